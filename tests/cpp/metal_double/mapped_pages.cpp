// Notices when memory that a Metal buffer wraps is unmapped or replaced: on a Mac the GPU would keep using the old
// pages. The functions here take the place of the C library's in what the double is linked into.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <set>

#include "tests/cpp/metal_double/metal.h"

namespace flexpte::metal_double {
namespace {

// Never destroyed: memory may be unmapped at any time.
struct Watched {
  std::mutex mutex;
  std::set<Buffer*> buffers;
};
Watched& watched() {
  static Watched* const watched = new Watched;
  return *watched;
}

void mark_stale(const void* data, size_t size_bytes) {
  const auto* begin = static_cast<const std::byte*>(data);
  const std::lock_guard lock(watched().mutex);
  for (Buffer* buffer : watched().buffers) {
    if (buffer->contents < begin + size_bytes && begin < buffer->contents + buffer->size_bytes) buffer->is_stale = true;
  }
}

}  // namespace

void watch_pages(Buffer& buffer) {
  const std::lock_guard lock(watched().mutex);
  watched().buffers.insert(&buffer);
}

void unwatch_pages(Buffer& buffer) {
  const std::lock_guard lock(watched().mutex);
  watched().buffers.erase(&buffer);
}

}  // namespace flexpte::metal_double

extern "C" int munmap(void* data, size_t size_bytes) noexcept {
  flexpte::metal_double::mark_stale(data, size_bytes);
  return static_cast<int>(::syscall(SYS_munmap, data, size_bytes));
}

extern "C" void* mmap(void* data, size_t size_bytes, int protection, int flags, int file, off_t offset) noexcept {
  if ((flags & MAP_FIXED) != 0) flexpte::metal_double::mark_stale(data, size_bytes);
  return reinterpret_cast<void*>(::syscall(SYS_mmap, data, size_bytes, protection, flags, file, offset));
}
