// What the draft budget's kernels share: how numbers come in, and what a step's drafts are weighed with.
#pragma once
#include <cmath>
#include <cstdint>

namespace budget {

constexpr int kLevels = 64;  // told apart, as in scheduler/acceptance.py
constexpr int kRanks = 8;
constexpr int kBins = 16;         // of a calibration
constexpr double kEdge = 0.002;   // rates stay this far from 0 and 1

// Numbers in the order in which they were packed.
struct Reader {
    const double *at;

    double next() { return *at++; }
    int64_t count() { return static_cast<int64_t>(*at++); }
    const double *take(int64_t size) {
        const double *const taken = at;
        at += size;
        return taken;
    }
};

// A step's seconds and tokens as nodes are added to it: scheduler/outlook.py.
struct Outlook {
    double emitting, base_s, full_s, goodput_off, least_chance, row_s, tokens, verify_s, slope;
    int64_t size;
    const double *sizes, *seconds;  // of the target's forward

    explicit Outlook(Reader &from)
        : emitting(from.next()), base_s(from.next()), full_s(from.next()), goodput_off(from.next()), least_chance(from.next()),
          row_s(from.next()), tokens(from.next()), verify_s(from.next()), slope(from.next()), size(from.count()),
          sizes(from.take(size)), seconds(from.take(size)) {}
};

// Seconds that nodes add, asked for ascending counts.
class NodeSeconds {
public:
    explicit NodeSeconds(const Outlook &outlook) : outlook_(outlook) {}

    double operator()(double count) {
        const double tokens = outlook_.tokens + count;
        while (place_ < outlook_.size && outlook_.sizes[place_] < tokens) ++place_;
        return forward_s(tokens) - outlook_.verify_s + outlook_.row_s * count;
    }

private:
    double forward_s(double tokens) const {
        const double *const sizes = outlook_.sizes, *const seconds = outlook_.seconds;
        if (place_ == outlook_.size) return seconds[place_ - 1] + outlook_.slope * (tokens - sizes[place_ - 1]);
        if (place_ == 0) return seconds[0];
        const double part = (tokens - sizes[place_ - 1]) / (sizes[place_] - sizes[place_ - 1]);
        return seconds[place_ - 1] + (seconds[place_] - seconds[place_ - 1]) * part;
    }

    const Outlook &outlook_;
    int64_t place_ = 0;  // of the first size that is not smaller
};

inline double clamped(double rate) { return std::fmin(std::fmax(rate, kEdge), 1 - kEdge); }

// A calibrated rate: linear between the means of the bins.
inline double calibrated(const double *x, const double *y, double stated) {
    int place = 0;
    while (place < kBins && x[place] <= stated) ++place;
    if (place == 0) return y[0];
    if (place == kBins) return y[kBins - 1];
    return y[place - 1] + (y[place] - y[place - 1]) * (stated - x[place - 1]) / (x[place] - x[place - 1]);
}

inline bool is_chain(const int32_t *parents, int64_t size) {
    for (int64_t node = 0; node < size; ++node) {
        if (parents[node] != node - 1) return false;
    }
    return true;
}

}  // namespace budget
