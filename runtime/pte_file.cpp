#include "runtime/pte_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "program_generated.h"

namespace flexpte {
namespace {

namespace et = executorch_flatbuffer;

constexpr size_t kExtendedHeaderOffset = 8;
constexpr uint32_t kExtendedHeaderMinLength = 24;
constexpr uint32_t kExtendedHeaderFullLength = 32;

// The file's integers are little-endian, as are all machines that this runs on.
template <class T>
T read_at(std::span<const std::byte> bytes, size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

Status malformed(const std::string& what) {
  return {Code::kInvalidProgram, what};
}

}  // namespace

FileBytes::~FileBytes() {
  if (mapped_) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

FileBytes::FileBytes(FileBytes&& other) noexcept {
  *this = std::move(other);
}

FileBytes& FileBytes::operator=(FileBytes&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  std::swap(mapped_, other.mapped_);
  std::swap(copied_, other.copied_);
  std::swap(name_, other.name_);
  return *this;
}

Result<FileBytes> FileBytes::map(const std::string& path) {
  const auto io_error = [&path](const char* what) {
    return Status(Code::kIo, std::string(what) + " '" + path + "': " + std::strerror(errno));
  };
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return io_error("cannot open");
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    const Status status = io_error("cannot read the size of");
    ::close(fd);
    return status;
  }
  if (!S_ISREG(info.st_mode)) {
    ::close(fd);
    return Status(Code::kIo, "'" + path + "' is not a file");
  }
  FileBytes file;
  file.name_ = path;
  const auto size_bytes = static_cast<size_t>(info.st_size);
  if (size_bytes > 0) {
    void* data = ::mmap(nullptr, size_bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
      const Status status = io_error("cannot map");
      ::close(fd);
      return status;
    }
    file.bytes_ = {static_cast<const std::byte*>(data), size_bytes};
    file.mapped_ = true;
  }
  ::close(fd);
  return file;
}

Result<FileBytes> FileBytes::copy(std::span<const std::byte> bytes) {
  FileBytes file;
  file.name_ = "<bytes>";
  FLEXPTE_ASSIGN(file.copied_, ZeroPages::allocate(bytes.size(), "the program"));
  if (!bytes.empty()) std::memcpy(file.copied_.bytes().data(), bytes.data(), bytes.size());
  file.bytes_ = file.copied_.bytes();
  return file;
}

Result<std::unique_ptr<PteFile>> PteFile::open(FileBytes file) {
  auto pte = std::make_unique<PteFile>();
  pte->file_ = std::move(file);
  for (const auto step : {&PteFile::read_header, &PteFile::read_segments, &PteFile::read_named_data}) {
    if (Status status = (pte.get()->*step)(); !status.is_ok()) {
      return Status(status.code(), "'" + pte->file_.name() + "': " + status.message());
    }
  }
  return pte;
}

Status PteFile::read_header() {
  const auto bytes = file_.bytes();
  constexpr size_t kMinSize = kExtendedHeaderOffset + 4;
  if (bytes.size() < kMinSize) {
    return malformed("not a .pte file: " + std::to_string(bytes.size()) + " bytes are too few");
  }
  if (std::memcmp(bytes.data() + 4, et::ProgramIdentifier(), 4) != 0) {
    std::string found;
    for (size_t i = 4; i < 8; ++i) {
      const auto c = static_cast<unsigned char>(bytes[i]);
      found += c >= 0x20 && c < 0x7f ? static_cast<char>(c) : '?';
    }
    return malformed("not a .pte file that this version reads: bytes 4-7 are '" + found + "', expected '" +
                     et::ProgramIdentifier() + "'");
  }
  program_size_bytes_ = bytes.size();
  if (std::memcmp(bytes.data() + kExtendedHeaderOffset, "eh00", 4) == 0) {
    if (bytes.size() < kExtendedHeaderOffset + kExtendedHeaderMinLength) {
      return malformed("the file is truncated inside its extended header");
    }
    const auto length = read_at<uint32_t>(bytes, kExtendedHeaderOffset + 4);
    if (length < kExtendedHeaderMinLength || length > bytes.size() - kExtendedHeaderOffset) {
      return malformed("the extended header's length " + std::to_string(length) + " is impossible");
    }
    const auto program_size = read_at<uint64_t>(bytes, kExtendedHeaderOffset + 8);
    segment_base_ = read_at<uint64_t>(bytes, kExtendedHeaderOffset + 16);
    if (program_size > bytes.size()) {
      return malformed("the file is truncated: its flatbuffer takes " + std::to_string(program_size) +
                       " bytes, the file has " + std::to_string(bytes.size()));
    }
    // 0 says that the file has no segments.
    if (segment_base_ != 0) {
      if (segment_base_ < program_size || segment_base_ > bytes.size()) {
        return malformed("the segments begin at byte " + std::to_string(segment_base_) +
                         ", outside of the file or inside its flatbuffer");
      }
      if (length >= kExtendedHeaderFullLength) {
        const auto data_size = read_at<uint64_t>(bytes, kExtendedHeaderOffset + 24);
        if (data_size > bytes.size() - segment_base_) {
          return malformed("the file is truncated: its segments take " + std::to_string(data_size) +
                           " bytes from byte " + std::to_string(segment_base_) + ", the file has " +
                           std::to_string(bytes.size()));
        }
      }
      has_segments_ = true;
    }
    program_size_bytes_ = program_size;
  }
  if (program_size_bytes_ < kMinSize || program_size_bytes_ >= FLATBUFFERS_MAX_BUFFER_SIZE) {
    return malformed("the flatbuffer's size " + std::to_string(program_size_bytes_) + " is impossible");
  }
  const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
  // No table is smaller than its vtable offset and two fields of a vtable, so this bounds what a
  // well-formed file can hold; shared tables of a hostile one stop at it.
  const auto max_tables = static_cast<flatbuffers::uoffset_t>(program_size_bytes_ / 4);
  flatbuffers::Verifier verifier(data, program_size_bytes_, /*max_depth=*/64, max_tables);
  if (!et::VerifyProgramBuffer(verifier)) {
    return malformed("the flatbuffer is malformed: an offset or a length points outside of it");
  }
  program_ = et::GetProgram(data);
  if (program_->version() != 0) {
    return {Code::kUnsupported,
            "the file has schema version " + std::to_string(program_->version()) + "; this version reads 0"};
  }
  return Status::ok();
}

Status PteFile::read_segments() {
  const auto* segments = program_->segments();
  if (segments == nullptr || segments->size() == 0) return Status::ok();
  // Programs without data have an empty constant segment, and no header.
  const auto bytes = has_segments_ ? file_.bytes().subspan(segment_base_) : std::span<const std::byte>();
  for (const et::DataSegment* segment : *segments) {
    const std::string which = "segment " + std::to_string(segments_.size());
    if (!has_segments_ && segment->size() != 0) {
      return malformed(which + " has data, but no header says where segments begin");
    }
    if (segment->offset() > bytes.size() || segment->size() > bytes.size() - segment->offset()) {
      return malformed("the file is truncated: " + which + " takes " + std::to_string(segment->size()) +
                       " bytes at offset " + std::to_string(segment->offset()) + ", but only " +
                       std::to_string(bytes.size()) + " bytes follow the flatbuffer");
    }
    segments_.push_back(bytes.subspan(segment->offset(), segment->size()));
  }
  return Status::ok();
}

Status PteFile::read_named_data() {
  if (program_->named_data() == nullptr) return Status::ok();
  for (const et::NamedData* entry : *program_->named_data()) {
    if (entry->key() == nullptr) return malformed("a named data entry has no key");
    const std::string key = entry->key()->str();
    if (entry->segment_index() >= segments_.size()) {
      return malformed("named data '" + key + "' is in segment " + std::to_string(entry->segment_index()) + " of " +
                       std::to_string(segments_.size()));
    }
    if (!named_data_.emplace(key, segments_[entry->segment_index()]).second) {
      return malformed("named data '" + key + "' occurs twice");
    }
  }
  return Status::ok();
}

Result<std::span<const std::byte>> PteFile::find(std::string_view key) const {
  const auto found = named_data_.find(key);
  if (found == named_data_.end()) {
    return Status(Code::kNotFound, "the program has no named data '" + std::string(key) + "'");
  }
  return found->second;
}

Result<std::span<const std::byte>> PteFile::subsegment(uint64_t segment_index, uint64_t offset, size_t size_bytes,
                                                       std::string_view what) const {
  if (segment_index >= segments_.size()) {
    return malformed(std::string(what) + " is in segment " + std::to_string(segment_index) + " of " +
                     std::to_string(segments_.size()));
  }
  const auto segment = segments_[segment_index];
  if (offset > segment.size() || size_bytes > segment.size() - offset) {
    return malformed(std::string(what) + " takes " + std::to_string(size_bytes) + " bytes at offset " +
                     std::to_string(offset) + " of a segment of " + std::to_string(segment.size()));
  }
  return segment.subspan(offset, size_bytes);
}

Result<std::span<const std::byte>> PteFile::constant(uint32_t data_buffer_idx, size_t size_bytes) const {
  const std::string what = "constant " + std::to_string(data_buffer_idx);
  const auto* in_segment = program_->constant_segment();
  if (in_segment != nullptr && in_segment->offsets() != nullptr && in_segment->offsets()->size() > 0) {
    if (data_buffer_idx >= in_segment->offsets()->size()) {
      return malformed(what + " of " + std::to_string(in_segment->offsets()->size()) + " does not exist");
    }
    return subsegment(in_segment->segment_index(), in_segment->offsets()->Get(data_buffer_idx), size_bytes, what);
  }
  const auto* buffers = program_->constant_buffer();
  if (buffers == nullptr || data_buffer_idx >= buffers->size()) {
    return malformed(what + " of " + std::to_string(buffers == nullptr ? 0 : buffers->size()) + " does not exist");
  }
  const auto* storage = buffers->Get(data_buffer_idx)->storage();
  const size_t available = storage == nullptr ? 0 : storage->size();
  if (size_bytes > available) {
    return malformed(what + " holds " + std::to_string(available) + " bytes, its tensor needs " +
                     std::to_string(size_bytes));
  }
  if (size_bytes == 0) return std::span<const std::byte>();
  return std::span(reinterpret_cast<const std::byte*>(storage->data()), size_bytes);
}

Result<std::span<const std::byte>> PteFile::initial_value(uint64_t mutable_segment_idx, uint32_t data_buffer_idx,
                                                          size_t size_bytes) const {
  const auto* segments = program_->mutable_data_segments();
  const std::string what = "initial value " + std::to_string(data_buffer_idx);
  if (segments == nullptr || mutable_segment_idx >= segments->size()) {
    return malformed(what + " is in mutable data segment " + std::to_string(mutable_segment_idx) + " of " +
                     std::to_string(segments == nullptr ? 0 : segments->size()));
  }
  const auto* segment = segments->Get(static_cast<flatbuffers::uoffset_t>(mutable_segment_idx));
  if (segment->offsets() == nullptr || data_buffer_idx >= segment->offsets()->size()) {
    return malformed(what + " does not exist in mutable data segment " + std::to_string(mutable_segment_idx));
  }
  return subsegment(segment->segment_index(), segment->offsets()->Get(data_buffer_idx), size_bytes, what);
}

Result<std::span<const std::byte>> PteFile::delegate_blob(const et::BackendDelegateDataReference* reference) const {
  if (reference == nullptr) return malformed("a delegate has no data reference");
  const uint32_t index = reference->index();
  if (reference->location() == et::DataLocation::SEGMENT) {
    if (index >= segments_.size()) {
      return malformed("delegate data is in segment " + std::to_string(index) + " of " +
                       std::to_string(segments_.size()));
    }
    return segments_[index];
  }
  if (reference->location() != et::DataLocation::INLINE) {
    return malformed("delegate data has the unknown location " +
                     std::to_string(static_cast<int>(reference->location())));
  }
  const auto* blobs = program_->backend_delegate_data();
  if (blobs == nullptr || index >= blobs->size()) {
    return malformed("inline delegate data " + std::to_string(index) + " of " +
                     std::to_string(blobs == nullptr ? 0 : blobs->size()) + " does not exist");
  }
  const auto* data = blobs->Get(index)->data();
  if (data == nullptr) return std::span<const std::byte>();
  return std::span(reinterpret_cast<const std::byte*>(data->data()), data->size());
}

}  // namespace flexpte
