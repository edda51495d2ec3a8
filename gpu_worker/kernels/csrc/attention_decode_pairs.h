// One bfloat16 token, as in attention_decode.h, with the processor's products of pairs: half the work of widening every
// number. Keys meet queries in pairs of elements, values meet weights (rounded to bfloat16) in pairs of positions. Sums
// are float32.
#pragma once
#include <algorithm>
#include <cmath>

#include "attention_decode.h"
#include "bf16_pairs.h"

#if defined(__AVX512BF16__) && HEAD_SIZE % 32 == 0 && !defined(KV_INT8)
#define DECODE_IN_PAIRS 1
#include <immintrin.h>

namespace {

// The run of positions that is read next. It is fetched little by little: a processor waits for few lines at once.
struct NextRun {
  const BF16* rows;
  bool every_line;  // or every second one

  // Of the run's elements `count` from a multiple of `count` on.
  void fetch(int from, int count) const {
    const char* first = (const char*)(rows + from);
    const int bytes = count * sizeof(BF16);
    if (every_line)
      for (int i = 0; i < bytes; i += LINE) __builtin_prefetch(first + i, 0, 2);
    else if (bytes > LINE || from / count % 2 == 0)
      for (int i = 0; i < bytes; i += 2 * LINE) __builtin_prefetch(first + i, 0, 2);
  }

  static constexpr int LINE = 64;  // bytes
};

// A KV head's G query heads, a run at a time: the scores of a few runs, then weigh(), then the values of these runs.
template <int G>
class PairDecode {
 public:
  PairDecode(const Args& args, const BF16* queries, int end_, int visible_)
      : a(args), query(queries), end(end_), visible(visible_) {
    for (int g = 0; g < G; ++g) top[g] = LOWEST;
  }

  // Scores of a run from `position` on into column c on. Behind the end the block goes on: what is there is not seen.
  // FETCHES: whether `next` is to be fetched; otherwise the keys are near, too.
  template <bool FETCHES = true>
  void score(const BF16* keys, const NextRun& next, int position, int c) {
    __m512bh q[G][PARTS];
    for (int g = 0; g < G; ++g)
      for (int i = 0; i < PARTS; ++i) q[g][i] = bits(_mm512_loadu_si512(query + g * D + i * PART));
    Vec sum[G];
    if constexpr (FETCHES) {
      Vec rows[G][RUN];
      for (int t = 0; t < RUN; ++t) {
        next.fetch(t * D, D);
        const Products row = products(keys + t * D, q);
        for (int g = 0; g < G; ++g) rows[g][t] = row.of[g];
      }
      for (int g = 0; g < G; ++g) sum[g] = sum_rows(rows[g]);
    } else {
      const Products all = sums_of<0, 1>(keys, q);
      for (int g = 0; g < G; ++g) sum[g] = all.of[g];
    }
    const VecInt positions = lane_numbers() + position;
    for (int g = 0; g < G; ++g) {
      const Vec s = limited(a, sum[g] * a.scale);
      store(&scores[g][c], (positions >= visible) & (positions < end) ? s : splat(LOWEST));
    }
  }

  // Scores become the softmax's weights; what was summed so far shrinks as the largest score grows.
  void weigh(int vecs) {
    for (int g = 0; g < G; ++g) {
      Vec best = load(scores[g]);
      for (int i = 1; i < vecs; ++i) best = maximum(best, load(scores[g] + i * LANES));
      const float now = std::max(top[g], largest(best));
      Vec total = {};
      for (int i = 0; i < vecs; ++i) {
        const Vec e = weight_of(load(scores[g] + i * LANES) - now);
        total += e;
        store((BF16*)shares[g] + i * LANES, e);
      }
      if (now > top[g]) {
        const float shrink = std::exp(top[g] - now);
        weights[g] *= shrink;
        for (int i = 0; i < PARTS; ++i)
          for (int half = 0; half < 2; ++half) sums[g][i][half] *= shrink;
        top[g] = now;
      }
      weights[g] += total;
    }
  }

  void add_values(const BF16* values, const NextRun& next, int c, int n) {
    for (int first = 0; first < PARTS; first += AT_ONCE)
      add_parts(first, c, (n + 1) / 2, [&](int p, int i, __m512bh& lower, __m512bh& upper) {
        const int t = 2 * p;
        if (i == 0) next.fetch((t * PARTS + first * 2) * PART, AT_ONCE * 2 * PART);
        const BF16* row = values + t * D + (first + i) * PART;
        const __m512i even = _mm512_loadu_si512(row);
        const __m512i odd = t + 1 < n ? _mm512_loadu_si512(row + D) : _mm512_setzero_si512();
        lower = bits(_mm512_unpacklo_epi16(even, odd));
        upper = bits(_mm512_unpackhi_epi16(even, odd));
      });
  }

  // The same of the first `count` of a span's positions, in pairs as RunDecode keeps them.
  void add_pairs(const uint32_t (*pairs)[D], int count) {
    for (int first = 0; first < PARTS; first += AT_ONCE)
      add_parts(first, 0, (count + 1) / 2, [&](int p, int i, __m512bh& lower, __m512bh& upper) {
        lower = bits(_mm512_load_si512(pairs[p] + (first + i) * PART));
        upper = bits(_mm512_load_si512(pairs[p] + (first + i) * PART + LANES));
      });
  }

  // The elements in their order again.
  void write(int g, const Target<BF16>& target) const {
    const VecInt low = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23}, high = low + 8;
    Vec row[VECS];
    for (int i = 0; i < PARTS; ++i) {
      row[2 * i] = __builtin_shuffle(sums[g][i][0], sums[g][i][1], low);
      row[2 * i + 1] = __builtin_shuffle(sums[g][i][0], sums[g][i][1], high);
    }
    target.write(row, top[g], sum(weights[g]));
  }

 private:
  static constexpr int PART = 2 * LANES, PARTS = D / PART;  // of a head: what one register holds
  // Parts whose sums fit into the registers beside what they are made of. It divides PARTS.
  static constexpr int AT_ONCE = G == 1 ? PARTS : G == 2 && PARTS % 4 == 0 ? 4 : PARTS % 2 == 0 ? 2 : 1;
  const Args& a;
  const BF16* query;
  const int end, visible;
  float top[G];
  Vec weights[G] = {};  // their sum, by position
  alignas(64) float scores[G][SPAN];
  alignas(64) uint16_t shares[G][SPAN];  // the softmax's weights
  Vec sums[G][PARTS][2] = {};            // of each part the lower and the upper four of every eight elements

  static __m512bh bits(__m512i x) { return (__m512bh)x; }

  // Adds `count` pairs of values from column c on to the sums of AT_ONCE parts: read(pair, part, lower, upper) gets each.
  template <class F>
  __attribute__((always_inline)) void add_parts(int first, int c, int count, F&& read) {
    Vec sum[G][AT_ONCE][2];
    for (int g = 0; g < G; ++g)
      for (int i = 0; i < AT_ONCE; ++i)
        for (int half = 0; half < 2; ++half) sum[g][i][half] = sums[g][first + i][half];
    for (int p = 0; p < count; ++p)
      for (int i = 0; i < AT_ONCE; ++i) {
        __m512bh lower, upper;
        read(p, i, lower, upper);
        for (int g = 0; g < G; ++g) {
          int32_t pair;
          memcpy(&pair, &shares[g][c + 2 * p], sizeof pair);
          const __m512bh share = bits(_mm512_set1_epi32(pair));
          sum[g][i][0] = (Vec)_mm512_dpbf16_ps((__m512)sum[g][i][0], share, lower);
          sum[g][i][1] = (Vec)_mm512_dpbf16_ps((__m512)sum[g][i][1], share, upper);
        }
      }
    for (int g = 0; g < G; ++g)
      for (int i = 0; i < AT_ONCE; ++i)
        for (int half = 0; half < 2; ++half) sums[g][first + i][half] = sum[g][i][half];
  }

  // Of each head a vector: the products with a key, or the sums of such vectors.
  struct Products {
    Vec of[G];
  };

  static Products products(const BF16* key, const __m512bh (&q)[G][PARTS]) {
    Products row = {};
    for (int i = 0; i < PARTS; ++i) {
      const __m512bh x = bits(_mm512_loadu_si512(key + i * PART));
      for (int g = 0; g < G; ++g) row.of[g] = (Vec)_mm512_dpbf16_ps((__m512)row.of[g], x, q[g][i]);
    }
    return row;
  }

  // What sum_rows() makes of all products, from keys in an order in which few vectors wait for their partners: registers
  // hold them, which a fifth of a prompt's attention is saved by. Keys from memory are better read one after the other.
  template <int FIRST, int N>
  __attribute__((always_inline)) static Products sums_of(const BF16* keys, const __m512bh (&q)[G][PARTS]) {
    if constexpr (N == RUN) {
      return products(keys + FIRST * D, q);
    } else {
      Products first = sums_of<FIRST, 2 * N>(keys, q);
      const Products second = sums_of<FIRST + N, 2 * N>(keys, q);
      for (int g = 0; g < G; ++g) first.of[g] = pair_sums(first.of[g], second.of[g], N);
      return first;
    }
  }
};

}  // namespace
#endif
