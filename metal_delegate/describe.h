// A program for people to read.
#pragma once

#include <string>
#include <string_view>

#include "metal_delegate/program.h"

namespace flexpte::bound {

// One JSON object: format version, exporter, device, instructions by kind, bytes of constants and arena,
// states, attentions.
std::string describe_program(const BoundProgram& program, std::string_view device);

}  // namespace flexpte::bound
