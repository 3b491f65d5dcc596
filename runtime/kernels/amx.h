// Products of bfloat16 matrices on the tile registers of Intel processors (AMX), summed in float.
//
// Intel, "Architecture Instruction Set Extensions Programming Reference", chapter 3. A tile has 16 rows of 64 bytes.
// TDPBF16PS: sums[16, 16] += rows[16, 32] pairs[32, 16], where `pairs` has two neighbours along the depth side by
// side: pairs[p, j, e] is element 2 p + e of column j. It takes subnormal numbers as 0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/kernels/scalar.h"

namespace flexpte::amx {

inline constexpr int64_t kRows = 16;   // of a tile
inline constexpr int64_t kCols = 16;   // floats of a row of sums
inline constexpr int64_t kDepth = 32;  // bfloat16 elements of a row
// A pairs tile in memory.
inline constexpr int64_t kPairsElements = kRows * kDepth;

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Whether the processor has the instructions and the system lets this process use them. The environment variable
// FLEXPTE_AMX=0 says no.
bool is_available();

// The calling thread's tile registers. The functions below need one of these on their thread, and is_available().
class Registers {
 public:
  Registers();
  ~Registers();
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;
};

// A matrix [outer, depth], contiguous along the depth.
struct Source {
  const BFloat16* data = nullptr;
  int64_t stride = 0;
  int64_t outer = 0;
  int64_t depth = 0;
};

// The rows of `source`, at most kCols, as columns of pairs tiles, one for each kDepth of the depth, `tile_step`
// elements apart. Zeros beyond the ends.
void pack_pairs(const Source& source, BFloat16* tiles, int64_t tile_step);

// rows[d, k] = source[k, d] for d < round_up(source.depth, kRows), k < round_up(source.outer, kDepth); zeros beyond
// the ends. False: some element is infinite or NaN.
bool pack_transposed(const Source& source, BFloat16* rows, int64_t row_stride);

// Float weights [depth, kCols columns of a matrix with this stride], rounded, as pairs tiles `tile_step` elements
// apart. Zeros beyond the depth.
void pack_weights(const float* weights, int64_t stride, int64_t depth, BFloat16* tiles, int64_t tile_step);

// sums[kRows * row_tiles, kCols * col_tiles] (+)= rows[..., kDepth * steps] pairs, with 1 or 2 tiles each way.
struct Product {
  int64_t steps = 0;
  const BFloat16* rows = nullptr;
  int64_t row_stride = 0;
  const BFloat16* pairs = nullptr;  // [steps][col_tiles], `tile_step` elements from step to step
  int64_t tile_step = 0;
  float* sums = nullptr;
  int64_t sums_stride = 0;
  bool accumulate = false;
};
void multiply(const Product& product, int row_tiles, int col_tiles);

}  // namespace flexpte::amx
