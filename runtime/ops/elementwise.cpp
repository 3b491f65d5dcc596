// Arithmetic, comparisons, logic and selection.
#include "runtime/ops/expression_builder.h"

namespace flexpte {
namespace {

using Nodes = std::span<const Node>;
using Builder = ExpressionBuilder;

// aten::<op>.out(self, other, out)
template <ExprOp kOp>
Result<Step> arithmetic(const Binder& binder) {
  return bind_elementwise(binder, {0, 1}, 2,
                          [](Builder& e, Nodes x) -> Result<Node> { return e.arithmetic(kOp, x[0], x[1]); });
}

// self + alpha * other, self - alpha * other, and reversed: other - alpha * self
template <ExprOp kOp, bool kReversed = false>
Result<Step> with_alpha(const Binder& binder) {
  FLEXPTE_ASSIGN(const Scalar alpha, binder.scalar(2));
  const bool plain = alpha.is_fixed && !alpha.is_bool && alpha.real == 1.0;
  return bind_elementwise(binder, {0, 1, 2}, 3, [plain](Builder& e, Nodes x) -> Result<Node> {
    const Node a = kReversed ? x[1] : x[0];
    const Node b = kReversed ? x[0] : x[1];
    return e.arithmetic(kOp, a, plain ? b : e.arithmetic(ExprOp::kMul, b, x[2]));
  });
}

Result<Step> divide(const Binder& binder) {
  return bind_elementwise(binder, {0, 1}, 2, [](Builder& e, Nodes x) -> Result<Node> {
    return e.op(ExprOp::kDiv, DType::kF32, {e.to_float(x[0]), e.to_float(x[1])});
  });
}

// aten::div.out_mode(self, other, rounding_mode, out)
Result<Step> divide_rounded(const Binder& binder) {
  FLEXPTE_ASSIGN(const std::string_view mode, binder.optional_text(2));
  if (mode != "" && mode != "floor" && mode != "trunc") {
    return Status(Code::kInvalidProgram, "has the unknown rounding mode '" + std::string(mode) + "'");
  }
  return bind_elementwise(binder, {0, 1}, 3, [mode](Builder& e, Nodes x) -> Result<Node> {
    if (mode == "floor") return e.arithmetic(ExprOp::kFloorDiv, x[0], x[1]);
    if (mode == "trunc") return e.arithmetic(ExprOp::kTruncDiv, x[0], x[1]);
    return e.op(ExprOp::kDiv, DType::kF32, {e.to_float(x[0]), e.to_float(x[1])});
  });
}

Result<Step> power(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t out, binder.out(2));
  const bool floating = is_floating(binder.dtype(out));
  return bind_elementwise(binder, {0, 1}, 2, [floating](Builder& e, Nodes x) -> Result<Node> {
    if (floating) return e.op(ExprOp::kPow, DType::kF32, {e.to_float(x[0]), e.to_float(x[1])});
    return e.arithmetic(ExprOp::kPow, x[0], x[1]);
  });
}

// x to a fixed power: the common ones without pow.
Result<Step> power_scalar(const Binder& binder) {
  FLEXPTE_ASSIGN(const Scalar exponent, binder.scalar(1));
  if (!exponent.is_fixed || (exponent.real != 2.0 && exponent.real != 0.5 && exponent.real != -0.5)) {
    return power(binder);
  }
  FLEXPTE_ASSIGN(const int32_t out, binder.out(2));
  if (!is_floating(binder.dtype(out))) return power(binder);
  const ExprOp op = exponent.real == 2.0 ? ExprOp::kSquare : exponent.real == 0.5 ? ExprOp::kSqrt : ExprOp::kRsqrt;
  return bind_elementwise(
      binder, {0}, 2, [op](Builder& e, Nodes x) -> Result<Node> { return e.op(op, DType::kF32, {e.to_float(x[0])}); });
}

template <ExprOp kOp>
Result<Step> compare(const Binder& binder) {
  return bind_elementwise(binder, {0, 1}, 2,
                          [](Builder& e, Nodes x) -> Result<Node> { return e.compare(kOp, x[0], x[1]); });
}

template <ExprOp kOp>
Result<Step> logical(const Binder& binder) {
  return bind_elementwise(binder, {0, 1}, 2, [](Builder& e, Nodes x) -> Result<Node> {
    return e.op(kOp, DType::kBool, {e.cast(x[0], DType::kBool), e.cast(x[1], DType::kBool)});
  });
}

Result<Step> logical_not(const Binder& binder) {
  return bind_elementwise(binder, {0}, 1, [](Builder& e, Nodes x) -> Result<Node> {
    return e.op(ExprOp::kLogicalNot, DType::kBool, {e.cast(x[0], DType::kBool)});
  });
}

// Bitwise operators on bools are the logical ones.
template <ExprOp kOnIntegers, ExprOp kOnBools>
Result<Step> bitwise(const Binder& binder) {
  return bind_elementwise(binder, {0, 1}, 2, [](Builder& e, Nodes x) -> Result<Node> {
    const DType type = Builder::promote(x[0].type, x[1].type);
    if (type == DType::kF32) return Status(Code::kInvalidProgram, "is a bitwise operator on floating numbers");
    return e.op(type == DType::kBool ? kOnBools : kOnIntegers, type, {e.cast(x[0], type), e.cast(x[1], type)});
  });
}

Result<Step> bitwise_not(const Binder& binder) {
  return bind_elementwise(binder, {0}, 1, [](Builder& e, Nodes x) -> Result<Node> {
    if (x[0].type == DType::kF32) return Status(Code::kInvalidProgram, "is a bitwise operator on floating numbers");
    const ExprOp op = x[0].type == DType::kBool ? ExprOp::kLogicalNot : ExprOp::kBitNot;
    return e.op(op, x[0].type, {x[0]});
  });
}

// aten::where.self_out(condition, self, other, out)
Result<Step> where(const Binder& binder) {
  return bind_elementwise(binder, {0, 1, 2}, 3,
                          [](Builder& e, Nodes x) -> Result<Node> { return e.where(x[0], x[1], x[2]); });
}

// aten::masked_fill.Scalar_out(self, mask, value, out)
Result<Step> masked_fill(const Binder& binder) {
  return bind_elementwise(binder, {0, 1, 2}, 3, [](Builder& e, Nodes x) -> Result<Node> {
    return e.where(x[1], e.cast(x[2], x[0].type), x[0]);
  });
}

// aten::clamp.out(self, min?, max?, out)
Result<Step> clamp(const Binder& binder) {
  return bind_elementwise(
      binder, {0, 1, 2}, 3,
      [](Builder& e, Nodes x) -> Result<Node> {
        Node result = x[0];
        if (x[1].id >= 0) result = e.arithmetic(ExprOp::kMax, result, x[1]);
        if (x[2].id >= 0) result = e.arithmetic(ExprOp::kMin, result, x[2]);
        return result;
      },
      /*optional=*/true);
}

constexpr OpEntry kOps[] = {
    {"aten::add.out", with_alpha<ExprOp::kAdd>},
    {"aten::add.Scalar_out", with_alpha<ExprOp::kAdd>},
    {"aten::sub.out", with_alpha<ExprOp::kSub>},
    {"aten::sub.Scalar_out", with_alpha<ExprOp::kSub>},
    {"aten::rsub.Scalar_out", with_alpha<ExprOp::kSub, true>},
    {"aten::mul.out", arithmetic<ExprOp::kMul>},
    {"aten::mul.Scalar_out", arithmetic<ExprOp::kMul>},
    {"aten::div.out", divide},
    {"aten::div.Scalar_out", divide},
    {"aten::div.out_mode", divide_rounded},
    {"aten::div.Scalar_mode_out", divide_rounded},
    {"aten::floor_divide.out", arithmetic<ExprOp::kFloorDiv>},
    {"aten::remainder.Tensor_out", arithmetic<ExprOp::kRemainder>},
    {"aten::remainder.Scalar_out", arithmetic<ExprOp::kRemainder>},
    {"aten::fmod.Tensor_out", arithmetic<ExprOp::kFmod>},
    {"aten::fmod.Scalar_out", arithmetic<ExprOp::kFmod>},
    {"aten::pow.Tensor_Scalar_out", power_scalar},
    {"aten::pow.Tensor_Tensor_out", power},
    {"aten::pow.Scalar_out", power},
    {"aten::maximum.out", arithmetic<ExprOp::kMax>},
    {"aten::minimum.out", arithmetic<ExprOp::kMin>},
    {"aten::atan2.out", arithmetic<ExprOp::kAtan2>},
    {"aten::eq.Tensor_out", compare<ExprOp::kEq>},
    {"aten::eq.Scalar_out", compare<ExprOp::kEq>},
    {"aten::ne.Tensor_out", compare<ExprOp::kNe>},
    {"aten::ne.Scalar_out", compare<ExprOp::kNe>},
    {"aten::lt.Tensor_out", compare<ExprOp::kLt>},
    {"aten::lt.Scalar_out", compare<ExprOp::kLt>},
    {"aten::le.Tensor_out", compare<ExprOp::kLe>},
    {"aten::le.Scalar_out", compare<ExprOp::kLe>},
    {"aten::gt.Tensor_out", compare<ExprOp::kGt>},
    {"aten::gt.Scalar_out", compare<ExprOp::kGt>},
    {"aten::ge.Tensor_out", compare<ExprOp::kGe>},
    {"aten::ge.Scalar_out", compare<ExprOp::kGe>},
    {"aten::logical_and.out", logical<ExprOp::kLogicalAnd>},
    {"aten::logical_or.out", logical<ExprOp::kLogicalOr>},
    {"aten::logical_xor.out", logical<ExprOp::kLogicalXor>},
    {"aten::logical_not.out", logical_not},
    {"aten::bitwise_and.Tensor_out", bitwise<ExprOp::kBitAnd, ExprOp::kLogicalAnd>},
    {"aten::bitwise_and.Scalar_out", bitwise<ExprOp::kBitAnd, ExprOp::kLogicalAnd>},
    {"aten::bitwise_or.Tensor_out", bitwise<ExprOp::kBitOr, ExprOp::kLogicalOr>},
    {"aten::bitwise_or.Scalar_out", bitwise<ExprOp::kBitOr, ExprOp::kLogicalOr>},
    {"aten::bitwise_xor.Tensor_out", bitwise<ExprOp::kBitXor, ExprOp::kLogicalXor>},
    {"aten::bitwise_xor.Scalar_out", bitwise<ExprOp::kBitXor, ExprOp::kLogicalXor>},
    {"aten::bitwise_left_shift.Tensor_out", bitwise<ExprOp::kShiftLeft, ExprOp::kShiftLeft>},
    {"aten::bitwise_left_shift.Tensor_Scalar_out", bitwise<ExprOp::kShiftLeft, ExprOp::kShiftLeft>},
    {"aten::bitwise_right_shift.Tensor_out", bitwise<ExprOp::kShiftRight, ExprOp::kShiftRight>},
    {"aten::bitwise_right_shift.Tensor_Scalar_out", bitwise<ExprOp::kShiftRight, ExprOp::kShiftRight>},
    {"aten::bitwise_not.out", bitwise_not},
    {"aten::where.self_out", where},
    {"aten::masked_fill.Scalar_out", masked_fill},
    {"aten::clamp.out", clamp},
    {"aten::clamp.Tensor_out", clamp},
};

}  // namespace

std::span<const OpEntry> elementwise_ops() {
  return kOps;
}

}  // namespace flexpte
