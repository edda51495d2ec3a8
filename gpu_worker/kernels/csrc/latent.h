// Attention of the heads of one token over compressed vectors [begin, end), which all heads share: the whole vector is
// the key, its first part the value. Build with -DWIDTH=n, the elements of a vector, and -DRANK=n, those of its value.
//
// For scores, heads are lanes and vectors are broadcast from where they lie. For outputs, elements are lanes and the
// softmax's weights are broadcast. Sums are float32.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "bf16_pairs.h"
#include "dot_bf16.h"
#include "vec.h"

namespace {

constexpr int TILE = 4 * LANES;  // elements of outputs, whose sums for a few heads registers hold
static_assert(RANK % TILE == 0 && WIDTH % 2 == 0 && RANK <= WIDTH, "outputs are whole tiles");
constexpr int SUMS = LANES >= 16 ? 16 : 8;  // vectors of sums that registers hold beside their factors
constexpr int HEADS_AT_ONCE = SUMS / (TILE / LANES);
constexpr int RUN = 16;            // positions from a multiple of it on lie side by side, in one block
constexpr int CHUNK = 128;        // positions between two looks at the largest score
constexpr int PARTIAL = RANK + 2;  // output, largest score, sum of weights
constexpr float LOWEST = -1e30f;

// Elements as they are multiplied: floats one by one.
struct Floats {
  typedef float Word;
  typedef Vec Words;
  static constexpr int DEPTH = 1;
  static Vec add(Vec sum, Vec words, float other) { return sum + words * other; }
  static Vec weight(Vec x) { return exponential(x); }
};

#ifdef HAS_BF16_PAIRS
// Bfloat16 numbers in pairs.
struct Pairs {
  typedef uint32_t Word;
  typedef VecBits Words;
  static constexpr int DEPTH = PAIR;
  static Vec add(Vec sum, VecBits words, uint32_t other) { return add_dot(sum, words, other); }
  static Vec weight(Vec x) { return weight_of(x); }
};
#endif

template <class T>
struct UnitOf {
  typedef Floats Unit;
};
#ifdef HAS_BF16_PAIRS
template <>
struct UnitOf<BF16> {
  typedef Pairs Unit;
};
#endif

// Work of one thread on up to V vectors of heads of a token.
template <class T, int V>
class LatentHeads {
  typedef typename UnitOf<T>::Unit Unit;
  typedef typename Unit::Word Word;
  typedef typename Unit::Words Words;

 public:
  static constexpr int HEADS = V * LANES;

  // `query` [num_heads, WIDTH].
  LatentHeads(const T* query, int num_heads_, float scale_)
      : num_heads(num_heads_), scale(scale_), scored((RUN_BYTES - mixed(num_heads_)) / RUN) {
    for (int i = 0; i < V; ++i) top[i] = splat(LOWEST), weights[i] = Vec{};
    std::fill_n(output[0][0], sizeof output / sizeof(float), 0.f);
    std::fill_n(queries[0], sizeof queries / sizeof(Word), Word{});
    for (int h = 0; h < num_heads; ++h)
      for (int k = 0; k < DEEP; ++k) queries[k][h] = word(query + h * WIDTH + k * Unit::DEPTH);
  }

  // `row(t)` returns where the vector of position t lies; those of RUN positions lie side by side. `next(run)` returns
  // where those of a run lie that are read after the last ones, or null.
  template <class F, class N>
  void run(int begin, int end, F&& row, N&& next) {
    for (int start = begin; start < end; start += CHUNK) {
      const int count = std::min(CHUNK, end - start), later = start + CHUNK;
      gather(start, count, row);
      for (int r = 0; r < CHUNK / RUN; ++r) {
        const T* from = later >= end ? next(r) : later + r * RUN < end ? row(later + r * RUN) : nullptr;
        ahead[r] = (const char*)(from ? from : (const T*)keys[0]);
      }
      for (int t = 0; t < count; t += AT_ONCE)
        score(scores + t, queries, keys[t], ahead[t / RUN] + t % RUN * scored, (scored * AT_ONCE + DEEP - 1) / DEEP);
      weigh(count);
      mix_all(count);
    }
  }

  float largest_of(int h) const { return top[h / LANES][h % LANES]; }
  float weight_of_head(int h) const { return weights[h / LANES][h % LANES]; }
  const float* output_of(int h, int tile) const { return output[tile][h]; }

 private:
  static constexpr int DEEP = WIDTH / Unit::DEPTH, AT_ONCE = SUMS / V;
  static constexpr bool WIDENS = std::is_same<T, BF16>::value && Unit::DEPTH == 1;
  static constexpr bool IS_PAIRED = Unit::DEPTH == 2;
  static constexpr int VALUE_STEP = IS_PAIRED ? TILE : WIDTH;  // words between the values of one position and the next
  static constexpr int64_t LINE = 64, RUN_BYTES = RUN * WIDTH * sizeof(T);
  const int num_heads;
  const float scale;
  // Vectors are fetched while those before them are computed, all the time: at once they would be more than can wait for
  // memory, and only beside the scores memory would rest for half of the time. Of each vector, so many bytes are fetched
  // beside the scores and the others beside the outputs, which fetch at most a line with each word.
  const int64_t scored;
  const char* ahead[CHUNK / RUN];
  Vec top[V], weights[V];
  const Word* keys[CHUNK];
  alignas(64) Word queries[DEEP][HEADS];
  alignas(64) float scores[CHUNK + AT_ONCE][HEADS];
  alignas(64) Word shares[CHUNK / Unit::DEPTH][HEADS];
  alignas(64) float factors[HEADS];
  // Pairs of positions of one tile. Floats are read where they lie, or where they were widened.
  alignas(64) Word values[IS_PAIRED ? CHUNK / 2 : 1][IS_PAIRED ? TILE : 1];
  alignas(64) Word rows[IS_PAIRED ? 1 : CHUNK][WIDTH] = {};
  alignas(64) float output[RANK / TILE][HEADS][TILE];

  // How many bytes of a run are fetched beside the outputs.
  static int64_t mixed(int num_heads) {
    const int64_t calls = RANK / TILE * ((num_heads + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE);
    return std::min(RUN_BYTES / 2, calls * (CHUNK / Unit::DEPTH) * LINE / (CHUNK / RUN)) / (RUN * LINE) * (RUN * LINE);
  }

  static Word word(const T* p) {
    if constexpr (WIDENS) return as_float((int32_t)((uint32_t)p->bits << 16));
    Word x;
    memcpy(&x, p, sizeof x);
    return x;
  }

  const Word* values_of(int tile) const {
    if constexpr (IS_PAIRED) return values[0];
    return rows[0] + tile * TILE;
  }

  template <class F>
  void gather(int start, int count, F& row) {
    const T* run = nullptr;
    for (int t = 0; t < count; ++t) {
      const T* from = t % RUN ? run + t % RUN * WIDTH : run = row(start + t);
      if constexpr (IS_PAIRED) {
        keys[t] = (const Word*)from;
      } else {
        for (int k = 0; k < WIDTH; k += LANES) store(rows[t] + k, load(from + k, WIDTH - k), WIDTH - k);
        keys[t] = rows[t];
      }
    }
  }

  // The values of a tile in pairs of positions. They stay in the first-level cache while all heads read them; those of
  // all tiles would not.
  void pair(int tile, int count) {
#ifdef HAS_BF16_PAIRS
    for (int t = 0; t < count; t += 2)
      for (int d = 0; d < TILE; d += 2 * LANES) {
        const int at = (tile * TILE + d) / 2;
        const __m512i even = _mm512_loadu_si512(keys[t] + at);
        const __m512i odd = t + 1 < count ? _mm512_loadu_si512(keys[t + 1] + at) : _mm512_setzero_si512();
        uint32_t* to = (uint32_t*)values[t / 2] + d;
        _mm512_store_si512(to, interleave(even, odd, 0));
        _mm512_store_si512(to + LANES, interleave(even, odd, 1));
      }
#endif
  }

  // The scores of AT_ONCE positions, whose vectors lie side by side: what lies behind the last one is computed and not
  // read. GCC keeps the sums in registers only in a function of its own.
  // Meanwhile every `step` bytes from `ahead` on are fetched.
  __attribute__((noinline)) static void score(float (*to)[HEADS], const Word (*left)[HEADS], const Word* key,
                                              const char* ahead, int64_t step) {
    Vec sum[AT_ONCE][V] = {};
    for (int k = 0; k < DEEP; ++k, ++key, ahead += step) {
      __builtin_prefetch(ahead, 0, 2);
      Words words[V];
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) memcpy(&words[i], &left[k][i * LANES], sizeof words[i]);
#pragma GCC unroll 16
      for (int u = 0; u < AT_ONCE; ++u)
#pragma GCC unroll 4
        for (int i = 0; i < V; ++i) sum[u][i] = Unit::add(sum[u][i], words[i], key[u * DEEP]);
    }
    for (int u = 0; u < AT_ONCE; ++u)
      for (int i = 0; i < V; ++i) store(&to[u][i * LANES], sum[u][i]);
  }

  // Scores become the softmax's weights; what was summed so far shrinks as the largest score grows.
  void weigh(int count) {
    for (int i = 0; i < V; ++i) {
      Vec now = top[i], total = {};
      for (int t = 0; t < count; ++t) now = maximum(now, load(&scores[t][i * LANES]) * scale);
      const Vec factor = Unit::weight(top[i] - now);
      const auto weight = [&](int t) {
        return t < count ? Unit::weight(load(&scores[t][i * LANES]) * scale - now) : Vec{};
      };
      for (int t = 0; t < count; t += Unit::DEPTH) {
        const Vec low = weight(t);
        total += low;
        if constexpr (IS_PAIRED) {
          const Vec high = weight(t + 1);
          total += high;
          put_pair(&shares[t / 2][i * LANES], low, high);
        } else {
          store((float*)&shares[t][i * LANES], low);
        }
      }
      top[i] = now;
      weights[i] = weights[i] * factor + total;
      store(&factors[i * LANES], factor);
    }
  }

  static void put_pair(Word* to, Vec low, Vec high) {
#ifdef HAS_BF16_PAIRS
    const VecInt words = pairs_of(low, high);
    memcpy(to, &words, sizeof words);
#endif
  }

  void mix_all(int count) {
    const int groups = (num_heads + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE, depth = (count + Unit::DEPTH - 1) / Unit::DEPTH;
    constexpr int WORDS = CHUNK / Unit::DEPTH;
    const int64_t left = RUN_BYTES - RUN * scored, each = left * (CHUNK / RUN) / (RANK / TILE * groups);
    for (int d = 0; d < RANK / TILE; ++d) {
      if constexpr (IS_PAIRED) pair(d, count);
      for (int g = 0; g < groups; ++g) {
        const int h = g * HEADS_AT_ONCE;
        const int64_t place = (d * groups + g) * each;
        const char* from = left ? ahead[place / left] + RUN * scored + place % left : ahead[0];
        mix(&output[d][h], depth, shares[0] + h, values_of(d), factors + h, from, (each + WORDS - 1) / WORDS);
      }
    }
  }

  // Scales the outputs of a few heads by their factors and adds `depth` words of values by their shares. Meanwhile every
  // `step` bytes from `ahead` on are fetched.
  __attribute__((noinline)) static void mix(float (*to)[TILE], int depth, const Word* share, const Word* value,
                                            const float* factor, const char* ahead, int64_t step) {
    constexpr int H = HEADS_AT_ONCE, W = TILE / LANES;
    Vec sum[H][W];
    for (int h = 0; h < H; ++h)
      for (int e = 0; e < W; ++e) sum[h][e] = load(&to[h][e * LANES]) * factor[h];
    for (int k = 0; k < depth; ++k, value += VALUE_STEP, share += HEADS, ahead += step) {
      __builtin_prefetch(ahead, 0, 2);
      Words words[W];
#pragma GCC unroll 4
      for (int e = 0; e < W; ++e) memcpy(&words[e], value + e * LANES, sizeof words[e]);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
        for (int e = 0; e < W; ++e) sum[h][e] = Unit::add(sum[h][e], words[e], share[h]);
    }
    for (int h = 0; h < H; ++h)
      for (int e = 0; e < W; ++e) store(&to[h][e * LANES], sum[h][e]);
  }
};

}  // namespace
