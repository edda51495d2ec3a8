// Drafts of a small decoder: all tokens of a step in one call, because each of its operations takes less time than a
// call from outside. Weights and arithmetic are float32; the KV cache has the model's dtype.
#include <cmath>
#include <cstdint>
#include <vector>

#include "vec.h"

extern "C" {

// Matrices lie in panels of PANEL outputs, in a panel input after input; zeros fill the last panel.
struct DraftLayer {
  const float *input_norm, *qkv;  // qkv: queries, keys and values
  const float* head_norm;         // [num_heads + num_kv_heads, D]; null: none
  const float *out, *post_norm, *gate_up, *down;
  void *keys, *values;  // [num_blocks, num_kv_heads, block_size, cache_head_size]
};

struct DraftArgs {
  const DraftLayer* layers;
  const float* embedding;         // [vocab, hidden]
  const float *norm, *output;     // output: the matrix of the logits
  const float* frequencies;       // [D / 2]: the angles that a position adds
  const int32_t *tokens, *tables; // of all rows of the batch: token ids and block ids
  const int64_t *rows, *starts, *ends, *counts;  // [n]: computes [start, end) of a row, then drafts up to so many tokens
  int64_t *drafts, *found;                       // [n, most], [n]: how many there are
  int64_t num_requests, most, num_layers, vocab, hidden, inner, num_heads, num_kv_heads, head_size, cache_head_size,
      block_size, tokens_stride, tables_stride;
  float eps, scale, rotation_factor, least_confidence;
  int32_t is_bf16;
};

}  // extern "C"

namespace {

constexpr int PANEL = 32;

inline int64_t whole(int64_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

// out = matrix times x, plus what out holds if `add`. `out` has room for whole panels.
void multiply(const float* matrix, const float* x, float* out, int64_t inputs, int64_t outputs, bool add = false) {
  constexpr int N = PANEL / LANES;
  for (int64_t o = 0; o < outputs; o += PANEL) {
    Vec sums[N] = {};
    for (int64_t k = 0; k < inputs; ++k, matrix += PANEL)
      for (int i = 0; i < N; ++i) sums[i] += load(matrix + i * LANES) * x[k];
    for (int i = 0; i < N; ++i) {
      float* to = out + o + i * LANES;
      store(to, add ? load(to) + sums[i] : sums[i]);
    }
  }
}

void norm(const float* x, const float* weight, float* out, int64_t n, float eps) {
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
        normed(whole(args.hidden)),
        qkv(whole(heads * args.head_size)),
        attended(whole(args.num_heads * args.head_size)),
        gates(whole(2 * args.inner)),
        logits(whole(args.vocab)),
        cosines(args.head_size / 2),
        sines(args.head_size / 2) {}

  void run() {
    for (int64_t r = 0; r < a.num_requests; ++r) {
      table = a.tables + a.rows[r] * a.tables_stride;
      const int32_t* tokens = a.tokens + a.rows[r] * a.tokens_stride;
      for (int64_t p = a.starts[r]; p < a.ends[r]; ++p) compute(tokens[p], p);
      a.found[r] = draft(a.drafts + r * a.most, a.ends[r], a.counts[r]);
    }
  }

 private:
  const DraftArgs& a;
  const int64_t heads;
  const int32_t* table = nullptr;
  std::vector<float> residual, normed, qkv, attended, gates, logits, cosines, sines, scores;

  // Returns how many drafts there are. Nothing follows the last one, so it is not computed.
  int64_t draft(int64_t* to, int64_t end, int64_t count) {
    float confidence = 1.f;
    for (int64_t n = 0; n < count; ++n) {
      if (n) compute(to[n - 1], end + n - 1);
      const int64_t best = choose(confidence);
      if (best < 0) return n;
      to[n] = best;
      if (!(confidence >= a.least_confidence)) return n + 1;
    }
    return count;
  }

  // The token of the largest logit, -1 without a finite one; multiplies `confidence` by its probability.
  int64_t choose(float& confidence) {
    norm(residual.data(), a.norm, normed.data(), a.hidden, a.eps);
    multiply(a.output, normed.data(), logits.data(), a.hidden, a.vocab);
    int64_t best = 0;
    for (int64_t i = 1; i < a.vocab; ++i)
      if (logits[i] > logits[best]) best = i;
    if (!std::isfinite(logits[best])) return -1;
    Vec sums = {};
    const int64_t full = a.vocab / LANES * LANES;
    for (int64_t i = 0; i < full; i += LANES) sums += exponential(load(&logits[i]) - logits[best]);
    float total = sum(sums);
    for (int64_t i = full; i < a.vocab; ++i) total += std::exp(logits[i] - logits[best]);
    confidence /= total;
    return best;
  }

  void compute(int64_t token, int64_t position) {
    memcpy(residual.data(), a.embedding + token * a.hidden, a.hidden * sizeof(float));
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
    multiply(layer.qkv, normed.data(), qkv.data(), a.hidden, heads * D);
    for (int64_t h = 0; h < a.num_heads + a.num_kv_heads; ++h) {
      float* x = &qkv[h * D];
      if (layer.head_norm) norm(x, layer.head_norm + h * D, x, D, a.eps);
      rotate(x);
    }
    for (int64_t h = 0; h < a.num_kv_heads; ++h) {
      write(&qkv[(a.num_heads + h) * D], slot(layer.keys, h, position));
      write(&qkv[(a.num_heads + a.num_kv_heads + h) * D], slot(layer.values, h, position));
    }
    for (int64_t h = 0; h < a.num_heads; ++h) attend(layer, h, position);
    multiply(layer.out, attended.data(), residual.data(), a.num_heads * D, a.hidden, true);
    norm(residual.data(), layer.post_norm, normed.data(), a.hidden, a.eps);
    multiply(layer.gate_up, normed.data(), gates.data(), a.hidden, 2 * a.inner);
    for (int64_t i = 0; i < a.inner; ++i) gates[i] *= gates[a.inner + i] / (1.f + std::exp(-gates[i]));
    multiply(layer.down, gates.data(), residual.data(), a.inner, a.hidden, true);
  }

  void rotate(float* x) const {
    const int64_t half = a.head_size / 2;
    for (int64_t i = 0; i < half; ++i) {
      const float first = x[i], second = x[half + i];
      x[i] = first * cosines[i] - second * sines[i];
      x[half + i] = second * cosines[i] + first * sines[i];
    }
  }

  T* slot(void* cache, int64_t kv_head, int64_t position) const {
    const int64_t block = table[position / a.block_size], offset = position % a.block_size;
    return (T*)cache + ((block * a.num_kv_heads + kv_head) * a.block_size + offset) * a.cache_head_size;
  }

  void write(const float* x, T* to) const {
    for (int64_t i = 0; i < a.head_size; i += LANES) store(to + i, load(x + i, a.head_size - i), a.head_size - i);
  }

  // Causal attention of one head over the positions up to this one.
  void attend(const DraftLayer& layer, int64_t head, int64_t position) {
    const int64_t D = a.head_size, kv_head = head / (a.num_heads / a.num_kv_heads);
    const float* query = &qkv[head * D];
    float* out = &attended[head * D];
    if ((int64_t)scores.size() <= position) scores.resize(2 * position + 1);
    float highest = -INFINITY, total = 0.f;
    for (int64_t p = 0; p <= position; ++p) {
      const T* key = slot(layer.keys, kv_head, p);
      Vec sums = {};
      for (int64_t i = 0; i < D; i += LANES) sums += load(query + i, D - i) * load(key + i, D - i);
      scores[p] = sum(sums) * a.scale;
      highest = scores[p] > highest ? scores[p] : highest;
    }
    for (int64_t i = 0; i < D; ++i) out[i] = 0.f;
    for (int64_t p = 0; p <= position; ++p) {
      const float weight = std::exp(scores[p] - highest);
      const T* value = slot(layer.values, kv_head, p);
      total += weight;
      for (int64_t i = 0; i < D; i += LANES)
        store(out + i, load(out + i, D - i) + load(value + i, D - i) * weight, D - i);
    }
    for (int64_t i = 0; i < D; ++i) out[i] /= total;
  }
};

}  // namespace

// How many outputs a panel of a matrix has.
extern "C" int64_t panel_outputs() { return PANEL; }

// Computes tokens of each request, then drafts the ones after them.
extern "C" void draft_greedily(const DraftArgs* args) {
  if (args->is_bf16)
    Decoder<BF16>(*args).run();
  else
    Decoder<float>(*args).run();
}
