#include "runtime/memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace flexpte {
namespace {

constexpr int kProtection = PROT_READ | PROT_WRITE;
#ifdef MAP_NORESERVE
constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
#else
constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
#endif

}  // namespace

ZeroPages::~ZeroPages() {
  if (data_ != nullptr) ::munmap(data_, size_bytes_);
}

ZeroPages::ZeroPages(ZeroPages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_bytes_(std::exchange(other.size_bytes_, 0)) {}

ZeroPages& ZeroPages::operator=(ZeroPages&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

Result<ZeroPages> ZeroPages::allocate(size_t size_bytes, std::string_view what) {
  ZeroPages pages;
  if (size_bytes == 0) return pages;
  void* data = ::mmap(nullptr, size_bytes, kProtection, kFlags, -1, 0);
  if (data == MAP_FAILED) {
    return Status(Code::kOutOfMemory, "cannot allocate " + std::to_string(size_bytes) + " bytes for " +
                                          std::string(what) + ": " + std::strerror(errno));
  }
  pages.data_ = static_cast<std::byte*>(data);
  pages.size_bytes_ = size_bytes;
  return pages;
}

Status ZeroPages::clear() {
  if (data_ == nullptr) return Status::ok();
#ifdef __linux__
  if (::madvise(data_, size_bytes_, MADV_DONTNEED) == 0) return Status::ok();
#endif
  // Not by mapping anew: a GPU that has these pages mapped would go on with the old ones.
  std::memset(data_, 0, size_bytes_);
  return Status::ok();
}

}  // namespace flexpte
