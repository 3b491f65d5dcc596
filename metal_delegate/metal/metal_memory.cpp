#include "metal_delegate/metal/metal_memory.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

namespace flexpte::metal {
namespace {

uintptr_t address_of(const std::byte* data) {
  return reinterpret_cast<uintptr_t>(data);
}

std::string argument_text(const gpu::BufferArgument& argument, size_t number, std::string_view kernel) {
  std::string text = "kernel " + std::string(kernel) + ": buffer " + std::to_string(number);
  if (!argument.name.empty()) text += " (" + std::string(argument.name) + ")";
  return text + " of " + std::to_string(argument.size_bytes) + " bytes";
}

}  // namespace

MappedMemory::MappedMemory(NS::SharedPtr<MTL::Device> device)
    : device_(std::move(device)), page_bytes_(static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE))) {}

Status MappedMemory::map(const std::byte* data, size_t size_bytes, gpu::Access access) {
  if (size_bytes == 0) return Status::ok();
  const Region region{address_of(data), size_bytes, access};
  const auto next = after(region.begin);
  const bool is_free = (next == regions_.end() || region.end() <= next->begin) &&
                       (next == regions_.begin() || std::prev(next)->end() <= region.begin);
  if (data == nullptr || !is_free) {
    return {Code::kInvalidArgument, "memory that is mapped for the GPU must not be null or mapped already"};
  }

  // The pages of this region and of every buffer that it shares a page with.
  const Pages own = pages_of(region);
  Pages pages = own;
  for (const Wrap& w : wraps_) {
    if (!w.pages.shares_with(own)) continue;
    pages = {std::min(pages.begin, w.pages.begin), std::max(pages.end, w.pages.end)};
  }
  FLEXPTE_ASSIGN(Wrap wrapped, wrap(pages));
  regions_.insert(next, region);
  replace(pages, {std::move(wrapped)});
  return Status::ok();
}

void MappedMemory::unmap(const std::byte* data) {
  const auto region =
      std::find_if(regions_.begin(), regions_.end(), [&](const Region& r) { return r.begin == address_of(data); });
  if (region == regions_.end()) return;
  const Pages gone = pages_of(*region);
  regions_.erase(region);
  const auto old = std::find_if(wraps_.begin(), wraps_.end(),
                                [&](const Wrap& w) { return w.pages.begin <= gone.begin && gone.end <= w.pages.end; });
  const Pages whole = old->pages;

  // What stays is wrapped anew, so that no buffer holds pages that may be freed now.
  std::vector<Pages> stays;
  for (const Region& r : regions_) {
    const Pages pages = pages_of(r);
    if (!pages.shares_with(whole)) continue;
    if (!stays.empty() && pages.begin < stays.back().end) {
      stays.back().end = std::max(stays.back().end, pages.end);
    } else {
      stays.push_back(pages);
    }
  }
  std::vector<Wrap> wraps;
  for (const Pages& pages : stays) {
    Result<Wrap> wrapped = wrap(pages);
    if (!wrapped.is_ok()) return;  // keeps the old buffer, which covers what stays
    wraps.push_back(std::move(*wrapped));
  }
  replace(whole, std::move(wraps));
}

Result<MappedMemory::Place> MappedMemory::find(const gpu::BufferArgument& argument, size_t number,
                                               std::string_view kernel) const {
  const uintptr_t begin = address_of(argument.data);
  const auto next = after(begin);
  if (next == regions_.begin() || begin >= std::prev(next)->end()) {
    return Status(Code::kInternal, argument_text(argument, number, kernel) + " is not in memory mapped for the GPU");
  }
  const Region& region = *std::prev(next);
  if (argument.size_bytes > region.end() - begin) {
    return Status(Code::kInternal,
                  argument_text(argument, number, kernel) + " reaches past the memory mapped for the GPU");
  }
  if (argument.access == gpu::Access::kReadWrite && region.access == gpu::Access::kRead) {
    return Status(Code::kInternal, argument_text(argument, number, kernel) + " is to be written, but mapped read-only");
  }
  return Place{region.place.buffer, region.place.offset_bytes + (begin - region.begin)};
}

MappedMemory::Pages MappedMemory::pages_of(const Region& region) const {
  const uintptr_t end = region.end() + page_bytes_ - 1;
  return {region.begin - region.begin % page_bytes_, end - end % page_bytes_};
}

Result<MappedMemory::Wrap> MappedMemory::wrap(const Pages& pages) const {
  for (const Wrap& w : wraps_) {
    if (w.pages == pages) return w;
  }
  const size_t size_bytes = pages.end - pages.begin;
  if (const size_t most_bytes = device_->maxBufferLength(); size_bytes > most_bytes) {
    return Status(Code::kOutOfMemory, "the GPU can map at most " + std::to_string(most_bytes) +
                                          " bytes at a time; the model needs " + std::to_string(size_bytes));
  }
  auto buffer = NS::TransferPtr(
      device_->newBuffer(reinterpret_cast<const void*>(pages.begin), size_bytes,
                         MTL::ResourceStorageModeShared | MTL::ResourceHazardTrackingModeTracked, nullptr));
  // Virtual machines have been seen to give buffers of length 0.
  if (!buffer || buffer->length() < size_bytes) {
    return Status(Code::kOutOfMemory, "Metal cannot map " + std::to_string(size_bytes) + " bytes for the GPU" +
                                          (buffer ? ": it gave " + std::to_string(buffer->length()) : std::string()));
  }
  return Wrap{pages, std::move(buffer)};
}

void MappedMemory::replace(const Pages& pages, std::vector<Wrap> wraps) {
  std::erase_if(wraps_, [&](const Wrap& w) { return pages.begin <= w.pages.begin && w.pages.end <= pages.end; });
  const auto at = std::find_if(wraps_.begin(), wraps_.end(), [&](const Wrap& w) { return pages.end <= w.pages.begin; });
  for (Region& region : regions_) {
    for (const Wrap& wrap : wraps) {
      if (wrap.pages.begin <= region.begin && region.begin < wrap.pages.end) {
        region.place = {wrap.buffer.get(), region.begin - wrap.pages.begin};
      }
    }
  }
  wraps_.insert(at, std::make_move_iterator(wraps.begin()), std::make_move_iterator(wraps.end()));
}

std::vector<MappedMemory::Region>::const_iterator MappedMemory::after(uintptr_t address) const {
  return std::upper_bound(regions_.begin(), regions_.end(), address,
                          [](uintptr_t a, const Region& region) { return a < region.begin; });
}

}  // namespace flexpte::metal
