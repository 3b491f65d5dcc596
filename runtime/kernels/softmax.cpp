// softmax: exp(x - max) / sum exp(x - max); its logarithm: x - max - log(sum exp(x - max)).
#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>

#include "runtime/kernels/kernels.h"
#include "runtime/kernels/scalar.h"
#include "runtime/kernels/simd_targets.h"
#include "runtime/kernels/strided.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/kernels/softmax.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, which includes this file once per target.
#include "hwy/contrib/math/math-inl.h"
#include "runtime/kernels/simd-inl.h"

#ifndef FLEXPTE_SOFTMAX_TYPES
#define FLEXPTE_SOFTMAX_TYPES
namespace flexpte {
namespace {

struct Softmax {
  const void* x = nullptr;
  void* out = nullptr;
  DType x_dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  int64_t size = 0;  // of a row
  int64_t x_stride = 1;
  int64_t out_stride = 1;
  bool log = false;
  Strided<2> rows;  // x, out
};

}  // namespace
}  // namespace flexpte
#endif

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {
namespace {

constexpr int64_t kLanes = HWY_LANES(float);

// Lanes [i, i + kLanes) of a row; -inf past its end, which adds nothing to max or sum.
template <class T>
HWY_INLINE VF load_row(DF d, const T* x, int64_t stride, int64_t i, int64_t size) {
  if (stride == 1 && i + kLanes <= size) return load(d, x + i);
  HWY_ALIGN float lanes[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) {
    lanes[j] = i + j < size ? widen(x[(i + j) * stride]) : -std::numeric_limits<float>::infinity();
  }
  return hn::Load(d, lanes);
}

template <class T>
HWY_INLINE void store_row(VF v, DF d, T* out, int64_t stride, int64_t i, int64_t size) {
  if (stride == 1 && i + kLanes <= size) {
    store(v, d, out + i);
    return;
  }
  HWY_ALIGN float lanes[kLanes];
  hn::Store(v, d, lanes);
  for (int64_t j = 0; j < std::min(kLanes, size - i); ++j) out[(i + j) * stride] = convert<T>(lanes[j]);
}

// e^x for x <= 0 or NaN (which Highway's Exp would turn into 0).
HWY_INLINE VF exp_or_nan(DF d, VF x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));
}

template <class In, class Out>
void softmax_row(const Softmax& p, const In* x, Out* out) {
  const DF d;
  // A NaN need not show in max: it is still there in the sum.
  VF max_lanes = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < p.size; i += kLanes) max_lanes = hn::Max(max_lanes, load_row(d, x, p.x_stride, i, p.size));
  const VF max = hn::MaxOfLanes(d, max_lanes);
  VF sum_lanes = hn::Zero(d);
  for (int64_t i = 0; i < p.size; i += kLanes) {
    const VF v = exp_or_nan(d, hn::Sub(load_row(d, x, p.x_stride, i, p.size), max));
    sum_lanes = hn::Add(sum_lanes, v);
  }
  const float sum = sum_of_lanes(d, sum_lanes);
  const VF shift = hn::Set(d, std::log(sum));
  const VF scale = hn::Set(d, 1.0f / sum);
  for (int64_t i = 0; i < p.size; i += kLanes) {
    const VF v = hn::Sub(load_row(d, x, p.x_stride, i, p.size), max);
    store_row(p.log ? hn::Sub(v, shift) : hn::Mul(exp_or_nan(d, v), scale), d, out, p.out_stride, i, p.size);
  }
}

void softmax_rows(const Softmax& p, int64_t begin, int64_t end) {
  with_float_type(p.x_dtype, [&](auto x_tag) {
    with_float_type(p.out_dtype, [&](auto out_tag) {
      StridedIterator<2> it(p.rows, begin);
      for (int64_t row = begin; row < end; ++row, it.advance()) {
        softmax_row(p, static_cast<const decltype(x_tag)*>(p.x) + it.offset(0),
                    static_cast<decltype(out_tag)*>(p.out) + it.offset(1));
      }
    });
  });
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace flexpte
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flexpte {
namespace {
HWY_EXPORT(softmax_rows);
}  // namespace

void softmax(const TensorView& x, bool log, const TensorView& out, const ThreadPool& pool) {
  assert(x.rank == out.rank);
  Softmax p;
  p.x = x.data;
  p.out = out.data;
  p.x_dtype = x.dtype;
  p.out_dtype = out.dtype;
  p.log = log;
  p.size = 1;  // a scalar is one row of one element
  if (x.rank > 0) {
    p.size = x.size(x.rank - 1);
    p.x_stride = x.stride(x.rank - 1);
    p.out_stride = out.stride(out.rank - 1);
  }
  for (int32_t d = 0; d < x.rank - 1; ++d) {
    assert(x.size(d) == out.size(d));
    p.rows.append(x.size(d), {x.stride(d), out.stride(d)});
  }
  if (p.size == 0) return;
  pool.parallel_for(p.rows.num_elements(), rows_per_piece(8 * p.size), [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(softmax_rows)(p, begin, end);
  });
}

}  // namespace flexpte
#endif  // HWY_ONCE
