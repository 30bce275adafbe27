// What a thread works with besides its registers.
#pragma once

#include "copies.h"

enum {
    CHUNK_ROWS = 24,      // of an item at once: their scores with a tile stay in the L1 cache
    MAX_CHUNK_ROWS = 32,  // the same by tiles, two of rows
    SCORES_STRIDE = TILE_TOKENS + COLUMNS_STEP,
};

typedef struct {
    int64_t token, position;  // its row of q, and where it stands in its sequence
} Query;

typedef struct {
    Query *queries;  // of the item
    const char **k_groups, **v_segments;
    const char *v_tiles[TILE_TOKENS / TILE_STEPS];  // where the values of each TILE_STEPS tokens of a tile begin
    int64_t tile_rows, tile_pairs;                  // that this thread's tiles are configured for; 0: they are not
    char *packed_k, *packed_v;
    float *q, *q_scales;      // of all rows; so are max, total and sums
    uint16_t *q_pairs;
    float *max, *total, *sums;
    float *merged;               // of a row
    float *k_scales, *v_scales;  // of a tile
    float *scores, *weight_scales;  // of a chunk
    uint16_t *weight_pairs;
} Scratch;

INLINE void *take(char **place, int64_t bytes) {
    void *start = *place;
    *place += round_up(bytes, 64);
    return start;
}

// Lays a thread's scratch out at *place.
static Scratch take_scratch(const AttendArgs *args, char **place) {
    int64_t rows = max_rows(args), chunk = MAX_CHUNK_ROWS * SCORES_STRIDE;
    return (Scratch){
        .queries = take(place, rows * sizeof(Query)),
        .k_groups = take(place, MAX_GROUPS * sizeof(char *)),
        .v_segments = take(place, MAX_SEGMENTS * sizeof(char *)),
        .packed_k = take(place, args->head_dim * TILE_TOKENS * 4),
        .packed_v = take(place, args->v_head_dim * TILE_TOKENS * 4),
        .q = take(place, rows * args->head_dim * 4),
        .q_scales = take(place, rows * 4),
        .q_pairs = take(place, rows * args->head_dim * 2),
        .max = take(place, rows * 4),
        .total = take(place, rows * 4),
        .sums = take(place, rows * args->v_head_dim * 4),
        .merged = take(place, args->v_head_dim * 4),
        .k_scales = take(place, SCORES_STRIDE * 4),
        .v_scales = take(place, SCORES_STRIDE * 4),
        .scores = take(place, chunk * 4),
        .weight_scales = take(place, MAX_CHUNK_ROWS * 4),
        .weight_pairs = take(place, chunk * 2),
    };
}
