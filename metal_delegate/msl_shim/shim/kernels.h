// How kernels get their arguments: included behind the kernel text, before the table that the host generates.
#ifndef FLEXPTE_MSL_KERNELS
#define FLEXPTE_MSL_KERNELS

namespace msl_shim {

template <class T>
T position(const unsigned (&p)[3]) {
  if constexpr (traits<T>::is_vector) {
    T r;
    for (int i = 0; i < traits<T>::size; ++i) r[i] = static_cast<typename traits<T>::element>(p[i]);
    return r;
  } else {
    return static_cast<T>(p[0]);
  }
}

template <class T>
struct msl_shim_argument {
  static __attribute__((noinline)) T get(const MslArgument& a) {
    const MslThread& t = *msl_thread();
    if constexpr (__is_integral(T) || traits<T>::is_vector) {
      const unsigned grid[3] = {t.threads[0] * t.threadgroups[0], t.threads[1] * t.threadgroups[1],
                                t.threads[2] * t.threadgroups[2]};
      const unsigned here[3] = {t.threads[0] * t.group[0] + t.position[0],
                                t.threads[1] * t.group[1] + t.position[1],
                                t.threads[2] * t.group[2] + t.position[2]};
      const unsigned num_threads = t.threads[0] * t.threads[1] * t.threads[2];
      const unsigned index[3] = {t.index, 0, 0}, lane[3] = {t.lane, 0, 0}, simdgroup[3] = {t.simdgroup, 0, 0};
      const unsigned simdgroups[3] = {(num_threads + 31) / 32, 0, 0}, width[3] = {32, 0, 0};
      switch (a.attribute) {
        case kMslThreadPositionInGrid:
          return position<T>(here);
        case kMslThreadgroupPositionInGrid:
          return position<T>(t.group);
        case kMslThreadPositionInThreadgroup:
          return position<T>(t.position);
        case kMslThreadIndexInThreadgroup:
          return position<T>(index);
        case kMslThreadIndexInSimdgroup:
          return position<T>(lane);
        case kMslSimdgroupIndexInThreadgroup:
          return position<T>(simdgroup);
        case kMslSimdgroupsPerThreadgroup:
          return position<T>(simdgroups);
        case kMslThreadsPerThreadgroup:
          return position<T>(t.threads);
        case kMslThreadsPerGrid:
          return position<T>(grid);
        case kMslThreadgroupsPerGrid:
          return position<T>(t.threadgroups);
        default:
          return position<T>(width);
      }
    }
  }
};
template <class T>
struct msl_shim_argument<device T*> {
  static device T* get(const MslArgument& a) { return (device T*)msl_buffer(a.index); }
};
template <class T>
struct msl_shim_argument<constant T*> {
  static constant T* get(const MslArgument& a) { return (constant T*)msl_buffer(a.index); }
};
template <class T>
struct msl_shim_argument<device T&> {
  static device T& get(const MslArgument& a) { return *(device T*)msl_buffer(a.index); }
};
template <class T>
struct msl_shim_argument<constant T&> {
  static constant T& get(const MslArgument& a) { return *(constant T*)msl_buffer(a.index); }
};
template <class T>
struct msl_shim_argument<threadgroup T*> {
  static threadgroup T* get(const MslArgument& a) { return (threadgroup T*)msl_threadgroup_argument(a.index); }
};

template <int... I>
struct indices {};
template <int N, int... I>
struct make_indices : make_indices<N - 1, N - 1, I...> {};
template <int... I>
struct make_indices<0, I...> {
  typedef indices<I...> type;
};

template <class F, F f>
struct thunk;
template <class... A, void (*f)(A...)>
struct thunk<void (*)(A...), f> {
  static constexpr int num_arguments = sizeof...(A);
  static void call(const MslArgument* arguments) {
    call(arguments, typename make_indices<sizeof...(A)>::type());
  }
  template <int... I>
  static void call(const MslArgument* arguments, indices<I...>) {
    f(msl_shim_argument<A>::get(arguments[I])...);
  }
};

}  // namespace msl_shim

#define MSL_THUNK(...) msl_shim::thunk<decltype(&__VA_ARGS__), &__VA_ARGS__>

#endif
