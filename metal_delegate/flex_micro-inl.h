// The two register-tiled matrix products of the prefill kernel. Included once per target, with no
// include guard but Highway's toggle.
//
// Both multiply broadcast numbers with vectors of lanes (queries): a tile of N results by V vectors
// stays in registers over the whole inner dimension.
#if defined(FLEXPTE_FLEX_MICRO_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLEXPTE_FLEX_MICRO_INL_H_
#undef FLEXPTE_FLEX_MICRO_INL_H_
#else
#define FLEXPTE_FLEX_MICRO_INL_H_
#endif

#include "hwy/highway.h"
#include "metal_delegate/flex_simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR
constexpr int kPanelVectors = 4;  // panels are transposed in blocks of 4 x 4
#else
constexpr int kPanelVectors = 2;
#endif
// Accumulators fill the registers but for those that the operands of a step need.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
constexpr int kMicroRows = 8;
#else
constexpr int kMicroRows = 6;
#endif

// scores[n, :] = sum_i keys[n, i] queries[i, :] for N keys; queries [dim, V vectors].
template <int N, int V>
HWY_INLINE void multiply_keys_tile(const float* HWY_RESTRICT keys, int64_t stride, const float* HWY_RESTRICT queries,
                                   int64_t dim, float* HWY_RESTRICT scores) {
  const DF d;
  VF sums[N][V];
  for (int n = 0; n < N; ++n) {
    for (int v = 0; v < V; ++v) sums[n][v] = hn::Zero(d);
  }
  for (int64_t i = 0; i < dim; ++i) {
    VF q[V];
    for (int v = 0; v < V; ++v) q[v] = hn::LoadU(d, queries + (i * V + v) * kLanes);
    for (int n = 0; n < N; ++n) {
      const VF k = hn::Set(d, keys[n * stride + i]);
      for (int v = 0; v < V; ++v) sums[n][v] = hn::MulAdd(k, q[v], sums[n][v]);
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int v = 0; v < V; ++v) hn::StoreU(sums[n][v], d, scores + (n * V + v) * kLanes);
  }
}

// outputs[n, :] = outputs[n, :] correction + sum_k values[k, n] weights[k, :] for N value dimensions.
template <int N, int V>
HWY_INLINE void multiply_values_tile(const float* HWY_RESTRICT values, int64_t stride,
                                     const float* HWY_RESTRICT weights, int64_t count, const VF (&correction)[V],
                                     float* HWY_RESTRICT outputs) {
  const DF d;
  VF sums[N][V];
  for (int n = 0; n < N; ++n) {
    for (int v = 0; v < V; ++v) sums[n][v] = hn::Mul(hn::LoadU(d, outputs + (n * V + v) * kLanes), correction[v]);
  }
  for (int64_t k = 0; k < count; ++k) {
    VF p[V];
    for (int v = 0; v < V; ++v) p[v] = hn::LoadU(d, weights + (k * V + v) * kLanes);
    for (int n = 0; n < N; ++n) {
      const VF value = hn::Set(d, values[k * stride + n]);
      for (int v = 0; v < V; ++v) sums[n][v] = hn::MulAdd(value, p[v], sums[n][v]);
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int v = 0; v < V; ++v) hn::StoreU(sums[n][v], d, outputs + (n * V + v) * kLanes);
  }
}

// scores [count, V vectors] = keys [count, dim] queries [dim, V vectors].
template <int V>
void multiply_keys(const float* keys, int64_t stride, const float* queries, int64_t dim, int64_t count, float* scores) {
  int64_t k = 0;
  for (; k + kMicroRows <= count; k += kMicroRows) {
    multiply_keys_tile<kMicroRows, V>(keys + k * stride, stride, queries, dim, scores + k * V * kLanes);
  }
  for (; k + 4 <= count; k += 4) {
    multiply_keys_tile<4, V>(keys + k * stride, stride, queries, dim, scores + k * V * kLanes);
  }
  for (; k < count; ++k) multiply_keys_tile<1, V>(keys + k * stride, stride, queries, dim, scores + k * V * kLanes);
}

// outputs [dim, V vectors] = outputs correction + values^T [dim, count] weights [count, V vectors].
template <int V>
void multiply_values(const float* values, int64_t stride, const float* weights, int64_t dim, int64_t count,
                     const VF (&correction)[V], float* outputs) {
  int64_t i = 0;
  for (; i + kMicroRows <= dim; i += kMicroRows) {
    multiply_values_tile<kMicroRows, V>(values + i, stride, weights, count, correction, outputs + i * V * kLanes);
  }
  for (; i + 4 <= dim; i += 4) {
    multiply_values_tile<4, V>(values + i, stride, weights, count, correction, outputs + i * V * kLanes);
  }
  for (; i < dim; ++i)
    multiply_values_tile<1, V>(values + i, stride, weights, count, correction, outputs + i * V * kLanes);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace flexpte
HWY_AFTER_NAMESPACE();

#endif  // FLEXPTE_FLEX_MICRO_INL_H_
