// Which instruction sets the expression loops are compiled for: the baseline, and AVX2 and AVX-512 on
// x86-64 (the steps between bring little and cost compile time). Included before Highway.
#pragma once

#ifndef HWY_DISABLED_TARGETS
#if defined(__x86_64__) || defined(_M_X64)
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif
#endif
