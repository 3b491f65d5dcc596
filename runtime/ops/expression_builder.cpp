#include "runtime/ops/expression_builder.h"

#include <memory>

namespace flexpte {
namespace {

constexpr size_t kMaxOperands = 6;

// A scalar that is computed at run time, read as a tensor of rank 0.
TensorView view_of_scalar(Value& value) {
  TensorView view;
  view.data = value.kind == ValueKind::kDouble ? static_cast<void*>(&value.real) : &value.integer;
  view.dtype = value.kind == ValueKind::kDouble ? DType::kF64 : DType::kI64;
  return view;
}

}  // namespace

DType expression_type(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return DType::kBool;
    case DType::kU8:
    case DType::kI8:
    case DType::kI16:
    case DType::kI32:
      return DType::kI32;
    case DType::kI64:
      return DType::kI64;
    default:
      return DType::kF32;
  }
}

Node ExpressionBuilder::add(ExprNode node) {
  const DType type = node.type;
  expression_.nodes.push_back(std::move(node));
  return {static_cast<int32_t>(expression_.nodes.size()) - 1, type};
}

Node ExpressionBuilder::constant(double value) {
  ExprNode node;
  node.op = ExprOp::kConstant;
  node.value_float = value;
  return add(std::move(node));
}

Node ExpressionBuilder::constant_integer(int64_t value, DType type) {
  ExprNode node;
  node.op = ExprOp::kConstant;
  node.type = type;
  node.value_int = value;
  return add(std::move(node));
}

Node ExpressionBuilder::input(int32_t index, DType type) {
  ExprNode node;
  node.op = ExprOp::kInput;
  node.type = type;
  node.index = index;
  return add(std::move(node));
}

Node ExpressionBuilder::op(ExprOp op, DType type, std::initializer_list<Node> args) {
  ExprNode node;
  node.op = op;
  node.type = type;
  for (const Node& arg : args) node.args.push_back(arg.id);
  return add(std::move(node));
}

Node ExpressionBuilder::cast(Node node, DType type) {
  return node.type == type ? node : op(ExprOp::kCast, type, {node});
}

Node ExpressionBuilder::arithmetic(ExprOp kind, Node a, Node b) {
  const DType type = promote(a.type, b.type);
  return op(kind, type, {cast(a, type), cast(b, type)});
}

Node ExpressionBuilder::compare(ExprOp kind, Node a, Node b) {
  const DType type = promote(a.type, b.type);
  return op(kind, DType::kBool, {cast(a, type), cast(b, type)});
}

Node ExpressionBuilder::where(Node condition, Node a, Node b) {
  const DType type = promote(a.type, b.type);
  return op(ExprOp::kWhere, type, {cast(condition, DType::kBool), cast(a, type), cast(b, type)});
}

Result<Step> bind_elementwise(const Binder& binder, std::initializer_list<size_t> operands, size_t out_arg,
                              const BuildExpression& build, bool optional) {
  struct Operand {
    int32_t id = -1;
    bool is_tensor = false;
  };
  FLEXPTE_TRY(binder.expect_args(out_arg + 1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(out_arg));
  ExpressionBuilder builder;
  std::array<Operand, kMaxOperands> inputs;
  size_t num_inputs = 0;
  std::vector<Node> nodes;
  // Scalars promote by category only: they never make a tensor's integers wider.
  DType tensors_type = DType::kBool;
  for (const size_t arg : operands) {
    if (binder.tensor(arg).is_ok()) {
      tensors_type = std::max(tensors_type, expression_type(binder.dtype(*binder.tensor(arg))));
    }
  }
  const DType integer_type = tensors_type == DType::kI32 ? DType::kI32 : DType::kI64;
  for (const size_t arg : operands) {
    if (optional && binder.is_none(arg)) {
      nodes.push_back({});
    } else if (auto tensor = binder.tensor(arg); tensor.is_ok()) {
      const DType dtype = binder.dtype(*tensor);
      if (dtype == DType::kF64) {
        return Status(Code::kUnsupported, "elementwise operators on float64 are not supported; use float32");
      }
      nodes.push_back(builder.input(static_cast<int32_t>(num_inputs), expression_type(dtype)));
      inputs[num_inputs++] = {*tensor, true};
    } else {
      FLEXPTE_ASSIGN(const Scalar scalar, binder.scalar(arg));
      if (!scalar.is_fixed) {
        const Node raw =
            builder.input(static_cast<int32_t>(num_inputs), scalar.is_floating ? DType::kF32 : DType::kI64);
        inputs[num_inputs++] = {scalar.id, false};
        nodes.push_back(scalar.is_floating ? raw : builder.cast(raw, scalar.is_bool ? DType::kBool : integer_type));
      } else if (scalar.is_floating) {
        nodes.push_back(builder.constant(scalar.real));
      } else if (scalar.is_bool) {
        nodes.push_back(builder.cast(builder.constant_integer(scalar.integer), DType::kBool));
      } else {
        nodes.push_back(builder.constant_integer(scalar.integer, integer_type));
      }
    }
  }
  FLEXPTE_ASSIGN(const Node raw_result, build(builder, nodes));
  if (binder.dtype(out) == DType::kF64) {
    return Status(Code::kUnsupported, "elementwise operators on float64 are not supported; use float32");
  }
  Node result = builder.cast(raw_result, expression_type(binder.dtype(out)));
  if (static_cast<size_t>(result.id) + 1 != builder.expression().nodes.size()) {
    result = builder.where(builder.cast(builder.constant_integer(1), DType::kBool), result, result);
  }
  FLEXPTE_ASSIGN(auto compiled, TileProgram::compile(builder.expression(), static_cast<int>(num_inputs), 0, {}));
  const auto program = std::make_shared<const TileProgram>(std::move(compiled));
  binder.workspace(elementwise_workspace_bytes(*program, binder.num_threads()));
  return Step([out, inputs, num_inputs, program](const Frame& frame) -> Status {
    std::array<TensorView, kMaxOperands> views;
    SizeList sizes;
    for (size_t i = 0; i < num_inputs; ++i) {
      Value& value = frame[inputs[i].id];
      views[i] = inputs[i].is_tensor ? value.tensor : view_of_scalar(value);
      if (!broadcast(sizes, sizes_of(views[i]))) {
        return invalid("sizes " + shape_string(views[i]) + " do not broadcast with " + sizes_string(sizes));
      }
    }
    FLEXPTE_TRY(frame.resize(out, sizes));
    for (size_t i = 0; i < num_inputs; ++i) {
      FLEXPTE_ASSIGN(views[i], expand(views[i], sizes));
    }
    return elementwise(*program, std::span(views).first(num_inputs), {}, {}, frame.tensor(out), frame.pool,
                       frame.workspace);
  });
}

}  // namespace flexpte
