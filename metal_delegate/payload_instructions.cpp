#include "metal_delegate/payload_instructions.h"

#include <cmath>
#include <string>

#include "metal_delegate/rules.h"

namespace flexpte::bound {
namespace {

// The enumerations of the schema and ours are cast into each other.
static_assert(static_cast<int>(payload::ExprOp::MAX) == kNumExprOps - 1);
static_assert(static_cast<int>(payload::ExprOp::Cast) == static_cast<int>(ExprOp::kCast));
static_assert(static_cast<int>(payload::ExprOp::Eq) == static_cast<int>(ExprOp::kEq));
static_assert(static_cast<int>(payload::ExprOp::Where) == static_cast<int>(ExprOp::kWhere));
static_assert(static_cast<int>(payload::ExprOp::Atan2) == static_cast<int>(ExprOp::kAtan2));
static_assert(static_cast<int>(payload::ExprOp::IsNan) == static_cast<int>(ExprOp::kIsNan));
static_assert(static_cast<int>(payload::DType::MAX) == kNumDTypes - 1);
static_assert(static_cast<int>(payload::DType::BF16) == static_cast<int>(DType::kBF16));
static_assert(static_cast<int>(payload::ReduceOp::MAX) == static_cast<int>(ReduceOp::kArgMin));
static_assert(static_cast<int>(payload::ReduceOp::Any) == static_cast<int>(ReduceOp::kAny));
static_assert(static_cast<int>(payload::ScalarOp::MAX) == static_cast<int>(ScalarOp::kMax));
static_assert(static_cast<int>(payload::StorageKind::MAX) == static_cast<int>(StorageKind::kArena));
static_assert(static_cast<int>(payload::Op::MAX) == kNumOpKinds);
static_assert(static_cast<int>(payload::Op::FlexAttention) == static_cast<int>(OpKind::kFlexAttention) + 1);

using Numbers = flatbuffers::Vector<int32_t>;

Status malformed(std::string message) {
  return {Code::kInvalidProgram, std::move(message)};
}

size_t length(const Numbers* numbers) {
  return numbers == nullptr ? 0 : numbers->size();
}

Status decode_expression(const payload::Expression& from, size_t number, Expression& to) {
  const std::string what = "expression " + std::to_string(number);
  const size_t count = from.nodes() == nullptr ? 0 : from.nodes()->size();
  if (count == 0) return malformed(what + " has no nodes");
  to.nodes.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const payload::ExprNode& node = *from.nodes()->Get(static_cast<uint32_t>(i));
    const std::string where = what + " node " + std::to_string(i);
    if (node.op() > payload::ExprOp::MAX) {
      return malformed(where + " has the unknown operation " + std::to_string(static_cast<int>(node.op())));
    }
    for (const payload::DType dtype : {node.type(), node.round_to()}) {
      if (dtype < payload::DType::MIN || dtype > payload::DType::MAX) {
        return malformed(where + " has the unknown type " + std::to_string(static_cast<int>(dtype)));
      }
    }
    ExprNode decoded;
    decoded.op = static_cast<ExprOp>(node.op());
    decoded.type = static_cast<DType>(node.type());
    for (size_t a = 0; a < length(node.args()); ++a) {
      const int32_t arg = node.args()->Get(static_cast<uint32_t>(a));
      if (arg < 0 || static_cast<size_t>(arg) >= i) {
        return malformed(where + " has node " + std::to_string(arg) + " as an argument, expected an earlier one");
      }
      decoded.args.push_back(arg);
    }
    decoded.index = node.index();
    decoded.round_to = static_cast<DType>(node.round_to());
    decoded.value_int = node.value_int();
    decoded.value_float = node.value_float();
    to.nodes.push_back(std::move(decoded));
  }
  return Status::ok();
}

// Decodes one instruction. Messages say what is wrong; the caller names the instruction.
class InstructionDecoder {
 public:
  InstructionDecoder(const BoundProgram& program, Instruction& to) : program_(program), to_(to) {}

  Status decode(const payload::Instruction& from) {
    switch (from.op_type()) {
      case payload::Op::Linear:
        return linear(*from.op_as_Linear());
      case payload::Op::Gather:
        return gather(*from.op_as_Gather());
      case payload::Op::RmsNorm:
        return rms_norm(*from.op_as_RmsNorm());
      case payload::Op::LayerNorm:
        return layer_norm(*from.op_as_LayerNorm());
      case payload::Op::Elementwise:
        return elementwise(*from.op_as_Elementwise());
      case payload::Op::Reduce:
        return reduce(*from.op_as_Reduce());
      case payload::Op::Softmax:
        return softmax(*from.op_as_Softmax());
      case payload::Op::MatMul:
        return matmul(*from.op_as_MatMul());
      case payload::Op::IndexCopy:
        return index_copy(*from.op_as_IndexCopy());
      case payload::Op::Arange:
        return arange(*from.op_as_Arange());
      case payload::Op::FlexAttention:
        return flex_attention(*from.op_as_FlexAttention());
      case payload::Op::NONE:
        break;
    }
    return malformed("has no operation that this version knows");
  }

 private:
  Status linear(const payload::Linear& op) {
    to_.params = NoParams{};
    return operands({{op.x(), "x"}, {op.weight(), "weight"}, {op.bias(), "bias", true}, {op.out(), "out"}});
  }
  Status gather(const payload::Gather& op) {
    to_.params = GatherParams{op.dim()};
    return operands({{op.source(), "source"}, {op.index(), "index"}, {op.out(), "out"}});
  }
  Status rms_norm(const payload::RmsNorm& op) {
    to_.params = NormParams{op.eps()};
    return operands({{op.x(), "x"}, {op.weight(), "weight", true}, {-1, "bias", true}, {op.out(), "out"}});
  }
  Status layer_norm(const payload::LayerNorm& op) {
    to_.params = NormParams{op.eps()};
    return operands({{op.x(), "x"}, {op.weight(), "weight", true}, {op.bias(), "bias", true}, {op.out(), "out"}});
  }
  Status elementwise(const payload::Elementwise& op) {
    FLEXPTE_TRY(operands({{op.out(), "out"}}));
    FLEXPTE_TRY(operand_list(op.inputs(), "inputs"));
    FLEXPTE_TRY(operand_list(op.captures(), "captures"));
    FLEXPTE_TRY(scalar_list(op.scalars()));
    FLEXPTE_TRY(expression(op.expression(), "expression", false));
    ElementwiseParams params;
    params.num_inputs = static_cast<int32_t>(length(op.inputs()));
    FLEXPTE_ASSIGN(TileProgram program,
                   TileProgram::compile(program_.expressions[static_cast<size_t>(op.expression())], params.num_inputs,
                                        static_cast<int>(length(op.scalars())), ranks(op.captures())));
    if (program.uses_score()) return malformed("an elementwise expression uses the score of an attention");
    params.program = std::make_shared<const TileProgram>(std::move(program));
    to_.params = std::move(params);
    return Status::ok();
  }
  Status reduce(const payload::Reduce& op) {
    if (op.op() < payload::ReduceOp::MIN || op.op() > payload::ReduceOp::MAX) {
      return malformed("has the unknown reduction " + std::to_string(static_cast<int>(op.op())));
    }
    to_.params = ReduceParams{static_cast<ReduceOp>(op.op()), op.num_dims()};
    return operands({{op.x(), "x"}, {op.out(), "out"}});
  }
  Status softmax(const payload::Softmax& op) {
    to_.params = SoftmaxParams{op.log()};
    return operands({{op.x(), "x"}, {op.out(), "out"}});
  }
  Status matmul(const payload::MatMul& op) {
    to_.params = NoParams{};
    return operands({{op.a(), "a"}, {op.b(), "b"}, {op.out(), "out"}});
  }
  Status index_copy(const payload::IndexCopy& op) {
    to_.params = IndexCopyParams{op.dim()};
    FLEXPTE_TRY(operands({{op.target(), "target"}, {op.index(), "index"}, {op.source(), "source"}}));
    if (program_.storage_kind(op.target()) != StorageKind::kState) return malformed("its target is no state");
    return Status::ok();
  }
  Status arange(const payload::Arange& op) {
    const auto count = static_cast<int64_t>(program_.scalars.size());
    for (const Sym sym : {op.start(), op.step()}) {
      if (is_symbolic(sym) && -1 - sym >= count) {
        return malformed("names scalar " + std::to_string(-1 - sym) + " of " + std::to_string(count));
      }
    }
    to_.params = ArangeParams{op.start(), op.step()};
    return operands({{op.out(), "out"}});
  }
  Status flex_attention(const payload::FlexAttention& op) {
    FLEXPTE_TRY(operands({{op.query(), "query"},
                          {op.key(), "key"},
                          {op.value(), "value"},
                          {op.out(), "out"},
                          {op.lse(), "lse", true},
                          {op.kv_num_blocks(), "kv_num_blocks", true},
                          {op.kv_indices(), "kv_indices", true},
                          {op.full_kv_num_blocks(), "full_kv_num_blocks", true},
                          {op.full_kv_indices(), "full_kv_indices", true}}));
    FLEXPTE_TRY(operand_list(op.score_captures(), "score_captures"));
    FLEXPTE_TRY(operand_list(op.mask_captures(), "mask_captures"));
    FLEXPTE_TRY(scalar_list(op.score_scalars()));
    FLEXPTE_TRY(scalar_list(op.mask_scalars()));
    FLEXPTE_TRY(mod(op.score(), "score", op.score_captures(), op.score_scalars(), DType::kF32));
    FLEXPTE_TRY(mod(op.mask(), "mask", op.mask_captures(), op.mask_scalars(), DType::kBool));
    if (!std::isfinite(op.scale())) return malformed("its scale is not finite");
    FlexParams params;
    params.scale = op.scale();
    params.score = op.score();
    params.mask = op.mask();
    params.num_score_captures = static_cast<int32_t>(length(op.score_captures()));
    params.num_mask_captures = static_cast<int32_t>(length(op.mask_captures()));
    params.num_score_scalars = static_cast<int32_t>(length(op.score_scalars()));
    params.num_mask_scalars = static_cast<int32_t>(length(op.mask_scalars()));
    params.q_block_size = op.q_block_size();
    params.kv_block_size = op.kv_block_size();
    params.prefill_rows = op.prefill_rows();
    params.decode_rows = op.decode_rows();
    params.prefill_threads = op.prefill_threads();
    params.chunk_rows = op.chunk_rows();
    params.chunk_threads = op.chunk_threads();
    constexpr int32_t kMaxPrefillRows = 128;
    constexpr int32_t kMaxThreads = 1024;
    constexpr int32_t kMaxDecodeRows = 8;
    const auto is_tile = [](int32_t rows, int32_t threads) {
      return rows >= 0 && rows <= kMaxPrefillRows && rows % 8 == 0 && threads >= 0 && threads <= kMaxThreads;
    };
    if (!is_tile(params.prefill_rows, params.prefill_threads) || !is_tile(params.chunk_rows, params.chunk_threads) ||
        params.decode_rows < 0 || params.decode_rows > kMaxDecodeRows) {
      return malformed("has Metal kernels of " + std::to_string(params.prefill_rows) + ", " +
                       std::to_string(params.chunk_rows) + " and " + std::to_string(params.decode_rows) + " rows");
    }
    to_.params = params;
    return Status::ok();
  }

  struct Operand {
    int32_t value;
    const char* what;
    bool is_optional = false;
  };
  Status operands(std::initializer_list<Operand> list) {
    for (const Operand& operand : list) FLEXPTE_TRY(add_operand(operand.value, operand.what, operand.is_optional));
    return Status::ok();
  }
  Status operand_list(const Numbers* values, const char* what) {
    for (size_t i = 0; i < length(values); ++i) {
      FLEXPTE_TRY(add_operand(values->Get(static_cast<uint32_t>(i)), what, false));
    }
    return Status::ok();
  }
  Status add_operand(int32_t value, const char* what, bool is_optional) {
    const bool is_absent = is_optional && value == -1;
    if (!is_absent && (value < 0 || static_cast<size_t>(value) >= program_.values.size())) {
      return malformed(std::string("its ") + what + " names value " + std::to_string(value) + " of " +
                       std::to_string(program_.values.size()));
    }
    to_.operands.push_back(value);
    return Status::ok();
  }
  Status scalar_list(const Numbers* scalars) {
    for (size_t i = 0; i < length(scalars); ++i) {
      const int32_t scalar = scalars->Get(static_cast<uint32_t>(i));
      if (scalar < 0 || static_cast<size_t>(scalar) >= program_.scalars.size()) {
        return malformed("names scalar " + std::to_string(scalar) + " of " + std::to_string(program_.scalars.size()));
      }
      to_.scalars.push_back(scalar);
    }
    return Status::ok();
  }
  Status expression(int32_t number, const char* what, bool is_optional) {
    if ((is_optional && number == -1) || (number >= 0 && static_cast<size_t>(number) < program_.expressions.size())) {
      return Status::ok();
    }
    return malformed(std::string("its ") + what + " names expression " + std::to_string(number) + " of " +
                     std::to_string(program_.expressions.size()));
  }
  Status mod(int32_t number, const char* what, const Numbers* captures, const Numbers* scalars, DType type) {
    FLEXPTE_TRY(expression(number, what, true));
    if (number == -1) return Status::ok();
    const Expression& mod = program_.expressions[static_cast<size_t>(number)];
    auto program = TileProgram::compile(mod, 0, static_cast<int>(length(scalars)), ranks(captures));
    if (!program.is_ok()) {
      return {program.status().code(), std::string("its ") + what + ": " + program.status().message()};
    }
    if (program->result_type() != type) {
      return malformed(std::string("its ") + what + " gives " + std::string(dtype_name(program->result_type())) +
                       ", expected " + std::string(dtype_name(type)));
    }
    return Status::ok();
  }
  std::vector<int> ranks(const Numbers* values) const {
    std::vector<int> result;
    for (size_t i = 0; i < length(values); ++i) {
      result.push_back(program_.values[static_cast<size_t>(values->Get(static_cast<uint32_t>(i)))].view.rank);
    }
    return result;
  }

  const BoundProgram& program_;
  Instruction& to_;
};

}  // namespace

Status decode_instructions(const payload::Payload& payload, BoundProgram& program) {
  for (size_t i = 0; payload.expressions() != nullptr && i < payload.expressions()->size(); ++i) {
    FLEXPTE_TRY(decode_expression(*payload.expressions()->Get(static_cast<uint32_t>(i)), i,
                                  program.expressions.emplace_back()));
  }
  std::vector<TensorView> operands;
  for (size_t i = 0; payload.instructions() != nullptr && i < payload.instructions()->size(); ++i) {
    const payload::Instruction& from = *payload.instructions()->Get(static_cast<uint32_t>(i));
    Instruction& instruction = program.instructions.emplace_back();
    if (from.name() != nullptr) instruction.name = from.name()->str();
    if (from.kernels() != nullptr) {
      for (const flatbuffers::String* kernel : *from.kernels()) instruction.kernels.push_back(kernel->str());
    }
    if (from.op_type() > payload::Op::NONE && from.op_type() <= payload::Op::MAX) {
      instruction.kind = static_cast<OpKind>(static_cast<int>(from.op_type()) - 1);
    }
    Status status = InstructionDecoder(program, instruction).decode(from);
    if (status.is_ok()) {
      operands.clear();
      for (const int32_t value : instruction.operands) {
        operands.push_back(value < 0 ? TensorView{} : program.values[static_cast<size_t>(value)].view);
      }
      status = check_operands(instruction, operands);
    }
    if (!status.is_ok()) return {status.code(), describe_instruction(program, i) + ": " + status.message()};
  }
  return Status::ok();
}

}  // namespace flexpte::bound
