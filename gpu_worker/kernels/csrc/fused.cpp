// What a decoder layer computes between its matrices, each in one pass over memory. Arithmetic is float32 whatever the
// dtype; intermediate results that a layer keeps are rounded to it.
#include <cmath>

#include "activations.h"
#include "kv_int8.h"
#include "parallel.h"
#include "vec.h"

extern "C" {

struct HeadsArgs {
  void* heads;             // [T, num_heads + 2 * num_kv_heads, D]: queries, keys, values; queries are changed in place
  const void* weights;     // [num_heads + num_kv_heads, D] of the heads' RMSNorms; null: none
  const float *cos, *sin;  // [T, rotated_size / 2]
  const int64_t* slots;    // [T]
  void *keys, *values;     // [num_blocks, num_kv_heads, block_size, cache_head_size], zeros behind D; or as kv_int8.h
  int64_t num_tokens, num_heads, num_kv_heads, head_size, rotated_size, cache_head_size, block_size;
  float eps, shift;        // shift: added to each weight
  int32_t is_bf16, is_int8, num_threads;  // is_int8: keys and values
};

struct GatedNormArgs {
  const void *x, *gate, *weight;              // [T, groups, size]; rows of the same; [size], or [groups, size]
  void* out;                                  // as x
  int64_t num_rows, num_groups, size, gate_stride, weight_stride;  // weight_stride: of groups
  float eps;
  int32_t norm_first, is_bf16, num_threads;
};

}  // extern "C"

namespace {

constexpr int64_t SMALL = 1 << 14;  // elements that one thread handles sooner than others wake up

// Rows of a range that one thread computes together.
inline int64_t row_grain(int64_t n) { return std::max<int64_t>(1, SMALL / 8 / n); }

// How many threads share rows of n elements.
inline int row_threads(int64_t rows, int64_t n, int threads) { return rows > 1 && rows * n > SMALL ? threads : 1; }

template <class T>
float inverse_rms(const T* x, int64_t n, float eps) {
  Vec squares = {};
  for (int64_t i = 0; i < n; i += LANES) {
    const Vec v = load(x + i, n - i);
    squares += v * v;
  }
  return 1.f / std::sqrt(sum(squares) / n + eps);
}

template <class T>
void add_norm_rows(T* residual, const T* delta, const T* weight, T* out, int64_t rows, int64_t n, float eps,
                   float shift, int threads) {
  const auto add_norm_row = [&](int64_t r) {
    T *x = residual + r * n, *y = out + r * n;
    if (delta)
      for (int64_t i = 0; i < n; i += LANES) store(x + i, load(x + i, n - i) + load(delta + r * n + i, n - i), n - i);
    const float scale = inverse_rms(x, n, eps);
    for (int64_t i = 0; i < n; i += LANES) store(y + i, load(x + i, n - i) * scale * (load(weight + i, n - i) + shift), n - i);
  };
  for_ranges(rows, row_grain(n), row_threads(rows, n, threads), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) add_norm_row(r);
  });
}

// Dimension i turns with i + rotated / 2; those from `rotated` on stay.
template <class T>
void norm_rotate(const T* x, const T* weight, const float* cos, const float* sin, T* out, int64_t size,
                 int64_t rotated, float eps, float shift) {
  const float scale = weight ? inverse_rms(x, size, eps) : 1.f;
  const int64_t half = rotated / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t n = half - i;
    Vec a = load(x + i, n) * scale, b = load(x + half + i, n) * scale;
    if (weight) {
      a *= load(weight + i, n) + shift;
      b *= load(weight + half + i, n) + shift;
    }
    const Vec c = load(cos + i, n), s = load(sin + i, n);
    store(out + i, a * c - b * s, n);
    store(out + half + i, b * c + a * s, n);
  }
  for (int64_t i = rotated; i < size; i += LANES) {
    Vec a = load(x + i, size - i) * scale;
    if (weight) a *= load(weight + i, size - i) + shift;
    store(out + i, a, size - i);
  }
}

template <class T, bool INT8>
void rotate_range(const HeadsArgs& a, int64_t begin, int64_t end) {
  const int64_t D = a.head_size, H = a.num_heads, K = a.num_kv_heads;
  for (int64_t t = begin; t < end; ++t) {
    T* row = (T*)a.heads + t * (H + 2 * K) * D;
    const float *cos = a.cos + t * a.rotated_size / 2, *sin = a.sin + t * a.rotated_size / 2;
    const int64_t block = a.slots[t] / a.block_size, offset = a.slots[t] % a.block_size;
    for (int64_t h = 0; h < H + K; ++h) {
      const int64_t place = ((block * K + h - H) * a.block_size + offset) * a.cache_head_size;
      T *x = row + h * D, *out = h < H || INT8 ? x : (T*)a.keys + place;
      norm_rotate(x, a.weights ? (const T*)a.weights + h * D : nullptr, cos, sin, out, D, a.rotated_size,
                  a.eps, a.shift);
      if (h < H) continue;
      if constexpr (INT8) {
        store_int8_row(x, D, (int8_t*)a.keys, a.slots[t], K, h - H, a.block_size, a.cache_head_size);
        store_int8_row(x + K * D, D, (int8_t*)a.values, a.slots[t], K, h - H, a.block_size, a.cache_head_size);
      } else {
        memcpy((T*)a.values + place, x + K * D, D * sizeof(T));
      }
    }
  }
}

template <class T, bool INT8>
void rotate_rows(const HeadsArgs& a) {
  const int64_t n = (a.num_heads + a.num_kv_heads) * a.head_size;
  for_ranges(a.num_tokens, row_grain(n), row_threads(a.num_tokens, n, a.num_threads),
             [&](int64_t begin, int64_t end) { rotate_range<T, INT8>(a, begin, end); });
}

template <class Activation, class T>
void gate_rows(const T* gate_up, T* out, int64_t rows, int64_t n, int threads) {
  for_ranges(rows, row_grain(n), row_threads(rows, n, threads), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T *gate = gate_up + 2 * r * n, *up = gate + n;
      for (int64_t i = 0; i < n; i += LANES)
        store(out + r * n + i, Activation::of(load(gate + i, n - i), load(up + i, n - i)), n - i);
    }
  });
}

template <class T>
void sigmoid_rows(const T* x, const T* gate, T* out, int64_t rows, int64_t n, bool is_wide, int threads) {
  for_ranges(rows, row_grain(n), row_threads(rows, n, threads), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t i = 0; i < n; i += LANES) {
        const Vec y = is_wide ? load(gate + r * n + i, n - i) : splat(load(gate + r, 1)[0]);
        store(out + r * n + i, load(x + r * n + i, n - i) / (1.f + exponential(-y)), n - i);
      }
  });
}

// x / rms(x) * weight * silu(gate), the norm before or after the gate.
template <class T>
void norm_group(const GatedNormArgs& a, int64_t row, int64_t group) {
  const int64_t n = a.size, at = (row * a.num_groups + group) * n;
  const T *x = (const T*)a.x + at, *gate = (const T*)a.gate + row * a.gate_stride + group * n;
  const T* weight = (const T*)a.weight + group * a.weight_stride;
  T* out = (T*)a.out + at;
  const auto gated = [&](int64_t i) { return Silu::of(load(gate + i, n - i), load(x + i, n - i)); };
  Vec squares = {};
  for (int64_t i = 0; i < n; i += LANES) {
    const Vec v = a.norm_first ? load(x + i, n - i) : gated(i);
    squares += v * v;
  }
  const float scale = 1.f / std::sqrt(sum(squares) / n + a.eps);
  for (int64_t i = 0; i < n; i += LANES)
    store(out + i, gated(i) * scale * load(weight + i, n - i), n - i);
}

template <class T>
void norm_rows(const GatedNormArgs& a) {
  const int64_t count = a.num_rows * a.num_groups;
  for_ranges(count, row_grain(a.size), row_threads(count, a.size, a.num_threads), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) norm_group<T>(a, i / a.num_groups, i % a.num_groups);
  });
}

}  // namespace

// residual += delta (if there is one); out = residual / rms(residual) * (weight + shift).
extern "C" void add_norm(int32_t is_bf16, void* residual, const void* delta, const void* weight, void* out,
                         int64_t rows, int64_t size, float eps, float shift, int32_t threads) {
  if (is_bf16)
    add_norm_rows((BF16*)residual, (const BF16*)delta, (const BF16*)weight, (BF16*)out, rows, size, eps, shift,
                  threads);
  else
    add_norm_rows((float*)residual, (const float*)delta, (const float*)weight, (float*)out, rows, size, eps, shift,
                  threads);
}

// Norm (if there is one) and rotation of queries and keys; keys and values into their slots.
extern "C" void rotate_and_write(const HeadsArgs* args) {
  if (args->is_int8)
    args->is_bf16 ? rotate_rows<BF16, true>(*args) : rotate_rows<float, true>(*args);
  else
    args->is_bf16 ? rotate_rows<BF16, false>(*args) : rotate_rows<float, false>(*args);
}

template <class Activation>
static void gate(int32_t is_bf16, const void* gate_up, void* out, int64_t rows, int64_t size, int32_t threads) {
  if (is_bf16)
    gate_rows<Activation>((const BF16*)gate_up, (BF16*)out, rows, size, threads);
  else
    gate_rows<Activation>((const float*)gate_up, (float*)out, rows, size, threads);
}

// RMSNorm of each group of x, and silu of the gate.
extern "C" void gated_norm(const GatedNormArgs* args) {
  args->is_bf16 ? norm_rows<BF16>(*args) : norm_rows<float>(*args);
}

// out = silu(gate) * up of [rows, 2 * size] gates and ups side by side.
extern "C" void silu_mul(int32_t is_bf16, const void* gate_up, void* out, int64_t rows, int64_t size, int32_t threads) {
  gate<Silu>(is_bf16, gate_up, out, rows, size, threads);
}

// The same with gelu, approximated by a hyperbolic tangent.
extern "C" void gelu_mul(int32_t is_bf16, const void* gate_up, void* out, int64_t rows, int64_t size, int32_t threads) {
  gate<Gelu>(is_bf16, gate_up, out, rows, size, threads);
}

// The same with the gate of gpt-oss.
extern "C" void clamped_swiglu_mul(int32_t is_bf16, const void* gate_up, void* out, int64_t rows, int64_t size,
                                   int32_t threads) {
  gate<ClampedSwiglu>(is_bf16, gate_up, out, rows, size, threads);
}

// out = x * sigmoid(gate) of [rows, size] each; unless `is_wide`, a gate is that of a row.
extern "C" void sigmoid_mul(int32_t is_bf16, const void* x, const void* gate, void* out, int64_t rows, int64_t size,
                            int32_t is_wide, int32_t threads) {
  if (is_bf16)
    sigmoid_rows((const BF16*)x, (const BF16*)gate, (BF16*)out, rows, size, is_wide, threads);
  else
    sigmoid_rows((const float*)x, (const float*)gate, (float*)out, rows, size, is_wide, threads);
}

// The cosines and sines, [count, half], of the angles that `frequencies` [half] give to each position, times `factor`.
extern "C" void rotations(const int64_t* positions, const float* frequencies, float* cosines, float* sines,
                          int64_t count, int64_t half, float factor, int32_t threads) {
  for_ranges(count, row_grain(half), row_threads(count, 8 * half, threads), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * half; i < end * half; ++i) {
      const float angle = (float)positions[i / half] * frequencies[i % half];
      cosines[i] = std::cos(angle) * factor;
      sines[i] = std::sin(angle) * factor;
    }
  });
}
