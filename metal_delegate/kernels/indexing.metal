// Copies by index: one thread an element. A bad index writes nothing and leaves the instruction's number in
// `status`, which the host reads when the step has run.
//
// gather:     out[..., i..., ...] = source[..., index[i...], ...], negative indices from the end
// index_copy: target[..., index[i], ...] = source[..., i, ...]; of equal indices any one stays, as in PyTorch

template <typename T, typename I>
[[kernel]] void gather(constant GatherParams& params [[buffer(0)]], device const T* source [[buffer(1)]],
                       device const I* index [[buffer(2)]], device T* out [[buffer(3)]],
                       device atomic_uint* status [[buffer(4)]], uint position [[thread_position_in_grid]]) {
  if (position >= params.count) return;
  long row = long(index[strided_offset(position, params.rank, params.sizes, params.index_strides)]);
  if (row < 0) row += params.source_size;
  if (row < 0 || row >= params.source_size) {
    atomic_store_explicit(status, params.instruction, memory_order_relaxed);
    return;
  }
  const long from = strided_offset(position, params.rank, params.sizes, params.source_strides);
  out[strided_offset(position, params.rank, params.sizes, params.out_strides)] =
      source[row * params.source_stride + from];
}

template <typename T, typename I>
[[kernel]] void index_copy(constant IndexCopyParams& params [[buffer(0)]], device T* target [[buffer(1)]],
                           device const I* index [[buffer(2)]], device const T* source [[buffer(3)]],
                           device atomic_uint* status [[buffer(4)]], uint position [[thread_position_in_grid]]) {
  if (position >= params.count) return;
  uint rest = position;
  long from = 0;
  long to = 0;
  long row = 0;
  for (int d = params.rank - 1; d >= 0; --d) {
    const uint size = uint(params.sizes[d]);
    const long at = long(rest % size);
    rest /= size;
    from += at * params.source_strides[d];
    if (d != params.dim) {
      to += at * params.target_strides[d];
      continue;
    }
    row = long(index[at * params.index_stride]);
  }
  if (row < 0 || row >= params.target_size) {
    atomic_store_explicit(status, params.instruction, memory_order_relaxed);
    return;
  }
  target[row * params.target_strides[params.dim] + to] = source[from];
}

// out[i] = start + i * step
template <typename T>
[[kernel]] void arange(constant ArangeParams& params [[buffer(0)]], device T* out [[buffer(1)]],
                       uint position [[thread_position_in_grid]]) {
  if (position < params.count) out[long(position) * params.stride] = T(params.start + long(position) * params.step);
}
