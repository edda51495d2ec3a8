// Many rows (a query head of a token each) over positions [begin, end): rows in lanes, keys and values broadcast.
#pragma once
#include <algorithm>

#include "attention.h"

namespace {

constexpr int MAX_ROWS = 32, TILE = 32;  // rows and positions of one tile
#ifdef __AVX512F__
constexpr int UNROLL = 8;  // keys, or elements of values, that share a load of the rows: as many as registers hold
#else
constexpr int UNROLL = 4;
#endif

template <class T, int V>
void tile(const Args& a, const int32_t* table, int head, const Row<T>* rows, int num_rows, int begin, int end) {
  constexpr int R = V * LANES;
  alignas(64) float q[D][R] = {}, o[D][R] = {}, p[TILE][R], k[TILE][D], v[TILE][D];
  VecInt last[V] = {};
  Vec top[V], weights[V] = {};
  for (int i = 0; i < V; ++i) top[i] = splat(LOWEST);
  for (int r = 0; r < R; ++r) last[r / LANES][r % LANES] = rows[std::min(r, num_rows - 1)].last;
  for (int r = 0; r < num_rows; ++r)
    for (int i = 0; i < VECS; ++i) {
      const Vec x = load(rows[r].query + i * LANES) * a.scale;
      for (int e = 0; e < LANES; ++e) q[i * LANES + e][r] = x[e];
    }
  for (int start = begin; start < end; start += TILE) {
    const int count = std::min(TILE, end - start);
    for (int t = 0; t < count; ++t) {
      const T* keys = kv_row<T>(a, a.key, table, head, start + t);
      const T* values = (const T*)a.value + (keys - (const T*)a.key);
      for (int i = 0; i < VECS; ++i) {
        store(&k[t][i * LANES], load(keys + i * LANES));
        store(&v[t][i * LANES], load(values + i * LANES));
      }
    }
    if (count < TILE) {
      memset(k[count], 0, (TILE - count) * D * sizeof(float));
      memset(v[count], 0, (TILE - count) * D * sizeof(float));
    }
    Vec now[V];
    for (int i = 0; i < V; ++i) now[i] = top[i];
    for (int t = 0; t < TILE; t += UNROLL) {
      Vec score[UNROLL][V] = {};
      for (int d = 0; d < D; ++d)
        for (int u = 0; u < UNROLL; ++u)
          for (int i = 0; i < V; ++i) score[u][i] += load(&q[d][i * LANES]) * k[t + u][d];
      for (int u = 0; u < UNROLL; ++u) {
        const int position = start + t + u;
        for (int i = 0; i < V; ++i) {
          VecInt seen = last[i] >= position;
          if (a.window) seen &= last[i] - (int)a.window < position;
          if (position >= end) seen = VecInt{};
          const Vec x = seen ? score[u][i] : splat(LOWEST);
          now[i] = maximum(now[i], x);
          store(&p[t + u][i * LANES], x);
        }
      }
    }
    Vec shrink[V];
    for (int i = 0; i < V; ++i) {
      shrink[i] = exponential(top[i] - now[i]);
      top[i] = now[i];
      Vec total = {};
      for (int t = 0; t < TILE; ++t) {
        const Vec e = exponential(load(&p[t][i * LANES]) - now[i]);
        total += e;
        store(&p[t][i * LANES], e);
      }
      weights[i] = weights[i] * shrink[i] + total;
    }
    for (int d = 0; d < D; d += UNROLL) {
      Vec sums[UNROLL][V];
      for (int u = 0; u < UNROLL; ++u)
        for (int i = 0; i < V; ++i) sums[u][i] = load(&o[d + u][i * LANES]) * shrink[i];
      for (int t = 0; t < TILE; ++t)
        for (int u = 0; u < UNROLL; ++u)
          for (int i = 0; i < V; ++i) sums[u][i] += load(&p[t][i * LANES]) * v[t][d + u];
      for (int u = 0; u < UNROLL; ++u)
        for (int i = 0; i < V; ++i) store(&o[d + u][i * LANES], sums[u][i]);
    }
  }
  for (int r = 0; r < num_rows; ++r) {
    Vec row[VECS] = {};
    for (int i = 0; i < VECS; ++i)
      for (int e = 0; e < LANES; ++e) row[i][e] = o[i * LANES + e][r];
    rows[r].target.write(row, top[r / LANES][r % LANES], weights[r / LANES][r % LANES]);
  }
}

}  // namespace
