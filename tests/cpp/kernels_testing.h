// Owning tensors for the kernel tests: values are set and read as double, memory starts poisoned.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "runtime/kernels/scalar.h"
#include "runtime/tensor.h"

namespace flexpte::testing {

class Tensor {
 public:
  // `strides` empty: contiguous. All bytes, those between strided elements too, are 0xFF (NaN).
  Tensor(DType dtype, std::vector<int64_t> sizes, std::vector<int64_t> strides = {}) {
    view_.dtype = dtype;
    view_.rank = static_cast<int32_t>(sizes.size());
    int64_t expected = 1;
    int64_t last = 0;
    bool is_empty = false;
    for (size_t d = sizes.size(); d-- > 0;) {
      view_.sizes[d] = sizes[d];
      view_.strides[d] = strides.empty() ? expected : strides[d];
      expected *= sizes[d];
      last += (sizes[d] - 1) * view_.strides[d];
      is_empty = is_empty || sizes[d] == 0;
    }
    const int64_t elements = is_empty ? 0 : last + 1;
    bytes_.assign(static_cast<size_t>(elements * element_size_bytes(dtype)), std::byte{0xFF});
    view_.data = bytes_.data();
  }
  Tensor(Tensor&&) = default;

  const TensorView& view() const { return view_; }
  int64_t num_elements() const { return view_.num_elements(); }
  const std::vector<std::byte>& bytes() const { return bytes_; }

  // Element number i in row-major order.
  double get(int64_t i) const {
    return with_storage_type(
        view_.dtype, [&](auto tag) { return static_cast<double>(widen(view_.as<decltype(tag)>()[offset(i)])); });
  }
  void set(int64_t i, double value) {
    with_storage_type(view_.dtype,
                      [&](auto tag) { view_.as<decltype(tag)>()[offset(i)] = convert<decltype(tag)>(value); });
  }
  int64_t get_int(int64_t i) const {
    return with_storage_type(view_.dtype,
                             [&](auto tag) { return convert<int64_t>(view_.as<decltype(tag)>()[offset(i)]); });
  }

  Tensor& fill_random(uint32_t seed, double scale = 1.0) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < num_elements(); ++i) set(i, scale * normal(random));
    return *this;
  }
  Tensor& fill(const std::vector<double>& values) {
    for (size_t i = 0; i < values.size(); ++i) set(static_cast<int64_t>(i), values[i]);
    return *this;
  }

  std::vector<double> values() const {
    std::vector<double> all;
    for (int64_t i = 0; i < num_elements(); ++i) all.push_back(get(i));
    return all;
  }

 private:
  int64_t offset(int64_t i) const {
    int64_t result = 0;
    for (int32_t d = view_.rank; d-- > 0;) {
      result += i % view_.size(d) * view_.stride(d);
      i /= view_.size(d);
    }
    return result;
  }

  TensorView view_;
  std::vector<std::byte> bytes_;
};

// Workspace between two fences; unaligned, and filled with NaN.
class Workspace {
 public:
  explicit Workspace(size_t size_bytes) : bytes_(size_bytes + 2 * kFence, std::byte{0xFF}) {}
  std::span<std::byte> span() { return std::span(bytes_).subspan(kFence, bytes_.size() - 2 * kFence); }
  bool fences_are_whole() const {
    for (size_t i = 0; i < kFence; ++i) {
      if (bytes_[i] != std::byte{0xFF} || bytes_[bytes_.size() - 1 - i] != std::byte{0xFF}) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kFence = 52;
  std::vector<std::byte> bytes_;
};

// Half a unit in the last place, relative.
inline double rounding(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return 0x1p-11;
    case DType::kBF16:
      return 0x1p-8;
    case DType::kF32:
      return 0x1p-24;
    default:
      return 0;
  }
}

}  // namespace flexpte::testing
