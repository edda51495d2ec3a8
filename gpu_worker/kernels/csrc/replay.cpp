// Runs the kernel calls of a recorded step one after the other, and the operations that PyTorch computes in a step that
// is not recorded.
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#include "vec.h"

extern "C" {

// Each argument is a word: a number, an address, or the bits of a float in the lower half.
struct RecordedCall {
  void (*function)();
  const uint64_t* words;
  int64_t signature;  // a place in SIGNATURES
};

}  // extern "C"

namespace {

template <class A>
A argument(uint64_t word) {
  A value;
  static_assert(sizeof(A) <= sizeof word, "an argument fits into a word");
  memcpy(&value, &word, sizeof value);  // of a little-endian word the first bytes are the lowest
  return value;
}

constexpr char letter(const void*) { return 'P'; }
constexpr char letter(int64_t) { return 'q'; }
constexpr char letter(int32_t) { return 'i'; }
constexpr char letter(float) { return 'f'; }

template <class... A>
struct Signature {
  static constexpr char letters[] = {letter(A{})..., 0};

  template <size_t... I>
  static void spread(void (*function)(), const uint64_t* words, std::index_sequence<I...>) {
    ((void (*)(A...))function)(argument<A>(words[I])...);
  }

  static void call(void (*function)(), const uint64_t* words) {
    spread(function, words, std::index_sequence_for<A...>());
  }
};

typedef const void* P;
typedef int64_t L;
typedef int32_t I;
typedef float F;

struct Entry {
  const char* letters;
  void (*call)(void (*function)(), const uint64_t* words);
};

template <class... A>
constexpr Entry entry() {
  return {Signature<A...>::letters, Signature<A...>::call};
}

// Templates convert the words, so that a call parses no types. A kernel with another signature ends a recording until
// its line is added here.
constexpr Entry SIGNATURES[] = {
    entry<P>(),                                               // attend, rotate_and_write, gated_delta and others
    entry<I, P, P, P, P, L, L, F, F, I>(),                    // add_norm
    entry<I, P, P, L, L, I>(),                                // silu_mul, gelu_mul, clamped_swiglu_mul, row_tops
    entry<I, P, P, P, P, P, L, L, L, L, L>(),                 // write_kv
    entry<P, P, P, P, L, L, L, I, I>(),                       // multiply of few rows
    entry<P, P, P, P, L, L, L, I>(),                          // multiply of panels
    entry<I, P, P, P, P, P, L, L, L, I>(),                    // multiply_int8
    entry<I, P, P, P, P, L, L, L, I>(),                       // sum_int8
    entry<I, P, P, P, P, P, L, L, I>(),                       // scale_sums
    entry<I, I, P, P, P, P, P, P, L, L, L, L, F, I, I>(),     // multiply_quantized
    entry<P, P, P, P, P, L, L, L, L, I>(),                    // multiply_float8
    entry<P, P, P, P, L, L, F, I>(),                          // rotations
    entry<P, P, P, L, L, L>(),                                // gather_rows
    entry<P, P, P, L, L, L, L>(),                             // gather_own_rows
    entry<P, L, P, L, L, L>(),                                // copy_rows
    entry<I, P, P, L>(),                                      // add_to
    entry<I, P, F, L>(),                                      // scale
    entry<P, P, L>(),                                         // widen
    entry<P, P, P, P>(),                                      // add_lora
    entry<P, P, L, I, I, I>(),                                // sum_ranks
    entry<P, P, P, L, L, I, I>(),                             // gather_ranks
    entry<I, P, P, P, P, P, P, L, L, L>(),                    // delta_gates
    entry<I, P, P, P, L, L, I, I>(),                          // sigmoid_mul
};

template <class T>
void add_all(T* to, const T* from, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) store(to + i, load(to + i, n - i) + load(from + i, n - i), n - i);
}

template <class T>
void scale_all(T* x, float factor, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) store(x + i, load(x + i, n - i) * factor, n - i);
}

}  // namespace

// The number by which calls name a signature such as "iPPqqi"; -1: it has none.
extern "C" int64_t find_signature(const char* letters) {
  for (size_t i = 0; i < sizeof SIGNATURES / sizeof *SIGNATURES; ++i)
    if (!strcmp(SIGNATURES[i].letters, letters)) return i;
  return -1;
}

extern "C" void replay(const RecordedCall* calls, int64_t count) {
  for (int64_t i = 0; i < count; ++i) SIGNATURES[calls[i].signature].call(calls[i].function, calls[i].words);
}

// out[i] = table[indices[i]], rows of `row_bytes`; NaN in every dtype for an index that none of the `rows` has.
extern "C" void gather_rows(const char* table, const int64_t* indices, char* out, int64_t count, int64_t row_bytes,
                            int64_t rows) {
  for (int64_t i = 0; i < count; ++i)
    if ((uint64_t)indices[i] < (uint64_t)rows)
      memcpy(out + i * row_bytes, table + indices[i] * row_bytes, row_bytes);
    else
      memset(out + i * row_bytes, 0xff, row_bytes);
}

// The same of a table that holds the `rows` from index `first` on; zeros for other indices, whose rows other ranks add.
extern "C" void gather_own_rows(const char* table, const int64_t* indices, char* out, int64_t count, int64_t row_bytes,
                                int64_t first, int64_t rows) {
  for (int64_t i = 0; i < count; ++i)
    if ((uint64_t)(indices[i] - first) < (uint64_t)rows)
      memcpy(out + i * row_bytes, table + (indices[i] - first) * row_bytes, row_bytes);
    else
      memset(out + i * row_bytes, 0, row_bytes);
}

// Rows whose beginnings lie so many bytes apart.
extern "C" void copy_rows(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t count,
                          int64_t row_bytes) {
  for (int64_t i = 0; i < count; ++i) memcpy(to + i * to_stride, from + i * from_stride, row_bytes);
}

extern "C" void add_to(int32_t is_bf16, void* to, const void* from, int64_t n) {
  is_bf16 ? add_all((BF16*)to, (const BF16*)from, n) : add_all((float*)to, (const float*)from, n);
}

extern "C" void scale(int32_t is_bf16, void* x, float factor, int64_t n) {
  is_bf16 ? scale_all((BF16*)x, factor, n) : scale_all((float*)x, factor, n);
}

// bfloat16 to float32.
extern "C" void widen(const void* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) store(to + i, load((const BF16*)from + i, n - i), n - i);
}
