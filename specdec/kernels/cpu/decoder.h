// A whole decoder forward in one call: quantised or bfloat16 weights, float32 between the products, paged KV in bfloat16 or float32.
//
// The structs are filled by specdec/kernels/decoder_ops.py; their fields must agree with it in order and type.
#pragma once
#include <cstdint>
#include <vector>

#include "attention.h"
#include "crowding.h"
#include "elementwise.h"
#include "linear.h"
#include "team.h"

namespace specdec {

// Norm weights are float32, with any offset added; null where the architecture has no such norm.
struct LayerWeights {
    LinearWeights q, k, v, o, gate, up, down;
    const float *input_norm, *q_norm, *k_norm;
    const float *attention_out_norm, *feed_forward_in_norm, *feed_forward_out_norm;
    int64_t window;
    const float *cos, *sin;  // [positions, head_dim / 2]
};

struct DecoderWeights {
    int64_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim;
    const LayerWeights *layers;
    LinearWeights head;
    const uint16_t *embedding;  // bfloat16 [vocabulary, hidden]; null where it is the head's own quantised weight
    const float *final_norm;
    float eps, attention_scale, attention_soft_cap, logits_soft_cap, embedding_scale;
    int32_t activation;
};

// One forward. The int32 arrays are those of specdec.pack.PackedBatch, without padding rows.
struct ForwardInput {
    const int32_t *tokens, *positions, *slots, *parents, *depths, *row_offsets, *cached, *page_table, *logit_rows;
    int64_t num_tokens, num_rows, table_width, page_size, num_logits;
    void *keys, *values;       // of the first layer: [pages, page_size, num_kv_heads, head_dim]
    int64_t layer_stride;      // elements from one layer's to the next one's
    const int64_t *capture;    // layers whose output is wanted, ascending
    int64_t num_captured;
    float *captured;           // [num_captured, num_tokens, hidden]
    float *logits;             // [num_logits, head.outputs]
    int32_t kv_bfloat16, threads;
};

// Buffers of a forward, kept from one to the next.
struct Workspace {
    std::vector<float> x;          // [T, hidden], the residual stream
    std::vector<float> branch;     // [T, hidden], what attention or feed-forward add to it, where a norm comes between
    std::vector<float> qkv;        // [T, (heads + 2 kv heads) * head_dim]
    std::vector<float> attention;  // [T, heads * head_dim]
    std::vector<float> inner;      // [T, intermediate]
    std::vector<int8_t> values;    // quantised rows of the product at hand
    std::vector<GroupSums> sums;
    std::vector<uint16_t> rounded;  // the same in bfloat16
};

class Decoder {
public:
    explicit Decoder(const DecoderWeights &weights);
    void forward(const ForwardInput &input);

private:
    DecoderWeights weights_;
    std::vector<LayerWeights> layers_;
    Workspace workspace_;
    Crowding crowding_;
};

}  // namespace specdec
