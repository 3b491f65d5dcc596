// Few rows of x: every row of the weight is read once, in order, and multiplied with all rows of x,
// at the speed of memory. Many rows: gemm().
#include <algorithm>
#include <cassert>
#include <cstring>

#include "runtime/kernels/gemm.h"
#include "runtime/kernels/kernels.h"
#include "runtime/kernels/scalar.h"
#include "runtime/kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/kernels/linear.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "runtime/kernels/simd-inl.h"

#ifndef FLEXPTE_LINEAR_TYPES
#define FLEXPTE_LINEAR_TYPES
namespace flexpte {
namespace {

constexpr int64_t kFewRows = 16;  // more rows pay for packing the weight
constexpr int64_t kPadding = 16;  // the widest vector, in floats

constexpr int64_t padded_depth(int64_t k) {
  return (k + kPadding - 1) / kPadding * kPadding;
}

struct FewRows {
  int64_t m = 0;
  int64_t k = 0;
  const float* x = nullptr;  // [m, padded_depth(k)], padded with zeros
  const void* weight = nullptr;
  DType weight_dtype = DType::kF32;
  const void* bias = nullptr;
  DType bias_dtype = DType::kF32;
  int64_t bias_stride = 0;
  void* out = nullptr;
  DType out_dtype = DType::kF32;
  int64_t out_row_stride = 0;
};

}  // namespace
}  // namespace flexpte
#endif

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {
namespace {

// Rows of the weight that are multiplied at a time.
constexpr int kWeightRows = 4;
// Rows of x that are multiplied at a time: as many as there are registers for.
#if HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM_A64
constexpr int kXRows = 4;
#else
constexpr int kXRows = 2;
#endif
static_assert(kPadding % static_cast<int64_t>(HWY_LANES(float)) == 0);

// sums[i] = sum of the lanes of v_i.
HWY_INLINE void sum_lanes_of_four(DF d, VF v0, VF v1, VF v2, VF v3, float* HWY_RESTRICT sums) {
#if HWY_TARGET == HWY_SCALAR
  const VF lanes[] = {v0, v1, v2, v3};
  for (int i = 0; i < 4; ++i) sums[i] = sum_of_lanes(d, lanes[i]);
#else
  const hn::Repartition<double, DF> d64;
  const hn::FixedTag<float, 4> d4;
  // Per block of four lanes: {v0, v1, v0, v1} and {v2, v3, v2, v3}, then {v0, v1, v2, v3}.
  const auto pairs01 = hn::BitCast(d64, hn::Add(hn::InterleaveLower(d, v0, v1), hn::InterleaveUpper(d, v0, v1)));
  const auto pairs23 = hn::BitCast(d64, hn::Add(hn::InterleaveLower(d, v2, v3), hn::InterleaveUpper(d, v2, v3)));
  const VF blocks = hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, pairs01, pairs23)),
                            hn::BitCast(d, hn::InterleaveUpper(d64, pairs01, pairs23)));
  HWY_ALIGN float lanes[HWY_LANES(float)];
  hn::Store(blocks, d, lanes);
  auto sum = hn::Load(d4, lanes);
  for (size_t i = 4; i < HWY_LANES(float); i += 4) sum = hn::Add(sum, hn::Load(d4, lanes + i));
  hn::StoreU(sum, d4, sums);
#endif
}

// sums[r * kWeightRows + j] = <x row r, weight row j>
template <int kRows, class T>
HWY_INLINE void dot_products(const float* HWY_RESTRICT x, int64_t x_stride, const T* HWY_RESTRICT w, int64_t k,
                             float* HWY_RESTRICT sums) {
  const DF d;
  constexpr int64_t kLanes = HWY_LANES(float);
  // One row of x alone would not keep the multipliers busy: two vectors at a time.
  constexpr int kUnroll = kRows == 1 ? 2 : 1;
  VF acc[kUnroll][kRows][kWeightRows];
  for (auto& step : acc) {
    for (auto& row : step) {
      for (VF& v : row) v = hn::Zero(d);
    }
  }
  int64_t i = 0;
  for (; i + kUnroll * kLanes <= k; i += kUnroll * kLanes) {
    HWY_UNROLL(2)
    for (int u = 0; u < kUnroll; ++u) {
      VF row[kRows];
      HWY_UNROLL(4)
      for (int r = 0; r < kRows; ++r) row[r] = hn::Load(d, x + r * x_stride + i + u * kLanes);
      HWY_UNROLL(4)
      for (int j = 0; j < kWeightRows; ++j) {
        const VF weight = load(d, w + j * k + i + u * kLanes);
        HWY_UNROLL(4)
        for (int r = 0; r < kRows; ++r) acc[u][r][j] = hn::MulAdd(row[r], weight, acc[u][r][j]);
      }
    }
  }
  for (; i < k; i += kLanes) {
    const int64_t count = std::min(kLanes, k - i);
    for (int j = 0; j < kWeightRows; ++j) {
      const VF weight =
          count == kLanes ? load(d, w + j * k + i) : load_first(d, w + j * k + i, static_cast<size_t>(count));
      for (int r = 0; r < kRows; ++r)
        acc[0][r][j] = hn::MulAdd(hn::Load(d, x + r * x_stride + i), weight, acc[0][r][j]);
    }
  }
  HWY_UNROLL(4)
  for (int r = 0; r < kRows; ++r) {
    if constexpr (kUnroll == 2) {
      for (int j = 0; j < kWeightRows; ++j) acc[0][r][j] = hn::Add(acc[0][r][j], acc[1][r][j]);
    }
    sum_lanes_of_four(d, acc[0][r][0], acc[0][r][1], acc[0][r][2], acc[0][r][3], sums + r * kWeightRows);
  }
}

template <int kRows = kXRows, class T>
HWY_INLINE void dot_rows(int64_t rows, const float* x, int64_t x_stride, const T* w, int64_t k, float* sums) {
  if (rows == kRows) {
    dot_products<kRows>(x, x_stride, w, k, sums);
  } else if constexpr (kRows > 1) {
    dot_rows<kRows - 1>(rows, x, x_stride, w, k, sums);
  }
}

// The same for `count` < kWeightRows rows of the weight.
template <class T>
void dot_rest(int64_t rows, const float* x, int64_t x_stride, const T* w, int64_t count, int64_t k, float* sums) {
  const DF d;
  constexpr int64_t kLanes = HWY_LANES(float);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < count; ++j) {
      VF acc = hn::Zero(d);
      for (int64_t i = 0; i < k; i += kLanes) {
        const T* const from = w + j * k + i;
        const VF weight = k - i >= kLanes ? load(d, from) : load_first(d, from, static_cast<size_t>(k - i));
        acc = hn::MulAdd(hn::Load(d, x + r * x_stride + i), weight, acc);
      }
      sums[r * kWeightRows + j] = sum_of_lanes(d, acc);
    }
  }
}

// Columns [begin, end) of out.
void few_rows(const FewRows& p, int64_t begin, int64_t end) {
  const int64_t x_stride = padded_depth(p.k);
  with_float_type(p.weight_dtype, [&](auto weight_tag) {
    const auto* const weight = static_cast<const decltype(weight_tag)*>(p.weight);
    for (int64_t n = begin; n < end; n += kWeightRows) {
      const int64_t cols = std::min<int64_t>(kWeightRows, end - n);
      float bias[kWeightRows] = {};
      if (p.bias != nullptr) {
        with_float_type(p.bias_dtype, [&](auto tag) {
          const auto* const from = static_cast<const decltype(tag)*>(p.bias);
          for (int64_t j = 0; j < cols; ++j) bias[j] = widen(from[(n + j) * p.bias_stride]);
        });
      }
      for (int64_t m = 0; m < p.m; m += kXRows) {
        const int64_t rows = std::min<int64_t>(kXRows, p.m - m);
        float sums[kXRows * kWeightRows];
        if (cols == kWeightRows) {
          dot_rows(rows, p.x + m * x_stride, x_stride, weight + n * p.k, p.k, sums);
        } else {
          dot_rest(rows, p.x + m * x_stride, x_stride, weight + n * p.k, cols, p.k, sums);
        }
        with_float_type(p.out_dtype, [&](auto tag) {
          using Out = decltype(tag);
          for (int64_t r = 0; r < rows; ++r) {
            Out* const to = static_cast<Out*>(p.out) + (m + r) * p.out_row_stride + n;
            for (int64_t j = 0; j < cols; ++j) to[j] = convert<Out>(sums[r * kWeightRows + j] + bias[j]);
          }
        });
      }
    }
  });
}

// wide [rows, padded_depth(k)] = x, padded with zeros.
void widen_rows(const void* x, DType dtype, int64_t row_stride, int64_t rows, int64_t k, float* wide) {
  const int64_t padded = padded_depth(k);
  with_float_type(dtype, [&](auto tag) {
    for (int64_t r = 0; r < rows; ++r) {
      widen_row(static_cast<const decltype(tag)*>(x) + r * row_stride, k, wide + r * padded);
      std::fill(wide + r * padded + k, wide + (r + 1) * padded, 0.0f);
    }
  });
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace flexpte
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flexpte {
namespace {
HWY_EXPORT(few_rows);
HWY_EXPORT(widen_rows);

// The leading dimensions of a view as one dimension.
struct Rows {
  int64_t count = 1;
  int64_t stride = 0;
};

Rows collapse_rows(const TensorView& view) {
  Rows rows;
  for (int32_t d = view.rank - 1; d-- > 0;) {
    if (view.size(d) == 1) continue;
    if (rows.count == 1) rows.stride = view.stride(d);
    assert(rows.count == 0 || view.stride(d) == rows.count * rows.stride);
    rows.count *= view.size(d);
  }
  return rows;
}

size_t few_rows_workspace_bytes(int64_t m, int64_t k) {
  return static_cast<size_t>(std::min(m, kFewRows) * padded_depth(k)) * sizeof(float);
}

}  // namespace

size_t linear_workspace_bytes(int64_t m, int64_t, int64_t k, DType, int num_threads) {
  // Enough for every number of rows up to m.
  const size_t many = m > kFewRows ? gemm_workspace_bytes(num_threads) : 0;
  return std::max(few_rows_workspace_bytes(m, k), many) + kWorkspaceAlignmentBytes;
}

void linear(const TensorView& x, const TensorView& weight, const TensorView* bias, const TensorView& out,
            const ThreadPool& pool, std::span<std::byte> workspace) {
  assert(weight.rank == 2 && x.rank >= 1 && out.rank == x.rank);
  const Rows x_rows = collapse_rows(x);
  const Rows out_rows = collapse_rows(out);
  const int64_t m = x_rows.count, n = weight.size(0), k = weight.size(1);
  assert(out_rows.count == m && x.size(x.rank - 1) == k && out.size(out.rank - 1) == n);
  assert(k <= 1 || (x.stride(x.rank - 1) == 1 && weight.stride(1) == 1 && (n <= 1 || weight.stride(0) == k)));
  assert(n <= 1 || out.stride(out.rank - 1) == 1);
  assert(workspace.size() >= linear_workspace_bytes(m, n, k, weight.dtype, pool.num_threads()));
  if (m <= 0 || n <= 0) return;
  const std::span<std::byte> scratch = align_workspace(workspace);
  if (m > kFewRows) {
    GemmProblem problem;
    problem.m = m;
    problem.n = n;
    problem.k = k;
    problem.a = {x.data, x.dtype, x_rows.stride, 1};
    problem.b = {weight.data, weight.dtype, k, 1};
    if (bias != nullptr) {
      problem.bias = bias->data;
      problem.bias_dtype = bias->dtype;
      problem.bias_stride = bias->stride(0);
    }
    problem.out = out.data;
    problem.out_dtype = out.dtype;
    problem.out_row_stride = out_rows.stride;
    problem.out_col_stride = 1;
    gemm(
        1, [](const void* context, int64_t) { return *static_cast<const GemmProblem*>(context); }, &problem, pool,
        scratch);
    return;
  }
  float* const wide = reinterpret_cast<float*>(scratch.data());
  HWY_DYNAMIC_DISPATCH(widen_rows)(x.data, x.dtype, x_rows.stride, m, k, wide);
  FewRows problem;
  problem.m = m;
  problem.k = k;
  problem.x = wide;
  problem.weight = weight.data;
  problem.weight_dtype = weight.dtype;
  if (bias != nullptr) {
    problem.bias = bias->data;
    problem.bias_dtype = bias->dtype;
    problem.bias_stride = bias->stride(0);
  }
  problem.out = out.data;
  problem.out_dtype = out.dtype;
  problem.out_row_stride = out_rows.stride;
  // Pieces of at least this many bytes of weight, whole groups of rows.
  constexpr int64_t kPieceBytes = 64 * 1024;
  constexpr int64_t kGroup = 4;
  const int64_t row_bytes = std::max<int64_t>(k, 1) * element_size_bytes(weight.dtype);
  const int64_t groups = (n + kGroup - 1) / kGroup;
  const int64_t grain = std::max<int64_t>(kPieceBytes / (row_bytes * kGroup), 1);
  pool.parallel_for(groups, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(few_rows)(problem, begin * kGroup, std::min(end * kGroup, n));
  });
}

}  // namespace flexpte
#endif  // HWY_ONCE
