// Arranges a matrix in panels of outputs, in a panel the words of inputs one after the other, of each word one for every
// output. A word has 4 bytes: a float32 number or two bfloat16 ones.
#pragma once
#include <algorithm>
#include <cstdint>

#include "parallel.h"
#include "vec.h"

namespace {

// Words [k, k + LANES) of up to LANES outputs, as far as there are any; the others are zero.
inline void load_square(const uint32_t* weight, int64_t outputs, int64_t words, int64_t output, int64_t k, Vec* square) {
  const int64_t width = std::min<int64_t>(LANES, words - k);
  for (int64_t i = 0; i < LANES; ++i) {
    square[i] = Vec{};
    if (output + i >= outputs) continue;
    const uint32_t* from = weight + (output + i) * words + k;
    if (width == LANES)
      memcpy(&square[i], from, sizeof square[i]);
    else
      memcpy(&square[i], from, width * sizeof *from);
  }
}

// `weight`: [outputs, words]. `matrix`: whole panels of `panel` outputs, a multiple of LANES; zeros fill the last one.
inline void pack_words(const uint32_t* weight, uint32_t* matrix, int64_t outputs, int64_t words, int64_t panel,
                       int threads) {
  for_pieces((outputs + panel - 1) / panel, threads, [&](int64_t number) {
    for (int64_t k = 0; k < words; k += LANES)
      for (int64_t lane = 0; lane < panel; lane += LANES) {
        Vec square[LANES];
        load_square(weight, outputs, words, number * panel + lane, k, square);
        // In registers: reading one output's words and writing each to its own line would touch a new line of the
        // matrix for every 4 bytes.
        transpose(square);
        uint32_t* to = matrix + (number * words + k) * panel + lane;
        for (int64_t i = 0; i < std::min<int64_t>(LANES, words - k); ++i)
          memcpy(to + i * panel, &square[i], sizeof square[i]);
      }
  });
}

}  // namespace
