// Functions of floating-point scalars and vectors. Those of half and bfloat are computed in float and rounded once.
#ifndef FLEXPTE_MSL_MATH
#define FLEXPTE_MSL_MATH

namespace metal {

#define MSL_ENABLE(...) typename msl_shim::enable_if<(__VA_ARGS__), int>::type = 0
#define MSL_FLOAT MSL_ENABLE(msl_shim::is_float<msl_shim::element<T>>)

// name(x, ...) by `call` of floats for float, half, bfloat and their vectors. Integers do not convert: Metal would
// not know whether to float or to half.
#define MSL_UNARY(name, call)                                                                      \
  template <class T, MSL_FLOAT>                                                                    \
  MSL_INLINE T name(T x) {                                                                         \
    if constexpr (msl_shim::is_vec<T>) {                                                           \
      T r;                                                                                         \
      for (int i = 0; i < msl_shim::traits<T>::size; ++i) r[i] = name(msl_shim::element<T>(x[i])); \
      return r;                                                                                    \
    } else {                                                                                       \
      return T(call(float(x)));                                                                    \
    }                                                                                              \
  }
#define MSL_BINARY(name, call)                                               \
  MSL_INLINE float name(float x, float y) {                                  \
    return call(x, y);                                                       \
  }                                                                          \
  template <class T, MSL_FLOAT>                                              \
  MSL_INLINE T name(T x, T y) {                                              \
    if constexpr (msl_shim::is_vec<T>) {                                     \
      T r;                                                                   \
      for (int i = 0; i < msl_shim::traits<T>::size; ++i)                    \
        r[i] = name(msl_shim::element<T>(x[i]), msl_shim::element<T>(y[i])); \
      return r;                                                              \
    } else {                                                                 \
      return T(call(float(x), float(y)));                                    \
    }                                                                        \
  }                                                                          \
  template <class V, MSL_ENABLE(msl_shim::is_vec<V>)>                        \
  MSL_INLINE V name(V x, msl_shim::element<V> y) {                           \
    return name(x, V(y));                                                    \
  }

#define MSL_RSQRT(x) (1.0f / __builtin_sqrtf(x))
#define MSL_EXP10(x) __builtin_powf(10.0f, x)
#define MSL_SINPI(x) __builtin_sinf(M_PI_F*(x))
#define MSL_COSPI(x) __builtin_cosf(M_PI_F*(x))
#define MSL_TANPI(x) __builtin_tanf(M_PI_F*(x))
#define MSL_FRACT(x) __builtin_fminf((x)-__builtin_floorf(x), 0x1.fffffep-1f)
#define MSL_SIGN(x) ((x) > 0.0f ? 1.0f : (x) < 0.0f ? -1.0f : __builtin_isnan(x) ? 0.0f : (x))
#define MSL_FLOAT_FUNCTIONS           \
  MSL_UNARY(exp, __builtin_expf)      \
  MSL_UNARY(exp2, __builtin_exp2f)    \
  MSL_UNARY(exp10, MSL_EXP10)         \
  MSL_UNARY(log, __builtin_logf)      \
  MSL_UNARY(log2, __builtin_log2f)    \
  MSL_UNARY(log10, __builtin_log10f)  \
  MSL_UNARY(sin, __builtin_sinf)      \
  MSL_UNARY(cos, __builtin_cosf)      \
  MSL_UNARY(tan, __builtin_tanf)      \
  MSL_UNARY(sinpi, MSL_SINPI)         \
  MSL_UNARY(cospi, MSL_COSPI)         \
  MSL_UNARY(tanpi, MSL_TANPI)         \
  MSL_UNARY(asin, __builtin_asinf)    \
  MSL_UNARY(acos, __builtin_acosf)    \
  MSL_UNARY(atan, __builtin_atanf)    \
  MSL_UNARY(sinh, __builtin_sinhf)    \
  MSL_UNARY(cosh, __builtin_coshf)    \
  MSL_UNARY(tanh, __builtin_tanhf)    \
  MSL_UNARY(asinh, __builtin_asinhf)  \
  MSL_UNARY(acosh, __builtin_acoshf)  \
  MSL_UNARY(atanh, __builtin_atanhf)  \
  MSL_UNARY(sqrt, __builtin_sqrtf)    \
  MSL_UNARY(rsqrt, MSL_RSQRT)         \
  MSL_UNARY(fabs, __builtin_fabsf)    \
  MSL_UNARY(floor, __builtin_floorf)  \
  MSL_UNARY(ceil, __builtin_ceilf)    \
  MSL_UNARY(rint, __builtin_rintf)    \
  MSL_UNARY(round, __builtin_roundf)  \
  MSL_UNARY(trunc, __builtin_truncf)  \
  MSL_UNARY(fract, MSL_FRACT)         \
  MSL_BINARY(pow, __builtin_powf)     \
  MSL_BINARY(powr, __builtin_powf)    \
  MSL_BINARY(atan2, __builtin_atan2f) \
  MSL_BINARY(fmod, __builtin_fmodf)   \
  MSL_BINARY(fmin, __builtin_fminf)   \
  MSL_BINARY(fmax, __builtin_fmaxf)

MSL_FLOAT_FUNCTIONS
MSL_UNARY(sign, MSL_SIGN)
MSL_BINARY(copysign, __builtin_copysignf)
MSL_BINARY(fdim, __builtin_fdimf)
MSL_BINARY(nextafter, __builtin_nextafterf)

template <class T, MSL_FLOAT>
MSL_INLINE T fma(T a, T b, T c) {
  if constexpr (msl_shim::is_vec<T>) {
    T r;
    for (int i = 0; i < msl_shim::traits<T>::size; ++i)
      r[i] = fma(msl_shim::element<T>(a[i]), msl_shim::element<T>(b[i]), msl_shim::element<T>(c[i]));
    return r;
  } else {
    return T(__builtin_fmaf(float(a), float(b), float(c)));
  }
}

template <class T>
MSL_INLINE T min(T a, T b) {
  if constexpr (msl_shim::is_vec<T>) {
    T r;
    for (int i = 0; i < msl_shim::traits<T>::size; ++i)
      r[i] = min(msl_shim::element<T>(a[i]), msl_shim::element<T>(b[i]));
    return r;
  } else if constexpr (msl_shim::is_float<T>) {
    return fmin(a, b);
  } else {
    static_assert(__is_integral(T), "min is of numbers");
    return b < a ? b : a;
  }
}
template <class T>
MSL_INLINE T max(T a, T b) {
  if constexpr (msl_shim::is_vec<T>) {
    T r;
    for (int i = 0; i < msl_shim::traits<T>::size; ++i)
      r[i] = max(msl_shim::element<T>(a[i]), msl_shim::element<T>(b[i]));
    return r;
  } else if constexpr (msl_shim::is_float<T>) {
    return fmax(a, b);
  } else {
    static_assert(__is_integral(T), "max is of numbers");
    return a < b ? b : a;
  }
}
template <class V, MSL_ENABLE(msl_shim::is_vec<V>)>
MSL_INLINE V min(V a, msl_shim::element<V> b) {
  return min(a, V(b));
}
template <class V, MSL_ENABLE(msl_shim::is_vec<V>)>
MSL_INLINE V max(V a, msl_shim::element<V> b) {
  return max(a, V(b));
}
template <class T>
MSL_INLINE T min3(T a, T b, T c) {
  return min(a, min(b, c));
}
template <class T>
MSL_INLINE T max3(T a, T b, T c) {
  return max(a, max(b, c));
}
template <class T>
MSL_INLINE T median3(T a, T b, T c) {
  return max(min(a, b), min(max(a, b), c));
}
template <class T>
MSL_INLINE T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class V, MSL_ENABLE(msl_shim::is_vec<V>)>
MSL_INLINE V clamp(V x, msl_shim::element<V> low, msl_shim::element<V> high) {
  return min(max(x, V(low)), V(high));
}
template <class T, MSL_FLOAT>
MSL_INLINE T mix(T x, T y, T a) {
  return x + (y - x) * a;
}
template <class T, MSL_FLOAT>
MSL_INLINE T saturate(T x) {
  return clamp(x, T(0), T(1));
}
template <class T, MSL_FLOAT>
MSL_INLINE T step(T edge, T x) {
  if constexpr (msl_shim::is_vec<T>) {
    T r;
    for (int i = 0; i < msl_shim::traits<T>::size; ++i) r[i] = x[i] < edge[i] ? 0 : 1;
    return r;
  } else {
    return x < edge ? T(0) : T(1);
  }
}
template <class T, MSL_FLOAT>
MSL_INLINE T smoothstep(T a, T b, T x) {
  const T t = saturate((x - a) / (b - a));
  return t * t * (T(3) - T(2) * t);
}
namespace precise {
MSL_FLOAT_FUNCTIONS
using metal::clamp;
using metal::fma;
using metal::max;
using metal::min;
}  // namespace precise
namespace fast {
MSL_FLOAT_FUNCTIONS
using metal::clamp;
using metal::fma;
using metal::max;
using metal::min;
}  // namespace fast

MSL_INLINE float ldexp(float x, int k) {
  return __builtin_ldexpf(x, k);
}
MSL_INLINE float frexp(float x, thread int& exponent) {
  return __builtin_frexpf(x, &exponent);
}
MSL_INLINE float modf(float x, thread float& whole) {
  whole = __builtin_truncf(x);
  return __builtin_isinf(x) ? __builtin_copysignf(0.0f, x) : x - whole;
}
MSL_INLINE float sincos(float x, thread float& cosine) {
  cosine = __builtin_cosf(x);
  return __builtin_sinf(x);
}
MSL_INLINE int ilogb(float x) {
  return __builtin_ilogbf(x);
}

// Tests give bool, of vectors a vector of bool.
#define MSL_TEST(name, call)                                                             \
  template <class T, MSL_FLOAT>                                                          \
  MSL_INLINE auto name(T x) {                                                            \
    if constexpr (msl_shim::is_vec<T>) {                                                 \
      vec<bool, msl_shim::traits<T>::size> r;                                            \
      for (int i = 0; i < msl_shim::traits<T>::size; ++i) r[i] = call(float(x[i])) != 0; \
      return r;                                                                          \
    } else {                                                                             \
      return call(float(x)) != 0;                                                        \
    }                                                                                    \
  }
MSL_TEST(isnan, __builtin_isnan)
MSL_TEST(isinf, __builtin_isinf)
MSL_TEST(isfinite, __builtin_isfinite)
MSL_TEST(isnormal, __builtin_isnormal)
MSL_TEST(signbit, __builtin_signbit)
#undef MSL_TEST

// b where c, else a; a comparison of vectors gives integers here, bool in Metal.
template <class T, class C>
MSL_INLINE T select(T a, T b, C c) {
  if constexpr (msl_shim::is_vec<T>) {
    static_assert(msl_shim::traits<C>::size == msl_shim::traits<T>::size, "select is of vectors of one size");
    T r;
    for (int i = 0; i < msl_shim::traits<T>::size; ++i) r[i] = c[i] ? b[i] : a[i];
    return r;
  } else {
    static_assert(msl_shim::is_same<C, bool>, "select(a, b, bool)");
    return c ? b : a;
  }
}
template <class V>
MSL_INLINE bool any(V x) {
  if constexpr (msl_shim::is_vec<V>) {
    bool r = false;
    for (int i = 0; i < msl_shim::traits<V>::size; ++i) r = r || x[i];
    return r;
  } else {
    return x;
  }
}
template <class V>
MSL_INLINE bool all(V x) {
  if constexpr (msl_shim::is_vec<V>) {
    bool r = true;
    for (int i = 0; i < msl_shim::traits<V>::size; ++i) r = r && x[i];
    return r;
  } else {
    return x;
  }
}

#define MSL_VEC MSL_ENABLE(msl_shim::is_vec<V>)
template <class V, MSL_VEC>
MSL_INLINE msl_shim::element<V> dot(V a, V b) {
  msl_shim::element<V> sum = a[0] * b[0];
  for (int i = 1; i < msl_shim::traits<V>::size; ++i) sum += a[i] * b[i];
  return sum;
}
template <class V, MSL_VEC>
MSL_INLINE msl_shim::element<V> length_squared(V x) {
  return dot(x, x);
}
template <class V, MSL_VEC>
MSL_INLINE msl_shim::element<V> length(V x) {
  return sqrt(dot(x, x));
}
template <class V, MSL_VEC>
MSL_INLINE msl_shim::element<V> distance(V a, V b) {
  return length(a - b);
}
template <class V, MSL_VEC>
MSL_INLINE V normalize(V x) {
  return x * V(rsqrt(dot(x, x)));
}
template <class V, MSL_ENABLE(msl_shim::traits<V>::size == 3)>
MSL_INLINE V cross(V a, V b) {
  return a.yzx * b.zxy - a.zxy * b.yzx;
}

}  // namespace metal

#endif
