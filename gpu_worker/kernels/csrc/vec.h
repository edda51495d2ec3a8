// As many floats at a time as a register holds, as GCC vector extensions: 16 with AVX-512, 8 with AVX2, 4 with SSE or
// NEON. Wider vectors than the processor's registers would do, but GCC builds them element by element.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t VecInt __attribute__((vector_size(4 * LANES)));
typedef uint32_t VecBits __attribute__((vector_size(4 * LANES)));
typedef uint16_t VecHalf __attribute__((vector_size(2 * LANES)));
typedef int8_t VecByte __attribute__((vector_size(LANES)));

struct BF16 {
  uint16_t bits;
};

// 0, 1, 2, …
inline VecInt lane_numbers() {
  constexpr int32_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  VecInt x;
  memcpy(&x, numbers, sizeof x);
  return x;
}

inline float as_float(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

inline Vec splat(float x) { return Vec{} + x; }
inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

inline Vec load(const float* p) {
  Vec x;
  memcpy(&x, p, sizeof x);
  return x;
}

inline Vec load(const BF16* p) {
  VecHalf x;
  memcpy(&x, p, sizeof x);
  return (Vec)(__builtin_convertvector(x, VecBits) << 16);
}

// GCC builds the conversion of so few bytes element by element, so it is spelled out.
inline Vec load(const int8_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  VecByte x;
  memcpy(&x, p, sizeof x);
  return __builtin_convertvector(__builtin_convertvector(x, VecInt), Vec);
#endif
}

inline void store(float* p, Vec x) { memcpy(p, &x, sizeof x); }

// Cuts what is behind the point.
inline void store(int8_t* p, Vec x) {
  const VecByte bytes = __builtin_convertvector(__builtin_convertvector(x, VecInt), VecByte);
  memcpy(p, &bytes, sizeof bytes);
}

// Rounds to nearest even. A NaN stays one: its payload is cut, not rounded.
inline void store(BF16* p, Vec x) {
#ifdef __AVX512BF16__
  const __m256bh half = _mm512_cvtneps_pbh(x);
#else
  VecBits bits = (VecBits)x;
  VecBits rounded = bits + 0x7fff + ((bits >> 16) & 1);
  VecHalf half = __builtin_convertvector((x == x ? rounded : bits | 0x400000) >> 16, VecHalf);
#endif
  memcpy(p, &half, sizeof half);
}

// The first n lanes, the others zero.
template <class T>
inline Vec load(const T* p, int64_t n) {
  if (n >= LANES) return load(p);
  T padded[LANES] = {};
  memcpy(padded, p, n * sizeof(T));
  return load(padded);
}

template <class T>
inline void store(T* p, Vec x, int64_t n) {
  if (n >= LANES) return store(p, x);
  T padded[LANES];
  store(padded, x);
  memcpy(p, padded, n * sizeof(T));
}

// Of all lanes, by halves: a chain of as many operations is slow.
template <class V, class F>
inline auto fold(V x, F both) {
  const VecInt lanes = lane_numbers();
#pragma GCC unroll 4
  for (int n = LANES / 2; n; n /= 2) x = both(x, __builtin_shuffle(x, lanes ^ n));
  return x[0];
}

inline float sum(Vec x) {
  return fold(x, [](Vec a, Vec b) { return a + b; });
}

inline float largest(Vec x) { return fold(x, maximum); }

// The bits of |x|: as integers they compare as the floats do, and those of NaN are larger than all.
inline VecInt magnitude(Vec x) { return (VecInt)x & 0x7fffffff; }

// The largest of these magnitudes as a float; NaN if it is not finite.
inline float finite_magnitude(VecInt x) {
  const float most = as_float(fold(x, [](VecInt a, VecInt b) { return a > b ? a : b; }));
  return most - most + most;
}

// e^x within 3e-7 of it, for x in [-87, 88]; beyond, the value at that end.
inline Vec exponential(Vec x) {
#ifdef __AVX512F__
  x = _mm512_min_ps(splat(88.f), _mm512_max_ps(splat(-87.f), x));  // in this order a NaN stays one
  const Vec t = x * 1.44269504f, n = _mm512_roundscale_ps(t, 0);
#else
  x = x < -87.f ? splat(-87.f) : x;
  x = x > 88.f ? splat(88.f) : x;
  const Vec t = x * 1.44269504f, n = (t + 12582912.f) - 12582912.f;  // 1.5 * 2^23: rounds to an integer
#endif
  const Vec f = t - n;
  Vec p = splat(1.5403530e-4f);  // 2^f on [-0.5, 0.5]
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.f;
#ifdef __AVX512F__
  return _mm512_scalef_ps(p, n);
#else
  return (Vec)((VecInt)p + (__builtin_convertvector(n, VecInt) << 23));
#endif
}

// e^x for x ≤ 0, within 3e-7 of it: exactly 1 for 0, and 0 below -88. With fewer instructions than exponential(x).
inline Vec decay(Vec x) {
#ifdef __AVX512DQ__
  const Vec t = x * 1.44269504f, f = _mm512_reduce_ps(t, 1);  // t less the integer below it: 0 for an infinity
  Vec p = splat(1.8793186e-3f);  // 2^f on [0, 1]
  p = p * f + 8.9909952e-3f;
  p = p * f + 5.5818676e-2f;
  p = p * f + 2.4015927e-1f;
  p = p * f + 6.9315174e-1f;
  p = p * f + 1.f;
  return _mm512_scalef_ps(p, t);
#else
  const Vec t = maximum(splat(-127.f), x * 1.44269504f), n = (t + 12582912.f) - 12582912.f, f = t - n;
  Vec p = splat(1.3264727e-3f);  // 2^f on [-0.5, 0.5]
  p = p * f + 9.6715128e-3f;
  p = p * f + 5.5507337e-2f;
  p = p * f + 2.4022242e-1f;
  p = p * f + 6.9314698e-1f;
  p = p * f + 1.f;
  return (Vec)((VecInt)p + (__builtin_convertvector(n, VecInt) << 23));
#endif
}

// Within 3e-7 of the value, relative to it.
inline Vec hyperbolic_tangent(Vec x) {
  const Vec square = x * x, size = x < 0.f ? -x : x;
  const Vec near = x * ((square + 105.f) * square + 945.f) / ((square * 15.f + 420.f) * square + 945.f);
  const Vec far = 1.f - 2.f / (exponential(size * 2.f) + 1.f);
  return size < 0.9f ? near : x < 0.f ? -far : far;
}

// As many rows as lanes become columns.
template <class V>
inline void transpose(V* rows) {
  const VecInt lanes = lane_numbers();
#pragma GCC unroll 4
  for (int n = LANES / 2; n; n /= 2) {
    const VecInt from_upper = (lanes & n) != 0 ? lanes + (LANES - n) : lanes;
    const VecInt from_lower = (lanes & n) != 0 ? lanes + LANES : lanes + n;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i)
      if (!(i & n)) {
        const V a = rows[i], b = rows[i + n];
        rows[i] = __builtin_shuffle(a, b, from_upper);
        rows[i + n] = __builtin_shuffle(a, b, from_lower);
      }
  }
}
