// Products of quantised weights and quantised activations: weights of 8 or 4 bits with scales by output and group of inputs,
// activations of 8 bits with a scale per row and group, quantised on the fly.
//
// Inputs are padded with zeros to a multiple of 32, outputs to tiles of 32. A group is 128 inputs, the last one may be less; a part is
// 32 inputs. A tile is one stream, read front to back:
//
//     int8   | scales bfloat16 [groups][32] | bytes [inputs / 4][32 outputs][4 inputs] |
//     int4   | scales float16 [parts][32] | minima float16 [parts][32] | bytes [inputs / 4][64] |
//              a byte's low nibble belongs to outputs 0 to 15 (16 outputs x 4 inputs), its high nibble to outputs 16 to 31
//
//     weight = scale * (byte - 128)          weight = scale * nibble - minimum
//
// The processor's instruction multiplies unsigned bytes by signed ones: nibbles are unsigned as they are, and the 128s of int8 come off
// again as 128 times the sum of the row's group.
//
// Sums within a part are integers, and so exact; parts and groups of a row are added in order, in float32. So a row's result is the
// same bits whatever the other rows are.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include <immintrin.h>
#define SPECDEC_VNNI 1
#endif

namespace specdec {

constexpr int64_t kTile = 32;      // outputs
constexpr int64_t kGroup = 128;    // inputs
constexpr int64_t kPart = 32;      // inputs
constexpr int64_t kParts = kGroup / kPart;
constexpr int64_t kRowChunk = 64;  // rows that share one pass over a tile: their sums stay in the first-level cache

enum class Format : int64_t { int8 = 0, int4 = 1 };

struct WeightShape {
    int64_t inputs, outputs, parts, groups, tiles;
    WeightShape(int64_t inputs_, int64_t outputs_) : inputs(inputs_), outputs(outputs_) {
        parts = (inputs + kPart - 1) / kPart;
        groups = (parts + kParts - 1) / kParts;
        tiles = (outputs + kTile - 1) / kTile;
    }
    int64_t head_bytes(Format format) const { return format == Format::int8 ? groups * kTile * 2 : parts * kTile * 4; }
    int64_t tile_bytes(Format format) const { return head_bytes(format) + parts * kPart * (format == Format::int8 ? kTile : kTile / 2); }
    int64_t parts_of(int64_t group) const { return std::min(kParts, parts - group * kParts); }
};

// Quantised rows, filled by quantize_row, group by group: what a pass over one group of weights reads lies together.
struct QuantizedRows {
    int8_t *values;  // [groups][rows][128]
    float *scales;   // [groups][rows]
    int32_t *totals; // [groups][rows], the sum of a group's values
    int32_t *sums;   // [groups * 4][rows], those of its parts
    int64_t rows;
};

// One group of a row: scale = max|x| / 127, values rounded to nearest. `count` inputs are there, up to 128; the rest are zeros.
inline void quantize_group(const float *x, int64_t count, const QuantizedRows &rows, int64_t row, int64_t g) {
    const int64_t at = g * rows.rows + row;
    int8_t *values = rows.values + at * kGroup;
    int32_t total = 0;
#ifdef SPECDEC_VNNI
    const auto load = [&](int64_t i) {
        const int64_t left = count - i;
        return _mm512_maskz_loadu_ps(left >= 16 ? 0xffff : left > 0 ? static_cast<__mmask16>((1u << left) - 1) : 0, x + i);
    };
    __m512 most = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16) most = _mm512_max_ps(most, _mm512_abs_ps(load(i)));
    const float top = _mm512_reduce_max_ps(most);
    const __m512 inverse = _mm512_set1_ps(top > 0.f ? 127.f / top : 0.f);
    for (int64_t part = 0; part < kParts; ++part) {
        const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(load(part * kPart), inverse));
        const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(load(part * kPart + 16), inverse));
        _mm512_mask_cvtsepi32_storeu_epi8(values + part * kPart, 0xffff, low);
        _mm512_mask_cvtsepi32_storeu_epi8(values + part * kPart + 16, 0xffff, high);
        const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
        rows.sums[(g * kParts + part) * rows.rows + row] = sum;
        total += sum;
    }
#else
    float top = 0.f;
    for (int64_t i = 0; i < count; ++i) top = std::fabs(x[i]) > top ? std::fabs(x[i]) : top;
    const float inverse = top > 0.f ? 127.f / top : 0.f;
    for (int64_t part = 0; part < kParts; ++part) {
        int32_t sum = 0;
        for (int64_t i = part * kPart; i < (part + 1) * kPart; ++i) {
            values[i] = i < count ? static_cast<int8_t>(std::nearbyint(x[i] * inverse)) : 0;
            sum += values[i];
        }
        rows.sums[(g * kParts + part) * rows.rows + row] = sum;
        total += sum;
    }
#endif
    rows.totals[at] = total;
    rows.scales[at] = top / 127.f;
}

inline void quantize_row(const float *x, const WeightShape &shape, const QuantizedRows &rows, int64_t row) {
    for (int64_t g = 0; g < shape.groups; ++g)
        quantize_group(x + g * kGroup, std::min(kGroup, shape.inputs - g * kGroup), rows, row, g);
}

}  // namespace specdec
