#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "runtime/kernels/kernels.h"
#include "runtime/kernels/scalar.h"
#include "runtime/kernels/simd_targets.h"
#include "runtime/kernels/strided.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/kernels/copy.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "runtime/kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {
namespace {

template <class In, class Out>
void convert_row(const In* in, int64_t count, Out* out) {
  const DF d;
  constexpr int64_t kLanes = HWY_LANES(float);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(load(d, in + i), d, out + i);
  for (; i < count; ++i) out[i] = convert<Out>(in[i]);
}

// Contiguous elements of F32, F16 or BF16.
void convert_floats(const void* in, DType in_dtype, int64_t count, void* out, DType out_dtype) {
  with_float_type(in_dtype, [&](auto in_tag) {
    with_float_type(out_dtype, [&](auto out_tag) {
      convert_row(static_cast<const decltype(in_tag)*>(in), count, static_cast<decltype(out_tag)*>(out));
    });
  });
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace flexpte
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flexpte {
namespace {
HWY_EXPORT(convert_floats);

// One row of a copy; strides in elements.
using CopyRow = void (*)(const std::byte* in, int64_t in_stride, DType in_dtype, std::byte* out, int64_t out_stride,
                         DType out_dtype, int64_t count);

void copy_contiguous(const std::byte* in, int64_t, DType dtype, std::byte* out, int64_t, DType, int64_t count) {
  std::memcpy(out, in, static_cast<size_t>(count * element_size_bytes(dtype)));
}

void convert_contiguous(const std::byte* in, int64_t, DType in_dtype, std::byte* out, int64_t, DType out_dtype,
                        int64_t count) {
  HWY_DYNAMIC_DISPATCH(convert_floats)(in, in_dtype, count, out, out_dtype);
}

void convert_strided(const std::byte* in, int64_t in_stride, DType in_dtype, std::byte* out, int64_t out_stride,
                     DType out_dtype, int64_t count) {
  with_storage_type(in_dtype, [&](auto in_tag) {
    with_storage_type(out_dtype, [&](auto out_tag) {
      using In = decltype(in_tag);
      using Out = decltype(out_tag);
      const auto* const from = reinterpret_cast<const In*>(in);
      auto* const to = reinterpret_cast<Out*>(out);
      for (int64_t i = 0; i < count; ++i) {
        if constexpr (std::is_same_v<In, Out>) {
          to[i * out_stride] = from[i * in_stride];  // every bit, NaN payloads too
        } else {
          to[i * out_stride] = convert<Out>(from[i * in_stride]);
        }
      }
    });
  });
}

bool is_simd_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

}  // namespace

void copy(const TensorView& source, const TensorView& out, const ThreadPool& pool) {
  assert(source.rank == out.rank);
  Strided<2> shape;
  for (int32_t d = 0; d < out.rank; ++d) {
    assert(source.size(d) == out.size(d));
    shape.append(out.size(d), {source.stride(d), out.stride(d)});
  }
  if (shape.num_elements() == 0) return;
  const auto [count, strides] = shape.pop_inner();
  const int64_t in_stride = strides[0], out_stride = strides[1];
  const bool contiguous = count == 1 || (in_stride == 1 && out_stride == 1);
  CopyRow row = convert_strided;
  if (contiguous && source.dtype == out.dtype) {
    row = copy_contiguous;
  } else if (contiguous && is_simd_float(source.dtype) && is_simd_float(out.dtype)) {
    row = convert_contiguous;
  }
  const int64_t rows = shape.num_elements();
  const int64_t in_bytes = element_size_bytes(source.dtype), out_bytes = element_size_bytes(out.dtype);
  const auto* const from = source.as<const std::byte>();
  auto* const to = out.as<std::byte>();
  if (rows == 1) {
    pool.parallel_for(count, rows_per_piece(1), [&](int64_t begin, int64_t end, int) {
      row(from + begin * in_stride * in_bytes, in_stride, source.dtype, to + begin * out_stride * out_bytes, out_stride,
          out.dtype, end - begin);
    });
    return;
  }
  pool.parallel_for(rows, rows_per_piece(count), [&, count = count](int64_t begin, int64_t end, int) {
    StridedIterator<2> it(shape, begin);
    for (int64_t i = begin; i < end; ++i, it.advance()) {
      row(from + it.offset(0) * in_bytes, in_stride, source.dtype, to + it.offset(1) * out_bytes, out_stride, out.dtype,
          count);
    }
  });
}

void arange(const TensorView& out, int64_t start, int64_t step) {
  assert(out.rank == 1);
  with_storage_type(out.dtype, [&](auto tag) {
    using T = decltype(tag);
    T* const to = out.as<T>();
    // Unsigned, so that a value past the last one may wrap.
    uint64_t value = static_cast<uint64_t>(start);
    for (int64_t i = 0; i < out.size(0); ++i, value += static_cast<uint64_t>(step)) {
      to[i * out.stride(0)] = convert<T>(static_cast<int64_t>(value));
    }
  });
}

}  // namespace flexpte
#endif  // HWY_ONCE
