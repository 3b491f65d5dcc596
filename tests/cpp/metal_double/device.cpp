// The GPU of the double, and what it makes: libraries, pipelines, buffers.
#include <unistd.h>

#include <fstream>
#include <iterator>

#include "metal_delegate/msl_host/msl_library.h"
#include "tests/cpp/metal_double/metal.h"
#include "tests/cpp/metal_double/metal_double.h"

namespace flexpte::metal_double {
namespace {

struct Device final : Object {
  Device();
};

struct CompileOptions final : Object {
  CompileOptions();
  uint64_t language_version = 0;
  bool is_fast_math = true;
};

constexpr int64_t kLibraryErrorCompileFailure = 3;
constexpr int64_t kPipelineErrorInternal = 1;
constexpr int64_t kFileNotFound = 260;
constexpr int64_t kApple7 = 1007;  // MTLGPUFamilyApple7
constexpr uint64_t kStorageModeMask = 0xF0;

Object* compile(const std::string& source, Error** error) {
  count(&Record::num_libraries);
  if (std::string text = take(&Behaviour::library_error); !text.empty()) {
    set_error(error, kLibraryErrorCompileFailure, std::move(text));
    return nullptr;
  }
  auto compiled = msl_host::compile_library(source, msl_host::Options::from_environment());
  if (!compiled.is_ok()) {
    set_error(error, kLibraryErrorCompileFailure, compiled.status().message());
    return nullptr;
  }
  auto queue = (*compiled)->make_queue();
  if (!queue.is_ok()) {
    set_error(error, kLibraryErrorCompileFailure, queue.status().message());
    return nullptr;
  }
  auto kernels = std::make_shared<Kernels>();
  kernels->functions = (*compiled)->functions();
  kernels->queue = std::move(*queue);
  return new Library(std::move(kernels));
}

Object* new_buffer(std::byte* memory, uint64_t length, uint64_t options) {
  if ((options & kStorageModeMask) != 0) violation("a buffer that the host cannot see");
  if (use_up(&Behaviour::num_buffers_refused)) return nullptr;
  if (length == 0 || length > behaviour().max_buffer_bytes) return nullptr;
  return new Buffer(memory, length);
}

Object* new_pipeline(Function* function, Error** error) {
  count(&Record::num_pipelines);
  if (std::string text = take(&Behaviour::pipeline_error); !text.empty()) {
    set_error(error, kPipelineErrorInternal, std::move(text));
    return nullptr;
  }
  const std::lock_guard lock(function->kernels->mutex);
  const auto pipeline = function->kernels->queue->pipeline(function->name);
  if (pipeline.is_ok()) return new PipelineState(function->kernels, *pipeline);
  set_error(error, kPipelineErrorInternal, pipeline.status().message());
  return nullptr;
}

const ClassInfo& device_class() {
  static const ClassInfo info = [] {
    ClassInfo c("MTLDevice", &ns_object());
    c.method("name",
             [](Device*, SEL) { return autoreleased(Ref<String>::adopt(new String(behaviour().device_name))); });
    c.method("supportsFamily:", [](Device*, SEL, int64_t family) {
      return family < kApple7 || (family == kApple7 && behaviour().has_simdgroup_matrix);
    });
    c.method("maxBufferLength", [](Device*, SEL) { return behaviour().max_buffer_bytes; });
    c.method("newLibraryWithSource:options:error:",
             [](Device*, SEL, String* source, CompileOptions* options, Error** error) {
               record().language_version = options->language_version;
               record().is_fast_math = options->is_fast_math;
               return compile(source->text(), error);
             });
    // A metallib of the double holds the text.
    c.method("newLibraryWithURL:error:", [](Device*, SEL, String* url, Error** error) -> Object* {
      std::ifstream file(url->text());
      if (file) return compile(std::string(std::istreambuf_iterator<char>(file), {}), error);
      set_error(error, kFileNotFound, "no such file");
      return nullptr;
    });
    c.method("newComputePipelineStateWithFunction:error:",
             [](Device*, SEL, Function* function, Error** error) { return new_pipeline(function, error); });
    c.method("newBufferWithLength:options:",
             [](Device*, SEL, uint64_t length, uint64_t options) { return new_buffer(nullptr, length, options); });
    c.method(
        "newBufferWithBytesNoCopy:length:options:deallocator:",
        [](Device*, SEL, std::byte* memory, uint64_t length, uint64_t options, const void* deallocator) -> Object* {
          const auto page_bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
          if (memory == nullptr || reinterpret_cast<uintptr_t>(memory) % page_bytes != 0 || length % page_bytes != 0) {
            violation("memory that is not whole pages was wrapped");
            return nullptr;
          }
          if (deallocator != nullptr) violation("the double takes no deallocators");
          count(&Record::num_wrapped_buffers);
          return new_buffer(memory, use_up(&Behaviour::num_buffers_short) ? 1 : length, options);
        });
    c.method("newCommandQueue", [](Device*, SEL) -> Object* {
      if (use_up(&Behaviour::num_queues_refused)) return nullptr;
      count(&Record::num_queues);
      return new Queue;
    });
    return c;
  }();
  return info;
}

Device::Device() : Object(device_class()) {}

const ClassInfo& options_class() {
  static const ClassInfo info = [] {
    ClassInfo c("MTLCompileOptions", &ns_object());
    c.class_method("alloc", [](Object*, SEL) -> Object* { return new CompileOptions; });
    c.method("init", [](Object* self, SEL) { return self; });
    c.method("setLanguageVersion:",
             [](CompileOptions* self, SEL, uint64_t version) { self->language_version = version; });
    c.method("setFastMathEnabled:", [](CompileOptions* self, SEL, bool is_fast) { self->is_fast_math = is_fast; });
    return c;
  }();
  return info;
}

CompileOptions::CompileOptions() : Object(options_class()) {}

}  // namespace

Library::Library(std::shared_ptr<Kernels> compiled) : Object(library_class()), kernels(std::move(compiled)) {}

Function::Function(std::shared_ptr<Kernels> library, std::string function)
    : Object(function_class()), kernels(std::move(library)), name(std::move(function)) {}

PipelineState::PipelineState(std::shared_ptr<Kernels> library, const gpu::Pipeline* shim_pipeline)
    : Object(pipeline_class()), kernels(std::move(library)), pipeline(shim_pipeline) {}

Buffer::Buffer(std::byte* memory, size_t size)
    : Object(buffer_class()), contents(memory), size_bytes(size), is_wrapped(memory != nullptr) {
  if (is_wrapped) {
    watch_pages(*this);
  } else {
    auto pages = ZeroPages::allocate(size, "a Metal buffer");
    if (pages.is_ok()) owned = std::move(*pages);
    contents = owned.bytes().data();
  }
}

void Buffer::dealloc() {
  if (is_wrapped) unwatch_pages(*this);
  owned = {};
}

const ClassInfo& library_class() {
  static const ClassInfo info = [] {
    ClassInfo c("MTLLibrary", &ns_object());
    c.method("functionNames", [](Library* self, SEL) { return string_array(self->kernels->functions); });
    c.method("newFunctionWithName:", [](Library* self, SEL, String* name) -> Object* {
      for (const std::string& function : self->kernels->functions) {
        if (function == name->text()) return new Function(self->kernels, function);
      }
      return nullptr;
    });
    return c;
  }();
  return info;
}

const ClassInfo& function_class() {
  static const ClassInfo info("MTLFunction", &ns_object());
  return info;
}

const ClassInfo& pipeline_class() {
  static const ClassInfo info = [] {
    ClassInfo c("MTLComputePipelineState", &ns_object());
    c.method("maxTotalThreadsPerThreadgroup",
             [](PipelineState*, SEL) { return behaviour().max_threads_per_threadgroup; });
    c.method("threadExecutionWidth", [](PipelineState*, SEL) { return behaviour().simd_width; });
    return c;
  }();
  return info;
}

const ClassInfo& buffer_class() {
  static const ClassInfo info = [] {
    ClassInfo c("MTLBuffer", &ns_object());
    c.method("contents", [](Buffer* self, SEL) { return self->contents; });
    c.method("length", [](Buffer* self, SEL) { return static_cast<uint64_t>(self->size_bytes); });
    return c;
  }();
  return info;
}

const std::unordered_map<std::string_view, const ClassInfo*>& metal_classes() {
  static const std::unordered_map<std::string_view, const ClassInfo*> classes = {
      {"MTLCompileOptions", &options_class()},
  };
  return classes;
}

extern "C" Object* MTLCreateSystemDefaultDevice() {
  return behaviour().has_device ? new Device : nullptr;
}

}  // namespace flexpte::metal_double
