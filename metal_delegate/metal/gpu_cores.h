// How many cores a GPU has, by the name that Metal gives it.
#pragma once

#include <cstdint>
#include <string_view>

namespace flexpte::metal {

// "Apple M3 Max" has up to 40. Chips are sold with some cores switched off, so this is the most they have; 8 for
// names that are not known.
uint32_t num_gpu_cores(std::string_view device_name);

}  // namespace flexpte::metal
