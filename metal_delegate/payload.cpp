#include "metal_delegate/payload.h"

#include <bit>
#include <cstring>
#include <new>
#include <optional>
#include <string>
#include <unordered_set>

#include "metal_delegate/dataflow.h"
#include "metal_delegate/payload_instructions.h"
#include "metal_delegate/rules.h"
#include "payload_generated.h"

namespace flexpte::bound {
namespace {

static_assert(std::endian::native == std::endian::little, "payloads are little-endian and read in place");

constexpr uint32_t kVersion = static_cast<uint32_t>(payload::FormatVersion::Current);
// Files promise 64 bytes; kernels need the elements' alignment only, so that less costs no copy.
constexpr size_t kConstantAlignment = 16;
constexpr int64_t kMaxElements = int64_t{1} << 56;  // so that sums and products of extents cannot overflow

Status malformed(std::string message) {
  return {Code::kInvalidProgram, std::move(message)};
}

std::string numbered(const char* what, size_t number) {
  return std::string(what) + " " + std::to_string(number);
}

template <class T>
size_t length(const flatbuffers::Vector<T>* vector) {
  return vector == nullptr ? 0 : vector->size();
}

bool is_valid(payload::DType dtype) {
  return dtype >= payload::DType::Bool && static_cast<int>(dtype) < kNumDTypes;
}

// The version, read before anything else is believed: a newer format need not pass today's verifier.
std::optional<uint32_t> peek_version(std::span<const std::byte> bytes) {
  const auto read = [bytes](uint64_t at, auto& value) {
    if (at > bytes.size() || bytes.size() - at < sizeof(value)) return false;
    std::memcpy(&value, bytes.data() + at, sizeof(value));
    return true;
  };
  uint32_t root = 0;
  int32_t to_vtable = 0;
  uint16_t vtable_bytes = 0;
  uint16_t field = 0;
  uint32_t version = 0;
  if (!read(0, root) || !read(root, to_vtable)) return std::nullopt;
  const int64_t vtable = int64_t{root} - to_vtable;
  if (vtable < 0 || !read(static_cast<uint64_t>(vtable), vtable_bytes)) return std::nullopt;
  constexpr uint16_t at = payload::Payload::VT_VERSION;
  if (vtable_bytes < at + sizeof(field)) return 0;
  if (!read(static_cast<uint64_t>(vtable) + at, field)) return std::nullopt;
  if (field == 0) return 0;
  if (!read(uint64_t{root} + field, version)) return std::nullopt;
  return version;
}

class Decoder {
 public:
  Decoder(const payload::Payload& payload, const NamedData& data, BoundProgram& program)
      : payload_(payload), data_(data), program_(program) {}

  Status run() {
    program_.version = payload_.version();
    if (payload_.exporter() != nullptr) program_.exporter = payload_.exporter()->str();
    program_.arena_size_bytes = payload_.arena_size_bytes();
    if (payload_.metal_library() != nullptr) program_.metal_library = payload_.metal_library()->str();
    program_.kernels_version = payload_.kernels_version();
    FLEXPTE_TRY(constants());
    FLEXPTE_TRY(states());
    FLEXPTE_TRY(storages());
    FLEXPTE_TRY(inputs_and_scalars());
    FLEXPTE_TRY(values());
    FLEXPTE_TRY(calls());
    FLEXPTE_TRY(decode_instructions(payload_, program_));
    return check_dataflow(program_);
  }

 private:
  Status constants() {
    for (size_t i = 0; i < length(payload_.constants()); ++i) {
      const payload::Constant& constant = *payload_.constants()->Get(static_cast<uint32_t>(i));
      ConstantData decoded;
      decoded.key = constant.key()->str();
      FLEXPTE_ASSIGN(decoded.bytes, data_.find(decoded.key));
      if (decoded.bytes.size() < constant.size_bytes()) {
        return malformed(numbered("constant", i) + " (" + decoded.key + ") needs " +
                         std::to_string(constant.size_bytes()) + " bytes, the program's named data has " +
                         std::to_string(decoded.bytes.size()));
      }
      decoded.bytes = decoded.bytes.first(static_cast<size_t>(constant.size_bytes()));
      if (reinterpret_cast<uintptr_t>(decoded.bytes.data()) % kConstantAlignment != 0) {
        FLEXPTE_TRY(align(decoded));
      }
      program_.constants.push_back(std::move(decoded));
    }
    return Status::ok();
  }

  static Status align(ConstantData& constant) {
    auto* copy = new (std::align_val_t{kConstantAlignment}, std::nothrow) std::byte[constant.bytes.size()];
    if (copy == nullptr) {
      return {Code::kOutOfMemory, "no memory for an aligned copy of " + constant.key + ", " +
                                      std::to_string(constant.bytes.size()) + " bytes"};
    }
    constant.copy = std::shared_ptr<std::byte[]>(
        copy, [](std::byte* p) { ::operator delete[](p, std::align_val_t{kConstantAlignment}); });
    if (!constant.bytes.empty()) std::memcpy(copy, constant.bytes.data(), constant.bytes.size());
    constant.bytes = {copy, constant.bytes.size()};
    return Status::ok();
  }

  Status states() {
    std::unordered_set<std::string> names;
    for (size_t i = 0; i < length(payload_.states()); ++i) {
      const payload::State& state = *payload_.states()->Get(static_cast<uint32_t>(i));
      const std::string what = numbered("state", i) + " (" + state.name()->str() + ")";
      State decoded;
      decoded.name = state.name()->str();
      if (!names.insert(decoded.name).second) return malformed(what + " has the name of an earlier one");
      if (!is_valid(state.dtype())) return malformed(what + " has an unknown dtype");
      decoded.dtype = static_cast<DType>(state.dtype());
      FLEXPTE_TRY(sizes(state.sizes(), what, decoded.shape));
      decoded.shape.dtype = decoded.dtype;
      int64_t elements = 1;
      for (int32_t d = decoded.shape.rank; d-- > 0;) {
        const int64_t size = decoded.shape.size(d);
        if (size < 0) return malformed(what + " has the size " + std::to_string(size) + ", expected a static one");
        decoded.shape.strides[static_cast<size_t>(d)] = elements;
        if (__builtin_mul_overflow(elements, size, &elements) || elements > kMaxElements) {
          return malformed(what + " is too large");
        }
      }
      decoded.size_bytes = static_cast<size_t>(elements * element_size_bytes(decoded.dtype));
      decoded.initial = state.initial();
      if (decoded.initial != -1) {
        FLEXPTE_TRY(in_table(decoded.initial, program_.constants.size(), what, "constant"));
        const size_t have = program_.constants[static_cast<size_t>(decoded.initial)].bytes.size();
        if (have != decoded.size_bytes) {
          return malformed(what + " has " + std::to_string(decoded.size_bytes) + " bytes and its initial value " +
                           std::to_string(have));
        }
      }
      program_.states.push_back(std::move(decoded));
    }
    return Status::ok();
  }

  Status storages() {
    for (size_t i = 0; i < length(payload_.storages()); ++i) {
      const payload::Storage& storage = *payload_.storages()->Get(static_cast<uint32_t>(i));
      const std::string what = numbered("storage", i);
      Storage decoded{static_cast<StorageKind>(storage.kind()), storage.index(), storage.offset_bytes(),
                      storage.size_bytes()};
      size_t room = 0;
      bool has_room = true;
      switch (storage.kind()) {
        case payload::StorageKind::Input:
          FLEXPTE_TRY(in_table(decoded.index, length(payload_.inputs()), what, "input"));
          has_room = false;
          break;
        case payload::StorageKind::Output:
          FLEXPTE_TRY(in_table(decoded.index, length(payload_.outputs()), what, "output"));
          has_room = false;
          break;
        case payload::StorageKind::Constant:
          FLEXPTE_TRY(in_table(decoded.index, program_.constants.size(), what, "constant"));
          room = program_.constants[static_cast<size_t>(decoded.index)].bytes.size();
          break;
        case payload::StorageKind::State:
          FLEXPTE_TRY(in_table(decoded.index, program_.states.size(), what, "state"));
          room = program_.states[static_cast<size_t>(decoded.index)].size_bytes;
          break;
        case payload::StorageKind::Arena:
          if (decoded.offset_bytes > program_.arena_size_bytes) {
            return malformed(what + " begins at byte " + std::to_string(decoded.offset_bytes) + " of an arena of " +
                             std::to_string(program_.arena_size_bytes));
          }
          room = program_.arena_size_bytes - decoded.offset_bytes;
          break;
        default:
          return malformed(what + " has an unknown kind");
      }
      if (has_room && decoded.size_bytes > room) {
        return malformed(what + " has " + std::to_string(decoded.size_bytes) + " bytes where there are " +
                         std::to_string(room));
      }
      program_.storages.push_back(decoded);
    }
    return Status::ok();
  }

  Status inputs_and_scalars() {
    const size_t num_values = length(payload_.values());
    for (size_t i = 0; i < length(payload_.inputs()); ++i) {
      const int32_t value = payload_.inputs()->Get(static_cast<uint32_t>(i));
      if (value != -1) FLEXPTE_TRY(in_table(value, num_values, numbered("input", i), "value"));
      program_.inputs.push_back(value);
    }
    for (size_t i = 0; i < length(payload_.scalars()); ++i) {
      const payload::Scalar& scalar = *payload_.scalars()->Get(static_cast<uint32_t>(i));
      const std::string what = numbered("scalar", i);
      switch (scalar.op()) {
        case payload::ScalarOp::Constant:
          break;
        case payload::ScalarOp::InputSize: {
          FLEXPTE_TRY(in_table(scalar.a(), program_.inputs.size(), what, "input"));
          const int32_t value = program_.inputs[static_cast<size_t>(scalar.a())];
          if (value == -1) return malformed(what + " is a size of an integer input");
          const size_t rank = length(payload_.values()->Get(static_cast<uint32_t>(value))->sizes());
          FLEXPTE_TRY(in_table(scalar.b(), rank, what, "dimension"));
          break;
        }
        case payload::ScalarOp::InputValue:
          FLEXPTE_TRY(in_table(scalar.a(), program_.inputs.size(), what, "input"));
          if (program_.inputs[static_cast<size_t>(scalar.a())] != -1) {
            return malformed(what + " is the value of a tensor input");
          }
          break;
        case payload::ScalarOp::Add:
        case payload::ScalarOp::Sub:
        case payload::ScalarOp::Mul:
        case payload::ScalarOp::FloorDiv:
        case payload::ScalarOp::Mod:
        case payload::ScalarOp::Min:
        case payload::ScalarOp::Max:
          FLEXPTE_TRY(in_table(scalar.a(), i, what, "earlier scalar"));
          FLEXPTE_TRY(in_table(scalar.b(), i, what, "earlier scalar"));
          break;
        default:
          return malformed(what + " has an unknown operation");
      }
      program_.scalars.push_back(
          {static_cast<ScalarOp>(scalar.op()), scalar.a(), scalar.b(), scalar.value(), scalar.upper_bound(), false});
    }
    return Status::ok();
  }

  Status values() {
    for (size_t i = 0; i < length(payload_.values()); ++i) {
      const payload::Value& value = *payload_.values()->Get(static_cast<uint32_t>(i));
      const std::string what = numbered("value", i);
      Value decoded;
      decoded.storage = value.storage();
      FLEXPTE_TRY(in_table(decoded.storage, program_.storages.size(), what, "storage"));
      if (!is_valid(value.dtype())) return malformed(what + " has an unknown dtype");
      FLEXPTE_TRY(sizes(value.sizes(), what, decoded.view));
      decoded.view.dtype = static_cast<DType>(value.dtype());
      if (length(value.strides()) != static_cast<size_t>(decoded.view.rank)) {
        return malformed(what + " has " + std::to_string(decoded.view.rank) + " sizes and " +
                         std::to_string(length(value.strides())) + " strides");
      }
      FLEXPTE_TRY(aligned(value.strides(), what));
      for (size_t d = 0; d < static_cast<size_t>(decoded.view.rank); ++d) {
        decoded.view.strides[d] = value.strides()->Get(static_cast<uint32_t>(d));
        FLEXPTE_TRY(extent(decoded.view.sizes[d], what));
        FLEXPTE_TRY(extent(decoded.view.strides[d], what));
      }
      decoded.offset = value.offset();
      FLEXPTE_TRY(extent(decoded.offset, what));
      program_.values.push_back(decoded);
      FLEXPTE_TRY(fits_storage(i));
    }
    return Status::ok();
  }

  // The value at its upper bounds lies in its storage. With an offset that depends on the shapes that
  // would refuse slices such as x[n:], whose size shrinks as the offset grows: there the check is left
  // to each call, which makes it for every value anyway.
  Status fits_storage(size_t number) {
    const Value& value = program_.values[number];
    const Storage& storage = program_.storages[static_cast<size_t>(value.storage)];
    const TensorView bound = program_.upper_bound(static_cast<int32_t>(number));
    const std::string what = numbered("value", number);
    int64_t elements = 1;
    int64_t last = 0;
    bool is_empty = false;
    for (int32_t d = 0; d < bound.rank; ++d) {
      int64_t span = 0;
      is_empty = is_empty || bound.size(d) == 0;
      if (__builtin_mul_overflow(elements, std::max<int64_t>(bound.size(d), 1), &elements) || elements > kMaxElements ||
          bound.stride(d) > kMaxElements ||
          __builtin_mul_overflow(std::max<int64_t>(bound.size(d), 1), bound.stride(d), &span) ||
          __builtin_add_overflow(last, bound.size(d) == 0 ? 0 : span - bound.stride(d), &last) || span > kMaxElements ||
          last > kMaxElements) {
        return malformed(what + " is too large");
      }
    }
    const int64_t offset =
        is_symbolic(value.offset) ? program_.scalars[scalar_of(value.offset)].upper_bound : value.offset;
    if (offset > kMaxElements) return malformed(what + " is too large");
    const auto element_bytes = static_cast<uint64_t>(element_size_bytes(bound.dtype));
    if (storage.kind == StorageKind::kArena && storage.offset_bytes % element_bytes != 0) {
      return malformed(what + " lies at byte " + std::to_string(storage.offset_bytes) +
                       " of the arena, which is not aligned for " + std::string(dtype_name(bound.dtype)));
    }
    if (is_symbolic(value.offset) || is_empty) return Status::ok();
    const uint64_t needed = static_cast<uint64_t>(offset + last + 1) * element_bytes;
    if (needed > storage.size_bytes) {
      return malformed(what + " reaches byte " + std::to_string(needed) + " of " +
                       numbered("storage", static_cast<size_t>(value.storage)) + ", which has " +
                       std::to_string(storage.size_bytes));
    }
    return Status::ok();
  }

  Status calls() {
    for (size_t i = 0; i < program_.inputs.size(); ++i) {
      const int32_t number = program_.inputs[i];
      if (number == -1) continue;
      const Value& value = program_.values[static_cast<size_t>(number)];
      const Storage& storage = program_.storages[static_cast<size_t>(value.storage)];
      if (storage.kind != StorageKind::kInput || storage.index != static_cast<int32_t>(i) || value.offset != 0) {
        return malformed(numbered("input", i) + " is " + numbered("value", static_cast<size_t>(number)) +
                         ", which does not lie at the start of its storage");
      }
    }
    for (size_t i = 0; i < length(payload_.outputs()); ++i) {
      const int32_t number = payload_.outputs()->Get(static_cast<uint32_t>(i));
      FLEXPTE_TRY(in_table(number, program_.values.size(), numbered("output", i), "value"));
      const Value& value = program_.values[static_cast<size_t>(number)];
      const Storage& storage = program_.storages[static_cast<size_t>(value.storage)];
      if (storage.kind == StorageKind::kOutput && (storage.index != static_cast<int32_t>(i) || value.offset != 0)) {
        return malformed(numbered("output", i) + " is " + numbered("value", static_cast<size_t>(number)) +
                         ", which does not lie at the start of its storage");
      }
      program_.outputs.push_back(number);
    }
    for (size_t i = 0; i < program_.storages.size(); ++i) {
      const Storage& storage = program_.storages[i];
      const auto index = static_cast<size_t>(storage.index);
      if (storage.kind == StorageKind::kInput && program_.inputs[index] == -1) {
        return malformed(numbered("storage", i) + " is that of an integer input");
      }
      if (storage.kind == StorageKind::kOutput &&
          program_.storage_kind(program_.outputs[index]) != StorageKind::kOutput) {
        return malformed(numbered("storage", i) + " is that of " + numbered("output", index) +
                         ", which lies elsewhere");
      }
    }
    return Status::ok();
  }

  // The verifier checks the alignment of scalars in tables, not that of the elements of vectors.
  static Status aligned(const flatbuffers::Vector<int64_t>* vector, const std::string& what) {
    if (vector == nullptr || reinterpret_cast<uintptr_t>(vector->Data()) % alignof(int64_t) == 0) return Status::ok();
    return malformed(what + " has sizes or strides that are not aligned");
  }

  static Status sizes(const flatbuffers::Vector<int64_t>* from, const std::string& what, TensorView& view) {
    if (length(from) > static_cast<size_t>(kMaxRank)) {
      return malformed(what + " has " + std::to_string(length(from)) + " dimensions, at most " +
                       std::to_string(kMaxRank) + " are supported");
    }
    FLEXPTE_TRY(aligned(from, what));
    view.rank = static_cast<int32_t>(length(from));
    for (size_t d = 0; d < length(from); ++d) view.sizes[d] = from->Get(static_cast<uint32_t>(d));
    return Status::ok();
  }

  Status extent(Sym sym, const std::string& what) {
    if (!is_symbolic(sym)) return Status::ok();
    const size_t scalar = scalar_of(sym);
    if (scalar >= program_.scalars.size()) {
      return malformed(what + " names " + numbered("scalar", scalar) + " of " +
                       std::to_string(program_.scalars.size()));
    }
    if (program_.scalars[scalar].upper_bound < 0) {
      return malformed(what + " has the size " + numbered("scalar", scalar) + ", whose upper bound is negative");
    }
    program_.scalars[scalar].is_extent = true;
    return Status::ok();
  }

  static Status in_table(int32_t number, size_t count, const std::string& what, const char* table) {
    if (number >= 0 && static_cast<size_t>(number) < count) return Status::ok();
    return malformed(what + " names " + table + " " + std::to_string(number) + " of " + std::to_string(count));
  }

  const payload::Payload& payload_;
  const NamedData& data_;
  BoundProgram& program_;
};

}  // namespace

Result<std::unique_ptr<BoundProgram>> decode_payload(std::span<const std::byte> bytes, const NamedData& data) {
  constexpr size_t kSmallest = 2 * sizeof(uint32_t);
  if (bytes.size() < kSmallest || std::memcmp(bytes.data() + sizeof(uint32_t), payload::PayloadIdentifier(),
                                              flatbuffers::FlatBufferBuilder::kFileIdentifierLength) != 0) {
    return malformed("not a payload of flexpte: the identifier " + std::string(payload::PayloadIdentifier()) +
                     " is missing");
  }
  const std::optional<uint32_t> version = peek_version(bytes);
  if (version.has_value() && *version > kVersion) {
    return Status(Code::kUnsupported, "the payload has format version " + std::to_string(*version) +
                                          ", this build reads up to " + std::to_string(kVersion) +
                                          ": update flexpte, or export again with this version");
  }
  // Fields are read in place: alignment inside the payload counts from its first byte.
  std::vector<std::max_align_t> aligned;
  if (reinterpret_cast<uintptr_t>(bytes.data()) % alignof(std::max_align_t) != 0) {
    aligned.resize(bytes.size() / sizeof(std::max_align_t) + 1);
    std::memcpy(aligned.data(), bytes.data(), bytes.size());
    bytes = std::as_bytes(std::span(aligned)).first(bytes.size());
  }
  flatbuffers::Verifier verifier(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  if (!payload::VerifyPayloadBuffer(verifier)) {
    return malformed("the payload is truncated or corrupt (" + std::to_string(bytes.size()) + " bytes)");
  }
  const payload::Payload& root = *payload::GetPayload(bytes.data());
  if (root.version() == 0) return malformed("the payload has no format version");
  auto program = std::make_unique<BoundProgram>();
  FLEXPTE_TRY(Decoder(root, data, *program).run());
  return program;
}

}  // namespace flexpte::bound
