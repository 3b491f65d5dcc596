// Norms and softmax over the last dimension: one threadgroup a row, its threads side by side along it; sums and
// maxima over the simdgroup, then over the threadgroup. Accumulated in float.
//
// rms_norm:   out = x / sqrt(mean(x^2) + eps) * weight
// layer_norm: out = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias
// softmax:    out = exp(x - max) / sum exp(x - max), or its logarithm

#define ROW_THREADS 256

// The sum of `value` over the threadgroup, known to all of it. `partial` has room for 8 floats.
inline float row_sum(float value, threadgroup float* partial, uint lane, uint simdgroup, uint num_simdgroups) {
  const float sum = simd_sum(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) partial[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0.0f;
  for (uint i = 0; i < num_simdgroups; ++i) total += partial[i];
  return total;
}

// NaN wins.
inline float row_max(float value, threadgroup float* partial, uint lane, uint simdgroup, uint num_simdgroups) {
  const bool has_nan = simd_any(isnan(value));
  const float most = has_nan ? NAN : simd_max(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) partial[simdgroup] = most;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float result = partial[0];
  for (uint i = 1; i < num_simdgroups; ++i) {
    const float other = partial[i];
    result = isnan(result) || result > other ? result : other;
  }
  return result;
}

template <typename TX, typename TW, typename TO>
[[kernel]] void rms_norm(constant RowParams& params [[buffer(0)]], device const TX* x [[buffer(1)]],
                         device const TW* weight [[buffer(2)]], device TO* out [[buffer(4)]],
                         uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                         uint num_threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]],
                         uint num_simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[8];
  x += strided_offset(row, params.rank, params.sizes, params.x_strides);
  out += strided_offset(row, params.rank, params.sizes, params.out_strides);
  const uint columns = uint(params.columns);
  float squares = 0.0f;
  for (uint i = thread_index; i < columns; i += num_threads) {
    const float value = float(x[i]);
    squares += value * value;
  }
  squares = row_sum(squares, partial, lane, simdgroup, num_simdgroups);
  const float factor = 1.0f / precise::sqrt(squares / float(columns) + params.eps);
  for (uint i = thread_index; i < columns; i += num_threads) {
    const float value = float(x[i]) * factor;
    out[i] = TO(params.has_weight != 0 ? value * float(weight[i]) : value);
  }
}

template <typename TX, typename TW, typename TB, typename TO>
[[kernel]] void layer_norm(constant RowParams& params [[buffer(0)]], device const TX* x [[buffer(1)]],
                           device const TW* weight [[buffer(2)]], device const TB* bias [[buffer(3)]],
                           device TO* out [[buffer(4)]], uint row [[threadgroup_position_in_grid]],
                           uint thread_index [[thread_index_in_threadgroup]],
                           uint num_threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]],
                           uint num_simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[8];
  x += strided_offset(row, params.rank, params.sizes, params.x_strides);
  out += strided_offset(row, params.rank, params.sizes, params.out_strides);
  const uint columns = uint(params.columns);
  float sum = 0.0f;
  for (uint i = thread_index; i < columns; i += num_threads) sum += float(x[i]);
  const float mean = row_sum(sum, partial, lane, simdgroup, num_simdgroups) / float(columns);
  float squares = 0.0f;
  for (uint i = thread_index; i < columns; i += num_threads) {
    const float difference = float(x[i]) - mean;
    squares += difference * difference;
  }
  squares = row_sum(squares, partial, lane, simdgroup, num_simdgroups);
  const float factor = 1.0f / precise::sqrt(squares / float(columns) + params.eps);
  for (uint i = thread_index; i < columns; i += num_threads) {
    float value = (float(x[i]) - mean) * factor;
    if (params.has_weight != 0) value *= float(weight[i]);
    if (params.has_bias != 0) value += float(bias[i]);
    out[i] = TO(value);
  }
}

template <typename TX, typename TO>
[[kernel]] void softmax(constant RowParams& params [[buffer(0)]], device const TX* x [[buffer(1)]],
                        device TO* out [[buffer(2)]], uint row [[threadgroup_position_in_grid]],
                        uint thread_index [[thread_index_in_threadgroup]],
                        uint num_threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint num_simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[8];
  x += strided_offset(row, params.rank, params.sizes, params.x_strides);
  out += strided_offset(row, params.rank, params.sizes, params.out_strides);
  const uint columns = uint(params.columns);
  float most = -INFINITY;
  for (uint i = thread_index; i < columns; i += num_threads) {
    const float value = float(x[i]);
    most = isnan(most) || most > value ? most : value;
  }
  most = row_max(most, partial, lane, simdgroup, num_simdgroups);
  float sum = 0.0f;
  for (uint i = thread_index; i < columns; i += num_threads) sum += precise::exp(float(x[i]) - most);
  sum = row_sum(sum, partial, lane, simdgroup, num_simdgroups);
  const float log_sum = precise::log(sum);
  for (uint i = thread_index; i < columns; i += num_threads) {
    const float value = float(x[i]) - most;
    out[i] = TO(params.is_log != 0 ? value - log_sum : precise::exp(value) / sum);
  }
}
