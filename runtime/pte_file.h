// A .pte file: its bytes, its header, its flatbuffer and its segments, verified once.
//
// Layout (ExecuTorch schema/program.fbs and schema/extended_header.h): bytes 0-3 root offset of the
// flatbuffer, 4-7 "ET12"; then optionally the extended header at byte 8: "eh00", its length (u32),
// size of the flatbuffer (u64), offset of the first segment (u64), size of all segments (u64, from
// length 32 on). Without it everything is inline in the flatbuffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/delegate.h"
#include "runtime/memory.h"
#include "runtime/status.h"

namespace executorch_flatbuffer {
struct Program;
struct BackendDelegateDataReference;
}  // namespace executorch_flatbuffer

namespace flexpte {

// The bytes of a file, at least 64-byte aligned: mapped read-only, or copied from the caller.
class FileBytes {
 public:
  FileBytes() = default;
  ~FileBytes();
  FileBytes(FileBytes&& other) noexcept;
  FileBytes& operator=(FileBytes&& other) noexcept;

  // Io: no such file, not a regular file, not readable.
  static Result<FileBytes> map(const std::string& path);
  static Result<FileBytes> copy(std::span<const std::byte> bytes);

  std::span<const std::byte> bytes() const { return bytes_; }
  const std::string& name() const { return name_; }  // the path, or "<bytes>"

 private:
  std::span<const std::byte> bytes_;
  bool mapped_ = false;
  ZeroPages copied_;
  std::string name_;
};

class PteFile final : public NamedData {
 public:
  // Verifies header, flatbuffer, segments and named data; methods are verified by their loader.
  static Result<std::unique_ptr<PteFile>> open(FileBytes file);

  const executorch_flatbuffer::Program& program() const { return *program_; }

  // Bytes of the constant (or of the initial value of a mutable buffer) that `data_buffer_idx` names.
  Result<std::span<const std::byte>> constant(uint32_t data_buffer_idx, size_t size_bytes) const;
  Result<std::span<const std::byte>> initial_value(uint64_t mutable_segment_idx, uint32_t data_buffer_idx,
                                                   size_t size_bytes) const;
  Result<std::span<const std::byte>> delegate_blob(
      const executorch_flatbuffer::BackendDelegateDataReference* reference) const;
  Result<std::span<const std::byte>> find(std::string_view key) const override;

  // For inspection.
  const std::string& name() const { return file_.name(); }
  size_t file_size_bytes() const { return file_.bytes().size(); }
  size_t program_size_bytes() const { return program_size_bytes_; }
  std::span<const std::span<const std::byte>> segments() const { return segments_; }
  const std::map<std::string, std::span<const std::byte>, std::less<>>& named_data() const { return named_data_; }

 private:
  Status read_header();
  Status read_segments();
  Status read_named_data();
  Result<std::span<const std::byte>> subsegment(uint64_t segment_index, uint64_t offset, size_t size_bytes,
                                                std::string_view what) const;

  FileBytes file_;
  const executorch_flatbuffer::Program* program_ = nullptr;
  size_t program_size_bytes_ = 0;
  bool has_segments_ = false;  // the extended header says where they begin
  uint64_t segment_base_ = 0;
  std::vector<std::span<const std::byte>> segments_;
  std::map<std::string, std::span<const std::byte>, std::less<>> named_data_;
};

}  // namespace flexpte
