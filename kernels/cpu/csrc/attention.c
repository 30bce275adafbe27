// Attention over block tables with an online softmax in base 2 (Milakov & Gimelshein 2018; Dao 2023, FlashAttention-2).
//
// The work is cut into items of (sequence, KV head, some queries, some of the context). The query heads that share a
// KV head are the rows of one item, so that its keys and values are read once. Long contexts are split between items
// whose partial results are merged afterwards (Flash-Decoding). The cuts depend on a sequence's own lengths alone: the
// same sequence gives the same bits in every batch and with every number of threads.

#include <omp.h>
#include <stddef.h>

#include "gemm.h"
#include "quantize.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    MAX_ITEM_ROWS = 192,       // query × head rows of an item, when one token's heads are not more
    MAX_DIRECT_ROWS = 12,      // above it, widening a tile to floats first pays
    DIRECT_TILE_TOKENS = 128,  // read from the blocks in place
    PACKED_TILE_TOKENS = 64,   // copied to scratch as floats; half of the L1 cache at 64 channels
    MAX_INTEGER_DEPTH = 512,
    FEW_ROWS = 32,
    SPLIT_TOKENS_FEW_ROWS = 512,    // context of an item of few rows; a multiple of every block size
    SPLIT_TOKENS_MANY_ROWS = 4096,  // enough rows that merging partial results is cheap
};

static const float LOG2_E = 1.44269504f;
static const float LOWEST = -1e30f;  // below any score, and finite: differences of it with -inf are -inf, not NaN

typedef struct {
    const void *q;  // [num_tokens, num_heads, head_dim]
    void *out;      // [num_tokens, num_heads, v_head_dim], contiguous, of the dtype of q
    const void *k, *v;
    const int32_t *cu_seqlens_q, *seq_lens, *block_table;
    const float *sinks, *alibi_slopes;  // [num_heads] or null
    int64_t q_token_stride, q_head_stride, block_table_stride;
    int64_t num_sequences, num_heads, num_kv_heads, head_dim, v_head_dim, block_size;
    int64_t sliding_window;  // 0 is none
    Scales k_scales, v_scales;
    int32_t q_dtype, kv_dtype, num_threads;
    float scale, softcap;  // softcap 0 is none
} AttendArgs;

typedef struct {
    int64_t sequence, head, first_query, num_queries;
    int64_t first_position;  // of first_query in its sequence
    int64_t num_items, partial;
    int64_t num_open;  // items that have no result yet
} Group;  // queries of one KV head, whose items are merged

typedef struct {
    int64_t group, start, end;  // tokens of the context
    int64_t partial;            // where its result goes, in floats; -1 is the output itself
} Item;

typedef struct {
    Group *groups;
    Item *items;
    int64_t num_groups, num_items, partial_floats;
} Plan;

typedef struct {
    float *q, *scores, *sums, *max, *total, *packed_k, *packed_v, *k_scales, *v_scales, *q_scales, *weight_scales;
    uint16_t *q_pairs, *weight_pairs;
} Scratch;

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

INLINE int64_t group_size(const AttendArgs *args) { return args->num_heads / args->num_kv_heads; }
INLINE int64_t max_rows(const AttendArgs *args) { return max64(MAX_ITEM_ROWS, group_size(args)); }

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

// The format of keys and values that are copied to scratch as floats.
INLINE int packing_format(const AttendArgs *args) {
    int format = direct_format(args);
    return format == B_BF16_DOT ? B_BF16_PAIRS : format == B_INT8_DOT ? B_INT8_PAIRS : format;
}

// ---------------------------------------------------------------------------------------------------------- planning

static void add_group(const AttendArgs *args, Plan *plan, Group group) {
    int64_t end = group.first_position + group.num_queries, start = 0;
    if (args->sliding_window) {
        start = max64(0, group.first_position - args->sliding_window + 1) / args->block_size * args->block_size;
    }
    int64_t rows = group.num_queries * group_size(args);
    int64_t split = rows <= FEW_ROWS ? SPLIT_TOKENS_FEW_ROWS : SPLIT_TOKENS_MANY_ROWS;
    group.num_items = (end - 1) / split - start / split + 1;
    group.num_open = group.num_items;
    group.partial = plan->partial_floats;
    for (int64_t i = 0; i < group.num_items; i++) {
        Item item = {plan->num_groups, start, min64(end, (start / split + 1) * split), -1};
        if (group.num_items > 1) {
            item.partial = plan->partial_floats;
            plan->partial_floats += rows * (args->v_head_dim + 2);
        }
        if (plan->items) plan->items[plan->num_items] = item;
        plan->num_items++;
        start = item.end;
    }
    if (plan->groups) plan->groups[plan->num_groups] = group;
    plan->num_groups++;
}

// Counts groups, items and floats; writes them too where the plan has room.
static void make_plan(const AttendArgs *args, Plan *plan) {
    plan->num_groups = plan->num_items = plan->partial_floats = 0;
    int64_t step = max64(1, MAX_ITEM_ROWS / group_size(args));
    for (int64_t sequence = 0; sequence < args->num_sequences; sequence++) {
        int64_t first = args->cu_seqlens_q[sequence], end = args->cu_seqlens_q[sequence + 1];
        if (args->seq_lens[sequence] == 0) continue;
        int64_t offset = args->seq_lens[sequence] - end;  // from a query's row to its position
        for (int64_t query = first; query < end; query += step) {
            for (int64_t head = 0; head < args->num_kv_heads; head++) {
                add_group(args, plan, (Group){sequence, head, query, min64(step, end - query), query + offset, 0, 0, 0});
            }
        }
    }
}

// --------------------------------------------------------------------------------------------------- keys and values

// The block of a token.
INLINE int64_t block_of(const AttendArgs *args, const Group *group, int64_t token) {
    return args->block_table[group->sequence * args->block_table_stride + token / args->block_size];
}

// A head's keys or values in the block of a token.
INLINE const char *head_block(const AttendArgs *args, const void *cache, int64_t dim, const Group *group, int64_t token) {
    int64_t block = block_of(args, group, token);
    int64_t head_bytes = dim * args->block_size * element_bytes(args->kv_dtype);
    return (const char *)cache + (block * args->num_kv_heads + group->head) * head_bytes;
}

// Columns from `offset` on of steps of B, in place.
INLINE const char *b_columns(int format, const char *b, int64_t offset) { return b + offset * column_bytes(format); }

// Steps from `offset` on; even where steps lie in pairs.
INLINE const char *b_steps(int format, const char *b, int64_t offset, int64_t ldb) {
    return b + offset * ldb * column_bytes(format) / steps_per_line(format);
}

// Widens B[depth, columns] to floats; columns are a multiple of LANES, depth is that of whole pairs where there are pairs.
INLINE void widen(const int format, const char *b, int64_t ldb, int64_t depth, int64_t columns, float *out, int64_t ldo) {
    int64_t line_bytes = ldb * column_bytes(format), second = is_paired(format) ? 0 : line_bytes;
    for (int64_t k = 0; k < depth; k += 2) {
        for (int64_t column = 0; column < columns; column += LANES) {
            put(out + k * ldo + column, load_step(format, b, 0, column));
            put(out + (k + 1) * ldo + column, load_step(format, b + second, 1, column));
        }
        b += second + line_bytes;
    }
}

INLINE void widen_narrow(int dtype, int format, const char *b, int64_t ldb, int64_t depth, int64_t columns, float *out, int64_t ldo) {
    for (int64_t k = 0; k < depth; k++) {
        for (int64_t column = 0; column < columns; column++) {
            int64_t index = is_paired(format) ? (k / 2 * ldb + column) * 2 + k % 2 : k * ldb + column;
            out[k * ldo + column] = get_element(dtype, b, index);
        }
    }
}

static void widen_any(int dtype, int format, const char *b, int64_t ldb, int64_t depth, int64_t columns, float *out, int64_t ldo) {
    if (columns % LANES) widen_narrow(dtype, format, b, ldb, depth, columns, out, ldo);
    else if (format == B_FP32) widen(B_FP32, b, ldb, depth, columns, out, ldo);
    else if (format == B_FP16) widen(B_FP16, b, ldb, depth, columns, out, ldo);
    else if (format == B_E4M3) widen(B_E4M3, b, ldb, depth, columns, out, ldo);
    else if (format == B_E5M2) widen(B_E5M2, b, ldb, depth, columns, out, ldo);
    else if (format == B_INT8_PAIRS) widen(B_INT8_PAIRS, b, ldb, depth, columns, out, ldo);
    else widen(B_BF16_PAIRS, b, ldb, depth, columns, out, ldo);
}

// Copies a tile's keys to [head_dim, PACKED_TILE_TOKENS] and values to [PACKED_TILE_TOKENS, v_head_dim] as floats.
static void pack_tile(const AttendArgs *args, const Group *group, int64_t start, int64_t end, Scratch *scratch) {
    int format = packing_format(args);
    int64_t size = args->block_size, dim = args->head_dim, v_dim = args->v_head_dim;
    for (int64_t token = start; token < end;) {
        int64_t offset = token % size, count = min64(size - offset, PACKED_TILE_TOKENS), place = token - start;
        const char *k = head_block(args, args->k, dim, group, token);
        widen_any(args->kv_dtype, format, b_columns(format, k, offset), size, dim, count, scratch->packed_k + place,
                  PACKED_TILE_TOKENS);
        const char *v = head_block(args, args->v, v_dim, group, token);
        widen_any(args->kv_dtype, format, b_steps(format, v, offset, v_dim), v_dim,
                  round_up(min64(count, end - token), 2), v_dim, scratch->packed_v + place * v_dim, v_dim);
        token += count;
    }
}

// Copies the scales of a tile's tokens, of elements as their format gives them. Those of the tokens from `next` on, up to `limit`, are asked for.
static void gather_scales(const AttendArgs *args, const Group *group, Scales scales, int64_t start, int64_t end,
                          int64_t limit, float *out) {
    float unit = args->kv_dtype == E4M3 ? 256.0f : 1.0f;
    int64_t size = args->block_size;
    for (int64_t token = start; token < end;) {
        int64_t offset = token % size, count = min64(size - offset, end - token), next = token + DIRECT_TILE_TOKENS;
        const float *head = scales.data + group->head * scales.head_stride;
        const float *first = head + block_of(args, group, token) * scales.block_stride + offset * scales.token_stride;
        if (next < limit) __builtin_prefetch(head + block_of(args, group, next) * scales.block_stride);
        for (int64_t i = 0; i < count; i++) out[token - start + i] = first[i * scales.token_stride] * unit;
        token += count;
    }
    // Zeros fill the last vector up, so that no weight is made of what lies there.
    memset(out + (end - start), 0, (round_up(end - start, LANES) - (end - start)) * sizeof(float));
}

// ---------------------------------------------------------------------------------------------------------- the tiles

typedef struct {
    const AttendArgs *args;
    const Group *group;
    Scratch *scratch;
    int64_t rows;       // row = query × group size + head in group
    int is_direct;      // keys and values are read in place
    int64_t tile_tokens;
} Work;

INLINE int64_t row_position(const Work *work, int64_t row) {
    return work->group->first_position + row / group_size(work->args);
}

// How far in front of the multiplication memory is asked for: as long as a miss takes, and whole blocks of usual sizes.
INLINE int64_t prefetch_tokens(const AttendArgs *args) { return max64(32, args->block_size); }

// Scores of rows [first_row, rows) with the tokens [start, end): dot products, not scaled yet.
static void multiply_keys(const Work *work, int64_t first_row, int64_t start, int64_t end, int64_t limit) {
    const AttendArgs *args = work->args;
    int format = work->is_direct ? direct_format(args) : B_PACKED;
    int64_t size = args->block_size, dim = args->head_dim, tile = work->tile_tokens;
    const char *q = is_dot(format) ? (const char *)work->scratch->q_pairs : (const char *)work->scratch->q;
    const float *q_scales = work->scratch->q_scales + first_row;
    int64_t lda = is_dot(format) ? dim / 2 : dim;
    q += first_row * lda * 4;
    float *scores = work->scratch->scores + first_row * tile;
    if (!work->is_direct) {
        multiply(format, work->rows - first_row, round_up(end - start, LANES), dim, q, lda, q_scales,
                 work->scratch->packed_k, tile, 0, scores, tile, 0);
        return;
    }
    for (int64_t token = start; token < end;) {
        int64_t offset = token % size, count = min64(size - offset, end - token);
        const char *k = b_columns(format, head_block(args, args->k, dim, work->group, token), offset);
        int64_t ahead = 0, next = token + prefetch_tokens(args);
        if (next < limit) ahead = b_columns(format, head_block(args, args->k, dim, work->group, next), next % size) - k;
        multiply(format, work->rows - first_row, round_up(count, LANES), dim, q, lda, q_scales, k, size, ahead,
                 scores + (token - start), tile, 0);
        token += count;
    }
}

// Adds weights × values of the tokens [start, end) to the sums of rows [first_row, rows).
static void multiply_values(const Work *work, int64_t first_row, int64_t start, int64_t end, int64_t limit) {
    const AttendArgs *args = work->args;
    int format = work->is_direct ? direct_format(args) : B_PACKED;
    int64_t size = args->block_size, dim = args->v_head_dim, tile = work->tile_tokens;
    const char *weights = is_dot(format) ? (const char *)work->scratch->weight_pairs : (const char *)work->scratch->scores;
    const float *weight_scales = work->scratch->weight_scales + first_row;
    int64_t lda = is_dot(format) ? tile / 2 : tile;
    weights += first_row * lda * 4;
    float *sums = work->scratch->sums + first_row * dim;
    if (!work->is_direct) {
        multiply(format, work->rows - first_row, dim, end - start, weights, lda, weight_scales, work->scratch->packed_v,
                 dim, 0, sums, dim, 1);
        return;
    }
    for (int64_t token = start; token < end;) {
        int64_t offset = token % size, count = min64(size - offset, end - token);
        const char *v = b_steps(format, head_block(args, args->v, dim, work->group, token), offset, dim);
        int64_t ahead = 0, next = token + prefetch_tokens(args);
        if (next < limit) ahead = b_steps(format, head_block(args, args->v, dim, work->group, next), next % size, dim) - v;
        multiply(format, work->rows - first_row, dim, count, weights + (token - start) * (is_dot(format) ? 2 : 4), lda,
                 weight_scales, v, dim, ahead, sums, dim, 1);
        token += count;
    }
}

// Turns a row's dot products with `count` tokens from `start` on into scores in base 2, those not seen into -inf.
// Returns the largest.
INLINE float finish_scores(const Work *work, int64_t row, int64_t start, int64_t count, float *scores) {
    const AttendArgs *args = work->args;
    int64_t position = row_position(work, row);
    int64_t head = work->group->head * group_size(args) + row % group_size(args);
    int64_t high = min64(count, position + 1 - start);
    int64_t low = args->sliding_window ? max64(0, position + 1 - args->sliding_window - start) : 0;
    const float *k_scales = args->k_scales.data ? work->scratch->k_scales : NULL;
    float slope = args->alibi_slopes ? args->alibi_slopes[head] * LOG2_E : 0.0f;
    float scale = args->softcap ? args->scale / args->softcap : args->scale * LOG2_E;
    float cap = args->softcap * LOG2_E;
    vfloat lane, max = splat(LOWEST);
    for (int i = 0; i < LANES; i++) lane[i] = (float)i;
    for (int64_t i = 0; i < count; i += LANES) {
        vfloat x = load(scores + i) * scale;
        if (k_scales) x *= load(k_scales + i);
        if (args->softcap) x = vtanh(x) * cap;
        if (args->alibi_slopes) x += slope * (lane + (float)(start + i - position));
        if (i < low || i + LANES > high) {
            vfloat column = lane + (float)i;
            x = choose((column >= splat((float)low)) & (column < splat((float)high)), x, splat(-INFINITY));
        }
        put(scores + i, x);
        max = vmax(x, max);
    }
    return max_lane(max);
}

// Turns a tile's dot products into weights, updating the running maximum, total and sums of each row.
static void soften(const Work *work, int64_t first_row, int64_t start, int64_t count) {
    Scratch *scratch = work->scratch;
    int64_t dim = work->args->v_head_dim, padded = round_up(count, LANES);
    int format = work->is_direct ? direct_format(work->args) : B_PACKED;
    const float *v_scales = work->args->v_scales.data ? scratch->v_scales : NULL;
    for (int64_t row = first_row; row < work->rows; row++) {
        float *scores = scratch->scores + row * work->tile_tokens;
        float max = finish_scores(work, row, start, count, scores);
        if (max > scratch->max[row]) {
            float factor = exp2f(scratch->max[row] - max);
            scratch->max[row] = max;
            scratch->total[row] *= factor;
            float *sums = scratch->sums + row * dim;
            for (int64_t i = 0; i < dim; i += LANES) put(sums + i, load(sums + i) * factor);
        }
        vfloat total = splat(0.0f);
        for (int64_t i = 0; i < padded; i += LANES) {
            vfloat weight = exp2_nonpositive(load(scores + i) - scratch->max[row]);
            total += weight;
            put(scores + i, v_scales ? weight * load(v_scales + i) : weight);
        }
        scratch->total[row] += sum_lanes(total);
        uint16_t *pairs = scratch->weight_pairs + row * work->tile_tokens;
        if (format == B_INT8_DOT) scratch->weight_scales[row] = quantize_to_shorts(scores, padded, pairs);
        if (format == B_BF16_DOT) {
            for (int64_t i = 0; i < padded; i++) pairs[i] = float_to_bf16(scores[i]);
        }
    }
}

// ----------------------------------------------------------------------------------------------------------- results

// Writes one row of the output: sums / total, the sink counted in the total.
static void write_row(const AttendArgs *args, const Group *group, int64_t row, float max, float total, const float *sums) {
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
    for (int64_t i = 0; i < dim; i++) set_element(args->q_dtype, args->out, first + i, sums[i] * factor / total);
}

static void read_queries(const Work *work) {
    const AttendArgs *args = work->args;
    int format = work->is_direct ? direct_format(args) : B_PACKED;
    int64_t dim = args->head_dim, size = group_size(args);
    for (int64_t row = 0; row < work->rows; row++) {
        int64_t token = work->group->first_query + row / size, head = work->group->head * size + row % size;
        int64_t first = token * args->q_token_stride + head * args->q_head_stride;
        for (int64_t i = 0; i < dim; i++) work->scratch->q[row * dim + i] = get_element(args->q_dtype, args->q, first + i);
        uint16_t *pairs = work->scratch->q_pairs + row * dim;
        if (format == B_BF16_DOT) memcpy(pairs, (const uint16_t *)args->q + first, dim * 2);
        if (format == B_INT8_DOT) work->scratch->q_scales[row] = quantize_to_shorts(work->scratch->q + row * dim, dim, pairs);
    }
}

static void run_item(const AttendArgs *args, const Group *group, const Item *item, float *partials, Scratch *scratch) {
    int64_t rows = group->num_queries * group_size(args), dim = args->v_head_dim;
    int is_direct = (rows <= MAX_DIRECT_ROWS || direct_format(args) == B_BF16_DOT) && args->block_size % LANES == 0;
    Work work = {args, group, scratch, rows, is_direct, is_direct ? DIRECT_TILE_TOKENS : PACKED_TILE_TOKENS};
    read_queries(&work);
    memset(scratch->sums, 0, rows * dim * sizeof(float));
    for (int64_t row = 0; row < rows; row++) {
        scratch->max[row] = LOWEST;
        scratch->total[row] = 0.0f;
    }
    for (int64_t start = item->start; start < item->end; start += work.tile_tokens) {
        int64_t end = min64(start + work.tile_tokens, item->end);
        // Rows whose query comes before the tile see nothing of it.
        int64_t first_row = max64(0, start - group->first_position) * group_size(args);
        if (!is_direct) pack_tile(args, group, start, end, scratch);
        if (args->k_scales.data) gather_scales(args, group, args->k_scales, start, end, item->end, scratch->k_scales);
        if (args->v_scales.data) gather_scales(args, group, args->v_scales, start, end, item->end, scratch->v_scales);
        multiply_keys(&work, first_row, start, end, item->end);
        soften(&work, first_row, start, end - start);
        multiply_values(&work, first_row, start, end, item->end);
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
    int64_t rows = max_rows(args), tile = max64(PACKED_TILE_TOKENS, DIRECT_TILE_TOKENS) * rows;
    return (Scratch){
        .q = take(place, rows * args->head_dim * 4),
        .scores = take(place, tile * 4),
        .sums = take(place, rows * args->v_head_dim * 4),
        .max = take(place, rows * 4),
        .total = take(place, rows * 4),
        .packed_k = take(place, args->head_dim * PACKED_TILE_TOKENS * 4),
        .packed_v = take(place, args->v_head_dim * PACKED_TILE_TOKENS * 4),
        .k_scales = take(place, DIRECT_TILE_TOKENS * 4),
        .v_scales = take(place, DIRECT_TILE_TOKENS * 4),
        .q_scales = take(place, rows * 4),
        .weight_scales = take(place, rows * 4),
        .q_pairs = take(place, rows * args->head_dim * 2),
        .weight_pairs = take(place, tile * 2),
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
#pragma omp parallel num_threads(args->num_threads)
    {
        char *own = scratches + scratch_bytes * omp_get_thread_num();
        Scratch scratch = take_scratch(args, &own);
        // The last items of a long prompt see the most of it: begun first, none of them is waited for at the end.
#pragma omp for schedule(dynamic, 1) nowait
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
