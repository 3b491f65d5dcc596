// From the bytes of a payload to a bound program: decoding and all verification that later steps rely
// on. Any bytes may be given; what is wrong with them comes back as one message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "metal_delegate/program.h"
#include "runtime/delegate.h"
#include "runtime/status.h"

namespace flexpte::bound {

// Constants are found in `data`, whose bytes the program then refers to. A constant whose bytes are not
// even 16-byte aligned is copied. A payload of a newer format version is Unsupported.
Result<std::unique_ptr<BoundProgram>> decode_payload(std::span<const std::byte> bytes, const NamedData& data);

}  // namespace flexpte::bound
