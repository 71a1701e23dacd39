// The coupled rule over the drafts of a step: chooses at the roots and at the nodes that can still be reached, then walks.
// The reference is specdec/kernels/step_reference.py: walk.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "choice.h"

namespace {

using namespace specdec;

constexpr int64_t kOpen = -2;     // not chosen yet
constexpr int64_t kRefuted = -3;  // cannot be reached: nothing is chosen there

thread_local Scratch scratch;

// One place at which a token may be chosen: node `node` of a request, -1 for its root.
struct Place {
    int32_t request, node;
};

}  // namespace

// Nodes are taken in order, those of all requests side by side and roots first, by whichever thread is free. One whose parent
// chose another token is passed over, so a request costs about its accepted path and not its tree; one whose parent is still
// being chosen is chosen ahead, since the thread would be idle otherwise.
//
// logits: float32 [*, vocabulary]; starts: int64 [requests], logit row of each root, those of its nodes follow it; tokens,
// parents: int32 [nodes of all]; offsets: int64 [requests + 1], first node of each; seeds, positions (of the token chosen at the
// root), top_k: int64 [requests]; temperature, top_p, min_p: float32 [requests]; typical_p: float32 [requests], or null for 1;
// deepest: columns of nodes; nodes: int32 [requests, deepest], filled with -1 by the caller; counts, next_tokens: int32 [requests].
extern "C" void specdec_walk(const float *logits, int64_t vocabulary, int64_t requests, const int64_t *starts, const int32_t *tokens,
                             const int32_t *parents, const int64_t *offsets, const int64_t *seeds, const int64_t *positions,
                             const float *temperature, const int64_t *top_k, const float *top_p, const float *min_p,
                             const float *typical_p, int64_t deepest, int32_t *nodes, int32_t *counts, int32_t *next_tokens,
                             int threads) {
    const int64_t total = offsets[requests] + requests;
    std::vector<std::atomic<int64_t>> chosen(total);  // request r: its root at offsets[r] + r, then its nodes
    std::vector<int32_t> depths(total, 0);
    std::vector<Place> places;
    places.reserve(total);
    int64_t widest = 0;
    for (int64_t r = 0; r < requests; ++r) {
        const int64_t root = offsets[r] + r, size = offsets[r + 1] - offsets[r];
        widest = std::max(widest, size);
        for (int64_t i = 0; i <= size; ++i) chosen[root + i].store(kOpen, std::memory_order_relaxed);
        for (int64_t i = 0; i < size; ++i) depths[root + 1 + i] = depths[root + 1 + parents[offsets[r] + i]] + 1;
    }
    for (int64_t i = -1; i < widest; ++i)
        for (int64_t r = 0; r < requests; ++r)
            if (i < offsets[r + 1] - offsets[r]) places.push_back({static_cast<int32_t>(r), static_cast<int32_t>(i)});

    std::atomic<int64_t> next{0};
    const int crew = static_cast<int>(std::min<int64_t>(threads, total));
#pragma omp parallel num_threads(crew) if (crew > 1)
    for (int64_t taken; (taken = next.fetch_add(1, std::memory_order_relaxed)) < total;) {
        const auto [r, node] = places[taken];
        const int64_t at = offsets[r] + r + 1 + node;
        if (node >= 0) {
            const int64_t above = chosen[offsets[r] + r + 1 + parents[offsets[r] + node]].load(std::memory_order_relaxed);
            if (above != kOpen && above != tokens[offsets[r] + node]) {
                chosen[at].store(kRefuted, std::memory_order_relaxed);
                continue;
            }
        }
        const Noise noise{static_cast<uint64_t>(seeds[r]), static_cast<uint32_t>(positions[r] + depths[at]), 0u, 0u};
        const Filters filters{temperature[r], top_k[r], top_p[r], min_p[r], typical_p ? typical_p[r] : 1.f};
        const float *row = logits + (starts[r] + 1 + node) * vocabulary;
        chosen[at].store(choose_row(row, vocabulary, noise, filters, scratch), std::memory_order_relaxed);
    }

    for (int64_t r = 0; r < requests; ++r) {
        const int64_t root = offsets[r] + r, size = offsets[r + 1] - offsets[r];
        int64_t token = chosen[root];
        int32_t last = -1, count = 0;
        for (int32_t i = 0; i < size; ++i)  // children come after their parent, and of equal ones the first counts
            if (parents[offsets[r] + i] == last && tokens[offsets[r] + i] == token) {
                nodes[r * deepest + count++] = last = i;
                token = chosen[root + 1 + i];
            }
        counts[r] = count;
        next_tokens[r] = static_cast<int32_t>(token);
    }
}
