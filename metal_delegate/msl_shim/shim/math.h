// Functions of scalars and vectors. Those of half and bfloat are computed in float and rounded once.
#ifndef FLEXPTE_MSL_MATH
#define FLEXPTE_MSL_MATH

namespace msl_shim {
template <class T>
constexpr bool is_float = is_same<T, float>::value || is_same<T, half>::value || is_same<T, bfloat>::value;
template <class T>
constexpr bool is_narrow = is_same<T, half>::value || is_same<T, bfloat>::value;
template <class T>
constexpr bool is_int = __is_integral(T) && !is_same<T, bool>::value;
template <class V>
constexpr bool is_vec = traits<V>::is_vector;
template <class V>
using element = typename traits<V>::element;
}  // namespace msl_shim

namespace metal {

#define MSL_ENABLE(...) typename msl_shim::enable_if<(__VA_ARGS__), int>::type = 0

// name(x) by a function of float.
#define MSL_UNARY(name, call)                                        \
  inline float name(float x) { return call(x); }                     \
  template <class T, MSL_ENABLE(msl_shim::is_narrow<T>)>             \
  inline T name(T x) {                                               \
    return T(name(float(x)));                                        \
  }                                                                  \
  template <class V, MSL_ENABLE(msl_shim::is_vec<V>)>                \
  inline V name(V x) {                                               \
    V r;                                                             \
    for (int i = 0; i < msl_shim::traits<V>::size; ++i) r[i] = name(msl_shim::element<V>(x[i])); \
    return r;                                                        \
  }
#define MSL_BINARY(name, call)                                       \
  inline float name(float x, float y) { return call(x, y); }         \
  template <class T, MSL_ENABLE(msl_shim::is_narrow<T>)>             \
  inline T name(T x, T y) {                                          \
    return T(name(float(x), float(y)));                              \
  }                                                                  \
  template <class V, MSL_ENABLE(msl_shim::is_vec<V>)>                \
  inline V name(V x, V y) {                                          \
    V r;                                                             \
    for (int i = 0; i < msl_shim::traits<V>::size; ++i)              \
      r[i] = name(msl_shim::element<V>(x[i]), msl_shim::element<V>(y[i])); \
    return r;                                                        \
  }

#define MSL_TRANSCENDENTAL                      \
  MSL_UNARY(exp, __builtin_expf)                \
  MSL_UNARY(exp2, __builtin_exp2f)              \
  MSL_UNARY(log, __builtin_logf)                \
  MSL_UNARY(log2, __builtin_log2f)              \
  MSL_UNARY(log10, __builtin_log10f)            \
  MSL_UNARY(sin, __builtin_sinf)                \
  MSL_UNARY(cos, __builtin_cosf)                \
  MSL_UNARY(tan, __builtin_tanf)                \
  MSL_UNARY(asin, __builtin_asinf)              \
  MSL_UNARY(acos, __builtin_acosf)              \
  MSL_UNARY(atan, __builtin_atanf)              \
  MSL_UNARY(sinh, __builtin_sinhf)              \
  MSL_UNARY(cosh, __builtin_coshf)              \
  MSL_UNARY(tanh, __builtin_tanhf)              \
  MSL_UNARY(asinh, __builtin_asinhf)            \
  MSL_UNARY(acosh, __builtin_acoshf)            \
  MSL_UNARY(atanh, __builtin_atanhf)            \
  MSL_UNARY(sqrt, __builtin_sqrtf)              \
  MSL_UNARY(rsqrt, 1.0f / __builtin_sqrtf)      \
  MSL_BINARY(pow, __builtin_powf)               \
  MSL_BINARY(powr, __builtin_powf)              \
  MSL_BINARY(atan2, __builtin_atan2f)

MSL_TRANSCENDENTAL
MSL_UNARY(fabs, __builtin_fabsf)
MSL_UNARY(floor, __builtin_floorf)
MSL_UNARY(ceil, __builtin_ceilf)
MSL_UNARY(rint, __builtin_rintf)
MSL_UNARY(round, __builtin_roundf)
MSL_UNARY(trunc, __builtin_truncf)
MSL_BINARY(fmod, __builtin_fmodf)
MSL_BINARY(copysign, __builtin_copysignf)
MSL_BINARY(fmin, __builtin_fminf)
MSL_BINARY(fmax, __builtin_fmaxf)
namespace precise {
MSL_TRANSCENDENTAL
}
namespace fast {
MSL_TRANSCENDENTAL
}

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <class T, MSL_ENABLE(msl_shim::is_narrow<T>)>
inline T fma(T a, T b, T c) {
  return T(__builtin_fmaf(float(a), float(b), float(c)));
}
template <class V, MSL_ENABLE(msl_shim::is_vec<V>)>
inline V fma(V a, V b, V c) {
  V r;
  for (int i = 0; i < msl_shim::traits<V>::size; ++i)
    r[i] = fma(msl_shim::element<V>(a[i]), msl_shim::element<V>(b[i]), msl_shim::element<V>(c[i]));
  return r;
}

template <class T, MSL_ENABLE(!msl_shim::is_vec<T>)>
inline T min(T a, T b) {
  if constexpr (msl_shim::is_float<T>) return fmin(a, b);
  return b < a ? b : a;
}
template <class T, MSL_ENABLE(!msl_shim::is_vec<T>)>
inline T max(T a, T b) {
  if constexpr (msl_shim::is_float<T>) return fmax(a, b);
  return a < b ? b : a;
}
template <class V, MSL_ENABLE(msl_shim::is_vec<V>), class = void>
inline V min(V a, V b) {
  V r;
  for (int i = 0; i < msl_shim::traits<V>::size; ++i)
    r[i] = min(msl_shim::element<V>(a[i]), msl_shim::element<V>(b[i]));
  return r;
}
template <class V, MSL_ENABLE(msl_shim::is_vec<V>), class = void>
inline V max(V a, V b) {
  V r;
  for (int i = 0; i < msl_shim::traits<V>::size; ++i)
    r[i] = max(msl_shim::element<V>(a[i]), msl_shim::element<V>(b[i]));
  return r;
}
template <class T>
inline T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class T>
inline T mix(T x, T y, T a) {
  return x + (y - x) * a;
}
template <class T>
inline T saturate(T x) {
  return clamp(x, T(0), T(1));
}
template <class T>
inline T abs(T x) {
  if constexpr (msl_shim::is_float<T>) return fabs(x);
  return x < T(0) ? T(-x) : x;
}
template <class T, MSL_ENABLE(!msl_shim::is_vec<T>)>
inline T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T, MSL_ENABLE(msl_shim::is_float<T>)>
inline bool isnan(T x) {
  return __builtin_isnan(float(x));
}
template <class T, MSL_ENABLE(msl_shim::is_float<T>)>
inline bool isinf(T x) {
  return __builtin_isinf(float(x));
}
template <class T, MSL_ENABLE(msl_shim::is_float<T>)>
inline bool isfinite(T x) {
  return __builtin_isfinite(float(x));
}
template <class T, MSL_ENABLE(msl_shim::is_int<T>)>
inline T popcount(T x) {
  return T(__builtin_popcountll(ulong(x) & (~0ul >> (64 - 8 * sizeof(T)))));
}
template <class T, MSL_ENABLE(msl_shim::is_int<T>)>
inline T ctz(T x) {
  return x == 0 ? T(8 * sizeof(T)) : T(__builtin_ctzll(ulong(x)));
}
template <class T, MSL_ENABLE(msl_shim::is_int<T>)>
inline T clz(T x) {
  const ulong bits = ulong(x) & (~0ul >> (64 - 8 * sizeof(T)));
  return bits == 0 ? T(8 * sizeof(T)) : T(__builtin_clzll(bits) - (64 - int(8 * sizeof(T))));
}
template <class V, MSL_ENABLE(msl_shim::is_vec<V>)>
inline msl_shim::element<V> dot(V a, V b) {
  msl_shim::element<V> sum = a[0] * b[0];
  for (int i = 1; i < msl_shim::traits<V>::size; ++i) sum += a[i] * b[i];
  return sum;
}
template <class V, MSL_ENABLE(msl_shim::is_vec<V>)>
inline bool any(V x) {
  bool r = false;
  for (int i = 0; i < msl_shim::traits<V>::size; ++i) r = r || x[i];
  return r;
}
template <class V, MSL_ENABLE(msl_shim::is_vec<V>)>
inline bool all(V x) {
  bool r = true;
  for (int i = 0; i < msl_shim::traits<V>::size; ++i) r = r && x[i];
  return r;
}

template <class T>
struct numeric_limits {
  static constexpr T max() {
    if constexpr (msl_shim::is_same<T, float>::value) return FLT_MAX;
    if constexpr (msl_shim::is_same<T, half>::value) return T(65504.0f);
    if constexpr (msl_shim::is_same<T, bfloat>::value) return T(3.3895314e38f);
    if constexpr (__is_integral(T)) return T(~0ul >> (T(-1) < T(0) ? 65 - 8 * sizeof(T) : 64 - 8 * sizeof(T)));
  }
  static constexpr T lowest() {
    if constexpr (msl_shim::is_float<T>) return -max();
    if constexpr (__is_integral(T)) return T(-1) < T(0) ? T(-max() - 1) : T(0);
  }
  static constexpr T min() {
    if constexpr (msl_shim::is_same<T, float>::value) return FLT_MIN;
    if constexpr (msl_shim::is_same<T, half>::value) return T(6.103515625e-05f);
    if constexpr (msl_shim::is_same<T, bfloat>::value) return T(FLT_MIN);
    if constexpr (__is_integral(T)) return lowest();
  }
  static constexpr T infinity() { return T(INFINITY); }
  static constexpr T quiet_NaN() { return T(NAN); }
};

}  // namespace metal

#endif
