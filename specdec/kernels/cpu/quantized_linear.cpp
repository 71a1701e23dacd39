// One linear layer over quantised weights, rows given and returned as float32: for models that are not run by the fused decoder, and
// for tests.
#include <omp.h>

#include <vector>

#include "products.h"

using namespace specdec;

// x: float32 [rows, inputs]; blocks: as quantized.h says; bias: float32 [outputs] or null; out: float32 [rows, outputs].
extern "C" void specdec_quantized_linear(int64_t format, const float *x, int64_t rows, int64_t inputs, int64_t outputs,
                                         const uint8_t *blocks, const float *bias, float *out, int threads) {
    const WeightShape shape(inputs, outputs);
    const auto kind = static_cast<Format>(format);
    std::vector<int8_t> values(rows * shape.groups * kGroup);
    std::vector<GroupSums> group_sums(rows * shape.groups);
    const QuantizedRows quantized{values.data(), group_sums.data(), rows};
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) quantize_row(x + row * inputs, shape, quantized, row);
        float sums[kRowChunk * kTile];
#pragma omp for schedule(dynamic, 4)
        for (int64_t tile = 0; tile < shape.tiles; ++tile) {
            const int64_t column = tile * kTile, width = outputs - column < kTile ? outputs - column : kTile;
            for (int64_t row = 0; row < rows; row += kRowChunk) {
                const int64_t count = rows - row < kRowChunk ? rows - row : kRowChunk;
                multiply_tile({kind, blocks + tile * shape.tile_bytes(kind), shape}, quantized, row, count, sums);
                for (int64_t r = 0; r < count; ++r)
                    for (int64_t n = 0; n < width; ++n)
                        out[(row + r) * outputs + column + n] = sums[r * kTile + n] + (bias ? bias[column + n] : 0.f);
            }
        }
    }
}

// 1 where this build multiplies bytes by an instruction made for it.
extern "C" int specdec_quantized_is_fast() {
#ifdef SPECDEC_VNNI
    return 1;
#else
    return 0;
#endif
}
