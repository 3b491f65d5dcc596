// The matrix product behind linear() and matmul(): C = A B^T, cache-blocked, accumulated in float32.
//
// Goto & van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008): a strip of B is
// packed into panels of as many columns as a micro-kernel holds in registers, a few rows of A are
// packed beside it, and the micro-kernel runs over the depth.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "runtime/tensor.h"
#include "runtime/thread_pool.h"

namespace flexpte {

// A matrix [outer, K] of F32, F16 or BF16; strides in elements.
struct GemmOperand {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t outer_stride = 0;
  int64_t k_stride = 0;
};

// out[m, n] = sum_k a[m, k] * b[n, k] + bias[n]
struct GemmProblem {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  GemmOperand a;
  GemmOperand b;
  const void* bias = nullptr;
  DType bias_dtype = DType::kF32;
  int64_t bias_stride = 0;
  void* out = nullptr;
  DType out_dtype = DType::kF32;
  int64_t out_row_stride = 0;
  int64_t out_col_stride = 0;
};

inline constexpr size_t kWorkspaceAlignmentBytes = 64;

// The part of `workspace` that is aligned.
inline std::span<std::byte> align_workspace(std::span<std::byte> workspace) {
  const size_t excess = reinterpret_cast<uintptr_t>(workspace.data()) % kWorkspaceAlignmentBytes;
  const size_t skip = excess == 0 ? 0 : kWorkspaceAlignmentBytes - excess;
  return skip <= workspace.size() ? workspace.subspan(skip) : std::span<std::byte>();
}

// Bytes of aligned workspace for any problem.
size_t gemm_workspace_bytes(int num_threads);

// Solves `batch` problems of one size. make_problem(context, i) gives problem i.
using MakeGemmProblem = GemmProblem (*)(const void* context, int64_t i);
void gemm(int64_t batch, MakeGemmProblem make_problem, const void* context, const ThreadPool& pool,
          std::span<std::byte> workspace);

}  // namespace flexpte
