// Prefill: out[q, :] = sum_k p[q, k] V[k, :] / sum_k p[q, k], p[q, k] = exp(score[q, k] - m[q]).
//
// Everything is transposed, so that queries are the vector lanes: S^T = K Q^T and O^T = V^T P^T are
// matrix products that broadcast the elements of K and V as they lie in memory, and maxima and sums
// over keys need no reduction across lanes.
//
//   for each unit (batch, KV head, some of its query heads, tile of queries), handed out to threads:
//     Q^T := scaled queries; m := -inf, l := 0, O^T := 0
//     for each run of keys that the plan has for the tile, in chunks:
//       K, V := the chunk, as it lies in memory or widened once for all that follows
//       for each panel of lanes, for each head:
//         S^T := K Q^T; the score expression; -inf where masked
//         m' := max(m, max_k S^T); P^T := exp(S^T - m'); l := l exp(m - m') + sum_k P^T
//         O^T := O^T exp(m - m') + V^T P^T
//     out := O / l, or 0 where l = 0
#include "metal_delegate/flex_prefill.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "runtime/kernels/scalar.h"
#include "runtime/kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "metal_delegate/flex_prefill.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "metal_delegate/flex_products-inl.h"
#include "metal_delegate/flex_simd-inl.h"

#ifndef FLEXPTE_FLEX_PREFILL_SHARED
#define FLEXPTE_FLEX_PREFILL_SHARED
namespace flexpte {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What the queries and outputs of a unit may take of the L2 cache.
constexpr int64_t kUnitBytes = 512 * 1024;

// Query heads of one KV head that a unit takes at most.
int64_t max_heads_per_unit(const FlexShape& shape) {
  const int64_t head_bytes = kTileLanes * (shape.key_dim + shape.value_dim) * 4;
  return std::clamp<int64_t>(kUnitBytes / std::max<int64_t>(1, head_bytes), 1, std::max<int64_t>(1, shape.group()));
}

}  // namespace
}  // namespace flexpte
#endif

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {
namespace {

// Which keys of a chunk the lanes of a panel see.
struct Visibility {
  const int32_t* begin = nullptr;  // bounds per lane, relative to the first key, or null
  const int32_t* end = nullptr;
  const uint8_t* bytes = nullptr;  // [keys, kMaxPanelLanes], or null

  bool all() const { return begin == nullptr && bytes == nullptr; }
  HWY_INLINE hn::Mask<DF> lanes(int64_t key, int64_t lane) const {
    const DF d;
    const hn::Rebind<int32_t, DF> di;
    if (bytes != nullptr) {
      const hn::Rebind<uint8_t, DF> d8;
      const auto value = hn::PromoteTo(di, hn::LoadU(d8, bytes + key * kMaxPanelLanes + lane));
      return hn::RebindMask(d, hn::Gt(value, hn::Zero(di)));
    }
    const auto k = hn::Set(di, static_cast<int32_t>(key));
    const auto before = hn::Lt(k, hn::LoadU(di, begin + lane));
    return hn::RebindMask(d, hn::AndNot(before, hn::Lt(k, hn::LoadU(di, end + lane))));
  }
};

template <class Products>
class PrefillUnit {
 public:
  using T = typename Products::Element;  // of query, key, value and out

  PrefillUnit(const FlexCall& call, const PrefillScratch& scratch)
      : call_(call),
        shape_(call.shape),
        args_(call.args),
        scratch_(scratch),
        mods_(call, scratch.mods),
        products_(call, scratch) {}

  void run(int64_t batch, int64_t first_head, int64_t num_heads, int64_t tile) {
    batch_ = batch;
    first_head_ = first_head;
    num_heads_ = num_heads;
    const PlanData& plan = call_.plan;
    q_begin_ = plan.tile_begin[static_cast<size_t>(tile)];
    num_queries_ = plan.tile_begin[static_cast<size_t>(tile) + 1] - q_begin_;
    entry_ = plan.entry(batch, first_head);
    const auto runs = plan.tile_runs(entry_, tile);
    set_panels();
    const int64_t lanes = num_heads * kTileLanes;
    std::fill_n(scratch_.max, lanes, -kInfinity);
    std::fill_n(scratch_.sum, lanes, 0.0f);
    std::fill_n(scratch_.outputs, lanes * shape_.padded_value_dim(), 0.0f);
    if (!runs.empty()) pack_queries();
    for (const KeyRun& run : runs) {
      if (run.kind == RunKind::kBounds) set_bounds();
      const int64_t length = run.end - run.begin;
      const int64_t chunks = (length + kFlexKeyChunk - 1) / kFlexKeyChunk;
      const int64_t step = std::min(kFlexKeyChunk, ((length + chunks - 1) / chunks + 7) / 8 * 8);
      for (int64_t begin = run.begin; begin < run.end; begin += step) {
        visit(run.kind, begin, std::min<int64_t>(run.end, begin + step));
      }
    }
    write_outputs();
  }

 private:
  float* outputs_of(int64_t head, const Panel& panel) const {
    return scratch_.outputs + (head * kTileLanes + panel.offset) * shape_.padded_value_dim();
  }

  void set_panels() {
    num_panels_ = 0;
    for (int64_t offset = 0; offset < num_queries_; offset += kPanelLanes) {
      const int64_t queries = std::min(kPanelLanes, num_queries_ - offset);
      const bool half = kLanes >= 4 && queries <= kLanes;
      panels_[num_panels_++] = {offset, half ? kLanes : kPanelLanes, queries, 0, 0, 0, 0};
    }
  }

  void set_bounds() {
    const PlanData& plan = call_.plan;
    const int64_t row0 = entry_ * plan.num_queries + q_begin_;
    for (int64_t p = 0; p < num_panels_; ++p) {
      Panel& panel = panels_[p];
      const int32_t* begin = plan.row_begin.data() + row0 + panel.offset;
      const int32_t* end = plan.row_end.data() + row0 + panel.offset;
      panel.first_begin = panel.first_end = std::numeric_limits<int32_t>::max();
      panel.last_begin = panel.last_end = 0;
      for (int64_t i = 0; i < panel.queries; ++i) {
        panel.last_begin = std::max<int64_t>(panel.last_begin, begin[i]);
        panel.first_end = std::min<int64_t>(panel.first_end, end[i]);
        if (begin[i] >= end[i]) continue;
        panel.first_begin = std::min<int64_t>(panel.first_begin, begin[i]);
        panel.last_end = std::max<int64_t>(panel.last_end, end[i]);
      }
    }
  }

  void pack_queries() {
    const TensorView& query = args_.query;
    for (int64_t head = 0; head < num_heads_; ++head) {
      const T* source = query.as<const T>() + batch_ * query.stride(0) + (first_head_ + head) * query.stride(1) +
                        q_begin_ * query.stride(2);
      for (int64_t p = 0; p < num_panels_; ++p) products_.pack_queries(head, panels_[p], source);
    }
  }

  void visit(RunKind kind, int64_t begin, int64_t end) {
    products_.load(batch_, first_head_ / shape_.group(), begin, end);
    for (int64_t p = 0; p < num_panels_; ++p) {
      const Panel& panel = panels_[p];
      int64_t panel_begin = begin;
      int64_t panel_end = end;
      Visibility visibility;
      if (kind == RunKind::kBounds) {
        panel_begin = std::max(begin, panel.first_begin);
        panel_end = std::min(end, panel.last_end);
        if (panel_begin >= panel_end) continue;
        const bool is_cut = panel.last_begin > panel_begin || panel.first_end < panel_end;
        const bool is_at_risk = products_.reads_beyond(panel_begin - begin, panel_end - panel_begin);
        if (is_cut || (is_at_risk && !products_.is_finite())) bound_lanes(panel, panel_begin, visibility);
        if (!visibility.all() && call_.mods.score_loads) expand_bounds(panel, panel_end - panel_begin, visibility);
      } else if (kind == RunKind::kMask) {
        std::memset(scratch_.visible, 0, static_cast<size_t>((end - begin) * kMaxPanelLanes));
        mods_.mask({batch_, first_head_, begin, q_begin_ + panel.offset, end - begin, panel.queries}, scratch_.visible,
                   kMaxPanelLanes);
        visibility.bytes = scratch_.visible;
      }
      // Where a row is masked, its weight 0 must not meet an infinity or NaN.
      const bool separate = !visibility.all() && !products_.is_finite();
      for (int64_t head = 0; head < num_heads_; ++head) {
        if (panel.lanes == kPanelLanes) {
          attend<kPanelVectors>(head, panel, begin, panel_begin, panel_end, visibility, separate);
        } else {
          attend<1>(head, panel, begin, panel_begin, panel_end, visibility, separate);
        }
      }
    }
  }

  // Bounds per lane relative to key `begin`; lanes without a query see nothing.
  void bound_lanes(const Panel& panel, int64_t begin, Visibility& visibility) {
    const PlanData& plan = call_.plan;
    const int64_t row0 = entry_ * plan.num_queries + q_begin_ + panel.offset;
    for (int64_t i = 0; i < panel.lanes; ++i) {
      const bool has_query = i < panel.queries;
      lane_begin_[i] = has_query ? static_cast<int32_t>(plan.row_begin[static_cast<size_t>(row0 + i)] - begin) : 0;
      lane_end_[i] = has_query ? static_cast<int32_t>(plan.row_end[static_cast<size_t>(row0 + i)] - begin) : 0;
    }
    visibility.begin = lane_begin_;
    visibility.end = lane_end_;
  }

  void expand_bounds(const Panel& panel, int64_t keys, Visibility& visibility) {
    for (int64_t key = 0; key < keys; ++key) {
      uint8_t* bytes = scratch_.visible + key * kMaxPanelLanes;
      for (int64_t i = 0; i < panel.lanes; ++i) {
        bytes[i] = static_cast<uint8_t>(lane_begin_[i] <= key && key < lane_end_[i]);
      }
    }
    visibility.bytes = scratch_.visible;
  }

  // Keys [begin, end) of those loaded, which begin at `loaded`.
  template <int V>
  HWY_INLINE void attend(int64_t head, const Panel& panel, int64_t loaded, int64_t begin, int64_t end,
                         const Visibility& visibility, bool separate) {
    constexpr int64_t kWidth = V * kLanes;
    const DF d;
    const int64_t count = end - begin;
    float* scores = scratch_.scores;
    products_.template multiply_keys<V>(head, panel, begin - loaded, count, scores);
    if (call_.mods.score != nullptr) {
      mods_.score({batch_, first_head_ + head, begin, q_begin_ + panel.offset, count, panel.queries}, scores, kWidth,
                  visibility.bytes, kMaxPanelLanes);
    }

    VF max[V], sum[V], safe_max[V], correction[V];
    float* max_of_lanes = scratch_.max + head * kTileLanes + panel.offset;
    float* sum_of_lanes = scratch_.sum + head * kTileLanes + panel.offset;
    for (int v = 0; v < V; ++v) max[v] = hn::LoadU(d, max_of_lanes + v * kLanes);
    if (visibility.all()) {
      for (int64_t k = 0; k < count; ++k) {
        for (int v = 0; v < V; ++v) max[v] = hn::Max(max[v], hn::LoadU(d, scores + k * kWidth + v * kLanes));
      }
    } else {
      for (int64_t k = 0; k < count; ++k) {
        for (int v = 0; v < V; ++v) {
          float* at = scores + k * kWidth + v * kLanes;
          const VF s = hn::IfThenElse(visibility.lanes(k, v * kLanes), hn::LoadU(d, at), hn::Set(d, -kInfinity));
          hn::StoreU(s, d, at);
          max[v] = hn::Max(max[v], s);
        }
      }
    }

    const VF scale = hn::Set(d, products_.log2_scale());
    for (int v = 0; v < V; ++v) {
      const VF old_max = hn::LoadU(d, max_of_lanes + v * kLanes);
      hn::StoreU(max[v], d, max_of_lanes + v * kLanes);
      // While nothing is visible the maximum is -inf, and -inf - -inf would be NaN.
      safe_max[v] = hn::IfThenZeroElse(hn::Eq(max[v], hn::Set(d, -kInfinity)), max[v]);
      correction[v] = exp2_nonpositive(d, hn::Mul(hn::Sub(old_max, safe_max[v]), scale));
      sum[v] = hn::Mul(hn::LoadU(d, sum_of_lanes + v * kLanes), correction[v]);
    }
    for (int64_t k = 0; k < count; ++k) {
      for (int v = 0; v < V; ++v) {
        float* at = scores + k * kWidth + v * kLanes;
        const VF p = exp2_nonpositive(d, hn::Mul(hn::Sub(hn::LoadU(d, at), safe_max[v]), scale));
        sum[v] = hn::Add(sum[v], p);
        hn::StoreU(p, d, at);
      }
    }
    for (int v = 0; v < V; ++v) hn::StoreU(sum[v], d, sum_of_lanes + v * kLanes);

    float* outputs = outputs_of(head, panel);
    if (separate) {
      Rows values = products_.values();
      values.data += (begin - loaded) * values.stride;
      accumulate_visible<V>(values, count, visibility, correction, outputs);
    } else {
      products_.template multiply_values<V>(begin - loaded, count, scores, correction, outputs);
    }
  }

  // O^T := O^T correction + V^T P^T over visible positions only: values may be infinite or NaN.
  template <int V>
  void accumulate_visible(const Rows& values, int64_t count, const Visibility& visibility, const VF (&correction)[V],
                          float* outputs) const {
    const DF d;
    for (int64_t i = 0; i < shape_.value_dim; ++i) {
      for (int v = 0; v < V; ++v) {
        float* at = outputs + (i * V + v) * kLanes;
        VF o = hn::Mul(hn::LoadU(d, at), correction[v]);
        for (int64_t k = 0; k < count; ++k) {
          const VF p = hn::LoadU(d, scratch_.scores + (k * V + v) * kLanes);
          const VF value = hn::Set(d, values.data[k * values.stride + i]);
          o = hn::IfThenElse(visibility.lanes(k, v * kLanes), hn::MulAdd(p, value, o), o);
        }
        hn::StoreU(o, d, at);
      }
    }
  }

  void write_outputs() const {
    const TensorView& out = args_.out;
    const DF d;
    const int64_t dim = shape_.value_dim;
    const int64_t stride = PrefillScratch::row_stride(shape_);
    for (int64_t head = 0; head < num_heads_; ++head) {
      T* target =
          out.as<T>() + batch_ * out.stride(0) + (first_head_ + head) * out.stride(1) + q_begin_ * out.stride(2);
      write_log_sum_exp(head);
      for (int64_t p = 0; p < num_panels_; ++p) {
        const Panel& panel = panels_[p];
        float* outputs = outputs_of(head, panel);
        for (int64_t lane = 0; lane < panel.lanes; lane += kLanes) {
          const VF sum = hn::LoadU(d, scratch_.sum + head * kTileLanes + panel.offset + lane);
          const auto empty = hn::Eq(sum, hn::Zero(d));
          const VF inverse = hn::Div(hn::Set(d, 1.0f), sum);
          for (int64_t i = 0; i < dim; ++i) {
            float* at = outputs + i * panel.lanes + lane;
            hn::StoreU(hn::IfThenZeroElse(empty, hn::Mul(hn::LoadU(d, at), inverse)), d, at);
          }
        }
        for (int64_t lane = 0; lane < panel.queries; lane += 4) {
          int64_t i = 0;
          for (; i + 4 <= dim; i += 4) {
            transpose_4x4(outputs + i * panel.lanes + lane, panel.lanes, scratch_.rows + i, stride);
          }
          for (; i < dim; ++i) {
            for (int64_t r = 0; r < 4; ++r) scratch_.rows[r * stride + i] = outputs[i * panel.lanes + lane + r];
          }
          for (int64_t r = 0; r < std::min<int64_t>(4, panel.queries - lane); ++r) {
            narrow_row(scratch_.rows + r * stride, dim, target + (panel.offset + lane + r) * out.stride(2));
          }
        }
      }
    }
  }

  void write_log_sum_exp(int64_t head) const {
    const TensorView& lse = args_.lse;
    if (lse.data == nullptr) return;
    float* target =
        lse.as<float>() + batch_ * lse.stride(0) + (first_head_ + head) * lse.stride(1) + q_begin_ * lse.stride(2);
    for (int64_t i = 0; i < num_queries_; ++i) {
      const float sum = scratch_.sum[head * kTileLanes + i];
      const float max = scratch_.max[head * kTileLanes + i] * products_.natural_scale();
      target[i * lse.stride(2)] = sum == 0.0f ? -kInfinity : max + std::log(sum);
    }
  }

  const FlexCall& call_;
  const FlexShape& shape_;
  const FlexAttentionArgs& args_;
  const PrefillScratch& scratch_;
  const FlexTileMods mods_;
  Products products_;
  int64_t batch_ = 0, first_head_ = 0, num_heads_ = 0, q_begin_ = 0, num_queries_ = 0, entry_ = 0;
  int64_t num_panels_ = 0;
  Panel panels_[kTileLanes / kPanelLanes];
  int32_t lane_begin_[kMaxPanelLanes];
  int32_t lane_end_[kMaxPanelLanes];
};

template <class Products>
void prefill(const FlexCall& call, int64_t heads_per_unit) {
  const FlexShape& shape = call.shape;
  const int64_t slices = (shape.group() + heads_per_unit - 1) / heads_per_unit;
  const int64_t tiles = call.plan.num_tiles();
  const int64_t units = shape.batch * shape.num_kv_heads * slices * tiles;
  const int64_t thread_bytes = static_cast<int64_t>(flex_prefill_workspace_bytes(shape, call.mods, 1));
  call.pool.parallel_for(units, 1, [&](int64_t begin, int64_t end, int thread) {
    WorkspaceCarver carver(call.workspace.subspan(static_cast<size_t>(thread * thread_bytes)));
    const PrefillScratch scratch(carver, shape, call.mods, heads_per_unit);
    PrefillUnit<Products> unit(call, scratch);
    for (int64_t i = begin; i < end; ++i) {
      // The last tiles of a causal mask are the largest: they come first.
      const int64_t tile = tiles - 1 - i % tiles;
      const int64_t slice = i / tiles % slices;
      const int64_t kv_head = i / tiles / slices % shape.num_kv_heads;
      const int64_t batch = i / tiles / slices / shape.num_kv_heads;
      const int64_t first = slice * heads_per_unit;
      unit.run(batch, kv_head * shape.group() + first, std::min(heads_per_unit, shape.group() - first), tile);
    }
  });
}

void prefill_any(const FlexCall& call, int64_t heads_per_unit) {
#if HWY_TARGET == HWY_AVX3
  if (call.shape.uses_amx()) return prefill<AmxProducts>(call, heads_per_unit);
#endif
  with_float_type(call.args.query.dtype,
                  [&](auto type) { prefill<FloatProducts<decltype(type)>>(call, heads_per_unit); });
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace flexpte
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flexpte {
HWY_EXPORT(prefill_any);

size_t flex_prefill_workspace_bytes(const FlexShape& shape, const FlexMods& mods, int num_threads) {
  WorkspaceCarver carver;
  const PrefillScratch scratch(carver, shape, mods, max_heads_per_unit(shape));
  return carver.used_bytes() * static_cast<size_t>(num_threads);
}

void flex_prefill(const FlexCall& call) {
  const FlexShape& shape = call.shape;
  int64_t heads_per_unit = max_heads_per_unit(shape);
  // Heads that visit different keys, or too few units for the threads: one head each.
  const int64_t units = shape.batch * shape.num_kv_heads * call.plan.num_tiles();
  if (call.plan.num_heads > 1 || units < 4 * call.pool.num_threads()) heads_per_unit = 1;
  HWY_DYNAMIC_DISPATCH(prefill_any)(call, heads_per_unit);
}

}  // namespace flexpte
#endif  // HWY_ONCE
