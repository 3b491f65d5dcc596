#include "metal_delegate/metal/metal_queue.h"

#include <algorithm>
#include <string>
#include <utility>

#include "metal_delegate/metal/gpu_cores.h"
#include "metal_delegate/metal/metal_error.h"

namespace flexpte::metal {
namespace {

constexpr size_t kAbsentBytes = 256;

uint64_t volume(const std::array<uint32_t, 3>& sizes) {
  return uint64_t{sizes[0]} * sizes[1] * sizes[2];
}

MTL::Size size_of(const std::array<uint32_t, 3>& sizes) {
  return MTL::Size(sizes[0], sizes[1], sizes[2]);
}

}  // namespace

Result<std::unique_ptr<MetalQueue>> MetalQueue::create(std::shared_ptr<MetalKernels> kernels) {
  const ScopedPool pool;
  std::unique_ptr<MetalQueue> queue(new MetalQueue(std::move(kernels)));
  FLEXPTE_TRY(queue->make_command_queue());
  queue->absent_ = NS::TransferPtr(
      queue->kernels_->device()->newBuffer(kAbsentBytes, MTL::ResourceOptions{MTL::ResourceStorageModeShared}));
  if (!queue->absent_) return Status(Code::kOutOfMemory, "Metal cannot allocate a buffer");
  return queue;
}

MetalQueue::MetalQueue(std::shared_ptr<MetalKernels> kernels)
    : kernels_(std::move(kernels)),
      num_cores_(num_gpu_cores(text_of(kernels_->device()->name()))),
      memory_(kernels_->device()) {}

MetalQueue::~MetalQueue() {
  const ScopedPool pool;
  drop_commands();
}

Result<const gpu::Pipeline*> MetalQueue::pipeline(std::string_view function) {
  FLEXPTE_ASSIGN(const MetalPipeline* pipeline, kernels_->pipeline(function));
  return static_cast<const gpu::Pipeline*>(pipeline);
}

Status MetalQueue::map(const std::byte* data, size_t size_bytes, gpu::Access access) {
  const ScopedPool pool;
  return memory_.map(data, size_bytes, access);
}

void MetalQueue::unmap(const std::byte* data) {
  const ScopedPool pool;
  memory_.unmap(data);
}

Status MetalQueue::dispatch(const gpu::Pipeline& pipeline, std::span<const std::byte> params,
                            std::span<const gpu::BufferArgument> buffers, const gpu::Grid& grid) {
  const auto& metal_pipeline = static_cast<const MetalPipeline&>(pipeline);
  FLEXPTE_TRY(check(metal_pipeline, params, buffers, grid));
  if (volume(grid.threadgroups) == 0 || volume(grid.threads) == 0) return Status::ok();

  Places places;
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].data == nullptr || buffers[i].size_bytes == 0) {
      places[i + 1] = {absent_.get(), 0};
    } else {
      FLEXPTE_ASSIGN(places[i + 1], memory_.find(buffers[i], i + 1, pipeline.name()));
    }
  }

  const ScopedPool pool;
  FLEXPTE_TRY(begin_commands());
  if (bound_pipeline_ != &metal_pipeline) {
    encoder_->setComputePipelineState(metal_pipeline.state());
    bound_pipeline_ = &metal_pipeline;
  }
  if (!params.empty()) encoder_->setBytes(params.data(), params.size(), 0);
  bind(places, buffers.size());
  encoder_->dispatchThreadgroups(size_of(grid.threadgroups), size_of(grid.threads));
  ++num_dispatches_;
  return Status::ok();
}

Status MetalQueue::finish() {
  if (!command_buffer_) return Status::ok();
  const ScopedPool pool;
  encoder_->endEncoding();
  command_buffer_->commit();
  command_buffer_->waitUntilCompleted();
  const Status status = command_buffer_status(*command_buffer_.get(), num_dispatches_);
  encoder_ = {};
  command_buffer_ = {};
  if (status.is_ok()) return status;
  // Metal may ignore what a queue submits after an error.
  if (const Status renewed = make_command_queue(); !renewed.is_ok()) command_queue_ = {};
  return status;
}

Status MetalQueue::make_command_queue() {
  command_queue_ = NS::TransferPtr(kernels_->device()->newCommandQueue());
  if (!command_queue_) return {Code::kUnavailable, "Metal has no command queue to give"};
  return Status::ok();
}

Status MetalQueue::begin_commands() {
  if (command_buffer_) return Status::ok();
  if (!command_queue_) FLEXPTE_TRY(make_command_queue());
  MTL::CommandBuffer* command_buffer = command_queue_->commandBuffer();
  // Serial: a dispatch sees all that those before it wrote.
  MTL::ComputeCommandEncoder* encoder =
      command_buffer == nullptr ? nullptr : command_buffer->computeCommandEncoder(MTL::DispatchTypeSerial);
  if (encoder == nullptr) return {Code::kUnavailable, "Metal has no command buffer to give"};
  command_buffer_ = NS::RetainPtr(command_buffer);
  encoder_ = NS::RetainPtr(encoder);
  num_dispatches_ = 0;
  bound_pipeline_ = nullptr;
  bound_ = {};
  return Status::ok();
}

void MetalQueue::drop_commands() {
  if (encoder_) encoder_->endEncoding();
  encoder_ = {};
  command_buffer_ = {};
}

Status MetalQueue::check(const MetalPipeline& pipeline, std::span<const std::byte> params,
                         std::span<const gpu::BufferArgument> buffers, const gpu::Grid& grid) const {
  const std::string kernel = "kernel " + std::string(pipeline.name());
  if (buffers.size() + 1 > gpu::kMaxBuffers) {
    return {Code::kUnsupported, kernel + " is given " + std::to_string(buffers.size() + 1) + " buffers; Metal has " +
                                    std::to_string(gpu::kMaxBuffers)};
  }
  if (params.size() > gpu::kMaxParamsBytes) {
    return {Code::kUnsupported, kernel + " is given " + std::to_string(params.size()) +
                                    " bytes of params; Metal takes " + std::to_string(gpu::kMaxParamsBytes)};
  }
  if (volume(grid.threads) > pipeline.max_threads_per_threadgroup()) {
    return {Code::kUnsupported, kernel + " is run with threadgroups of " + std::to_string(volume(grid.threads)) +
                                    " threads; on this GPU it can have " +
                                    std::to_string(pipeline.max_threads_per_threadgroup())};
  }
  return Status::ok();
}

void MetalQueue::bind(const Places& places, size_t num_buffers) {
  for (size_t i = 1; i <= num_buffers; ++i) {
    const MappedMemory::Place& place = places[i];
    MappedMemory::Place& bound = bound_[i];
    if (bound.buffer != place.buffer) {
      encoder_->setBuffer(place.buffer, place.offset_bytes, i);
    } else if (bound.offset_bytes != place.offset_bytes) {
      encoder_->setBufferOffset(place.offset_bytes, i);
    }
    bound = place;
  }
}

}  // namespace flexpte::metal
