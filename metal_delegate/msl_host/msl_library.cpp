#include "metal_delegate/msl_host/msl_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "metal_delegate/msl_host/compiler.h"
#include "metal_delegate/msl_host/shim/runtime.h"

namespace flexpte::msl_host {
namespace {

// A library in this process. Its runtime has one state: dispatches take turns.
struct Loaded {
  void* handle = nullptr;
  const MslKernel* kernels = nullptr;
  void (*dispatch)(MslDispatch*) = nullptr;
  std::mutex mutex;
  std::vector<std::string> functions;

  ~Loaded() {
    if (handle != nullptr) dlclose(handle);
  }
};

class MslPipeline final : public gpu::Pipeline {
 public:
  explicit MslPipeline(const MslKernel* kernel) : kernel_(kernel) {}
  std::string_view name() const override { return kernel_->name; }
  uint32_t max_threads_per_threadgroup() const override {
    return kernel_->max_threads == 0 ? MSL_MAX_THREADS : kernel_->max_threads;
  }
  const MslKernel* kernel() const { return kernel_; }

 private:
  const MslKernel* kernel_;
};

std::string json_of(const Counters& counters) {
  std::string text = "{";
  const auto field = [&text](const char* name, uint64_t value) {
    text += std::string(text.back() == '{' ? "" : ", ") + "\"" + name + "\": " + std::to_string(value);
  };
  for (const auto& [name, c] : counters) {
    text += std::string(text.back() == '{' ? "" : ", ") + "\"" + name + "\": {";
    field("dispatches", c.dispatches);
    field("threadgroups", c.threadgroups);
    field("threads", c.threads);
    field("constant_read_bytes", c.constant_read_bytes);
    field("threadgroup_read_bytes", c.threadgroup_read_bytes);
    field("threadgroup_written_bytes", c.threadgroup_written_bytes);
    field("threadgroup_bytes", c.threadgroup_bytes);
    field("barriers", c.barriers);
    field("simdgroup_barriers", c.simdgroup_barriers);
    field("simdgroup_operations", c.simdgroup_operations);
    field("matrix_multiplies", c.matrix_multiplies);
    field("flops", c.flops);
    field("instructions", c.instructions);
    field("instruction_slots", c.instruction_slots);
    text += ", \"buffers\": {";
    for (const auto& [buffer, bytes] : c.buffers) {
      text += std::string(text.back() == '{' ? "" : ", ") + "\"" + buffer + "\": {";
      field("read_bytes", bytes.read_bytes);
      field("written_bytes", bytes.written_bytes);
      field("unique_bytes", bytes.unique_bytes);
      text += "}";
    }
    text += "}}";
  }
  return text + "}";
}

class MslQueue final : public Queue {
 public:
  MslQueue(std::shared_ptr<Loaded> loaded, bool is_reversed) : loaded_(std::move(loaded)), is_reversed_(is_reversed) {}

  // An M1 has 8; heuristics that are tested here should be those of a small GPU.
  uint32_t num_cores() const override { return 8; }

  Result<const gpu::Pipeline*> pipeline(std::string_view function) override {
    const auto found = pipelines_.find(std::string(function));
    if (found != pipelines_.end()) return static_cast<const gpu::Pipeline*>(found->second.get());
    for (const MslKernel* kernel = loaded_->kernels; kernel->name != nullptr; ++kernel) {
      if (function != kernel->name) continue;
      auto& pipeline = pipelines_[std::string(function)];
      pipeline = std::make_unique<MslPipeline>(kernel);
      return static_cast<const gpu::Pipeline*>(pipeline.get());
    }
    return Status(Code::kInvalidProgram, "the Metal library has no kernel named " + std::string(function));
  }

  // Accesses are checked against the arguments of a dispatch, which are narrower than what is mapped.
  Status map(const std::byte*, size_t, gpu::Access) override { return Status::ok(); }
  void unmap(const std::byte*) override {}

  Status dispatch(const gpu::Pipeline& pipeline, std::span<const std::byte> params,
                  std::span<const gpu::BufferArgument> buffers, const gpu::Grid& grid) override {
    if (buffers.size() + 1 > gpu::kMaxBuffers) {
      return {Code::kInvalidArgument, "kernel " + std::string(pipeline.name()) + " is given " +
                                          std::to_string(buffers.size() + 1) + " buffers; Metal has " +
                                          std::to_string(gpu::kMaxBuffers)};
    }
    // buffer(0) begins at an address that suits any struct.
    params_.assign((params.size() + sizeof(uint64_t) - 1) / sizeof(uint64_t), 0);
    std::copy(params.begin(), params.end(), reinterpret_cast<std::byte*>(params_.data()));
    arguments_.clear();
    arguments_.push_back({params.empty() ? nullptr : params_.data(), params.size(), 0, "params", 6, 0, 0, 0});
    for (const gpu::BufferArgument& buffer : buffers) {
      arguments_.push_back({buffer.data, buffer.size_bytes, buffer.access == gpu::Access::kReadWrite,
                            buffer.name.data(), static_cast<int>(buffer.name.size()), 0, 0, 0});
    }
    MslDispatch dispatch{};
    dispatch.kernel = static_cast<const MslPipeline&>(pipeline).kernel();
    dispatch.buffers = arguments_.data();
    dispatch.num_buffers = static_cast<int>(arguments_.size());
    for (size_t d = 0; d < 3; ++d) {
      dispatch.threadgroups[d] = grid.threadgroups[d];
      dispatch.threads[d] = grid.threads[d];
    }
    dispatch.threadgroup_arguments = threadgroup_arguments_.data();
    dispatch.num_threadgroup_arguments = static_cast<int>(threadgroup_arguments_.size());
    dispatch.is_reversed = is_reversed_ ? 1 : 0;
    {
      const std::lock_guard lock(loaded_->mutex);
      loaded_->dispatch(&dispatch);
    }
    count(dispatch, buffers);
    if (dispatch.error[0] == '\0') return Status::ok();
    if (fault_.is_ok()) fault_ = Status(Code::kInternal, dispatch.error);
    return {Code::kInternal, dispatch.error};
  }

  Status finish() override { return std::exchange(fault_, Status::ok()); }
  std::string counters() const override { return json_of(counters_); }
  const Counters& kernel_counters() const override { return counters_; }
  void reset_counters() override { counters_.clear(); }
  void set_threadgroup_arguments(std::vector<size_t> sizes_bytes) override {
    threadgroup_arguments_ = std::move(sizes_bytes);
  }

 private:
  void count(const MslDispatch& dispatch, std::span<const gpu::BufferArgument> buffers) {
    KernelCounters& c = counters_[dispatch.kernel->name];
    const MslCounters& d = dispatch.counters;
    ++c.dispatches;
    c.threadgroups += d.threadgroups;
    c.threads += d.threads;
    c.constant_read_bytes += d.constant_read_bytes;
    c.threadgroup_read_bytes += d.threadgroup_read_bytes;
    c.threadgroup_written_bytes += d.threadgroup_written_bytes;
    c.threadgroup_bytes = std::max<uint64_t>(c.threadgroup_bytes, dispatch.threadgroup_bytes);
    c.barriers += d.barriers;
    c.simdgroup_barriers += d.simdgroup_barriers;
    c.simdgroup_operations += d.simdgroup_operations;
    c.matrix_multiplies += d.matrix_multiplies;
    c.flops += d.flops;
    c.instructions += d.instructions;
    c.instruction_slots += d.instruction_slots;
    for (size_t i = 0; i < buffers.size(); ++i) {
      const MslBufferArgument& bytes = arguments_[i + 1];
      if (bytes.unique_bytes == 0) continue;
      const std::string name =
          buffers[i].name.empty() ? "buffer" + std::to_string(i + 1) : std::string(buffers[i].name);
      KernelCounters::Buffer& b = c.buffers[name];
      b.read_bytes += bytes.read_bytes;
      b.written_bytes += bytes.written_bytes;
      b.unique_bytes += bytes.unique_bytes;
    }
  }

  std::shared_ptr<Loaded> loaded_;
  bool is_reversed_;
  Status fault_;  // the first since finish()
  std::unordered_map<std::string, std::unique_ptr<MslPipeline>> pipelines_;
  Counters counters_;
  std::vector<size_t> threadgroup_arguments_;
  std::vector<uint64_t> params_;  // of the dispatch that runs
  std::vector<MslBufferArgument> arguments_;
};

class MslLibrary final : public Library {
 public:
  MslLibrary(std::shared_ptr<Loaded> loaded, Options options)
      : loaded_(std::move(loaded)), options_(std::move(options)) {}
  const std::vector<std::string>& functions() const override { return loaded_->functions; }
  Result<std::unique_ptr<gpu::Queue>> make_queue() const override {
    return std::unique_ptr<gpu::Queue>(make_msl_queue());
  }
  std::unique_ptr<Queue> make_msl_queue() const override {
    return std::make_unique<MslQueue>(loaded_, options_.is_reversed);
  }

 private:
  std::shared_ptr<Loaded> loaded_;
  Options options_;
};

// Whoever has loaded a file shares it: its runtime has one state.
Result<std::shared_ptr<Loaded>> load(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<Loaded>> all;
  const std::lock_guard lock(mutex);
  if (std::shared_ptr<Loaded> loaded = all[path].lock()) return loaded;
  auto loaded = std::make_shared<Loaded>();
  loaded->handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (loaded->handle == nullptr) {
    return Status(Code::kInternal, std::string("the compiled Metal kernels do not load: ") + dlerror());
  }
  loaded->kernels = static_cast<const MslKernel*>(dlsym(loaded->handle, "msl_kernels"));
  loaded->dispatch = reinterpret_cast<void (*)(MslDispatch*)>(dlsym(loaded->handle, "msl_dispatch"));
  if (loaded->kernels == nullptr || loaded->dispatch == nullptr) {
    return Status(Code::kInternal, "the compiled Metal kernels lack their table: remove " + path);
  }
  for (const MslKernel* kernel = loaded->kernels; kernel->name != nullptr; ++kernel) {
    loaded->functions.emplace_back(kernel->name);
  }
  all[path] = loaded;
  return loaded;
}

}  // namespace

Options Options::from_environment() {
  Options options;
  const char* checks = std::getenv("FLEXPTE_MSL_CHECKS");
  options.is_checked = checks == nullptr || std::string_view(checks) != "0";
  return options;
}

Result<std::shared_ptr<Library>> compile_library(std::string_view source, Options options) {
  FLEXPTE_ASSIGN(const std::string path, build_library(source, options));
  FLEXPTE_ASSIGN(std::shared_ptr<Loaded> loaded, load(path));
  return std::shared_ptr<Library>(std::make_shared<MslLibrary>(std::move(loaded), std::move(options)));
}

}  // namespace flexpte::msl_host
