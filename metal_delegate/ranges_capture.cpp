#include "metal_delegate/ranges_capture.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "runtime/kernels/scalar.h"

namespace flexpte {
namespace {

void merge(ValueRange& into, const ValueRange& other) {
  into.has_nan |= other.has_nan;
  into.min_int = std::min(into.min_int, other.min_int);
  into.max_int = std::max(into.max_int, other.max_int);
  into.min_float = std::min(into.min_float, other.min_float);
  into.max_float = std::max(into.max_float, other.max_float);
}

template <class T>
ValueRange scan_elements(const T* data, int64_t stride, int64_t n) {
  ValueRange result;
  using Wide = decltype(widen(T()));
  if constexpr (std::is_floating_point_v<Wide>) {
    result.is_float = true;
    result.min_float = std::numeric_limits<double>::infinity();
    result.max_float = -result.min_float;
    for (int64_t i = 0; i < n; ++i) {
      const double value = static_cast<double>(widen(data[i * stride]));
      result.has_nan |= std::isnan(value);
      result.min_float = value < result.min_float ? value : result.min_float;
      result.max_float = value > result.max_float ? value : result.max_float;
    }
  } else {
    result.min_int = std::numeric_limits<int64_t>::max();
    result.max_int = std::numeric_limits<int64_t>::min();
    for (int64_t i = 0; i < n; ++i) {
      const int64_t value = widen(data[i * stride]);
      result.min_int = std::min(result.min_int, value);
      result.max_int = std::max(result.max_int, value);
    }
  }
  return result;
}

template <class T>
int direction_of(const T* data, int64_t stride, int64_t n) {
  bool rises = true, falls = true;
  for (int64_t i = 1; i < n && (rises || falls); ++i) {
    const auto before = widen(data[(i - 1) * stride]);
    const auto after = widen(data[i * stride]);
    rises &= before <= after;
    falls &= before >= after;
  }
  if (n == 1) rises = falls = widen(data[0]) == widen(data[0]);
  return rises ? (falls ? 2 : 1) : (falls ? -1 : 0);
}

}  // namespace

void CaptureSummary::bind(const TensorView& capture) {
  view_ = capture;
  row_size_ = capture.rank == 0 ? 1 : capture.size(capture.rank - 1);
  num_rows_ = row_size_ == 0 ? 0 : capture.num_elements() / row_size_;
  blocks_per_row_ = (row_size_ + kBlock - 1) / kBlock;
  groups_per_row_ = (blocks_per_row_ + kBlock - 1) / kBlock;
  has_blocks_ = num_rows_ > 0 && blocks_per_row_ <= kMaxBlocks / num_rows_;
  if (!has_blocks_) return;
  const int64_t blocks = num_rows_ * blocks_per_row_;
  const int64_t groups = num_rows_ * groups_per_row_;
  // A wrapped epoch must not find blocks of the last time round.
  const bool wraps = epoch_ == std::numeric_limits<uint32_t>::max();
  if (blocks > num_blocks_ || wraps) {
    num_blocks_ = std::max(blocks, num_blocks_);
    blocks_ = std::make_unique<Block[]>(static_cast<size_t>(num_blocks_));
  }
  if (groups > num_groups_ || wraps) {
    num_groups_ = std::max(groups, num_groups_);
    groups_ = std::make_unique<Block[]>(static_cast<size_t>(num_groups_));
  }
  if (num_rows_ > num_directions_ || wraps) {
    num_directions_ = std::max(num_rows_, num_directions_);
    directions_ = std::make_unique<std::atomic<uint64_t>[]>(static_cast<size_t>(num_directions_));
  }
  epoch_ = wraps ? 1 : epoch_ + 1;
}

ValueRange CaptureSummary::scan(int64_t offset, int64_t begin, int64_t end) const {
  const int64_t stride = view_.rank == 0 ? 0 : view_.stride(view_.rank - 1);
  return with_storage_type(view_.dtype, [&](auto tag) {
    const auto* data = static_cast<const decltype(tag)*>(view_.data);
    return scan_elements(data + offset + begin * stride, stride, end - begin);
  });
}

// NaN in a block is kept as a NaN minimum.
ValueRange CaptureSummary::summary(Block& block, int64_t row, int64_t offset, int64_t begin, int64_t end,
                                   bool group) const {
  ValueRange result;
  result.is_float = is_floating(view_.dtype);
  if (block.epoch.load(std::memory_order_acquire) == epoch_) {
    const int64_t low = block.min_bits.load(std::memory_order_relaxed);
    const int64_t high = block.max_bits.load(std::memory_order_relaxed);
    if (result.is_float) {
      result.min_float = std::bit_cast<double>(low);
      result.max_float = std::bit_cast<double>(high);
      result.has_nan = std::isnan(result.min_float);
    } else {
      result.min_int = low;
      result.max_int = high;
    }
    return result;
  }
  result = group ? walk(row, offset, begin, end, false) : scan(offset, begin, end);
  if (result.is_float) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    block.min_bits.store(std::bit_cast<int64_t>(result.has_nan ? nan : result.min_float), std::memory_order_relaxed);
    block.max_bits.store(std::bit_cast<int64_t>(result.max_float), std::memory_order_relaxed);
  } else {
    block.min_bits.store(result.min_int, std::memory_order_relaxed);
    block.max_bits.store(result.max_int, std::memory_order_relaxed);
  }
  block.epoch.store(epoch_, std::memory_order_release);
  return result;
}

ValueRange CaptureSummary::walk(int64_t row, int64_t offset, int64_t begin, int64_t end, bool groups) const {
  constexpr int64_t kGroup = kBlock * kBlock;
  const auto ends_at = [&](int64_t at, int64_t size) {
    const int64_t stop = std::min(at + size, row_size_);
    return at % size == 0 && stop <= end ? stop : 0;
  };
  ValueRange result;
  for (int64_t at = begin; at < end;) {
    ValueRange part;
    int64_t stop = groups ? ends_at(at, kGroup) : 0;
    if (stop != 0) {
      part = summary(groups_[static_cast<size_t>(row * groups_per_row_ + at / kGroup)], row, offset, at, stop, true);
    } else if (stop = ends_at(at, kBlock); stop != 0) {
      part = summary(blocks_[static_cast<size_t>(row * blocks_per_row_ + at / kBlock)], row, offset, at, stop, false);
    } else {
      stop = std::min((at / kBlock + 1) * kBlock, end);
      part = scan(offset, at, stop);
    }
    if (at == begin) {
      result = part;
    } else {
      merge(result, part);
    }
    at = stop;
  }
  return result;
}

bool CaptureSummary::range(int64_t row, int64_t offset, int64_t begin, int64_t end, ValueRange* result) const {
  if (has_blocks_) {
    *result = walk(row, offset, begin, end, true);
    return true;
  }
  if (end - begin > kMaxScan) return false;
  *result = scan(offset, begin, end);
  return true;
}

int CaptureSummary::direction(int64_t row, int64_t offset) const {
  if (!has_blocks_) return 0;
  std::atomic<uint64_t>& known = directions_[static_cast<size_t>(row)];
  const uint64_t state = known.load(std::memory_order_relaxed);
  if (state / 8 == epoch_) return static_cast<int>(state % 8) - 1;
  const int64_t stride = view_.rank == 0 ? 0 : view_.stride(view_.rank - 1);
  const int direction = with_storage_type(view_.dtype, [&](auto tag) {
    return direction_of(static_cast<const decltype(tag)*>(view_.data) + offset, stride, row_size_);
  });
  known.store(uint64_t{epoch_} * 8 + static_cast<uint64_t>(direction + 1), std::memory_order_relaxed);
  return direction;
}

}  // namespace flexpte
