// Products of bfloat16 rows with a matrix of 8-bit floats (e4m3), of which each output has a scale for every group of
// inputs. Needs AVX-512, or AVX2 with FMA.
//
// A thread widens a chunk of a panel once for a stretch of rows: to pairs of bfloat16 numbers with AVX-512 BF16, which
// the matrix unit (AMX) multiplies if there is one, otherwise to float32. Both hold each number exactly; scales are
// applied to the sums of a group, in float32. NaN, which e4m3 has too, is a scale of NaN here: it makes the output NaN
// all the same.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "amx.h"
#include "dot_bf16.h"
#include "parallel.h"
#include "vec.h"

namespace {

struct Task {
  const BF16* rows;       // [num_rows, inputs]
  const uint8_t* matrix;  // [outputs, inputs] of whole panels, packed
  const float* scales;    // [panels, groups, outputs of a panel]
  const float* bias;      // [outputs] or none
  BF16* out;              // [num_rows, outputs]
  int64_t num_rows, inputs, outputs, group;
};

struct Numbers {
  static constexpr bool SCALED = true;
#ifdef HAS_DOT_BF16
  typedef BF16 Number;
  typedef uint32_t Word;
  typedef VecBits Words;
  static Vec add(Vec sum, Words words, Word word) { return add_dot(sum, words, word); }
#else
  typedef float Number;
  typedef float Word;
  typedef Vec Words;
  static Vec add(Vec sum, Words words, float word) { return sum + words * word; }
#endif
#if defined(__AVX512BW__) || (defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__))
#define HAS_FLOAT8 1
  static constexpr bool USABLE = true;
#else
  static constexpr bool USABLE = false;
#endif
};

}  // namespace

#include "panel_products.h"

namespace {

constexpr int INPUTS = Product<Numbers>::INPUTS;         // of a word
constexpr int STEP = 64;                                 // words of an output that are widened together: 16 KB
constexpr int WORD_BYTES = PANEL * INPUTS;               // of the matrix, for a word of each output
constexpr int FEW = LANES == 16 ? 4 : 1;                  // rows that share what is widened in registers
constexpr int AHEAD = 4096;                              // bytes that few rows fetch before their use
constexpr int SMALL = 1 << 13;  // numbers of rows that one thread converts sooner than another one wakes up

// Where the number of an output and of an input of a word lies among the bytes. A register of bytes becomes two of
// bfloat16 numbers: each of its lanes of 16 bytes becomes a lane of both, and two numbers share 32 bits.
inline int64_t place_of(int64_t output, int64_t input) {
  const int64_t lane = output % LANES, number = output / LANES * INPUTS + input;
  return number / 4 * 4 * LANES + lane / 4 * 16 + number % 4 / 2 * 8 + lane % 4 * 2 + number % 2;
}

#ifdef HAS_FLOAT8
constexpr int REGISTERS = 64 / LANES / INPUTS;  // that the numbers of 64 bytes fill

#ifdef __AVX512F__
typedef __m512i Bytes;
inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes table(uint64_t low, uint64_t high) {
  return _mm512_broadcast_i32x4(_mm_set_epi64x((int64_t)high, (int64_t)low));
}
inline Bytes with_sign(Bytes x, Bytes codes) {
  return _mm512_ternarylogic_epi32(x, codes, _mm512_set1_epi8((char)0x80), 0xf8);
}
inline VecBits first_words(Bytes lower, Bytes upper) { return (VecBits)_mm512_unpacklo_epi8(lower, upper); }
inline VecBits second_words(Bytes lower, Bytes upper) { return (VecBits)_mm512_unpackhi_epi8(lower, upper); }
#else
typedef __m256i Bytes;
inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Bytes table(uint64_t low, uint64_t high) {
  return _mm256_broadcastsi128_si256(_mm_set_epi64x((int64_t)high, (int64_t)low));
}
inline Bytes with_sign(Bytes x, Bytes codes) {
  return _mm256_or_si256(x, _mm256_and_si256(codes, _mm256_set1_epi8((char)0x80)));
}
inline VecBits first_words(Bytes lower, Bytes upper) { return (VecBits)_mm256_unpacklo_epi8(lower, upper); }
inline VecBits second_words(Bytes lower, Bytes upper) { return (VecBits)_mm256_unpackhi_epi8(lower, upper); }
#endif

// Finds the two bytes of bfloat16 numbers by their codes, without the sign.
class Tables {
#ifdef __AVX512VBMI__
 public:
  Tables() {
    alignas(64) uint8_t bytes[2][128];
    for (int code = 0; code < 128; ++code) {
      const float x = code < 8 ? code / 512.f : as_float((code << 20) + (120 << 23));
      uint32_t bits;
      memcpy(&bits, &x, sizeof bits);
      bytes[0][code] = bits >> 24;
      bytes[1][code] = bits >> 16;
    }
    for (int i = 0; i < 2; ++i) {
      uppers[i] = _mm512_load_si512(bytes[0] + i * 64);
      lowers[i] = _mm512_load_si512(bytes[1] + i * 64);
    }
  }

  void find(Bytes codes, Bytes& upper, Bytes& lower) const {
    upper = _mm512_permutex2var_epi8(uppers[0], codes, uppers[1]);
    lower = _mm512_permutex2var_epi8(lowers[0], codes, lowers[1]);
  }

 private:
  Bytes uppers[2], lowers[2];
#else
 public:
  // Both bytes follow from the halves of a code, apart from those of numbers below 2^-6, which e4m3 stores without a
  // leading one: those have tables of their own.
  void find(Bytes codes, Bytes& upper, Bytes& lower) const {
#ifdef __AVX512F__
    const Bytes halves = _mm512_set1_epi8(15);
    const __mmask64 small = _mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x70));
    const Bytes low = _mm512_and_si512(codes, halves), high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), halves);
    upper = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(uppers, high), small, small_uppers, low);
    lower = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(lowers, low), small, small_lowers, low);
#else
    const Bytes halves = _mm256_set1_epi8(15);
    const Bytes small = _mm256_cmpeq_epi8(_mm256_and_si256(codes, _mm256_set1_epi8(0x70)), Bytes{});
    const Bytes low = _mm256_and_si256(codes, halves), high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), halves);
    upper = _mm256_blendv_epi8(_mm256_shuffle_epi8(uppers, high), _mm256_shuffle_epi8(small_uppers, low), small);
    lower = _mm256_blendv_epi8(_mm256_shuffle_epi8(lowers, low), _mm256_shuffle_epi8(small_lowers, low), small);
#endif
  }

 private:
  const Bytes uppers = table(0x434241403f3e3d3c, 0x434241403f3e3d3c);
  const Bytes lowers = table(0x7060504030201000, 0xf0e0d0c0b0a09080);
  const Bytes small_uppers = table(0x3c3c3c3c3b3b3b00, 0x3c3c3c3c3c3c3c3c);
  const Bytes small_lowers = table(0x60402000c0800000, 0xf0e0d0c0b0a09080);
#endif
};

// Widens the numbers of 64 bytes.
inline void widen(const Tables& tables, const uint8_t* from, Numbers::Words* to) {
#pragma GCC unroll 2
  for (int i = 0; i < 64; i += sizeof(Bytes), to += 4 / INPUTS) {
    const Bytes codes = load_bytes(from + i);
    Bytes upper, lower;
    tables.find(codes, upper, lower);
    upper = with_sign(upper, codes);
    const VecBits first = first_words(lower, upper), second = second_words(lower, upper);
#ifdef HAS_DOT_BF16
    to[0] = first;
    to[1] = second;
#else
    to[0] = (Vec)(first << 16);
    to[1] = (Vec)(first & 0xffff0000u);
    to[2] = (Vec)(second << 16);
    to[3] = (Vec)(second & 0xffff0000u);
#endif
  }
}

// A chunk of a panel, for as many words of each output.
struct Codes {
  const uint8_t* bytes;
  int64_t words;
  const float* scales;  // [PANEL]

  const uint8_t* end() const { return bytes + words * WORD_BYTES; }
};

// Adds the products of a chunk to the sums of R rows, few enough for registers, while it is widened. For other rows it
// may keep what was widened in `words`, [words, PANEL].
template <int R, bool KEEPS>
void add_few(const Product<Numbers>& p, const Numbers::Number* rows, const Codes& codes, const Tables& memory,
             float* sums, Numbers::Words* words) {
  const Tables tables = memory;  // in registers
  Vec sum[R][VECS] = {};
  const uint8_t* from = codes.bytes;
  for (int64_t k = 0; k < codes.words; ++k) {
#pragma GCC unroll 2
    for (int line = 0; line < WORD_BYTES; line += 64, from += 64) {
      __builtin_prefetch(from + AHEAD);
      Numbers::Words widened[REGISTERS];
      widen(tables, from, widened);
      if constexpr (KEEPS) {
        memcpy(words, widened, sizeof widened);
        words += REGISTERS;
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        Numbers::Word word;
        memcpy(&word, rows + r * p.inputs + k * INPUTS, sizeof word);
#pragma GCC unroll 8
        for (int i = 0; i < REGISTERS; ++i) {
          Vec& to = sum[r][line / 64 * REGISTERS + i];
          to = Numbers::add(to, widened[i], word);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < VECS; ++i) {
      float* to = sums + r * PANEL + i * LANES;
      store(to, load(to) + sum[r][i] * load(codes.scales + i * LANES));
    }
}

template <int R = FEW>
void add_few_rows(int64_t count, const Product<Numbers>& p, const Numbers::Number* rows, const Codes& codes,
                  const Tables& tables, float* sums) {
  if constexpr (R > 1)
    if (count < R) return add_few_rows<R - 1>(count, p, rows, codes, tables, sums);
  add_few<R, false>(p, rows, codes, tables, sums, nullptr);
}

// The same for more rows, which share what is widened once. As a step of its own that takes 8 rows of AVX2 124 instead
// of 116 µs (512 by 1,024 numbers).
void add_many_rows(int64_t count, const Product<Numbers>& p, const Numbers::Number* rows, const Codes& codes,
                   const Tables& tables, float* sums) {
  Numbers::Words words[STEP * VECS];
  add_few<FEW, true>(p, rows, codes, tables, sums, words);
  const auto* next = (const Numbers::Word*)codes.end();  // only fetched
  const int64_t lines = codes.words * WORD_BYTES / 64;
  add_chunk(p, rows + FEW * p.inputs, count - FEW, {(Numbers::Word*)words, codes.words, next, lines, codes.scales},
            sums + FEW * PANEL);
}

// Rows [first, first + num_rows) and one panel. add(k, codes, tables, sums) adds the chunk that begins with word k.
template <class F>
void multiply_panel(const Task& t, int64_t first, int64_t num_rows, int64_t panel, float* sums, F add) {
  static const Tables tables;
  std::fill_n(sums, num_rows * PANEL, 0.f);
  const int64_t groups = (t.inputs + t.group - 1) / t.group, of_group = t.group / INPUTS, words = t.inputs / INPUTS;
  Codes codes = {t.matrix + panel * PANEL * t.inputs, 0, nullptr};
  for (int64_t k = 0; k < words; k += codes.words) {
    codes.words = std::min({(int64_t)STEP, words - k, of_group - k % of_group});
    codes.scales = t.scales + (panel * groups + k / of_group) * PANEL;
    add(k, codes, tables, sums);
    codes.bytes = codes.end();
  }
  finish_panel(sums, t.bias, t.out + first * t.outputs, num_rows, panel, t.outputs);
}

// The rows as the products read them.
#ifdef HAS_DOT_BF16
const BF16* take_rows(const Task& t, int) { return t.rows; }
#else
const float* take_rows(const Task& t, int threads) {
  static thread_local std::vector<float> scratch;
  const int64_t size = t.num_rows * t.inputs;
  if ((int64_t)scratch.size() < size) scratch.resize(size);
  float* to = scratch.data();
  for_ranges(size, SMALL, size > SMALL ? threads : 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += LANES) store(to + i, load(t.rows + i, end - i), end - i);
  });
  return to;
}
#endif

#ifdef HAS_AMX
constexpr int TILE_ROWS = 16, DEPTH = 32, TILE = TILE_ROWS * DEPTH;  // rows, inputs and numbers of a tile
constexpr int PAIRS = DEPTH / INPUTS;                                // words of an output in a tile
constexpr int STRETCH = 1 << 19;                                     // numbers of rows that a second-level cache holds

// Whether the matrix unit computes the task.
inline bool uses_tiles(const Task& t) { return t.inputs % DEPTH == 0 && t.group % DEPTH == 0 && may_use_amx(); }

// Up to 16 rows: where their first tile is, and how far the next tile (in numbers) and the next row (in bytes) are.
struct TileRows {
  const BF16* at;
  int64_t step, stride, count;
};

// Adds a chunk's products to the sums of a tile's rows: registers 0 to 3 hold those of 64 outputs, 4 rows.
void add_tile(const TileRows& x, const Codes& codes, const Numbers::Words* words, float* sums) {
  alignas(64) float products[VECS][TILE_ROWS * LANES];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const BF16* rows = x.at;
  for (int64_t k = 0; k < codes.words; k += PAIRS, words += PAIRS * VECS, rows += x.step) {
    _tile_loadd(4, rows, x.stride);
    _tile_loadd(5, words, PANEL * sizeof(Numbers::Word));
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, words + 1, PANEL * sizeof(Numbers::Word));
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, words + 2, PANEL * sizeof(Numbers::Word));
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, words + 3, PANEL * sizeof(Numbers::Word));
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, products[0], 64);
  _tile_stored(1, products[1], 64);
  _tile_stored(2, products[2], 64);
  _tile_stored(3, products[3], 64);
  for (int i = 0; i < VECS; ++i) {
    const Vec scales = load(codes.scales + i * LANES);
    for (int64_t r = 0; r < x.count; ++r) {
      float* to = sums + r * PANEL + i * LANES;
      store(to, load(to) + load(products[i] + r * LANES) * scales);
    }
  }
}

// [rows / 16, inputs / 32, 16, 32]: rows as they are lie so far apart that they evict each other from the cache.
const BF16* to_tiles(const Task& t, int threads) {
  static thread_local std::vector<BF16> scratch;
  const int64_t steps = t.inputs / DEPTH;
  const size_t size = (t.num_rows + TILE_ROWS - 1) / TILE_ROWS * steps * TILE;
  if (scratch.size() < size) scratch.resize(size);
  BF16* to = scratch.data();
  for_ranges(t.num_rows, TILE_ROWS, threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t k = 0; k < steps; ++k)
        memcpy(to + (r / TILE_ROWS * steps + k) * TILE + r % TILE_ROWS * DEPTH, t.rows + r * t.inputs + k * DEPTH,
               DEPTH * sizeof(BF16));
  });
  return to;
}

void run_tiles(const Task& t, int threads) {
  if (!t.num_rows) return;  // a register cannot have no rows
  const bool few = t.num_rows <= TILE_ROWS;
  const BF16* rows = few ? t.rows : to_tiles(t, threads);
  const int64_t step = few ? DEPTH : TILE, stride = (few ? t.inputs : DEPTH) * sizeof(BF16);
  const int64_t block = std::max<int64_t>(4, std::min<int64_t>(16, STRETCH / t.inputs / TILE_ROWS)) * TILE_ROWS;
  const int64_t blocks = (t.num_rows + block - 1) / block, panels = (t.outputs + PANEL - 1) / PANEL;
  for_ranges(panels * blocks, 1, threads, [&](int64_t begin, int64_t end) {
    static thread_local std::vector<float> sums;
    if ((int64_t)sums.size() < block * PANEL) sums.resize(block * PANEL);
    const uint8_t m = few ? t.num_rows : TILE_ROWS;
    const AmxRegisters registers({m, m, m, m, m, PAIRS, PAIRS, PAIRS});
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t first = piece % blocks * block, count = std::min(block, t.num_rows - first);
      const auto add = [&](int64_t k, const Codes& codes, const Tables& tables, float* to) {
        Numbers::Words words[STEP * VECS], *at = words;
        for (const uint8_t* from = codes.bytes; from < codes.end(); from += 64, at += REGISTERS)
          widen(tables, from, at);
        finish_stores();
        for (int64_t r = 0; r < count; r += TILE_ROWS) {
          const BF16* at = rows + (few ? 0 : (first + r) * t.inputs) + k / PAIRS * step;
          add_tile({at, step, stride, std::min<int64_t>(TILE_ROWS, count - r)}, codes, words, to + r * PANEL);
        }
      };
      multiply_panel(t, first, count, piece / blocks, sums.data(), add);
    }
  });
}
#endif

void run(const Task& t, int threads) {
#ifdef HAS_AMX
  if (uses_tiles(t)) return run_tiles(t, threads);
#endif
  const Product<Numbers> p = {take_rows(t, threads), nullptr, nullptr, nullptr, t.num_rows, t.inputs, t.outputs};
  for_panels(p, threads, [&](int64_t first, int64_t num_rows, int64_t panel) {
    alignas(64) float sums[MOST_ROWS * PANEL];
    const auto add = [&](int64_t k, const Codes& codes, const Tables& tables, float* to) {
      const auto add_rows = num_rows <= FEW ? add_few_rows<> : add_many_rows;
      add_rows(num_rows, p, p.rows + first * p.inputs + k * INPUTS, codes, tables, to);
    };
    multiply_panel(t, first, num_rows, panel, sums, add);
  });
}
#else
void run(const Task&, int) {}
#endif

}  // namespace

// Whether the products can be computed; otherwise, do not multiply.
extern "C" int32_t can_multiply() { return Numbers::USABLE; }

// How many outputs a panel has, and of how many inputs there must be a multiple, in all and in a group.
extern "C" int64_t panel_outputs() { return PANEL; }
extern "C" int64_t whole_inputs() { return INPUTS; }

// Arranges `weight`, [outputs, inputs], as the products read it; zeros fill the last panel. A NaN becomes the scale of
// its output and group among those of the panels.
extern "C" void pack(const uint8_t* weight, uint8_t* matrix, float* scales, int64_t outputs, int64_t inputs,
                     int64_t group, int32_t threads) {
  for_pieces((outputs + PANEL - 1) / PANEL, threads, [&](int64_t panel) {
    uint8_t* to = matrix + panel * PANEL * inputs;
    float* of_panel = scales + panel * ((inputs + group - 1) / group) * PANEL;
    std::fill_n(to, PANEL * inputs, 0);
    for (int64_t output = 0; output < std::min<int64_t>(PANEL, outputs - panel * PANEL); ++output) {
      const uint8_t* from = weight + (panel * PANEL + output) * inputs;
      for (int64_t k = 0; k < inputs; ++k)
        if ((from[k] & 127) != 127)
          to[k / INPUTS * WORD_BYTES + place_of(output, k % INPUTS)] = from[k];
        else
          of_panel[k / group * PANEL + output] = NAN;
    }
  });
}

// out = rows times matrixᵀ, plus bias if there is one. `group`: inputs that share a scale of an output.
extern "C" void multiply_float8(const BF16* rows, const uint8_t* matrix, const float* scales, const float* bias,
                                BF16* out, int64_t num_rows, int64_t inputs, int64_t outputs, int64_t group,
                                int32_t threads) {
  run({rows, matrix, scales, bias, out, num_rows, inputs, outputs, group}, threads);
}
