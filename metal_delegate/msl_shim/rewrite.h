// Metal kernel text as C++ that clang compiles against the shim's headers, line by line the same.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "runtime/status.h"

namespace flexpte::msl_host {

struct RewrittenKernels {
  std::string text;
  std::vector<std::string> functions;  // names of the kernels, in the order of the library's table
};

// Errors name the line: what is no valid MSL although C++ would take it (std::, double, a pointer without an
// address space, ...), and what the shim does not understand.
Result<RewrittenKernels> rewrite_kernels(std::string_view source);

}  // namespace flexpte::msl_host
