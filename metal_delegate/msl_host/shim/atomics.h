// Atomic functions on device and threadgroup memory, relaxed as all of Metal's.
#ifndef FLEXPTE_MSL_ATOMICS
#define FLEXPTE_MSL_ATOMICS

namespace metal {

enum memory_order { memory_order_relaxed = __ATOMIC_RELAXED };

template <class T>
struct atomic {
  static_assert(msl_shim::is_same<T, int> || msl_shim::is_same<T, uint> || msl_shim::is_same<T, float> ||
                    msl_shim::is_same<T, ulong> || msl_shim::is_same<T, bool>,
                "atomic is of int, uint, float, ulong and bool");
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<ulong> atomic_ulong;
typedef atomic<bool> atomic_bool;

#define MSL_ATOMIC_FETCH(space, name, builtin)                                                  \
  template <class T, class U>                                                                   \
  MSL_INLINE T atomic_fetch_##name##_explicit(volatile space atomic<T>* p, U x, memory_order) { \
    return builtin(&p->value, T(x), __ATOMIC_RELAXED);                                          \
  }
// Bits of a value, as the compiler's atomic functions take them.
template <class T>
using msl_bits = conditional_t<sizeof(T) == 8, ulong, conditional_t<sizeof(T) == 4, uint, uchar>>;

#define MSL_ATOMICS(space)                                                                                           \
  template <class T>                                                                                                 \
  MSL_INLINE T atomic_load_explicit(const volatile space atomic<T>* p, memory_order) {                               \
    return as_type<T>(__atomic_load_n((const volatile space msl_bits<T>*)&p->value, __ATOMIC_RELAXED));              \
  }                                                                                                                  \
  template <class T, class U>                                                                                        \
  MSL_INLINE void atomic_store_explicit(volatile space atomic<T>* p, U value, memory_order) {                        \
    __atomic_store_n((volatile space msl_bits<T>*)&p->value, as_type<msl_bits<T>>(T(value)), __ATOMIC_RELAXED);      \
  }                                                                                                                  \
  template <class T, class U>                                                                                        \
  MSL_INLINE T atomic_exchange_explicit(volatile space atomic<T>* p, U value, memory_order) {                        \
    return as_type<T>(__atomic_exchange_n((volatile space msl_bits<T>*)&p->value, as_type<msl_bits<T>>(T(value)),    \
                                          __ATOMIC_RELAXED));                                                        \
  }                                                                                                                  \
  template <class T, class U>                                                                                        \
  MSL_INLINE bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>* p, T* expected, U desired,         \
                                                        memory_order, memory_order) {                                \
    msl_bits<T> old = as_type<msl_bits<T>>(*expected);                                                               \
    const bool is_done =                                                                                             \
        __sync_bool_compare_and_swap((volatile space msl_bits<T>*)&p->value, old, as_type<msl_bits<T>>(T(desired))); \
    if (!is_done) *expected = atomic_load_explicit(p, memory_order_relaxed);                                         \
    return is_done;                                                                                                  \
  }                                                                                                                  \
  MSL_ATOMIC_FETCH(space, add, __atomic_fetch_add)                                                                   \
  MSL_ATOMIC_FETCH(space, sub, __atomic_fetch_sub)                                                                   \
  MSL_ATOMIC_FETCH(space, and, __atomic_fetch_and)                                                                   \
  MSL_ATOMIC_FETCH(space, or, __atomic_fetch_or)                                                                     \
  MSL_ATOMIC_FETCH(space, xor, __atomic_fetch_xor)                                                                   \
  MSL_ATOMIC_FETCH(space, min, __atomic_fetch_min)                                                                   \
  MSL_ATOMIC_FETCH(space, max, __atomic_fetch_max)
MSL_ATOMICS(device)
MSL_ATOMICS(threadgroup)
#undef MSL_ATOMICS
#undef MSL_ATOMIC_FETCH

}  // namespace metal

#endif
