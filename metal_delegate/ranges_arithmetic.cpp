#include "metal_delegate/ranges_arithmetic.h"

#include <algorithm>
#include <cmath>

#include "runtime/kernels/scalar.h"

namespace flexpte::ranges {

Range unknown(DType type) {
  Range r;
  if (type == DType::kF32) {
    r.min_float = -std::numeric_limits<double>::infinity();
    r.max_float = -r.min_float;
    r.has_nan = true;
  } else {
    r.min = type_min(type);
    r.max = type_max(type);
  }
  r.wraps = true;
  return r;
}

Range interval(int64_t min, int64_t max) {
  Range r;
  r.min = min;
  r.max = max;
  return r;
}

Range point(int64_t value) {
  return interval(value, value);
}

Range affine_point(int64_t value) {
  Range r = point(value);
  r.affine = true;
  r.offset = value;
  return r;
}

Range affine(const Box& box, int64_t q_coefficient, int64_t kv_coefficient, int64_t offset, DType type) {
  const auto corner = [&](int64_t q, int64_t kv) {
    return static_cast<__int128>(q_coefficient) * q + static_cast<__int128>(kv_coefficient) * kv + offset;
  };
  const int64_t q_last = box.q_end - 1, kv_last = box.kv_end - 1;
  const __int128 min = corner(q_coefficient >= 0 ? box.q_begin : q_last, kv_coefficient >= 0 ? box.kv_begin : kv_last);
  const __int128 max = corner(q_coefficient >= 0 ? q_last : box.q_begin, kv_coefficient >= 0 ? kv_last : box.kv_begin);
  if (min < type_min(type) || max > type_max(type)) return unknown(type);
  Range r = interval(static_cast<int64_t>(min), static_cast<int64_t>(max));
  r.affine = true;
  r.q_coefficient = q_coefficient;
  r.kv_coefficient = kv_coefficient;
  r.offset = offset;
  return r;
}

Range hull(const Range& a, const Range& b) {
  Range r;
  r.min = std::min(a.min, b.min);
  r.max = std::max(a.max, b.max);
  r.min_float = std::min(a.min_float, b.min_float);
  r.max_float = std::max(a.max_float, b.max_float);
  r.has_nan = a.has_nan || b.has_nan;
  r.wraps = a.wraps || b.wraps;
  return r;
}

namespace {

// Bool ranges: what is known of a truth value.
Range truth(bool can_be_false, bool can_be_true) {
  return interval(can_be_false ? 0 : 1, can_be_true ? 1 : 0);
}

Range nonzero(const Range& r, DType type) {
  if (type == DType::kF32) {
    const bool zero_inside = r.min_float <= 0.0 && r.max_float >= 0.0;
    const bool only_zero = r.min_float == 0.0 && r.max_float == 0.0 && !r.has_nan;
    return truth(zero_inside, !only_zero);
  }
  return truth(r.contains(0), !(r.min == 0 && r.max == 0));
}

// Which of <, ==, > can hold between values of a and b, and whether they can be unordered.
struct Order {
  bool less = false, equal = false, greater = false, unordered = false;
};

Order order(const Range& a, const Range& b, DType type, const Box& box) {
  Order o;
  if (type == DType::kF32) {
    o.less = a.min_float < b.max_float;
    o.greater = a.max_float > b.min_float;
    o.equal = a.min_float <= b.max_float && b.min_float <= a.max_float;
    o.unordered = a.has_nan || b.has_nan;
    return o;
  }
  o.less = a.min < b.max;
  o.greater = a.max > b.min;
  o.equal = a.min <= b.max && b.min <= a.max;
  int64_t q = 0, kv = 0, offset = 0;
  if (a.affine && b.affine && !__builtin_sub_overflow(a.q_coefficient, b.q_coefficient, &q) &&
      !__builtin_sub_overflow(a.kv_coefficient, b.kv_coefficient, &kv) &&
      !__builtin_sub_overflow(a.offset, b.offset, &offset)) {
    const Range difference = affine(box, q, kv, offset, DType::kI64);
    if (difference.affine) {
      o.less = difference.min < 0;
      o.greater = difference.max > 0;
      o.equal = difference.contains(0);
    }
  }
  return o;
}

Range comparison(ExprOp op, const Range& a, const Range& b, DType type, const Box& box) {
  const Order o = order(a, b, type, box);
  switch (op) {
    case ExprOp::kEq:
      return truth(o.less || o.greater || o.unordered, o.equal);
    case ExprOp::kNe:
      return truth(o.equal, o.less || o.greater || o.unordered);
    case ExprOp::kLt:
      return truth(o.equal || o.greater || o.unordered, o.less);
    case ExprOp::kLe:
      return truth(o.greater || o.unordered, o.less || o.equal);
    case ExprOp::kGt:
      return truth(o.less || o.equal || o.unordered, o.greater);
    default:
      return truth(o.less || o.unordered, o.equal || o.greater);
  }
}

Range logic(ExprOp op, const Range& a, const Range& b) {
  switch (op) {
    case ExprOp::kLogicalAnd:
      return interval(a.min & b.min, a.max & b.max);
    case ExprOp::kLogicalOr:
      return interval(a.min | b.min, a.max | b.max);
    default:
      if (!a.is_point() || !b.is_point()) return interval(0, 1);
      return point(a.min ^ b.min);
  }
}

// What arithmetic on Bool means.
ExprOp bool_logic(ExprOp op) {
  switch (op) {
    case ExprOp::kBitAnd:
    case ExprOp::kMul:
    case ExprOp::kMin:
      return ExprOp::kLogicalAnd;
    case ExprOp::kBitOr:
    case ExprOp::kAdd:
    case ExprOp::kMax:
      return ExprOp::kLogicalOr;
    case ExprOp::kBitXor:
      return ExprOp::kLogicalXor;
    case ExprOp::kBitNot:
      return ExprOp::kLogicalNot;
    default:
      return op;
  }
}

Range cast(const Range& r, DType from, DType to) {
  if (from == to) return r;
  if (to == DType::kBool) return nonzero(r, from);
  if (to == DType::kF32) {
    Range result;
    result.min_float = static_cast<float>(r.min);
    result.max_float = static_cast<float>(r.max);
    return result;
  }
  if (from == DType::kF32) {
    Range result;
    if (to == DType::kI32) {
      result = interval(float_to_int<int32_t>(r.min_float), float_to_int<int32_t>(r.max_float));
    } else {
      result = interval(float_to_int<int64_t>(r.min_float), float_to_int<int64_t>(r.max_float));
    }
    return r.has_nan ? hull(result, point(0)) : result;
  }
  // Between integers: what fits is unchanged.
  return fits(r.min, to) && fits(r.max, to) ? r : unknown(to);
}

Range select(const Range& condition, const Range& a, const Range& b) {
  if (condition.is_point()) return condition.min != 0 ? a : b;
  return hull(a, b);
}

}  // namespace

Range operation(const Node& node, DType type, const std::array<const Range*, 3>& args, const Box& box) {
  if (node.op == ExprOp::kCast) return cast(*args[0], type, node.type);
  if (node.op == ExprOp::kWhere) return select(*args[0], *args[1], *args[2]);
  const ExprOp op = type == DType::kBool ? bool_logic(node.op) : node.op;
  if (op >= ExprOp::kEq && op <= ExprOp::kGe) return comparison(op, *args[0], *args[1], type, box);
  if (op >= ExprOp::kLogicalAnd && op <= ExprOp::kLogicalXor) {
    return logic(op, nonzero(*args[0], type), nonzero(*args[1], type));
  }
  if (op == ExprOp::kLogicalNot) {
    const Range r = nonzero(*args[0], type);
    return interval(1 - r.max, 1 - r.min);
  }
  if (op == ExprOp::kIsNan || op == ExprOp::kIsInf) {
    if (type != DType::kF32) return point(0);
    if (op == ExprOp::kIsNan) return truth(true, args[0]->has_nan);
    return truth(true, std::isinf(args[0]->min_float) || std::isinf(args[0]->max_float));
  }
  if (node.type == DType::kF32) return float_operation(node, args);
  if (node.type == DType::kBool) return interval(0, 1);
  return integer_operation(node, type, args, box);
}

Range float_operation(const Node& node, const std::array<const Range*, 3>& args) {
  const Range& a = *args[0];
  const bool unbounded = std::isinf(a.min_float) || std::isinf(a.max_float);
  const auto floats = [&](double low, double high, bool has_nan) {
    if (std::isnan(low) || std::isnan(high)) return unknown(DType::kF32);
    Range r;
    // F32 rounding is monotone, so that bounds stay bounds.
    r.min_float = static_cast<float>(low);
    r.max_float = static_cast<float>(high);
    r.has_nan = has_nan;
    return r;
  };
  const auto monotone = [&](auto f) { return floats(f(a.min_float), f(a.max_float), a.has_nan); };
  switch (node.op) {
    case ExprOp::kNeg:
      return floats(-a.max_float, -a.min_float, a.has_nan);
    case ExprOp::kFloor:
      return monotone([](double x) { return std::floor(x); });
    case ExprOp::kCeil:
      return monotone([](double x) { return std::ceil(x); });
    case ExprOp::kTrunc:
      return monotone([](double x) { return std::trunc(x); });
    case ExprOp::kRound:
      return monotone([](double x) { return std::nearbyint(x); });
    case ExprOp::kRelu:
      return monotone([](double x) { return std::max(x, 0.0); });
    case ExprOp::kAbs: {
      const double high = std::max(std::abs(a.min_float), std::abs(a.max_float));
      const bool crosses = a.min_float <= 0.0 && a.max_float >= 0.0;
      return floats(crosses ? 0.0 : std::min(std::abs(a.min_float), std::abs(a.max_float)), high, a.has_nan);
    }
    case ExprOp::kAdd:
    case ExprOp::kSub:
    case ExprOp::kMul:
    case ExprOp::kMin:
    case ExprOp::kMax:
      break;
    default:
      return unknown(DType::kF32);
  }
  const Range& b = *args[1];
  const bool has_nan = a.has_nan || b.has_nan;
  if (node.op == ExprOp::kMin) {
    return floats(std::min(a.min_float, b.min_float), std::min(a.max_float, b.max_float), has_nan);
  }
  if (node.op == ExprOp::kMax) {
    return floats(std::max(a.min_float, b.min_float), std::max(a.max_float, b.max_float), has_nan);
  }
  // Infinities meet as inf - inf or 0 * inf.
  if (unbounded || std::isinf(b.min_float) || std::isinf(b.max_float)) return unknown(DType::kF32);
  if (node.op == ExprOp::kAdd) return floats(a.min_float + b.min_float, a.max_float + b.max_float, has_nan);
  if (node.op == ExprOp::kSub) return floats(a.min_float - b.max_float, a.max_float - b.min_float, has_nan);
  const auto [low, high] = std::minmax(
      {a.min_float * b.min_float, a.min_float * b.max_float, a.max_float * b.min_float, a.max_float * b.max_float});
  return floats(low, high, has_nan);
}

}  // namespace flexpte::ranges
