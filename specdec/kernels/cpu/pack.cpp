// Lays the rows of a step out in the flat arrays of one forward.
// The reference, which draws the layout, is specdec/pack.py: pack.
#include <cstdint>

// counts: int32 [5, rows], of each row its tokens, those cached, its logit rows, its draft nodes and its pages; parents: int32, of
// the nodes of all rows; pages: int32, the block tables of all rows; flat: int32 [5, width] as specdec/pack.py: blank has it, the
// tokens filled in; row_offsets: int32 [rows + 1] and page_table: int32 [rows, widest], both of zeros; logit_rows: int32 [R].
extern "C" void specdec_pack(int64_t rows, const int32_t *counts, const int32_t *parents, const int32_t *pages, int page_size,
                             int32_t *flat, int64_t width, int32_t *row_offsets, int32_t *page_table, int64_t widest,
                             int32_t *logit_rows) {
    int32_t start = 0;
    for (int64_t r = 0; r < rows; ++r) {
        const int32_t length = counts[r], cached = counts[rows + r], num_logits = counts[2 * rows + r];
        const int32_t num_nodes = counts[3 * rows + r], num_pages = counts[4 * rows + r], pending = length - num_nodes;
        int32_t *const positions = flat + width + start, *const slots = flat + 2 * width + start;
        int32_t *const local_parents = flat + 3 * width + start, *const depths = flat + 4 * width + start;
        for (int32_t i = 0; i < length; ++i) {
            const int32_t above = i < pending ? i - 1 : parents[i - pending] < 0 ? pending - 1 : pending + parents[i - pending];
            local_parents[i] = above;
            depths[i] = above < 0 ? 0 : depths[above] + 1;
            positions[i] = cached + depths[i];
            slots[i] = pages[(cached + i) / page_size] * page_size + (cached + i) % page_size;
        }
        for (int32_t i = 0; i < num_pages; ++i) page_table[r * widest + i] = pages[i];
        for (int32_t i = length - num_logits; i < length; ++i) *logit_rows++ = start + i;
        row_offsets[r + 1] = start += length;
        parents += num_nodes;
        pages += num_pages;
    }
}
