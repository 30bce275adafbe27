// Attention over block tables, by tiles of the context that fit the cache.

#include <omp.h>

#include "products.h"
#include "results.h"
#include "sharing.h"
#include "tile_products.h"

#define EXPORT __attribute__((visibility("default")))

// ---------------------------------------------------------------------------------------------------------- the tiles

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
    int64_t count = chunk->high - chunk->low, size = group_size(args);
    int64_t padded = round_up(count, work->layout.uses_tiles ? TILE_STEPS : LANES);
    const float *k_scales = args->k_scales.data ? scratch->k_scales + chunk->low : NULL;
    const float *v_scales = args->v_scales.data ? scratch->v_scales + chunk->low : NULL;
    int is_plain = format == B_BF16_DOT && args->scale > 0 && !k_scales && !args->softcap && !args->alibi_slopes;
    for (int64_t r = 0; r < chunk->rows; r++) {
        int64_t row = chunk->first_row + r;
        float *scores = scratch->scores + r * SCORES_STRIDE + chunk->low, scale = 1.0f, max;
        int64_t head = work->group->head * size + row % size;
        RowView view = view_row(args, head, scratch->queries[row / size].position - chunk->start - chunk->low, count);
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
#if HAS_TILES
    if (work->layout.uses_tiles) {
        multiply_keys_by_tiles(work, chunk);
        soften(work, chunk);
        multiply_values_by_tiles(work, chunk);
        return;
    }
#endif
    multiply_keys(work, chunk);
    soften(work, chunk);
    multiply_values(work, chunk);
}

// Attends to the tokens [start, end), chunk by chunk.
static void attend_tile(const Work *work, const Item *item, int64_t start, int64_t end) {
    const AttendArgs *args = work->args;
    Scratch *scratch = work->scratch;
    const Layout *layout = &work->layout;
    int64_t offset = layout->is_direct ? start - item->start : 0, size = group_size(args);
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
#if HAS_TILES
    if (layout->uses_tiles) find_tile_values(work, &chunk, end - start);
#endif
    const int64_t low_step = layout->uses_tiles ? TILE_STEPS : MAX_SEGMENT;
    for (int64_t row = 0; row < work->rows; row += work->chunk_rows) {
        chunk.first_row = row;
        chunk.rows = min64(work->chunk_rows, work->rows - row);
        const Query *first = &scratch->queries[row / size], *last = &scratch->queries[(row + chunk.rows - 1) / size];
        chunk.high = min64(end, last->position + 1) - start;
        int64_t seen = args->sliding_window ? first->position - start + 1 - args->sliding_window : 0;
        chunk.low = max64(0, seen) / low_step * low_step;
        if (chunk.low >= chunk.high) continue;
        attend_chunk(work, &chunk);
        chunk.fetches = 0;
    }
}

// ----------------------------------------------------------------------------------------------------------- an item

static void read_queries(const Work *work) {
    const AttendArgs *args = work->args;
    Scratch *scratch = work->scratch;
    int format = work->layout.format;
    int64_t dim = args->head_dim, size = group_size(args);
    for (int64_t row = 0; row < work->rows; row++) {
        int64_t head = work->group->head * size + row % size;
        int64_t first = scratch->queries[row / size].token * args->q_token_stride + head * args->q_head_stride;
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

// Lists the queries of an item and of those that share its context. Returns how many they are.
static int64_t list_queries(const Plan *plan, const Item *item, Query *queries) {
    int64_t count = 0;
    for (;; item = &plan->items[item->next]) {
        const Group *group = &plan->groups[item->group];
        for (int64_t i = 0; i < group->num_queries; i++) {
            queries[count++] = (Query){group->first_query + i, group->first_position + i};
        }
        if (item->next < 0) return count;
    }
}

// How the rows of an item are multiplied: to the same bits as those of its first sequence alone.
static Work begin_work(const AttendArgs *args, const Plan *plan, const Item *item, Scratch *scratch) {
    const Group *group = &plan->groups[item->group];
    int64_t size = group_size(args), rows = list_queries(plan, item, scratch->queries) * size;
    Layout layout = choose_layout(args, group->num_queries * size, group->num_queries == 1);
    Work work = {args, group, scratch, layout, rows, layout.uses_tiles ? MAX_CHUNK_ROWS : CHUNK_ROWS, 0};
    if (item->num_shared > 1) {
        work.chunk_rows = work.chunk_rows / size * size;
        work.alike = may_mix_rows(work.layout.format, size, args->v_head_dim) ? 0 : size;
    }
    return work;
}

static void attend_item(const Work *work, const Item *item) {
    const Layout *layout = &work->layout;
    Scratch *scratch = work->scratch;
    if (layout->is_direct) {
        find_blocks(work->args, layout, work->group, item->start, item->end, scratch->k_groups, scratch->v_segments);
    } else {
        find_packed(layout, scratch->packed_k, scratch->packed_v, scratch->k_groups, scratch->v_segments);
    }
    read_queries(work);
    memset(scratch->sums, 0, work->rows * work->args->v_head_dim * sizeof(float));
    for (int64_t row = 0; row < work->rows; row++) {
        scratch->max[row] = LOWEST;
        scratch->total[row] = 0.0f;
    }
    for (int64_t start = item->start; start < item->end; start += layout->tile_tokens) {
        attend_tile(work, item, start, min64(start + layout->tile_tokens, item->end));
    }
}

// Writes the rows of an item and of those that share its context, and merges the groups that this completes: waiting for
// all threads in between would cost more.
static void finish_item(const AttendArgs *args, const Plan *plan, const Item *item, Scratch *scratch) {
    for (int64_t row = 0;; item = &plan->items[item->next]) {
        Group *group = &plan->groups[item->group];
        float *partial = item->partial < 0 ? NULL : plan->partials + item->partial;
        write_rows(args, group, partial, scratch->max + row, scratch->total + row, scratch->sums + row * args->v_head_dim);
        row += group->num_queries * group_size(args);
        if (group->num_items > 1 && __atomic_sub_fetch(&group->num_open, 1, __ATOMIC_ACQ_REL) == 0) {
            merge_group(args, group, plan->partials, scratch->merged);
        }
        if (item->next < 0) return;
    }
}

// ------------------------------------------------------------------------------------------------------------ a call

// Lays the plan out at *place, as large as it was counted.
static void take_plan(Plan *plan, char **place) {
    plan->table_bits = 4;
    while (1 << plan->table_bits < plan->num_items) plan->table_bits++;
    plan->groups = take(place, plan->num_groups * (int64_t)sizeof(Group));
    plan->items = take(place, plan->num_items * (int64_t)sizeof(Item));
    plan->order = take(place, plan->num_items * (int64_t)sizeof(int32_t));
    plan->last_seen = take(place, (int64_t)sizeof(int32_t) << plan->table_bits);
    plan->partials = take(place, plan->partial_floats * 4);
}

// Attends. Returns the bytes of workspace that this takes; with fewer it does nothing else.
EXPORT int64_t pagedkv_attend(const AttendArgs *args, char *workspace, int64_t workspace_bytes) {
    Plan plan = {0};
    make_plan(args, &plan);
    char *place = (char *)(uintptr_t)round_up((int64_t)(uintptr_t)workspace, 64);
    take_plan(&plan, &place);
    char *scratches = place;
    take_scratch(args, &place);
    int64_t scratch_bytes = place - scratches;
    int64_t needed = scratches - workspace + scratch_bytes * args->num_threads;
    if (needed > workspace_bytes) return needed + 64;
    make_plan(args, &plan);
    share_contexts(args, &plan);
    order_items(&plan);
    clear_padding(args);
    // A thread takes all heads of the same context where enough is left for the other threads.
    int64_t heads = args->num_kv_heads, chunk = plan.num_ordered >= 4 * heads * args->num_threads ? heads : 1;
#pragma omp parallel num_threads(args->num_threads)
    {
        char *own = scratches + scratch_bytes * omp_get_thread_num();
        Scratch scratch = take_scratch(args, &own);
        // The last items of a long prompt see the most of it: begun first, none of them is waited for at the end.
#pragma omp for schedule(dynamic, chunk) nowait
        for (int64_t i = plan.num_ordered - 1; i >= 0; i--) {
            const Item *item = &plan.items[plan.order[i]];
            Work work = begin_work(args, &plan, item, &scratch);
            attend_item(&work, item);
            finish_item(args, &plan, item, &scratch);
        }
#if HAS_TILES
        end_tiles(&scratch);
#endif
    }
    return needed;
}

// 0 where AttendArgs.tiles may be other than 0, or an error number; see find_tiles_error.
EXPORT int32_t pagedkv_attention_tiles_error(void) { return find_tiles_error(); }
