// Elementwise operators as expressions: nodes are made with ATen's type promotion, compiled when the
// operator is bound, and run by the tile evaluator.
#pragma once

#include <functional>
#include <initializer_list>
#include <span>
#include <vector>

#include "runtime/kernels/expression.h"
#include "runtime/ops/op.h"

namespace flexpte {

// A node of the expression under construction.
struct Node {
  int32_t id = -1;
  DType type = DType::kF32;  // kBool, kI32, kI64 or kF32
};

class ExpressionBuilder {
 public:
  Node constant(double value);  // F32
  Node constant_integer(int64_t value, DType type = DType::kI64);
  Node input(int32_t index, DType type);
  Node op(ExprOp op, DType type, std::initializer_list<Node> args);
  Node cast(Node node, DType type);
  Node to_float(Node node) { return cast(node, DType::kF32); }
  // A binary operation in the common type of its arguments; comparisons give bool.
  Node arithmetic(ExprOp op, Node a, Node b);
  Node compare(ExprOp op, Node a, Node b);
  Node where(Node condition, Node a, Node b);

  // Bool < I32 < I64 < F32, as ATen's categories.
  static DType promote(DType a, DType b) { return std::max(a, b); }

  const Expression& expression() const { return expression_; }

 private:
  Node add(ExprNode node);

  Expression expression_;
};

// The type in which an expression computes on elements of `dtype`.
DType expression_type(DType dtype);

// Operands of an elementwise operator: argument numbers of tensors and scalars, made into nodes.
// `build` makes the result from them, in that order.
using BuildExpression = std::function<Result<Node>(ExpressionBuilder&, std::span<const Node>)>;

// A step that computes out = build(operands...) with broadcasting, for the tensor at argument `out_arg`.
// Operands that are missing or none come as nodes with id -1 where `optional` allows it.
Result<Step> bind_elementwise(const Binder& binder, std::initializer_list<size_t> operands, size_t out_arg,
                              const BuildExpression& build, bool optional = false);

}  // namespace flexpte
