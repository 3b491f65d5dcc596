// One dispatch an instruction, for all kinds but FlexAttention.
#pragma once

#include <cstdint>
#include <span>

#include "metal_delegate/gpu/encoder.h"
#include "metal_delegate/program.h"
#include "runtime/status.h"
#include "runtime/tensor.h"

namespace flexpte::gpu {

// An instruction of this call. `operands` are resolved, none of what it writes is empty; `scalars` are those of
// its expression; `number` is its number in the program.
struct Call {
  const bound::Instruction& instruction;
  size_t number;
  Pipelines pipelines;
  std::span<const TensorView> operands;
  std::span<const int64_t> scalars;
  int64_t arange_start = 0;
  int64_t arange_step = 1;
};

Status encode_instruction(Encoder& encoder, const Call& call);

// Captures as kernels index them: a CaptureView each.
Result<BufferArgument> encode_views(Encoder& encoder, std::span<const TensorView> captures);
// The scalars of a mod or elementwise expression.
Result<BufferArgument> encode_scalars(Encoder& encoder, std::span<const int64_t> scalars);

}  // namespace flexpte::gpu
