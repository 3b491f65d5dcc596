// Checks of the order of a program's reads and writes, and what follows from that order.
#pragma once

#include "metal_delegate/program.h"
#include "runtime/status.h"

namespace flexpte::bound {

// Nothing is read before it is written, nor after its arena bytes went to something else; only outputs,
// arena values and states are written, states only by IndexCopy and Elementwise. Numbers the plans of
// the attentions (two that see the same keys share one) and finds the first write to a state.
Status check_dataflow(BoundProgram& program);

}  // namespace flexpte::bound
