// Runs clang on kernel text; results are cached by content.
#pragma once

#include <string>
#include <string_view>

#include "metal_delegate/msl_host/msl_library.h"
#include "runtime/status.h"

namespace flexpte::msl_host {

// The path of a shared library with the kernels of `source` and the shim's runtime.
Result<std::string> build_library(std::string_view source, const Options& options);

}  // namespace flexpte::msl_host
