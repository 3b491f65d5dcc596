// Barriers and exchanges between the lanes of a simdgroup. The functions named msl_shim_* are the points where
// threads wait for each other: the instrumentation notes the place of each call, and counts nothing inside them.
#ifndef FLEXPTE_MSL_SIMDGROUP
#define FLEXPTE_MSL_SIMDGROUP

#define MSL_MEETING inline __attribute__((noinline))

namespace msl_shim {
template <class T>
MSL_INLINE T& slot(unsigned parity, unsigned lane) {
  static_assert(sizeof(T) <= 32, "simdgroup functions take scalars and vectors of up to four elements");
  return *reinterpret_cast<T*>(msl_current->simdgroup->slots[parity][lane]);
}
template <class T>
MSL_INLINE void publish(T x) {
  slot<T>(msl_current->simdgroup->parity, msl_current->lane) = x;
}
}  // namespace msl_shim

// The lane that arrives last reduces what all have published, in pairs as a butterfly would.
template <class Op, class T>
MSL_MEETING T msl_shim_reduce(T x) {
  MslSimdgroup& s = *msl_current->simdgroup;
  msl_shim::publish(x);
  if (msl_arrive()) {
    T values[MSL_LANES];
    if (s.num_lanes == MSL_LANES) {
      for (unsigned i = 0; i < 16; ++i) {
        values[i] = Op::apply(msl_shim::slot<T>(s.parity, i), msl_shim::slot<T>(s.parity, i + 16));
      }
      for (unsigned i = 0; i < 8; ++i) values[i] = Op::apply(values[i], values[i + 8]);
      for (unsigned i = 0; i < 4; ++i) values[i] = Op::apply(values[i], values[i + 4]);
      for (unsigned i = 0; i < 2; ++i) values[i] = Op::apply(values[i], values[i + 2]);
      values[0] = Op::apply(values[0], values[1]);
    } else {
      for (unsigned i = 0; i < s.num_lanes; ++i) values[i] = msl_shim::slot<T>(s.parity, i);
      for (unsigned step = 16; step > 0; step /= 2) {
        for (unsigned i = 0; i < step && i + step < s.num_lanes; ++i)
          values[i] = Op::apply(values[i], values[i + step]);
      }
    }
    *reinterpret_cast<T*>(s.result) = values[0];
    msl_release();
  }
  return *reinterpret_cast<T*>(s.result);
}
template <class Op, class T>
MSL_MEETING T msl_shim_prefix(T x, T first, bool is_inclusive) {
  MslSimdgroup& s = *msl_current->simdgroup;
  msl_shim::publish(x);
  if (msl_arrive()) {
    T sum = first;
    for (unsigned i = 0; i < s.num_lanes; ++i) {
      T& value = msl_shim::slot<T>(s.parity, i);
      const T next = Op::apply(sum, value);
      value = is_inclusive ? next : sum;
      sum = next;
    }
    msl_release();
  }
  return msl_shim::slot<T>(s.parity ^ 1, msl_current->lane);
}
// The value of lane `from`; the own one where there is no such lane.
template <class T>
MSL_MEETING T msl_shim_shuffle(T x, int from) {
  MslSimdgroup& s = *msl_current->simdgroup;
  msl_shim::publish(x);
  if (msl_arrive()) msl_release();
  return from >= 0 && from < int(s.num_lanes) ? msl_shim::slot<T>(s.parity ^ 1, unsigned(from)) : x;
}
MSL_MEETING uint msl_shim_ballot(bool x) {
  MslSimdgroup& s = *msl_current->simdgroup;
  msl_shim::publish(x);
  if (msl_arrive()) {
    uint bits = 0;
    for (unsigned i = 0; i < s.num_lanes; ++i) bits |= uint(msl_shim::slot<bool>(s.parity, i)) << i;
    *reinterpret_cast<uint*>(s.result) = bits;
    msl_release();
  }
  return *reinterpret_cast<uint*>(s.result);
}
MSL_MEETING void msl_shim_threadgroup_barrier(int flags) {
  msl_threadgroup_barrier(flags);
}
MSL_MEETING void msl_shim_simdgroup_barrier(int flags) {
  msl_simdgroup_barrier(flags);
}

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
MSL_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(int(a) | int(b));
}
MSL_INLINE void threadgroup_barrier(mem_flags flags) {
  msl_shim_threadgroup_barrier(int(flags));
}
MSL_INLINE void simdgroup_barrier(mem_flags flags) {
  msl_shim_simdgroup_barrier(int(flags));
}

namespace msl_op {
#define MSL_OP(name, expression) \
  struct name {                  \
    template <class T>           \
    static T apply(T a, T b) {   \
      return T(expression);      \
    }                            \
  };
MSL_OP(sum, a + b)
MSL_OP(product, a* b)
MSL_OP(minimum, metal::min(a, b))
MSL_OP(maximum, metal::max(a, b))
MSL_OP(bit_and, a& b)
MSL_OP(bit_or, a | b)
MSL_OP(bit_xor, a ^ b)
#undef MSL_OP
}  // namespace msl_op

// Of scalars, and of vectors by element.
#define MSL_REDUCTION(name, kind, call)                                                            \
  template <class T, MSL_ENABLE(msl_shim::kind<msl_shim::element<T>>)>                             \
  MSL_INLINE T name(T x) {                                                                         \
    if constexpr (msl_shim::is_vec<T>) {                                                           \
      T r;                                                                                         \
      for (int i = 0; i < msl_shim::traits<T>::size; ++i) r[i] = name(msl_shim::element<T>(x[i])); \
      return r;                                                                                    \
    } else {                                                                                       \
      return call;                                                                                 \
    }                                                                                              \
  }
#define MSL_REDUCTIONS(kind)                                                                            \
  MSL_REDUCTION(simd_sum, kind, msl_shim_reduce<msl_op::sum>(x))                                        \
  MSL_REDUCTION(simd_product, kind, msl_shim_reduce<msl_op::product>(x))                                \
  MSL_REDUCTION(simd_max, kind, msl_shim_reduce<msl_op::maximum>(x))                                    \
  MSL_REDUCTION(simd_min, kind, msl_shim_reduce<msl_op::minimum>(x))                                    \
  MSL_REDUCTION(simd_prefix_inclusive_sum, kind, (msl_shim_prefix<msl_op::sum>(x, T(0), true)))         \
  MSL_REDUCTION(simd_prefix_exclusive_sum, kind, (msl_shim_prefix<msl_op::sum>(x, T(0), false)))        \
  MSL_REDUCTION(simd_prefix_inclusive_product, kind, (msl_shim_prefix<msl_op::product>(x, T(1), true))) \
  MSL_REDUCTION(simd_prefix_exclusive_product, kind, (msl_shim_prefix<msl_op::product>(x, T(1), false)))
MSL_REDUCTIONS(is_float)
MSL_REDUCTIONS(is_int)
MSL_REDUCTION(simd_and, is_int, msl_shim_reduce<msl_op::bit_and>(x))
MSL_REDUCTION(simd_or, is_int, msl_shim_reduce<msl_op::bit_or>(x))
MSL_REDUCTION(simd_xor, is_int, msl_shim_reduce<msl_op::bit_xor>(x))
#undef MSL_REDUCTIONS
#undef MSL_REDUCTION

#define MSL_EXCHANGE                                                             \
  template <class T, MSL_ENABLE(!msl_shim::is_same<msl_shim::element<T>, bool>)> \
  MSL_INLINE T
MSL_EXCHANGE simd_shuffle(T x, ushort lane) {
  return msl_shim_shuffle(x, lane);
}
MSL_EXCHANGE simd_broadcast(T x, ushort lane) {
  return msl_shim_shuffle(x, lane);
}
MSL_EXCHANGE simd_broadcast_first(T x) {
  return msl_shim_shuffle(x, 0);
}
MSL_EXCHANGE simd_shuffle_xor(T x, ushort mask) {
  return msl_shim_shuffle(x, int(msl_current->lane ^ mask));
}
MSL_EXCHANGE simd_shuffle_up(T x, ushort delta) {
  return msl_shim_shuffle(x, int(msl_current->lane) - delta);
}
MSL_EXCHANGE simd_shuffle_down(T x, ushort delta) {
  return msl_shim_shuffle(x, int(msl_current->lane) + delta);
}
MSL_EXCHANGE simd_shuffle_rotate_up(T x, ushort delta) {
  return msl_shim_shuffle(x, int((msl_current->lane + 32u - delta % 32u) % 32u));
}
MSL_EXCHANGE simd_shuffle_rotate_down(T x, ushort delta) {
  return msl_shim_shuffle(x, int((msl_current->lane + delta) % 32u));
}
// Lanes that shuffle beyond the end take from the filling, shifted as well.
MSL_EXCHANGE simd_shuffle_and_fill_up(T x, T fill, ushort delta) {
  const int from = int(msl_current->lane) - delta;
  const T a = msl_shim_shuffle(x, from);
  const T b = msl_shim_shuffle(fill, from + 32);
  return from < 0 ? b : a;
}
MSL_EXCHANGE simd_shuffle_and_fill_down(T x, T fill, ushort delta) {
  const int from = int(msl_current->lane) + delta;
  const T a = msl_shim_shuffle(x, from);
  const T b = msl_shim_shuffle(fill, from - 32);
  return from > 31 ? b : a;
}
MSL_EXCHANGE quad_shuffle(T x, ushort lane) {
  return msl_shim_shuffle(x, int((msl_current->lane & ~3u) | lane));
}
MSL_EXCHANGE quad_broadcast(T x, ushort lane) {
  return quad_shuffle(x, lane);
}
MSL_EXCHANGE quad_shuffle_xor(T x, ushort mask) {
  return msl_shim_shuffle(x, int(msl_current->lane ^ mask));
}
MSL_EXCHANGE quad_sum(T x) {
  x = x + quad_shuffle_xor(x, 1);
  return x + quad_shuffle_xor(x, 2);
}
MSL_EXCHANGE quad_max(T x) {
  x = max(x, quad_shuffle_xor(x, 1));
  return max(x, quad_shuffle_xor(x, 2));
}
MSL_EXCHANGE quad_min(T x) {
  x = min(x, quad_shuffle_xor(x, 1));
  return min(x, quad_shuffle_xor(x, 2));
}
#undef MSL_EXCHANGE

struct simd_vote {
  typedef ulong vote_t;
  vote_t votes;
  explicit constexpr simd_vote(vote_t v = 0) : votes(v) {}
  explicit constexpr operator vote_t() const { return votes; }
  bool any() const { return votes != 0; }
  bool all() const { return votes == msl_current->simdgroup->all_lanes; }
};
MSL_INLINE simd_vote simd_ballot(bool x) {
  return simd_vote(msl_shim_ballot(x));
}
MSL_INLINE bool simd_any(bool x) {
  return msl_shim_ballot(x) != 0;
}
MSL_INLINE bool simd_all(bool x) {
  return msl_shim_ballot(!x) == 0;
}
MSL_INLINE bool simd_is_first() {
  return msl_current->lane == 0;
}
MSL_INLINE simd_vote simd_active_threads_mask() {
  return simd_vote(msl_current->simdgroup->all_lanes);
}

}  // namespace metal

#endif
