// What Python calls of a kernel over panels. Its source defines `Numbers`, as panel_products.h describes it, with USABLE:
// whether the compiler may use the instructions.
#pragma once
#include "pack_words.h"
#include "panel_products.h"

// Whether the products can be computed; otherwise, do not multiply.
extern "C" int32_t can_multiply() { return Numbers::USABLE; }

// How many outputs a panel has.
extern "C" int64_t panel_outputs() { return PANEL; }

// How many outputs and inputs a word of the packed matrix holds, and of how many inputs there must be a multiple.
extern "C" int64_t word_outputs() { return 1; }
extern "C" int64_t word_inputs() { return Product<Numbers>::INPUTS; }
extern "C" int64_t whole_inputs() { return Product<Numbers>::INPUTS; }

// Arranges `weight`, [outputs, inputs], as the products read it; zeros fill the last panel.
extern "C" void pack(const Numbers::Number* weight, Numbers::Number* matrix, int64_t outputs, int64_t inputs,
                     int32_t threads) {
  pack_words((const uint32_t*)weight, (uint32_t*)matrix, outputs, inputs / Product<Numbers>::INPUTS, PANEL, threads);
}

// out = rows times matrixᵀ, plus bias if there is one.
extern "C" void multiply(const Numbers::Number* rows, const Numbers::Word* matrix, const float* bias,
                         Numbers::Number* out, int64_t num_rows, int64_t inputs, int64_t outputs, int32_t threads) {
  multiply_rows<Numbers>({rows, matrix, bias, out, num_rows, inputs, outputs}, threads);
}
