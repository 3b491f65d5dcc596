// Devices that run a payload's Metal kernels: one dispatch or two an instruction, one command buffer a step.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "metal_delegate/device.h"
#include "metal_delegate/gpu/queue.h"

namespace flexpte::bound {

// Makes a library of a payload's kernels: compiles its text.
using MakeLibrary = std::function<Result<std::shared_ptr<gpu::Library>>(std::string_view metal_text)>;

// `name` is what users select the device by: "msl-host", "metal".
std::unique_ptr<Device> make_gpu_device(std::string name, MakeLibrary make_library);

}  // namespace flexpte::bound
