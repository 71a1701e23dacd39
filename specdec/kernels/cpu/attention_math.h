// The inner loops of attention, for up to kQueries queries and one block of keys. How queries are grouped never changes a
// bit: a sum is one chain in a fixed order (dimensions; positions).
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention_products.h"

namespace specdec::attention {

using simd::Ints;

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kQueries = 8;  // 8 x 2 accumulators of 32 registers
#else
constexpr int kQueries = 4;  // of 16
#endif

struct Span {
    int first, last;  // lanes of a block
    bool empty() const { return first >= last; }
};

// Calls f with `count`, 1 to kQueries, as a constant.
template <int Most = kQueries, class F>
inline void with_constant(int count, F f) {
    if constexpr (Most == 1) {
        f(std::integral_constant<int, 1>{});
    } else {
        if (count == Most) return f(std::integral_constant<int, Most>{});
        with_constant<Most - 1>(count, f);
    }
}

// scores[r][lane] = q_r . key_lane. queries: [dim / kPack][kQueries]; tile: [dim / kPack][kBlock]; scores: [R][kBlock].
template <class Products, int R>
void score_block(const typename Products::Operand *queries, const typename Products::Operand *tile, int64_t dim, float *scores) {
    for (int lane = 0; lane < kBlock; lane += 2 * kLanes) {
        Floats sums[R][2] = {};
        for (int64_t d = 0; d < dim / Products::kPack; ++d) {
            const auto a = Products::load(tile + d * kBlock + lane), b = Products::load(tile + d * kBlock + lane + kLanes);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const auto x = Products::splat(queries[d * kQueries + r]);
                sums[r][0] = Products::multiply_add(x, a, sums[r][0]);
                sums[r][1] = Products::multiply_add(x, b, sums[r][1]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < 2; ++c) simd::store(sums[r][c], scores + r * kBlock + lane + c * kLanes);
    }
}

// One step of a query's online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867): turns the scores of `lanes` into
// weights exp(score - maximum so far), the others into 0, and adds them to total[kLanes]. Returns the factor by which that
// lowers the weights of earlier blocks. Compiled once, so that its sums have one order.
template <class Products>
[[gnu::noinline]] float soften(float *scores, Span lanes, float scale, float soft_cap, float &maximum, float *total) {
    constexpr int vectors = kBlock / kLanes;
    Floats x[vectors], top = simd::splat(-INFINITY);
    Ints seen[vectors], lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    for (int v = 0; v < vectors; ++v) {
        x[v] = simd::load(scores + v * kLanes) * scale;
        if (soft_cap > 0.f) x[v] = soft_cap * simd::tanh(x[v] / soft_cap);
        seen[v] = (lane + v * kLanes >= lanes.first) & (lane + v * kLanes < lanes.last);
        x[v] = seen[v] ? x[v] : simd::splat(-INFINITY);
        top = simd::max(x[v], top);
    }
    const float before = maximum;
    maximum = std::max(before, simd::reduce_max(top));
    const float factor = maximum == before ? 1.f : simd::exp_negative(simd::splat(before - maximum))[0];
    Floats sum = simd::load(total) * factor;
    for (int v = 0; v < vectors; ++v) {
        const Floats weight = simd::exp_negative(x[v] - maximum);
        sum += Products::store_weights(seen[v] ? weight : Floats{}, v * kLanes, scores);
    }
    simd::store(sum, total);
    return factor;
}

// The sum of a query's weights. Compiled once, too.
[[gnu::noinline]] inline float sum_lanes(const float *total) {
    float sum = 0.f;
    for (int i = 0; i < kLanes; ++i) sum += total[i];
    return sum;
}

// sums[r] = factors[r] * sums[r] + the weighted values of packs [first, last), for C vectors of columns.
template <class Products, int R, int C>
inline void accumulate(const typename Products::Operand *weights, const typename Products::Operand *tile, int64_t stride, int first,
                       int last, uint32_t part, const float *factors, float *sums) {
    Floats acc[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = simd::load(sums + r * stride + c * kLanes) * factors[r];
    for (int pack = first; pack < last; ++pack) {
        typename Products::Vector value[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) value[c] = Products::load_part(tile + pack * stride + c * kLanes, part);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const auto weight = Products::splat(weights[r * kBlock + pack]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) acc[r][c] = Products::multiply_add(weight, value[c], acc[r][c]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) simd::store(acc[r][c], sums + r * stride + c * kLanes);
}

// The same for whole rows, and only the lanes of a pack that `part` masks. weights: [R][kBlock], of which the first
// kBlock / kPack are used; tile: [kBlock / kPack][stride]; sums: [R][stride]; stride: a multiple of kLanes.
template <class Products, int R>
void accumulate_packs(const float *weights, const typename Products::Operand *tile, int64_t stride, int first, int last, uint32_t part,
                      const float *factors, float *sums) {
    constexpr int wide = R > kQueries / 2 ? 2 : 4;  // as many independent chains as there are registers
    const auto *operands = reinterpret_cast<const typename Products::Operand *>(weights);
    int64_t d = 0;
    for (; d + wide * kLanes <= stride; d += wide * kLanes)
        accumulate<Products, R, wide>(operands, tile + d, stride, first, last, part, factors, sums + d);
    for (; d < stride; d += kLanes) accumulate<Products, R, 1>(operands, tile + d, stride, first, last, part, factors, sums + d);
}

// The same for one query and any lanes: a pack that is seen in part counts in part.
template <class Products>
void accumulate_lanes(const float *weights, const typename Products::Operand *tile, int64_t stride, Span lanes, float factor, float *sums) {
    constexpr int pack = Products::kPack;
    constexpr float one = 1.f;
    if (lanes.first % pack) {
        accumulate_packs<Products, 1>(weights, tile, stride, lanes.first / pack, lanes.first / pack + 1, 0xffff0000, &factor, sums);
        factor = one, ++lanes.first;
    }
    accumulate_packs<Products, 1>(weights, tile, stride, lanes.first / pack, lanes.last / pack, 0xffffffff, &factor, sums);
    if (lanes.last % pack && !lanes.empty())
        accumulate_packs<Products, 1>(weights, tile, stride, lanes.last / pack, lanes.last / pack + 1, 0x0000ffff, &one, sums);
}

}  // namespace specdec::attention
