// What the prefill and the decode kernel are given, and the pieces they share.
#pragma once

#include <atomic>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <span>

#include "metal_delegate/flex_attention.h"
#include "metal_delegate/flex_plan.h"
#include "runtime/kernels/amx.h"
#include "runtime/kernels/expression.h"
#include "runtime/thread_pool.h"

namespace flexpte {

struct FlexShape {
  int64_t batch, num_heads, num_kv_heads, num_queries, num_keys, key_dim, value_dim;
  DType dtype;

  explicit FlexShape(const FlexAttentionArgs& args)
      : batch(args.query.size(0)),
        num_heads(args.query.size(1)),
        num_kv_heads(args.key.size(1)),
        num_queries(args.query.size(2)),
        num_keys(args.key.size(2)),
        key_dim(args.query.size(3)),
        value_dim(args.value.size(3)),
        dtype(args.query.dtype) {}
  int64_t group() const { return num_kv_heads == 0 ? 1 : num_heads / num_kv_heads; }
  // Whether prefill multiplies with tile registers.
  bool uses_amx() const { return dtype == DType::kBF16 && amx::is_available(); }
  // Rows of outputs that products write.
  int64_t padded_value_dim() const { return uses_amx() ? amx::round_up(value_dim, amx::kRows) : value_dim; }
};

// Keys that a kernel takes at a time.
inline constexpr int64_t kFlexKeyChunk = 128;

// The mods of an attention in the orientation of a kernel's score tile: one lane per (row, column).
struct FlexMods {
  const TileProgram* score = nullptr;  // null: none
  const TileProgram* mask = nullptr;
  bool score_loads = false;  // the score expression reads captures
};

struct FlexCall {
  FlexShape shape;
  float scale;
  const FlexAttentionArgs& args;
  const PlanData& plan;
  FlexMods mods;
  const ThreadPool& pool;
  std::span<std::byte> workspace;  // 64-byte aligned
  std::atomic<bool>* score_out_of_bounds;
  std::atomic<bool>* mask_out_of_bounds;
};

size_t flex_prefill_workspace_bytes(const FlexShape& shape, const FlexMods& mods, int num_threads);
void flex_prefill(const FlexCall& call);
size_t flex_decode_workspace_bytes(const FlexShape& shape, const FlexMods& mods, int num_threads);
void flex_decode(const FlexCall& call);

// Hands out 64-byte aligned pieces of a workspace; over no memory it measures.
class WorkspaceCarver {
 public:
  WorkspaceCarver() = default;
  explicit WorkspaceCarver(std::span<std::byte> memory) : memory_(memory) {}

  template <class T>
  T* take(int64_t count) {
    const size_t offset = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    if (memory_.data() == nullptr) return nullptr;
    assert(used_ <= memory_.size());
    return reinterpret_cast<T*>(memory_.data() + offset);
  }
  size_t used_bytes() const { return used_; }

 private:
  std::span<std::byte> memory_;
  size_t used_ = 0;
};

// Bytes that FlexTileMods needs for tiles of at most rows x cols.
size_t flex_mods_workspace_bytes(const FlexMods& mods, int64_t rows, int64_t cols);

// Evaluates the mods over tiles.
class FlexTileMods {
 public:
  FlexTileMods(const FlexCall& call, std::span<std::byte> workspace) : call_(call), workspace_(workspace) {}

  // What a tile covers: `row_index` is the first index along the rows, `col_index` along the columns.
  struct Tile {
    int64_t batch, head, row_index, col_index, rows, cols;
  };

  // visible[r * stride + c] = 1 where the mask is true, 0 elsewhere.
  void mask(const Tile& tile, uint8_t* visible, int64_t stride) const;
  // score = expression(score), in place. `visible` may be null: all lanes are.
  void score(const Tile& tile, float* score, int64_t stride, const uint8_t* visible, int64_t visible_stride) const;

 private:
  const FlexCall& call_;
  std::span<std::byte> workspace_;
};

}  // namespace flexpte
