// Functions of one tensor.
#include "runtime/ops/expression_builder.h"

namespace flexpte {
namespace {

using Nodes = std::span<const Node>;
using Builder = ExpressionBuilder;

// In float32; integers are widened.
template <ExprOp kOp>
Result<Step> function(const Binder& binder) {
  return bind_elementwise(
      binder, {0}, 1, [](Builder& e, Nodes x) -> Result<Node> { return e.op(kOp, DType::kF32, {e.to_float(x[0])}); });
}

// In the type of the tensor.
template <ExprOp kOp>
Result<Step> keep_type(const Binder& binder) {
  return bind_elementwise(binder, {0}, 1, [](Builder& e, Nodes x) -> Result<Node> {
    const DType type = x[0].type == DType::kBool ? DType::kI32 : x[0].type;
    return e.op(kOp, type, {e.cast(x[0], type)});
  });
}

// Rounding leaves integers as they are.
template <ExprOp kOp>
Result<Step> rounding(const Binder& binder) {
  return bind_elementwise(binder, {0}, 1, [](Builder& e, Nodes x) -> Result<Node> {
    return x[0].type == DType::kF32 ? e.op(kOp, DType::kF32, {x[0]}) : x[0];
  });
}

template <ExprOp kOp>
Result<Step> predicate(const Binder& binder) {
  return bind_elementwise(
      binder, {0}, 1, [](Builder& e, Nodes x) -> Result<Node> { return e.op(kOp, DType::kBool, {e.to_float(x[0])}); });
}

Result<Step> relu(const Binder& binder) {
  return bind_elementwise(binder, {0}, 1, [](Builder& e, Nodes x) -> Result<Node> {
    if (x[0].type == DType::kF32) return e.op(ExprOp::kRelu, DType::kF32, {x[0]});
    return e.arithmetic(ExprOp::kMax, x[0], e.constant_integer(0, x[0].type));
  });
}

// aten::gelu.out(self, approximate, out)
Result<Step> gelu(const Binder& binder) {
  FLEXPTE_ASSIGN(const std::string_view approximate, binder.optional_text(1));
  if (approximate != "none" && approximate != "tanh") {
    return Status(Code::kInvalidProgram, "has the unknown approximation '" + std::string(approximate) + "'");
  }
  const ExprOp op = approximate == "tanh" ? ExprOp::kGeluTanh : ExprOp::kGeluErf;
  return bind_elementwise(
      binder, {0}, 2, [op](Builder& e, Nodes x) -> Result<Node> { return e.op(op, DType::kF32, {e.to_float(x[0])}); });
}

// aten::hardtanh.out(self, min, max, out)
Result<Step> hardtanh(const Binder& binder) {
  return bind_elementwise(binder, {0, 1, 2}, 3, [](Builder& e, Nodes x) -> Result<Node> {
    return e.arithmetic(ExprOp::kMin, e.arithmetic(ExprOp::kMax, x[0], x[1]), x[2]);
  });
}

// aten::leaky_relu.out(self, negative_slope, out)
Result<Step> leaky_relu(const Binder& binder) {
  return bind_elementwise(binder, {0, 1}, 2, [](Builder& e, Nodes x) -> Result<Node> {
    const Node positive = e.compare(ExprOp::kGt, x[0], e.constant(0.0));
    return e.where(positive, x[0], e.arithmetic(ExprOp::kMul, x[0], x[1]));
  });
}

// aten::elu.out(self, alpha, scale, input_scale, out):
// scale * (x > 0 ? x : alpha * expm1(input_scale * x))
Result<Step> elu(const Binder& binder) {
  return bind_elementwise(binder, {0, 1, 2, 3}, 4, [](Builder& e, Nodes x) -> Result<Node> {
    const Node negative = e.op(ExprOp::kExpm1, DType::kF32, {e.to_float(e.arithmetic(ExprOp::kMul, x[0], x[3]))});
    const Node positive = e.compare(ExprOp::kGt, x[0], e.constant(0.0));
    return e.arithmetic(ExprOp::kMul, e.where(positive, x[0], e.arithmetic(ExprOp::kMul, negative, x[1])), x[2]);
  });
}

// aten::logit.out(self, eps?, out): log(x / (1 - x)), x clamped to [eps, 1 - eps]
Result<Step> logit(const Binder& binder) {
  return bind_elementwise(
      binder, {0, 1}, 2,
      [](Builder& e, Nodes x) -> Result<Node> {
        Node p = e.to_float(x[0]);
        const Node one = e.constant(1.0);
        if (x[1].id >= 0) {
          const Node eps = e.to_float(x[1]);
          p = e.arithmetic(ExprOp::kMax, p, eps);
          p = e.arithmetic(ExprOp::kMin, p, e.arithmetic(ExprOp::kSub, one, eps));
        }
        const Node odds = e.arithmetic(ExprOp::kDiv, p, e.arithmetic(ExprOp::kSub, one, p));
        return e.op(ExprOp::kLog, DType::kF32, {odds});
      },
      /*optional=*/true);
}

constexpr OpEntry kOps[] = {
    {"aten::abs.out", keep_type<ExprOp::kAbs>},
    {"aten::neg.out", keep_type<ExprOp::kNeg>},
    {"aten::sign.out", keep_type<ExprOp::kSign>},
    {"aten::reciprocal.out", function<ExprOp::kReciprocal>},
    {"aten::sqrt.out", function<ExprOp::kSqrt>},
    {"aten::rsqrt.out", function<ExprOp::kRsqrt>},
    {"aten::exp.out", function<ExprOp::kExp>},
    {"aten::exp2.out", function<ExprOp::kExp2>},
    {"aten::expm1.out", function<ExprOp::kExpm1>},
    {"aten::log.out", function<ExprOp::kLog>},
    {"aten::log2.out", function<ExprOp::kLog2>},
    {"aten::log10.out", function<ExprOp::kLog10>},
    {"aten::log1p.out", function<ExprOp::kLog1p>},
    {"aten::sin.out", function<ExprOp::kSin>},
    {"aten::cos.out", function<ExprOp::kCos>},
    {"aten::tan.out", function<ExprOp::kTan>},
    {"aten::asin.out", function<ExprOp::kAsin>},
    {"aten::acos.out", function<ExprOp::kAcos>},
    {"aten::atan.out", function<ExprOp::kAtan>},
    {"aten::sinh.out", function<ExprOp::kSinh>},
    {"aten::cosh.out", function<ExprOp::kCosh>},
    {"aten::tanh.out", function<ExprOp::kTanh>},
    {"aten::asinh.out", function<ExprOp::kAsinh>},
    {"aten::acosh.out", function<ExprOp::kAcosh>},
    {"aten::atanh.out", function<ExprOp::kAtanh>},
    {"aten::sigmoid.out", function<ExprOp::kSigmoid>},
    {"aten::silu.out", function<ExprOp::kSilu>},
    {"aten::erf.out", function<ExprOp::kErf>},
    {"aten::floor.out", rounding<ExprOp::kFloor>},
    {"aten::ceil.out", rounding<ExprOp::kCeil>},
    {"aten::round.out", rounding<ExprOp::kRound>},
    {"aten::trunc.out", rounding<ExprOp::kTrunc>},
    {"aten::isinf.out", predicate<ExprOp::kIsInf>},
    {"aten::isnan.out", predicate<ExprOp::kIsNan>},
    {"aten::relu.out", relu},
    {"aten::gelu.out", gelu},
    {"aten::hardtanh.out", hardtanh},
    {"aten::leaky_relu.out", leaky_relu},
    {"aten::elu.out", elu},
    {"aten::logit.out", logit},
};

}  // namespace

std::span<const OpEntry> elementwise_math_ops() {
  return kOps;
}

}  // namespace flexpte
