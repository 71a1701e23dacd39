// Choices of many rows, what filters leave of rows, and what turns their logits into probabilities.
#include <algorithm>
#include <cstdint>

#include "choice.h"
#include "simd.h"

namespace {

using namespace specdec;

thread_local Scratch scratch;

// Weights below exp(-kNegligible) of the highest one's add nothing to a float sum of a vocabulary.
constexpr float kNegligible = 40.f;

// log of the sum of exp(logit / temperature). In double: at a low temperature it is large, and its difference from a logit small.
double log_sum_exp(const Row &row, float temperature) {
    const float inverse = 1.f / temperature, floor = row.top() - kNegligible * temperature;
    simd::Floats sum = {};
    for (int64_t b = 0; b < row.blocks(); ++b) {
        if (row.maxima()[b] < floor) continue;
        float tail[kBlock];
        const float *x = row.block(b, tail);
        for (int64_t i = 0; i < kBlock; i += simd::kLanes) sum += simd::exp_negative((simd::load(x + i) - row.top()) * inverse);
    }
    double total = 0.0;
    for (int i = 0; i < simd::kLanes; ++i) total += sum[i];
    return row.top() / static_cast<double>(temperature) + std::log(total);
}

}  // namespace

// logits: float32 [rows, vocabulary]; seeds, positions, top_k: int64 [rows]; temperature, top_p, min_p: float32 [rows];
// typical_p: float32 [rows], or null for 1; salts: int64 [rows], or null for 0; out: int64 [rows], -1 where a logit is NaN
// or none is finite.
extern "C" void specdec_choose(const float *logits, int64_t rows, int64_t vocabulary, const int64_t *seeds, const int64_t *positions,
                               const float *temperature, const int64_t *top_k, const float *top_p, const float *min_p,
                               const float *typical_p, int stream, const int64_t *salts, int64_t *out, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (rows > 1)
    for (int64_t r = 0; r < rows; ++r) {
        const Noise noise{static_cast<uint64_t>(seeds[r]), static_cast<uint32_t>(positions[r]), static_cast<uint32_t>(stream),
                          salts ? static_cast<uint32_t>(salts[r]) : 0u};
        const Filters filters{temperature[r], top_k[r], top_p[r], min_p[r], typical_p ? typical_p[r] : 1.f};
        out[r] = choose_row(logits + r * vocabulary, vocabulary, noise, filters, scratch);
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

// out: float64 [rows], the log of the sum of exp(logit / temperature); NaN where a logit is NaN or none is finite.
extern "C" void specdec_log_sum_exp(const float *logits, int64_t rows, int64_t vocabulary, const float *temperature, double *out,
                                    int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (rows > 1)
    for (int64_t r = 0; r < rows; ++r) {
        const Row row(logits + r * vocabulary, vocabulary, scratch.maxima);
        out[r] = row.ok() ? log_sum_exp(row, temperature[r]) : NAN;
    }
}
