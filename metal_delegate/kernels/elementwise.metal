// out[i] = expression(inputs[0][i], ...). The kernel of each expression is generated (exporter/msl_elementwise.py):
//
//   for each row of the merged index space (grid y), for each four neighbours of its innermost dimension (grid x):
//     load four of each input, its value of each, store four of the output
//
// The host has merged dimensions that lie at one stride in all operands, so that contiguous tensors are one row;
// the innermost dimension is that of the output's smallest stride.

// Four elements, `stride` apart; of those past the first `count`, the last one again. Whether they are neighbours and
// aligned is the same for all threads.
template <typename T>
inline vec<T, 4> elementwise_load(device const T* from, long stride, int count, bool is_vector) {
  if (is_vector && count == 4) return *(device const vec<T, 4>*)from;
  vec<T, 4> values;
  values[0] = from[0];
  for (int i = 1; i < 4; ++i) values[i] = stride == 0L ? values[0] : from[stride * long(min(i, count - 1))];
  return values;
}

template <typename T>
inline void elementwise_store(device T* to, vec<T, 4> values, long stride, int count, bool is_vector) {
  if (is_vector && count == 4) {
    *(device vec<T, 4>*)to = values;
    return;
  }
  for (int i = 0; i < count; ++i) to[stride * i] = values[i];
}
