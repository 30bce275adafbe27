// How the keys and values of a context are multiplied, and where they lie.
#pragma once

#include "gemm.h"
#include "plan.h"
#include "tiles.h"

enum {
    TILE_TOKENS = 128,         // of the context at once
    TILE_TOKENS_FLOATS = 64,   // where keys and values are copied as floats; half of the L1 cache at 64 channels
    MAX_DIRECT_ROWS = 12,      // above it, widening a tile once and for all pays
    MAX_INTEGER_DEPTH = 512,   // whose sums of 16-bit integers × 8-bit ones fit 32 bits
    TILE_STEPS = 2 * TILE_PAIRS,  // tokens whose values are a tile; a multiple of LANES
    MAX_SEGMENT = 16,          // tokens whose values are found by one pointer
    AHEAD_TOKENS = 32,         // that are asked for from memory: as many as are multiplied while a miss takes
    // Entries of pointers behind the last token: tiles are filled up, and memory is asked for in front.
    SPARE_GROUPS = 2 * MAX_TILE_VECTORS + AHEAD_TOKENS / LANES,
    MAX_GROUPS = SPLIT_TOKENS_MANY_ROWS / LANES + SPARE_GROUPS,
    MAX_SEGMENTS = SPLIT_TOKENS_MANY_ROWS / 8 + AHEAD_TOKENS / 8,
};

// How an item's keys and values are multiplied.
typedef struct {
    int format;         // of B: in blocks, or in scratch
    int is_direct;      // in blocks
    int uses_tiles;     // for B_BF16_DOT, instead of vectors
    int64_t tile_tokens, segment;
    int64_t k_line_bytes, v_line_bytes;
} Layout;

// The format of keys and values that are read in place.
INLINE int direct_format(const AttendArgs *args) {
    if (args->kv_dtype == FP32) return B_FP32;
    if (args->kv_dtype == FP16) return B_FP16;
    if (args->kv_dtype == E4M3) return B_E4M3;
    if (args->kv_dtype == E5M2) return B_E5M2;
    // 16-bit integers hold more of a query or weight than halves do, and less than floats.
    int allows_integers = args->q_dtype != FP32 && args->head_dim <= MAX_INTEGER_DEPTH;
    if (args->kv_dtype == INT8) return allows_integers ? B_INT8_DOT : B_INT8_PAIRS;
    return HAS_BF16_DOT && args->q_dtype == BF16 ? B_BF16_DOT : B_BF16_PAIRS;
}

// The format of copies: pairs of bf16 where queries are bf16 and elements are bf16 numbers exactly.
INLINE int packed_format(const AttendArgs *args) {
    int fits = args->kv_dtype != FP32 && args->kv_dtype != FP16;  // INT4 is rounded to bf16, as torch would round it
    return HAS_BF16_DOT && args->q_dtype == BF16 && fits ? B_BF16_DOT : B_FP32;
}

// Whether the products of a group are made by tiles, which does not depend on how many rows there are beside it.
INLINE int wants_tiles(const AttendArgs *args, int is_decode) {
    if (!HAS_TILES || packed_format(args) != B_BF16_DOT) return 0;
    // Weights of elements of 8 bits are multiplied by a scale before bf16 would round them, which a decode must not.
    if (is_decode && is_scaled(args->kv_dtype)) return 0;
    return (args->tiles & (is_decode ? TILES_OF_DECODES : TILES_OF_PROMPTS)) != 0;
}

// `rows` are those of a group, and of a decode where it has one query.
INLINE Layout choose_layout(const AttendArgs *args, int64_t rows, int is_decode) {
    int uses_tiles = wants_tiles(args, is_decode), direct = args->kv_dtype == INT4 ? B_FP32 : direct_format(args);
    int is_direct = (rows <= MAX_DIRECT_ROWS || direct == B_BF16_DOT) && args->block_size % LANES == 0;
    is_direct &= args->kv_dtype != INT4;
    if (uses_tiles) is_direct = direct == B_BF16_DOT && args->block_size % TILE_COLUMNS == 0;
    int format = is_direct ? direct : packed_format(args);
    int64_t tile = format == B_FP32 && !is_direct ? TILE_TOKENS_FLOATS : TILE_TOKENS;
    return (Layout){
        .format = format,
        .is_direct = is_direct,
        .uses_tiles = uses_tiles,
        .tile_tokens = tile,
        .segment = is_direct ? min64(args->block_size, MAX_SEGMENT) : tile,
        .k_line_bytes = (is_direct ? args->block_size : tile) * column_bytes(format),
        .v_line_bytes = args->v_head_dim * column_bytes(format),
    };
}

// A head's keys or values in the block of a token.
INLINE const char *head_block(const AttendArgs *args, const void *cache, int64_t dim, const Group *group, int64_t token) {
    int64_t block = args->block_table[group->sequence * args->block_table_stride + token / args->block_size];
    int64_t head_bytes = elements_bytes(args->kv_dtype, dim * args->block_size);
    return (const char *)cache + (block * args->num_kv_heads + group->head) * head_bytes;
}

// Columns from `offset` on of lines of B.
INLINE const char *b_columns(int format, const char *b, int64_t offset) { return b + offset * column_bytes(format); }

// Steps from `offset` on; even where steps lie in pairs.
INLINE const char *b_steps(int format, const char *b, int64_t offset, int64_t ldb) {
    return b + offset * ldb * column_bytes(format) / steps_per_line(format);
}

// Fills entries up to `count`; those from `known` on repeat the last one that is known.
INLINE void repeat_last(const char **entries, int64_t known, int64_t count) {
    for (int64_t i = known; i < count; i++) entries[i] = entries[known - 1];
}

// Finds the tokens [start, end) in their blocks: keys of each LANES tokens, values of each segment.
static void find_blocks(const AttendArgs *args, const Layout *layout, const Group *group, int64_t start, int64_t end,
                        const char **k_groups, const char **v_segments) {
    int64_t size = args->block_size, num_groups = 0, num_segments = 0;
    for (int64_t token = start; token < end; token += size) {  // a block is begun at its start
        int64_t known = min64(size, end - token);
        const char *k = head_block(args, args->k, args->head_dim, group, token);
        const char *v = head_block(args, args->v, args->v_head_dim, group, token);
        for (int64_t offset = 0; offset < known; offset += LANES) {
            k_groups[num_groups++] = b_columns(layout->format, k, offset);
        }
        for (int64_t offset = 0; offset < known; offset += layout->segment) {
            v_segments[num_segments++] = b_steps(layout->format, v, offset, args->v_head_dim);
        }
    }
    repeat_last(k_groups, num_groups, num_groups + SPARE_GROUPS);
    repeat_last(v_segments, num_segments, num_segments + AHEAD_TOKENS / 8);
}

// The same of a tile in scratch.
static void find_packed(const Layout *layout, const void *k, const void *v, const char **k_groups, const char **v_segments) {
    int64_t count = layout->tile_tokens / LANES;
    for (int64_t i = 0; i < count; i++) k_groups[i] = b_columns(layout->format, k, i * LANES);
    repeat_last(k_groups, count, count + SPARE_GROUPS);
    v_segments[0] = v;
}
