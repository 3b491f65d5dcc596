// out[i] = op over x[i, ...], any strides. Floats accumulate in float (sums compensated), integers in long, where
// they wrap. The first NaN wins a maximum or minimum; of equal values the first one's index counts.
//
// By params.mode: a simdgroup makes an output, its lanes side by side along what is reduced; or a threadgroup does,
// where that is long; or a thread does, where outputs are nearer in memory than what is reduced.
//
//   state = initial; for each element of the thread: step(state, x, index)
//   merge over the lanes of the simdgroup, then over the simdgroups; out = result(state)

inline float reduce_shuffle(float x, ushort mask) { return simd_shuffle_xor(x, mask); }
inline long reduce_shuffle(long x, ushort mask) {
  const uint2 halves = as_type<uint2>(x);
  return as_type<long>(uint2(simd_shuffle_xor(halves.x, mask), simd_shuffle_xor(halves.y, mask)));
}
inline bool reduce_is_nan(float x) { return isnan(x); }
inline bool reduce_is_nan(long) { return false; }

// Each operation has a state of two numbers, V value and E extra, and
//   begin(value, extra)                  a state of nothing
//   step(value, extra, x, index)         adds element `index`, after those before it of this thread
//   merge(value, extra, other, other's)  adds what another thread has seen
//   store(to, value, extra, count)       the result for a count of elements

// Floats: extra is what rounding lost (Knuth's two-sum). Where the sum is not finite it means nothing.
template <typename V, bool IS_MEAN>
struct ReduceSum {
  typedef float E;
  static void begin(thread float& value, thread float& extra) { value = extra = 0.0f; }
  static void step(thread float& value, thread float& extra, float x, long) {
    const float sum = value + x;
    const float part = sum - value;
    extra += (value - (sum - part)) + (x - part);
    value = sum;
  }
  static void merge(thread float& value, thread float& extra, float other, float other_extra) {
    step(value, extra, other, 0L);
    extra += other_extra;
  }
  template <typename O>
  static void store(device O* to, float value, float extra, long count) {
    const float sum = isfinite(value) ? value + extra : value;
    store_narrow(to, IS_MEAN ? sum / float(count) : sum);
  }
};
template <>
struct ReduceSum<long, false> {
  typedef long E;
  static void begin(thread long& value, thread long& extra) { value = extra = 0L; }
  static void step(thread long& value, thread long&, long x, long) { value = long(ulong(value) + ulong(x)); }
  static void merge(thread long& value, thread long& extra, long other, long) { step(value, extra, other, 0L); }
  template <typename O>
  static void store(device O* to, long value, long, long) {
    store_narrow(to, value);
  }
};

inline float reduce_product(float a, float b) { return a * b; }
inline long reduce_product(long a, long b) { return long(ulong(a) * ulong(b)); }

template <typename V>
struct ReduceProduct {
  typedef V E;
  static void begin(thread V& value, thread V& extra) { value = extra = V(1); }
  static void step(thread V& value, thread V&, V x, long) { value = reduce_product(value, x); }
  static void merge(thread V& value, thread V& extra, V other, V) { step(value, extra, other, 0L); }
  template <typename O>
  static void store(device O* to, V value, V, long) {
    store_narrow(to, value);
  }
};

// extra is the index of value, -1 in a state of nothing.
template <typename V, bool IS_MAX, bool IS_ARG>
struct ReduceExtreme {
  typedef long E;
  static void begin(thread V& value, thread long& extra) {
    value = V(0);
    extra = -1L;
  }
  static void step(thread V& value, thread long& extra, V x, long index) { merge(value, extra, x, index); }
  static void merge(thread V& value, thread long& extra, V other, long other_index) {
    if (other_index < 0L) return;
    const bool is_first = extra < 0L || other_index < extra;
    bool wins = extra < 0L;
    if (!wins) {
      if (reduce_is_nan(value) || reduce_is_nan(other)) {
        wins = reduce_is_nan(other) && (!reduce_is_nan(value) || is_first);
      } else {
        wins = other == value ? is_first : (IS_MAX ? other > value : other < value);
      }
    }
    if (wins) {
      value = other;
      extra = other_index;
    }
  }
  template <typename O>
  static void store(device O* to, V value, long extra, long) {
    if (IS_ARG) {
      store_narrow(to, max(extra, 0L));
    } else {
      store_narrow(to, extra < 0L ? least(V(0)) : value);
    }
  }
  // Of no elements.
  static float least(float) { return IS_MAX ? -INFINITY : INFINITY; }
  static long least(long) { return IS_MAX ? -9223372036854775807L - 1L : 9223372036854775807L; }
};

template <typename V, bool IS_ANY>
struct ReduceTruth {
  typedef V E;
  static void begin(thread V& value, thread V& extra) { value = extra = V(IS_ANY ? 0 : 1); }
  static void step(thread V& value, thread V&, V x, long) {
    const bool before = value != V(0);
    const bool truth = x != V(0);
    value = V((IS_ANY ? before || truth : before && truth) ? 1 : 0);
  }
  static void merge(thread V& value, thread V& extra, V other, V) { step(value, extra, other, 0L); }
  template <typename O>
  static void store(device O* to, V value, V, long) {
    store_narrow(to, value != V(0) ? 1L : 0L);
  }
};

// The operations by number, as in ReduceOp of the payload.
template <typename V, int KIND>
struct ReduceOp;
template <typename V>
struct ReduceOp<V, 0> {
  typedef ReduceSum<V, false> type;
};
template <typename V>
struct ReduceOp<V, 1> {
  typedef ReduceSum<V, true> type;
};
template <typename V>
struct ReduceOp<V, 2> {
  typedef ReduceExtreme<V, true, false> type;
};
template <typename V>
struct ReduceOp<V, 3> {
  typedef ReduceExtreme<V, false, false> type;
};
template <typename V>
struct ReduceOp<V, 4> {
  typedef ReduceProduct<V> type;
};
template <typename V>
struct ReduceOp<V, 5> {
  typedef ReduceTruth<V, true> type;
};
template <typename V>
struct ReduceOp<V, 6> {
  typedef ReduceTruth<V, false> type;
};
template <typename V>
struct ReduceOp<V, 7> {
  typedef ReduceExtreme<V, true, true> type;
};
template <typename V>
struct ReduceOp<V, 8> {
  typedef ReduceExtreme<V, false, true> type;
};

// V is float for floating X, else long.
template <typename X, typename V, typename O, int KIND>
[[kernel]] void reduce(constant ReduceParams& params [[buffer(0)]], device const X* x [[buffer(1)]],
                       device O* out [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
                       uint thread_index [[thread_index_in_threadgroup]],
                       uint num_threads [[threads_per_threadgroup]]) {
  typedef typename ReduceOp<V, KIND>::type Op;
  typedef typename Op::E E;
  threadgroup V partial_values[32];
  threadgroup E partial_extras[32];
  const uint lane = thread_index % 32;
  const uint simd_index = thread_index / 32;
  long output = long(group);
  long first = long(thread_index);
  long step = long(num_threads);
  if (params.mode == REDUCE_BY_SIMDGROUP) {
    output = long(group) * long(num_threads / 32) + long(simd_index);
    first = long(lane);
    step = 32;
  } else if (params.mode == REDUCE_BY_THREAD) {
    output = long(group) * long(num_threads) + long(thread_index);
    first = 0;
    step = 1;
  }
  if (output >= params.outer_count) return;  // never some threads of a simdgroup or threadgroup that works together
  x += strided_offset(output, params.outer_rank, params.outer_sizes, params.x_outer_strides);
  V value;
  E extra;
  Op::begin(value, extra);
  if (params.inner_rank <= 1) {
    const long stride = params.inner_strides[0];
    for (long i = first; i < params.inner_count; i += step) Op::step(value, extra, load_wide(x + i * stride), i);
  } else {
    for (long i = first; i < params.inner_count; i += step) {
      const long offset = strided_offset(i, params.inner_rank, params.inner_sizes, params.inner_strides);
      Op::step(value, extra, load_wide(x + offset), i);
    }
  }
  if (params.mode != REDUCE_BY_THREAD) {
    for (ushort mask = 16; mask > 0; mask /= 2) {
      const V other = reduce_shuffle(value, mask);
      const E other_extra = reduce_shuffle(extra, mask);
      Op::merge(value, extra, other, other_extra);
    }
    if (params.mode == REDUCE_BY_THREADGROUP) {
      if (lane == 0) {
        partial_values[simd_index] = value;
        partial_extras[simd_index] = extra;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (thread_index == 0) {
        for (uint s = 1; s < num_threads / 32; ++s) Op::merge(value, extra, partial_values[s], partial_extras[s]);
      }
      if (thread_index != 0) return;
    } else if (lane != 0) {
      return;
    }
  }
  out += strided_offset(output, params.outer_rank, params.outer_sizes, params.out_strides);
  Op::store(out, value, extra, params.inner_count);
}
