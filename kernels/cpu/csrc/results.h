// Sums of weighted values to the output, at once or by way of the partial results of a split context.
#pragma once

#include "plan.h"
#include "softmax.h"

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

// Writes a group's rows of an item, [rows] max and total, [rows, v_head_dim] sums, to the output or as a partial result.
static void write_rows(const AttendArgs *args, const Group *group, float *partial, const float *max, const float *total,
                       float *sums) {
    int64_t rows = group->num_queries * group_size(args), dim = args->v_head_dim;
    if (!partial) {
        for (int64_t row = 0; row < rows; row++) write_row(args, group, row, max[row], total[row], sums + row * dim);
        return;
    }
    memcpy(partial, max, rows * sizeof(float));
    memcpy(partial + rows, total, rows * sizeof(float));
    memcpy(partial + 2 * rows, sums, rows * dim * sizeof(float));
}

// Merges a group's partial results. `sums` is scratch of a row.
static void merge_group(const AttendArgs *args, const Group *group, const float *partials, float *sums) {
    int64_t rows = group->num_queries * group_size(args), dim = args->v_head_dim, size = rows * (dim + 2);
    const float *first = partials + group->partial;
    for (int64_t row = 0; row < rows; row++) {
        float max = LOWEST, total = 0.0f;
        for (int64_t i = 0; i < group->num_items; i++) max = fmaxf(max, first[i * size + row]);
        memset(sums, 0, dim * sizeof(float));
        for (int64_t i = 0; i < group->num_items; i++) {
            const float *part = first + i * size;
            float factor = exp2f(part[row] - max);
            total += part[rows + row] * factor;
            for (int64_t d = 0; d < dim; d++) sums[d] += part[2 * rows + row * dim + d] * factor;
        }
        write_row(args, group, row, max, total, sums);
    }
}

static void clear_padding(const AttendArgs *args) {
    int64_t token_bytes = args->num_heads * args->v_head_dim * element_bytes(args->q_dtype);
    for (int64_t i = 0; i < args->num_sequences; i++) {
        int64_t first = args->cu_seqlens_q[i], count = args->cu_seqlens_q[i + 1] - first;
        if (args->seq_lens[i] == 0) memset((char *)args->out + first * token_bytes, 0, count * token_bytes);
    }
}
