// What happens to a row between the matrix products: norms, rotary embedding, activations. A row's result depends on that row alone.
#pragma once
#include <cmath>
#include <cstdint>

#include "simd.h"

namespace specdec {

// out = x / rms(x) * weight. x and out may be the same.
inline void rms_norm(const float *x, const float *weight, int64_t size, float eps, float *out) {
    float squares = 0.f;
    for (int64_t i = 0; i < size; ++i) squares += x[i] * x[i];
    const float factor = 1.f / std::sqrt(squares / static_cast<float>(size) + eps);
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] * factor * weight[i];
}

// Rotates each pair (x[i], x[i + size / 2]) by the angle whose cosine and sine are cos[i] and sin[i].
inline void rotate(float *x, const float *cos, const float *sin, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float first = x[i], second = x[i + half];
        x[i] = first * cos[i] - second * sin[i];
        x[i + half] = second * cos[i] + first * sin[i];
    }
}

enum class Activation : int32_t { silu = 0, gelu_tanh = 1 };

inline simd::Floats sigmoid(simd::Floats x) {
    const simd::Floats e = simd::exp_negative(x < 0.f ? x : -x);  // of -|x|: no overflow
    return (x < 0.f ? e : 1.f + simd::Floats{}) / (1.f + e);
}

inline simd::Floats activate(simd::Floats x, Activation kind) {
    if (kind == Activation::silu) return x * sigmoid(x);
    const simd::Floats inner = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
    return 0.5f * x * (1.f + simd::tanh(inner));
}

}  // namespace specdec
