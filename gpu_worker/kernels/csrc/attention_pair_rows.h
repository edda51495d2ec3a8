// Many bfloat16 rows (a query head of a token each) whose scores are products of pairs: what the kernels of
// attention_amx.h and attention_pairs.h have in common. Rows are lanes.
#pragma once
#include "attention.h"
#include "bf16_pairs.h"

#if defined(HAS_BF16_PAIRS) && HEAD_SIZE % 32 == 0
#define ATTEND_IN_PAIRS 1
#include <algorithm>

namespace {

constexpr int MAX_PAIR_ROWS = 64, PAIR_TILE = 128;  // rows, and positions between two looks at the largest score

constexpr float LOG2_E = 1.44269504f;

// Scores of V * 16 rows over PAIR_TILE positions.
template <int V>
struct PairScores {
  alignas(64) float of[PAIR_TILE][V * LANES];
};

// Up to V * 16 rows, which see nothing from position `end` on.
template <int V>
struct PairRows {
  static constexpr int R = V * LANES;
  typedef PairScores<V> Scores;
  const Args& a;
  const Row<BF16>* rows;
  const int num_rows;
  VecInt first[V], last[V];
  Vec top[V], weights[V] = {};
  alignas(64) uint32_t query[D / PAIR][R];  // pairs of elements

  PairRows(const Args& args, const Row<BF16>* rows_, int num_rows_) : a(args), rows(rows_), num_rows(num_rows_) {
    for (int i = 0; i < V; ++i) top[i] = splat(LOWEST);
    for (int r = 0; r < R; ++r) {
      const Row<BF16>& row = rows[std::min(r, num_rows - 1)];
      first[r / LANES][r % LANES] = row.first;
      last[r / LANES][r % LANES] = row.last;
    }
    for (int i = 0; i < V; ++i)
      for (int d = 0; d < D / PAIR; d += LANES) {
        VecInt block[LANES] = {};
        for (int r = 0; r < LANES && i * LANES + r < num_rows; ++r)
          memcpy(&block[r], rows[i * LANES + r].query + d * PAIR, sizeof(VecInt));
        transpose(block);
        for (int e = 0; e < LANES; ++e) memcpy(&query[d + e][i * LANES], &block[e], sizeof(VecInt));
      }
  }

  // Limits the scores of 16 rows over `count` positions, an even number, hides what they do not see, and returns the
  // largest so far.
  Vec settle(Scores& scores, int i, int start, int end, int count) const {
    if constexpr (LIMITS_SCORES)
      for (int t = 0; t < count; ++t) store(&scores.of[t][i * LANES], limited(a, load(&scores.of[t][i * LANES]) * a.scale));
    if (!all_seen(i, start, end, count)) hide(scores, i, start, end, count);
    Vec even = load(&scores.of[0][i * LANES]), odd = even;  // two chains: one would wait for each comparison
    for (int t = 0; t < count; t += 2) {
      even = maximum(even, load(&scores.of[t][i * LANES]));
      odd = maximum(odd, load(&scores.of[t + 1][i * LANES]));
    }
    return maximum(top[i], maximum(even, odd) * factor());
  }

  // By which settled scores are multiplied.
  float factor() const { return LIMITS_SCORES ? 1.f : a.scale; }

  // The softmax's weights of a settled score where `now` is the largest, and `least` is -now * LOG2_E.
  Vec weight(const Scores& scores, int t, int i, Vec least) const {
    return power_of_two(load(&scores.of[t][i * LANES]) * (factor() * LOG2_E) + least);
  }

  // Whether any of these is larger than what was the largest score, or no number.
  bool grows(int i, Vec now) const { return _mm512_cmp_ps_mask(now, top[i], _CMP_NLE_UQ); }

  // Makes `now` the largest score. Returns the factor by which what was summed before shrinks.
  Vec raise(int i, Vec now) {
    const Vec factor = weight_of(top[i] - now);
    top[i] = now;
    weights[i] *= factor;
    return factor;
  }

  void write(int r, const Vec* output) const {
    rows[r].target.write(output, top[r / LANES][r % LANES], weights[r / LANES][r % LANES]);
  }

  // Behind the end nothing is seen, though rows of requests that share a prefix have their own positions there.
  // A prefix of an odd number of blocks was padded to whole tiles, and rows that have positions of their own beyond it
  // took the padding for seen: errors of 0.06, and 1.3 with sinks, instead of 0.008.
  bool all_seen(int i, int start, int end, int count) const {
    if (start + count > end) return false;
    for (int r = 0; r < LANES; ++r) {
      if (last[i][r] < start + count - 1) return false;
      if (a.window && first[i][r] > start) return false;
    }
    return true;
  }

  void hide(Scores& scores, int i, int start, int end, int count) const {
    for (int t = 0; t < count; ++t) {
      const int position = start + t;
      VecInt seen = last[i] >= position;
      if (a.window) seen &= first[i] <= position;
      if (position >= end) seen = VecInt{};
      store(&scores.of[t][i * LANES], seen ? load(&scores.of[t][i * LANES]) : splat(-INFINITY));  // whose weight is 0
    }
  }
};

}  // namespace
#endif
