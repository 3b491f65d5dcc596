// Functions of integers and their vectors; abs is of floats as well.
#ifndef FLEXPTE_MSL_INTEGERS
#define FLEXPTE_MSL_INTEGERS

namespace metal {

#define MSL_INT MSL_ENABLE(msl_shim::is_int<msl_shim::element<T>>)
#define MSL_INTEGER_UNARY(name, expression)                                                        \
  template <class T, MSL_INT>                                                                      \
  MSL_INLINE T name(T x) {                                                                         \
    if constexpr (msl_shim::is_vec<T>) {                                                           \
      T r;                                                                                         \
      for (int i = 0; i < msl_shim::traits<T>::size; ++i) r[i] = name(msl_shim::element<T>(x[i])); \
      return r;                                                                                    \
    } else {                                                                                       \
      constexpr int bits = 8 * sizeof(T);                                                          \
      const ulong u = ulong(x) & (~0ul >> (64 - bits));                                            \
      (void)u;                                                                                     \
      return T(expression);                                                                        \
    }                                                                                              \
  }
#define MSL_INTEGER_BINARY(name, expression)                                 \
  template <class T, MSL_INT>                                                \
  MSL_INLINE T name(T x, T y) {                                              \
    if constexpr (msl_shim::is_vec<T>) {                                     \
      T r;                                                                   \
      for (int i = 0; i < msl_shim::traits<T>::size; ++i)                    \
        r[i] = name(msl_shim::element<T>(x[i]), msl_shim::element<T>(y[i])); \
      return r;                                                              \
    } else {                                                                 \
      constexpr int bits = 8 * sizeof(T);                                    \
      (void)bits;                                                            \
      return T(expression);                                                  \
    }                                                                        \
  }
MSL_INTEGER_UNARY(popcount, __builtin_popcountll(u))
MSL_INTEGER_UNARY(ctz, u == 0 ? bits : __builtin_ctzll(u))
MSL_INTEGER_UNARY(clz, u == 0 ? bits : __builtin_clzll(u) - (64 - bits))
MSL_INTEGER_UNARY(reverse_bits, __builtin_bitreverse64(u) >> (64 - bits))
MSL_INTEGER_BINARY(absdiff, x < y ? y - x : x - y)
MSL_INTEGER_BINARY(hadd, (__int128(x) + __int128(y)) >> 1)
MSL_INTEGER_BINARY(rhadd, (__int128(x) + __int128(y) + 1) >> 1)
MSL_INTEGER_BINARY(mulhi, (__int128(x) * __int128(y)) >> bits)
MSL_INTEGER_BINARY(rotate, (make_unsigned_t<T>(x) << (y & (bits - 1))) |
                               (make_unsigned_t<T>(x) >> ((bits - (y & (bits - 1))) & (bits - 1))))
MSL_INTEGER_BINARY(addsat, clamp(__int128(x) + __int128(y), __int128(numeric_limits<T>::lowest()),
                                 __int128(numeric_limits<T>::max())))
MSL_INTEGER_BINARY(subsat, clamp(__int128(x) - __int128(y), __int128(numeric_limits<T>::lowest()),
                                 __int128(numeric_limits<T>::max())))
template <class T, MSL_INT>
MSL_INLINE T madhi(T a, T b, T c) {
  return mulhi(a, b) + c;
}
MSL_INLINE int mul24(int a, int b) {
  return ((a << 8) >> 8) * ((b << 8) >> 8);
}
MSL_INLINE uint mul24(uint a, uint b) {
  return (a & 0xffffffu) * (b & 0xffffffu);
}
MSL_INLINE int mad24(int a, int b, int c) {
  return mul24(a, b) + c;
}
MSL_INLINE uint mad24(uint a, uint b, uint c) {
  return mul24(a, b) + c;
}
template <class T, MSL_ENABLE(msl_shim::is_int<T>)>
MSL_INLINE T extract_bits(T x, uint offset, uint bits) {
  if (bits == 0) return T(0);
  const uint unused = 8 * sizeof(T) - bits;
  return T(T(make_unsigned_t<T>(x) << (unused - offset)) >> unused);
}
template <class T, MSL_ENABLE(msl_shim::is_int<T>)>
MSL_INLINE T insert_bits(T base, T insert, uint offset, uint bits) {
  if (bits == 0) return base;
  const ulong mask = (~0ul >> (64 - bits)) << offset;
  return T((ulong(base) & ~mask) | ((ulong(insert) << offset) & mask));
}
template <class T, MSL_ENABLE(msl_shim::is_int<msl_shim::element<T>> || msl_shim::is_float<msl_shim::element<T>>)>
MSL_INLINE T abs(T x) {
  if constexpr (msl_shim::is_float<msl_shim::element<T>>) {
    return fabs(x);
  } else if constexpr (msl_shim::is_vec<T>) {
    T r;
    for (int i = 0; i < msl_shim::traits<T>::size; ++i) r[i] = abs(msl_shim::element<T>(x[i]));
    return r;
  } else {
    return x < T(0) ? T(-x) : x;
  }
}
#undef MSL_INTEGER_UNARY
#undef MSL_INTEGER_BINARY

}  // namespace metal

#endif
