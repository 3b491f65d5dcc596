#include "runtime/kernels/amx.h"

#include <cassert>

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

// GCC's own intrinsics begin from undefined vectors on purpose and warn of it (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define FLEXPTE_AMX __attribute__((target("avx512f,avx512bw,avx512bf16,amx-tile,amx-bf16")))

namespace flexpte::amx {
namespace {

constexpr size_t kRowBytes = 64;

// What LDTILECFG loads: all eight tiles whole.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  std::array<uint8_t, 14> reserved{};
  std::array<uint16_t, 16> row_bytes{};
  std::array<uint8_t, 16> rows{};

  constexpr TileConfig() {
    std::fill_n(row_bytes.begin(), 8, uint16_t{kRowBytes});
    std::fill_n(rows.begin(), 8, uint8_t{kRows});
  }
};
static_assert(sizeof(TileConfig) == 64);
// Not on the stack: GCC's intrinsic admits to reading 8 bytes only, and stores of the others would be dropped.
constexpr TileConfig kConfig;

bool detect() {
  const char* const wanted = std::getenv("FLEXPTE_AMX");
  if (wanted != nullptr && std::strcmp(wanted, "0") == 0) return false;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kAvx512F = 1u << 16, kAvx512Bw = 1u << 30;  // of EBX
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;   // of EDX
  if ((b & kAvx512F) == 0 || (b & kAvx512Bw) == 0 || (d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  constexpr unsigned kAvx512Bf16 = 1u << 5;  // of EAX
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0 || (a & kAvx512Bf16) == 0) return false;
  // Linux hands out the 8 KiB of tile state on request (Documentation/arch/x86/xstate.rst), where it saves it at all.
  constexpr long kArchRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kArchRequestPermission, kTileData) == 0;
}

// Functions of their own: compilers do not apply the attribute to constructors.
FLEXPTE_AMX void configure() {
  _tile_loadconfig(&kConfig);
}

FLEXPTE_AMX void release() {
  _tile_release();
}

// to[j, i] = from[i, j] of 16 x 16 words.
FLEXPTE_AMX inline void transpose(__m512i (&rows)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  // In each 128-bit block b: rows[4 g + j] holds column 4 b + j of rows 4 g ... 4 g + 3.
  for (int g = 0; g < 16; g += 4) {
    rows[g] = _mm512_unpacklo_epi64(t[g], t[g + 2]);
    rows[g + 1] = _mm512_unpackhi_epi64(t[g], t[g + 2]);
    rows[g + 2] = _mm512_unpacklo_epi64(t[g + 1], t[g + 3]);
    rows[g + 3] = _mm512_unpackhi_epi64(t[g + 1], t[g + 3]);
  }
  // A transpose of 4 x 4 blocks.
  for (int j = 0; j < 4; ++j) {
    const __m512i low01 = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0x44);
    const __m512i high01 = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0xee);
    const __m512i low23 = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0x44);
    const __m512i high23 = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0xee);
    t[j] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    t[8 + j] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
  std::copy_n(t, 16, rows);
}

__mmask32 first_32(int64_t count) {
  return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << std::max<int64_t>(count, 0)) - 1;
}

__mmask16 first_16(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffffu : (1u << std::max<int64_t>(count, 0)) - 1);
}

// The tile registers of a product: sums in 0 to 3, rows in 4 and 5, pairs in 6 and 7.
template <int kRowTiles, int kColTiles>
FLEXPTE_AMX void multiply_tiles(const Product& p) {
  const auto row_bytes = static_cast<size_t>(p.row_stride) * sizeof(BFloat16);
  const auto sums_bytes = static_cast<size_t>(p.sums_stride) * sizeof(float);
  const BFloat16* const low_rows = p.rows;
  const BFloat16* const high_rows = p.rows + kRows * p.row_stride;
  float* const low_sums = p.sums;
  float* const high_sums = p.sums + kRows * p.sums_stride;
  // GCC's _tile_loadd does not say that it reads memory.
  asm volatile("" ::: "memory");
  if (p.accumulate) {
    _tile_loadd(0, low_sums, sums_bytes);
    if constexpr (kColTiles == 2) _tile_loadd(1, low_sums + kCols, sums_bytes);
    if constexpr (kRowTiles == 2) _tile_loadd(2, high_sums, sums_bytes);
    if constexpr (kRowTiles == 2 && kColTiles == 2) _tile_loadd(3, high_sums + kCols, sums_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < p.steps; ++step) {
    const BFloat16* const pairs = p.pairs + step * p.tile_step;
    _tile_loadd(4, low_rows + step * kDepth, row_bytes);
    _tile_loadd(6, pairs, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kColTiles == 2) {
      _tile_loadd(7, pairs + kPairsElements, kRowBytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRowTiles == 2) {
      _tile_loadd(5, high_rows + step * kDepth, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (kRowTiles == 2 && kColTiles == 2) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, low_sums, sums_bytes);
  if constexpr (kColTiles == 2) _tile_stored(1, low_sums + kCols, sums_bytes);
  if constexpr (kRowTiles == 2) _tile_stored(2, high_sums, sums_bytes);
  if constexpr (kRowTiles == 2 && kColTiles == 2) _tile_stored(3, high_sums + kCols, sums_bytes);
}

}  // namespace

bool is_available() {
  static const bool available = detect();
  return available;
}

Registers::Registers() {
  configure();
}

Registers::~Registers() {
  release();
}

FLEXPTE_AMX void pack_pairs(const Source& source, BFloat16* tiles, int64_t tile_step) {
  assert(source.outer <= kCols);
  for (int64_t k = 0; k < source.depth; k += kDepth, tiles += tile_step) {
    const __mmask32 present = first_32(source.depth - k);
    __m512i rows[16];
    for (int64_t j = 0; j < kCols; ++j) {
      rows[j] = j < source.outer ? _mm512_maskz_loadu_epi16(present, source.data + j * source.stride + k)
                                 : _mm512_setzero_si512();
    }
    transpose(rows);
    for (int64_t p = 0; p < kRows; ++p) _mm512_storeu_si512(tiles + p * kDepth, rows[p]);
  }
}

FLEXPTE_AMX bool pack_transposed(const Source& source, BFloat16* rows, int64_t row_stride) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 not_finite = 0;
  for (int64_t d = 0; d < source.depth; d += kRows) {
    const __mmask16 present = first_16(source.depth - d);
    for (int64_t k = 0; k < source.outer; k += kDepth) {
      __m512i pairs[16];
      for (int64_t p = 0; p < 16; ++p) {
        const BFloat16* const at = source.data + (k + 2 * p) * source.stride + d;
        __m256i even = _mm256_setzero_si256();
        __m256i odd = _mm256_setzero_si256();
        if (k + 2 * p < source.outer) {
          even = _mm512_castsi512_si256(_mm512_maskz_loadu_epi16(present, at));
        }
        if (k + 2 * p + 1 < source.outer) {
          odd = _mm512_castsi512_si256(_mm512_maskz_loadu_epi16(present, at + source.stride));
        }
        pairs[p] = _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
        not_finite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(pairs[p], exponent), exponent);
      }
      transpose(pairs);
      for (int64_t i = 0; i < kRows; ++i) _mm512_storeu_si512(rows + (d + i) * row_stride + k, pairs[i]);
    }
  }
  return not_finite == 0;
}

FLEXPTE_AMX void pack_weights(const float* weights, int64_t stride, int64_t depth, BFloat16* tiles, int64_t tile_step) {
  // VCVTNE2PS2BF16 puts one vector below the other: word i of it goes beside word i of the other.
  alignas(64) std::array<uint16_t, 32> order;
  for (size_t i = 0; i < 16; ++i) {
    order[2 * i] = static_cast<uint16_t>(i);
    order[2 * i + 1] = static_cast<uint16_t>(16 + i);
  }
  const __m512i interleave = _mm512_load_si512(order.data());
  for (int64_t k = 0; k < depth; k += kDepth, tiles += tile_step) {
    for (int64_t p = 0; p < kRows; ++p) {
      const int64_t at = k + 2 * p;
      const __m512 even = at < depth ? _mm512_loadu_ps(weights + at * stride) : _mm512_setzero_ps();
      const __m512 odd = at + 1 < depth ? _mm512_loadu_ps(weights + (at + 1) * stride) : _mm512_setzero_ps();
      const __m512bh both = _mm512_cvtne2ps_pbh(odd, even);
      __m512i words;
      std::memcpy(&words, &both, sizeof words);
      _mm512_storeu_si512(tiles + p * kDepth, _mm512_permutexvar_epi16(interleave, words));
    }
  }
}

void multiply(const Product& product, int row_tiles, int col_tiles) {
  assert(row_tiles == 1 || row_tiles == 2);
  if (col_tiles == 2) {
    row_tiles == 2 ? multiply_tiles<2, 2>(product) : multiply_tiles<1, 2>(product);
  } else {
    assert(col_tiles == 1);
    row_tiles == 2 ? multiply_tiles<2, 1>(product) : multiply_tiles<1, 1>(product);
  }
}

}  // namespace flexpte::amx

#else

namespace flexpte::amx {

// is_available() says no: nothing else is called.
bool is_available() {
  return false;
}
Registers::Registers() {
  assert(false);
}
Registers::~Registers() = default;
void pack_pairs(const Source&, BFloat16*, int64_t) {
  assert(false);
}
bool pack_transposed(const Source&, BFloat16*, int64_t) {
  assert(false);
  return false;
}
void pack_weights(const float*, int64_t, int64_t, BFloat16*, int64_t) {
  assert(false);
}
void multiply(const Product&, int, int) {
  assert(false);
}

}  // namespace flexpte::amx

#endif
