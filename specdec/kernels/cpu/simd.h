// Vectors of floats of the machine's width. Everything here treats each lane alike and rounds the same wherever it is
// inlined, so that a result does not depend on which unrolled variant of a loop computed it.
#pragma once
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace specdec::simd {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

inline Floats load(const float *from) {
    Floats v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
inline Floats load(const uint16_t *bfloat16) {
    Halves halves;
    std::memcpy(&halves, bfloat16, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Ints) << 16);
}
inline void store(Floats v, float *to) { std::memcpy(to, &v, sizeof v); }
inline Floats splat(float x) { return x - Floats{}; }
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

// a * b + c. Opaque to -fassociative-math: a chain of these is summed in the order written.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    asm("" : "+m"(c));
    Floats sum = a * b + c;
    asm("" : "+m"(sum));
    return sum;
#endif
}

inline float reduce_max(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(v);
#else
    float top = v[0];
    for (int i = 1; i < kLanes; ++i) top = v[i] > top ? v[i] : top;
    return top;
#endif
}

// exp for x <= 0, 2 ulp: 2^round(x / ln2) times a polynomial of degree 6. Below -87 it stays at exp(-87); NaN stays NaN.
inline Floats exp_negative(Floats x) {
    const Floats lowest = splat(-87.f);
    x = x < lowest ? lowest : x;
    const Ints n = __builtin_convertvector(fma(x, splat(1.44269504f), splat(-0.5f)), Ints);  // truncation rounds up
    const Floats k = __builtin_convertvector(n, Floats);
    const Floats r = fma(k, splat(-1.42860677e-6f), fma(k, splat(-0.693145752f), x));
    Floats y = splat(1.f / 720);
    for (const float c : {1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f}) y = fma(y, r, splat(c));
    return y * (Floats)((n + 127) << 23);
}

// tanh to about 1e-7 absolute.
inline Floats tanh(Floats x) {
    const Floats size = x < 0.f ? -x : x;
    const Floats e = exp_negative(-2.f * size), y = (1.f - e) / (1.f + e);
    return x < 0.f ? -y : y;
}

inline float to_float(float x) { return x; }
inline float to_float(uint16_t bfloat16) {
    const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float from_float16(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    if (exponent == 0) {
        const float size = static_cast<float>(fraction) * 0x1p-24f;
        return sign ? -size : size;
    }
    const uint32_t wide = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

// Rounds to nearest even; NaN stays NaN.
inline uint16_t to_bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace specdec::simd
