// What the encode_*.cpp files of kinds of instructions share.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "metal_delegate/gpu/encode_ops.h"
#include "metal_delegate/gpu/encoder.h"
#include "metal_delegate/gpu/params.h"
#include "runtime/kernels/strided.h"
#include "runtime/status.h"
#include "runtime/tensor.h"

namespace flexpte::gpu {

// One function a kind of instruction.
Status encode_linear(Encoder& encoder, const Call& call);
Status encode_matmul(Encoder& encoder, const Call& call);
Status encode_norm(Encoder& encoder, const Call& call);
Status encode_softmax(Encoder& encoder, const Call& call);
Status encode_reduce(Encoder& encoder, const Call& call);
Status encode_gather(Encoder& encoder, const Call& call);
Status encode_index_copy(Encoder& encoder, const Call& call);
Status encode_arange(Encoder& encoder, const Call& call);
Status encode_elementwise(Encoder& encoder, const Call& call);

// Captures as kernels index them.
void fill_views(std::span<const TensorView> captures, params::CaptureView* views);

inline constexpr int64_t kSimdWidth = 32;
inline constexpr int64_t kVectorBytes = 16;

inline int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

inline bool is_aligned(const void* data, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0;
}

inline int64_t max_threads(const Call& call, size_t kernel, int64_t wanted) {
  const int64_t most = call.pipelines[kernel]->max_threads_per_threadgroup();
  return std::max(kSimdWidth, std::min(wanted, most) / kSimdWidth * kSimdWidth);
}

// Extents that kernels hold in 32 bits.
template <class Int>
Result<Int> narrow(const char* what, int64_t count) {
  if (count >= 0 && count <= int64_t{std::numeric_limits<Int>::max()}) return static_cast<Int>(count);
  return Status(Code::kUnsupported, std::string(what) + ": " + std::to_string(count) + " of them; Metal kernels take " +
                                        std::to_string(std::numeric_limits<Int>::max()) + " at most");
}

// A grid over `inner` (x) and `rows` (y) of a kernel that loops over what exceeds it.
inline Grid grid_over(int64_t inner, int64_t rows, int64_t threads, int64_t max_threadgroups) {
  const auto round_up = [](int64_t n) { return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n))); };
  const int64_t x = std::min(round_up(std::clamp<int64_t>(inner, 1, threads)), threads);
  const int64_t y = std::min(std::max(threads / x, int64_t{1}), round_up(std::clamp<int64_t>(rows, 1, threads)));
  const int64_t wide = std::min(divide_up(inner, x), max_threadgroups);
  const int64_t high = std::min(divide_up(rows, y), std::max(max_threadgroups / wide, int64_t{1}));
  return {{static_cast<uint32_t>(wide), static_cast<uint32_t>(high), 1},
          {static_cast<uint32_t>(x), static_cast<uint32_t>(y), 1}};
}

// Of a kernel that loops: enough to fill the GPU several times over.
inline int64_t enough_threadgroups(Encoder& encoder) {
  return 64 * std::max<int64_t>(encoder.queue().num_cores(), 1);
}

// Strides of one of the views of merged dimensions, as a kernel's params hold them.
template <int N>
void copy_strides(const Strided<N>& shape, size_t view, int64_t* strides) {
  std::copy_n(shape.strides[view].begin(), shape.rank, strides);
}
template <int N>
void copy_sizes(const Strided<N>& shape, int64_t* sizes) {
  std::copy_n(shape.sizes.begin(), shape.rank, sizes);
}

// Whether the strides of a view are multiples of `elements`.
template <int N>
bool strides_divide(const Strided<N>& shape, size_t view, int64_t elements) {
  return std::all_of(shape.strides[view].begin(), shape.strides[view].begin() + shape.rank,
                     [elements](int64_t stride) { return stride % elements == 0; });
}

}  // namespace flexpte::gpu
