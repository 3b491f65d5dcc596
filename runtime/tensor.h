// Element types and strided, non-owning tensor views.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace flexpte {

enum class DType : int8_t { kBool = 0, kU8, kI8, kI16, kI32, kI64, kF16, kBF16, kF32, kF64 };
inline constexpr int kNumDTypes = 10;

constexpr int64_t element_size_bytes(DType dtype) {
  constexpr std::array<int64_t, kNumDTypes> sizes = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8};
  return sizes[static_cast<size_t>(dtype)];
}

constexpr std::string_view dtype_name(DType dtype) {
  constexpr std::array<std::string_view, kNumDTypes> names = {"bool",  "uint8",   "int8",     "int16",   "int32",
                                                              "int64", "float16", "bfloat16", "float32", "float64"};
  return names[static_cast<size_t>(dtype)];
}

constexpr bool is_floating(DType dtype) {
  return dtype >= DType::kF16;
}

inline constexpr int kMaxRank = 8;

// A strided view; sizes and strides in elements. Views never own.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> sizes{};
  std::array<int64_t, kMaxRank> strides{};

  int64_t size(int32_t dim) const { return sizes[static_cast<size_t>(dim)]; }
  int64_t stride(int32_t dim) const { return strides[static_cast<size_t>(dim)]; }
  int64_t num_elements() const {
    int64_t n = 1;
    for (int32_t d = 0; d < rank; ++d) n *= size(d);
    return n;
  }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int32_t d = rank; d-- > 0;) {
      if (size(d) != 1 && stride(d) != expected) return false;
      expected *= size(d);
    }
    return true;
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// "[2, 3, 4]"
std::string shape_string(const TensorView& view);

}  // namespace flexpte
