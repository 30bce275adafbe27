// The two products of a chunk by tiles: queries × keys and weights × values, both in pairs of bf16.
//
// C is cut into 2 × 2 tiles, or 1 × 4 where there are no more than 16 rows. Keys of 16 tokens lie in a block as a tile of B
// does, a line for each pair of channels. Values of 32 tokens are a tile of B where a block holds as many; those of smaller
// blocks are put together first, and so are the last ones, with zeros behind them.
#pragma once

#include "products.h"

#if HAS_TILES

enum { FIRST_A_TILE = 4, LAST_B_TILE = 7 };

typedef struct {
    const char *a;         // [rows, steps, pairs] of bf16
    const char *const *b;  // of keys, where each LANES columns begin; of values, each step
    float *c;              // [rows, columns]
    int64_t a_row_bytes, c_row_bytes, line_bytes;
    int64_t num_steps, pairs;  // of the sum; pairs in a step
    int64_t ahead;             // entries of b in front of the product that are asked for from memory; 0: none
    int sums_columns;          // whether C += A × B of values, or C = A × B of keys
} TileProduct;

// The tile of B of a step and 16 columns.
INLINE const char *b_tile(const TileProduct *p, int64_t step, int64_t column) {
    if (p->sums_columns) return p->b[step] + column * 64;
    return p->b[column * (TILE_COLUMNS / LANES)] + step * p->pairs * p->line_bytes;
}

INLINE void prefetch_tile(const TileProduct *p, int64_t step, int64_t column) {
    const char *line = p->b[column * (TILE_COLUMNS / LANES) + p->ahead] + step * p->pairs * p->line_bytes;
    for (int64_t i = 0; i < p->pairs; i++) __builtin_prefetch(line + i * p->line_bytes);
}

// C[row_tiles × 16, width × 16] from a column on, in tiles of 16. Both sizes are constants where this is inlined.
INLINE void multiply_tiles(const int row_tiles, const int width, const TileProduct *p, int64_t column) {
    char *c = (char *)p->c + column * 64;
#pragma GCC unroll 2
    for (int i = 0; i < row_tiles; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < width; j++) {
            if (p->sums_columns) tile_load(i * 2 + j, c + i * 16 * p->c_row_bytes + j * 64, p->c_row_bytes);
            else tile_zero(i * 2 + j);
        }
    }
    for (int64_t step = 0; step < p->num_steps; step++) {
        const char *a = p->a + step * p->pairs * 4;
#pragma GCC unroll 2
        for (int i = 0; i < row_tiles; i++) tile_load(FIRST_A_TILE + i, a + i * 16 * p->a_row_bytes, p->a_row_bytes);
#pragma GCC unroll 4
        for (int j = 0; j < width; j++) {
            if (p->ahead) prefetch_tile(p, step, column + j);
            tile_load(LAST_B_TILE - j % 2, b_tile(p, step, column + j), p->line_bytes);
#pragma GCC unroll 2
            for (int i = 0; i < row_tiles; i++) tile_dot_bf16(i * 2 + j, FIRST_A_TILE + i, LAST_B_TILE - j % 2);
        }
    }
#pragma GCC unroll 2
    for (int i = 0; i < row_tiles; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < width; j++) tile_store(i * 2 + j, c + i * 16 * p->c_row_bytes + j * 64, p->c_row_bytes);
    }
}

// Gives this thread's tiles their shapes, if they have others: C and A those of the rows, B that of the pairs.
INLINE void shape_tiles(Scratch *scratch, int64_t rows, int64_t pairs) {
    if (scratch->tile_rows == rows && scratch->tile_pairs == pairs) return;
    scratch->tile_rows = rows;
    scratch->tile_pairs = pairs;
    TileConfig config = {0};
    int64_t first = min64(rows, TILE_ROWS_MAX), second = rows > TILE_ROWS_MAX ? rows - TILE_ROWS_MAX : first;
    for (int tile = 0; tile < NUM_TILES; tile++) {
        int64_t own_rows = tile < 2 || tile == FIRST_A_TILE ? first : second, is_a = tile == FIRST_A_TILE || tile == FIRST_A_TILE + 1;
        set_tile(&config, tile, tile > FIRST_A_TILE + 1 ? pairs : own_rows, is_a ? pairs * 4 : 64);
    }
    configure_tiles(&config);
}

// After a thread's last product.
INLINE void end_tiles(Scratch *scratch) {
    if (scratch->tile_rows) release_tiles();
    scratch->tile_rows = 0;
}

static void multiply_by_tiles(Scratch *scratch, int64_t rows, int64_t columns, const TileProduct *p) {
    shape_tiles(scratch, rows, p->pairs);
    int64_t count = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS, column = 0;
    if (rows > TILE_ROWS_MAX) {
        for (; column + 2 <= count; column += 2) multiply_tiles(2, 2, p, column);
        for (; column < count; column++) multiply_tiles(2, 1, p, column);
    } else {
        for (; column + 4 <= count; column += 4) multiply_tiles(1, 4, p, column);
        for (; column < count; column++) multiply_tiles(1, 1, p, column);
    }
}

// Scores of a chunk: dot products, not scaled yet, of whole tiles of tokens.
static void multiply_keys_by_tiles(const Work *work, const Chunk *chunk) {
    Scratch *scratch = work->scratch;
    int64_t dim = work->args->head_dim, pairs = dim % (2 * TILE_PAIRS) ? TILE_PAIRS / 2 : TILE_PAIRS;
    TileProduct product = {
        .a = (const char *)(scratch->q_pairs + chunk->first_row * dim),
        .b = chunk->k_groups + chunk->low / LANES,
        .c = scratch->scores + chunk->low,
        .a_row_bytes = dim * 2,
        .c_row_bytes = SCORES_STRIDE * 4,
        .line_bytes = work->layout.k_line_bytes,
        .num_steps = dim / (2 * pairs),
        .pairs = pairs,
        .ahead = chunk->fetches ? AHEAD_TOKENS / LANES : 0,
    };
    multiply_by_tiles(scratch, chunk->rows, chunk->high - chunk->low, &product);
}

// Adds weights × values to the sums of a chunk. Behind its last token weights are 0, and values numbers.
static void multiply_values_by_tiles(const Work *work, const Chunk *chunk) {
    Scratch *scratch = work->scratch;
    int64_t dim = work->args->v_head_dim;
    TileProduct product = {
        .a = (const char *)(scratch->weight_pairs + chunk->low),
        .b = scratch->v_tiles + chunk->low / TILE_STEPS,
        .c = scratch->sums + chunk->first_row * dim,
        .a_row_bytes = SCORES_STRIDE * 2,
        .c_row_bytes = dim * 4,
        .line_bytes = work->layout.v_line_bytes,
        .num_steps = round_up(chunk->high - chunk->low, TILE_STEPS) / TILE_STEPS,
        .pairs = TILE_PAIRS,
        .sums_columns = 1,
    };
    multiply_by_tiles(scratch, chunk->rows, dim, &product);
}

// Of the last of an odd number of tokens nothing stands beside it: its pairs' second halves become zero.
INLINE void clear_second(char *line, int64_t line_bytes) {
    uint32_t *pairs = (uint32_t *)line;
    for (int64_t i = 0; i < line_bytes / 4; i++) pairs[i] &= 0xffff;
}

// Finds the values of a tile's first `count` tokens for products by tiles, those that do not lie together by copies.
static void find_tile_values(const Work *work, const Chunk *chunk, int64_t count) {
    const Layout *layout = &work->layout;
    Scratch *scratch = work->scratch;
    int64_t line_bytes = layout->v_line_bytes, segment = layout->segment;
    for (int64_t first = 0; first < count; first += TILE_STEPS) {
        char *copy = scratch->packed_v + first / 2 * line_bytes;
        int64_t known = min64(TILE_STEPS, count - first), lines = (known + 1) / 2;
        if (layout->is_direct && known == TILE_STEPS && work->args->block_size >= TILE_STEPS) {
            scratch->v_tiles[first / TILE_STEPS] = chunk->v_segments[first / segment];
            continue;
        }
        scratch->v_tiles[first / TILE_STEPS] = copy;
        for (int64_t t = 0; layout->is_direct && t < known; t += segment) {
            const char *const *from = &chunk->v_segments[(first + t) / segment];
            prefetch_bytes(from[AHEAD_TOKENS / segment], segment / 2 * line_bytes);
            memcpy(copy + t / 2 * line_bytes, *from, (min64(segment, known - t) + 1) / 2 * line_bytes);
        }
        if (known % 2) clear_second(copy + (lines - 1) * line_bytes, line_bytes);
        memset(copy + lines * line_bytes, 0, (TILE_PAIRS - lines) * line_bytes);
    }
}

#endif
