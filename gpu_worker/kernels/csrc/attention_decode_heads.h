// One bfloat16 token, as in attention_decode_pairs.h: one KV head, or all of them.
//
// All are read in the order of addresses: of a span first the keys of all heads, block after block, then the values.
// The processor fetches ahead by itself what is read in that order. The blocks of a single head lie apart, so that a
// thread gets no more than the few lines that it may ask for at the same time, half of what memory could give it.
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

}  // namespace
#endif
