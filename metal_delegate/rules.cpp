#include "metal_delegate/rules.h"

#include <algorithm>
#include <string>

namespace flexpte::bound {
namespace {

Status wrong(std::string message) {
  return {Code::kInvalidProgram, std::move(message)};
}

bool agree(Sym a, Sym b) {
  return a == b || is_symbolic(a) || is_symbolic(b);
}
bool is(Sym a, int64_t n) {
  return agree(a, n);
}

bool is_float(DType dtype) {
  return dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF32;
}
bool is_index(DType dtype) {
  return dtype == DType::kI32 || dtype == DType::kI64;
}

// Symbolic sizes read "?".
std::string describe(const TensorView& view) {
  std::string text(dtype_name(view.dtype));
  text += " [";
  for (int32_t d = 0; d < view.rank; ++d) {
    if (d > 0) text += ", ";
    text += is_symbolic(view.size(d)) ? "?" : std::to_string(view.size(d));
  }
  return text + "]";
}

bool has_unit_last_stride(const TensorView& view) {
  return view.rank > 0 && (is(view.size(view.rank - 1), 1) || is(view.stride(view.rank - 1), 1));
}

bool may_be_contiguous(const TensorView& view) {
  int64_t expected = 1;
  for (int32_t d = view.rank; d-- > 0;) {
    if (view.size(d) != 1 && !agree(view.stride(d), expected)) return false;
    if (is_symbolic(view.size(d))) return true;
    expected *= view.size(d);
  }
  return true;
}

// Two elements at one address would make a result depend on the order of writing.
bool may_overlap_itself(const TensorView& view) {
  for (int32_t d = 0; d < view.rank; ++d) {
    if (view.size(d) > 1 && view.stride(d) == 0) return true;
  }
  return false;
}

class Checker {
 public:
  Checker(const Instruction& instruction, std::span<const TensorView> views)
      : instruction_(instruction), views_(views) {}

  bool has(size_t operand) const { return instruction_.operands[operand] >= 0; }
  const TensorView& operator[](size_t operand) const { return views_[operand]; }

  Status require_float(size_t operand, const char* what) const {
    if (is_float(views_[operand].dtype)) return Status::ok();
    return wrong(std::string(what) + " is " + describe(views_[operand]) + ", expected float32, float16 or bfloat16");
  }
  Status require_index(size_t operand, const char* what) const {
    if (is_index(views_[operand].dtype)) return Status::ok();
    return wrong(std::string(what) + " is " + describe(views_[operand]) + ", expected int32 or int64");
  }
  Status require_rank(size_t operand, const char* what, int32_t rank) const {
    if (views_[operand].rank == rank) return Status::ok();
    return wrong(std::string(what) + " is " + describe(views_[operand]) + ", expected " + std::to_string(rank) +
                 " dimensions");
  }
  // Equal sizes of dimension `dim_a` of one operand and `dim_b` of another.
  Status require_equal(size_t a, const char* what_a, int32_t dim_a, size_t b, const char* what_b, int32_t dim_b) const {
    if (agree(views_[a].size(dim_a), views_[b].size(dim_b))) return Status::ok();
    return wrong(std::string(what_a) + " is " + describe(views_[a]) + " and " + what_b + " is " + describe(views_[b]) +
                 ": dimension " + std::to_string(dim_a) + " of the one and dimension " + std::to_string(dim_b) +
                 " of the other must be equal");
  }
  Status require_unit_last_stride(size_t operand, const char* what) const {
    if (has_unit_last_stride(views_[operand])) return Status::ok();
    return wrong(std::string(what) + " is " + describe(views_[operand]) + ", whose last dimension is not contiguous");
  }
  Status require_contiguous(size_t operand, const char* what) const {
    if (may_be_contiguous(views_[operand])) return Status::ok();
    return wrong(std::string(what) + " is " + describe(views_[operand]) + ", which is not contiguous");
  }
  // A weight or bias [n] over the last dimension of operand x.
  Status require_vector(size_t operand, const char* what, size_t x, const char* what_x) const {
    if (!has(operand)) return Status::ok();
    FLEXPTE_TRY(require_float(operand, what));
    FLEXPTE_TRY(require_rank(operand, what, 1));
    FLEXPTE_TRY(require_contiguous(operand, what));
    return require_equal(operand, what, 0, x, what_x, views_[x].rank - 1);
  }
  Status require_same_shape(size_t a, const char* what_a, size_t b, const char* what_b) const {
    if (views_[a].rank != views_[b].rank) {
      return wrong(std::string(what_a) + " is " + describe(views_[a]) + " and " + what_b + " is " +
                   describe(views_[b]) + ", expected equal sizes");
    }
    for (int32_t d = 0; d < views_[a].rank; ++d) FLEXPTE_TRY(require_equal(a, what_a, d, b, what_b, d));
    return Status::ok();
  }
  Status require_at_least_one_dim(size_t operand, const char* what) const {
    if (views_[operand].rank >= 1) return Status::ok();
    return wrong(std::string(what) + " has no dimensions");
  }

 private:
  const Instruction& instruction_;
  std::span<const TensorView> views_;
};

Status check_linear(const Instruction&, const Checker& c) {
  using namespace operand;
  FLEXPTE_TRY(c.require_float(kX, "x"));
  FLEXPTE_TRY(c.require_float(kWeight, "the weight"));
  FLEXPTE_TRY(c.require_float(kOut, "the output"));
  FLEXPTE_TRY(c.require_at_least_one_dim(kX, "x"));
  FLEXPTE_TRY(c.require_rank(kWeight, "the weight", 2));
  FLEXPTE_TRY(c.require_contiguous(kWeight, "the weight"));
  FLEXPTE_TRY(c.require_rank(kOut, "the output", c[kX].rank));
  const int32_t last = c[kX].rank - 1;
  FLEXPTE_TRY(c.require_equal(kX, "x", last, kWeight, "the weight", 1));
  FLEXPTE_TRY(c.require_equal(kOut, "the output", last, kWeight, "the weight", 0));
  for (int32_t d = 0; d < last; ++d) FLEXPTE_TRY(c.require_equal(kX, "x", d, kOut, "the output", d));
  FLEXPTE_TRY(c.require_vector(kBias, "the bias", kOut, "the output"));
  FLEXPTE_TRY(c.require_unit_last_stride(kX, "x"));
  FLEXPTE_TRY(c.require_unit_last_stride(kOut, "the output"));
  for (const size_t which : {kX, kOut}) {
    if (!dims_collapse(c[which], 0, last)) {
      return wrong(std::string(which == kX ? "x" : "the output") + " is " + describe(c[which]) +
                   ", whose leading dimensions do not lie at one stride");
    }
  }
  return Status::ok();
}

Status check_gather(const Instruction& instruction, const Checker& c) {
  using namespace operand;
  const int32_t dim = std::get<GatherParams>(instruction.params).dim;
  const TensorView& source = c[kGatherSource];
  const TensorView& index = c[kGatherIndex];
  FLEXPTE_TRY(c.require_index(kGatherIndex, "the index"));
  if (dim < 0 || dim >= source.rank) {
    return wrong("dimension " + std::to_string(dim) + " of a source " + describe(source));
  }
  FLEXPTE_TRY(c.require_rank(kGatherOut, "the output", source.rank - 1 + index.rank));
  if (c[kGatherOut].dtype != source.dtype) {
    return wrong("the output is " + describe(c[kGatherOut]) + " and the source " + describe(source) +
                 ", expected one dtype");
  }
  for (int32_t d = 0; d < dim; ++d) {
    FLEXPTE_TRY(c.require_equal(kGatherOut, "the output", d, kGatherSource, "the source", d));
  }
  for (int32_t d = 0; d < index.rank; ++d) {
    FLEXPTE_TRY(c.require_equal(kGatherOut, "the output", dim + d, kGatherIndex, "the index", d));
  }
  for (int32_t d = dim + 1; d < source.rank; ++d) {
    FLEXPTE_TRY(c.require_equal(kGatherOut, "the output", d - 1 + index.rank, kGatherSource, "the source", d));
  }
  return Status::ok();
}

Status check_norm(const Instruction&, const Checker& c) {
  using namespace operand;
  FLEXPTE_TRY(c.require_float(kX, "x"));
  FLEXPTE_TRY(c.require_float(kOut, "the output"));
  FLEXPTE_TRY(c.require_at_least_one_dim(kX, "x"));
  FLEXPTE_TRY(c.require_same_shape(kX, "x", kOut, "the output"));
  FLEXPTE_TRY(c.require_vector(kWeight, "the weight", kX, "x"));
  FLEXPTE_TRY(c.require_vector(kBias, "the bias", kX, "x"));
  FLEXPTE_TRY(c.require_unit_last_stride(kX, "x"));
  return c.require_unit_last_stride(kOut, "the output");
}

Status check_elementwise(const Instruction& instruction, const Checker& c) {
  using namespace operand;
  const auto& params = std::get<ElementwiseParams>(instruction.params);
  for (size_t i = 0; i < static_cast<size_t>(params.num_inputs); ++i) {
    const std::string what = "operand " + std::to_string(i);
    FLEXPTE_TRY(c.require_same_shape(kFirstInput + i, what.c_str(), kElementwiseOut, "the output"));
  }
  return Status::ok();
}

Status check_reduce(const Instruction& instruction, const Checker& c) {
  using namespace operand;
  const auto& params = std::get<ReduceParams>(instruction.params);
  const TensorView& x = c[kUnaryX];
  const TensorView& out = c[kUnaryOut];
  if (params.num_dims < 1 || params.num_dims > x.rank) {
    return wrong("reduces " + std::to_string(params.num_dims) + " dimensions of x, which is " + describe(x));
  }
  FLEXPTE_TRY(c.require_rank(kUnaryOut, "the output", x.rank - params.num_dims));
  for (int32_t d = 0; d < out.rank; ++d) FLEXPTE_TRY(c.require_equal(kUnaryOut, "the output", d, kUnaryX, "x", d));
  bool fits = false;
  switch (params.op) {
    case ReduceOp::kSum:
    case ReduceOp::kProd:
      fits = is_floating(x.dtype) ? is_floating(out.dtype) : !is_floating(out.dtype);
      break;
    case ReduceOp::kMean:
      fits = is_floating(x.dtype) && is_floating(out.dtype);
      break;
    case ReduceOp::kMax:
    case ReduceOp::kMin:
      fits = x.dtype == out.dtype;
      break;
    case ReduceOp::kAny:
    case ReduceOp::kAll:
      fits = out.dtype == DType::kBool || out.dtype == DType::kU8;
      break;
    case ReduceOp::kArgMax:
    case ReduceOp::kArgMin:
      fits = out.dtype == DType::kI64;
      break;
  }
  if (!fits) return wrong("a reduction of this kind does not give " + describe(out) + " from " + describe(x));
  const bool of_nothing_fails = params.op == ReduceOp::kMax || params.op == ReduceOp::kMin ||
                                params.op == ReduceOp::kArgMax || params.op == ReduceOp::kArgMin;
  for (int32_t d = out.rank; of_nothing_fails && d < x.rank; ++d) {
    if (x.size(d) == 0) return wrong("the extreme of no elements: x is " + describe(x));
  }
  return Status::ok();
}

Status check_softmax(const Instruction&, const Checker& c) {
  using namespace operand;
  FLEXPTE_TRY(c.require_float(kUnaryX, "x"));
  FLEXPTE_TRY(c.require_float(kUnaryOut, "the output"));
  FLEXPTE_TRY(c.require_at_least_one_dim(kUnaryX, "x"));
  FLEXPTE_TRY(c.require_same_shape(kUnaryX, "x", kUnaryOut, "the output"));
  FLEXPTE_TRY(c.require_unit_last_stride(kUnaryX, "x"));
  return c.require_unit_last_stride(kUnaryOut, "the output");
}

Status check_matmul(const Instruction&, const Checker& c) {
  using namespace operand;
  FLEXPTE_TRY(c.require_float(kMatMulA, "a"));
  FLEXPTE_TRY(c.require_float(kMatMulB, "b"));
  FLEXPTE_TRY(c.require_float(kMatMulOut, "the output"));
  const int32_t rank = c[kMatMulOut].rank;
  if (rank < 2) return wrong("the output is " + describe(c[kMatMulOut]) + ", expected at least 2 dimensions");
  FLEXPTE_TRY(c.require_rank(kMatMulA, "a", rank));
  FLEXPTE_TRY(c.require_rank(kMatMulB, "b", rank));
  for (int32_t d = 0; d < rank - 2; ++d) {
    FLEXPTE_TRY(c.require_equal(kMatMulA, "a", d, kMatMulOut, "the output", d));
    FLEXPTE_TRY(c.require_equal(kMatMulB, "b", d, kMatMulOut, "the output", d));
  }
  FLEXPTE_TRY(c.require_equal(kMatMulA, "a", rank - 2, kMatMulOut, "the output", rank - 2));
  FLEXPTE_TRY(c.require_equal(kMatMulB, "b", rank - 1, kMatMulOut, "the output", rank - 1));
  return c.require_equal(kMatMulA, "a", rank - 1, kMatMulB, "b", rank - 2);
}

Status check_index_copy(const Instruction& instruction, const Checker& c) {
  using namespace operand;
  const int32_t dim = std::get<IndexCopyParams>(instruction.params).dim;
  const TensorView& target = c[kTarget];
  FLEXPTE_TRY(c.require_index(kCopyIndex, "the index"));
  FLEXPTE_TRY(c.require_rank(kCopyIndex, "the index", 1));
  FLEXPTE_TRY(c.require_rank(kCopySource, "the source", target.rank));
  if (dim < 0 || dim >= target.rank) {
    return wrong("dimension " + std::to_string(dim) + " of a target " + describe(target));
  }
  if (c[kCopySource].dtype != target.dtype) {
    return wrong("the target is " + describe(target) + " and the source " + describe(c[kCopySource]) +
                 ", expected one dtype");
  }
  for (int32_t d = 0; d < target.rank; ++d) {
    if (d != dim) FLEXPTE_TRY(c.require_equal(kTarget, "the target", d, kCopySource, "the source", d));
  }
  return c.require_equal(kCopyIndex, "the index", 0, kCopySource, "the source", dim);
}

Status check_arange(const Instruction&, const Checker& c) {
  return c.require_rank(operand::kArangeOut, "the output", 1);
}

Status check_block_list(const Checker& c, size_t counts, size_t indices, const char* counts_name,
                        const char* indices_name, const FlexParams& params) {
  using namespace operand;
  for (const auto& [which, name, rank] : {std::tuple{counts, counts_name, 3}, std::tuple{indices, indices_name, 4}}) {
    if (c[which].dtype != DType::kI32) {
      return wrong(std::string(name) + " is " + describe(c[which]) + ", expected int32");
    }
    FLEXPTE_TRY(c.require_rank(which, name, rank));
    FLEXPTE_TRY(c.require_contiguous(which, name));
    if (!is(c[which].size(0), 1)) FLEXPTE_TRY(c.require_equal(which, name, 0, kQuery, "the query", 0));
    if (!is(c[which].size(1), 1)) FLEXPTE_TRY(c.require_equal(which, name, 1, kQuery, "the query", 1));
  }
  for (int32_t d = 0; d < 3; ++d) FLEXPTE_TRY(c.require_equal(counts, counts_name, d, indices, indices_name, d));
  if (params.q_block_size < 1 || params.kv_block_size < 1) {
    return wrong("block lists with blocks of " + std::to_string(params.q_block_size) + " queries and " +
                 std::to_string(params.kv_block_size) + " keys");
  }
  const Sym q_length = c[kQuery].size(2);
  const Sym q_blocks = c[counts].size(2);
  if (!is_symbolic(q_length) && !is_symbolic(q_blocks) &&
      q_blocks < q_length / params.q_block_size + (q_length % params.q_block_size != 0 ? 1 : 0)) {
    return wrong(std::string(counts_name) + " is " + describe(c[counts]) + ", too short for " +
                 std::to_string(q_length) + " queries in blocks of " + std::to_string(params.q_block_size));
  }
  return Status::ok();
}

Status check_flex_attention(const Instruction& instruction, const Checker& c) {
  using namespace operand;
  const auto& params = std::get<FlexParams>(instruction.params);
  for (const auto& [which, name] : {std::pair{kQuery, "the query"}, std::pair{kKey, "the key"},
                                    std::pair{kValue, "the value"}, std::pair{kFlexOut, "the output"}}) {
    FLEXPTE_TRY(c.require_float(which, name));
    FLEXPTE_TRY(c.require_rank(which, name, 4));
    FLEXPTE_TRY(c.require_unit_last_stride(which, name));
  }
  if (c[kKey].dtype != c[kValue].dtype) {
    return wrong("the key is " + describe(c[kKey]) + " and the value " + describe(c[kValue]) + ", expected one dtype");
  }
  for (int32_t d = 0; d < 3; ++d) {
    FLEXPTE_TRY(c.require_equal(kKey, "the key", d, kValue, "the value", d));
    FLEXPTE_TRY(c.require_equal(kQuery, "the query", d, kFlexOut, "the output", d));
  }
  FLEXPTE_TRY(c.require_equal(kQuery, "the query", 3, kKey, "the key", 3));
  FLEXPTE_TRY(c.require_equal(kValue, "the value", 3, kFlexOut, "the output", 3));
  if (!is(c[kKey].size(0), 1)) FLEXPTE_TRY(c.require_equal(kKey, "the key", 0, kQuery, "the query", 0));
  const Sym num_heads = c[kQuery].size(1);
  const Sym num_kv_heads = c[kKey].size(1);
  if (!is_symbolic(num_heads) && !is_symbolic(num_kv_heads) && (num_kv_heads == 0 || num_heads % num_kv_heads != 0)) {
    return wrong(std::to_string(num_heads) + " query heads are no multiple of " + std::to_string(num_kv_heads) +
                 " key/value heads");
  }
  if (is(c[kQuery].size(3), 0) && !is_symbolic(c[kQuery].size(3))) return wrong("the head dimension is 0");
  if (c.has(kLse)) {
    if (c[kLse].dtype != DType::kF32) return wrong("lse is " + describe(c[kLse]) + ", expected float32");
    FLEXPTE_TRY(c.require_rank(kLse, "lse", 3));
    for (int32_t d = 0; d < 3; ++d) FLEXPTE_TRY(c.require_equal(kLse, "lse", d, kQuery, "the query", d));
  }
  if (c.has(kKvNumBlocks) != c.has(kKvIndices) || c.has(kFullKvNumBlocks) != c.has(kFullKvIndices)) {
    return wrong("a block list has its counts or its indices only, expected both");
  }
  if (c.has(kFullKvNumBlocks) && !c.has(kKvNumBlocks)) {
    return wrong("a list of full blocks without a list of partial ones");
  }
  if (c.has(kKvNumBlocks)) {
    FLEXPTE_TRY(check_block_list(c, kKvNumBlocks, kKvIndices, "kv_num_blocks", "kv_indices", params));
  }
  if (c.has(kFullKvNumBlocks)) {
    FLEXPTE_TRY(check_block_list(c, kFullKvNumBlocks, kFullKvIndices, "full_kv_num_blocks", "full_kv_indices", params));
  }
  return Status::ok();
}

using Check = Status (*)(const Instruction&, const Checker&);
constexpr std::array<Check, kNumOpKinds> kChecks = {
    check_linear,  check_gather, check_norm,       check_norm,   check_elementwise,    check_reduce,
    check_softmax, check_matmul, check_index_copy, check_arange, check_flex_attention,
};

}  // namespace

bool dims_collapse(const TensorView& view, int32_t begin, int32_t end) {
  Sym expected = 0;
  bool first = true;
  for (int32_t d = end; d-- > begin;) {
    if (view.size(d) == 1) continue;
    if (!first && !agree(view.stride(d), expected)) return false;
    if (is_symbolic(view.size(d)) || is_symbolic(view.stride(d))) return true;
    expected = view.size(d) * view.stride(d);
    first = false;
  }
  return true;
}

Status check_operands(const Instruction& instruction, std::span<const TensorView> operands) {
  FLEXPTE_TRY(kChecks[static_cast<size_t>(instruction.kind)](instruction, Checker(instruction, operands)));
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto sizes = std::span(operands[i].sizes).first(static_cast<size_t>(operands[i].rank));
    const bool is_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    if (instruction.operands[i] >= 0 && instruction.writes(i) && !is_empty && may_overlap_itself(operands[i])) {
      return wrong("writes " + describe(operands[i]) + " with a stride of 0");
    }
  }
  return Status::ok();
}

}  // namespace flexpte::bound
