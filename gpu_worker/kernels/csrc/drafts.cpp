// Drafts of a small decoder or of an EAGLE head: all tokens of a step in one call, because each of its operations takes
// less time than a call from outside. Arithmetic is float32; matrices, embeddings, states and KV cache have the model's
// dtype.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vec.h"

extern "C" {

// arrange_matrix makes the matrices. A head has no input_norm.
struct DraftLayer {
  const float* input_norm;
  const void* qkv;         // queries, keys and values
  const float* head_norm;  // [num_heads + num_kv_heads, D]; null: none
  const void* out;
  const float* post_norm;
  const void *gate_up, *down;
  void *keys, *values;  // [num_blocks, num_kv_heads, block_size, cache_head_size]
};

struct DraftArgs {
  const DraftLayer* layers;
  const void* embedding;    // [vocab, hidden]
  const void* fc;           // of a head: the matrix that joins embedding and state, [hidden, 2 * hidden]; null: none
  const float* norm;        // null: none
  const void* output;       // the matrix of the logits
  const float* frequencies; // [D / 2]: the angles that a position adds
  const int32_t *tokens, *tables; // of all rows of the batch: token ids and block ids
  const int64_t *rows, *starts, *ends, *counts;  // [n]: computes [start, end) of a row, then drafts up to so many tokens
  const void *const *before, *const *states;     // of a head, [n]: the model's state before `start` (null: zeros), and
                                                 // those from `start` on, [.., hidden]
  int64_t *drafts, *found;                       // [n, most], [n]: how many there are
  int64_t num_requests, most, num_layers, vocab, hidden, inner, num_heads, num_kv_heads, head_size, cache_head_size,
      block_size, tokens_stride, tables_stride;
  int64_t num_rows, num_blocks;  // of the batch, and of the cache
  float eps, scale, rotation_factor, least_confidence;
  int32_t is_bf16;
};

}  // extern "C"

namespace {

// Matrices lie in panels of PANEL outputs, in a panel input after input; zeros fill the last panel. In bfloat16 a word
// holds two outputs that are LANES apart, so that a shift and a mask make floats of them.
// A step of the demo model's draft, 0.2 million weights, spent its time on 20 calls from Python: one stream got 0.86 to
// 1.03 times the tokens of one without drafts. In one call it got 1.33 times with 4 drafts and 1.62 with 6.
constexpr int PANEL = 64;

inline int64_t whole(int64_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

// Adds `x` times the outputs of one input, whose numbers begin at `from`.
inline void add_input(const float* from, float x, Vec* sums) {
#pragma GCC unroll 16
  for (int i = 0; i < PANEL / LANES; ++i) sums[i] += load(from + i * LANES) * x;
}

inline void add_input(const BF16* from, float x, Vec* sums) {
#pragma GCC unroll 16
  for (int i = 0; i < PANEL / LANES; i += 2) {
    VecBits words;
    memcpy(&words, from + i * LANES, sizeof words);
    sums[i] += (Vec)(words << 16) * x;
    sums[i + 1] += (Vec)(words & 0xffff0000u) * x;
  }
}

// out = matrix times x, plus what out holds if `add`. `out` has room for whole panels.
template <class T>
void multiply(const void* matrix, const float* x, float* out, int64_t inputs, int64_t outputs, bool add = false) {
  const T* from = (const T*)matrix;
  for (int64_t o = 0; o < outputs; o += PANEL) {
    Vec sums[PANEL / LANES] = {};
    for (int64_t k = 0; k < inputs; ++k, from += PANEL) add_input(from, x[k], sums);
    for (int i = 0; i < PANEL / LANES; ++i) {
      float* to = out + o + i * LANES;
      store(to, add ? load(to) + sums[i] : sums[i]);
    }
  }
}

// The number at `at`, exactly, as one of the matrix's dtype.
inline void put(float x, float* at) { *at = x; }
inline void put(float x, BF16* at) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  at->bits = bits >> 16;
}

// Where the output of a panel lies among the numbers of an input.
inline int64_t place(int64_t output, const float*) { return output; }
inline int64_t place(int64_t output, const BF16*) {
  const int64_t pair = output / (2 * LANES), lane = output % LANES;
  return pair * 2 * LANES + 2 * lane + output / LANES % 2;
}

template <class T>
void arrange(const float* weight, T* to, int64_t outputs, int64_t inputs) {
  for (int64_t o = 0; o < whole(outputs); ++o)
    for (int64_t k = 0; k < inputs; ++k)
      put(o < outputs ? weight[o * inputs + k] : 0.f, to + (o / PANEL * inputs + k) * PANEL + place(o % PANEL, to));
}

// `out` may be `x`; without weights it is a copy.
void norm(const float* x, const float* weight, float* out, int64_t n, float eps) {
  if (!weight) {
    memcpy(out, x, n * sizeof(float));
    return;
  }
  Vec squares = {};
  for (int64_t i = 0; i < n; i += LANES) {
    const Vec v = load(x + i, n - i);
    squares += v * v;
  }
  const float scale = 1.f / std::sqrt(sum(squares) / n + eps);
  for (int64_t i = 0; i < n; i += LANES) store(out + i, load(x + i, n - i) * scale * load(weight + i, n - i), n - i);
}

template <class T>
class Decoder {
 public:
  explicit Decoder(const DraftArgs& args)
      : a(args),
        heads(args.num_heads + 2 * args.num_kv_heads),
        residual(whole(args.hidden)),
        joined(args.fc ? 2 * args.hidden : 0),
        normed(whole(args.hidden)),
        qkv(whole(heads * args.head_size)),
        query(args.cache_head_size),
        attended(whole(args.num_heads * args.head_size)),
        gates(whole(2 * args.inner)),
        logits(whole(args.vocab)),
        cosines(args.head_size / 2),
        sines(args.head_size / 2) {}

  // Returns the number of requests, or the first of them that names what is not there: then nothing is drafted.
  int64_t run() {
    for (int64_t r = 0; r < a.num_requests; ++r)
      if (!is_within(r)) return r;
    for (int64_t r = 0; r < a.num_requests; ++r) {
      table = a.tables + a.rows[r] * a.tables_stride;
      const int32_t* tokens = a.tokens + a.rows[r] * a.tokens_stride;
      for (int64_t p = a.starts[r]; p < a.ends[r]; ++p) {
        if (a.fc) take_state(r, p);
        compute(tokens[p], p);
      }
      a.found[r] = draft(a.drafts + r * a.most, a.ends[r], a.counts[r]);
    }
    return a.num_requests;
  }

 private:
  const DraftArgs& a;
  const int64_t heads;
  const int32_t* table = nullptr;
  std::vector<float> residual, joined, normed, qkv, query, attended, gates, logits, cosines, sines, scores;

  // Whether the batch has the row, and the row the tokens and blocks from `start` to the last draft's. Unsigned, a
  // negative number is too large.
  bool is_within(int64_t r) const {
    const int64_t row = a.rows[r], start = a.starts[r], end = a.ends[r], count = a.counts[r];
    if ((uint64_t)row >= (uint64_t)a.num_rows || (uint64_t)count > (uint64_t)a.most) return false;
    if (start < 0 || end <= start || end > a.tokens_stride) return false;
    const int64_t last = count > 1 ? end + count - 2 : end - 1;  // nothing is computed for the last draft
    if (last / a.block_size >= a.tables_stride) return false;
    for (int64_t p = start; p < end; ++p)
      if ((uint64_t)(int64_t)a.tokens[row * a.tokens_stride + p] >= (uint64_t)a.vocab) return false;
    for (int64_t b = 0; b <= last / a.block_size; ++b)
      if ((uint64_t)(int64_t)a.tables[row * a.tables_stride + b] >= (uint64_t)a.num_blocks) return false;
    return true;
  }

  // The model's state before position `p` becomes the second half of what a head joins.
  void take_state(int64_t r, int64_t p) {
    const T* state = p == a.starts[r] ? (const T*)a.before[r] : (const T*)a.states[r] + (p - 1 - a.starts[r]) * a.hidden;
    // Zeros stand for a state that was not computed here (a prefix hit or a transfer): the head then drafts worse, and
    // its KV stays a function of the tokens alone.
    if (state)
      widen(state, &joined[a.hidden]);
    else
      std::fill_n(&joined[a.hidden], a.hidden, 0.f);
  }

  void widen(const T* from, float* to) const {
    for (int64_t i = 0; i < a.hidden; i += LANES) store(to + i, load(from + i, a.hidden - i), a.hidden - i);
  }

  // Returns how many drafts there are. Nothing follows the last one, so it is not computed.
  int64_t draft(int64_t* to, int64_t end, int64_t count) {
    float confidence = 1.f;
    for (int64_t n = 0; n < count; ++n) {
      if (n) {
        if (a.fc) memcpy(&joined[a.hidden], residual.data(), a.hidden * sizeof(float));  // the head's own state
        compute(to[n - 1], end + n - 1);
      }
      const int64_t best = choose(confidence);
      if (best < 0) return n;
      to[n] = best;
      // Written so that a NaN ends the drafts too. The last draft stays: it was computed, and a wrong one costs a row,
      // not a token.
      if (!(confidence >= a.least_confidence)) return n + 1;
    }
    return count;
  }

  // The token of the largest logit, -1 without a finite one; multiplies `confidence` by its probability.
  int64_t choose(float& confidence) {
    norm(residual.data(), a.norm, normed.data(), a.hidden, a.eps);
    multiply<T>(a.output, normed.data(), logits.data(), a.hidden, a.vocab);
    const int64_t full = a.vocab / LANES * LANES;
    Vec highest = splat(-INFINITY), sums = {};
    for (int64_t i = 0; i < full; i += LANES) highest = maximum(load(&logits[i]), highest);
    float most = largest(highest);
    for (int64_t i = full; i < a.vocab; ++i) most = logits[i] > most ? logits[i] : most;
    int64_t best = 0;
    while (best < a.vocab && logits[best] != most) ++best;
    if (!std::isfinite(most) || best == a.vocab) return -1;
    for (int64_t i = 0; i < full; i += LANES) sums += exponential(load(&logits[i]) - most);
    float total = sum(sums);
    for (int64_t i = full; i < a.vocab; ++i) total += std::exp(logits[i] - most);
    confidence /= total;
    return best;
  }

  void compute(int64_t token, int64_t position) {
    widen((const T*)a.embedding + token * a.hidden, a.fc ? joined.data() : residual.data());
    if (a.fc) multiply<T>(a.fc, joined.data(), residual.data(), 2 * a.hidden, a.hidden);
    for (int64_t i = 0; i < a.head_size / 2; ++i) {
      const float angle = (float)position * a.frequencies[i];
      cosines[i] = std::cos(angle) * a.rotation_factor;
      sines[i] = std::sin(angle) * a.rotation_factor;
    }
    for (int64_t l = 0; l < a.num_layers; ++l) compute_layer(a.layers[l], position);
  }

  void compute_layer(const DraftLayer& layer, int64_t position) {
    const int64_t D = a.head_size;
    norm(residual.data(), layer.input_norm, normed.data(), a.hidden, a.eps);
    multiply<T>(layer.qkv, normed.data(), qkv.data(), a.hidden, heads * D);
    for (int64_t h = 0; h < a.num_heads + a.num_kv_heads; ++h) {
      float* x = &qkv[h * D];
      if (layer.head_norm) norm(x, layer.head_norm + h * D, x, D, a.eps);
      rotate(x);
    }
    for (int64_t h = 0; h < a.num_kv_heads; ++h) {
      write(&qkv[(a.num_heads + h) * D], block(layer.keys, h, position) + offset(position));
      write(&qkv[(a.num_heads + a.num_kv_heads + h) * D], block(layer.values, h, position) + offset(position));
    }
    for (int64_t h = 0; h < a.num_heads; ++h) attend(layer, h, position + 1);
    multiply<T>(layer.out, attended.data(), residual.data(), a.num_heads * D, a.hidden, true);
    norm(residual.data(), layer.post_norm, normed.data(), a.hidden, a.eps);
    multiply<T>(layer.gate_up, normed.data(), gates.data(), a.hidden, 2 * a.inner);
    for (int64_t i = 0; i < a.inner; i += LANES) {
      const Vec gate = load(&gates[i], a.inner - i), up = load(&gates[a.inner + i], a.inner - i);
      store(&gates[i], gate * up / (1.f + exponential(-gate)), a.inner - i);
    }
    multiply<T>(layer.down, gates.data(), residual.data(), a.inner, a.hidden, true);
  }

  void rotate(float* x) const {
    const int64_t half = a.head_size / 2;
    for (int64_t i = 0; i < half; ++i) {
      const float first = x[i], second = x[half + i];
      x[i] = first * cosines[i] - second * sines[i];
      x[half + i] = second * cosines[i] + first * sines[i];
    }
  }

  // The rows of a head in the block of a position.
  T* block(void* cache, int64_t kv_head, int64_t position) const {
    return (T*)cache + (table[position / a.block_size] * a.num_kv_heads + kv_head) * a.block_size * a.cache_head_size;
  }

  int64_t offset(int64_t position) const { return position % a.block_size * a.cache_head_size; }

  void write(const float* x, T* to) const {
    for (int64_t i = 0; i < a.head_size; i += LANES) store(to + i, load(x + i, a.head_size - i), a.head_size - i);
  }

  // Calls work(row, position) for the first positions. Zeros fill a row behind the head's size.
  template <class F>
  void for_rows(void* cache, int64_t kv_head, int64_t positions, F&& work) const {
    for (int64_t first = 0; first < positions; first += a.block_size) {
      const T* row = block(cache, kv_head, first);
      const int64_t end = std::min(first + a.block_size, positions);
      for (int64_t p = first; p < end; ++p, row += a.cache_head_size) work(row, p);
    }
  }

  // Attention of one head over the first positions.
  void attend(const DraftLayer& layer, int64_t head, int64_t positions) {
    const int64_t D = a.cache_head_size, kv_head = head / (a.num_heads / a.num_kv_heads);
    if ((int64_t)scores.size() < positions + LANES) scores.resize(2 * positions + LANES);
    memcpy(query.data(), &qkv[head * a.head_size], a.head_size * sizeof(float));
    for_rows(layer.keys, kv_head, positions, [&](const T* key, int64_t p) {
      Vec sums = {};
      for (int64_t i = 0; i < D; i += LANES) sums += load(&query[i]) * load(key + i);
      scores[p] = sum(sums) * a.scale;
    });
    std::fill_n(&scores[positions], LANES, -INFINITY);
    Vec highest = splat(-INFINITY), totals = {};
    for (int64_t p = 0; p < positions; p += LANES) highest = maximum(load(&scores[p]), highest);
    const float most = largest(highest);
    for (int64_t p = 0; p < positions; p += LANES) {
      const Vec weights = exponential(load(&scores[p]) - most);
      store(&scores[p], weights);
      totals += weights;  // those behind the last position are below 1e-37
    }
    const float scale = 1.f / sum(totals);
    float* out = &attended[head * a.head_size];
    for (int64_t i = 0; i < a.head_size; i += 2 * LANES) {
      Vec first = {}, second = {};
      for_rows(layer.values, kv_head, positions, [&](const T* value, int64_t p) {
        first += load(value + i) * scores[p];
        if (i + LANES < D) second += load(value + i + LANES) * scores[p];
      });
      store(out + i, first * scale, a.head_size - i);
      if (i + LANES < a.head_size) store(out + i + LANES, second * scale, a.head_size - i - LANES);
    }
  }
};

}  // namespace

// How many bytes a matrix takes.
extern "C" int64_t matrix_bytes(int64_t outputs, int64_t inputs, int32_t is_bf16) {
  return whole(outputs) * inputs * (is_bf16 ? sizeof(BF16) : sizeof(float));
}

// Arranges `weight`, [outputs, inputs], as the products read it. In bfloat16 its numbers are cut, so they must be exact.
extern "C" void arrange_matrix(const float* weight, void* to, int64_t outputs, int64_t inputs, int32_t is_bf16) {
  is_bf16 ? arrange(weight, (BF16*)to, outputs, inputs) : arrange(weight, (float*)to, outputs, inputs);
}

// Computes tokens of each request, then drafts the ones after them. Returns what run() does.
extern "C" int64_t draft_greedily(const DraftArgs* args) {
  return args->is_bf16 ? Decoder<BF16>(*args).run() : Decoder<float>(*args).run();
}
