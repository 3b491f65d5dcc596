// What Metal reports, as Status.
#pragma once

#include <string>
#include <string_view>

#include "metal_delegate/metal/metal_cpp.h"
#include "runtime/status.h"

namespace flexpte::metal {

// Empty for null.
std::string text_of(const NS::String* string);
// What an error says of itself; `otherwise` when there is none.
std::string describe(const NS::Error* error, std::string_view otherwise);

// Of a command buffer that has ended.
Status command_buffer_status(const MTL::CommandBuffer& command_buffer, size_t num_dispatches);

}  // namespace flexpte::metal
