#include "metal_delegate/frame.h"

#include <algorithm>
#include <cstring>

#include "metal_delegate/rules.h"

namespace flexpte::bound {
namespace {

Status bad_argument(std::string message) {
  return {Code::kInvalidArgument, std::move(message)};
}

std::string input_name(size_t number) {
  return "input " + std::to_string(number);
}

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
        state.initial < 0 ? std::span<const std::byte>() : program_.constants[static_cast<size_t>(state.initial)].bytes;
    FLEXPTE_ASSIGN(const std::span<std::byte> bytes, states.state(state.name, state.size_bytes, initial));
    state_bytes.push_back(bytes);
  }
  FLEXPTE_ASSIGN(arena_, ZeroPages::allocate(static_cast<size_t>(program_.arena_size_bytes), "the delegate's arena"));
  for (const Storage& storage : program_.storages) {
    std::byte* data = nullptr;
    const auto index = static_cast<size_t>(storage.index);
    switch (storage.kind) {
      case StorageKind::kInput:
      case StorageKind::kOutput:
        break;
      case StorageKind::kConstant:
        // Never written: see check_dataflow().
        data = const_cast<std::byte*>(program_.constants[index].bytes.data());
        break;
      case StorageKind::kState:
        data = state_bytes[index].data();
        break;
      case StorageKind::kArena:
        data = arena_.bytes().data() + storage.offset_bytes;
        break;
    }
    storage_data_.push_back(data);
    storage_bytes_.push_back(storage.size_bytes);
  }
  input_copies_.resize(program_.inputs.size());
  call_inputs_.resize(program_.inputs.size());
  call_outputs_.resize(program_.outputs.size());
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

// Before the first write to a state the positions of a later IndexCopy are known when they were written
// by then and are not written again until it reads them.
void Frame::collect_positions() {
  std::vector<bool> is_written(program_.storages.size(), false);
  std::vector<bool> is_written_later(program_.storages.size(), false);
  for (size_t i = 0; i < program_.instructions.size(); ++i) {
    const Instruction& instruction = program_.instructions[i];
    if (instruction.kind == OpKind::kIndexCopy) {
      const int32_t index = instruction.operands[operand::kCopyIndex];
      const Value& target = program_.values[static_cast<size_t>(instruction.operands[operand::kTarget])];
      const auto storage = static_cast<size_t>(program_.values[static_cast<size_t>(index)].storage);
      const StorageKind kind = program_.storages[storage].kind;
      const bool is_known = (is_written[storage] || (kind != StorageKind::kArena && kind != StorageKind::kOutput)) &&
                            !is_written_later[storage];
      const Sym capacity = target.view.size(std::get<IndexCopyParams>(instruction.params).dim);
      const bool is_new = std::none_of(positions_.begin(), positions_.end(),
                                       [&](const Positions& p) { return p.index == index && p.capacity == capacity; });
      if (is_known && is_new) {
        const Storage& cache = program_.storages[static_cast<size_t>(target.storage)];
        positions_.push_back({index, capacity, i, program_.states[static_cast<size_t>(cache.index)].name});
      }
    }
    for (size_t k = 0; k < instruction.operands.size(); ++k) {
      if (!instruction.writes(k) || instruction.operands[k] < 0) continue;
      const Value& value = program_.values[static_cast<size_t>(instruction.operands[k])];
      std::vector<bool>& written = i < program_.first_state_write ? is_written : is_written_later;
      written[static_cast<size_t>(value.storage)] = true;
    }
  }
}

Status Frame::begin(std::span<DelegateArgument> inputs, std::span<DelegateArgument> outputs) {
  FLEXPTE_TRY(check_inputs(inputs));
  if (outputs.size() != program_.outputs.size()) {
    return bad_argument("the call has " + std::to_string(outputs.size()) + " outputs, expected " +
                        std::to_string(program_.outputs.size()));
  }
  FLEXPTE_TRY(evaluate_scalars(program_.scalars, inputs, next_scalars_));
  bool has_same_shapes = is_resolved_;
  for (size_t i = 0; i < scalars_.size(); ++i) {
    has_same_shapes = has_same_shapes && (!program_.scalars[i].is_extent || next_scalars_[i] == scalars_[i]);
  }
  std::swap(scalars_, next_scalars_);
  FLEXPTE_TRY(check_input_sizes(inputs));
  if (!has_same_shapes) {
    is_resolved_ = false;
    FLEXPTE_TRY(resolve());
    is_resolved_ = true;
  }
  FLEXPTE_TRY(bind_inputs(inputs));
  FLEXPTE_TRY(bind_outputs(outputs));
  move_pointers();
  return Status::ok();
}

Status Frame::check_inputs(std::span<const DelegateArgument> inputs) const {
  if (inputs.size() != program_.inputs.size()) {
    return bad_argument("the call has " + std::to_string(inputs.size()) + " inputs, expected " +
                        std::to_string(program_.inputs.size()));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const DelegateArgument& input = inputs[i];
    const bool is_tensor = program_.inputs[i] >= 0;
    if (is_tensor != (input.kind == DelegateArgument::Kind::kTensor)) {
      return bad_argument(input_name(i) +
                          (is_tensor ? " is an integer, expected a tensor" : " is a tensor, expected an integer"));
    }
    if (!is_tensor) continue;
    const TensorView& expected = program_.values[static_cast<size_t>(program_.inputs[i])].view;
    if (input.tensor.dtype != expected.dtype) {
      return bad_argument(input_name(i) + " is " + std::string(dtype_name(input.tensor.dtype)) + ", expected " +
                          std::string(dtype_name(expected.dtype)));
    }
    if (input.tensor.rank != expected.rank) {
      return bad_argument(input_name(i) + " has the shape " + shape_string(input.tensor) + ", expected " +
                          std::to_string(expected.rank) + " dimensions");
    }
    for (int32_t d = 0; d < expected.rank; ++d) {
      const Sym size = expected.size(d);
      const bool is_bounded = is_symbolic(size);
      const int64_t bound = is_bounded ? program_.scalars[scalar_of(size)].upper_bound : size;
      const int64_t actual = input.tensor.size(d);
      if (actual < 0 || (is_bounded ? actual > bound : actual != bound)) {
        return bad_argument(input_name(i) + " has the shape " + shape_string(input.tensor) + ": dimension " +
                            std::to_string(d) + " is " + std::to_string(actual) + ", expected " +
                            (is_bounded ? "at most " : "") + std::to_string(bound));
      }
    }
  }
  return Status::ok();
}

Status Frame::check_input_sizes(std::span<const DelegateArgument> inputs) const {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (program_.inputs[i] < 0) continue;
    const TensorView& expected = program_.values[static_cast<size_t>(program_.inputs[i])].view;
    for (int32_t d = 0; d < expected.rank; ++d) {
      if (inputs[i].tensor.size(d) == evaluate(expected.size(d))) continue;
      return bad_argument(input_name(i) + " has the shape " + shape_string(inputs[i].tensor) + ": dimension " +
                          std::to_string(d) + " is " + std::to_string(inputs[i].tensor.size(d)) +
                          ", and the other inputs give " + std::to_string(evaluate(expected.size(d))));
    }
  }
  return Status::ok();
}

// A value's sizes and strides are not negative and at most their upper bounds, whose products were found
// to be representable at load.
void Frame::resolve_value(size_t number) {
  const Value& value = program_.values[number];
  TensorView& view = values_[number];
  view.dtype = value.view.dtype;
  view.rank = value.view.rank;
  for (size_t d = 0; d < static_cast<size_t>(view.rank); ++d) {
    view.sizes[d] = evaluate(value.view.sizes[d]);
    view.strides[d] = evaluate(value.view.strides[d]);
  }
  offsets_bytes_[number] = evaluate(value.offset) * element_size_bytes(view.dtype);
}

Status Frame::resolve() {
  for (size_t v = 0; v < values_.size(); ++v) resolve_value(v);
  for (size_t s = 0; s < storage_bytes_.size(); ++s) {
    const Storage& storage = program_.storages[s];
    const auto index = static_cast<size_t>(storage.index);
    if (storage.kind == StorageKind::kInput) {
      storage_bytes_[s] = extent_bytes(values_[static_cast<size_t>(program_.inputs[index])]);
    } else if (storage.kind == StorageKind::kOutput) {
      const TensorView& view = values_[static_cast<size_t>(program_.outputs[index])];
      if (!view.is_contiguous()) {
        return {Code::kInvalidProgram, "output " + std::to_string(index) + " is not contiguous"};
      }
      storage_bytes_[s] = extent_bytes(view);
    }
  }
  for (size_t v = 0; v < values_.size(); ++v) {
    const auto storage = static_cast<size_t>(program_.values[v].storage);
    const uint64_t extent = extent_bytes(values_[v]);
    const uint64_t end = static_cast<uint64_t>(offsets_bytes_[v]) + extent;
    if (extent > 0 && end > storage_bytes_[storage]) {
      return {Code::kInvalidProgram, "value " + std::to_string(v) + " with the shape " + shape_string(values_[v]) +
                                         " reaches byte " + std::to_string(end) + " of storage " +
                                         std::to_string(storage) + ", which has " +
                                         std::to_string(storage_bytes_[storage])};
    }
    if (extent == 0) offsets_bytes_[v] = 0;
    std::byte* data = storage_data_[storage];
    values_[v].data = data == nullptr ? nullptr : data + offsets_bytes_[v];
  }
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slot_values_[i] >= 0) slots_[i] = values_[static_cast<size_t>(slot_values_[i])];
  }
  for (size_t i = 0; i < program_.instructions.size(); ++i) {
    const Status status = check_operands(program_.instructions[i], operands(i));
    if (!status.is_ok()) return {status.code(), describe_instruction(program_, i) + ": " + status.message()};
  }
  return Status::ok();
}

Status Frame::bind_inputs(std::span<const DelegateArgument> inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (program_.inputs[i] < 0) continue;
    TensorView& view = values_[static_cast<size_t>(program_.inputs[i])];
    const TensorView& given = inputs[i].tensor;
    const bool is_empty = given.num_elements() == 0;
    if (!is_empty && given.data == nullptr) return bad_argument(input_name(i) + " has no data");
    if (is_empty || (same_layout(view, given) && is_aligned(given))) {
      view.data = given.data;
      continue;
    }
    for (int32_t d = 0; d < view.rank; ++d) {
      if (view.size(d) > 1 && view.stride(d) == 0) {
        return bad_argument(input_name(i) + " must be expanded along dimension " + std::to_string(d) +
                            " (stride 0), as the example input of the export was");
      }
    }
    if (input_copies_[i].bytes().empty()) {
      const uint64_t bytes = extent_bytes(program_.upper_bound(program_.inputs[i]));
      FLEXPTE_ASSIGN(input_copies_[i], ZeroPages::allocate(static_cast<size_t>(bytes), "a copy of " + input_name(i)));
    }
    view.data = input_copies_[i].bytes().data();
    copy_elements(given, view);
  }
  return Status::ok();
}

Status Frame::bind_outputs(std::span<DelegateArgument> outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    TensorView& view = values_[static_cast<size_t>(program_.outputs[i])];
    TensorView& given = outputs[i].tensor;
    const std::string_view dtype = dtype_name(view.dtype);
    if (outputs[i].kind != DelegateArgument::Kind::kTensor || given.dtype != view.dtype) {
      return bad_argument("output " + std::to_string(i) + " is not a tensor of " + std::string(dtype));
    }
    const auto needed = static_cast<uint64_t>(view.num_elements() * element_size_bytes(view.dtype));
    if (needed > outputs[i].capacity_bytes || (needed > 0 && given.data == nullptr)) {
      return bad_argument("output " + std::to_string(i) + " has room for " + std::to_string(outputs[i].capacity_bytes) +
                          " bytes and needs " + std::to_string(needed));
    }
    if (!is_aligned(given)) {
      return bad_argument("output " + std::to_string(i) + " is not aligned for " + std::string(dtype));
    }
    given.rank = view.rank;
    given.sizes = view.sizes;
    int64_t stride = 1;
    for (auto d = static_cast<size_t>(view.rank); d-- > 0;) {
      given.strides[d] = stride;
      stride *= view.sizes[d];
    }
    if (program_.storage_kind(program_.outputs[i]) == StorageKind::kOutput) view.data = given.data;
  }
  return Status::ok();
}

// Values of inputs and outputs begin where the first value of their storage does.
void Frame::move_pointers() {
  for (size_t i = 0; i < program_.inputs.size(); ++i) {
    if (program_.inputs[i] < 0) continue;
    const auto value = static_cast<size_t>(program_.inputs[i]);
    call_inputs_[i] = static_cast<std::byte*>(values_[value].data);
  }
  for (size_t i = 0; i < program_.outputs.size(); ++i) {
    const auto value = static_cast<size_t>(program_.outputs[i]);
    if (program_.storage_kind(program_.outputs[i]) == StorageKind::kOutput) {
      call_outputs_[i] = static_cast<std::byte*>(values_[value].data);
    }
  }
  for (const size_t v : moving_values_) {
    const Storage& storage = program_.storages[static_cast<size_t>(program_.values[v].storage)];
    const auto index = static_cast<size_t>(storage.index);
    std::byte* data = storage.kind == StorageKind::kInput ? call_inputs_[index] : call_outputs_[index];
    values_[v].data = data == nullptr ? nullptr : data + offsets_bytes_[v];
  }
  for (const size_t slot : moving_slots_) slots_[slot].data = values_[static_cast<size_t>(slot_values_[slot])].data;
}

Status Frame::check_positions() const {
  for (const Positions& positions : positions_) {
    const TensorView& index = values_[static_cast<size_t>(positions.index)];
    const int64_t capacity = evaluate(positions.capacity);
    for (int64_t i = 0; i < index.size(0); ++i) {
      const int64_t at = i * index.stride(0);
      const int64_t position =
          index.dtype == DType::kI32 ? index.as<const int32_t>()[at] : index.as<const int64_t>()[at];
      if (position >= 0 && position < capacity) continue;
      return {Code::kOutOfRange,
              "position " + std::to_string(position) +
                  (position < 0 ? " is before the start" : " is past the capacity " + std::to_string(capacity)) +
                  " of cache " + positions.cache + (position < 0 ? "" : ": context full")};
    }
  }
  return Status::ok();
}

bool Frame::has_computed_positions() const {
  return std::any_of(positions_.begin(), positions_.end(), [this](const Positions& positions) {
    return program_.storage_kind(positions.index) == StorageKind::kArena;
  });
}

std::span<std::byte> Frame::storage(size_t number) const {
  const Storage& storage = program_.storages[number];
  std::byte* data = storage_data_[number];
  if (storage.kind == StorageKind::kInput) data = call_inputs_[static_cast<size_t>(storage.index)];
  if (storage.kind == StorageKind::kOutput) data = call_outputs_[static_cast<size_t>(storage.index)];
  return data == nullptr ? std::span<std::byte>() : std::span(data, static_cast<size_t>(storage_bytes_[number]));
}

void Frame::finish(std::span<DelegateArgument> outputs) const {
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (program_.storage_kind(program_.outputs[i]) == StorageKind::kOutput) continue;
    copy_elements(values_[static_cast<size_t>(program_.outputs[i])], outputs[i].tensor);
  }
}

}  // namespace flexpte::bound
