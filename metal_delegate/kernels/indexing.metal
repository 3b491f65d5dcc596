// Copies by index: bits, along rows. An index outside copies nothing and leaves the instruction's number in `status`,
// which the host reads after the step.
//
// gather:     out[..., i..., :] = source[..., index[i...], :], negative indices from the end
// index_copy: target[..., index[i], ...] = source[..., i, ...]; of equal indices the last one stays: what a later one
//             overwrites is not copied
//
// The grid: x over what lies contiguous (or innermost), y over the other dimensions by row-major position; index_copy: z
// over the indices. Threads go on behind the grid.

template <typename T, typename I>
[[kernel]] void gather(constant GatherParams& params [[buffer(0)]], device const T* source [[buffer(1)]],
                       device const I* index [[buffer(2)]], device T* out [[buffer(3)]],
                       device atomic_uint* status [[buffer(4)]], uint2 position [[thread_position_in_grid]],
                       uint2 grid [[threads_per_grid]]) {
  for (uint row = position.y; row < params.rows; row += grid.y) {
    const long index_at = strided_offset(row, params.rank, params.sizes, params.index_strides);
    const long source_at = strided_offset(row, params.rank, params.sizes, params.source_strides);
    const long out_at = strided_offset(row, params.rank, params.sizes, params.out_strides);
    for (long i = long(position.x); i < params.inner; i += long(grid.x)) {
      long from = long(index[index_at + i * params.index_inner_stride]);
      if (from < 0L) from += params.source_size;
      if (from < 0L || from >= params.source_size) {
        atomic_store_explicit(status, params.instruction, memory_order_relaxed);
        continue;
      }
      from = from * params.source_stride + source_at;
      if (params.is_vectorizable != 0) {  // rows of 16 bytes at a time
        device const uint4* from16 = (device const uint4*)(source + from);
        device uint4* to16 = (device uint4*)(out + out_at);
        to16[i] = from16[i];
      } else {
        out[out_at + i * params.out_inner_stride] = source[from + i * params.source_inner_stride];
      }
    }
    if (row > 0xffffffffu - grid.y) return;
  }
}

template <typename T, typename I>
[[kernel]] void index_copy(constant IndexCopyParams& params [[buffer(0)]], device T* target [[buffer(1)]],
                           device const I* index [[buffer(2)]], device const T* source [[buffer(3)]],
                           device atomic_uint* status [[buffer(4)]], uint3 position [[thread_position_in_grid]],
                           uint3 grid [[threads_per_grid]], uint thread_index [[thread_index_in_threadgroup]],
                           uint3 num_threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup uint repeats[32];
  const long i = long(position.z);
  const long row = long(index[i * params.index_stride]);
  if (i + 1 < params.count) {
    const uint total = num_threads.x * num_threads.y;
    bool is_repeated = false;
    for (long later = i + 1 + long(thread_index); later < params.count; later += long(total)) {
      is_repeated = is_repeated || long(index[later * params.index_stride]) == row;
    }
    const bool any = simd_any(is_repeated);
    if (lane == 0) repeats[simdgroup] = any ? 1u : 0u;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint seen = 0;
    for (uint s = 0; s < total / 32; ++s) seen |= repeats[s];
    if (seen != 0) return;
  }
  if (row < 0L || row >= params.target_size) {
    atomic_store_explicit(status, params.instruction, memory_order_relaxed);
    return;
  }
  target += row * params.target_stride;
  source += i * params.source_stride;
  for (uint rest = position.y; rest < params.rows; rest += grid.y) {
    const long to = strided_offset(rest, params.rank, params.sizes, params.target_strides);
    const long from = strided_offset(rest, params.rank, params.sizes, params.source_strides);
    for (long j = long(position.x); j < params.inner; j += long(grid.x)) {
      if (params.is_vectorizable != 0) {  // 16 bytes at a time
        device const uint4* from16 = (device const uint4*)(source + from);
        device uint4* to16 = (device uint4*)(target + to);
        to16[j] = from16[j];
      } else {
        target[to + j * params.target_inner_stride] = source[from + j * params.source_inner_stride];
      }
    }
    if (rest > 0xffffffffu - grid.y) return;
  }
}

// out[i] = start + i * step, in long, where it may wrap.
template <typename O>
[[kernel]] void arange(constant ArangeParams& params [[buffer(0)]], device O* out [[buffer(1)]],
                       uint position [[thread_position_in_grid]], uint grid [[threads_per_grid]]) {
  for (long i = long(position); i < params.count; i += long(grid)) {
    store_narrow(out + i * params.stride, long(ulong(params.start) + ulong(i) * ulong(params.step)));
  }
}
