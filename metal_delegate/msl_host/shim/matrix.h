// simdgroup_matrix: 8x8 elements held by the 32 lanes of a simdgroup, each with two neighbours of one row.
#ifndef FLEXPTE_MSL_MATRIX
#define FLEXPTE_MSL_MATRIX

namespace msl_matrix {
// The layout of Apple GPUs that kernels rely on where they use thread_elements().
MSL_INLINE unsigned row() {
  const unsigned lane = msl_current->lane;
  return ((lane / 4) & 4) + (lane / 2) % 4;
}
MSL_INLINE unsigned col() {
  const unsigned lane = msl_current->lane;
  return ((lane / 4) & 2) * 2 + (lane % 2) * 2;
}
}  // namespace msl_matrix

namespace metal {

template <class T, int Cols, int Rows>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Cols == 8, "simdgroup_matrix is 8x8");
  static_assert(msl_shim::is_float<T>, "simdgroup_matrix is of float, half or bfloat");
  typedef vec<T, 2> storage_type;
  storage_type elements;
  simdgroup_matrix() = default;
  // The diagonal.
  explicit MSL_INLINE simdgroup_matrix(T x) {
    elements[0] = msl_matrix::row() == msl_matrix::col() ? x : T(0);
    elements[1] = msl_matrix::row() == msl_matrix::col() + 1 ? x : T(0);
  }
  MSL_INLINE storage_type& thread_elements() { return elements; }
  MSL_INLINE const storage_type& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Cols, int Rows>
MSL_INLINE simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, Cols, Rows> m;
  m.elements[0] = x;
  m.elements[1] = x;
  return m;
}

// Element (row, col) lies at origin.y + row, origin.x + col; transposed, at origin.y + col, origin.x + row.
#define MSL_MATRIX_MEMORY(space)                                                                                     \
  template <class T>                                                                                                 \
  MSL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const space T* source, ulong elements_per_row = 8,    \
                                 ulong2 origin = 0, bool is_transposed = false) {                                    \
    const ulong row = msl_matrix::row();                                                                             \
    const ulong col = msl_matrix::col();                                                                             \
    source += origin.y * elements_per_row + origin.x;                                                                \
    for (ulong i = 0; i < 2; ++i)                                                                                    \
      m.elements[i] = source[is_transposed ? (col + i) * elements_per_row + row : row * elements_per_row + col + i]; \
  }                                                                                                                  \
  template <class T>                                                                                                 \
  MSL_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, space T* target, ulong elements_per_row = 8,   \
                                  ulong2 origin = 0, bool is_transposed = false) {                                   \
    const ulong row = msl_matrix::row();                                                                             \
    const ulong col = msl_matrix::col();                                                                             \
    target += origin.y * elements_per_row + origin.x;                                                                \
    for (ulong i = 0; i < 2; ++i)                                                                                    \
      target[is_transposed ? (col + i) * elements_per_row + row : row * elements_per_row + col + i] = m.elements[i]; \
  }
MSL_MATRIX_MEMORY(device)
MSL_MATRIX_MEMORY(threadgroup)
#undef MSL_MATRIX_MEMORY

}  // namespace metal

// Lanes bring their elements, the one that arrives last multiplies: products and sums in float.
MSL_MEETING float2 msl_shim_multiply(float2 a, float2 b, float2 c) {
  MslSimdgroup& s = *msl_current->simdgroup;
  const unsigned row = msl_matrix::row(), col = msl_matrix::col();
  *reinterpret_cast<float2*>(&s.a[row][col]) = a;
  *reinterpret_cast<float2*>(&s.b[row][col]) = b;
  *reinterpret_cast<float2*>(&s.c[row][col]) = c;
  if (msl_arrive()) {
    msl_matrix_multiply();
    msl_release();
  }
  return *reinterpret_cast<float2*>(&s.d[row][col]);
}

namespace metal {
template <class D, class A, class B, class C>
MSL_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c) {
  d.elements = msl_shim::make<vec<D, 2>>(msl_shim_multiply(
      msl_shim::make<float2>(a.elements), msl_shim::make<float2>(b.elements), msl_shim::make<float2>(c.elements)));
}
template <class D, class A, class B>
MSL_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b) {
  d.elements = msl_shim::make<vec<D, 2>>(
      msl_shim_multiply(msl_shim::make<float2>(a.elements), msl_shim::make<float2>(b.elements), float2(0.0f)));
}
}  // namespace metal

#endif
