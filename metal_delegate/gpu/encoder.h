// Turns instructions into dispatches: what all encode_* functions share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "metal_delegate/gpu/queue.h"
#include "metal_delegate/program.h"
#include "runtime/memory.h"
#include "runtime/status.h"
#include "runtime/tensor.h"

namespace flexpte::gpu {

// Of the instruction being encoded: its kernels in the order of Instruction::kernels.
using Pipelines = std::span<const Pipeline* const>;

// The extent of a strided view, from its first element to its last, as an argument of a kernel. Strides are
// not negative. A view without data or elements is an absent buffer.
BufferArgument read(const TensorView& view, std::string_view name);
BufferArgument write(const TensorView& view, std::string_view name);
BufferArgument read(std::span<const std::byte> bytes, std::string_view name);
BufferArgument write(std::span<std::byte> bytes, std::string_view name);

class Encoder {
 public:
  // `queue` outlives the encoder.
  explicit Encoder(Queue& queue) : queue_(queue) {}
  ~Encoder();
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  Queue& queue() { return queue_; }

  // Memory that kernels can read and write, 256-byte aligned, until reset(). Its contents are undefined.
  Result<std::span<std::byte>> scratch(size_t size_bytes);

  // A word, zero at first, in which kernels leave the number plus one of an instruction with a bad index.
  Result<std::span<std::byte>> status();
  // Of the kernels that have run; 0: all indices were good.
  uint32_t bad_instruction() const;

  // Memory that kernels of this step may have written is not readable by the host before the step ends.
  void set_unreadable(std::span<const std::byte> bytes) { unreadable_ = bytes; }
  bool is_readable(const void* data) const {
    const auto* at = static_cast<const std::byte*>(data);
    return at < unreadable_.data() || at >= unreadable_.data() + unreadable_.size();
  }

  // The step's kernels have run: scratch memory may be handed out again.
  void reset();

  template <typename Params>
  Status dispatch(const Pipeline& pipeline, const Params& params, std::span<const BufferArgument> buffers,
                  const Grid& grid) {
    static_assert(sizeof(Params) <= kMaxParamsBytes);
    return queue_.dispatch(pipeline, std::as_bytes(std::span(&params, 1)), buffers, grid);
  }

 private:
  struct Chunk {
    ZeroPages pages;
    size_t used_bytes = 0;
  };

  Queue& queue_;
  std::vector<Chunk> chunks_;
  std::span<std::byte> status_;
  std::span<const std::byte> unreadable_;
};

}  // namespace flexpte::gpu
