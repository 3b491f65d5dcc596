// Operations of expressions (payload.fbs: ExprOp) that MSL does not have or defines differently: what
// functions generated from mods and fused elementwise chains call. All are total: integer overflow wraps,
// integer division by zero gives 0, a float outside an integer's range saturates, an index outside a capture
// loads 0.

inline uint expr_unsigned(int x) { return as_type<uint>(x); }
inline ulong expr_unsigned(long x) { return as_type<ulong>(x); }

template <typename T>
inline T expr_add(T a, T b) { return T(expr_unsigned(a) + expr_unsigned(b)); }
template <typename T>
inline T expr_sub(T a, T b) { return T(expr_unsigned(a) - expr_unsigned(b)); }
template <typename T>
inline T expr_mul(T a, T b) { return T(expr_unsigned(a) * expr_unsigned(b)); }
template <typename T>
inline T expr_neg(T a) { return expr_sub(T(0), a); }
template <typename T>
inline T expr_abs(T a) { return a < T(0) ? expr_neg(a) : a; }
template <typename T>
inline T expr_sign(T a) { return T(a > T(0)) - T(a < T(0)); }

template <typename T>
inline T expr_trunc_div(T a, T b) {
  if (b == T(0)) return T(0);
  if (b == T(-1)) return expr_neg(a);
  return a / b;
}
template <typename T>
inline T expr_trunc_mod(T a, T b) {
  if (b == T(0) || b == T(-1)) return T(0);
  return a % b;
}
template <typename T>
inline T expr_floor_div(T a, T b) {
  const T quotient = expr_trunc_div(a, b);
  return expr_trunc_mod(a, b) != T(0) && (a < T(0)) != (b < T(0)) ? quotient - T(1) : quotient;
}
template <typename T>
inline T expr_remainder(T a, T b) {
  const T remainder = expr_trunc_mod(a, b);
  return remainder != T(0) && (a < T(0)) != (b < T(0)) ? remainder + b : remainder;
}

// A negative exponent gives 0 but for bases 1 and -1, as in ATen's powi.
template <typename T>
inline T expr_int_pow(T base, T exponent) {
  if (exponent < T(0)) {
    if (base == T(1)) return T(1);
    if (base == T(-1)) return exponent % T(2) == T(0) ? T(1) : T(-1);
    return T(0);
  }
  T result = T(1);
  while (exponent != T(0)) {
    if (exponent % T(2) != T(0)) result = expr_mul(result, base);
    exponent /= T(2);
    base = expr_mul(base, base);
  }
  return result;
}

// Shift counts outside the type's bits: 0 to the left, the sign to the right.
template <typename T>
inline T expr_shift_left(T a, T count) {
  const T bits = T(sizeof(T) * 8);
  return count < T(0) || count >= bits ? T(0) : T(expr_unsigned(a) << expr_unsigned(count));
}
template <typename T>
inline T expr_shift_right(T a, T count) {
  const T bits = T(sizeof(T) * 8);
  return a >> (count < T(0) || count >= bits ? bits - T(1) : count);
}

// NaN wins, as in torch.minimum and torch.maximum.
inline float expr_min(float a, float b) { return isnan(a) ? a : (a < b ? a : b); }
inline float expr_max(float a, float b) { return isnan(a) ? a : (a > b ? a : b); }
inline float expr_relu(float a) { return isnan(a) || a > 0.0f ? a : 0.0f; }
inline float expr_sign(float a) { return float(a > 0.0f) - float(a < 0.0f); }  // NaN gives 0, as in ATen

// c10::div_floor_floating and ATen's remainder.
inline float expr_remainder(float a, float b) {
  const float mod = fmod(a, b);
  return mod != 0.0f && (b < 0.0f) != (mod < 0.0f) ? mod + b : mod;
}
inline float expr_floor_div(float a, float b) {
  if (b == 0.0f) return a / b;
  const float mod = fmod(a, b);
  float quotient = (a - mod) / b;
  if (mod != 0.0f && (b < 0.0f) != (mod < 0.0f)) quotient -= 1.0f;
  if (quotient == 0.0f) return copysign(0.0f, a / b);
  const float floored = floor(quotient);
  return quotient - floored > 0.5f ? floored + 1.0f : floored;
}
inline float expr_pow(float a, float b) {
  if (b == 2.0f) return a * a;
  if (b == 3.0f) return a * a * a;
  if (b == -1.0f) return 1.0f / a;
  return precise::pow(a, b);
}

inline int expr_to_int(float x) {
  if (isnan(x)) return 0;
  if (x >= 2147483648.0f) return 2147483647;
  return x < -2147483648.0f ? -2147483647 - 1 : int(x);
}
inline long expr_to_long(float x) {
  if (isnan(x)) return 0L;
  if (x >= 9223372036854775808.0f) return 9223372036854775807L;
  return x < -9223372036854775808.0f ? -9223372036854775807L - 1L : long(x);
}

inline float expr_sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }

// e^x - 1: u = e^x; (u - 1) x / log u keeps the digits that u - 1 loses (Kahan).
inline float expr_expm1(float x) {
  const float u = precise::exp(x);
  if (u == 1.0f || isnan(x)) return x;
  const float difference = u - 1.0f;
  if (difference == -1.0f) return -1.0f;
  return isinf(u) ? u : difference * x / precise::log(u);
}

// log(1 + x) by the same device.
inline float expr_log1p(float x) {
  const float u = 1.0f + x;
  if (u == 1.0f || isnan(x)) return x;
  return isinf(u) ? u : precise::log(u) * x / (u - 1.0f);
}

inline float expr_tanh(float x) {
  const float magnitude = fabs(x);
  const float doubled = expr_expm1(2.0f * magnitude);
  const float result = isinf(doubled) ? 1.0f : doubled / (doubled + 2.0f);
  return copysign(isnan(x) ? x : result, x);
}

// x + x P(x^2) for |x| <= 1, else 1 - e^Q(|x|): the host kernels' minimax fits.
inline float expr_erf(float x) {
  const float magnitude = fabs(x);
  if (magnitude <= 1.0f) {
    const float s = x * x;
    float p = 7.889122802893e-5f;
    p = fma(p, s, -8.020842258946e-4f);
    p = fma(p, s, 5.189535449208e-3f);
    p = fma(p, s, -0.02685444464869f);
    p = fma(p, s, 0.1128360017758f);
    p = fma(p, s, -0.3761262713608f);
    p = fma(p, s, 0.1283791659138f);
    return fma(x, p, x);
  }
  const float m = isnan(x) ? x : fmin(magnitude, 4.0f);
  float q = 1.863784000964e-4f;
  q = fma(q, m, -2.947650947274e-3f);
  q = fma(q, m, 0.02183803608591f);
  q = fma(q, m, -0.1031066990952f);
  q = fma(q, m, -0.6381448936996f);
  q = fma(q, m, -1.127089155106f);
  q = fma(q, m, -3.415312921540e-4f);
  return copysign(1.0f - precise::exp(q), x);
}

inline float expr_gelu_erf(float x) { return x * 0.5f * (1.0f + expr_erf(x * 0.707106781f)); }
inline float expr_gelu_tanh(float x) {
  const float inner = 0.797884561f * fma(0.044715f, x * x * x, x);
  return x * 0.5f * (1.0f + expr_tanh(inner));
}

// One index into dimension `dim` of a capture as an offset; `inside` becomes false where it is outside.
inline long expr_index(constant const CaptureView& view, int dim, long index, thread bool& inside) {
  const long size = view.sizes[dim];
  const long wrapped = index < 0L ? index + size : index;
  inside = inside && wrapped >= 0L && wrapped < size;
  return wrapped * view.strides[dim];
}
