// Elements in device memory: widened to float or long (bools to 0 and 1) where they are loaded, converted back
// as ATen casts where they are stored. Sixteen bytes at a time where the host found that rows are aligned.

inline float load_wide(device const float* from) { return *from; }
inline float load_wide(device const half* from) { return float(*from); }
inline float load_wide(device const bfloat* from) { return float(*from); }
inline long load_wide(device const long* from) { return *from; }
inline long load_wide(device const int* from) { return long(*from); }
inline long load_wide(device const short* from) { return long(*from); }
inline long load_wide(device const char* from) { return long(*from); }
inline long load_wide(device const uchar* from) { return long(*from); }
// Any byte but 0 is true.
inline long load_wide(device const bool* from) { return *(device const uchar*)from != 0 ? 1L : 0L; }

inline void store_narrow(device float* to, float value) { *to = value; }
inline void store_narrow(device half* to, float value) { *to = half(value); }
inline void store_narrow(device bfloat* to, float value) { *to = bfloat(value); }
inline void store_narrow(device float* to, long value) { *to = float(value); }
inline void store_narrow(device half* to, long value) { *to = half(float(value)); }
inline void store_narrow(device bfloat* to, long value) { *to = bfloat(float(value)); }
inline void store_narrow(device long* to, long value) { *to = value; }
inline void store_narrow(device int* to, long value) { *to = int(value); }
inline void store_narrow(device short* to, long value) { *to = short(value); }
inline void store_narrow(device char* to, long value) { *to = char(value); }
inline void store_narrow(device uchar* to, long value) { *to = uchar(value); }
inline void store_narrow(device bool* to, long value) { *to = value != 0L; }

// Elements of T in 16 bytes.
template <typename T>
constexpr int packed_count() {
  return 16 / int(sizeof(T));
}

// The packed_count<T>() elements of T in 16 bytes, widened.
template <typename T>
inline void unpack(uint4 bits, thread float* values);
template <>
inline void unpack<float>(uint4 bits, thread float* values) {
  for (int i = 0; i < 4; ++i) values[i] = as_type<float>(bits[i]);
}
template <>
inline void unpack<half>(uint4 bits, thread float* values) {
  for (int i = 0; i < 4; ++i) {
    const half2 pair = as_type<half2>(bits[i]);
    values[2 * i] = float(pair.x);
    values[2 * i + 1] = float(pair.y);
  }
}
template <>
inline void unpack<bfloat>(uint4 bits, thread float* values) {
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = as_type<float>(bits[i] << 16);
    values[2 * i + 1] = as_type<float>(bits[i] & 0xffff0000u);
  }
}
