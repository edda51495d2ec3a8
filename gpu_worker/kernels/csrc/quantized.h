// Packs matrices of 4 and 8 bits for quantized.cpp, and rounds weights to 4 bits.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "dot.h"
#include "parallel.h"
#include "vec.h"

namespace {

// Sixteen outputs fill one register of AVX-512 and two of AVX2, so both read one layout. Groups of 32 inputs with a
// float16 scale take 4.5 or 8.5 bits a weight, as GGUF's do.
constexpr int PANEL = 16, GROUP = 32, FOURS = GROUP / 4, LINE = PANEL * 4;  // outputs; inputs; bytes of a four

// Twice the floats of 4 bits (e2m1), by their codes, and 12 more, which makes them unsigned.
alignas(16) constexpr uint8_t FLOAT4_LEVELS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// One panel of `blocks`, [outputs, inputs / 2]: two codes a byte, the first in the lower half.
inline void pack_float4_panel(const uint8_t* blocks, int64_t outputs, int64_t inputs, uint8_t* panel) {
  for (int64_t o = 0; o < std::min<int64_t>(PANEL, outputs); ++o)
    for (int64_t k = 0; k < inputs; k += 8) {
      const uint8_t* from = blocks + (o * inputs + k) / 2;
      uint8_t* to = panel + k / 8 * LINE + o * 4;
      for (int i = 0; i < 2; ++i) {
        to[2 * i] = (from[i] & 15) | from[i + 2] << 4;
        to[2 * i + 1] = from[i] >> 4 | (from[i + 2] & 240);
      }
    }
}

// One panel of `values`, [outputs, inputs], less `least`.
template <int KIND>
void pack_panel(const int8_t* values, int64_t outputs, int64_t inputs, int32_t least, uint8_t* panel) {
  for (int64_t k = 0; k < inputs; k += 4)
    for (int64_t o = 0; o < std::min<int64_t>(PANEL, outputs); ++o)
      for (int i = 0; i < 4; ++i) {
        const uint8_t number = (uint8_t)(values[o * inputs + k + i] - least);
        if (KIND == INT8)
          panel[k * PANEL + o * 4 + i] = number;
        else
          panel[k / 8 * LINE + o * 4 + i] |= k % 8 ? number << 4 : number;
      }
}

#ifdef HAS_DOT
inline void store_bytes(int8_t* to, const VecInt* x) {
#ifdef __AVX512F__
  for (int i = 0; i < GROUP / LANES; ++i) {
    const __m128i bytes = _mm512_cvtsepi32_epi8((__m512i)x[i]);
    memcpy(to + i * LANES, &bytes, sizeof bytes);
  }
#else
  const __m256i lower = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]);
  const __m256i upper = _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(lower, upper), order);
  memcpy(to, &bytes, sizeof bytes);
#endif
}

// Adds a group's numbers: those at the first and second place of each four, and the others.
inline void sum_pairs(const int8_t* x, int32_t* sums) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_loadu_si256((const __m256i*)x));
  __m128i sum = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  sum = _mm_add_epi16(sum, _mm_unpackhi_epi64(sum, sum));
  const int64_t both = _mm_cvtsi128_si64(_mm_add_epi16(sum, _mm_srli_epi64(sum, 32)));
  sums[0] = (int16_t)both;
  sums[1] = (int16_t)(both >> 16);
}

// Rounds a number by a scale's inverse to the levels of 4 bits.
inline Vec to_level(Vec x, float inverse) {
  const Vec level = __builtin_convertvector(to_int(x * inverse), Vec);
  return minimum(maximum(level, splat(-8.f)), splat(7.f));
}

// What checkpoint/files/quantized_weight.py describes, for one group. Returns the scale.
template <class T>
float best_scale(const T* x, int64_t group, const float* extremes, int64_t count) {
  Vec most = splat(-INFINITY), least = splat(INFINITY);
  for (int64_t i = 0; i < group; i += LANES) {
    most = maximum(most, load(x + i));
    least = minimum(least, load(x + i));
  }
  const float high = largest(most), low = -largest(-least), extreme = high >= -low ? high : low;
  float scale = 0, gained = 0;
  for (int64_t e = 0; extreme != 0 && e < count; ++e) {
    Vec product = {}, square = {};
    for (int64_t i = 0; i < group; i += LANES) {
      const Vec part = load(x + i), level = to_level(part, -extremes[e] / extreme);
      product += part * level;
      square += level * level;
    }
    const float xl = sum(product), ll = sum(square), gain = xl * (xl / ll);
    if (gain > gained) gained = gain, scale = xl / ll;
  }
  // Rounded already here, so that the levels fit the scale that is stored. Beyond float16's normal numbers the exact
  // scale stays.
  const float half = _cvtsh_ss(_cvtss_sh(scale, _MM_FROUND_TO_NEAREST_INT));
  return std::fabs(half) >= 6.103515625e-5f && std::fabs(half) <= 65504.f ? half : scale;
}

template <class T>
void round_groups(const T* weight, int64_t groups, int64_t group, const float* extremes, int64_t count, int8_t* values,
                  float* scales, int threads) {
  const auto round_one = [&](int64_t g) {
    const T* x = weight + g * group;
    const float scale = scales[g] = best_scale(x, group, extremes, count), inverse = scale != 0 ? 1 / scale : 0;
    for (int64_t i = 0; i < group; i += GROUP) {
      VecInt levels[GROUP / LANES];
      for (int j = 0; j < GROUP / LANES; ++j) levels[j] = to_int(to_level(load(x + i + j * LANES), inverse));
      store_bytes(values + g * group + i, levels);
    }
  };
  for_ranges(groups, 16, threads, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) round_one(g);
  });
}
#else
template <class T>
void round_groups(const T*, int64_t, int64_t, const float*, int64_t, int8_t*, float*, int) {}
#endif

}  // namespace
