// Layers that keep a state between tokens: the gated delta rule, Mamba-2, and short convolutions. Arithmetic is float32
// whatever the dtype.
#include "gated_delta.h"
#include "mamba2.h"
#include "short_conv.h"

extern "C" void gated_delta(const DeltaArgs* args) {
  const DeltaArgs& a = *args;
  for_chains(a, a.num_heads, a.num_heads * a.key_size * a.value_size, [&](const Chain& chain, int64_t head) {
    a.is_bf16 ? delta_head<BF16>(a, chain, head) : delta_head<float>(a, chain, head);
  });
}

extern "C" void mamba2(const Mamba2Args* args) {
  const Mamba2Args& a = *args;
  for_chains(a, a.num_heads, a.num_heads * a.head_size * a.state_size, [&](const Chain& chain, int64_t head) {
    a.is_bf16 ? mamba2_head<BF16>(a, chain, head) : mamba2_head<float>(a, chain, head);
  });
}

extern "C" void short_conv(const ConvArgs* args) {
  const ConvArgs& a = *args;
  for_chains(a, (a.channels + CHANNELS - 1) / CHANNELS, a.channels * (a.taps + 1), [&](const Chain& chain, int64_t i) {
    const int64_t first = i * CHANNELS, end = std::min(a.channels, first + CHANNELS);
    a.is_bf16 ? convolve<BF16>(a, chain, first, end) : convolve<float>(a, chain, first, end);
  });
}

// decay = rates * softplus(a + bias), beta = sigmoid(b), both [rows, heads]; a, b: rows of a common stride.
extern "C" void delta_gates(int32_t is_bf16, const void* a, const void* b, const float* rates, const float* bias,
                            float* decay, float* beta, int64_t rows, int64_t heads, int64_t stride) {
  if (is_bf16)
    gate_decays((const BF16*)a, (const BF16*)b, rates, bias, decay, beta, rows, heads, stride);
  else
    gate_decays((const float*)a, (const float*)b, rates, bias, decay, beta, rows, heads, stride);
}
