// Products of any number of rows with a float32 matrix. Needs AVX-512, or AVX2 with FMA.
#include "panel_products.h"

namespace {

struct FloatNumbers {
  typedef float Number;
  typedef float Word;
  typedef Vec Words;
  static Vec add(Vec sum, Vec words, float word) { return sum + words * word; }
};

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
constexpr bool USABLE = true;
#else
constexpr bool USABLE = false;
#endif

}  // namespace

// Whether this processor has registers enough; without them, do not multiply.
extern "C" int32_t can_multiply() { return USABLE; }

// How many outputs a panel has.
extern "C" int64_t panel_outputs() { return PANEL; }

// How many outputs and inputs a word of the packed matrix holds.
extern "C" int64_t word_outputs() { return 1; }
extern "C" int64_t word_inputs() { return 1; }

// Arranges `weight`, [outputs, inputs], as the products read it; zeros fill the last panel.
extern "C" void pack(const float* weight, float* matrix, int64_t outputs, int64_t inputs, int32_t threads) {
  pack_panels<FloatNumbers>(weight, matrix, outputs, inputs, threads);
}

// out = rows times matrixᵀ, plus bias if there is one.
extern "C" void multiply(const float* rows, const float* matrix, const float* bias, float* out, int64_t num_rows,
                                int64_t inputs, int64_t outputs, int32_t threads) {
  multiply_rows<FloatNumbers>({rows, matrix, bias, out, num_rows, inputs, outputs}, threads);
}
