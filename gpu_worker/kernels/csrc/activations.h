// What makes one number of a gate and an up.
#pragma once
#include <cstdint>

#include "vec.h"

namespace {

// x * sigmoid(x) * up
struct Silu {
  static Vec of(Vec gate, Vec up) { return gate / (1.f + exponential(-gate)) * up; }
};

// The approximation of x * (the normal distribution's share below x) by a hyperbolic tangent, written as a sigmoid,
// times up.
struct Gelu {
  static Vec of(Vec x, Vec up) {
    return x / (1.f + exponential(x * (x * x * -0.07135481627f - 1.59576912161f))) * up;
  }
};

// What layers/activation.py calls clamped_swiglu. A NaN stays one.
struct ClampedSwiglu {
  static Vec of(Vec gate, Vec up) {
    const Vec x = gate > 7.f ? splat(7.f) : gate, above = up > 7.f ? splat(7.f) : up;
    return x / (1.f + exponential(x * -1.702f)) * ((above < -7.f ? splat(-7.f) : above) + 1.f);
  }
};

// By the numbers that callers know.
inline Vec activate(int32_t activation, Vec gate, Vec up) {
  return activation == 0 ? Silu::of(gate, up) : activation == 1 ? Gelu::of(gate, up) : ClampedSwiglu::of(gate, up);
}

}  // namespace
