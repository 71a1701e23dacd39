// Prompt lookup: where the n-grams of a growing text ended last and before that, and the tree of what followed them.
// The reference is specdec/drafters/ngram_reference.py, which says what and why; this file does the same, faster.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace {

constexpr int kCandidates = 16;
constexpr int kMostLength = 32 + 256;  // of a match, and what a path adds to it
constexpr double kWorth = 0.01;

// An earlier occurrence of the text's end: how much of it agrees, and what followed.
struct Match {
    int32_t end, length;
};

struct Candidate {
    double reach, chance;
    int32_t depth, parent, token;
    uint32_t voters;  // bit per match that foretells it
    int32_t order;
};

// Whether `a` is grown after `b`: the less likely to be reached, of equal ones the later.
bool after(const Candidate &a, const Candidate &b) { return a.reach != b.reach ? a.reach < b.reach : a.order > b.order; }

const std::vector<double> &weights() {
    static const std::vector<double> table = [] {
        std::vector<double> odds(kMostLength + 1);
        for (int length = 0; length <= kMostLength; ++length) odds[length] = 0.3 * std::pow(static_cast<double>(length), 1.2);
        return odds;
    }();
    return table;
}

class Index {
public:
    Index(int shortest, int longest) : longest_(longest) {
        const int longer = std::min(longest, std::max(4, shortest));
        if (longer > shortest) grams_.emplace_back(longer);
        grams_.emplace_back(shortest);
    }

    void extend(const int32_t *tokens, int64_t count) {
        text_.insert(text_.end(), tokens, tokens + count);
        for (Grams &grams : grams_) grams.extend(text_);
    }

    // Grows a tree of at most `most` nodes, `deepest` deep, into the arrays; returns its size.
    int64_t grow(int64_t most, int32_t deepest, int32_t *tokens, int32_t *parents, float *confidence) {
        find_matches();
        heap_.clear();
        order_ = 0;
        int64_t size = 0;
        push_children(-1, 0, 1.0, (1u << matches_.size()) - 1, deepest);
        while (!heap_.empty() && size < most) {
            std::pop_heap(heap_.begin(), heap_.end(), after);
            const Candidate node = heap_.back();
            heap_.pop_back();
            tokens[size] = node.token;
            parents[size] = node.parent;
            confidence[size] = static_cast<float>(node.chance);
            if (node.depth < deepest) push_children(static_cast<int32_t>(size), node.depth, node.reach, node.voters, deepest);
            ++size;
        }
        return size;
    }

private:
    struct Grams {
        explicit Grams(int n) : size(n) {}

        void extend(const std::vector<int32_t> &text) {
            for (int32_t end = static_cast<int32_t>(previous.size()); end <= static_cast<int32_t>(text.size()); ++end) {
                if (end < size) {
                    previous.push_back(0);
                    continue;
                }
                uint64_t hash = 0;
                for (int32_t i = end - size; i < end; ++i) {
                    hash = (hash ^ static_cast<uint32_t>(text[i])) * 0x9E3779B97F4A7C15u;
                    hash ^= hash >> 29;
                }
                int32_t &last_end = last[hash];
                previous.push_back(last_end);
                last_end = end;
            }
        }

        int32_t size;
        std::unordered_map<uint64_t, int32_t> last;
        std::vector<int32_t> previous{0};  // by end; 0: there is none before
    };

    void find_matches() {
        matches_.clear();
        for (const Grams &grams : grams_)
            for (int32_t end = grams.previous.back(); end && matches_.size() < kCandidates; end = grams.previous[end]) {
                const auto known = [end](const Match &match) { return match.end == end; };
                const int32_t length = agreeing(end);  // short of a gram where two of them share a hash
                if (length >= grams.size && std::none_of(matches_.begin(), matches_.end(), known)) matches_.push_back({end, length});
            }
    }

    int32_t agreeing(int32_t end) const {
        const int32_t most = std::min(longest_, end), length = static_cast<int32_t>(text_.size());
        int32_t count = 0;
        while (count < most && text_[length - 1 - count] == text_[end - 1 - count]) ++count;
        return count;
    }

    void push_children(int32_t node, int32_t depth, double reach, uint32_t agreeing, int32_t deepest) {
        Candidate votes[kCandidates];
        int32_t count = 0;
        double total = 1.0;
        for (uint32_t left = agreeing; left; left &= left - 1) {
            const int place = __builtin_ctz(left);
            const Match &match = matches_[place];
            const int32_t round = std::min<int32_t>(deepest, static_cast<int32_t>(text_.size()) - match.end);
            const int32_t token = text_[match.end + depth % round];
            const double odds = weights()[match.length + depth];
            int32_t at = 0;
            while (at < count && votes[at].token != token) ++at;
            if (at == count) votes[count++] = {reach, 0.0, depth + 1, node, token, 0, 0};
            votes[at].chance += odds;
            votes[at].voters |= 1u << place;
            total += odds;
        }
        for (int32_t at = 0; at < count; ++at) {
            votes[at].chance /= total;
            votes[at].reach = reach * votes[at].chance;
            if (votes[at].reach < kWorth) continue;
            votes[at].order = ++order_;
            heap_.push_back(votes[at]);
            std::push_heap(heap_.begin(), heap_.end(), after);
        }
    }

    int32_t longest_;
    int32_t order_ = 0;
    std::vector<int32_t> text_;
    std::vector<Grams> grams_;
    std::vector<Match> matches_;
    std::vector<Candidate> heap_;
};

}  // namespace

// An index of an empty text; freed by specdec_ngram_free. 1 <= shortest <= longest <= 32.
extern "C" void *specdec_ngram_new(int shortest, int longest) { return new Index(shortest, longest); }

extern "C" void specdec_ngram_free(void *index) { delete static_cast<Index *>(index); }

// For every row adds tokens to its text and grows a tree.
// asks: int64 [4, rows], of each row its index, how many tokens are new, the most nodes and how deep, 1 to 256; added: int32, the new
// tokens of all rows; width: columns of the outputs, at least the most nodes of any row; tokens, parents: int32 [rows, width];
// confidence: float32 [rows, width]; sizes: int64 [rows].
extern "C" void specdec_ngram_propose(const int64_t *asks, int64_t rows, const int32_t *added, int64_t width, int32_t *tokens,
                                      int32_t *parents, float *confidence, int64_t *sizes) {
    const int64_t *const counts = asks + rows, *const most = counts + rows, *const deepest = most + rows;
    for (int64_t r = 0; r < rows; ++r) {
        Index &index = *reinterpret_cast<Index *>(asks[r]);
        index.extend(added, counts[r]);
        added += counts[r];
        sizes[r] = index.grow(most[r], static_cast<int32_t>(deepest[r]), tokens + r * width, parents + r * width, confidence + r * width);
    }
}
