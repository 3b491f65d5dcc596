// Vector exponentials, rows of tensors and 4 x 4 transpositions for the attention kernels. Included
// once per target, with no include guard but Highway's toggle.
#if defined(FLEXPTE_FLEX_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLEXPTE_FLEX_SIMD_INL_H_
#undef FLEXPTE_FLEX_SIMD_INL_H_
#else
#define FLEXPTE_FLEX_SIMD_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "hwy/highway.h"
#include "runtime/kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {

constexpr int64_t kLanes = static_cast<int64_t>(HWY_LANES(float));

// 2^x for x <= 0 within 2 units in the last place; 0 below the normal numbers and for -inf, NaN for
// NaN. 2^x = 2^n 2^r with n = round(x), and 2^r on [-1/2, 1/2] is its minimax polynomial (relative
// error 2e-9).
HWY_INLINE VF exp2_nonpositive(DF d, VF x) {
  const hn::Rebind<int32_t, DF> di;
  const VF magic = hn::Set(d, 12583039.0f);  // 1.5 * 2^23 + 127: its sum with x holds n + 127 in the low bits
  const VF shifted = hn::Add(x, magic);
  const VF r = hn::Sub(x, hn::Sub(shifted, magic));
  VF poly = hn::MulAdd(hn::Set(d, 0.000154614446986f), r, hn::Set(d, 0.00134004281776f));
  poly = hn::MulAdd(poly, r, hn::Set(d, 0.00961805667852f));
  poly = hn::MulAdd(poly, r, hn::Set(d, 0.0555032722667f));
  poly = hn::MulAdd(poly, r, hn::Set(d, 0.240226509223f));
  poly = hn::MulAdd(poly, r, hn::Set(d, 0.693147206703f));
  poly = hn::MulAdd(poly, r, hn::Set(d, 1.0f));
  const VF power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, shifted)));
  const VF result = hn::Mul(poly, power);
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -125.5f)), result);
}

// Widens row elements [0, n) with stride `stride` (elements).
template <class T>
HWY_INLINE void widen_strided(const T* HWY_RESTRICT in, int64_t stride, int64_t n, float* HWY_RESTRICT out) {
  if (stride == 1) {
    widen_row(in, n, out);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = widen(in[i * stride]);
  }
}

// out[r, :] = rows of `in`, packed with row stride `out_stride`.
template <class T>
HWY_INLINE void widen_rows(const T* in, int64_t row_stride, int64_t stride, int64_t rows, int64_t n, float* out,
                           int64_t out_stride) {
  for (int64_t r = 0; r < rows; ++r) widen_strided(in + r * row_stride, stride, n, out + r * out_stride);
}

template <class T>
HWY_INLINE void narrow_row(const float* HWY_RESTRICT in, int64_t n, T* HWY_RESTRICT out) {
  const DF d;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(hn::LoadU(d, in + i), d, out + i);
  if (i < n) store_first(load_first(d, in + i, static_cast<size_t>(n - i)), d, out + i, static_cast<size_t>(n - i));
}

// out[c * out_stride + r] = in[r * in_stride + c] for a 4 x 4 block.
HWY_INLINE void transpose_4x4(const float* HWY_RESTRICT in, int64_t in_stride, float* HWY_RESTRICT out,
                              int64_t out_stride) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t r = 0; r < 4; ++r) {
    for (int64_t c = 0; c < 4; ++c) out[c * out_stride + r] = in[r * in_stride + c];
  }
#else
  const hn::Simd<float, 4, 0> d4;
  const hn::Repartition<uint64_t, decltype(d4)> d64;
  const auto r0 = hn::LoadU(d4, in);
  const auto r1 = hn::LoadU(d4, in + in_stride);
  const auto r2 = hn::LoadU(d4, in + 2 * in_stride);
  const auto r3 = hn::LoadU(d4, in + 3 * in_stride);
  const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d4, r0, r1));  // r0[0] r1[0] r0[1] r1[1]
  const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d4, r0, r1));
  const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d4, r2, r3));
  const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d4, r2, r3));
  hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d64, low01, low23)), d4, out);
  hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d64, low01, low23)), d4, out + out_stride);
  hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d64, high01, high23)), d4, out + 2 * out_stride);
  hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d64, high01, high23)), d4, out + 3 * out_stride);
#endif
}

// Whether all of rows x n numbers are finite.
template <class T>
HWY_INLINE bool all_finite(const T* in, int64_t row_stride, int64_t rows, int64_t n) {
  const DF d;
  // 0 * x is NaN for infinities and NaN, and a sum keeps it.
  VF sum = hn::Zero(d);
  float tail = 0.0f;
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = in + r * row_stride;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) sum = hn::MulAdd(load(d, row + i), hn::Zero(d), sum);
    for (; i < n; ++i) tail += 0.0f * static_cast<float>(widen(row[i]));
  }
  return sum_of_lanes(d, sum) + tail == 0.0f;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace flexpte
HWY_AFTER_NAMESPACE();

#endif  // FLEXPTE_FLEX_SIMD_INL_H_
