// Operators of the executor. An operator is bound once, when a program is loaded: its arguments'
// kinds, dtypes and fixed values are checked and a step is made. A step runs as often as its
// method does; it checks sizes, which may change from run to run, and allocates nothing.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/status.h"
#include "runtime/tensor.h"
#include "runtime/thread_pool.h"
#include "runtime/value.h"

namespace flexpte {

using Sizes = std::span<const int64_t>;

// What a step sees of its session.
struct Frame {
  std::span<Value> values;
  std::span<std::byte> workspace;  // 64-byte aligned
  const ThreadPool& pool;

  Value& operator[](int32_t id) const { return values[static_cast<size_t>(id)]; }
  const TensorView& tensor(int32_t id) const { return (*this)[id].tensor; }
  int64_t integer(int32_t id) const { return (*this)[id].integer; }

  // Makes a tensor ready to be written with these sizes. An error where it may not be written, where
  // the rank or a static size differs, or where its memory does not suffice.
  Status resize(int32_t id, Sizes sizes) const;
};

using Step = std::function<Status(const Frame&)>;

// A number that is fixed in the file, or a value read at each run.
struct Scalar {
  int32_t id = 0;
  bool is_fixed = true;
  bool is_floating = false;
  bool is_bool = false;
  int64_t integer = 0;  // when not floating
  double real = 0.0;    // always

  double read_real(const Frame& frame) const {
    if (is_fixed) return real;
    const Value& value = frame[id];
    return is_floating ? value.real : static_cast<double>(value.integer);
  }
  // Only of integers and bools.
  int64_t read_integer(const Frame& frame) const { return is_fixed ? integer : frame[id].integer; }
};

// The arguments of one call of an operator, while it is bound.
class Binder {
 public:
  Binder(std::span<ValueInfo> values, std::span<const int32_t> args, const ThreadPool& pool, size_t& workspace_bytes)
      : values_(values), args_(args), pool_(pool), workspace_bytes_(workspace_bytes) {}

  size_t num_args() const { return args_.size(); }
  Status expect_args(size_t at_least) const;
  int num_threads() const { return pool_.num_threads(); }

  // Values by argument number. Errors name the argument, what was expected and what came.
  Result<int32_t> tensor(size_t arg) const;
  Result<int32_t> out(size_t arg) const;              // a tensor that may be written
  Result<int32_t> optional_tensor(size_t arg) const;  // -1 for none
  Result<Scalar> scalar(size_t arg) const;
  Result<int32_t> integer(size_t arg) const;           // an int read at each run
  Result<int32_t> optional_integer(size_t arg) const;  // -1 for none
  Result<int32_t> scalar_out(size_t arg) const;        // an int, bool or float to be written
  Result<int64_t> fixed_integer(size_t arg) const;
  Result<double> fixed_real(size_t arg) const;
  Result<bool> fixed_bool(size_t arg) const;
  Result<std::string_view> optional_text(size_t arg) const;       // empty for none
  Result<std::vector<int32_t>> integers(size_t arg) const;        // ints read at each run
  Result<std::vector<int64_t>> fixed_integers(size_t arg) const;  // empty for none
  Result<std::vector<int32_t>> tensors(size_t arg) const;
  Result<std::vector<int32_t>> optional_tensors(size_t arg) const;
  bool is_none(size_t arg) const;

  // The tensor with its upper-bound sizes; data only where it is a constant.
  const TensorView& upper(int32_t id) const { return info(id).initial.tensor; }
  DType dtype(int32_t id) const { return upper(id).dtype; }
  int32_t rank(int32_t id) const { return upper(id).rank; }
  const ValueInfo& info(int32_t id) const { return values_[static_cast<size_t>(id)]; }
  // For operators that become part of the plan instead of a step.
  ValueInfo& mutable_info(int32_t id) const { return values_[static_cast<size_t>(id)]; }

  // A dimension, counted from the end when negative.
  Result<int32_t> wrap_dim(int64_t dim, int32_t rank) const;
  Status expect_dtype(int32_t id, DType dtype, std::string_view what) const;
  Status expect_same_dtype(int32_t a, int32_t b) const;
  Status expect_floating(int32_t id, std::string_view what) const;  // F32, F16, BF16
  Status expect_index(int32_t id) const;                            // I32 or I64
  Status expect_rank(int32_t id, int32_t rank, std::string_view what) const;

  // Asks for scratch; the session has one area as large as the largest request.
  void workspace(size_t size_bytes) const { workspace_bytes_ = std::max(workspace_bytes_, size_bytes); }

 private:
  Result<int32_t> of_kind(size_t arg, ValueKind kind) const;

  std::span<ValueInfo> values_;
  std::span<const int32_t> args_;
  const ThreadPool& pool_;
  size_t& workspace_bytes_;
};

using BindOp = Result<Step> (*)(const Binder&);

struct OpEntry {
  std::string_view name;
  BindOp bind;
};

// Operators by concern; table.cpp names them all.
std::span<const OpEntry> elementwise_ops();
std::span<const OpEntry> elementwise_math_ops();
std::span<const OpEntry> linear_ops();
std::span<const OpEntry> norm_ops();
std::span<const OpEntry> reduce_ops();
std::span<const OpEntry> shape_ops();
std::span<const OpEntry> join_ops();
std::span<const OpEntry> index_ops();
std::span<const OpEntry> create_ops();
std::span<const OpEntry> scalar_ops();

// The operator called `name` ("aten::add.out"), or null.
BindOp find_op(std::string_view name);

// --- Helpers of steps.

inline Status invalid(std::string message) {
  return {Code::kInvalidArgument, std::move(message)};
}

inline Sizes sizes_of(const TensorView& view) {
  return {view.sizes.data(), static_cast<size_t>(view.rank)};
}
std::string sizes_string(Sizes sizes);

// Sizes under construction, without allocation.
struct SizeList {
  std::array<int64_t, kMaxRank> values{};
  int32_t rank = 0;

  void push(int64_t size) { values[static_cast<size_t>(rank++)] = size; }
  int64_t& operator[](int32_t i) { return values[static_cast<size_t>(i)]; }
  int64_t operator[](int32_t i) const { return values[static_cast<size_t>(i)]; }
  operator Sizes() const { return {values.data(), static_cast<size_t>(rank)}; }  // NOLINT
};

// Joins `sizes` into `joined` by broadcasting; false where they do not fit.
bool broadcast(SizeList& joined, Sizes sizes);
// The view as if it had `sizes`, repeated with stride 0; an error where it does not broadcast.
Result<TensorView> expand(const TensorView& view, Sizes sizes);
// View with dimensions in the order `dims`.
TensorView permuted(const TensorView& view, std::span<const int32_t> dims);
// View without dimension `dim`, at `index` of it.
TensorView select(const TensorView& view, int32_t dim, int64_t index);
// View of `length` elements of `dim` from `start` on, `step` apart.
TensorView narrowed(const TensorView& view, int32_t dim, int64_t start, int64_t length, int64_t step = 1);
// View of equal bytes with other sizes; an error where the element counts differ or it is not contiguous.
Result<TensorView> reshaped(const TensorView& view, Sizes sizes);
// Resolves one size of -1 in place; an error where the element count does not fit.
Status infer_size(SizeList& sizes, int64_t num_elements);
void* element_at(const TensorView& view, int64_t offset_elements);

}  // namespace flexpte
