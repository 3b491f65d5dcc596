// Metal kernel text as C++ that clang compiles against the shim's headers; lines stay what they are.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "runtime/status.h"

namespace flexpte::msl_host {

// `text` is preprocessed. `constants` are the values of function constants by number. Errors name the line: what is
// no valid MSL although C++ would take it (lint.h), and what the shim does not understand.
Result<std::string> rewrite_kernels(std::string_view text, const std::map<uint32_t, std::string>& constants);

}  // namespace flexpte::msl_host
