// Matrix products.
#include <memory>

#include "runtime/kernels/kernels.h"
#include "runtime/ops/expression_builder.h"

namespace flexpte {
namespace {

bool is_transposed_weight(const TensorView& b) {
  return b.rank == 2 && b.stride(0) == 1 && b.stride(1) == b.size(0);
}

// x's leading dimensions collapse to one with rows of stride 1.
bool has_rows(const TensorView& x) {
  return x.is_contiguous();
}

TensorView transposed(const TensorView& b) {
  constexpr std::array<int32_t, 2> kDims = {1, 0};
  return permuted(b, kDims);
}

Status expect_product(const Binder& binder, int32_t a, int32_t b, int32_t out, int32_t rank) {
  FLEXPTE_TRY(binder.expect_floating(a, "the left matrix"));
  FLEXPTE_TRY(binder.expect_same_dtype(a, b));
  FLEXPTE_TRY(binder.expect_same_dtype(a, out));
  FLEXPTE_TRY(binder.expect_rank(a, rank, "the left matrix"));
  FLEXPTE_TRY(binder.expect_rank(b, rank, "the right matrix"));
  return binder.expect_rank(out, rank, "the product");
}

void ask_workspace(const Binder& binder, int32_t a, int32_t b) {
  const TensorView& x = binder.upper(a);
  const TensorView& y = binder.upper(b);
  binder.workspace(matmul_workspace_bytes(x, y, binder.num_threads()));
  if (x.rank == 2) {
    binder.workspace(linear_workspace_bytes(x.size(0), y.size(1), x.size(1), y.dtype, binder.num_threads()));
  }
}

// out = a @ b, of rank 2 or 3 with equal leading sizes.
Status multiply(const Frame& frame, int32_t a_id, int32_t b_id, const TensorView* bias, int32_t out_id) {
  const TensorView& a = frame.tensor(a_id);
  const TensorView& b = frame.tensor(b_id);
  const int32_t rank = a.rank;
  if (a.size(rank - 1) != b.size(rank - 2) || (rank == 3 && a.size(0) != b.size(0))) {
    return invalid("matrices of sizes " + shape_string(a) + " and " + shape_string(b) + " do not multiply");
  }
  SizeList sizes;
  for (int32_t d = 0; d < rank - 1; ++d) sizes.push(a.size(d));
  sizes.push(b.size(rank - 1));
  FLEXPTE_TRY(frame.resize(out_id, sizes));
  const TensorView& out = frame.tensor(out_id);
  if (rank == 2 && has_rows(a) && has_rows(out) && is_transposed_weight(b)) {
    linear(a, transposed(b), bias, out, frame.pool, frame.workspace);
  } else {
    matmul(a, b, out, frame.pool, frame.workspace);
  }
  return Status::ok();
}

// aten::mm.out(self, mat2, out), aten::bmm.out
template <int32_t kRank>
Result<Step> product(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t a, binder.tensor(0));
  FLEXPTE_ASSIGN(const int32_t b, binder.tensor(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(2));
  FLEXPTE_TRY(expect_product(binder, a, b, out, kRank));
  ask_workspace(binder, a, b);
  return Step([=](const Frame& frame) { return multiply(frame, a, b, nullptr, out); });
}

// aten::addmm.out(self, mat1, mat2, beta, alpha, out): beta * self + alpha * mat1 @ mat2
Result<Step> addmm(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t self, binder.tensor(0));
  FLEXPTE_ASSIGN(const int32_t a, binder.tensor(1));
  FLEXPTE_ASSIGN(const int32_t b, binder.tensor(2));
  FLEXPTE_ASSIGN(const double beta, binder.fixed_real(3));
  FLEXPTE_ASSIGN(const double alpha, binder.fixed_real(4));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(5));
  FLEXPTE_TRY(expect_product(binder, a, b, out, 2));
  FLEXPTE_TRY(binder.expect_same_dtype(self, out));
  ask_workspace(binder, a, b);
  // The product lands in `out` first, then the rest is added in place.
  FLEXPTE_ASSIGN(
      const Step add,
      bind_elementwise(binder, {0, 5}, 5, [=](ExpressionBuilder& e, std::span<const Node> x) -> Result<Node> {
        const Node product = e.arithmetic(ExprOp::kMul, x[1], e.constant(alpha));
        if (beta == 0.0) return product;  // as in ATen, a NaN in self is then ignored
        return e.arithmetic(ExprOp::kAdd, e.arithmetic(ExprOp::kMul, x[0], e.constant(beta)), product);
      }));
  const bool may_fuse = alpha == 1.0 && beta == 1.0 && binder.rank(self) == 1;
  return Step([=](const Frame& frame) -> Status {
    const TensorView& bias = frame.tensor(self);
    const TensorView& x = frame.tensor(a);
    const TensorView& y = frame.tensor(b);
    if (may_fuse && has_rows(x) && is_transposed_weight(y) && bias.size(0) == y.size(1) && bias.is_contiguous()) {
      return multiply(frame, a, b, &bias, out);
    }
    FLEXPTE_TRY(multiply(frame, a, b, nullptr, out));
    return add(frame);
  });
}

// aten::linear.out(input, weight, bias?, out)
Result<Step> linear_op(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int32_t weight, binder.tensor(1));
  FLEXPTE_ASSIGN(const int32_t bias, binder.optional_tensor(2));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(3));
  FLEXPTE_TRY(binder.expect_floating(x, "the input"));
  FLEXPTE_TRY(binder.expect_same_dtype(x, weight));
  FLEXPTE_TRY(binder.expect_same_dtype(x, out));
  FLEXPTE_TRY(binder.expect_rank(weight, 2, "the weight"));
  if (bias >= 0) {
    FLEXPTE_TRY(binder.expect_same_dtype(x, bias));
    FLEXPTE_TRY(binder.expect_rank(bias, 1, "the bias"));
  }
  if (binder.rank(x) < 1) return Status(Code::kUnsupported, "the input has rank 0");
  const TensorView& upper = binder.upper(x);
  const TensorView& w = binder.upper(weight);
  const int64_t k = std::max<int64_t>(upper.size(upper.rank - 1), 1);
  binder.workspace(
      linear_workspace_bytes(upper.num_elements() / k, w.size(0), w.size(1), w.dtype, binder.num_threads()));
  return Step([=](const Frame& frame) -> Status {
    const TensorView& in = frame.tensor(x);
    const TensorView& matrix = frame.tensor(weight);
    if (in.size(in.rank - 1) != matrix.size(1) || (bias >= 0 && frame.tensor(bias).size(0) != matrix.size(0))) {
      return invalid("an input of sizes " + shape_string(in) + " does not fit a weight of " + shape_string(matrix));
    }
    SizeList sizes;
    for (int32_t d = 0; d < in.rank - 1; ++d) sizes.push(in.size(d));
    sizes.push(matrix.size(0));
    FLEXPTE_TRY(frame.resize(out, sizes));
    const TensorView* added = bias >= 0 ? &frame.tensor(bias) : nullptr;
    if (!has_rows(in) || !has_rows(frame.tensor(out)) || !matrix.is_contiguous() ||
        (added != nullptr && !added->is_contiguous())) {
      return Status(Code::kUnsupported, "tensors with permuted dimensions");
    }
    linear(in, matrix, added, frame.tensor(out), frame.pool, frame.workspace);
    return Status::ok();
  });
}

constexpr OpEntry kOps[] = {
    {"aten::mm.out", product<2>},
    {"aten::bmm.out", product<3>},
    {"aten::addmm.out", addmm},
    {"aten::linear.out", linear_op},
};

}  // namespace

std::span<const OpEntry> linear_ops() {
  return kOps;
}

}  // namespace flexpte
