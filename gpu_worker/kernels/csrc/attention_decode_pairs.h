// One bfloat16 token, as in attention_decode.h, with the processor's products of pairs: half the work of widening every
// number. Keys meet queries in pairs of elements, values meet weights (rounded to bfloat16) in pairs of positions. Sums
// are float32.
#pragma once
#include <algorithm>
#include <cmath>

#include "attention_decode.h"

#if defined(__AVX512BF16__) && HEAD_SIZE % 32 == 0 && !defined(KV_INT8)
#define DECODE_IN_PAIRS 1
#include <immintrin.h>

namespace {

template <int G>
class PairDecode {
 public:
  PairDecode(const Args& args, const int32_t* blocks, int kv_head, const BF16* query_, int begin_, int end_,
             int visible_)
      : a(args), table(blocks), head(kv_head), query(query_), begin(begin_), end(end_), visible(visible_) {
    for (int g = 0; g < G; ++g) top[g] = LOWEST;
  }

  void run(const Target<BF16>* targets) {
    for (int start = begin; start < end; start += SPAN) {
      const int count = std::min(SPAN, end - start);
      score(start, count);
      weigh(count);
      add_values(start, count);
    }
    for (int g = 0; g < G; ++g) write(g, targets[g]);
  }

 private:
  static constexpr int PART = 2 * LANES, PARTS = D / PART;  // of a head: what one register holds
  // Parts whose sums fit into the registers beside what they are made of. It divides PARTS.
  static constexpr int AT_ONCE = G == 1 ? PARTS : G == 2 && PARTS % 4 == 0 ? 4 : PARTS % 2 == 0 ? 2 : 1;
  const Args& a;
  const int32_t* table;
  const int head;
  const BF16* query;
  const int begin, end, visible;
  float top[G], weights[G] = {};
  alignas(64) float scores[G][SPAN];
  alignas(64) uint16_t shares[G][SPAN];  // the softmax's weights
  Vec sums[G][PARTS][2] = {};            // of each part the lower and the upper four of every eight elements

  static __m512bh bits(__m512i x) { return (__m512bh)x; }

  void score(int start, int count) {
    const VecInt lanes = lane_numbers();
    __m512bh q[G][PARTS];
    for (int g = 0; g < G; ++g)
      for (int i = 0; i < PARTS; ++i) q[g][i] = bits(_mm512_loadu_si512(query + g * D + i * PART));
    for (int c = 0; c < count; c += LANES) {
      const BF16* keys = kv_row<BF16>(a, a.key, table, head, start + c);
      const BF16* values = (const BF16*)a.value + (keys - (const BF16*)a.key);
      Vec rows[G][LANES];
      for (int t = 0; t < LANES; ++t) {  // behind the end the block goes on: what is there is not seen
        prefetch(values + t * D, D * sizeof(BF16));
        Vec sum[G] = {};
        for (int i = 0; i < PARTS; ++i) {
          const __m512bh x = bits(_mm512_loadu_si512(keys + t * D + i * PART));
          for (int g = 0; g < G; ++g) sum[g] = (Vec)_mm512_dpbf16_ps((__m512)sum[g], x, q[g][i]);
        }
        for (int g = 0; g < G; ++g) rows[g][t] = sum[g];
      }
      const VecInt positions = lanes + (start + c);
      for (int g = 0; g < G; ++g) {
        const Vec s = limited(a, sum_rows(rows[g]) * a.scale);
        store(&scores[g][c], (positions >= visible) & (positions < end) ? s : splat(LOWEST));
      }
    }
  }

  // Scores become the softmax's weights; what was summed so far shrinks as the largest score grows.
  void weigh(int count) {
    const int vecs = (count + LANES - 1) / LANES;
    for (int g = 0; g < G; ++g) {
      Vec best = load(scores[g]);
      for (int i = 1; i < vecs; ++i) best = maximum(best, load(scores[g] + i * LANES));
      const float now = std::max(top[g], largest(best));
      Vec total = {};
      for (int i = 0; i < vecs; ++i) {
        const Vec e = exponential(load(scores[g] + i * LANES) - now);
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
      weights[g] += sum(total);
    }
  }

  void add_values(int start, int count) {
    for (int c = 0; c < count; c += LANES) {
      const BF16* values = kv_row<BF16>(a, a.value, table, head, start + c);
      const int n = std::min(LANES, count - c), next = start + SPAN + c;
      const BF16* ahead = next < end ? kv_row<BF16>(a, a.key, table, head, next) : values;
      for (int first = 0; first < PARTS; first += AT_ONCE) {
        Vec sum[G][AT_ONCE][2];
        for (int g = 0; g < G; ++g)
          for (int i = 0; i < AT_ONCE; ++i)
            for (int half = 0; half < 2; ++half) sum[g][i][half] = sums[g][first + i][half];
        for (int t = 0; t < n; t += 2) {
          prefetch(ahead + (t * PARTS + first * 2) * PART, AT_ONCE * 2 * 64);
          for (int i = 0; i < AT_ONCE; ++i) {
            const BF16* row = values + t * D + (first + i) * PART;
            const __m512i even = _mm512_loadu_si512(row);
            const __m512i odd = t + 1 < n ? _mm512_loadu_si512(row + D) : _mm512_setzero_si512();
            const __m512bh lower = bits(_mm512_unpacklo_epi16(even, odd)), upper = bits(_mm512_unpackhi_epi16(even, odd));
            for (int g = 0; g < G; ++g) {
              int32_t pair;
              memcpy(&pair, &shares[g][c + t], sizeof pair);
              const __m512bh share = bits(_mm512_set1_epi32(pair));
              sum[g][i][0] = (Vec)_mm512_dpbf16_ps((__m512)sum[g][i][0], share, lower);
              sum[g][i][1] = (Vec)_mm512_dpbf16_ps((__m512)sum[g][i][1], share, upper);
            }
          }
        }
        for (int g = 0; g < G; ++g)
          for (int i = 0; i < AT_ONCE; ++i)
            for (int half = 0; half < 2; ++half) sums[g][first + i][half] = sum[g][i][half];
      }
    }
  }

  // The elements in their order again.
  void write(int g, const Target<BF16>& target) const {
    const VecInt low = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23}, high = low + 8;
    Vec row[VECS];
    for (int i = 0; i < PARTS; ++i) {
      row[2 * i] = __builtin_shuffle(sums[g][i][0], sums[g][i][1], low);
      row[2 * i + 1] = __builtin_shuffle(sums[g][i][0], sums[g][i][1], high);
    }
    target.write(row, top[g], weights[g]);
  }
};

template <int G>
void decode_pairs(const Args& a, const int32_t* table, int head, const BF16* query, int begin, int end, int visible,
                  const Target<BF16>* targets) {
  PairDecode<G>(a, table, head, query, begin, end, visible).run(targets);
}

}  // namespace
#endif
