// Adds one group of a panel of a quantized matrix to the sums of rows, as many rows at a time as registers hold.
#pragma once
#include <cstdint>
#include <vector>

#include "dot.h"
#include "quantized.h"
#include "vec.h"

namespace {

// A matrix of whole panels. The value of an output is (byte + `least`) times its scale, plus its offset; of a FLOAT4 one
// the byte is an entry of FLOAT4_LEVELS.
struct Matrix {
  const uint8_t* bytes;
  const uint8_t* scales;    // [panels, groups / groups_per_scale, 16] float16; of FLOAT4 bytes, see load_exponents
  const uint16_t* offsets;  // as the scales, or none
  int64_t groups, groups_per_scale;
  int32_t least;
};

#ifdef HAS_DOT
constexpr int VECS = PANEL / LANES;  // registers of a panel's outputs
constexpr int AHEAD = 2048;          // bytes fetched before their use

// Rows' part in a group, one after the other; see Rounded.
struct RowsGroup {
  const int8_t* values;
  const float* units;
  const int32_t* starts;
  const float* totals;

  RowsGroup after(int64_t rows) const { return {values + rows * GROUP, units + rows, starts + rows, totals + rows}; }
};

// A stretch of rows as int8, by groups: what a thread needs of all rows for one group of the matrix lies together.
struct Rounded {
  std::vector<int8_t> values;   // [groups, rows, 32]
  std::vector<float> units;     // [groups, rows]: what a one is worth
  std::vector<int32_t> starts;  // [groups, rows]: what the sums start with, see dot.h
  std::vector<float> totals;    // [groups, rows]: of the values, times the unit

  RowsGroup from(int64_t place) const {
    return {values.data() + place * GROUP, units.data() + place, starts.data() + place, totals.data() + place};
  }

  void reserve(size_t most) {
    if (units.size() >= most) return;
    values.resize(most * GROUP);
    units.resize(most);
    starts.resize(most);
    totals.resize(most);
  }
};

// A panel's group of the matrix, as it is packed, and its scales and offsets.
struct PanelGroup {
  const uint8_t* bytes;
  const uint8_t* scales;
  const uint16_t* offsets;  // or none
};

template <int KIND>
constexpr int SCALE_BYTES = KIND == FLOAT4 ? 1 : 2;

template <int KIND>
inline Vec load_scales(const uint8_t* scales, int vec) {
  const uint8_t* from = scales + vec * LANES * SCALE_BYTES<KIND>;
  return KIND == FLOAT4 ? load_exponents(from) : load_half((const uint16_t*)from);
}

// Which four, and of a byte which half, a register holds. Unpacked groups lie part after part, each as [8, 16, 4].
template <int KIND>
inline Bytes unpack(const uint8_t* group, int part, int four, int vec) {
  const uint8_t* line = group + (KIND == INT8 ? four : four / 2) * LINE + vec * sizeof(Bytes);
  if (KIND == INT8 && PARTS<KIND> == 1) return load_bytes(line);
  const bool high = KIND == INT8 ? part : four % 2;
  const Bytes halves = high ? high_halves(load_bytes(line)) : low_halves(load_bytes(line));
  return KIND == FLOAT4 ? look_up(FLOAT4_LEVELS, halves) : halves;
}

inline int64_t unpacked_place(int part, int four, int vec) {
  return (part * FOURS + four) * LINE + vec * (int64_t)sizeof(Bytes);
}

template <int KIND>
void unpack_group(const uint8_t* group, uint8_t* to) {
#pragma GCC unroll 8
  for (int four = 0; four < FOURS; ++four)
    for (int vec = 0; vec < VECS; ++vec)
      for (int part = 0; part < PARTS<KIND>; ++part) {
        const Bytes bytes = unpack<KIND>(group, part, four, vec);
        memcpy(to + unpacked_place(part, four, vec), &bytes, sizeof bytes);
      }
}

// Rows whose sums registers hold at once: of AVX2's 16, eight hold sums.
template <int KIND>
constexpr int AT_ONCE = 8 / (VECS * PARTS<KIND>);

// The sums of rows, in memory or in registers.
struct SumsInMemory {
  float (*rows)[PANEL];
  Vec get(int r, int v) const { return load(rows[r] + v * LANES); }
  void set(int r, int v, Vec x) const { store(rows[r] + v * LANES, x); }
};

template <int R>
struct SumsInRegisters {
  Vec rows[R][VECS] = {};
  Vec get(int r, int v) const { return rows[r][v]; }
  void set(int r, int v, Vec x) { rows[r][v] = x; }
};

// Adds the products of a group, whose integers are known, to the sums of R rows.
template <int KIND, bool OFFSETS, int R, class S>
inline void add_products(const Sums (&dots)[R][VECS][PARTS<KIND>], const PanelGroup& group, const RowsGroup& x,
                         S& sums) {
#pragma GCC unroll 2
  for (int v = 0; v < VECS; ++v) {
    const Vec scales = load_scales<KIND>(group.scales, v);
    const Vec offsets = OFFSETS ? load_half(group.offsets + v * LANES) : Vec{};
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec product = __builtin_convertvector(total<KIND>(dots[r][v]), Vec);
      Vec sum = multiply_add(product, scales * x.units[r], sums.get(r, v));
      if (OFFSETS) sum = multiply_add(offsets, splat(x.totals[r]), sum);
      sums.set(r, v, sum);
    }
  }
}

// Adds a group to the sums of R rows. `unpacked`: what unpack_group wrote, or none: then the group is unpacked on the
// way.
template <int KIND, bool OFFSETS, int R, bool UNPACKED, class S>
inline void add_rows(const PanelGroup& group, const uint8_t* unpacked, const RowsGroup& x, S& sums) {
  constexpr int N = PARTS<KIND>;
  Sums dots[R][VECS][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < VECS; ++v) {
      dots[r][v][0] = zero_sums();
      // The sums start with the correction for levels that are stored unsigned, so that no instruction adds it later.
      // With AVX2, 16 bits hold the sum of a whole group of 4-bit products.
      dots[r][v][N - 1] = first_sums(x.starts[r]);
    }
#pragma GCC unroll 8
  for (int four = 0; four < FOURS; ++four) {
    Bytes u[VECS][N];
#pragma GCC unroll 2
    for (int v = 0; v < VECS; ++v)
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        u[v][n] = UNPACKED ? load_bytes(unpacked + unpacked_place(n, four, v)) : unpack<KIND>(group.bytes, n, four, v);
        // An empty assembly statement, without which GCC reorders the additions and spills the sums.
        keep_here(u[v][n]);
      }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Bytes s = repeat_four(x.values + r * GROUP + four * 4);
#pragma GCC unroll 2
      for (int v = 0; v < VECS; ++v)
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          dots[r][v][n] = add_four(dots[r][v][n], u[v][n], s);
          keep_here(dots[r][v][n]);
        }
    }
  }
  add_products<KIND, OFFSETS>(dots, group, x, sums);
}

// Calls `each` with the groups of panel `b`, one after the other.
template <int KIND, bool OFFSETS, class F>
inline void for_groups(const Matrix& matrix, int64_t b, F each) {
  constexpr int BYTES = PANEL * GROUP * bits_of(KIND) / 8, OF_SCALES = PANEL * SCALE_BYTES<KIND>;
  const int64_t of_scales = matrix.groups / matrix.groups_per_scale;
  PanelGroup group = {matrix.bytes + b * matrix.groups * BYTES, matrix.scales + b * of_scales * OF_SCALES, nullptr};
  if (OFFSETS) group.offsets = matrix.offsets + b * of_scales * PANEL;
  for (int64_t s = 0; s < of_scales; ++s) {
    for (int64_t g = 0; g < matrix.groups_per_scale; ++g) {
      for (int i = 0; i < BYTES; i += 64) _mm_prefetch((const char*)group.bytes + AHEAD + i, _MM_HINT_T0);
      each(group);
      group.bytes += BYTES;
    }
    group.scales += OF_SCALES;
    if (OFFSETS) group.offsets += PANEL;
  }
}

// So few rows that a group is unpacked on the way to their sums, and the sums of all groups stay in registers.
template <int KIND>
// Storing the sums between groups made a lone row take 26 instead of 19 µs (1,024 by 1,024 numbers of 4 bits, in the
// second-level cache).
constexpr int FEW = AT_ONCE<KIND> < 4 ? AT_ONCE<KIND> : 4;

// One panel for few rows.
template <int KIND, bool OFFSETS, int R>
void multiply_few(const Matrix& matrix, RowsGroup rows, int64_t count, int64_t b, float (*to)[PANEL]) {
  if constexpr (R > 1)
    if (R > count) return multiply_few<KIND, OFFSETS, R - 1>(matrix, rows, count, b, to);
  SumsInRegisters<R> sums;
  for_groups<KIND, OFFSETS>(matrix, b, [&](const PanelGroup& group) {
    add_rows<KIND, OFFSETS, R, false>(group, nullptr, rows, sums);
    rows = rows.after(R);
  });
  memcpy(to, sums.rows, sizeof sums.rows);
}

template <int KIND, bool OFFSETS, int R>
inline void add_unpacked(int64_t count, const PanelGroup& group, const uint8_t* unpacked, RowsGroup x,
                         float (*sums)[PANEL]) {
  for (; count >= R; count -= R, sums += R, x = x.after(R)) {
    const SumsInMemory some = {sums};
    add_rows<KIND, OFFSETS, R, true>(group, unpacked, x, some);
  }
  if constexpr (R > 1) add_unpacked<KIND, OFFSETS, R / 2>(count, group, unpacked, x, sums);
}

// One panel for many rows: each group is unpacked once.
template <int KIND, bool OFFSETS>
void multiply_many(const Matrix& matrix, RowsGroup rows, int64_t count, int64_t b, float (*sums)[PANEL]) {
  memset(sums, 0, count * sizeof *sums);
  for_groups<KIND, OFFSETS>(matrix, b, [&](const PanelGroup& group) {
    // Once for all rows of a stretch, which then go by fours: 128 rows of 1,024 by 1,024 numbers take 1.32 ms, one by
    // one 1.73.
    alignas(64) uint8_t unpacked[PARTS<KIND> * FOURS * LINE];
    unpack_group<KIND>(group.bytes, unpacked);
    add_unpacked<KIND, OFFSETS, AT_ONCE<KIND>>(count, group, unpacked, rows, sums);
    rows = rows.after(count);
  });
}

#endif

}  // namespace
