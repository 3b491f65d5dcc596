#include <algorithm>
#include <cassert>
#include <cmath>

#include "runtime/kernels/kernels.h"
#include "runtime/kernels/scalar.h"
#include "runtime/kernels/simd_targets.h"
#include "runtime/kernels/strided.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/kernels/norm.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "runtime/kernels/simd-inl.h"

#ifndef FLEXPTE_NORM_TYPES
#define FLEXPTE_NORM_TYPES
namespace flexpte {
namespace {

struct Norm {
  const void* x = nullptr;
  void* out = nullptr;
  DType x_dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  const TensorView* weight = nullptr;
  const TensorView* bias = nullptr;
  int64_t size = 0;  // of a row
  float eps = 0;
  bool centered = false;  // layer_norm; otherwise rms_norm
  Strided<2> rows;        // x, out
};

}  // namespace
}  // namespace flexpte
#endif

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {
namespace {

template <class T>
HWY_INLINE VF load_some(DF d, const T* p, int64_t count) {
  return count >= static_cast<int64_t>(hn::Lanes(d)) ? load(d, p) : load_first(d, p, static_cast<size_t>(count));
}

template <class T>
HWY_INLINE void store_some(VF v, DF d, T* p, int64_t count) {
  if (count >= static_cast<int64_t>(hn::Lanes(d))) {
    store(v, d, p);
  } else {
    store_first(v, d, p, static_cast<size_t>(count));
  }
}

template <class T>
float sum_of(const T* x, int64_t size) {
  const DF d;
  constexpr int64_t kLanes = HWY_LANES(float);
  VF sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    sum0 = hn::Add(sum0, load(d, x + i));
    sum1 = hn::Add(sum1, load(d, x + i + kLanes));
  }
  for (; i < size; i += kLanes) sum0 = hn::Add(sum0, load_some(d, x + i, size - i));
  return sum_of_lanes(d, hn::Add(sum0, sum1));
}

// sum (x - mean)^2
template <class T>
float sum_of_squares(const T* x, float mean, int64_t size) {
  const DF d;
  constexpr int64_t kLanes = HWY_LANES(float);
  const VF shift = hn::Set(d, mean);
  VF sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    const VF x0 = hn::Sub(load(d, x + i), shift), x1 = hn::Sub(load(d, x + i + kLanes), shift);
    sum0 = hn::MulAdd(x0, x0, sum0);
    sum1 = hn::MulAdd(x1, x1, sum1);
  }
  for (; i < size; i += kLanes) {
    const VF inside = hn::Sub(load_some(d, x + i, size - i), shift);
    const VF x0 = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(std::min(kLanes, size - i))), inside);
    sum0 = hn::MulAdd(x0, x0, sum0);
  }
  return sum_of_lanes(d, hn::Add(sum0, sum1));
}

// A parameter's lanes [i, i + count).
HWY_INLINE VF load_parameter(DF d, const TensorView& parameter, int64_t i, int64_t count) {
  VF v = hn::Zero(d);
  const int64_t stride = parameter.stride(0);
  with_float_type(parameter.dtype, [&](auto tag) {
    const auto* const from = parameter.as<const decltype(tag)>();
    if (stride == 1) {
      v = load_some(d, from + i, count);
    } else {
      HWY_ALIGN float lanes[HWY_LANES(float)] = {};
      for (int64_t j = 0; j < std::min<int64_t>(count, HWY_LANES(float)); ++j) lanes[j] = widen(from[(i + j) * stride]);
      v = hn::Load(d, lanes);
    }
  });
  return v;
}

template <class In, class Out>
void norm_row(const Norm& norm, const In* x, Out* out) {
  const DF d;
  constexpr int64_t kLanes = HWY_LANES(float);
  const float size = static_cast<float>(norm.size);
  const float mean = norm.centered ? sum_of(x, norm.size) / size : 0.0f;
  const float variance = sum_of_squares(x, mean, norm.size) / size;
  const VF scale = hn::Set(d, 1.0f / std::sqrt(variance + norm.eps));
  const VF shift = hn::Set(d, mean);
  for (int64_t i = 0; i < norm.size; i += kLanes) {
    const int64_t count = norm.size - i;
    VF v = hn::Mul(hn::Sub(load_some(d, x + i, count), shift), scale);
    if (norm.weight != nullptr) v = hn::Mul(v, load_parameter(d, *norm.weight, i, count));
    if (norm.bias != nullptr) v = hn::Add(v, load_parameter(d, *norm.bias, i, count));
    store_some(v, d, out + i, count);
  }
}

void norm_rows(const Norm& norm, int64_t begin, int64_t end) {
  with_float_type(norm.x_dtype, [&](auto x_tag) {
    with_float_type(norm.out_dtype, [&](auto out_tag) {
      StridedIterator<2> it(norm.rows, begin);
      for (int64_t row = begin; row < end; ++row, it.advance()) {
        norm_row(norm, static_cast<const decltype(x_tag)*>(norm.x) + it.offset(0),
                 static_cast<decltype(out_tag)*>(norm.out) + it.offset(1));
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
HWY_EXPORT(norm_rows);

void run_norm(const TensorView& x, const TensorView* weight, const TensorView* bias, float eps, bool centered,
              const TensorView& out, const ThreadPool& pool) {
  assert(x.rank >= 1 && x.rank == out.rank);
  Norm norm;
  norm.x = x.data;
  norm.out = out.data;
  norm.x_dtype = x.dtype;
  norm.out_dtype = out.dtype;
  norm.weight = weight;
  norm.bias = bias;
  norm.size = x.size(x.rank - 1);
  norm.eps = eps;
  norm.centered = centered;
  assert(norm.size <= 1 || (x.stride(x.rank - 1) == 1 && out.stride(out.rank - 1) == 1));
  for (int32_t d = 0; d < x.rank - 1; ++d) {
    assert(x.size(d) == out.size(d));
    norm.rows.append(x.size(d), {x.stride(d), out.stride(d)});
  }
  if (norm.size == 0) return;
  pool.parallel_for(norm.rows.num_elements(), rows_per_piece(norm.size), [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(norm_rows)(norm, begin, end);
  });
}

}  // namespace

void rms_norm(const TensorView& x, const TensorView* weight, float eps, const TensorView& out, const ThreadPool& pool) {
  run_norm(x, weight, nullptr, eps, /*centered=*/false, out, pool);
}

void layer_norm(const TensorView& x, const TensorView* weight, const TensorView* bias, float eps, const TensorView& out,
                const ThreadPool& pool) {
  run_norm(x, weight, bias, eps, /*centered=*/true, out, pool);
}

}  // namespace flexpte
#endif  // HWY_ONCE
