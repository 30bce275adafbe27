// The layers of a Llama-shaped decoder around their attention: norms, projections, rotary positions, gated feed-forward.
//
// One call does all that lies between two attentions. Its threads either share every row, each with some columns of a
// product, and meet after each part (few rows: the weights are read once); or each takes blocks of rows through all parts
// alone (many rows: what a block's parts hand on stays in the cache of one core).

#include <omp.h>
#include <stddef.h>

#include "rows.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    BLOCK_ROWS = 120,     // of a thread on its own
    MIN_OWN_ROWS = 96,    // a thread for which there are fewer shares its rows with the others
    MANY_PANELS = 16,     // a thread
};

typedef struct {
    const float *cos, *sin;  // [positions, half], or null
    int64_t half;
} Rotary;

typedef struct {
    const float *input_norm, *feed_forward_norm;             // [hidden]
    const float *attention_output_norm, *feed_forward_output_norm;  // [hidden], or null
    const float *query_norm, *key_norm;                      // [head_dim], or null
    Linear qkv, attention_output, gate_up, down;
    Rotary rotary;
    int64_t num_heads, num_kv_heads, head_dim;
} Layer;

typedef struct {
    const void *embedding;  // [vocab, hidden]; null where the head's weights are the embedding's
    const float *final_norm;
    Linear head;
    int64_t hidden, hidden_stride;
    int64_t sums_width, gated_width;  // the widest layer's: sums of any product that is not the head's, and gated elements
    float embedding_scale, eps;
    int32_t dtype, activation;
} Model;

typedef struct {
    const int64_t *token_ids, *positions, *logit_rows;
    float *residual;        // [num_tokens, hidden_stride]
    void *qkv;              // [num_tokens, qkv columns]
    const void *attention;  // [num_tokens, num_heads * head_dim]
    float *logits;          // [num_logit_rows, head columns]
    float *last_residual;   // [num_logit_rows, hidden_stride]
    void *last_attention;   // [num_logit_rows, num_heads * head_dim]
    char *scratch;
    int64_t num_tokens, num_logit_rows;
    int32_t num_threads;
} Step;

// Threads that work on the same rows.
typedef struct {
    int rank, size;
    int64_t first, last;  // rows
    float *sums;          // [rows, columns] of a product, addressed by a row's own number, as all below
    void *normed, *gated;
} Team;

INLINE int64_t num_columns(const Linear *linear) { return linear->num_panels * PANEL; }
INLINE char *row_of(int dtype, void *data, int64_t index) { return (char *)data + index * bytes_of(dtype); }

INLINE void meet(const Team *team) {
    if (team->size > 1) {
#pragma omp barrier
    }
}

static void multiply_all(int dtype, int kind, const Team *team, const Linear *linear, const void *a, int64_t a_stride,
                         Target target) {
    const int64_t num_rows = team->last - team->first, num_panels = linear->num_panels;
    // Panels alone deal out evenly where they divide, or are many.
    const int is_even = num_panels % team->size == 0 || num_panels >= (int64_t)team->size * MANY_PANELS;
    const int64_t num_chunks = is_even ? 1 : min64(team->size, (num_rows + TILE_ROWS - 1) / TILE_ROWS);
    const int64_t num_items = num_chunks * linear->num_panels;
    const int64_t end = num_items * (team->rank + 1) / team->size;
    for (int64_t item = num_items * team->rank / team->size; item < end; item++) {
        int64_t chunk = item % num_chunks;
        multiply_panel(dtype, kind, linear, item / num_chunks, a, a_stride, &target,
                       team->first + num_rows * chunk / num_chunks, team->first + num_rows * (chunk + 1) / num_chunks);
    }
}

static void normalize_all(int dtype, const Team *team, const float *x, int64_t x_stride, const float *weight,
                          int64_t size, float eps) {
    for (int64_t row = team->first + team->rank; row < team->last; row += team->size) {
        if (dtype == BF16) normalize(BF16, x + row * x_stride, weight, size, eps, row_of(BF16, team->normed, row * size));
        else normalize(FP32, x + row * x_stride, weight, size, eps, row_of(FP32, team->normed, row * size));
    }
}

INLINE void place_head(const int dtype, float *head, const float *norm, float eps, const Rotary *rotary, int64_t position,
                       int64_t dim, void *out) {
    if (norm) normalize(FP32, head, norm, dim, eps, head);
    if (rotary->cos) {
        int64_t first = position * rotary->half;
        rotate(head, rotary->cos + first, rotary->sin + first, rotary->half);
    }
    convert_row(dtype, head, dim, out);
}

// From the sums of the joined projection to queries, keys and values.
INLINE void place_row(const int dtype, const Model *model, const Layer *layer, float *sums, int64_t position, char *out) {
    const int64_t dim = layer->head_dim, num_rotated = layer->num_heads + layer->num_kv_heads;
    for (int64_t head = 0; head < num_rotated; head++) {
        const float *norm = head < layer->num_heads ? layer->query_norm : layer->key_norm;
        place_head(dtype, sums + head * dim, norm, model->eps, &layer->rotary, position, dim, row_of(dtype, out, head * dim));
    }
    convert_row(dtype, sums + num_rotated * dim, layer->num_kv_heads * dim, row_of(dtype, out, num_rotated * dim));
}

// Up to a layer's attention.
static void project(const Model *model, const Step *step, const Layer *layer, const Team *team) {
    const int64_t columns = model->sums_width;
    const int64_t width = (layer->num_heads + 2 * layer->num_kv_heads) * layer->head_dim;
    normalize_all(model->dtype, team, step->residual, model->hidden_stride, layer->input_norm, model->hidden, model->eps);
    meet(team);
    multiply_all(model->dtype, TO_FLOATS, team, &layer->qkv, team->normed, model->hidden, (Target){team->sums, columns, 0});
    meet(team);
    for (int64_t row = team->first + team->rank; row < team->last; row += team->size) {
        float *sums = team->sums + row * columns;
        char *out = row_of(model->dtype, step->qkv, row * width);
        if (model->dtype == BF16) place_row(BF16, model, layer, sums, step->positions[row], out);
        else place_row(FP32, model, layer, sums, step->positions[row], out);
    }
}

static void add_normalized(const Model *model, const Team *team, const float *norm, float *residual) {
    for (int64_t row = team->first + team->rank; row < team->last; row += team->size) {
        float *sums = team->sums + row * model->sums_width, *target = residual + row * model->hidden_stride;
        normalize(FP32, sums, norm, model->hidden, model->eps, sums);
        for (int64_t i = 0; i < model->hidden; i++) target[i] += sums[i];
    }
}

// A product that is added to the residual, through a norm where the layer has one.
static void add_product(const Model *model, const Team *team, const Linear *linear, const void *a, int64_t a_stride,
                        const float *norm, float *residual) {
    Target target = {norm ? team->sums : residual, norm ? model->sums_width : model->hidden_stride, 0};
    multiply_all(model->dtype, norm ? TO_FLOATS : TO_SUM, team, linear, a, a_stride, target);
    meet(team);
    if (norm) {
        add_normalized(model, team, norm, residual);
        meet(team);
    }
}

// From a layer's attention to its end.
static void complete(const Model *model, const Layer *layer, const Team *team, const void *attention, float *residual) {
    add_product(model, team, &layer->attention_output, attention, layer->attention_output.depth, layer->attention_output_norm, residual);
    normalize_all(model->dtype, team, residual, model->hidden_stride, layer->feed_forward_norm, model->hidden, model->eps);
    meet(team);
    multiply_all(model->dtype, TO_GATED, team, &layer->gate_up, team->normed, model->hidden,
                 (Target){team->gated, model->gated_width, model->activation});
    meet(team);
    add_product(model, team, &layer->down, team->gated, model->gated_width, layer->feed_forward_output_norm, residual);
}

INLINE float element_of(int dtype, const void *p, int64_t i) {
    return dtype == BF16 ? bits_to_float((uint32_t)((const uint16_t *)p)[i] << 16) : ((const float *)p)[i];
}

static void embed(const Model *model, const Step *step, const Team *team) {
    const int64_t hidden = model->hidden;
    for (int64_t row = team->first + team->rank; row < team->last; row += team->size) {
        int64_t token = step->token_ids[row];
        float *out = step->residual + row * model->hidden_stride;
        for (int64_t i = 0; i < hidden; i++) {
            int64_t place = token * hidden + i;
            if (!model->embedding) {
                int64_t panel = token / PANEL, column = token % PANEL;
                place = model->dtype == BF16 ? ((panel * hidden / 2 + i / 2) * PANEL + column) * 2 + i % 2
                                             : (panel * hidden + i) * PANEL + column;
            }
            out[i] = element_of(model->dtype, model->embedding ? model->embedding : model->head.weight, place) * model->embedding_scale;
        }
    }
}

INLINE int64_t sums_bytes(const Model *model, int64_t rows) { return round_up(rows * model->sums_width * 4, 64); }
INLINE int64_t normed_bytes(const Model *model, int64_t rows) { return round_up(rows * model->hidden * bytes_of(model->dtype), 64); }
INLINE int64_t gated_bytes(const Model *model, int64_t rows) { return round_up(rows * model->gated_width * bytes_of(model->dtype), 64); }

// What a team needs for so many rows.
INLINE int64_t team_bytes(const Model *model, int64_t rows) {
    return sums_bytes(model, rows) + normed_bytes(model, rows) + gated_bytes(model, rows);
}

INLINE int takes_own_rows(int64_t num_rows, int32_t num_threads) {
    return num_threads == 1 || num_rows >= (int64_t)MIN_OWN_ROWS * num_threads;
}

static Team make_team(const Model *model, char *scratch, int64_t first, int64_t last, int rank, int size) {
    const int64_t rows = last - first, bytes = bytes_of(model->dtype);
    char *normed = scratch + sums_bytes(model, rows), *gated = normed + normed_bytes(model, rows);
    return (Team){rank, size, first, last, (float *)scratch - first * model->sums_width,
                  normed - first * model->hidden * bytes, gated - first * model->gated_width * bytes};
}

typedef void part_fn(const Model *, const Step *, const Layer *, const Layer *, const Team *);

// Runs a part over all rows, in teams as suits their number.
static void run(part_fn *part, const Model *model, const Step *step, const Layer *layer, const Layer *next, int64_t num_rows) {
    const int num_threads = step->num_threads;
    if (!takes_own_rows(num_rows, num_threads)) {
#pragma omp parallel num_threads(num_threads)
        {
            Team team = make_team(model, step->scratch, 0, num_rows, omp_get_thread_num(), omp_get_num_threads());
            part(model, step, layer, next, &team);
        }
        return;
    }
    const int64_t num_blocks = round_up((num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS, num_threads);
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1)
    for (int64_t block = 0; block < num_blocks; block++) {
        char *scratch = step->scratch + omp_get_thread_num() * team_bytes(model, BLOCK_ROWS);
        Team team = make_team(model, scratch, num_rows * block / num_blocks, num_rows * (block + 1) / num_blocks, 0, 1);
        part(model, step, layer, next, &team);
    }
}

static void begin_part(const Model *model, const Step *step, const Layer *layer, const Layer *next, const Team *team) {
    embed(model, step, team);
    meet(team);
    project(model, step, next, team);
}

static void layer_part(const Model *model, const Step *step, const Layer *layer, const Layer *next, const Team *team) {
    complete(model, layer, team, step->attention, step->residual);
    project(model, step, next, team);
}

static void finish_part(const Model *model, const Step *step, const Layer *layer, const Layer *next, const Team *team) {
    const int64_t stride = model->hidden_stride, width = layer->attention_output.depth * bytes_of(model->dtype);
    for (int64_t row = team->first + team->rank; row < team->last; row += team->size) {
        int64_t source = step->logit_rows[row];
        memcpy(step->last_residual + row * stride, step->residual + source * stride, (size_t)stride * 4);
        memcpy((char *)step->last_attention + row * width, (const char *)step->attention + source * width, (size_t)width);
    }
    meet(team);
    complete(model, layer, team, step->last_attention, step->last_residual);
    normalize_all(model->dtype, team, step->last_residual, stride, model->final_norm, model->hidden, model->eps);
    meet(team);
    multiply_all(model->dtype, TO_FLOATS, team, &model->head, team->normed, model->hidden,
                 (Target){step->logits, num_columns(&model->head), 0});
}

// Columns of a panel, for who lays weights out.
EXPORT int64_t pagedkv_decoder_panel(void) { return PANEL; }

// Bytes of scratch that a step of `num_rows` rows needs.
EXPORT int64_t pagedkv_decoder_scratch_bytes(const Model *model, int64_t num_rows, int32_t num_threads) {
    return takes_own_rows(num_rows, num_threads) ? num_threads * team_bytes(model, BLOCK_ROWS) : team_bytes(model, num_rows);
}

// Embeds the tokens, and goes up to the first attention.
EXPORT void pagedkv_decoder_begin(const Model *model, const Step *step, const Layer *first) {
    run(begin_part, model, step, NULL, first, step->num_tokens);
}

// From the attention of one layer to that of the next.
EXPORT void pagedkv_decoder_layer(const Model *model, const Step *step, const Layer *layer, const Layer *next) {
    run(layer_part, model, step, layer, next, step->num_tokens);
}

// From the last attention to the logits, for the rows alone whose logits are wanted.
EXPORT void pagedkv_decoder_finish(const Model *model, const Step *step, const Layer *last) {
    run(finish_part, model, step, last, NULL, step->num_logit_rows);
}
