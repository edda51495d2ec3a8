// Many rows (a query head of a token each) over positions [begin, end): rows in lanes, keys and values broadcast.
#pragma once
#include <algorithm>
#include <type_traits>

#include "attention.h"

namespace {

constexpr int MAX_ROWS = 32, TILE = 32;  // rows, and positions between two looks at the largest score
#ifdef __AVX512F__
constexpr int SUMS = 16;  // that registers hold
#else
constexpr int SUMS = 12;
#endif

// Up to R rows, one of several such tiles that a thread computes side by side.
template <class T, int R>
class Tile {
  static constexpr int RUNS = TILE / RUN;

 public:
  static constexpr int ROWS = R, POSITIONS = TILE;  // of a step

  // What tiles share, one after the other.
  struct Shared {
    const float *keys[RUNS], *values[RUNS];  // of each run of a step, [RUN, D], for all tiles
    alignas(64) float key_copies[RUNS][RUN * D], value_copies[RUNS][RUN * D];
    alignas(64) float scores[TILE][R];

    void read(const Args& a, const int32_t* table, int head, int start, int end) {
      for (int b = 0; b < RUNS; ++b) {
        const int from = start + b * RUN;
        keys[b] = run_of(a, a.key, table, head, from, end, key_copies[b]);
        values[b] = run_of(a, a.value, table, head, from, end, value_copies[b]);
      }
    }
  };

  Tile(const Args& args, const Row<T>* rows_, int num_rows_) : a(args), rows(rows_), num_rows(num_rows_) {
    for (int i = 0; i < V; ++i) top[i] = splat(LOWEST);
    for (int r = 0; r < R; ++r) {
      const Row<T>& row = rows[std::min(r, num_rows - 1)];
      first[r / LANES][r % LANES] = row.first;
      last[r / LANES][r % LANES] = row.last;
    }
    for (int i = 0; i < V; ++i)
      for (int d = 0; d < D; d += LANES) {
        Vec block[LANES] = {};
        for (int r = 0; r < LANES && i * LANES + r < num_rows; ++r)
          block[r] = load(rows[i * LANES + r].query + d) * a.scale;
        transpose(block);
        for (int e = 0; e < LANES; ++e) store(&query[d + e][i * LANES], block[e]);
      }
  }

  // Adds the positions of a step, which begins before `end`: the rows see nothing from there on.
  void step(Shared& shared, const int32_t* table, int head, int start, int end, const NextStep& next) {
    next.fetch<T>(a, table, head, start + TILE, TILE);
    for (int t = 0; t + UNROLL <= TILE; t += UNROLL) score<UNROLL>(shared, t);
    if constexpr (TILE % UNROLL) score<TILE % UNROLL>(shared, TILE - TILE % UNROLL);
    if (!all_seen(start, end)) hide(shared, start, end);
    weigh(shared);
    for (int d = 0; d + UNROLL <= D; d += UNROLL) add_values<UNROLL>(shared, d);
    if constexpr (D % UNROLL) add_values<D % UNROLL>(shared, D - D % UNROLL);
  }

  void write() const {
    turn_columns(output, num_rows, [&](int r, const Vec* row) {
      rows[r].target.write(row, top[r / LANES][r % LANES], weights[r / LANES][r % LANES]);
    });
  }

 private:
  static constexpr int V = R / LANES;
  static constexpr int UNROLL = std::max(SUMS / V, 1);  // keys, or elements of values, that share a load of the rows
  const Args& a;
  const Row<T>* rows;
  const int num_rows;
  VecInt first[V], last[V];
  Vec top[V], weights[V] = {}, shrink[V];
  alignas(64) float query[D][R], output[D][R] = {};

  // Positions from `first` on, where they lie or, if they are no float32 or not all before `end`, a copy with zeros.
  static const float* run_of(const Args& a, const void* cache, const int32_t* table, int head, int first, int end,
                             float* copy) {
    const int count = std::min(RUN, end - first);
    if constexpr (READS_INT8) return int8_run_of(a, cache, table, head, first, count, copy);
    const T* from = count > 0 ? kv_row<T>(a, cache, table, head, first) : nullptr;
    if constexpr (std::is_same_v<T, float>)
      if (count == RUN) return from;
    for (int i = 0; i < RUN * D; i += LANES) store(copy + i, i < count * D ? load(from + i) : Vec{});
    return copy;
  }

  static const float* int8_run_of(const Args& a, const void* cache, const int32_t* table, int head, int first, int count,
                                  float* copy) {
    if (count > 0) {
      const Int8Rows rows = int8_rows(a, cache, table, head, first);
      for (int t = 0; t < count; ++t) load_int8_row(rows.numbers + t * D, rows.scales[t], D, copy + t * D);
    }
    for (int t = std::max(count, 0); t < RUN; ++t) memset(copy + t * D, 0, D * sizeof(float));
    return copy;
  }

  // Of N keys from position t of the step on.
  template <int N>
  void score(Shared& shared, int t) const {
    const float* k[N];
    for (int u = 0; u < N; ++u) k[u] = shared.keys[(t + u) / RUN] + (t + u) % RUN * D;
    Vec sums[N][V] = {};
    for (int d = 0; d < D; ++d)
      for (int u = 0; u < N; ++u)
        for (int i = 0; i < V; ++i) sums[u][i] += load(&query[d][i * LANES]) * k[u][d];
    for (int u = 0; u < N; ++u)
      for (int i = 0; i < V; ++i) store(&shared.scores[t + u][i * LANES], limited(a, sums[u][i]));
  }

  bool all_seen(int start, int end) const {
    if (start + TILE > end) return false;
    VecInt unseen = {};
    for (int i = 0; i < V; ++i) {
      unseen |= last[i] < start + TILE - 1;
      if (a.window) unseen |= first[i] > start;
    }
    for (int r = 0; r < LANES; ++r)
      if (unseen[r]) return false;
    return true;
  }

  void hide(Shared& shared, int start, int end) const {
    for (int t = 0; t < TILE; ++t)
      for (int i = 0; i < V; ++i) {
        const int position = start + t;
        VecInt seen = last[i] >= position;
        if (a.window) seen &= first[i] <= position;
        if (position >= end) seen = VecInt{};
        float* score = &shared.scores[t][i * LANES];
        store(score, seen ? load(score) : splat(-INFINITY));  // whose weight is 0
      }
  }

  // Scores become the softmax's weights; what was summed so far is to shrink as the largest score grows.
  void weigh(Shared& shared) {
    for (int i = 0; i < V; ++i) {
      Vec now = top[i];
      for (int t = 0; t < TILE; ++t) now = maximum(now, load(&shared.scores[t][i * LANES]));
      shrink[i] = decay(top[i] - now);
      top[i] = now;
      Vec total = {};
      for (int t = 0; t < TILE; ++t) {
        const Vec e = decay(load(&shared.scores[t][i * LANES]) - now);
        total += e;
        store(&shared.scores[t][i * LANES], e);
      }
      weights[i] = weights[i] * shrink[i] + total;
    }
  }

  template <int N>
  void add_values(const Shared& shared, int d) {
    Vec sums[N][V];
    for (int u = 0; u < N; ++u)
      for (int i = 0; i < V; ++i) sums[u][i] = load(&output[d + u][i * LANES]) * shrink[i];
    for (int b = 0; b < RUNS; ++b)
      for (int t = 0; t < RUN; ++t)
        for (int u = 0; u < N; ++u)
          for (int i = 0; i < V; ++i)
            sums[u][i] += load(&shared.scores[b * RUN + t][i * LANES]) * shared.values[b][t * D + d + u];
    for (int u = 0; u < N; ++u)
      for (int i = 0; i < V; ++i) store(&output[d + u][i * LANES], sums[u][i]);
  }
};

}  // namespace
