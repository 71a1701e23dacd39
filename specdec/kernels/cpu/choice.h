// The choice of one row by the coupled rule: argmax over x of logit(x) / T + G(seed, position, x), the lowest id on ties, over
// what the filters keep. The reference is specdec/kernels/reference.py: choose.
#pragma once
#include <cmath>
#include <cstdint>

#include "filter.h"
#include "philox.h"
#include "row.h"

namespace specdec {

// The token that wins the race among those that `boundary` keeps, which the mode is one of.
//
// G(x) >= s only if the word's uniform u < exp(-s), because E = -log(1 - u) > u. So from the best score so far and the
// highest logit of a block follows a bound that no word of a token that could still win exceeds. Words are drawn for
// blocks of tokens at once, and logarithms taken for the few below the bound only.
inline int64_t race(const Row &row, const Noise &noise, float temperature, const Boundary &boundary) {
    int64_t best = -1;
    double best_score = -INFINITY;
    const auto enter = [&](int64_t x, uint32_t word) {
        const float logit = row[x];
        if (!boundary.keeps(x, logit)) return;
        const double score = logit / static_cast<double>(temperature) + gumbel(word);
        if (score > best_score || (score == best_score && x < best)) best_score = score, best = x;
    };
    const auto run = [&](int64_t b) {
        const double needed = best_score - row.maxima()[b] / static_cast<double>(temperature);
        const float bound = std::exp(static_cast<float>(-needed)) * (4294967296.f * 1.001f);
        if (!(bound >= 0.5f)) return;
        const uint32_t limit = bound >= 4294967040.f ? 0xFFFFFFFFu : static_cast<uint32_t>(bound);
        Halves words[2][4];
        const uint32_t first = static_cast<uint32_t>(b * kBlock);
        philox_words(noise, first, words[0]);
        philox_words(noise, first + 32, words[1]);
        Halves lowest = words[0][0] << 32;
        for (int i = 1; i < 8; ++i) {
            const Halves high = words[i / 4][i % 4] << 32;
            lowest = high < lowest ? high : lowest;
        }
        if (!any_at_most(lowest, static_cast<uint64_t>(limit) << 32)) return;
        const int64_t count = std::min(kBlock, row.size() - b * kBlock);
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t word = static_cast<uint32_t>(words[i / 32][i % 4][i % 32 / 4]);
            if (word <= limit) enter(first + i, word);
        }
    };
    const int64_t home = row.mode() / kBlock;
    run(home);
    for (int64_t b = 0; b < row.blocks(); ++b)
        if (b != home && row.maxima()[b] >= boundary.logit) run(b);
    return best;
}

inline bool filters_at_all(const Filters &filters) {
    return filters.top_k > 0 || filters.top_p < 1 || filters.min_p > 0 || filters.typical_p < 1;
}

inline int64_t sampled(const Row &row, const Noise &noise, const Filters &filters, Scratch &scratch) {
    const Boundary boundary = filters_at_all(filters) ? Filter(row, filters, scratch).boundary() : Boundary{};
    if (filters.typical_p >= 1) return race(row, noise, filters.temperature, boundary);
    scratch.masked.resize(row.size());
    Filter(row, filters, scratch).write_masked(boundary, scratch.masked.data());
    std::vector<float> maxima;
    return race(Row(scratch.masked.data(), row.size(), maxima), noise, filters.temperature, Boundary{});
}

// The token chosen in a row; -1 where a logit is NaN or none is finite.
inline int64_t choose_row(const float *logits, int64_t vocabulary, const Noise &noise, const Filters &filters, Scratch &scratch) {
    const Row row(logits, vocabulary, scratch.maxima);
    if (!row.ok()) return -1;
    return filters.temperature == 0.f ? row.mode() : sampled(row, noise, filters, scratch);
}

}  // namespace specdec
