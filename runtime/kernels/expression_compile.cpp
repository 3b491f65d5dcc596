// From a verified expression to steps: dead nodes dropped, constants folded, extents found, scratch
// shared between values that do not live at the same time.
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

#include "runtime/kernels/expression_program.h"

namespace flexpte {
namespace {

using Impl = TileProgram::Impl;
using Step = Impl::Step;

Extent leaf_extent(ExprOp op) {
  switch (op) {
    case ExprOp::kScore:
    case ExprOp::kInput:
      return Extent::kFull;
    case ExprOp::kQIdx:
      return Extent::kRows;
    case ExprOp::kKvIdx:
      return Extent::kCols;
    default:
      return Extent::kUniform;
  }
}

bool is_costly_op(ExprOp op) {
  return op == ExprOp::kPow || op == ExprOp::kFmod || op == ExprOp::kRemainder || op == ExprOp::kAtan2 ||
         (op >= ExprOp::kExp && op <= ExprOp::kGeluTanh && op != ExprOp::kSqrt && op != ExprOp::kRsqrt);
}

void set_literal(Step& step, const ExprNode& node) {
  switch (step.type) {
    case DType::kBool: {
      const uint8_t value = node.value_int != 0 ? 1 : 0;
      std::memcpy(step.literal.data(), &value, sizeof(value));
      break;
    }
    case DType::kI32: {
      const int32_t value = static_cast<int32_t>(node.value_int);
      std::memcpy(step.literal.data(), &value, sizeof(value));
      break;
    }
    case DType::kI64:
      std::memcpy(step.literal.data(), &node.value_int, sizeof(int64_t));
      break;
    default: {
      const float value = static_cast<float>(node.value_float);
      std::memcpy(step.literal.data(), &value, sizeof(value));
      break;
    }
  }
}

class Compiler {
 public:
  explicit Compiler(const Expression& expression) : expression_(expression) {}

  std::shared_ptr<const Impl> compile() {
    program_ = std::make_shared<Impl>();
    const std::vector<bool> reachable = reachable_nodes(expression_);
    step_of_.assign(expression_.nodes.size(), -1);
    for (size_t i = 0; i < expression_.nodes.size(); ++i) {
      if (reachable[i]) add_step(i);
    }
    drop_unused();
    assign_slots();
    return std::move(program_);
  }

 private:
  void add_step(size_t number) {
    const ExprNode& node = expression_.nodes[number];
    Step step;
    step.op = node.op;
    step.type = node.type;
    step.index = node.index;
    step.extent = leaf_extent(node.op);
    for (const int32_t a : node.args) step.extent = join(step.extent, arg_step(a).extent);
    if (node.op == ExprOp::kLoad) {
      add_load(step, node);
    } else if (!node.args.empty()) {
      step.num_args = static_cast<int32_t>(node.args.size());
      for (size_t i = 0; i < node.args.size(); ++i) step.args[i] = step_of_[static_cast<size_t>(node.args[i])];
      step.kernel = find_step_kernel(node, expression_.nodes[static_cast<size_t>(node.args.back())].type);
      fold(step);
    } else if (node.op == ExprOp::kConstant) {
      set_literal(step, node);
    }
    column_steps_.push_back(column_step(step));
    step_of_[number] = static_cast<int32_t>(program_->steps.size());
    program_->steps.push_back(step);
  }

  void add_load(Step& step, const ExprNode& node) {
    step.first_index = static_cast<int32_t>(program_->index_args.size());
    step.capture_rank = static_cast<int32_t>(node.args.size());
    for (size_t i = 0; i < node.args.size(); ++i) {
      const int32_t index = step_of_[static_cast<size_t>(node.args[i])];
      program_->index_args.push_back(index);
      const std::optional<int32_t> change = column_steps_[static_cast<size_t>(index)];
      const bool last = i + 1 == node.args.size();
      if (last && change && (*change == 1 || *change == -1)) step.column_step = *change;
      if (!last && change != 0) break_runs_ = true;
    }
    if (break_runs_) step.column_step = 0;
    break_runs_ = false;
  }

  // How an integer grows from column to column when it does so evenly (overflow aside).
  std::optional<int32_t> column_step(const Step& step) const {
    if (step.extent == Extent::kUniform || step.extent == Extent::kRows) return 0;
    if (step.op == ExprOp::kKvIdx) return 1;
    if (step.type != DType::kI32 && step.type != DType::kI64) return std::nullopt;
    const auto of = [&](size_t i) { return column_steps_[static_cast<size_t>(step.args[i])]; };
    switch (step.op) {
      case ExprOp::kCast:
        return program_->steps[static_cast<size_t>(step.args[0])].type == DType::kF32 ? std::nullopt : of(0);
      case ExprOp::kNeg:
        return of(0) ? std::optional(-*of(0)) : std::nullopt;
      case ExprOp::kAdd:
        return bounded(of(0), of(1), 1);
      case ExprOp::kSub:
        return bounded(of(0), of(1), -1);
      default:
        return std::nullopt;
    }
  }

  // a + sign * b, unless it is of no use.
  static std::optional<int32_t> bounded(std::optional<int32_t> a, std::optional<int32_t> b, int32_t sign) {
    if (!a || !b) return std::nullopt;
    const int32_t sum = *a + sign * *b;
    return std::abs(sum) <= 1 ? std::optional(sum) : std::nullopt;
  }

  // An operation on constants is a constant.
  void fold(Step& step) const {
    std::array<LaneOperand, 3> operands;
    for (int32_t i = 0; i < step.num_args; ++i) {
      const Step& arg = program_->steps[static_cast<size_t>(step.args[static_cast<size_t>(i)])];
      if (arg.op != ExprOp::kConstant) return;
      operands[static_cast<size_t>(i)].data = arg.literal.data();
    }
    step.kernel(operands.data(), step.literal.data(), 0, 1, 1);
    step.op = ExprOp::kConstant;
    step.kernel = nullptr;
    step.num_args = 0;
  }

  const Step& arg_step(int32_t node) const {
    return program_->steps[static_cast<size_t>(step_of_[static_cast<size_t>(node)])];
  }

  template <class F>
  void for_each_arg(const Step& step, F&& f) const {
    for (int32_t i = 0; i < step.num_args; ++i) f(step.args[static_cast<size_t>(i)]);
    for (int32_t i = 0; i < step.capture_rank; ++i) {
      f(program_->index_args[static_cast<size_t>(step.first_index + i)]);
    }
  }

  // Folding leaves constants that nothing reads.
  void drop_unused() {
    std::vector<Step>& steps = program_->steps;
    std::vector<bool> used(steps.size(), false);
    used.back() = true;
    for (size_t i = steps.size(); i-- > 0;) {
      if (used[i]) for_each_arg(steps[i], [&](int32_t a) { used[static_cast<size_t>(a)] = true; });
    }
    std::vector<int32_t> renumbered(steps.size(), -1);
    std::vector<Step> kept;
    for (size_t i = 0; i < steps.size(); ++i) {
      if (!used[i]) continue;
      renumbered[i] = static_cast<int32_t>(kept.size());
      kept.push_back(steps[i]);
      for (int32_t& a : kept.back().args) a = a < static_cast<int32_t>(i) ? renumbered[static_cast<size_t>(a)] : 0;
    }
    for (int32_t& a : program_->index_args) a = std::max(renumbered[static_cast<size_t>(a)], 0);
    steps = std::move(kept);
    for (const Step& step : steps) {
      program_->max_capture_rank = std::max(program_->max_capture_rank, step.capture_rank);
      program_->uses_score |= step.op == ExprOp::kScore;
      program_->uses_inputs |= step.op == ExprOp::kInput;
      program_->uses_indices |= step.op >= ExprOp::kBatch && step.op <= ExprOp::kKvIdx;
      program_->is_costly |= is_costly_op(step.op);
    }
  }

  // Steps run in two passes: those that are not kFull once, then those that are, band by band. A
  // value of the first pass that the second reads must last to the end; all others share scratch
  // with later ones of their pass once read for the last time.
  void assign_slots() {
    std::vector<Step>& steps = program_->steps;
    constexpr size_t kForever = SIZE_MAX;
    std::vector<size_t> last_use(steps.size(), 0);
    for (size_t i = 0; i < steps.size(); ++i) {
      for_each_arg(steps[i], [&](int32_t a) {
        size_t& use = last_use[static_cast<size_t>(a)];
        const bool crosses = steps[i].extent == Extent::kFull && steps[static_cast<size_t>(a)].extent != Extent::kFull;
        use = crosses ? kForever : std::max(use, i);
      });
    }
    last_use.back() = kForever;
    std::vector<size_t> busy_until;  // per slot
    for (size_t i = 0; i < steps.size(); ++i) {
      Step& step = steps[i];
      if (step.op == ExprOp::kConstant || step.op == ExprOp::kScore) continue;
      const bool result = i + 1 == steps.size();
      const int64_t size = element_size_bytes(step.type);
      const auto reusable = [&](size_t s) {
        const Impl::Slot& slot = program_->slots[s];
        return !result && slot.extent == step.extent && slot.element_size == size && busy_until[s] < i;
      };
      size_t s = 0;
      while (s < program_->slots.size() && !reusable(s)) ++s;
      if (s == program_->slots.size()) {
        program_->slots.push_back({step.extent, size, result});
        busy_until.push_back(0);
      }
      busy_until[s] = std::max(last_use[i], i);
      step.slot = static_cast<int32_t>(s);
    }
  }

  const Expression& expression_;
  std::shared_ptr<Impl> program_;
  std::vector<int32_t> step_of_;                      // of each node
  std::vector<std::optional<int32_t>> column_steps_;  // of each step, before dropping
  bool break_runs_ = false;
};

}  // namespace

TileProgram::TileProgram(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

Result<TileProgram> TileProgram::compile(const Expression& expression, int num_inputs, int num_scalars,
                                         std::span<const int> capture_ranks) {
  if (num_inputs > Impl::kMaxInputs) {
    return Status(Code::kUnsupported, "expression: has " + std::to_string(num_inputs) + " inputs; at most " +
                                          std::to_string(Impl::kMaxInputs) + " are supported");
  }
  FLEXPTE_TRY(verify_expression(expression, num_inputs, num_scalars, capture_ranks));
  return TileProgram(Compiler(expression).compile());
}

DType TileProgram::result_type() const {
  return impl_->steps.back().type;
}
Extent TileProgram::result_extent() const {
  return impl_->steps.back().extent;
}
bool TileProgram::uses_score() const {
  return impl_->uses_score;
}

}  // namespace flexpte
