// Drivers that run one operation over a tile of lanes, compiled once per instruction set: included
// inside Highway's foreach_target. F32 operations are explicit vectors; the others are plain loops
// that the compiler vectorises for the target.
#if defined(FLEXPTE_EXPRESSION_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FLEXPTE_EXPRESSION_LANES_INL_H_
#undef FLEXPTE_EXPRESSION_LANES_INL_H_
#else
#define FLEXPTE_EXPRESSION_LANES_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

#include "runtime/kernels/expression_kernels.h"
#include "runtime/kernels/expression_scalar.h"
#include "runtime/kernels/scalar.h"

// Lanes of one loop never depend on each other: `out` is either exactly an argument or apart.
#ifndef FLEXPTE_INDEPENDENT_LANES
#if defined(__clang__)
#define FLEXPTE_INDEPENDENT_LANES _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define FLEXPTE_INDEPENDENT_LANES _Pragma("GCC ivdep")
#else
#define FLEXPTE_INDEPENDENT_LANES
#endif
#endif

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;

template <class T>
HWY_INLINE const T* row_of(const LaneOperand& operand, int64_t r) {
  return static_cast<const T*>(operand.data) + r * operand.row_step;
}

// out = Op::apply(a), scalars of type In to Out.
template <class Op, class In, class Out>
void unary_loop(const LaneOperand* args, void* out, int64_t out_row_step, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    const In* a = row_of<In>(args[0], r);
    Out* o = static_cast<Out*>(out) + r * out_row_step;
    FLEXPTE_INDEPENDENT_LANES
    for (int64_t c = 0; c < cols; ++c) o[c] = Op::template apply<In, Out>(a[c]);
  }
}

template <class Op, class In, class Out>
void binary_loop(const LaneOperand* args, void* out, int64_t out_row_step, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) {
    const In* a = row_of<In>(args[0], r);
    const In* b = row_of<In>(args[1], r);
    Out* o = static_cast<Out*>(out) + r * out_row_step;
    if (args[0].col_step == 0) {
      const In x = *a;
      FLEXPTE_INDEPENDENT_LANES
      for (int64_t c = 0; c < cols; ++c) o[c] = Op::template apply<In, Out>(x, b[c]);
    } else if (args[1].col_step == 0) {
      const In y = *b;
      FLEXPTE_INDEPENDENT_LANES
      for (int64_t c = 0; c < cols; ++c) o[c] = Op::template apply<In, Out>(a[c], y);
    } else {
      FLEXPTE_INDEPENDENT_LANES
      for (int64_t c = 0; c < cols; ++c) o[c] = Op::template apply<In, Out>(a[c], b[c]);
    }
  }
}

// out = Op::apply(d, a), vectors of floats. What is left of a row goes through a whole vector too.
template <class Op>
void unary_vectors(const LaneOperand* args, void* out, int64_t out_row_step, int64_t rows, int64_t cols) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t r = 0; r < rows; ++r) {
    const float* a = row_of<float>(args[0], r);
    float* o = static_cast<float*>(out) + r * out_row_step;
    int64_t c = 0;
    for (; c + lanes <= cols; c += lanes) hn::StoreU(Op::apply(d, hn::LoadU(d, a + c)), d, o + c);
    if (c < cols) {
      HWY_ALIGN float tail[HWY_MAX_BYTES / sizeof(float)] = {};
      const size_t bytes = static_cast<size_t>(cols - c) * sizeof(float);
      std::memcpy(tail, a + c, bytes);
      hn::Store(Op::apply(d, hn::Load(d, tail)), d, tail);
      std::memcpy(o + c, tail, bytes);
    }
  }
}

template <class Op>
void binary_vectors(const LaneOperand* args, void* out, int64_t out_row_step, int64_t rows, int64_t cols) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const bool splat_a = args[0].col_step == 0;
  const bool splat_b = args[1].col_step == 0;
  for (int64_t r = 0; r < rows; ++r) {
    const float* a = row_of<float>(args[0], r);
    const float* b = row_of<float>(args[1], r);
    float* o = static_cast<float*>(out) + r * out_row_step;
    const FloatVec x = hn::Set(d, *a);
    const FloatVec y = hn::Set(d, *b);
    int64_t c = 0;
    if (splat_a) {
      for (; c + lanes <= cols; c += lanes) hn::StoreU(Op::apply(d, x, hn::LoadU(d, b + c)), d, o + c);
    } else if (splat_b) {
      for (; c + lanes <= cols; c += lanes) hn::StoreU(Op::apply(d, hn::LoadU(d, a + c), y), d, o + c);
    } else {
      for (; c + lanes <= cols; c += lanes) {
        hn::StoreU(Op::apply(d, hn::LoadU(d, a + c), hn::LoadU(d, b + c)), d, o + c);
      }
    }
    if (c < cols) {
      HWY_ALIGN float tail_a[HWY_MAX_BYTES / sizeof(float)] = {};
      HWY_ALIGN float tail_b[HWY_MAX_BYTES / sizeof(float)] = {};
      const size_t bytes = static_cast<size_t>(cols - c) * sizeof(float);
      if (!splat_a) std::memcpy(tail_a, a + c, bytes);
      if (!splat_b) std::memcpy(tail_b, b + c, bytes);
      hn::Store(Op::apply(d, splat_a ? x : hn::Load(d, tail_a), splat_b ? y : hn::Load(d, tail_b)), d, tail_a);
      std::memcpy(o + c, tail_a, bytes);
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace flexpte
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
