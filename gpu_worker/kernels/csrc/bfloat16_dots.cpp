// Products of rows with a bfloat16 matrix on processors with AVX-512 BF16, whose instruction multiplies pairs of
// bfloat16 numbers and adds both products to a float32 sum.
//
// The matrix lies in panels of four registers of outputs, in a panel the pairs of inputs one after the other, of each
// pair a word with both numbers for every output. A sum adds its pairs in their order, whatever the other rows are.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "dot_bf16.h"
#include "parallel.h"
#include "vec.h"

namespace {

struct Product {
  const BF16* rows;        // [num_rows, inputs]
  const uint32_t* matrix;  // [outputs, inputs] of whole panels and pairs, packed
  const float* bias;       // [outputs] or none
  BF16* out;               // [num_rows, outputs]
  int64_t num_rows, inputs, outputs;

  int64_t pairs() const { return (inputs + 1) / 2; }
};

constexpr int VECS = 4, PANEL = VECS * 16;  // outputs

#ifdef HAS_DOT_BF16
constexpr bool USABLE = true;
constexpr int AT_ONCE = 6;           // rows whose sums registers hold
constexpr int CHUNK = 512;           // pairs that are added before the sums go back to memory, and fetched ahead
constexpr int MOST_ROWS = 264;       // that are computed together
constexpr int TOGETHER = 1 << 19;    // bytes of rows that are computed together: a second-level cache holds them
constexpr int SMALL = 1 << 13;       // numbers of rows that one thread arranges sooner than another one wakes up
constexpr int LINE = 16;             // words

// Inputs of a panel, by pairs: of each pair a word for each output of the panel.
struct Chunk {
  const uint32_t* words;
  int64_t pairs;
  const uint32_t* next;  // what is fetched meanwhile
  int64_t fetching;      // pairs at which it is
};

// The parts of `count` rows are as equal as can be, because a lone row wastes registers.
inline int64_t num_parts(int64_t count) { return (count + AT_ONCE - 1) / AT_ONCE; }
inline int64_t part_start(int64_t count, int64_t part) { return count * part / num_parts(count); }

// Adds the products of a chunk to the sums of R rows, and fetches FETCH lines of the next chunk at each of the first
// pairs. `x`: [pairs, R] words; `sums`: [R, PANEL].
template <int R, int FETCH>
void add_rows(const uint32_t* x, const Chunk& chunk, float* sums) {
  Vec sum[R][VECS];
#pragma GCC unroll 6  // or the sums do not stay in registers
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < VECS; ++i) sum[r][i] = load(sums + r * PANEL + i * LANES);
  const auto add_pair = [&](int64_t k) __attribute__((always_inline)) {
    VecBits words[VECS];
#pragma GCC unroll 4
    for (int i = 0; i < VECS; ++i) memcpy(&words[i], chunk.words + k * PANEL + i * LANES, sizeof words[i]);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < VECS; ++i) sum[r][i] = add_dot(sum[r][i], words[i], x[k * R + r]);
  };
  int64_t k = 0;
  for (const uint32_t* next = chunk.next; k < chunk.fetching; ++k, next += FETCH * LINE) {
#pragma GCC unroll 4
    for (int i = 0; i < FETCH; ++i) __builtin_prefetch(next + i * LINE, 0, 2);
    add_pair(k);
  }
  for (; k < chunk.pairs; ++k) add_pair(k);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < VECS; ++i) store(sums + r * PANEL + i * LANES, sum[r][i]);
}

template <int FETCH>
void add_some_rows(int64_t rows, const uint32_t* x, const Chunk& chunk, float* sums) {
  switch (rows) {
    case 1: return add_rows<1, FETCH>(x, chunk, sums);
    case 2: return add_rows<2, FETCH>(x, chunk, sums);
    case 3: return add_rows<3, FETCH>(x, chunk, sums);
    case 4: return add_rows<4, FETCH>(x, chunk, sums);
    case 5: return add_rows<5, FETCH>(x, chunk, sums);
    default: return add_rows<AT_ONCE, FETCH>(x, chunk, sums);
  }
}

// The next chunk's lines, shared among the parts, so that memory is read while all of them compute.
void add_part(int64_t part, int64_t parts, int64_t rows, const uint32_t* x, Chunk chunk, float* sums) {
  const int64_t lines = chunk.pairs * VECS, begin = lines * part / parts, end = lines * (part + 1) / parts;
  const int64_t at_once = parts == 1 ? 4 : parts < 4 ? 2 : 1;
  chunk.next += begin * LINE;
  chunk.fetching = (end - begin) / at_once;
  if (at_once == 4) return add_some_rows<4>(rows, x, chunk, sums);
  if (at_once == 2) return add_some_rows<2>(rows, x, chunk, sums);
  add_some_rows<1>(rows, x, chunk, sums);
}

// A register of sums of a row to where they go.
inline void finish(const Product& p, Vec sum, int64_t row, int64_t output) {
  const int64_t left = p.outputs - output;
  if (left > 0) store(p.out + row * p.outputs + output, p.bias ? sum + load(p.bias + output, left) : sum, left);
}

// Rows [first, first + rows) and one panel. `x`: part after part, each [pairs, rows of the part].
void multiply_panel(const Product& p, const uint32_t* x, int64_t first, int64_t rows, int64_t panel) {
  alignas(64) float sums[MOST_ROWS * PANEL];
  std::fill_n(sums, rows * PANEL, 0.f);
  const int64_t pairs = p.pairs(), parts = num_parts(rows);
  const uint32_t* words = p.matrix + panel * PANEL * pairs;
  for (int64_t k = 0; k < pairs; k += CHUNK) {
    const int64_t count = std::min<int64_t>(CHUNK, pairs - k);
    const Chunk chunk{words + k * PANEL, count, words + (k + count) * PANEL, 0};
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t row = part_start(rows, part), width = part_start(rows, part + 1) - row;
      add_part(part, parts, width, x + row * pairs + k * width, chunk, sums + row * PANEL);
    }
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int i = 0; i < PANEL; i += LANES) finish(p, load(sums + r * PANEL + i), first + r, panel * PANEL + i);
}

// The pairs of the rows of a part, next to each other.
void arrange_part(const Product& p, int64_t first, int64_t rows, int64_t part, uint32_t* x) {
  const int64_t start = part_start(rows, part), width = part_start(rows, part + 1) - start, pairs = p.pairs();
  uint32_t* to = x + start * pairs;
  const BF16* from = p.rows + (first + start) * p.inputs;
  for (int64_t k = 0; k < p.inputs / 2; ++k)
    for (int64_t r = 0; r < width; ++r) memcpy(to + k * width + r, from + r * p.inputs + 2 * k, sizeof *to);
  if (p.inputs % 2)
    for (int64_t r = 0; r < width; ++r) to[(pairs - 1) * width + r] = from[(r + 1) * p.inputs - 1].bits;
}

void multiply_rows(const Product& p, int64_t first, int64_t rows, uint32_t* x, int threads) {
  const int64_t grain = std::max<int64_t>(1, SMALL / (p.inputs * AT_ONCE)), parts = num_parts(rows);
  for_ranges(parts, grain, parts > grain ? threads : 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) arrange_part(p, first, rows, part, x);
  });
  for_ranges((p.outputs + PANEL - 1) / PANEL, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) multiply_panel(p, x, first, rows, panel);
  });
}

void run(const Product& p, int threads) {
  static thread_local std::vector<uint32_t> scratch;
  const int64_t words = p.pairs();
  const int64_t fitting = std::clamp<int64_t>(TOGETHER / (4 * words) / AT_ONCE * AT_ONCE, AT_ONCE, MOST_ROWS);
  const int64_t stretches = (p.num_rows + fitting - 1) / fitting;
  const size_t most = std::min(fitting, p.num_rows) * words;
  if (scratch.size() < most) scratch.resize(most);
  for (int64_t s = 0; s < stretches; ++s) {
    const int64_t first = p.num_rows * s / stretches, end = p.num_rows * (s + 1) / stretches;
    multiply_rows(p, first, end - first, scratch.data(), threads);
  }
}
#else
constexpr bool USABLE = false;
void run(const Product&, int) {}
#endif

}  // namespace

// Whether the compiler may use the instructions; without them, do not multiply.
extern "C" int32_t can_multiply() { return USABLE; }

// How many outputs a panel has.
extern "C" int64_t panel_outputs() { return PANEL; }

// How many inputs a word of the packed matrix holds: two, of one output.
extern "C" int64_t word_inputs() { return 2; }

// Arranges `weight`, [outputs, inputs], as the products read it; zeros fill the last panel and the last pair.
extern "C" void pack_bfloat16(const uint16_t* weight, uint32_t* matrix, int64_t outputs, int64_t inputs,
                              int32_t threads) {
  const int64_t pairs = (inputs + 1) / 2;
  for_pieces((outputs + PANEL - 1) / PANEL, threads, [&](int64_t panel) {
    for (int64_t lane = 0; lane < PANEL; ++lane) {
      const int64_t output = panel * PANEL + lane;
      uint32_t* to = matrix + panel * PANEL * pairs + lane;
      for (int64_t k = 0; k < pairs; ++k) {
        const uint16_t* from = weight + output * inputs + 2 * k;
        const uint32_t first = output < outputs ? from[0] : 0;
        const uint32_t second = output < outputs && 2 * k + 1 < inputs ? from[1] : 0;
        to[k * PANEL] = first | second << 16;
      }
    }
  });
}

// out = rows times matrixᵀ, plus bias if there is one.
extern "C" void multiply_bfloat16(const void* rows, const void* matrix, const float* bias, void* out, int64_t num_rows,
                                  int64_t inputs, int64_t outputs, int32_t threads) {
  run({(const BF16*)rows, (const uint32_t*)matrix, bias, (BF16*)out, num_rows, inputs, outputs}, threads);
}
