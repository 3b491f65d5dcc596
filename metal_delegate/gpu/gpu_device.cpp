#include "metal_delegate/gpu/gpu_device.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "metal_delegate/frame.h"
#include "metal_delegate/gpu/encode_flex.h"
#include "metal_delegate/gpu/encode_ops.h"
#include "metal_delegate/gpu/encoder.h"
#include "metal_delegate/gpu/memory_map.h"
#include "metal_delegate/gpu/params.h"

namespace flexpte::bound {
namespace {

class GpuExecutable final : public Executable {
 public:
  static Result<std::unique_ptr<GpuExecutable>> create(const BoundProgram& program, std::string_view device,
                                                       const MakeLibrary& make_library) {
    for (size_t i = 0; i < program.instructions.size(); ++i) {
      if (!program.metal_library.empty() && !program.instructions[i].kernels.empty()) continue;
      return Status(Code::kUnsupported,
                    describe_instruction(program, i) + " has no Metal kernel in this file, so device '" +
                        std::string(device) +
                        "' cannot run it: load it with device \"host\", or export the model again (float64 has no "
                        "Metal kernels)");
    }
    if (program.kernels_version != FLEXPTE_KERNELS_VERSION) {
      return Status(Code::kUnsupported, "the file's Metal kernels have version " +
                                            std::to_string(program.kernels_version) + ", device '" +
                                            std::string(device) + "' of this build runs version " +
                                            std::to_string(FLEXPTE_KERNELS_VERSION) +
                                            ": export the model again, or load it with device \"host\"");
    }
    std::unique_ptr<GpuExecutable> executable(new GpuExecutable(program));
    FLEXPTE_ASSIGN(executable->library_, make_library(program.metal_library));
    FLEXPTE_ASSIGN(executable->planners_, gpu::FlexPlanners::create(program));
    return executable;
  }

  Result<std::unique_ptr<DelegateInstance>> instantiate(StateStore& states) const override;

  const BoundProgram& program() const { return program_; }
  const gpu::FlexPlanners& planners() const { return planners_; }

 private:
  explicit GpuExecutable(const BoundProgram& program) : program_(program) {}

  const BoundProgram& program_;
  std::shared_ptr<gpu::Library> library_;
  gpu::FlexPlanners planners_;
};

class GpuInstance final : public DelegateInstance {
 public:
  static Result<std::unique_ptr<GpuInstance>> create(const GpuExecutable& executable, std::unique_ptr<gpu::Queue> queue,
                                                     std::unique_ptr<Frame> frame) {
    std::unique_ptr<GpuInstance> instance(new GpuInstance(executable, std::move(queue), std::move(frame)));
    for (const Instruction& instruction : executable.program().instructions) {
      instance->first_pipeline_.push_back(instance->pipelines_.size());
      for (const std::string& kernel : instruction.kernels) {
        FLEXPTE_ASSIGN(const gpu::Pipeline* pipeline, instance->queue_->pipeline(kernel));
        instance->pipelines_.push_back(pipeline);
      }
    }
    return instance;
  }

  Status execute(std::span<DelegateArgument> inputs, std::span<DelegateArgument> outputs) override {
    FLEXPTE_TRY(frame_->begin(inputs, outputs));
    const Status status = run();
    memory_.end_step();
    FLEXPTE_TRY(status);
    frame_->finish(outputs);
    return Status::ok();
  }

  std::string counters() const override { return queue_->counters(); }

 private:
  GpuInstance(const GpuExecutable& executable, std::unique_ptr<gpu::Queue> queue, std::unique_ptr<Frame> frame)
      : executable_(executable),
        queue_(std::move(queue)),
        frame_(std::move(frame)),
        encoder_(*queue_),
        memory_(*queue_),
        plans_(executable.planners()) {}

  Status run() {
    FLEXPTE_TRY(map_memory());
    plans_.begin_step();
    encoder_.set_unreadable(frame_->arena());
    const Status status = encode();
    const Status finished = queue_->finish();
    const uint32_t bad = encoder_.bad_instruction();
    encoder_.reset();
    FLEXPTE_TRY(status);
    FLEXPTE_TRY(finished);
    if (bad != 0) {
      const BoundProgram& program = executable_.program();
      const bool is_mod = program.instructions[bad - 1].kind == OpKind::kFlexAttention;
      return {Code::kOutOfRange,
              describe_instruction(program, bad - 1) +
                  (is_mod ? ": the score or mask expression indexes a captured tensor outside its bounds"
                          : ": an index is outside the tensor that it indexes")};
    }
    return Status::ok();
  }

  Status map_memory() {
    const BoundProgram& program = executable_.program();
    memory_.add(frame_->arena(), gpu::Access::kReadWrite);
    for (size_t s = 0; s < program.storages.size(); ++s) {
      const StorageKind kind = program.storages[s].kind;
      if (kind == StorageKind::kArena) continue;
      const bool is_read = kind == StorageKind::kConstant || kind == StorageKind::kInput;
      const bool is_callers = kind == StorageKind::kInput || kind == StorageKind::kOutput;
      memory_.add(frame_->storage(s), is_read ? gpu::Access::kRead : gpu::Access::kReadWrite,
                  is_callers ? gpu::Lifetime::kStep : gpu::Lifetime::kSession);
    }
    return memory_.apply();
  }

  Status encode() {
    const BoundProgram& program = executable_.program();
    bool is_pending = false;  // whether results of this step are still being computed
    for (size_t i = 0; i < program.instructions.size(); ++i) {
      const Instruction& instruction = program.instructions[i];
      // What the host reads has to be there: positions that an instruction computed, captures that are planned from.
      const bool is_checked = i == program.first_state_write;
      if (is_pending && ((is_checked && frame_->has_computed_positions()) || is_planned_from_results(instruction))) {
        FLEXPTE_TRY(queue_->finish());
        is_pending = false;
      }
      if (is_checked) FLEXPTE_TRY(frame_->check_positions());
      const Status status = encode(i, instruction);
      if (!status.is_ok()) return {status.code(), describe_instruction(program, i) + ": " + status.message()};
      is_pending = true;
    }
    return Status::ok();
  }

  Status encode(size_t number, const Instruction& instruction) {
    const std::span<const TensorView> operands = frame_->operands(number);
    for (size_t k = 0; k < operands.size(); ++k) {
      if (instruction.writes(k) && instruction.operands[k] >= 0 && operands[k].num_elements() == 0) {
        return Status::ok();
      }
    }
    const gpu::Pipelines pipelines = std::span(pipelines_).subspan(first_pipeline_[number], instruction.kernels.size());
    scalars_.clear();
    for (const int32_t scalar : instruction.scalars) {
      scalars_.push_back(frame_->scalars()[static_cast<size_t>(scalar)]);
    }
    gpu::Call call{instruction, number, pipelines, operands, scalars_};
    if (instruction.kind == OpKind::kFlexAttention) return gpu::encode_flex_attention(encoder_, plans_, call);
    if (instruction.kind == OpKind::kArange) {
      const auto& params = std::get<ArangeParams>(instruction.params);
      call.arange_start = frame_->evaluate(params.start);
      call.arange_step = frame_->evaluate(params.step);
    }
    return gpu::encode_instruction(encoder_, call);
  }

  bool is_planned_from_results(const Instruction& instruction) const {
    if (instruction.kind != OpKind::kFlexAttention) return false;
    const auto& params = std::get<FlexParams>(instruction.params);
    const size_t first_mask_capture = operand::kFirstCapture + static_cast<size_t>(params.num_score_captures);
    for (size_t k = operand::kKvNumBlocks; k < instruction.operands.size(); ++k) {
      if (k >= operand::kFirstCapture && k < first_mask_capture) continue;
      const int32_t value = instruction.operands[k];
      if (value < 0) continue;
      const StorageKind kind = executable_.program().storage_kind(value);
      if (kind != StorageKind::kInput && kind != StorageKind::kConstant) return true;
    }
    return false;
  }

  const GpuExecutable& executable_;
  std::unique_ptr<gpu::Queue> queue_;
  std::unique_ptr<Frame> frame_;
  gpu::Encoder encoder_;
  gpu::MemoryMap memory_;
  gpu::FlexPlans plans_;
  std::vector<size_t> first_pipeline_;  // by instruction
  std::vector<const gpu::Pipeline*> pipelines_;
  std::vector<int64_t> scalars_;  // of the instruction being encoded
};

Result<std::unique_ptr<DelegateInstance>> GpuExecutable::instantiate(StateStore& states) const {
  FLEXPTE_ASSIGN(std::unique_ptr<gpu::Queue> queue, library_->make_queue());
  FLEXPTE_ASSIGN(std::unique_ptr<Frame> frame, Frame::create(program_, states));
  FLEXPTE_ASSIGN(std::unique_ptr<GpuInstance> instance, GpuInstance::create(*this, std::move(queue), std::move(frame)));
  return std::unique_ptr<DelegateInstance>(std::move(instance));
}

class GpuDevice final : public Device {
 public:
  GpuDevice(std::string name, MakeLibrary make_library)
      : name_(std::move(name)), make_library_(std::move(make_library)) {}
  std::string_view name() const override { return name_; }
  Result<std::unique_ptr<Executable>> prepare(const BoundProgram& program) const override {
    FLEXPTE_ASSIGN(std::unique_ptr<GpuExecutable> executable, GpuExecutable::create(program, name_, make_library_));
    return std::unique_ptr<Executable>(std::move(executable));
  }

 private:
  std::string name_;
  MakeLibrary make_library_;
};

}  // namespace

std::unique_ptr<Device> make_gpu_device(std::string name, MakeLibrary make_library) {
  return std::make_unique<GpuDevice>(std::move(name), std::move(make_library));
}

}  // namespace flexpte::bound
