#include "runtime/method_values.h"

#include <algorithm>
#include <limits>
#include <string>

#include "program_generated.h"
#include "runtime/method.h"

namespace flexpte {
namespace {

namespace et = executorch_flatbuffer;

constexpr size_t kAlignment = 64;

Status bad(const std::string& what) {
  return {Code::kInvalidProgram, what};
}

Result<DType> read_dtype(et::ScalarType type) {
  switch (type) {
    case et::ScalarType::BOOL:
      return DType::kBool;
    case et::ScalarType::BYTE:
      return DType::kU8;
    case et::ScalarType::CHAR:
      return DType::kI8;
    case et::ScalarType::SHORT:
      return DType::kI16;
    case et::ScalarType::INT:
      return DType::kI32;
    case et::ScalarType::LONG:
      return DType::kI64;
    case et::ScalarType::HALF:
      return DType::kF16;
    case et::ScalarType::BFLOAT16:
      return DType::kBF16;
    case et::ScalarType::FLOAT:
      return DType::kF32;
    case et::ScalarType::DOUBLE:
      return DType::kF64;
    default:
      return Status(Code::kUnsupported, "has scalar type " + std::to_string(static_cast<int>(type)) +
                                            ", which this version does not support");
  }
}

Status read_shape(const et::Tensor& tensor, Value& value) {
  FLEXPTE_ASSIGN(value.tensor.dtype, read_dtype(tensor.scalar_type()));
  const size_t rank = tensor.sizes() == nullptr ? 0 : tensor.sizes()->size();
  const size_t num_dims = tensor.dim_order() == nullptr ? 0 : tensor.dim_order()->size();
  if (rank > kMaxRank) {
    return {Code::kUnsupported,
            "has rank " + std::to_string(rank) + ", at most " + std::to_string(kMaxRank) + " is supported"};
  }
  if (num_dims != rank) {
    return bad("has " + std::to_string(rank) + " sizes, but a dimension order of " + std::to_string(num_dims));
  }
  value.tensor.rank = static_cast<int32_t>(rank);
  std::array<bool, kMaxRank> seen{};
  int64_t size_bytes = element_size_bytes(value.tensor.dtype);
  for (uint32_t i = 0; i < rank; ++i) {
    const int64_t size = tensor.sizes()->Get(i);
    if (size < 0) return bad("has the negative size " + std::to_string(size));
    // Zero sizes count as one, so that the product of the others cannot overflow unseen.
    if (__builtin_mul_overflow(size_bytes, std::max<int64_t>(size, 1), &size_bytes)) {
      return bad("has more bytes than fit 63 bits");
    }
    value.tensor.sizes[i] = size;
    const uint8_t dim = tensor.dim_order()->Get(i);
    if (dim >= rank || seen[dim]) return bad("has a dimension order that is not a permutation");
    seen[dim] = true;
    value.dim_order[i] = dim;
  }
  set_dense_strides(value.tensor, value.dim_order);
  value.capacity_bytes = static_cast<size_t>(value.tensor.num_elements() * element_size_bytes(value.tensor.dtype));
  return Status::ok();
}

Status read_tensor(const PteFile& file, const et::Tensor& tensor, std::span<const size_t> arenas, ValueInfo& info) {
  Value& value = info.initial;
  value.kind = ValueKind::kTensor;
  FLEXPTE_TRY(read_shape(tensor, value));
  if (tensor.storage_offset() != 0) return bad("has a storage offset, which the format does not allow");
  switch (tensor.shape_dynamism()) {
    case et::TensorShapeDynamism::STATIC:
      break;
    case et::TensorShapeDynamism::DYNAMIC_BOUND:
      value.dynamic = true;
      break;
    case et::TensorShapeDynamism::DYNAMIC_UNBOUND:
      return {Code::kUnsupported, "has sizes without upper bound; export it with a maximum for each dimension"};
    default:
      return bad("has an unknown kind of dynamism");
  }
  uint64_t mutable_segment = 0;
  if (const auto* extra = tensor.extra_tensor_info()) {
    mutable_segment = extra->mutable_data_segments_idx();
    if (extra->fully_qualified_name() != nullptr) info.name = extra->fully_qualified_name()->string_view();
    if (extra->location() != et::TensorDataLocation::SEGMENT) {
      return {Code::kUnsupported,
              "'" + std::string(info.name) + "' has its data in another file (.ptd); export with the weights inside"};
    }
    if (extra->device_type() != et::DeviceType::CPU) {
      return {Code::kUnsupported, "lies on another device than the CPU"};
    }
  }
  const auto* allocation = tensor.allocation_info();
  const uint32_t data = tensor.data_buffer_idx();
  if (allocation == nullptr && data > 0) {
    FLEXPTE_ASSIGN(const auto bytes, file.constant(data, value.capacity_bytes));
    if (reinterpret_cast<uintptr_t>(bytes.data()) % static_cast<size_t>(element_size_bytes(value.tensor.dtype))) {
      return bad("has constant data that is not aligned to its elements");
    }
    value.dynamic = false;
    value.tensor.data = const_cast<std::byte*>(bytes.data());  // never written: `writable` is false
    info.storage = Storage::kConstant;
    return Status::ok();
  }
  value.writable = true;
  if (allocation == nullptr) return Status::ok();
  if (allocation->memory_id() >= arenas.size()) {
    return bad("is planned in memory " + std::to_string(allocation->memory_id()) + " of " +
               std::to_string(arenas.size()));
  }
  info.storage = Storage::kArena;
  info.index = static_cast<int32_t>(allocation->memory_id());
  info.offset_bytes = (static_cast<uint64_t>(allocation->memory_offset_high()) << 32) | allocation->memory_offset_low();
  const size_t room = arenas[allocation->memory_id()];
  if (info.offset_bytes > room || value.capacity_bytes > room - info.offset_bytes) {
    return bad("is planned at offset " + std::to_string(info.offset_bytes) + " with " +
               std::to_string(value.capacity_bytes) + " bytes in a memory of " + std::to_string(room));
  }
  if (info.offset_bytes % static_cast<size_t>(element_size_bytes(value.tensor.dtype)) != 0) {
    return bad("is planned at offset " + std::to_string(info.offset_bytes) + ", not aligned to its elements");
  }
  if (data > 0) {
    FLEXPTE_ASSIGN(info.initial_data, file.initial_value(mutable_segment, data, value.capacity_bytes));
  }
  return Status::ok();
}

template <class List>
Status read_items(const List* items, size_t num_values, bool may_be_none, std::vector<int32_t>& ids) {
  if (items == nullptr) return Status::ok();
  for (const int64_t id : *items) {
    const bool is_none = may_be_none && id == -1;
    if (!is_none && (id < 0 || static_cast<size_t>(id) >= num_values)) {
      return bad("lists value " + std::to_string(id) + " of " + std::to_string(num_values));
    }
    ids.push_back(static_cast<int32_t>(id));
  }
  return Status::ok();
}

Status read_value(const PteFile& file, const et::EValue& source, size_t num_values, std::span<const size_t> arenas,
                  ValueInfo& info) {
  Value& value = info.initial;
  if (source.val() == nullptr && source.val_type() != et::KernelTypes::NONE) return bad("is empty");
  switch (source.val_type()) {
    case et::KernelTypes::NONE:
    case et::KernelTypes::Null:
      return Status::ok();
    case et::KernelTypes::Int:
      value.kind = ValueKind::kInt;
      value.integer = source.val_as_Int()->int_val();
      return Status::ok();
    case et::KernelTypes::Bool:
      value.kind = ValueKind::kBool;
      value.integer = source.val_as_Bool()->bool_val() ? 1 : 0;
      return Status::ok();
    case et::KernelTypes::Double:
      value.kind = ValueKind::kDouble;
      value.real = source.val_as_Double()->double_val();
      return Status::ok();
    case et::KernelTypes::String:
      value.kind = ValueKind::kString;
      if (source.val_as_String()->string_val() == nullptr) return bad("is a string without text");
      info.text = source.val_as_String()->string_val()->string_view();
      return Status::ok();
    case et::KernelTypes::Tensor:
      return read_tensor(file, *source.val_as_Tensor(), arenas, info);
    case et::KernelTypes::IntList:
      value.kind = ValueKind::kIntList;
      return read_items(source.val_as_IntList()->items(), num_values, false, info.items);
    case et::KernelTypes::TensorList:
      value.kind = ValueKind::kTensorList;
      return read_items(source.val_as_TensorList()->items(), num_values, false, info.items);
    case et::KernelTypes::OptionalTensorList:
      value.kind = ValueKind::kOptionalTensorList;
      return read_items(source.val_as_OptionalTensorList()->items(), num_values, true, info.items);
    case et::KernelTypes::DoubleList:
      value.kind = ValueKind::kDoubleList;
      if (const auto* items = source.val_as_DoubleList()->items()) info.reals.assign(items->begin(), items->end());
      return Status::ok();
    case et::KernelTypes::BoolList:
      value.kind = ValueKind::kBoolList;
      if (const auto* items = source.val_as_BoolList()->items()) {
        for (const auto item : *items) info.items.push_back(item != 0);
      }
      return Status::ok();
    default:
      return bad("has the unknown kind " + std::to_string(static_cast<int>(source.val_type())));
  }
}

Status check_list(const std::vector<ValueInfo>& values, ValueInfo& list) {
  const ValueKind kind = list.initial.kind;
  if (kind != ValueKind::kIntList && kind != ValueKind::kTensorList && kind != ValueKind::kOptionalTensorList) {
    return Status::ok();
  }
  const ValueKind expected = kind == ValueKind::kIntList ? ValueKind::kInt : ValueKind::kTensor;
  for (int32_t& item : list.items) {
    if (item < 0) continue;
    const ValueKind found = values[static_cast<size_t>(item)].initial.kind;
    if (kind == ValueKind::kOptionalTensorList && found == ValueKind::kNone) {
      item = -1;
    } else if (found != expected) {
      return bad("is a list of kind " + std::string(kind_name(kind)) + " with an item of kind " +
                 std::string(kind_name(found)));
    }
  }
  return Status::ok();
}

Status name_value(Status status, size_t number) {
  if (status.is_ok()) return status;
  return {status.code(), "value " + std::to_string(number) + " " + status.message()};
}

}  // namespace

Status read_values(const PteFile& file, const et::ExecutionPlan& plan, std::vector<ValueInfo>& values,
                   std::vector<size_t>& arena_sizes_bytes) {
  if (const auto* sizes = plan.non_const_buffer_sizes()) {
    for (const int64_t size : *sizes) {
      if (size < 0 || size > std::numeric_limits<int64_t>::max() / 2) {
        return bad("has a memory of " + std::to_string(size) + " bytes");
      }
      arena_sizes_bytes.push_back(static_cast<size_t>(size));
    }
  }
  if (const auto* devices = plan.non_const_buffer_device()) {
    for (const et::NonConstBufferDevice* device : *devices) {
      if (device->device_type() != et::DeviceType::CPU) {
        return {Code::kUnsupported, "plans memory on another device than the CPU"};
      }
    }
  }
  if (plan.values() == nullptr) return Status::ok();
  values.resize(plan.values()->size());
  for (size_t i = 0; i < values.size(); ++i) {
    const et::EValue* source = plan.values()->Get(static_cast<flatbuffers::uoffset_t>(i));
    FLEXPTE_TRY(name_value(read_value(file, *source, values.size(), arena_sizes_bytes, values[i]), i));
  }
  for (size_t i = 0; i < values.size(); ++i) FLEXPTE_TRY(name_value(check_list(values, values[i]), i));
  return Status::ok();
}

Status place_states(std::vector<ValueInfo>& values, std::span<const int32_t> inputs,
                    std::vector<PlannedState>& states) {
  struct Range {
    int32_t arena;
    size_t begin, end;
    int32_t state;
  };
  std::vector<Range> ranges;
  for (size_t i = 0; i < values.size(); ++i) {
    const ValueInfo& info = values[i];
    const bool is_input = std::find(inputs.begin(), inputs.end(), static_cast<int32_t>(i)) != inputs.end();
    if (info.storage != Storage::kArena || info.name.empty() || is_input) continue;
    ranges.push_back({info.index, info.offset_bytes, info.offset_bytes + info.initial.capacity_bytes,
                      static_cast<int32_t>(states.size())});
    states.push_back({info.name, info.initial.capacity_bytes, info.initial_data});
  }
  for (ValueInfo& info : values) {
    if (info.storage != Storage::kArena) continue;
    const size_t begin = info.offset_bytes;
    const size_t end = begin + info.initial.capacity_bytes;
    for (const Range& range : ranges) {
      if (info.index != range.arena || end <= range.begin || begin >= range.end) continue;
      if (begin < range.begin || end > range.end) {
        return bad("the buffer '" + std::string(states[static_cast<size_t>(range.state)].name) +
                   "' shares memory with another tensor");
      }
      info.storage = Storage::kState;
      info.index = range.state;
      info.offset_bytes = begin - range.begin;
      info.initial_data = {};
      break;
    }
  }
  return Status::ok();
}

Status give_room(std::vector<ValueInfo>& values, std::vector<size_t>& arena_sizes_bytes) {
  size_t size_bytes = 0;
  for (ValueInfo& info : values) {
    if (info.initial.kind != ValueKind::kTensor || info.storage != Storage::kNone) continue;
    info.storage = Storage::kArena;
    info.index = static_cast<int32_t>(arena_sizes_bytes.size());
    info.offset_bytes = size_bytes;
    const size_t padded = (info.initial.capacity_bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (padded < info.initial.capacity_bytes || __builtin_add_overflow(size_bytes, padded, &size_bytes)) {
      return bad("has tensors of more bytes than fit 64 bits");
    }
  }
  if (size_bytes > 0) arena_sizes_bytes.push_back(size_bytes);
  return Status::ok();
}

}  // namespace flexpte
