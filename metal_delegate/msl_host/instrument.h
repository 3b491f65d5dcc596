// LLVM IR of kernels with a check before every access to device, constant and threadgroup memory, and counters
// in every basic block.
#pragma once

#include <string>
#include <string_view>

#include "runtime/status.h"

namespace flexpte::msl_host {

// `ir` is what clang writes with -S -emit-llvm -gline-tables-only for a file named `file`. Without
// `is_checked` only the places of barriers and simdgroup operations are noted, for messages.
Result<std::string> instrument_ir(std::string_view ir, std::string_view file, bool is_checked);

}  // namespace flexpte::msl_host
