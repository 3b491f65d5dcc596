// Loads and stores of float vectors from and to F32, F16 and BF16. Included once per target, with no
// include guard but Highway's toggle.
#if defined(FLEXPTE_KERNELS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLEXPTE_KERNELS_SIMD_INL_H_
#undef FLEXPTE_KERNELS_SIMD_INL_H_
#else
#define FLEXPTE_KERNELS_SIMD_INL_H_
#endif

#include <cstring>

#include "hwy/highway.h"
#include "runtime/kernels/scalar.h"

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;

// Whether the target has instructions for float16 <-> float32 (Highway's emulation of them is wrong
// for infinities).
#undef FLEXPTE_NATIVE_F16
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM_A64
#define FLEXPTE_NATIVE_F16 1
#else
#define FLEXPTE_NATIVE_F16 0
#endif

HWY_INLINE VF load(DF d, const float* p) {
  return hn::LoadU(d, p);
}

HWY_INLINE VF load(DF d, const BFloat16* p) {
  const hn::Rebind<uint16_t, DF> d16;
  const hn::Rebind<uint32_t, DF> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}

HWY_INLINE VF load(DF d, const Float16* p) {
  const hn::Rebind<uint16_t, DF> d16;
  const auto narrow = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p));
#if FLEXPTE_NATIVE_F16
  return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, DF>(), narrow));
#else
  const hn::Rebind<uint32_t, DF> d32;
  const auto bits = hn::PromoteTo(d32, narrow);
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(d32, 0x8000u)));
  const auto magnitude = hn::ShiftLeft<13>(hn::And(bits, hn::Set(d32, 0x7FFFu)));
  const VF scaled = hn::Mul(hn::BitCast(d, magnitude), hn::Set(d, 0x1p112f));
  const VF special = hn::BitCast(d, hn::Or(hn::BitCast(d32, scaled), hn::Set(d32, 0x7F800000u)));
  const hn::Rebind<int32_t, DF> di;
  const auto is_special = hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, 0x0F7FFFFF));
  const VF result = hn::IfThenElse(hn::RebindMask(d, is_special), special, scaled);
  return hn::Or(result, hn::BitCast(d, sign));
#endif
}

HWY_INLINE void store(VF v, DF d, float* p) {
  hn::StoreU(v, d, p);
}

HWY_INLINE void store(VF v, DF, BFloat16* p) {
  const hn::Rebind<uint16_t, DF> d16;
  const hn::Rebind<uint32_t, DF> d32;
  const hn::Rebind<int32_t, DF> di;
  const auto bits = hn::BitCast(d32, v);
  const auto high = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(high, hn::Set(d32, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(d32, 0x7FFFu)), odd));
  const auto quiet = hn::Or(high, hn::Set(d32, 0x40u));
  const auto result = hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(v)), quiet, rounded);
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, result)), d16, reinterpret_cast<uint16_t*>(p));
}

HWY_INLINE void store(VF v, [[maybe_unused]] DF d, Float16* p) {
#if FLEXPTE_NATIVE_F16
  const hn::Rebind<uint16_t, DF> d16;
  const hn::Rebind<hwy::float16_t, DF> df16;
  hn::StoreU(hn::BitCast(d16, hn::DemoteTo(df16, v)), d16, reinterpret_cast<uint16_t*>(p));
#else
  HWY_ALIGN float lanes[HWY_LANES(float)];
  hn::Store(v, d, lanes);
  for (size_t i = 0; i < hn::Lanes(d); ++i) p[i] = to_float16(lanes[i]);
#endif
}

// The first `count` < Lanes(d) elements, then zeros. Touches no memory beyond them.
template <class T>
HWY_INLINE VF load_first(DF d, const T* p, size_t count) {
  HWY_ALIGN T lanes[HWY_LANES(float)] = {};
  std::memcpy(lanes, p, count * sizeof(T));
  return load(d, lanes);
}

template <class T>
HWY_INLINE void store_first(VF v, DF d, T* p, size_t count) {
  HWY_ALIGN T lanes[HWY_LANES(float)];
  store(v, d, lanes);
  std::memcpy(p, lanes, count * sizeof(T));
}

HWY_INLINE float sum_of_lanes(DF d, VF v) {
  return hn::GetLane(hn::SumOfLanes(d, v));
}

// Widens `count` elements.
template <class T>
HWY_INLINE void widen_row(const T* HWY_RESTRICT in, int64_t count, float* HWY_RESTRICT out) {
  const DF d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(load(d, in + i), d, out + i);
  for (; i < count; ++i) out[i] = widen(in[i]);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace flexpte
HWY_AFTER_NAMESPACE();

#endif  // FLEXPTE_KERNELS_SIMD_INL_H_
