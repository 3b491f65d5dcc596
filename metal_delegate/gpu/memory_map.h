// Tells a queue which memory kernels may touch, and keeps that up to date as callers' arguments move.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "metal_delegate/gpu/queue.h"
#include "runtime/status.h"

namespace flexpte::gpu {

class MemoryMap {
 public:
  // `queue` outlives the map.
  explicit MemoryMap(Queue& queue) : queue_(queue) {}
  ~MemoryMap() { clear(); }
  MemoryMap(const MemoryMap&) = delete;
  MemoryMap& operator=(const MemoryMap&) = delete;

  // Adds a region to the next set; empty ones are left out, overlapping and adjacent ones become one.
  void add(std::span<const std::byte> bytes, Access access);
  // Maps the regions added since the last call, and no others. Does nothing when they are those of last time.
  Status apply();
  void clear();

 private:
  struct Region {
    const std::byte* data = nullptr;
    size_t size_bytes = 0;
    Access access = Access::kRead;
    bool operator==(const Region&) const = default;
  };

  Queue& queue_;
  std::vector<Region> next_;
  std::vector<Region> mapped_;
};

}  // namespace flexpte::gpu
