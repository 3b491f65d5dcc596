// FlexAttention on the host: plan (which key tiles each query tile visits, found from the mask
// itself) and the prefill and decode kernels with online softmax.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "runtime/kernels/expression.h"
#include "runtime/status.h"
#include "runtime/tensor.h"
#include "runtime/thread_pool.h"

namespace flexpte {

// What is fixed when the program is bound.
struct FlexAttentionSpec {
  float scale = 1.0f;
  const Expression* score = nullptr;  // null: none; outlives the FlexAttention
  const Expression* mask = nullptr;
  int num_score_captures = 0;
  int num_mask_captures = 0;
  int num_score_scalars = 0;
  int num_mask_scalars = 0;
  bool has_block_lists = false;  // kv_num_blocks and kv_indices (partial), full_* optional
  int64_t q_block_size = 0;
  int64_t kv_block_size = 0;
};

// One call. Shapes as in payload.fbs: FlexAttention; any strides with contiguous last dimension for
// query, key and value (the last stride of out is 1).
struct FlexAttentionArgs {
  TensorView query, key, value, out;
  TensorView lse;  // data null: not wanted
  std::span<const TensorView> score_captures, mask_captures;
  std::span<const int64_t> score_scalars, mask_scalars;
  TensorView kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices;  // data null: none
};

// The key tiles that one mask makes each query tile visit. Calls with the same mask, captures,
// scalars and lengths (all layers of a decoder, usually) share one plan.
class FlexPlan;

class FlexAttention {
 public:
  static Result<std::unique_ptr<FlexAttention>> create(const FlexAttentionSpec& spec,
                                                       std::span<const int> score_capture_ranks,
                                                       std::span<const int> mask_capture_ranks);
  ~FlexAttention();

  // Fills `plan` for these arguments (captures are read; query, key and value are not).
  // Planning is O(tiles visited); memory is reused between calls.
  Status plan(const FlexAttentionArgs& args, FlexPlan& plan, const ThreadPool& pool) const;
  size_t workspace_bytes(const FlexAttentionArgs& upper_bounds, int num_threads) const;
  Status run(const FlexAttentionArgs& args, const FlexPlan& plan, const ThreadPool& pool,
             std::span<std::byte> workspace) const;

 private:
  FlexAttention();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Owned by whoever binds the program; opaque but for what reports need.
class FlexPlan {
 public:
  FlexPlan();
  ~FlexPlan();
  FlexPlan(FlexPlan&&) noexcept;
  FlexPlan& operator=(FlexPlan&&) noexcept;

  struct Counts {
    int64_t tiles_empty = 0, tiles_full = 0, tiles_partial = 0;
    int64_t q_tile = 0, kv_tile = 0;
  };
  Counts counts() const;

 private:
  friend class FlexAttention;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flexpte
