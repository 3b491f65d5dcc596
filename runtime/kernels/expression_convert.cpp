// Casts between the types of nodes, rounding through narrower types, and conversion from and to the
// element types of tensors.
#include "runtime/kernels/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/kernels/expression_convert.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "runtime/kernels/expression_lanes-inl.h"
#include "runtime/kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {

struct Cast {
  template <class In, class Out>
  static HWY_INLINE Out apply(In x) {
    return convert<Out>(x);
  }
};

template <class Narrow>
struct RoundThrough {
  template <class T, class>
  static HWY_INLINE T apply(T x) {
    return static_cast<T>(static_cast<Narrow>(x));
  }
};

template <class Narrow>
struct RoundVector {
  static HWY_INLINE FloatVec apply(FloatTag d, FloatVec x) {
    HWY_ALIGN Narrow lanes[HWY_LANES(float)];
    store(x, d, lanes);
    return load(d, lanes);
  }
};

struct KeepVector {
  static HWY_INLINE FloatVec apply(FloatTag, FloatVec x) { return x; }
};

template <class In>
LaneKernel cast_from(DType to) {
  switch (to) {
    case DType::kBool:
      return unary_loop<Cast, In, Bool>;
    case DType::kI32:
      return unary_loop<Cast, In, int32_t>;
    case DType::kI64:
      return unary_loop<Cast, In, int64_t>;
    default:
      return unary_loop<Cast, In, float>;
  }
}

LaneKernel find_cast(DType from, DType to) {
  switch (from) {
    case DType::kBool:
      return cast_from<Bool>(to);
    case DType::kI32:
      return cast_from<int32_t>(to);
    case DType::kI64:
      return cast_from<int64_t>(to);
    default:
      return cast_from<float>(to);
  }
}

template <class T>
LaneKernel round_int(DType round_to) {
  switch (round_to) {
    case DType::kU8:
      return unary_loop<RoundThrough<uint8_t>, T, T>;
    case DType::kI8:
      return unary_loop<RoundThrough<int8_t>, T, T>;
    case DType::kI16:
      return unary_loop<RoundThrough<int16_t>, T, T>;
    case DType::kI32:
      return unary_loop<RoundThrough<int32_t>, T, T>;
    default:
      return nullptr;
  }
}

LaneKernel find_round(DType type, DType round_to) {
  if (type == DType::kI32) return round_int<int32_t>(round_to);
  if (type == DType::kI64) return round_int<int64_t>(round_to);
  if (type != DType::kF32) return nullptr;
  switch (round_to) {
    case DType::kF16:
      return unary_vectors<RoundVector<Float16>>;
    case DType::kBF16:
      return unary_vectors<RoundVector<BFloat16>>;
    case DType::kF32:
      return unary_vectors<KeepVector>;
    default:
      return nullptr;
  }
}

template <class Narrow>
void widen_lanes(const void* source, void* out, int64_t n) {
  widen_row(static_cast<const Narrow*>(source), n, static_cast<float*>(out));
}

template <class Narrow>
void narrow_lanes(const void* source, void* out, int64_t n) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const float* a = static_cast<const float*>(source);
  Narrow* o = static_cast<Narrow*>(out);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) store(hn::LoadU(d, a + i), d, o + i);
  if (i < n) {
    const size_t rest = static_cast<size_t>(n - i);
    store_first(load_first(d, a + i, rest), d, o + i, rest);
  }
}

using ContiguousConversion = void (*)(const void* source, void* out, int64_t n);

ContiguousConversion find_float_conversion(DType from, DType to) {
  if (to == DType::kF32 && from == DType::kF16) return widen_lanes<Float16>;
  if (to == DType::kF32 && from == DType::kBF16) return widen_lanes<BFloat16>;
  if (from == DType::kF32 && to == DType::kF16) return narrow_lanes<Float16>;
  if (from == DType::kF32 && to == DType::kBF16) return narrow_lanes<BFloat16>;
  return nullptr;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace flexpte
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flexpte {

HWY_EXPORT(find_cast);
HWY_EXPORT(find_round);
HWY_EXPORT(find_float_conversion);

LaneKernel find_cast_kernel(DType from, DType to) {
  return HWY_DYNAMIC_DISPATCH(find_cast)(from, to);
}
LaneKernel find_round_kernel(DType type, DType round_to) {
  return HWY_DYNAMIC_DISPATCH(find_round)(type, round_to);
}

namespace {

template <class From, class To>
void convert_strided(const From* source, int64_t stride, To* out, int64_t out_stride, int64_t n) {
  if (stride == 1 && out_stride == 1) {
    for (int64_t i = 0; i < n; ++i) out[i] = convert<To>(source[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i * out_stride] = convert<To>(source[i * stride]);
  }
}

// Calls f with a value of the storage type of a node's type.
template <class F>
void with_node_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBool:
      return f(Bool());
    case DType::kI32:
      return f(int32_t());
    case DType::kI64:
      return f(int64_t());
    default:
      return f(float());
  }
}

bool is_node_type(DType dtype) {
  return dtype == DType::kBool || dtype == DType::kI32 || dtype == DType::kI64 || dtype == DType::kF32;
}

}  // namespace

void convert_lanes(const void* source, DType from, int64_t stride, void* out, DType to, int64_t out_stride, int64_t n) {
  if (stride == 1 && out_stride == 1) {
    if (from == to && from != DType::kBool) {
      std::memmove(out, source, static_cast<size_t>(n * element_size_bytes(to)));
      return;
    }
    if (const auto conversion = HWY_DYNAMIC_DISPATCH(find_float_conversion)(from, to)) {
      return conversion(source, out, n);
    }
  }
  if (is_node_type(to)) {
    with_node_type(to, [&](auto to_tag) {
      with_storage_type(from, [&](auto from_tag) {
        convert_strided(static_cast<const decltype(from_tag)*>(source), stride, static_cast<decltype(to_tag)*>(out),
                        out_stride, n);
      });
    });
  } else {
    with_node_type(from, [&](auto from_tag) {
      with_storage_type(to, [&](auto to_tag) {
        convert_strided(static_cast<const decltype(from_tag)*>(source), stride, static_cast<decltype(to_tag)*>(out),
                        out_stride, n);
      });
    });
  }
}

}  // namespace flexpte
#endif  // HWY_ONCE
