// The two products of a chunk by vectors: queries × keys and weights × values.
#pragma once

#include "scratch.h"

typedef struct {
    const AttendArgs *args;
    const Group *group;
    Scratch *scratch;
    Layout layout;
    int64_t rows;        // row = query × group size + head in group
    int64_t chunk_rows;  // that are done at once
    int64_t alike;       // rows that register tiles are cut from, see `Product`; 0: all of a chunk
} Work;

// A tile of the context and the rows that attend to it. The tokens that any of the rows sees are [low, high) of it.
typedef struct {
    int64_t start, first_row, rows, low, high;
    const char *const *k_groups, *const *v_segments;
    int fetches;  // whether memory is to be asked for: the first rows do it for all
} Chunk;

// Scores of a chunk: dot products, not scaled yet.
static void multiply_keys(const Work *work, const Chunk *chunk) {
    const Scratch *scratch = work->scratch;
    int format = work->layout.format;
    int64_t lda = work->args->head_dim / (is_dot(format) ? 2 : 1);
    Product product = {
        .a = (is_dot(format) ? (const float *)scratch->q_pairs : scratch->q) + chunk->first_row * lda,
        .a_scales = scratch->q_scales + chunk->first_row,
        .b = chunk->k_groups + chunk->low / LANES,
        .c = scratch->scores + chunk->low,
        .lda = lda,
        .ldc = SCORES_STRIDE,
        .rows = chunk->rows,
        .alike = work->alike ? work->alike : chunk->rows,
        .columns = chunk->high - chunk->low,
        .depth = work->args->head_dim,
        .line_bytes = work->layout.k_line_bytes,
        .ahead = chunk->fetches ? MAX_TILE_VECTORS + AHEAD_TOKENS / LANES : 0,
    };
    multiply_columns(format, &product);
}

// Adds weights × values to the sums of a chunk.
static void multiply_values(const Work *work, const Chunk *chunk) {
    const Scratch *scratch = work->scratch;
    const Layout *layout = &work->layout;
    int64_t dim = work->args->v_head_dim, first_segment = chunk->low / layout->segment;
    int64_t first = layout->is_direct ? 0 : chunk->low % layout->segment;
    const char *packed = chunk->v_segments[0] + first / steps_per_line(layout->format) * layout->v_line_bytes;
    int64_t places = is_dot(layout->format) ? 2 : 1;
    Product product = {
        .a = (is_dot(layout->format) ? (const float *)scratch->weight_pairs : scratch->scores) + chunk->low / places,
        .a_scales = scratch->weight_scales,
        .b = layout->is_direct ? chunk->v_segments + first_segment : &packed,
        .c = scratch->sums + chunk->first_row * dim,
        .lda = SCORES_STRIDE / places,
        .ldc = dim,
        .rows = chunk->rows,
        .alike = work->alike ? work->alike : chunk->rows,
        .columns = dim,
        .depth = chunk->high - chunk->low,
        .line_bytes = layout->v_line_bytes,
        .segment = layout->segment,
        .ahead = chunk->fetches ? AHEAD_TOKENS / layout->segment : 0,
    };
    multiply_steps(layout->format, &product);
}
