#include "metal_delegate/ranges_box.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "metal_delegate/ranges_arithmetic.h"
#include "runtime/kernels/scalar.h"

namespace flexpte::ranges {
namespace {

// Elements of a capture's rows read for one answer.
constexpr int64_t kMaxRows = 256;

Range from_capture(const ValueRange& values, DType type) {
  if (type == DType::kF32) {
    Range r;
    if (values.is_float) {
      // Rounding to nearest is monotone.
      r.min_float = static_cast<float>(values.min_float);
      r.max_float = static_cast<float>(values.max_float);
      r.has_nan = values.has_nan;
      return values.has_nan ? unknown(type) : r;
    }
    r.min_float = static_cast<float>(values.min_int);
    r.max_float = static_cast<float>(values.max_int);
    return r;
  }
  int64_t low = values.min_int, high = values.max_int;
  if (values.is_float) {
    if (values.has_nan) return unknown(type);
    if (type == DType::kBool) {
      if (values.min_float > 0.0 || values.max_float < 0.0) return point(1);
      return values.min_float == 0.0 && values.max_float == 0.0 ? point(0) : interval(0, 1);
    }
    low = type == DType::kI32 ? float_to_int<int32_t>(values.min_float) : float_to_int<int64_t>(values.min_float);
    high = type == DType::kI32 ? float_to_int<int32_t>(values.max_float) : float_to_int<int64_t>(values.max_float);
  }
  if (type == DType::kBool) {
    if (low > 0 || high < 0) return point(1);
    return low == 0 && high == 0 ? point(0) : interval(0, 1);
  }
  return fits(low, type) && fits(high, type) ? interval(low, high) : unknown(type);
}

Range load(const Context& context, const Node& node, const RangeArray& ranges) {
  const CaptureSummary& capture = context.captures[static_cast<size_t>(node.index)];
  const TensorView& view = capture.view();
  std::array<WrappedIndex, kMaxRank> at;
  int64_t num_rows = 1;
  for (int32_t d = 0; d < view.rank; ++d) {
    WrappedIndex& index = at[static_cast<size_t>(d)];
    index = wrap_index(ranges[static_cast<size_t>(node.arg(static_cast<size_t>(d)))], view.size(d));
    // An error where it counts: nothing may be proved from it, so that somebody looks.
    if (index.outside || index.begin >= index.end) return unknown(node.type);
    if (d + 1 < view.rank)
      num_rows = std::min(num_rows * std::min(index.end - index.begin, kMaxRows + 1), kMaxRows + 1);
  }
  if (num_rows > kMaxRows) return unknown(node.type);
  const int32_t last = view.rank - 1;
  std::array<int64_t, kMaxRank> row_at{};
  for (int32_t d = 0; d < last; ++d) row_at[static_cast<size_t>(d)] = at[static_cast<size_t>(d)].begin;
  Range result;
  for (int64_t n = 0; n < num_rows; ++n) {
    int64_t row = 0, offset = 0;
    for (int32_t d = 0; d < last; ++d) {
      row = row * view.size(d) + row_at[static_cast<size_t>(d)];
      offset += row_at[static_cast<size_t>(d)] * view.stride(d);
    }
    ValueRange values;
    const int64_t begin = view.rank == 0 ? 0 : at[static_cast<size_t>(last)].begin;
    const int64_t end = view.rank == 0 ? 1 : at[static_cast<size_t>(last)].end;
    if (!capture.range(row, offset, begin, end, &values)) return unknown(node.type);
    const Range part = from_capture(values, node.type);
    result = n == 0 ? part : hull(result, part);
    for (int32_t d = last - 1; d >= 0; --d) {
      int64_t& position = row_at[static_cast<size_t>(d)];
      if (++position < at[static_cast<size_t>(d)].end) break;
      position = at[static_cast<size_t>(d)].begin;
    }
  }
  return result;
}

Range constant(const Node& node) {
  if (node.type != DType::kF32) {
    if (node.type == DType::kBool) return affine_point(node.value_int != 0 ? 1 : 0);
    return affine_point(node.type == DType::kI32 ? static_cast<int32_t>(node.value_int) : node.value_int);
  }
  const float value = static_cast<float>(node.value_float);
  Range r;
  r.min_float = r.max_float = value;
  return std::isnan(value) ? unknown(DType::kF32) : r;
}

Range index_leaf(int64_t value, DType type) {
  return affine_point(type == DType::kI32 ? static_cast<int32_t>(value) : value);
}

}  // namespace

WrappedIndex wrap_index(const Range& index, int64_t size) {
  WrappedIndex result;
  result.outside = index.min < -size || index.max >= size;
  const int64_t low = std::max(index.min, -size);
  const int64_t high = std::min(index.max, size - 1);
  if (low > high) return result;
  if (low >= 0) {
    result.begin = low;
    result.end = high + 1;
  } else if (high < 0) {
    result.begin = low + size;
    result.end = high + size + 1;
  } else {
    // [0, high] and [low + size, size).
    result.begin = 0;
    result.end = size;
    result.straddles = true;
  }
  return result;
}

void evaluate_box(const Context& context, const Box& box, size_t end, RangeArray& ranges) {
  for (size_t i = 0; i < end; ++i) {
    const Node& node = context.nodes[i];
    switch (node.op) {
      case ExprOp::kConstant:
        ranges[i] = constant(node);
        break;
      case ExprOp::kBatch:
        ranges[i] = index_leaf(box.batch, node.type);
        break;
      case ExprOp::kHead:
        ranges[i] = index_leaf(box.head, node.type);
        break;
      case ExprOp::kScalar:
        ranges[i] = index_leaf(context.scalars[static_cast<size_t>(node.index)], node.type);
        break;
      case ExprOp::kQIdx:
        ranges[i] = affine(box, 1, 0, 0, node.type);
        break;
      case ExprOp::kKvIdx:
        ranges[i] = affine(box, 0, 1, 0, node.type);
        break;
      case ExprOp::kLoad:
        ranges[i] = load(context, node, ranges);
        break;
      default: {
        std::array<const Range*, 3> args{};
        for (size_t a = 0; a < static_cast<size_t>(node.num_args); ++a) {
          args[a] = &ranges[static_cast<size_t>(node.arg(a))];
        }
        const DType type = context.nodes[static_cast<size_t>(node.arg(static_cast<size_t>(node.num_args - 1)))].type;
        ranges[i] = operation(node, type, args, box);
        break;
      }
    }
  }
}

}  // namespace flexpte::ranges
