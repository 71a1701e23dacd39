// The forward of decoder.h, phase by phase. All threads run the same phases; within one they share rows, tiles or attention units.
#include "decoder.h"

#include <omp.h>

#include <algorithm>
#include <memory>

namespace specdec {
namespace {

constexpr int64_t kPhasesPerLayer = 10, kOtherPhases = 4;

// Makes a vector at least so large. It never shrinks, so that steps of a steady size allocate nothing.
template <class T>
void grow(std::vector<T> &buffer, int64_t size) {
    if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
}

// What one thread does in a forward.
class Worker {
public:
    Worker(const DecoderWeights &weights, const ForwardInput &input, Workspace &space, Team &team,
           const std::vector<const AttentionPlan *> &plans)
        : weights_(weights), input_(input), space_(space), team_(team), plans_(plans) {
        int64_t floats = 0;
        for (const AttentionPlan *plan : plans) floats = std::max(floats, plan->scratch_floats());
        scratch_.reset(new float[floats]);
        row_.resize(std::max(weights.hidden, weights.intermediate));
    }

    void run() {
        rows(input_.num_tokens, [&](int64_t t) { embed(input_.tokens[t], x(t)); });
        for (int64_t index = 0; index < weights_.num_layers; ++index) run_layer(index, weights_.layers[index]);
        rows(input_.num_tokens, [&](int64_t t) { end_layer(weights_.num_layers - 1, t); });
        const LinearRows normed = input_rows(input_.num_logits);
        rows(input_.num_logits, [&](int64_t r) { norm_and_prepare(x(input_.logit_rows[r]), weights_.final_norm, weights_.head, normed, r); });
        project(weights_.head, normed, input_.num_logits, [&](const float *sums, int64_t row, int64_t count, int64_t column, int64_t width) {
            for (int64_t r = 0; r < count; ++r) store_logits(sums + r * kTile, row + r, column, width);
        });
    }

private:
    void run_layer(int64_t index, const LayerWeights &layer) {
        attend(index, layer);
        const LinearRows hidden = input_rows(input_.num_tokens);
        const float *norm = layer.feed_forward_in_norm;
        rows(input_.num_tokens, [&](int64_t t) {
            if (layer.attention_out_norm) add_normed(branch(t), layer.attention_out_norm, x(t));
            norm_and_prepare(x(t), norm, layer.gate, hidden, t);
        });
        gate_and_up(layer, hidden);
        const LinearRows inner = input_rows(input_.num_tokens);
        rows(input_.num_tokens, [&](int64_t t) {
            prepare_row(space_.inner.data() + t * layer.down.inputs, layer.down, inner, t);
        });
        project_to_residual(layer.down, inner, layer.feed_forward_out_norm != nullptr);
    }

    void attend(int64_t index, const LayerWeights &layer) {
        const LinearRows hidden = input_rows(input_.num_tokens);
        rows(input_.num_tokens, [&](int64_t t) {
            if (index > 0) end_layer(index - 1, t);
            norm_and_prepare(x(t), layer.input_norm, layer.q, hidden, t);
        });
        project_qkv(layer, hidden);
        rows(input_.num_tokens * weights_.num_kv_heads, [&](int64_t unit) {
            place(index, layer, unit / weights_.num_kv_heads, unit % weights_.num_kv_heads);
        });
        const AttentionPlan &plan = *plans_[index];
        const AttentionTensors tensors{space_.qkv.data(), keys(index), values(index), space_.attention.data(), qkv_width(), false,
                                       input_.kv_bfloat16 != 0, false};
        rows(plan.num_units(), [&](int64_t unit) { attention_task(plan, tensors, unit, scratch_.get()); });
        const LinearRows heads = input_rows(input_.num_tokens);
        rows(input_.num_tokens, [&](int64_t t) {
            prepare_row(space_.attention.data() + t * layer.o.inputs, layer.o, heads, t);
        });
        project_to_residual(layer.o, heads, layer.attention_out_norm != nullptr);
    }

    // What remains of a layer once its last product is done.
    void end_layer(int64_t index, int64_t t) {
        const LayerWeights &layer = weights_.layers[index];
        if (layer.feed_forward_out_norm) add_normed(branch(t), layer.feed_forward_out_norm, x(t));
        const int64_t *wanted = std::find(input_.capture, input_.capture + input_.num_captured, index);
        if (wanted == input_.capture + input_.num_captured) return;
        float *out = input_.captured + ((wanted - input_.capture) * input_.num_tokens + t) * weights_.hidden;
        std::copy_n(x(t), weights_.hidden, out);
    }

    // Rows

    void embed(int64_t token, float *out) const {
        const int64_t hidden = weights_.hidden;
        if (weights_.embedding) {
            for (int64_t i = 0; i < hidden; ++i) out[i] = simd::to_float(weights_.embedding[token * hidden + i]);
        } else {
            dequantize_row(weights_.head.format(), static_cast<const uint8_t *>(weights_.head.weights), weights_.head.shape(), token, out);
        }
        for (int64_t i = 0; i < hidden; ++i) out[i] *= weights_.embedding_scale;
    }

    void norm_and_prepare(const float *from, const float *norm, const LinearWeights &linear, const LinearRows &out, int64_t row) {
        rms_norm(from, norm, weights_.hidden, weights_.eps, row_.data());
        prepare_row(row_.data(), linear, out, row);
    }

    void add_normed(const float *from, const float *norm, float *to) {
        rms_norm(from, norm, weights_.hidden, weights_.eps, row_.data());
        for (int64_t i = 0; i < weights_.hidden; ++i) to[i] += row_[i];
    }

    // Head norms and rotary embedding of one KV head and its query heads; its key and value into their slot.
    void place(int64_t index, const LayerWeights &layer, int64_t t, int64_t kv_head) {
        const int64_t dim = weights_.head_dim, group = weights_.num_heads / weights_.num_kv_heads;
        const float *cos = layer.cos + input_.positions[t] * (dim / 2), *sin = layer.sin + input_.positions[t] * (dim / 2);
        float *q = space_.qkv.data() + t * qkv_width() + kv_head * group * dim;
        float *k = space_.qkv.data() + t * qkv_width() + (weights_.num_heads + kv_head) * dim, *v = k + weights_.num_kv_heads * dim;
        for (int64_t head = 0; head < group; ++head) turn(q + head * dim, layer.q_norm, cos, sin);
        turn(k, layer.k_norm, cos, sin);
        const int64_t at = (input_.slots[t] * weights_.num_kv_heads + kv_head) * dim;
        put(k, keys(index), at);
        put(v, values(index), at);
    }

    void turn(float *head, const float *norm, const float *cos, const float *sin) const {
        if (norm) rms_norm(head, norm, weights_.head_dim, weights_.eps, head);
        rotate(head, cos, sin, weights_.head_dim);
    }

    void put(const float *from, void *pool, int64_t at) const {
        if (input_.kv_bfloat16) {
            uint16_t *to = static_cast<uint16_t *>(pool) + at;
            for (int64_t i = 0; i < weights_.head_dim; ++i) to[i] = simd::to_bfloat16(from[i]);
        } else {
            std::copy_n(from, weights_.head_dim, static_cast<float *>(pool) + at);
        }
    }

    // Products

    // Calls finish(sums [count][32], first row, count, first column, columns) for every tile and chunk of rows.
    template <class F>
    void multiply(const LinearWeights &linear, const LinearRows &rows, int64_t num_rows, int64_t tile, F finish) {
        const int64_t column = tile * kTile, width = std::min(kTile, linear.outputs - column);
        for (int64_t row = 0; row < num_rows; row += kRowChunk) {
            const int64_t count = std::min(kRowChunk, num_rows - row);
            multiply_tile(linear, tile, rows, row, count, sums_);
            if (linear.bias)
                for (int64_t r = 0; r < count; ++r)
                    for (int64_t n = 0; n < width; ++n) sums_[r * kTile + n] += linear.bias[column + n];
            finish(sums_, row, count, column, width);
        }
    }

    template <class F>
    void project(const LinearWeights &linear, const LinearRows &rows, int64_t num_rows, F finish) {
        tiles(linear.num_tiles(), [&](int64_t tile) { multiply(linear, rows, num_rows, tile, finish); });
    }

    void project_qkv(const LayerWeights &layer, const LinearRows &rows) {
        const LinearWeights *parts[] = {&layer.q, &layer.k, &layer.v};
        tiles(layer.q.num_tiles() + layer.k.num_tiles() + layer.v.num_tiles(), [&](int64_t tile) {
            int64_t part = 0, start = 0;
            for (; tile >= parts[part]->num_tiles(); ++part) tile -= parts[part]->num_tiles(), start += parts[part]->outputs;
            multiply(*parts[part], rows, input_.num_tokens, tile, [&](const float *sums, int64_t row, int64_t count, int64_t column, int64_t width) {
                for (int64_t r = 0; r < count; ++r)
                    std::copy_n(sums + r * kTile, width, space_.qkv.data() + (row + r) * qkv_width() + start + column);
            });
        });
    }

    void project_to_residual(const LinearWeights &linear, const LinearRows &rows, bool normed_first) {
        const int64_t hidden = weights_.hidden;
        project(linear, rows, input_.num_tokens, [&](const float *sums, int64_t row, int64_t count, int64_t column, int64_t width) {
            for (int64_t r = 0; r < count; ++r) {
                float *to = (normed_first ? space_.branch : space_.x).data() + (row + r) * hidden + column;
                for (int64_t n = 0; n < width; ++n) to[n] = sums[r * kTile + n] + (normed_first ? 0.f : to[n]);
            }
        });
    }

    void gate_and_up(const LayerWeights &layer, const LinearRows &rows) {
        const auto kind = static_cast<Activation>(weights_.activation);
        tiles(layer.gate.num_tiles(), [&](int64_t tile) {
            multiply(layer.gate, rows, input_.num_tokens, tile, [&](const float *sums, int64_t row, int64_t count, int64_t column, int64_t width) {
                float *out = space_.inner.data() + row * layer.gate.outputs + column;
                for (int64_t r = 0; r < count; ++r) {
                    alignas(64) float activated[kTile];
                    for (int64_t n = 0; n < kTile; n += simd::kLanes)
                        simd::store(activate(simd::load(sums + r * kTile + n), kind), activated + n);
                    std::copy_n(activated, width, out + r * layer.gate.outputs);
                }
            });
            multiply(layer.up, rows, input_.num_tokens, tile, [&](const float *sums, int64_t row, int64_t count, int64_t column, int64_t width) {
                float *out = space_.inner.data() + row * layer.gate.outputs + column;
                for (int64_t r = 0; r < count; ++r)
                    for (int64_t n = 0; n < width; ++n) out[r * layer.gate.outputs + n] *= sums[r * kTile + n];
            });
        });
    }

    void store_logits(const float *sums, int64_t row, int64_t column, int64_t width) const {
        float *out = input_.logits + row * weights_.head.outputs + column;
        const float cap = weights_.logits_soft_cap;
        if (cap == 0.f) {
            std::copy_n(sums, width, out);
            return;
        }
        alignas(64) float capped[kTile];
        for (int64_t n = 0; n < kTile; n += simd::kLanes) simd::store(cap * simd::tanh(simd::load(sums + n) / cap), capped + n);
        std::copy_n(capped, width, out);
    }

    // Phases

    template <class F>
    void rows(int64_t count, F f) {
        share(count, 1, f);
    }

    // A thread takes neighbouring tiles, which it reads as one stream, but not so many that others wait for it in the end.
    template <class F>
    void tiles(int64_t count, F f) {
        share(count, std::max<int64_t>(1, count / (8 * team_.size())), f);
    }

    template <class F>
    void share(int64_t count, int64_t chunk, F f) {
        team_.share(phase_++, count, chunk, f);
        team_.wait();
    }

    // Places

    LinearRows input_rows(int64_t count) const {
        return {{space_.values.data(), space_.sums.data(), count}, space_.rounded.data()};
    }

    int64_t qkv_width() const { return (weights_.num_heads + 2 * weights_.num_kv_heads) * weights_.head_dim; }
    float *x(int64_t t) const { return space_.x.data() + t * weights_.hidden; }
    float *branch(int64_t t) const { return space_.branch.data() + t * weights_.hidden; }
    void *keys(int64_t layer) const { return offset(input_.keys, layer); }
    void *values(int64_t layer) const { return offset(input_.values, layer); }
    void *offset(void *pool, int64_t layer) const {
        return static_cast<char *>(pool) + layer * input_.layer_stride * (input_.kv_bfloat16 ? 2 : 4);
    }

    const DecoderWeights &weights_;
    const ForwardInput &input_;
    Workspace &space_;
    Team &team_;
    const std::vector<const AttentionPlan *> &plans_;  // by layer
    std::unique_ptr<float[]> scratch_;
    std::vector<float> row_;
    alignas(64) float sums_[kRowChunk * kTile];
    int64_t phase_ = 0;
};

void prepare(Workspace &space, const DecoderWeights &weights, int64_t rows) {
    const int64_t heads = weights.num_heads * weights.head_dim, kv = weights.num_kv_heads * weights.head_dim;
    const int64_t widest = std::max({weights.hidden, weights.intermediate, heads});
    grow(space.x, rows * weights.hidden);
    grow(space.branch, rows * weights.hidden);
    grow(space.qkv, rows * (heads + 2 * kv));
    grow(space.attention, rows * heads);
    grow(space.inner, rows * weights.intermediate);
    if (weights.head.kind == Kind::bfloat16) {
        grow(space.rounded, rows * bfloat16::row_stride(widest));
        return;
    }
    const WeightShape shape(widest, 1);
    grow(space.values, rows * shape.groups * kGroup);
    grow(space.sums, rows * shape.groups);
}

}  // namespace

Decoder::Decoder(const DecoderWeights &weights) : weights_(weights), layers_(weights.layers, weights.layers + weights.num_layers) {
    weights_.layers = layers_.data();
}

void Decoder::forward(const ForwardInput &input) {
    const int threads = crowding_.threads(input.threads);
    prepare(workspace_, weights_, std::max(input.num_tokens, input.num_logits));
    const AttentionBatch batch{input.parents, input.depths, input.row_offsets, input.cached, input.page_table,
                               input.num_rows, input.table_width, input.page_size};
    std::vector<std::unique_ptr<AttentionPlan>> owned;  // one per window
    std::vector<const AttentionPlan *> plans;
    for (const LayerWeights &layer : layers_) {
        const auto same = std::find_if(owned.begin(), owned.end(), [&](const auto &plan) { return plan->shape().window == layer.window; });
        if (same == owned.end()) {
            const AttentionShape shape{weights_.num_heads, weights_.num_kv_heads, weights_.head_dim, layer.window,
                                       weights_.attention_scale, weights_.attention_soft_cap};
            owned.push_back(std::make_unique<AttentionPlan>(batch, shape, threads));
            plans.push_back(owned.back().get());
        } else {
            plans.push_back(same->get());
        }
    }
    Team team(threads, kPhasesPerLayer * weights_.num_layers + kOtherPhases);
    double ran_s = 0.0;
    const double start_s = wall_seconds();
#pragma omp parallel num_threads(threads) reduction(+ : ran_s)
    {
        const double before_s = thread_seconds();
        Worker(weights_, input, workspace_, team, plans).run();
        ran_s += thread_seconds() - before_s;
    }
    crowding_.book(threads, input.threads, ran_s, wall_seconds() - start_s);
}

}  // namespace specdec

extern "C" void *specdec_decoder_create(const specdec::DecoderWeights *weights) { return new specdec::Decoder(*weights); }
extern "C" void specdec_decoder_destroy(void *decoder) { delete static_cast<specdec::Decoder *>(decoder); }
extern "C" void specdec_decoder_forward(void *decoder, const specdec::ForwardInput *input) {
    static_cast<specdec::Decoder *>(decoder)->forward(*input);
}

// 1 where this build runs decoders with bfloat16 weights, by an instruction made for them.
extern "C" int specdec_decoder_takes_bfloat16() {
#ifdef SPECDEC_BFLOAT16
    return 1;
#else
    return 0;
#endif
}
