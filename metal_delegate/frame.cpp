#include "metal_delegate/frame.h"

#include <algorithm>
#include <cstring>

#include "metal_delegate/rules.h"

namespace flexpte {
namespace {

Status bad_argument(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }

std::string input_name(size_t number) { return "input " + std::to_string(number); }

// Elements of equal width, any strides, any alignment.
void copy_elements(const TensorView& source, const TensorView& target) {
  const auto width = static_cast<size_t>(element_size_bytes(source.dtype));
  const auto signed_width = static_cast<int64_t>(width);
  const int64_t count = source.num_elements();
  if (count == 0) return;
  const auto* from = static_cast<const std::byte*>(source.data);
  auto* to = static_cast<std::byte*>(target.data);
  if (source.is_contiguous() && target.is_contiguous()) {
    std::memcpy(to, from, static_cast<size_t>(count) * width);
    return;
  }
  std::array<int64_t, kMaxRank> at{};
  for (int64_t i = 0; i < count; ++i) {
    int64_t from_offset = 0;
    int64_t to_offset = 0;
    for (size_t d = 0; d < static_cast<size_t>(source.rank); ++d) {
      from_offset += at[d] * source.strides[d];
      to_offset += at[d] * target.strides[d];
    }
    std::memcpy(to + to_offset * signed_width, from + from_offset * signed_width, width);
    for (auto d = static_cast<size_t>(source.rank); d-- > 0;) {
      if (++at[d] < source.sizes[d]) break;
      at[d] = 0;
    }
  }
}

// Bytes from the first element to the end of the last.
uint64_t extent_bytes(const TensorView& view) {
  int64_t last = 0;
  for (int32_t d = 0; d < view.rank; ++d) {
    if (view.size(d) == 0) return 0;
    last += (view.size(d) - 1) * view.stride(d);
  }
  return static_cast<uint64_t>((last + 1) * element_size_bytes(view.dtype));
}

bool same_layout(const TensorView& a, const TensorView& b) {
  for (int32_t d = 0; d < a.rank; ++d) {
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

bool is_aligned(const TensorView& view) {
  return reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(element_size_bytes(view.dtype)) == 0;
}

}  // namespace

Frame::Frame(const BoundProgram& program) : program_(program) {}

Result<std::unique_ptr<Frame>> Frame::create(const BoundProgram& program, StateStore& states) {
  std::unique_ptr<Frame> frame(new Frame(program));
  FLEXPTE_TRY(frame->bind_memory(states));
  frame->collect_positions();
  return frame;
}

Status Frame::bind_memory(StateStore& states) {
  std::vector<std::span<std::byte>> state_bytes;
  for (const State& state : program_.states) {
    const std::span<const std::byte> initial =
        state.initial < 0 ? std::span<const std::byte>()
                          : program_.constants[static_cast<size_t>(state.initial)].bytes;
    FLEXPTE_ASSIGN(const std::span<std::byte> bytes, states.state(state.name, state.size_bytes, initial));
    state_bytes.push_back(bytes);
  }
  FLEXPTE_ASSIGN(arena_, ZeroPages::allocate(static_cast<size_t>(program_.arena_size_bytes), "the delegate's arena"));
  for (const Storage& storage : program_.storages) {
    std::byte* data = nullptr;
    const auto index = static_cast<size_t>(storage.index);
    switch (storage.kind) {
      case StorageKind::kInput:
      case StorageKind::kOutput: break;
      case StorageKind::kConstant:
        // Never written: see check_dataflow().
        data = const_cast<std::byte*>(program_.constants[index].bytes.data());
        break;
      case StorageKind::kState: data = state_bytes[index].data(); break;
      case StorageKind::kArena: data = arena_.bytes().data() + storage.offset_bytes; break;
    }
    storage_data_.push_back(data);
    storage_bytes_.push_back(storage.size_bytes);
  }
  input_copies_.resize(program_.inputs.size());
  scalars_.resize(program_.scalars.size());
  next_scalars_.resize(program_.scalars.size());
  values_.resize(program_.values.size());
  offsets_bytes_.resize(program_.values.size());
  const auto moves = [this](int32_t value) {
    const StorageKind kind = program_.storage_kind(value);
    return kind == StorageKind::kInput || kind == StorageKind::kOutput;
  };
  for (size_t v = 0; v < program_.values.size(); ++v) {
    if (moves(static_cast<int32_t>(v))) moving_values_.push_back(v);
  }
  for (const Instruction& instruction : program_.instructions) {
    first_slot_.push_back(slot_values_.size());
    for (const int32_t value : instruction.operands) {
      if (value >= 0 && moves(value)) moving_slots_.push_back(slot_values_.size());
      slot_values_.push_back(value);
    }
  }
  slots_.resize(slot_values_.size());
  return Status::ok();
}

void Frame::collect_positions() {
  std::vector<bool> written_early(program_.storages.size(), false);
  for (size_t i = 0; i < program_.instructions.size(); ++i) {
    const Instruction& instruction = program_.instructions[i];
    if (i < program_.first_state_write) {
      for (size_t k = 0; k < instruction.operands.size(); ++k) {
        if (!instruction.writes(k) || instruction.operands[k] < 0) continue;
        written_early[static_cast<size_t>(program_.values[static_cast<size_t>(instruction.operands[k])].storage)] =
            true;
      }
    }
    if (instruction.kind != OpKind::kIndexCopy) continue;
    const int32_t index = instruction.operands[operand::kCopyIndex];
    const Value& target = program_.values[static_cast<size_t>(instruction.operands[operand::kTarget])];
    const auto storage = static_cast<size_t>(program_.values[static_cast<size_t>(index)].storage);
    const StorageKind kind = program_.storages[storage].kind;
    const bool is_known = kind == StorageKind::kInput || kind == StorageKind::kConstant ||
                          kind == StorageKind::kState ||
                          (written_early[storage] && is_live_at_first_write(index, i));
    const Sym capacity = target.view.size(std::get<IndexCopyParams>(instruction.params).dim);
    const bool is_new = std::none_of(positions_.begin(), positions_.end(), [&](const Positions& p) {
      return p.index == index && p.capacity == capacity;
    });
    if (!is_known || !is_new) continue;
    const Storage& cache = program_.storages[static_cast<size_t>(target.storage)];
    positions_.push_back({index, capacity, i, program_.states[static_cast<size_t>(cache.index)].name});
  }
}
