// One product of rounded rows with panels of a quantized matrix.
#pragma once
#include <algorithm>
#include <cstdint>

#include "dot.h"
#include "quantized.h"
#include "quantized_rows.h"
#include "vec.h"

namespace {

struct Product {
  const void* rows;   // [num_rows, inputs], bfloat16 or float32
  Matrix matrix;      // [outputs, inputs]
  const float* bias;  // [outputs] or none
  void* out;          // [num_rows, outputs], of the rows' dtype
  int64_t num_rows, inputs, outputs;
  float factor;  // of all scales and offsets
};

#ifdef HAS_DOT
constexpr int SMALL = 64;     // groups that one thread rounds sooner than another one wakes up
constexpr int STRETCH = 128;  // rows that are computed together: of 3,072 inputs they take 400 KB of the cache

// A row's group as int8 by its largest number. A number that is not finite makes the unit NaN.
template <int KIND, class T>
void round_group(const T* x, int32_t least, int64_t index, Rounded& to) {
  constexpr int VECS = GROUP / LANES;
  Vec parts[VECS];
  VecInt most = {};
#pragma GCC unroll 4
  for (int i = 0; i < VECS; ++i) {
    parts[i] = load(x + i * LANES);
    const VecInt size = magnitude(parts[i]);
    most = size > most ? size : most;
  }
  // By group of 32 and not by row: models have inputs with a few very large numbers, which would cost all others of the
  // row their precision.
  const float top = finite_magnitude(most), scale = top > 0 ? 127.f / top : 0.f;
  VecInt rounded[VECS];
#pragma GCC unroll 4
  for (int i = 0; i < VECS; ++i) rounded[i] = to_int(parts[i] * scale);
  int8_t* values = to.values.data() + index * GROUP;
  store_bytes(values, rounded);
  to.units[index] = top / 127.f;
  int32_t sums[2];
  sum_pairs(values, sums);
  to.starts[index] = first_sum<KIND>(sums, least);
  to.totals[index] = (float)(sums[0] + sums[1]) * to.units[index];
}

constexpr int TOGETHER = 2;  // panels whose outputs fill a line of a bfloat16 row

// The sums of rows and of `panels` panels from output `output` on. Row after row, whole lines: rows whose lines share a set of
// the cache (4 KiB apart) evicted half-written ones, a tenth of the time of 128 rows.
template <class T>
void finish(const Product& p, const float (*sums)[STRETCH][PANEL], int64_t panels, int64_t first_row, int64_t rows,
            int64_t output) {
  const int64_t count = std::min<int64_t>(panels * PANEL, p.outputs - output);
  T* out = (T*)p.out + first_row * p.outputs + output;
  for (int64_t r = 0; r < rows; ++r, out += p.outputs)
    for (int64_t i = 0; i < count; i += LANES) {
      const Vec bias = p.bias ? load(p.bias + output + i, count - i) : Vec{};
      store(out + i, load(&sums[i / PANEL][r][i % PANEL]) * p.factor + bias, count - i);
    }
}

// A stretch of rows, from `first` on, and the panels [begin, end).
template <int KIND, bool OFFSETS, class T>
void multiply(const Product& p, RowsGroup x, int64_t first, int64_t rows, int64_t begin, int64_t end) {
  alignas(64) float sums[TOGETHER][STRETCH][PANEL];
  for (int64_t b = begin; b < end; b += TOGETHER) {
    const int64_t panels = std::min<int64_t>(TOGETHER, end - b);  // experts' ranges may have an odd number
    for (int64_t n = 0; n < panels; ++n)
      if (rows <= FEW<KIND>)
        multiply_few<KIND, OFFSETS, FEW<KIND>>(p.matrix, x, rows, b + n, sums[n]);
      else
        multiply_many<KIND, OFFSETS>(p.matrix, x, rows, b + n, sums[n]);
    finish<T>(p, sums, panels, first, rows, b * PANEL);
  }
}
#endif

}  // namespace
