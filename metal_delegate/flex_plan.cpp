#include "metal_delegate/flex_plan.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <string>

namespace flexpte {
namespace {

int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

int64_t read_index(const TensorView& view, int64_t offset) {
  return view.dtype == DType::kI64 ? view.as<const int64_t>()[offset]
                                   : static_cast<int64_t>(view.as<const int32_t>()[offset]);
}

// Plans one call. The runs of a tile are emitted in ascending order of keys.
class Planner {
 public:
  Planner(const FlexAttentionSpec& spec, const FlexAttentionArgs& args, bool has_mask, int64_t q_tile, PlanData& plan)
      : spec_(spec), args_(args), has_mask_(has_mask), q_tile_(q_tile), plan_(plan) {}

  Status run() {
    plan_.counts = {0, 0, 0, q_tile_, kFlexKeyTile};
    plan_.runs.clear();
    plan_.first_run.clear();
    cut_queries();
    if (has_mask_) {
      const auto rows = static_cast<size_t>(plan_.num_batches * plan_.num_heads * plan_.num_queries);
      plan_.row_begin.resize(rows);
      plan_.row_end.resize(rows);
    }
    for (int64_t batch = 0; batch < plan_.num_batches; ++batch) {
      for (int64_t head = 0; head < plan_.num_heads; ++head) {
        FLEXPTE_TRY(plan_entry(batch, head));
      }
    }
    plan_.first_run.push_back(static_cast<int64_t>(plan_.runs.size()));
    return Status::ok();
  }

 private:
  // A tile of queries lies in one block of the block lists.
  void cut_queries() {
    const int64_t block = spec_.has_block_lists ? std::min(spec_.q_block_size, plan_.num_queries) : plan_.num_queries;
    plan_.tile_begin.clear();
    for (int64_t begin = 0; begin < plan_.num_queries; begin += block) {
      const int64_t end = std::min(plan_.num_queries, begin + block);
      for (int64_t q = begin; q < end; q += q_tile_) plan_.tile_begin.push_back(static_cast<int32_t>(q));
    }
    plan_.tile_begin.push_back(static_cast<int32_t>(plan_.num_queries));
  }

  Status plan_entry(int64_t batch, int64_t head) {
    int64_t listed_block = -1;
    is_relative_ = has_mask_ && plan_.bound_mask.relative_interval(batch, head, &relative_);
    if (!spec_.has_block_lists) plan_.segments.assign(1, {0, static_cast<int32_t>(plan_.num_keys), RunKind::kMask});
    for (int64_t tile = 0; tile < plan_.num_tiles(); ++tile) {
      const auto t = static_cast<size_t>(tile);
      q_begin_ = plan_.tile_begin[t];
      q_end_ = plan_.tile_begin[t + 1];
      if (spec_.has_block_lists && q_begin_ / spec_.q_block_size != listed_block) {
        listed_block = q_begin_ / spec_.q_block_size;
        FLEXPTE_TRY(list_segments(batch, head, listed_block));
      }
      plan_.first_run.push_back(static_cast<int64_t>(plan_.runs.size()));
      first_run_of_tile_ = plan_.runs.size();
      plan_tile(batch, head);
      count_tiles();
    }
    return Status::ok();
  }

  // The segments of keys that the lists name for one block of queries, sorted and merged; kFull for
  // those of the full lists, kMask for the others.
  Status list_segments(int64_t batch, int64_t head, int64_t q_block) {
    plan_.segments.clear();
    FLEXPTE_TRY(append_listed(args_.kv_num_blocks, args_.kv_indices, "kv", RunKind::kMask, batch, head, q_block));
    if (args_.full_kv_num_blocks.data != nullptr) {
      FLEXPTE_TRY(append_listed(args_.full_kv_num_blocks, args_.full_kv_indices, "full_kv", RunKind::kFull, batch, head,
                                q_block));
    }
    auto& segments = plan_.segments;
    // A block that is listed twice counts once, and as full when either list says so.
    std::sort(segments.begin(), segments.end(), [](const KeyRun& a, const KeyRun& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.kind < b.kind;
    });
    size_t kept = 0;
    for (const KeyRun& segment : segments) {
      if (kept > 0 && segments[kept - 1].end > segment.begin) continue;
      if (kept > 0 && segments[kept - 1].end == segment.begin && segments[kept - 1].kind == segment.kind) {
        segments[kept - 1].end = segment.end;
      } else {
        segments[kept++] = segment;
      }
    }
    segments.resize(kept);
    return Status::ok();
  }

  Status append_listed(const TensorView& num_blocks, const TensorView& indices, const char* list, RunKind kind,
                       int64_t batch, int64_t head, int64_t q_block) {
    const int64_t b = num_blocks.size(0) == 1 ? 0 : batch;
    const int64_t h = num_blocks.size(1) == 1 ? 0 : head;
    const int64_t count =
        read_index(num_blocks, b * num_blocks.stride(0) + h * num_blocks.stride(1) + q_block * num_blocks.stride(2));
    const auto where = [&] {
      return " at batch " + std::to_string(b) + ", head " + std::to_string(h) + ", query block " +
             std::to_string(q_block);
    };
    if (count < 0 || count > indices.size(3)) {
      return Status(Code::kOutOfRange, std::string("flex_attention: ") + list + "_num_blocks is " +
                                           std::to_string(count) + where() + ", but " + list + "_indices lists " +
                                           std::to_string(indices.size(3)) + " blocks");
    }
    const int64_t bi = indices.size(0) == 1 ? 0 : batch;
    const int64_t hi = indices.size(1) == 1 ? 0 : head;
    const int64_t row = bi * indices.stride(0) + hi * indices.stride(1) + q_block * indices.stride(2);
    const int64_t num_kv_blocks = (plan_.num_keys + spec_.kv_block_size - 1) / spec_.kv_block_size;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t index = read_index(indices, row + i * indices.stride(3));
      if (index < 0 || index >= num_kv_blocks) {
        return Status(Code::kOutOfRange,
                      std::string("flex_attention: ") + list + "_indices holds block " + std::to_string(index) +
                          where() + ", but the " + std::to_string(plan_.num_keys) + " keys have " +
                          std::to_string(num_kv_blocks) + " blocks of " + std::to_string(spec_.kv_block_size));
      }
      const int64_t begin = index * spec_.kv_block_size;
      const int64_t end = std::min(plan_.num_keys, begin + std::min(spec_.kv_block_size, plan_.num_keys));
      plan_.segments.push_back({static_cast<int32_t>(begin), static_cast<int32_t>(end), kind});
    }
    return Status::ok();
  }

  void plan_tile(int64_t batch, int64_t head) {
    if (!has_mask_) {
      for (const KeyRun& segment : plan_.segments) emit(segment.begin, segment.end, RunKind::kFull);
      return;
    }
    const KeyRange visible = is_relative_ ? KeyRange{std::max<int64_t>(0, relative_.begin + q_begin_),
                                                     std::min(plan_.num_keys, relative_.end + q_end_ - 1)}
                                          : plan_.bound_mask.visible_keys(batch, head, q_begin_, q_end_);
    const bool bounded = !visible.empty() && bound_rows(batch, head, visible);
    for (const KeyRun& segment : plan_.segments) {
      if (segment.kind == RunKind::kFull) {
        emit(segment.begin, segment.end, RunKind::kFull);
        continue;
      }
      if (visible.empty()) continue;
      if (bounded) {
        emit_bounded(segment);
      } else {
        const int64_t begin = std::max<int64_t>(segment.begin, visible.begin / kFlexKeyTile * kFlexKeyTile);
        const int64_t end = std::min<int64_t>(segment.end, round_up(visible.end, kFlexKeyTile));
        if (begin < end) classify(batch, head, begin, end);
      }
    }
  }

  // Stores the bounds of every row of the tile, if each row sees one interval of the visible keys.
  bool bound_rows(int64_t batch, int64_t head, KeyRange visible) {
    const int64_t row0 = plan_.entry(batch, head) * plan_.num_queries;
    bounds_ = {plan_.num_keys, 0};
    core_ = {0, plan_.num_keys};
    for (int64_t q = q_begin_; q < q_end_; ++q) {
      KeyRange row{std::max<int64_t>(0, relative_.begin + q), std::min(plan_.num_keys, relative_.end + q)};
      if (!is_relative_ && !plan_.bound_mask.row_interval(batch, head, q, visible.begin, visible.end, &row))
        return false;
      if (row.empty()) {
        row = {0, 0};
        core_ = {0, 0};
      } else {
        bounds_.begin = std::min(bounds_.begin, row.begin);
        bounds_.end = std::max(bounds_.end, row.end);
        core_.begin = std::max(core_.begin, row.begin);
        core_.end = std::min(core_.end, row.end);
      }
      plan_.row_begin[static_cast<size_t>(row0 + q)] = static_cast<int32_t>(row.begin);
      plan_.row_end[static_cast<size_t>(row0 + q)] = static_cast<int32_t>(row.end);
    }
    return true;
  }

  void emit_bounded(const KeyRun& segment) {
    const int64_t begin = std::max<int64_t>(segment.begin, bounds_.begin);
    const int64_t end = std::min<int64_t>(segment.end, bounds_.end);
    if (begin >= end) return;
    const bool full = core_.begin <= begin && end <= core_.end;
    emit(begin, end, full ? RunKind::kFull : RunKind::kBounds);
  }

  // Halves the range, at multiples of the key tile, until it is proved or one tile.
  void classify(int64_t batch, int64_t head, int64_t begin, int64_t end) {
    switch (plan_.bound_mask.classify(batch, head, q_begin_, q_end_, begin, end)) {
      case Verdict::kNone:
        return;
      case Verdict::kAll:
        emit(begin, end, RunKind::kFull);
        return;
      case Verdict::kMixed:
        break;
    }
    const int64_t first = begin / kFlexKeyTile;
    const int64_t last = (end - 1) / kFlexKeyTile;
    if (first == last) {
      // Worth a look: a tile less is a tile less in all heads and all layers with this mask.
      const Verdict seen = plan_.bound_mask.examine(batch, head, q_begin_, q_end_, begin, end);
      if (seen != Verdict::kNone) emit(begin, end, seen == Verdict::kAll ? RunKind::kFull : RunKind::kMask);
      return;
    }
    const int64_t middle = (first + (last - first + 1) / 2) * kFlexKeyTile;
    classify(batch, head, begin, middle);
    classify(batch, head, middle, end);
  }

  void emit(int64_t begin, int64_t end, RunKind kind) {
    if (begin >= end) return;
    auto& runs = plan_.runs;
    if (runs.size() > first_run_of_tile_ && runs.back().end == begin && runs.back().kind == kind) {
      runs.back().end = static_cast<int32_t>(end);
    } else {
      runs.push_back({static_cast<int32_t>(begin), static_cast<int32_t>(end), kind});
    }
  }

  // Counts the key tiles that the runs of this tile touch; one that several runs touch is partial.
  void count_tiles() {
    int64_t full = 0;
    int64_t partial = 0;
    int64_t last_partial = -1;
    const auto count = [&](int64_t begin, int64_t end, bool is_full) {
      if (begin >= end) return;
      int64_t first = begin / kFlexKeyTile;
      int64_t last = (end - 1) / kFlexKeyTile;
      const bool cut_end = end != plan_.num_keys && end % kFlexKeyTile != 0;
      const auto count_partial = [&](int64_t from, int64_t to) {
        from = std::max(from, last_partial + 1);
        if (from > to) return;
        partial += to - from + 1;
        last_partial = to;
      };
      if (!is_full) return count_partial(first, last);
      if (begin % kFlexKeyTile != 0) {
        count_partial(first, first);
        ++first;
      }
      if (cut_end && last >= first) {
        full += last - first;
        count_partial(last, last);
      } else if (last >= first) {
        full += last - first + 1;
      }
    };
    for (size_t i = first_run_of_tile_; i < plan_.runs.size(); ++i) {
      const KeyRun& run = plan_.runs[i];
      if (run.kind != RunKind::kBounds) {
        count(run.begin, run.end, run.kind == RunKind::kFull);
        continue;
      }
      const int64_t core_begin = std::clamp<int64_t>(core_.begin, run.begin, run.end);
      const int64_t core_end = std::clamp<int64_t>(core_.end, core_begin, run.end);
      count(run.begin, core_begin, false);
      count(core_begin, core_end, true);
      count(core_end, run.end, false);
    }
    plan_.counts.tiles_full += full;
    plan_.counts.tiles_partial += partial;
    plan_.counts.tiles_empty += (plan_.num_keys + kFlexKeyTile - 1) / kFlexKeyTile - full - partial;
  }

  const FlexAttentionSpec& spec_;
  const FlexAttentionArgs& args_;
  const bool has_mask_;
  const int64_t q_tile_;
  PlanData& plan_;
  int64_t q_begin_ = 0;
  int64_t q_end_ = 0;
  size_t first_run_of_tile_ = 0;
  bool is_relative_ = false;
  KeyRange relative_;  // where is_relative_: what row q sees is this plus q
  KeyRange bounds_;    // keys that some row of the tile sees
  KeyRange core_;      // keys that every row of the tile sees
};

}  // namespace

namespace {

// Whether block lists differ along dimension `dim`, 0 the batch, 1 the head.
bool lists_differ(const FlexAttentionSpec& spec, const FlexAttentionArgs& args, int32_t dim) {
  if (!spec.has_block_lists) return false;
  for (const TensorView* list :
       {&args.kv_num_blocks, &args.kv_indices, &args.full_kv_num_blocks, &args.full_kv_indices}) {
    if (list->data != nullptr && list->size(dim) != 1) return true;
  }
  return false;
}

// What some of several heads visit: full where all see all, else the mask decides.
void append_union(std::span<const std::span<const KeyRun>> heads, std::vector<int32_t>& edges,
                  std::vector<KeyRun>& runs) {
  edges.clear();
  for (const auto head : heads) {
    for (const KeyRun& run : head) edges.insert(edges.end(), {run.begin, run.end});
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  const size_t first = runs.size();
  for (size_t e = 0; e + 1 < edges.size(); ++e) {
    size_t num_visiting = 0;
    size_t num_full = 0;
    for (const auto head : heads) {
      const auto run = std::find_if(head.begin(), head.end(), [&](const KeyRun& r) { return r.end > edges[e]; });
      if (run == head.end() || run->begin > edges[e]) continue;
      ++num_visiting;
      if (run->kind == RunKind::kFull) ++num_full;
    }
    if (num_visiting == 0) continue;
    const RunKind kind = num_full == heads.size() ? RunKind::kFull : RunKind::kMask;
    if (runs.size() > first && runs.back().end == edges[e] && runs.back().kind == kind) {
      runs.back().end = edges[e + 1];
    } else {
      runs.push_back({edges[e], edges[e + 1], kind});
    }
  }
}

}  // namespace

bool lists_depend_on_head(const FlexAttentionSpec& spec, const FlexAttentionArgs& args) {
  return lists_differ(spec, args, 1);
}

bool plan_depends_on_head(const FlexAttentionSpec& spec, const FlexAttentionArgs& args, const MaskRanges* mask) {
  return (mask != nullptr && mask->depends_on_head()) || lists_depend_on_head(spec, args);
}

Status build_plan(const FlexAttentionSpec& spec, const FlexAttentionArgs& args, const MaskRanges* mask, PlanData& plan,
                  int64_t q_tile) {
  const int64_t batch = args.query.size(0);
  const int64_t num_heads = args.query.size(1);
  plan.num_queries = args.query.size(2);
  plan.num_keys = args.key.size(2);
  const bool per_batch = (mask != nullptr && mask->depends_on_batch()) || lists_differ(spec, args, 0);
  plan.num_batches = per_batch ? batch : 1;
  plan.num_heads = plan_depends_on_head(spec, args, mask) ? num_heads : 1;
  if (mask != nullptr) {
    plan.bound_mask.bind(*mask, args.mask_captures, args.mask_scalars, plan.num_queries, plan.num_keys);
  }
  return Planner(spec, args, mask != nullptr, q_tile, plan).run();
}

void put_heads_together(PlanData& data, int64_t group) {
  if (group == 1) return;
  std::vector<KeyRun> runs;
  std::vector<int64_t> first_run;
  std::vector<int32_t> edges;
  std::vector<std::span<const KeyRun>> heads;
  for (int64_t entry = 0; entry < data.num_batches * data.num_heads; ++entry) {
    for (int64_t tile = 0; tile < data.num_tiles(); ++tile) {
      first_run.push_back(static_cast<int64_t>(runs.size()));
      if (entry % group != 0) continue;
      heads.clear();
      for (int64_t h = 0; h < group; ++h) heads.push_back(data.tile_runs(entry + h, tile));
      append_union(heads, edges, runs);
    }
  }
  first_run.push_back(static_cast<int64_t>(runs.size()));
  data.runs = std::move(runs);
  data.first_run = std::move(first_run);
}

}  // namespace flexpte
