// Barriers, exchanges between the lanes of a simdgroup, simdgroup matrices, atomics. What the functions named
// msl_shim_* do is not counted as work of the kernel.
#ifndef FLEXPTE_MSL_SIMDGROUP
#define FLEXPTE_MSL_SIMDGROUP

#define MSL_SITE __builtin_return_address(0)
#define MSL_NOINLINE __attribute__((noinline))

template <class T>
MSL_NOINLINE T msl_shim_reduce_sum(T x) {
  const void* all[32];
  const int n = msl_gather(&x, sizeof(T), all, MSL_SITE);
  // Pairs, as a butterfly adds them.
  T values[32];
  for (int i = 0; i < 32; ++i) values[i] = i < n ? *static_cast<const T*>(all[i]) : T(0);
  for (int step = 16; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) values[i] = values[i] + values[i + step];
  return values[0];
}
template <class T>
MSL_NOINLINE T msl_shim_reduce_product(T x) {
  const void* all[32];
  const int n = msl_gather(&x, sizeof(T), all, MSL_SITE);
  T r = *static_cast<const T*>(all[0]);
  for (int i = 1; i < n; ++i) r = r * *static_cast<const T*>(all[i]);
  return r;
}
template <class T>
MSL_NOINLINE T msl_shim_reduce_max(T x) {
  const void* all[32];
  const int n = msl_gather(&x, sizeof(T), all, MSL_SITE);
  T r = *static_cast<const T*>(all[0]);
  for (int i = 1; i < n; ++i) r = metal::max(r, *static_cast<const T*>(all[i]));
  return r;
}
template <class T>
MSL_NOINLINE T msl_shim_reduce_min(T x) {
  const void* all[32];
  const int n = msl_gather(&x, sizeof(T), all, MSL_SITE);
  T r = *static_cast<const T*>(all[0]);
  for (int i = 1; i < n; ++i) r = metal::min(r, *static_cast<const T*>(all[i]));
  return r;
}
template <class T>
MSL_NOINLINE T msl_shim_reduce_bits(T x, int op) {
  const void* all[32];
  const int n = msl_gather(&x, sizeof(T), all, MSL_SITE);
  T r = *static_cast<const T*>(all[0]);
  for (int i = 1; i < n; ++i) {
    const T y = *static_cast<const T*>(all[i]);
    r = op == 0 ? T(r & y) : op == 1 ? T(r | y) : T(r ^ y);
  }
  return r;
}
template <class T>
MSL_NOINLINE T msl_shim_prefix_sum(T x, int is_inclusive) {
  const void* all[32];
  msl_gather(&x, sizeof(T), all, MSL_SITE);
  T r = T(0);
  for (int i = 0; i < int(msl_thread()->lane) + is_inclusive; ++i) r = r + *static_cast<const T*>(all[i]);
  return r;
}
// The value of lane `from`; the own one where there is no such lane.
template <class T>
MSL_NOINLINE T msl_shim_shuffle(T x, int from) {
  const void* all[32];
  const int n = msl_gather(&x, sizeof(T), all, MSL_SITE);
  return from >= 0 && from < n ? *static_cast<const T*>(all[from]) : x;
}
inline MSL_NOINLINE unsigned long msl_shim_ballot(bool x) {
  const void* all[32];
  const int n = msl_gather(&x, sizeof(bool), all, MSL_SITE);
  unsigned long r = 0;
  for (int i = 0; i < n; ++i) r |= static_cast<unsigned long>(*static_cast<const bool*>(all[i])) << i;
  return r;
}
inline MSL_NOINLINE int msl_shim_num_lanes(bool x) {
  const void* all[32];
  return msl_gather(&x, sizeof(bool), all, MSL_SITE);
}
inline MSL_NOINLINE void msl_shim_threadgroup_barrier() { msl_threadgroup_barrier(MSL_SITE); }
inline MSL_NOINLINE void msl_shim_simdgroup_barrier() { msl_simdgroup_barrier(MSL_SITE); }

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
inline __attribute__((always_inline)) void threadgroup_barrier(mem_flags) { msl_shim_threadgroup_barrier(); }
inline __attribute__((always_inline)) void simdgroup_barrier(mem_flags) { msl_shim_simdgroup_barrier(); }

#define MSL_LANES(name, call)                                                                     \
  template <class T, MSL_ENABLE(!msl_shim::is_vec<T>)>                                            \
  inline __attribute__((always_inline)) T name(T x) {                                             \
    return call;                                                                                  \
  }                                                                                               \
  template <class V, MSL_ENABLE(msl_shim::is_vec<V>), class = void>                               \
  inline __attribute__((always_inline)) V name(V x) {                                             \
    V r;                                                                                          \
    for (int i = 0; i < msl_shim::traits<V>::size; ++i) r[i] = name(msl_shim::element<V>(x[i]));  \
    return r;                                                                                     \
  }
MSL_LANES(simd_sum, msl_shim_reduce_sum(x))
MSL_LANES(simd_product, msl_shim_reduce_product(x))
MSL_LANES(simd_max, msl_shim_reduce_max(x))
MSL_LANES(simd_min, msl_shim_reduce_min(x))
MSL_LANES(simd_and, msl_shim_reduce_bits(x, 0))
MSL_LANES(simd_or, msl_shim_reduce_bits(x, 1))
MSL_LANES(simd_xor, msl_shim_reduce_bits(x, 2))
MSL_LANES(simd_prefix_inclusive_sum, msl_shim_prefix_sum(x, 1))
MSL_LANES(simd_prefix_exclusive_sum, msl_shim_prefix_sum(x, 0))
MSL_LANES(simd_broadcast_first, msl_shim_shuffle(x, 0))
#undef MSL_LANES

#define MSL_INLINE inline __attribute__((always_inline))
template <class T>
MSL_INLINE T simd_shuffle(T x, ushort lane) {
  return msl_shim_shuffle(x, lane);
}
template <class T>
MSL_INLINE T simd_broadcast(T x, ushort lane) {
  return msl_shim_shuffle(x, lane);
}
template <class T>
MSL_INLINE T simd_shuffle_xor(T x, ushort mask) {
  return msl_shim_shuffle(x, int(msl_thread()->lane ^ mask));
}
template <class T>
MSL_INLINE T simd_shuffle_up(T x, ushort delta) {
  return msl_shim_shuffle(x, int(msl_thread()->lane) - delta);
}
template <class T>
MSL_INLINE T simd_shuffle_down(T x, ushort delta) {
  return msl_shim_shuffle(x, int(msl_thread()->lane) + delta);
}
template <class T>
MSL_INLINE T simd_shuffle_and_fill_up(T x, T fill, ushort delta) {
  const T y = msl_shim_shuffle(x, int(msl_thread()->lane) - delta);
  return msl_thread()->lane < delta ? fill : y;
}
template <class T>
MSL_INLINE T simd_shuffle_and_fill_down(T x, T fill, ushort delta) {
  const T y = msl_shim_shuffle(x, int(msl_thread()->lane) + delta);
  return msl_thread()->lane + delta > 31 ? fill : y;
}
template <class T>
MSL_INLINE T quad_shuffle_xor(T x, ushort mask) {
  return msl_shim_shuffle(x, int(msl_thread()->lane ^ mask));
}
template <class T>
MSL_INLINE T quad_sum(T x) {
  x = x + quad_shuffle_xor(x, 1);
  return x + quad_shuffle_xor(x, 2);
}
template <class T>
MSL_INLINE T quad_max(T x) {
  x = max(x, quad_shuffle_xor(x, 1));
  return max(x, quad_shuffle_xor(x, 2));
}
MSL_INLINE bool simd_any(bool x) { return msl_shim_ballot(x) != 0; }
MSL_INLINE bool simd_all(bool x) { return msl_shim_ballot(!x) == 0; }
MSL_INLINE bool simd_is_first() { return msl_thread()->lane == 0; }
struct simd_vote {
  typedef ulong vote_t;
  vote_t votes;
  explicit constexpr operator vote_t() const { return votes; }
  bool any() const { return votes != 0; }
  bool all() const { return votes == 0xffffffffu; }
};
MSL_INLINE simd_vote simd_ballot(bool x) { return {msl_shim_ballot(x)}; }

// Lane i holds two neighbours of one row of the 8x8 elements.
template <class T, int Rows, int Cols>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Cols == 8, "simdgroup_matrix is 8x8");
  static_assert(msl_shim::is_float<T>, "simdgroup_matrix is of float, half or bfloat");
  typedef typename msl_shim::vector<T, 2>::type storage;
  storage elements;
  simdgroup_matrix() = default;
  // The diagonal.
  explicit simdgroup_matrix(T x) {
    const int lane = int(msl_thread()->lane);
    const int row = ((lane / 4) & 4) + (lane / 2) % 4;
    const int col = ((lane / 4) & 2) * 2 + (lane % 2) * 2;
    elements[0] = row == col ? x : T(0);
    elements[1] = row == col + 1 ? x : T(0);
  }
  thread storage& thread_elements() { return elements; }
  const thread storage& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Rows, int Cols>
MSL_INLINE simdgroup_matrix<T, Rows, Cols> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, Rows, Cols> m;
  m.elements[0] = x;
  m.elements[1] = x;
  return m;
}

namespace msl_matrix {
MSL_INLINE int row() {
  const int lane = int(msl_thread()->lane);
  return ((lane / 4) & 4) + (lane / 2) % 4;
}
MSL_INLINE int col() {
  const int lane = int(msl_thread()->lane);
  return ((lane / 4) & 2) * 2 + (lane % 2) * 2;
}
template <class T>
constexpr int type() {
  return is_same_v<T, float> ? kMslFloat : is_same_v<T, half> ? kMslHalf : kMslBfloat;
}
}  // namespace msl_matrix

#define MSL_MATRIX_MEMORY(space)                                                                              \
  template <class T>                                                                                          \
  MSL_INLINE void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& m, const space T* source,                  \
                                 ulong elements_per_row = 8, ulong2 origin = ulong2(0),                       \
                                 bool is_transposed = false) {                                                \
    const ulong row = ulong(msl_matrix::row()) + origin[is_transposed ? 0 : 1];                               \
    const ulong col = ulong(msl_matrix::col()) + origin[is_transposed ? 1 : 0];                               \
    for (ulong i = 0; i < 2; ++i)                                                                             \
      m.elements[i] = source[is_transposed ? (col + i) * elements_per_row + row                               \
                                           : row * elements_per_row + col + i];                               \
  }                                                                                                           \
  template <class T>                                                                                          \
  MSL_INLINE void simdgroup_store(simdgroup_matrix<T, 8, 8> m, space T* target, ulong elements_per_row = 8,   \
                                  ulong2 origin = ulong2(0), bool is_transposed = false) {                    \
    const ulong row = ulong(msl_matrix::row()) + origin[is_transposed ? 0 : 1];                               \
    const ulong col = ulong(msl_matrix::col()) + origin[is_transposed ? 1 : 0];                               \
    for (ulong i = 0; i < 2; ++i)                                                                             \
      target[is_transposed ? (col + i) * elements_per_row + row : row * elements_per_row + col + i] =         \
          m.elements[i];                                                                                      \
  }
MSL_MATRIX_MEMORY(device)
MSL_MATRIX_MEMORY(threadgroup)
#undef MSL_MATRIX_MEMORY

}  // namespace metal

template <class D, class A, class B, class C>
MSL_NOINLINE void msl_shim_multiply(metal::simdgroup_matrix<D, 8, 8>* d, const metal::simdgroup_matrix<A, 8, 8>* a,
                                    const metal::simdgroup_matrix<B, 8, 8>* b,
                                    const metal::simdgroup_matrix<C, 8, 8>* c) {
  const MslMatrices mine = {&a->elements, &b->elements, c == nullptr ? nullptr : &c->elements, &d->elements};
  using namespace metal::msl_matrix;
  msl_matrix_multiply(&mine, type<A>(), type<B>(), type<C>(), type<D>(), MSL_SITE);
}

namespace metal {
template <class D, class A, class B, class C>
MSL_INLINE void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  msl_shim_multiply(&d, &a, &b, &c);
}
template <class D, class A, class B>
MSL_INLINE void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b) {
  msl_shim_multiply(&d, &a, &b, static_cast<const simdgroup_matrix<D, 8, 8>*>(nullptr));
}

enum memory_order { memory_order_relaxed };
#define MSL_ATOMIC(name, T)                                                                          \
  struct name {                                                                                      \
    T value;                                                                                         \
  };
MSL_ATOMIC(atomic_uint, uint)
MSL_ATOMIC(atomic_int, int)
MSL_ATOMIC(atomic_float, float)
#undef MSL_ATOMIC
#define MSL_ATOMICS(space, name, T)                                                                  \
  MSL_INLINE T atomic_load_explicit(const space name* p, memory_order) { return p->value; }          \
  MSL_INLINE void atomic_store_explicit(space name* p, T x, memory_order) { p->value = x; }          \
  MSL_INLINE T atomic_exchange_explicit(space name* p, T x, memory_order) {                          \
    const T old = p->value;                                                                          \
    p->value = x;                                                                                    \
    return old;                                                                                      \
  }                                                                                                  \
  MSL_INLINE T atomic_fetch_add_explicit(space name* p, T x, memory_order) {                         \
    const T old = p->value;                                                                          \
    p->value = old + x;                                                                              \
    return old;                                                                                      \
  }
#define MSL_INT_ATOMICS(space, name, T)                                                              \
  MSL_ATOMICS(space, name, T)                                                                        \
  MSL_INLINE T atomic_fetch_or_explicit(space name* p, T x, memory_order) {                          \
    const T old = p->value;                                                                          \
    p->value = old | x;                                                                              \
    return old;                                                                                      \
  }                                                                                                  \
  MSL_INLINE T atomic_fetch_max_explicit(space name* p, T x, memory_order) {                         \
    const T old = p->value;                                                                          \
    p->value = max(old, x);                                                                          \
    return old;                                                                                      \
  }                                                                                                  \
  MSL_INLINE T atomic_fetch_min_explicit(space name* p, T x, memory_order) {                         \
    const T old = p->value;                                                                          \
    p->value = min(old, x);                                                                          \
    return old;                                                                                      \
  }
MSL_INT_ATOMICS(device, atomic_uint, uint)
MSL_INT_ATOMICS(device, atomic_int, int)
MSL_INT_ATOMICS(threadgroup, atomic_uint, uint)
MSL_INT_ATOMICS(threadgroup, atomic_int, int)
MSL_ATOMICS(device, atomic_float, float)
#undef MSL_ATOMICS
#undef MSL_INT_ATOMICS
}  // namespace metal

#endif
