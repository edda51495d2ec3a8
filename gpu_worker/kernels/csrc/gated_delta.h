// The gated delta rule, with a decay for each head or for each channel of its keys: for a state S [K, V] of a head,
// S = decay S + k (beta (v - k decay S)) and out = q S.
#pragma once
#include "state_runs.h"

extern "C" {

struct DeltaArgs {
  const void *query, *key, *value;            // rows of [HK, K], [HK, K] and [H, V]
  const float *decay, *beta;                  // [T, H] logarithms, or [T, H, K] of each channel; [T, H]
  float* states;                              // [slots, H, K, V]
  void* out;                                  // [T, H, V]
  StateRuns runs;
  int64_t num_heads, num_key_heads, key_size, value_size, key_stride, value_stride;  // of rows
  int32_t by_channel, is_bf16, num_threads;
};

}  // extern "C"

namespace {

// What a token needs of its head: keys and queries of unit length, the query scaled, and both times the decay.
struct DeltaToken {
  float key[MOST], decay[MOST], decayed_key[MOST], decayed_query[MOST];
  float product, beta;  // of key and query
};

template <class T>
float inverse_length(const T* x, int64_t n) {
  Vec squares = {};
  for (int64_t i = 0; i < n; i += LANES) {
    const Vec v = load(x + i, n - i);
    squares = fused(v, v, squares);
  }
  return 1.f / std::sqrt(sum(squares) + 1e-6f);
}

template <class T>
void prepare(const DeltaArgs& a, int64_t row, int64_t head, DeltaToken& token) {
  const int64_t K = a.key_size, H = a.num_heads, at = row * a.key_stride + head / (H / a.num_key_heads) * K;
  const T *k = (const T*)a.key + at, *q = (const T*)a.query + at;
  const float key_scale = inverse_length(k, K), query_scale = inverse_length(q, K) / std::sqrt((float)K);
  const float of_head = a.by_channel ? 0.f : std::exp(a.decay[row * H + head]);
  Vec product = {};
  for (int64_t i = 0; i < K; i += LANES) {
    const int64_t n = K - i;
    const Vec key = load(k + i, n) * key_scale, query = load(q + i, n) * query_scale;
    product = fused(key, query, product);
    const Vec decay = a.by_channel ? exponential(load(a.decay + (row * H + head) * K + i, n)) : splat(of_head);
    store(token.key + i, key, n);
    store(token.decay + i, decay, n);
    store(token.decayed_key + i, key * decay, n);
    store(token.decayed_query + i, query * decay, n);
  }
  token.product = sum(product);
  token.beta = a.beta[row * H + head];
}

// Whole registers, or (N = 1) the first `width` lanes of one.
template <int N>
inline Vec load_part(const float* p, int v, int64_t width) {
  if constexpr (N == 1) return load(p, width);
  return load(p + v * LANES);
}

template <int N>
inline void store_part(float* p, int v, Vec x, int64_t width) {
  if constexpr (N == 1) return store(p, x, width);
  store(p + v * LANES, x);
}

// Adds up what a token reads of columns of the state. If the token before is not yet in it (`last`), that is written on
// the way: so a scan loads and stores the state once for each token.
template <int N, bool HAS_LAST>
inline void read_state(const StateRows& s, int64_t K, int64_t V, int64_t width, const DeltaToken& last,
                       const Vec* delta, const DeltaToken& now, Vec* memory, Vec* result) {
  Vec sums[N] = {}, results[N] = {}, added[N];  // of this function: the state's stores could change those of the caller
  for (int v = 0; v < N; ++v) added[v] = delta[v];
  for (int64_t i = 0; i < K; ++i) {
    const Vec key = splat(now.decayed_key[i]), query = splat(now.decayed_query[i]);
    const Vec last_key = splat(last.key[i]), decay = splat(last.decay[i]);
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      Vec x = load_part<N>(s.from + i * s.from_stride, v, width);
      if constexpr (HAS_LAST) {
        x = fused(last_key, added[v], x * decay);
        store_part<N>(s.to + i * V, v, x, width);
      }
      sums[v] = fused(key, x, sums[v]);
      results[v] = fused(query, x, results[v]);
    }
  }
  for (int v = 0; v < N; ++v) memory[v] = sums[v], result[v] = results[v];
}

template <int N>
inline void write_state(const StateRows& s, int64_t K, int64_t V, int64_t width, const DeltaToken& last,
                        const Vec* delta) {
  Vec added[N];
  for (int v = 0; v < N; ++v) added[v] = delta[v];
  for (int64_t i = 0; i < K; ++i) {
    const Vec key = splat(last.key[i]), decay = splat(last.decay[i]);
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      const Vec x = load_part<N>(s.from + i * s.from_stride, v, width) * decay;
      store_part<N>(s.to + i * V, v, fused(key, added[v], x), width);
    }
  }
}

// The columns [first, first + width) of a head's state, of N registers.
template <int N, class T>
void delta_columns(const DeltaArgs& a, const Chain& chain, int64_t head, int64_t first, int64_t width) {
  const int64_t K = a.key_size, V = a.value_size, H = a.num_heads;
  DeltaToken tokens[2];
  Vec delta[N] = {}, memory[N], result[N];
  const auto columns = [&](int32_t slot) { return a.states + ((int64_t)slot * H + head) * K * V + first; };
  for (int32_t run = chain.first; run <= chain.last; ++run) {
    const bool is_new = a.runs.read[run] < 0;
    float* to = columns(a.runs.written[run]);
    StateRows rows = {is_new ? ZEROS : columns(a.runs.read[run]), is_new ? 0 : V, to};
    const int32_t start = a.runs.starts[run], end = a.runs.starts[run + 1];
    if (!is_new && first + width < V)  // in time for the columns that are next
      for (int64_t i = 0; i < K; ++i)
        for (int64_t v = 0; v < N * LANES; v += 16) __builtin_prefetch(rows.from + i * V + N * LANES + v);
    for (int32_t t = start; t < end; ++t) {
      DeltaToken &now = tokens[t & 1], &last = tokens[~t & 1];
      prepare<T>(a, t, head, now);
      if (t == start) {
        read_state<N, false>(rows, K, V, width, now, delta, now, memory, result);
      } else {
        read_state<N, true>(rows, K, V, width, last, delta, now, memory, result);
        rows = {to, V, to};
      }
      const T* value = (const T*)a.value + t * a.value_stride + head * V + first;
      T* out = (T*)a.out + (t * H + head) * V + first;
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) {
        const int64_t n = N == 1 ? width : LANES;
        delta[v] = (load(value + v * LANES, n) - memory[v]) * now.beta;
        store(out + v * LANES, fused(splat(now.product), delta[v], result[v]), n);
      }
    }
    write_state<N>(rows, K, V, width, tokens[(end - 1) & 1], delta);
  }
}

#ifdef __AVX512F__
constexpr int WIDE = 4;  // registers of columns that tokens pass through together: 64 x 128 floats stay in the L1 cache
#else
constexpr int WIDE = 2;
#endif

template <class T>
void delta_head(const DeltaArgs& a, const Chain& chain, int64_t head) {
  const int64_t V = a.value_size;
  int64_t first = 0;
  // Whole rows of a state that comes from memory for a single token: one long stream is read ahead, pieces are not.
  if (a.runs.starts[chain.last + 1] - a.runs.starts[chain.first] == 1)
    for (; first + 8 * LANES <= V; first += 8 * LANES) delta_columns<8, T>(a, chain, head, first, 8 * LANES);
  for (; first + WIDE * LANES <= V; first += WIDE * LANES) delta_columns<WIDE, T>(a, chain, head, first, WIDE * LANES);
  for (; first < V; first += LANES) delta_columns<1, T>(a, chain, head, first, std::min<int64_t>(LANES, V - first));
}

template <class T>
void gate_decays(const T* a, const T* b, const float* rates, const float* bias, float* decay, float* beta,
                 int64_t rows, int64_t heads, int64_t stride) {
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t h = 0; h < heads; ++h) {
      decay[t * heads + h] = rates[h] * log_1p_exp(value_of(a + t * stride + h) + bias[h]);
      beta[t * heads + h] = 1.f / (1.f + std::exp(-value_of(b + t * stride + h)));
    }
}

}  // namespace
