// Products of rows with a matrix of 4 or 8 bits, whose groups of 32 inputs have a scale, and possibly an offset, for each
// output. Numbers of 4 bits may be floats (e2m1), which doubled are integers. Rows are rounded to int8 by the same groups.
// Needs AVX2; uses AVX-512 and VNNI.
//
// The matrix lies in panels of 16 outputs, in a panel group after group, of a group eight fours of inputs, of a four its
// 16 outputs. Two fours of 4 bits share 64 bytes: the first in the lower halves. A thread unpacks a panel once for a
// stretch of rows. Sums of a group are exact, and a row adds its groups in their order: it depends on no other row.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "dot.h"
#include "parallel.h"
#include "quantized.h"
#include "quantized_experts.h"
#include "quantized_product.h"
#include "vec.h"

namespace {

#ifdef HAS_DOT
template <int KIND, bool OFFSETS, class T>
void run(const Product& p, int threads) {
  static thread_local Rounded scratch;
  Rounded& x = scratch;
  const int64_t groups = p.inputs / GROUP, panels = (p.outputs + PANEL - 1) / PANEL;
  x.reserve(groups * std::min<int64_t>(STRETCH, p.num_rows));
  for (int64_t first = 0; first < p.num_rows; first += STRETCH) {
    const int64_t rows = std::min<int64_t>(STRETCH, p.num_rows - first);
    // Groups of all rows one after the other, so that a few rows too are shared among all threads.
    for_ranges(rows * groups, SMALL, rows * groups > SMALL ? threads : 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / groups, g = i % groups;
        round_group<KIND>((const T*)p.rows + (first + row) * p.inputs + g * GROUP, p.matrix.least, g * rows + row, x);
      }
    });
    for_ranges(panels, TOGETHER, threads,
               [&](int64_t begin, int64_t end) { multiply<KIND, OFFSETS, T>(p, x.from(0), first, rows, begin, end); });
  }
}

template <class T>
void choose(int kind, const Product& p, int threads) {
  if (kind == FLOAT4) return run<FLOAT4, false, T>(p, threads);
  if (kind == INT4) return p.matrix.offsets ? run<INT4, true, T>(p, threads) : run<INT4, false, T>(p, threads);
  p.matrix.offsets ? run<INT8, true, T>(p, threads) : run<INT8, false, T>(p, threads);
}

template <class T>
void choose_experts(const ExpertsArgs& a) {
  if (a.kind == FLOAT4) return run_experts<FLOAT4, false, T>(a);
  const bool has_offsets = a.gate_up->offsets;
  if (a.kind == INT4) return has_offsets ? run_experts<INT4, true, T>(a) : run_experts<INT4, false, T>(a);
  has_offsets ? run_experts<INT8, true, T>(a) : run_experts<INT8, false, T>(a);
}
constexpr bool USABLE = true;
#else
constexpr bool USABLE = false;
template <class T>
void choose(int, const Product&, int) {}
template <class T>
void choose_experts(const ExpertsArgs&) {}
#endif

}  // namespace

// Whether this processor has AVX2 and what comes with it; without it, do not multiply.
extern "C" int32_t can_multiply() { return USABLE; }

// out = rows times matrixᵀ, plus bias if there is one. `kind`: see dot.h; whole 32s of inputs.
extern "C" void multiply_quantized(int32_t kind, int32_t is_bf16, const void* rows, const uint8_t* matrix,
                                   const uint8_t* scales, const uint16_t* offsets, const float* bias, void* out,
                                   int64_t num_rows, int64_t inputs, int64_t outputs, int64_t groups_per_scale,
                                   float factor, int32_t least, int32_t threads) {
  const Matrix packed = {matrix, scales, offsets, inputs / GROUP, groups_per_scale, least};
  const Product p = {rows, packed, bias, out, num_rows, inputs, outputs, factor};
  is_bf16 ? choose<BF16>(kind, p, threads) : choose<float>(kind, p, threads);
}

// What quantized_experts.h describes.
extern "C" void compute_experts(const ExpertsArgs* args) {
  args->is_bf16 ? choose_experts<BF16>(*args) : choose_experts<float>(*args);
}

// Packs `values`, [outputs, inputs] int8, into zeros as the products read them.
extern "C" void pack_quantized(int32_t bits, const int8_t* values, uint8_t* matrix, int64_t outputs, int64_t inputs,
                               int32_t least, int32_t threads) {
  for_pieces((outputs + PANEL - 1) / PANEL, threads, [&](int64_t piece) {
    const int64_t first = piece * PANEL;
    const int8_t* rows = values + first * inputs;
    uint8_t* panel = matrix + first * inputs * bits / 8;
    bits == 4 ? pack_panel<INT4>(rows, outputs - first, inputs, least, panel)
              : pack_panel<INT8>(rows, outputs - first, inputs, least, panel);
  });
}

// Packs `blocks` of floats of 4 bits, [outputs, inputs / 2], into zeros as the products read them.
extern "C" void pack_float4(const uint8_t* blocks, uint8_t* matrix, int64_t outputs, int64_t inputs, int32_t threads) {
  for_pieces((outputs + PANEL - 1) / PANEL, threads, [&](int64_t piece) {
    const int64_t bytes = piece * PANEL * inputs / 2;
    pack_float4_panel(blocks + bytes, outputs - piece * PANEL, inputs, matrix + bytes);
  });
}

// Rounds `groups` groups of a weight, of whole 32s of numbers each, to -8 to 7; `extremes`: the levels, as positive
// numbers, that the largest number of a group may become. Writes as many values as numbers, and a scale for each group.
extern "C" void round_to_4_bits(int32_t is_bf16, const void* weight, int64_t groups, int64_t group,
                                const float* extremes, int64_t count, int8_t* values, float* scales, int32_t threads) {
  is_bf16 ? round_groups((const BF16*)weight, groups, group, extremes, count, values, scales, threads)
          : round_groups((const float*)weight, groups, group, extremes, count, values, scales, threads);
}
