// One token over bfloat16 keys and values, as in attention_decode.h, without bfloat16 instructions. A word holds two
// neighbouring elements, so that a shift and a mask make floats of a whole register of them; the elements of even and odd
// numbers have sums of their own. Sums stay in registers: over a key, and over all values of a span.
#pragma once
#include <algorithm>
#include <cmath>

#include "attention_decode.h"

#if defined(__AVX2__) && !defined(__AVX512BF16__) && HEAD_SIZE % 32 == 0 && !defined(KV_INT8)
#define DECODE_IN_WORDS 1
namespace {

constexpr int WORDS = D / (2 * LANES);  // registers of words in a row

struct Halves {
  Vec even, odd;
};

inline Halves load_words(const BF16* row) {
  VecBits words;
  memcpy(&words, row, sizeof words);
  return {(Vec)(words << 16), (Vec)(words & 0xffff0000u)};
}

// As sum_rows, with fewer instructions.
inline Vec sum_keys(Vec* rows) {
#ifdef __AVX512F__
  return sum_rows(rows);
#else
  const __m256 first = _mm256_hadd_ps(_mm256_hadd_ps(rows[0], rows[1]), _mm256_hadd_ps(rows[2], rows[3]));
  const __m256 second = _mm256_hadd_ps(_mm256_hadd_ps(rows[4], rows[5]), _mm256_hadd_ps(rows[6], rows[7]));
  return (Vec)(_mm256_permute2f128_ps(first, second, 0x20) + _mm256_permute2f128_ps(first, second, 0x31));
#endif
}

template <int G>
class WordsDecode {
 public:
  WordsDecode(const Args& args, const int32_t* blocks, int kv_head, const BF16* query, int begin_, int end_, int visible_)
      : a(args), table(blocks), head(kv_head), begin(begin_), end(end_), visible(visible_) {
    for (int g = 0; g < G; ++g) {
      top[g] = LOWEST;
      for (int w = 0; w < WORDS; ++w) {
        const Halves x = load_words(query + g * D + w * 2 * LANES);
        q[g][w] = {x.even * a.scale, x.odd * a.scale};
      }
    }
  }

  void run(const Target<BF16>* targets) {
    for (int start = begin; start < end; start += SPAN) {
      const int count = std::min(SPAN, end - start);
      for (int c = 0; c < count; c += LANES) score(start + c, c, std::min(LANES, count - c));
      weigh((count + LANES - 1) / LANES);
      add_values(start, count);
    }
    for (int g = 0; g < G; ++g) write(targets[g], g);
  }

 private:
  static constexpr int SUMS = LANES == 16 ? 16 : 8;           // that registers hold
  static constexpr int KEYS = G <= 2 ? SUMS / G : SUMS / 4;  // at the same time
  static constexpr int most_words() {  // of the values, the largest divisor of WORDS whose sums registers hold
    int n = std::max(1, SUMS / (2 * G));
    while (WORDS % n) --n;
    return n;
  }
  static constexpr int AT_ONCE = most_words();
  const Args& a;
  const int32_t* table;
  const int head, begin, end, visible;
  Halves q[G][WORDS], o[G][WORDS] = {};
  float top[G], weights[G] = {};
  alignas(64) float scores[G][SPAN];

  // Products of N keys from `keys` on with each query head, of which `rows` become the sums.
  template <int N>
  void multiply(const BF16* keys, Vec (*rows)[LANES], int first) {
    Vec sums[N][G] = {};
#pragma GCC unroll 2
    for (int w = 0; w < WORDS; ++w)
#pragma GCC unroll 16
      for (int t = 0; t < N; ++t) {
        const Halves x = load_words(keys + t * D + w * 2 * LANES);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
          sums[t][g] += x.even * q[g][w].even;
          sums[t][g] += x.odd * q[g][w].odd;
        }
      }
#pragma GCC unroll 16
    for (int t = 0; t < N; ++t)
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) rows[g][first + t] = sums[t][g];
  }

  // Scores of n positions from `position` on into column c on.
  void score(int position, int c, int n) {
    const BF16* keys = kv_row<BF16>(a, a.key, table, head, position);
    const BF16* values = (const BF16*)a.value + (keys - (const BF16*)a.key);
    Vec rows[G][LANES];
    int t = 0;
    for (; t + KEYS <= n; t += KEYS) {
      prefetch(values + t * D, KEYS * D * sizeof(BF16));
      multiply<KEYS>(keys + t * D, rows, t);
    }
    for (; t < n; ++t) multiply<1>(keys + t * D, rows, t);
    const VecInt positions = lane_numbers() + position;
    for (int g = 0; g < G; ++g) {
      for (int i = n; i < LANES; ++i) rows[g][i] = Vec{};
      const Vec s = limited(a, sum_keys(rows[g]));
      store(&scores[g][c], (positions >= visible) & (positions < end) ? s : splat(LOWEST));
    }
  }

  // Scores become the softmax's weights; what was summed so far shrinks as the largest score grows.
  void weigh(int vecs) {
    for (int g = 0; g < G; ++g) {
      const float shrink = soften(scores[g], vecs, top[g], weights[g]);
      for (int w = 0; w < WORDS; ++w) o[g][w] = {o[g][w].even * shrink, o[g][w].odd * shrink};
    }
  }

  // Several passes, each over a part of every row, so that the sums stay in registers. One request at a context of
  // 8,192 reads 14 to 18 GB/s with one thread, and read 9 to 10 when sums lay in memory (AMD EPYC with AVX2).
  void add_values(int start, int count) {
    constexpr int PIECE = AT_ONCE * 2 * LANES;  // elements of a row that a pass over the span reads
    const BF16* values[SPAN / RUN];
    for (int c = 0; c < count; c += RUN) values[c / RUN] = kv_row<BF16>(a, a.value, table, head, start + c);
    // The next span's keys are fetched meanwhile, in the order of their addresses whatever the order of the values.
    const BF16* ahead[SPAN / RUN];
    for (int c = 0; c < SPAN; c += RUN) {
      const int next = start + SPAN + c;
      ahead[c / RUN] = next < end ? kv_row<BF16>(a, a.key, table, head, next) : values[0];
    }
    for (int first = 0; first < WORDS; first += AT_ONCE) {
      Halves sums[G][AT_ONCE];
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
        for (int w = 0; w < AT_ONCE; ++w) sums[g][w] = o[g][first + w];
      for (int c = 0; c < count; c += RUN) {
        const BF16* row = values[c / RUN] + first * 2 * LANES;
        const int n = std::min(RUN, count - c);
        for (int t = 0; t < n; ++t, row += D) {
          const int element = (first / AT_ONCE * SPAN + c + t) * PIECE;
          // In the order of the passes, a line of each row at a time, no prefetcher of the processor would follow.
          prefetch(ahead[element / (RUN * D)] + element % (RUN * D), PIECE * sizeof(BF16));
#pragma GCC unroll 4
          for (int w = 0; w < AT_ONCE; ++w) {
            const Halves x = load_words(row + w * 2 * LANES);
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) {
              sums[g][w].even += x.even * scores[g][c + t];
              sums[g][w].odd += x.odd * scores[g][c + t];
            }
          }
        }
      }
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
        for (int w = 0; w < AT_ONCE; ++w) o[g][first + w] = sums[g][w];
    }
  }

  void write(const Target<BF16>& target, int g) const {
    Vec ordered[VECS];
    for (int d = 0; d < D; ++d) {
      const Halves& x = o[g][d / (2 * LANES)];
      const int lane = d / 2 % LANES;
      ordered[d / LANES][d % LANES] = d % 2 ? x.odd[lane] : x.even[lane];
    }
    target.write(ordered, top[g], weights[g]);
  }
};

template <int G>
void decode_words(const Args& a, const int32_t* table, int head, const BF16* query, int begin, int end, int visible,
                  const Target<BF16>* targets) {
  WordsDecode<G>(a, table, head, query, begin, end, visible).run(targets);
}

}  // namespace
#endif
