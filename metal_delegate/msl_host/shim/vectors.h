// Vector types (swizzles and operators are the compiler's), their constructors, and type traits.
#ifndef FLEXPTE_MSL_VECTORS
#define FLEXPTE_MSL_VECTORS

#define MSL_INLINE inline __attribute__((always_inline))

namespace msl_shim {
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

template <class T, int N>
struct vector;
template <class V>
struct traits {
  typedef V element;
  static constexpr int size = 1;
  static constexpr bool is_vector = false;
};
template <class V>
struct traits<const V> : traits<V> {};
}  // namespace msl_shim

#define MSL_VECTOR(T, N)                              \
  typedef T T##N __attribute__((ext_vector_type(N))); \
  template <>                                         \
  struct msl_shim::vector<T, N> {                     \
    typedef T##N type;                                \
  };                                                  \
  template <>                                         \
  struct msl_shim::traits<T##N> {                     \
    typedef T element;                                \
    static constexpr int size = N;                    \
    static constexpr bool is_vector = true;           \
  };
#define MSL_VECTORS(T) MSL_VECTOR(T, 2) MSL_VECTOR(T, 3) MSL_VECTOR(T, 4)
MSL_VECTORS(bool)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(float)
#undef MSL_VECTORS
#undef MSL_VECTOR

// Packed vectors are aligned as their elements.
#define MSL_PACKED(T, N, A) typedef T packed_##T##N __attribute__((ext_vector_type(N), aligned(A)));
#define MSL_PACKEDS(T, A) MSL_PACKED(T, 2, A) MSL_PACKED(T, 4, A)
MSL_PACKEDS(char, 1)
MSL_PACKEDS(uchar, 1)
MSL_PACKEDS(short, 2)
MSL_PACKEDS(ushort, 2)
MSL_PACKEDS(int, 4)
MSL_PACKEDS(uint, 4)
MSL_PACKEDS(half, 2)
MSL_PACKEDS(bfloat, 2)
MSL_PACKEDS(float, 4)
#undef MSL_PACKEDS
#undef MSL_PACKED

namespace msl_shim {
template <class T>
constexpr bool is_float = is_same<T, float> || is_same<T, half> || is_same<T, bfloat>;
template <class T>
constexpr bool is_narrow = is_same<T, half> || is_same<T, bfloat>;
template <class T>
constexpr bool is_int = __is_integral(T) && !is_same<T, bool>;
template <class V>
constexpr bool is_vec = traits<V>::is_vector;
template <class V>
using element = typename traits<V>::element;

template <class V, class T>
MSL_INLINE void put(V& v, int& at, T x) {
  if constexpr (is_vec<T>) {
    for (int i = 0; i < traits<T>::size; ++i) v[at++] = static_cast<element<V>>(x[i]);
  } else {
    v[at++] = static_cast<element<V>>(x);
  }
}

// T(x): all elements x, or the elements of a vector converted; T(x, y, ...): put together. What is no vector is
// made as C++ makes it.
template <class V, class... A>
MSL_INLINE V make(A... a) {
  if constexpr (!is_vec<V>) {
    return V(a...);
  } else if constexpr (sizeof...(A) == 0) {
    return V(0);
  } else if constexpr (sizeof...(A) == 1) {
    V v;
    const auto fill = [&v](auto x) {
      for (int i = 0; i < traits<V>::size; ++i) {
        if constexpr (is_vec<decltype(x)>) {
          static_assert(traits<decltype(x)>::size == traits<V>::size, "vectors of different sizes");
          v[i] = static_cast<element<V>>(x[i]);
        } else {
          v[i] = static_cast<element<V>>(x);
        }
      }
    };
    (fill(a), ...);
    return v;
  } else {
    static_assert((traits<A>::size + ... + 0) == traits<V>::size, "a vector is made of as many elements as it has");
    V v;
    int at = 0;
    (put(v, at, a), ...);
    return v;
  }
}

// A struct from memory of any address space, word by word: C++ has copy constructors for its own only.
template <int Align>
struct word_of {
  typedef unsigned char type;
};
template <>
struct word_of<2> {
  typedef unsigned short type;
};
template <>
struct word_of<4> {
  typedef unsigned int type;
};
template <>
struct word_of<8> {
  typedef unsigned long type;
};
template <>
struct word_of<16> : word_of<8> {};
#define MSL_COPY(space)                                                                    \
  template <class T>                                                                       \
  MSL_INLINE T copy(const space T& x) {                                                    \
    typedef typename word_of<alignof(T)>::type word;                                       \
    T result;                                                                              \
    const space word* from = (const space word*)&x;                                        \
    for (int i = 0; i < int(sizeof(T) / sizeof(word)); ++i) ((word*)&result)[i] = from[i]; \
    return result;                                                                         \
  }
MSL_COPY(device)
MSL_COPY(constant)
MSL_COPY(threadgroup)
#undef MSL_COPY
template <class T>
MSL_INLINE const T& copy(const T& x) {
  return x;
}
}  // namespace msl_shim

namespace metal {
#define MSL_USING(T) \
  using ::T##2;      \
  using ::T##3;      \
  using ::T##4;
// clang-format off
MSL_USING(bool)
MSL_USING(char)
MSL_USING(uchar)
MSL_USING(short)
MSL_USING(ushort)
MSL_USING(int)
MSL_USING(uint)
MSL_USING(long)
MSL_USING(ulong)
MSL_USING(half)
MSL_USING(bfloat)
MSL_USING(float)
// clang-format on
#undef MSL_USING
template <class T, int N>
using vec = typename msl_shim::vector<T, N>::type;

template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  typedef T value_type;
  constexpr operator T() const { return v; }
};
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <bool B>
using bool_constant = integral_constant<bool, B>;
template <class A, class B>
struct is_same : bool_constant<msl_shim::is_same<A, B>> {};
template <class A, class B>
constexpr bool is_same_v = msl_shim::is_same<A, B>;
template <bool B, class T, class F>
struct conditional {
  typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;
template <bool B, class T = void>
struct enable_if : msl_shim::enable_if<B, T> {};
template <bool B, class T = void>
using enable_if_t = typename msl_shim::enable_if<B, T>::type;
template <class T>
struct remove_const {
  typedef __remove_const(T) type;
};
template <class T>
using remove_const_t = __remove_const(T);
template <class T>
struct remove_cv {
  typedef __remove_cv(T) type;
};
template <class T>
using remove_cv_t = __remove_cv(T);
template <class T>
struct remove_reference {
  typedef __remove_reference_t(T) type;
};
template <class T>
using remove_reference_t = __remove_reference_t(T);
template <class T>
struct remove_pointer {
  typedef __remove_pointer(T) type;
};
template <class T>
using remove_pointer_t = __remove_pointer(T);
template <class T>
struct remove_addrspace {
  typedef T type;
};
template <class T>
struct remove_addrspace<device T> : remove_addrspace<T> {};
template <class T>
struct remove_addrspace<constant T> : remove_addrspace<T> {};
template <class T>
struct remove_addrspace<threadgroup T> : remove_addrspace<T> {};
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;
template <class T>
struct make_unsigned {
  typedef __make_unsigned(T) type;
};
template <class T>
using make_unsigned_t = __make_unsigned(T);
template <class T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <class T>
constexpr bool is_integral_v = __is_integral(T);
template <class T>
struct is_floating_point : bool_constant<msl_shim::is_float<T>> {};
template <class T>
constexpr bool is_floating_point_v = msl_shim::is_float<T>;
template <class T>
struct is_arithmetic : bool_constant<msl_shim::is_float<T> || __is_integral(T)> {};
template <class T>
constexpr bool is_arithmetic_v = msl_shim::is_float<T> || __is_integral(T);
template <class T>
struct is_signed : bool_constant<(T(-1) < T(0))> {};
template <class T>
constexpr bool is_signed_v = T(-1) < T(0);
template <class T>
struct is_unsigned : bool_constant<!(T(-1) < T(0))> {};
template <class T>
constexpr bool is_unsigned_v = !(T(-1) < T(0));
template <class T>
struct is_scalar : bool_constant<msl_shim::is_float<T> || __is_integral(T)> {};
template <class T>
constexpr bool is_vector_v = msl_shim::is_vec<T>;

template <class T>
struct numeric_limits {
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr bool is_integer = __is_integral(T);
  static constexpr T max() {
    if constexpr (msl_shim::is_same<T, float>) return FLT_MAX;
    if constexpr (msl_shim::is_same<T, half>) return T(65504.0f);
    if constexpr (msl_shim::is_same<T, bfloat>) return T(3.3895314e38f);
    if constexpr (__is_integral(T)) return T(~0ul >> (is_signed ? 65 - 8 * sizeof(T) : 64 - 8 * sizeof(T)));
  }
  static constexpr T lowest() {
    if constexpr (msl_shim::is_float<T>) return -max();
    if constexpr (__is_integral(T)) return is_signed ? T(-max() - 1) : T(0);
  }
  static constexpr T min() {
    if constexpr (msl_shim::is_same<T, float>) return FLT_MIN;
    if constexpr (msl_shim::is_same<T, half>) return T(6.103515625e-05f);
    if constexpr (msl_shim::is_same<T, bfloat>) return T(FLT_MIN);
    if constexpr (__is_integral(T)) return lowest();
  }
  static constexpr T epsilon() {
    if constexpr (msl_shim::is_same<T, float>) return FLT_EPSILON;
    if constexpr (msl_shim::is_same<T, half>) return T(0.0009765625f);
    if constexpr (msl_shim::is_same<T, bfloat>) return T(0.0078125f);
  }
  static constexpr T infinity() { return T(INFINITY); }
  static constexpr T quiet_NaN() { return T(NAN); }
};
}  // namespace metal

template <class To, class From>
MSL_INLINE To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type is between types of one size");
  return __builtin_bit_cast(To, x);
}

namespace metal {
using ::as_type;
}

#endif
