// What a drafter's drafts teach: how many nodes it proposes, and how many of them are accepted, by level, confidence and request.
// The references are in scheduler/acceptance.py, request_rates.py and calibration.py, which say what and why.
#include <algorithm>
#include <vector>

#include "budget.h"

namespace {

using budget::kBins;
using budget::kLevels;
using budget::kRanks;

// Levels and widths.

constexpr double kKeepWidth = 0.93, kMemory = 300.0, kKeepUntried = 0.998, kRankMemory = 33.0;
constexpr double kFirstRate = 0.6, kFirstPrior = 2.0, kLevelPrior = 10.0;

double log_odds(double rate) {
    const double inside = budget::clamped(rate);
    return std::log(inside / (1 - inside));
}

bool follow(double *widths, const int64_t *counts, const int64_t *asked, int64_t levels) {
    bool moved = false;
    for (int64_t level = 0; level < levels; ++level) {
        const double rows = static_cast<double>(asked[level]), count = static_cast<double>(counts[level]);
        if (rows > 0 && count != rows * widths[level]) {
            moved = true;
            widths[level] += (1 - std::pow(kKeepWidth, std::fmin(rows, 4.0))) * (count / rows - widths[level]);
        }
    }
    return moved;
}

// Requests.

constexpr int kViews = 3;
constexpr double kDeviation[kViews] = {0.0, 1.0, 2.5}, kKeepStep[kViews] = {1.0, 0.995, 0.97};
constexpr double kKeepShared = 0.998, kKeepOwn = 0.9, kLeastShare = 0.005, kMostMove = 2.0, kLeastLikelihood = 1e-40;
constexpr int64_t kIdleSteps = 8;

struct Evidence {
    double step, shifts[kViews], spreads[kViews], losses[kViews], shift;

    void pass_steps(int64_t count) {
        for (int view = 1; view < kViews; ++view) {
            const double keep = std::pow(kKeepStep[view], static_cast<double>(count));
            shifts[view] *= keep;
            spreads[view] = keep * keep * spreads[view] + (1 - keep * keep) * kDeviation[view] * kDeviation[view];
        }
        if (count > 1) {
            for (double &loss : losses) loss *= std::pow(kKeepOwn, static_cast<double>(count - 1));
        }
    }
};

void shares(const double *losses, double *shares) {
    const double least = *std::min_element(losses, losses + kViews);
    double total = 0.0;
    for (int view = 0; view < kViews; ++view) total += shares[view] = std::exp(least - losses[view]);
    for (int view = 0; view < kViews; ++view) shares[view] /= total;
}

// shared: losses [3] and log shares [3] of the views over all requests.
void observe(Evidence &own, int64_t step, const std::vector<double> &odds, const std::vector<uint8_t> &accepted, double *shared) {
    if (own.step >= 0) {
        const int64_t idle = step - static_cast<int64_t>(own.step);
        if (idle >= kIdleSteps) own.pass_steps(idle / kIdleSteps);
        own.pass_steps(1);
    }
    own.step = static_cast<double>(step);
    double losses[kViews], part[kViews];
    for (int view = 0; view < kViews; ++view) {
        double shift = own.shifts[view], spread = own.spreads[view], likelihood = 1.0;
        for (size_t node = 0; node < odds.size(); ++node) {
            const double rate = 1 / (1 + std::exp(-odds[node] - shift)), was = accepted[node];
            likelihood *= accepted[node] ? rate : 1 - rate;
            if (spread > 0) {
                spread /= 1 + spread * rate * (1 - rate);
                shift += std::clamp(spread * (was - rate), -kMostMove, kMostMove);
            }
        }
        own.shifts[view] = shift;
        own.spreads[view] = spread;
        losses[view] = -std::log(std::fmax(likelihood, kLeastLikelihood));
    }
    const double least = *std::min_element(losses, losses + kViews);
    for (int view = 0; view < kViews; ++view) {
        shared[view] = kKeepShared * shared[view] + losses[view] - least;
        own.losses[view] = kKeepOwn * own.losses[view] + losses[view] - least;
    }
    shares(shared, part);
    for (int view = 0; view < kViews; ++view) {
        shared[kViews + view] = std::log(part[view] + kLeastShare);
        losses[view] = own.losses[view] - shared[kViews + view];
    }
    shares(losses, part);
    own.shift = 0.0;
    for (int view = 0; view < kViews; ++view) own.shift += part[view] * own.shifts[view];
}

// Confidences. calibration: weight, stated, accepted, x, y, [16] each.

constexpr double kPrior = 4.0, kCalibrationMemory = 2000.0;

void smooth(const double *values, double *smoothed) {
    for (int bin = 0; bin < kBins; ++bin) {
        const double left = bin ? values[bin - 1] : 0.0, right = bin + 1 < kBins ? values[bin + 1] : 0.0;
        smoothed[bin] = 0.25 * left + 0.5 * values[bin] + 0.25 * right;
    }
}

void calibrate(double *calibration, const std::vector<double> &stated, const std::vector<uint8_t> &accepted) {
    double *const weight = calibration, *const sums = weight + kBins, *const hits = sums + kBins;
    double *const x = hits + kBins, *const y = x + kBins;
    const double keep = std::exp(-static_cast<double>(stated.size()) / kCalibrationMemory);
    for (int bin = 0; bin < kBins; ++bin) {
        const double center = kPrior * (bin + 0.5) / kBins;
        weight[bin] = kPrior + keep * (weight[bin] - kPrior);
        sums[bin] = center + keep * (sums[bin] - center);
        hits[bin] = center + keep * (hits[bin] - center);
    }
    for (size_t node = 0; node < stated.size(); ++node) {
        const int bin = std::min(static_cast<int>(stated[node] * kBins), kBins - 1);
        weight[bin] += 1;
        sums[bin] += stated[node];
        hits[bin] += accepted[node];
    }
    double weights[kBins], rate = 0.0;
    smooth(weight, weights);
    smooth(sums, x);
    smooth(hits, y);
    for (int bin = 0; bin < kBins; ++bin) {
        x[bin] /= weights[bin];
        y[bin] = rate = bin ? std::fmax(rate, y[bin] / weights[bin]) : y[bin] / weights[bin];
    }
}

// What one draft tells, see `Verified` in scheduler/acceptance.py.
struct Verified {
    int64_t hits, trials;
    std::vector<int32_t> reached;
    std::vector<uint8_t> accepted;
    std::vector<int> ranks;

    void read(const int32_t *parents, int64_t size, const int32_t *path, int64_t length, bool ended, bool told) {
        hits = std::min<int64_t>(length, kLevels);
        const bool goes_on = !ended && hits < kLevels;
        reached.clear();
        accepted.clear();
        ranks.clear();
        if (budget::is_chain(parents, size)) {
            trials = hits + (goes_on && hits < size);
            for (int64_t level = 0; level < trials; ++level) {
                reached.push_back(static_cast<int32_t>(level));
                accepted.push_back(level < hits);
            }
            return;
        }
        const int32_t last = length ? path[length - 1] : -1;
        const bool missed = goes_on && std::find(parents + last + 1, parents + size, last) != parents + size;
        trials = hits + missed;
        for (int64_t step = 0; step < length; ++step) {
            const int32_t parent = parents[path[step]];
            ranks.push_back(std::min<int>(static_cast<int>(std::count(parents, parents + path[step], parent)), kRanks - 1));
        }
        if (!told) {
            for (int64_t level = 0; level < trials; ++level) accepted.push_back(level < hits);
            return;
        }
        // children of accepted nodes: those of the last only where it goes on and has some
        if (!missed && length == 0) return;
        const int32_t *const known = path + (missed ? length : length - 1);
        for (int32_t node = 0; node < size; ++node) {
            if (parents[node] >= 0 && std::find(path, known, parents[node]) == known) continue;
            reached.push_back(node);
            accepted.push_back(std::find(path, path + length, node) != path + length);
        }
    }
};

}  // namespace

// widths, verified: [64], of a drafter's nodes per level; rows: int64 [count, 2], nodes and levels asked for;
// parents: int32 [n]; keep: bool [n]. Returns whether `widths` moved.
extern "C" int specdec_follow_widths(double *widths, double *verified, int64_t count, const int64_t *rows, const int32_t *parents,
                                     const uint8_t *keep) {
    int64_t asked[kLevels] = {}, proposed[kLevels] = {}, kept[kLevels] = {}, levels = 0;
    for (int64_t row = 0; row < count; ++row) levels = std::max(levels, rows[2 * row + 1]);
    std::vector<int32_t> depths;
    for (int64_t row = 0; row < count; ++row) {
        const int64_t size = rows[2 * row];
        for (int64_t level = 0; level < rows[2 * row + 1]; ++level) ++asked[level];
        depths.assign(size + 1, 0);
        for (int64_t node = 0; node < size; ++node) {
            const int64_t level = depths[node + 1] = depths[parents[node] + 1] + 1;
            if (level > levels) continue;  // deeper than anything that was asked for
            ++proposed[level - 1];
            kept[level - 1] += keep[node];
        }
        parents += size;
        keep += size;
    }
    follow(verified, kept, asked, levels);
    return follow(widths, proposed, asked, levels);
}

// rows: int64 [count, 5]: nodes, accepted ones, whether the request ended, whether there are confidences, place of its evidence.
// parents: int32 [n]; confidence: float32, of rows that have some; paths: int32, of all rows. levels: hits, trials, log odds, [64]
// each; tried: levels tried before. Returns how many levels were tried in this step.
extern "C" int64_t specdec_learn_drafts(int64_t count, const int64_t *rows, const int32_t *parents, const float *confidence,
                                        const int32_t *paths, int64_t step, double *evidence, double *shared, double *levels,
                                        int64_t tried, double *calibration, double *ranks) {
    double *const hits = levels, *const trials = hits + kLevels, *const odds = trials + kLevels;
    const double *const x = calibration + 3 * kBins, *const y = x + kBins;
    int64_t hit[kLevels + 1] = {}, decided[kLevels + 1] = {}, deepest = 0;
    std::vector<double> own_odds, stated;
    std::vector<uint8_t> accepted;
    std::vector<int> seen_ranks;
    Verified seen;
    for (int64_t row = 0; row < count; ++row) {
        const int64_t size = rows[5 * row], length = rows[5 * row + 1];
        const bool told = rows[5 * row + 3] != 0;
        seen.read(parents, size, paths, length, rows[5 * row + 2] != 0, told);
        deepest = std::max(deepest, seen.hits);
        for (int64_t level = 0; level < seen.hits; ++level) ++hit[level];
        for (int64_t level = 0; level < seen.trials; ++level) ++decided[level];
        own_odds.clear();
        if (told) {
            for (const int32_t node : seen.reached) {
                own_odds.push_back(log_odds(budget::calibrated(x, y, confidence[node])));
                stated.push_back(confidence[node]);
            }
            accepted.insert(accepted.end(), seen.accepted.begin(), seen.accepted.end());
            confidence += size;
        } else {
            own_odds.assign(odds, odds + seen.trials);
        }
        observe(*reinterpret_cast<Evidence *>(evidence + rows[5 * row + 4]), step, own_odds, seen.accepted, shared);
        seen_ranks.insert(seen_ranks.end(), seen.ranks.begin(), seen.ranks.end());
        parents += size;
        paths += length;
    }
    if (!stated.empty()) calibrate(calibration, stated, accepted);
    const int64_t now = std::min<int64_t>(deepest + 1, kLevels);
    for (int64_t level = 0; level < std::max(now, tried); ++level) {
        const double count_now = level < now ? static_cast<double>(decided[level]) : 0.0;
        const double keep = count_now > 0 ? std::exp(-count_now / kMemory) : kKeepUntried;
        hits[level] = keep * hits[level] + (level < now ? static_cast<double>(hit[level]) : 0.0);
        trials[level] = keep * trials[level] + count_now;
    }
    double rate = kFirstRate, weight = kFirstPrior;
    for (int level = 0; level < kLevels; ++level) {
        rate = (hits[level] + weight * rate) / (trials[level] + weight);
        weight = kLevelPrior;
        odds[level] = log_odds(rate);
    }
    if (!seen_ranks.empty()) {
        const double keep = std::exp(-static_cast<double>(seen_ranks.size()) / kRankMemory);
        for (int rank = 0; rank < kRanks; ++rank) ranks[rank] *= keep;
        for (const int rank : seen_ranks) ranks[rank] += 1;
    }
    return now;
}
