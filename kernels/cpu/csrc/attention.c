// Attention over block tables, by tiles of the context that fit the cache.

#include <omp.h>

#include "blocks.h"
#include "softmax.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    CHUNK_ROWS = 24,  // of an item at once: their scores with a tile stay in the L1 cache
    SCORES_STRIDE = TILE_TOKENS + COLUMNS_STEP,
};

typedef struct {
    const char **k_groups, **v_segments;
    char *packed_k, *packed_v;
    float *q, *q_scales;      // of all rows; so are max, total and sums
    uint16_t *q_pairs;
    float *max, *total, *sums;
    float *k_scales, *v_scales;  // of a tile
    float *scores, *weight_scales;  // of a chunk
    uint16_t *weight_pairs;
} Scratch;

typedef struct {
    const AttendArgs *args;
    const Group *group;
    Scratch *scratch;
    Layout layout;
    int64_t rows;  // row = query × group size + head in group
} Work;

// ---------------------------------------------------------------------------------------------------------- the tiles

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
        .columns = dim,
        .depth = chunk->high - chunk->low,
        .line_bytes = layout->v_line_bytes,
        .segment = layout->segment,
        .ahead = chunk->fetches ? AHEAD_TOKENS / layout->segment : 0,
    };
    multiply_steps(layout->format, &product);
}

INLINE void raise_max(const Work *work, int64_t row, float max) {
    Scratch *scratch = work->scratch;
    if (max <= scratch->max[row]) return;
    int64_t dim = work->args->v_head_dim;
    float factor = exp2f(scratch->max[row] - max), *sums = scratch->sums + row * dim;
    scratch->max[row] = max;
    scratch->total[row] *= factor;
    for (int64_t i = 0; i < dim; i += LANES) put(sums + i, load(sums + i) * factor);
}

// Turns a chunk's dot products into weights, updating the running maximum, total and sums of each row.
static void soften(const Work *work, const Chunk *chunk) {
    const AttendArgs *args = work->args;
    Scratch *scratch = work->scratch;
    int format = work->layout.format;
    int64_t count = chunk->high - chunk->low, padded = round_up(count, LANES);
    const float *k_scales = args->k_scales.data ? scratch->k_scales + chunk->low : NULL;
    const float *v_scales = args->v_scales.data ? scratch->v_scales + chunk->low : NULL;
    int is_plain = format == B_BF16_DOT && args->scale > 0 && !k_scales && !args->softcap && !args->alibi_slopes;
    for (int64_t r = 0; r < chunk->rows; r++) {
        int64_t row = chunk->first_row + r;
        float *scores = scratch->scores + r * SCORES_STRIDE + chunk->low, scale = 1.0f, max;
        RowView view = view_row(args, work->group, row, chunk->start + chunk->low, count);
        if (is_plain && view.low == 0 && view.high == padded) {
            scale = args->scale * LOG2_E;
            max = find_max(scores, padded) * scale;
        } else {
            max = finish_scores(args, &view, k_scales, padded, scores);
        }
        raise_max(work, row, max);
        uint16_t *pairs = scratch->weight_pairs + r * SCORES_STRIDE + chunk->low;
        if (format == B_BF16_DOT) {
            scratch->total[row] += make_bf16_weights(scores, padded, scale, scratch->max[row], v_scales, pairs);
            continue;
        }
        scratch->total[row] += make_weights(scores, padded, scratch->max[row], v_scales);
        if (format == B_INT8_DOT) scratch->weight_scales[r] = quantize_to_shorts(scores, padded, pairs);
    }
}

static void attend_chunk(const Work *work, const Chunk *chunk) {
    multiply_keys(work, chunk);
    soften(work, chunk);
    multiply_values(work, chunk);
}

// Attends to the tokens [start, end), chunk by chunk.
static void attend_tile(const Work *work, const Item *item, int64_t start, int64_t end) {
    const AttendArgs *args = work->args;
    Scratch *scratch = work->scratch;
    const Layout *layout = &work->layout;
    int64_t offset = layout->is_direct ? start - item->start : 0;
    if (args->kv_dtype == INT4) {
        pack_nibble_tile(args, layout, work->group, start, end, item->end, scratch->packed_k, scratch->packed_v);
    } else if (!layout->is_direct) {
        pack_tile(args, layout, work->group, start, end, scratch->packed_k, scratch->packed_v);
    }
    if (args->k_scales.data) gather_scales(args, work->group, args->k_scales, start, end, item->end, scratch->k_scales);
    if (args->v_scales.data) gather_scales(args, work->group, args->v_scales, start, end, item->end, scratch->v_scales);
    Chunk chunk = {.start = start, .fetches = layout->is_direct};
    chunk.k_groups = scratch->k_groups + offset / LANES;
    chunk.v_segments = scratch->v_segments + offset / layout->segment;
    for (int64_t row = 0; row < work->rows; row += CHUNK_ROWS) {
        chunk.first_row = row;
        chunk.rows = min64(CHUNK_ROWS, work->rows - row);
        int64_t last = row + chunk.rows - 1, position = work->group->first_position - start;
        chunk.high = min64(end - start, position + last / group_size(args) + 1);
        int64_t seen = args->sliding_window ? position + row / group_size(args) + 1 - args->sliding_window : 0;
        chunk.low = max64(0, seen) / MAX_SEGMENT * MAX_SEGMENT;
        if (chunk.low >= chunk.high) continue;
        attend_chunk(work, &chunk);
        chunk.fetches = 0;
    }
}

// ----------------------------------------------------------------------------------------------------------- results

// Writes one row of the output: sums / total, the sink counted in the total.
static void write_row(const AttendArgs *args, const Group *group, int64_t row, float max, float total, float *sums) {
    int64_t query = group->first_query + row / group_size(args), dim = args->v_head_dim;
    int64_t head = group->head * group_size(args) + row % group_size(args);
    float factor = 1.0f;
    if (args->sinks) {
        float sink = args->sinks[head] * LOG2_E;
        float new_max = sink > max ? sink : max;
        factor = exp2f(max - new_max);
        total = total * factor + exp2f(sink - new_max);
    }
    int64_t first = (query * args->num_heads + head) * dim;
    factor /= total;
    if (args->kv_dtype == INT4) rotate(sums, dim);
    for (int64_t i = 0; i < dim; i += LANES) set_numbers(args->q_dtype, args->out, first + i, load(sums + i) * factor);
}

static void read_queries(const Work *work) {
    const AttendArgs *args = work->args;
    Scratch *scratch = work->scratch;
    int format = work->layout.format;
    int64_t dim = args->head_dim, size = group_size(args);
    for (int64_t row = 0; row < work->rows; row++) {
        int64_t token = work->group->first_query + row / size, head = work->group->head * size + row % size;
        int64_t first = token * args->q_token_stride + head * args->q_head_stride;
        float *q = scratch->q + row * dim;
        uint16_t *pairs = scratch->q_pairs + row * dim;
        if (format == B_BF16_DOT) {
            memcpy(pairs, (const uint16_t *)args->q + first, dim * 2);
            continue;
        }
        for (int64_t i = 0; i < dim; i += LANES) put(q + i, get_numbers(args->q_dtype, args->q, first + i));
        if (format == B_INT8_DOT) scratch->q_scales[row] = quantize_to_shorts(q, dim, pairs);
    }
}

static void run_item(const AttendArgs *args, const Group *group, const Item *item, float *partials, Scratch *scratch) {
    int64_t rows = group->num_queries * group_size(args), dim = args->v_head_dim;
    Work work = {args, group, scratch, choose_layout(args, rows), rows};
    if (work.layout.is_direct) {
        find_blocks(args, &work.layout, group, item->start, item->end, scratch->k_groups, scratch->v_segments);
    } else {
        find_packed(&work.layout, scratch->packed_k, scratch->packed_v, scratch->k_groups, scratch->v_segments);
    }
    read_queries(&work);
    memset(scratch->sums, 0, rows * dim * sizeof(float));
    for (int64_t row = 0; row < rows; row++) {
        scratch->max[row] = LOWEST;
        scratch->total[row] = 0.0f;
    }
    for (int64_t start = item->start; start < item->end; start += work.layout.tile_tokens) {
        attend_tile(&work, item, start, min64(start + work.layout.tile_tokens, item->end));
    }
    if (item->partial < 0) {
        for (int64_t row = 0; row < rows; row++) {
            write_row(args, group, row, scratch->max[row], scratch->total[row], scratch->sums + row * dim);
        }
        return;
    }
    float *partial = partials + item->partial;
    memcpy(partial, scratch->max, rows * sizeof(float));
    memcpy(partial + rows, scratch->total, rows * sizeof(float));
    memcpy(partial + 2 * rows, scratch->sums, rows * dim * sizeof(float));
}

static void merge_group(const AttendArgs *args, const Group *group, const float *partials, Scratch *scratch) {
    int64_t rows = group->num_queries * group_size(args), dim = args->v_head_dim, size = rows * (dim + 2);
    const float *first = partials + group->partial;
    for (int64_t row = 0; row < rows; row++) {
        float max = LOWEST, total = 0.0f;
        for (int64_t i = 0; i < group->num_items; i++) max = fmaxf(max, first[i * size + row]);
        memset(scratch->sums, 0, dim * sizeof(float));
        for (int64_t i = 0; i < group->num_items; i++) {
            const float *part = first + i * size;
            float factor = exp2f(part[row] - max);
            total += part[rows + row] * factor;
            for (int64_t d = 0; d < dim; d++) scratch->sums[d] += part[2 * rows + row * dim + d] * factor;
        }
        write_row(args, group, row, max, total, scratch->sums);
    }
}

static void clear_padding(const AttendArgs *args) {
    int64_t token_bytes = args->num_heads * args->v_head_dim * element_bytes(args->q_dtype);
    for (int64_t i = 0; i < args->num_sequences; i++) {
        int64_t first = args->cu_seqlens_q[i], count = args->cu_seqlens_q[i + 1] - first;
        if (args->seq_lens[i] == 0) memset((char *)args->out + first * token_bytes, 0, count * token_bytes);
    }
}

// -------------------------------------------------------------------------------------------------------- the workspace

INLINE void *take(char **place, int64_t bytes) {
    void *start = *place;
    *place += round_up(bytes, 64);
    return start;
}

// Lays a thread's scratch out at *place.
static Scratch take_scratch(const AttendArgs *args, char **place) {
    int64_t rows = max_rows(args), chunk = CHUNK_ROWS * SCORES_STRIDE;
    return (Scratch){
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
        .k_scales = take(place, SCORES_STRIDE * 4),
        .v_scales = take(place, SCORES_STRIDE * 4),
        .scores = take(place, chunk * 4),
        .weight_scales = take(place, CHUNK_ROWS * 4),
        .weight_pairs = take(place, chunk * 2),
    };
}

// Attends. Returns the bytes of workspace that this takes; with fewer it does nothing else.
EXPORT int64_t pagedkv_attend(const AttendArgs *args, char *workspace, int64_t workspace_bytes) {
    Plan plan = {0};
    make_plan(args, &plan);
    char *place = (char *)(uintptr_t)round_up((int64_t)(uintptr_t)workspace, 64);
    plan.groups = take(&place, plan.num_groups * (int64_t)sizeof(Group));
    plan.items = take(&place, plan.num_items * (int64_t)sizeof(Item));
    float *partials = take(&place, plan.partial_floats * 4);
    char *scratches = place;
    take_scratch(args, &place);
    int64_t scratch_bytes = place - scratches;
    int64_t needed = scratches - workspace + scratch_bytes * args->num_threads;
    if (needed > workspace_bytes) return needed + 64;
    make_plan(args, &plan);
    clear_padding(args);
    // A thread takes all heads of the same context where enough is left for the other threads.
    int64_t heads = args->num_kv_heads, chunk = plan.num_items >= 4 * heads * args->num_threads ? heads : 1;
#pragma omp parallel num_threads(args->num_threads)
    {
        char *own = scratches + scratch_bytes * omp_get_thread_num();
        Scratch scratch = take_scratch(args, &own);
        // The last items of a long prompt see the most of it: begun first, none of them is waited for at the end.
#pragma omp for schedule(dynamic, chunk) nowait
        for (int64_t i = plan.num_items - 1; i >= 0; i--) {
            Group *group = &plan.groups[plan.items[i].group];
            run_item(args, group, &plan.items[i], partials, &scratch);
            // Who finishes a group merges it: waiting for all threads in between would cost more.
            if (group->num_items > 1 && __atomic_sub_fetch(&group->num_open, 1, __ATOMIC_ACQ_REL) == 0) {
                merge_group(args, group, partials, &scratch);
            }
        }
    }
    return needed;
}
