// Noise keyed by its arguments alone: Philox-4x32-10 (Salmon et al. 2011), key = seed, counter = (token / 4, position,
// stream, salt), lane token % 4; and the Gumbel variate of a word. See specdec/kernels/reference.py.
#pragma once
#include <cmath>
#include <cstdint>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace specdec {

// Eight 32-bit numbers in the low halves of 64-bit lanes; the high halves hold anything.
typedef uint64_t Halves __attribute__((vector_size(64)));

// Products of the low halves with a factor.
inline Halves low_product(Halves a, uint32_t factor) {
#if defined(__AVX512F__)
    return (Halves)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(factor));
#else
    return (a & 0xFFFFFFFFu) * static_cast<uint64_t>(factor);
#endif
}

inline bool any_at_most(Halves a, uint64_t bound) {
#if defined(__AVX512F__)
    return _mm512_cmple_epu64_mask((__m512i)a, _mm512_set1_epi64(static_cast<int64_t>(bound)));
#else
    bool any = false;
    for (int i = 0; i < 8; ++i) any |= a[i] <= bound;
    return any;
#endif
}

struct Noise {
    uint64_t seed;
    uint32_t position, stream, salt;
};

// The words of 32 tokens from `first`, a multiple of 4: token first + 4 * lane + i is in out[i][lane].
inline void philox_words(const Noise &noise, uint32_t first, Halves out[4]) {
    uint32_t k0 = static_cast<uint32_t>(noise.seed), k1 = static_cast<uint32_t>(noise.seed >> 32);
    Halves c0 = Halves{0, 1, 2, 3, 4, 5, 6, 7} + static_cast<uint64_t>(first / 4);
    Halves c1 = Halves{} + static_cast<uint64_t>(noise.position);
    Halves c2 = Halves{} + static_cast<uint64_t>(noise.stream);
    Halves c3 = Halves{} + static_cast<uint64_t>(noise.salt);
    for (int round = 0; round < 10; ++round) {
        const Halves a = low_product(c0, 0xD2511F53u), b = low_product(c2, 0xCD9E8D57u);
        c0 = (b >> 32) ^ c1 ^ static_cast<uint64_t>(k0);
        c1 = b;
        c2 = (a >> 32) ^ c3 ^ static_cast<uint64_t>(k1);
        c3 = a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// Between -3.14 and 22.88. The argument of the inner log is exact, and never 0 or 1.
inline double gumbel(uint32_t word) {
    const double v = (4294967295.5 - static_cast<double>(word)) * (1.0 / 4294967296.0);
    return -std::log(-std::log(v));
}

}  // namespace specdec
