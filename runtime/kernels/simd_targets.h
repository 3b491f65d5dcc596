// Which instruction sets the kernels are compiled for. Include before any Highway header.
//
// The baseline, AVX2, AVX-512 and NEON: further ones would multiply compile time and library size
// for little speed.
#pragma once

#define HWY_DISABLED_TARGETS (~(HWY_EMU128 | HWY_SSE2 | HWY_AVX2 | HWY_AVX3 | HWY_NEON))
