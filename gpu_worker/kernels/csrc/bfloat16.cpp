// Products of rows with a bfloat16 matrix in float32 arithmetic, for processors whose bfloat16 products oneDNN does not
// know. Needs FMA.
//
// The matrix lies in panels of two registers of outputs, in a panel input after input. Of an input a word holds two
// numbers, an output of the first register in its lower half and one of the second in its upper half, so that a shift and
// a mask make floats of them. A sum adds its inputs in their order, whatever the other rows are.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "vec.h"

namespace {

struct Product {
  const BF16* rows;        // [num_rows, inputs]
  const uint32_t* matrix;  // [outputs, inputs] of whole panels, packed
  const float* bias;       // [outputs] or none
  BF16* out;               // [num_rows, outputs]
  int64_t num_rows, inputs, outputs;
};

#if defined(__FMA__) && defined(__AVX2__)
constexpr bool USABLE = true;
#else
constexpr bool USABLE = false;
#endif
constexpr int PANEL = 2 * LANES;  // outputs
constexpr int AT_ONCE = 6;        // rows whose sums registers hold
constexpr int STRETCH = 96;       // rows that are computed together, so that a second-level cache holds them
constexpr int AHEAD = 64;         // inputs fetched before their use

// The part of `count` rows that comes `part`-th of `parts`: as equal as can be, because a lone row wastes registers.
inline int64_t part_start(int64_t count, int64_t part) {
  const int64_t parts = (count + AT_ONCE - 1) / AT_ONCE;
  return count * part / parts;
}

// `x`: [inputs, R]. `sums`: [R, PANEL].
template <int R>
void add_rows(const float* x, const uint32_t* panel, int64_t inputs, bool fetch, float* sums) {
  Vec lower[R] = {}, upper[R] = {};
  for (int64_t k = 0; k < inputs; ++k, panel += LANES, x += R) {
    if (fetch) __builtin_prefetch(panel + AHEAD * LANES, 0, 2);
    VecBits words;
    memcpy(&words, panel, sizeof words);
    const Vec first = (Vec)(words << 16), second = (Vec)(words & 0xffff0000u);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      lower[r] += first * x[r];
      upper[r] += second * x[r];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    store(sums + r * PANEL, lower[r]);
    store(sums + r * PANEL + LANES, upper[r]);
  }
}

void add_some_rows(int64_t count, const float* x, const uint32_t* panel, int64_t inputs, bool fetch, float* sums) {
  switch (count) {
    case 1: return add_rows<1>(x, panel, inputs, fetch, sums);
    case 2: return add_rows<2>(x, panel, inputs, fetch, sums);
    case 3: return add_rows<3>(x, panel, inputs, fetch, sums);
    case 4: return add_rows<4>(x, panel, inputs, fetch, sums);
    case 5: return add_rows<5>(x, panel, inputs, fetch, sums);
    default: return add_rows<AT_ONCE>(x, panel, inputs, fetch, sums);
  }
}

// One panel for the rows [first, first + rows), which `x` holds.
void multiply(const Product& p, const float* x, int64_t first, int64_t rows, int64_t panel) {
  alignas(64) float sums[AT_ONCE * PANEL];
  const uint32_t* matrix = p.matrix + panel * LANES * p.inputs;
  for (int64_t part = 0, start = 0; start < rows; ++part) {
    const int64_t end = part_start(rows, part + 1);
    add_some_rows(end - start, x + start * p.inputs, matrix, p.inputs, part == 0, sums);
    for (int i = 0; i < PANEL; i += LANES) {
      const int64_t output = panel * PANEL + i, left = p.outputs - output;
      if (left <= 0) break;
      const Vec bias = p.bias ? load(p.bias + output, left) : Vec{};
      for (int64_t r = start; r < end; ++r)
        store(p.out + (first + r) * p.outputs + output, load(sums + (r - start) * PANEL + i) + bias, left);
    }
    start = end;
  }
}

// A row as floats, next to the others of its part.
void arrange(const Product& p, int64_t first, int64_t rows, int64_t row, float* x) {
  int64_t part = 0;
  while (part_start(rows, part + 1) <= row) ++part;
  const int64_t start = part_start(rows, part), width = part_start(rows, part + 1) - start;
  const BF16* from = p.rows + (first + row) * p.inputs;
  float* to = x + start * p.inputs + row - start;
  for (int64_t k = 0; k < p.inputs; ++k) {
    const uint32_t bits = (uint32_t)from[k].bits << 16;
    memcpy(to + k * width, &bits, sizeof bits);
  }
}

void run(const Product& p, int threads) {
  static thread_local std::vector<float> scratch;
  const size_t most = std::min<int64_t>(STRETCH, p.num_rows) * p.inputs;
  if (scratch.size() < most) scratch.resize(most);
  float* x = scratch.data();
  for (int64_t first = 0; first < p.num_rows; first += STRETCH) {
    const int64_t rows = std::min<int64_t>(STRETCH, p.num_rows - first);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < rows; ++row) arrange(p, first, rows, row, x);
#pragma omp for schedule(static)
      for (int64_t panel = 0; panel < (p.outputs + PANEL - 1) / PANEL; ++panel) multiply(p, x, first, rows, panel);
    }
  }
}

}  // namespace

// Whether this processor has FMA; without it, do not multiply.
extern "C" int32_t can_multiply() { return USABLE; }

// How many outputs a panel has; of each input it takes two bytes for each of them.
extern "C" int64_t panel_outputs() { return PANEL; }

// Arranges `weight`, [outputs, inputs], as the products read it; zeros fill the last panel.
extern "C" void pack_bfloat16(const uint16_t* weight, uint32_t* matrix, int64_t outputs, int64_t inputs,
                              int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t panel = 0; panel < (outputs + PANEL - 1) / PANEL; ++panel)
    for (int64_t k = 0; k < inputs; ++k)
      for (int64_t lane = 0; lane < LANES; ++lane) {
        const int64_t first = panel * PANEL + lane, second = first + LANES;
        const uint32_t lower = first < outputs ? weight[first * inputs + k] : 0;
        const uint32_t upper = second < outputs ? weight[second * inputs + k] : 0;
        matrix[(panel * inputs + k) * LANES + lane] = lower | upper << 16;
      }
}

// out = rows times matrixᵀ, plus bias if there is one.
extern "C" void multiply_bfloat16(const void* rows, const void* matrix, const float* bias, void* out, int64_t num_rows,
                                  int64_t inputs, int64_t outputs, int32_t threads) {
  run({(const BF16*)rows, (const uint32_t*)matrix, bias, (BF16*)out, num_rows, inputs, outputs}, threads);
}
