// Kernels on a Mac's or a phone's GPU: one command buffer a step, dispatches in order.
#pragma once

#include <array>
#include <memory>

#include "metal_delegate/gpu/queue.h"
#include "metal_delegate/metal/metal_cpp.h"
#include "metal_delegate/metal/metal_kernels.h"
#include "metal_delegate/metal/metal_memory.h"
#include "runtime/status.h"

namespace flexpte::metal {

class MetalQueue final : public gpu::Queue {
 public:
  static Result<std::unique_ptr<MetalQueue>> create(std::shared_ptr<MetalKernels> kernels);
  ~MetalQueue() override;

  uint32_t num_cores() const override { return num_cores_; }
  Result<const gpu::Pipeline*> pipeline(std::string_view function) override;
  Status map(const std::byte* data, size_t size_bytes, gpu::Access access) override;
  void unmap(const std::byte* data) override;
  Status dispatch(const gpu::Pipeline& pipeline, std::span<const std::byte> params,
                  std::span<const gpu::BufferArgument> buffers, const gpu::Grid& grid) override;
  Status finish() override;

 private:
  using Places = std::array<MappedMemory::Place, gpu::kMaxBuffers>;

  explicit MetalQueue(std::shared_ptr<MetalKernels> kernels);

  Status make_command_queue();
  Status begin_commands();
  // Ends the command buffer that is being encoded, without running it.
  void drop_commands();
  Status check(const MetalPipeline& pipeline, std::span<const std::byte> params,
               std::span<const gpu::BufferArgument> buffers, const gpu::Grid& grid) const;
  void bind(const Places& places, size_t num_buffers);

  std::shared_ptr<MetalKernels> kernels_;
  uint32_t num_cores_;
  MappedMemory memory_;
  NS::SharedPtr<MTL::Buffer> absent_;  // for operands that a kernel does not touch
  NS::SharedPtr<MTL::CommandQueue> command_queue_;

  // Of the step that is being encoded; null between steps.
  NS::SharedPtr<MTL::CommandBuffer> command_buffer_;
  NS::SharedPtr<MTL::ComputeCommandEncoder> encoder_;
  size_t num_dispatches_ = 0;
  // What the encoder has already: dispatches of a step share weights, caches and kernels.
  const MetalPipeline* bound_pipeline_ = nullptr;
  Places bound_ = {};
};

}  // namespace flexpte::metal
