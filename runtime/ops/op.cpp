#include "runtime/ops/op.h"

#include <algorithm>

namespace flexpte {
namespace {

Status bad(std::string message) {
  return {Code::kInvalidProgram, std::move(message)};
}

}  // namespace

std::string sizes_string(Sizes sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

Status Frame::resize(int32_t id, Sizes sizes) const {
  Value& value = (*this)[id];
  TensorView& view = value.tensor;
  if (!value.writable) return bad("an output is a constant or an input that lies in the caller's memory");
  if (sizes.size() != static_cast<size_t>(view.rank)) {
    return invalid("the output has sizes " + sizes_string(sizes) + ", the file expects rank " +
                   std::to_string(view.rank));
  }
  if (std::equal(sizes.begin(), sizes.end(), view.sizes.begin())) return Status::ok();
  if (!value.dynamic) {
    return invalid("the output has sizes " + sizes_string(sizes) + ", the file says " + shape_string(view));
  }
  auto room = static_cast<int64_t>(value.capacity_bytes) / element_size_bytes(view.dtype);
  bool fits = true;
  bool empty = false;
  for (const int64_t size : sizes) {
    fits = fits && size >= 0;
    empty = empty || size == 0;
    if (size > 0) room /= size;
  }
  if (!fits || (!empty && room == 0)) {
    return invalid("the output has sizes " + sizes_string(sizes) + ", more than the " +
                   std::to_string(value.capacity_bytes) + " bytes that the file plans for it");
  }
  std::copy(sizes.begin(), sizes.end(), view.sizes.begin());
  set_dense_strides(view, value.dim_order);
  return Status::ok();
}

Status Binder::expect_args(size_t at_least) const {
  if (args_.size() >= at_least) return Status::ok();
  return bad("has " + std::to_string(args_.size()) + " arguments, needs " + std::to_string(at_least));
}

Result<int32_t> Binder::of_kind(size_t arg, ValueKind kind) const {
  FLEXPTE_TRY(expect_args(arg + 1));
  const int32_t id = args_[arg];
  if (info(id).initial.kind != kind) {
    return bad("argument " + std::to_string(arg) + " is of kind " + std::string(kind_name(info(id).initial.kind)) +
               ", expected " + std::string(kind_name(kind)));
  }
  return id;
}

bool Binder::is_none(size_t arg) const {
  return arg < args_.size() && info(args_[arg]).initial.kind == ValueKind::kNone;
}

Result<int32_t> Binder::tensor(size_t arg) const {
  return of_kind(arg, ValueKind::kTensor);
}

Result<int32_t> Binder::out(size_t arg) const {
  FLEXPTE_ASSIGN(const int32_t id, tensor(arg));
  if (info(id).storage == Storage::kConstant) {
    return bad("argument " + std::to_string(arg) + " is an output, but a constant of the file");
  }
  return id;
}

Result<int32_t> Binder::optional_tensor(size_t arg) const {
  return is_none(arg) ? Result<int32_t>(-1) : tensor(arg);
}

Result<Scalar> Binder::scalar(size_t arg) const {
  FLEXPTE_TRY(expect_args(arg + 1));
  const int32_t id = args_[arg];
  const ValueInfo& value = info(id);
  Scalar scalar;
  scalar.id = id;
  scalar.is_fixed = !value.written;
  scalar.is_floating = value.initial.kind == ValueKind::kDouble;
  scalar.is_bool = value.initial.kind == ValueKind::kBool;
  if (!scalar.is_floating && !scalar.is_bool && value.initial.kind != ValueKind::kInt) {
    return bad("argument " + std::to_string(arg) + " is of kind " + std::string(kind_name(value.initial.kind)) +
               ", expected a number");
  }
  scalar.integer = value.initial.integer;
  scalar.real = scalar.is_floating ? value.initial.real : static_cast<double>(value.initial.integer);
  return scalar;
}

Result<int32_t> Binder::integer(size_t arg) const {
  FLEXPTE_TRY(expect_args(arg + 1));
  if (info(args_[arg]).initial.kind == ValueKind::kBool) return args_[arg];
  return of_kind(arg, ValueKind::kInt);
}

Result<int32_t> Binder::optional_integer(size_t arg) const {
  return is_none(arg) ? Result<int32_t>(-1) : integer(arg);
}

Result<int32_t> Binder::scalar_out(size_t arg) const {
  FLEXPTE_ASSIGN(const Scalar number, scalar(arg));
  return number.id;
}

Result<int64_t> Binder::fixed_integer(size_t arg) const {
  FLEXPTE_ASSIGN(const int32_t id, integer(arg));
  if (info(id).written) return bad("argument " + std::to_string(arg) + " must be fixed, but is computed");
  return info(id).initial.integer;
}

Result<double> Binder::fixed_real(size_t arg) const {
  FLEXPTE_ASSIGN(const Scalar number, scalar(arg));
  if (!number.is_fixed) return bad("argument " + std::to_string(arg) + " must be fixed, but is computed");
  return number.real;
}

Result<bool> Binder::fixed_bool(size_t arg) const {
  FLEXPTE_ASSIGN(const int64_t number, fixed_integer(arg));
  return number != 0;
}

Result<std::string_view> Binder::optional_text(size_t arg) const {
  if (is_none(arg)) return std::string_view();
  FLEXPTE_ASSIGN(const int32_t id, of_kind(arg, ValueKind::kString));
  return info(id).text;
}

Result<std::vector<int32_t>> Binder::integers(size_t arg) const {
  FLEXPTE_ASSIGN(const int32_t id, of_kind(arg, ValueKind::kIntList));
  if (info(id).items.size() > kMaxRank) {
    return Status(Code::kUnsupported, "argument " + std::to_string(arg) + " lists " +
                                          std::to_string(info(id).items.size()) + " dimensions, at most " +
                                          std::to_string(kMaxRank) + " are supported");
  }
  return info(id).items;
}

Result<std::vector<int64_t>> Binder::fixed_integers(size_t arg) const {
  std::vector<int64_t> numbers;
  if (is_none(arg)) return numbers;
  FLEXPTE_ASSIGN(const std::vector<int32_t> ids, integers(arg));
  for (const int32_t id : ids) {
    if (info(id).written) return bad("argument " + std::to_string(arg) + " must be fixed, but is computed");
    numbers.push_back(info(id).initial.integer);
  }
  return numbers;
}

Result<std::vector<int32_t>> Binder::tensors(size_t arg) const {
  FLEXPTE_ASSIGN(const int32_t id, of_kind(arg, ValueKind::kTensorList));
  if (info(id).items.empty()) return bad("argument " + std::to_string(arg) + " is an empty tensor list");
  return info(id).items;
}

Result<std::vector<int32_t>> Binder::optional_tensors(size_t arg) const {
  FLEXPTE_TRY(expect_args(arg + 1));
  const ValueInfo& list = info(args_[arg]);
  if (list.initial.kind != ValueKind::kTensorList && list.initial.kind != ValueKind::kOptionalTensorList) {
    return bad("argument " + std::to_string(arg) + " is of kind " + std::string(kind_name(list.initial.kind)) +
               ", expected a tensor list");
  }
  return list.items;
}

Result<int32_t> Binder::wrap_dim(int64_t dim, int32_t rank) const {
  const int64_t bound = std::max(rank, 1);
  if (dim < -bound || dim >= bound) {
    return bad("dimension " + std::to_string(dim) + " of a tensor of rank " + std::to_string(rank));
  }
  return static_cast<int32_t>(dim < 0 ? dim + bound : dim);
}

Status Binder::expect_dtype(int32_t id, DType dtype, std::string_view what) const {
  if (this->dtype(id) == dtype) return Status::ok();
  return {Code::kUnsupported, std::string(what) + " is " + std::string(dtype_name(this->dtype(id))) + ", expected " +
                                  std::string(dtype_name(dtype))};
}

Status Binder::expect_same_dtype(int32_t a, int32_t b) const {
  if (dtype(a) == dtype(b)) return Status::ok();
  return bad("the tensors are " + std::string(dtype_name(dtype(a))) + " and " + std::string(dtype_name(dtype(b))) +
             ", expected one dtype");
}

Status Binder::expect_floating(int32_t id, std::string_view what) const {
  const DType type = dtype(id);
  if (type == DType::kF32 || type == DType::kF16 || type == DType::kBF16) return Status::ok();
  return {Code::kUnsupported,
          std::string(what) + " is " + std::string(dtype_name(type)) + "; float32, float16 and bfloat16 are supported"};
}

Status Binder::expect_index(int32_t id) const {
  if (dtype(id) == DType::kI64 || dtype(id) == DType::kI32) return Status::ok();
  return {Code::kUnsupported, "an index is " + std::string(dtype_name(dtype(id))) + "; int64 and int32 are supported"};
}

Status Binder::expect_rank(int32_t id, int32_t rank, std::string_view what) const {
  if (this->rank(id) == rank) return Status::ok();
  return bad(std::string(what) + " has rank " + std::to_string(this->rank(id)) + ", expected " + std::to_string(rank));
}

bool broadcast(SizeList& joined, Sizes sizes) {
  const auto rank = static_cast<int32_t>(sizes.size());
  if (rank > joined.rank) {
    const int32_t shift = rank - joined.rank;
    for (int32_t i = joined.rank; i-- > 0;) joined[i + shift] = joined[i];
    for (int32_t i = 0; i < shift; ++i) joined[i] = 1;
    joined.rank = rank;
  }
  for (int32_t i = 0; i < rank; ++i) {
    int64_t& size = joined[joined.rank - rank + i];
    const int64_t other = sizes[static_cast<size_t>(i)];
    if (size == other || other == 1) continue;
    if (size != 1) return false;
    size = other;
  }
  return true;
}

Result<TensorView> expand(const TensorView& view, Sizes sizes) {
  TensorView result = view;
  const auto rank = static_cast<int32_t>(sizes.size());
  const int32_t shift = rank - view.rank;
  bool fits = shift >= 0 && rank <= kMaxRank;
  result.rank = rank;
  for (int32_t i = 0; fits && i < rank; ++i) {
    const auto at = static_cast<size_t>(i);
    const int64_t own = i < shift ? 1 : view.size(i - shift);
    result.sizes[at] = sizes[at];
    result.strides[at] = own == 1 && sizes[at] != 1 ? 0 : (i < shift ? 0 : view.stride(i - shift));
    fits = own == sizes[at] || own == 1;
  }
  if (!fits) return invalid("sizes " + shape_string(view) + " do not broadcast to " + sizes_string(sizes));
  return result;
}

TensorView permuted(const TensorView& view, std::span<const int32_t> dims) {
  TensorView result = view;
  for (size_t i = 0; i < dims.size(); ++i) {
    result.sizes[i] = view.size(dims[i]);
    result.strides[i] = view.stride(dims[i]);
  }
  return result;
}

void* element_at(const TensorView& view, int64_t offset_elements) {
  if (view.data == nullptr) return nullptr;
  return view.as<std::byte>() + offset_elements * element_size_bytes(view.dtype);
}

TensorView select(const TensorView& view, int32_t dim, int64_t index) {
  TensorView result = view;
  result.data = element_at(view, index * view.stride(dim));
  result.rank = view.rank - 1;
  for (int32_t i = dim; i < result.rank; ++i) {
    result.sizes[static_cast<size_t>(i)] = view.size(i + 1);
    result.strides[static_cast<size_t>(i)] = view.stride(i + 1);
  }
  return result;
}

TensorView narrowed(const TensorView& view, int32_t dim, int64_t start, int64_t length, int64_t step) {
  TensorView result = view;
  if (length > 0) result.data = element_at(view, start * view.stride(dim));
  result.sizes[static_cast<size_t>(dim)] = length;
  result.strides[static_cast<size_t>(dim)] = view.stride(dim) * step;
  return result;
}

Result<TensorView> reshaped(const TensorView& view, Sizes sizes) {
  TensorView result = view;
  result.rank = static_cast<int32_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), result.sizes.begin());
  if (!view.is_contiguous()) {
    return Status(Code::kUnsupported, "a view of a tensor that is not contiguous, " + shape_string(view));
  }
  if (result.num_elements() != view.num_elements()) {
    return invalid("sizes " + shape_string(view) + " do not hold as many elements as " + sizes_string(sizes));
  }
  constexpr DimOrder kIdentity = {0, 1, 2, 3, 4, 5, 6, 7};
  set_dense_strides(result, kIdentity);
  return result;
}

Status infer_size(SizeList& sizes, int64_t num_elements) {
  int32_t inferred = -1;
  int64_t known = 1;
  bool fits = true;
  for (int32_t i = 0; fits && i < sizes.rank; ++i) {
    if (sizes[i] == -1 && inferred < 0) {
      inferred = i;
    } else {
      fits = sizes[i] >= 0 && !__builtin_mul_overflow(known, sizes[i], &known);
    }
  }
  if (fits && inferred >= 0) {
    fits = known > 0 && num_elements % known == 0;
    if (fits) sizes[inferred] = num_elements / known;
  } else {
    fits = fits && known == num_elements;
  }
  if (fits) return Status::ok();
  return invalid("sizes " + sizes_string(sizes) + " do not fit " + std::to_string(num_elements) + " elements");
}

}  // namespace flexpte
