// Meaning of single operations on scalars, shared by the tile loops and the ranges evaluator. All are
// total: integer overflow wraps (two's complement), division by zero gives 0 where ATen raises, and a
// float outside the integer type saturates (NaN gives 0) where ATen leaves it undefined.
#pragma once

#include <bit>
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

template <class To, class From>
constexpr To saturate_cast(From x) {
  // The largest power of two that is out of range, exact in any floating type.
  constexpr From limit = static_cast<From>(uint64_t{1} << (std::numeric_limits<To>::digits - 1)) * From{2};
  if (x >= limit) return std::numeric_limits<To>::max();
  if (x < -limit) return std::numeric_limits<To>::min();
  return x == x ? static_cast<To>(x) : To{0};
}

// IEEE binary16 and bfloat16, stored as their bits.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float to_float(Float16 h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t magnitude = h.bits & 0x7fffu;
  // Exponents are 112 apart; the product also normalises subnormals exactly.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const uint32_t finite = std::bit_cast<uint32_t>(scaled);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  return std::bit_cast<float>(sign | (magnitude >= 0x7c00u ? special : finite));
}

inline float to_float(BFloat16 b) { return std::bit_cast<float>(static_cast<uint32_t>(b.bits) << 16); }

// Nearest, ties to even; NaN stays a (quiet) NaN.
inline Float16 to_float16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Below the normals: adding 0.5 aligns the units of both formats, and the sum rounds.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t small = magnitude < 0x38800000u ? subnormal : normal;
  return {static_cast<uint16_t>(sign | (magnitude >= 0x477ff000u ? special : small))};
}

inline BFloat16 to_bfloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
}

// Conversion between element types, for all of payload.fbs: DType. Bool is uint8_t 0 or 1 here, marked
// by the tag so that it is not taken for U8.
struct Boolean {
  uint8_t value;
};

template <class To, class From>
inline To convert_element(From x) {
  if constexpr (std::is_same_v<From, Float16> || std::is_same_v<From, BFloat16>) {
    return convert_element<To>(to_float(x));
  } else if constexpr (std::is_same_v<From, Boolean>) {
    return convert_element<To>(static_cast<uint8_t>(x.value != 0));
  } else if constexpr (std::is_same_v<To, Boolean>) {
    return Boolean{static_cast<uint8_t>(x != From{0})};
  } else if constexpr (std::is_same_v<To, Float16>) {
    return to_float16(static_cast<float>(x));
  } else if constexpr (std::is_same_v<To, BFloat16>) {
    return to_bfloat16(static_cast<float>(x));
  } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
    // Narrow integers wrap from the 64-bit value, as ATen's casts do.
    if constexpr (sizeof(To) < 4) {
      return static_cast<To>(saturate_cast<int64_t>(x));
    } else {
      return saturate_cast<To>(x);
    }
  } else {
    return static_cast<To>(x);
  }
}

}  // namespace flexpte
