// The compiled form of an expression, private to the evaluator and the elementwise kernel.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/kernels/expression.h"
#include "runtime/kernels/expression_kernels.h"

namespace flexpte {

// Checks every node: arguments earlier, their number and types, indices of leaves. What ranges and
// tiles both rely on.
Status verify_expression(const Expression& expression, int num_inputs, int num_scalars,
                         std::span<const int> capture_ranks);

// The loop for an operation on arguments of type `arg` (kWhere: the type of the values); null when the
// operation is not defined for it.
LaneKernel find_step_kernel(const ExprNode& node, DType arg);

// Name as in payload.fbs.
std::string_view expr_op_name(ExprOp op);

// Nodes that the result depends on, by number.
std::vector<bool> reachable_nodes(const Expression& expression);

constexpr Extent join(Extent a, Extent b) {
  if (a == b || b == Extent::kUniform) return a;
  return a == Extent::kUniform ? b : Extent::kFull;
}

struct TileProgram::Impl {
  static constexpr int32_t kNoSlot = -1;
  static constexpr int kMaxInputs = 64;

  // One node that the result depends on. Values are numbered by step.
  struct Step {
    ExprOp op = ExprOp::kConstant;
    DType type = DType::kF32;
    Extent extent = Extent::kUniform;  // at most; inputs that do not vary make it smaller at run time
    LaneKernel kernel = nullptr;       // null: constants, leaves and loads
    std::array<int32_t, 3> args{};     // steps
    int32_t num_args = 0;
    int32_t index = 0;        // kInput, kScalar, kLoad
    int32_t first_index = 0;  // kLoad: its indices in index_args, as many as capture_rank
    int32_t capture_rank = 0;
    int32_t column_step = 0;                        // kLoad: see LaneLoad::step
    int32_t slot = kNoSlot;                         // where the value goes; kNoSlot: it is read where it lies
    alignas(8) std::array<std::byte, 8> literal{};  // kConstant
  };

  // Scratch that several values share one after the other.
  struct Slot {
    Extent extent = Extent::kUniform;
    int64_t element_size = 0;
    bool whole_tile = false;  // the result: all rows, where other values hold one band of rows
  };

  // Rows are evaluated in bands of about this many lanes, so that values stay in the first cache.
  static constexpr int64_t kBandLanes = 4096;

  std::vector<Step> steps;  // the last is the result
  std::vector<Slot> slots;
  std::vector<int32_t> index_args;  // steps
  int32_t max_capture_rank = 0;
  bool uses_score = false;
  bool uses_inputs = false;
  bool uses_indices = false;  // batch, head, q_idx or kv_idx
  bool is_costly = false;     // has functions that cost many cycles a lane

  // Columns of a row in memory: whole vectors, so that several rows can be run through as one.
  static constexpr int64_t row_stride(int64_t cols) { return cols <= 16 ? cols : (cols + 15) / 16 * 16; }
  static int64_t band_rows(int64_t rows, int64_t cols);

  int64_t slot_bytes(const Slot& slot, int64_t rows, int64_t cols, bool upper_bound) const;
  size_t workspace_bytes(int64_t max_rows, int64_t max_cols) const;

  // A kInput leaf of this tile; steps in elements, 0 where it does not vary.
  struct Input {
    const void* data = nullptr;
    DType dtype = DType::kF32;
    int64_t row_step = 0;
    int64_t col_step = 0;
  };
  struct Frame {
    int64_t batch = 0, head = 0, q_begin = 0, kv_begin = 0;
    const float* score = nullptr;
    int64_t score_stride = 0;
    std::span<const Input> inputs;
    std::span<const TensorView> captures;
    std::span<const int64_t> scalars;
    int64_t rows = 0, cols = 0;
    ActiveLanes active;
    // Where the result is to go if it is of extent kFull and computed by a loop; else null.
    void* destination = nullptr;
    int64_t destination_row_step = 0;
  };
  struct Value {
    LaneOperand operand;
    Extent extent = Extent::kUniform;
  };
  // Evaluates the result; clears *inside when an active lane loads outside a capture.
  Value run(const Frame& frame, std::span<std::byte> workspace, bool* inside) const;
};

}  // namespace flexpte
