// The arithmetic of attention, in two kinds of one interface. Either way a sum is one chain of multiply-adds in the order
// of the calls.
#pragma once
#include <type_traits>

#include "attention_tile.h"

namespace specdec::attention {

using simd::Floats;
using simd::kLanes;

// Products of float32; a bfloat16 cache is widened.
template <class Element>
struct Float32Products {
    using KV = Element;
    using Operand = float;           // of queries, keys, weights and values
    static constexpr int kPack = 1;  // dimensions (of queries and keys) or lanes (of weights and values) in an operand
    using Vector = Floats;

    static Vector load(const Operand *from) { return simd::load(from); }
    static Vector load_part(const Operand *from, uint32_t) { return simd::load(from); }
    static Vector splat(Operand x) { return simd::splat(x); }
    static Floats multiply_add(Vector a, Vector b, Floats sum) { return simd::fma(a, b, sum); }

    static void store_query(float x, int64_t d, Operand *to, int64_t stride) { to[d * stride] = x; }
    // Stores the weights of lanes from `lane`, and returns them as they will be multiplied.
    static Floats store_weights(Floats x, int lane, float *weights) {
        simd::store(x, weights + lane);
        return x;
    }
    static constexpr auto load_keys = attention::load_keys<Element>;
    static constexpr auto load_values = attention::load_values<Element>;
};

#if defined(__AVX512BF16__)
// Products of pairs of bfloat16, summed in float32, at twice the rate. Queries and weights are rounded as the cache is; a
// query before it is scaled, so that a bfloat16 one stays as it is, and the weights before they are summed.
struct BFloat16Products {
    using KV = uint16_t;
    using Operand = uint32_t;
    static constexpr int kPack = 2;
    using Vector = __m512i;

    static Vector load(const Operand *from) { return _mm512_loadu_si512(from); }
    static Vector load_part(const Operand *from, uint32_t mask) {
        return _mm512_and_si512(load(from), _mm512_set1_epi32(static_cast<int32_t>(mask)));
    }
    static Vector splat(Operand x) { return _mm512_set1_epi32(static_cast<int32_t>(x)); }
    static Floats multiply_add(Vector a, Vector b, Floats sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

    static void store_query(float x, int64_t d, Operand *to, int64_t stride) {
        const uint16_t half = simd::to_bfloat16(x);
        std::memcpy(reinterpret_cast<char *>(to + d / 2 * stride) + d % 2 * sizeof half, &half, sizeof half);
    }
    static Floats store_weights(Floats x, int lane, float *weights) {
        const __m256i halves = (__m256i)_mm512_cvtneps_pbh(x);
        std::memcpy(reinterpret_cast<char *>(weights) + lane * sizeof(uint16_t), &halves, sizeof halves);
        return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
    }
    static constexpr auto load_keys = load_key_pairs;
    static constexpr auto load_values = load_value_pairs;
};
template <class Element>
using ProductsOf = std::conditional_t<std::is_same_v<Element, uint16_t>, BFloat16Products, Float32Products<Element>>;
#else
template <class Element>
using ProductsOf = Float32Products<Element>;
#endif

}  // namespace specdec::attention
