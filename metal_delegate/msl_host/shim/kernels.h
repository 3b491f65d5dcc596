// How kernels get their arguments: included behind the kernel text, before the table that the host generates.
#ifndef FLEXPTE_MSL_KERNELS
#define FLEXPTE_MSL_KERNELS

namespace msl_shim {

template <int Attribute, int Index>
struct attribute {};

template <class T>
MSL_INLINE T position(unsigned x, unsigned y, unsigned z) {
  static_assert(is_int<element<T>>, "positions are of an unsigned integer type");
  if constexpr (is_vec<T>) {
    const unsigned p[3] = {x, y, z};
    T r;
    for (int i = 0; i < traits<T>::size; ++i) r[i] = static_cast<element<T>>(p[i]);
    return r;
  } else {
    return static_cast<T>(x);
  }
}

template <class T>
struct argument {
  template <int Attribute, int Index>
  static MSL_INLINE T get(attribute<Attribute, Index>) {
    static_assert(Attribute != kMslBuffer && Attribute != kMslThreadgroup,
                  "a [[buffer(n)]] is a pointer or reference to device or constant memory, a [[threadgroup(n)]] a "
                  "pointer to threadgroup memory");
    const MslThread& t = *msl_current;
    const MslGrid& g = msl_grid;
    static_assert(!is_vec<T> || Attribute == kMslThreadPositionInGrid || Attribute == kMslThreadgroupPositionInGrid ||
                      Attribute == kMslThreadPositionInThreadgroup || Attribute == kMslThreadsPerThreadgroup ||
                      Attribute == kMslThreadsPerGrid || Attribute == kMslThreadgroupsPerGrid,
                  "this attribute is of a scalar");
    if constexpr (Attribute == kMslThreadPositionInGrid) {
      return position<T>(g.threads[0] * g.group[0] + t.position[0], g.threads[1] * g.group[1] + t.position[1],
                         g.threads[2] * g.group[2] + t.position[2]);
    } else if constexpr (Attribute == kMslThreadgroupPositionInGrid) {
      return position<T>(g.group[0], g.group[1], g.group[2]);
    } else if constexpr (Attribute == kMslThreadPositionInThreadgroup) {
      return position<T>(t.position[0], t.position[1], t.position[2]);
    } else if constexpr (Attribute == kMslThreadIndexInThreadgroup) {
      return position<T>(t.index, 0, 0);
    } else if constexpr (Attribute == kMslThreadIndexInSimdgroup) {
      return position<T>(t.lane, 0, 0);
    } else if constexpr (Attribute == kMslSimdgroupIndexInThreadgroup) {
      return position<T>(t.simdgroup->index, 0, 0);
    } else if constexpr (Attribute == kMslSimdgroupsPerThreadgroup) {
      return position<T>(g.num_simdgroups, 0, 0);
    } else if constexpr (Attribute == kMslThreadsPerThreadgroup) {
      return position<T>(g.threads[0], g.threads[1], g.threads[2]);
    } else if constexpr (Attribute == kMslThreadsPerGrid) {
      return position<T>(g.threads[0] * g.threadgroups[0], g.threads[1] * g.threadgroups[1],
                         g.threads[2] * g.threadgroups[2]);
    } else if constexpr (Attribute == kMslThreadgroupsPerGrid) {
      return position<T>(g.threadgroups[0], g.threadgroups[1], g.threadgroups[2]);
    } else {
      return position<T>(MSL_LANES, 0, 0);
    }
  }
};
template <class T>
struct argument<device T*> {
  template <int N>
  static MSL_INLINE device T* get(attribute<kMslBuffer, N>) {
    return *(device T**)&msl_buffers[N];
  }
};
template <class T>
struct argument<constant T*> {
  template <int N>
  static MSL_INLINE constant T* get(attribute<kMslBuffer, N>) {
    return *(constant T**)&msl_buffers[N];
  }
};
template <class T>
struct argument<device T&> {
  template <int N>
  static MSL_INLINE device T& get(attribute<kMslBuffer, N>) {
    return **(device T**)&msl_buffers[N];
  }
};
template <class T>
struct argument<constant T&> {
  template <int N>
  static MSL_INLINE constant T& get(attribute<kMslBuffer, N>) {
    return **(constant T**)&msl_buffers[N];
  }
};
template <class T>
struct argument<threadgroup T*> {
  template <int N>
  static MSL_INLINE threadgroup T* get(attribute<kMslThreadgroup, N>) {
    return (threadgroup T*)msl_threadgroup_argument(N);
  }
};

template <class F, F f, class... Attributes>
struct thunk;
template <class... A, void (*f)(A...), class... Attributes>
struct thunk<void (*)(A...), f, Attributes...> {
  static_assert(sizeof...(A) == sizeof...(Attributes), "a kernel's parameters and their attributes");
  static void call() { f(argument<A>::get(Attributes())...); }
};

}  // namespace msl_shim

#endif
