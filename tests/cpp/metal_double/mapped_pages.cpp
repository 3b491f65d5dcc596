// Notices when memory that a Metal buffer wraps is unmapped or replaced: on a Mac the GPU would keep using the old
// pages. Takes the place of the C library's functions in what the double is linked into.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/cpp/metal_double/metal.h"

extern "C" int munmap(void* data, size_t size_bytes) noexcept {
  flexpte::metal_double::mark_stale(data, size_bytes);
  return static_cast<int>(::syscall(SYS_munmap, data, size_bytes));
}

extern "C" void* mmap(void* data, size_t size_bytes, int protection, int flags, int file, off_t offset) noexcept {
  if ((flags & MAP_FIXED) != 0) flexpte::metal_double::mark_stale(data, size_bytes);
  return reinterpret_cast<void*>(::syscall(SYS_mmap, data, size_bytes, protection, flags, file, offset));
}
