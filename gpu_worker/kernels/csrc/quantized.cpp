// Products of rows with a matrix of 4 or 8 bits, whose groups of 32 inputs have a scale, and possibly an offset, for each
// output. Numbers of 4 bits may be floats (e2m1), which doubled are integers. Rows are rounded to int8 by the same groups.
// Needs AVX2; uses AVX-512 and VNNI.
//
// The matrix lies in panels of 16 outputs, in a panel group after group, of a group eight fours of inputs, of a four its
// 16 outputs. Two fours of 4 bits share 64 bytes: the first in the lower halves. A thread unpacks a panel once for a
// stretch of rows. Sums of a group are exact, and a row adds its groups in their order: it depends on no other row.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "dot.h"
#include "parallel.h"
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

template <class T>
void finish(const Product& p, const float (*sums)[PANEL], int64_t first_row, int64_t rows, int64_t output) {
  for (int i = 0; i < PANEL; i += LANES) {
    const int64_t left = p.outputs - output - i;
    if (left <= 0) return;
    const Vec bias = p.bias ? load(p.bias + output + i, left) : Vec{};
    for (int64_t r = 0; r < rows; ++r)
      store((T*)p.out + (first_row + r) * p.outputs + output + i, load(sums[r] + i) * p.factor + bias, left);
  }
}

// A stretch of rows, from `first` on, and the panels [begin, end).
template <int KIND, bool OFFSETS, class T>
void multiply(const Product& p, RowsGroup x, int64_t first, int64_t rows, int64_t begin, int64_t end) {
  alignas(64) float sums[STRETCH][PANEL];
  for (int64_t b = begin; b < end; ++b) {
    if (rows <= FEW<KIND>)
      multiply_few<KIND, OFFSETS, FEW<KIND>>(p.matrix, x, rows, b, sums);
    else
      multiply_many<KIND, OFFSETS>(p.matrix, x, rows, b, sums);
    finish<T>(p, sums, first, rows, b * PANEL);
  }
}

template <int KIND, bool OFFSETS, class T>
void run(const Product& p, int threads) {
  static thread_local Rounded scratch;
  Rounded& x = scratch;
  const int64_t groups = p.inputs / GROUP, panels = (p.outputs + PANEL - 1) / PANEL;
  x.reserve(groups * std::min<int64_t>(STRETCH, p.num_rows));
  for (int64_t first = 0; first < p.num_rows; first += STRETCH) {
    const int64_t rows = std::min<int64_t>(STRETCH, p.num_rows - first);
    // Groups of all rows one after the other, so that a few rows too are shared among all threads.
    for_ranges(rows * groups, SMALL, rows * groups > SMALL ? threads : 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / groups, g = i % groups;
        round_group<KIND>((const T*)p.rows + (first + row) * p.inputs + g * GROUP, p.matrix.least, g * rows + row, x);
      }
    });
    for_ranges(panels, 1, threads,
               [&](int64_t begin, int64_t end) { multiply<KIND, OFFSETS, T>(p, x.from(0), first, rows, begin, end); });
  }
}

template <class T>
void choose(int kind, const Product& p, int threads) {
  if (kind == FLOAT4) return run<FLOAT4, false, T>(p, threads);
  if (kind == INT4) return p.matrix.offsets ? run<INT4, true, T>(p, threads) : run<INT4, false, T>(p, threads);
  p.matrix.offsets ? run<INT8, true, T>(p, threads) : run<INT8, false, T>(p, threads);
}
constexpr bool USABLE = true;
#else
constexpr bool USABLE = false;
template <class T>
void choose(int, const Product&, int) {}
#endif

}  // namespace

// Whether this processor has AVX2 and what comes with it; without it, do not multiply.
extern "C" int32_t can_multiply() { return USABLE; }

// out = rows times matrixᵀ, plus bias if there is one. `kind`: see dot.h; whole 32s of inputs.
extern "C" void multiply_quantized(int32_t kind, int32_t is_bf16, const void* rows, const uint8_t* matrix,
                                   const uint8_t* scales, const uint16_t* offsets, const float* bias, void* out,
                                   int64_t num_rows, int64_t inputs, int64_t outputs, int64_t groups_per_scale,
                                   float factor, int32_t least, int32_t threads) {
  const Matrix packed = {matrix, scales, offsets, inputs / GROUP, groups_per_scale, least};
  const Product p = {rows, packed, bias, out, num_rows, inputs, outputs, factor};
  is_bf16 ? choose<BF16>(kind, p, threads) : choose<float>(kind, p, threads);
}

// Packs `values`, [outputs, inputs] int8, into zeros as the products read them.
extern "C" void pack_quantized(int32_t bits, const int8_t* values, uint8_t* matrix, int64_t outputs, int64_t inputs,
                               int32_t least, int32_t threads) {
  for_pieces((outputs + PANEL - 1) / PANEL, threads, [&](int64_t piece) {
    const int64_t first = piece * PANEL;
    const int8_t* rows = values + first * inputs;
    uint8_t* panel = matrix + first * inputs * bits / 8;
    bits == 4 ? pack_panel<INT4>(rows, outputs - first, inputs, least, panel)
              : pack_panel<INT8>(rows, outputs - first, inputs, least, panel);
  });
}

// Packs `blocks` of floats of 4 bits, [outputs, inputs / 2], into zeros as the products read them.
extern "C" void pack_float4(const uint8_t* blocks, uint8_t* matrix, int64_t outputs, int64_t inputs, int32_t threads) {
  for_pieces((outputs + PANEL - 1) / PANEL, threads, [&](int64_t piece) {
    const int64_t bytes = piece * PANEL * inputs / 2;
    pack_float4_panel(blocks + bytes, outputs - piece * PANEL, inputs, matrix + bytes);
  });
}

// Rounds `groups` groups of a weight, of whole 32s of numbers each, to -8 to 7; `extremes`: the levels, as positive
// numbers, that the largest number of a group may become. Writes as many values as numbers, and a scale for each group.
extern "C" void round_to_4_bits(int32_t is_bf16, const void* weight, int64_t groups, int64_t group,
                                const float* extremes, int64_t count, int8_t* values, float* scales, int32_t threads) {
  is_bf16 ? round_groups((const BF16*)weight, groups, group, extremes, count, values, scales, threads)
          : round_groups((const float*)weight, groups, group, extremes, count, values, scales, threads);
}
