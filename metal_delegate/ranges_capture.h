// Smallest and largest values of captured tensors over index ranges, read lazily and kept by blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "runtime/tensor.h"

namespace flexpte {

// Of integers and bools (is_float false) or of floats, where NaN anywhere makes has_nan.
struct ValueRange {
  bool is_float = false;
  bool has_nan = false;
  int64_t min_int = 0, max_int = 0;
  double min_float = 0.0, max_float = 0.0;
};

// One capture of one call. Elements are grouped in rows along the last dimension. Queries may run in
// several threads at once: a block is summarised by whoever needs it first (or by two at once, with
// the same result), and published by its epoch.
class CaptureSummary {
 public:
  // Allocates only when the capture is larger than all before. Forgets what was read.
  void bind(const TensorView& capture);

  const TensorView& view() const { return view_; }
  int64_t row_size() const { return row_size_; }

  // Elements [begin, end), not empty, of the row that starts at element `offset` and is number `row` in
  // row-major order. False when reading them would cost too much (then nothing is known).
  bool range(int64_t row, int64_t offset, int64_t begin, int64_t end, ValueRange* result) const;

  // 1: the row never decreases, -1: it never increases, 2: both (one value), 0: neither, or unknown.
  int direction(int64_t row, int64_t offset) const;

 private:
  static constexpr int64_t kBlock = 64;  // elements of a block, and blocks of a group
  static constexpr int64_t kMaxBlocks = 1 << 16;
  static constexpr int64_t kMaxScan = 1 << 12;  // elements read for one answer where there are no blocks

  struct Block {
    std::atomic<uint32_t> epoch{0};
    std::atomic<int64_t> min_bits{0}, max_bits{0};
  };

  ValueRange scan(int64_t offset, int64_t begin, int64_t end) const;
  ValueRange summary(Block& block, int64_t row, int64_t offset, int64_t begin, int64_t end, bool group) const;
  ValueRange walk(int64_t row, int64_t offset, int64_t begin, int64_t end, bool groups) const;

  TensorView view_;
  int64_t row_size_ = 1;
  int64_t num_rows_ = 0;
  int64_t blocks_per_row_ = 0, groups_per_row_ = 0;
  bool has_blocks_ = false;
  uint32_t epoch_ = 0;
  int64_t num_blocks_ = 0, num_groups_ = 0, num_directions_ = 0;  // allocated
  std::unique_ptr<Block[]> blocks_, groups_;
  std::unique_ptr<std::atomic<uint64_t>[]> directions_;  // epoch * 8 + direction + 1
};

}  // namespace flexpte
