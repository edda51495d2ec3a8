// Words of two bfloat16 numbers each, as the products of pairs take them, and the softmax's weights in that form.
// HAS_BF16_PAIRS where the compiler may use the instructions.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define HAS_BF16_PAIRS 1
#include <immintrin.h>

#include "vec.h"

namespace {

constexpr int PAIR = 2;                // bfloat16 numbers that the processor multiplies together
constexpr uint32_t ONES = 0x3f803f80;  // a pair of ones

// e^x for x ≤ 0, within 2e-4 of it, which is finer than what it is rounded to; exactly 1 for 0, and 0 for what is not
// seen: otherwise a value of 0 would get some 1e-38 from later tokens.
inline Vec weight_of(Vec x) {
  const Vec t = maximum(splat(-256.f), x * 1.44269504f);  // in this order a NaN stays one
  const Vec n = _mm512_roundscale_ps(t, 0), f = t - n;
  const Vec p = ((f * 5.5167763e-2f + 2.4225464e-1f) * f + 6.9325576e-1f) * f + 1.f;  // 2^f on [-0.5, 0.5]
  return _mm512_scalef_ps(p, n);
}

// 2^t for t ≤ 0, within 2e-4 of it, in eight instructions instead of weight_of's eleven: the scale and the largest score
// join in t by one of them. Exactly 1 for 0, and 0 for minus infinity and what is not seen.
inline Vec power_of_two(Vec t) {
  const Vec f = _mm512_reduce_ps(t, 1);  // t less the integer below it: 0 for an infinity
  const Vec p = ((f * 7.7691949e-2f + 2.2720805e-1f) * f + 6.9510000e-1f) * f + 1.f;  // 2^f on [0, 1]
  return _mm512_scalef_ps(p, t);
}

// Of each lane a word: the lower number from `low`, the upper from `high`, both rounded to bfloat16.
inline VecInt pairs_of(Vec low, Vec high) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  return (VecInt)_mm512_permutexvar_epi16(_mm512_load_si512(order), both);
}

// Words of two rows' numbers: of the lower (half 0) or the upper 16 of 32 columns.
inline __m512i interleave(__m512i even, __m512i odd, int half) {
  alignas(64) static const uint16_t order[2][32] = {
      {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  return _mm512_permutex2var_epi16(even, _mm512_load_si512(order[half]), odd);
}

}  // namespace
#endif
