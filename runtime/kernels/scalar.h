// Conversion between element types, one element at a time.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "runtime/tensor.h"

namespace flexpte {

// Storage of the narrow floats; arithmetic happens in float.
struct Float16 {
  uint16_t bits = 0;
};
struct BFloat16 {
  uint16_t bits = 0;
};
// Storage of a bool: any nonzero byte is true, true is written as 1.
struct Bool {
  uint8_t byte = 0;
};

constexpr float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

inline float to_float(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7FFFu) << 13;
  // The exponent bias grows from 15 to 127: a multiplication, so that subnormals become normal.
  uint32_t bits = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  if (magnitude >= 0x0F800000u) bits |= 0x7F800000u;  // infinity or NaN
  return std::bit_cast<float>(bits | sign);
}

// Rounds to nearest even.
constexpr BFloat16 to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}

// Rounds to nearest even.
inline Float16 to_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t result;
  if (magnitude > 0x7F800000u) {
    result = 0x7E00u;
  } else if (magnitude >= 0x47800000u) {  // 65536
    result = 0x7C00u;
  } else if (magnitude < 0x38800000u) {  // below the smallest normal, 2^-14
    // The unit in the last place of 0.5 is 2^-24, that of the subnormals: the addition rounds.
    result = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
  } else {
    result = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return {static_cast<uint16_t>(result | ((bits >> 16) & 0x8000u))};
}

// Truncates; what does not fit saturates, NaN gives 0.
template <class Int, class Float>
Int float_to_int(Float value) {
  static_assert(std::is_same_v<Int, int32_t> || std::is_same_v<Int, int64_t>);
  constexpr Float kEnd = sizeof(Int) == 4 ? Float(0x1p31) : Float(0x1p63);
  if (std::isnan(value)) return 0;
  if (value >= kEnd) return std::numeric_limits<Int>::max();
  if (value < -kEnd) return std::numeric_limits<Int>::min();
  return static_cast<Int>(value);
}

// Widened to the arithmetic type: float, double or int64_t.
template <class T>
auto widen(T value) {
  if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) {
    return to_float(value);
  } else if constexpr (std::is_same_v<T, Bool>) {
    return static_cast<int64_t>(value.byte != 0);
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<int64_t>(value);
  } else {
    return value;
  }
}

// As a cast in ATen: floats round to nearest even, integers wrap, nonzero (NaN too) is true, a float
// becomes an integer by truncation and one of 8 or 16 bits by way of int64. Beyond that range, where
// ATen leaves it to the machine, see float_to_int.
template <class Out, class In>
Out convert(In input) {
  const auto value = widen(input);
  using Value = std::remove_const_t<decltype(value)>;
  if constexpr (std::is_same_v<Out, Bool>) {
    return {static_cast<uint8_t>(value != 0)};
  } else if constexpr (std::is_same_v<Out, Float16>) {
    return to_float16(static_cast<float>(value));
  } else if constexpr (std::is_same_v<Out, BFloat16>) {
    return to_bfloat16(static_cast<float>(value));
  } else if constexpr (std::is_integral_v<Out> && std::is_floating_point_v<Value>) {
    if constexpr (std::is_same_v<Out, int32_t>) {
      return float_to_int<int32_t>(value);
    } else {
      return static_cast<Out>(float_to_int<int64_t>(value));
    }
  } else {
    return static_cast<Out>(value);
  }
}

// Calls f with a value of the storage type of `dtype`.
template <class F>
decltype(auto) with_storage_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBool:
      return f(Bool());
    case DType::kU8:
      return f(uint8_t());
    case DType::kI8:
      return f(int8_t());
    case DType::kI16:
      return f(int16_t());
    case DType::kI32:
      return f(int32_t());
    case DType::kI64:
      return f(int64_t());
    case DType::kF16:
      return f(Float16());
    case DType::kBF16:
      return f(BFloat16());
    case DType::kF64:
      return f(double());
    case DType::kF32:
      break;
  }
  return f(float());
}

// The same for F32, F16 and BF16 only.
template <class F>
decltype(auto) with_float_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF16:
      return f(Float16());
    case DType::kBF16:
      return f(BFloat16());
    default:
      return f(float());
  }
}

}  // namespace flexpte
