// Products of bfloat16 weights and rows rounded to bfloat16, summed in float32.
//
// Weights are [outputs, inputs] as checkpoints hold them, aligned to nothing: no copy in another layout. So both operands lie along the
// inputs, and the processor's instruction adds up neighbouring pairs of them:
//
//     sum[lane] += weight[2 lane] * x[2 lane] + weight[2 lane + 1] * x[2 lane + 1]          16 lanes, 32 inputs at a time
//
// Four outputs by up to six rows are 24 such sums in registers, and 10 loads for 24 instructions. At the end the lanes of a sum are
// added up in a fixed order. So a row's result is the same bits whatever the other rows are.
#pragma once
#include <algorithm>
#include <cstdint>

namespace specdec::bfloat16 {

constexpr int64_t kStep = 32;  // inputs

// Numbers from one rounded row to the next: with zeros up to a whole step, and one step more, as rows whose distance is a power of two
// would drive each other out of the first-level cache.
inline int64_t row_stride(int64_t inputs) { return (inputs + kStep - 1) / kStep * kStep + kStep; }

}  // namespace specdec::bfloat16

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512BF16__)
#include <immintrin.h>
#define SPECDEC_BFLOAT16 1

namespace specdec::bfloat16 {

constexpr int64_t kQuad = 4;  // outputs
constexpr int64_t kRows = 6;  // in a block: 24 sums, 4 vectors of weights and one of a row in 32 registers

// Rounds to nearest even, 16 numbers at a time.
inline void round_row(const float *x, int64_t inputs, uint16_t *out) {
    const int64_t padded = (inputs + kStep - 1) / kStep * kStep;
    for (int64_t i = 0; i < padded; i += 16) {
        const int64_t left = inputs - i;
        const __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? static_cast<__mmask16>((1u << left) - 1) : 0;
        const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + i));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + i), reinterpret_cast<const __m256i &>(rounded));
    }
}

// Four rows of a weight, and which of them to bring into the cache for the next four.
struct Quad {
    const uint16_t *rows[kQuad];
    int64_t first_fetched, end_fetched;
};

// a + b, opaque to -fassociative-math: the order of these sums must be the same for every number of rows.
inline __m512 add(__m512 a, __m512 b) { return _mm512_add_round_ps(a, b, _MM_FROUND_CUR_DIRECTION); }

// out[4] = the sums of the lanes of four vectors.
inline void add_lanes(const __m512 (&sums)[kQuad], float *out) {
    const auto halve = [](__m512 a, __m512 b) { return _mm512_castps_pd(add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b))); };
    const __m512d first = halve(sums[0], sums[1]), last = halve(sums[2], sums[3]);
    const __m512 four = add(_mm512_castpd_ps(_mm512_unpacklo_pd(first, last)), _mm512_castpd_ps(_mm512_unpackhi_pd(first, last)));
    const __m512 two = add(four, _mm512_shuffle_f32x4(four, four, 0b01001110));  // each a quarter of the lanes for all four
    _mm_storeu_ps(out, _mm512_castps512_ps128(add(two, _mm512_shuffle_f32x4(two, two, 0b10110001))));
}

// out[R][4] = R rows times four outputs.
template <int R>
void multiply_block(const Quad &quad, int64_t inputs, const uint16_t *x, float *out, int64_t out_stride) {
    const int64_t stride = row_stride(inputs);
    __m512 sums[R][kQuad];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int o = 0; o < kQuad; ++o) sums[r][o] = _mm512_setzero_ps();
    const auto add_step = [&](int64_t k, auto load) {
        __m512bh weights[kQuad];
#pragma GCC unroll 4
        for (int o = 0; o < kQuad; ++o) weights[o] = reinterpret_cast<__m512bh>(load(quad.rows[o] + k));
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const __m512bh row = reinterpret_cast<__m512bh>(_mm512_loadu_si512(x + r * stride + k));
#pragma GCC unroll 4
            for (int o = 0; o < kQuad; ++o) sums[r][o] = _mm512_dpbf16_ps(sums[r][o], weights[o], row);
        }
    };
    int64_t k = 0;
#pragma GCC unroll 1
    for (; k + kStep <= inputs; k += kStep) {
        // the processor's own prefetch stops where many rows keep four outputs busy for long; into the second-level cache, since into
        // the first it was half as fast
        for (int64_t o = quad.first_fetched; o < quad.end_fetched; ++o) _mm_prefetch(quad.rows[o] + kQuad * inputs + k, _MM_HINT_T1);
        add_step(k, [](const uint16_t *from) { return _mm512_loadu_si512(from); });
    }
    if (k < inputs) {
        const __mmask32 mask = (1u << (inputs - k)) - 1;
        add_step(k, [mask](const uint16_t *from) { return _mm512_maskz_loadu_epi16(mask, from); });
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) add_lanes(sums[r], out + r * out_stride);
}

// out[count][outputs] = `count` rows times some neighbouring outputs. `x`: rows by round_row; `out_stride`: at least `outputs`, rounded up
// to a multiple of 4, as so many numbers are written.
inline void multiply(const uint16_t *weights, int64_t inputs, int64_t outputs, const uint16_t *x, int64_t count, float *out,
                     int64_t out_stride) {
    const int64_t blocks = (count + kRows - 1) / kRows, stride = row_stride(inputs);
    for (int64_t n = 0; n < outputs; n += kQuad) {
        Quad quad;
        for (int64_t o = 0; o < kQuad; ++o) quad.rows[o] = weights + std::min(n + o, outputs - 1) * inputs;
        int64_t row = 0;
        for (int64_t block = 0; block < blocks; ++block) {  // whose sizes differ by no more than one
            quad.first_fetched = kQuad * block / blocks, quad.end_fetched = kQuad * (block + 1) / blocks;
            const int64_t end = count * (block + 1) / blocks;
            const uint16_t *from = x + row * stride;
            float *to = out + row * out_stride + n;
            switch (end - row) {
                case 1: multiply_block<1>(quad, inputs, from, to, out_stride); break;
                case 2: multiply_block<2>(quad, inputs, from, to, out_stride); break;
                case 3: multiply_block<3>(quad, inputs, from, to, out_stride); break;
                case 4: multiply_block<4>(quad, inputs, from, to, out_stride); break;
                case 5: multiply_block<5>(quad, inputs, from, to, out_stride); break;
                default: multiply_block<6>(quad, inputs, from, to, out_stride);
            }
            row = end;
        }
    }
}

}  // namespace specdec::bfloat16
#endif
