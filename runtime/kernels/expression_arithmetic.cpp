// Arithmetic, minimum and maximum, bits and shifts, and selection.
#include "runtime/kernels/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/kernels/expression_arithmetic.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "runtime/kernels/expression_lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {

struct AddF {
  static HWY_INLINE FloatVec apply(FloatTag, FloatVec a, FloatVec b) { return hn::Add(a, b); }
};
struct SubF {
  static HWY_INLINE FloatVec apply(FloatTag, FloatVec a, FloatVec b) { return hn::Sub(a, b); }
};
struct MulF {
  static HWY_INLINE FloatVec apply(FloatTag, FloatVec a, FloatVec b) { return hn::Mul(a, b); }
};
struct DivF {
  static HWY_INLINE FloatVec apply(FloatTag, FloatVec a, FloatVec b) { return hn::Div(a, b); }
};
// NaN wins, as in torch.minimum and torch.maximum.
struct MinF {
  static HWY_INLINE FloatVec apply(FloatTag, FloatVec a, FloatVec b) {
    return hn::IfThenElse(hn::IsNaN(a), a, hn::IfThenElse(hn::Lt(a, b), a, b));
  }
};
struct MaxF {
  static HWY_INLINE FloatVec apply(FloatTag, FloatVec a, FloatVec b) {
    return hn::IfThenElse(hn::IsNaN(a), a, hn::IfThenElse(hn::Gt(a, b), a, b));
  }
};

struct Remainder {
  template <class T, class>
  static HWY_INLINE T apply(T a, T b) {
    if constexpr (std::is_same_v<T, float>) {
      return float_remainder(a, b);
    } else {
      return floor_mod(a, b);
    }
  }
};
struct FloorDiv {
  template <class T, class>
  static HWY_INLINE T apply(T a, T b) {
    if constexpr (std::is_same_v<T, float>) {
      return float_floor_div(a, b);
    } else {
      return floor_div(a, b);
    }
  }
};
struct Fmod {
  template <class T, class>
  static HWY_INLINE T apply(T a, T b) {
    if constexpr (std::is_same_v<T, float>) {
      return std::fmod(a, b);
    } else {
      return trunc_mod(a, b);
    }
  }
};
struct TruncDiv {
  template <class T, class>
  static HWY_INLINE T apply(T a, T b) {
    if constexpr (std::is_same_v<T, float>) {
      return std::trunc(a / b);
    } else {
      return trunc_div(a, b);
    }
  }
};
struct Pow {
  template <class T, class>
  static HWY_INLINE T apply(T a, T b) {
    if constexpr (std::is_same_v<T, float>) {
      return std::pow(a, b);
    } else {
      return int_pow(a, b);
    }
  }
};
struct Atan2 {
  template <class T, class>
  static HWY_INLINE T apply(T a, T b) {
    return std::atan2(a, b);
  }
};

#define FLEXPTE_BINARY(name, expression)  \
  struct name {                           \
    template <class T, class>             \
    static HWY_INLINE T apply(T a, T b) { \
      return static_cast<T>(expression);  \
    }                                     \
  };
FLEXPTE_BINARY(Add, wrap_add(a, b))
FLEXPTE_BINARY(Sub, wrap_sub(a, b))
FLEXPTE_BINARY(Mul, wrap_mul(a, b))
FLEXPTE_BINARY(Min, a < b ? a : b)
FLEXPTE_BINARY(Max, a > b ? a : b)
FLEXPTE_BINARY(BitAnd, a& b)
FLEXPTE_BINARY(BitOr, a | b)
FLEXPTE_BINARY(BitXor, a ^ b)
FLEXPTE_BINARY(ShiftLeft, shift_left(a, b))
FLEXPTE_BINARY(ShiftRight, shift_right(a, b))
#undef FLEXPTE_BINARY

#define FLEXPTE_UNARY(name, expression)  \
  struct name {                          \
    template <class T, class>            \
    static HWY_INLINE T apply(T a) {     \
      return static_cast<T>(expression); \
    }                                    \
  };
FLEXPTE_UNARY(Neg, wrap_neg(a))
FLEXPTE_UNARY(Abs, a < 0 ? wrap_neg(a) : a)
FLEXPTE_UNARY(Sign, (a > 0) - (a < 0))
FLEXPTE_UNARY(Square, wrap_mul(a, a))
FLEXPTE_UNARY(Relu, a > 0 ? a : T{0})
FLEXPTE_UNARY(BitNot, ~a)
FLEXPTE_UNARY(Copy, a)
#undef FLEXPTE_UNARY

// Division by one positive power of two is a shift or a bit mask, exactly, for floored quotients.
template <class T, bool kRemainder>
void floored_by_power_of_two(const LaneOperand* args, void* out, int64_t out_row_step, int64_t rows, int64_t cols) {
  const T divisor = *static_cast<const T*>(args[1].data);
  const bool one_divisor = args[1].col_step == 0 && (rows == 1 || args[1].row_step == 0);
  if (!one_divisor || divisor <= 0 || (divisor & (divisor - 1)) != 0) {
    if constexpr (kRemainder) {
      binary_loop<Remainder, T, T>(args, out, out_row_step, rows, cols);
    } else {
      binary_loop<FloorDiv, T, T>(args, out, out_row_step, rows, cols);
    }
    return;
  }
  const T mask = static_cast<T>(divisor - 1);
  int shift = 0;
  while ((T{1} << shift) < divisor) ++shift;
  for (int64_t r = 0; r < rows; ++r) {
    const T* a = row_of<T>(args[0], r);
    T* o = static_cast<T*>(out) + r * out_row_step;
    FLEXPTE_INDEPENDENT_LANES
    for (int64_t c = 0; c < cols; ++c) o[c] = static_cast<T>(kRemainder ? a[c] & mask : a[c] >> shift);
  }
}

struct SquareF {
  static HWY_INLINE FloatVec apply(FloatTag, FloatVec a) { return hn::Mul(a, a); }
};
struct CubeF {
  static HWY_INLINE FloatVec apply(FloatTag, FloatVec a) { return hn::Mul(hn::Mul(a, a), a); }
};
struct ReciprocalF {
  static HWY_INLINE FloatVec apply(FloatTag d, FloatVec a) { return hn::Div(hn::Set(d, 1.0f), a); }
};

// One small exponent is a product, the commonest use of pow (ATen does the same).
void pow_float(const LaneOperand* args, void* out, int64_t out_row_step, int64_t rows, int64_t cols) {
  if (args[1].col_step == 0 && (rows == 1 || args[1].row_step == 0)) {
    const float exponent = *static_cast<const float*>(args[1].data);
    if (exponent == 2.0f) return unary_vectors<SquareF>(args, out, out_row_step, rows, cols);
    if (exponent == 3.0f) return unary_vectors<CubeF>(args, out, out_row_step, rows, cols);
    if (exponent == -1.0f) return unary_vectors<ReciprocalF>(args, out, out_row_step, rows, cols);
  }
  binary_loop<Pow, float, float>(args, out, out_row_step, rows, cols);
}

template <class T>
void where_loop(const LaneOperand* args, void* out, int64_t out_row_step, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* m = row_of<uint8_t>(args[0], r);
    const T* a = row_of<T>(args[1], r);
    const T* b = row_of<T>(args[2], r);
    T* o = static_cast<T*>(out) + r * out_row_step;
    const T x = *a;
    const T y = *b;
    const bool vector_a = args[1].col_step != 0;
    const bool vector_b = args[2].col_step != 0;
    if (args[0].col_step == 0) {
      const LaneOperand& chosen = *m != 0 ? args[1] : args[2];
      const T* from = *m != 0 ? a : b;
      if (chosen.col_step != 0) {
        FLEXPTE_INDEPENDENT_LANES
        for (int64_t c = 0; c < cols; ++c) o[c] = from[c];
      } else {
        const T value = *from;
        FLEXPTE_INDEPENDENT_LANES
        for (int64_t c = 0; c < cols; ++c) o[c] = value;
      }
    } else if (vector_a && vector_b) {
      FLEXPTE_INDEPENDENT_LANES
      for (int64_t c = 0; c < cols; ++c) {
        const T u = a[c];
        const T v = b[c];
        o[c] = m[c] != 0 ? u : v;
      }
    } else if (vector_a) {
      FLEXPTE_INDEPENDENT_LANES
      for (int64_t c = 0; c < cols; ++c) {
        const T u = a[c];
        o[c] = m[c] != 0 ? u : y;
      }
    } else if (vector_b) {
      FLEXPTE_INDEPENDENT_LANES
      for (int64_t c = 0; c < cols; ++c) {
        const T v = b[c];
        o[c] = m[c] != 0 ? x : v;
      }
    } else {
      FLEXPTE_INDEPENDENT_LANES
      for (int64_t c = 0; c < cols; ++c) o[c] = m[c] != 0 ? x : y;
    }
  }
}

LaneKernel float_arithmetic(ExprOp op) {
  switch (op) {
    case ExprOp::kAdd:
      return binary_vectors<AddF>;
    case ExprOp::kSub:
      return binary_vectors<SubF>;
    case ExprOp::kMul:
      return binary_vectors<MulF>;
    case ExprOp::kDiv:
      return binary_vectors<DivF>;
    case ExprOp::kMin:
      return binary_vectors<MinF>;
    case ExprOp::kMax:
      return binary_vectors<MaxF>;
    case ExprOp::kFloorDiv:
      return binary_loop<FloorDiv, float, float>;
    case ExprOp::kRemainder:
      return binary_loop<Remainder, float, float>;
    case ExprOp::kFmod:
      return binary_loop<Fmod, float, float>;
    case ExprOp::kTruncDiv:
      return binary_loop<TruncDiv, float, float>;
    case ExprOp::kPow:
      return pow_float;
    case ExprOp::kAtan2:
      return binary_loop<Atan2, float, float>;
    default:
      return nullptr;
  }
}

template <class T>
LaneKernel int_arithmetic(ExprOp op) {
  switch (op) {
    case ExprOp::kAdd:
      return binary_loop<Add, T, T>;
    case ExprOp::kSub:
      return binary_loop<Sub, T, T>;
    case ExprOp::kMul:
      return binary_loop<Mul, T, T>;
    case ExprOp::kMin:
      return binary_loop<Min, T, T>;
    case ExprOp::kMax:
      return binary_loop<Max, T, T>;
    case ExprOp::kFloorDiv:
      return floored_by_power_of_two<T, false>;
    case ExprOp::kRemainder:
      return floored_by_power_of_two<T, true>;
    case ExprOp::kFmod:
      return binary_loop<Fmod, T, T>;
    case ExprOp::kTruncDiv:
      return binary_loop<TruncDiv, T, T>;
    case ExprOp::kPow:
      return binary_loop<Pow, T, T>;
    case ExprOp::kBitAnd:
      return binary_loop<BitAnd, T, T>;
    case ExprOp::kBitOr:
      return binary_loop<BitOr, T, T>;
    case ExprOp::kBitXor:
      return binary_loop<BitXor, T, T>;
    case ExprOp::kShiftLeft:
      return binary_loop<ShiftLeft, T, T>;
    case ExprOp::kShiftRight:
      return binary_loop<ShiftRight, T, T>;
    case ExprOp::kNeg:
      return unary_loop<Neg, T, T>;
    case ExprOp::kAbs:
      return unary_loop<Abs, T, T>;
    case ExprOp::kSign:
      return unary_loop<Sign, T, T>;
    case ExprOp::kSquare:
      return unary_loop<Square, T, T>;
    case ExprOp::kRelu:
      return unary_loop<Relu, T, T>;
    case ExprOp::kBitNot:
      return unary_loop<BitNot, T, T>;
    // Integers are whole already.
    case ExprOp::kFloor:
    case ExprOp::kCeil:
    case ExprOp::kRound:
    case ExprOp::kTrunc:
      return unary_loop<Copy, T, T>;
    default:
      return nullptr;
  }
}

LaneKernel find_arithmetic(ExprOp op, DType type) {
  if (type == DType::kF32) return float_arithmetic(op);
  return type == DType::kI32 ? int_arithmetic<int32_t>(op) : int_arithmetic<int64_t>(op);
}

LaneKernel find_where(DType type) {
  switch (element_size_bytes(type)) {
    case 1:
      return where_loop<uint8_t>;
    case 4:
      return where_loop<int32_t>;
    default:
      return where_loop<int64_t>;
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace flexpte
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flexpte {

HWY_EXPORT(find_arithmetic);
HWY_EXPORT(find_where);

LaneKernel find_arithmetic_kernel(ExprOp op, DType type) {
  return HWY_DYNAMIC_DISPATCH(find_arithmetic)(op, type);
}
LaneKernel find_where_kernel(DType type) {
  return HWY_DYNAMIC_DISPATCH(find_where)(type);
}

}  // namespace flexpte
#endif  // HWY_ONCE
