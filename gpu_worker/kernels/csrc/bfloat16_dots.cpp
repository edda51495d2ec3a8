// Products of any number of rows with a bfloat16 matrix on processors with AVX-512 BF16, whose instruction multiplies pairs
// of bfloat16 numbers and adds both products to a float32 sum. Whole pairs of inputs.
#include "dot_bf16.h"
#include "panel_products.h"

namespace {

struct PairNumbers {
  typedef BF16 Number;
  typedef uint32_t Word;
  typedef VecBits Words;
#ifdef HAS_DOT_BF16
  static Vec add(Vec sum, Words words, Word word) { return add_dot(sum, words, word); }
#else
  static Vec add(Vec sum, Words, Word) { return sum; }
#endif
};

#ifdef HAS_DOT_BF16
constexpr bool USABLE = true;
#else
constexpr bool USABLE = false;
#endif

}  // namespace

// Whether the compiler may use the instructions; without them, do not multiply.
extern "C" int32_t can_multiply() { return USABLE; }

// How many outputs a panel has.
extern "C" int64_t panel_outputs() { return PANEL; }

// How many outputs and inputs a word of the packed matrix holds.
extern "C" int64_t word_outputs() { return 1; }
extern "C" int64_t word_inputs() { return 2; }

// Arranges `weight`, [outputs, inputs], as the products read it; zeros fill the last panel.
extern "C" void pack(const BF16* weight, BF16* matrix, int64_t outputs, int64_t inputs, int32_t threads) {
  pack_panels<PairNumbers>(weight, matrix, outputs, inputs, threads);
}

// out = rows times matrixᵀ, plus bias if there is one.
extern "C" void multiply(const BF16* rows, const uint32_t* matrix, const float* bias, BF16* out,
                                  int64_t num_rows, int64_t inputs, int64_t outputs, int32_t threads) {
  multiply_rows<PairNumbers>({rows, matrix, bias, out, num_rows, inputs, outputs}, threads);
}
