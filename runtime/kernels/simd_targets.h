// Which instruction sets the kernels are compiled for. Include before any Highway header.
//
// On x86-64 the baseline, AVX2 and AVX-512; on arm64 NEON: further ones would multiply compile time
// and library size for little speed, and the kernels hold vectors of fixed size in arrays.
#pragma once

#ifndef HWY_DISABLED_TARGETS
#if defined(__x86_64__) || defined(_M_X64)
// The bits below AVX3 are its extensions.
#define HWY_DISABLED_TARGETS ((HWY_AVX3 - 1) | HWY_SSSE3 | HWY_SSE4)
#else
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#endif
