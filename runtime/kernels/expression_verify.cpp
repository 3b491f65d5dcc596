// Verification of expressions as they come from a file.
#include <algorithm>
#include <string>
#include <string_view>

#include "runtime/kernels/expression_program.h"

namespace flexpte {
namespace {

constexpr std::array<std::string_view, kNumExprOps> kNames = {
    "Constant",   "Input",   "Score", "Batch",   "Head",   "QIdx",      "KvIdx",      "Scalar",     "Load",
    "Cast",       "RoundTo", "Add",   "Sub",     "Mul",    "Div",       "FloorDiv",   "Remainder",  "Fmod",
    "TruncDiv",   "Pow",     "Neg",   "Abs",     "Sign",   "Min",       "Max",        "Reciprocal", "Square",
    "Eq",         "Ne",      "Lt",    "Le",      "Gt",     "Ge",        "LogicalAnd", "LogicalOr",  "LogicalXor",
    "LogicalNot", "BitAnd",  "BitOr", "BitXor",  "BitNot", "ShiftLeft", "ShiftRight", "Where",      "Exp",
    "Exp2",       "Expm1",   "Log",   "Log2",    "Log10",  "Log1p",     "Sqrt",       "Rsqrt",      "Sin",
    "Cos",        "Tan",     "Asin",  "Acos",    "Atan",   "Atan2",     "Sinh",       "Cosh",       "Tanh",
    "Asinh",      "Acosh",   "Atanh", "Sigmoid", "Silu",   "Erf",       "GeluErf",    "GeluTanh",   "Relu",
    "Floor",      "Ceil",    "Round", "Trunc",   "IsInf",  "IsNan"};

bool is_node_type(DType type) {
  return type == DType::kBool || type == DType::kI32 || type == DType::kI64 || type == DType::kF32;
}

bool is_index_type(DType type) {
  return type == DType::kI32 || type == DType::kI64;
}

// Number of arguments; -1 for Load, which has one per dimension of the capture.
int arity(ExprOp op) {
  switch (op) {
    case ExprOp::kLoad:
      return -1;
    case ExprOp::kWhere:
      return 3;
    case ExprOp::kAdd:
    case ExprOp::kSub:
    case ExprOp::kMul:
    case ExprOp::kDiv:
    case ExprOp::kFloorDiv:
    case ExprOp::kRemainder:
    case ExprOp::kFmod:
    case ExprOp::kTruncDiv:
    case ExprOp::kPow:
    case ExprOp::kMin:
    case ExprOp::kMax:
    case ExprOp::kEq:
    case ExprOp::kNe:
    case ExprOp::kLt:
    case ExprOp::kLe:
    case ExprOp::kGt:
    case ExprOp::kGe:
    case ExprOp::kLogicalAnd:
    case ExprOp::kLogicalOr:
    case ExprOp::kLogicalXor:
    case ExprOp::kBitAnd:
    case ExprOp::kBitOr:
    case ExprOp::kBitXor:
    case ExprOp::kShiftLeft:
    case ExprOp::kShiftRight:
    case ExprOp::kAtan2:
      return 2;
    default:
      return op <= ExprOp::kScalar ? 0 : 1;
  }
}

class Verifier {
 public:
  Verifier(const Expression& expression, int num_inputs, int num_scalars, std::span<const int> capture_ranks)
      : nodes_(expression.nodes), num_inputs_(num_inputs), num_scalars_(num_scalars), ranks_(capture_ranks) {}

  Status run() {
    if (nodes_.empty()) return {Code::kInvalidProgram, "expression: has no nodes; expected at least one"};
    for (number_ = 0; number_ < nodes_.size(); ++number_) FLEXPTE_TRY(node(nodes_[number_]));
    return Status::ok();
  }

 private:
  Status fail(const std::string& what) const {
    const ExprOp op = nodes_[number_].op;
    const std::string name =
        static_cast<int>(op) < kNumExprOps ? std::string(expr_op_name(op)) : std::to_string(static_cast<int>(op));
    return {Code::kInvalidProgram, "expression: node " + std::to_string(number_) + " (" + name + ") " + what};
  }

  Status leaf(int32_t index, int count, std::string_view kind) const {
    if (index >= 0 && index < count) return Status::ok();
    return fail("reads " + std::string(kind) + " " + std::to_string(index) + "; there are " + std::to_string(count));
  }

  Status type_is(DType type, bool ok, std::string_view expected) const {
    if (ok) return Status::ok();
    const std::string name = static_cast<int>(type) >= 0 && static_cast<int>(type) < kNumDTypes
                                 ? std::string(dtype_name(type))
                                 : std::to_string(static_cast<int>(type));
    return fail("has type " + name + "; expected " + std::string(expected));
  }

  const ExprNode& arg(const ExprNode& n, size_t i) const { return nodes_[static_cast<size_t>(n.args[i])]; }

  Status node(const ExprNode& n) {
    if (static_cast<int>(n.op) >= kNumExprOps) return fail("is no operation that this version knows");
    FLEXPTE_TRY(type_is(n.type, is_node_type(n.type), "bool, int32, int64 or float32"));
    int expected = arity(n.op);
    if (n.op == ExprOp::kLoad) {
      FLEXPTE_TRY(leaf(n.index, static_cast<int>(ranks_.size()), "capture"));
      expected = ranks_[static_cast<size_t>(n.index)];
      if (expected < 0 || expected > kMaxRank) {
        return fail("reads a capture of " + std::to_string(expected) + " dimensions; at most " +
                    std::to_string(kMaxRank) + " are supported");
      }
    }
    if (n.args.size() != static_cast<size_t>(expected)) {
      return fail("has " + std::to_string(n.args.size()) + " arguments; expected " + std::to_string(expected));
    }
    for (const int32_t a : n.args) {
      if (a < 0 || static_cast<size_t>(a) >= number_) {
        return fail("has argument " + std::to_string(a) + "; expected an earlier node");
      }
    }
    if (n.op == ExprOp::kInput) return leaf(n.index, num_inputs_, "input");
    if (n.op == ExprOp::kScalar) {
      FLEXPTE_TRY(leaf(n.index, num_scalars_, "scalar"));
      return type_is(n.type, is_index_type(n.type), "int32 or int64");
    }
    if (n.op == ExprOp::kScore) return type_is(n.type, n.type == DType::kF32, "float32");
    if (n.op >= ExprOp::kBatch && n.op <= ExprOp::kKvIdx) {
      return type_is(n.type, is_index_type(n.type), "int32 or int64");
    }
    if (n.op == ExprOp::kLoad) {
      for (size_t i = 0; i < n.args.size(); ++i) {
        if (!is_index_type(arg(n, i).type)) {
          return fail("has an index of type " + std::string(dtype_name(arg(n, i).type)) + "; expected int32 or int64");
        }
      }
      return Status::ok();
    }
    return n.args.empty() ? Status::ok() : operation(n);
  }

  // Types of an operation: one type for all arguments, and a result that has a loop for it.
  Status operation(const ExprNode& n) const {
    const size_t first = n.op == ExprOp::kWhere ? 1 : 0;
    const DType type = arg(n, first).type;
    for (size_t i = first; i < n.args.size(); ++i) {
      if (arg(n, i).type != type) {
        return fail("has arguments of types " + std::string(dtype_name(type)) + " and " +
                    std::string(dtype_name(arg(n, i).type)) + "; expected one type");
      }
    }
    if (n.op == ExprOp::kCast) return Status::ok();
    if (n.op == ExprOp::kWhere && arg(n, 0).type != DType::kBool) {
      return fail("has a condition of type " + std::string(dtype_name(arg(n, 0).type)) + "; expected bool");
    }
    const bool predicate =
        (n.op >= ExprOp::kEq && n.op <= ExprOp::kLogicalNot) || n.op == ExprOp::kIsInf || n.op == ExprOp::kIsNan;
    FLEXPTE_TRY(
        type_is(n.type, n.type == (predicate ? DType::kBool : type), dtype_name(predicate ? DType::kBool : type)));
    if (find_step_kernel(n, type) == nullptr) {
      std::string what = "is not defined for " + std::string(dtype_name(type));
      if (n.op == ExprOp::kRoundTo) what += " through type " + std::to_string(static_cast<int>(n.round_to));
      return fail(what);
    }
    return Status::ok();
  }

  const std::vector<ExprNode>& nodes_;
  const int num_inputs_;
  const int num_scalars_;
  const std::span<const int> ranks_;
  size_t number_ = 0;
};

}  // namespace

std::string_view expr_op_name(ExprOp op) {
  return kNames[static_cast<size_t>(op)];
}

Status verify_expression(const Expression& expression, int num_inputs, int num_scalars,
                         std::span<const int> capture_ranks) {
  return Verifier(expression, num_inputs, num_scalars, capture_ranks).run();
}

std::vector<bool> reachable_nodes(const Expression& expression) {
  std::vector<bool> reachable(expression.nodes.size(), false);
  reachable.back() = true;
  for (size_t i = expression.nodes.size(); i-- > 0;) {
    if (!reachable[i]) continue;
    for (const int32_t a : expression.nodes[i].args) reachable[static_cast<size_t>(a)] = true;
  }
  return reachable;
}

LaneKernel find_step_kernel(const ExprNode& node, DType arg) {
  if (node.op == ExprOp::kCast) return find_cast_kernel(arg, node.type);
  if (node.op == ExprOp::kRoundTo) return find_round_kernel(arg, node.round_to);
  if (node.op == ExprOp::kWhere) return find_where_kernel(arg);
  if (node.type == DType::kBool) return find_logic_kernel(node.op, arg);
  if (arg == DType::kF32) {
    const LaneKernel kernel = find_arithmetic_kernel(node.op, arg);
    return kernel != nullptr ? kernel : find_math_kernel(node.op);
  }
  return find_arithmetic_kernel(node.op, arg);
}

}  // namespace flexpte
