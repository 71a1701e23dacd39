// Paged tree attention. Each query attends over its own path in position order: the committed prefix by pages, then
// its ancestors in the draft. So a tree node does the very arithmetic that a linear decode would do at that position,
// bit for bit, whatever else is in the batch; there is no mask and no work on siblings.
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

struct Batch {
    const int32_t *parents, *depths, *row_offsets, *cached, *page_table;
    int64_t num_rows, table_width, page_size;
};

struct Shape {
    int64_t num_heads, num_kv_heads, head_dim, window;
    float scale, soft_cap;
};

inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) {  // bfloat16 bits
    union { uint32_t bits; float value; } cast{static_cast<uint32_t>(x) << 16};
    return cast.value;
}
inline void store(float x, float *out) { *out = x; }
inline void store(float x, uint16_t *out) {  // round to nearest even
    union { float value; uint32_t bits; } cast{x};
    *out = static_cast<uint16_t>((cast.bits + 0x7fff + ((cast.bits >> 16) & 1)) >> 16);
}

// exp for x <= 0, 2 ulp: 2^round(x/ln2) times a degree-6 polynomial. libm's expf does not vectorise.
inline float exp_negative(float x) {
    x = x < -87.f ? -87.f : x;
    const float n = std::nearbyint(x * 1.44269504f);
    const float r = x - n * 0.693145752f - n * 1.42860677e-6f;
    float y = 1.f / 720;
    y = y * r + 1.f / 120;
    y = y * r + 1.f / 24;
    y = y * r + 1.f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.f;
    y = y * r + 1.f;
    union { int32_t bits; float value; } power{(static_cast<int32_t>(n) + 127) << 23};
    return y * power.value;
}

// Ancestors-or-self of local token `local`, from the root down. A token whose depth is its index has all earlier
// tokens as ancestors, so the walk ends there: a chain costs nothing.
void path_of(const int32_t *parents, const int32_t *depths, int32_t local, std::vector<int32_t> &path) {
    path.resize(depths[local] + 1);
    while (depths[local] != local) {
        path[depths[local]] = local;
        local = parents[local];
    }
    for (int32_t i = 0; i <= local; ++i) path[i] = i;
}

template <class T>
void attend(const T *q, const T *keys, const T *values, T *out, const Batch &batch, const Shape &shape,
            int64_t row, int64_t token, int64_t kv_head, std::vector<int32_t> &path, std::vector<float> &scratch) {
    const int64_t dim = shape.head_dim, group = shape.num_heads / shape.num_kv_heads;
    const int64_t stride = shape.num_kv_heads * dim, first = batch.row_offsets[row], cached = batch.cached[row];
    const int32_t *table = batch.page_table + row * batch.table_width;
    path_of(batch.parents + first, batch.depths + first, static_cast<int32_t>(token - first), path);
    const int64_t length = cached + static_cast<int64_t>(path.size());
    const int64_t start = shape.window > 0 && length > shape.window ? length - shape.window : 0;
    const int64_t count = length - start;

    scratch.resize(group * (count + 2 * dim));
    float *scores = scratch.data(), *query = scores + group * count, *sums = query + group * dim;
    const T *q_row = q + token * shape.num_heads * dim + kv_head * group * dim;
    for (int64_t i = 0; i < group * dim; ++i) query[i] = to_float(q_row[i]) * shape.scale, sums[i] = 0.f;

    auto offset = [&](int64_t position) {
        const int64_t slot = position < cached ? position : cached + path[position - cached];
        return (table[slot / batch.page_size] * batch.page_size + slot % batch.page_size) * stride + kv_head * dim;
    };
    for (int64_t p = 0; p < count; ++p) {
        const T *key = keys + offset(start + p);
        for (int64_t g = 0; g < group; ++g) {
            const float *vector = query + g * dim;
            float dot = 0.f;
            for (int64_t i = 0; i < dim; ++i) dot += vector[i] * to_float(key[i]);
            scores[g * count + p] = dot;
        }
    }
    for (int64_t g = 0; g < group; ++g) {
        float *row_scores = scores + g * count;
        if (shape.soft_cap > 0.f)
            for (int64_t p = 0; p < count; ++p) row_scores[p] = shape.soft_cap * std::tanh(row_scores[p] / shape.soft_cap);
        float top = row_scores[0], total = 0.f;
        for (int64_t p = 1; p < count; ++p) top = row_scores[p] > top ? row_scores[p] : top;
        for (int64_t p = 0; p < count; ++p) row_scores[p] = exp_negative(row_scores[p] - top);
        for (int64_t p = 0; p < count; ++p) total += row_scores[p];
        const float inverse = 1.f / total;
        for (int64_t p = 0; p < count; ++p) row_scores[p] *= inverse;
    }
    for (int64_t p = 0; p < count; ++p) {
        const T *value = values + offset(start + p);
        for (int64_t g = 0; g < group; ++g) {
            const float weight = scores[g * count + p];
            float *sum = sums + g * dim;
            for (int64_t i = 0; i < dim; ++i) sum[i] += weight * to_float(value[i]);
        }
    }
    T *out_row = out + token * shape.num_heads * dim + kv_head * group * dim;
    for (int64_t i = 0; i < group * dim; ++i) store(sums[i], out_row + i);
}

template <class T>
void run(const T *q, const T *keys, const T *values, T *out, const Batch &batch, const Shape &shape, int threads) {
    std::vector<int32_t> row_of(batch.row_offsets[batch.num_rows]);
    for (int64_t row = 0; row < batch.num_rows; ++row)
        for (int32_t token = batch.row_offsets[row]; token < batch.row_offsets[row + 1]; ++token)
            row_of[token] = static_cast<int32_t>(row);
    const int64_t tasks = static_cast<int64_t>(row_of.size()) * shape.num_kv_heads;
#pragma omp parallel num_threads(threads)
    {
        std::vector<int32_t> path;
        std::vector<float> scratch;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; ++task) {
            const int64_t token = task / shape.num_kv_heads;
            attend(q, keys, values, out, batch, shape, row_of[token], token, task % shape.num_kv_heads, path, scratch);
        }
    }
}

}  // namespace

// q, out: [T, num_heads, head_dim]; keys, values: [pages, page_size, num_kv_heads, head_dim], one layer;
// the int32 arrays are those of specdec.pack.PackedBatch. Rows past row_offsets[num_rows] are left alone.
extern "C" void specdec_paged_attention(
    int bfloat16, const void *q, const void *keys, const void *values, void *out, const int32_t *parents,
    const int32_t *depths, const int32_t *row_offsets, const int32_t *cached, const int32_t *page_table,
    int64_t num_rows, int64_t table_width, int64_t page_size, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
    int64_t window, float scale, float soft_cap, int threads) {
    const Batch batch{parents, depths, row_offsets, cached, page_table, num_rows, table_width, page_size};
    const Shape shape{num_heads, num_kv_heads, head_dim, window, scale, soft_cap};
    if (bfloat16)
        run(static_cast<const uint16_t *>(q), static_cast<const uint16_t *>(keys), static_cast<const uint16_t *>(values),
            static_cast<uint16_t *>(out), batch, shape, threads);
    else
        run(static_cast<const float *>(q), static_cast<const float *>(keys), static_cast<const float *>(values),
            static_cast<float *>(out), batch, shape, threads);
}
