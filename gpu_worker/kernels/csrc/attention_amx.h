// Many bfloat16 rows over positions [begin, end), as in attention_tile.h, with the matrix unit of newer Intel processors.
//
// Scores are computed as keys times queries, so that keys are read where they lie and rows are lanes of the softmax.
// Its weights, rounded to bfloat16 and turned, then multiply the values. Sums are float32.
#pragma once
#include "amx.h"
#include "attention_pair_rows.h"

#if defined(HAS_AMX) && defined(ATTEND_IN_PAIRS) && !defined(KV_INT8)
#define ATTEND_WITH_AMX 1
#include <algorithm>

namespace {

// Registers 0 to 3, two by two, += two stacks of 16 rows (4, 5) times two of 16 columns (6, 7), `depth` times 32 deep.
// Strides are in bytes: between rows, and between columns' pairs of numbers.
inline void multiply(const void* left0, const void* left1, int64_t left_stride, const void* right0, const void* right1,
                     int64_t right_stride, int depth) {
  const char *a0 = (const char*)left0, *a1 = (const char*)left1, *b0 = (const char*)right0, *b1 = (const char*)right1;
  for (int k = 0; k < depth; ++k, a0 += 64, a1 += 64, b0 += 16 * right_stride, b1 += 16 * right_stride) {
    _tile_loadd(4, a0, left_stride);
    _tile_loadd(6, b0, right_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b1, right_stride);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a1, left_stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// V * 16 rows, one of several such tiles that a thread computes side by side.
template <int V>
class AmxTile {
  static constexpr int R = V * LANES, STEP = 2 * LANES;  // STEP: positions that one multiplication takes
  static_assert(V % 2 == 0, "registers are used two by two");

 public:
  static constexpr int ROWS = R, POSITIONS = PAIR_TILE;  // of a step

  // What tiles share, one after the other.
  struct Shared {
    const AmxRegisters registers{{16, 16, 16, 16, 16, 16, 16, 16}};
    PairScores<V> scores;
    alignas(64) int32_t shares[R][PAIR_TILE / PAIR];            // pairs of positions: the softmax's weights
    alignas(64) uint16_t values[PAIR_TILE / PAIR][D][PAIR];     // of a step, for all tiles

    void read(const Args& a, const int32_t* table, int head, int start, int end) {
      const int count = std::min(PAIR_TILE, end - start);
      for (int t = 0; t < count; t += PAIR) {
        const BF16* row = kv_row<BF16>(a, a.value, table, head, start + t);
        for (int i = 0; i < D; i += STEP) {
          const __m512i even = _mm512_loadu_si512(row + i);
          const __m512i odd = t + 1 < count ? _mm512_loadu_si512(row + D + i) : _mm512_setzero_si512();
          _mm512_store_si512(values[t / PAIR][i], interleave(even, odd, 0));
          _mm512_store_si512(values[t / PAIR][i + LANES], interleave(even, odd, 1));
        }
      }
      for (int t = (count + 1) / PAIR; t < (count + STEP - 1) / STEP * LANES; ++t) memset(values[t], 0, sizeof values[t]);
    }
  };

  AmxTile(const Args& args, const Row<BF16>* first, int num_rows) : a(args), lanes(args, first, num_rows) {
    memset(output, 0, sizeof output);
  }

  // As PairTile's.
  void step(Shared& shared, const int32_t* table, int head, int start, int end, const NextStep&) {
    const int count = std::min(PAIR_TILE, end - start);
    score(shared, table, head, start, count);
    weigh(shared, start, end, count);
    add_values(shared, count);
  }

  void write() const {
    for (int r = 0; r < lanes.num_rows; ++r) {
      Vec row[VECS];
      for (int i = 0; i < VECS; ++i) row[i] = load(&output[r][i * LANES]);
      lanes.write(r, row);
    }
  }

 private:
  const Args& a;
  PairRows<V> lanes;
  alignas(64) float output[R][D];

  void score(Shared& shared, const int32_t* table, int head, int start, int count) {
    for (int t = 0; t < count; t += STEP) {
      const BF16* first = kv_row<BF16>(a, a.key, table, head, start + t);
      // Behind the end there may be no block: what is computed in its place is not seen.
      const BF16* second = t + LANES < count ? kv_row<BF16>(a, a.key, table, head, start + t + LANES) : first;
      for (int r = 0; r < R; r += STEP) {
        zero();
        multiply(first, second, D * sizeof(BF16), &lanes.query[0][r], &lanes.query[0][r + LANES], sizeof lanes.query[0],
                 D / 32);
        store_registers(&shared.scores.of[t][r], sizeof shared.scores.of[0]);
      }
    }
  }

  // Scores become the softmax's weights; what was summed so far shrinks as the largest score grows.
  void weigh(Shared& shared, int start, int end, int count) {
    const int padded = (count + STEP - 1) / STEP * STEP;
    for (int i = 0; i < V; ++i) {
      const Vec now = lanes.settle(shared.scores, i, start, end, padded), least = now * -LOG2_E;
      if (lanes.grows(i, now)) shrink(i, now);
      Vec total = {};
      for (int t = 0; t < padded; t += STEP) {
        VecInt pairs[LANES];
        for (int p = 0; p < LANES; ++p) {
          const Vec low = lanes.weight(shared.scores, t + 2 * p, i, least);
          const Vec high = lanes.weight(shared.scores, t + 2 * p + 1, i, least);
          total += low + high;
          pairs[p] = pairs_of(low, high);
        }
        transpose(pairs);
        for (int r = 0; r < LANES; ++r) memcpy(&shared.shares[i * LANES + r][t / PAIR], &pairs[r], sizeof(VecInt));
      }
      lanes.weights[i] += total;
    }
  }

  void shrink(int i, Vec now) {
    const Vec factor = lanes.raise(i, now);
    for (int r = 0; r < LANES; ++r) {
      if (factor[r] == 1.f) continue;
      float* row = output[i * LANES + r];
      for (int e = 0; e < D; e += LANES) store(row + e, load(row + e) * factor[r]);
    }
  }

  void add_values(Shared& shared, int count) {
    finish_stores();
    const int depth = (count + STEP - 1) / STEP;
    for (int r = 0; r < R; r += STEP)
      for (int d = 0; d < D; d += STEP) {
        load_registers(&output[r][d], sizeof output[0]);
        multiply(shared.shares[r], shared.shares[r + LANES], sizeof shared.shares[0], shared.values[0][d],
                 shared.values[0][d + LANES], sizeof shared.values[0], depth);
        store_registers(&output[r][d], sizeof output[0]);
      }
  }

  static void zero() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  static void load_registers(const float* from, int64_t stride) {
    const float* lower = from + LANES * stride / sizeof(float);
    _tile_loadd(0, from, stride);
    _tile_loadd(1, from + LANES, stride);
    _tile_loadd(2, lower, stride);
    _tile_loadd(3, lower + LANES, stride);
  }

  static void store_registers(float* to, int64_t stride) {
    float* lower = to + LANES * stride / sizeof(float);
    _tile_stored(0, to, stride);
    _tile_stored(1, to + LANES, stride);
    _tile_stored(2, lower, stride);
    _tile_stored(3, lower + LANES, stride);
  }
};

}  // namespace
#endif
