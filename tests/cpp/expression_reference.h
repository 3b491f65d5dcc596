// A scalar interpreter of expressions, written for tests from the definitions of ATen's operations and
// sharing no code with the evaluators; and what builds expressions and captures for them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "runtime/kernels/expression.h"

namespace flexpte::reference {

struct Value {
  int64_t i = 0;   // Bool, I32, I64
  float f = 0.0f;  // F32
};

struct Environment {
  int64_t batch = 0, head = 0, q = 0, kv = 0;
  float score = 0.0f;
  std::vector<Value> inputs;
  std::vector<int64_t> scalars;
  std::vector<TensorView> captures;
};

class Builder {
 public:
  int32_t add(ExprOp op, DType type, std::vector<int32_t> args = {}, int32_t index = 0) {
    ExprNode node;
    node.op = op;
    node.type = type;
    node.args = std::move(args);
    node.index = index;
    expression.nodes.push_back(node);
    return static_cast<int32_t>(expression.nodes.size()) - 1;
  }
  int32_t constant(DType type, int64_t value) {
    const int32_t n = add(ExprOp::kConstant, type);
    expression.nodes.back().value_int = value;
    expression.nodes.back().value_float = static_cast<double>(value);
    return n;
  }
  int32_t constant(double value) {
    const int32_t n = add(ExprOp::kConstant, DType::kF32);
    expression.nodes.back().value_float = value;
    return n;
  }
  int32_t round_to(int32_t arg, DType through) {
    const int32_t n = add(ExprOp::kRoundTo, expression.nodes[static_cast<size_t>(arg)].type, {arg});
    expression.nodes.back().round_to = through;
    return n;
  }
  int32_t q(DType type = DType::kI32) { return add(ExprOp::kQIdx, type); }
  int32_t kv(DType type = DType::kI32) { return add(ExprOp::kKvIdx, type); }
  DType type(int32_t n) const { return expression.nodes[static_cast<size_t>(n)].type; }

  Expression expression;
};

// Owns the elements of a view; ASan guards both ends.
struct Tensor {
  std::vector<std::byte> bytes;
  TensorView view;

  Tensor() = default;
  Tensor(DType dtype, std::vector<int64_t> sizes) {
    view.dtype = dtype;
    view.rank = static_cast<int32_t>(sizes.size());
    int64_t stride = 1;
    for (size_t d = sizes.size(); d-- > 0;) {
      view.sizes[d] = sizes[d];
      view.strides[d] = stride;
      stride *= sizes[d];
    }
    bytes.resize(static_cast<size_t>(stride * element_size_bytes(dtype)));
    view.data = bytes.data();
  }
  Tensor(Tensor&&) = default;
  Tensor& operator=(Tensor&&) = default;
};

inline float half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) {
    magnitude = fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  return static_cast<float>((bits & 0x8000) != 0 ? -magnitude : magnitude);
}

inline float bfloat_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

inline uint16_t bfloat_bits(float value) {  // nearest by search between both neighbours
  uint32_t wide;
  std::memcpy(&wide, &value, sizeof(wide));
  const uint16_t low = static_cast<uint16_t>(wide >> 16);
  if (std::isnan(value)) return static_cast<uint16_t>(low | 0x40);
  const uint32_t rest = wide & 0xffff;
  return static_cast<uint16_t>(low + (rest > 0x8000 || (rest == 0x8000 && (low & 1) != 0) ? 1 : 0));
}

inline uint16_t half_bits(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00);
  const double magnitude = std::abs(static_cast<double>(value));
  if (magnitude >= 65520.0) return static_cast<uint16_t>(sign | 0x7c00);
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - 11, -24));
  const double rounded = std::nearbyint(magnitude / unit) * unit;
  uint16_t low = 0, high = 0x7c00;  // magnitudes order as their bits
  while (high - low > 1) {
    const uint16_t middle = static_cast<uint16_t>((low + high) / 2);
    (half_value(middle) <= rounded ? low : high) = middle;
  }
  return static_cast<uint16_t>(sign | low);
}

struct Element {
  bool is_float = false;
  int64_t i = 0;
  double f = 0.0;
};

inline Element read(const TensorView& view, int64_t offset) {
  const auto* bytes = static_cast<const std::byte*>(view.data) + offset * element_size_bytes(view.dtype);
  const auto as = [&](auto tag) {
    std::memcpy(&tag, bytes, sizeof(tag));
    return tag;
  };
  switch (view.dtype) {
    case DType::kBool:
      return {false, as(uint8_t()) != 0, 0};
    case DType::kU8:
      return {false, as(uint8_t()), 0};
    case DType::kI8:
      return {false, as(int8_t()), 0};
    case DType::kI16:
      return {false, as(int16_t()), 0};
    case DType::kI32:
      return {false, as(int32_t()), 0};
    case DType::kI64:
      return {false, as(int64_t()), 0};
    case DType::kF16:
      return {true, 0, half_value(as(uint16_t()))};
    case DType::kBF16:
      return {true, 0, bfloat_value(as(uint16_t()))};
    case DType::kF32:
      return {true, 0, as(float())};
    case DType::kF64:
      return {true, 0, as(double())};
  }
  return {};
}

inline void write(const TensorView& view, int64_t offset, const Element& e) {
  auto* bytes = static_cast<std::byte*>(view.data) + offset * element_size_bytes(view.dtype);
  const auto put = [&](auto value) { std::memcpy(bytes, &value, sizeof(value)); };
  const double f = e.is_float ? e.f : static_cast<double>(e.i);
  const auto whole = [&]() -> int64_t {
    if (!e.is_float) return e.i;
    if (std::isnan(e.f)) return 0;
    if (e.f >= 9223372036854775808.0) return std::numeric_limits<int64_t>::max();
    if (e.f < -9223372036854775808.0) return std::numeric_limits<int64_t>::min();
    return static_cast<int64_t>(e.f);
  };
  switch (view.dtype) {
    case DType::kBool:
      put(static_cast<uint8_t>(e.is_float ? e.f != 0 : e.i != 0));
      break;
    case DType::kU8:
      put(static_cast<uint8_t>(whole()));
      break;
    case DType::kI8:
      put(static_cast<int8_t>(whole()));
      break;
    case DType::kI16:
      put(static_cast<int16_t>(whole()));
      break;
    case DType::kI32: {
      int64_t w = whole();
      if (e.is_float)
        w = std::clamp<int64_t>(w, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max());
      put(static_cast<int32_t>(w));
      break;
    }
    case DType::kI64:
      put(whole());
      break;
    case DType::kF16:
      put(half_bits(e.is_float ? static_cast<float>(f) : static_cast<float>(e.i)));
      break;
    case DType::kBF16:
      put(bfloat_bits(e.is_float ? static_cast<float>(f) : static_cast<float>(e.i)));
      break;
    case DType::kF32:
      put(e.is_float ? static_cast<float>(e.f) : static_cast<float>(e.i));
      break;
    case DType::kF64:
      put(f);
      break;
  }
}

// The value of an element as a node of the given type.
inline Value as_type(const Element& e, DType type) {
  Value v;
  if (type == DType::kF32) {
    v.f = e.is_float ? static_cast<float>(e.f) : static_cast<float>(e.i);
  } else if (type == DType::kBool) {
    v.i = e.is_float ? e.f != 0 : e.i != 0;
  } else {
    TensorView cell;
    std::byte bytes[8];
    cell.data = bytes;
    cell.dtype = type;
    write(cell, 0, e);
    v.i = read(cell, 0).i;
  }
  return v;
}

// Arithmetic in 128 bits, then wrapped: no overflow to get wrong.
inline int64_t wrapped(__int128 x, DType type) {
  const __int128 period = static_cast<__int128>(1) << (type == DType::kI32 ? 32 : 64);
  __int128 r = x % period;
  if (r < 0) r += period;
  if (r >= period / 2) r -= period;
  return static_cast<int64_t>(r);
}

inline __int128 integer(ExprOp op, __int128 a, __int128 b, DType type) {
  const __int128 width = type == DType::kI32 ? 32 : 64;
  const auto floor_quotient = [&] {
    __int128 q = a / b;
    if (q * b != a && (a < 0) != (b < 0)) --q;
    return q;
  };
  switch (op) {
    case ExprOp::kAdd:
      return a + b;
    case ExprOp::kSub:
      return a - b;
    case ExprOp::kMul:
      return a * b;
    case ExprOp::kFloorDiv:
      return b == 0 ? 0 : floor_quotient();
    case ExprOp::kRemainder:
      return b == 0 ? 0 : a - floor_quotient() * b;
    case ExprOp::kTruncDiv:
      return b == 0 ? 0 : a / b;
    case ExprOp::kFmod:
      return b == 0 ? 0 : a - a / b * b;
    case ExprOp::kMin:
      return a < b ? a : b;
    case ExprOp::kMax:
      return a > b ? a : b;
    case ExprOp::kBitAnd:
      return a & b;
    case ExprOp::kBitOr:
      return a | b;
    case ExprOp::kBitXor:
      return a ^ b;
    case ExprOp::kShiftLeft:
      return b < 0 || b >= width ? 0 : a * (static_cast<__int128>(1) << b);
    case ExprOp::kShiftRight:
      return a >> (b < 0 || b >= width ? width - 1 : b);
    case ExprOp::kPow: {
      if (b < 0) return a == 1 ? 1 : a == -1 ? (b % 2 == 0 ? 1 : -1) : 0;
      __int128 r = 1;
      for (__int128 i = 0; i < b && i < 4096; ++i) r = wrapped(r * a, type);
      return r;
    }
    case ExprOp::kNeg:
      return -a;
    case ExprOp::kAbs:
      return a < 0 ? -a : a;
    case ExprOp::kSign:
      return a > 0 ? 1 : a < 0 ? -1 : 0;
    case ExprOp::kSquare:
      return a * a;
    case ExprOp::kRelu:
      return a > 0 ? a : 0;
    case ExprOp::kBitNot:
      return -a - 1;
    default:
      return a;  // Floor, Ceil, Round, Trunc
  }
}

inline float real(ExprOp op, float a, float b) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  switch (op) {
    case ExprOp::kAdd:
      return a + b;
    case ExprOp::kSub:
      return a - b;
    case ExprOp::kMul:
      return a * b;
    case ExprOp::kDiv:
      return a / b;
    case ExprOp::kMin:
      return std::isnan(a) || std::isnan(b) ? nan : std::fmin(a, b);
    case ExprOp::kMax:
      return std::isnan(a) || std::isnan(b) ? nan : std::fmax(a, b);
    case ExprOp::kFmod:
      return static_cast<float>(std::fmod(static_cast<double>(a), static_cast<double>(b)));
    case ExprOp::kRemainder: {
      const double r = std::fmod(static_cast<double>(a), static_cast<double>(b));
      return static_cast<float>(r != 0 && (r < 0) != (b < 0) ? r + b : r);
    }
    case ExprOp::kTruncDiv:
      return std::trunc(a / b);
    case ExprOp::kNeg:
      return -a;
    case ExprOp::kAbs:
      return std::fabs(a);
    case ExprOp::kSign:
      return a > 0 ? 1.0f : a < 0 ? -1.0f : 0.0f;
    case ExprOp::kReciprocal:
      return 1.0f / a;
    case ExprOp::kSquare:
      return a * a;
    case ExprOp::kRelu:
      return std::isnan(a) ? a : a > 0 ? a : 0.0f;
    case ExprOp::kSqrt:
      return std::sqrt(a);
    case ExprOp::kFloor:
      return std::floor(a);
    case ExprOp::kCeil:
      return std::ceil(a);
    case ExprOp::kRound:
      return std::nearbyint(a);
    default:
      return std::trunc(a);
  }
}

template <class T>
int64_t predicate(ExprOp op, T a, T b) {
  switch (op) {
    case ExprOp::kEq:
      return a == b;
    case ExprOp::kNe:
      return a != b;
    case ExprOp::kLt:
      return a < b;
    case ExprOp::kLe:
      return a <= b;
    case ExprOp::kGt:
      return a > b;
    case ExprOp::kGe:
      return a >= b;
    case ExprOp::kLogicalAnd:
    case ExprOp::kBitAnd:
    case ExprOp::kMul:
    case ExprOp::kMin:
      return a != 0 && b != 0;
    case ExprOp::kLogicalOr:
    case ExprOp::kBitOr:
    case ExprOp::kAdd:
    case ExprOp::kMax:
      return a != 0 || b != 0;
    case ExprOp::kLogicalXor:
    case ExprOp::kBitXor:
      return (a != 0) != (b != 0);
    case ExprOp::kIsNan:
      return std::isnan(static_cast<double>(a));
    case ExprOp::kIsInf:
      return std::isinf(static_cast<double>(a));
    default:
      return a == 0;  // LogicalNot, BitNot
  }
}

// The result at one lane; *outside is set by loads beyond a capture.
inline Value evaluate(const Expression& expression, const Environment& env, bool* outside = nullptr) {
  std::vector<Value> values;
  for (const ExprNode& n : expression.nodes) {
    const auto arg = [&](size_t k) { return values[static_cast<size_t>(n.args[k])]; };
    const auto arg_type = [&](size_t k) { return expression.nodes[static_cast<size_t>(n.args[k])].type; };
    const auto index = [&](int64_t i) { return as_type({false, i, 0}, n.type); };
    Value v;
    switch (n.op) {
      case ExprOp::kConstant:
        v = n.type == DType::kF32 ? as_type({true, 0, n.value_float}, n.type) : index(n.value_int);
        break;
      case ExprOp::kInput:
        v = env.inputs[static_cast<size_t>(n.index)];
        break;
      case ExprOp::kScore:
        v.f = env.score;
        break;
      case ExprOp::kBatch:
        v = index(env.batch);
        break;
      case ExprOp::kHead:
        v = index(env.head);
        break;
      case ExprOp::kQIdx:
        v = index(env.q);
        break;
      case ExprOp::kKvIdx:
        v = index(env.kv);
        break;
      case ExprOp::kScalar:
        v = index(env.scalars[static_cast<size_t>(n.index)]);
        break;
      case ExprOp::kLoad: {
        const TensorView& view = env.captures[static_cast<size_t>(n.index)];
        int64_t offset = 0;
        bool inside = true;
        for (size_t d = 0; d < n.args.size(); ++d) {
          const int64_t size = view.sizes[d];
          const int64_t i = arg(d).i < 0 ? arg(d).i + size : arg(d).i;
          inside = inside && i >= 0 && i < size;
          offset += i * view.strides[d] * (inside ? 1 : 0);
        }
        if (inside) v = as_type(read(view, offset), n.type);
        if (!inside && outside != nullptr) *outside = true;
        break;
      }
      case ExprOp::kCast:
        v = as_type(arg_type(0) == DType::kF32 ? Element{true, 0, arg(0).f} : Element{false, arg(0).i, 0}, n.type);
        break;
      case ExprOp::kRoundTo:
        if (n.round_to == DType::kF16) {
          v.f = half_value(half_bits(arg(0).f));
        } else if (n.round_to == DType::kBF16) {
          v.f = bfloat_value(bfloat_bits(arg(0).f));
        } else {
          std::byte cell[8];
          TensorView view;
          view.data = cell;
          view.dtype = n.round_to;
          write(view, 0, {false, arg(0).i, 0});
          v.i = read(view, 0).i;
        }
        break;
      case ExprOp::kWhere:
        v = arg(0).i != 0 ? arg(1) : arg(2);
        break;
      default: {
        const Value a = arg(0), b = n.args.size() > 1 ? arg(1) : Value();
        if (n.type == DType::kBool) {
          v.i = arg_type(0) == DType::kF32 ? predicate(n.op, a.f, b.f) : predicate(n.op, a.i, b.i);
        } else if (n.type == DType::kF32) {
          v.f = real(n.op, a.f, b.f);
        } else {
          v.i = wrapped(integer(n.op, a.i, b.i, n.type), n.type);
        }
      }
    }
    values.push_back(v);
  }
  return values.back();
}

}  // namespace flexpte::reference
