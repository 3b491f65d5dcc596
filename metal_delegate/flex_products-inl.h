// The matrix products of the prefill kernel, S^T = K Q^T and O^T = O^T correction + V^T P^T, in two ways: with
// vectors of floats for every type, and with tile registers for bfloat16. Included once per target, with no include
// guard but Highway's toggle.
#if defined(FLEXPTE_FLEX_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLEXPTE_FLEX_PRODUCTS_INL_H_
#undef FLEXPTE_FLEX_PRODUCTS_INL_H_
#else
#define FLEXPTE_FLEX_PRODUCTS_INL_H_
#endif

#include <algorithm>
#include <type_traits>

#include "hwy/highway.h"
#include "metal_delegate/flex_kernels.h"
#include "metal_delegate/flex_micro-inl.h"
#include "metal_delegate/flex_prefill.h"
#include "metal_delegate/flex_simd-inl.h"
#include "runtime/kernels/amx.h"

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {

constexpr int64_t kPanelLanes = kPanelVectors * kLanes;
static_assert(kPanelLanes <= kMaxPanelLanes && kTileLanes % kPanelLanes == 0);

// The rows of a chunk of values, in float.
struct Rows {
  const float* data;
  int64_t stride;
};

// Lanes of queries that are computed together.
struct Panel {
  int64_t offset;   // of its first lane in the tile
  int64_t lanes;    // a multiple of kLanes
  int64_t queries;  // the first so many lanes hold one
  // Bounds of its rows, where a run has them.
  int64_t first_begin, last_begin, first_end, last_end;
};

// Row `begin` of a batch and head of a [B, H, L, D] view, whose batch may be 1 for all.
template <class T>
const T* row_of(const TensorView& view, int64_t batch, int64_t head, int64_t begin) {
  return view.as<const T>() + (view.size(0) == 1 ? 0 : batch) * view.stride(0) + head * view.stride(1) +
         begin * view.stride(2);
}

// Queries are packed scaled, in units of log2 where no score expression needs them otherwise.
template <class T>
class FloatProducts {
 public:
  using Element = T;

  FloatProducts(const FlexCall& call, const PrefillScratch& scratch)
      : call_(call), shape_(call.shape), scratch_(scratch) {}

  // What a difference of scores is multiplied with to give a power of two.
  float log2_scale() const { return call_.mods.score == nullptr ? 1.0f : kLog2e; }
  // And a score to give a natural logarithm.
  float natural_scale() const { return call_.mods.score == nullptr ? kLn2 : 1.0f; }

  // `head` of the unit; `source` is its first query of the tile.
  void pack_queries(int64_t head, const Panel& panel, const T* source) {
    const TensorView& query = call_.args.query;
    const DF d;
    const float scale = call_.mods.score == nullptr ? call_.scale * kLog2e : call_.scale;
    const int64_t dim = shape_.key_dim;
    const int64_t stride = PrefillScratch::row_stride(shape_);
    float* const rows = scratch_.rows;
    float* const packed = queries_of(head, panel);
    for (int64_t lane = 0; lane < panel.lanes; lane += 4) {
      const int64_t count = std::clamp<int64_t>(panel.queries - lane, 0, 4);
      if (count < 4) std::fill_n(rows, 4 * stride, 0.0f);
      for (int64_t r = 0; r < count; ++r) {
        float* row = rows + r * stride;
        widen_strided(source + (panel.offset + lane + r) * query.stride(2), query.stride(3), dim, row);
        int64_t i = 0;
        for (; i + kLanes <= dim; i += kLanes) {
          hn::StoreU(hn::Mul(hn::LoadU(d, row + i), hn::Set(d, scale)), d, row + i);
        }
        for (; i < dim; ++i) row[i] *= scale;
      }
      int64_t i = 0;
      for (; i + 4 <= dim; i += 4) transpose_4x4(rows + i, stride, packed + i * panel.lanes + lane, panel.lanes);
      for (; i < dim; ++i) {
        for (int64_t r = 0; r < 4; ++r) packed[i * panel.lanes + lane + r] = rows[r * stride + i];
      }
    }
  }

  // The keys and values that the following products are of.
  void load(int64_t batch, int64_t kv_head, int64_t begin, int64_t end) {
    count_ = end - begin;
    keys_ = load_rows(call_.args.key, batch, kv_head, begin, shape_.key_dim, scratch_.keys);
    values_ = load_rows(call_.args.value, batch, kv_head, begin, shape_.value_dim, scratch_.values);
    finite_ = -1;
  }

  // Whether all loaded values are finite.
  bool is_finite() {
    if (finite_ < 0) finite_ = all_finite(values_.data, values_.stride, count_, shape_.value_dim) ? 1 : 0;
    return finite_ == 1;
  }
  // Weights may be computed of keys [first, first + count) only; must the values of the others be finite?
  bool reads_beyond(int64_t, int64_t) const { return false; }

  // scores [count, V vectors], by the loaded keys [first, first + count).
  template <int V>
  HWY_INLINE void multiply_keys(int64_t head, const Panel& panel, int64_t first, int64_t count, float* scores) const {
    flexpte::HWY_NAMESPACE::multiply_keys<V>(keys_.data + first * keys_.stride, keys_.stride, queries_of(head, panel),
                                             shape_.key_dim, count, scores);
  }

  // outputs [value_dim, V vectors].
  template <int V>
  HWY_INLINE void multiply_values(int64_t first, int64_t count, const float* weights, const VF (&correction)[V],
                                  float* outputs) const {
    flexpte::HWY_NAMESPACE::multiply_values<V>(values_.data + first * values_.stride, values_.stride, weights,
                                               shape_.value_dim, count, correction, outputs);
  }

  Rows values() const { return values_; }

 private:
  float* queries_of(int64_t head, const Panel& panel) const {
    return scratch_.queries + (head * kTileLanes + panel.offset) * shape_.key_dim;
  }

  // In place where that is float and contiguous.
  Rows load_rows(const TensorView& view, int64_t batch, int64_t kv_head, int64_t begin, int64_t dim,
                 float* packed) const {
    const T* source = row_of<T>(view, batch, kv_head, begin);
    if constexpr (std::is_same_v<T, float>) {
      if (view.stride(3) == 1 && view.stride(2) == dim) return {source, dim};
    }
    widen_rows(source, view.stride(2), view.stride(3), count_, dim, packed, dim);
    return {packed, dim};
  }

  const FlexCall& call_;
  const FlexShape& shape_;
  const PrefillScratch& scratch_;
  int64_t count_ = 0;
  Rows keys_{};
  Rows values_{};
  int finite_ = -1;  // -1: not known yet
};

#if HWY_TARGET == HWY_AVX3

// Scores are not scaled but where a score expression reads them; weights are rounded to bfloat16.
class AmxProducts {
 public:
  using Element = BFloat16;

  AmxProducts(const FlexCall& call, const PrefillScratch& scratch)
      : call_(call),
        shape_(call.shape),
        scratch_(scratch),
        key_steps_(amx::round_up(call.shape.key_dim, amx::kDepth) / amx::kDepth) {}

  float log2_scale() const { return is_scaled() ? kLog2e : call_.scale * kLog2e; }
  float natural_scale() const { return is_scaled() ? 1.0f : call_.scale; }

  void pack_queries(int64_t head, const Panel& panel, const BFloat16* source) {
    const TensorView& query = call_.args.query;
    const int64_t dim = shape_.key_dim;
    for (int64_t lane = 0; lane < panel.lanes; lane += amx::kCols) {
      const int64_t count = std::clamp<int64_t>(panel.queries - lane, 0, amx::kCols);
      const BFloat16* rows = source + (panel.offset + lane) * query.stride(2);
      int64_t stride = query.stride(2);
      if (query.stride(3) != 1) {
        copy_rows(rows, query, count, dim, scratch_.amx_rows, dim);
        rows = scratch_.amx_rows;
        stride = dim;
      }
      amx::pack_pairs({rows, stride, count, dim}, queries_of(head, panel) + lane / amx::kCols * amx::kPairsElements,
                      pairs_step(panel.lanes));
    }
  }

  void load(int64_t batch, int64_t kv_head, int64_t begin, int64_t end) {
    const TensorView& value = call_.args.value;
    count_ = end - begin;
    copy_rows(row_of<BFloat16>(call_.args.key, batch, kv_head, begin), call_.args.key, count_, shape_.key_dim,
              scratch_.amx_keys, key_steps_ * amx::kDepth);
    source_ = row_of<BFloat16>(value, batch, kv_head, begin);
    const BFloat16* rows = source_;
    int64_t stride = value.stride(2);
    if (value.stride(3) != 1) {
      copy_rows(rows, value, count_, shape_.value_dim, scratch_.amx_rows, shape_.value_dim);
      rows = scratch_.amx_rows;
      stride = shape_.value_dim;
    }
    finite_ = amx::pack_transposed({rows, stride, count_, shape_.value_dim}, scratch_.amx_values, kValueStride);
    // A product of the last keys, whose number is no multiple of the depth, may begin anywhere.
    const int64_t packed = amx::round_up(count_, amx::kDepth);
    for (int64_t i = 0; i < shape_.padded_value_dim(); ++i) {
      std::fill_n(scratch_.amx_values + i * kValueStride + packed, amx::kDepth, BFloat16{});
    }
    is_widened_ = false;
  }

  bool is_finite() const { return finite_; }
  bool reads_beyond(int64_t first, int64_t count) const { return first + count < count_ && count % amx::kDepth != 0; }

  template <int V>
  HWY_INLINE void multiply_keys(int64_t head, const Panel& panel, int64_t first, int64_t count, float* scores) const {
    amx::Product product;
    product.steps = key_steps_;
    product.row_stride = key_steps_ * amx::kDepth;
    product.pairs = queries_of(head, panel);
    product.tile_step = pairs_step(V * kLanes);
    product.sums_stride = V * kLanes;
    for (int64_t k = 0; k < count; k += 2 * amx::kRows) {
      product.rows = scratch_.amx_keys + (first + k) * product.row_stride;
      product.sums = scores + k * product.sums_stride;
      amx::multiply(product, count - k > amx::kRows ? 2 : 1, V);
    }
    if (!is_scaled()) return;
    const DF d;
    const VF scale = hn::Set(d, call_.scale);
    for (int64_t i = 0; i < count * V * kLanes; i += kLanes) {
      hn::Store(hn::Mul(hn::Load(d, scores + i), scale), d, scores + i);
    }
  }

  template <int V>
  HWY_INLINE void multiply_values(int64_t first, int64_t count, const float* weights, const VF (&correction)[V],
                                  float* outputs) const {
    const DF d;
    constexpr int64_t kWidth = V * kLanes;
    const int64_t tile_step = pairs_step(kWidth);
    for (int v = 0; v < V; ++v) {
      amx::pack_weights(weights + v * kLanes, kWidth, count, scratch_.amx_weights + v * amx::kPairsElements, tile_step);
    }
    for (int64_t i = 0; i < shape_.value_dim; ++i) {
      for (int v = 0; v < V; ++v) {
        float* const at = outputs + i * kWidth + v * kLanes;
        hn::Store(hn::Mul(hn::Load(d, at), correction[v]), d, at);
      }
    }
    amx::Product product;
    product.steps = amx::round_up(count, amx::kDepth) / amx::kDepth;
    product.row_stride = kValueStride;
    product.pairs = scratch_.amx_weights;
    product.tile_step = tile_step;
    product.sums_stride = kWidth;
    product.accumulate = true;
    for (int64_t i = 0; i < shape_.value_dim; i += 2 * amx::kRows) {
      product.rows = scratch_.amx_values + i * kValueStride + first;
      product.sums = outputs + i * kWidth;
      amx::multiply(product, shape_.value_dim - i > amx::kRows ? 2 : 1, V);
    }
  }

  Rows values() {
    if (!is_widened_) {
      const TensorView& value = call_.args.value;
      widen_rows(source_, value.stride(2), value.stride(3), count_, shape_.value_dim, scratch_.values,
                 shape_.value_dim);
      is_widened_ = true;
    }
    return {scratch_.values, shape_.value_dim};
  }

 private:
  static constexpr int64_t kValueStride = PrefillScratch::kAmxValueStride;

  static int64_t pairs_step(int64_t lanes) { return lanes / amx::kCols * amx::kPairsElements; }

  // A scale that is not positive would turn maxima into minima.
  bool is_scaled() const { return call_.mods.score != nullptr || !(call_.scale > 0.0f); }

  BFloat16* queries_of(int64_t head, const Panel& panel) const {
    return scratch_.amx_queries + (head * kTileLanes + panel.offset) * key_steps_ * amx::kDepth;
  }

  // Rows of `view` from `from` on, packed with zeros up to `padded`.
  static void copy_rows(const BFloat16* from, const TensorView& view, int64_t count, int64_t dim, BFloat16* to,
                        int64_t padded) {
    for (int64_t r = 0; r < count; ++r, from += view.stride(2), to += padded) {
      if (view.stride(3) == 1) {
        std::copy_n(from, dim, to);
      } else {
        for (int64_t i = 0; i < dim; ++i) to[i] = from[i * view.stride(3)];
      }
      std::fill(to + dim, to + padded, BFloat16{});
    }
  }

  const FlexCall& call_;
  const FlexShape& shape_;
  const PrefillScratch& scratch_;
  const int64_t key_steps_;
  const amx::Registers registers_;
  int64_t count_ = 0;
  const BFloat16* source_ = nullptr;
  bool finite_ = true;
  bool is_widened_ = false;
};

#endif  // HWY_TARGET == HWY_AVX3

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace flexpte
HWY_AFTER_NAMESPACE();

#endif  // FLEXPTE_FLEX_PRODUCTS_INL_H_
