// Products of any number of rows with a float32 matrix. Needs AVX-512, whose 32 registers hold the sums of six rows, or AVX2
// with FMA, whose 16 hold those of three rows and half a panel.
//
// The matrix lies as oneDNN packs it: panels of 64 outputs, in a panel the inputs one after the other, of each its 64
// numbers. Up to 36 rows read every stretch of it once; as many further ones read it once more, from the cache. A sum adds
// its inputs in their order, whatever the other rows are.
#include <algorithm>

#include "parallel.h"
#include "vec.h"

namespace {

struct Product {
  const float* rows;    // [num_rows, inputs]
  const float* matrix;  // [outputs, inputs], packed
  const float* bias;    // [outputs] or none
  float* out;           // [num_rows, outputs]
  int64_t num_rows, inputs, outputs;
};

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
constexpr bool USABLE = true;
#else
constexpr bool USABLE = false;
#endif
constexpr int WIDTH = 64, VECS = WIDTH / LANES;  // outputs of a panel
constexpr int AT_ONCE = LANES == 16 ? 6 : 3;     // rows whose sums registers hold
constexpr int MOST_ROWS = 36;                    // that read a panel together: their sums stay in the nearest cache
constexpr int DEPTH = 64;                        // inputs that all rows take before the next: 16 KiB stay in the cache
constexpr int AHEAD = DEPTH * WIDTH;             // numbers fetched before their use

// Vectors of a panel that R rows take at once; a lone row takes all, because an addition takes 4 cycles.
template <int R>
constexpr int TAKEN = LANES == 16 || R == 1 ? VECS : VECS / 2;

// Which inputs of the next part these rows fetch: each group of rows fetches some, so that the memory works while all of
// them compute.
struct Fetch {
  int first, step;
};

// Sums of R rows over `depth` inputs of a panel. ALONE: no other rows read it, so these fetch all of the next part.
template <int R, bool ALONE>
void add_rows(const float* rows, int64_t stride, const float* panel, int depth, float* sums, Fetch fetch) {
  constexpr int N = TAKEN<R>;
  for (int first = 0; first < WIDTH; first += N * LANES) {
    Vec sum[R][N];
#pragma GCC unroll 6  // or the sums do not stay in registers
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) sum[r][i] = load(sums + r * WIDTH + first + i * LANES);
    const float* numbers = panel + first;
    int fetched = fetch.first;
    for (int k = 0; k < depth; ++k, numbers += WIDTH) {
      if (!ALONE && k == fetched) {
#pragma GCC unroll 4
        for (int i = 0; i < N * LANES; i += 16) __builtin_prefetch(numbers + AHEAD + i, 0, 2);
        fetched += fetch.step;
      }
      Vec x[N];
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        if (ALONE && i * LANES % 16 == 0) __builtin_prefetch(numbers + AHEAD + i * LANES, 0, 2);
        x[i] = load(numbers + i * LANES);
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const float row = rows[r * stride + k];
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) sum[r][i] += x[i] * row;
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) store(sums + r * WIDTH + first + i * LANES, sum[r][i]);
  }
}

template <bool ALONE>
void add_some_rows(int count, const float* rows, int64_t stride, const float* panel, int depth, float* sums,
                   Fetch fetch) {
  switch (count) {
    case 1: return add_rows<1, ALONE>(rows, stride, panel, depth, sums, fetch);
    case 2: return add_rows<2, ALONE>(rows, stride, panel, depth, sums, fetch);
    case 3: return add_rows<3, ALONE>(rows, stride, panel, depth, sums, fetch);
    case 4: return add_rows<4, ALONE>(rows, stride, panel, depth, sums, fetch);
    case 5: return add_rows<5, ALONE>(rows, stride, panel, depth, sums, fetch);
    default: return add_rows<AT_ONCE, ALONE>(rows, stride, panel, depth, sums, fetch);
  }
}

// Multiplies `num_rows` rows from `first_row` on with a panel.
void multiply_panel(const Product& p, int64_t panel, int64_t first_row, int64_t num_rows) {
  alignas(64) float sums[MOST_ROWS][WIDTH];
  const float* matrix = p.matrix + panel * WIDTH * p.inputs;
  const float* rows = p.rows + first_row * p.inputs;
  float* out = p.out + first_row * p.outputs + panel * WIDTH;
  for (int64_t r = 0; r < num_rows; ++r)
    for (int i = 0; i < WIDTH; i += LANES) store(sums[r] + i, p.bias ? load(p.bias + panel * WIDTH + i) : Vec{});
  const int64_t parts = (num_rows + AT_ONCE - 1) / AT_ONCE;  // as equal as can be: a lone row wastes registers
  for (int64_t k = 0; k < p.inputs; k += DEPTH) {
    const int depth = std::min<int64_t>(DEPTH, p.inputs - k);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = num_rows * part / parts, count = num_rows * (part + 1) / parts - first;
      const auto add = parts == 1 ? add_some_rows<true> : add_some_rows<false>;
      add(count, rows + first * p.inputs + k, p.inputs, matrix + k * WIDTH, depth, sums[first],
          {(int)part, (int)parts});
    }
  }
  for (int64_t r = 0; r < num_rows; ++r) memcpy(out + r * p.outputs, sums[r], sizeof sums[r]);
}

}  // namespace

// Whether this processor has registers enough; without them, do not multiply.
extern "C" int32_t can_multiply() { return USABLE; }

// As in few_rows.cpp, but that everything is float32. Any number of rows; whole 64s of outputs.
extern "C" void multiply(const float* rows, const float* matrix, const float* bias, float* out, int64_t num_rows,
                         int64_t inputs, int64_t outputs, int32_t /* to_float */, int32_t threads) {
  const Product p = {rows, matrix, bias, out, num_rows, inputs, outputs};
  const int64_t blocks = (num_rows + MOST_ROWS - 1) / MOST_ROWS;  // of rows; a panel's come one after the other
  for_ranges(outputs / WIDTH * blocks, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t panel = piece / blocks, first = piece % blocks * MOST_ROWS;
      multiply_panel(p, panel, first, std::min<int64_t>(MOST_ROWS, num_rows - first));
    }
  });
}
