// The delegate: payloads in, instances that run on a device out.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/delegate.h"
#include "runtime/thread_pool.h"

namespace flexpte {

struct DelegateOptions {
  std::string device = "host";
  std::shared_ptr<const ThreadPool> pool;  // null: one of its own, with the default number of threads
};

// Named "FlexpteBackend", as in .pte files. An unknown device is an error of load().
std::unique_ptr<Delegate> make_metal_delegate(DelegateOptions options);

// The names of the devices that this build has.
std::vector<std::string> available_devices();

}  // namespace flexpte
