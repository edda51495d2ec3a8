// One bfloat16 token, as in attention_decode.h, with the matrix unit: its query heads of a KV head, 3 to 16 of them.
//
// As in attention_amx.h scores are keys times queries, so that keys are read where they lie. Weights are rounded to
// bfloat16, sums are float32. With fewer heads the unit idles, and attention_decode_pairs.h is as fast or faster.
#pragma once
#include "attention_amx.h"

constexpr int FEWEST_AMX_HEADS = 3, MOST_AMX_HEADS = 16;

#ifdef ATTEND_WITH_AMX
#include <cmath>

namespace {

constexpr int STRETCH = 32;  // positions of one multiplication, and between two looks at the largest score

// Fetches the keys and values of the next stretch, a little at a time: memory shall not idle while the unit computes.
class Ahead {
 public:
  void plan(const Args& a, const int32_t* table, int head, int start, int end) {
    const int64_t shift = (const char*)a.value - (const char*)a.key;
    num_pieces = next = 0;
    for (int t = start; t < std::min(start + STRETCH, end); t += LANES) {
      const char* keys = (const char*)kv_row<BF16>(a, a.key, table, head, t);
      for (int i = 0; i < BYTES; i += PIECE) {
        pieces[num_pieces++] = keys + i;
        pieces[num_pieces++] = keys + shift + i;
      }
    }
  }

  void fetch(int count) {
    for (const int end = std::min(next + count, num_pieces); next < end; ++next) prefetch(pieces[next], PIECE);
  }

  void fetch_rest() { fetch(num_pieces - next); }

 private:
  static constexpr int PIECE = 512, BYTES = LANES * D * sizeof(BF16);  // at a time; of sixteen rows
  const char* pieces[2 * STRETCH / LANES * BYTES / PIECE];
  int num_pieces = 0, next = 0;
};

// C columns of queries: a power of two, at least as many as there are heads.
template <int C>
class AmxDecode {
 public:
  AmxDecode(const Args& args, const int32_t* blocks, int kv_head, const BF16* queries, int num_heads, int visible_from)
      : a(args), table(blocks), head(kv_head), heads(num_heads), visible(visible_from) {
    for (int g = 0; g < heads; ++g) top[g] = LOWEST;
    for (int d = 0; d < D / PAIR; ++d)
      for (int g = 0; g < heads; ++g) memcpy(&query[d][g], queries + g * D + d * PAIR, sizeof query[d][g]);
  }

  void run(int begin, int end, const Target<BF16>* targets) {
    const uint8_t rows = heads;  // and bytes of each row below: a register of 16 heads takes no longer than one of 3
    const AmxRegisters registers({16, 16, 16, 16, 16, rows, rows, rows}, {C * 4, C * 4, 64, 64, C * 4, 64, 64, 64});
    for (int start = begin; start < end; start += STRETCH) {
      ahead.plan(a, table, head, start + STRETCH, end);
      score(start, end);
      weigh(start, end);
      gather_values(start, end);
      add_values();
      ahead.fetch_rest();
    }
    for (int g = 0; g < heads; ++g) write(g, targets[g]);
  }

 private:
  const Args& a;
  const int32_t* table;
  const int head, heads, visible;
  Ahead ahead;
  float top[C], weights[C] = {};
  alignas(64) int32_t query[D / PAIR][C] = {};  // pairs of elements
  alignas(64) float scores[STRETCH][C];
  alignas(64) uint16_t shares[C][STRETCH];        // the softmax's weights
  alignas(64) int32_t values[STRETCH / PAIR][D];  // pairs of positions
  alignas(64) float output[C][D] = {};

  // Registers: 0 and 1 scores, 2 and 3 keys, 4 queries.
  void score(int start, int end) {
    const BF16* first = kv_row<BF16>(a, a.key, table, head, start);
    // Behind the end there may be no block: what is computed in its place is not seen.
    const BF16* second = start + LANES < end ? kv_row<BF16>(a, a.key, table, head, start + LANES) : first;
    _tile_zero(0);
    _tile_zero(1);
    for (int d = 0; d < D; d += STRETCH) {
      _tile_loadd(4, query[d / PAIR], sizeof query[0]);
      _tile_loadd(2, first + d, D * sizeof(BF16));
      _tile_dpbf16ps(0, 2, 4);
      _tile_loadd(3, second + d, D * sizeof(BF16));
      _tile_dpbf16ps(1, 3, 4);
      ahead.fetch(2);
    }
    _tile_stored(0, scores[0], sizeof scores[0]);
    _tile_stored(1, scores[LANES], sizeof scores[0]);
  }

  // Sixteen rows of C scores as C vectors of sixteen. Each pass sorts by one bit of the column.
  static void to_columns(const float* rows, Vec* to) {
    const VecInt even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    for (int i = 0; i < C; ++i) to[i] = load(rows + i * LANES);
    for (int n = 1; n < C; n *= 2) {
      Vec sorted[C];
      for (int i = 0; i < C / 2; ++i) {
        sorted[i] = __builtin_shuffle(to[2 * i], to[2 * i + 1], even);
        sorted[C / 2 + i] = __builtin_shuffle(to[2 * i], to[2 * i + 1], even + 1);
      }
      for (int i = 0; i < C; ++i) to[i] = sorted[i];
    }
  }

  // Scores become the softmax's weights; what was summed so far shrinks as the largest score grows.
  void weigh(int start, int end) {
    const VecInt lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Vec columns[2][C];
    for (int i = 0; i < 2; ++i) {
      to_columns(scores[i * LANES], columns[i]);
      const VecInt positions = lanes + (start + i * LANES), seen = (positions >= visible) & (positions < end);
      for (int g = 0; g < heads; ++g) columns[i][g] = seen ? limited(a, columns[i][g] * a.scale) : splat(LOWEST);
      ahead.fetch(4);
    }
    for (int g = 0; g < heads; ++g) {
      const float now = std::max(top[g], largest(maximum(columns[0][g], columns[1][g])));
      if (now > top[g]) shrink(g, now);
      const Vec first = weight_of(columns[0][g] - now), second = weight_of(columns[1][g] - now);
      weights[g] += sum(first + second);
      store((BF16*)shares[g], first);
      store((BF16*)shares[g] + LANES, second);
    }
  }

  void shrink(int g, float now) {
    const float factor = std::exp(top[g] - now);
    top[g] = now;
    weights[g] *= factor;
    for (int d = 0; d < D; d += LANES) store(output[g] + d, load(output[g] + d) * factor);
  }

  // Of every eight elements the lower four go into one half of their 32, the upper four into the other: an instruction
  // each, and write() puts them right once.
  void gather_values(int start, int end) {
    for (int t = 0; t < STRETCH; t += PAIR) {
      if (start + t >= end) {
        memset(values[t / PAIR], 0, sizeof values[0]);
        continue;
      }
      const BF16* row = kv_row<BF16>(a, a.value, table, head, start + t);
      for (int d = 0; d < D; d += STRETCH) {
        const __m512i even = _mm512_loadu_si512(row + d);
        const __m512i odd = start + t + 1 < end ? _mm512_loadu_si512(row + D + d) : _mm512_setzero_si512();
        _mm512_store_si512(values[t / PAIR] + d, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(values[t / PAIR] + d + LANES, _mm512_unpackhi_epi16(even, odd));
      }
      if (t % 4 == 0) ahead.fetch(1);
    }
  }

  // Registers: 5 and 7 the output, 6 weights, 2 and 3 values.
  void add_values() {
    finish_stores();
    _tile_loadd(6, shares[0], sizeof shares[0]);
    for (int d = 0; d < D; d += STRETCH) {
      _tile_loadd(5, output[0] + d, sizeof output[0]);
      _tile_loadd(2, values[0] + d, sizeof values[0]);
      _tile_dpbf16ps(5, 6, 2);
      _tile_stored(5, output[0] + d, sizeof output[0]);
      _tile_loadd(7, output[0] + d + LANES, sizeof output[0]);
      _tile_loadd(3, values[0] + d + LANES, sizeof values[0]);
      _tile_dpbf16ps(7, 6, 3);
      _tile_stored(7, output[0] + d + LANES, sizeof output[0]);
      ahead.fetch(2);
    }
  }

  void write(int g, const Target<BF16>& target) const {
    const VecInt first = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23}, second = first + 8;
    Vec row[VECS];
    for (int i = 0; i < VECS; i += 2) {
      const Vec lower = load(output[g] + i * LANES), upper = load(output[g] + (i + 1) * LANES);
      row[i] = __builtin_shuffle(lower, upper, first);
      row[i + 1] = __builtin_shuffle(lower, upper, second);
    }
    target.write(row, top[g], weights[g]);
  }
};

}  // namespace
#endif
