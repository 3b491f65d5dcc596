#include "metal_delegate/metal/metal_kernels.h"

#include <utility>

#include "metal_delegate/metal/metal_error.h"

namespace flexpte::metal {
namespace {

// Kernels are written for simdgroups of this width, that of every Apple GPU.
constexpr NS::UInteger kSimdWidth = 32;

std::string function_names(const MTL::Library& library) {
  const NS::Array* names = library.functionNames();
  std::string text;
  for (NS::UInteger i = 0; names != nullptr && i < names->count(); ++i) {
    text += (i == 0 ? "" : ", ") + text_of(names->object<NS::String>(i));
  }
  return text.empty() ? "none" : text;
}

}  // namespace

MetalPipeline::MetalPipeline(std::string name, NS::SharedPtr<MTL::ComputePipelineState> state)
    : name_(std::move(name)),
      state_(std::move(state)),
      max_threads_per_threadgroup_(static_cast<uint32_t>(state_->maxTotalThreadsPerThreadgroup())) {}

Result<const MetalPipeline*> MetalKernels::pipeline(std::string_view function) {
  const std::lock_guard lock(mutex_);
  const auto found = pipelines_.find(function);
  if (found != pipelines_.end()) return static_cast<const MetalPipeline*>(found->second.get());
  std::string name(function);
  FLEXPTE_ASSIGN(std::unique_ptr<MetalPipeline> compiled, compile(name));
  const MetalPipeline* pipeline = compiled.get();
  pipelines_.emplace(std::move(name), std::move(compiled));
  return pipeline;
}

Result<std::unique_ptr<MetalPipeline>> MetalKernels::compile(const std::string& function) const {
  const ScopedPool pool;
  const NS::String* name = NS::String::string(function.c_str(), NS::UTF8StringEncoding);
  const auto metal_function = NS::TransferPtr(name == nullptr ? nullptr : library_->newFunction(name));
  if (!metal_function) {
    return Status(Code::kInvalidProgram,
                  "the Metal library has no kernel named " + function + "; it has: " + function_names(*library_.get()));
  }
  NS::Error* error = nullptr;
  auto state = NS::TransferPtr(device_->newComputePipelineState(metal_function.get(), &error));
  if (!state) {
    return Status(Code::kUnsupported, "kernel " + function + " does not compile for this GPU (" +
                                          text_of(device_->name()) + "): " + describe(error, "Metal does not say why"));
  }
  if (state->threadExecutionWidth() != kSimdWidth) {
    return Status(Code::kUnsupported, "kernel " + function + " needs simdgroups of " + std::to_string(kSimdWidth) +
                                          " threads; this GPU (" + text_of(device_->name()) + ") has " +
                                          std::to_string(state->threadExecutionWidth()));
  }
  return std::make_unique<MetalPipeline>(function, std::move(state));
}

}  // namespace flexpte::metal
