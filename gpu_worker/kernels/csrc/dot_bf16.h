// Dot products of pairs of bfloat16 numbers with AVX-512 BF16. HAS_DOT_BF16 where the compiler may use them.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define HAS_DOT_BF16 1
#include <immintrin.h>

#include "vec.h"

namespace {

// Adds a row's pair of inputs times the same pair of 16 outputs. A word holds a pair.
inline Vec add_dot(Vec sum, VecBits words, uint32_t pair) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)words, (__m512bh)(VecBits{} + pair));
}

}  // namespace
#endif
