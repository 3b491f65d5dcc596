// Comparisons and logic: results are bytes 0 or 1.
#include "runtime/kernels/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/kernels/expression_logic.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "runtime/kernels/expression_lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {

#define FLEXPTE_PREDICATE(name, expression)     \
  struct name {                                 \
    template <class T, class>                   \
    static HWY_INLINE uint8_t apply(T a, T b) { \
      return static_cast<uint8_t>(expression);  \
    }                                           \
  };
FLEXPTE_PREDICATE(Eq, a == b)
FLEXPTE_PREDICATE(Ne, a != b)
FLEXPTE_PREDICATE(Lt, a < b)
FLEXPTE_PREDICATE(Le, a <= b)
FLEXPTE_PREDICATE(Gt, a > b)
FLEXPTE_PREDICATE(Ge, a >= b)
FLEXPTE_PREDICATE(And, (a != T{0}) & (b != T{0}))
FLEXPTE_PREDICATE(Or, (a != T{0}) | (b != T{0}))
FLEXPTE_PREDICATE(Xor, (a != T{0}) ^ (b != T{0}))
#undef FLEXPTE_PREDICATE

#define FLEXPTE_PREDICATE(name, expression)    \
  struct name {                                \
    template <class T, class>                  \
    static HWY_INLINE uint8_t apply(T a) {     \
      return static_cast<uint8_t>(expression); \
    }                                          \
  };
FLEXPTE_PREDICATE(Not, a == T{0})
FLEXPTE_PREDICATE(IsNan, a != a)
#undef FLEXPTE_PREDICATE

struct IsInf {
  template <class T, class>
  static HWY_INLINE uint8_t apply(T a) {
    if constexpr (std::is_same_v<T, float>) {
      return static_cast<uint8_t>((std::bit_cast<uint32_t>(a) & 0x7fffffffu) == 0x7f800000u);
    } else {
      return 0;
    }
  }
};

template <class T>
LaneKernel logic_of(ExprOp op) {
  switch (op) {
    case ExprOp::kEq:
      return binary_loop<Eq, T, uint8_t>;
    case ExprOp::kNe:
      return binary_loop<Ne, T, uint8_t>;
    case ExprOp::kLt:
      return binary_loop<Lt, T, uint8_t>;
    case ExprOp::kLe:
      return binary_loop<Le, T, uint8_t>;
    case ExprOp::kGt:
      return binary_loop<Gt, T, uint8_t>;
    case ExprOp::kGe:
      return binary_loop<Ge, T, uint8_t>;
    case ExprOp::kLogicalAnd:
      return binary_loop<And, T, uint8_t>;
    case ExprOp::kLogicalOr:
      return binary_loop<Or, T, uint8_t>;
    case ExprOp::kLogicalXor:
      return binary_loop<Xor, T, uint8_t>;
    case ExprOp::kLogicalNot:
      return unary_loop<Not, T, uint8_t>;
    case ExprOp::kIsNan:
      return unary_loop<IsNan, T, uint8_t>;
    case ExprOp::kIsInf:
      return unary_loop<IsInf, T, uint8_t>;
    default:
      return nullptr;
  }
}

// What arithmetic on Bool means, where ATen gives it a Bool result.
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

LaneKernel find_logic(ExprOp op, DType arg) {
  switch (arg) {
    case DType::kBool:
      return logic_of<uint8_t>(bool_logic(op));
    case DType::kI32:
      return logic_of<int32_t>(op);
    case DType::kI64:
      return logic_of<int64_t>(op);
    default:
      return logic_of<float>(op);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace flexpte
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flexpte {

HWY_EXPORT(find_logic);

LaneKernel find_logic_kernel(ExprOp op, DType arg) {
  return HWY_DYNAMIC_DISPATCH(find_logic)(op, arg);
}

}  // namespace flexpte
#endif  // HWY_ONCE
