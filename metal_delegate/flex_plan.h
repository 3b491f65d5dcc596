// Which keys every tile of queries visits, found from the mask itself and from block lists.
//
// The queries are cut into tiles; each tile has a sorted list of runs of keys, and a run says how its
// keys are masked. Nothing here grows with num_queries x num_keys unless the mask itself alternates.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "metal_delegate/flex_attention.h"
#include "metal_delegate/ranges.h"
#include "runtime/status.h"

namespace flexpte {

enum class RunKind : uint8_t {
  kFull,    // every row sees every key
  kBounds,  // row q sees the keys in [row_begin[q], row_end[q])
  kMask,    // the mask expression decides, element by element
};

// Keys begin <= kv < end.
struct KeyRun {
  int32_t begin;
  int32_t end;
  RunKind kind;
};

// The largest tile of queries, and the tile of keys at which the mask is classified.
inline constexpr int64_t kFlexQueryTile = 64;
inline constexpr int64_t kFlexKeyTile = 64;
// At most so many queries are decoded: they are one tile, and rows of all heads of a group share
// what is read of the cache.
inline constexpr int64_t kFlexMaxDecodeQueries = 8;

struct PlanData {
  int64_t num_batches = 0;  // 1 when all batches visit the same keys
  int64_t num_heads = 0;    // 1 when all heads visit the same keys
  int64_t num_queries = 0;
  int64_t num_keys = 0;
  std::vector<int32_t> tile_begin;  // first query of each tile, then num_queries
  std::vector<int64_t> first_run;   // [num_batches, num_heads, num_tiles] and one more
  std::vector<KeyRun> runs;
  std::vector<int32_t> row_begin;  // [num_batches, num_heads, num_queries]; where a run is kBounds
  std::vector<int32_t> row_end;
  FlexPlan::Counts counts;

  // Kept for their memory.
  BoundMask bound_mask;
  std::vector<KeyRun> segments;

  int64_t num_tiles() const { return static_cast<int64_t>(tile_begin.size()) - 1; }
  int64_t entry(int64_t batch, int64_t head) const {
    return (num_batches == 1 ? 0 : batch) * num_heads + (num_heads == 1 ? 0 : head);
  }
  std::span<const KeyRun> tile_runs(int64_t entry, int64_t tile) const {
    const auto first = static_cast<size_t>(entry * num_tiles() + tile);
    return std::span(runs).subspan(static_cast<size_t>(first_run[first]),
                                   static_cast<size_t>(first_run[first + 1] - first_run[first]));
  }
};

// Whether block lists differ by head.
bool lists_depend_on_head(const FlexAttentionSpec& spec, const FlexAttentionArgs& args);
// Whether heads may visit different keys: the mask or the block lists differ by head.
bool plan_depends_on_head(const FlexAttentionSpec& spec, const FlexAttentionArgs& args, const MaskRanges* mask);

// Fills `plan`, with tiles of at most `q_tile` queries. Shapes of `args` are valid; the contents of block lists
// are checked here.
Status build_plan(const FlexAttentionSpec& spec, const FlexAttentionArgs& args, const MaskRanges* mask, PlanData& plan,
                  int64_t q_tile = kFlexQueryTile);

// For kernels where groups of `group` neighbouring heads share a threadgroup, which reads the plan of its first head:
// that becomes what any of the group visits, full where all see all, and the others' become empty.
void put_heads_together(PlanData& plan, int64_t group);

}  // namespace flexpte
