// Command queues, command buffers and encoders of the double.
#include <algorithm>
#include <cstring>

#include "tests/cpp/metal_double/metal.h"
#include "tests/cpp/metal_double/metal_double.h"

namespace flexpte::metal_double {
namespace {

constexpr std::array<std::string_view, gpu::kMaxBuffers> kArgumentNames = {
    "buffer0",  "buffer1",  "buffer2",  "buffer3",  "buffer4",  "buffer5",  "buffer6",  "buffer7",
    "buffer8",  "buffer9",  "buffer10", "buffer11", "buffer12", "buffer13", "buffer14", "buffer15",
    "buffer16", "buffer17", "buffer18", "buffer19", "buffer20", "buffer21", "buffer22", "buffer23",
    "buffer24", "buffer25", "buffer26", "buffer27", "buffer28", "buffer29", "buffer30"};

std::array<uint32_t, 3> sizes_of(const Size& size) {
  return {static_cast<uint32_t>(size.width), static_cast<uint32_t>(size.height), static_cast<uint32_t>(size.depth)};
}

// One buffer over the memory of another: Metal would not know that they are the same.
bool overlap(const Buffer& a, const Buffer& b) {
  return &a != &b && a.contents < b.contents + b.size_bytes && b.contents < a.contents + a.size_bytes;
}

}  // namespace

Queue::Queue() : Object(queue_class()) {}

CommandBuffer::CommandBuffer() : Object(command_buffer_class()) {}

void CommandBuffer::dealloc() {
  if (is_encoding) violation("a command buffer was released with an encoder that has not ended");
  if (state == kCommitted) violation("a command buffer was committed and not waited for");
  dispatches.clear();
  used.clear();
  error.reset();
}

void CommandBuffer::fail(int64_t code, std::string description) {
  state = kError;
  error = Ref<Error>::adopt(new Error(code, std::move(description)));
}

void CommandBuffer::commit() {
  if (state != kNotEnqueued) return violation("a command buffer was committed twice");
  if (is_encoding) violation("a command buffer was committed with an encoder that has not ended");
  count(&Record::num_command_buffers);
  state = kCommitted;
}

void CommandBuffer::wait() {
  if (state == kNotEnqueued) return violation("a command buffer was waited for and never committed");
  if (state != kCommitted) return;
  if (const int64_t code = take_command_buffer_error(); code != 0) return fail(code, "as the test wants");
  state = kCompleted;
  for (const Dispatch& dispatch : dispatches) {
    for (const Binding& binding : dispatch.bindings) {
      if (binding.buffer != nullptr && binding.buffer->is_stale) {
        return fail(kErrorPageFault, "memory was unmapped or replaced while a buffer wrapped it");
      }
    }
    if (std::string text = run(dispatch); !text.empty()) return fail(kErrorInternal, std::move(text));
  }
  if (std::string text = take_violation(); !text.empty()) fail(kErrorInternal, std::move(text));
}

std::string CommandBuffer::run(const Dispatch& dispatch) {
  record_kernel(dispatch.pipeline->pipeline->name());
  size_t num_buffers = 0;
  for (size_t i = 1; i < dispatch.bindings.size(); ++i) {
    if (dispatch.bindings[i].buffer != nullptr) num_buffers = i;
  }
  std::vector<gpu::BufferArgument> arguments(num_buffers);
  for (size_t i = 0; i < num_buffers; ++i) {
    const Binding& binding = dispatch.bindings[i + 1];
    if (binding.buffer == nullptr) continue;
    for (size_t k = 1; k <= i; ++k) {
      const Buffer* other = dispatch.bindings[k].buffer;
      if (other != nullptr && overlap(*binding.buffer, *other)) violation("two buffers of a dispatch share memory");
    }
    // A kernel may touch all of a Metal buffer.
    arguments[i] = {binding.buffer->contents + binding.offset_bytes, binding.buffer->size_bytes - binding.offset_bytes,
                    gpu::Access::kReadWrite, kArgumentNames[i + 1]};
  }
  Kernels& kernels = *dispatch.pipeline->kernels;
  const std::lock_guard lock(kernels.mutex);
  const Status status = kernels.queue->dispatch(*dispatch.pipeline->pipeline, dispatch.bytes, arguments, dispatch.grid);
  const Status finished = kernels.queue->finish();
  return status.is_ok() ? finished.message() : status.message();
}

Encoder::Encoder(CommandBuffer& buffer) : Object(encoder_class()), command_buffer(Ref<CommandBuffer>::retain(&buffer)) {
  buffer.is_encoding = true;
}

void Encoder::dealloc() {
  if (!is_ended) violation("an encoder was released before it ended");
  command_buffer.reset();
}

void Encoder::end() {
  if (is_ended) violation("an encoder ended twice");
  is_ended = true;
  command_buffer->is_encoding = false;
}

bool Encoder::is_usable(uint64_t index) {
  if (is_ended) violation("an encoder was used after it ended");
  if (index >= gpu::kMaxBuffers) violation("a buffer index past 30");
  return !is_ended && index < gpu::kMaxBuffers;
}

const ClassInfo& encoder_class() {
  static const ClassInfo info = [] {
    ClassInfo c("MTLComputeCommandEncoder", &ns_object());
    c.method("setComputePipelineState:", [](Encoder* self, SEL, PipelineState* pipeline) {
      if (!self->is_usable(0)) return;
      self->next.pipeline = pipeline;
      self->command_buffer->used.push_back(Ref<Object>::retain(pipeline));
    });
    c.method("setBytes:length:atIndex:", [](Encoder* self, SEL, const void* bytes, uint64_t length, uint64_t index) {
      if (!self->is_usable(index)) return;
      if (length == 0 || length > gpu::kMaxParamsBytes) return violation("setBytes takes 1 to 4096 bytes");
      if (index != 0) return violation("the double takes bytes at index 0 only");
      const auto* begin = static_cast<const std::byte*>(bytes);
      self->next.bytes.assign(begin, begin + length);
    });
    c.method("setBuffer:offset:atIndex:", [](Encoder* self, SEL, Buffer* buffer, uint64_t offset, uint64_t index) {
      if (!self->is_usable(index)) return;
      count(&Record::num_set_buffers);
      if (buffer == nullptr) return violation("a null buffer was bound");
      if (offset >= buffer->size_bytes) return violation("a buffer was bound past its end");
      self->next.bindings[index] = {buffer, offset};
      self->command_buffer->used.push_back(Ref<Object>::retain(buffer));
    });
    c.method("setBufferOffset:atIndex:", [](Encoder* self, SEL, uint64_t offset, uint64_t index) {
      if (!self->is_usable(index)) return;
      count(&Record::num_set_offsets);
      Binding& binding = self->next.bindings[index];
      if (binding.buffer == nullptr) return violation("the offset of a buffer that is not bound was set");
      if (offset >= binding.buffer->size_bytes) return violation("a buffer was bound past its end");
      binding.offset_bytes = offset;
    });
    c.method("dispatchThreadgroups:threadsPerThreadgroup:", [](Encoder* self, SEL, Size threadgroups, Size threads) {
      if (!self->is_usable(0)) return;
      if (self->next.pipeline == nullptr) return violation("a dispatch without a pipeline");
      const uint64_t num_threads = threads.width * threads.height * threads.depth;
      if (num_threads == 0 || num_threads > behaviour().max_threads_per_threadgroup ||
          threadgroups.width * threadgroups.height * threadgroups.depth == 0) {
        return violation("a dispatch of no threads, or of more in a threadgroup than the pipeline can have");
      }
      self->next.grid = {sizes_of(threadgroups), sizes_of(threads)};
      self->command_buffer->dispatches.push_back(self->next);
    });
    c.method("endEncoding", [](Encoder* self, SEL) { self->end(); });
    return c;
  }();
  return info;
}

const ClassInfo& command_buffer_class() {
  static const ClassInfo info = [] {
    ClassInfo c("MTLCommandBuffer", &ns_object());
    c.method("computeCommandEncoderWithDispatchType:", [](CommandBuffer* self, SEL, uint64_t type) -> Object* {
      constexpr uint64_t kSerial = 0;
      if (type != kSerial) violation("the double runs dispatches in order only");
      if (self->is_encoding) violation("a command buffer with two encoders at a time");
      if (self->state != CommandBuffer::kNotEnqueued) violation("a command buffer was encoded after it was committed");
      count(&Record::num_encoders);
      return autoreleased(Ref<Encoder>::adopt(new Encoder(*self)));
    });
    c.method("commit", [](CommandBuffer* self, SEL) { self->commit(); });
    c.method("waitUntilCompleted", [](CommandBuffer* self, SEL) { self->wait(); });
    c.method("status", [](CommandBuffer* self, SEL) { return static_cast<uint64_t>(self->state); });
    c.method("error", [](CommandBuffer* self, SEL) { return self->error.get(); });
    return c;
  }();
  return info;
}

const ClassInfo& queue_class() {
  static const ClassInfo info = [] {
    ClassInfo c("MTLCommandQueue", &ns_object());
    c.method("commandBuffer", [](Queue*, SEL) -> Object* {
      if (use_up(&Behaviour::num_command_buffers_refused)) return nullptr;
      return autoreleased(Ref<CommandBuffer>::adopt(new CommandBuffer));
    });
    return c;
  }();
  return info;
}

}  // namespace flexpte::metal_double
