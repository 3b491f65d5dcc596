// Integer operations on ranges.
#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "metal_delegate/ranges_arithmetic.h"
#include "runtime/kernels/expression_scalar.h"

namespace flexpte::ranges {
namespace {

using Wide = __int128;

Range clipped(Wide min, Wide max, DType type) {
  if (min < type_min(type) || max > type_max(type)) return unknown(type);
  return interval(static_cast<int64_t>(min), static_cast<int64_t>(max));
}

Range clipped(std::initializer_list<Wide> corners, DType type) {
  return clipped(std::min(corners), std::max(corners), type);
}

// The exact value on exact arguments.
template <class T>
T exact(ExprOp op, T a, T b) {
  switch (op) {
    case ExprOp::kAdd:
      return wrap_add(a, b);
    case ExprOp::kSub:
      return wrap_sub(a, b);
    case ExprOp::kMul:
      return wrap_mul(a, b);
    case ExprOp::kFloorDiv:
      return floor_div(a, b);
    case ExprOp::kRemainder:
      return floor_mod(a, b);
    case ExprOp::kFmod:
      return trunc_mod(a, b);
    case ExprOp::kTruncDiv:
      return trunc_div(a, b);
    case ExprOp::kPow:
      return int_pow(a, b);
    case ExprOp::kMin:
      return std::min(a, b);
    case ExprOp::kMax:
      return std::max(a, b);
    case ExprOp::kBitAnd:
      return a & b;
    case ExprOp::kBitOr:
      return a | b;
    case ExprOp::kBitXor:
      return a ^ b;
    case ExprOp::kShiftLeft:
      return shift_left(a, b);
    default:
      return shift_right(a, b);
  }
}

Range scaled(const Range& a, int64_t by, DType type, const Box& box) {
  int64_t q = 0, kv = 0, offset = 0;
  if (a.affine && !__builtin_mul_overflow(a.q_coefficient, by, &q) &&
      !__builtin_mul_overflow(a.kv_coefficient, by, &kv) && !__builtin_mul_overflow(a.offset, by, &offset)) {
    return affine(box, q, kv, offset, type);
  }
  return clipped({Wide{a.min} * by, Wide{a.max} * by}, type);
}

Range sum(const Range& a, const Range& b, bool subtract, DType type, const Box& box) {
  int64_t q = 0, kv = 0, offset = 0;
  if (a.affine && b.affine) {
    const bool overflows = subtract ? __builtin_sub_overflow(a.q_coefficient, b.q_coefficient, &q) ||
                                          __builtin_sub_overflow(a.kv_coefficient, b.kv_coefficient, &kv) ||
                                          __builtin_sub_overflow(a.offset, b.offset, &offset)
                                    : __builtin_add_overflow(a.q_coefficient, b.q_coefficient, &q) ||
                                          __builtin_add_overflow(a.kv_coefficient, b.kv_coefficient, &kv) ||
                                          __builtin_add_overflow(a.offset, b.offset, &offset);
    if (!overflows) return affine(box, q, kv, offset, type);
  }
  return subtract ? clipped(Wide{a.min} - b.max, Wide{a.max} - b.min, type)
                  : clipped(Wide{a.min} + b.min, Wide{a.max} + b.max, type);
}

Range product(const Range& a, const Range& b, DType type, const Box& box) {
  if (b.is_point()) return scaled(a, b.min, type, box);
  if (a.is_point()) return scaled(b, a.min, type, box);
  return clipped({Wide{a.min} * b.min, Wide{a.min} * b.max, Wide{a.max} * b.min, Wide{a.max} * b.max}, type);
}

// Quotients are monotone in each argument while the divisor keeps its sign.
Range quotient(ExprOp op, const Range& a, const Range& b, DType type) {
  if (b.contains(0) || (a.min == type_min(type) && b.contains(-1))) return unknown(type);
  const auto corner = [&](int64_t x, int64_t y) { return Wide{exact(op, x, y)}; };
  return clipped({corner(a.min, b.min), corner(a.min, b.max), corner(a.max, b.min), corner(a.max, b.max)}, type);
}

Range remainder(const Range& a, const Range& b, DType type, const Box& box) {
  if (b.is_point() && b.min > 0) {
    const int64_t low = floor_div(a.min, b.min);
    if (low == floor_div(a.max, b.min)) {
      // One period: the argument moved by a constant.
      int64_t moved = 0;
      if (!__builtin_mul_overflow(low, b.min, &moved)) return sum(a, affine_point(moved), true, type, box);
    }
  }
  int64_t max = b.max > 0 ? b.max - 1 : 0;
  if (a.min >= 0 && b.min >= 0) max = std::min(max, a.max);
  return interval(b.min < 0 ? b.min + 1 : 0, max);
}

Range truncated_remainder(const Range& a, const Range& b, DType type) {
  if (b.min == type_min(type)) return unknown(type);
  const int64_t size = std::max(std::abs(b.min), std::abs(b.max));
  const int64_t largest = std::max<int64_t>(size - 1, 0);
  return interval(a.min < 0 ? -largest : 0, a.max > 0 ? std::min(largest, a.max) : 0);
}

Range magnitude(const Range& a, DType type, const Box& box) {
  if (a.min >= 0) return a;
  if (a.max <= 0) return scaled(a, -1, type, box);
  return clipped(0, std::max(-Wide{a.min}, Wide{a.max}), type);
}

// Every value below the next power of two.
int64_t all_bits_below(int64_t value) {
  uint64_t bits = static_cast<uint64_t>(value);
  for (int shift = 1; shift < 64; shift *= 2) bits |= bits >> shift;
  return static_cast<int64_t>(bits);
}

Range bits(ExprOp op, const Range& a, const Range& b, DType type) {
  if (op == ExprOp::kBitAnd) {
    if (a.min >= 0 && b.min >= 0) return interval(0, std::min(a.max, b.max));
    if (a.min >= 0) return interval(0, a.max);
    if (b.min >= 0) return interval(0, b.max);
    return unknown(type);
  }
  if (a.min < 0 || b.min < 0) return unknown(type);
  return interval(0, all_bits_below(a.max | b.max));
}

// The argument itself where it cannot be the other one.
Range extreme(const Range& a, const Range& b, bool minimum) {
  if (minimum ? a.max <= b.min : a.min >= b.max) return a;
  if (minimum ? b.max <= a.min : b.min >= a.max) return b;
  Range r = minimum ? interval(std::min(a.min, b.min), std::min(a.max, b.max))
                    : interval(std::max(a.min, b.min), std::max(a.max, b.max));
  r.wraps = a.wraps || b.wraps;
  return r;
}

Range shift(ExprOp op, const Range& a, const Range& b, DType type, const Box& box) {
  const int64_t width = type == DType::kI32 ? 32 : 64;
  if (!b.is_point()) return unknown(type);
  if (op == ExprOp::kShiftRight) {
    const int64_t count = b.min < 0 || b.min >= width ? width - 1 : b.min;
    return interval(a.min >> count, a.max >> count);
  }
  if (b.min < 0 || b.min >= width) return point(0);
  if (b.min >= 62) return unknown(type);
  return scaled(a, int64_t{1} << b.min, type, box);
}

Range round_to(const Range& a, DType type, DType narrow) {
  int64_t min = type_min(DType::kI32), max = type_max(DType::kI32);
  if (narrow == DType::kU8) min = 0, max = 255;
  if (narrow == DType::kI8) min = -128, max = 127;
  if (narrow == DType::kI16) min = -32768, max = 32767;
  if (a.min >= min && a.max <= max) return a;
  Range r = interval(std::max(min, type_min(type)), std::min(max, type_max(type)));
  r.wraps = true;
  return r;
}

}  // namespace

Range integer_operation(const Node& node, DType type, const std::array<const Range*, 3>& args, const Box& box) {
  const Range& a = *args[0];
  switch (node.op) {
    case ExprOp::kNeg:
      return scaled(a, -1, type, box);
    case ExprOp::kAbs:
      return magnitude(a, type, box);
    case ExprOp::kSign:
      return interval(a.min > 0 ? 1 : a.min == 0 ? 0 : -1, a.max > 0 ? 1 : a.max == 0 ? 0 : -1);
    case ExprOp::kSquare: {
      const Range m = magnitude(a, type, box);
      return m.wraps ? unknown(type) : clipped(Wide{m.min} * m.min, Wide{m.max} * m.max, type);
    }
    case ExprOp::kRelu:
      return extreme(a, affine_point(0), false);
    case ExprOp::kBitNot:
      return sum(affine_point(-1), a, true, type, box);
    case ExprOp::kFloor:
    case ExprOp::kCeil:
    case ExprOp::kRound:
    case ExprOp::kTrunc:
      return a;
    case ExprOp::kRoundTo:
      return round_to(a, type, node.round_to);
    default:
      break;
  }
  if (args[1] == nullptr) return unknown(type);
  const Range& b = *args[1];
  if (a.is_point() && b.is_point()) {
    if (type == DType::kI32) {
      return affine_point(exact(node.op, static_cast<int32_t>(a.min), static_cast<int32_t>(b.min)));
    }
    return affine_point(exact(node.op, a.min, b.min));
  }
  switch (node.op) {
    case ExprOp::kAdd:
      return sum(a, b, false, type, box);
    case ExprOp::kSub:
      return sum(a, b, true, type, box);
    case ExprOp::kMul:
      return product(a, b, type, box);
    case ExprOp::kFloorDiv:
    case ExprOp::kTruncDiv:
      return quotient(node.op, a, b, type);
    case ExprOp::kRemainder:
      return remainder(a, b, type, box);
    case ExprOp::kFmod:
      return truncated_remainder(a, b, type);
    case ExprOp::kMin:
      return extreme(a, b, true);
    case ExprOp::kMax:
      return extreme(a, b, false);
    case ExprOp::kBitAnd:
    case ExprOp::kBitOr:
    case ExprOp::kBitXor:
      return bits(node.op, a, b, type);
    case ExprOp::kShiftLeft:
    case ExprOp::kShiftRight:
      return shift(node.op, a, b, type, box);
    default:
      return unknown(type);
  }
}

}  // namespace flexpte::ranges
