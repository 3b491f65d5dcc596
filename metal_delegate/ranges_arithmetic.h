// Operations on ranges; private to ranges. Each result holds every value that the operation can give
// on values of its arguments, wrapping and rounding included.
#pragma once

#include <array>
#include <cstdint>
#include <limits>

#include "metal_delegate/ranges_box.h"

namespace flexpte::ranges {

inline int64_t type_min(DType type) {
  if (type == DType::kBool) return 0;
  return type == DType::kI32 ? std::numeric_limits<int32_t>::min() : std::numeric_limits<int64_t>::min();
}
inline int64_t type_max(DType type) {
  if (type == DType::kBool) return 1;
  return type == DType::kI32 ? std::numeric_limits<int32_t>::max() : std::numeric_limits<int64_t>::max();
}
inline bool fits(int64_t value, DType type) {
  return type_min(type) <= value && value <= type_max(type);
}

Range unknown(DType type);
Range interval(int64_t min, int64_t max);
Range point(int64_t value);
Range affine_point(int64_t value);
Range affine(const Box& box, int64_t q_coefficient, int64_t kv_coefficient, int64_t offset, DType type);
Range hull(const Range& a, const Range& b);

// The range of a node with arguments of type `type` (kWhere: of the values).
Range operation(const Node& node, DType type, const std::array<const Range*, 3>& args, const Box& box);

// The integer operations, shared with operation().
Range integer_operation(const Node& node, DType type, const std::array<const Range*, 3>& args, const Box& box);
// F32 arguments and result.
Range float_operation(const Node& node, const std::array<const Range*, 3>& args);

}  // namespace flexpte::ranges
