// Products of any number of rows with a matrix in panels of 64 outputs. In a panel lie the words of inputs one after the
// other, of each word one for every output. A word holds the inputs that one instruction multiplies.
//
// Registers hold the sums of a few rows. All rows read a stretch of a panel while a second-level cache holds it, and
// each fetches a part of the next one, so that memory is read while all of them compute. A sum adds its words in their
// order, whatever the other rows are.
//
// A struct `Numbers` says what is multiplied: `Number` is the type of rows, matrix and results, `Word` that of a word,
// `Words` that of a register of them, and add(sum, words, word) multiplies them and adds the products. With `SCALED` each
// chunk has a scale for every output, with which its products are multiplied as they are added.
#pragma once
#include <algorithm>
#include <cstdint>

#include "parallel.h"
#include "vec.h"

namespace {

constexpr int PANEL = 64, VECS = PANEL / LANES;  // outputs
constexpr int AT_ONCE = LANES == 16 ? 6 : 3;     // rows whose sums registers hold
// Fetched by all rows: when only the first ones did, they waited for memory and the others left it idle, and 8 rows
// read 26 GB/s. On AVX2 8 and 16 rows take 22 to 25 % less time this way.
constexpr int CHUNK = 512;      // words of an output that are added before the sums go back to memory, and fetched ahead
// Of more rows the first-level cache holds the chunk that they share: 2 to 5 % of the time of 128 and 512 rows.
constexpr int CHUNK_OF_MANY = 128, FEW_ROWS = 3 * AT_ONCE;
// A multiple of both 6 and 3 rows. Rows are read where they lie: copying them next to each other took longer than it
// saved, 10 to 40 % of a tiny model's products of 64 to 512 rows.
constexpr int MOST_ROWS = 132;  // that are computed together
constexpr int LINE = 16, LINES = PANEL / LINE;  // words that a line of a cache holds, and lines of a word of inputs

template <class Numbers>
struct Product {
  typedef typename Numbers::Number Number;
  typedef typename Numbers::Word Word;
  static constexpr int INPUTS = sizeof(Word) / sizeof(Number);  // of a word

  const Number* rows;  // [num_rows, inputs]
  const Word* matrix;  // [outputs, inputs] of whole panels, packed
  const float* bias;   // [outputs] or none
  Number* out;         // [num_rows, outputs]
  int64_t num_rows, inputs, outputs;

  int64_t words() const { return inputs / INPUTS; }
};

// A stretch of a panel, and the lines that are fetched meanwhile.
template <class Word>
struct Chunk {
  const Word* panel;
  int64_t words;
  const Word* next;
  int64_t lines;
  const float* scales = nullptr;  // [PANEL], if `Numbers` has them
};

// Registers of a panel that R rows take at the same time; a lone row takes all, because an addition takes 4 cycles.
template <int R>
constexpr int TAKEN = LANES == 16 || R == 1 ? VECS : VECS / 2;

// Adds the products of a chunk to the sums of R rows, [R, PANEL], and fetches the next one's lines, FETCH for a word.
template <int R, int FETCH, class Numbers>
void add_rows(const Product<Numbers>& p, const typename Numbers::Number* rows,
              const Chunk<typename Numbers::Word>& chunk, float* sums) {
  constexpr int N = TAKEN<R>, PASSES = VECS / N, AT_A_TIME = FETCH > PASSES ? FETCH / PASSES : 1;
  const auto* next = chunk.next;
  for (int first = 0; first < PANEL; first += N * LANES) {
    Vec sum[R][N];
#pragma GCC unroll 6  // or the sums do not stay in registers
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        if constexpr (Numbers::SCALED)
          sum[r][i] = Vec{};
        else
          sum[r][i] = load(sums + r * PANEL + first + i * LANES);
      }
    const auto add_word = [&](int64_t k) __attribute__((always_inline)) {
      typename Numbers::Words words[N];
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) memcpy(&words[i], chunk.panel + k * PANEL + first + i * LANES, sizeof words[i]);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        typename Numbers::Word word;
        memcpy(&word, rows + r * p.inputs + k * p.INPUTS, sizeof word);
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) sum[r][i] = Numbers::add(sum[r][i], words[i], word);
      }
    };
    int64_t k = 0;
    for (; k < chunk.lines / (PASSES * AT_A_TIME); ++k, next += AT_A_TIME * LINE) {
#pragma GCC unroll 4
      for (int i = 0; i < AT_A_TIME; ++i) __builtin_prefetch(next + i * LINE, 0, 2);
      add_word(k);
    }
    for (; k < chunk.words; ++k) add_word(k);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        float* to = sums + r * PANEL + first + i * LANES;
        if constexpr (Numbers::SCALED)
          store(to, load(to) + sum[r][i] * load(chunk.scales + first + i * LANES));
        else
          store(to, sum[r][i]);
      }
  }
}

template <int FETCH, int R = AT_ONCE, class Numbers>
void add_some_rows(int64_t count, const Product<Numbers>& p, const typename Numbers::Number* rows,
                   const Chunk<typename Numbers::Word>& chunk, float* sums) {
  if constexpr (R > 1)
    if (count < R) return add_some_rows<FETCH, R - 1>(count, p, rows, chunk, sums);
  add_rows<R, FETCH>(p, rows, chunk, sums);
}

// One chunk of a panel for `num_rows` rows. Their parts are as equal as can be, because a lone row wastes registers.
template <class Numbers>
void add_chunk(const Product<Numbers>& p, const typename Numbers::Number* rows, int64_t num_rows,
               Chunk<typename Numbers::Word> chunk, float* sums) {
  const int64_t parts = (num_rows + AT_ONCE - 1) / AT_ONCE, lines = chunk.lines;
  const auto* next = chunk.next;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t row = num_rows * part / parts, count = num_rows * (part + 1) / parts - row;
    const int64_t line = lines * part / parts;
    chunk.next = next + line * LINE;
    chunk.lines = lines * (part + 1) / parts - line;
    const auto add = parts == 1 ? add_some_rows<4, AT_ONCE, Numbers>
                     : parts < 4 ? add_some_rows<2, AT_ONCE, Numbers>
                                 : add_some_rows<1, AT_ONCE, Numbers>;
    add(count, p, rows + row * p.inputs, chunk, sums + row * PANEL);
  }
}

// The sums of a panel, [num_rows, PANEL], become outputs of the rows of `out`, row after row: when vectors of outputs
// came first, rows whose lines share a set of the cache (4 KiB apart) evicted each other's half-written ones. That was
// a sixth of the time of 512 rows of a 2048 by 256 float32 matrix on AVX2.
template <class Number>
void finish_panel(const float* sums, const float* bias, Number* out, int64_t num_rows, int64_t panel, int64_t outputs) {
  const int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, outputs - first);
  out += first;
  for (int64_t r = 0; r < num_rows; ++r, sums += PANEL, out += outputs)
    for (int64_t i = 0; i < count; i += LANES) {
      const Vec added = bias ? load(bias + first + i, count - i) : Vec{};
      store(out + i, load(sums + i) + added, count - i);
    }
}

// Rows [first, first + num_rows) and one panel.
template <class Numbers>
void multiply_panel(const Product<Numbers>& p, int64_t first, int64_t num_rows, int64_t panel) {
  alignas(64) float sums[MOST_ROWS * PANEL];
  std::fill_n(sums, num_rows * PANEL, 0.f);
  const auto* matrix = p.matrix + panel * PANEL * p.words();
  const int64_t most = num_rows > FEW_ROWS ? CHUNK_OF_MANY : CHUNK;
  for (int64_t k = 0; k < p.words(); k += most) {
    const int64_t words = std::min<int64_t>(most, p.words() - k);
    add_chunk(p, p.rows + first * p.inputs + k * p.INPUTS, num_rows,
              {matrix + k * PANEL, words, matrix + (k + words) * PANEL, words * LINES}, sums);
  }
  finish_panel(sums, p.bias, p.out + first * p.outputs, num_rows, panel, p.outputs);
}

// Shares the panels among threads, and the rows if there are many: those of a panel come one after the other. Calls
// multiply(first, num_rows, panel) for each part.
template <class Numbers, class F>
void for_panels(const Product<Numbers>& p, int threads, F multiply) {
  const int64_t blocks = (p.num_rows + MOST_ROWS - 1) / MOST_ROWS, panels = (p.outputs + PANEL - 1) / PANEL;
  for_ranges(panels * blocks, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t block = piece % blocks, first = p.num_rows * block / blocks;
      multiply(first, p.num_rows * (block + 1) / blocks - first, piece / blocks);
    }
  });
}

template <class Numbers>
void multiply_rows(const Product<Numbers>& p, int threads) {
  for_panels(p, threads, [&](int64_t first, int64_t rows, int64_t panel) { multiply_panel(p, first, rows, panel); });
}

}  // namespace
