// Products of any number of rows with a bfloat16 matrix on the matrix unit (AMX). Its registers hold tiles: 16 rows of 32
// inputs, 16 pairs of inputs of 16 outputs, or the sums of 16 rows and 16 outputs.
//
// The matrix lies in panels of 32 outputs, in a panel one pair of inputs after the other, of each pair all outputs. A
// stretch of rows lies as tiles in a second-level cache while a thread goes over panels; each pair of its tiles fetches a
// part of what comes next from memory. A sum adds its inputs in their order, whatever the other rows are.
#include <algorithm>
#include <vector>

#include "amx.h"
#include "pack_words.h"
#include "parallel.h"
#include "vec.h"

namespace {

struct Product {
  const BF16* rows;    // [num_rows, inputs]
  const BF16* matrix;  // [outputs, inputs] of whole panels, packed
  const float* bias;   // [outputs] or none
  BF16* out;           // [num_rows, outputs]
  int64_t num_rows, inputs, outputs;
};

constexpr int PANEL = 32, DEPTH = 32;  // outputs of a panel, inputs of a tile

#ifdef HAS_AMX
constexpr bool USABLE = true;
constexpr int BLOCK = PANEL * DEPTH;                     // numbers of a panel for the inputs of a tile
constexpr int TILE_ROWS = 16, TILE = TILE_ROWS * DEPTH;  // rows and numbers of a tile
constexpr int PAIR = 2 * TILE_ROWS;                      // rows that are computed at once
// oneDNN fetches nothing of what comes next: a prompt of 64 tokens had 61 % of the unit's rate, one of 128 tokens 80 %.
// Here 64 rows make 1,227 GFLOP/s instead of 924 (qwen3-0.6b's layers, two cores).
constexpr int CHUNK = 32;          // blocks that are added before the sums go back to memory, and fetched ahead
// One MiB of tiles, half of the second-level cache of the processors that have the unit, beside the blocks of the
// matrix that are fetched into it.
constexpr int STRETCH = 1 << 19;   // numbers of the rows that are computed together
// Without streaming, each line of a result is read before it is written: a third of the time of 2,048 rows went there.
constexpr int LARGE = 1 << 19;     // numbers of a result that no cache keeps
constexpr int AHEAD = 4;           // blocks that up to 16 rows fetch before their use
constexpr int LINE = 64, NUMBERS = LINE / sizeof(BF16);  // bytes of a cache's line, and the numbers in it
constexpr int BLOCK_LINES = BLOCK / NUMBERS;

inline void fetch(const BF16* from, int lines) {
  for (int i = 0; i < lines; ++i) __builtin_prefetch(from + i * NUMBERS, 0, 2);
}

// What registers 0 to 3 hold: two tiles of rows, of each the lower and the upper 16 outputs.
struct Sums {
  alignas(LINE) float of[4][TILE_ROWS * LANES];

  void store() {
    _tile_stored(0, of[0], LINE);
    _tile_stored(1, of[1], LINE);
    _tile_stored(2, of[2], LINE);
    _tile_stored(3, of[3], LINE);
  }

  void load() const {
    _tile_loadd(0, of[0], LINE);
    _tile_loadd(1, of[1], LINE);
    _tile_loadd(2, of[2], LINE);
    _tile_loadd(3, of[3], LINE);
  }

  static void zero() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
};

// Writes past the caches. `p` is a multiple of 32 bytes.
inline void stream(BF16* p, Vec x) {
  BF16 rounded[LANES];
  store(rounded, x);
  __m256i bits;
  memcpy(&bits, rounded, sizeof bits);
  _mm256_stream_si256((__m256i*)p, bits);
}

// Whether results are written past the caches. Otherwise a line of a result is read before it is written.
inline bool streams(const Product& p) {
  return p.num_rows * p.outputs >= LARGE && p.outputs % PANEL == 0 && (uintptr_t)p.out % LINE == 0;
}

// The sums of a tile's rows, `count` or all, from `row` on and of a panel to where they go.
inline void finish(const Product& p, const float* lower, const float* upper, int64_t row, int64_t count, int64_t panel) {
  const int64_t output = panel * PANEL, left = p.outputs - output;
  const Vec first = p.bias ? load(p.bias + output, left) : Vec{};
  const Vec second = p.bias && left > LANES ? load(p.bias + output + LANES, left - LANES) : Vec{};
  const bool past = streams(p);
  for (int64_t r = 0; r < std::min<int64_t>(TILE_ROWS, count); ++r) {
    BF16* out = p.out + (row + r) * p.outputs + output;
    const Vec x = load(lower + r * LANES) + first, y = load(upper + r * LANES) + second;
    past ? stream(out, x) : store(out, x, left);
    if (left > LANES) past ? stream(out + LANES, y) : store(out + LANES, y, left - LANES);
  }
}

// Up to 16 rows and panels [begin, end), two at a time: register 4 holds rows, 5 and 6 the matrix.
void multiply_16(const Product& p, int64_t begin, int64_t end) {
  const uint8_t m = p.num_rows;
  const AmxRegisters registers({m, m, m, m, m, 16, 16, 16});
  const int64_t stride = p.inputs * sizeof(BF16), steps = p.inputs / DEPTH;
  Sums sums;
  for (int64_t panel = begin; panel < end; panel += 2) {
    const bool both = panel + 1 < end;
    const BF16* left = p.matrix + panel * steps * BLOCK;
    const BF16* right = both ? left + steps * BLOCK : left;
    Sums::zero();
    for (int64_t k = 0; k < steps; ++k, left += BLOCK, right += BLOCK) {
      _tile_loadd(4, p.rows + k * DEPTH, stride);
      fetch(left + AHEAD * BLOCK, BLOCK_LINES);
      _tile_loadd(5, left, 2 * LINE);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, left + NUMBERS, 2 * LINE);
      _tile_dpbf16ps(1, 4, 6);
      fetch(right + AHEAD * BLOCK, BLOCK_LINES);
      _tile_loadd(5, right, 2 * LINE);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(6, right + NUMBERS, 2 * LINE);
      _tile_dpbf16ps(3, 4, 6);
    }
    sums.store();
    finish(p, sums.of[0], sums.of[1], 0, m, panel);
    if (both) finish(p, sums.of[2], sums.of[3], 0, m, panel + 1);
  }
}

// Adds `count` blocks of a panel to registers 0 to 3: 4 and 5 hold two tiles of rows, 6 and 7 the matrix. Each block
// fetches `lines` of `next`.
inline void add_blocks(const BF16* upper, const BF16* lower, const BF16* block, int64_t count, const BF16* next, int lines) {
  for (int64_t k = 0; k < count; ++k, block += BLOCK, upper += TILE, lower += TILE, next += lines * NUMBERS) {
    _tile_loadd(4, upper, LINE);
    _tile_loadd(6, block, 2 * LINE);
    fetch(next, lines);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, block + NUMBERS, 2 * LINE);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower, LINE);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Sums of up to two tiles of rows to where they go.
inline void finish_pair(const Product& p, const Sums& sums, int64_t row, int64_t count, int64_t panel) {
  finish(p, sums.of[0], sums.of[1], row, count, panel);
  finish(p, sums.of[2], sums.of[3], row + TILE_ROWS, count - TILE_ROWS, panel);
}

// Rows of a stretch, which begins at `first` and lies in `tiles`, and one panel. `sums`: one for each pair of tiles.
void multiply_panel(const Product& p, const BF16* tiles, int64_t first, int64_t num_rows, int64_t panel, Sums* sums) {
  const int64_t steps = p.inputs / DEPTH, pairs = (num_rows + PAIR - 1) / PAIR;
  const int lines = (BLOCK_LINES + pairs - 1) / pairs;
  const BF16* block = p.matrix + panel * steps * BLOCK;
  for (int64_t k = 0; k < steps; k += CHUNK, block += CHUNK * BLOCK) {
    const int64_t count = std::min<int64_t>(CHUNK, steps - k);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const BF16 *upper = tiles + (2 * pair * steps + k) * TILE, *lower = upper + steps * TILE;
      k ? sums[pair].load() : Sums::zero();
      add_blocks(upper, lower, block, count, block + count * BLOCK + pair * count * lines * NUMBERS, lines);
      sums[pair].store();
      if (k + count == steps) finish_pair(p, sums[pair], first + pair * PAIR, num_rows - pair * PAIR, panel);
    }
  }
}

// Panels [begin, end) for the rows of a stretch.
void multiply_panels(const Product& p, const BF16* tiles, int64_t first, int64_t num_rows, int64_t begin, int64_t end) {
  static thread_local std::vector<Sums> scratch;
  if ((int64_t)scratch.size() * PAIR < num_rows) scratch.resize((num_rows + PAIR - 1) / PAIR);
  const AmxRegisters registers({16, 16, 16, 16, 16, 16, 16, 16});
  for (int64_t panel = begin; panel < end; ++panel) multiply_panel(p, tiles, first, num_rows, panel, scratch.data());
  // Streaming stores are not ordered with others: the thread that waits for this piece could read old numbers.
  if (streams(p)) _mm_sfence();
}

// [rows / 16, inputs / 32, 16, 32]: rows as they are lie so far apart that they evict each other from the cache.
void to_tiles(const Product& p, int64_t first, BF16* tiles, int64_t begin, int64_t end) {
  const int64_t steps = p.inputs / DEPTH;
  for (int64_t r = begin; r < end; ++r)
    for (int64_t k = 0; k < steps; ++k)
      memcpy(tiles + (r / TILE_ROWS * steps + k) * TILE + r % TILE_ROWS * DEPTH,
             p.rows + (first + r) * p.inputs + k * DEPTH, LINE);
}

struct alignas(LINE) Line {
  BF16 numbers[NUMBERS];
};

void run(const Product& p, int threads) {
  if (!p.num_rows) return;  // a register cannot have no rows
  static thread_local std::vector<Line> scratch;
  const int64_t panels = (p.outputs + PANEL - 1) / PANEL;
  // Few rows are not copied into tiles: with one tile of rows there is nothing to reuse, and two panels share it
  // instead.
  if (p.num_rows <= TILE_ROWS)
    return for_ranges(panels, 2, threads, [&](int64_t begin, int64_t end) { multiply_16(p, begin, end); });
  const int64_t stretch = std::max<int64_t>(PAIR, STRETCH / p.inputs / PAIR * PAIR);
  const size_t most = (std::min(stretch, p.num_rows) + PAIR - 1) / PAIR * PAIR * p.inputs / NUMBERS;
  if (scratch.size() < most) scratch.resize(most);
  BF16* tiles = scratch.data()->numbers;
  for (int64_t first = 0; first < p.num_rows; first += stretch) {
    const int64_t rows = std::min(stretch, p.num_rows - first);
    for_ranges(rows, TILE_ROWS, threads, [&](int64_t begin, int64_t end) { to_tiles(p, first, tiles, begin, end); });
    for_ranges(panels, 1, threads,
               [&](int64_t begin, int64_t end) { multiply_panels(p, tiles, first, rows, begin, end); });
  }
}
#else
constexpr bool USABLE = false;
bool may_use_amx() { return false; }
void run(const Product&, int) {}
#endif

}  // namespace

// Whether this processor and system have the unit; without it, do not multiply.
extern "C" int32_t can_multiply() { return USABLE && may_use_amx(); }

// How many outputs a panel has.
extern "C" int64_t panel_outputs() { return PANEL; }

// How many outputs and inputs a word of the packed matrix holds, and of how many inputs there must be a multiple.
extern "C" int64_t word_outputs() { return 1; }
extern "C" int64_t word_inputs() { return 2; }
extern "C" int64_t whole_inputs() { return DEPTH; }

// Arranges `weight`, [outputs, inputs], as the products read it; zeros fill the last panel.
extern "C" void pack(const BF16* weight, BF16* matrix, int64_t outputs, int64_t inputs, int32_t threads) {
  pack_words((const uint32_t*)weight, (uint32_t*)matrix, outputs, inputs / 2, PANEL, threads);
}

// out = rows times matrixᵀ, plus bias if there is one.
extern "C" void multiply(const BF16* rows, const BF16* matrix, const float* bias, BF16* out, int64_t num_rows,
                         int64_t inputs, int64_t outputs, int32_t threads) {
  run({rows, matrix, bias, out, num_rows, inputs, outputs}, threads);
}
