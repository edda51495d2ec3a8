// The experts of a layer, of which each row has a few: products with quantized matrices for all rows and experts at once, so
// that threads meet five times a layer and not twice for each expert.
//
// A place is a row's choice of one expert. Places are sorted by expert, and those of one expert are cut into batches, each
// of which reads the expert's matrices once. What a place computes depends on no other.
#pragma once
#include <cstdint>
#include <vector>

#include "activations.h"
#include "parallel.h"
#include "quantized_product.h"

extern "C" {

// One matrix of an expert, as Matrix and Product say.
struct ExpertMatrix {
  const uint8_t* bytes;
  const uint8_t* scales;
  const uint16_t* offsets;
  const float* bias;
  float factor;
  int32_t least;
};

struct ExpertsArgs {
  const ExpertMatrix *gate_up, *down;  // [num_experts]: to gates and then ups, [2 * inner]; from their product to hidden
  const void* rows;                    // [num_rows, hidden], bfloat16 or float32
  const int64_t* chosen;               // [num_rows, per_token]: the experts of each row
  const float* weights;                // [num_rows, per_token]: the factors of what they compute
  void* out;                           // [num_rows, hidden]: their sum, of the rows' dtype
  int64_t num_rows, per_token, num_experts, hidden, inner;
  int64_t gate_up_groups_per_scale, down_groups_per_scale;
  int32_t kind, activation, is_bf16, num_threads;  // activation: see activations.h
};

}  // extern "C"

namespace {

#ifdef HAS_DOT
constexpr int64_t ROWS_AT_ONCE = 512;  // of 2,880 inputs and gates, with 4 experts each, they take 90 MB in between

struct Batch {
  int64_t expert, first, count;  // places [first, first + count)
};

// What lies between the products of a layer. A thread that calls again finds its memory.
struct ExpertsScratch {
  std::vector<int64_t> rows;     // [places]: the row of each
  std::vector<int64_t> places;   // [num_rows, per_token]: the place of each choice
  std::vector<int64_t> batches;  // [places]: the batch of each
  std::vector<Batch> list;
  std::vector<float> inner, out;  // [places, 2 * inner], [places, hidden]
  Rounded rounded;

  void sort(const int64_t* chosen, int64_t num_places, int64_t per_token, int64_t num_experts) {
    std::vector<int64_t> starts(num_experts + 1);
    for (int64_t i = 0; i < num_places; ++i) ++starts[chosen[i] + 1];
    for (int64_t e = 0; e < num_experts; ++e) starts[e + 1] += starts[e];
    rows.resize(num_places), places.resize(num_places), batches.resize(num_places), list.clear();
    for (int64_t e = 0; e < num_experts; ++e)
      for (int64_t first = starts[e]; first < starts[e + 1]; first += STRETCH) {
        const int64_t count = std::min<int64_t>(STRETCH, starts[e + 1] - first);
        std::fill_n(batches.begin() + first, count, (int64_t)list.size());
        list.push_back({e, first, count});
      }
    for (int64_t i = 0; i < num_places; ++i) rows[places[i] = starts[chosen[i]]++] = i / per_token;
  }
};

// Rounds the groups of all places; `from`: writes a group's numbers, or returns where they are.
template <int KIND, class F>
void round_places(ExpertsScratch& s, const ExpertMatrix* matrices, int64_t inputs, int threads, F from) {
  const int64_t groups = inputs / GROUP, count = groups * (int64_t)s.rows.size();
  s.rounded.reserve(count);
  for_ranges(count, SMALL, count > SMALL ? threads : 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t place = i / groups, g = i % groups;
      const Batch& batch = s.list[s.batches[place]];
      const int64_t index = batch.first * groups + g * batch.count + place - batch.first;
      alignas(64) float numbers[GROUP];
      round_group<KIND>(from(place, g, numbers), matrices[batch.expert].least, index, s.rounded);
    }
  });
}

// Multiplies the rounded places with their experts' matrices, to [places, outputs].
template <int KIND, bool OFFSETS>
void multiply_places(ExpertsScratch& s, const ExpertMatrix* matrices, int64_t inputs, int64_t outputs,
                     int64_t groups_per_scale, float* out, int threads) {
  const int64_t groups = inputs / GROUP, panels = (outputs + PANEL - 1) / PANEL;
  for_ranges(panels * (int64_t)s.list.size(), 1, threads, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const Batch& batch = s.list[begin / panels];
      const int64_t first = begin % panels, last = std::min(panels, first + end - begin);
      const ExpertMatrix& m = matrices[batch.expert];
      const Matrix matrix = {m.bytes, m.scales, m.offsets, groups, groups_per_scale, m.least};
      const Product p = {nullptr, matrix, m.bias, out, batch.count, inputs, outputs, m.factor};
      multiply<KIND, OFFSETS, float>(p, s.rounded.from(batch.first * groups), batch.first, batch.count, first, last);
      begin += last - first;
    }
  });
}

template <class T>
void mix_places(const ExpertsArgs& a, const ExpertsScratch& s, int64_t first, int64_t count) {
  const int64_t vecs = a.hidden / LANES, k = a.per_token;
  for_ranges(count * vecs, 4 * SMALL, count * vecs > 4 * SMALL ? a.num_threads : 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / vecs, at = i % vecs * LANES;
      Vec sum = {};
      for (int64_t j = 0; j < k; ++j)  // in the order of the row's own choices
        sum += load(s.out.data() + s.places[row * k + j] * a.hidden + at) * a.weights[(first + row) * k + j];
      store((T*)a.out + (first + row) * a.hidden + at, sum);
    }
  });
}

template <int KIND, bool OFFSETS, class T>
void run_experts(const ExpertsArgs& a) {
  static thread_local ExpertsScratch scratch;
  ExpertsScratch& s = scratch;
  for (int64_t first = 0; first < a.num_rows; first += ROWS_AT_ONCE) {
    const int64_t rows = std::min(ROWS_AT_ONCE, a.num_rows - first), places = rows * a.per_token;
    s.sort(a.chosen + first * a.per_token, places, a.per_token, a.num_experts);
    if ((int64_t)s.inner.size() < places * 2 * a.inner) s.inner.resize(places * 2 * a.inner);
    if ((int64_t)s.out.size() < places * a.hidden) s.out.resize(places * a.hidden);
    round_places<KIND>(s, a.gate_up, a.hidden, a.num_threads, [&](int64_t place, int64_t g, float*) {
      return (const T*)a.rows + (first + s.rows[place]) * a.hidden + g * GROUP;
    });
    multiply_places<KIND, OFFSETS>(s, a.gate_up, a.hidden, 2 * a.inner, a.gate_up_groups_per_scale, s.inner.data(),
                                   a.num_threads);
    round_places<KIND>(s, a.down, a.inner, a.num_threads, [&](int64_t place, int64_t g, float* numbers) {
      const float* gates = s.inner.data() + place * 2 * a.inner + g * GROUP;
      for (int i = 0; i < GROUP; i += LANES)
        store(numbers + i, activate(a.activation, load(gates + i), load(gates + a.inner + i)));
      return (const float*)numbers;
    });
    multiply_places<KIND, OFFSETS>(s, a.down, a.inner, a.hidden, a.down_groups_per_scale, s.out.data(), a.num_threads);
    mix_places<T>(a, s, first, rows);
  }
}
#endif

}  // namespace
