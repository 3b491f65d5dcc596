// The loops behind expression programs: one function per operation and type, over a tile of lanes.
#pragma once

#include <cstdint>
#include <span>

#include "runtime/kernels/expression.h"
#include "runtime/tensor.h"

namespace flexpte {

// One argument of a loop. Element (r, c) is data[r * row_step + c * col_step]; col_step is 0 or 1.
struct LaneOperand {
  const void* data = nullptr;
  int64_t row_step = 0;
  int64_t col_step = 0;
};

// out[r, c] = op(args...[r, c]), out's columns contiguous. `out` may be exactly an argument.
using LaneKernel = void (*)(const LaneOperand* args, void* out, int64_t out_row_step, int64_t rows, int64_t cols);

// The loop for `op` on arguments of type `arg` giving `result`, for the fastest instructions that this
// machine has; null when there is none for these types. kWhere: `arg` is the type of the values.
LaneKernel find_lane_kernel(ExprOp op, DType arg, DType result, DType round_to);

// The parts of it.
LaneKernel find_arithmetic_kernel(ExprOp op, DType type);             // result has the arguments' type
LaneKernel find_logic_kernel(ExprOp op, DType arg);                   // result is Bool
LaneKernel find_math_kernel(ExprOp op);                               // F32
LaneKernel find_where_kernel(DType type);
LaneKernel find_cast_kernel(DType from, DType to);
LaneKernel find_round_kernel(DType type, DType round_to);

// out[i] = source[i * stride] for i < n, converted.
void convert_lanes(const void* source, DType from, int64_t stride, void* out, DType to, int64_t out_stride, int64_t n);

// Reads capture[indices...] at rows x cols lanes (payload.fbs: Load). All indices have type `index_type`
// (I32 or I64). Returns whether every lane that `active` marks was inside the capture.
struct LoadArgs {
  const TensorView* capture = nullptr;
  std::span<const LaneOperand> indices;
  std::span<const DType> index_types;
  DType type = DType::kF32;
  // For each row the last index grows by one per column and no other index depends on the column.
  bool unit_step = false;
  const uint8_t* active = nullptr;  // lane (r, c) at r * active_row_step + c * active_col_step
};
bool load_lanes(const LoadArgs& load, void* out, int64_t out_row_step, int64_t rows, int64_t cols);

}  // namespace flexpte
