#include <algorithm>
#include <cassert>

#include "runtime/kernels/gemm.h"
#include "runtime/kernels/kernels.h"

namespace flexpte {
namespace {

struct Batch {
  const TensorView& a;
  const TensorView& b;
  const TensorView& out;
};

const std::byte* advance(const TensorView& view, int64_t elements) {
  return view.as<const std::byte>() + elements * element_size_bytes(view.dtype);
}

GemmProblem make_problem(const void* context, int64_t i) {
  const auto& [a, b, out] = *static_cast<const Batch*>(context);
  const int32_t rank = out.rank;
  int64_t a_offset = 0, b_offset = 0, out_offset = 0;
  for (int32_t d = rank - 2; d-- > 0;) {
    const int64_t index = i % out.size(d);
    i /= out.size(d);
    a_offset += index * a.stride(d);
    b_offset += index * b.stride(d);
    out_offset += index * out.stride(d);
  }
  GemmProblem problem;
  problem.m = out.size(rank - 2);
  problem.n = out.size(rank - 1);
  problem.k = a.size(rank - 1);
  problem.a = {advance(a, a_offset), a.dtype, a.stride(rank - 2), a.stride(rank - 1)};
  problem.b = {advance(b, b_offset), b.dtype, b.stride(rank - 1), b.stride(rank - 2)};
  problem.out = out.as<std::byte>() + out_offset * element_size_bytes(out.dtype);
  problem.out_dtype = out.dtype;
  problem.out_row_stride = out.stride(rank - 2);
  problem.out_col_stride = out.stride(rank - 1);
  return problem;
}

}  // namespace

size_t matmul_workspace_bytes(const TensorView&, const TensorView&, int num_threads) {
  return gemm_workspace_bytes(num_threads) + kWorkspaceAlignmentBytes;
}

void matmul(const TensorView& a, const TensorView& b, const TensorView& out, const ThreadPool& pool,
            std::span<std::byte> workspace) {
  assert(a.rank >= 2 && a.rank == b.rank && a.rank == out.rank);
  assert(a.size(a.rank - 1) == b.size(b.rank - 2));
  assert(workspace.size() >= matmul_workspace_bytes(a, b, pool.num_threads()));
  if (out.num_elements() == 0) return;
  int64_t batch = 1;
  for (int32_t d = 0; d < out.rank - 2; ++d) {
    assert(a.size(d) == out.size(d) && b.size(d) == out.size(d));
    batch *= out.size(d);
  }
  const Batch context{a, b, out};
  gemm(batch, make_problem, &context, pool, align_workspace(workspace));
}

}  // namespace flexpte
