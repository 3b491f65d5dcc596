// The two matrix-vector products of the decode kernel. Included once per target, with no include
// guard but Highway's toggle.
//
// A few rows (queries of the heads that share a KV head) meet every key and value while it is in
// registers, so that K and V are read once.
#if defined(FLEXPTE_FLEX_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLEXPTE_FLEX_DECODE_INL_H_
#undef FLEXPTE_FLEX_DECODE_INL_H_
#else
#define FLEXPTE_FLEX_DECODE_INL_H_
#endif

#include "hwy/highway.h"
#include "metal_delegate/flex_simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {

// Rows that are computed together at most.
constexpr int kDecodeRows = 4;

// How a row of value_dim numbers lies in vectors: whole ones, then one that holds the last kLanes
// numbers, overlapping them (so that rows are read whole and never beyond their end), or the only
// one, filled up with zeros, where there are fewer numbers than lanes.
struct DecodeLayout {
  int64_t whole;    // numbers in whole vectors
  int64_t rest;     // numbers beyond
  int64_t overlap;  // numbers of the last vector that belong to whole ones
  explicit DecodeLayout(int64_t dim)
      : whole(dim / kLanes * kLanes), rest(dim - whole), overlap(whole > 0 && rest > 0 ? kLanes - rest : 0) {}
  int64_t position(int64_t i) const { return i < whole ? i : i + overlap; }
};

// The last vector of a row.
template <class T>
HWY_INLINE VF load_rest(DF d, const T* row, const DecodeLayout& layout) {
  if (layout.overlap == 0) return load_first(d, row, static_cast<size_t>(layout.rest));
  return load(d, row + layout.whole - layout.overlap);
}

#if HWY_TARGET != HWY_SCALAR
HWY_INLINE auto sum_blocks(hn::Vec<hn::Simd<float, 4, 0>> v) {
  return v;
}
#endif
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
HWY_INLINE auto sum_blocks(hn::Vec<hn::Simd<float, 8, 0>> v) {
  const hn::Simd<float, 4, 0> d4;
  return hn::Add(hn::LowerHalf(d4, v), hn::UpperHalf(d4, v));
}
#endif
#if HWY_TARGET == HWY_AVX3
HWY_INLINE auto sum_blocks(hn::Vec<hn::Simd<float, 16, 0>> v) {
  const hn::Simd<float, 8, 0> d8;
  return sum_blocks(hn::Add(hn::LowerHalf(d8, v), hn::UpperHalf(d8, v)));
}
#endif

// Stores the sums of the lanes of four vectors.
HWY_INLINE void store_sums_of_lanes(DF d, const VF (&v)[4], float* out) {
#if HWY_TARGET == HWY_SCALAR
  for (int j = 0; j < 4; ++j) hn::StoreU(v[j], d, out + j);
#else
  const hn::Repartition<uint64_t, DF> d64;
  const auto v01 = hn::BitCast(d64, hn::Add(hn::InterleaveLower(d, v[0], v[1]), hn::InterleaveUpper(d, v[0], v[1])));
  const auto v23 = hn::BitCast(d64, hn::Add(hn::InterleaveLower(d, v[2], v[3]), hn::InterleaveUpper(d, v[2], v[3])));
  const VF sums =
      hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, v01, v23)), hn::BitCast(d, hn::InterleaveUpper(d64, v01, v23)));
  hn::StoreU(sum_blocks(sums), hn::Simd<float, 4, 0>(), out);
#endif
}

// scores[r, k] = <queries[r], keys[k]> for R rows; queries are filled up with zeros. May write up to
// three numbers beyond `count`, which is at most scores_stride - 3 unless a multiple of four.
template <int R, class T>
HWY_INLINE void multiply_decode_keys(const T* keys, int64_t stride, int64_t dim, int64_t count, const float* queries,
                                     int64_t query_stride, float* scores, int64_t scores_stride) {
  const DF d;
  const DecodeLayout layout(dim);
  for (int64_t k = 0; k < count; k += 4) {
    const T* row[4];
    for (int64_t j = 0; j < 4; ++j) row[j] = keys + std::min(k + j, count - 1) * stride;
    VF sums[R][4];
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < 4; ++j) sums[r][j] = hn::Zero(d);
    }
    for (int64_t i = 0; i < layout.whole; i += kLanes) {
      VF key[4];
      for (int j = 0; j < 4; ++j) key[j] = load(d, row[j] + i);
      for (int r = 0; r < R; ++r) {
        const VF q = hn::LoadU(d, queries + r * query_stride + i);
        for (int j = 0; j < 4; ++j) sums[r][j] = hn::MulAdd(key[j], q, sums[r][j]);
      }
    }
    if (layout.rest != 0) {
      // Lanes that whole vectors have counted already are left out, infinite ones too.
      const auto counted = hn::FirstN(d, static_cast<size_t>(layout.overlap));
      for (int j = 0; j < 4; ++j) {
        const VF key = hn::IfThenZeroElse(counted, load_rest(d, row[j], layout));
        for (int r = 0; r < R; ++r) {
          const VF q = layout.overlap == 0 ? hn::LoadU(d, queries + r * query_stride)
                                           : hn::LoadU(d, queries + r * query_stride + layout.whole - layout.overlap);
          sums[r][j] = hn::MulAdd(key, q, sums[r][j]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      store_sums_of_lanes(d, sums[r], scores + r * scores_stride + k);
    }
  }
}

// outputs[r] = outputs[r] correction[r] + sum_k weights[r, k] values[k] for R rows and V vectors.
// `load_value` gives vector v of row k.
template <int R, int V, class Load>
HWY_INLINE void multiply_decode_values_tile(const Load& load_value, int64_t count, const float* weights,
                                            int64_t weights_stride, const float* correction, float* outputs,
                                            int64_t outputs_stride) {
  const DF d;
  VF sums[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      sums[r][v] = hn::Mul(hn::LoadU(d, outputs + r * outputs_stride + v * kLanes), hn::Set(d, correction[r]));
    }
  }
  for (int64_t k = 0; k < count; ++k) {
    VF value[V];
    for (int v = 0; v < V; ++v) value[v] = load_value(k, v);
    for (int r = 0; r < R; ++r) {
      const VF p = hn::Set(d, weights[r * weights_stride + k]);
      for (int v = 0; v < V; ++v) sums[r][v] = hn::MulAdd(p, value[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) hn::StoreU(sums[r][v], d, outputs + r * outputs_stride + v * kLanes);
  }
}

// Over all of a row's vectors; outputs lie as DecodeLayout says.
template <int R, class T>
HWY_INLINE void multiply_decode_values(const T* values, int64_t stride, int64_t dim, int64_t count,
                                       const float* weights, int64_t weights_stride, const float* correction,
                                       float* outputs, int64_t outputs_stride) {
  const DF d;
  const DecodeLayout layout(dim);
  int64_t i = 0;
  for (; i + 4 * kLanes <= layout.whole; i += 4 * kLanes) {
    multiply_decode_values_tile<R, 4>(
        [&](int64_t k, int64_t v) { return load(d, values + k * stride + i + v * kLanes); }, count, weights,
        weights_stride, correction, outputs + i, outputs_stride);
  }
  for (; i < layout.whole; i += kLanes) {
    multiply_decode_values_tile<R, 1>([&](int64_t k, int64_t) { return load(d, values + k * stride + i); }, count,
                                      weights, weights_stride, correction, outputs + i, outputs_stride);
  }
  if (layout.rest != 0) {
    multiply_decode_values_tile<R, 1>([&](int64_t k, int64_t) { return load_rest(d, values + k * stride, layout); },
                                      count, weights, weights_stride, correction, outputs + layout.whole,
                                      outputs_stride);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace flexpte
HWY_AFTER_NAMESPACE();

#endif  // FLEXPTE_FLEX_DECODE_INL_H_
