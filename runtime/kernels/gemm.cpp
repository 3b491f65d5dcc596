#include "runtime/kernels/gemm.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>
#include <type_traits>

#include "runtime/kernels/amx.h"
#include "runtime/kernels/scalar.h"
#include "runtime/kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/kernels/gemm.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "runtime/kernels/simd-inl.h"

#ifndef FLEXPTE_GEMM_BLOCKING
#define FLEXPTE_GEMM_BLOCKING
namespace flexpte {
namespace {

constexpr int64_t kStripCols = 64;    // columns packed at a time
constexpr int64_t kDepth = 768;       // of one pass: a packed strip (192 KiB) stays in the L2 cache
constexpr int64_t kBlockRows = 256;   // rows that use one packed strip
constexpr int64_t kMaxTileRows = 12;  // rows of a micro-kernel
// An odd number of cache lines, so that the rows of a tile do not meet in one set of the L1 cache.
constexpr int64_t kTileStride = kDepth + 16;

constexpr int64_t kAmxRows = 2 * amx::kRows;  // of a product of tile registers
// Packing a strip costs as much as multiplying a hundred rows with it.
constexpr int64_t kAmxBlockRows = 512;
static_assert(kDepth % amx::kDepth == 0 && kAmxBlockRows % kAmxRows == 0 && kStripCols % (2 * amx::kCols) == 0);

// Scratch of one thread.
struct GemmScratch {
  alignas(64) float strip[kStripCols * kDepth];
  alignas(64) float tile[std::max(kMaxTileRows * kTileStride, kAmxRows* kDepth / 2)];
  alignas(64) float sums[std::max(kBlockRows, kAmxBlockRows) * kStripCols];

  // Of bfloat16, where there are tile registers.
  BFloat16* strip_pairs() { return reinterpret_cast<BFloat16*>(strip); }
  BFloat16* tile_rows() { return reinterpret_cast<BFloat16*>(tile); }
};
bool uses_amx(const GemmProblem& p) {
  const auto fits = [](const GemmOperand& x) { return x.dtype == DType::kBF16 && x.k_stride == 1; };
  return fits(p.a) && fits(p.b) && amx::is_available();
}

}  // namespace
}  // namespace flexpte
#endif

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {
namespace {

// Accumulators fill the registers but for those that the operands of a step need.
#if HWY_TARGET == HWY_AVX3
constexpr int kTileRows = 12;
constexpr int kTileVectors = 2;
#elif HWY_ARCH_ARM_A64
constexpr int kTileRows = 6;
constexpr int kTileVectors = 4;
#else
constexpr int kTileRows = 6;
constexpr int kTileVectors = 2;
#endif
constexpr int64_t kPanelCols = kTileVectors * static_cast<int64_t>(HWY_LANES(float));
static_assert(kStripCols % kPanelCols == 0 && kTileRows <= kMaxTileRows);

// sums[r, :] (+)= sum_k tile[r, k] * panel[k, :]; panel [depth, kPanelCols].
template <int kRows>
void multiply_tile(int64_t depth, const float* HWY_RESTRICT tile, const float* HWY_RESTRICT panel, bool accumulate,
                   float* HWY_RESTRICT sums) {
  const DF d;
  constexpr int64_t kLanes = HWY_LANES(float);
  VF acc[kRows][kTileVectors];
  HWY_UNROLL(12)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (int v = 0; v < kTileVectors; ++v) {
      acc[r][v] = accumulate ? hn::Load(d, sums + r * kStripCols + v * kLanes) : hn::Zero(d);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    VF b[kTileVectors];
    HWY_UNROLL(4)
    for (int v = 0; v < kTileVectors; ++v) b[v] = hn::Load(d, panel + k * kPanelCols + v * kLanes);
    HWY_UNROLL(12)
    for (int r = 0; r < kRows; ++r) {
      const VF a = hn::Set(d, tile[r * kTileStride + k]);
      HWY_UNROLL(4)
      for (int v = 0; v < kTileVectors; ++v) acc[r][v] = hn::MulAdd(a, b[v], acc[r][v]);
    }
  }
  HWY_UNROLL(12)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (int v = 0; v < kTileVectors; ++v) hn::Store(acc[r][v], d, sums + r * kStripCols + v * kLanes);
  }
}

template <int kRows = kTileRows>
void multiply_rows(int64_t rows, int64_t depth, const float* tile, const float* panel, bool accumulate, float* sums) {
  if (rows == kRows) {
    multiply_tile<kRows>(depth, tile, panel, accumulate, sums);
  } else if constexpr (kRows > 1) {
    multiply_rows<kRows - 1>(rows, depth, tile, panel, accumulate, sums);
  }
}

#if HWY_TARGET == HWY_SCALAR

// panel[k, j] = rows[j][k] for j < kPanelCols.
void transpose(const float* const* rows, int64_t depth, float* HWY_RESTRICT panel) {
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t j = 0; j < kPanelCols; ++j) panel[k * kPanelCols + j] = rows[j][k];
  }
}

#else

// The vector whose 128-bit block i holds rows[4 * i][0..3].
HWY_INLINE VF load_blocks(DF d, const float* const* rows, int64_t offset) {
  constexpr int kBlocks = static_cast<int>(HWY_LANES(float) / 4);
  VF v = hn::LoadDup128(d, rows[4 * (kBlocks - 1)] + offset);
  HWY_UNROLL(4)
  for (int i = kBlocks - 2; i >= 0; --i) {
    v = hn::IfThenElse(hn::FirstN(d, static_cast<size_t>(4 * (i + 1))), hn::LoadDup128(d, rows[4 * i] + offset), v);
  }
  return v;
}

// panel[k, j] = rows[j][k] for j < kPanelCols.
void transpose(const float* const* rows, int64_t depth, float* HWY_RESTRICT panel) {
  const DF d;
  const hn::Repartition<double, DF> d64;
  constexpr int64_t kLanes = HWY_LANES(float);
  int64_t k = 0;
  for (; k + 4 <= depth; k += 4) {
    for (int64_t j = 0; j < kPanelCols; j += kLanes) {
      const VF r0 = load_blocks(d, rows + j, k), r1 = load_blocks(d, rows + j + 1, k);
      const VF r2 = load_blocks(d, rows + j + 2, k), r3 = load_blocks(d, rows + j + 3, k);
      const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));
      const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
      const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
      const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
      float* const to = panel + k * kPanelCols + j;
      hn::Store(hn::BitCast(d, hn::InterleaveLower(d64, low01, low23)), d, to);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(d64, low01, low23)), d, to + kPanelCols);
      hn::Store(hn::BitCast(d, hn::InterleaveLower(d64, high01, high23)), d, to + 2 * kPanelCols);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(d64, high01, high23)), d, to + 3 * kPanelCols);
    }
  }
  for (; k < depth; ++k) {
    for (int64_t j = 0; j < kPanelCols; ++j) panel[k * kPanelCols + j] = rows[j][k];
  }
}

#endif  // HWY_TARGET == HWY_SCALAR

// panel[k, j] = b[j, k] for j < cols; the other columns hold anything finite or not: they are not used.
template <class T>
void pack_panel(const T* b, int64_t outer_stride, int64_t k_stride, int64_t cols, int64_t depth, float* panel) {
  const float* rows[kPanelCols];
  if (k_stride == 1) {
    if constexpr (std::is_same_v<T, float>) {
      for (int64_t j = 0; j < kPanelCols; ++j) rows[j] = b + std::min(j, cols - 1) * outer_stride;
      transpose(rows, depth, panel);
    } else {
      constexpr int64_t kWide = 64;
      HWY_ALIGN float wide[kPanelCols * kWide];
      for (int64_t j = 0; j < kPanelCols; ++j) rows[j] = wide + std::min(j, cols - 1) * kWide;
      for (int64_t k = 0; k < depth; k += kWide) {
        const int64_t count = std::min(kWide, depth - k);
        for (int64_t j = 0; j < cols; ++j) widen_row(b + j * outer_stride + k, count, wide + j * kWide);
        transpose(rows, count, panel + k * kPanelCols);
      }
    }
    return;
  }
  for (int64_t k = 0; k < depth; ++k) {
    float* const to = panel + k * kPanelCols;
    const T* const from = b + k * k_stride;
    if (outer_stride == 1) {
      widen_row(from, cols, to);
    } else {
      for (int64_t j = 0; j < cols; ++j) to[j] = widen(from[j * outer_stride]);
    }
    for (int64_t j = cols; j < kPanelCols; ++j) to[j] = 0;
  }
}

// tile[r, k] = a[r, k]
template <class T>
void pack_tile(const T* a, int64_t outer_stride, int64_t k_stride, int64_t rows, int64_t depth, float* tile) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* const from = a + r * outer_stride;
    float* const to = tile + r * kTileStride;
    if (k_stride == 1) {
      widen_row(from, depth, to);
    } else {
      for (int64_t k = 0; k < depth; ++k) to[k] = widen(from[k * k_stride]);
    }
  }
}

template <class T>
void store_sums(const float* HWY_RESTRICT sums, const float* HWY_RESTRICT bias, int64_t rows, int64_t cols, T* out,
                int64_t row_stride, int64_t col_stride) {
  const DF d;
  constexpr int64_t kLanes = HWY_LANES(float);
  for (int64_t r = 0; r < rows; ++r) {
    const float* const from = sums + r * kStripCols;
    T* const to = out + r * row_stride;
    int64_t j = 0;
    if (col_stride == 1) {
      for (; j + kLanes <= cols; j += kLanes) store(hn::Add(hn::Load(d, from + j), hn::Load(d, bias + j)), d, to + j);
    }
    for (; j < cols; ++j) to[j * col_stride] = convert<T>(from[j] + bias[j]);
  }
}

// The bias of columns [col, col + cols), zeros where there is none.
void load_bias(const GemmProblem& p, int64_t col, int64_t cols, float* bias) {
  std::fill_n(bias, kStripCols, 0.0f);
  if (p.bias == nullptr) return;
  with_float_type(p.bias_dtype, [&](auto tag) {
    const auto* const from = static_cast<const decltype(tag)*>(p.bias);
    for (int64_t j = 0; j < cols; ++j) bias[j] = widen(from[(col + j) * p.bias_stride]);
  });
}

// multiply_block for bfloat16, contiguous along the depth, with tile registers.
void multiply_block_amx(const GemmProblem& p, int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end,
                        GemmScratch& scratch) {
  const amx::Registers registers;
  constexpr int64_t kTileStep = kStripCols / amx::kCols * amx::kPairsElements;
  const int64_t rows = row_end - row_begin;
  const auto* const a = static_cast<const BFloat16*>(p.a.data) + row_begin * p.a.outer_stride;
  const auto* const b = static_cast<const BFloat16*>(p.b.data);
  const int64_t passes = std::max<int64_t>((p.k + kDepth - 1) / kDepth, 1);
  HWY_ALIGN float bias[kStripCols];
  for (int64_t col = col_begin; col < col_end; col += kStripCols) {
    const int64_t cols = std::min(kStripCols, col_end - col);
    load_bias(p, col, cols, bias);
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t k = pass * kDepth;
      const int64_t depth = std::min(kDepth, p.k - k);
      const int64_t steps = amx::round_up(depth, amx::kDepth) / amx::kDepth;
      for (int64_t j = 0; j < cols; j += amx::kCols) {
        amx::pack_pairs({b + (col + j) * p.b.outer_stride + k, p.b.outer_stride, std::min(amx::kCols, cols - j), depth},
                        scratch.strip_pairs() + j / amx::kCols * amx::kPairsElements, kTileStep);
      }
      for (int64_t begin = 0; begin < rows; begin += kAmxRows) {
        const int64_t count = std::min(kAmxRows, rows - begin);
        amx::Product product;
        product.steps = steps;
        product.rows = a + begin * p.a.outer_stride + k;
        product.row_stride = p.a.outer_stride;
        const int row_tiles = count > amx::kRows ? 2 : 1;
        if (count != row_tiles * amx::kRows || depth != steps * amx::kDepth) {
          // Rows and depth that a tile has too many of: zeros, or anything in rows that are not kept.
          BFloat16* const copy = scratch.tile_rows();
          for (int64_t r = 0; r < count; ++r) {
            BFloat16* const to = copy + r * steps * amx::kDepth;
            std::copy_n(product.rows + r * product.row_stride, depth, to);
            std::fill(to + depth, to + steps * amx::kDepth, BFloat16{});
          }
          product.rows = copy;
          product.row_stride = steps * amx::kDepth;
        }
        product.tile_step = kTileStep;
        product.sums_stride = kStripCols;
        product.accumulate = pass > 0;
        float* const sums = scratch.sums + begin * kStripCols;
        for (int64_t j = 0; j < cols; j += 2 * amx::kCols) {
          product.pairs = scratch.strip_pairs() + j / amx::kCols * amx::kPairsElements;
          product.sums = sums + j;
          amx::multiply(product, row_tiles, cols - j > amx::kCols ? 2 : 1);
        }
        if (pass + 1 < passes) continue;
        with_float_type(p.out_dtype, [&](auto tag) {
          auto* const out = static_cast<decltype(tag)*>(p.out);
          store_sums(sums, bias, count, cols, out + (row_begin + begin) * p.out_row_stride + col * p.out_col_stride,
                     p.out_row_stride, p.out_col_stride);
        });
      }
    }
  }
}

// out[row_begin..row_end, panel_begin * kPanelCols...]: at most kBlockRows rows, or kAmxBlockRows.
void multiply_block(const GemmProblem& p, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end,
                    GemmScratch& scratch) {
  const int64_t rows = row_end - row_begin;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  const int64_t passes = std::max<int64_t>((p.k + kDepth - 1) / kDepth, 1);
  const int64_t col_end = std::min(panel_end * kPanelCols, p.n);
  if (uses_amx(p)) return multiply_block_amx(p, row_begin, row_end, panel_begin * kPanelCols, col_end, scratch);
  HWY_ALIGN float bias[kStripCols];
  for (int64_t col = panel_begin * kPanelCols; col < col_end; col += kStripCols) {
    const int64_t cols = std::min(kStripCols, col_end - col);
    load_bias(p, col, cols, bias);
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t k = p.k * pass / passes;
      const int64_t depth = p.k * (pass + 1) / passes - k;
      with_float_type(p.b.dtype, [&](auto tag) {
        const auto* const from = static_cast<const decltype(tag)*>(p.b.data) + k * p.b.k_stride;
        for (int64_t j = 0; j < cols; j += kPanelCols) {
          pack_panel(from + (col + j) * p.b.outer_stride, p.b.outer_stride, p.b.k_stride,
                     std::min(kPanelCols, cols - j), depth, scratch.strip + j * depth);
        }
      });
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t begin = rows * tile / tiles;
        const int64_t count = rows * (tile + 1) / tiles - begin;
        with_float_type(p.a.dtype, [&](auto tag) {
          pack_tile(
              static_cast<const decltype(tag)*>(p.a.data) + (row_begin + begin) * p.a.outer_stride + k * p.a.k_stride,
              p.a.outer_stride, p.a.k_stride, count, depth, scratch.tile);
        });
        float* const sums = scratch.sums + begin * kStripCols;
        for (int64_t j = 0; j < cols; j += kPanelCols) {
          multiply_rows(count, depth, scratch.tile, scratch.strip + j * depth, pass > 0, sums + j);
        }
        if (pass + 1 < passes) continue;
        with_float_type(p.out_dtype, [&](auto tag) {
          store_sums(
              sums, bias, count, cols,
              static_cast<decltype(tag)*>(p.out) + (row_begin + begin) * p.out_row_stride + col * p.out_col_stride,
              p.out_row_stride, p.out_col_stride);
        });
      }
    }
  }
}

int64_t panel_cols() {
  return kPanelCols;
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace flexpte
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flexpte {
namespace {
HWY_EXPORT(multiply_block);
HWY_EXPORT(panel_cols);
}  // namespace

size_t gemm_workspace_bytes(int num_threads) {
  return static_cast<size_t>(num_threads) * sizeof(GemmScratch);
}

void gemm(int64_t batch, MakeGemmProblem make_problem, const void* context, const ThreadPool& pool,
          std::span<std::byte> workspace) {
  if (batch <= 0) return;
  const GemmProblem first = make_problem(context, 0);
  if (first.m <= 0 || first.n <= 0) return;
  assert(workspace.size() >= gemm_workspace_bytes(pool.num_threads()));
  assert(reinterpret_cast<uintptr_t>(workspace.data()) % alignof(GemmScratch) == 0);
  auto* const scratch = reinterpret_cast<GemmScratch*>(workspace.data());
  const int64_t cols_per_panel = HWY_DYNAMIC_DISPATCH(panel_cols)();
  const int64_t panels = (first.n + cols_per_panel - 1) / cols_per_panel;
  // A piece is some panels of one block of rows. Small problems are cut into smaller blocks of rows so
  // that every thread has work, but not so small that packing the panels would dominate.
  constexpr int64_t kMinBlockRows = 48;
  const int64_t wanted = 4 * static_cast<int64_t>(pool.num_threads());
  const int64_t block_rows = uses_amx(first) ? kAmxBlockRows : kBlockRows;
  const int64_t least = (first.m + block_rows - 1) / block_rows;
  const int64_t most = std::max((first.m + kMinBlockRows - 1) / kMinBlockRows, least);
  const int64_t blocks = std::clamp((wanted + batch * panels - 1) / (batch * panels), least, most);
  const int64_t items = batch * blocks * panels;
  const int64_t grain = std::clamp<int64_t>(items / wanted, 1, kStripCols / cols_per_panel);
  pool.parallel_for(items, grain, [&](int64_t begin, int64_t end, int thread) {
    while (begin < end) {
      const int64_t block = begin / panels;
      const int64_t panel = begin % panels;
      const int64_t count = std::min(panels - panel, end - begin);
      const int64_t row_block = block % blocks;
      const GemmProblem problem = make_problem(context, block / blocks);
      HWY_DYNAMIC_DISPATCH(multiply_block)
      (problem, first.m * row_block / blocks, first.m * (row_block + 1) / blocks, panel, panel + count,
       scratch[thread]);
      begin += count;
    }
  });
}

}  // namespace flexpte
#endif  // HWY_ONCE
