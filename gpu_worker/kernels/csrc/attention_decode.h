// One token: its G query heads of a KV head over positions [begin, end), the head's elements in lanes.
#pragma once
#include <algorithm>
#include <cmath>

#include "attention.h"

namespace {

// Rows whose sums are in lanes that differ by n in their number: each lane adds that of its partner.
inline Vec pair_sums(Vec first, Vec second, int n) {
  const VecInt lanes = lane_numbers(), of_second = (lanes & n) != 0;
  const Vec partners = __builtin_shuffle(first, second, of_second ? lanes + (LANES - n) : lanes + n);
  return (of_second ? second : first) + partners;
}

// Lane t of the result is the sum of rows[t].
inline Vec sum_rows(Vec* rows) {
#pragma GCC unroll 4
  for (int n = LANES / 2; n; n /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) rows[i] = pair_sums(rows[i], rows[i + n], n);
  return rows[0];
}

// A step of the online softmax: scores in `vecs` vectors become weights relative to the largest score so far, `top`, and
// join their sum, `weights`. Returns the factor by which everything that was summed before shrinks.
inline float soften(float* scores, int vecs, float& top, float& weights) {
  Vec best = load(scores);
  for (int i = 1; i < vecs; ++i) best = maximum(best, load(scores + i * LANES));
  const float now = std::max(top, largest(best)), shrink = std::exp(top - now);
  Vec total = {};
  for (int i = 0; i < vecs; ++i) {
    const Vec e = exponential(load(scores + i * LANES) - now);
    total += e;
    store(scores + i * LANES, e);
  }
  top = now;
  weights = weights * shrink + sum(total);
  return shrink;
}

constexpr int SPAN = 64;  // positions between two looks at the largest score

template <class T, int G>
void decode(const Args& a, const int32_t* table, int head, const T* query, int begin, int end, int visible,
            const Target<T>* targets) {
  Vec q[G][VECS], o[G][VECS] = {};
  float top[G], weights[G] = {};
  for (int g = 0; g < G; ++g) {
    top[g] = LOWEST;
    for (int i = 0; i < VECS; ++i) q[g][i] = load(query + g * D + i * LANES) * a.scale;
  }
  const VecInt lanes = lane_numbers();
  alignas(64) float scores[G][SPAN];
  for (int start = begin; start < end; start += SPAN) {
    const int count = std::min(SPAN, end - start), vecs = (count + LANES - 1) / LANES;
    for (int c = 0; c < count; c += LANES) {
      const T* keys = kv_row<T>(a, a.key, table, head, start + c);
      const T* values = (const T*)a.value + (keys - (const T*)a.key);
      const int n = std::min(LANES, count - c);
      Vec rows[G][LANES];
      for (int t = 0; t < n; ++t) {
        prefetch(values + t * D, D * sizeof(T));
        Vec even[G] = {}, odd[G] = {};
        for (int i = 0; i < VECS; ++i) {
          const Vec x = load(keys + t * D + i * LANES);
          for (int g = 0; g < G; ++g) (i & 1 ? odd : even)[g] += x * q[g][i];
        }
        for (int g = 0; g < G; ++g) rows[g][t] = even[g] + odd[g];
      }
      const VecInt positions = lanes + (start + c);
      for (int g = 0; g < G; ++g) {
        for (int t = n; t < LANES; ++t) rows[g][t] = Vec{};
        const Vec s = limited(a, sum_rows(rows[g]));
        store(&scores[g][c], (positions >= visible) & (positions < end) ? s : splat(LOWEST));
      }
    }
    for (int g = 0; g < G; ++g) {
      const float shrink = soften(scores[g], vecs, top[g], weights[g]);
      for (int i = 0; i < VECS; ++i) o[g][i] *= shrink;
    }
    for (int c = 0; c < count; c += LANES) {
      const T* values = kv_row<T>(a, a.value, table, head, start + c);
      const int n = std::min(LANES, count - c), next = start + SPAN + c;
      const T* ahead = next < end ? kv_row<T>(a, a.key, table, head, next) : values;
      for (int t = 0; t < n; ++t) {
        prefetch(ahead + t * D, D * sizeof(T));
        for (int i = 0; i < VECS; ++i) {
          const Vec x = load(values + t * D + i * LANES);
          for (int g = 0; g < G; ++g) o[g][i] += x * scores[g][c + t];
        }
      }
    }
  }
  for (int g = 0; g < G; ++g) targets[g].write(o[g], top[g], weights[g]);
}

}  // namespace
