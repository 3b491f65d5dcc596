// What each kind of instruction demands of its operands.
#pragma once

#include <span>

#include "metal_delegate/program.h"
#include "runtime/status.h"
#include "runtime/tensor.h"

namespace flexpte::bound {

// Checks dtypes, ranks, sizes and strides. Sizes and strides may still be symbolic (when a program is
// loaded): what depends on them then passes, and is checked when the sizes are known. A message does
// not name the instruction.
Status check_operands(const Instruction& instruction, std::span<const TensorView> operands);

// Whether the dimensions [begin, end) of `view` can be walked with one stride (the innermost one's).
bool dims_collapse(const TensorView& view, int32_t begin, int32_t end);

}  // namespace flexpte::bound
