// Copies rows of a KV pool, slots or whole pages, in all planes: keys and values of every layer.
// The reference is specdec/kernels/step_reference.py: copy_rows.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kParallelBytes = 1 << 18;  // below this, waking other threads costs more than they save
constexpr int64_t kLine = 64, kAhead = 512;  // bytes of a cache line, and of each row that are asked for ahead: all of a usual slot

thread_local std::vector<char> gathered;

}  // namespace

// pool: [planes, rows, row_bytes]; src, dst: int64 [count]. Within a plane every source is read before any destination is
// written, so they may overlap.
extern "C" void specdec_copy_rows(char *pool, int64_t planes, int64_t rows, int64_t row_bytes, const int64_t *src, const int64_t *dst,
                                  int64_t count, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (planes * count * row_bytes >= kParallelBytes)
    for (int64_t p = 0; p < planes; ++p) {
        char *const plane = pool + p * rows * row_bytes;
        gathered.resize(count * row_bytes);
        for (int64_t i = 0; i < count; ++i)  // rows lie apart: asked for together, they take two thirds of the time
            for (int64_t at = 0; at < std::min(row_bytes, kAhead); at += kLine) __builtin_prefetch(plane + src[i] * row_bytes + at);
        for (int64_t i = 0; i < count; ++i) std::memcpy(gathered.data() + i * row_bytes, plane + src[i] * row_bytes, row_bytes);
        for (int64_t i = 0; i < count; ++i) std::memcpy(plane + dst[i] * row_bytes, gathered.data() + i * row_bytes, row_bytes);
    }
}
