// A linear layer, its weights quantised or in bfloat16: all that differs between the kinds is here.
#pragma once
#include "bfloat16_products.h"
#include "products.h"

namespace specdec {

// By their number in decoder_ops.py; the first two are the formats of quantized.h.
enum class Kind : int64_t { int8 = 0, int4 = 1, bfloat16 = 2 };

// weights: blocks as quantized.h says, or bfloat16 [outputs, inputs]; bias: float32 [outputs] or null.
struct LinearWeights {
    const void *weights;
    const float *bias;
    int64_t outputs, inputs;
    Kind kind;

    int64_t num_tiles() const { return (outputs + kTile - 1) / kTile; }
    WeightShape shape() const { return {inputs, outputs}; }
    Format format() const { return static_cast<Format>(kind); }
};

// Rows in the form that the weights at hand want: quantised, or rounded by bfloat16::round_row.
struct LinearRows {
    QuantizedRows quantized;
    uint16_t *rounded;
};

inline void prepare_row(const float *x, const LinearWeights &linear, const LinearRows &rows, int64_t row) {
#ifdef SPECDEC_BFLOAT16
    if (linear.kind == Kind::bfloat16) {
        bfloat16::round_row(x, linear.inputs, rows.rounded + row * bfloat16::row_stride(linear.inputs));
        return;
    }
#endif
    quantize_row(x, linear.shape(), rows.quantized, row);
}

// sums[count][32] = rows [row, row + count) times the outputs of one tile; count <= kRowChunk.
inline void multiply_tile(const LinearWeights &linear, int64_t tile, const LinearRows &rows, int64_t row, int64_t count, float *sums) {
#ifdef SPECDEC_BFLOAT16
    if (linear.kind == Kind::bfloat16) {
        const uint16_t *weights = static_cast<const uint16_t *>(linear.weights) + tile * kTile * linear.inputs;
        const uint16_t *x = rows.rounded + row * bfloat16::row_stride(linear.inputs);
        bfloat16::multiply(weights, linear.inputs, std::min(kTile, linear.outputs - tile * kTile), x, count, sums, kTile);
        return;
    }
#endif
    const WeightShape shape = linear.shape();
    const uint8_t *start = static_cast<const uint8_t *>(linear.weights) + tile * shape.tile_bytes(linear.format());
    multiply_tile({linear.format(), start, shape}, rows.quantized, row, count, sums);
}

}  // namespace specdec
