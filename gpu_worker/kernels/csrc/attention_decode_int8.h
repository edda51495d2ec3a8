// One token, as in attention_decode.h, over keys and values in 8 bits: their scales are multiplied with the scores and
// the weights, of which a row has one each, so that the numbers are only widened.
#pragma once
#include <algorithm>
#include <cmath>

#include "attention_decode.h"

#ifdef KV_INT8
namespace {

template <class T, int G>
class Int8Decode {
 public:
  Int8Decode(const Args& args, const int32_t* blocks, int kv_head, const T* query, int begin_, int end_, int visible_)
      : a(args), table(blocks), head(kv_head), begin(begin_), end(end_), visible(visible_) {
    for (int g = 0; g < G; ++g) {
      top[g] = LOWEST;
      for (int i = 0; i < VECS; ++i) q[g][i] = load(query + g * D + i * LANES) * a.scale;
    }
  }

  void run(const Target<T>* targets) {
    for (int start = begin; start < end; start += SPAN) {
      const int count = std::min(SPAN, end - start);
      for (int c = 0; c < count; c += LANES) score(start + c, c, std::min(LANES, count - c));
      weigh((count + LANES - 1) / LANES);
      add_values(start, count);
    }
    for (int g = 0; g < G; ++g) targets[g].write(o[g], top[g], weights[g]);
  }

 private:
  static constexpr int at_once() {  // the largest divisor of VECS whose sums leave registers for what they are made of
    int n = std::max(1, SUMS / G);
    while (VECS % n) --n;
    return n;
  }
  static constexpr int SUMS = LANES == 16 ? 16 : 8, AT_ONCE = at_once();
  const Args& a;
  const int32_t* table;
  const int head, begin, end, visible;
  Vec q[G][VECS], o[G][VECS] = {};
  float top[G], weights[G] = {};
  alignas(64) float scores[G][SPAN];

  // Scores of n positions from `position` on into column c on.
  void score(int position, int c, int n) {
    const Int8Rows keys = int8_rows(a, a.key, table, head, position);
    const Int8Rows values = int8_rows(a, a.value, table, head, position);
    prefetch(values.scales, LANES * sizeof(float));
    Vec rows[G][LANES];
    for (int t = 0; t < n; ++t) {
      prefetch(values.numbers + t * D, D);
      Vec even[G] = {}, odd[G] = {};
      for (int i = 0; i < VECS; ++i) {
        const Vec x = load(keys.numbers + t * D + i * LANES);
        for (int g = 0; g < G; ++g) (i & 1 ? odd : even)[g] += x * q[g][i];
      }
      for (int g = 0; g < G; ++g) rows[g][t] = even[g] + odd[g];
    }
    const VecInt positions = lane_numbers() + position;
    const Vec scales = load(keys.scales);  // behind the end the block goes on: what is there is not seen
    for (int g = 0; g < G; ++g) {
      for (int t = n; t < LANES; ++t) rows[g][t] = Vec{};
      const Vec s = limited(a, sum_rows(rows[g]) * scales);
      store(&scores[g][c], (positions >= visible) & (positions < end) ? s : splat(LOWEST));
    }
  }

  // Scores become the softmax's weights; what was summed so far shrinks as the largest score grows.
  void weigh(int vecs) {
    for (int g = 0; g < G; ++g) {
      const float shrink = soften(scores[g], vecs, top[g], weights[g]);
      for (int i = 0; i < VECS; ++i) o[g][i] *= shrink;
    }
  }

  // A few vectors of the sums at a time, which stay in registers over all positions.
  void add_values(int start, int count) {
    const int8_t *numbers[SPAN / RUN], *ahead[SPAN / RUN];  // ahead: keys to fetch meanwhile
    for (int c = 0; c < count; c += RUN) {
      const Int8Rows rows = int8_rows(a, a.value, table, head, start + c);
      const Int8Rows next = start + SPAN + c < end ? int8_rows(a, a.key, table, head, start + SPAN + c) : rows;
      prefetch(next.scales, RUN * sizeof(float));
      numbers[c / RUN] = rows.numbers;
      ahead[c / RUN] = next.numbers;
      // Scales go to the weights, one for each position, and not to the values: a vector of weights takes one
      // multiplication where the elements would take one each.
      for (int t = 0; t < RUN; t += LANES)
        for (int g = 0; g < G; ++g) store(&scores[g][c + t], load(&scores[g][c + t]) * load(rows.scales + t));
    }
    for (int first = 0; first < VECS; first += AT_ONCE) {
      Vec sums[G][AT_ONCE];
      for (int g = 0; g < G; ++g)
        for (int i = 0; i < AT_ONCE; ++i) sums[g][i] = o[g][first + i];
      for (int c = 0; c < count; c += RUN) {
        const int8_t* row = numbers[c / RUN] + first * LANES;
        const int n = std::min(RUN, count - c);
        prefetch(ahead[c / RUN] + first * LANES * RUN, AT_ONCE * LANES * RUN);
        for (int t = 0; t < n; ++t, row += D)
          for (int i = 0; i < AT_ONCE; ++i) {
            const Vec x = load(row + i * LANES);
            for (int g = 0; g < G; ++g) sums[g][i] += x * scores[g][c + t];
          }
      }
      for (int g = 0; g < G; ++g)
        for (int i = 0; i < AT_ONCE; ++i) o[g][first + i] = sums[g][i];
    }
  }
};

template <class T, int G>
void decode_int8(const Args& a, const int32_t* table, int head, const T* query, int begin, int end, int visible,
                 const Target<T>* targets) {
  Int8Decode<T, G>(a, table, head, query, begin, end, visible).run(targets);
}

}  // namespace
#endif
