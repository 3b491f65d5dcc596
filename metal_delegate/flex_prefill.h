// What the prefill kernel and its matrix products share on all targets.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "metal_delegate/flex_kernels.h"
#include "runtime/kernels/amx.h"

namespace flexpte {

inline constexpr float kLog2e = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

// Lanes that the panels of a tile of queries have together, on every target.
inline constexpr int64_t kTileLanes = kFlexQueryTile;
inline constexpr int64_t kMaxPanelLanes = 32;

// Scratch of one thread.
struct PrefillScratch {
  // A product of the last keys may begin at any of them.
  static constexpr int64_t kAmxValueStride = kFlexKeyChunk + amx::kDepth;

  float* queries;    // [heads, panels][key_dim, lanes of the panel]
  float* outputs;    // [heads, panels][padded_value_dim, lanes of the panel]
  float* max;        // [heads, kTileLanes]
  float* sum;        // [heads, kTileLanes]
  float* scores;     // [kFlexKeyChunk, kMaxPanelLanes]
  float* keys;       // [kFlexKeyChunk, key_dim]
  float* values;     // [kFlexKeyChunk, value_dim]
  float* rows;       // [4, max(key_dim, value_dim)] rounded up
  uint8_t* visible;  // [kFlexKeyChunk, kMaxPanelLanes]
  // With tile registers.
  BFloat16* amx_queries;  // [heads, panels][steps, lanes / kCols] pairs tiles
  BFloat16* amx_keys;     // [kFlexKeyChunk and two tiles, key_dim rounded up]
  BFloat16* amx_values;   // [padded_value_dim, kAmxValueStride]: transposed
  BFloat16* amx_weights;  // [kFlexKeyChunk / kDepth, kMaxPanelLanes / kCols] pairs tiles
  BFloat16* amx_rows;     // [kFlexKeyChunk, max(key_dim, value_dim)]: of views that are not contiguous
  std::span<std::byte> mods;

  PrefillScratch(WorkspaceCarver& carver, const FlexShape& shape, const FlexMods& call_mods, int64_t heads) {
    const bool amx = shape.uses_amx();
    const int64_t padded_key_dim = amx::round_up(shape.key_dim, amx::kDepth);
    queries = carver.take<float>(amx ? 0 : heads * kTileLanes * shape.key_dim);
    outputs = carver.take<float>(heads * kTileLanes * shape.padded_value_dim());
    max = carver.take<float>(heads * kTileLanes);
    sum = carver.take<float>(heads * kTileLanes);
    scores = carver.take<float>(kFlexKeyChunk * kMaxPanelLanes);
    keys = carver.take<float>(amx ? 0 : kFlexKeyChunk * shape.key_dim);
    values = carver.take<float>(kFlexKeyChunk * shape.value_dim);
    rows = carver.take<float>(4 * row_stride(shape));
    visible = carver.take<uint8_t>(kFlexKeyChunk * kMaxPanelLanes);
    amx_queries = carver.take<BFloat16>(amx ? heads * kTileLanes * padded_key_dim : 0);
    amx_keys = carver.take<BFloat16>(amx ? (kFlexKeyChunk + 2 * amx::kRows) * padded_key_dim : 0);
    amx_values = carver.take<BFloat16>(amx ? shape.padded_value_dim() * kAmxValueStride : 0);
    amx_weights = carver.take<BFloat16>(amx ? kFlexKeyChunk * kMaxPanelLanes : 0);
    amx_rows = carver.take<BFloat16>(amx ? kFlexKeyChunk * std::max(shape.key_dim, shape.value_dim) : 0);
    const size_t bytes = flex_mods_workspace_bytes(call_mods, kFlexKeyChunk, kMaxPanelLanes);
    mods = {carver.take<std::byte>(static_cast<int64_t>(bytes)), bytes};
  }

  static int64_t row_stride(const FlexShape& shape) { return (std::max(shape.key_dim, shape.value_dim) + 3) / 4 * 4; }
};

}  // namespace flexpte
