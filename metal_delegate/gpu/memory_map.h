// Tells a queue which memory kernels may touch, and keeps that up to date as callers' arguments move.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "metal_delegate/gpu/queue.h"
#include "runtime/status.h"

namespace flexpte::gpu {

// How long memory is the same pages: that of a session is, that of a caller may be freed and come back as other pages
// at the same address, which a GPU would not notice.
enum class Lifetime : uint8_t { kSession, kStep };

class MemoryMap {
 public:
  // `queue` outlives the map.
  explicit MemoryMap(Queue& queue) : queue_(queue) {}
  ~MemoryMap() { clear(); }
  MemoryMap(const MemoryMap&) = delete;
  MemoryMap& operator=(const MemoryMap&) = delete;

  // Adds a region to the next set; empty ones are left out, overlapping and adjacent ones become one.
  void add(std::span<const std::byte> bytes, Access access, Lifetime lifetime = Lifetime::kSession);
  // Maps the regions added since the last call, and no others. What is mapped already stays.
  Status apply();
  // Unmaps what lasts for a step.
  void end_step();
  void clear();

 private:
  struct Region {
    const std::byte* data = nullptr;
    size_t size_bytes = 0;
    Access access = Access::kRead;
    Lifetime lifetime = Lifetime::kSession;
    bool operator==(const Region&) const = default;
  };

  template <class Predicate>
  void unmap_if(Predicate predicate);

  Queue& queue_;
  std::vector<Region> next_;
  std::vector<Region> mapped_;
};

}  // namespace flexpte::gpu
