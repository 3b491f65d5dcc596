// out[i] = op over the inner dimensions of x[i, ...]: one simdgroup an output, its lanes side by side along what is
// reduced, then over the lanes. Floats accumulate in float (compensated sums), integers in long, where they wrap.
// The first NaN stays; of equal values the first is the arg.

enum ReduceKind { REDUCE_SUM, REDUCE_MEAN, REDUCE_MAX, REDUCE_MIN, REDUCE_PROD, REDUCE_ANY, REDUCE_ALL,
                  REDUCE_ARG_MAX, REDUCE_ARG_MIN };

inline bool reduce_is_nan(float x) { return isnan(x); }
inline bool reduce_is_nan(long x) { return false; }

template <typename V>
inline V reduce_wrapping_add(V a, V b) { return expr_add(a, b); }
inline float reduce_wrapping_add(float a, float b) { return a + b; }
template <typename V>
inline V reduce_wrapping_mul(V a, V b) { return expr_mul(a, b); }
inline float reduce_wrapping_mul(float a, float b) { return a * b; }

// Whether (value, index) replaces (best, best_index): the first of equal ones stays, the first NaN before all.
template <typename V>
inline bool reduce_beats(bool is_max, V value, long index, V best, long best_index) {
  if (best_index < 0) return true;
  if (reduce_is_nan(value) || reduce_is_nan(best)) {
    return reduce_is_nan(value) && (!reduce_is_nan(best) || index < best_index);
  }
  if (value == best) return index < best_index;
  return is_max ? value > best : value < best;
}

inline float reduce_shuffle(float x, ushort mask) { return simd_shuffle_xor(x, mask); }
inline long reduce_shuffle(long x, ushort mask) {
  const uint2 bits = as_type<uint2>(x);
  return as_type<long>(uint2(simd_shuffle_xor(bits.x, mask), simd_shuffle_xor(bits.y, mask)));
}

// V is float for floating x, else long.
template <typename TX, typename V, typename TO, int KIND>
[[kernel]] void reduce(constant ReduceParams& params [[buffer(0)]], device const TX* x [[buffer(1)]],
                       device TO* out [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  const uint row = group * 4 + simdgroup;
  if (row >= params.outer_count) return;
  x += strided_offset(row, params.outer_rank, params.sizes, params.x_strides);
  const bool is_sum = KIND == REDUCE_SUM || KIND == REDUCE_MEAN;
  const bool is_max = KIND == REDUCE_MAX || KIND == REDUCE_ARG_MAX;
  const bool is_extreme = is_max || KIND == REDUCE_MIN || KIND == REDUCE_ARG_MIN;
  V state = V(KIND == REDUCE_PROD || KIND == REDUCE_ALL ? 1 : 0);
  V lost = V(0);
  long at = -1;
  for (uint i = lane; i < params.inner_count; i += 32) {
    const V value = V(x[strided_offset(i, params.inner_rank, params.inner_sizes, params.inner_strides)]);
    if (is_sum) {
      // Neumaier's compensation; what is not finite must not meet it.
      const V next = reduce_wrapping_add(state, value);
      if (reduce_is_nan(next - next)) {
        lost = V(0);
      } else {
        const bool is_small = (state < V(0) ? -state : state) < (value < V(0) ? -value : value);
        lost = reduce_wrapping_add(lost, is_small ? V((value - next) + state) : V((state - next) + value));
      }
      state = next;
    } else if (KIND == REDUCE_PROD) {
      state = reduce_wrapping_mul(state, value);
    } else if (is_extreme) {
      if (reduce_beats(is_max, value, long(i), state, at)) {
        state = value;
        at = long(i);
      }
    } else if (KIND == REDUCE_ANY) {
      state = state != V(0) || value != V(0) ? V(1) : V(0);
    } else {
      state = state != V(0) && value != V(0) ? V(1) : V(0);
    }
  }
  if (is_sum) state = reduce_wrapping_add(state, lost);
  for (ushort step = 16; step > 0; step /= 2) {
    const V other = reduce_shuffle(state, step);
    if (is_sum) {
      state = reduce_wrapping_add(state, other);
    } else if (KIND == REDUCE_PROD) {
      state = reduce_wrapping_mul(state, other);
    } else if (is_extreme) {
      const long other_at = reduce_shuffle(at, step);
      if (other_at >= 0 && reduce_beats(is_max, other, other_at, state, at)) {
        state = other;
        at = other_at;
      }
    } else if (KIND == REDUCE_ANY) {
      state = state != V(0) || other != V(0) ? V(1) : V(0);
    } else {
      state = state != V(0) && other != V(0) ? V(1) : V(0);
    }
  }
  if (lane != 0) return;
  out += strided_offset(row, params.outer_rank, params.sizes, params.out_strides);
  if (KIND == REDUCE_ARG_MAX || KIND == REDUCE_ARG_MIN) {
    *out = TO(at);
  } else if (KIND == REDUCE_MEAN) {
    *out = TO(state / V(params.inner_count));
  } else {
    *out = TO(state);
  }
}
