// Paged tree attention. Each query attends over its own path in position order: the committed prefix by pages, then its
// ancestors in the draft. Its arithmetic depends on its path alone, so a tree node has the bits of a linear decode at that
// position, whatever else is in the batch; there is no mask and no work on siblings.
//
//     positions   |0 ........ 31|32 ....... 63|64 ....... 95|      blocks of kBlock, whatever the page size
//     path        |<------- cached ------->|<- ancestors->|t|
//     keys        |<--- shared: one tile for all ---->|<own>|      own: from the first ancestor that has an elder sibling
//
// A forward makes one AttentionPlan per window; then any thread may run any unit of it, layer after layer.
#pragma once
#include <cstdint>
#include <vector>

namespace specdec {

constexpr int64_t kMaxQueries = 128;  // of a unit: their sums stay in the second-level cache

// The arrays of specdec.pack.PackedBatch of these names.
struct AttentionBatch {
    const int32_t *parents, *depths, *row_offsets, *cached, *page_table;
    int64_t num_rows, table_width, page_size;
};

// specdec.backend.base.AttentionSpec. head_dim: even; whole vectors of it, such as 64 or 128, are fastest.
struct AttentionShape {
    int64_t num_heads, num_kv_heads, head_dim, window;
    float scale, soft_cap;
};

// Tensors of one layer, each float32 or bfloat16.
struct AttentionTensors {
    const void *q;       // [T, num_heads, head_dim], rows q_stride elements apart
    const void *keys;    // [pages, page_size, num_kv_heads, head_dim]
    const void *values;  // the same
    void *out;           // [T, num_heads, head_dim]; rows past row_offsets[num_rows] are left alone
    int64_t q_stride;
    bool q_bfloat16, kv_bfloat16, out_bfloat16;
};

// Queries of one row and one KV head that share the conversion of the keys.
struct AttentionUnit {
    int32_t row, kv_head;
    int32_t first_token, num_tokens;  // in the batch
    int32_t first_head, num_heads;    // of the KV head's query heads
};

// Where the keys of a token are: positions [start, shared) in the slots of these numbers, [shared, end) in its ancestors'.
struct AttentionPath {
    int32_t start, shared, end;
};

class AttentionPlan {
public:
    // Keeps `batch`'s pointers. `threads`: how many will share the units.
    AttentionPlan(const AttentionBatch &batch, const AttentionShape &shape, int threads);

    const AttentionBatch &batch() const { return batch_; }
    const AttentionShape &shape() const { return shape_; }
    int64_t num_units() const { return static_cast<int64_t>(units_.size()); }
    const AttentionUnit &unit(int64_t index) const { return units_[index]; }
    const AttentionPath &path(int64_t token) const { return paths_[token]; }
    int64_t scratch_floats() const;  // what attention_task needs of each thread

private:
    void find_paths(int64_t row);
    int64_t count_units(int64_t tokens, int64_t heads) const;  // units of at most so many tokens and heads
    void add_units(int64_t row, int64_t tokens, int64_t heads);
    int64_t cost(const AttentionUnit &unit) const;  // to rank units

    AttentionBatch batch_;
    AttentionShape shape_;
    std::vector<AttentionPath> paths_;  // by token
    std::vector<AttentionUnit> units_;  // the longest first
    int64_t max_queries_ = 0;           // of a unit
};

// Computes one unit. `scratch`: plan.scratch_floats() floats, of this thread alone.
void attention_task(const AttentionPlan &plan, const AttentionTensors &tensors, int64_t unit, float *scratch);

}  // namespace specdec
