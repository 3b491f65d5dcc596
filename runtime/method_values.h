// Reading the values of an execution plan and placing them in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/pte_file.h"
#include "runtime/status.h"
#include "runtime/value.h"

namespace executorch_flatbuffer {
struct ExecutionPlan;
}

namespace flexpte {

struct PlannedState;

constexpr DimOrder identity_dim_order() {
  return {0, 1, 2, 3, 4, 5, 6, 7};
}

// Values with everything verified that does not depend on instructions: kinds, dtypes, sizes, dimension
// orders, list items, constants' bytes and planned ranges. Arenas by memory id.
Status read_values(const PteFile& file, const executorch_flatbuffer::ExecutionPlan& plan,
                   std::vector<ValueInfo>& values, std::vector<size_t>& arena_sizes_bytes);

// Moves named mutable buffers, and what views them, out of the arenas: methods share them by name.
Status place_states(std::vector<ValueInfo>& values, std::span<const int32_t> inputs, std::vector<PlannedState>& states);

// Tensors that the file gives no memory get a further arena.
Status give_room(std::vector<ValueInfo>& values, std::vector<size_t>& arena_sizes_bytes);

}  // namespace flexpte
