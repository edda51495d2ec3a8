// The runs of tokens of a step that layers with a state compute, and the arithmetic that is the same in each.
//
// A run reads one slot of states and writes one, which may be the same. Its tokens are computed one after the other, so
// that a result depends on nothing but the tokens before it: it has the same bits however a prompt is cut, in any batch,
// with any number of threads. Runs that go on where the run before them ended, as those around a snapshot, form a
// chain, whose pieces are its heads, or stretches of its channels.
#pragma once
#include <cmath>
#include <vector>

#include "parallel.h"
#include "vec.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

extern "C" {

struct StateRuns {
  const int32_t *read, *written;  // [num_runs]: slots; read -1: the run begins from zero
  const int32_t* starts;          // [num_runs + 1]: where the runs' tokens begin
  int64_t num_runs;
};

}  // extern "C"

namespace {

constexpr int64_t SMALL_STATES = 1 << 15;  // elements that one thread handles sooner than others wake up
constexpr int64_t MOST = 512;              // elements of a row of a state, or of a key
constexpr float ZEROS[MOST] = {};

// a * b + c. Spelled out: where the compiler fuses, it could choose another product in another loop.
inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

float log_1p_exp(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }

float value_of(const float* p) { return *p; }
float value_of(const BF16* p) { return as_float((int32_t)((uint32_t)p->bits << 16)); }

template <class T>
Vec rounded(Vec x) {
  T kept[LANES];
  store(kept, x);
  return load(kept);
}

// Where a token finds the state, and where it leaves it. A stride of 0: a row of zeros in the place of all rows.
struct StateRows {
  const float* from;
  int64_t from_stride;
  float* to;
};

struct Chain {
  int32_t first, last;  // runs
};

// The longest first: a thread that begins with it last would let the others wait.
std::vector<Chain> chains_of(const StateRuns& runs) {
  std::vector<Chain> chains;
  for (int32_t run = 0; run < runs.num_runs; ++run) {
    const bool goes_on = run && runs.read[run] >= 0 && runs.read[run] == runs.written[run - 1];
    goes_on ? void(chains.back().last = run) : chains.push_back({run, run});
  }
  const auto tokens = [&](const Chain& c) { return runs.starts[c.last + 1] - runs.starts[c.first]; };
  std::stable_sort(chains.begin(), chains.end(), [&](const Chain& x, const Chain& y) { return tokens(x) > tokens(y); });
  return chains;
}

// Calls work(chain, part) for each part of each chain. `elements`: of the states of one slot.
template <class Args, class F>
void for_chains(const Args& a, int64_t parts, int64_t elements, F&& work) {
  const std::vector<Chain> chains = chains_of(a.runs);
  const int threads = a.runs.starts[a.runs.num_runs] * elements > SMALL_STATES ? a.num_threads : 1;
  for_pieces(chains.size() * parts, threads, [&](int64_t i) { work(chains[i / parts], i % parts); });
}

}  // namespace
