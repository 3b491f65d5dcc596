// Kernels of one library, compiled for one GPU when they are first asked for.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "metal_delegate/gpu/queue.h"
#include "metal_delegate/metal/metal_cpp.h"
#include "runtime/status.h"

namespace flexpte::metal {

class MetalPipeline final : public gpu::Pipeline {
 public:
  MetalPipeline(std::string name, NS::SharedPtr<MTL::ComputePipelineState> state);
  std::string_view name() const override { return name_; }
  uint32_t max_threads_per_threadgroup() const override { return max_threads_per_threadgroup_; }
  MTL::ComputePipelineState* state() const { return state_.get(); }

 private:
  std::string name_;
  NS::SharedPtr<MTL::ComputePipelineState> state_;
  uint32_t max_threads_per_threadgroup_;
};

// Shared by the queues of a library; safe to use from several threads.
class MetalKernels {
 public:
  MetalKernels(NS::SharedPtr<MTL::Device> device, NS::SharedPtr<MTL::Library> library)
      : device_(std::move(device)), library_(std::move(library)) {}

  const NS::SharedPtr<MTL::Device>& device() const { return device_; }
  Result<const MetalPipeline*> pipeline(std::string_view function);

 private:
  Result<std::unique_ptr<MetalPipeline>> compile(const std::string& function) const;

  NS::SharedPtr<MTL::Device> device_;
  NS::SharedPtr<MTL::Library> library_;
  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<MetalPipeline>, std::less<>> pipelines_;
};

}  // namespace flexpte::metal
