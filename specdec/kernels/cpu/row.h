// A row of logits and the maxima of its blocks, by which later passes skip most of it.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace specdec {

constexpr int64_t kBlock = 64;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

inline Floats load(const float *from) {
    Floats v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}

// Buffers that a thread reuses from row to row.
struct Scratch {
    std::vector<float> maxima;
    std::vector<float> ordered_maxima;
    std::vector<float> masked;
    std::vector<double> weights;
};

class Row {
public:
    // Scans the row. `ok()` is false where a logit is NaN or none is finite, or one is +inf.
    Row(const float *logits, int64_t size, std::vector<float> &maxima) : logits_(logits), size_(size), maxima_(maxima) {
        const int64_t blocks = (size + kBlock - 1) / kBlock;
        maxima_.resize(blocks);
        Ints nan = {};
        float top = -INFINITY;
        for (int64_t b = 0; b < blocks; ++b) {
            float tail[kBlock];
            const float *x = block(b, tail);
            const Floats a0 = load(x), a1 = load(x + 16), a2 = load(x + 32), a3 = load(x + 48);
            nan |= (a0 != a0) | (a1 != a1) | (a2 != a2) | (a3 != a3);
            const Floats m0 = a0 > a1 ? a0 : a1, m1 = a2 > a3 ? a2 : a3, m = m0 > m1 ? m0 : m1;
            float highest = m[0];
            for (int i = 1; i < 16; ++i) highest = m[i] > highest ? m[i] : highest;
            maxima_[b] = highest;
            top = highest > top ? highest : top;
        }
        bool bad = !std::isfinite(top);
        for (int i = 0; i < 16; ++i) bad |= nan[i] != 0;
        if (bad) return;
        top_ = top;
        int64_t b = 0;
        while (maxima_[b] != top) ++b;
        mode_ = b * kBlock;
        while (logits_[mode_] != top) ++mode_;
    }

    bool ok() const { return mode_ >= 0; }
    float top() const { return top_; }
    int64_t mode() const { return mode_; }  // lowest id of the highest logit
    int64_t size() const { return size_; }
    int64_t blocks() const { return static_cast<int64_t>(maxima_.size()); }
    float operator[](int64_t token) const { return logits_[token]; }
    const float *logits() const { return logits_; }
    const std::vector<float> &maxima() const { return maxima_; }

    // The kBlock logits of a block; past the end of the row -inf, for which `tail` is used.
    const float *block(int64_t b, float *tail) const {
        const int64_t start = b * kBlock;
        if (start + kBlock <= size_) return logits_ + start;
        std::fill(std::copy(logits_ + start, logits_ + size_, tail), tail + kBlock, -INFINITY);
        return tail;
    }

    // Calls take(token, logit) for every token whose logit is at least `low`, by rising id.
    template <typename Take>
    void each_from(float low, Take take) const {
        for (int64_t b = 0; b < blocks(); ++b) {
            if (maxima_[b] < low) continue;
            const int64_t end = std::min(size_, (b + 1) * kBlock);
            for (int64_t x = b * kBlock; x < end; ++x)
                if (logits_[x] >= low) take(x, logits_[x]);
        }
    }

private:
    const float *logits_;
    int64_t size_;
    std::vector<float> &maxima_;
    float top_ = -INFINITY;
    int64_t mode_ = -1;
};

}  // namespace specdec
