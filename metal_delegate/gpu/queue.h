// What runs Metal kernels: a Mac's GPU, or the shim that executes the same text on this machine.
//
// All memory is the host's own (unified memory): a queue is told once which regions its kernels may touch,
// and arguments of dispatches are plain addresses inside them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "runtime/status.h"

namespace flexpte::gpu {

// The number of buffers that a kernel can have, buffer(0), which holds the params struct, included.
inline constexpr size_t kMaxBuffers = 31;
// The largest params struct: what Metal copies into a command buffer.
inline constexpr size_t kMaxParamsBytes = 4096;

enum class Access : uint8_t { kRead, kReadWrite };

// Argument buffer(1 + i) of a kernel: the kernel's pointer is `data`, and it may touch size_bytes from there.
// A null `data` is a buffer that the kernel does not touch (an absent optional operand).
struct BufferArgument {
  const std::byte* data = nullptr;
  size_t size_bytes = 0;
  Access access = Access::kRead;
  std::string_view name;  // for reports and counters, of static storage: "key", "weight"
};

struct Grid {
  std::array<uint32_t, 3> threadgroups = {1, 1, 1};
  std::array<uint32_t, 3> threads = {1, 1, 1};  // of one threadgroup
};

// A kernel, compiled. Owned by its queue.
class Pipeline {
 public:
  virtual ~Pipeline() = default;
  virtual std::string_view name() const = 0;
  virtual uint32_t max_threads_per_threadgroup() const = 0;
};

// Not safe to use from two threads at once. One queue serves one session.
class Queue {
 public:
  virtual ~Queue() = default;

  // Cores of the GPU (an estimate where it does not say); heuristics spread work over them.
  virtual uint32_t num_cores() const = 0;

  // kUnsupported or kInvalidProgram with the compiler's message when the function does not exist.
  virtual Result<const Pipeline*> pipeline(std::string_view function) = 0;

  // Kernels may touch [data, data + size_bytes) until unmap(data). Regions do not overlap.
  virtual Status map(const std::byte* data, size_t size_bytes, Access access) = 0;
  virtual void unmap(const std::byte* data) = 0;

  // Adds one dispatch to the current command buffer. Dispatches take effect in order: one sees all that
  // those before it wrote. `params` (at most kMaxParamsBytes) are copied; they are buffer(0).
  virtual Status dispatch(const Pipeline& pipeline, std::span<const std::byte> params,
                          std::span<const BufferArgument> buffers, const Grid& grid) = 0;

  // Runs everything dispatched so far to its end; afterwards the host may read what was written.
  // After an error the command buffer is gone and a new one begins.
  virtual Status finish() = 0;

  // What was counted since the queue was made: one JSON object, or empty where nothing is counted.
  virtual std::string counters() const { return {}; }
};

// A library of kernels ready to make queues for: shared by the sessions of a program.
class Library {
 public:
  virtual ~Library() = default;
  virtual Result<std::unique_ptr<Queue>> make_queue() const = 0;
};

}  // namespace flexpte::gpu
