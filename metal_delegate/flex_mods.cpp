#include <algorithm>
#include <cstring>

#include "metal_delegate/flex_kernels.h"

namespace flexpte {
namespace {

// Copies a result of any extent to a full tile.
template <class T>
void expand(const TileProgram::Tile& result, int64_t rows, int64_t cols, T* out, int64_t stride) {
  const auto* data = static_cast<const T*>(result.data);
  for (int64_t r = 0; r < rows; ++r) {
    T* row = out + r * stride;
    switch (result.extent) {
      case Extent::kUniform:
        std::fill_n(row, cols, data[0]);
        break;
      case Extent::kRows:
        std::fill_n(row, cols, data[r]);
        break;
      case Extent::kCols:
        std::copy_n(data, cols, row);
        break;
      case Extent::kFull:
        if (data + r * result.stride != row) std::copy_n(data + r * result.stride, cols, row);
        break;
    }
  }
}

}  // namespace

size_t flex_mods_workspace_bytes(const FlexMods& mods, int64_t rows, int64_t cols) {
  const size_t score = mods.score == nullptr ? 0 : mods.score->workspace_bytes(rows, cols);
  const size_t mask = mods.mask == nullptr ? 0 : mods.mask->workspace_bytes(rows, cols);
  return std::max(score, mask);
}

void FlexTileMods::mask(const Tile& tile, uint8_t* visible, int64_t stride) const {
  TileInputs in;
  in.batch = tile.batch;
  in.head = tile.head;
  in.q_begin = tile.row_index;
  in.kv_begin = tile.col_index;
  in.captures = call_.args.mask_captures;
  in.scalars = call_.args.mask_scalars;
  bool out_of_bounds = false;
  const TileProgram::Tile result =
      call_.mods.mask->run(in, tile.rows, tile.cols, workspace_, nullptr, 0, &out_of_bounds);
  if (out_of_bounds) call_.mask_out_of_bounds->store(true, std::memory_order_relaxed);
  expand(result, tile.rows, tile.cols, visible, stride);
}

void FlexTileMods::score(const Tile& tile, float* score, int64_t stride, const uint8_t* visible,
                         int64_t visible_stride) const {
  TileInputs in;
  in.batch = tile.batch;
  in.head = tile.head;
  in.q_begin = tile.row_index;
  in.kv_begin = tile.col_index;
  in.score = score;
  in.score_stride = stride;
  in.captures = call_.args.score_captures;
  in.scalars = call_.args.score_scalars;
  bool out_of_bounds = false;
  const TileProgram::Tile result =
      call_.mods.score->run(in, tile.rows, tile.cols, workspace_, visible, visible_stride, &out_of_bounds);
  if (out_of_bounds) call_.score_out_of_bounds->store(true, std::memory_order_relaxed);
  expand(result, tile.rows, tile.cols, score, stride);
}

}  // namespace flexpte
