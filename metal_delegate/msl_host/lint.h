// What C++ accepts and the Metal Shading Language does not.
#pragma once

#include <set>
#include <string>
#include <string_view>

#include "metal_delegate/msl_host/tokens.h"
#include "runtime/status.h"

namespace flexpte::msl_host {

Status kernel_text_error(int line, const std::string& what);

// Names of types that the text declares: structs, aliases, type parameters of templates.
std::set<std::string, std::less<>> declared_types(const Tokens& tokens);

// Of text whose attributes [[...]] are already removed.
Status lint_tokens(const Tokens& tokens);

// Of text as it is, without macros expanded.
Status lint_kernel_text(std::string_view source);

}  // namespace flexpte::msl_host
