// Metal's classes in the double.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "metal_delegate/gpu/queue.h"
#include "runtime/memory.h"
#include "tests/cpp/metal_double/objects.h"

namespace flexpte::metal_double {

// MTLSize.
struct Size {
  uint64_t width, height, depth;
};

// MTLCommandBufferError, as far as the double itself makes them.
inline constexpr int64_t kErrorInternal = 1;
inline constexpr int64_t kErrorPageFault = 3;

// Kernels of a library, compiled by the shim.
struct Kernels {
  std::mutex mutex;  // of the queue
  std::vector<std::string> functions;
  std::unique_ptr<gpu::Queue> queue;
};

struct Library final : Object {
  explicit Library(std::shared_ptr<Kernels> compiled);
  void dealloc() override { kernels.reset(); }
  std::shared_ptr<Kernels> kernels;
};

struct Function final : Object {
  Function(std::shared_ptr<Kernels> library, std::string function);
  void dealloc() override { kernels.reset(); }
  std::shared_ptr<Kernels> kernels;
  std::string name;
};

struct PipelineState final : Object {
  PipelineState(std::shared_ptr<Kernels> library, const gpu::Pipeline* shim_pipeline);
  void dealloc() override { kernels.reset(); }
  std::shared_ptr<Kernels> kernels;
  const gpu::Pipeline* pipeline;
};

struct Buffer final : Object {
  // Over `memory`, which is the caller's; over memory of its own where null.
  Buffer(std::byte* memory, size_t size);
  void dealloc() override;
  std::byte* contents;
  size_t size_bytes;
  bool is_wrapped;
  // The caller's memory was unmapped or replaced meanwhile: a GPU still sees the old pages.
  bool is_stale = false;
  ZeroPages owned;  // pages that nothing else is on
};

// What an encoder has bound, and a dispatch takes.
struct Binding {
  Buffer* buffer = nullptr;
  size_t offset_bytes = 0;
};

struct Dispatch {
  PipelineState* pipeline = nullptr;
  std::vector<std::byte> bytes;
  std::array<Binding, gpu::kMaxBuffers> bindings;
  gpu::Grid grid;
};

struct CommandBuffer final : Object {
  CommandBuffer();
  void dealloc() override;
  void commit();
  // The GPU works when it is waited for, which is as late as it may.
  void wait();
  void fail(int64_t code, std::string description);
  // An empty text when it went well.
  std::string run(const Dispatch& dispatch);

  enum State : uint64_t { kNotEnqueued = 0, kCommitted = 2, kCompleted = 4, kError = 5 };  // MTLCommandBufferStatus
  State state = kNotEnqueued;
  bool is_encoding = false;
  Ref<Error> error;
  std::vector<Ref<Object>> used;  // as with retained references
  std::vector<Dispatch> dispatches;
};

struct Queue final : Object {
  Queue();
};

struct Encoder final : Object {
  explicit Encoder(CommandBuffer& buffer);
  void dealloc() override;
  void end();
  bool is_usable(uint64_t index);

  Ref<CommandBuffer> command_buffer;
  bool is_ended = false;
  Dispatch next;
};

const ClassInfo& library_class();
const ClassInfo& function_class();
const ClassInfo& pipeline_class();
const ClassInfo& buffer_class();
const ClassInfo& command_buffer_class();
const ClassInfo& encoder_class();
const ClassInfo& queue_class();

// Marks `buffer` stale when its pages are unmapped or replaced.
void watch_pages(Buffer& buffer);
void unwatch_pages(Buffer& buffer);

}  // namespace flexpte::metal_double
