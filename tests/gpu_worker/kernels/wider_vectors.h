// Defines the instructions of AVX-512 that the products use in plain C++, so that those of their paths that this machine's
// processor lacks can be tested on it. WITH_VNNI and WITH_BF16 add those extensions. WITH_AVX_VNNI alone defines what
// AVX-VNNI adds to AVX2. An overflow ends the process.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef WITH_AVX_VNNI
#define __AVXVNNI__ 1
#else
#define __AVX512F__ 1
#define __AVX512BW__ 1
#endif
#ifdef WITH_VNNI
#define __AVX512VNNI__ 1
#endif
#ifdef WITH_BF16
#define __AVX512BF16__ 1
#endif
#undef _mm512_srli_epi16
#undef _mm512_slli_epi32
#undef _mm512_roundscale_ps

namespace {

struct Unsigned {
  uint8_t at[64];
};
struct Signed {
  int8_t at[64];
};
struct Words {
  int16_t at[32];
};
struct Ints {
  int32_t at[16];
};
struct Floats {
  float at[16];
};

template <class To, class From>
To view(From from) {
  static_assert(sizeof(To) == sizeof(From), "a view has the size of what it views");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

inline int16_t exact(int x) {
  if (x != (int16_t)x) __builtin_trap();
  return x;
}

template <class Lanes, class T>
__m512i every(T x) {
  Lanes lanes;
  for (auto& lane : lanes.at) lane = x;
  return view<__m512i>(lanes);
}

inline __m512i wide_load(const void* p) {
  __m512i x;
  memcpy(&x, p, sizeof x);
  return x;
}

inline __m512i wide_shift(__m512i x, int bits) {
  Words words = view<Words>(x);
  for (auto& word : words.at) word = (int16_t)((uint16_t)word >> bits);
  return view<__m512i>(words);
}

inline __m512i wide_shift_left(__m512i x, int bits) {
  Ints ints = view<Ints>(x);
  for (auto& each : ints.at) each = (int32_t)((uint32_t)each << bits);
  return view<__m512i>(ints);
}

inline __m512i wide_repeat(__m128i x) {
  Unsigned bytes;
  for (int i = 0; i < 4; ++i) memcpy(bytes.at + 16 * i, &x, sizeof x);
  return view<__m512i>(bytes);
}

inline __m512i wide_look_up(__m512i table, __m512i places) {
  const Unsigned from = view<Unsigned>(table);
  Unsigned bytes = view<Unsigned>(places);
  for (int i = 0; i < 64; ++i) bytes.at[i] = bytes.at[i] & 128 ? 0 : from.at[i / 16 * 16 + bytes.at[i] % 16];
  return view<__m512i>(bytes);
}

inline __m512i wide_from_bytes(__m128i x) {
  uint8_t bytes[16];
  memcpy(bytes, &x, sizeof bytes);
  Ints ints;
  for (int i = 0; i < 16; ++i) ints.at[i] = bytes[i];
  return view<__m512i>(ints);
}

inline __m512 wide_from_half(__m256i x) {
  uint16_t halves[16];
  memcpy(halves, &x, sizeof halves);
  Floats floats;
  for (int i = 0; i < 16; ++i) floats.at[i] = _cvtsh_ss(halves[i]);
  return view<__m512>(floats);
}

inline __m512 wide_multiply_add(__m512 a, __m512 b, __m512 c) {
  const Floats x = view<Floats>(a), y = view<Floats>(b);
  Floats sum = view<Floats>(c);
  for (int i = 0; i < 16; ++i) sum.at[i] = std::fma(x.at[i], y.at[i], sum.at[i]);
  return view<__m512>(sum);
}

// As the instructions: the second one if either is no number.
inline __m512 wide_min(__m512 a, __m512 b) {
  const Floats x = view<Floats>(a);
  Floats least = view<Floats>(b);
  for (int i = 0; i < 16; ++i) least.at[i] = x.at[i] < least.at[i] ? x.at[i] : least.at[i];
  return view<__m512>(least);
}

inline __m512 wide_max(__m512 a, __m512 b) {
  const Floats x = view<Floats>(a);
  Floats most = view<Floats>(b);
  for (int i = 0; i < 16; ++i) most.at[i] = x.at[i] > most.at[i] ? x.at[i] : most.at[i];
  return view<__m512>(most);
}

// To whole numbers, as for a control word of 0: half to even.
template <int CONTROL>
__m512 wide_round(__m512 x) {
  static_assert(CONTROL == 0, "no other rounding is defined here");
  Floats floats = view<Floats>(x);
  for (auto& each : floats.at) each = std::nearbyint(each);
  return view<__m512>(floats);
}

inline __m512 wide_scale(__m512 a, __m512 b) {
  const Floats powers = view<Floats>(b);
  Floats floats = view<Floats>(a);
  for (int i = 0; i < 16; ++i) floats.at[i] *= std::exp2(std::floor(powers.at[i]));
  return view<__m512>(floats);
}

inline __m512i wide_to_int(__m512 x) {
  const Floats floats = view<Floats>(x);
  Ints ints;
  for (int i = 0; i < 16; ++i) ints.at[i] = _mm_cvtss_si32(_mm_set_ss(floats.at[i]));
  return view<__m512i>(ints);
}

inline __m512i wide_pairs(__m512i a, __m512i b) {
  const Unsigned x = view<Unsigned>(a);
  const Signed y = view<Signed>(b);
  Words sums;
  for (int i = 0; i < 32; ++i) sums.at[i] = exact(x.at[2 * i] * y.at[2 * i] + x.at[2 * i + 1] * y.at[2 * i + 1]);
  return view<__m512i>(sums);
}

inline __m512i wide_add_words(__m512i a, __m512i b) {
  const Words x = view<Words>(a), y = view<Words>(b);
  Words sums;
  for (int i = 0; i < 32; ++i) sums.at[i] = exact(x.at[i] + y.at[i]);
  return view<__m512i>(sums);
}

inline __m512i wide_add_pairs(__m512i a, __m512i b) {
  const Words x = view<Words>(a), y = view<Words>(b);
  Ints sums;
  for (int i = 0; i < 16; ++i) sums.at[i] = x.at[2 * i] * y.at[2 * i] + x.at[2 * i + 1] * y.at[2 * i + 1];
  return view<__m512i>(sums);
}

// As _mm256_dpbusd_avx_epi32 computes it.
inline __m256i narrow_add_fours(__m256i sum, __m256i a, __m256i b) {
  uint8_t x[32];
  int8_t y[32];
  int32_t sums[8];
  memcpy(x, &a, sizeof x);
  memcpy(y, &b, sizeof y);
  memcpy(sums, &sum, sizeof sums);
  for (int i = 0; i < 32; ++i) sums[i / 4] += x[i] * y[i];
  memcpy(&sum, sums, sizeof sums);
  return sum;
}

inline float from_bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float x;
  memcpy(&x, &wide, sizeof x);
  return x;
}

// The upper number of a pair is added first, and each addition is rounded.
inline __m512 wide_add_bf16_pairs(__m512 sum, __m512bh a, __m512bh b) {
  const Words x = view<Words>(a), y = view<Words>(b);
  Floats sums = view<Floats>(sum);
  for (int i = 0; i < 16; ++i)
    for (int half = 1; half >= 0; --half)
      sums.at[i] = std::fma(from_bf16(x.at[2 * i + half]), from_bf16(y.at[2 * i + half]), sums.at[i]);
  return view<__m512>(sums);
}

inline __m256bh wide_to_bf16(__m512 x) {
  const Floats floats = view<Floats>(x);
  uint16_t halves[16];
  for (int i = 0; i < 16; ++i) {
    uint32_t bits;
    memcpy(&bits, &floats.at[i], sizeof bits);
    const bool is_nan = floats.at[i] != floats.at[i];
    halves[i] = (is_nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  __m256bh result;
  memcpy(&result, halves, sizeof result);
  return result;
}

inline __m512i wide_add_fours(__m512i sum, __m512i a, __m512i b) {
  const Unsigned x = view<Unsigned>(a);
  const Signed y = view<Signed>(b);
  Ints sums = view<Ints>(sum);
  for (int i = 0; i < 64; ++i) sums.at[i / 4] += x.at[i] * y.at[i];
  return view<__m512i>(sums);
}

inline __m128i wide_to_bytes(__m512i x) {
  const Ints ints = view<Ints>(x);
  int8_t bytes[16];
  for (int i = 0; i < 16; ++i) bytes[i] = ints.at[i] > 127 ? 127 : ints.at[i] < -128 ? -128 : ints.at[i];
  __m128i result;
  memcpy(&result, bytes, sizeof result);
  return result;
}

}  // namespace

#ifdef WITH_AVX_VNNI
#define _mm256_dpbusd_avx_epi32 narrow_add_fours
#endif
#define _mm512_dpbf16_ps wide_add_bf16_pairs
#define _mm512_cvtneps_pbh wide_to_bf16
#define _mm512_loadu_si512 wide_load
#define _mm512_and_si512(a, b) ((a) & (b))
#define _mm512_set1_epi8 every<Signed>
#define _mm512_set1_epi16 every<Words>
#define _mm512_set1_epi32 every<Ints>
#define _mm512_srli_epi16 wide_shift
#define _mm512_cvtph_ps wide_from_half
#define _mm512_fmadd_ps wide_multiply_add
#define _mm512_cvtps_epi32 wide_to_int
#define _mm512_min_ps wide_min
#define _mm512_max_ps wide_max
#define _mm512_roundscale_ps(x, control) wide_round<control>(x)
#define _mm512_scalef_ps wide_scale
#define _mm512_maddubs_epi16 wide_pairs
#define _mm512_add_epi16 wide_add_words
#define _mm512_madd_epi16 wide_add_pairs
#define _mm512_dpbusd_epi32 wide_add_fours
#define _mm512_cvtsepi32_epi8 wide_to_bytes
#define _mm512_slli_epi32 wide_shift_left
#define _mm512_broadcast_i32x4 wide_repeat
#define _mm512_shuffle_epi8 wide_look_up
#define _mm512_cvtepu8_epi32 wide_from_bytes
