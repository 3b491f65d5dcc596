// What C++ accepts and the Metal Shading Language does not.
#pragma once

#include <string>
#include <string_view>

#include "runtime/status.h"

namespace flexpte::msl_host {

// The text with comments and string literals blanked; lines and columns stay.
std::string without_comments(std::string_view source);

int line_at(std::string_view text, size_t offset);

// `code` is without comments.
Status lint_kernels(std::string_view code);

}  // namespace flexpte::msl_host
