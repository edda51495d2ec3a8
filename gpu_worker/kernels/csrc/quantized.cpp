// Products of rows with a matrix of 4 or 8 bits, whose groups of 32 inputs have a scale, and possibly an offset, for each
// output. Rows are rounded to int8 by the same groups. Needs AVX2; uses AVX-512 and VNNI.
//
// The matrix lies in panels of 16 outputs, in a panel group after group, of a group eight fours of inputs, of a four its
// 16 outputs. Two fours of 4 bits share 64 bytes: the first in the lower halves. Each thread unpacks its panels once for
// a stretch of rows. Sums of a group are exact, and a row adds its groups in their order: it depends on no other row.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "dot.h"
#include "vec.h"

namespace {

struct Product {
  const void* rows;         // [num_rows, inputs], bfloat16 or float32
  const uint8_t* matrix;    // [outputs, inputs] of whole panels, packed; the value of an output is a byte plus `least`
  const uint16_t* scales;   // [panels, groups, 16] float16
  const uint16_t* offsets;  // as the scales, or none
  const float* bias;        // [outputs] or none
  void* out;                // [num_rows, outputs], of the rows' dtype
  int64_t num_rows, inputs, outputs;
  float factor;   // of all scales and offsets
  int32_t least;  // added to the matrix's numbers
};

constexpr int PANEL = 16, GROUP = 32, FOURS = GROUP / 4, LINE = PANEL * 4;  // outputs; inputs; bytes of a four

// One panel of `values`, [outputs, inputs], less `least`.
template <int BITS>
void pack_panel(const int8_t* values, int64_t outputs, int64_t inputs, int32_t least, uint8_t* panel) {
  for (int64_t k = 0; k < inputs; k += 4)
    for (int64_t o = 0; o < std::min<int64_t>(PANEL, outputs); ++o)
      for (int i = 0; i < 4; ++i) {
        const uint8_t number = (uint8_t)(values[o * inputs + k + i] - least);
        if (BITS == 8)
          panel[k * PANEL + o * 4 + i] = number;
        else
          panel[k / 8 * LINE + o * 4 + i] |= k % 8 ? number << 4 : number;
      }
}

#ifdef HAS_DOT
constexpr int STRETCH = 128;  // rows that are computed together: of 3,072 inputs they take 400 KB of the cache
constexpr int AHEAD = 2048;   // bytes fetched before their use

// A stretch of rows as int8, by groups: what a thread needs of all rows for one group of the matrix lies together.
struct Rounded {
  std::vector<int8_t> values;  // [groups, rows, 32]
  std::vector<float> units;    // [groups, rows]: what a one is worth
  std::vector<int32_t> sums;   // [groups, rows]: of the values, times `least`
  std::vector<float> totals;   // [groups, rows]: of the values, times the unit
  int64_t rows;
};

inline void store_bytes(int8_t* to, const VecInt* x) {
#ifdef __AVX512F__
  for (int i = 0; i < GROUP / LANES; ++i) {
    const __m128i bytes = _mm512_cvtsepi32_epi8((__m512i)x[i]);
    memcpy(to + i * LANES, &bytes, sizeof bytes);
  }
#else
  const __m256i lower = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]);
  const __m256i upper = _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(lower, upper), order);
  memcpy(to, &bytes, sizeof bytes);
#endif
}

// A row's group as int8 by its largest number. A number that is not finite makes the unit NaN.
template <class T>
void round_group(const T* x, int32_t least, int64_t index, Rounded& to) {
  constexpr int VECS = GROUP / LANES;
  Vec most = {}, zero = {};
  for (int i = 0; i < VECS; ++i) {
    const Vec part = load(x + i * LANES);
    most = maximum(most, maximum(part, -part));
    zero += part * 0.f;
  }
  const float top = largest(most) + sum(zero), scale = top > 0 ? 127.f / top : 0.f;
  VecInt rounded[VECS], total = {};
  for (int i = 0; i < VECS; ++i) total += rounded[i] = to_int(load(x + i * LANES) * scale);
  store_bytes(to.values.data() + index * GROUP, rounded);
  const float values = sum(__builtin_convertvector(total, Vec));  // exact: they are small integers
  to.units[index] = top / 127.f;
  to.sums[index] = (int32_t)values * least;
  to.totals[index] = values * to.units[index];
}

// Unpacks LANES outputs of a group, from lane `first` of the panel on; of 4 bits whole numbers, of 8 bits bytes.
template <int BITS>
inline void unpack(const uint8_t* group, int first, Bytes* to) {
#pragma GCC unroll 8
  for (int i = 0; i < FOURS; ++i)
    if (BITS == 8) {
      to[i] = load_bytes(group + i * LINE + first * 4);
    } else if (i % 2 == 0) {
      const Bytes both = load_bytes(group + i / 2 * LINE + first * 4);
      to[i] = low_halves(both);
      to[i + 1] = high_halves(both);
    }
}

// What adds the groups of one panel for all rows of a stretch.
template <int BITS, bool OFFSETS>
struct PanelSums {
  const Rounded& x;
  alignas(64) float sums[STRETCH][PANEL];
  alignas(64) int32_t halves[STRETCH][LANES];

  explicit PanelSums(const Rounded& rows) : x(rows) {}

  void add(VecInt dot, int64_t row, int64_t index, int first, Vec scales, Vec offsets) {
    const Vec product = __builtin_convertvector(dot + x.sums[index], Vec);
    Vec sum = multiply_add(product, scales * x.units[index], load(sums[row] + first));
    if (OFFSETS) sum = multiply_add(offsets, splat(x.totals[index]), sum);
    store(sums[row] + first, sum);
  }

  void add_group(const uint8_t* group, int first, int64_t start, Vec scales, Vec offsets) {
    Bytes u[FOURS];
    unpack<BITS>(group, first, u);
#ifndef HAS_VNNI
    if (BITS == 8) return add_bytes(u, first, start, scales, offsets);
#endif
    for (int64_t r = 0; r < x.rows; ++r)
      add(dot_halves<FOURS>(u, x.values.data() + (start + r) * GROUP), r, start + r, first, scales, offsets);
  }

  // Bytes as two halves, lest 16 bits overflow; first four fours, then the others, because registers hold no more.
  void add_bytes(const Bytes* u, int first, int64_t start, Vec scales, Vec offsets) {
    constexpr int SOME = FOURS / 2;
    Bytes low[FOURS], high[FOURS];
#pragma GCC unroll 8
    for (int i = 0; i < FOURS; ++i) {
      low[i] = low_halves(u[i]);
      high[i] = high_halves(u[i]);
    }
    const int8_t* values = x.values.data() + start * GROUP;
    for (int64_t r = 0; r < x.rows; ++r) {
      const int8_t* row = values + r * GROUP;
      const VecInt dot = dot_halves<SOME>(low, row) + dot_halves<SOME>(high, row, 16);
      memcpy(halves[r], &dot, sizeof dot);
    }
    for (int64_t r = 0; r < x.rows; ++r) {
      const int8_t* row = values + r * GROUP + SOME * 4;
      VecInt dot;
      memcpy(&dot, halves[r], sizeof dot);
      dot += dot_halves<SOME>(low + SOME, row) + dot_halves<SOME>(high + SOME, row, 16);
      add(dot, r, start + r, first, scales, offsets);
    }
  }
};

template <class T>
void finish(const Product& p, const float (*sums)[PANEL], int64_t first_row, int64_t rows, int64_t output) {
  for (int i = 0; i < PANEL; i += LANES) {
    const int64_t left = p.outputs - output - i;
    if (left <= 0) return;
    const Vec bias = p.bias ? load(p.bias + output + i, left) : Vec{};
    for (int64_t r = 0; r < rows; ++r)
      store((T*)p.out + (first_row + r) * p.outputs + output + i, load(sums[r] + i) * p.factor + bias, left);
  }
}

// A stretch of rows, from `first` on, and the panels [begin, end).
template <int BITS, bool OFFSETS, class T>
void multiply(const Product& p, const Rounded& x, int64_t first, int64_t begin, int64_t end) {
  constexpr int BYTES = PANEL * GROUP * BITS / 8;
  const int64_t groups = p.inputs / GROUP;
  PanelSums<BITS, OFFSETS> panel(x);
  for (int64_t b = begin; b < end; ++b) {
    memset(panel.sums, 0, x.rows * sizeof *panel.sums);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t place = b * groups + g;
      const uint8_t* group = p.matrix + place * BYTES;
      for (int i = 0; i < BYTES; i += 64) _mm_prefetch((const char*)group + AHEAD + i, _MM_HINT_T0);
      for (int i = 0; i < PANEL; i += LANES) {
        const Vec offsets = OFFSETS ? load_half(p.offsets + place * PANEL + i) : Vec{};
        panel.add_group(group, i, g * x.rows, load_half(p.scales + place * PANEL + i), offsets);
      }
    }
    finish<T>(p, panel.sums, first, x.rows, b * PANEL);
  }
}

template <int BITS, bool OFFSETS, class T>
void run(const Product& p, int threads) {
  static thread_local Rounded scratch;
  Rounded& x = scratch;
  const int64_t groups = p.inputs / GROUP, panels = (p.outputs + PANEL - 1) / PANEL;
  const size_t most = groups * std::min<int64_t>(STRETCH, p.num_rows);
  if (x.units.size() < most) {
    x.values.resize(most * GROUP);
    x.units.resize(most);
    x.sums.resize(most);
    x.totals.resize(most);
  }
  for (int64_t first = 0; first < p.num_rows; first += STRETCH) {
    x.rows = std::min<int64_t>(STRETCH, p.num_rows - first);
#pragma omp parallel num_threads(threads)
    {
      const int64_t thread = omp_get_thread_num(), count = omp_get_num_threads();
#pragma omp for schedule(static)
      for (int64_t r = 0; r < x.rows * groups; ++r) {  // few rows too are shared among all threads
        const int64_t row = r / groups, g = r % groups;
        round_group((const T*)p.rows + (first + row) * p.inputs + g * GROUP, p.least, g * x.rows + row, x);
      }
      multiply<BITS, OFFSETS, T>(p, x, first, panels * thread / count, panels * (thread + 1) / count);
    }
  }
}

// Rounds a number by a scale's inverse to the levels of 4 bits.
inline Vec to_level(Vec x, float inverse) {
  const Vec level = __builtin_convertvector(to_int(x * inverse), Vec);
  return minimum(maximum(level, splat(-8.f)), splat(7.f));
}

// What layers/quantized_weight.py describes, for one group. Returns the scale.
template <class T>
float best_scale(const T* x, int64_t group, const float* extremes, int64_t count) {
  Vec most = splat(-INFINITY), least = splat(INFINITY);
  for (int64_t i = 0; i < group; i += LANES) {
    most = maximum(most, load(x + i));
    least = minimum(least, load(x + i));
  }
  const float high = largest(most), low = -largest(-least), extreme = high >= -low ? high : low;
  float scale = 0, gained = 0;
  for (int64_t e = 0; extreme != 0 && e < count; ++e) {
    Vec product = {}, square = {};
    for (int64_t i = 0; i < group; i += LANES) {
      const Vec part = load(x + i), level = to_level(part, -extremes[e] / extreme);
      product += part * level;
      square += level * level;
    }
    const float xl = sum(product), ll = sum(square), gain = xl * (xl / ll);
    if (gain > gained) gained = gain, scale = xl / ll;
  }
  const float half = _cvtsh_ss(_cvtss_sh(scale, _MM_FROUND_TO_NEAREST_INT));
  return std::fabs(half) >= 6.103515625e-5f && std::fabs(half) <= 65504.f ? half : scale;
}

template <class T>
void round_groups(const T* weight, int64_t groups, int64_t group, const float* extremes, int64_t count, int8_t* values,
                  float* scales, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t g = 0; g < groups; ++g) {
    const T* x = weight + g * group;
    const float scale = scales[g] = best_scale(x, group, extremes, count), inverse = scale != 0 ? 1 / scale : 0;
    for (int64_t i = 0; i < group; i += GROUP) {
      VecInt levels[GROUP / LANES];
      for (int j = 0; j < GROUP / LANES; ++j) levels[j] = to_int(to_level(load(x + i + j * LANES), inverse));
      store_bytes(values + g * group + i, levels);
    }
  }
}

template <int BITS, class T>
void choose(const Product& p, int threads) {
  p.offsets ? run<BITS, true, T>(p, threads) : run<BITS, false, T>(p, threads);
}
constexpr bool USABLE = true;
#else
constexpr bool USABLE = false;
template <int BITS, class T>
void choose(const Product&, int) {}
template <class T>
void round_groups(const T*, int64_t, int64_t, const float*, int64_t, int8_t*, float*, int) {}
#endif

}  // namespace

// Whether this processor has AVX2 and what comes with it; without it, do not multiply.
extern "C" int32_t can_multiply() { return USABLE; }

// out = rows times matrixᵀ, plus bias if there is one. `bits`: 4 or 8; whole 32s of inputs.
extern "C" void multiply_quantized(int32_t bits, int32_t is_bf16, const void* rows, const uint8_t* matrix,
                                   const uint16_t* scales, const uint16_t* offsets, const float* bias, void* out,
                                   int64_t num_rows, int64_t inputs, int64_t outputs, float factor, int32_t least,
                                   int32_t threads) {
  const Product p = {rows, matrix, scales, offsets, bias, out, num_rows, inputs, outputs, factor, least};
  if (bits == 4)
    is_bf16 ? choose<4, BF16>(p, threads) : choose<4, float>(p, threads);
  else
    is_bf16 ? choose<8, BF16>(p, threads) : choose<8, float>(p, threads);
}

// Packs `values`, [outputs, inputs] int8, into zeros as the products read them.
extern "C" void pack_quantized(int32_t bits, const int8_t* values, uint8_t* matrix, int64_t outputs, int64_t inputs,
                               int32_t least, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t first = 0; first < outputs; first += PANEL) {
    const int8_t* rows = values + first * inputs;
    uint8_t* panel = matrix + first * inputs * bits / 8;
    bits == 4 ? pack_panel<4>(rows, outputs - first, inputs, least, panel)
              : pack_panel<8>(rows, outputs - first, inputs, least, panel);
  }
}

// Rounds `groups` groups of a weight, of whole 32s of numbers each, to -8 to 7; `extremes`: the levels, as positive
// numbers, that the largest number of a group may become. Writes as many values as numbers, and a scale for each group.
extern "C" void round_to_4_bits(int32_t is_bf16, const void* weight, int64_t groups, int64_t group,
                                const float* extremes, int64_t count, int8_t* values, float* scales, int32_t threads) {
  is_bf16 ? round_groups((const BF16*)weight, groups, group, extremes, count, values, scales, threads)
          : round_groups((const float*)weight, groups, group, extremes, count, values, scales, threads);
}
