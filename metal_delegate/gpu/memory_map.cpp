#include "metal_delegate/gpu/memory_map.h"

#include <algorithm>

namespace flexpte::gpu {
namespace {

// Constants of one file lie a few bytes apart: one region of the GPU holds them all.
constexpr size_t kMergedGapBytes = 4096;

}  // namespace

void MemoryMap::add(std::span<const std::byte> bytes, Access access, Lifetime lifetime) {
  if (!bytes.empty()) next_.push_back({bytes.data(), bytes.size(), access, lifetime});
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
        if (region.lifetime == Lifetime::kStep) last.lifetime = Lifetime::kStep;
        continue;
      }
    }
    next_[kept++] = region;
  }
  next_.resize(kept);
  unmap_if([this](const Region& region) { return std::find(next_.begin(), next_.end(), region) == next_.end(); });
  Status status;
  for (const Region& region : next_) {
    if (std::find(mapped_.begin(), mapped_.end(), region) != mapped_.end()) continue;
    status = queue_.map(region.data, region.size_bytes, region.access);
    if (!status.is_ok()) break;
    mapped_.push_back(region);
  }
  next_.clear();
  return status;
}

void MemoryMap::end_step() {
  unmap_if([](const Region& region) { return region.lifetime == Lifetime::kStep; });
}

void MemoryMap::clear() {
  unmap_if([](const Region&) { return true; });
  next_.clear();
}

template <class Predicate>
void MemoryMap::unmap_if(Predicate predicate) {
  std::erase_if(mapped_, [&](const Region& region) {
    if (!predicate(region)) return false;
    queue_.unmap(region.data);
    return true;
  });
}

}  // namespace flexpte::gpu
