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
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "metal_delegate/flex_kernels.h"
#include "runtime/kernels/scalar.h"
#include "runtime/kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "metal_delegate/flex_prefill.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "metal_delegate/flex_micro-inl.h"
#include "metal_delegate/flex_simd-inl.h"

#ifndef FLEXPTE_FLEX_PREFILL_SHARED
#define FLEXPTE_FLEX_PREFILL_SHARED
namespace flexpte {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

// Lanes that the panels of a tile of queries have together, on every target.
constexpr int64_t kTileLanes = kFlexQueryTile;
constexpr int64_t kMaxPanelLanes = 32;
// What the queries and outputs of a unit may take of the L2 cache.
constexpr int64_t kUnitBytes = 512 * 1024;

// Scratch of one thread.
struct PrefillScratch {
  float* queries;    // [heads, panels][key_dim, lanes of the panel]
  float* outputs;    // [heads, panels][value_dim, lanes of the panel]
  float* max;        // [heads, kTileLanes]
  float* sum;        // [heads, kTileLanes]
  float* scores;     // [kFlexKeyChunk, kMaxPanelLanes]
  float* keys;       // [kFlexKeyChunk, key_dim]
  float* values;     // [kFlexKeyChunk, value_dim]
  float* rows;       // [4, max(key_dim, value_dim)] rounded up
  uint8_t* visible;  // [kFlexKeyChunk, kMaxPanelLanes]
  std::span<std::byte> mods;

  PrefillScratch(WorkspaceCarver& carver, const FlexShape& shape, const FlexMods& call_mods, int64_t heads) {
    queries = carver.take<float>(heads * kTileLanes * shape.key_dim);
    outputs = carver.take<float>(heads * kTileLanes * shape.value_dim);
    max = carver.take<float>(heads * kTileLanes);
    sum = carver.take<float>(heads * kTileLanes);
    scores = carver.take<float>(kFlexKeyChunk * kMaxPanelLanes);
    keys = carver.take<float>(kFlexKeyChunk * shape.key_dim);
    values = carver.take<float>(kFlexKeyChunk * shape.value_dim);
    rows = carver.take<float>(4 * row_stride(shape));
    visible = carver.take<uint8_t>(kFlexKeyChunk * kMaxPanelLanes);
    const size_t bytes = flex_mods_workspace_bytes(call_mods, kFlexKeyChunk, kMaxPanelLanes);
    mods = {carver.take<std::byte>(static_cast<int64_t>(bytes)), bytes};
  }

  static int64_t row_stride(const FlexShape& shape) { return (std::max(shape.key_dim, shape.value_dim) + 3) / 4 * 4; }
};

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

constexpr int64_t kPanelLanes = kPanelVectors * kLanes;
static_assert(kPanelLanes <= kMaxPanelLanes && kTileLanes % kPanelLanes == 0);

// The rows of a chunk of keys or values, in float.
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

// The storage type T of query, key, value and out is a parameter.
template <class T>
class PrefillUnit {
 public:
  PrefillUnit(const FlexCall& call, const PrefillScratch& scratch)
      : call_(call),
        shape_(call.shape),
        args_(call.args),
        scratch_(scratch),
        mods_(call, scratch.mods),
        // Scores are kept in units of log2 where no expression needs them otherwise.
        log2_scale_(call.mods.score == nullptr ? 1.0f : kLog2e) {}

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
    std::fill_n(scratch_.outputs, lanes * shape_.value_dim, 0.0f);
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
  float* queries_of(int64_t head, const Panel& panel) const {
    return scratch_.queries + (head * kTileLanes + panel.offset) * shape_.key_dim;
  }
  float* outputs_of(int64_t head, const Panel& panel) const {
    return scratch_.outputs + (head * kTileLanes + panel.offset) * shape_.value_dim;
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
    const DF d;
    const float scale = call_.mods.score == nullptr ? call_.scale * kLog2e : call_.scale;
    const int64_t dim = shape_.key_dim;
    const int64_t stride = PrefillScratch::row_stride(shape_);
    float* rows = scratch_.rows;
    for (int64_t head = 0; head < num_heads_; ++head) {
      const T* source = query.as<const T>() + batch_ * query.stride(0) + (first_head_ + head) * query.stride(1) +
                        q_begin_ * query.stride(2);
      for (int64_t p = 0; p < num_panels_; ++p) {
        const Panel& panel = panels_[p];
        float* packed = queries_of(head, panel);
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
    }
  }

  // Rows [begin, end) of the unit's KV head, in place where that is float and contiguous.
  Rows load_rows(const TensorView& view, int64_t begin, int64_t end, int64_t dim, float* packed) const {
    const int64_t kv_head = first_head_ / shape_.group();
    const int64_t b = view.size(0) == 1 ? 0 : batch_;
    const T* source = view.as<const T>() + b * view.stride(0) + kv_head * view.stride(1) + begin * view.stride(2);
    if constexpr (std::is_same_v<T, float>) {
      if (view.stride(3) == 1 && view.stride(2) == dim) return {source, dim};
    }
    widen_rows(source, view.stride(2), view.stride(3), end - begin, dim, packed, dim);
    return {packed, dim};
  }

  void visit(RunKind kind, int64_t begin, int64_t end) {
    const Rows keys = load_rows(args_.key, begin, end, shape_.key_dim, scratch_.keys);
    const Rows values = load_rows(args_.value, begin, end, shape_.value_dim, scratch_.values);
    // -1: not known yet. Where a row is masked, its weight 0 must not meet an infinity or NaN.
    int finite = -1;
    for (int64_t p = 0; p < num_panels_; ++p) {
      const Panel& panel = panels_[p];
      int64_t panel_begin = begin;
      int64_t panel_end = end;
      Visibility visibility;
      if (kind == RunKind::kBounds) {
        panel_begin = std::max(begin, panel.first_begin);
        panel_end = std::min(end, panel.last_end);
        if (panel_begin >= panel_end) continue;
        if (panel.last_begin > panel_begin || panel.first_end < panel_end) bound_lanes(panel, panel_begin, visibility);
        if (!visibility.all() && call_.mods.score_loads) expand_bounds(panel, panel_end - panel_begin, visibility);
      } else if (kind == RunKind::kMask) {
        std::memset(scratch_.visible, 0, static_cast<size_t>((end - begin) * kMaxPanelLanes));
        mods_.mask({batch_, first_head_, begin, q_begin_ + panel.offset, end - begin, panel.queries}, scratch_.visible,
                   kMaxPanelLanes);
        visibility.bytes = scratch_.visible;
      }
      const Rows panel_keys = {keys.data + (panel_begin - begin) * keys.stride, keys.stride};
      const Rows panel_values = {values.data + (panel_begin - begin) * values.stride, values.stride};
      if (!visibility.all() && finite < 0) {
        finite = all_finite(values.data, values.stride, end - begin, shape_.value_dim) ? 1 : 0;
      }
      const bool separate = !visibility.all() && finite == 0;
      for (int64_t head = 0; head < num_heads_; ++head) {
        if (panel.lanes == kPanelLanes) {
          attend<kPanelVectors>(head, panel, panel_begin, panel_end, panel_keys, panel_values, visibility, separate);
        } else {
          attend<1>(head, panel, panel_begin, panel_end, panel_keys, panel_values, visibility, separate);
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

  template <int V>
  HWY_INLINE void attend(int64_t head, const Panel& panel, int64_t begin, int64_t end, const Rows& keys,
                         const Rows& values, const Visibility& visibility, bool separate) {
    constexpr int64_t kWidth = V * kLanes;
    const DF d;
    const int64_t count = end - begin;
    float* scores = scratch_.scores;
    multiply_keys<V>(keys.data, keys.stride, queries_of(head, panel), shape_.key_dim, count, scores);
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

    const VF scale = hn::Set(d, log2_scale_);
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
      accumulate_visible<V>(values, count, visibility, correction, outputs);
    } else {
      multiply_values<V>(values.data, values.stride, scores, shape_.value_dim, count, correction, outputs);
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
      const float max = scratch_.max[head * kTileLanes + i] * (call_.mods.score == nullptr ? kLn2 : 1.0f);
      target[i * lse.stride(2)] = sum == 0.0f ? -kInfinity : max + std::log(sum);
    }
  }

  const FlexCall& call_;
  const FlexShape& shape_;
  const FlexAttentionArgs& args_;
  const PrefillScratch& scratch_;
  const FlexTileMods mods_;
  const float log2_scale_;
  int64_t batch_ = 0, first_head_ = 0, num_heads_ = 0, q_begin_ = 0, num_queries_ = 0, entry_ = 0;
  int64_t num_panels_ = 0;
  Panel panels_[kTileLanes / kPanelLanes];
  int32_t lane_begin_[kMaxPanelLanes];
  int32_t lane_end_[kMaxPanelLanes];
};

template <class T>
void prefill(const FlexCall& call, int64_t heads_per_unit) {
  const FlexShape& shape = call.shape;
  const int64_t slices = (shape.group() + heads_per_unit - 1) / heads_per_unit;
  const int64_t tiles = call.plan.num_tiles();
  const int64_t units = shape.batch * shape.num_kv_heads * slices * tiles;
  const int64_t thread_bytes = static_cast<int64_t>(flex_prefill_workspace_bytes(shape, call.mods, 1));
  call.pool.parallel_for(units, 1, [&](int64_t begin, int64_t end, int thread) {
    WorkspaceCarver carver(call.workspace.subspan(static_cast<size_t>(thread * thread_bytes)));
    const PrefillScratch scratch(carver, shape, call.mods, heads_per_unit);
    PrefillUnit<T> unit(call, scratch);
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
  with_float_type(call.args.query.dtype, [&](auto type) { prefill<decltype(type)>(call, heads_per_unit); });
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
