// Anonymous memory straight from the system: zero at first, and pages that are never touched cost nothing.
#pragma once

#include <cstddef>
#include <span>

#include "runtime/status.h"

namespace flexpte {

class ZeroPages {
 public:
  ZeroPages() = default;
  ~ZeroPages();
  ZeroPages(ZeroPages&& other) noexcept;
  ZeroPages& operator=(ZeroPages&& other) noexcept;

  // Page-aligned; `what` names the memory in the error when the system refuses. Zero bytes are allowed.
  static Result<ZeroPages> allocate(size_t size_bytes, std::string_view what);

  std::span<std::byte> bytes() const { return {data_, size_bytes_}; }
  // The pages read as zero again; on Linux the system has them back until they are touched.
  Status clear();

 private:
  std::byte* data_ = nullptr;
  size_t size_bytes_ = 0;
};

}  // namespace flexpte
