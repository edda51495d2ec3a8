// Products of few rows with a large bfloat16 matrix, as fast as memory gives the matrix. Needs the matrix unit.
//
// The matrix lies as oneDNN packs it, AB16b32a2b: blocks of 32 outputs and 32 inputs, in a block 16 pairs of inputs, of
// a pair 32 outputs. A thread reads a stretch of it once, and every row uses what it reads.
#include <algorithm>
#include <vector>

#include "amx.h"
#include "parallel.h"
#include "vec.h"

namespace {

struct Product {
  const BF16* rows;    // [num_rows, inputs]
  const BF16* matrix;  // [outputs, inputs], packed
  const BF16* bias;    // [outputs] or none
  void* out;           // [num_rows, outputs]
  int64_t num_rows, inputs, outputs;
  bool to_float;  // out is float32
};

#ifdef HAS_AMX
constexpr int WIDTH = 32, DEPTH = 32, BLOCK = WIDTH * DEPTH;  // outputs, inputs and numbers of a block
constexpr int TILE_ROWS = 16, TILE = TILE_ROWS * DEPTH;       // of rows, in one register
constexpr int AHEAD = 4;                                      // blocks fetched before their use
constexpr int LINE = 128, TILE_LINE = 64;                     // bytes between lines of a block, of a tile

inline void fetch(const BF16* block) {
  for (int i = 0; i < BLOCK; i += 32) __builtin_prefetch(block + i, 0, 2);
}

inline void zero() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Registers 0 to 3, each 16 outputs of 16 rows.
struct Sums {
  alignas(64) float of[4][TILE_ROWS * LANES];

  Sums() {
    _tile_stored(0, of[0], 64);
    _tile_stored(1, of[1], 64);
    _tile_stored(2, of[2], 64);
    _tile_stored(3, of[3], 64);
  }
};

// Sums of rows [row, row + count) and 16 outputs to where they go. As float32 too they are what bfloat16 can hold.
inline void finish(const Product& p, const float* sums, int64_t row, int64_t count, int64_t output) {
  const Vec bias = p.bias ? load(p.bias + output) : Vec{};
  for (int64_t r = 0; r < count; ++r) {
    const Vec x = load(sums + r * LANES) + bias;
    const int64_t place = (row + r) * p.outputs + output;
    BF16 rounded[LANES];
    store(rounded, x);
    p.to_float ? store((float*)p.out + place, load(rounded)) : (void)memcpy((BF16*)p.out + place, rounded, sizeof rounded);
  }
}

// Up to 16 rows and blocks [begin, end) of outputs, two at a time: registers 4 holds rows, 5 and 6 the matrix.
void multiply_16(const Product& p, int64_t begin, int64_t end) {
  const uint8_t m = p.num_rows;
  const AmxRegisters registers({m, m, m, m, m, 16, 16, 16});
  const int64_t stride = p.inputs * sizeof(BF16), steps = p.inputs / DEPTH;
  for (int64_t b = begin; b < end; b += 2) {
    const bool both = b + 1 < end;
    const BF16* left = p.matrix + b * steps * BLOCK;
    const BF16* right = both ? left + steps * BLOCK : left;
    zero();
    for (int64_t k = 0; k < steps; ++k, left += BLOCK, right += BLOCK) {
      _tile_loadd(4, p.rows + k * DEPTH, stride);
      fetch(left + AHEAD * BLOCK);
      _tile_loadd(5, left, LINE);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, left + WIDTH, LINE);
      _tile_dpbf16ps(1, 4, 6);
      fetch(right + AHEAD * BLOCK);
      _tile_loadd(5, right, LINE);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(6, right + WIDTH, LINE);
      _tile_dpbf16ps(3, 4, 6);
    }
    const Sums sums;
    for (int i = 0; i < (both ? 4 : 2); ++i) finish(p, sums.of[i], 0, m, b * WIDTH + i * LANES);
  }
}

// 17 to 32 rows, as tiles: registers 4 and 5 hold rows, 6 and 7 the matrix.
void multiply_32(const Product& p, const BF16* tiles, int64_t begin, int64_t end) {
  const AmxRegisters registers({16, 16, 16, 16, 16, 16, 16, 16});
  const int64_t steps = p.inputs / DEPTH;
  for (int64_t b = begin; b < end; ++b) {
    const BF16 *block = p.matrix + b * steps * BLOCK, *upper = tiles, *lower = tiles + steps * TILE;
    zero();
    for (int64_t k = 0; k < steps; ++k, block += BLOCK, upper += TILE, lower += TILE) {
      fetch(block + AHEAD * BLOCK);
      _tile_loadd(4, upper, TILE_LINE);
      _tile_loadd(6, block, LINE);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, block + WIDTH, LINE);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, lower, TILE_LINE);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    const Sums sums;
    for (int i = 0; i < 4; ++i) {
      const int64_t row = i / 2 * TILE_ROWS;
      finish(p, sums.of[i], row, std::min<int64_t>(TILE_ROWS, p.num_rows - row), b * WIDTH + i % 2 * LANES);
    }
  }
}

// [2, inputs / 32, 16, 32]: rows as they are lie so far apart that they evict each other from the cache.
void to_tiles(const Product& p, BF16* tiles, int64_t begin, int64_t end) {
  const int64_t steps = p.inputs / DEPTH;
  for (int64_t k = begin; k < end; ++k)
    for (int64_t r = 0; r < p.num_rows; ++r)
      memcpy(tiles + (r / TILE_ROWS * steps + k) * TILE + r % TILE_ROWS * DEPTH, p.rows + r * p.inputs + k * DEPTH,
             DEPTH * sizeof(BF16));
}

void run(const Product& p, int threads) {
  static thread_local std::vector<BF16> scratch;
  if (p.num_rows > TILE_ROWS) scratch.resize(2 * TILE_ROWS * p.inputs);
  BF16* tiles = scratch.data();
  const int64_t blocks = p.outputs / WIDTH;
  if (p.num_rows <= TILE_ROWS)
    return for_ranges(blocks, 2, threads, [&](int64_t begin, int64_t end) { multiply_16(p, begin, end); });
  for_ranges(p.inputs / DEPTH, 8, threads, [&](int64_t begin, int64_t end) { to_tiles(p, tiles, begin, end); });
  for_ranges(blocks, 1, threads, [&](int64_t begin, int64_t end) { multiply_32(p, tiles, begin, end); });
}
#else
bool may_use_amx() { return false; }
void run(const Product&, int) {}
#endif

}  // namespace

// Whether this processor and system have the unit; without it, do not multiply.
extern "C" int32_t can_multiply() { return may_use_amx(); }

// out, bfloat16 or float32, = rows times matrixᵀ, plus bias if there is one. 1 to 32 rows; whole 32s of inputs and outputs.
extern "C" void multiply(const void* rows, const void* matrix, const void* bias, void* out, int64_t num_rows,
                         int64_t inputs, int64_t outputs, int32_t to_float, int32_t threads) {
  run({(const BF16*)rows, (const BF16*)matrix, (const BF16*)bias, out, num_rows, inputs, outputs, to_float != 0}, threads);
}
