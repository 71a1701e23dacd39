// The products of quantized.h: one group of a tile of weights with up to 8 rows at a time, and what is built of it.
#pragma once
#include "quantized.h"

namespace specdec {

#ifdef SPECDEC_VNNI

// sum += the four products of each lane's bytes: weights unsigned, x signed. In assembly, since GCC 12 copies the sum before
// and after its own function for it, and then runs out of registers at 10 rows: half the speed.
inline void add_products(__m512i &sum, __m512i weights, __m512i x) {
    __m512i in_register = sum;
    asm("vpdpbusd %2, %1, %0" : "+v"(in_register) : "v"(weights), "v"(x));
    sum = in_register;
}

// Four values of a row in every lane.
inline __m512i spread(const int8_t *values) {
    int32_t four;
    std::memcpy(&four, values, 4);
    return _mm512_set1_epi32(four);
}

// 32 numbers of 16 bits as two vectors of floats.
struct Halves {
    __m512 low, high;
};
inline Halves from_bfloat16(const uint8_t *from) {
    const auto widen = [](__m256i half) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)); };
    const __m512i both = _mm512_loadu_si512(from);
    return {widen(_mm512_castsi512_si256(both)), widen(_mm512_extracti64x4_epi64(both, 1))};
}
inline Halves from_float16(const uint8_t *from) {
    const __m512i both = _mm512_loadu_si512(from);
    return {_mm512_cvtph_ps(_mm512_castsi512_si256(both)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1))};
}

// sum[16] (+)= part * factor.
inline void add_scaled(float *sum, __m512 part, __m512 factor, bool first) {
    _mm512_storeu_ps(sum, _mm512_fmadd_ps(part, factor, first ? _mm512_setzero_ps() : _mm512_loadu_ps(sum)));
}

// sums[R][32] (+)= one group of R rows, and the next group into the cache meanwhile where `fetch` says so. `head`: the group's
// scales; `bytes`: its weights.
template <int R>
void multiply_int8(const uint8_t *head, const uint8_t *bytes, int64_t parts, const QuantizedRows &rows, int64_t row, int64_t g, bool fetch,
                   float *sums) {
    const int64_t at = g * rows.rows + row;
    const int8_t *values = rows.values + at * kGroup;
    __m512i low[R], high[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_set1_epi32(-128 * rows.totals[at + r]);
#pragma GCC unroll 1
    for (int64_t k = 0; k < parts * kPart; k += 4) {
        const uint8_t *here = bytes + k * kTile;
        if (fetch) _mm_prefetch(here + kGroup * kTile, _MM_HINT_T0), _mm_prefetch(here + kGroup * kTile + 64, _MM_HINT_T0);
        const __m512i first_half = _mm512_loadu_si512(here), second_half = _mm512_loadu_si512(here + 64);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512i x = spread(values + r * kGroup + k);
            add_products(low[r], first_half, x);
            add_products(high[r], second_half, x);
        }
    }
    const Halves scales = from_bfloat16(head);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const __m512 row_scale = _mm512_set1_ps(rows.scales[at + r]);
        add_scaled(sums + r * kTile, _mm512_mul_ps(_mm512_cvtepi32_ps(low[r]), scales.low), row_scale, g == 0);
        add_scaled(sums + r * kTile + 16, _mm512_mul_ps(_mm512_cvtepi32_ps(high[r]), scales.high), row_scale, g == 0);
    }
}

// The same. `head`: the scales of the group's parts; the minima lie `minima` bytes behind them.
template <int R>
void multiply_int4(const uint8_t *head, int64_t minima, const uint8_t *bytes, int64_t parts, const QuantizedRows &rows, int64_t row,
                   int64_t g, bool fetch, float *sums) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const int64_t at = g * rows.rows + row;
    const int8_t *values = rows.values + at * kGroup;
    __m512 low_total[R], high_total[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) low_total[r] = high_total[r] = _mm512_setzero_ps();
#pragma GCC unroll 1
    for (int64_t part = 0; part < parts; ++part) {
        __m512i low[R], high[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_setzero_si512();
#pragma GCC unroll 1
        for (int64_t k = part * kPart; k < (part + 1) * kPart; k += 4) {
            const uint8_t *here = bytes + k * (kTile / 2);
            if (fetch) _mm_prefetch(here + kGroup * (kTile / 2), _MM_HINT_T0);
            const __m512i both = _mm512_loadu_si512(here);
            const __m512i first_half = _mm512_and_si512(both, nibble);
            const __m512i second_half = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m512i x = spread(values + r * kGroup + k);
                add_products(low[r], first_half, x);
                add_products(high[r], second_half, x);
            }
        }
        const Halves scales = from_float16(head + part * kTile * 2), lowest = from_float16(head + minima + part * kTile * 2);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const __m512 sum = _mm512_set1_ps(static_cast<float>(rows.sums[(g * kParts + part) * rows.rows + row + r]));
            low_total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low[r]), scales.low, _mm512_fnmadd_ps(sum, lowest.low, low_total[r]));
            high_total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[r]), scales.high, _mm512_fnmadd_ps(sum, lowest.high, high_total[r]));
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const __m512 row_scale = _mm512_set1_ps(rows.scales[at + r]);
        add_scaled(sums + r * kTile, low_total[r], row_scale, g == 0);
        add_scaled(sums + r * kTile + 16, high_total[r], row_scale, g == 0);
    }
}

// Rows in a block: int8 needs 16 chains to hide the latency; int4 has two sums for each, and 32 registers.
constexpr int64_t most_rows(Format format) { return format == Format::int8 ? 8 : 6; }

#else  // one row at a time, in plain loops

template <int R>
void multiply_int8(const uint8_t *head, const uint8_t *bytes, int64_t parts, const QuantizedRows &rows, int64_t row, int64_t g,
                   bool /*fetch*/, float *sums) {
    const int64_t at = g * rows.rows + row;
    const int8_t *values = rows.values + at * kGroup;
    int32_t dots[kTile];
    for (int64_t n = 0; n < kTile; ++n) dots[n] = -128 * rows.totals[at];
    for (int64_t k = 0; k < parts * kPart; k += 4)
        for (int64_t n = 0; n < kTile; ++n)
            for (int64_t i = 0; i < 4; ++i) dots[n] += bytes[k * kTile + n * 4 + i] * values[k + i];
    uint16_t scales[kTile];
    std::memcpy(scales, head, sizeof scales);
    const float row_scale = rows.scales[at];
    for (int64_t n = 0; n < kTile; ++n) {
        const float product = static_cast<float>(dots[n]) * simd::to_float(scales[n]) * row_scale;
        sums[n] = g == 0 ? product : sums[n] + product;
    }
}

template <int R>
void multiply_int4(const uint8_t *head, int64_t minima, const uint8_t *bytes, int64_t parts, const QuantizedRows &rows, int64_t row,
                   int64_t g, bool /*fetch*/, float *sums) {
    const int64_t at = g * rows.rows + row;
    const int8_t *values = rows.values + at * kGroup;
    float totals[kTile] = {};
    for (int64_t part = 0; part < parts; ++part) {
        int32_t dots[kTile] = {};
        for (int64_t k = part * kPart; k < (part + 1) * kPart; k += 4)
            for (int64_t n = 0; n < kTile; ++n)
                for (int64_t i = 0; i < 4; ++i) {
                    const uint8_t both = bytes[k * (kTile / 2) + n % 16 * 4 + i];
                    dots[n] += (n < 16 ? both & 15 : both >> 4) * values[k + i];
                }
        uint16_t scales[kTile], lowest[kTile];
        std::memcpy(scales, head + part * kTile * 2, sizeof scales);
        std::memcpy(lowest, head + minima + part * kTile * 2, sizeof lowest);
        const float sum = static_cast<float>(rows.sums[(g * kParts + part) * rows.rows + row]);
        for (int64_t n = 0; n < kTile; ++n)
            totals[n] += static_cast<float>(dots[n]) * simd::from_float16(scales[n]) - sum * simd::from_float16(lowest[n]);
    }
    for (int64_t n = 0; n < kTile; ++n) sums[n] = (g == 0 ? 0.f : sums[n]) + totals[n] * rows.scales[at];
}

constexpr int64_t most_rows(Format) { return 1; }

#endif

// One tile of a weight.
struct Tile {
    Format format;
    const uint8_t *start;
    const WeightShape &shape;

    template <int R>
    void multiply(const QuantizedRows &rows, int64_t row, int64_t g, bool fetch, float *sums) const {
        const uint8_t *bytes = start + shape.head_bytes(format);
        if (format == Format::int8) {
            multiply_int8<R>(start + g * kTile * 2, bytes + g * kGroup * kTile, shape.parts_of(g), rows, row, g, fetch, sums);
        } else {
            multiply_int4<R>(start + g * kParts * kTile * 2, shape.parts * kTile * 2, bytes + g * kGroup * (kTile / 2), shape.parts_of(g),
                             rows, row, g, fetch, sums);
        }
    }
};

// One group of `count` rows, in blocks whose sizes differ by no more than one.
inline void multiply_rows(const Tile &tile, const QuantizedRows &rows, int64_t row, int64_t count, int64_t g, float *sums) {
    int64_t blocks = (count + most_rows(tile.format) - 1) / most_rows(tile.format);
    bool fetch = count > 4;  // the processor's own prefetch stops where many rows keep a group busy for long
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
}

// One row of a weight, such as a token's embedding.
inline void dequantize_row(Format format, const uint8_t *blocks, const WeightShape &shape, int64_t row, float *out) {
    const uint8_t *head = blocks + row / kTile * shape.tile_bytes(format), *bytes = head + shape.head_bytes(format);
    const int64_t n = row % kTile;
    const auto number = [&](int64_t index) {
        uint16_t bits;
        std::memcpy(&bits, head + (index * kTile + n) * 2, 2);
        return bits;
    };
    for (int64_t i = 0; i < shape.inputs; ++i) {
        if (format == Format::int8) {
            out[i] = static_cast<float>(bytes[i / 4 * 4 * kTile + n * 4 + i % 4] - 128) * simd::to_float(number(i / kGroup));
        } else {
            const uint8_t both = bytes[i / 4 * 2 * kTile + n % 16 * 4 + i % 4];
            const float scale = simd::from_float16(number(i / kPart)), lowest = simd::from_float16(number(shape.parts + i / kPart));
            out[i] = static_cast<float>(n < 16 ? both & 15 : both >> 4) * scale - lowest;
        }
    }
}

}  // namespace specdec
