// Mamba-2: S = decay S + dt x b, out = S c + d x, for a state S [P, N] of a head, with decay = exp(dt a).
#pragma once
#include "state_runs.h"

extern "C" {

struct Mamba2Args {
  const void *x, *b, *c, *dt;                 // rows of [H, P], [G, N], [G, N] and [H]
  const float *a, *d, *dt_bias;               // [H] each; a: negative
  float* states;                              // [slots, H, P, N]
  void* out;                                  // [T, H, P]
  StateRuns runs;
  int64_t num_heads, num_groups, head_size, state_size, row_stride, dt_stride;  // row_stride: of x, b, c
  float least_dt, most_dt;
  int32_t is_bf16, num_threads;
};

}  // extern "C"

namespace {

// The sum of each of as many vectors as lanes, each in the same order.
inline Vec sum_each(Vec* rows) {
  const VecInt lanes = lane_numbers();
#pragma GCC unroll 4
  for (int n = LANES / 2; n; n /= 2) {
    const VecInt near = (lanes & n) != 0 ? lanes + (LANES - n) : lanes;
    const VecInt far = (lanes & n) != 0 ? lanes + LANES : lanes + n;
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) {
      const Vec a = rows[i], b = rows[i + n];
      rows[i] = __builtin_shuffle(a, b, near) + __builtin_shuffle(a, b, far);
    }
  }
  return rows[0];
}

// N rows of the state: read, changed, written, and multiplied by c into `sums`.
template <int N, class T>
inline void mamba2_rows(const StateRows& s, int64_t size, float decay, const float* inputs, const T* b, const T* c,
                        Vec* sums) {
  const float* from = s.from;
  float* to = s.to;
  const int64_t stride = s.from_stride, whole = size / LANES * LANES;
  Vec total[N] = {}, in[N];  // of this function: the state's stores could change those of the caller
  for (int r = 0; r < N; ++r) in[r] = splat(inputs[r]);
  const Vec kept = splat(decay);
  for (int64_t j = 0; j < whole; j += LANES) {
    const Vec input = load(b + j), output = load(c + j);
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      const Vec x = fused(in[r], input, load(from + r * stride + j) * kept);
      store(to + r * size + j, x);
      total[r] = fused(x, output, total[r]);
    }
  }
  if (const int64_t n = size - whole) {
    const Vec input = load(b + whole, n), output = load(c + whole, n);
    for (int r = 0; r < N; ++r) {
      const Vec x = fused(in[r], input, load(from + r * stride + whole, n) * kept);
      store(to + r * size + whole, x, n);
      total[r] = fused(x, output, total[r]);
    }
  }
  for (int r = 0; r < N; ++r) sums[r] = total[r];
}

// One token in up to LANES rows of a head's state, from row `first` on. `is_far`: the state is in no cache near.
template <class T>
void mamba2_token(const Mamba2Args& a, int64_t t, int64_t head, int64_t first, StateRows s, float dt, float decay,
                  bool is_far) {
  const int64_t P = a.head_size, N = a.state_size, group = head / (a.num_heads / a.num_groups);
  const int64_t count = std::min<int64_t>(LANES, P - first), at = t * a.row_stride;
  const T *b = (const T*)a.b + at + group * N, *c = (const T*)a.c + at + group * N;
  const Vec x = load((const T*)a.x + at + head * P + first, count);
  float inputs[LANES];
  Vec sums[LANES] = {};
  store(inputs, x * dt);
  int64_t r = 0;
  // Row by row where the state comes from memory: one long stream is read ahead, four short ones are not.
  for (; !is_far && r + 4 <= count; r += 4, s.from += 4 * s.from_stride, s.to += 4 * N)
    mamba2_rows<4>(s, N, decay, inputs + r, b, c, sums + r);
  for (; r < count; ++r, s.from += s.from_stride, s.to += N)
    mamba2_rows<1>(s, N, decay, inputs + r, b, c, sums + r);
  store((T*)a.out + (t * a.num_heads + head) * P + first, fused(splat(a.d[head]), x, sum_each(sums)), count);
}

template <class T>
void mamba2_head(const Mamba2Args& a, const Chain& chain, int64_t head) {
  const int64_t P = a.head_size, N = a.state_size, H = a.num_heads, start = a.runs.starts[chain.first];
  static thread_local std::vector<float> steps;  // of each token: dt, and what is left of the state
  steps.resize(2 * (a.runs.starts[chain.last + 1] - start));
  for (size_t i = 0; i < steps.size(); i += 2) {
    const T* dt = (const T*)a.dt + (start + i / 2) * a.dt_stride + head;
    steps[i] = std::min(a.most_dt, std::max(a.least_dt, log_1p_exp(value_of(dt) + a.dt_bias[head])));
    steps[i + 1] = std::exp(steps[i] * a.a[head]);
  }
  for (int64_t first = 0; first < P; first += LANES) {
    const auto rows_of = [&](int32_t slot) { return a.states + (((int64_t)slot * H + head) * P + first) * N; };
    for (int32_t run = chain.first; run <= chain.last; ++run) {
      const bool is_new = a.runs.read[run] < 0;
      float* to = rows_of(a.runs.written[run]);
      StateRows rows = {is_new ? ZEROS : rows_of(a.runs.read[run]), is_new ? 0 : N, to};
      for (int64_t t = a.runs.starts[run]; t < a.runs.starts[run + 1]; ++t, rows = {to, N, to})
        mamba2_token<T>(a, t, head, first, rows, steps[2 * (t - start)], steps[2 * (t - start) + 1],
                        t == a.runs.starts[run]);
    }
  }
}

}  // namespace
