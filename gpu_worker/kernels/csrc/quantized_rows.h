// Adds one group of a panel of a quantized matrix to the sums of rows, as many rows at a time as registers hold.
#pragma once
#include <cstdint>
#include <vector>

#include "dot.h"
#include "quantized.h"
#include "vec.h"

#ifdef HAS_DOT
namespace {

constexpr int VECS = PANEL / LANES;  // registers of a panel's outputs

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
  int64_t rows;

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
  const uint16_t* scales;
  const uint16_t* offsets;  // or none
};

// Which four, and of a byte which half, a register holds. Unpacked groups lie part after part, each as [8, 16, 4].
template <int BITS>
inline Bytes unpack(const uint8_t* group, int part, int four, int vec) {
  const uint8_t* line = group + (BITS == 8 ? four : four / 2) * LINE + vec * sizeof(Bytes);
  if (BITS == 8 && PARTS<BITS> == 1) return load_bytes(line);
  const bool high = BITS == 8 ? part : four % 2;
  return high ? high_halves(load_bytes(line)) : low_halves(load_bytes(line));
}

inline int64_t unpacked_place(int part, int four, int vec) {
  return (part * FOURS + four) * LINE + vec * (int64_t)sizeof(Bytes);
}

template <int BITS>
void unpack_group(const uint8_t* group, uint8_t* to) {
#pragma GCC unroll 8
  for (int four = 0; four < FOURS; ++four)
    for (int vec = 0; vec < VECS; ++vec)
      for (int part = 0; part < PARTS<BITS>; ++part) {
        const Bytes bytes = unpack<BITS>(group, part, four, vec);
        memcpy(to + unpacked_place(part, four, vec), &bytes, sizeof bytes);
      }
}

// Rows whose sums registers hold at once: of AVX2's 16, eight hold sums.
template <int BITS>
constexpr int AT_ONCE = 8 / (VECS * PARTS<BITS>);

// R rows. `unpacked`: what unpack_group wrote, or none: then the group is unpacked on the way.
template <int BITS, bool OFFSETS, int R, bool UNPACKED>
inline void add_rows(const PanelGroup& group, const uint8_t* unpacked, const RowsGroup& x, float (*sums)[PANEL]) {
  constexpr int N = PARTS<BITS>;
  Sums dots[R][VECS][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < VECS; ++v) {
      dots[r][v][0] = zero_sums();
      dots[r][v][N - 1] = first_sums(x.starts[r]);
    }
#pragma GCC unroll 8
  for (int four = 0; four < FOURS; ++four) {
    Bytes u[VECS][N];
#pragma GCC unroll 2
    for (int v = 0; v < VECS; ++v)
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        u[v][n] = UNPACKED ? load_bytes(unpacked + unpacked_place(n, four, v)) : unpack<BITS>(group.bytes, n, four, v);
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
#pragma GCC unroll 2
  for (int v = 0; v < VECS; ++v) {
    const Vec scales = load_half(group.scales + v * LANES);
    const Vec offsets = OFFSETS ? load_half(group.offsets + v * LANES) : Vec{};
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      float* to = sums[r] + v * LANES;
      const Vec product = __builtin_convertvector(total<BITS>(dots[r][v]), Vec);
      Vec sum = multiply_add(product, scales * x.units[r], load(to));
      if (OFFSETS) sum = multiply_add(offsets, splat(x.totals[r]), sum);
      store(to, sum);
    }
  }
}

template <int BITS, bool OFFSETS, int R, bool UNPACKED>
inline void add_last_rows(int64_t count, const PanelGroup& group, const uint8_t* unpacked,
                          const RowsGroup& x, float (*sums)[PANEL]) {
  if (count == R) return add_rows<BITS, OFFSETS, R, UNPACKED>(group, unpacked, x, sums);
  if constexpr (R > 1) add_last_rows<BITS, OFFSETS, R - 1, UNPACKED>(count, group, unpacked, x, sums);
}

// Adds a group to the sums of `rows` rows.
template <int BITS, bool OFFSETS>
inline void add_group(const PanelGroup& group, RowsGroup x, int64_t rows, float (*sums)[PANEL]) {
  constexpr int R = AT_ONCE<BITS>;
  if (rows <= R) return add_last_rows<BITS, OFFSETS, R, false>(rows, group, nullptr, x, sums);
  alignas(64) uint8_t unpacked[PARTS<BITS> * FOURS * LINE];
  unpack_group<BITS>(group.bytes, unpacked);
  for (; rows >= R; rows -= R, sums += R, x = x.after(R)) add_rows<BITS, OFFSETS, R, true>(group, unpacked, x, sums);
  add_last_rows<BITS, OFFSETS, R, true>(rows, group, unpacked, x, sums);
}

}  // namespace
#endif
