// Draws the next token of every row from its logits and appends it to the persistent batch, by the rule of sampler.py.
// In numpy that takes a dozen calls for each row, whose code a model's weights have pushed out of the caches since the
// last step.
//
// A random row keeps its allowed tokens in the order of their ids, with weights that are integers and the same as those of
// numpy, and so the tokens are.

// A product and a sum in one rounding would make other weights than numpy's.
#pragma GCC optimize("fp-contract=off")

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "parallel.h"
#include "vec.h"

extern "C" {

// Of a request; top-k of 0, top-p of 1 and min-p of 0 leave all tokens.
struct DrawParams {
  double temperature, top_p, min_p;
  int64_t top_k;
  uint64_t seed;
};

struct DrawArgs {
  // Of the batch, by row: token ids, how many are known, and how many of them are the prompt.
  int32_t* tokens;
  int64_t* known;
  const int64_t* prompts;
  // Of the step, by request: its row and parameters; none if all take the token of the largest logit.
  const int64_t* rows;
  const DrawParams* params;
  // By token to draw: the place of its request in the step, and its logits, so many floats apart.
  const int64_t* places;
  const float* logits;
  int64_t* drawn;  // written
  int64_t num_drawn, tokens_stride, logits_stride, vocab;
  int64_t num_rows, num_requests, most_drawn;  // of the batch, of the step, and of what is written
  int32_t num_threads;
};

}  // extern "C"

namespace {

constexpr int64_t STRETCH = 1024;    // numbers that are searched again for the place of their largest one
constexpr int64_t FEW = 128 * 1024;  // numbers that one thread compares in the time that sharing them takes
constexpr int CHAINS = 4;            // registers, because a comparison takes 4 cycles
constexpr int64_t GROUP = 64;        // numbers that have one sum; at most so many have one maximum
constexpr int WHOLE_BITS = 40;       // the largest weight is 2^40
constexpr int STEPS = 20;            // sampler.py explains these two and OCTAVE
constexpr float OCTAVE[] = {0x1p24f, -0x1.62e3dp3f, 0x1.ebe67p-19f, -0x1.c52116p-41f, 0x1.2e4806p-63f, -0x1.f376bap-87f};
// A nucleus needs an order only where it ends: by the bits of their exponents weights fall into 2,626 buckets, and one
// bucket is sorted instead of thousands of tokens.
constexpr int FRACTION = 6;                                            // bits behind the point that tell buckets apart
constexpr int64_t BUCKETS = (int64_t(WHOLE_BITS + 1) << FRACTION) + 2;  // of weights from 0 to 2^40

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

// Philox4x32-10, as philox.py has it for the purpose of a sample: in [0, 1), with 53 random bits.
double uniform(uint64_t seed, uint64_t index) {
  uint32_t x[4] = {(uint32_t)index, (uint32_t)(index >> 32), 0, 0}, k[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = (uint64_t)x[0] * 0xD2511F53, p1 = (uint64_t)x[2] * 0xCD9E8D57;
    x[0] = (uint32_t)(p1 >> 32) ^ x[1] ^ k[0], x[1] = (uint32_t)p1;
    x[2] = (uint32_t)(p0 >> 32) ^ x[3] ^ k[1], x[3] = (uint32_t)p0;
    k[0] += 0x9E3779B9, k[1] += 0xBB67AE85;
  }
  return (((uint64_t)x[1] << 32 | x[0]) >> 11) * 0x1p-53;
}

// What the distance of a logit from the largest one is multiplied by, for `weight`.
float rate_of(double temperature) {
  const double exact = 1.4426950408889634 * (1 << STEPS) / temperature;
  return std::min(std::max(exact, (double)FLT_MIN), (double)FLT_MAX);
}

// The weight of a logit so far below the largest one; see sampler.py, whose operations these are.
inline int64_t weight(float distance, float rate) {
  const float power = distance * rate, cut = (WHOLE_BITS + 1) << STEPS;
  const int32_t steps = power < cut ? power : cut;
  const float r = steps & ((1 << STEPS) - 1);
  float octave = OCTAVE[5] * r;
#pragma GCC unroll 4
  for (int i = 4; i > 0; --i) octave = (octave + OCTAVE[i]) * r;
  return ((int64_t)(int32_t)(octave + OCTAVE[0]) << 16) >> (steps >> STEPS);
}

// What is left of a row's tokens: ascending ids and their weights. Threads keep the memory for the next row.
struct Allowed {
  std::vector<int32_t> ids;  // empty if all tokens are left
  std::vector<int64_t> weights;
  std::vector<float> values;
  std::vector<int64_t> masses;
  std::vector<int32_t> order;

  // Lets the k largest of n logits be left, with 0 < k < n; of equal ones the first.
  void keep_largest(const float* x, int64_t n, int64_t k) {
    // A bound from the maxima of groups passes over nearly all of the vocabulary, before the exact k-th number is
    // searched among the rest.
    const float least = bound(x, n, k);
    ids.clear();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
      if (any(load(x + i) >= least))
        for (int64_t j = i; j < i + LANES; ++j)
          if (x[j] >= least) ids.push_back(j);
    for (; i < n; ++i)
      if (x[i] >= least) ids.push_back(i);
    values.clear();
    for (const int32_t id : ids) values.push_back(x[id]);
    std::nth_element(values.begin(), values.begin() + k - 1, values.end(), std::greater<float>());
    const float kth = values[k - 1];
    int64_t equal = k - std::count_if(values.begin(), values.end(), [&](float each) { return each > kth; });
    const auto is_late = [&](int32_t id) { return x[id] < kth || (x[id] == kth && equal-- <= 0); };
    ids.erase(std::remove_if(ids.begin(), ids.end(), is_late), ids.end());
  }

  // A number that at least k of n logits reach, and not many more: the k-th of the largest ones of disjoint groups.
  float bound(const float* x, int64_t n, int64_t k) {
    const int64_t members = std::clamp<int64_t>(n / (4 * k), 1, GROUP), groups = n / members;
    if (members == 1) return -INFINITY;
    values.assign(x, x + groups);
    float* most = values.data();
    for (int64_t i = 1; i < members; ++i)
      for (int64_t g = 0; g < groups; ++g) most[g] = std::max(most[g], x[i * groups + g]);
    std::nth_element(values.begin(), values.begin() + k - 1, values.end(), std::greater<float>());
    return most[k - 1];
  }

  // Keeps the tokens at these ascending places.
  void keep(const std::vector<int32_t>& places) {
    const bool had_all = ids.empty();
    if (had_all) ids.resize(places.size());
    for (size_t i = 0; i < places.size(); ++i) {
      ids[i] = had_all ? places[i] : ids[places[i]];
      weights[i] = weights[places[i]];
    }
    ids.resize(places.size());
    weights.resize(places.size());
  }

  void weigh(const float* x, int64_t n, float top, double temperature) {
    const int64_t count = ids.empty() ? n : ids.size();
    const float rate = rate_of(temperature);
    weights.resize(count);
    int64_t* out = weights.data();
    if (ids.empty())
      for (int64_t i = 0; i < count; ++i) out[i] = weight(top - x[i], rate);
    else
      for (int64_t i = 0; i < count; ++i) out[i] = weight(top - x[ids[i]], rate);
  }

  void keep_likely(double min_p) {
    const int64_t least = std::ceil(min_p * (int64_t(1) << WHOLE_BITS));
    order.clear();
    for (size_t i = 0; i < weights.size(); ++i)
      if (weights[i] >= least) order.push_back(i);
    keep(order);
  }

  // The shortest prefix, in the order of the logits, whose mass reaches the share `top_p` of the whole. They are sorted
  // only where it ends: among those whose weights share the highest bits.
  void keep_nucleus(const float* x, double top_p) {
    const int64_t whole = total();
    int64_t left = std::max<int64_t>(1, std::min<int64_t>(whole, std::ceil((double)whole * top_p)));
    masses.assign(BUCKETS, 0);
    for (const int64_t weight : weights) masses[bucket_of(weight)] += weight;
    int64_t last = BUCKETS - 1;
    while (masses[last] < left) left -= masses[last--];
    order.clear();
    for (size_t i = 0; i < weights.size(); ++i)
      if (bucket_of(weights[i]) == last) order.push_back(i);
    const auto is_before = [&](int32_t a, int32_t b) { return x[id(a)] > x[id(b)]; };
    std::stable_sort(order.begin(), order.end(), is_before);
    size_t count = 0;
    while (left > 0) left -= weights[order[count++]];
    const int32_t end = order[count - 1];
    order.clear();
    for (size_t i = 0; i < weights.size(); ++i)
      if (is_before(i, end) || (!is_before(end, i) && (int32_t)i <= end)) order.push_back(i);
    keep(order);
  }

  // A number in [0, BUCKETS) that grows with a weight, by the bits of its exponent and the first ones behind the point.
  static int64_t bucket_of(int64_t weight) {
    const double exact = weight;
    int64_t bits;
    memcpy(&bits, &exact, sizeof bits);
    return weight ? (bits >> (52 - FRACTION)) - (int64_t(1023) << FRACTION) + 1 : 0;
  }

  int64_t sum_of(size_t begin, size_t end) const {
    return std::accumulate(weights.begin() + begin, weights.begin() + end, int64_t(0));
  }

  int64_t total() const { return sum_of(0, weights.size()); }

  // The first token at which the running sum passes `u` of the whole.
  int64_t draw(double u) const {
    const int64_t whole = total(), target = std::min<int64_t>((double)whole * u, whole - 1);
    int64_t sum = 0;
    size_t begin = 0;
    for (int64_t group; sum + (group = sum_of(begin, std::min(begin + GROUP, weights.size()))) <= target; sum += group)
      begin += GROUP;
    while ((sum += weights[begin]) <= target) ++begin;
    return id(begin);
  }

  int64_t id(size_t place) const { return ids.empty() ? place : ids[place]; }
};

// Draws among the tokens that the parameters allow, after the largest logit was found to be finite.
int64_t draw_random(const float* x, int64_t n, float top, const DrawParams& params, int64_t index) {
  static thread_local Allowed allowed;
  allowed.ids.clear();
  if (params.top_k > 0 && params.top_k < n) allowed.keep_largest(x, n, params.top_k);
  allowed.weigh(x, n, top, params.temperature);
  if (params.min_p > 0.) allowed.keep_likely(params.min_p);
  if (params.top_p < 1.) allowed.keep_nucleus(x, params.top_p);
  return allowed.draw(uniform(params.seed, index));
}

}  // namespace

namespace {

// Whether every token to draw belongs to a request of the step and a row of the batch, whose numbers are possible.
bool are_within(const DrawArgs& a) {
  if ((uint64_t)a.num_drawn > (uint64_t)a.most_drawn || a.vocab < 1 || a.vocab > INT32_MAX || a.logits_stride < 0)
    return false;
  return std::all_of(a.places, a.places + a.num_drawn, [&](int64_t place) {
    if ((uint64_t)place >= (uint64_t)a.num_requests || (uint64_t)a.rows[place] >= (uint64_t)a.num_rows) return false;
    const int64_t row = a.rows[place];
    return a.prompts[row] >= 0 && a.known[row] >= a.prompts[row];
  });
}

}  // namespace

// Appends a token to each row, unless the row is full. Returns 0, and appends nothing, if one of the logits is NaN or a
// largest one infinite; and -1 for rows and places that are not there.
extern "C" int32_t append_drawn(DrawArgs* args) {
  DrawArgs& a = *args;
  if (!are_within(a)) return -1;
  const bool is_quick = !a.params && a.num_drawn * a.vocab < FEW;
  for_pieces(a.num_drawn, is_quick ? 1 : a.num_threads, [&](int64_t i) {
    const float* x = a.logits + i * a.logits_stride;
    const int64_t place = a.places[i], row = a.rows[place], best = place_of_largest(x, a.vocab);
    const bool is_greedy = best < 0 || !a.params || a.params[place].temperature == 0.;
    a.drawn[i] = is_greedy ? best : draw_random(x, a.vocab, x[best], a.params[place], a.known[row] - a.prompts[row]);
  });
  if (std::any_of(a.drawn, a.drawn + a.num_drawn, [](int64_t token) { return token < 0; })) return 0;
  for (int64_t i = 0; i < a.num_drawn; ++i) {
    const int64_t row = a.rows[a.places[i]];
    int64_t& known = a.known[row];
    if (known < a.tokens_stride) a.tokens[row * a.tokens_stride + known++] = a.drawn[i];
  }
  return 1;
}
