// Meaning of single operations of expressions on scalars, shared by the tile loops and the ranges
// evaluator. All are total: integer overflow wraps (two's complement) and integer division by zero
// gives 0, where ATen raises.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace flexpte {

template <class T>
constexpr T wrap_add(T a, T b) {
  using U = std::make_unsigned_t<T>;
  return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
}

template <class T>
constexpr T wrap_sub(T a, T b) {
  using U = std::make_unsigned_t<T>;
  return static_cast<T>(static_cast<U>(a) - static_cast<U>(b));
}

template <class T>
constexpr T wrap_mul(T a, T b) {
  using U = std::make_unsigned_t<T>;
  return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
}

template <class T>
constexpr T wrap_neg(T a) {
  return wrap_sub(T{0}, a);
}

template <class T>
constexpr T trunc_div(T a, T b) {
  if (b == 0) return 0;
  if (b == -1) return wrap_neg(a);
  return a / b;
}

template <class T>
constexpr T trunc_mod(T a, T b) {
  if (b == 0 || b == -1) return 0;
  return a % b;
}

template <class T>
constexpr T floor_div(T a, T b) {
  const T quotient = trunc_div(a, b);
  return trunc_mod(a, b) != 0 && (a < 0) != (b < 0) ? static_cast<T>(quotient - 1) : quotient;
}

template <class T>
constexpr T floor_mod(T a, T b) {
  const T remainder = trunc_mod(a, b);
  return remainder != 0 && (a < 0) != (b < 0) ? static_cast<T>(remainder + b) : remainder;
}

// As ATen's powi: a negative exponent gives 0 but for bases 1 and -1.
template <class T>
constexpr T int_pow(T base, T exponent) {
  if (exponent < 0) {
    if (base == 1) return 1;
    if (base == -1) return exponent % 2 == 0 ? 1 : -1;
    return 0;
  }
  T result = 1;
  for (;; base = wrap_mul(base, base)) {
    if (exponent % 2 != 0) result = wrap_mul(result, base);
    exponent /= 2;
    if (exponent == 0) return result;
  }
}

// Shift counts outside [0, bits): 0 to the left, the sign to the right.
template <class T>
constexpr T shift_left(T a, T count) {
  using U = std::make_unsigned_t<T>;
  constexpr T bits = std::numeric_limits<U>::digits;
  return count < 0 || count >= bits ? T{0} : static_cast<T>(static_cast<U>(a) << static_cast<U>(count));
}

template <class T>
constexpr T shift_right(T a, T count) {
  constexpr T bits = std::numeric_limits<std::make_unsigned_t<T>>::digits;
  return static_cast<T>(a >> (count < 0 || count >= bits ? static_cast<T>(bits - 1) : count));
}

inline float float_remainder(float a, float b) {
  const float mod = std::fmod(a, b);
  return mod != 0.0f && (b < 0.0f) != (mod < 0.0f) ? mod + b : mod;
}

// c10::div_floor_floating.
inline float float_floor_div(float a, float b) {
  if (b == 0.0f) return a / b;
  const float mod = std::fmod(a, b);
  float quotient = (a - mod) / b;
  if (mod != 0.0f && (b < 0.0f) != (mod < 0.0f)) quotient -= 1.0f;
  if (quotient == 0.0f) return std::copysign(0.0f, a / b);
  const float floored = std::floor(quotient);
  return quotient - floored > 0.5f ? floored + 1.0f : floored;
}

}  // namespace flexpte
