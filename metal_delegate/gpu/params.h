// The params structs of the Metal kernels, as the host sees them.
#pragma once

#include <cstdint>

namespace flexpte::gpu::params {
#include "metal_delegate/kernels/params.h"
}  // namespace flexpte::gpu::params
