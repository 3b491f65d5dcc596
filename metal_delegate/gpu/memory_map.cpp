#include "metal_delegate/gpu/memory_map.h"

#include <algorithm>

namespace flexpte::gpu {
namespace {

// Constants of one file lie a few bytes apart: one region of the GPU holds them all.
constexpr size_t kMergedGapBytes = 4096;

}  // namespace

void MemoryMap::add(std::span<const std::byte> bytes, Access access) {
  if (!bytes.empty()) next_.push_back({bytes.data(), bytes.size(), access});
}

Status MemoryMap::apply() {
  std::sort(next_.begin(), next_.end(), [](const Region& a, const Region& b) { return a.data < b.data; });
  size_t kept = 0;
  for (const Region& region : next_) {
    if (kept > 0) {
      Region& last = next_[kept - 1];
      const std::byte* end = last.data + last.size_bytes;
      const bool is_one_file = last.access == Access::kRead && region.access == Access::kRead;
      if (region.data <= end || (is_one_file && static_cast<size_t>(region.data - end) < kMergedGapBytes)) {
        const std::byte* new_end = std::max(end, region.data + region.size_bytes);
        last.size_bytes = static_cast<size_t>(new_end - last.data);
        if (region.access == Access::kReadWrite) last.access = Access::kReadWrite;
        continue;
      }
    }
    next_[kept++] = region;
  }
  next_.resize(kept);
  if (next_ == mapped_) {
    next_.clear();
    return Status::ok();
  }
  for (const Region& region : mapped_) queue_.unmap(region.data);
  mapped_.clear();
  for (const Region& region : next_) {
    FLEXPTE_TRY(queue_.map(region.data, region.size_bytes, region.access));
    mapped_.push_back(region);
  }
  next_.clear();
  return Status::ok();
}

void MemoryMap::clear() {
  for (const Region& region : mapped_) queue_.unmap(region.data);
  mapped_.clear();
  next_.clear();
}

}  // namespace flexpte::gpu
