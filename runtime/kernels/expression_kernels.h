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

// The fastest loops that this machine has; null when there is none for these types.
LaneKernel find_arithmetic_kernel(ExprOp op, DType type);  // result has the arguments' type
LaneKernel find_logic_kernel(ExprOp op, DType arg);        // result is Bool
LaneKernel find_math_kernel(ExprOp op);                    // F32
LaneKernel find_where_kernel(DType type);                  // of the values
LaneKernel find_cast_kernel(DType from, DType to);
LaneKernel find_round_kernel(DType type, DType round_to);

// out[i * out_stride] = source[i * stride] for i < n, converted. One of the types is Bool, I32, I64 or F32.
void convert_lanes(const void* source, DType from, int64_t stride, void* out, DType to, int64_t out_stride, int64_t n);

// The lanes of a tile that a caller cares for: all when `data` is null.
struct ActiveLanes {
  const uint8_t* data = nullptr;
  int64_t stride = 0;
  int64_t rows = 0;
  int64_t cols = 0;

  // Whether any lane of the tile that shares the value (r, c) of a node with this extent is active.
  bool any(Extent extent, int64_t r, int64_t c) const;
};

// Reads capture[indices...] at rows x cols lanes (payload.fbs: Load): negative indices wrap, what is
// still outside reads as 0 and, at an active lane, clears the result.
struct LaneLoad {
  const TensorView* capture = nullptr;
  const LaneOperand* indices = nullptr;  // one per dimension of the capture
  const DType* index_types = nullptr;    // kI32 or kI64
  DType type = DType::kF32;              // of `out`
  // 1 or -1: the last index changes by this from column to column (unless it overflows) and the other
  // indices do not; 0: nothing is known.
  int step = 0;
};
bool load_lanes(const LaneLoad& load, void* out, int64_t out_row_step, Extent extent, int64_t rows, int64_t cols,
                const ActiveLanes& active);

}  // namespace flexpte
