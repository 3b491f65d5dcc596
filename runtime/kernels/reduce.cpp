#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <type_traits>

#include "runtime/kernels/kernels.h"
#include "runtime/kernels/scalar.h"
#include "runtime/kernels/strided.h"

namespace flexpte {
namespace {

// Outputs that are reduced side by side where they are nearer in memory than what is reduced.
constexpr int64_t kTile = 64;

template <class T>
bool is_nan(T value) {
  if constexpr (std::is_floating_point_v<T>) return std::isnan(value);
  return false;
}

// Whether `value` replaces `best` as maximum (or minimum): the first NaN stays.
template <bool kMax, class T>
bool beats(T value, T best) {
  if (is_nan(best)) return false;
  return is_nan(value) || (kMax ? value > best : value < best);
}

// Each reduction has a state per output: its initial value, a step with the value and its flat index
// within what is reduced, and the result for a count of values.

// Sums and products of floats are held in double, those of integers wrap in int64.
template <class Value>
using Accumulator = std::conditional_t<std::is_floating_point_v<Value>, double, int64_t>;

template <class Value, bool kMean>
struct Sum {
  using State = std::conditional_t<kMean, double, Accumulator<Value>>;
  static State initial() { return 0; }
  static void step(State& state, Value value, int64_t) {
    if constexpr (std::is_integral_v<State>) {
      state = static_cast<int64_t>(static_cast<uint64_t>(state) + static_cast<uint64_t>(value));
    } else {
      state += static_cast<double>(value);
    }
  }
  static State result(const State& state, int64_t count) {
    if constexpr (kMean) return state / static_cast<double>(count);
    return state;
  }
};

template <class Value>
struct Product {
  using State = Accumulator<Value>;
  static State initial() { return 1; }
  static void step(State& state, Value value, int64_t) {
    if constexpr (std::is_integral_v<State>) {
      state = static_cast<int64_t>(static_cast<uint64_t>(state) * static_cast<uint64_t>(value));
    } else {
      state *= static_cast<double>(value);
    }
  }
  static State result(const State& state, int64_t) { return state; }
};

template <class Value, bool kMax>
struct Extremum {
  using State = Value;
  static State initial() {
    using Limits = std::numeric_limits<Value>;
    if constexpr (Limits::has_infinity) return kMax ? -Limits::infinity() : Limits::infinity();
    return kMax ? Limits::min() : Limits::max();
  }
  static void step(State& state, Value value, int64_t) {
    if (beats<kMax>(value, state)) state = value;
  }
  static State result(const State& state, int64_t) { return state; }
};

template <class Value, bool kMax>
struct ArgExtremum {
  struct State {
    Value value;
    int64_t index;
  };
  static State initial() { return {0, 0}; }
  static void step(State& state, Value value, int64_t index) {
    if (index == 0 || beats<kMax>(value, state.value)) state = {value, index};
  }
  static int64_t result(const State& state, int64_t) { return state.index; }
};

template <class Value, bool kAny>
struct Truth {
  using State = bool;
  static State initial() { return !kAny; }
  static void step(State& state, Value value, int64_t) {
    const bool truth = value != 0;
    state = kAny ? state || truth : state && truth;
  }
  static int64_t result(const State& state, int64_t) { return state; }
};

struct Shape {
  Strided<2> outer;  // x, out; without the innermost dimension
  int64_t outer_count = 1;
  int64_t x_outer_stride = 0;
  int64_t out_stride = 0;
  Strided<1> inner;  // without the innermost dimension
  int64_t inner_count = 1;
  int64_t inner_stride = 0;
  int64_t reduced = 1;  // elements per output
};

// Calls f(offset, flat index) for all that is reduced into one output.
template <class F>
void for_each_reduced(const Shape& shape, const F& f) {
  const int64_t rows = shape.inner_count == 0 ? 0 : shape.reduced / shape.inner_count;
  StridedIterator<1> it(shape.inner, 0);
  for (int64_t row = 0; row < rows; ++row, it.advance()) {
    for (int64_t i = 0; i < shape.inner_count; ++i) {
      f(it.offset(0) + i * shape.inner_stride, row * shape.inner_count + i);
    }
  }
}

template <class Result>
void store_result(const TensorView& out, int64_t offset, Result result) {
  with_storage_type(out.dtype, [&](auto tag) { out.as<decltype(tag)>()[offset] = convert<decltype(tag)>(result); });
}

template <class Op, class In>
void reduce_typed(const Shape& shape, const In* x, const TensorView& out, const ThreadPool& pool) {
  using State = typename Op::State;
  const bool side_by_side = shape.outer_count > 1 && std::abs(shape.x_outer_stride) < std::abs(shape.inner_stride);
  const int64_t tile = side_by_side ? kTile : 1;
  const int64_t tiles = (shape.outer_count + tile - 1) / tile;
  pool.parallel_for(
      shape.outer.num_elements() * tiles, rows_per_piece(tile * shape.reduced), [&](int64_t begin, int64_t end, int) {
        for (int64_t item = begin; item < end; ++item) {
          const StridedIterator<2> it(shape.outer, item / tiles);
          const int64_t first = item % tiles * tile;
          const int64_t count = std::min(tile, shape.outer_count - first);
          const In* const from = x + it.offset(0) + first * shape.x_outer_stride;
          const int64_t to = it.offset(1) + first * shape.out_stride;
          if (count == 1) {
            State state = Op::initial();
            for_each_reduced(shape,
                             [&](int64_t offset, int64_t index) { Op::step(state, widen(from[offset]), index); });
            store_result(out, to, Op::result(state, shape.reduced));
            continue;
          }
          State states[kTile];
          std::fill_n(states, count, Op::initial());
          for_each_reduced(shape, [&](int64_t offset, int64_t index) {
            for (int64_t t = 0; t < count; ++t) {
              Op::step(states[t], widen(from[offset + t * shape.x_outer_stride]), index);
            }
          });
          for (int64_t t = 0; t < count; ++t) {
            store_result(out, to + t * shape.out_stride, Op::result(states[t], shape.reduced));
          }
        }
      });
}

template <template <class> class Op>
void reduce_dtypes(const Shape& shape, const TensorView& x, const TensorView& out, const ThreadPool& pool) {
  with_storage_type(x.dtype, [&](auto x_tag) {
    using Value = decltype(widen(x_tag));
    reduce_typed<Op<Value>>(shape, x.as<const decltype(x_tag)>(), out, pool);
  });
}

template <class Value>
using SumOf = Sum<Value, false>;
template <class Value>
using MeanOf = Sum<Value, true>;
template <class Value>
using MaxOf = Extremum<Value, true>;
template <class Value>
using MinOf = Extremum<Value, false>;
template <class Value>
using ArgMaxOf = ArgExtremum<Value, true>;
template <class Value>
using ArgMinOf = ArgExtremum<Value, false>;
template <class Value>
using AnyOf = Truth<Value, true>;
template <class Value>
using AllOf = Truth<Value, false>;

}  // namespace

void reduce(ReduceOp op, const TensorView& x, [[maybe_unused]] int num_dims, const TensorView& out,
            const ThreadPool& pool) {
  assert(num_dims >= 0 && num_dims <= x.rank && out.rank == x.rank - num_dims);
  Shape shape;
  for (int32_t d = 0; d < x.rank; ++d) {
    if (d < out.rank) {
      assert(x.size(d) == out.size(d));
      shape.outer.append(x.size(d), {x.stride(d), out.stride(d)});
    } else {
      shape.inner.append(x.size(d), {x.stride(d)});
    }
  }
  if (shape.outer.num_elements() == 0) return;
  shape.reduced = shape.inner.num_elements();
  const auto [outer_count, outer_strides] = shape.outer.pop_inner();
  shape.outer_count = outer_count;
  shape.x_outer_stride = outer_strides[0];
  shape.out_stride = outer_strides[1];
  const auto [inner_count, inner_strides] = shape.inner.pop_inner();
  shape.inner_count = inner_count;
  shape.inner_stride = inner_strides[0];
  switch (op) {
    case ReduceOp::kSum:
      return reduce_dtypes<SumOf>(shape, x, out, pool);
    case ReduceOp::kMean:
      return reduce_dtypes<MeanOf>(shape, x, out, pool);
    case ReduceOp::kMax:
      return reduce_dtypes<MaxOf>(shape, x, out, pool);
    case ReduceOp::kMin:
      return reduce_dtypes<MinOf>(shape, x, out, pool);
    case ReduceOp::kProd:
      return reduce_dtypes<Product>(shape, x, out, pool);
    case ReduceOp::kAny:
      return reduce_dtypes<AnyOf>(shape, x, out, pool);
    case ReduceOp::kAll:
      return reduce_dtypes<AllOf>(shape, x, out, pool);
    case ReduceOp::kArgMax:
      return reduce_dtypes<ArgMaxOf>(shape, x, out, pool);
    case ReduceOp::kArgMin:
      return reduce_dtypes<ArgMinOf>(shape, x, out, pool);
  }
}

}  // namespace flexpte
