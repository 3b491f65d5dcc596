// FlexAttention as dispatches: the plan in device memory, then prefill or decode, then a merge where the keys
// are split.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "metal_delegate/flex_plan.h"
#include "metal_delegate/gpu/encode_ops.h"
#include "metal_delegate/gpu/encoder.h"
#include "metal_delegate/program.h"
#include "metal_delegate/ranges.h"
#include "runtime/status.h"

namespace flexpte::gpu {

// The masks of a program's attentions, ready for planning. Immutable.
class FlexPlanners {
 public:
  static Result<FlexPlanners> create(const bound::BoundProgram& program);
  // Of an instruction; null: no mask.
  const MaskRanges* mask(size_t instruction) const { return masks_[instruction].get(); }

 private:
  std::vector<std::shared_ptr<const MaskRanges>> masks_;  // by instruction
};

// A plan that kernels can read.
struct DevicePlan {
  BufferArgument tile_begin, first_run, runs, row_bounds;
  int32_t num_tiles = 0;
  int32_t num_batches = 1;
  int32_t num_heads = 1;
  int64_t most_keys = 0;  // that one tile visits
};

// Plans of the current step: made once for all instructions that share one. One per session.
class FlexPlans {
 public:
  explicit FlexPlans(const FlexPlanners& planners) : planners_(planners) {}
  void begin_step() { plans_.clear(); }

  const FlexPlanners& planners() const { return planners_; }
  // For tiles of at most `q_tile` queries; `heads` of a KV group visit keys together. Captures that the mask reads
  // are computed.
  Result<const DevicePlan*> plan(Encoder& encoder, size_t instruction, int32_t plan_number, int64_t q_tile,
                                 int64_t heads, const FlexAttentionSpec& spec, const FlexAttentionArgs& args);

 private:
  const FlexPlanners& planners_;
  PlanData data_;
  std::map<std::tuple<int32_t, int64_t, int64_t>, DevicePlan> plans_;  // by plan number, tile and heads
};

Status encode_flex_attention(Encoder& encoder, FlexPlans& plans, const Call& call);

}  // namespace flexpte::gpu
