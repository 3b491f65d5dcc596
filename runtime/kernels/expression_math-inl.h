// Vector functions of F32, compiled once per instruction set. Polynomials are minimax fits of our own
// (weighted to the relative error of the result); double-precision series are Taylor's.
#if defined(FLEXPTE_EXPRESSION_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLEXPTE_EXPRESSION_MATH_INL_H_
#undef FLEXPTE_EXPRESSION_MATH_INL_H_
#else
#define FLEXPTE_EXPRESSION_MATH_INL_H_
#endif

#include <hwy/highway.h>

#include "runtime/kernels/expression_lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {

// c[0] + c[1] x + ... by Horner's rule.
template <class D, class V, class T, size_t N>
HWY_INLINE V polynomial(D d, V x, const T (&c)[N]) {
  V p = hn::Set(d, c[N - 1]);
  for (size_t i = N - 1; i-- > 0;) p = hn::MulAdd(p, x, hn::Set(d, c[i]));
  return p;
}

// p * 2^n for whole n, in two steps so that subnormal results and 2^128 need no special case.
HWY_INLINE FloatVec scale_by_power(FloatTag d, FloatVec p, FloatVec n) {
  const hn::RebindToSigned<FloatTag> di;
  const auto exponent = hn::ConvertTo(di, n);
  const auto half = hn::ShiftRight<1>(exponent);
  const auto bias = hn::Set(di, 127);
  const auto first = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const auto second = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(exponent, half), bias)));
  return hn::Mul(hn::Mul(p, first), second);
}

// e^x = 2^n e^r, |r| <= log(2)/2. Beyond the clamp the result is 0 or inf already; NaN passes through.
HWY_INLINE FloatVec exp_vector(FloatTag d, FloatVec x) {
  static constexpr float kPolynomial[] = {0.499999930507f, 0.166665147913f, 0.04166845679f, 0.008369418847f,
                                          0.001381314439f};
  const auto nan = hn::IsNaN(x);
  const FloatVec clamped = hn::IfThenZeroElse(nan, hn::Min(hn::Max(x, hn::Set(d, -104.0f)), hn::Set(d, 89.0f)));
  const FloatVec n = hn::Round(hn::Mul(clamped, hn::Set(d, 1.44269504f)));
  FloatVec r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), clamped);  // log(2) in two parts, the first short
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  const FloatVec p = hn::MulAdd(hn::Mul(r, r), polynomial(d, r, kPolynomial), r);
  return hn::IfThenElse(nan, x, scale_by_power(d, hn::Add(p, hn::Set(d, 1.0f)), n));
}

HWY_INLINE FloatVec exp2_vector(FloatTag d, FloatVec x) {
  static constexpr float kPolynomial[] = {0.6931472078257f,   0.2402265138591f,   0.05550324418752f,
                                          0.009617998802440f, 0.001340161191368f, 0.0001547776493537f};
  const auto nan = hn::IsNaN(x);
  const FloatVec clamped = hn::IfThenZeroElse(nan, hn::Min(hn::Max(x, hn::Set(d, -151.0f)), hn::Set(d, 129.0f)));
  const FloatVec n = hn::Round(clamped);
  const FloatVec r = hn::Sub(clamped, n);
  const FloatVec p = hn::MulAdd(r, polynomial(d, r, kPolynomial), hn::Set(d, 1.0f));
  return hn::IfThenElse(nan, x, scale_by_power(d, p, n));
}

// x + x^3 P(x^2) near 0, else 1 - 2 / (e^2|x| + 1).
HWY_INLINE FloatVec tanh_vector(FloatTag d, FloatVec x) {
  static constexpr float kPolynomial[] = {-0.33333299272f, 0.133319582412f, -0.053786683447f, 0.02080538418f,
                                          -0.005905867948f};
  const FloatVec magnitude = hn::Abs(x);
  const FloatVec square = hn::Mul(x, x);
  const FloatVec small = hn::MulAdd(hn::Mul(x, square), polynomial(d, square, kPolynomial), x);
  const FloatVec e = exp_vector(d, hn::Add(magnitude, magnitude));
  const FloatVec one = hn::Set(d, 1.0f);
  const FloatVec large = hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(e, one)));
  // The sign is the argument's, also that of a zero.
  return hn::CopySign(hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0.6f)), small, large), x);
}

HWY_INLINE FloatVec sigmoid_vector(FloatTag d, FloatVec x) {
  const FloatVec one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, exp_vector(d, hn::Neg(x))));
}

// x + x P(x^2) for |x| <= 1, else 1 - e^Q(|x|).
HWY_INLINE FloatVec erf_vector(FloatTag d, FloatVec x) {
  static constexpr float kSmall[] = {0.1283791659138f,   -0.3761262713608f,   0.1128360017758f,  -0.02685444464869f,
                                     0.005189535449208f, -8.020842258946e-4f, 7.889122802893e-5f};
  static constexpr float kLarge[] = {-3.415312921540e-4f, -1.127089155106f,    -0.6381448936996f, -0.1031066990952f,
                                     0.02183803608591f,   -2.947650947274e-3f, 1.863784000964e-4f};
  const FloatVec one = hn::Set(d, 1.0f);
  const FloatVec square = hn::Mul(x, x);
  const FloatVec small = hn::MulAdd(x, polynomial(d, square, kSmall), x);
  const FloatVec magnitude = hn::IfThenElse(hn::IsNaN(x), x, hn::Min(hn::Abs(x), hn::Set(d, 4.0f)));
  const FloatVec large = hn::Sub(one, exp_vector(d, polynomial(d, magnitude, kLarge)));
  return hn::IfThenElse(hn::Le(hn::Abs(x), one), small, hn::CopySign(large, x));
}

// x / 2 (1 + erf(x / sqrt(2))), evaluated as ATen does.
HWY_INLINE FloatVec gelu_erf_vector(FloatTag d, FloatVec x) {
  const FloatVec phi = hn::Add(hn::Set(d, 1.0f), erf_vector(d, hn::Mul(x, hn::Set(d, 0.707106781f))));
  return hn::Mul(hn::Mul(x, hn::Set(d, 0.5f)), phi);
}

// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), evaluated as ATen does.
HWY_INLINE FloatVec gelu_tanh_vector(FloatTag d, FloatVec x) {
  const FloatVec cube = hn::Mul(hn::Mul(x, x), x);
  const FloatVec inner = hn::Mul(hn::Set(d, 0.797884561f), hn::MulAdd(hn::Set(d, 0.044715f), cube, x));
  return hn::Mul(hn::Mul(x, hn::Set(d, 0.5f)), hn::Add(hn::Set(d, 1.0f), tanh_vector(d, inner)));
}

// Both halves widened, Op applied, and rounded once.
#if HWY_TARGET == HWY_SCALAR
using DoubleTag = hn::ScalableTag<double>;
using DoubleVec = hn::Vec<DoubleTag>;

template <class Op>
HWY_INLINE FloatVec through_double(FloatTag d, FloatVec x) {
  const DoubleTag dd;
  return hn::DemoteTo(d, Op::apply(dd, hn::PromoteTo(dd, x)));
}
#else
using DoubleTag = hn::Repartition<double, FloatTag>;
using DoubleVec = hn::Vec<DoubleTag>;

template <class Op>
HWY_INLINE FloatVec through_double(FloatTag d, FloatVec x) {
  const DoubleTag dd;
  const hn::Half<FloatTag> dh;
  const auto low = hn::DemoteTo(dh, Op::apply(dd, hn::PromoteTo(dd, hn::LowerHalf(dh, x))));
  const auto high = hn::DemoteTo(dh, Op::apply(dd, hn::PromoteTo(dd, hn::UpperHalf(dh, x))));
  return hn::Combine(d, high, low);
}
#endif

// e^x - 1 = 2^n (e^r - 1) + (2^n - 1).
struct Expm1D {
  static HWY_INLINE DoubleVec apply(DoubleTag d, DoubleVec x) {
    static constexpr double kTaylor[] = {1.0,       1.0 / 2,    1.0 / 6,     1.0 / 24,     1.0 / 120,
                                         1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800};
    const hn::RebindToSigned<DoubleTag> di;
    const auto nan = hn::IsNaN(x);
    const DoubleVec clamped = hn::IfThenZeroElse(nan, hn::Min(hn::Max(x, hn::Set(d, -120.0)), hn::Set(d, 100.0)));
    // Adding 3 * 2^51 leaves the nearest whole number in the low bits.
    const DoubleVec magic = hn::Set(d, 0x1.8p52);
    const DoubleVec shifted = hn::Add(hn::Mul(clamped, hn::Set(d, 1.4426950408889634)), magic);
    const DoubleVec n = hn::Sub(shifted, magic);
    const DoubleVec r = hn::NegMulAdd(n, hn::Set(d, 0.69314718055994531), clamped);
    const DoubleVec p = hn::Mul(r, polynomial(d, r, kTaylor));
    const auto exponent = hn::Sub(hn::BitCast(di, shifted), hn::BitCast(di, magic));
    const DoubleVec scale = hn::BitCast(d, hn::ShiftLeft<52>(hn::Add(exponent, hn::Set(di, 1023))));
    const DoubleVec result = hn::MulAdd(scale, p, hn::Sub(scale, hn::Set(d, 1.0)));
    // The sign of a zero is the argument's.
    return hn::IfThenElse(hn::Or(nan, hn::Eq(x, hn::Zero(d))), x, result);
  }
};

// log(1 + x) when kPlusOne (s = x / (2 + x) keeps every digit near 0), else log(x): with
// y = 2^e m, m in [sqrt(1/2), sqrt(2)), s = (m - 1) / (m + 1), log y = e log 2 + 2 artanh s.
template <bool kPlusOne>
HWY_INLINE DoubleVec log_double(DoubleTag d, DoubleVec x, double unit, double log2_in_unit) {
  static constexpr double kArtanh[] = {2.0, 2.0 / 3, 2.0 / 5, 2.0 / 7, 2.0 / 9, 2.0 / 11, 2.0 / 13};
  const hn::RebindToUnsigned<DoubleTag> du;
  const DoubleVec one = hn::Set(d, 1.0);
  const DoubleVec y = kPlusOne ? hn::Add(one, x) : x;
  const auto sqrt_half = hn::Set(du, uint64_t{0x3fe6a09e667f3bcd});
  const auto bits = hn::BitCast(du, y);
  // The exponent of y / sqrt(1/2), biased by 1024 so that it stays positive.
  const auto biased = hn::ShiftRight<52>(hn::Add(hn::Sub(bits, sqrt_half), hn::Set(du, uint64_t{1024} << 52)));
  const auto mantissa = hn::Sub(hn::Add(bits, hn::Set(du, uint64_t{1024} << 52)), hn::ShiftLeft<52>(biased));
  const DoubleVec m = hn::BitCast(d, mantissa);
  const DoubleVec magic = hn::Set(d, 0x1.0p52);
  const DoubleVec biased_value = hn::Sub(hn::BitCast(d, hn::Or(biased, hn::BitCast(du, magic))), magic);
  DoubleVec e = hn::Sub(biased_value, hn::Set(d, 1024.0));
  DoubleVec s = hn::Div(hn::Sub(m, one), hn::Add(m, one));
  if constexpr (kPlusOne) {
    const auto near = hn::Lt(hn::Abs(x), hn::Set(d, 0.25));
    s = hn::IfThenElse(near, hn::Div(x, hn::Add(x, hn::Set(d, 2.0))), s);
    e = hn::IfThenZeroElse(near, e);
  }
  const DoubleVec series = hn::Mul(s, polynomial(d, hn::Mul(s, s), kArtanh));
  DoubleVec result = hn::MulAdd(e, hn::Set(d, log2_in_unit), hn::Mul(series, hn::Set(d, unit)));
  const DoubleVec inf = hn::Inf(d);
  result = hn::IfThenElse(hn::Eq(y, inf), inf, result);
  result = hn::IfThenElse(hn::Eq(y, hn::Zero(d)), hn::Neg(inf), result);
  result = hn::IfThenElse(hn::Or(hn::Lt(y, hn::Zero(d)), hn::IsNaN(y)), hn::NaN(d), result);
  if constexpr (kPlusOne) result = hn::IfThenElse(hn::Eq(x, hn::Zero(d)), x, result);
  return result;
}

struct LogD {
  static HWY_INLINE DoubleVec apply(DoubleTag d, DoubleVec x) {
    return log_double<false>(d, x, 1.0, 0.6931471805599453);
  }
};
struct Log2D {
  static HWY_INLINE DoubleVec apply(DoubleTag d, DoubleVec x) {
    return log_double<false>(d, x, 1.4426950408889634, 1.0);
  }
};
struct Log10D {
  static HWY_INLINE DoubleVec apply(DoubleTag d, DoubleVec x) {
    return log_double<false>(d, x, 0.4342944819032518, 0.3010299956639812);
  }
};
struct Log1pD {
  static HWY_INLINE DoubleVec apply(DoubleTag d, DoubleVec x) {
    return log_double<true>(d, x, 1.0, 0.6931471805599453);
  }
};

// Up to here n * (the first 33 bits of pi / 2) is exact.
inline constexpr float kSinCosLimit = 1.0e6f;

// Cody and Waite: x = n pi/2 + r, |r| <= pi/4; the quadrant decides which series and which sign.
template <bool kCosine>
struct SinCosD {
  static HWY_INLINE DoubleVec apply(DoubleTag d, DoubleVec x) {
    static constexpr double kSin[] = {1.0, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800};
    static constexpr double kCos[] = {1.0,         -1.0 / 2,       1.0 / 24,       -1.0 / 720,
                                      1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600};
    const hn::RebindToUnsigned<DoubleTag> du;
    const DoubleVec magic = hn::Set(d, 0x1.8p52);
    const DoubleVec shifted = hn::Add(hn::Mul(x, hn::Set(d, 0.63661977236758134)), magic);
    const DoubleVec n = hn::Sub(shifted, magic);
    DoubleVec r = hn::NegMulAdd(n, hn::Set(d, 0x1.921fb544p+0), x);
    r = hn::NegMulAdd(n, hn::Set(d, 6.07710050650619224932e-11), r);
    const DoubleVec square = hn::Mul(r, r);
    const DoubleVec sine = hn::Mul(r, polynomial(d, square, kSin));
    const DoubleVec cosine = polynomial(d, square, kCos);
    const auto quadrant = hn::Add(hn::BitCast(du, shifted), hn::Set(du, uint64_t{kCosine ? 1 : 0}));
    const auto odd = hn::Eq(hn::And(quadrant, hn::Set(du, uint64_t{1})), hn::Set(du, uint64_t{1}));
    const DoubleVec value = hn::IfThenElse(hn::RebindMask(d, odd), cosine, sine);
    const auto sign = hn::ShiftLeft<62>(hn::And(quadrant, hn::Set(du, uint64_t{2})));
    const DoubleVec result = hn::Xor(value, hn::BitCast(d, sign));
    return kCosine ? result : hn::IfThenElse(hn::Eq(x, hn::Zero(d)), x, result);
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace flexpte
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
