// Products of rows with an int8 matrix: each row is rounded to int8 by a scale of its own, each output of the matrix has
// been before. Needs the matrix unit.
//
// Where several ranks have parts of the inputs, a product takes three calls, between which they exchange the largest
// magnitudes of rows, and then integer sums: the result has the bits of one rank's.
//
// The matrix lies in blocks of 32 outputs and 64 inputs, in a block 16 fours of inputs, of a four 32 outputs. Rows are
// computed by stretches that stay in the cache while threads go over parts of the matrix.
#include <algorithm>
#include <cmath>
#include <vector>

#include "amx.h"
#include "parallel.h"
#include "vec.h"

namespace {

struct Product {
  const void* rows;      // [num_rows, inputs], bfloat16 or float32
  const int8_t* matrix;  // [outputs, inputs], in blocks
  const float* scales;   // [outputs]
  const float* bias;     // [outputs] or none
  void* out;             // [num_rows, outputs], of the rows' dtype
  int64_t num_rows, inputs, outputs;
  const int32_t* tops = nullptr;  // [num_rows], bits of the largest magnitudes of whole rows; none: those of the rows
  int32_t* sums = nullptr;        // [num_rows, outputs], in the place of `out`
};

// The bits of the largest magnitude of a row: as integers they compare as the floats do, those of NaN are the largest.
template <class T>
int32_t top_of(const T* row, int64_t inputs) {
  VecInt most = {};
  for (int64_t i = 0; i < inputs; i += LANES) {
    const VecInt size = magnitude(load(row + i));
    most = size > most ? size : most;
  }
  return fold(most, [](VecInt a, VecInt b) { return a > b ? a : b; });
}

// A magnitude as a float; NaN if it is not finite.
inline float finite(int32_t top) { return as_float(top) - as_float(top) + as_float(top); }

// A stretch of sums as floats.
inline Vec scaled(const int32_t* sums, Vec scales, float unit, Vec bias) {
  VecInt sum;
  memcpy(&sum, sums, sizeof sum);
  return __builtin_convertvector(sum, Vec) * (scales * unit) + bias;
}

#ifdef HAS_AMX
constexpr int WIDTH = 32, DEPTH = 64, BLOCK = WIDTH * DEPTH;  // outputs, inputs and numbers of a block
constexpr int TILE_ROWS = 16, TILE = TILE_ROWS * DEPTH;       // of rows, in one register
constexpr int STRETCH = 256;                                  // rows that are computed together
constexpr int AHEAD = 4;                                      // blocks fetched before their use
constexpr int LINE = 128, TILE_LINE = 64;                     // bytes between lines of a block, of a tile

inline void fetch(const int8_t* block) {
  for (int i = 0; i < BLOCK; i += 64) __builtin_prefetch(block + i, 0, 2);
}

// A stretch of rows as int8: tiles [rows / 16, inputs / 64, 16, 64], and what one unit of each row is worth.
struct Rounded {
  std::vector<int8_t> tiles;
  std::vector<float> units;
};

// A number that is not finite makes the unit NaN.
template <class T>
void round_row(const T* row, int64_t inputs, int32_t top_bits, int64_t index, Rounded& to) {
  const float top = finite(top_bits), scale = top > 0 ? 127.f / top : 0.f;
  to.units[index] = top / 127.f;
  int8_t* tile = to.tiles.data() + index / TILE_ROWS * TILE_ROWS * inputs + index % TILE_ROWS * DEPTH;
  for (int64_t i = 0; i < inputs; i += LANES) {
    const __m128i q = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(load(row + i) * scale));
    memcpy(tile + i / DEPTH * TILE + i % DEPTH, &q, sizeof q);
  }
}

template <class T>
void finish(const Product& p, const Rounded& x, const int32_t* sums, int64_t first, int64_t tile_row, int64_t output) {
  const int64_t rows = std::min<int64_t>(TILE_ROWS, p.num_rows - first - tile_row);
  if (p.sums) {
    for (int64_t r = 0; r < rows; ++r)
      memcpy(p.sums + (first + tile_row + r) * p.outputs + output, sums + r * LANES, LANES * sizeof *sums);
    return;
  }
  const Vec scales = load(p.scales + output), bias = p.bias ? load(p.bias + output) : Vec{};
  for (int64_t r = 0; r < rows; ++r)
    store((T*)p.out + (first + tile_row + r) * p.outputs + output,
          scaled(sums + r * LANES, scales, x.units[tile_row + r], bias));
}

// Rows [first, first + num_rows) and blocks [begin, end) of outputs: 4 and 5 hold rows, 6 and 7 the matrix, 0 to 3 sums.
template <class T>
void multiply(const Product& p, const Rounded& x, int64_t first, int64_t num_rows, int64_t begin, int64_t end) {
  const AmxRegisters registers({16, 16, 16, 16, 16, 16, 16, 16});
  const int64_t steps = p.inputs / DEPTH, tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
  alignas(64) int32_t sums[4][TILE_ROWS * LANES];
  for (int64_t b = begin; b < end; ++b)
    for (int64_t tile = 0; tile < tiles; tile += 2) {
      const bool both = tile + 1 < tiles;
      const int8_t *block = p.matrix + b * steps * BLOCK, *upper = x.tiles.data() + tile * steps * TILE;
      const int8_t* lower = upper + steps * TILE;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t k = 0; k < steps; ++k, block += BLOCK, upper += TILE, lower += TILE) {
        if (!tile) fetch(block + AHEAD * BLOCK);
        _tile_loadd(4, upper, TILE_LINE);
        _tile_loadd(6, block, LINE);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, block + LINE / 2, LINE);
        _tile_dpbssd(1, 4, 7);
        if (!both) continue;
        _tile_loadd(5, lower, TILE_LINE);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      }
      _tile_stored(0, sums[0], 64);
      _tile_stored(1, sums[1], 64);
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
      for (int i = 0; i < (both ? 4 : 2); ++i)
        finish<T>(p, x, sums[i], first, (tile + i / 2) * TILE_ROWS, b * WIDTH + i % 2 * LANES);
    }
}

template <class T>
void run(const Product& p, int threads) {
  static thread_local Rounded scratch;
  Rounded& x = scratch;
  const int64_t most = std::min<int64_t>(STRETCH, (p.num_rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS);
  x.tiles.resize(most * p.inputs);
  x.units.resize(most);
  const int64_t blocks = p.outputs / WIDTH;
  for (int64_t first = 0; first < p.num_rows; first += STRETCH) {
    const int64_t rows = std::min<int64_t>(STRETCH, p.num_rows - first);
    for_ranges(rows, 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* row = (const T*)p.rows + (first + r) * p.inputs;
        round_row(row, p.inputs, p.tops ? p.tops[first + r] : top_of(row, p.inputs), r, x);
      }
    });
    for_ranges(blocks, 1, threads, [&](int64_t begin, int64_t end) { multiply<T>(p, x, first, rows, begin, end); });
  }
}
#else
bool may_use_amx() { return false; }
template <class T>
void run(const Product&, int) {}
#endif

}  // namespace

// Whether this processor and system have the unit; without it, do not multiply.
extern "C" int32_t can_multiply() { return may_use_amx(); }

// out = rows times (matrix times scales)ᵀ, plus bias if there is one. Whole 64s of inputs, whole 32s of outputs.
extern "C" void multiply_int8(int32_t is_bf16, const void* rows, const int8_t* matrix, const float* scales,
                              const float* bias, void* out, int64_t num_rows, int64_t inputs, int64_t outputs,
                              int32_t threads) {
  const Product p = {rows, matrix, scales, bias, out, num_rows, inputs, outputs};
  is_bf16 ? run<BF16>(p, threads) : run<float>(p, threads);
}

// The bits of the largest magnitude of each row. Whole 64s of inputs.
extern "C" void row_tops(int32_t is_bf16, const void* rows, int32_t* tops, int64_t num_rows, int64_t inputs,
                         int32_t threads) {
  for_ranges(num_rows, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      tops[r] = is_bf16 ? top_of((const BF16*)rows + r * inputs, inputs) : top_of((const float*)rows + r * inputs, inputs);
  });
}

// Integer sums [num_rows, outputs] of rows that are rounded by `tops`, times the matrix. Sizes as in multiply_int8.
extern "C" void sum_int8(int32_t is_bf16, const void* rows, const int8_t* matrix, const int32_t* tops, int32_t* sums,
                         int64_t num_rows, int64_t inputs, int64_t outputs, int32_t threads) {
  const Product p = {rows, matrix, nullptr, nullptr, nullptr, num_rows, inputs, outputs, tops, sums};
  is_bf16 ? run<BF16>(p, threads) : run<float>(p, threads);
}

// out = the floats that such sums stand for, plus bias if there is one. Whole 32s of outputs.
extern "C" void scale_sums(int32_t is_bf16, const int32_t* sums, const int32_t* tops, const float* scales,
                           const float* bias, void* out, int64_t num_rows, int64_t outputs, int32_t threads) {
  for_ranges(num_rows, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float unit = finite(tops[r]) / 127.f;
      for (int64_t i = r * outputs, o = 0; o < outputs; i += LANES, o += LANES) {
        const Vec y = scaled(sums + i, load(scales + o), unit, bias ? load(bias + o) : Vec{});
        is_bf16 ? store((BF16*)out + i, y) : store((float*)out + i, y);
      }
    }
  });
}
