// What is drafted and what is verified: the prefix of the sorted chances that brings the most tokens per second.
// The references are choose_plainly in scheduler/ask.py and in scheduler/node_choice.py, which say what and why.
#include <algorithm>
#include <cstring>
#include <vector>

#include "budget.h"

namespace {

using budget::Outlook;
using budget::Reader;

struct Level {
    double order, chance, width;
    int32_t row, level;
};

struct Option {
    uint64_t drafters;  // bit per drafter
    const double *odds, *widths;
};

struct Asking {
    int64_t option, limit;
    double shift, fee_s;
};

struct Drafter {
    double once_s, row_s, level_s, both_s;
    int64_t rows, deepest;

    double seconds() const { return rows ? once_s + row_s * rows + (level_s + both_s * rows) * deepest : 0.0; }
};

// The levels of one row that may be worth their place; returns how many were weighed.
int32_t add_levels(const Asking &row, int32_t index, const Option &option, const Outlook &outlook, double least_width,
                   std::vector<Level> &levels) {
    const double factor = std::exp(-row.shift);
    const size_t first = levels.size();
    double rate = 1.0, total = 0.0;
    for (int64_t level = 0; level < row.limit; ++level) {
        rate /= 1 + std::exp(-option.odds[level]) * factor;
        if (rate < outlook.least_chance && level > 0) break;
        const double width = std::fmax(option.widths[level], least_width);
        const double chance = rate * std::fmin(width, 1.0);
        total += chance;
        levels.push_back({0.0, chance, width, index, static_cast<int32_t>(level + 1)});
        if (rate < outlook.least_chance) break;
    }
    const int32_t weighed = static_cast<int32_t>(levels.size() - first);
    const double worth = total > 0 ? std::fmax(0.0, 1 - row.fee_s * outlook.goodput_off / total) : 0.0;
    double order = INFINITY;
    for (size_t place = first; place < levels.size(); ++place) {
        order = std::fmin(order, levels[place].chance / levels[place].width * worth);
        levels[place].order = order;
        if (order <= 0) {
            levels.resize(place);
            break;
        }
    }
    return weighed;
}

struct Best {
    double goodput;
    int64_t cap = 0, place = -1;
};

// Looks at every prefix of the levels up to a cap; whether one of them is better than the best so far.
void weigh(int64_t cap, const std::vector<Level> &levels, const std::vector<Asking> &rows, const std::vector<Option> &options,
           std::vector<Drafter> drafters, const Outlook &outlook, double cap_s, Best &best) {
    budget::NodeSeconds node_s(outlook);
    double gains = 0.0, count = 0.0, fees_s = 0.0, draft_s = 0.0;
    for (size_t place = 0; place < levels.size(); ++place) {
        const Level &own = levels[place];
        if (own.level > cap) continue;
        gains += own.chance;
        count += own.width;
        bool moved = own.level == 1;
        if (moved) fees_s += rows[own.row].fee_s;
        for (uint64_t left = options[rows[own.row].option].drafters; left; left &= left - 1) {
            Drafter &drafter = drafters[__builtin_ctzll(left)];
            drafter.rows += own.level == 1;
            if (own.level > drafter.deepest) {
                drafter.deepest = own.level;
                moved = true;
            }
        }
        if (moved) {
            draft_s = 0.0;
            for (const Drafter &drafter : drafters) draft_s += drafter.seconds();
        }
        const double seconds = node_s(count) + fees_s + draft_s;
        const double goodput = (outlook.emitting + gains) / (outlook.base_s + seconds);
        if (goodput > best.goodput && outlook.full_s + seconds <= cap_s) best = {goodput, cap, static_cast<int64_t>(place)};
    }
}

}  // namespace

// numbers: cap_s, least_width, Outlook; caps; drafters: 4 coefficients each; levels, options: drafters, odds, widths;
//          rows: option, limit, shift, fee_s.  depths: int64 [rows].  Returns the goodput.
extern "C" double specdec_choose_depths(const double *numbers, int64_t *depths) {
    Reader from{numbers};
    const double cap_s = from.next(), least_width = from.next();
    const Outlook outlook(from);
    const int64_t num_caps = from.count();
    const double *const all_caps = from.take(num_caps);
    std::vector<Drafter> drafters(from.count());
    for (Drafter &drafter : drafters) {
        const double *const own = from.take(4);
        drafter = {own[0], own[1], own[2], own[3], 0, 0};
    }
    const int64_t tables = from.count();
    std::vector<Option> options(from.count());
    for (Option &option : options) {
        option.drafters = static_cast<uint64_t>(from.next());
        option.odds = from.take(tables);
        option.widths = from.take(tables);
    }
    std::vector<Asking> rows(from.count());
    std::vector<Level> levels;
    int64_t most = 0;
    for (size_t index = 0; index < rows.size(); ++index) {
        Asking &row = rows[index];
        row.option = from.count();
        row.limit = from.count();
        row.shift = from.next();
        row.fee_s = from.next();
        depths[index] = 0;
        if (row.limit > 0) {
            most = std::max<int64_t>(most, add_levels(row, static_cast<int32_t>(index), options[row.option], outlook, least_width, levels));
        }
    }
    // equal ones by row and level, so that a prefix is closed
    std::stable_sort(levels.begin(), levels.end(), [](const Level &a, const Level &b) { return a.order > b.order; });
    Best best{outlook.goodput_off};
    weigh(most, levels, rows, options, drafters, outlook, cap_s, best);
    int64_t deepest = 0;
    for (int64_t place = 0; place <= best.place; ++place) deepest = std::max<int64_t>(deepest, levels[place].level);
    if (rows.size() > 1) {  // the prefixes of one row's draft are all its depths
        for (int64_t cap = num_caps; cap-- > 0;) {
            if (all_caps[cap] < most && all_caps[cap] < deepest) {
                weigh(static_cast<int64_t>(all_caps[cap]), levels, rows, options, drafters, outlook, cap_s, best);
            }
        }
    }
    for (int64_t place = 0; place <= best.place; ++place) {
        if (levels[place].level <= best.cap) depths[levels[place].row] = levels[place].level;
    }
    return best.goodput;
}

// numbers: cap_s, Outlook; options: odds [64], calibration x [16] and y [16], ranks [8];
//          rows: option, nodes, draft_limit, depth_limit, shift, whether it has confidences.
// parents: int32 [n], nodes of all rows; confidence: float32, of the rows that have some; keep: bool [n]; counts: int64 [rows].
extern "C" void specdec_choose_nodes(const double *numbers, const int32_t *parents, const float *confidence, uint8_t *keep,
                                     int64_t *counts) {
    struct Node {
        double chance;
        int64_t place, row;
    };
    constexpr int64_t kOption = budget::kLevels + 2 * budget::kBins + budget::kRanks;
    Reader from{numbers};
    const double cap_s = from.next();
    const Outlook outlook(from);
    const double *const options = from.take(kOption * from.count());
    const int64_t rows = from.count();
    std::vector<Node> nodes;
    std::vector<double> chances;
    std::vector<int32_t> depths, children, elder;
    int64_t start = 0;
    for (int64_t row = 0; row < rows; ++row) {
        const double *const odds = options + kOption * from.count(), *const x = odds + budget::kLevels, *const y = x + budget::kBins;
        const double *const ranks = y + budget::kBins;
        const int64_t size = from.count(), draft_limit = from.count(), depth_limit = from.count();
        const double factor = std::exp(-from.next());
        const bool told = from.next() != 0;
        const int32_t *const own = parents + start;
        const bool has_siblings = !told && !budget::is_chain(own, size);
        chances.assign(size + 1, 0.0);  // the first stands for the root
        chances[0] = 1.0;
        depths.assign(size + 1, 0);
        if (has_siblings) {
            children.assign(size + 1, 0);
            elder.assign(size + 1, 0);
            for (int64_t node = 0; node < size; ++node) ++children[own[node] + 1];
        }
        for (int64_t node = 0; node < std::min(size, draft_limit); ++node) {
            const int32_t above = own[node] + 1, depth = depths[node + 1] = depths[above] + 1;
            // what is below a node that is in no best set is in none either
            if (depth > depth_limit || chances[above] <= outlook.least_chance) continue;
            double rate;
            if (told) {
                rate = 1 / (1 + (1 / budget::clamped(budget::calibrated(x, y, confidence[node])) - 1) * factor);
            } else {
                rate = 1 / (1 + std::exp(-odds[std::min(depth, budget::kLevels) - 1]) * factor);
            }
            if (has_siblings) {
                const int among = std::min(children[above], budget::kRanks), rank = std::min(elder[above]++, budget::kRanks - 1);
                double falling = ranks[0], total = ranks[0], share = ranks[0];
                for (int place = 1; place < among; ++place) {
                    falling = std::fmin(falling, ranks[place]);
                    total += falling;
                    if (place <= rank) share = falling;
                }
                rate *= share / total;
            }
            chances[node + 1] = chances[above] * rate;
            if (chances[node + 1] > outlook.least_chance) nodes.push_back({chances[node + 1], start + node, row});
        }
        counts[row] = 0;
        start += size;
        if (told) confidence += size;
    }
    // of equal ones those that come first, so that parents stay
    std::stable_sort(nodes.begin(), nodes.end(), [](const Node &a, const Node &b) { return a.chance > b.chance; });
    budget::NodeSeconds node_s(outlook);
    double gains = 0.0, best_goodput = outlook.goodput_off;
    size_t best = 0;
    for (size_t count = 1; count <= nodes.size(); ++count) {
        gains += nodes[count - 1].chance;
        const double seconds = node_s(static_cast<double>(count));
        if (outlook.full_s + seconds > cap_s) break;
        const double goodput = (outlook.emitting + gains) / (outlook.base_s + seconds);
        if (goodput > best_goodput) {
            best_goodput = goodput;
            best = count;
        }
    }
    std::memset(keep, 0, start);
    for (size_t place = 0; place < best; ++place) {
        keep[nodes[place].place] = 1;
        ++counts[nodes[place].row];
    }
}
