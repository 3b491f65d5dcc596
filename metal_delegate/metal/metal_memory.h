// Host memory as Metal buffers, without copies.
//
// Metal wraps whole pages. Regions that share a page share one buffer, so that what the GPU knows of hazards
// between dispatches holds for every byte; a region is an offset into the buffer of its pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "metal_delegate/gpu/queue.h"
#include "metal_delegate/metal/metal_cpp.h"
#include "runtime/status.h"

namespace flexpte::metal {

class MappedMemory {
 public:
  explicit MappedMemory(NS::SharedPtr<MTL::Device> device);

  Status map(const std::byte* data, size_t size_bytes, gpu::Access access);
  void unmap(const std::byte* data);

  struct Place {
    MTL::Buffer* buffer = nullptr;
    size_t offset_bytes = 0;
  };
  // Where an argument lies; `number` is its buffer(number) in `kernel`, for the error.
  Result<Place> find(const gpu::BufferArgument& argument, size_t number, std::string_view kernel) const;

 private:
  struct Pages {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    bool operator==(const Pages&) const = default;
    bool shares_with(const Pages& other) const { return begin < other.end && other.begin < end; }
  };
  struct Wrap {
    Pages pages;
    NS::SharedPtr<MTL::Buffer> buffer;
  };
  struct Region {
    uintptr_t begin = 0;
    size_t size_bytes = 0;
    gpu::Access access = gpu::Access::kRead;
    Place place = {};

    uintptr_t end() const { return begin + size_bytes; }
  };

  Pages pages_of(const Region& region) const;
  // The buffer of exactly these pages: the one there is, or a new one.
  Result<Wrap> wrap(const Pages& pages) const;
  // Puts `wraps` where those of `pages` were, and lets the regions inside point at them.
  void replace(const Pages& pages, std::vector<Wrap> wraps);
  std::vector<Region>::const_iterator after(uintptr_t address) const;

  NS::SharedPtr<MTL::Device> device_;
  uintptr_t page_bytes_;
  std::vector<Region> regions_;  // by address, apart from one another
  std::vector<Wrap> wraps_;      // by address, apart from one another
};

}  // namespace flexpte::metal
