#include "metal_delegate/gpu/encoder.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace flexpte::gpu {
namespace {

constexpr size_t kAlignmentBytes = 256;
constexpr size_t kMinChunkBytes = size_t{1} << 20;

size_t extent_bytes(const TensorView& view) {
  if (view.data == nullptr || view.num_elements() == 0) return 0;
  int64_t last = 0;
  for (int32_t d = 0; d < view.rank; ++d) last += (view.size(d) - 1) * view.stride(d);
  return static_cast<size_t>((last + 1) * element_size_bytes(view.dtype));
}

BufferArgument argument(const TensorView& view, Access access, std::string_view name) {
  const size_t bytes = extent_bytes(view);
  return {bytes == 0 ? nullptr : static_cast<const std::byte*>(view.data), bytes, access, name};
}

}  // namespace

BufferArgument read(const TensorView& view, std::string_view name) {
  return argument(view, Access::kRead, name);
}
BufferArgument write(const TensorView& view, std::string_view name) {
  return argument(view, Access::kReadWrite, name);
}
BufferArgument read(std::span<const std::byte> bytes, std::string_view name) {
  return {bytes.empty() ? nullptr : bytes.data(), bytes.size(), Access::kRead, name};
}
BufferArgument write(std::span<std::byte> bytes, std::string_view name) {
  return {bytes.empty() ? nullptr : bytes.data(), bytes.size(), Access::kReadWrite, name};
}

Encoder::~Encoder() {
  for (const Chunk& chunk : chunks_) queue_.unmap(chunk.pages.bytes().data());
}

Result<std::span<std::byte>> Encoder::scratch(size_t size_bytes) {
  const size_t rounded = (size_bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
  for (Chunk& chunk : chunks_) {
    if (chunk.pages.bytes().size() - chunk.used_bytes < rounded) continue;
    const std::span<std::byte> bytes = chunk.pages.bytes().subspan(chunk.used_bytes, size_bytes);
    chunk.used_bytes += rounded;
    return bytes;
  }
  FLEXPTE_ASSIGN(ZeroPages pages, ZeroPages::allocate(std::max(rounded, kMinChunkBytes), "scratch memory of kernels"));
  FLEXPTE_TRY(queue_.map(pages.bytes().data(), pages.bytes().size(), Access::kReadWrite));
  chunks_.push_back({std::move(pages), rounded});
  return chunks_.back().pages.bytes().first(size_bytes);
}

Result<std::span<std::byte>> Encoder::status() {
  if (status_.empty()) {
    FLEXPTE_ASSIGN(status_, scratch(sizeof(uint32_t)));
    std::memset(status_.data(), 0, status_.size());
  }
  return status_;
}

uint32_t Encoder::bad_instruction() const {
  uint32_t number = 0;
  if (!status_.empty()) std::memcpy(&number, status_.data(), sizeof number);
  return number;
}

void Encoder::reset() {
  status_ = {};
  for (Chunk& chunk : chunks_) chunk.used_bytes = 0;
}

}  // namespace flexpte::gpu
