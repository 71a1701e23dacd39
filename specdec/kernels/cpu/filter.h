// Which tokens top_k, top_p, min_p and typical_p keep, without sorting the vocabulary. See specdec/kernels/filters.py.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "row.h"

namespace specdec {

struct Filters {
    float temperature;
    int64_t top_k;
    float top_p, min_p, typical_p;
};

// What top_k, top_p and min_p keep: the most probable tokens down to one of them, of equal logits those of lowest ids.
struct Boundary {
    float logit = -INFINITY;
    int64_t token = std::numeric_limits<int64_t>::max();

    bool keeps(int64_t x, float value) const { return value > logit || (value == logit && x <= token); }
};

struct Candidate {
    double key;  // candidates are taken by rising key, then by falling logit, then by rising id
    float logit;
    int32_t token;
    double weight;  // exp(gap), the gap being the nats from the best, at most 0
};

inline bool precedes(const Candidate &a, const Candidate &b) {
    if (a.key != b.key) return a.key < b.key;
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

constexpr double kNegligible = -40;  // gap below which a whole vocabulary weighs nothing, in float64 or against float32's 1 - top_p

typedef double Doubles __attribute__((vector_size(64)));

// exp for gaps; exactly 1 at 0, relative error below 1e-14.
inline Doubles exp_gap(Doubles x) {
    typedef int32_t Steps __attribute__((vector_size(32)));
    typedef int64_t Bits __attribute__((vector_size(64)));
    x = x < kNegligible * 2 ? Doubles{} + kNegligible * 2 : x;
    const Steps steps = __builtin_convertvector(x * 1.4426950408889634 - 0.5, Steps);
    const Doubles n = __builtin_convertvector(steps, Doubles);
    const Doubles r = x - n * 0.6931471805599453;
    Doubles sum = Doubles{} + 1.0 / 39916800;
    for (const double c : {1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
        sum = sum * r + c;
    const Bits power = (__builtin_convertvector(steps, Bits) + 1023) << 52;
    return sum * (Doubles)power;
}

// The bucket in which the mass reaches `target`; adds what lies in those before it to `mass`.
inline int bucket_at_end(const double *masses, int buckets, double target, double &mass) {
    int at = 0, last = buckets - 1;
    while (last > 0 && masses[last] == 0) --last;
    while (at < last && mass + masses[at] < target) mass += masses[at++];
    return at;
}

// The last of the smallest set whose weight reaches `target`, of which `mass` precedes `items`: by buckets of the key, then
// within the bucket at the end.
inline Candidate last_kept(std::vector<Candidate> items, double target, double mass = 0) {
    constexpr int kBuckets = 256;
    while (items.size() > kBuckets) {
        double low = INFINITY, high = -INFINITY;
        for (const auto &item : items) low = std::min(low, item.key), high = std::max(high, item.key);
        const double scale = (kBuckets - 1) / (high - low);
        if (!std::isfinite(scale)) break;  // all keys are equal
        const auto bucket = [&](const Candidate &item) { return static_cast<int>((item.key - low) * scale); };
        double masses[kBuckets] = {};
        for (const auto &item : items) masses[bucket(item)] += item.weight;
        const int at = bucket_at_end(masses, kBuckets, target, mass);
        items.erase(std::remove_if(items.begin(), items.end(), [&](const auto &item) { return bucket(item) != at; }), items.end());
    }
    if (!std::is_sorted(items.begin(), items.end(), precedes)) std::sort(items.begin(), items.end(), precedes);
    size_t kept = 0;
    while (kept + 1 < items.size() && (mass += items[kept].weight) < target) ++kept;
    return items[kept];
}

// Not inlined, so that the difference is never fused with the product that made `nats`: equal gaps must have equal keys.
__attribute__((noinline)) inline double distance(double nats, double mean) { return std::fabs(nats - mean); }

class Filter {
public:
    Filter(const Row &row, const Filters &filters, Scratch &scratch)
        : row_(row), filters_(filters), per_nat_(1.0 / filters.temperature), scratch_(scratch) {}

    Boundary boundary() {
        Boundary out;
        const bool limits_count = filters_.top_k > 0 && filters_.top_k < row_.size();
        std::vector<Candidate> most_probable;
        if (limits_count) {
            most_probable = highest(filters_.top_k);
            out = {most_probable.back().logit, most_probable.back().token};
        }
        if (filters_.top_p < 1) {
            const Candidate last = limits_count ? nucleus_of(most_probable) : nucleus();
            out = {last.logit, last.token};
        }
        return filters_.min_p > 0 ? at_least_min_p(out) : out;
    }

    // Writes the row with -inf at what lies beyond `boundary` or typical_p excludes to `out`.
    void write_masked(const Boundary &boundary, float *out) const {
        std::fill(out, out + row_.size(), -INFINITY);
        if (filters_.typical_p >= 1) {
            row_.each_from(boundary.logit, [&](int64_t x, float logit) {
                if (boundary.keeps(x, logit)) out[x] = logit;
            });
            return;
        }
        const double total = weigh(boundary);
        double mean = 0;
        row_.each_from(std::max(low_of(kNegligible), boundary.logit),
                       [&](int64_t x, float logit) { mean += scratch_.weights[x] * gap(logit); });
        mean /= total;
        const auto key = [mean](double nats) { return distance(nats, mean); };
        const Candidate last = last_of_row(boundary, static_cast<double>(filters_.typical_p) * total, key, mean);
        row_.each_from(std::max(low_of(std::max(mean - last.key, kNegligible)), boundary.logit), [&](int64_t x, float logit) {
            if (boundary.keeps(x, logit) && !precedes(last, candidate(x, logit, key, 0))) out[x] = logit;
        });
    }

private:
    double gap(float logit) const { return static_cast<double>(logit - row_.top()) * per_nat_; }

    template <typename Key>
    Candidate candidate(int64_t x, float logit, Key key, double weight) const {
        const double nats = gap(logit);
        return {key(nats), logit, static_cast<int32_t>(x), weight};
    }

    // The `count` most probable tokens, the last of them at the end.
    std::vector<Candidate> highest(int64_t count) {
        float low = -INFINITY;
        if (count <= row_.blocks()) {  // as many blocks, each with a token that is as high as this
            auto &maxima = scratch_.ordered_maxima;
            maxima = row_.maxima();
            std::nth_element(maxima.begin(), maxima.begin() + (count - 1), maxima.end(), std::greater<float>());
            low = maxima[count - 1];
        }
        std::vector<Candidate> items;
        row_.each_from(low, [&](int64_t x, float logit) { items.push_back(candidate(x, logit, std::negate<double>(), 0)); });
        std::nth_element(items.begin(), items.begin() + (count - 1), items.end(), precedes);
        items.resize(count);
        return items;
    }

    // The last token of the nucleus among some of the tokens, or among all of them.
    Candidate nucleus_of(std::vector<Candidate> &items) const {
        double total = 0;
        items.erase(std::remove_if(items.begin(), items.end(), [](const auto &item) { return -item.key < kNegligible; }), items.end());
        for (auto &item : items) total += item.weight = std::exp(-item.key);
        return last_kept(items, static_cast<double>(filters_.top_p) * total);
    }

    Candidate nucleus() const {
        const double total = weigh(Boundary{});
        return last_of_row(Boundary{}, static_cast<double>(filters_.top_p) * total, std::negate<double>(), 0);
    }

    // Puts exp(gap) of every token into scratch_.weights, 0 where `boundary` does not keep it or it weighs nothing; returns
    // the sum.
    double weigh(const Boundary &boundary) const {
        typedef float Octet __attribute__((vector_size(32)));
        auto &weights = scratch_.weights;
        weights.resize(row_.blocks() * kBlock);
        const bool all = boundary.logit == -INFINITY;
        const float low = std::max(low_of(kNegligible), boundary.logit);
        Doubles sums[2] = {};
        for (int64_t b = 0; b < row_.blocks(); ++b) {
            double *out = weights.data() + b * kBlock;
            if (row_.maxima()[b] < low) {
                std::fill(out, out + kBlock, 0.0);
                continue;
            }
            float tail[kBlock];
            const float *x = row_.block(b, tail);
            for (int i = 0; i < kBlock; i += 8) {
                Octet octet;
                __builtin_memcpy(&octet, x + i, sizeof octet);
                Doubles weight = exp_gap(__builtin_convertvector(octet - row_.top(), Doubles) * per_nat_);
                if (!all)
                    for (int lane = 0; lane < 8; ++lane)
                        if (!boundary.keeps(b * kBlock + i + lane, x[i + lane])) weight[lane] = 0;
                sums[i / 8 % 2] += weight;
                __builtin_memcpy(out + i, &weight, sizeof weight);
            }
        }
        double total = 0;
        for (int i = 0; i < 8; ++i) total += sums[0][i] + sums[1][i];
        return total;
    }

    // The last of the smallest set, by the key of the gap, whose weight reaches `target`, out of what `boundary` keeps, which
    // has been weighed. It is looked for near the gap `centre`; where too much of the row lies there, in buckets of the key of all.
    template <typename Key>
    Candidate last_of_row(const Boundary &boundary, double target, Key key, double centre) const {
        constexpr int64_t kFewBlocks = 512;
        const double *weights = scratch_.weights.data();
        const auto &maxima = row_.maxima();
        std::vector<Candidate> items;
        for (double reach = 2; reach < 10; reach *= 2) {
            const float low = std::max(low_of(centre - reach), boundary.logit);
            if (std::count_if(maxima.begin(), maxima.end(), [low](float highest) { return highest >= low; }) > kFewBlocks) break;
            items.clear();
            double mass = 0;
            row_.each_from(low, [&](int64_t x, float logit) {
                if (key(gap(logit)) > reach || !boundary.keeps(x, logit)) return;
                items.push_back(candidate(x, logit, key, weights[x]));
                mass += weights[x];
            });
            if (mass > target) return last_kept(items, target);
        }
        constexpr int kBuckets = 2048;
        const double scale = kBuckets / -kNegligible;
        const auto bucket = [&](float logit) { return std::min(static_cast<int>(key(gap(logit)) * scale), kBuckets - 1); };
        double masses[kBuckets] = {}, mass = 0;
        const float low = std::max(low_of(kNegligible), boundary.logit);
        row_.each_from(low, [&](int64_t x, float logit) { masses[bucket(logit)] += weights[x]; });
        const int at = bucket_at_end(masses, kBuckets, target, mass);
        items.clear();
        const float lowest = std::max(low, low_of(centre - (at + 1) / scale));
        row_.each_from(lowest, [&](int64_t x, float logit) {
            if (weights[x] > 0 && bucket(logit) == at) items.push_back(candidate(x, logit, key, weights[x]));
        });
        return last_kept(items, target, mass);
    }

    Boundary at_least_min_p(Boundary found) const {
        const double nats = std::log(static_cast<double>(filters_.min_p));
        float lowest = row_.top();
        row_.each_from(low_of(nats), [&](int64_t, float logit) {
            if (logit < lowest && gap(logit) >= nats) lowest = logit;
        });
        return lowest > found.logit ? Boundary{lowest} : found;
    }

    // A logit at or below every one that is no more than `nats` (negative) below the best.
    float low_of(double nats) const {
        const double low = row_.top() + nats / per_nat_;
        return static_cast<float>(low - 1e-6 * (std::fabs(low) + std::fabs(row_.top())));
    }

    const Row &row_;
    const Filters filters_;
    const double per_nat_;
    Scratch &scratch_;
};

}  // namespace specdec
