// The device "msl-host": Metal kernel text compiled by clang against the shim's metal_stdlib and executed on this
// machine, one threadgroup at a time, every access checked and counted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "metal_delegate/gpu/queue.h"
#include "runtime/status.h"

namespace flexpte::msl_host {

struct Options {
  bool is_checked = true;    // faults and counters; without, kernels just run
  bool is_reversed = false;  // threadgroups run last to first
  // Values of [[function_constant(n)]] by n, as MSL text: "true", "64".
  std::map<uint32_t, std::string> constants = {};

  // Unchecked where the environment variable FLEXPTE_MSL_CHECKS is 0.
  static Options from_environment();
};

// Of all dispatches of one kernel. Flops: an addition, multiplication, division, minimum, maximum or function is
// one, a fused multiply-add two, matrix products apart. idle(): the share of instruction slots in which a thread
// waits for the busiest one of its threadgroup.
struct KernelCounters {
  struct Buffer {
    uint64_t read_bytes = 0, written_bytes = 0;
    uint64_t unique_bytes = 0;  // touched at all, of each dispatch
  };
  uint64_t dispatches = 0, threadgroups = 0, threads = 0;
  uint64_t constant_read_bytes = 0, threadgroup_read_bytes = 0, threadgroup_written_bytes = 0;
  uint64_t threadgroup_bytes = 0;  // that a threadgroup of the kernel has
  uint64_t barriers = 0, simdgroup_barriers = 0, simdgroup_operations = 0, matrix_multiplies = 0, flops = 0;
  uint64_t instructions = 0, instruction_slots = 0;
  std::map<std::string, Buffer> buffers;  // device memory, by the name of the argument

  double idle() const {
    return instruction_slots == 0 ? 0.0
                                  : 1.0 - static_cast<double>(instructions) / static_cast<double>(instruction_slots);
  }
};

// By kernel name.
using Counters = std::map<std::string, KernelCounters, std::less<>>;

// dispatch() runs the kernel at once; its fault is reported by dispatch() and again by finish().
class Queue : public gpu::Queue {
 public:
  // Sizes of the kernel's [[threadgroup(n)]] arguments, for the dispatches that follow.
  virtual void set_threadgroup_arguments(std::vector<size_t> sizes_bytes) = 0;
  virtual const Counters& kernel_counters() const = 0;
  virtual void reset_counters() = 0;
};

class Library : public gpu::Library {
 public:
  virtual const std::vector<std::string>& functions() const = 0;
  virtual std::unique_ptr<Queue> make_msl_queue() const = 0;
};

// Compiles, or takes from the cache ($XDG_CACHE_HOME/flexpte/msl-host, else ~/.cache/flexpte/msl-host).
// The compiler is $FLEXPTE_CLANG, else clang++-19 or a later one, else clang++. kInvalidProgram: the text does
// not compile, with the compiler's first error; kUnsupported: there is no compiler.
Result<std::shared_ptr<Library>> compile_library(std::string_view source, Options options);

}  // namespace flexpte::msl_host
