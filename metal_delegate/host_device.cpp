#include "metal_delegate/host_device.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "metal_delegate/flex_attention.h"
#include "metal_delegate/frame.h"
#include "metal_delegate/profile.h"
#include "runtime/kernels/kernels.h"

namespace flexpte::bound {
namespace {

std::vector<int> capture_ranks(const BoundProgram& program, std::span<const int32_t> values) {
  std::vector<int> ranks;
  for (const int32_t value : values) ranks.push_back(program.values[static_cast<size_t>(value)].view.rank);
  return ranks;
}

FlexAttentionArgs flex_arguments(const FlexParams& params, std::span<const TensorView> operands,
                                 std::span<const int64_t> scalars) {
  using namespace operand;
  FlexAttentionArgs args;
  args.query = operands[kQuery];
  args.key = operands[kKey];
  args.value = operands[kValue];
  args.out = operands[kFlexOut];
  args.lse = operands[kLse];
  args.kv_num_blocks = operands[kKvNumBlocks];
  args.kv_indices = operands[kKvIndices];
  args.full_kv_num_blocks = operands[kFullKvNumBlocks];
  args.full_kv_indices = operands[kFullKvIndices];
  const auto captures = operands.subspan(kFirstCapture);
  args.score_captures = captures.first(static_cast<size_t>(params.num_score_captures));
  args.mask_captures = captures.subspan(static_cast<size_t>(params.num_score_captures));
  args.score_scalars = scalars.first(static_cast<size_t>(params.num_score_scalars));
  args.mask_scalars = scalars.subspan(static_cast<size_t>(params.num_score_scalars));
  return args;
}

class HostExecutable final : public Executable {
 public:
  static Result<std::unique_ptr<HostExecutable>> create(const BoundProgram& program,
                                                        std::shared_ptr<const ThreadPool> pool) {
    std::unique_ptr<HostExecutable> executable(new HostExecutable(program, std::move(pool)));
    for (size_t i = 0; i < program.instructions.size(); ++i) {
      const Status status = executable->prepare(i);
      if (!status.is_ok()) return Status(status.code(), describe_instruction(program, i) + ": " + status.message());
    }
    return executable;
  }

  Result<std::unique_ptr<DelegateInstance>> instantiate(StateStore& states) const override;

  const BoundProgram& program() const { return program_; }
  const ThreadPool& pool() const { return *pool_; }
  const FlexAttention& attention(size_t instruction) const { return *attentions_[instruction]; }

 private:
  HostExecutable(const BoundProgram& program, std::shared_ptr<const ThreadPool> pool)
      : program_(program), pool_(std::move(pool)), attentions_(program.instructions.size()) {}

  Status prepare(size_t number) {
    const Instruction& instruction = program_.instructions[number];
    max_scalars_ = std::max(max_scalars_, instruction.scalars.size());
    std::vector<TensorView> bounds;
    for (const int32_t value : instruction.operands) {
      bounds.push_back(value < 0 ? TensorView{} : program_.upper_bound(value));
    }
    size_t bytes = 0;
    const int num_threads = pool_->num_threads();
    switch (instruction.kind) {
      case OpKind::kLinear: {
        const TensorView& x = bounds[operand::kX];
        const TensorView& weight = bounds[operand::kWeight];
        int64_t rows = 1;
        for (int32_t d = 0; d + 1 < x.rank; ++d) rows *= x.size(d);
        bytes = linear_workspace_bytes(rows, weight.size(0), weight.size(1), weight.dtype, num_threads);
        break;
      }
      case OpKind::kMatMul:
        bytes = matmul_workspace_bytes(bounds[operand::kMatMulA], bounds[operand::kMatMulB], num_threads);
        break;
      case OpKind::kElementwise:
        bytes = elementwise_workspace_bytes(*std::get<ElementwiseParams>(instruction.params).program, num_threads);
        break;
      case OpKind::kFlexAttention: {
        FLEXPTE_TRY(prepare_attention(number));
        const std::vector<int64_t> scalars(instruction.scalars.size());
        bytes = attentions_[number]->workspace_bytes(
            flex_arguments(std::get<FlexParams>(instruction.params), bounds, scalars), num_threads);
        break;
      }
      default:
        break;
    }
    workspace_bytes_ = std::max(workspace_bytes_, bytes);
    return Status::ok();
  }

  // Layers usually have equal attentions: these share one.
  Status prepare_attention(size_t number) {
    const Instruction& instruction = program_.instructions[number];
    const auto& params = std::get<FlexParams>(instruction.params);
    const std::span<const int32_t> captures = std::span(instruction.operands).subspan(operand::kFirstCapture);
    const auto num_score = static_cast<size_t>(params.num_score_captures);
    const std::vector<int> score_ranks = capture_ranks(program_, captures.first(num_score));
    const std::vector<int> mask_ranks = capture_ranks(program_, captures.subspan(num_score));
    FlexAttentionSpec spec;
    spec.scale = params.scale;
    if (params.score >= 0) spec.score = &program_.expressions[static_cast<size_t>(params.score)];
    if (params.mask >= 0) spec.mask = &program_.expressions[static_cast<size_t>(params.mask)];
    spec.num_score_captures = params.num_score_captures;
    spec.num_mask_captures = params.num_mask_captures;
    spec.num_score_scalars = params.num_score_scalars;
    spec.num_mask_scalars = params.num_mask_scalars;
    spec.has_block_lists = instruction.operands[operand::kKvNumBlocks] >= 0;
    spec.q_block_size = params.q_block_size;
    spec.kv_block_size = params.kv_block_size;
    for (const Prepared& prepared : prepared_) {
      const FlexAttentionSpec& other = prepared.spec;
      if (other.scale == spec.scale && other.score == spec.score && other.mask == spec.mask &&
          prepared.score_ranks == score_ranks && prepared.mask_ranks == mask_ranks &&
          other.num_score_scalars == spec.num_score_scalars && other.num_mask_scalars == spec.num_mask_scalars &&
          other.has_block_lists == spec.has_block_lists && other.q_block_size == spec.q_block_size &&
          other.kv_block_size == spec.kv_block_size) {
        attentions_[number] = prepared.attention;
        return Status::ok();
      }
    }
    FLEXPTE_ASSIGN(std::shared_ptr<const FlexAttention> attention,
                   FlexAttention::create(spec, score_ranks, mask_ranks));
    attentions_[number] = attention;
    prepared_.push_back({spec, score_ranks, mask_ranks, std::move(attention)});
    return Status::ok();
  }

  struct Prepared {
    FlexAttentionSpec spec;
    std::vector<int> score_ranks;
    std::vector<int> mask_ranks;
    std::shared_ptr<const FlexAttention> attention;
  };

  const BoundProgram& program_;
  std::shared_ptr<const ThreadPool> pool_;
  std::vector<std::shared_ptr<const FlexAttention>> attentions_;  // by instruction; null for other kinds
  std::vector<Prepared> prepared_;
  size_t workspace_bytes_ = 0;
  size_t max_scalars_ = 0;
};

class HostInstance final : public DelegateInstance {
 public:
  HostInstance(const HostExecutable& executable, std::unique_ptr<Frame> frame, ZeroPages workspace, size_t max_scalars)
      : executable_(executable),
        frame_(std::move(frame)),
        workspace_(std::move(workspace)),
        scalars_(max_scalars),
        plans_(static_cast<size_t>(executable.program().num_plans)),
        is_planned_(plans_.size()) {
    if (Profile::is_wanted()) profile_.emplace(executable.program());
  }

  Status execute(std::span<DelegateArgument> inputs, std::span<DelegateArgument> outputs) override {
    FLEXPTE_TRY(frame_->begin(inputs, outputs));
    std::fill(is_planned_.begin(), is_planned_.end(), false);
    const BoundProgram& program = executable_.program();
    if (profile_) profile_->start();
    for (size_t i = 0; i < program.instructions.size(); ++i) {
      if (i == program.first_state_write) FLEXPTE_TRY(frame_->check_positions());
      const Status status = run(i);
      if (!status.is_ok()) return {status.code(), describe_instruction(program, i) + ": " + status.message()};
      if (profile_) profile_->add(i);
    }
    if (profile_) profile_->count_call();
    frame_->finish(outputs);
    return Status::ok();
  }

 private:
  using Operands = std::span<const TensorView>;

  Status run(size_t number) {
    const Instruction& instruction = executable_.program().instructions[number];
    const Operands operands = frame_->operands(number);
    for (size_t k = 0; k < operands.size(); ++k) {
      if (instruction.writes(k) && instruction.operands[k] >= 0 && operands[k].num_elements() == 0) {
        return Status::ok();
      }
    }
    return (this->*kRun[static_cast<size_t>(instruction.kind)])(number, instruction, operands);
  }

  static const TensorView* optional(const Instruction& instruction, Operands operands, size_t which) {
    return instruction.operands[which] < 0 ? nullptr : &operands[which];
  }

  std::span<const int64_t> scalars_of(const Instruction& instruction) {
    const std::span<int64_t> values = std::span(scalars_).first(instruction.scalars.size());
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = frame_->scalars()[static_cast<size_t>(instruction.scalars[i])];
    }
    return values;
  }

  const ThreadPool& pool() const { return executable_.pool(); }

  Status linear(size_t, const Instruction& instruction, Operands v) {
    using namespace operand;
    flexpte::linear(v[kX], v[kWeight], optional(instruction, v, kBias), v[kOut], pool(), workspace_.bytes());
    return Status::ok();
  }
  Status gather(size_t, const Instruction& instruction, Operands v) {
    using namespace operand;
    return flexpte::gather(v[kGatherSource], std::get<GatherParams>(instruction.params).dim, v[kGatherIndex],
                           v[kGatherOut], pool());
  }
  Status rms_norm(size_t, const Instruction& instruction, Operands v) {
    using namespace operand;
    flexpte::rms_norm(v[kX], optional(instruction, v, kWeight), std::get<NormParams>(instruction.params).eps, v[kOut],
                      pool());
    return Status::ok();
  }
  Status layer_norm(size_t, const Instruction& instruction, Operands v) {
    using namespace operand;
    flexpte::layer_norm(v[kX], optional(instruction, v, kWeight), optional(instruction, v, kBias),
                        std::get<NormParams>(instruction.params).eps, v[kOut], pool());
    return Status::ok();
  }
  Status elementwise(size_t, const Instruction& instruction, Operands v) {
    using namespace operand;
    const auto& params = std::get<ElementwiseParams>(instruction.params);
    const auto num_inputs = static_cast<size_t>(params.num_inputs);
    return flexpte::elementwise(*params.program, v.subspan(kFirstInput, num_inputs), scalars_of(instruction),
                                v.subspan(kFirstInput + num_inputs), v[kElementwiseOut], pool(), workspace_.bytes());
  }
  Status reduce(size_t, const Instruction& instruction, Operands v) {
    using namespace operand;
    const auto& params = std::get<ReduceParams>(instruction.params);
    flexpte::reduce(params.op, v[kUnaryX], params.num_dims, v[kUnaryOut], pool());
    return Status::ok();
  }
  Status softmax(size_t, const Instruction& instruction, Operands v) {
    using namespace operand;
    flexpte::softmax(v[kUnaryX], std::get<SoftmaxParams>(instruction.params).log, v[kUnaryOut], pool());
    return Status::ok();
  }
  Status matmul(size_t, const Instruction&, Operands v) {
    using namespace operand;
    flexpte::matmul(v[kMatMulA], v[kMatMulB], v[kMatMulOut], pool(), workspace_.bytes());
    return Status::ok();
  }
  Status index_copy(size_t, const Instruction& instruction, Operands v) {
    using namespace operand;
    return flexpte::index_copy(v[kTarget], std::get<IndexCopyParams>(instruction.params).dim, v[kCopyIndex],
                               v[kCopySource], pool());
  }
  Status arange(size_t, const Instruction& instruction, Operands v) {
    const auto& params = std::get<ArangeParams>(instruction.params);
    flexpte::arange(v[operand::kArangeOut], frame_->evaluate(params.start), frame_->evaluate(params.step));
    return Status::ok();
  }
  Status flex_attention(size_t number, const Instruction& instruction, Operands v) {
    const auto& params = std::get<FlexParams>(instruction.params);
    const FlexAttentionArgs args = flex_arguments(params, v, scalars_of(instruction));
    const FlexAttention& attention = executable_.attention(number);
    const auto plan = static_cast<size_t>(params.plan);
    if (!is_planned_[plan]) {
      FLEXPTE_TRY(attention.plan(args, plans_[plan], pool()));
      is_planned_[plan] = true;
      if (profile_) profile_->add_planning();
    }
    return attention.run(args, plans_[plan], pool(), workspace_.bytes());
  }

  // By OpKind.
  using Run = Status (HostInstance::*)(size_t, const Instruction&, Operands);
  static constexpr std::array<Run, kNumOpKinds> kRun = {
      &HostInstance::linear,      &HostInstance::gather, &HostInstance::rms_norm,       &HostInstance::layer_norm,
      &HostInstance::elementwise, &HostInstance::reduce, &HostInstance::softmax,        &HostInstance::matmul,
      &HostInstance::index_copy,  &HostInstance::arange, &HostInstance::flex_attention,
  };

  const HostExecutable& executable_;
  std::unique_ptr<Frame> frame_;
  ZeroPages workspace_;
  std::vector<int64_t> scalars_;  // of the instruction that runs
  std::vector<FlexPlan> plans_;
  std::vector<bool> is_planned_;  // in this call
  std::optional<Profile> profile_;
};

Result<std::unique_ptr<DelegateInstance>> HostExecutable::instantiate(StateStore& states) const {
  FLEXPTE_ASSIGN(std::unique_ptr<Frame> frame, Frame::create(program_, states));
  FLEXPTE_ASSIGN(ZeroPages workspace, ZeroPages::allocate(workspace_bytes_, "the delegate's workspace"));
  return std::unique_ptr<DelegateInstance>(
      std::make_unique<HostInstance>(*this, std::move(frame), std::move(workspace), max_scalars_));
}

class HostDevice final : public Device {
 public:
  explicit HostDevice(std::shared_ptr<const ThreadPool> pool) : pool_(std::move(pool)) {}
  std::string_view name() const override { return "host"; }
  Result<std::unique_ptr<Executable>> prepare(const BoundProgram& program) const override {
    FLEXPTE_ASSIGN(std::unique_ptr<HostExecutable> executable, HostExecutable::create(program, pool_));
    return std::unique_ptr<Executable>(std::move(executable));
  }

 private:
  std::shared_ptr<const ThreadPool> pool_;
};

}  // namespace

std::unique_ptr<Device> make_host_device(std::shared_ptr<const ThreadPool> pool) {
  return std::make_unique<HostDevice>(std::move(pool));
}

}  // namespace flexpte::bound
