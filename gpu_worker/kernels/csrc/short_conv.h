// Short convolutions: out[t] = silu(bias + the sum of weight[j] x[t - taps + j]), for each channel alone.
#pragma once
#include "activations.h"
#include "state_runs.h"

extern "C" {

struct ConvArgs {
  const void *x, *weight, *bias;              // rows of [C]; [taps + 1, C], the newest last; [C] or null
  const void *gate_in, *gate_out;             // rows of [C] that x, and the result, are multiplied by; or null
  void *states, *out;                         // [slots, taps, C], the newest last; [T, C]
  StateRuns runs;
  int64_t channels, taps, row_stride;  // row_stride: of x and gates
  int32_t has_silu, is_bf16, num_threads;
};

}  // extern "C"

namespace {

constexpr int64_t CHANNELS = 512;  // of a piece

template <class T>
struct ConvInput {
  const ConvArgs& a;
  const T* past;  // the state that the run reads; null: zeros
  int64_t start;

  // The inputs of channels of token t; of tokens before the run's they are in the state.
  template <class... Count>
  Vec at(int64_t t, int64_t c, Count... count) const {
    if (t < start) return past ? load(past + (a.taps + t - start) * a.channels + c, count...) : Vec{};
    const Vec x = load((const T*)a.x + t * a.row_stride + c, count...);
    return a.gate_in ? rounded<T>(x * load((const T*)a.gate_in + t * a.row_stride + c, count...)) : x;
  }
};

template <class T, class... Count>
inline void convolve_token(const ConvArgs& a, const ConvInput<T>& input, int64_t t, int64_t c, Count... count) {
  Vec x = a.bias ? load((const T*)a.bias + c, count...) : Vec{};
  for (int64_t j = 0; j <= a.taps; ++j)
    x = fused(load((const T*)a.weight + j * a.channels + c, count...), input.at(t - a.taps + j, c, count...), x);
  if (a.has_silu) x = Silu::of(x, splat(1.f));
  if (a.gate_out) x = rounded<T>(x) * load((const T*)a.gate_out + t * a.row_stride + c, count...);
  store((T*)a.out + t * a.channels + c, x, count...);
}

// The channels [first, end) of a chain.
template <class T>
void convolve(const ConvArgs& a, const Chain& chain, int64_t first, int64_t end) {
  const int64_t taps = a.taps, C = a.channels;
  const auto for_channels = [&](auto&& work) {
    int64_t c = first;
    for (; c + LANES <= end; c += LANES) work(c);
    if (c < end) work(c, end - c);
  };
  for (int32_t run = chain.first; run <= chain.last; ++run) {
    const int64_t start = a.runs.starts[run], stop = a.runs.starts[run + 1];
    T *slots = (T*)a.states, *kept = slots + a.runs.written[run] * taps * C;
    const ConvInput<T> input = {a, a.runs.read[run] < 0 ? nullptr : slots + a.runs.read[run] * taps * C, start};
    for (int64_t t = start; t < stop; ++t)
      for_channels([&](int64_t c, auto... count) { convolve_token(a, input, t, c, count...); });
    // In order of time: a row that is overwritten, if both slots are one, was read before.
    for (int64_t j = 0; j < taps; ++j)
      for_channels([&](int64_t c, auto... count) {
        store(kept + j * C + c, input.at(stop - taps + j, c, count...), count...);
      });
  }
}

}  // namespace
