// Keys and values in 8 bits. A block of one KV head holds block_size * D numbers, then a float32 scale for each of its
// tokens: element = number * scale. A token's numbers depend on that token alone, so neither its batch nor its chunk
// nor later tokens change them.
#pragma once
#include <cstdint>

#include "vec.h"

namespace {

// Where one KV head of one block begins, in a cache [num_blocks, num_kv_heads, block_size * (size + 4)] bytes.
inline int64_t int8_offset(int64_t block, int64_t num_kv_heads, int64_t head, int64_t block_size, int64_t size) {
  return (block * num_kv_heads + head) * block_size * (size + (int64_t)sizeof(float));
}

// By the additions' own rounding, which is that of PyTorch's round: both write the same bits.
inline Vec round_to_even(Vec x) { return (x + 12582912.f) - 12582912.f; }  // 1.5 * 2^23; for |x| < 2^22

// Stores the first `count` of a row's `size` elements: scale = largest / 127, number = element / scale. A row with an
// infinity or a NaN gets a scale of NaN, so that what reads it is NaN too.
template <class T>
inline void store_int8_row(const T* row, int64_t count, int8_t* cache, int64_t slot, int64_t num_kv_heads, int64_t head,
                           int64_t block_size, int64_t size) {
  int8_t* block = cache + int8_offset(slot / block_size, num_kv_heads, head, block_size, size);
  const int64_t offset = slot % block_size;
  Vec most = {}, poison = {};
  for (int64_t i = 0; i < count; i += LANES) {
    const Vec x = load(row + i, count - i);
    most = maximum(x < 0.f ? -x : x, most);
    poison += x * 0.f;
  }
  // For each head of each token: a scale for a block of 16 tokens takes fewer bytes (50 % of bfloat16's instead of 53 %
  // for heads of 64), but a later token may be larger. Rounding its neighbours again would make KV depend on chunks and
  // preemptions.
  const float scale = largest(most) / 127.f;
  ((float*)(block + block_size * size))[offset] = scale + sum(poison);
  const Vec divisor = splat(scale > 0.f ? scale : 1.f);
  for (int64_t i = 0; i < count; i += LANES) {
    Vec x = load(row + i, count - i) / divisor;
    x = x < 127.f ? x : splat(127.f);  // a NaN becomes 127 too
    x = x > -127.f ? x : splat(-127.f);
    store(block + offset * size + i, round_to_even(x), count - i);
  }
}

// [size] numbers of float32 at `to`.
inline void load_int8_row(const int8_t* numbers, float scale, int64_t size, float* to) {
  for (int64_t i = 0; i < size; i += LANES) store(to + i, load(numbers + i) * scale);
}

}  // namespace
