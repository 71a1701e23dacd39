// The products of quantized.h: one group of a tile of weights with up to 8 rows at a time, and what is built of it.
#pragma once
#include "quantized.h"

namespace specdec {

// One of the numbers of an int4 pair, by output, part and input.
inline int32_t nibble_at(const uint8_t *pair, int64_t n, int64_t part, int64_t k, int64_t i) {
    const uint8_t both = pair[2 * kPairHead + k * 64 + n / 4 * 16 + n % 2 * 8 + part * 4 + i];
    return n % 4 < 2 ? both & 15 : both >> 4;
}

#ifdef SPECDEC_VNNI

// sum += the four products of each lane's bytes: weights unsigned, x signed. In assembly, since GCC 12 copies the sum before
// and after its own function for it, and then runs out of registers at 10 rows: half the speed.
inline void add_products(__m512i &sum, __m512i weights, __m512i x) {
    __m512i in_register = sum;
    asm("vpdpbusd %2, %1, %0" : "+v"(in_register) : "v"(weights), "v"(x));
    sum = in_register;
}

// sum += the two products of each lane's 16-bit halves.
inline void add_pairs(__m512i &sum, __m512i a, __m512i b) {
    __m512i in_register = sum;
    asm("vpdpwssd %2, %1, %0" : "+v"(in_register) : "v"(a), "v"(b));
    sum = in_register;
}

// 4 or 8 bytes in every lane of that size.
inline __m512i spread4(const void *from) {
    int32_t bits;
    std::memcpy(&bits, from, 4);
    return _mm512_set1_epi32(bits);
}
inline __m512i spread8(const void *from) {
    int64_t bits;
    std::memcpy(&bits, from, 8);
    return _mm512_set1_epi64(bits);
}

// sum[16] (+)= part * factor.
inline void add_scaled(float *sum, __m512 part, float factor, bool first) {
    _mm512_storeu_ps(sum, _mm512_fmadd_ps(part, _mm512_set1_ps(factor), first ? _mm512_setzero_ps() : _mm512_loadu_ps(sum)));
}

// Weights that are due later, into the cache: measured at 5 to 32 rows, int4 is best fetched one group ahead; of int8, which is twice as
// long, the first-level cache would keep the products' own loads waiting.
template <Format F>
inline void fetch_ahead(const uint8_t *here) {
    if constexpr (F == Format::int4) {
        _mm_prefetch(here + WeightShape::group_bytes(F), _MM_HINT_T0);
    } else {
        _mm_prefetch(here + 2 * WeightShape::group_bytes(F), _MM_HINT_T1);
    }
}

// sums[R][32] (+)= one group of R rows, and what follows into the cache meanwhile where `fetch` says so. `here`: the group.
template <int R>
void multiply_int8(const uint8_t *here, int64_t pairs, const QuantizedRows &rows, int64_t row, int64_t g, bool fetch, float *sums) {
    const int64_t at = g * rows.rows + row;
    const int8_t *values = rows.values + at * kGroup;
    const GroupSums *group = rows.sums + at;
    const __m512i halves = _mm512_loadu_si512(here);
    if (fetch) fetch_ahead<Format::int8>(here);
    here += kTile * 2;
    __m512i low[R], high[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_set1_epi32(group[r].start);
#pragma GCC unroll 1
    for (int64_t k = 0; k < pairs * kPair; k += 4, here += 128) {
        if (fetch) fetch_ahead<Format::int8>(here), fetch_ahead<Format::int8>(here + 64);
        const __m512i first_half = _mm512_loadu_si512(here), second_half = _mm512_loadu_si512(here + 64);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512i x = spread4(values + r * kGroup + k);
            add_products(low[r], first_half, x);
            add_products(high[r], second_half, x);
        }
    }
    const auto widen = [](__m256i bfloat16) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bfloat16), 16)); };
    const __m512 low_scales = widen(_mm512_castsi512_si256(halves)), high_scales = widen(_mm512_extracti64x4_epi64(halves, 1));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        add_scaled(sums + r * kTile, _mm512_mul_ps(_mm512_cvtepi32_ps(low[r]), low_scales), group[r].scale, g == 0);
        add_scaled(sums + r * kTile + 16, _mm512_mul_ps(_mm512_cvtepi32_ps(high[r]), high_scales), group[r].scale, g == 0);
    }
}

// The same, in steps.
template <int R>
void multiply_int4(const uint8_t *here, int64_t pairs, const QuantizedRows &rows, int64_t row, int64_t g, bool fetch, float *sums) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const int64_t at = g * rows.rows + row;
    const GroupSums *group = rows.sums + at;
#pragma GCC unroll 1
    for (int64_t half = 0; half < 2; ++half) {
        __m512i total[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) total[r] = _mm512_setzero_si512();
#pragma GCC unroll 1
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const int8_t *values = rows.values + at * kGroup + pair * kPair;
            const uint8_t *bytes = here + 2 * kPairHead;
            if (fetch) fetch_ahead<Format::int4>(here), fetch_ahead<Format::int4>(here + kPairHead);
            __m512i low[R], high[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) low[r] = high[r] = spread8(group[r].starts + pair * 2);
#pragma GCC unroll 2
            for (int64_t k = 0; k < 8; ++k) {
                if (fetch) fetch_ahead<Format::int4>(bytes + k * 64);
                const __m512i both = _mm512_loadu_si512(bytes + k * 64);
                const __m512i low_nibbles = _mm512_and_si512(both, nibble);
                const __m512i high_nibbles = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const __m512i x = spread8(values + r * kGroup + k * 8);
                    add_products(low[r], low_nibbles, x);
                    add_products(high[r], high_nibbles, x);
                }
            }
            const __m512i scales = _mm512_loadu_si512(here), offsets = _mm512_loadu_si512(here + kPairHead);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                add_pairs(total[r], _mm512_packs_epi32(low[r], high[r]), scales);  // output 4 j + o comes to lie in lane 4 j + o
                add_pairs(total[r], offsets, spread4(group[r].sums + pair * 2));
            }
            here += kPairBytes;
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) add_scaled(sums + r * kTile + half * 16, _mm512_cvtepi32_ps(total[r]), group[r].scale, g == 0);
    }
}

constexpr int64_t kMostRows = 8;  // in a block: 16 sums, and what is multiplied, in 32 registers

#else  // one row at a time, in plain loops

template <int R>
void multiply_int8(const uint8_t *here, int64_t pairs, const QuantizedRows &rows, int64_t row, int64_t g, bool /*fetch*/, float *sums) {
    const int64_t at = g * rows.rows + row;
    const int8_t *values = rows.values + at * kGroup;
    const uint8_t *bytes = here + kTile * 2;
    int32_t dots[kTile];
    for (int64_t n = 0; n < kTile; ++n) dots[n] = rows.sums[at].start;
    for (int64_t k = 0; k < pairs * kPair; k += 4)
        for (int64_t n = 0; n < kTile; ++n)
            for (int64_t i = 0; i < 4; ++i) dots[n] += bytes[k * kTile + n * 4 + i] * values[k + i];
    uint16_t scales[kTile];
    std::memcpy(scales, here, sizeof scales);
    for (int64_t n = 0; n < kTile; ++n) {
        const float product = static_cast<float>(dots[n]) * simd::to_float(scales[n]) * rows.sums[at].scale;
        sums[n] = g == 0 ? product : sums[n] + product;
    }
}

template <int R>
void multiply_int4(const uint8_t *here, int64_t pairs, const QuantizedRows &rows, int64_t row, int64_t g, bool /*fetch*/, float *sums) {
    const int64_t at = g * rows.rows + row;
    const GroupSums &group = rows.sums[at];
    int32_t totals[kTile] = {};
    for (int64_t half = 0; half < 2; ++half) {
        for (int64_t pair = 0; pair < pairs; ++pair, here += kPairBytes) {
            const int8_t *values = rows.values + at * kGroup + pair * kPair;
            int16_t scales[16][2], offsets[16][2];
            std::memcpy(scales, here, kPairHead);
            std::memcpy(offsets, here + kPairHead, kPairHead);
            for (int64_t n = 0; n < 16; ++n)
                for (int64_t part = 0; part < 2; ++part) {
                    int32_t dot = group.starts[pair * 2 + part];
                    for (int64_t k = 0; k < 8; ++k)
                        for (int64_t i = 0; i < 4; ++i) dot += nibble_at(here, n, part, k, i) * values[k * 8 + part * 4 + i];
                    totals[half * 16 + n] += dot * scales[n][part] + group.sums[pair * 2 + part] * offsets[n][part];
                }
        }
    }
    for (int64_t n = 0; n < kTile; ++n) sums[n] = (g == 0 ? 0.f : sums[n]) + static_cast<float>(totals[n]) * group.scale;
}

constexpr int64_t kMostRows = 1;

#endif

// One tile of a weight.
struct Tile {
    Format format;
    const uint8_t *start;
    const WeightShape &shape;

    template <int R>
    void multiply(const QuantizedRows &rows, int64_t row, int64_t g, bool fetch, float *sums) const {
        const uint8_t *here = start + shape.head_bytes(format) + g * shape.group_bytes(format);
        if (format == Format::int8) {
            multiply_int8<R>(here, shape.pairs_of(g), rows, row, g, fetch, sums);
        } else {
            multiply_int4<R>(here, shape.pairs_of(g), rows, row, g, fetch, sums);
        }
    }
};

// One group of `count` rows, in blocks whose sizes differ by no more than one.
inline void multiply_rows(const Tile &tile, const QuantizedRows &rows, int64_t row, int64_t count, int64_t g, float *sums) {
    int64_t blocks = (count + kMostRows - 1) / kMostRows;
    // Where few rows are done with a group fast, the processor's own prefetch is better.
    bool fetch = count > (tile.format == Format::int4 ? 3 : 4);
    while (count > 0) {
        const int64_t size = (count + blocks - 1) / blocks;
        switch (size) {
#ifdef SPECDEC_VNNI
            case 2: tile.multiply<2>(rows, row, g, fetch, sums); break;
            case 3: tile.multiply<3>(rows, row, g, fetch, sums); break;
            case 4: tile.multiply<4>(rows, row, g, fetch, sums); break;
            case 5: tile.multiply<5>(rows, row, g, fetch, sums); break;
            case 6: tile.multiply<6>(rows, row, g, fetch, sums); break;
            case 7: tile.multiply<7>(rows, row, g, fetch, sums); break;
            case 8: tile.multiply<8>(rows, row, g, fetch, sums); break;
#endif
            default: tile.multiply<1>(rows, row, g, fetch, sums);
        }
        row += size, count -= size, sums += size * kTile, --blocks, fetch = false;
    }
}

// sums[count][32] = rows [row, row + count) times one tile; count <= kRowChunk.
inline void multiply_tile(const Tile &tile, const QuantizedRows &rows, int64_t row, int64_t count, float *sums) {
    for (int64_t g = 0; g < tile.shape.groups; ++g) multiply_rows(tile, rows, row, count, g, sums);
    if (tile.format == Format::int8) return;
    float steps[kTile];
    std::memcpy(steps, tile.start, sizeof steps);
    for (int64_t r = 0; r < count; ++r)
        for (int64_t n = 0; n < kTile; ++n) sums[r * kTile + n] *= steps[n];
}

// One row of a weight, such as a token's embedding.
inline void dequantize_row(Format format, const uint8_t *blocks, const WeightShape &shape, int64_t row, float *out) {
    const uint8_t *tile = blocks + row / kTile * shape.tile_bytes(format);
    const int64_t n = row % kTile;
    float step;
    std::memcpy(&step, tile + n * 4, 4);
    for (int64_t g = 0; g < shape.groups; ++g) {
        const uint8_t *group = tile + shape.head_bytes(format) + g * shape.group_bytes(format);
        const int64_t pairs = shape.pairs_of(g), count = std::min(kGroup, shape.inputs - g * kGroup);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t pair = i / kPair, part = i % kPair / kPart, k = i % kPart / 4;
            if (format == Format::int8) {
                uint16_t scale;
                std::memcpy(&scale, group + n * 2, 2);
                const uint8_t byte = group[kTile * 2 + place_of(i) / 4 * kTile * 4 + n * 4 + i % 4];
                out[g * kGroup + i] = static_cast<float>(byte - 128) * simd::to_float(scale);
            } else {
                const uint8_t *here = group + (n / 16 * pairs + pair) * kPairBytes;
                int16_t scale, offset;
                std::memcpy(&scale, here + (n % 16 * 2 + part) * 2, 2);
                std::memcpy(&offset, here + kPairHead + (n % 16 * 2 + part) * 2, 2);
                out[g * kGroup + i] = static_cast<float>(scale * (nibble_at(here, n % 16, part, k, i % 4) - 8) + offset) * step;
            }
        }
    }
}

}  // namespace specdec
