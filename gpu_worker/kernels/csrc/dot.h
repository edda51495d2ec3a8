// Dot products of unsigned bytes below 16, or any, with signed bytes, by fours: 16 outputs at a time with AVX-512, 8 with
// AVX2. HAS_DOT where the compiler may use what they need.
#pragma once

namespace {

// What the numbers of a matrix are: integers of 4 or 8 bits, or floats of 4 bits (e2m1).
constexpr int INT4 = 4, INT8 = 8, FLOAT4 = 5;
constexpr int bits_of(int kind) { return kind == INT8 ? 8 : 4; }

}  // namespace

#if defined(__AVX2__) && defined(__F16C__) && defined(__FMA__) && (!defined(__AVX512F__) || defined(__AVX512BW__))
#define HAS_DOT 1
#include <immintrin.h>

#include "vec.h"

namespace {

#if defined(__AVX512F__)
typedef __m512i Bytes;
inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes low_halves(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Bytes high_halves(Bytes x) { return low_halves(_mm512_srli_epi16(x, 4)); }
// Of each byte below 16, the entry of a table.
inline Bytes look_up(const uint8_t* table, Bytes x) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), x);
}
// The powers of two whose exponents, with a bias of 127, are bytes.
inline Vec load_exponents(const uint8_t* p) {
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 23);
}
inline Bytes repeat_four(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}
inline Vec load_half(const uint16_t* p) { return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline VecInt to_int(Vec x) { return (VecInt)_mm512_cvtps_epi32((__m512)x); }
inline Bytes pairs(Bytes u, Bytes s) { return _mm512_maddubs_epi16(u, s); }
inline Bytes add_pairs(Bytes a, Bytes b) { return _mm512_add_epi16(a, b); }
inline VecInt fours(Bytes pairs, int factor) { return (VecInt)_mm512_madd_epi16(pairs, _mm512_set1_epi16(factor)); }
#else
typedef __m256i Bytes;
inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Bytes low_halves(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Bytes high_halves(Bytes x) { return low_halves(_mm256_srli_epi16(x, 4)); }
inline Bytes look_up(const uint8_t* table, Bytes x) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), x);
}
inline Vec load_exponents(const uint8_t* p) {
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), 23);
}
inline Bytes repeat_four(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, sizeof four);
  return _mm256_set1_epi32(four);
}
inline Vec load_half(const uint16_t* p) { return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline VecInt to_int(Vec x) { return (VecInt)_mm256_cvtps_epi32((__m256)x); }
inline Bytes pairs(Bytes u, Bytes s) { return _mm256_maddubs_epi16(u, s); }
inline Bytes add_pairs(Bytes a, Bytes b) { return _mm256_add_epi16(a, b); }
inline VecInt fours(Bytes pairs, int factor) { return (VecInt)_mm256_madd_epi16(pairs, _mm256_set1_epi16(factor)); }
#endif

inline Vec minimum(Vec a, Vec b) { return a < b ? a : b; }

// start + the dot product of each four; exact for all bytes.
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define HAS_VNNI 1
inline VecInt add_dot(VecInt start, Bytes u, Bytes s) { return (VecInt)_mm512_dpbusd_epi32((Bytes)start, u, s); }
#elif !defined(__AVX512F__) && defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define HAS_VNNI 1
inline VecInt add_dot(VecInt start, Bytes u, Bytes s) { return (VecInt)_mm256_dpbusd_epi32((Bytes)start, u, s); }
#elif !defined(__AVX512F__) && defined(__AVXVNNI__)
#define HAS_VNNI 1
inline VecInt add_dot(VecInt start, Bytes u, Bytes s) { return (VecInt)_mm256_dpbusd_avx_epi32((Bytes)start, u, s); }
#endif

#ifdef HAS_VNNI
// How many registers of sums a byte of a matrix needs: 32 bits hold every sum.
template <int KIND>
constexpr int PARTS = 1;
inline VecInt zero_sums() { return VecInt{}; }
inline VecInt first_sums(int32_t start) { return VecInt{} + start; }
inline VecInt add_four(VecInt sums, Bytes u, Bytes s) { return add_dot(sums, u, s); }
template <int KIND>
inline VecInt total(const VecInt* sums) {
  return sums[0];
}
typedef VecInt Sums;

// What the sums of a group start with, so that they become those of numbers that are `least` larger. `sums`: of the
// group's inputs, those at the first and second place of each four, and the others.
template <int KIND>
inline int32_t first_sum(const int32_t* sums, int32_t least) {
  return (sums[0] + sums[1]) * least;
}
#else
// A byte of 8 bits is two halves, each with sums of its own: 16 bits hold the sum of 16 products of 15 and 127. They hold
// those of floats of 4 bits, of up to 24, because the sums start with `least`, which leaves 12 of each.
template <int KIND>
constexpr int PARTS = bits_of(KIND) / 4;
inline Bytes zero_sums() { return Bytes{}; }
inline Bytes first_sums(int32_t start) { return repeat_four((const int8_t*)&start); }
inline Bytes add_four(Bytes sums, Bytes u, Bytes s) { return add_pairs(sums, pairs(u, s)); }
template <int KIND>
inline VecInt total(const Bytes* sums) {
  return KIND != INT8 ? fours(sums[0], 1) : fours(sums[0], 1) + fours(sums[PARTS<KIND> - 1], 16);
}
typedef Bytes Sums;

// As above, for the sums of the upper halves, which count 16 times: two numbers of 16 bits.
template <int KIND>
inline int32_t first_sum(const int32_t* sums, int32_t least) {
  const int32_t factor = KIND != INT8 ? least : least / 16;
  return (sums[0] * factor & 0xffff) | (int32_t)((uint32_t)(sums[1] * factor) << 16);
}
#endif

// Keeps the compiler from adding in another order: it would load all factors first, and AVX2 has 16 registers.
template <class T>
inline void keep_here(T& sums) {
#ifndef __AVX512F__
  asm("" : "+x"(sums));
#endif
}

}  // namespace
#endif
