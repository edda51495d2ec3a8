// What the kinds of attention have in common. Build with -DHEAD_SIZE=n, a multiple of 16, with -DSOFTCAP=1 for models
// that limit their scores, and with -DKV_INT8=1 for keys and values as in kv_int8.h: others run code without it.
#pragma once
#include <algorithm>
#include <cmath>

#include "kv_int8.h"
#include "vec.h"

namespace {

constexpr int D = HEAD_SIZE, VECS = D / LANES;
static_assert(D % LANES == 0, "heads are whole vectors");
constexpr int RUN = 16;  // positions from a multiple of it on lie side by side, in one block
static_assert(RUN % LANES == 0, "vectors of positions lie in one run");
constexpr float LOWEST = -1e30f;         // the score of what is not seen
constexpr float NOT_SEEN = .99f * LOWEST;  // and what it is below, however it was rounded
// A build of its own: a branch for the hyperbolic tangent in the inner loops would take registers from all models. The
// second library costs 5 s of compiling, once.
#ifdef SOFTCAP
constexpr bool LIMITS_SCORES = true;
#else
constexpr bool LIMITS_SCORES = false;
#endif
#ifdef KV_INT8
constexpr bool READS_INT8 = true;
#else
constexpr bool READS_INT8 = false;
#endif
constexpr int PARTIAL = D + 2;  // output, largest score, sum of weights

}  // namespace

extern "C" {

struct AttentionArgs {
  const void* query;            // [T, num_heads, D], rows query_stride apart
  const void* key;              // [num_blocks, num_kv_heads, block_size, D], or as in kv_int8.h
  const void* value;            // likewise
  void* out;                    // [T, num_heads, D]
  const int32_t* block_tables;  // [num_requests, table_stride]
  const int32_t* query_starts;  // [num_requests + 1]
  const int32_t* seq_lens;      // [num_requests]
  const int32_t* members;       // requests of the groups that share a prefix, group after group
  const int32_t* group_starts;  // [num_groups + 1] into members
  const int32_t* shared_lens;   // [num_groups] tokens of the prefix, whole blocks
  const float* sinks;           // [num_heads] a score each that weighs no value; null: none
  const int32_t* limits;        // [T] the last position that a token sees, growing in a request; null: its own
  int64_t num_groups, num_requests, num_heads, num_kv_heads, block_size, table_stride, query_stride;
  int64_t window;  // 0: none
  int64_t span;    // positions of a piece of a decode; 0: as many as suit the batch
  float scale, softcap;  // softcap: as SOFTCAP says
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

// From a position on to the end of its block.
struct Int8Rows {
  const int8_t* numbers;  // [rows, D]
  const float* scales;    // [rows]
};

inline Int8Rows int8_rows(const Args& a, const void* cache, const int32_t* table, int head, int position) {
  const int64_t block = table[position / a.block_size], offset = position % a.block_size;
  const int8_t* first = (const int8_t*)cache + int8_offset(block, a.num_kv_heads, head, a.block_size, D);
  return {first + offset * D, (const float*)(first + a.block_size * D) + offset};
}

// Into the second-level cache: of the first level's misses too few can wait for memory at the same time.
// With AVX2, decode attention that fetched into the first level read long contexts at a third of what a thread reads in
// order.
inline void prefetch(const void* row, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)row + i, 0, 2);
}

// Which part of the next step's keys and values a tile of rows fetches while it computes: `part` of `parts`, of those
// before position `end`.
struct NextStep {
  int part, parts, end;

  // Of the keys and values from `position` on, of which all parts together fetch `count`.
  template <class T>
  void fetch(const Args& a, const int32_t* table, int head, int position, int count) const {
    for (int t = position + count * part / parts; t < std::min(position + count * (part + 1) / parts, end); ++t) {
      if constexpr (READS_INT8) {
        prefetch(int8_rows(a, a.key, table, head, t).numbers, D);
        prefetch(int8_rows(a, a.value, table, head, t).numbers, D);
      } else {
        const T* keys = kv_row<T>(a, a.key, table, head, t);
        prefetch(keys, D * sizeof(T));
        prefetch((const T*)a.value + (keys - (const T*)a.key), D * sizeof(T));
      }
    }
  }
};

// A scaled score s becomes softcap * tanh(s / softcap), before any position is hidden.
inline Vec limited(const Args& a, Vec score) {
  if constexpr (LIMITS_SCORES) return hyperbolic_tangent(score * (1.f / a.softcap)) * a.softcap;
  return score;
}

// Where a row's result goes: normalized to `out`, or as it is to `partial` if that is set. A sink enters the sum of
// weights only when the row is normalized, thus once, into however many parts the row was cut. If no score is above that
// of what is not seen, all that the row sees are infinite, and without a sink nothing can be weighed: the result is NaN.
template <class T>
struct Target {
  T* out;
  float* partial;
  const float* sink;  // null: none

  void write(const Vec* o, float top, float weights) const {
    if (partial) {
      for (int i = 0; i < VECS; ++i) store(partial + i * LANES, o[i]);
      partial[D] = top;
      partial[D + 1] = weights;
    } else {
      if (sink)
        weights += std::exp(*sink - top);
      else if (top < NOT_SEEN)
        weights = NAN;
      for (int i = 0; i < VECS; ++i) store(out + i * LANES, o[i] * (1.f / weights));
    }
  }
};

// Columns become rows: calls write(row, its vectors) for the first `num_rows` columns of `output`.
template <int R, class F>
void turn_columns(const float (&output)[D][R], int num_rows, F&& write) {
  for (int first = 0; first < num_rows; first += LANES) {
    Vec turned[LANES][VECS];
    for (int e = 0; e < VECS; ++e) {
      Vec block[LANES];
      for (int d = 0; d < LANES; ++d) block[d] = load(&output[e * LANES + d][first]);
      transpose(block);
      for (int r = 0; r < LANES; ++r) turned[r][e] = block[r];
    }
    for (int r = 0; r < LANES && first + r < num_rows; ++r) write(first + r, turned[r]);
  }
}

// A query head of a token.
template <class T>
struct Row {
  const T* query;
  int first, last;  // positions that the token sees, both included; `first` is read if there is a window
  Target<T> target;
};

}  // namespace
