// Attention over the paged KV cache: prefill and decode in one call, grouped queries, sliding windows.
//
// A call is cut into pieces of work (some queries, one KV head, a range of positions) that threads draw, dearest first.
// Results of pieces that share queries are partial (an output, its largest score, its sum of weights) and merged.
// Arithmetic is float32 whatever the dtype. Build with -DHEAD_SIZE=n, a multiple of 16.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "vec.h"

namespace {

constexpr int D = HEAD_SIZE, VECS = D / LANES;
static_assert(D % LANES == 0, "heads are whole vectors");
constexpr float LOWEST = -1e30f;
constexpr int PARTIAL = D + 2;  // output, largest score, sum of weights

}  // namespace

extern "C" {

struct AttentionArgs {
  const void* query;            // [T, num_heads, D], rows query_stride apart
  const void* key;              // [num_blocks, num_kv_heads, block_size, D]
  const void* value;            // likewise
  void* out;                    // [T, num_heads, D]
  const int32_t* block_tables;  // [num_requests, table_stride]
  const int32_t* query_starts;  // [num_requests + 1]
  const int32_t* seq_lens;      // [num_requests]
  const int32_t* members;       // requests of the groups that share a prefix, group after group
  const int32_t* group_starts;  // [num_groups + 1] into members
  const int32_t* shared_lens;   // [num_groups] tokens of the prefix, whole blocks
  int64_t num_groups, num_requests, num_heads, num_kv_heads, block_size, table_stride, query_stride;
  int64_t window;  // 0: none
  float scale;
  int32_t is_bf16, num_threads;
};

}  // extern "C"

namespace {

typedef AttentionArgs Args;

template <class T>
const T* kv_row(const Args& a, const void* cache, const int32_t* table, int head, int position) {
  const int64_t block = table[position / a.block_size], offset = position % a.block_size;
  return (const T*)cache + ((block * a.num_kv_heads + head) * a.block_size + offset) * D;
}

inline void prefetch(const void* row, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)row + i);
}

// Lane t of the result is the sum of rows[t].
inline Vec sum_rows(Vec* rows) {
  const VecInt a8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}, b8 = a8 + 8;
  const VecInt a4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}, b4 = a4 + 4;
  const VecInt a2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}, b2 = a2 + 2;
  const VecInt a1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}, b1 = a1 + 1;
  auto halve = [&](int n, VecInt a, VecInt b) {
    for (int i = 0; i < n; ++i)
      rows[i] = __builtin_shuffle(rows[i], rows[i + n], a) + __builtin_shuffle(rows[i], rows[i + n], b);
  };
  halve(8, a8, b8);
  halve(4, a4, b4);
  halve(2, a2, b2);
  halve(1, a1, b1);
  return rows[0];
}

// Where a row's result goes: normalized to `out`, or as it is to `partial` if that is set.
template <class T>
struct Target {
  T* out;
  float* partial;

  void write(const Vec* o, float top, float weights) const {
    if (partial) {
      for (int i = 0; i < VECS; ++i) store(partial + i * LANES, o[i]);
      partial[D] = top;
      partial[D + 1] = weights;
    } else {
      for (int i = 0; i < VECS; ++i) store(out + i * LANES, o[i] * (1.f / weights));
    }
  }
};

// ---- One token: its G query heads of a KV head over positions [begin, end), the head's elements in lanes.

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
  const VecInt lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
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
        const Vec s = sum_rows(rows[g]);
        store(&scores[g][c], (positions >= visible) & (positions < end) ? s : splat(LOWEST));
      }
    }
    for (int g = 0; g < G; ++g) {
      Vec best = load(scores[g]);
      for (int i = 1; i < vecs; ++i) best = maximum(best, load(scores[g] + i * LANES));
      const float now = std::max(top[g], largest(best)), shrink = std::exp(top[g] - now);
      Vec total = {};
      for (int i = 0; i < vecs; ++i) {
        const Vec e = exponential(load(scores[g] + i * LANES) - now);
        total += e;
        store(scores[g] + i * LANES, e);
      }
      top[g] = now;
      weights[g] = weights[g] * shrink + sum(total);
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

// ---- Many rows (a query head of a token each) over positions [begin, end): rows in lanes, keys and values broadcast.

template <class T>
struct Row {
  const T* query;
  int last;  // position of the token: it sees (last - window, last]
  Target<T> target;
};

constexpr int MAX_ROWS = 32, TILE = 32;  // rows and positions of one tile
#ifdef __AVX512F__
constexpr int UNROLL = 8;  // keys, or elements of values, that share a load of the rows: as many as registers hold
#else
constexpr int UNROLL = 4;
#endif

template <class T, int V>
void tile(const Args& a, const int32_t* table, int head, const Row<T>* rows, int num_rows, int begin, int end) {
  constexpr int R = V * LANES;
  alignas(64) float q[D][R] = {}, o[D][R] = {}, p[TILE][R], k[TILE][D], v[TILE][D];
  VecInt last[V] = {};
  Vec top[V], weights[V] = {};
  for (int i = 0; i < V; ++i) top[i] = splat(LOWEST);
  for (int r = 0; r < R; ++r) last[r / LANES][r % LANES] = rows[std::min(r, num_rows - 1)].last;
  for (int r = 0; r < num_rows; ++r)
    for (int i = 0; i < VECS; ++i) {
      const Vec x = load(rows[r].query + i * LANES) * a.scale;
      for (int e = 0; e < LANES; ++e) q[i * LANES + e][r] = x[e];
    }
  for (int start = begin; start < end; start += TILE) {
    const int count = std::min(TILE, end - start);
    for (int t = 0; t < count; ++t) {
      const T* keys = kv_row<T>(a, a.key, table, head, start + t);
      const T* values = (const T*)a.value + (keys - (const T*)a.key);
      for (int i = 0; i < VECS; ++i) {
        store(&k[t][i * LANES], load(keys + i * LANES));
        store(&v[t][i * LANES], load(values + i * LANES));
      }
    }
    if (count < TILE) {
      memset(k[count], 0, (TILE - count) * D * sizeof(float));
      memset(v[count], 0, (TILE - count) * D * sizeof(float));
    }
    Vec now[V];
    for (int i = 0; i < V; ++i) now[i] = top[i];
    for (int t = 0; t < TILE; t += UNROLL) {
      Vec score[UNROLL][V] = {};
      for (int d = 0; d < D; ++d)
        for (int u = 0; u < UNROLL; ++u)
          for (int i = 0; i < V; ++i) score[u][i] += load(&q[d][i * LANES]) * k[t + u][d];
      for (int u = 0; u < UNROLL; ++u) {
        const int position = start + t + u;
        for (int i = 0; i < V; ++i) {
          VecInt seen = last[i] >= position;
          if (a.window) seen &= last[i] - (int)a.window < position;
          if (position >= end) seen = VecInt{};
          const Vec x = seen ? score[u][i] : splat(LOWEST);
          now[i] = maximum(now[i], x);
          store(&p[t + u][i * LANES], x);
        }
      }
    }
    Vec shrink[V];
    for (int i = 0; i < V; ++i) {
      shrink[i] = exponential(top[i] - now[i]);
      top[i] = now[i];
      Vec total = {};
      for (int t = 0; t < TILE; ++t) {
        const Vec e = exponential(load(&p[t][i * LANES]) - now[i]);
        total += e;
        store(&p[t][i * LANES], e);
      }
      weights[i] = weights[i] * shrink[i] + total;
    }
    for (int d = 0; d < D; d += UNROLL) {
      Vec sums[UNROLL][V];
      for (int u = 0; u < UNROLL; ++u)
        for (int i = 0; i < V; ++i) sums[u][i] = load(&o[d + u][i * LANES]) * shrink[i];
      for (int t = 0; t < TILE; ++t)
        for (int u = 0; u < UNROLL; ++u)
          for (int i = 0; i < V; ++i) sums[u][i] += load(&p[t][i * LANES]) * v[t][d + u];
      for (int u = 0; u < UNROLL; ++u)
        for (int i = 0; i < V; ++i) store(&o[d + u][i * LANES], sums[u][i]);
    }
  }
  for (int r = 0; r < num_rows; ++r) {
    Vec row[VECS] = {};
    for (int i = 0; i < VECS; ++i)
      for (int e = 0; e < LANES; ++e) row[i][e] = o[i * LANES + e][r];
    rows[r].target.write(row, top[r / LANES][r % LANES], weights[r / LANES][r % LANES]);
  }
}

// ---- Pieces

struct Piece {
  int32_t request;  // whose queries, or (group) a member, for its block table
  int32_t group;    // set: queries first … first + count are members of it, a token each; -1: tokens of the request
  int32_t first, count, begin, end, head;
  int64_t partial;  // first of the request's partials for this range and head; -1: written to out
  int64_t cost;
};

template <class T>
class Call {
 public:
  explicit Call(const Args& args) : a(args), heads(a.num_heads / a.num_kv_heads), tokens(MAX_ROWS / heads) {
    cut();
    partials.resize(num_partials * PARTIAL);
  }

  void run() {
    const int64_t n = pieces.size(), merges = merged.size() * a.num_heads;
#pragma omp parallel num_threads(a.num_threads) if (n > 1)
    {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < n; ++i) compute(pieces[i]);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < merges; ++i) merge(merged[i / a.num_heads], i % a.num_heads);
    }
  }

 private:
  const Args& a;
  const int heads;   // query heads of a KV head
  const int tokens;  // in one tile
  std::vector<Piece> pieces;
  std::vector<float> partials;
  int64_t num_partials = 0;
  std::vector<int32_t> merged, parts, shared;
  std::vector<int64_t> first_partial;  // of each request: [parts, num_heads]

  int context(int r) const { return a.seq_lens[r] - (a.query_starts[r + 1] - a.query_starts[r]); }
  int first_seen(int position) const { return a.window ? std::max<int>(0, position - a.window + 1) : 0; }

  void cut() {
    parts.assign(a.num_requests, 1);
    shared.assign(a.num_requests, 0);
    first_partial.assign(a.num_requests, -1);
    for (int g = 0; g < a.num_groups; ++g)
      for (int m = a.group_starts[g]; m < a.group_starts[g + 1]; ++m) shared[a.members[m]] = a.shared_lens[g];
    int64_t positions = 0;
    for (int r = 0; r < a.num_requests; ++r)
      if (is_decode(r)) positions += decode_range(r);
    // So that the longest request keeps no thread busy alone: at least four pieces a thread.
    const int64_t fair = positions * a.num_kv_heads / (4 * a.num_threads);
    const int span = (std::max<int64_t>(fair, 256) + 255) / 256 * 256;
    for (int r = 0; r < a.num_requests; ++r) is_decode(r) ? cut_decode(r, span) : cut_prefill(r);
    for (int g = 0; g < a.num_groups; ++g) cut_group(g);
    std::sort(pieces.begin(), pieces.end(), [](const Piece& x, const Piece& y) { return x.cost > y.cost; });
  }

  bool is_decode(int r) const { return a.query_starts[r + 1] - a.query_starts[r] == 1; }
  int decode_begin(int r) const { return std::max(shared[r], first_seen(a.seq_lens[r] - 1) / LANES * LANES); }
  int decode_range(int r) const { return a.seq_lens[r] - decode_begin(r); }

  void cut_decode(int r, int span) {
    const int begin = decode_begin(r), range = decode_range(r), own = (range + span - 1) / span;
    parts[r] = own + (shared[r] > 0);
    if (parts[r] > 1) {
      merged.push_back(r);
      first_partial[r] = num_partials;
      num_partials += parts[r] * a.num_heads;
    }
    for (int part = 0; part < own; ++part)
      for (int head = 0; head < a.num_kv_heads; ++head) {
        const int from = begin + part * span, to = std::min(from + span, begin + range);
        pieces.push_back({r, -1, 0, 1, from, to, head, partial(r, part, head), to - from});
      }
  }

  void cut_prefill(int r) {
    const int count = a.query_starts[r + 1] - a.query_starts[r], before = context(r);
    for (int first = 0; first < count; first += tokens)
      for (int head = 0; head < a.num_kv_heads; ++head) {
        const int n = std::min(tokens, count - first), end = before + first + n;
        const int begin = first_seen(before + first) / LANES * LANES;
        pieces.push_back({r, -1, first, n, begin, end, head, -1, (int64_t)8 * (end - begin)});
      }
  }

  void cut_group(int g) {
    const int count = a.group_starts[g + 1] - a.group_starts[g];
    for (int first = 0; first < count; first += tokens)
      for (int head = 0; head < a.num_kv_heads; ++head) {
        const int n = std::min(tokens, count - first), r = a.members[a.group_starts[g]];
        pieces.push_back({r, g, first, n, 0, a.shared_lens[g], head, 0, (int64_t)8 * a.shared_lens[g]});
      }
  }

  int64_t partial(int r, int part, int head) const {
    return first_partial[r] < 0 ? -1 : first_partial[r] + part * a.num_heads + head * heads;
  }

  const T* query(int64_t token, int head) const { return (const T*)a.query + token * a.query_stride + head * D; }
  T* out(int64_t token, int head) const { return (T*)a.out + (token * a.num_heads + head) * D; }
  float* partial_at(int64_t index) { return index < 0 ? nullptr : partials.data() + index * PARTIAL; }

  void compute(const Piece& piece) {
    const int32_t* table = a.block_tables + piece.request * a.table_stride;
    if (piece.group < 0 && is_decode(piece.request) && heads <= 4) return compute_decode(piece, table);
    Row<T> rows[MAX_ROWS];
    const int num_rows = piece.count * heads;
    for (int i = 0; i < num_rows; ++i) rows[i] = row(piece, piece.first + i / heads, i % heads);
    if (num_rows <= LANES)
      tile<T, 1>(a, table, piece.head, rows, num_rows, piece.begin, piece.end);
    else
      tile<T, 2>(a, table, piece.head, rows, num_rows, piece.begin, piece.end);
  }

  Row<T> row(const Piece& piece, int index, int g) {
    const int head = piece.head * heads + g;
    const int r = piece.group < 0 ? piece.request : a.members[a.group_starts[piece.group] + index];
    const int token = a.query_starts[r] + (piece.group < 0 ? index : 0);
    const int last = context(r) + (piece.group < 0 ? index : 0);
    int64_t target = piece.partial < 0 ? -1 : piece.partial + g;
    if (piece.group >= 0) target = partial(r, parts[r] - 1, piece.head) + g;
    return {query(token, head), last, {out(token, head), partial_at(target)}};
  }

  void compute_decode(const Piece& piece, const int32_t* table) {
    const int r = piece.request, token = a.query_starts[r], head = piece.head * heads;
    Target<T> targets[4];
    for (int g = 0; g < heads; ++g)
      targets[g] = {out(token, head + g), partial_at(piece.partial < 0 ? -1 : piece.partial + g)};
    const int visible = first_seen(a.seq_lens[r] - 1);
    auto go = [&](auto kernel) {
      kernel(a, table, piece.head, query(token, head), piece.begin, piece.end, visible, targets);
    };
    switch (heads) {
      case 1: return go(decode<T, 1>);
      case 2: return go(decode<T, 2>);
      case 3: return go(decode<T, 3>);
      default: return go(decode<T, 4>);
    }
  }

  void merge(int r, int head) {
    float top = LOWEST, weights = 0;
    const float* first = partials.data() + (first_partial[r] + head) * PARTIAL;
    const int64_t stride = a.num_heads * PARTIAL;
    for (int i = 0; i < parts[r]; ++i) top = std::max(top, first[i * stride + D]);
    Vec o[VECS] = {};
    for (int i = 0; i < parts[r]; ++i) {
      const float* part = first + i * stride;
      const float share = std::exp(part[D] - top);
      weights += part[D + 1] * share;
      for (int e = 0; e < VECS; ++e) o[e] += load(part + e * LANES) * share;
    }
    Target<T>{out(a.query_starts[r], head), nullptr}.write(o, top, weights);
  }
};

template <class T>
void copy_rows(const T* key, const T* value, T* keys, T* values, const int64_t* slots, int64_t num_tokens,
               int64_t num_kv_heads, int64_t block_size, int64_t key_stride, int64_t value_stride) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    T* to = keys + (slots[t] / block_size * num_kv_heads * block_size + slots[t] % block_size) * D;
    const int64_t shift = values - keys;
    for (int64_t h = 0; h < num_kv_heads; ++h, to += block_size * D) {
      memcpy(to, key + t * key_stride + h * D, D * sizeof(T));
      memcpy(to + shift, value + t * value_stride + h * D, D * sizeof(T));
    }
  }
}

}  // namespace

extern "C" void attend(const AttentionArgs* args) {
  args->is_bf16 ? Call<BF16>(*args).run() : Call<float>(*args).run();
}

// Slot s is row s % block_size of block s / block_size. Strides, in elements, are between tokens.
extern "C" void write_kv(int32_t is_bf16, const void* key, const void* value, void* keys, void* values,
                         const int64_t* slots, int64_t num_tokens, int64_t num_kv_heads, int64_t block_size,
                         int64_t key_stride, int64_t value_stride) {
  if (is_bf16)
    copy_rows((const BF16*)key, (const BF16*)value, (BF16*)keys, (BF16*)values, slots, num_tokens, num_kv_heads,
              block_size, key_stride, value_stride);
  else
    copy_rows((const float*)key, (const float*)value, (float*)keys, (float*)values, slots, num_tokens, num_kv_heads,
              block_size, key_stride, value_stride);
}
