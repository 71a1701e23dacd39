// Row choice of the coupled rule: argmax over x of logit(x) / T + G(seed, position, x), in one pass over each row.
// Philox-4x32-10 (Salmon et al. 2011): key = seed, counter = (x / 4, position, stream, 0), lane x % 4.
// G <= 33 ln 2 and G >= -ln(24 ln 2), so a token more than their distance below the best can't win and draws no noise.
#include <cmath>
#include <cstdint>

namespace {

constexpr float kMargin = 26.f;  // 33 ln 2 + ln(24 ln 2) = 25.69, and room for rounding

struct Words { uint32_t lane[4]; };

inline Words philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2) {
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32), c3 = 0;
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c0, b = static_cast<uint64_t>(0xCD9E8D57u) * c2;
        c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(b);
        c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// u is uniform in (0, 1), never 0 or 1 in float32 and finest near 0, where E = -log(1 - u) is small and can win.
inline float gumbel(uint32_t word) {
    float u = (static_cast<float>(word) + 0.5f) * 2.3283064365386963e-10f;
    u = u > 0.99999994f ? 0.99999994f : u;
    return -std::log(-std::log1p(-u));
}

int64_t greedy(const float *logits, int64_t vocabulary) {
    int64_t best = -1;
    float top = -INFINITY;
    for (int64_t x = 0; x < vocabulary; ++x) {
        if (std::isnan(logits[x])) return -1;
        if (logits[x] > top) top = logits[x], best = x;
    }
    return best;
}

int64_t sampled(const float *logits, int64_t vocabulary, uint64_t seed, uint32_t position, uint32_t stream, float temperature) {
    const int64_t mode = greedy(logits, vocabulary);
    if (mode < 0 || std::isinf(logits[mode])) return -1;
    const float top = logits[mode], floor = top - kMargin * temperature;
    int64_t best = -1;
    float best_score = -INFINITY;
    for (int64_t group = 0; group < vocabulary; group += 4) {
        const int64_t end = group + 4 < vocabulary ? group + 4 : vocabulary;
        bool any = false;
        for (int64_t x = group; x < end; ++x) any |= logits[x] >= floor;
        if (!any) continue;
        const Words words = philox(seed, static_cast<uint32_t>(group / 4), position, stream);
        for (int64_t x = group; x < end; ++x) {
            if (!(logits[x] >= floor)) continue;
            const float score = (logits[x] - top) / temperature + gumbel(words.lane[x - group]);
            if (score > best_score) best_score = score, best = x;
        }
    }
    return best;
}

}  // namespace

// logits: float32 [rows, vocabulary]; out: int64 [rows], -1 where a logit is NaN or none is finite.
extern "C" void specdec_choose(const float *logits, int64_t rows, int64_t vocabulary, const int64_t *seeds,
                               const int64_t *positions, const float *temperature, int stream, int64_t *out, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) {
        const float *row_logits = logits + row * vocabulary;
        out[row] = temperature[row] == 0.f
                       ? greedy(row_logits, vocabulary)
                       : sampled(row_logits, vocabulary, static_cast<uint64_t>(seeds[row]),
                                 static_cast<uint32_t>(positions[row]), static_cast<uint32_t>(stream), temperature[row]);
    }
}
