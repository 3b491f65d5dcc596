// Decoding of the expressions and instructions of a payload; see payload.h.
#pragma once

#include "metal_delegate/program.h"
#include "payload_generated.h"
#include "runtime/status.h"

namespace flexpte::bound {

// Fills expressions and instructions; the other tables of `program` are complete. Checks every index,
// compiles every expression that is used, and checks operands as far as sizes are known.
Status decode_instructions(const payload::Payload& payload, BoundProgram& program);

}  // namespace flexpte::bound
