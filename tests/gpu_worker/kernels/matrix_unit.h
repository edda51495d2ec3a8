// Defines the matrix unit (AMX) and what its kernels use of AVX-512 in plain C++, so that they can be tested on processors
// without it. A register keeps its content until it is loaded, zeroed or configured anew.
#pragma once
#define WITH_BF16
#include "wider_vectors.h"

#include <sys/syscall.h>
#include <unistd.h>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#undef SYS_arch_prctl
#define SYS_arch_prctl SYS_sched_yield  // the system is asked for the unit's registers, and agrees

namespace {

struct Tile {
  uint8_t bytes[16][64];
  int rows, width;
};

inline thread_local Tile tiles[8];

inline void tile_configure(const void* from) {
  const uint8_t* config = (const uint8_t*)from;
  for (int i = 0; i < 8; ++i) {
    tiles[i] = {};
    memcpy(&tiles[i].width, config + 16 + 2 * i, 2);
    tiles[i].rows = config[48 + i];
    if (config[0] != 1 || tiles[i].width > 64 || tiles[i].rows > 16) __builtin_trap();
  }
}

inline void tile_load(int tile, const void* from, int64_t stride) {
  for (int r = 0; r < tiles[tile].rows; ++r)
    memcpy(tiles[tile].bytes[r], (const char*)from + r * stride, tiles[tile].width);
}

inline void tile_store(int tile, void* to, int64_t stride) {
  for (int r = 0; r < tiles[tile].rows; ++r)
    memcpy((char*)to + r * stride, tiles[tile].bytes[r], tiles[tile].width);
}

inline void tile_zero(int tile) { memset(tiles[tile].bytes, 0, sizeof tiles[tile].bytes); }

// For each row, each word of it and each word of `right` in that word's line: add(sum, left word, right word).
template <class Sum, class F>
void tile_add(int to, int left, int right, F add) {
  if (tiles[left].rows != tiles[to].rows || tiles[left].width != 4 * tiles[right].rows) __builtin_trap();
  for (int r = 0; r < tiles[to].rows; ++r)
    for (int k = 0; k < tiles[right].rows; ++k)
      for (int n = 0; n < tiles[to].width / 4; ++n) {
        Sum sum;
        memcpy(&sum, tiles[to].bytes[r] + 4 * n, 4);
        sum = add(sum, tiles[left].bytes[r] + 4 * k, tiles[right].bytes[k] + 4 * n);
        memcpy(tiles[to].bytes[r] + 4 * n, &sum, 4);
      }
}

inline void tile_add_bf16(int to, int left, int right) {
  tile_add<float>(to, left, right, [](float sum, const uint8_t* a, const uint8_t* b) {
    uint16_t x[2], y[2];
    memcpy(x, a, sizeof x);
    memcpy(y, b, sizeof y);
    return sum + from_bf16(x[0]) * from_bf16(y[0]) + from_bf16(x[1]) * from_bf16(y[1]);
  });
}

inline void tile_add_int8(int to, int left, int right) {
  tile_add<int32_t>(to, left, right, [](int32_t sum, const uint8_t* a, const uint8_t* b) {
    for (int i = 0; i < 4; ++i) sum += (int8_t)a[i] * (int8_t)b[i];
    return sum;
  });
}

}  // namespace

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig tile_configure
#define _tile_release()
#define _tile_loadd tile_load
#define _tile_stored tile_store
#define _tile_zero tile_zero
#define _tile_dpbf16ps tile_add_bf16
#define _tile_dpbssd tile_add_int8
