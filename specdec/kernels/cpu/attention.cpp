#include "attention.h"

#include <algorithm>
#include <memory>

#include "attention_math.h"

namespace specdec {
namespace attention {
namespace {

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// A thread's buffers for a unit, in one piece of memory.
struct Buffers {
    float *queries;     // [ceil(queries / kQueries)][head_dim / kPack][kQueries]
    float *sums;        // [queries][stride], the weighted values
    float *totals;      // [queries][kLanes], the weights
    float *maxima;      // [queries], the highest scores
    float *scores;      // [kQueries][kBlock], then the weights
    float *key_tile;    // [head_dim / kPack][kBlock]
    float *value_tile;  // [kBlock / kPack][stride]
    float *end;

    Buffers(float *from, int64_t num_queries, int64_t dim) {
        const int64_t padded = round_up(num_queries, std::max(kQueries, kLanes)), stride = round_up(dim, kLanes);
        queries = from;
        sums = queries + padded * dim;
        totals = sums + padded * stride;
        maxima = totals + padded * kLanes;
        scores = maxima + padded;
        key_tile = scores + kQueries * kBlock;
        value_tile = key_tile + dim * kBlock;
        end = value_tile + kBlock * stride;
    }
};

float *align(float *p) { return reinterpret_cast<float *>(round_up(reinterpret_cast<intptr_t>(p), 64)); }

// Attention of the queries of one unit. Query i is head i % num_heads of token i / num_heads.
template <class Products>
class Worker {
    using KV = typename Products::KV;
    using Operand = typename Products::Operand;
    static_assert(sizeof(Operand) == sizeof(float));

public:
    Worker(const AttentionPlan &plan, const AttentionTensors &tensors, const AttentionUnit &unit, float *scratch)
        : plan_(plan),
          batch_(plan.batch()),
          shape_(plan.shape()),
          tensors_(tensors),
          unit_(unit),
          buffers_(align(scratch), int64_t{unit.num_tokens} * unit.num_heads, plan.shape().head_dim),
          stride_(round_up(plan.shape().head_dim, kLanes)),
          queries_(reinterpret_cast<Operand *>(buffers_.queries)),
          key_tile_(reinterpret_cast<Operand *>(buffers_.key_tile)),
          value_tile_(reinterpret_cast<Operand *>(buffers_.value_tile)) {}

    void run() {
        if (tensors_.q_bfloat16) load_queries(static_cast<const uint16_t *>(tensors_.q));
        else load_queries(static_cast<const float *>(tensors_.q));
        attend_shared();
        attend_own();
        if (tensors_.out_bfloat16) store_sums(static_cast<uint16_t *>(tensors_.out));
        else store_sums(static_cast<float *>(tensors_.out));
    }

private:
    Operand *query(int64_t i) const { return queries_ + i / kQueries * kQueries * (shape_.head_dim / Products::kPack) + i % kQueries; }
    int64_t num_queries() const { return int64_t{unit_.num_tokens} * unit_.num_heads; }
    const AttentionPath &path(int64_t token) const { return plan_.path(unit_.first_token + token); }

    // Elements from the start of q or out, whose rows are `row` elements apart, to the unit's first head of a token.
    int64_t head_offset(int64_t token, int64_t row) const {
        const int64_t group = shape_.num_heads / shape_.num_kv_heads;
        return (unit_.first_token + token) * row + (unit_.kv_head * group + unit_.first_head) * shape_.head_dim;
    }

    template <class T>
    void load_queries(const T *q) {
        const int64_t dim = shape_.head_dim;
        for (int64_t i = 0; i < num_queries(); ++i) {
            const T *from = q + head_offset(i / unit_.num_heads, tensors_.q_stride) + i % unit_.num_heads * dim;
            for (int64_t d = 0; d < dim; ++d) Products::store_query(simd::to_float(from[d]), d, query(i), kQueries);
        }
        std::fill_n(buffers_.sums, num_queries() * stride_, 0.f);
        std::fill_n(buffers_.totals, num_queries() * kLanes, 0.f);
        std::fill_n(buffers_.maxima, num_queries(), -INFINITY);
    }

    static void store(float x, float &out) { out = x; }
    static void store(float x, uint16_t &out) { out = simd::to_bfloat16(x); }

    template <class T>
    void store_sums(T *out) const {
        const int64_t dim = shape_.head_dim;
        for (int64_t i = 0; i < num_queries(); ++i) {
            const float inverse = 1.f / sum_lanes(buffers_.totals + i * kLanes), *from = buffers_.sums + i * stride_;
            T *to = out + head_offset(i / unit_.num_heads, shape_.num_heads * dim) + i % unit_.num_heads * dim;
            for (int64_t d = 0; d < dim; ++d) store(from[d] * inverse, to[d]);
        }
    }

    // The blocks whose keys are the same for every token that sees them: all of a linear token, and those of a node that
    // lie before its own part. The tokens of a block differ in the lanes they see.
    void attend_shared() {
        int32_t begin = path(0).start, end = 0;
        for (int64_t t = 0; t < unit_.num_tokens; ++t) {
            begin = std::min(begin, path(t).start);
            end = std::max(end, path(t).shared);
        }
        for (int32_t base = begin / kBlock * kBlock; base < end; base += kBlock) {
            Span lanes{kBlock, 0};
            for (int64_t t = 0; t < unit_.num_tokens; ++t) {
                const AttentionPath &p = path(t);
                spans_[t] = clip(p.start, p.shared == p.end ? p.end : p.shared / kBlock * kBlock, base);
                if (spans_[t].empty()) continue;
                lanes = {std::min(lanes.first, spans_[t].first), std::max(lanes.last, spans_[t].last)};
            }
            if (lanes.empty()) continue;
            locate(base, lanes);
            load_tiles(lanes);
            for (int64_t t = 0, next; t < unit_.num_tokens; t = next) {
                for (next = t; next < unit_.num_tokens && !spans_[next].empty();) ++next;
                if (next > t) attend_tokens(t, next);
                else ++next;
            }
        }
    }

    // The blocks from the one in which a node's path leaves the slots' order: a tile for each node.
    void attend_own() {
        for (int64_t t = 0; t < unit_.num_tokens; ++t) {
            const AttentionPath &p = path(t);
            if (p.shared == p.end) continue;
            for (int32_t base = std::max(p.shared, p.start) / kBlock * kBlock; base < p.end; base += kBlock) {
                spans_[t] = clip(p.start, p.end, base);
                locate(base, clip(p.start, p.shared, base));
                locate_ancestors(t, base, spans_[t]);
                load_tiles(spans_[t]);
                attend_tokens(t, t + 1);
            }
        }
    }

    static Span clip(int32_t begin, int32_t end, int32_t base) { return {std::max(begin - base, 0), std::min(end - base, kBlock)}; }

    // Notes where the KV of slots base + lane is.
    void locate(int32_t base, Span lanes) {
        const int32_t page_size = static_cast<int32_t>(batch_.page_size);
        int32_t page = (base + lanes.first) / page_size, offset = (base + lanes.first) % page_size;
        for (int lane = lanes.first; lane < lanes.last; ++lane) {
            offsets_[lane] = slot_offset(page, offset);
            if (++offset == page_size) offset = 0, ++page;
        }
    }

    // The same for the lanes of a node's own part, from the node up.
    void locate_ancestors(int64_t token, int32_t base, Span lanes) {
        const int64_t first = batch_.row_offsets[unit_.row];
        const int32_t cached = batch_.cached[unit_.row], page_size = static_cast<int32_t>(batch_.page_size);
        const int32_t stop = std::max(path(token).shared, base + lanes.first);
        int32_t local = static_cast<int32_t>(unit_.first_token + token - first);
        for (int32_t position = path(token).end - 1; position >= stop; --position) {
            const int32_t slot = cached + local, lane = position - base;
            if (lane < lanes.last) offsets_[lane] = slot_offset(slot / page_size, slot % page_size);
            local = batch_.parents[first + local];
        }
    }

    int64_t slot_offset(int32_t page, int32_t offset) const {
        const int64_t slot = batch_.page_table[unit_.row * batch_.table_width + page] * batch_.page_size + offset;
        return (slot * shape_.num_kv_heads + unit_.kv_head) * shape_.head_dim;
    }

    // Lanes outside get some key, whose score nobody reads, and keep their value of old, which nobody reads either.
    void load_tiles(Span lanes) {
        std::fill(offsets_, offsets_ + lanes.first, offsets_[lanes.first]);
        std::fill(offsets_ + lanes.last, offsets_ + kBlock, offsets_[lanes.first]);
        Products::load_keys(static_cast<const KV *>(tensors_.keys), offsets_, shape_.head_dim, key_tile_);
        Products::load_values(static_cast<const KV *>(tensors_.values), offsets_, lanes.first, lanes.last, shape_.head_dim, stride_,
                              value_tile_);
    }

    // The block in the tiles for tokens [begin, end), kQueries queries at a time.
    void attend_tokens(int64_t begin, int64_t end) {
        const int64_t last = end * unit_.num_heads;
        for (int64_t query = begin * unit_.num_heads, next; query < last; query = next) {
            next = std::min(last, query / kQueries * kQueries + kQueries);
            with_constant(static_cast<int>(next - query), [&](auto count) { attend_queries<count.value>(query); });
        }
    }

    template <int R>
    void attend_queries(int64_t first) {
        constexpr int pack = Products::kPack;
        score_block<Products, R>(query(first), key_tile_, shape_.head_dim, buffers_.scores);
        float factors[R];
        Span spans[R], common{0, kBlock};  // what all see, in whole packs
        for (int r = 0; r < R; ++r) {
            spans[r] = spans_[(first + r) / unit_.num_heads];
            factors[r] = soften<Products>(buffers_.scores + r * kBlock, spans[r], shape_.scale, shape_.soft_cap,
                                          buffers_.maxima[first + r], buffers_.totals + (first + r) * kLanes);
            common.first = std::max(common.first, (spans[r].first + pack - 1) / pack * pack);
            common.last = std::min(common.last, spans[r].last / pack * pack);
        }
        if (common.empty()) common = {kBlock, kBlock};
        for (int r = 0; r < R; ++r) {  // what only some see: here before the common lanes, below after them
            if (spans[r].first >= common.first) continue;
            add_values(first, r, {spans[r].first, std::min(common.first, spans[r].last)}, factors[r]);
            factors[r] = 1.f;
        }
        if (!common.empty())
            accumulate_packs<Products, R>(buffers_.scores, value_tile_, stride_, common.first / pack, common.last / pack, 0xffffffff,
                                          factors, buffers_.sums + first * stride_);
        for (int r = 0; r < R; ++r)
            if (spans[r].last > common.last) add_values(first, r, {common.last, spans[r].last}, 1.f);
    }

    void add_values(int64_t first, int r, Span lanes, float factor) {
        accumulate_lanes<Products>(buffers_.scores + r * kBlock, value_tile_, stride_, lanes, factor,
                                   buffers_.sums + (first + r) * stride_);
    }

    const AttentionPlan &plan_;
    const AttentionBatch &batch_;
    const AttentionShape &shape_;
    const AttentionTensors &tensors_;
    const AttentionUnit &unit_;
    const Buffers buffers_;
    const int64_t stride_;
    Operand *const queries_, *const key_tile_, *const value_tile_;
    int64_t offsets_[kBlock];  // elements from the start of keys and values, by lane
    Span spans_[kMaxQueries];  // by token: the lanes it sees of the block at hand
};

}  // namespace
}  // namespace attention

int64_t AttentionPlan::scratch_floats() const {
    const attention::Buffers buffers(nullptr, max_queries_, shape_.head_dim);
    return buffers.end - buffers.queries + 64 / sizeof(float);
}

void attention_task(const AttentionPlan &plan, const AttentionTensors &tensors, int64_t unit, float *scratch) {
    using namespace attention;
    if (tensors.kv_bfloat16) Worker<ProductsOf<uint16_t>>(plan, tensors, plan.unit(unit), scratch).run();
    else Worker<ProductsOf<float>>(plan, tensors, plan.unit(unit), scratch).run();
}

}  // namespace specdec

// See attention.h; the int32 arrays are those of specdec.pack.PackedBatch.
extern "C" void specdec_paged_attention(
    const void *q, const void *keys, const void *values, void *out, int q_bfloat16, int kv_bfloat16, int64_t q_stride,
    const int32_t *parents, const int32_t *depths, const int32_t *row_offsets, const int32_t *cached, const int32_t *page_table,
    int64_t num_rows, int64_t table_width, int64_t page_size, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
    int64_t window, float scale, float soft_cap, int threads) {
    using namespace specdec;
    const AttentionBatch batch{parents, depths, row_offsets, cached, page_table, num_rows, table_width, page_size};
    const AttentionPlan plan(batch, {num_heads, num_kv_heads, head_dim, window, scale, soft_cap}, threads);
    const AttentionTensors tensors{q, keys, values, out, q_stride, q_bfloat16 != 0, kv_bfloat16 != 0, q_bfloat16 != 0};
#pragma omp parallel num_threads(threads)
    {
        const std::unique_ptr<float[]> scratch(new float[plan.scratch_floats()]);
#pragma omp for schedule(dynamic, 1)
        for (int64_t unit = 0; unit < plan.num_units(); ++unit) attention_task(plan, tensors, unit, scratch.get());
    }
}
