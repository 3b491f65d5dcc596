// The delegate as a backend of the stock ExecuTorch runtime: the same payload, the same kernels, behind
// executorch::runtime::BackendInterface.
//
// The library is built without linking to ExecuTorch: the process that loads it must have the runtime's
// symbols in its global scope (python/flexpte/executorch.py sees to that). It asks for two of them only,
// register_backend and resize_tensor_impl, because builds of the runtime differ in what they export:
// hence no logging macros, no checking accessors and a destructor of our own for the interface.
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "metal_delegate/delegate.h"
#include "runtime/delegate.h"
#include "runtime/session.h"

namespace et = executorch::runtime;

namespace flexpte {
namespace {

et::Error report(const char* when, const Status& status) {
  std::fprintf(stderr, "flexpte: %s: %s: %s\n", when, std::string(code_name(status.code())).c_str(),
               status.message().c_str());
  switch (status.code()) {
    case Code::kOk:
      return et::Error::Ok;
    case Code::kInvalidArgument:
    case Code::kOutOfRange:
      return et::Error::InvalidArgument;
    case Code::kInvalidProgram:
      return et::Error::InvalidProgram;
    case Code::kUnsupported:
      return et::Error::DelegateInvalidCompatibility;
    case Code::kNotFound:
      return et::Error::NotFound;
    case Code::kOutOfMemory:
      return et::Error::MemoryAllocationFailed;
    case Code::kIo:
      return et::Error::AccessFailed;
    case Code::kUnavailable:
      return et::Error::InvalidState;
    case Code::kInternal:
      return et::Error::Internal;
  }
  return et::Error::Internal;
}

std::optional<DType> dtype_of(executorch::aten::ScalarType type) {
  using Type = executorch::aten::ScalarType;
  switch (type) {
    case Type::Bool:
      return DType::kBool;
    case Type::Byte:
      return DType::kU8;
    case Type::Char:
      return DType::kI8;
    case Type::Short:
      return DType::kI16;
    case Type::Int:
      return DType::kI32;
    case Type::Long:
      return DType::kI64;
    case Type::Half:
      return DType::kF16;
    case Type::BFloat16:
      return DType::kBF16;
    case Type::Float:
      return DType::kF32;
    case Type::Double:
      return DType::kF64;
    default:
      return std::nullopt;
  }
}

// Named data of the program that is being loaded; what was found is kept for as long as the handle lives.
class StockNamedData final : public NamedData {
 public:
  explicit StockNamedData(const et::NamedDataMap* map) : map_(map) {}

  Result<std::span<const std::byte>> find(std::string_view key) const override {
    if (const auto found = buffers_.find(key); found != buffers_.end()) return bytes_of(found->second);
    if (map_ == nullptr)
      return Status(Code::kNotFound, "the program has no named data, '" + std::string(key) + "' is needed");
    et::Result<et::FreeableBuffer> data = map_->get_data(key);
    if (!data.ok()) {
      return Status(Code::kNotFound, "named data '" + std::string(key) + "' cannot be loaded (ExecuTorch error " +
                                         std::to_string(static_cast<unsigned>(data.error())) + ")");
    }
    const auto kept = buffers_.emplace(std::string(key), std::move(data.get())).first;
    return bytes_of(kept->second);
  }

  // The map belongs to the program's loading; later lookups would dangle.
  void forget_map() { map_ = nullptr; }

 private:
  static Result<std::span<const std::byte>> bytes_of(const et::FreeableBuffer& buffer) {
    const et::Result<const void*> data = buffer.data_safe();
    if (!data.ok()) return Status(Code::kUnsupported, "named data does not lie in this process's memory");
    return std::span(static_cast<const std::byte*>(*data), buffer.size());
  }

  const et::NamedDataMap* map_;
  mutable std::map<std::string, et::FreeableBuffer, std::less<>> buffers_;
};

// What one loaded method keeps for one delegated region. The order is that of the lifetimes.
struct Handle {
  explicit Handle(const et::NamedDataMap* map) : data(map) {}
  StockNamedData data;
  SessionStates states;
  std::unique_ptr<LoadedDelegate> loaded;
  std::unique_ptr<DelegateInstance> instance;
  std::vector<DelegateArgument> arguments;
  std::vector<size_t> capacities_bytes;  // of the outputs' memory, by argument
};

Status read_argument(const et::EValue& value, size_t number, DelegateArgument& argument) {
  const std::string what = "argument " + std::to_string(number) + " of the delegate call ";
  if (value.isInt()) {
    argument.kind = DelegateArgument::Kind::kInt;
    argument.integer = value.payload.copyable_union.as_int;
    return Status::ok();
  }
  if (!value.isTensor()) return {Code::kInvalidArgument, what + "is neither a tensor nor an integer"};
  const executorch::aten::Tensor& tensor = value.payload.as_tensor;
  const std::optional<DType> dtype = dtype_of(tensor.scalar_type());
  if (!dtype) return {Code::kInvalidArgument, what + "has an unsupported dtype"};
  if (tensor.dim() > kMaxRank) {
    return {Code::kInvalidArgument, what + "has " + std::to_string(tensor.dim()) + " dimensions, at most " +
                                        std::to_string(kMaxRank) + " are supported"};
  }
  argument.kind = DelegateArgument::Kind::kTensor;
  argument.tensor.data = tensor.mutable_data_ptr();
  argument.tensor.dtype = *dtype;
  argument.tensor.rank = static_cast<int32_t>(tensor.dim());
  for (size_t d = 0; d < static_cast<size_t>(tensor.dim()); ++d) {
    argument.tensor.sizes[d] = tensor.sizes()[d];
    argument.tensor.strides[d] = tensor.strides()[d];
  }
  argument.capacity_bytes = tensor.nbytes();
  return Status::ok();
}

Status write_sizes(const et::EValue& value, const TensorView& view) {
  std::array<executorch::aten::SizesType, kMaxRank> sizes{};
  for (size_t d = 0; d < static_cast<size_t>(view.rank); ++d) {
    sizes[d] = static_cast<executorch::aten::SizesType>(view.sizes[d]);
  }
  const et::Error error = et::resize_tensor(value.payload.as_tensor, {sizes.data(), static_cast<size_t>(view.rank)});
  if (error != et::Error::Ok) {
    return {Code::kInternal, "ExecuTorch refuses the output shape " + shape_string(view)};
  }
  return Status::ok();
}

class Backend final : public et::BackendInterface {
 public:
  Backend() : delegate_(make_metal_delegate({})) {}

  bool is_available() const override { return true; }

  et::Result<et::DelegateHandle*> init(et::BackendInitContext& context, et::FreeableBuffer* processed,
                                       et::ArrayRef<et::CompileSpec>) const override {
    auto handle = std::make_unique<Handle>(context.get_named_data_map());
    const Status status = load(*handle, *processed);
    if (!status.is_ok()) return report("loading", status);
    return static_cast<et::DelegateHandle*>(handle.release());
  }

  et::Error execute(et::BackendExecutionContext&, et::DelegateHandle* opaque,
                    et::Span<et::EValue*> values) const override {
    const Status status = run(*static_cast<Handle*>(opaque), values);
    return status.is_ok() ? et::Error::Ok : report("running", status);
  }

  void destroy(et::DelegateHandle* opaque) const override { delete static_cast<Handle*>(opaque); }

 private:
  Status load(Handle& handle, const et::FreeableBuffer& processed) const {
    const et::Result<const void*> blob = processed.data_safe();
    if (!blob.ok()) return {Code::kUnsupported, "the payload does not lie in this process's memory"};
    FLEXPTE_ASSIGN(handle.loaded,
                   delegate_->load({static_cast<const std::byte*>(*blob), processed.size()}, handle.data));
    handle.data.forget_map();
    FLEXPTE_ASSIGN(handle.instance, handle.loaded->instantiate(handle.states));
    handle.arguments.resize(handle.loaded->num_inputs() + handle.loaded->num_outputs());
    return Status::ok();
  }

  static Status run(Handle& handle, et::Span<et::EValue*> values) {
    if (values.size() != handle.arguments.size()) {
      return {Code::kInvalidProgram, "the delegate call has " + std::to_string(values.size()) +
                                         " arguments, expected " + std::to_string(handle.arguments.size())};
    }
    const size_t num_inputs = handle.loaded->num_inputs();
    for (size_t i = 0; i < values.size(); ++i) FLEXPTE_TRY(read_argument(*values[i], i, handle.arguments[i]));
    // Before their first resize outputs have the shape that their memory was planned for.
    handle.capacities_bytes.resize(values.size(), 0);
    for (size_t i = num_inputs; i < values.size(); ++i) {
      size_t& capacity = handle.capacities_bytes[i];
      capacity = std::max(capacity, handle.arguments[i].capacity_bytes);
      handle.arguments[i].capacity_bytes = capacity;
    }
    const std::span all(handle.arguments);
    FLEXPTE_TRY(handle.instance->execute(all.first(num_inputs), all.subspan(num_inputs)));
    for (size_t i = num_inputs; i < values.size(); ++i) {
      FLEXPTE_TRY(write_sizes(*values[i], handle.arguments[i].tensor));
    }
    return Status::ok();
  }

  std::unique_ptr<Delegate> delegate_;
};

// Registered when the library is loaded; lives as long as the process.
[[maybe_unused]] const et::Error registered = [] {
  static Backend backend;
  static const std::string name(make_metal_delegate({})->name());
  return et::register_backend({name.c_str(), &backend});
}();

}  // namespace
}  // namespace flexpte

namespace executorch::ET_RUNTIME_NAMESPACE {
BackendInterface::~BackendInterface() = default;
}  // namespace executorch::ET_RUNTIME_NAMESPACE
