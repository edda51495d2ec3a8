// Adds what LoRA adapters change to the output of a layer: out += (x · down) · up, for the rows of each adapter, and
// after that out = out * factors + shifts where an adapter has these (DoRA and biases).
//
// A layer may consist of parts, such as queries, keys and values, whose outputs lie next to each other and which have
// matrices of their own. Sums are float32, in an order that does not depend on the other rows.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "parallel.h"
#include "vec.h"
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif

extern "C" {

// A layer, for all steps.
struct LoraLayer {
  const struct LoraPart* parts;  // [slots, num_parts]
  int64_t num_parts, inputs, outputs;
  int64_t is_bf16;  // rows and matrices; otherwise they are floats
};

// One part of a layer with the matrices of one adapter.
struct LoraPart {
  const void* down;      // [inputs, rank in whole vectors], zeros behind the rank; null: there are no matrices
  const void* up;        // [panels, rank, PANEL], the last panel with zeros behind the outputs
  const float* factors;  // [panels, PANEL]; null, as shifts is: outputs are only added to
  const float* shifts;   // [panels, PANEL]
  int64_t rank, column;  // column: of the layer's output where those of the part begin
  int64_t outputs;
};

// The rows of a step that have an adapter.
struct LoraRows {
  const int32_t* rows;    // [n], those of an adapter next to each other
  const int32_t* starts;  // [num_groups + 1]: where those of each adapter begin
  const int32_t* slots;   // [num_groups]: the slot of each of these adapters
  int64_t num_groups, num_threads;
};

}  // extern "C"

namespace {

constexpr int ROWS = 2;               // whose sums registers hold
constexpr int VECTORS = 4;
constexpr int64_t PANEL = VECTORS * LANES;  // outputs whose sums registers hold; memory is read in its order
constexpr int64_t COLUMNS = 4 * PANEL;      // outputs that a thread computes at a time
constexpr int64_t SMALL = 1 << 16;    // products that one thread computes sooner than others wake up

// A part of some rows.
struct Task {
  const LoraPart* part;
  const int32_t* rows;
  int64_t num_rows, column, columns;
  float* sums;  // [num_rows, width of the rank]
};

inline int64_t whole(int64_t rank) { return (rank + LANES - 1) / LANES * LANES; }

// a * b + c, rounded once where the processor can. The compiler would fuse some of these and not others, so that a row's
// result would depend on how many rows are computed with it.
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__) && defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// Rows as floats: a copy in `space`, unless they are.
inline const float* floats(const float* x, int64_t, float*) { return x; }
inline const float* floats(const BF16* x, int64_t n, float* space) {
  for (int64_t i = 0; i < n; i += LANES) store(space + i, load(x + i, n - i), n - i);
  return space;
}

// sums [R, width] = x · down, V vectors of the rank at a time. Even and odd inputs have sums of their own: one sum for
// both would wait for each addition.
template <int R, int V, class T>
void shrink(const float* const* x, const T* down, int64_t inputs, int64_t width, float* sums) {
  Vec even[R][V] = {}, odd[R][V] = {};
  int64_t k = 0;
  for (; k + 2 <= inputs; k += 2) {
    const T *first = down + k * width, *second = first + width;
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const Vec a = load(first + v * LANES), b = load(second + v * LANES);
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
        even[r][v] = multiply_add(a, splat(x[r][k]), even[r][v]);
        odd[r][v] = multiply_add(b, splat(x[r][k + 1]), odd[r][v]);
      }
    }
  }
  for (int v = 0; v < V; ++v)
    for (int r = 0; r < R; ++r) {
      if (k < inputs) even[r][v] = multiply_add(load(down + k * width + v * LANES), splat(x[r][k]), even[r][v]);
      store(sums + r * width + v * LANES, even[r][v] + odd[r][v]);
    }
}

template <class T, int R>
void shrink_rows(const float* const* x, const LoraPart& part, int64_t inputs, float* sums) {
  const int64_t width = whole(part.rank);
  const T* down = (const T*)part.down;
  int64_t i = 0;
  for (; i + 2 * LANES <= width; i += 2 * LANES) shrink<R, 2>(x, down + i, inputs, width, sums + i);
  if (i < width) shrink<R, 1>(x, down + i, inputs, width, sums + i);
}

// out [R, n] += sums · one panel of `up`, of which n columns are outputs; then it is times `factors` plus `shifts`, unless
// they are null.
template <int R, class T>
void expand(T* const* out, const float* sums, int64_t width, const T* panel, int64_t rank, int64_t n,
            const float* factors, const float* shifts) {
  Vec total[R][VECTORS] = {};
  for (int64_t j = 0; j < rank; ++j, panel += PANEL) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const Vec b = load(panel + v * LANES);
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) total[r][v] = multiply_add(b, splat(sums[r * width + j]), total[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < VECTORS && v * LANES < n; ++v) {
      T* to = out[r] + v * LANES;
      const int64_t left = n - v * LANES;
      Vec sum = load(to, left) + total[r][v];
      if (factors) sum = multiply_add(sum, load(factors + v * LANES), load(shifts + v * LANES));
      store(to, sum, left);
    }
}

template <int R, class T>
void expand_rows(T* const* out, const Task& task, const float* sums) {
  const LoraPart& part = *task.part;
  const int64_t end = task.column + task.columns;
  for (int64_t i = task.column; i < end; i += PANEL) {
    T* to[R];
    for (int r = 0; r < R; ++r) to[r] = out[r] + part.column + i;
    const float *factors = part.factors, *shifts = part.shifts;
    if (factors) factors += i, shifts += i;
    expand<R>(to, sums, whole(part.rank), (const T*)part.up + i * part.rank, part.rank, end - i, factors, shifts);
  }
}

template <class T>
void shrink_task(const T* x, int64_t inputs, const Task& task) {
  static thread_local std::vector<float> space;
  if ((int64_t)space.size() < ROWS * inputs) space.resize(ROWS * inputs);
  const int64_t width = whole(task.part->rank);
  for (int64_t r = 0; r < task.num_rows; r += ROWS) {
    const float* from[ROWS];
    const int64_t count = std::min<int64_t>(ROWS, task.num_rows - r);
    for (int64_t i = 0; i < count; ++i)
      from[i] = floats(x + task.rows[r + i] * inputs, inputs, space.data() + i * inputs);
    if (count == ROWS)
      shrink_rows<T, ROWS>(from, *task.part, inputs, task.sums + r * width);
    else
      shrink_rows<T, 1>(from, *task.part, inputs, task.sums + r * width);
  }
}

template <class T>
void expand_task(T* out, int64_t outputs, const Task& task) {
  const int64_t width = whole(task.part->rank);
  for (int64_t r = 0; r < task.num_rows; r += ROWS) {
    T* to[ROWS];
    const int64_t count = std::min<int64_t>(ROWS, task.num_rows - r);
    for (int64_t i = 0; i < count; ++i) to[i] = out + task.rows[r + i] * outputs;
    if (count == ROWS)
      expand_rows<ROWS>(to, task, task.sums + r * width);
    else
      expand_rows<1>(to, task, task.sums + r * width);
  }
}

template <class T>
void add(const T* x, T* out, const LoraRows& step, const LoraLayer& layer) {
  static thread_local std::vector<float> scratch;
  static thread_local std::vector<Task> down, up;
  down.clear();
  up.clear();
  const int64_t inputs = layer.inputs, num_parts = layer.num_parts;
  int64_t needed = 0, work = 0;
  const auto each_part = [&](auto&& take) {
    for (int64_t g = 0; g < step.num_groups; ++g)
      for (int64_t p = 0; p < num_parts; ++p) {
        const LoraPart& part = layer.parts[step.slots[g] * num_parts + p];
        if (part.down || part.factors) take(part, step.starts[g], step.starts[g + 1] - step.starts[g]);
      }
  };
  each_part([&](const LoraPart& part, int64_t, int64_t rows) {
    needed += rows * whole(part.rank);
    work += rows * part.rank * (inputs + part.outputs);
  });
  if ((int64_t)scratch.size() < needed) scratch.resize(needed);
  float* sums = scratch.data();
  each_part([&](const LoraPart& part, int64_t start, int64_t rows) {
    constexpr int64_t AT_ONCE = 16 * ROWS;
    for (int64_t r = 0; r < rows && part.rank; r += AT_ONCE)
      down.push_back({&part, step.rows + start + r, std::min(AT_ONCE, rows - r), 0, 0, sums + r * whole(part.rank)});
    for (int64_t c = 0; c < part.outputs; c += COLUMNS)
      up.push_back({&part, step.rows + start, rows, c, std::min(COLUMNS, part.outputs - c), sums});
    sums += rows * whole(part.rank);
  });
  const std::vector<Task>&shrinks = down, &expands = up;  // of this thread, for all of them
  const int threads = work > SMALL ? step.num_threads : 1;
  for_pieces(shrinks.size(), threads, [&](int64_t i) { shrink_task(x, inputs, shrinks[i]); });
  for_pieces(expands.size(), threads, [&](int64_t i) { expand_task(out, layer.outputs, expands[i]); });
}

}  // namespace

// How many numbers `down` has for each input are multiples of this.
extern "C" int64_t rank_step() { return LANES; }

// How many outputs a panel of `up` has.
extern "C" int64_t panel_outputs() { return PANEL; }

// x [n, inputs] and out [n, outputs] of the layer's dtype.
extern "C" void add_lora(const void* x, void* out, const LoraRows* step, const LoraLayer* layer) {
  if (layer->is_bf16)
    add((const BF16*)x, (BF16*)out, *step, *layer);
  else
    add((const float*)x, (float*)out, *step, *layer);
}
