// The device "metal": kernels compiled by Metal and run by the GPU of a Mac, an iPhone or an iPad.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "metal_delegate/gpu/queue.h"
#include "runtime/status.h"

namespace flexpte::metal {

struct Options {
  // A library that was compiled ahead of time, to load in place of compiling the text.
  std::string metallib_path = {};
  // Lets the compiler assume that there are no infinities and NaNs. Off: masked scores are -inf.
  bool is_fast_math = false;
};

// A library for the default GPU. kUnsupported: there is none, or it is too old; kInvalidProgram: the text does not
// compile, with the compiler's message; kIo: the metallib does not load.
Result<std::shared_ptr<gpu::Library>> make_metal_library(std::string_view source, const Options& options = {});

}  // namespace flexpte::metal
