// Offsets into strided tensors.

// The offset of element `index`, in row-major order of the sizes.
inline long strided_offset(uint index, int rank, constant const long* sizes, constant const long* strides) {
  long offset = 0;
  for (int d = rank - 1; d >= 0; --d) {
    const uint size = uint(sizes[d]);
    offset += long(index % size) * strides[d];
    index /= size;
  }
  return offset;
}
