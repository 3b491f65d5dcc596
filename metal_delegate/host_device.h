// The host device: the C++ kernels of the runtime, on this machine's cores.
#pragma once

#include <memory>

#include "metal_delegate/device.h"
#include "runtime/thread_pool.h"

namespace flexpte::bound {

// With the environment variable FLEXPTE_PROFILE=1 each instance prints, when it ends, where its time went.
std::unique_ptr<Device> make_host_device(std::shared_ptr<const ThreadPool> pool);

}  // namespace flexpte::bound
