// Gathers the arrays of a step from the persistent batch, and appends greedily drawn tokens to it. In numpy each takes
// many calls, whose code a model's weights have pushed out of the caches since the last step.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "parallel.h"
#include "vec.h"

extern "C" {

struct GatherArgs {
  // Of the batch, by row: token ids, how many tokens are computed and known, block ids and how many there are.
  const int32_t* tokens;
  const int64_t *computed, *known;
  const int32_t* tables;
  const int64_t* num_blocks;
  // Of the step, by request: its row, and how many of its tokens the step computes.
  const int64_t *rows, *lengths;
  // Written, as StepInputs holds them; the first `width` columns of block tables as wide as those of the batch.
  int64_t *token_ids, *positions, *slots;
  int32_t *query_starts, *seq_lens, *block_tables;
  int64_t* sampled;
  int64_t num_requests, tokens_stride, tables_stride, block_size;
  int64_t num_tokens, num_sampled, width;  // written
};

struct BestArgs {
  // Of the batch, by row: token ids, and how many are known.
  int32_t* tokens;
  int64_t* known;
  int64_t* best;  // written, by request
  // Of the step, by request: its logits, so many floats apart, and its row.
  const float* logits;
  const int64_t* rows;
  int64_t num_requests, tokens_stride, logits_stride, vocab;
  int32_t num_threads;
};

}  // extern "C"

namespace {

constexpr int64_t STRETCH = 1024;    // numbers that are searched again for the place of their largest one
constexpr int64_t FEW = 128 * 1024;  // numbers that one thread compares in the time that sharing them takes
constexpr int CHAINS = 4;            // registers, because a comparison takes 4 cycles

// Whether a lane is not zero.
bool any(VecInt x) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
  return fold(x, [](VecInt a, VecInt b) { return a | b; });
#endif
}

// The place of the largest of n numbers, of equal ones the first; -1 if one of them is NaN or the largest is infinite.
int64_t place_of_largest(const float* x, int64_t n) {
  float top = -INFINITY;
  int64_t where = 0;
  VecInt is_nan = {};
  for (int64_t begin = 0; begin < n; begin += STRETCH) {
    const int64_t end = std::min(n, begin + STRETCH);
    Vec tops[CHAINS];
    std::fill_n(tops, CHAINS, splat(-INFINITY));
    int64_t i = begin;
    for (; i + CHAINS * LANES <= end; i += CHAINS * LANES)
#pragma GCC unroll 4
      for (int chain = 0; chain < CHAINS; ++chain) {
        const Vec each = load(x + i + chain * LANES);
        is_nan |= each != each;
        tops[chain] = maximum(each, tops[chain]);
      }
    float found = largest(maximum(maximum(tops[0], tops[1]), maximum(tops[2], tops[3])));
    for (; i < end; ++i) {
      is_nan[0] |= x[i] != x[i];
      found = std::max(found, x[i]);
    }
    if (found > top) top = found, where = begin;
  }
  if (any(is_nan) || !std::isfinite(top)) return -1;
  while (where + LANES <= n && !any(load(x + where) == top)) where += LANES;
  while (x[where] != top) ++where;
  return where;
}

}  // namespace

extern "C" void gather(GatherArgs* args) {
  GatherArgs& a = *args;
  a.num_tokens = a.num_sampled = a.width = 0;
  for (int64_t r = 0; r < a.num_requests; ++r) a.width = std::max(a.width, a.num_blocks[a.rows[r]]);
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const int64_t row = a.rows[r], start = a.computed[row], end = start + a.lengths[r];
    const int32_t *table = a.tables + row * a.tables_stride, *tokens = a.tokens + row * a.tokens_stride;
    a.query_starts[r] = a.num_tokens;
    a.seq_lens[r] = end;
    memcpy(a.block_tables + r * a.tables_stride, table, a.width * sizeof *table);
    for (int64_t p = start; p < end; ++p, ++a.num_tokens) {
      a.token_ids[a.num_tokens] = tokens[p];
      a.positions[a.num_tokens] = p;
      a.slots[a.num_tokens] = (int64_t)table[p / a.block_size] * a.block_size + p % a.block_size;
    }
    if (end >= a.known[row]) a.sampled[a.num_sampled++] = r;
  }
  a.query_starts[a.num_requests] = a.num_tokens;
}

// Appends to each row the token of its largest logit, unless the row is full. Returns 0, and appends nothing, if one of
// the logits is NaN or a largest one infinite.
extern "C" int32_t append_best(BestArgs* args) {
  BestArgs& a = *args;
  for_pieces(a.num_requests, a.num_requests * a.vocab < FEW ? 1 : a.num_threads,
             [&](int64_t r) { a.best[r] = place_of_largest(a.logits + r * a.logits_stride, a.vocab); });
  if (std::any_of(a.best, a.best + a.num_requests, [](int64_t token) { return token < 0; })) return 0;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    int64_t& known = a.known[a.rows[r]];
    if (known < a.tokens_stride) a.tokens[a.rows[r] * a.tokens_stride + known++] = a.best[r];
  }
  return 1;
}
