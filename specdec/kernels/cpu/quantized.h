// Products of quantised weights and quantised activations: weights of 8 or 4 bits with scales by output, activations of 8 bits with a
// scale per row and group of inputs, quantised on the fly.
//
// A part is 32 inputs, a pair two parts, a group two pairs. Inputs are padded with zeros to whole pairs, so that the last group may have
// one; outputs to tiles of 32. A tile is one stream, read front to back, and the next tile follows it:
//
//     int8   | group, group, ... |
//              group: scales bfloat16 [32] | pair, pair
//              pair:  bytes [8][2 parts][32 outputs][4 inputs]
//              weight = scale * (byte - 128)
//
//     int4   | steps float32 [32] | group, group, ... |
//              group: outputs 0 to 15: pair, pair | outputs 16 to 31: pair, pair
//              pair:  scales int16 [16 outputs][2 parts] | offsets int16 [16][2] | bytes [8][4][2][2 parts][4 inputs]
//              bytes [.][j][o] have output 4 j + o in their low nibbles and output 4 j + 2 + o in their high ones
//              weight = step * (scale * (nibble - 8) + offset)
//
// In both, as in the activations, each four inputs of a pair's first part stand beside the same four of its second. The processor's
// instruction multiplies unsigned bytes by signed ones and adds up fours: bytes and nibbles are unsigned as they are, and the 128s and 8s
// come off again as so many times the sum of the row's values.
//
// int4 needs two scales for the 64 products of 16 outputs and one instruction: float scales would take a fifth of the time. So they are
// integers in steps of their output's own. A part of nibble - 8 sums up to no more than 32 * 8 * 127, 16 bits; two parts of an output are
// then packed into one lane and multiplied by their scales and added by one instruction.
//
// Sums within a group are integers, and so exact; groups of a row are added in order, in float32. So a row's result is the same bits
// whatever the other rows are.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include <immintrin.h>
#define SPECDEC_VNNI 1
#endif

namespace specdec {

constexpr int64_t kTile = 32;  // outputs
constexpr int64_t kPart = 32;  // inputs
constexpr int64_t kPair = 2 * kPart;
constexpr int64_t kPairs = 2;  // in a group
constexpr int64_t kGroup = kPairs * kPair;
constexpr int64_t kParts = 2 * kPairs;
constexpr int64_t kRowChunk = 64;  // rows that share one pass over a tile: their sums stay in the first-level cache

enum class Format : int64_t { int8 = 0, int4 = 1 };

// Bytes of an int4 pair: 16 outputs.
constexpr int64_t kPairHead = 16 * 2 * 2;  // of the scales, and of the offsets
constexpr int64_t kPairBytes = 2 * kPairHead + 16 * kPair / 2;

struct WeightShape {
    int64_t inputs, outputs, pairs, groups, tiles;
    WeightShape(int64_t inputs_, int64_t outputs_) : inputs(inputs_), outputs(outputs_) {
        pairs = (inputs + kPair - 1) / kPair;
        groups = (pairs + kPairs - 1) / kPairs;
        tiles = (outputs + kTile - 1) / kTile;
    }
    static int64_t head_bytes(Format format) { return format == Format::int8 ? 0 : kTile * 4; }
    // Of a group that is whole.
    static int64_t group_bytes(Format format) { return format == Format::int8 ? kTile * (2 + kGroup) : kPairs * 2 * kPairBytes; }
    int64_t tile_bytes(Format format) const {
        return format == Format::int8 ? groups * kTile * 2 + pairs * kPair * kTile : head_bytes(format) + pairs * 2 * kPairBytes;
    }
    int64_t pairs_of(int64_t group) const { return std::min(kPairs, pairs - group * kPairs); }
};

// What goes with a group's values of a row.
struct GroupSums {
    float scale;             // value = scale * its byte
    int32_t start;           // -128 times the sum of the bytes
    int32_t starts[kParts];  // -8 times that of each part
    int16_t sums[kParts];    // that of each part
};

// Quantised rows, filled by quantize_row, group by group: what a pass over one group of weights reads lies together.
struct QuantizedRows {
    int8_t *values;   // [groups][rows][2 pairs][8][2 parts][4]
    GroupSums *sums;  // [groups][rows]
    int64_t rows;
};

// Where input i of a group lies in its values.
inline int64_t place_of(int64_t i) { return i / kPair * kPair + i % kPart / 4 * 8 + i % kPair / kPart * 4 + i % 4; }

// One group of a row: scale = max|x| / 127, values rounded to nearest. `count` inputs are there, up to 128; the rest are zeros.
inline void quantize_group(const float *x, int64_t count, const QuantizedRows &rows, int64_t row, int64_t g) {
    const int64_t at = g * rows.rows + row;
    int8_t *values = rows.values + at * kGroup;
    GroupSums &sums = rows.sums[at];
    int32_t total = 0;
    const auto book = [&](int64_t part, int32_t sum) {
        sums.starts[part] = -8 * sum;
        sums.sums[part] = static_cast<int16_t>(sum);
        total += sum;
    };
#ifdef SPECDEC_VNNI
    const auto load = [&](int64_t i) {
        const int64_t left = count - i;
        return _mm512_maskz_loadu_ps(left >= 16 ? 0xffff : left > 0 ? static_cast<__mmask16>((1u << left) - 1) : 0, x + i);
    };
    __m512 most = _mm512_setzero_ps();
    __mmask16 unordered = 0;  // a maximum loses NaN
    for (int64_t i = 0; i < count; i += 16) {
        most = _mm512_max_ps(most, _mm512_abs_ps(load(i)));
        unordered |= _mm512_cmp_ps_mask(load(i), load(i), _CMP_UNORD_Q);
    }
    const float top = _mm512_reduce_max_ps(most);
    const bool is_nan = unordered != 0;
    const __m512 inverse = _mm512_set1_ps(top > 0.f ? 127.f / top : 0.f);
    // 16 bytes of each part, four of one beside four of the other
    const __m512i beside = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 0, 0, 0, 0, 0, 0, 0, 0);
    for (int64_t pair = 0; pair < kPairs; ++pair) {
        __m512i sum[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        for (int64_t half = 0; half < 2; ++half) {
            __m128i bytes[2];
            for (int64_t part = 0; part < 2; ++part) {
                const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(load(pair * kPair + part * kPart + half * 16), inverse));
                const __m512i wide = _mm512_max_epi32(rounded, _mm512_set1_epi32(-127));  // NaN is rounded to the least int32
                sum[part] = _mm512_add_epi32(sum[part], wide);
                bytes[part] = _mm512_cvtsepi32_epi8(wide);
            }
            const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(bytes[0]), bytes[1], 1);
            const __m512i mixed = _mm512_permutexvar_epi32(beside, _mm512_castsi256_si512(both));
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(values + pair * kPair + half * kPart), _mm512_castsi512_si256(mixed));
        }
        for (int64_t part = 0; part < 2; ++part) book(pair * 2 + part, _mm512_reduce_add_epi32(sum[part]));
    }
#else
    float top = 0.f;
    bool is_nan = false;
    for (int64_t i = 0; i < count; ++i) {
        top = std::fabs(x[i]) > top ? std::fabs(x[i]) : top;
        is_nan |= x[i] != x[i];
    }
    const float inverse = top > 0.f ? 127.f / top : 0.f;
    for (int64_t part = 0; part < kParts; ++part) {
        int32_t sum = 0;
        for (int64_t i = part * kPart; i < (part + 1) * kPart; ++i) {
            const auto value = i < count ? static_cast<int8_t>(std::max(-127.f, std::nearbyint(x[i] * inverse))) : int8_t{0};
            values[place_of(i)] = value;
            sum += value;
        }
        book(part, sum);
    }
#endif
    sums.start = -128 * total;
    sums.scale = is_nan ? std::numeric_limits<float>::quiet_NaN() : top / 127.f;
}

inline void quantize_row(const float *x, const WeightShape &shape, const QuantizedRows &rows, int64_t row) {
    for (int64_t g = 0; g < shape.groups; ++g)
        quantize_group(x + g * kGroup, std::min(kGroup, shape.inputs - g * kGroup), rows, row, g);
}

}  // namespace specdec
