// Products of rows with a bfloat16 matrix in float32 arithmetic, for processors whose bfloat16 products oneDNN does not
// know. Needs FMA.
//
// The matrix lies in panels of two registers of outputs, in a panel input after input. Of an input a word holds two
// numbers, an output of the first register in its lower half and one of the second in its upper half, so that a shift and
// a mask make floats of them. A sum adds its inputs in their order, whatever the other rows are.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "parallel.h"
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
constexpr int PANEL = 2 * LANES;   // outputs
// PyTorch's own product takes 3.5 ms of CPU for 8 rows of a 3072 by 1024 matrix on AVX2, this kernel 0.85.
constexpr int AT_ONCE = 6;         // rows whose sums registers hold
constexpr int STRETCH = 96;        // rows that are computed together, so that a second-level cache holds them
constexpr int CHUNK = 128;         // inputs that all rows use while a first-level cache holds them, and fetched ahead
constexpr int SMALL = 1 << 13;     // numbers of rows that one thread arranges sooner than another one wakes up
// The order of a row's sums depends on none of these numbers, so a row has the same bits in every batch.
constexpr int LONE = 4, SEVERAL = 2;  // panels that a lone row, or more rows, read at the same time

// How many panels R rows multiply at once: an addition takes 4 cycles, so two registers of sums for each row would leave
// the processor waiting.
template <int R>
constexpr int PANELS = R == 1 ? LONE : R <= 3 ? SEVERAL : 1;

// The part of `count` rows that comes `part`-th of `parts`: as equal as can be, because a lone row wastes registers.
inline int64_t part_start(int64_t count, int64_t part) {
  const int64_t parts = (count + AT_ONCE - 1) / AT_ONCE;
  return count * part / parts;
}

// Inputs [begin, end) of P panels, whose words lie `stride` after each other.
struct Chunk {
  const uint32_t* panels;
  int64_t stride, begin, end;
  int64_t ahead;  // words to what is fetched meanwhile; 0: it was fetched
};

// `x`: [inputs, R]. `sums`: [P, R, PANEL], to which the products of the chunk are added.
template <int R, int P>
void add_rows(const float* x, const Chunk& c, float* sums) {
  Vec lower[P][R], upper[P][R];
#pragma GCC unroll 4
  for (int q = 0; q < P; ++q)
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      lower[q][r] = load(sums + (q * R + r) * PANEL);
      upper[q][r] = load(sums + (q * R + r) * PANEL + LANES);
    }
  const uint32_t* panel = c.panels + c.begin * LANES;
  x += c.begin * R;
  for (int64_t k = c.begin; k < c.end; ++k, panel += LANES, x += R) {
#pragma GCC unroll 4
    for (int q = 0; q < P; ++q) {
      const uint32_t* words_at = panel + q * c.stride;
      if (c.ahead) __builtin_prefetch(words_at + c.ahead);
      VecBits words;
      memcpy(&words, words_at, sizeof words);
      const Vec first = (Vec)(words << 16), second = (Vec)(words & 0xffff0000u);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        lower[q][r] += first * x[r];
        upper[q][r] += second * x[r];
      }
      if (P > 1 && R > 1) asm volatile("" ::: "memory");  // the inputs are read again: there are no registers for them
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < P; ++q)
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      store(sums + (q * R + r) * PANEL, lower[q][r]);
      store(sums + (q * R + r) * PANEL + LANES, upper[q][r]);
    }
}

// `count` panels for R rows, as many at once as there are registers for. `sums`: [count, R, PANEL].
template <int R>
void add_part(const float* x, Chunk c, int64_t count, float* sums) {
  int64_t q = 0;
  for (; q + PANELS<R> <= count; q += PANELS<R>, c.panels += PANELS<R> * c.stride)
    add_rows<R, PANELS<R>>(x, c, sums + q * R * PANEL);
  for (; q < count; ++q, c.panels += c.stride) add_rows<R, 1>(x, c, sums + q * R * PANEL);
}

void add_some_rows(int64_t rows, const float* x, const Chunk& c, int64_t count, float* sums) {
  switch (rows) {
    case 1: return add_part<1>(x, c, count, sums);
    case 2: return add_part<2>(x, c, count, sums);
    case 3: return add_part<3>(x, c, count, sums);
    case 4: return add_part<4>(x, c, count, sums);
    case 5: return add_part<5>(x, c, count, sums);
    default: return add_part<AT_ONCE>(x, c, count, sums);
  }
}

inline int64_t panels_at_once(int64_t rows) { return rows == 1 ? LONE : SEVERAL; }

// Rows [start, end) of a stretch from row `first` on, and one panel: the sums become outputs.
void finish(const Product& p, int64_t first, int64_t start, int64_t end, int64_t panel, const float* sums) {
  for (int i = 0; i < PANEL; i += LANES) {
    const int64_t output = panel * PANEL + i, left = p.outputs - output;
    if (left <= 0) break;
    const Vec bias = p.bias ? load(p.bias + output, left) : Vec{};
    for (int64_t r = start; r < end; ++r)
      store(p.out + (first + r) * p.outputs + output, load(sums + (r - start) * PANEL + i) + bias, left);
  }
}

// `count` panels for the rows [first, first + rows), which `x` holds.
void multiply_panels(const Product& p, const float* x, int64_t first, int64_t rows, int64_t panel, int64_t count) {
  alignas(64) float sums[SEVERAL * STRETCH * PANEL];
  std::fill_n(sums, count * rows * PANEL, 0.f);
  const int64_t stride = LANES * p.inputs;
  for (int64_t begin = 0; begin < p.inputs; begin += CHUNK) {
    const int64_t end = std::min(begin + CHUNK, p.inputs);
    // Behind the last chunk: the first one of the panels that come next.
    const int64_t ahead = end < p.inputs ? CHUNK * LANES : count * stride - begin * LANES;
    for (int64_t part = 0, start = 0; start < rows; ++part) {
      const int64_t next = part_start(rows, part + 1);
      const Chunk chunk{p.matrix + panel * stride, stride, begin, end, part ? 0 : ahead};
      add_some_rows(next - start, x + start * p.inputs, chunk, count, sums + start * count * PANEL);
      start = next;
    }
  }
  for (int64_t part = 0, start = 0; start < rows; ++part) {
    const int64_t next = part_start(rows, part + 1), width = next - start;
    for (int64_t q = 0; q < count; ++q)
      finish(p, first, start, next, panel + q, sums + (start * count + q * width) * PANEL);
    start = next;
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
  const int64_t panels = (p.outputs + PANEL - 1) / PANEL;
  for (int64_t first = 0; first < p.num_rows; first += STRETCH) {
    const int64_t rows = std::min<int64_t>(STRETCH, p.num_rows - first), step = panels_at_once(rows);
    const int64_t grain = std::max<int64_t>(1, SMALL / p.inputs);
    for_ranges(rows, grain, rows > grain ? threads : 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) arrange(p, first, rows, row, x);
    });
    for_ranges(panels, step, threads, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; panel += step)
        multiply_panels(p, x, first, rows, panel, std::min(step, end - panel));
    });
  }
}

}  // namespace

// Whether this processor has FMA; without it, do not multiply.
extern "C" int32_t can_multiply() { return USABLE; }

// How many outputs a panel has.
extern "C" int64_t panel_outputs() { return PANEL; }

// How many outputs and inputs a word of the packed matrix holds, and of how many inputs there must be a multiple.
extern "C" int64_t word_outputs() { return 2; }
extern "C" int64_t word_inputs() { return 1; }
extern "C" int64_t whole_inputs() { return 1; }

// Arranges `weight`, [outputs, inputs], as the products read it; zeros fill the last panel.
extern "C" void pack(const uint16_t* weight, uint32_t* matrix, int64_t outputs, int64_t inputs,
                              int32_t threads) {
  for_pieces((outputs + PANEL - 1) / PANEL, threads, [&](int64_t panel) {
    for (int64_t k = 0; k < inputs; ++k)
      for (int64_t lane = 0; lane < LANES; ++lane) {
        const int64_t first = panel * PANEL + lane, second = first + LANES;
        const uint32_t lower = first < outputs ? weight[first * inputs + k] : 0;
        const uint32_t upper = second < outputs ? weight[second * inputs + k] : 0;
        matrix[(panel * inputs + k) * LANES + lane] = lower | upper << 16;
      }
  });
}

// out = rows times matrixᵀ, plus bias if there is one.
extern "C" void multiply(const void* rows, const void* matrix, const float* bias, void* out, int64_t num_rows,
                                  int64_t inputs, int64_t outputs, int32_t threads) {
  run({(const BF16*)rows, (const uint32_t*)matrix, bias, (BF16*)out, num_rows, inputs, outputs}, threads);
}
