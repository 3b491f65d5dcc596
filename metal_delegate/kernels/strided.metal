// Offsets into strided tensors.

// The offset of element `index`, in row-major order of the sizes.
inline long strided_offset(uint index, int rank, constant const long* sizes, constant const long* strides) {
  long offset = 0;
  for (int d = rank - 1; d > 0; --d) {
    const uint size = uint(sizes[d]);
    const uint rest = index / size;
    offset += long(index - rest * size) * strides[d];
    index = rest;
  }
  return rank > 0 ? offset + long(index) * strides[0] : 0L;
}
inline long strided_offset(long index, int rank, constant const long* sizes, constant const long* strides) {
  if (index <= 0xffffffffL) return strided_offset(uint(index), rank, sizes, strides);
  long offset = 0;
  for (int d = rank - 1; d > 0; --d) {
    const long rest = index / sizes[d];
    offset += (index - rest * sizes[d]) * strides[d];
    index = rest;
  }
  return rank > 0 ? offset + index * strides[0] : 0L;
}
