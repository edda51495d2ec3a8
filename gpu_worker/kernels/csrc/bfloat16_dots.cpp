// Products of any number of rows with a bfloat16 matrix on processors with AVX-512 BF16, whose instruction multiplies
// pairs of bfloat16 numbers and adds both products to a float32 sum. Whole pairs of inputs.
#include "dot_bf16.h"
#include "vec.h"

namespace {

// Only the instruction is here; panel_products.h has what it shares with the float32 kernel, so that a fix of one is
// one of both.
struct Numbers {
  static constexpr bool SCALED = false;
  typedef BF16 Number;
  typedef uint32_t Word;
  typedef VecBits Words;
#ifdef HAS_DOT_BF16
  static constexpr bool USABLE = true;
  static Vec add(Vec sum, Words words, Word word) { return add_dot(sum, words, word); }
#else
  static constexpr bool USABLE = false;
  static Vec add(Vec sum, Words, Word) { return sum; }
#endif
};

}  // namespace

#include "panel_exports.h"
