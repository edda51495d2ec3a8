// Many bfloat16 rows over positions [begin, end), as in attention_tile.h, with the matrix unit of newer Intel processors.
//
// Scores are computed as keys times queries, so that keys are read where they lie and rows are lanes of the softmax.
// Its weights, rounded to bfloat16 and turned, then multiply the values. Sums are float32.
#pragma once
#include "amx.h"
#include "attention.h"

#if defined(HAS_AMX) && HEAD_SIZE % 32 == 0 && !defined(KV_INT8)
#define ATTEND_WITH_AMX 1
#include <algorithm>

namespace {

constexpr int MAX_AMX_ROWS = 64, AMX_TILE = 128;  // rows and positions between two looks at the largest score
constexpr int PAIR = 2;                           // bfloat16 numbers that the unit multiplies together

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

// e^x for x ≤ 0, within 2e-4 of it, which is finer than what it is rounded to; exactly 1 for 0.
inline Vec weight_of(Vec x) {
  const Vec t = maximum(x * 1.44269504f, splat(-126.f));
  const Vec n = _mm512_roundscale_ps(t, 0), f = t - n;
  const Vec p = ((f * 5.5167763e-2f + 2.4225464e-1f) * f + 6.9325576e-1f) * f + 1.f;  // 2^f on [-0.5, 0.5]
  return _mm512_scalef_ps(p, n);
}

inline VecInt pairs_of(Vec low, Vec high) {
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  return (VecInt)_mm512_permutexvar_epi16(_mm512_load_si512(order), both);
}

// Work of one thread on V * 16 rows.
template <int V>
class AmxTile {
 public:
  AmxTile(const Args& args, const Row<BF16>* rows_, int num_rows_) : a(args), rows(rows_), num_rows(num_rows_) {
    for (int i = 0; i < V; ++i) top[i] = splat(LOWEST);
    for (int r = 0; r < R; ++r) last[r / LANES][r % LANES] = rows[std::min(r, num_rows - 1)].last;
    memset(output, 0, sizeof output);
    for (int i = 0; i < V; ++i)
      for (int d = 0; d < D / PAIR; d += LANES) {
        VecInt block[LANES] = {};
        for (int r = 0; r < LANES && i * LANES + r < num_rows; ++r)
          memcpy(&block[r], rows[i * LANES + r].query + d * PAIR, sizeof(VecInt));
        transpose(block);
        for (int e = 0; e < LANES; ++e) memcpy(&query[d + e][i * LANES], &block[e], sizeof(VecInt));
      }
  }

  void run(const int32_t* table, int head, int begin, int end) {
    const AmxRegisters registers({16, 16, 16, 16, 16, 16, 16, 16});
    for (int start = begin; start < end; start += AMX_TILE) {
      const int count = std::min(AMX_TILE, end - start);
      score(table, head, start, count);
      gather_values(table, head, start, count);
      weigh(start, end, count);
      add_values(count);
    }
    for (int r = 0; r < num_rows; ++r) {
      Vec row[VECS];
      for (int i = 0; i < VECS; ++i) row[i] = load(&output[r][i * LANES]);
      rows[r].target.write(row, top[r / LANES][r % LANES], weights[r / LANES][r % LANES]);
    }
  }

 private:
  static constexpr int R = V * LANES, STEP = 2 * LANES;  // STEP: positions that one multiplication takes
  static_assert(V % 2 == 0, "registers are used two by two");
  const Args& a;
  const Row<BF16>* rows;
  const int num_rows;
  VecInt last[V];
  Vec top[V], weights[V] = {};
  alignas(64) int32_t query[D / PAIR][R];           // pairs of elements
  alignas(64) float scores[AMX_TILE][R];
  alignas(64) int32_t shares[R][AMX_TILE / PAIR];   // pairs of positions: the softmax's weights
  alignas(64) uint16_t values[AMX_TILE / PAIR][D][PAIR];
  alignas(64) float output[R][D];

  void score(const int32_t* table, int head, int start, int count) {
    for (int t = 0; t < count; t += STEP) {
      const BF16* first = kv_row<BF16>(a, a.key, table, head, start + t);
      // Behind the end there may be no block: what is computed in its place is not seen.
      const BF16* second = t + LANES < count ? kv_row<BF16>(a, a.key, table, head, start + t + LANES) : first;
      for (int r = 0; r < R; r += STEP) {
        zero();
        multiply(first, second, D * sizeof(BF16), &query[0][r], &query[0][r + LANES], sizeof query[0], D / 32);
        store_registers(&scores[t][r], sizeof scores[0]);
      }
    }
  }

  void gather_values(const int32_t* table, int head, int start, int count) {
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

  static __m512i interleave(__m512i even, __m512i odd, int half) {
    alignas(64) static const uint16_t order[2][32] = {
        {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    return _mm512_permutex2var_epi16(even, _mm512_load_si512(order[half]), odd);
  }

  // Scores become the softmax's weights; what was summed so far shrinks as the largest score grows.
  void weigh(int start, int end, int count) {
    const int padded = (count + STEP - 1) / STEP * STEP;
    const float scale = LIMITS_SCORES ? 1.f : a.scale;
    for (int i = 0; i < V; ++i) {
      if constexpr (LIMITS_SCORES)
        for (int t = 0; t < padded; ++t)
          store(&scores[t][i * LANES], limited(a, load(&scores[t][i * LANES]) * a.scale));
      if (!all_seen(i, start, padded)) hide(i, start, end, padded);
      Vec now = top[i];
      for (int t = 0; t < padded; ++t) now = maximum(now, load(&scores[t][i * LANES]) * scale);
      shrink(i, now);
      Vec total = {};
      for (int t = 0; t < padded; t += STEP) {
        VecInt pairs[LANES];
        for (int p = 0; p < LANES; ++p) {
          const Vec low = weight_of(load(&scores[t + 2 * p][i * LANES]) * scale - now);
          const Vec high = weight_of(load(&scores[t + 2 * p + 1][i * LANES]) * scale - now);
          total += low + high;
          pairs[p] = pairs_of(low, high);
        }
        transpose(pairs);
        for (int r = 0; r < LANES; ++r) memcpy(&shares[i * LANES + r][t / PAIR], &pairs[r], sizeof(VecInt));
      }
      weights[i] += total;
    }
  }

  bool all_seen(int i, int start, int padded) const {
    for (int r = 0; r < LANES; ++r) {
      if (last[i][r] < start + padded - 1) return false;
      if (a.window && last[i][r] - a.window >= start) return false;
    }
    return true;
  }

  void hide(int i, int start, int end, int padded) {
    for (int t = 0; t < padded; ++t) {
      const int position = start + t;
      VecInt seen = last[i] >= position;
      if (a.window) seen &= last[i] - (int)a.window < position;
      if (position >= end) seen = VecInt{};
      store(&scores[t][i * LANES], seen ? load(&scores[t][i * LANES]) : splat(LOWEST));
    }
  }

  void shrink(int i, Vec now) {
    const Vec factor = weight_of(top[i] - now);
    top[i] = now;
    weights[i] *= factor;
    for (int r = 0; r < LANES; ++r) {
      if (factor[r] == 1.f) continue;
      float* row = output[i * LANES + r];
      for (int e = 0; e < D; e += LANES) store(row + e, load(row + e) * factor[r]);
    }
  }

  void add_values(int count) {
    const int depth = (count + STEP - 1) / STEP;
    for (int r = 0; r < R; r += STEP)
      for (int d = 0; d < D; d += STEP) {
        load_registers(&output[r][d], sizeof output[0]);
        multiply(shares[r], shares[r + LANES], sizeof shares[0], values[0][d], values[0][d + LANES], sizeof values[0],
                 depth);
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
