// bfloat16 tokens as in attention_decode_pairs.h: one with one KV head or all of them, or a few tokens of a request.
//
// All heads are read in the order of addresses: of a span first their keys, block after block, then the values. The
// processor fetches ahead by itself what is read in that order. The blocks of a single head lie apart, so that a thread
// gets no more than the few lines that it may ask for at the same time, half of what memory could give it.
#pragma once
#include <algorithm>
#include <vector>

#include "attention_decode_pairs.h"

#ifdef DECODE_IN_PAIRS
namespace {

template <int G>
class HeadsDecode {
 public:
  HeadsDecode(const Args& args, const int32_t* blocks, int first_head, int count, const BF16* query, int end_,
              int visible)
      : a(args), table(blocks), head(first_head), end(end_) {
    kernels.reserve(count);
    for (int h = 0; h < count; ++h) kernels.emplace_back(a, query + h * G * D, end, visible);
  }

  void run(int begin, const Target<BF16>* targets) {
    // A loop that only reads gets 18 GB/s head by head, because the blocks of one head are 4 KiB each and 32 KiB apart,
    // and 28 to 31 GB/s in this order. Kernels without bfloat16 instructions lose 7 to 15 % by it: they compute as long
    // as they read.
    for (int start = begin; start < end; start += SPAN) {
      const int count = std::min(SPAN, end - start);
      read(a.key, start, count, a.value, start, [&](int h, int c, const BF16* keys, const NextRun& next) {
        kernels[h].score(keys, next, start + c, c);
      });
      for (auto& kernel : kernels) kernel.weigh((count + LANES - 1) / LANES);
      read(a.value, start, count, a.key, start + SPAN, [&](int h, int c, const BF16* values, const NextRun& next) {
        kernels[h].add_values(values, next, c, std::min(RUN, count - c));
      });
    }
    for (int h = 0; h < (int)kernels.size(); ++h)
      for (int g = 0; g < G; ++g) kernels[h].write(g, targets[h * G + g]);
  }

 private:
  const Args& a;
  const int32_t* table;
  const int head, end;
  std::vector<PairDecode<G>> kernels;

  // Calls work(h, c, rows, next) for each head and each run from start + c on. Behind these `count` positions those of
  // the cache `then` are read, from `first` on.
  template <class F>
  void read(const void* cache, int start, int count, const void* then, int first, F&& work) const {
    const int last = kernels.size() - 1;
    const int64_t stride = a.block_size * D;  // between heads
    for (int c = 0; c < count; c += RUN) {
      const BF16 *rows = kv_row<BF16>(a, cache, table, head, start + c), *behind = rows;
      if (c + RUN < count)
        behind = kv_row<BF16>(a, cache, table, head, start + c + RUN);
      else if (first < end)
        behind = kv_row<BF16>(a, then, table, head, first);
      // Asking for every second line reads 25 instead of 18 GB/s: the processor fetches the others itself and runs
      // further ahead than the some 24 lines that a thread may wait for.
      const bool every_line = !lies_in_order(start + c);
      for (int h = 0; h <= last; ++h, rows += stride) work(h, c, rows, {h < last ? rows + stride : behind, every_line});
    }
  }

  // Whether the processor will have begun to fetch ahead. Then every second line is enough: it fetches the others, and
  // more of them at once than it may be asked for.
  bool lies_in_order(int position) const {
    if (a.block_size != RUN || (int64_t)kernels.size() < a.num_kv_heads || position < RUN) return false;
    return table[position / RUN] == table[position / RUN - 1] + 1;
  }
};

// A few tokens of a request and one KV head, side by side: a key or value that was read serves all of them. Each has the
// sums of its decode, bit by bit.
template <int G>
class RunDecode {
 public:
  RunDecode(const Args& args, const int32_t* blocks, int kv_head, const Row<BF16>* first, int num_tokens)
      : a(args), table(blocks), head(kv_head), rows(first), count(num_tokens) {}

  void run(int begin, int end) {
    std::vector<PairDecode<G>> kernels;
    kernels.reserve(count);
    for (int t = 0; t < count; ++t) kernels.emplace_back(a, row(t).query, end_of(t, end), row(t).first);
    for (int start = begin; start < end; start += SPAN) {
      int first = 0;  // the first token that sees something here; later ones see more
      while (end_of(first, end) <= start) ++first;
      const int most = std::min(SPAN, end - start);
      for (int c = 0; c < most; c += RUN) {
        const BF16* keys = kv_row<BF16>(a, a.key, table, head, start + c);
        prefetch((const BF16*)a.value + (keys - (const BF16*)a.key), RUN * D * sizeof(BF16));
        for (int t = first; t < count; ++t)
          if (seen(t, start, end) > c) kernels[t].template score<false>(keys, {}, start + c, c);
      }
      gather_values(start, most);
      for (int t = first; t < count; ++t) {
        const int own = seen(t, start, end);
        kernels[t].weigh((own + LANES - 1) / LANES);
        kernels[t].add_pairs(values, own);
      }
    }
    for (int t = 0; t < count; ++t)
      for (int g = 0; g < G; ++g) kernels[t].write(g, rows[t * G + g].target);
  }

 private:
  const Args& a;
  const int32_t* table;
  const int head;
  const Row<BF16>* rows;  // [count, G]
  const int count;
  alignas(64) uint32_t values[SPAN / 2][D];  // pairs of positions, of every 32 elements the lower four of eight first

  const Row<BF16>& row(int t) const { return rows[t * G]; }
  int end_of(int t, int end) const { return std::min(row(t).last + 1, end); }
  int seen(int t, int start, int end) const { return std::min(SPAN, end_of(t, end) - start); }

  // Once for all tokens. What a token does not see has the weight zero in it.
  void gather_values(int start, int most) {
    for (int t = 0; t < most; t += 2) {
      const BF16* row = kv_row<BF16>(a, a.value, table, head, start + t);
      for (int d = 0; d < D; d += 2 * LANES) {
        const __m512i even = _mm512_loadu_si512(row + d);
        const __m512i odd = t + 1 < most ? _mm512_loadu_si512(row + D + d) : _mm512_setzero_si512();
        _mm512_store_si512(values[t / 2] + d, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(values[t / 2] + d + LANES, _mm512_unpackhi_epi16(even, odd));
      }
    }
  }
};

}  // namespace
#endif
