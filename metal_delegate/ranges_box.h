// Interval and affine evaluation of mask expressions over a box of queries and keys; private to ranges.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "metal_delegate/ranges_capture.h"
#include "runtime/kernels/expression.h"

namespace flexpte::ranges {

// A node that the mask depends on.
struct Node {
  ExprOp op = ExprOp::kConstant;
  DType type = DType::kBool;
  std::array<int32_t, kMaxRank> args{};
  int32_t num_args = 0;
  int32_t index = 0;
  DType round_to = DType::kF32;
  int64_t value_int = 0;
  double value_float = 0.0;
  bool uses_kv = false;

  int32_t arg(size_t i) const { return args[i]; }
};

// Larger expressions are not analysed: every tile is mixed.
inline constexpr size_t kMaxNodes = 192;

struct Box {
  int64_t batch = 0, head = 0;
  int64_t q_begin = 0, q_end = 0, kv_begin = 0, kv_end = 0;
};

// All that is known of a node over a box: every value it takes lies in [min, max] of its type (Bool: 0
// or 1), NaN aside. An affine one is exactly q_coefficient * q + kv_coefficient * kv + offset.
struct Range {
  int64_t min = 0, max = 0;                 // Bool, I32, I64
  double min_float = 0.0, max_float = 0.0;  // F32
  bool has_nan = false;
  bool wraps = false;  // arithmetic may have overflowed: no monotonicity
  bool affine = false;
  int64_t q_coefficient = 0, kv_coefficient = 0, offset = 0;

  bool is_point() const { return min == max; }
  bool contains(int64_t value) const { return min <= value && value <= max; }
};

struct Context {
  std::span<const Node> nodes;
  std::span<const CaptureSummary> captures;
  std::span<const int64_t> scalars;
};

// Room for one value per node that costs nothing until it is written.
template <class T>
class NodeArray {
 public:
  T& operator[](size_t i) { return reinterpret_cast<T*>(storage_)[i]; }
  const T& operator[](size_t i) const { return reinterpret_cast<const T*>(storage_)[i]; }

 private:
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);
  alignas(T) std::byte storage_[kMaxNodes * sizeof(T)];
};

using RangeArray = NodeArray<Range>;

// Fills ranges[0 .. end) of context.nodes over a box that is not empty.
void evaluate_box(const Context& context, const Box& box, size_t end, RangeArray& ranges);

// Where an index range of one dimension lands after wrapping.
struct WrappedIndex {
  int64_t begin = 0, end = 0;  // inside the dimension; may be empty
  bool outside = false;        // some values are outside
  bool straddles = false;      // both signs occur: [begin, end) covers both landings
};
WrappedIndex wrap_index(const Range& index, int64_t size);

}  // namespace flexpte::ranges
