// Vector types (swizzles and operators are the compiler's) and their constructors.
#ifndef FLEXPTE_MSL_VECTORS
#define FLEXPTE_MSL_VECTORS

namespace msl_shim {

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <class A, class B>
struct is_same {
  static constexpr bool value = false;
};
template <class A>
struct is_same<A, A> {
  static constexpr bool value = true;
};

template <class T, int N>
struct vector;
template <class V>
struct traits {
  typedef V element;
  static constexpr int size = 1;
  static constexpr bool is_vector = false;
};

#define MSL_VECTOR(T, N)                                          \
  typedef T T##N __attribute__((ext_vector_type(N)));             \
  template <>                                                     \
  struct vector<T, N> {                                           \
    typedef T##N type;                                            \
  };                                                              \
  template <>                                                     \
  struct traits<T##N> {                                           \
    typedef T element;                                            \
    static constexpr int size = N;                                \
    static constexpr bool is_vector = true;                       \
  };
#define MSL_VECTORS(T) MSL_VECTOR(T, 2) MSL_VECTOR(T, 3) MSL_VECTOR(T, 4)
}  // namespace msl_shim

namespace msl_shim {
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

template <class V, class T>
inline void put(V& v, int& at, T x) {
  typedef typename traits<V>::element E;
  if constexpr (traits<T>::is_vector) {
    for (int i = 0; i < traits<T>::size; ++i) v[at++] = static_cast<E>(x[i]);
  } else {
    v[at++] = static_cast<E>(x);
  }
}

// V(x): all elements x, or the elements of a vector converted; V(x, y, ...): put together.
template <class V, class T>
inline V make(T x) {
  V v;
  for (int i = 0; i < traits<V>::size; ++i) {
    if constexpr (traits<T>::is_vector) {
      static_assert(traits<T>::size == traits<V>::size, "vectors of different sizes");
      v[i] = static_cast<typename traits<V>::element>(x[i]);
    } else {
      v[i] = static_cast<typename traits<V>::element>(x);
    }
  }
  return v;
}
template <class V>
inline V make() {
  return make<V>(0);
}
template <class V, class A, class B, class... Rest>
inline V make(A a, B b, Rest... rest) {
  static_assert(traits<A>::size + traits<B>::size + (traits<Rest>::size + ... + 0) == traits<V>::size,
                "a vector is made of as many elements as it has");
  V v;
  int at = 0;
  put(v, at, a);
  put(v, at, b);
  (put(v, at, rest), ...);
  return v;
}
}  // namespace msl_shim

using msl_shim::bool2; using msl_shim::bool3; using msl_shim::bool4;
using msl_shim::char2; using msl_shim::char3; using msl_shim::char4;
using msl_shim::uchar2; using msl_shim::uchar3; using msl_shim::uchar4;
using msl_shim::short2; using msl_shim::short3; using msl_shim::short4;
using msl_shim::ushort2; using msl_shim::ushort3; using msl_shim::ushort4;
using msl_shim::int2; using msl_shim::int3; using msl_shim::int4;
using msl_shim::uint2; using msl_shim::uint3; using msl_shim::uint4;
using msl_shim::long2; using msl_shim::long3; using msl_shim::long4;
using msl_shim::ulong2; using msl_shim::ulong3; using msl_shim::ulong4;
using msl_shim::half2; using msl_shim::half3; using msl_shim::half4;
using msl_shim::bfloat2; using msl_shim::bfloat3; using msl_shim::bfloat4;
using msl_shim::float2; using msl_shim::float3; using msl_shim::float4;

// A type's name followed by a parenthesis is its constructor.
#define bool2(...) msl_shim::make<bool2>(__VA_ARGS__)
#define bool4(...) msl_shim::make<bool4>(__VA_ARGS__)
#define char2(...) msl_shim::make<char2>(__VA_ARGS__)
#define char4(...) msl_shim::make<char4>(__VA_ARGS__)
#define uchar2(...) msl_shim::make<uchar2>(__VA_ARGS__)
#define uchar4(...) msl_shim::make<uchar4>(__VA_ARGS__)
#define short2(...) msl_shim::make<short2>(__VA_ARGS__)
#define short4(...) msl_shim::make<short4>(__VA_ARGS__)
#define ushort2(...) msl_shim::make<ushort2>(__VA_ARGS__)
#define ushort3(...) msl_shim::make<ushort3>(__VA_ARGS__)
#define ushort4(...) msl_shim::make<ushort4>(__VA_ARGS__)
#define int2(...) msl_shim::make<int2>(__VA_ARGS__)
#define int3(...) msl_shim::make<int3>(__VA_ARGS__)
#define int4(...) msl_shim::make<int4>(__VA_ARGS__)
#define uint2(...) msl_shim::make<uint2>(__VA_ARGS__)
#define uint3(...) msl_shim::make<uint3>(__VA_ARGS__)
#define uint4(...) msl_shim::make<uint4>(__VA_ARGS__)
#define long2(...) msl_shim::make<long2>(__VA_ARGS__)
#define long4(...) msl_shim::make<long4>(__VA_ARGS__)
#define ulong2(...) msl_shim::make<ulong2>(__VA_ARGS__)
#define half2(...) msl_shim::make<half2>(__VA_ARGS__)
#define half3(...) msl_shim::make<half3>(__VA_ARGS__)
#define half4(...) msl_shim::make<half4>(__VA_ARGS__)
#define bfloat2(...) msl_shim::make<bfloat2>(__VA_ARGS__)
#define bfloat4(...) msl_shim::make<bfloat4>(__VA_ARGS__)
#define float2(...) msl_shim::make<float2>(__VA_ARGS__)
#define float3(...) msl_shim::make<float3>(__VA_ARGS__)
#define float4(...) msl_shim::make<float4>(__VA_ARGS__)

namespace metal {
template <class T, int N>
using vec = typename msl_shim::vector<T, N>::type;

template <class A, class B>
struct is_same {
  static constexpr bool value = msl_shim::is_same<A, B>::value;
};
template <class A, class B>
constexpr bool is_same_v = msl_shim::is_same<A, B>::value;
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
using enable_if_t = typename msl_shim::enable_if<B, T>::type;
template <class T>
struct is_integral {
  static constexpr bool value = __is_integral(T);
};
template <class T>
constexpr bool is_integral_v = __is_integral(T);
template <class T>
struct is_floating_point {
  static constexpr bool value =
      msl_shim::is_same<T, float>::value || msl_shim::is_same<T, half>::value || msl_shim::is_same<T, bfloat>::value;
};
template <class T>
constexpr bool is_floating_point_v = is_floating_point<T>::value;
}  // namespace metal

template <class To, class From>
inline To as_type(From x) {
  return __builtin_bit_cast(To, x);
}

#endif
