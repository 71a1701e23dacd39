// Row choice of the coupled rule: argmax over x of logit(x) / T + G(seed, position, x), the lowest id on ties, over what the
// filters keep. The reference is specdec/kernels/reference.py: choose.
#include <cmath>
#include <cstdint>

#include "filter.h"
#include "philox.h"
#include "row.h"

namespace {

using namespace specdec;

// The token that wins the race among those that `boundary` keeps, which the mode is one of.
//
// G(x) >= s only if the word's uniform u < exp(-s), because E = -log(1 - u) > u. So from the best score so far and the
// highest logit of a block follows a bound that no word of a token that could still win exceeds. Words are drawn for
// blocks of tokens at once, and logarithms taken for the few below the bound only.
int64_t race(const Row &row, const Noise &noise, float temperature, const Boundary &boundary) {
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

bool filters_at_all(const Filters &filters) {
    return filters.top_k > 0 || filters.top_p < 1 || filters.min_p > 0 || filters.typical_p < 1;
}

int64_t sampled(const Row &row, const Noise &noise, const Filters &filters, Scratch &scratch) {
    const Boundary boundary = filters_at_all(filters) ? Filter(row, filters, scratch).boundary() : Boundary{};
    if (filters.typical_p >= 1) return race(row, noise, filters.temperature, boundary);
    scratch.masked.resize(row.size());
    Filter(row, filters, scratch).write_masked(boundary, scratch.masked.data());
    std::vector<float> maxima;
    return race(Row(scratch.masked.data(), row.size(), maxima), noise, filters.temperature, Boundary{});
}

thread_local Scratch scratch;

}  // namespace

// logits: float32 [rows, vocabulary]; seeds, positions, top_k: int64 [rows]; temperature, top_p, min_p: float32 [rows];
// typical_p: float32 [rows], or null for 1; salts: int64 [rows], or null for 0; out: int64 [rows], -1 where a logit is NaN
// or none is finite.
extern "C" void specdec_choose(const float *logits, int64_t rows, int64_t vocabulary, const int64_t *seeds, const int64_t *positions,
                               const float *temperature, const int64_t *top_k, const float *top_p, const float *min_p,
                               const float *typical_p, int stream, const int64_t *salts, int64_t *out, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t r = 0; r < rows; ++r) {
        const Row row(logits + r * vocabulary, vocabulary, scratch.maxima);
        if (!row.ok())
            out[r] = -1;
        else if (temperature[r] == 0.f)
            out[r] = row.mode();
        else
            out[r] = sampled(row,
                             {static_cast<uint64_t>(seeds[r]), static_cast<uint32_t>(positions[r]), static_cast<uint32_t>(stream),
                              salts ? static_cast<uint32_t>(salts[r]) : 0u},
                             {temperature[r], top_k[r], top_p[r], min_p[r], typical_p ? typical_p[r] : 1.f}, scratch);
    }
}

// Writes `logits` with -inf at what each row's filters exclude to out, float32 [rows, vocabulary]. Rows that are greedy or
// hold no finite best logit are copied.
extern "C" void specdec_filter(const float *logits, int64_t rows, int64_t vocabulary, const float *temperature, const int64_t *top_k,
                               const float *top_p, const float *min_p, const float *typical_p, float *out, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t r = 0; r < rows; ++r) {
        const Filters filters{temperature[r], top_k[r], top_p[r], min_p[r], typical_p ? typical_p[r] : 1.f};
        const Row row(logits + r * vocabulary, vocabulary, scratch.maxima);
        if (row.ok() && temperature[r] > 0.f && filters_at_all(filters)) {
            Filter filter(row, filters, scratch);
            filter.write_masked(filter.boundary(), out + r * vocabulary);
        } else {
            std::copy(row.logits(), row.logits() + vocabulary, out + r * vocabulary);
        }
    }
}
