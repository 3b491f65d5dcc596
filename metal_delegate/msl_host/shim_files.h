// The shim's headers and runtime, which the compiler of kernels reads: part of this library as text.
#pragma once

#include <span>
#include <string_view>

namespace flexpte::msl_host {

struct ShimFile {
  std::string_view name;
  std::string_view text;
};
std::span<const ShimFile> shim_files();

}  // namespace flexpte::msl_host
