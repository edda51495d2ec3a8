// Products of few rows with a large bfloat16 matrix, for processors with AVX-512 BF16 and without the matrix unit.
//
// The matrix lies as oneDNN packs it there: panels of 64, 32 or 16 outputs, in a panel the pairs of inputs one after the
// other, of each pair the two numbers of every output. A thread reads a stretch of it once, and every row uses what
// it reads while a first-level cache holds it. A sum adds its pairs in their order, whatever the other rows are.
#include <algorithm>
#include <vector>

#include "dot_bf16.h"
#include "parallel.h"
#include "vec.h"

namespace {

struct Product {
  const BF16* rows;       // [num_rows, inputs]
  const uint32_t* words;  // [outputs, inputs / 2], packed
  const BF16* bias;       // [outputs] or none
  void* out;              // [num_rows, outputs]
  int64_t num_rows, inputs, outputs;
  bool to_float;  // out is float32
};

#ifdef HAS_DOT_BF16
constexpr bool USABLE = true;
constexpr int MOST_ROWS = 32, AT_ONCE = 6;  // rows whose sums registers hold
constexpr int CHUNK = 64;                   // pairs that all rows take before the next: 16 KiB stay in the cache
constexpr int SMALL = 1 << 13;  // numbers of rows that one thread arranges sooner than another one wakes up

// The first row of part `part`: parts are as equal as can be, because a lone row wastes registers.
inline int64_t part_start(int64_t rows, int64_t part) {
  const int64_t parts = (rows + AT_ONCE - 1) / AT_ONCE;
  return rows * part / parts;
}

template <int VECS>
void add_part(int64_t rows, const uint32_t* x, const PairChunk& chunk, float* sums) {
  switch (rows) {
    case 1: return add_pair_rows<1, VECS>(x, chunk, sums);
    case 2: return add_pair_rows<2, VECS>(x, chunk, sums);
    case 3: return add_pair_rows<3, VECS>(x, chunk, sums);
    case 4: return add_pair_rows<4, VECS>(x, chunk, sums);
    case 5: return add_pair_rows<5, VECS>(x, chunk, sums);
    default: return add_pair_rows<AT_ONCE, VECS>(x, chunk, sums);
  }
}

// 16 sums of a row to where they go. As float32 too they are what bfloat16 can hold.
inline void finish(const Product& p, Vec sum, int64_t row, int64_t output) {
  const int64_t place = row * p.outputs + output;
  BF16 rounded[LANES];
  store(rounded, p.bias ? sum + load(p.bias + output) : sum);
  if (p.to_float)
    store((float*)p.out + place, load(rounded));
  else
    memcpy((BF16*)p.out + place, rounded, sizeof rounded);
}

// `x`: part after part, each [pairs, rows of the part].
template <int VECS>
void multiply_panel(const Product& p, const uint32_t* x, int64_t panel) {
  constexpr int WIDTH = VECS * LANES;
  alignas(64) float sums[MOST_ROWS * WIDTH] = {};
  const int64_t pairs = p.inputs / 2;
  const uint32_t* words = p.words + panel * WIDTH * pairs;
  for (int64_t k = 0; k < pairs; k += CHUNK) {
    PairChunk chunk{words + k * WIDTH, std::min<int64_t>(CHUNK, pairs - k), CHUNK * WIDTH};
    for (int64_t part = 0, row = 0; row < p.num_rows; ++part) {
      const int64_t next = part_start(p.num_rows, part + 1);
      add_part<VECS>(next - row, x + row * pairs + k * (next - row), chunk, sums + row * WIDTH);
      row = next;
      chunk.ahead = 0;
    }
  }
  for (int64_t r = 0; r < p.num_rows; ++r)
    for (int i = 0; i < WIDTH; i += LANES) finish(p, load(sums + r * WIDTH + i), r, panel * WIDTH + i);
}

// A row's pairs, next to those of the others of its part.
void arrange(const Product& p, int64_t row, uint32_t* x) {
  int64_t part = 0;
  while (part_start(p.num_rows, part + 1) <= row) ++part;
  const int64_t start = part_start(p.num_rows, part), width = part_start(p.num_rows, part + 1) - start;
  const int64_t pairs = p.inputs / 2;
  const BF16* from = p.rows + row * p.inputs;
  uint32_t* to = x + start * pairs + row - start;
  for (int64_t k = 0; k < pairs; ++k) memcpy(to + k * width, from + 2 * k, sizeof *to);
}

template <int VECS>
void run(const Product& p, int threads) {
  static thread_local std::vector<uint32_t> scratch;
  const bool alone = p.num_rows == 1;
  if (!alone) scratch.resize(p.num_rows * p.inputs / 2);
  uint32_t* arranged = scratch.data();
  const uint32_t* x = alone ? (const uint32_t*)p.rows : arranged;
  const int64_t panels = p.outputs / (VECS * LANES);
  if (!alone) {
    const int64_t grain = std::max<int64_t>(1, SMALL / p.inputs);
    for_ranges(p.num_rows, grain, p.num_rows > grain ? threads : 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) arrange(p, row, arranged);
    });
  }
  for_ranges(panels, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) multiply_panel<VECS>(p, x, panel);
  });
}
#else
constexpr bool USABLE = false;
template <int VECS>
void run(const Product&, int) {}
#endif

template <int VECS>
void run(const void* rows, const void* matrix, const void* bias, void* out, int64_t num_rows, int64_t inputs,
         int64_t outputs, int32_t to_float, int32_t threads) {
  const Product p = {(const BF16*)rows, (const uint32_t*)matrix, (const BF16*)bias, out,
                     num_rows,          inputs,                  outputs,           to_float != 0};
  run<VECS>(p, threads);
}

}  // namespace

// Whether the compiler may use the instructions; without them, do not multiply.
extern "C" int32_t can_multiply() { return USABLE; }

// As in few_rows.cpp, for panels of 64 outputs. 1 to 32 rows, an even number of inputs, whole panels.
extern "C" void multiply_64(const void* rows, const void* matrix, const void* bias, void* out, int64_t num_rows,
                            int64_t inputs, int64_t outputs, int32_t to_float, int32_t threads) {
  run<4>(rows, matrix, bias, out, num_rows, inputs, outputs, to_float, threads);
}

// As above, for panels of 32 outputs.
extern "C" void multiply_32(const void* rows, const void* matrix, const void* bias, void* out, int64_t num_rows,
                            int64_t inputs, int64_t outputs, int32_t to_float, int32_t threads) {
  run<2>(rows, matrix, bias, out, num_rows, inputs, outputs, to_float, threads);
}

// As above, for panels of 16 outputs.
extern "C" void multiply_16(const void* rows, const void* matrix, const void* bias, void* out, int64_t num_rows,
                            int64_t inputs, int64_t outputs, int32_t to_float, int32_t threads) {
  run<1>(rows, matrix, bias, out, num_rows, inputs, outputs, to_float, threads);
}
