// Dot products of pairs of bfloat16 numbers with AVX-512 BF16. HAS_DOT_BF16 where the compiler may use them.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define HAS_DOT_BF16 1
#include <immintrin.h>

#include "vec.h"

namespace {

// Adds a row's pair of inputs times the same pair of 16 outputs. A word holds a pair.
inline Vec add_dot(Vec sum, VecBits words, uint32_t pair) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)words, (__m512bh)(VecBits{} + pair));
}

// Inputs of a panel of the matrix, by pairs: of each pair a word for each output of the panel.
struct PairChunk {
  const uint32_t* words;
  int64_t pairs;
  int64_t ahead;  // words to what is fetched meanwhile; 0: it was fetched
};

// Adds the products of a chunk to the sums of R rows. `x`: [pairs, R] words; `sums`: [R, VECS * 16]. Each sum adds its
// pairs in their order, whatever the other rows are.
template <int R, int VECS>
void add_pair_rows(const uint32_t* x, const PairChunk& chunk, float* sums) {
  constexpr int WIDTH = VECS * LANES;
  Vec sum[R][VECS];
#pragma GCC unroll 6  // or the sums do not stay in registers
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < VECS; ++i) sum[r][i] = load(sums + r * WIDTH + i * LANES);
  const uint32_t* words_at = chunk.words;
  for (int64_t k = 0; k < chunk.pairs; ++k, words_at += WIDTH, x += R) {
    VecBits words[VECS];
#pragma GCC unroll 4
    for (int i = 0; i < VECS; ++i) {
      if (chunk.ahead) __builtin_prefetch(words_at + chunk.ahead + i * LANES, 0, 2);
      memcpy(&words[i], words_at + i * LANES, sizeof words[i]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < VECS; ++i) sum[r][i] = add_dot(sum[r][i], words[i], x[r]);
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < VECS; ++i) store(sums + r * WIDTH + i * LANES, sum[r][i]);
}

}  // namespace
#endif
