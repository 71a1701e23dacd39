// Blocks of keys and values, copied out of the cache into the layout that the inner loops read.
#pragma once
#include <cstdint>

#include "simd.h"

namespace specdec::attention {

constexpr int kBlock = 32;  // positions in a block; block b holds [b * kBlock, (b + 1) * kBlock), whatever the page size

#if defined(__AVX512F__)
// Transposes 16 x 16 words in registers: rows[i][j] becomes rows[j][i].
inline void transpose(__m512i (&rows)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {  // within 128-bit lanes: pairs of rows
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // rows[i + c]: column 4 * lane + c of rows i .. i + 3
        rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int c = 0; c < 4; ++c) {  // the 128-bit lanes themselves, 4 x 4
        const __m512i a = _mm512_shuffle_i32x4(rows[c], rows[c + 4], 0x88), b = _mm512_shuffle_i32x4(rows[c], rows[c + 4], 0xdd);
        const __m512i d = _mm512_shuffle_i32x4(rows[c + 8], rows[c + 12], 0x88);
        const __m512i e = _mm512_shuffle_i32x4(rows[c + 8], rows[c + 12], 0xdd);
        t[c] = _mm512_shuffle_i32x4(a, d, 0x88), t[c + 8] = _mm512_shuffle_i32x4(a, d, 0xdd);
        t[c + 4] = _mm512_shuffle_i32x4(b, e, 0x88), t[c + 12] = _mm512_shuffle_i32x4(b, e, 0xdd);
    }
    for (int i = 0; i < 16; ++i) rows[i] = t[i];
}

inline void store_keys(const __m512i (&columns)[16], float *tile, const float *) {
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(tile + i * kBlock, columns[i]);
}
inline void store_keys(const __m512i (&columns)[16], float *tile, const uint16_t *) {  // a word holds two dimensions
    for (int i = 0; i < 16; ++i) {
        _mm512_storeu_si512(tile + 2 * i * kBlock, _mm512_slli_epi32(columns[i], 16));
        _mm512_storeu_si512(tile + (2 * i + 1) * kBlock, _mm512_and_si512(columns[i], _mm512_set1_epi32(int32_t(0xffff0000))));
    }
}
#endif

// Keys of a block as float32, transposed: tile[d][lane] = keys[offsets[lane] + d], for all lanes.
template <class KV>
void load_keys(const KV *keys, const int64_t *offsets, int64_t dim, float *tile) {
    int64_t done = 0;
#if defined(__AVX512F__)
    constexpr int64_t step = 64 / sizeof(KV);
    for (; done + step <= dim; done += step)
        for (int lane = 0; lane < kBlock; lane += 16) {
            __m512i rows[16];
            for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(keys + offsets[lane + i] + done);
            transpose(rows);
            store_keys(rows, tile + done * kBlock + lane, keys);
        }
#endif
    for (; done < dim; ++done)
        for (int lane = 0; lane < kBlock; ++lane) tile[done * kBlock + lane] = simd::to_float(keys[offsets[lane] + done]);
}

// Values of lanes [first, last) as float32: tile[lane][d] = values[offsets[lane] + d]; rows are `stride` apart.
template <class KV>
void load_values(const KV *values, const int64_t *offsets, int first, int last, int64_t dim, int64_t stride, float *tile) {
    for (int lane = first; lane < last; ++lane) {
        const KV *from = values + offsets[lane];
        float *to = tile + lane * stride;
        int64_t d = 0;
        for (; d + simd::kLanes <= dim; d += simd::kLanes) simd::store(simd::load(from + d), to + d);
        for (; d < dim; ++d) to[d] = simd::to_float(from[d]);
    }
}

#if defined(__AVX512BF16__)
// Keys of a block in pairs of dimensions, transposed: words tile[d / 2][lane] = keys[offsets[lane] + d], [... + d + 1].
inline void load_key_pairs(const uint16_t *keys, const int64_t *offsets, int64_t dim, uint32_t *tile) {
    int64_t done = 0;
    for (; done + 32 <= dim; done += 32)
        for (int lane = 0; lane < kBlock; lane += 16) {
            __m512i rows[16];
            for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(keys + offsets[lane + i] + done);
            transpose(rows);
            for (int i = 0; i < 16; ++i) _mm512_storeu_si512(tile + (done / 2 + i) * kBlock + lane, rows[i]);
        }
    for (; done < dim; done += 2)
        for (int lane = 0; lane < kBlock; ++lane) std::memcpy(tile + done / 2 * kBlock + lane, keys + offsets[lane] + done, 4);
}

// Values of lanes [first, last) in pairs of lanes: words tile[lane / 2][d] = values[offsets[lane] + d], [offsets[lane + 1] + d].
inline void load_value_pairs(const uint16_t *values, const int64_t *offsets, int first, int last, int64_t dim, int64_t stride,
                             uint32_t *tile) {
    alignas(64) static constexpr uint16_t interleave[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                            8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(interleave), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int lane = first / 2 * 2; lane < last; lane += 2) {
        const uint16_t *even = values + offsets[lane], *odd = values + offsets[lane + 1];
        uint32_t *to = tile + lane / 2 * stride;
        int64_t d = 0;
        for (; d + 32 <= dim; d += 32) {
            const __m512i a = _mm512_loadu_si512(even + d), b = _mm512_loadu_si512(odd + d);
            _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(to + d + 16, _mm512_permutex2var_epi16(a, high, b));
        }
        for (; d < dim; ++d) to[d] = even[d] | static_cast<uint32_t>(odd[d]) << 16;
    }
}
#endif

}  // namespace specdec::attention
