#include "metal_delegate/program.h"

#include <limits>

namespace flexpte::bound {
namespace {

std::string number(int64_t n) {
  return std::to_string(n);
}

Status floor_divide(size_t which, int64_t a, int64_t b, bool modulo, int64_t& result) {
  if (b == 0) return {Code::kInvalidArgument, "scalar " + std::to_string(which) + " divides by zero"};
  if (b == -1) {
    if (modulo) {
      result = 0;
      return Status::ok();
    }
    if (a == std::numeric_limits<int64_t>::min()) {
      return {Code::kInvalidArgument, "scalar " + std::to_string(which) + " overflows"};
    }
    result = -a;
    return Status::ok();
  }
  const int64_t remainder = a % b;
  const bool round_down = remainder != 0 && ((remainder < 0) != (b < 0));
  if (modulo) {
    result = round_down ? remainder + b : remainder;
  } else {
    result = a / b - (round_down ? 1 : 0);
  }
  return Status::ok();
}

}  // namespace

Status evaluate_scalars(std::span<const Scalar> scalars, std::span<const DelegateArgument> inputs,
                        std::span<int64_t> values) {
  for (size_t i = 0; i < scalars.size(); ++i) {
    const Scalar& scalar = scalars[i];
    const auto a = static_cast<size_t>(scalar.a);
    const auto b = static_cast<size_t>(scalar.b);
    int64_t result = 0;
    bool overflow = false;
    switch (scalar.op) {
      case ScalarOp::kConstant:
        result = scalar.value;
        break;
      case ScalarOp::kInputSize:
        result = inputs[a].tensor.size(scalar.b);
        break;
      case ScalarOp::kInputValue:
        result = inputs[a].integer;
        break;
      case ScalarOp::kAdd:
        overflow = __builtin_add_overflow(values[a], values[b], &result);
        break;
      case ScalarOp::kSub:
        overflow = __builtin_sub_overflow(values[a], values[b], &result);
        break;
      case ScalarOp::kMul:
        overflow = __builtin_mul_overflow(values[a], values[b], &result);
        break;
      case ScalarOp::kFloorDiv:
        FLEXPTE_TRY(floor_divide(i, values[a], values[b], false, result));
        break;
      case ScalarOp::kMod:
        FLEXPTE_TRY(floor_divide(i, values[a], values[b], true, result));
        break;
      case ScalarOp::kMin:
        result = std::min(values[a], values[b]);
        break;
      case ScalarOp::kMax:
        result = std::max(values[a], values[b]);
        break;
    }
    if (overflow) return {Code::kInvalidArgument, "scalar " + std::to_string(i) + " overflows"};
    if (scalar.is_extent && (result < 0 || result > scalar.upper_bound)) {
      return {Code::kInvalidArgument, "the inputs' shapes give the size " + number(result) + " (scalar " +
                                          std::to_string(i) + "), and the program was planned for 0 to " +
                                          number(scalar.upper_bound)};
    }
    values[i] = result;
  }
  return Status::ok();
}

std::string_view op_kind_name(OpKind kind) {
  constexpr std::array<std::string_view, kNumOpKinds> names = {
      "Linear",  "Gather", "RmsNorm",   "LayerNorm", "Elementwise",   "Reduce",
      "Softmax", "MatMul", "IndexCopy", "Arange",    "FlexAttention",
  };
  return names[static_cast<size_t>(kind)];
}

bool Instruction::writes(size_t operand_number) const {
  switch (kind) {
    case OpKind::kLinear:
    case OpKind::kRmsNorm:
    case OpKind::kLayerNorm:
      return operand_number == operand::kOut;
    case OpKind::kGather:
      return operand_number == operand::kGatherOut;
    case OpKind::kElementwise:
      return operand_number == operand::kElementwiseOut;
    case OpKind::kReduce:
    case OpKind::kSoftmax:
      return operand_number == operand::kUnaryOut;
    case OpKind::kMatMul:
      return operand_number == operand::kMatMulOut;
    case OpKind::kIndexCopy:
      return operand_number == operand::kTarget;
    case OpKind::kArange:
      return operand_number == operand::kArangeOut;
    case OpKind::kFlexAttention:
      return operand_number == operand::kFlexOut || operand_number == operand::kLse;
  }
  return false;
}

TensorView BoundProgram::upper_bound(int32_t value) const {
  TensorView view = values[static_cast<size_t>(value)].view;
  const auto bound = [this](Sym sym) { return is_symbolic(sym) ? scalars[scalar_of(sym)].upper_bound : sym; };
  for (size_t d = 0; d < static_cast<size_t>(view.rank); ++d) {
    view.sizes[d] = bound(view.sizes[d]);
    view.strides[d] = bound(view.strides[d]);
  }
  return view;
}

std::string describe_instruction(const BoundProgram& program, size_t number) {
  const Instruction& instruction = program.instructions[number];
  std::string text = "instruction " + std::to_string(number) + " (" + std::string(op_kind_name(instruction.kind));
  if (!instruction.name.empty()) text += ", " + instruction.name;
  return text + ")";
}

}  // namespace flexpte::bound
