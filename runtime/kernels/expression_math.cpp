// Functions of F32. Vectors of our own where models use them in bulk (errors below about 2 ulp; sine,
// cosine and logarithms through double precision, so that arguments of any size stay exact); the C
// library for the rest.
#include "runtime/kernels/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/kernels/expression_math.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cmath>

#include "runtime/kernels/expression_lanes-inl.h"
#include "runtime/kernels/expression_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {

#define FLEXPTE_VECTOR(name, expression)                                                             \
  struct name {                                                                                      \
    static HWY_INLINE FloatVec apply([[maybe_unused]] FloatTag d, FloatVec x) { return expression; } \
  };
FLEXPTE_VECTOR(Neg, hn::Neg(x))
FLEXPTE_VECTOR(Abs, hn::Abs(x))
// ATen gives 0 for NaN.
FLEXPTE_VECTOR(Sign, hn::IfThenElseZero(hn::Gt(hn::Abs(x), hn::Zero(d)), hn::CopySign(hn::Set(d, 1.0f), x)))
FLEXPTE_VECTOR(Reciprocal, hn::Div(hn::Set(d, 1.0f), x))
FLEXPTE_VECTOR(Square, hn::Mul(x, x))
FLEXPTE_VECTOR(Relu, hn::IfThenElse(hn::Le(x, hn::Zero(d)), hn::Zero(d), x))
FLEXPTE_VECTOR(Sqrt, hn::Sqrt(x))
FLEXPTE_VECTOR(Rsqrt, hn::Div(hn::Set(d, 1.0f), hn::Sqrt(x)))
FLEXPTE_VECTOR(Floor, hn::Floor(x))
FLEXPTE_VECTOR(Ceil, hn::Ceil(x))
FLEXPTE_VECTOR(Round, hn::Round(x))
FLEXPTE_VECTOR(Trunc, hn::Trunc(x))
FLEXPTE_VECTOR(Exp, exp_vector(d, x))
FLEXPTE_VECTOR(Exp2, exp2_vector(d, x))
FLEXPTE_VECTOR(Expm1, through_double<Expm1D>(d, x))
FLEXPTE_VECTOR(Log, through_double<LogD>(d, x))
FLEXPTE_VECTOR(Log2, through_double<Log2D>(d, x))
FLEXPTE_VECTOR(Log10, through_double<Log10D>(d, x))
FLEXPTE_VECTOR(Log1p, through_double<Log1pD>(d, x))
FLEXPTE_VECTOR(Tanh, tanh_vector(d, x))
FLEXPTE_VECTOR(Sigmoid, sigmoid_vector(d, x))
FLEXPTE_VECTOR(Silu, hn::Div(x, hn::Add(hn::Set(d, 1.0f), exp_vector(d, hn::Neg(x)))))
FLEXPTE_VECTOR(Erf, erf_vector(d, x))
FLEXPTE_VECTOR(GeluErf, gelu_erf_vector(d, x))
FLEXPTE_VECTOR(GeluTanh, gelu_tanh_vector(d, x))
#undef FLEXPTE_VECTOR

#define FLEXPTE_LIBRARY(name, function) \
  struct name {                         \
    template <class T, class>           \
    static HWY_INLINE T apply(T x) {    \
      return function(x);               \
    }                                   \
  };
FLEXPTE_LIBRARY(SinLibrary, std::sin)
FLEXPTE_LIBRARY(CosLibrary, std::cos)
FLEXPTE_LIBRARY(Tan, std::tan)
FLEXPTE_LIBRARY(Asin, std::asin)
FLEXPTE_LIBRARY(Acos, std::acos)
FLEXPTE_LIBRARY(Atan, std::atan)
FLEXPTE_LIBRARY(Sinh, std::sinh)
FLEXPTE_LIBRARY(Cosh, std::cosh)
FLEXPTE_LIBRARY(Asinh, std::asinh)
FLEXPTE_LIBRARY(Acosh, std::acosh)
FLEXPTE_LIBRARY(Atanh, std::atanh)
#undef FLEXPTE_LIBRARY

template <bool kCosine>
struct SinCos {
  static HWY_INLINE FloatVec apply(FloatTag d, FloatVec x) { return through_double<SinCosD<kCosine>>(d, x); }
};

// Where the reduction of the vector path ends, the C library's takes over, run by run.
template <bool kCosine>
void sin_cos(const LaneOperand* args, void* out, int64_t out_row_step, int64_t rows, int64_t cols) {
  constexpr int64_t kRun = 64;
  for (int64_t r = 0; r < rows; ++r) {
    const float* a = row_of<float>(args[0], r);
    float* o = static_cast<float*>(out) + r * out_row_step;
    for (int64_t c = 0; c < cols; c += kRun) {
      const int64_t n = cols - c < kRun ? cols - c : kRun;
      bool far = false;
      for (int64_t i = 0; i < n; ++i) far |= !(std::abs(a[c + i]) <= kSinCosLimit);
      const LaneOperand run{a + c, 0, 1};
      if (!far) {
        unary_vectors<SinCos<kCosine>>(&run, o + c, 0, 1, n);
      } else if constexpr (kCosine) {
        unary_loop<CosLibrary, float, float>(&run, o + c, 0, 1, n);
      } else {
        unary_loop<SinLibrary, float, float>(&run, o + c, 0, 1, n);
      }
    }
  }
}

LaneKernel find_math(ExprOp op) {
  switch (op) {
    case ExprOp::kNeg:
      return unary_vectors<Neg>;
    case ExprOp::kAbs:
      return unary_vectors<Abs>;
    case ExprOp::kSign:
      return unary_vectors<Sign>;
    case ExprOp::kReciprocal:
      return unary_vectors<Reciprocal>;
    case ExprOp::kSquare:
      return unary_vectors<Square>;
    case ExprOp::kRelu:
      return unary_vectors<Relu>;
    case ExprOp::kSqrt:
      return unary_vectors<Sqrt>;
    case ExprOp::kRsqrt:
      return unary_vectors<Rsqrt>;
    case ExprOp::kFloor:
      return unary_vectors<Floor>;
    case ExprOp::kCeil:
      return unary_vectors<Ceil>;
    case ExprOp::kRound:
      return unary_vectors<Round>;
    case ExprOp::kTrunc:
      return unary_vectors<Trunc>;
    case ExprOp::kExp:
      return unary_vectors<Exp>;
    case ExprOp::kExp2:
      return unary_vectors<Exp2>;
    case ExprOp::kExpm1:
      return unary_vectors<Expm1>;
    case ExprOp::kLog:
      return unary_vectors<Log>;
    case ExprOp::kLog2:
      return unary_vectors<Log2>;
    case ExprOp::kLog10:
      return unary_vectors<Log10>;
    case ExprOp::kLog1p:
      return unary_vectors<Log1p>;
    case ExprOp::kSin:
      return sin_cos<false>;
    case ExprOp::kCos:
      return sin_cos<true>;
    case ExprOp::kTan:
      return unary_loop<Tan, float, float>;
    case ExprOp::kAsin:
      return unary_loop<Asin, float, float>;
    case ExprOp::kAcos:
      return unary_loop<Acos, float, float>;
    case ExprOp::kAtan:
      return unary_loop<Atan, float, float>;
    case ExprOp::kSinh:
      return unary_loop<Sinh, float, float>;
    case ExprOp::kCosh:
      return unary_loop<Cosh, float, float>;
    case ExprOp::kTanh:
      return unary_vectors<Tanh>;
    case ExprOp::kAsinh:
      return unary_loop<Asinh, float, float>;
    case ExprOp::kAcosh:
      return unary_loop<Acosh, float, float>;
    case ExprOp::kAtanh:
      return unary_loop<Atanh, float, float>;
    case ExprOp::kSigmoid:
      return unary_vectors<Sigmoid>;
    case ExprOp::kSilu:
      return unary_vectors<Silu>;
    case ExprOp::kErf:
      return unary_vectors<Erf>;
    case ExprOp::kGeluErf:
      return unary_vectors<GeluErf>;
    case ExprOp::kGeluTanh:
      return unary_vectors<GeluTanh>;
    default:
      return nullptr;
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace flexpte
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flexpte {

HWY_EXPORT(find_math);

LaneKernel find_math_kernel(ExprOp op) {
  return HWY_DYNAMIC_DISPATCH(find_math)(op);
}

}  // namespace flexpte
#endif  // HWY_ONCE
