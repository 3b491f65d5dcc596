// Norms and softmax over the last dimension, accumulated in float.
//
// rms_norm:   out = x / sqrt(mean(x^2) + eps) * weight
// layer_norm: out = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias
// softmax:    out = exp(x - max) / sum exp(x - max), or its logarithm, x - max - log(sum exp(x - max))
//
// A threadgroup has a row to itself, or each of its simdgroups has one where rows are short; ROW_VALUES elements a
// thread at a time are held in registers, so that rows of up to that many a thread are read once.

constant constexpr int ROW_VALUES = 8;

// A thread's place in the row that it works on.
struct RowPlace {
  long row;
  int rank;     // of the thread, among the threads of the row
  int threads;  // of the row
  uint lane;
  uint simd_index;
  uint num_simdgroups;  // that share the row: 1, or all of the threadgroup
};

inline RowPlace row_place(constant const RowParams& params, uint group, uint thread_index, uint num_threads) {
  RowPlace place;
  const uint num_simdgroups = num_threads / 32;
  place.lane = thread_index % 32;
  place.simd_index = thread_index / 32;
  if (params.is_row_per_simdgroup != 0) {
    place.row = long(group) * long(num_simdgroups) + long(place.simd_index);
    place.rank = int(place.lane);
    place.threads = 32;
    place.num_simdgroups = 1;
  } else {
    place.row = long(group);
    place.rank = int(thread_index);
    place.threads = int(num_threads);
    place.num_simdgroups = num_simdgroups;
  }
  return place;
}

// The column of value v of a thread, of those from `base` on. Vectors: four neighbours each.
inline long row_column(constant const RowParams& params, thread const RowPlace& place, long base, int v) {
  if (params.is_vectorizable != 0) return base + long((v / 4 * place.threads + place.rank) * 4 + v % 4);
  return base + long(v * place.threads + place.rank);
}

template <typename T>
inline void row_load(constant const RowParams& params, thread const RowPlace& place, device const T* from, long stride,
                     long base, float outside, thread float* values) {
  if (params.is_vectorizable != 0) {
    for (int v = 0; v < ROW_VALUES; v += 4) {
      const long column = row_column(params, place, base, v);
      float4 four = float4(outside);
      if (column < params.columns) four = float4(*(device const vec<T, 4>*)(from + column));
      for (int i = 0; i < 4; ++i) values[v + i] = four[i];
    }
    return;
  }
  for (int v = 0; v < ROW_VALUES; ++v) {
    const long column = row_column(params, place, base, v);
    values[v] = column < params.columns ? float(from[column * stride]) : outside;
  }
}

template <typename T>
inline void row_store(constant const RowParams& params, thread const RowPlace& place, thread const float* values,
                      long base, device T* to) {
  if (params.is_vectorizable != 0) {
    for (int v = 0; v < ROW_VALUES; v += 4) {
      const long column = row_column(params, place, base, v);
      vec<T, 4> four;
      for (int i = 0; i < 4; ++i) four[i] = T(values[v + i]);
      if (column < params.columns) *(device vec<T, 4>*)(to + column) = four;
    }
    return;
  }
  for (int v = 0; v < ROW_VALUES; ++v) {
    const long column = row_column(params, place, base, v);
    if (column < params.columns) to[column * params.out_stride] = T(values[v]);
  }
}

// The sum over the row's threads, known to all of them. `partial` has room for a float a simdgroup.
inline float row_sum(float value, threadgroup float* partial, thread const RowPlace& place) {
  const float sum = simd_sum(value);
  if (place.num_simdgroups == 1) return sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (place.lane == 0) partial[place.simd_index] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(place.lane < place.num_simdgroups ? partial[place.lane] : 0.0f);
}

// The largest; a NaN need not show in it.
inline float row_max(float value, threadgroup float* partial, thread const RowPlace& place) {
  const float most = simd_max(value);
  if (place.num_simdgroups == 1) return most;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (place.lane == 0) partial[place.simd_index] = most;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_max(place.lane < place.num_simdgroups ? partial[place.lane] : -INFINITY);
}

template <typename X, typename W, typename B, typename O>
inline void norm_row(constant const RowParams& params, bool is_centered, device const X* x, device const W* weight,
                     device const B* bias, device O* out, threadgroup float* partial, uint group, uint thread_index,
                     uint num_threads) {
  const RowPlace place = row_place(params, group, thread_index, num_threads);
  if (place.row >= params.rows) return;  // only where a simdgroup has a row to itself: nobody waits for it
  x += strided_offset(place.row, params.rank, params.sizes, params.x_strides);
  out += strided_offset(place.row, params.rank, params.sizes, params.out_strides);
  const long step = long(ROW_VALUES * place.threads);
  const float columns = float(params.columns);
  float first[ROW_VALUES];
  float values[ROW_VALUES];
  row_load<X>(params, place, x, params.x_stride, 0L, 0.0f, first);
  float mean = 0.0f;
  if (is_centered) {
    float sum = 0.0f;
    for (int v = 0; v < ROW_VALUES; ++v) sum += first[v];
    for (long base = step; base < params.columns; base += step) {
      row_load<X>(params, place, x, params.x_stride, base, 0.0f, values);
      for (int v = 0; v < ROW_VALUES; ++v) sum += values[v];
    }
    mean = row_sum(sum, partial, place) / columns;
  }
  float squares = 0.0f;
  for (long base = 0; base < params.columns; base += step) {
    if (base > 0) row_load<X>(params, place, x, params.x_stride, base, 0.0f, values);
    for (int v = 0; v < ROW_VALUES; ++v) {
      const float difference = (base > 0 ? values[v] : first[v]) - mean;
      if (row_column(params, place, base, v) < params.columns) squares += difference * difference;
    }
  }
  const float factor = 1.0f / precise::sqrt(row_sum(squares, partial, place) / columns + params.eps);
  for (long base = 0; base < params.columns; base += step) {
    if (base > 0) row_load<X>(params, place, x, params.x_stride, base, 0.0f, values);
    for (int v = 0; v < ROW_VALUES; ++v) values[v] = ((base > 0 ? values[v] : first[v]) - mean) * factor;
    float parameter[ROW_VALUES];
    if (params.has_weight != 0) {
      row_load<W>(params, place, weight, params.weight_stride, base, 0.0f, parameter);
      for (int v = 0; v < ROW_VALUES; ++v) values[v] *= parameter[v];
    }
    if (params.has_bias != 0) {
      row_load<B>(params, place, bias, params.bias_stride, base, 0.0f, parameter);
      for (int v = 0; v < ROW_VALUES; ++v) values[v] += parameter[v];
    }
    row_store<O>(params, place, values, base, out);
  }
}

// buffer(3), the bias, stays empty.
template <typename X, typename W, typename O>
[[kernel]] void rms_norm(constant RowParams& params [[buffer(0)]], device const X* x [[buffer(1)]],
                         device const W* weight [[buffer(2)]], device const W* bias [[buffer(3)]],
                         device O* out [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                         uint thread_index [[thread_index_in_threadgroup]],
                         uint num_threads [[threads_per_threadgroup]]) {
  threadgroup float partial[32];
  norm_row<X, W, W, O>(params, false, x, weight, bias, out, partial, group, thread_index, num_threads);
}

template <typename X, typename W, typename B, typename O>
[[kernel]] void layer_norm(constant RowParams& params [[buffer(0)]], device const X* x [[buffer(1)]],
                           device const W* weight [[buffer(2)]], device const B* bias [[buffer(3)]],
                           device O* out [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                           uint thread_index [[thread_index_in_threadgroup]],
                           uint num_threads [[threads_per_threadgroup]]) {
  threadgroup float partial[32];
  norm_row<X, W, B, O>(params, true, x, weight, bias, out, partial, group, thread_index, num_threads);
}

// A row of -inf alone, or with a NaN or +inf, gives NaN, as in ATen.
template <typename X, typename O>
[[kernel]] void softmax(constant RowParams& params [[buffer(0)]], device const X* x [[buffer(1)]],
                        device O* out [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
                        uint thread_index [[thread_index_in_threadgroup]],
                        uint num_threads [[threads_per_threadgroup]]) {
  threadgroup float partial[32];
  const RowPlace place = row_place(params, group, thread_index, num_threads);
  if (place.row >= params.rows) return;  // only where a simdgroup has a row to itself: nobody waits for it
  x += strided_offset(place.row, params.rank, params.sizes, params.x_strides);
  out += strided_offset(place.row, params.rank, params.sizes, params.out_strides);
  const long step = long(ROW_VALUES * place.threads);
  float first[ROW_VALUES];
  float values[ROW_VALUES];
  row_load<X>(params, place, x, params.x_stride, 0L, -INFINITY, first);
  float most = -INFINITY;
  for (int v = 0; v < ROW_VALUES; ++v) most = max(most, first[v]);
  for (long base = step; base < params.columns; base += step) {
    row_load<X>(params, place, x, params.x_stride, base, -INFINITY, values);
    for (int v = 0; v < ROW_VALUES; ++v) most = max(most, values[v]);
  }
  most = row_max(most, partial, place);
  float sum = 0.0f;
  for (long base = 0; base < params.columns; base += step) {
    if (base > 0) row_load<X>(params, place, x, params.x_stride, base, -INFINITY, values);
    for (int v = 0; v < ROW_VALUES; ++v) {
      const float e = precise::exp((base > 0 ? values[v] : first[v]) - most);
      if (row_column(params, place, base, v) < params.columns) sum += e;
    }
  }
  sum = row_sum(sum, partial, place);
  const float log_sum = precise::log(sum);
  const float factor = 1.0f / sum;
  for (long base = 0; base < params.columns; base += step) {
    if (base > 0) row_load<X>(params, place, x, params.x_stride, base, -INFINITY, values);
    for (int v = 0; v < ROW_VALUES; ++v) {
      const float shifted = (base > 0 ? values[v] : first[v]) - most;
      values[v] = params.is_log != 0 ? shifted - log_sum : precise::exp(shifted) * factor;
    }
    row_store<O>(params, place, values, base, out);
  }
}
