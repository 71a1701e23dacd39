// Cuts the attention of a forward into units of work.
#include <algorithm>

#include "attention.h"

namespace specdec {

AttentionPlan::AttentionPlan(const AttentionBatch &batch, const AttentionShape &shape, int threads) : batch_(batch), shape_(shape) {
    paths_.resize(batch.row_offsets[batch.num_rows]);
    int64_t longest = 1;
    for (int64_t row = 0; row < batch.num_rows; ++row) {
        find_paths(row);
        longest = std::max<int64_t>(longest, batch.row_offsets[row + 1] - batch.row_offsets[row]);
    }
    // The conversion of a block of keys costs about as much as attending over it with two queries: units of many queries
    // share it, and are cut further only to occupy all threads.
    constexpr int64_t few = 16;
    int64_t heads = std::min<int64_t>(shape.num_heads / shape.num_kv_heads, kMaxQueries);
    int64_t tokens = std::min(longest, kMaxQueries / heads);
    while (tokens > 1 && tokens * heads > few && count_units(tokens, heads) < 4 * threads) tokens = (tokens + 1) / 2;
    while (heads > 1 && count_units(tokens, heads) < threads) heads = (heads + 1) / 2;
    max_queries_ = tokens * heads;
    units_.reserve(count_units(tokens, heads));
    for (int64_t row = 0; row < batch.num_rows; ++row) add_units(row, tokens, heads);
    std::stable_sort(units_.begin(), units_.end(), [&](const AttentionUnit &a, const AttentionUnit &b) { return cost(a) > cost(b); });
}

void AttentionPlan::find_paths(int64_t row) {
    const int32_t first = batch_.row_offsets[row], count = batch_.row_offsets[row + 1] - first, cached = batch_.cached[row];
    const int32_t *parents = batch_.parents + first, *depths = batch_.depths + first;
    const int32_t window = static_cast<int32_t>(shape_.window);
    for (int32_t i = 0; i < count; ++i) {
        const int32_t end = cached + depths[i] + 1;
        const int32_t shared = depths[i] == i ? end : paths_[first + parents[i]].shared;
        paths_[first + i] = {window > 0 ? std::max(end - window, 0) : 0, shared, end};
    }
}

int64_t AttentionPlan::count_units(int64_t tokens, int64_t heads) const {
    const int64_t group = shape_.num_heads / shape_.num_kv_heads;
    int64_t blocks = 0;
    for (int64_t row = 0; row < batch_.num_rows; ++row)
        blocks += (batch_.row_offsets[row + 1] - batch_.row_offsets[row] + tokens - 1) / tokens;
    return blocks * shape_.num_kv_heads * ((group + heads - 1) / heads);
}

void AttentionPlan::add_units(int64_t row, int64_t tokens, int64_t heads) {
    const int64_t group = shape_.num_heads / shape_.num_kv_heads, end = batch_.row_offsets[row + 1];
    for (int64_t token = batch_.row_offsets[row]; token < end; token += tokens)
        for (int64_t kv_head = 0; kv_head < shape_.num_kv_heads; ++kv_head)
            for (int64_t head = 0; head < group; head += heads)
                units_.push_back({static_cast<int32_t>(row), static_cast<int32_t>(kv_head), static_cast<int32_t>(token),
                                  static_cast<int32_t>(std::min(tokens, end - token)), static_cast<int32_t>(head),
                                  static_cast<int32_t>(std::min(heads, group - head))});
}

int64_t AttentionPlan::cost(const AttentionUnit &unit) const {
    const AttentionPath &last = paths_[unit.first_token + unit.num_tokens - 1];
    return int64_t{unit.num_tokens} * unit.num_heads * (last.end - last.start);
}

}  // namespace specdec
