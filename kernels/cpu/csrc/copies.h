// Copies of keys and values in scratch, where they can't be multiplied in place, and of scales.
#pragma once

#include "blocks.h"

// Writes two steps of LANES columns: as a pair of bf16, or as floats a line apart.
INLINE void put_steps(const int as_pairs, char *out, int64_t line_bytes, vfloat first, vfloat second) {
    if (as_pairs) {
        *(vuint_any *)out = ((vuint)first >> 16) | ((vuint)second & 0xffff0000);
    } else {
        put((float *)out, first);
        put((float *)(out + line_bytes), second);
    }
}

// Widens B[depth, columns]; columns are a multiple of LANES, depth is that of whole pairs.
INLINE void widen(const int format, const int as_pairs, const char *b, int64_t ldb, int64_t depth, int64_t columns,
                  char *out, int64_t line_bytes) {
    int64_t source_bytes = ldb * column_bytes(format), second = is_paired(format) ? 0 : source_bytes;
    for (int64_t k = 0; k < depth; k += 2) {
        for (int64_t column = 0; column < columns; column += LANES) {
            const char *line = b + column * column_bytes(format);
            put_steps(as_pairs, out + column * 4, line_bytes, load_step(format, line, 0), load_step(format, line + second, 1));
        }
        b += second + source_bytes;
        out += as_pairs ? line_bytes : 2 * line_bytes;
    }
}

INLINE void widen_narrow(int dtype, int format, int as_pairs, const char *b, int64_t ldb, int64_t depth, int64_t columns,
                         char *out, int64_t line_bytes) {
    for (int64_t k = 0; k < depth; k++) {
        for (int64_t column = 0; column < columns; column++) {
            int64_t index = is_paired(format) ? (k / 2 * ldb + column) * 2 + k % 2 : k * ldb + column;
            float x = get_element(dtype, b, index);
            if (as_pairs) ((uint16_t *)(out + k / 2 * line_bytes))[column * 2 + k % 2] = (uint16_t)(float_to_bits(x) >> 16);
            else ((float *)(out + k * line_bytes))[column] = x;
        }
    }
}

INLINE void widen_format(const int as_pairs, int dtype, int format, const char *b, int64_t ldb, int64_t depth,
                         int64_t columns, char *out, int64_t line_bytes) {
    if (columns % LANES) widen_narrow(dtype, format, as_pairs, b, ldb, depth, columns, out, line_bytes);
    else if (format == B_FP32) widen(B_FP32, as_pairs, b, ldb, depth, columns, out, line_bytes);
    else if (format == B_FP16) widen(B_FP16, as_pairs, b, ldb, depth, columns, out, line_bytes);
    else if (format == B_E4M3) widen(B_E4M3, as_pairs, b, ldb, depth, columns, out, line_bytes);
    else if (format == B_E5M2) widen(B_E5M2, as_pairs, b, ldb, depth, columns, out, line_bytes);
    else if (format == B_INT8_PAIRS) widen(B_INT8_PAIRS, as_pairs, b, ldb, depth, columns, out, line_bytes);
    else widen(B_BF16_PAIRS, as_pairs, b, ldb, depth, columns, out, line_bytes);
}

static void widen_any(int as_pairs, int dtype, int format, const char *b, int64_t ldb, int64_t depth, int64_t columns,
                      char *out, int64_t line_bytes) {
    if (as_pairs) widen_format(1, dtype, format, b, ldb, depth, columns, out, line_bytes);
    else widen_format(0, dtype, format, b, ldb, depth, columns, out, line_bytes);
}

// Elements in nibbles to numbers: LANES columns of two steps, each with its scale and offset.
INLINE void widen_nibbles(const int as_pairs, vuint bytes, const float *scales, const float *offsets, const float *quarters,
                          char *out, int64_t line_bytes) {
    vfloat first = __builtin_convertvector((vint)(bytes & 15), vfloat);
    vfloat second = __builtin_convertvector((vint)(bytes >> 4), vfloat);
    if (quarters) {
        vfloat unit = {1.0f};
        first += unit * quarters[0];
        second += unit * quarters[1];
    }
    first = (first + offsets[0]) * scales[0];
    second = (second + offsets[1]) * scales[1];
    if (as_pairs) {
        *(vuint_any *)out = pack_bf16(first, second);
    } else {
        put((float *)out, first);
        put((float *)(out + line_bytes), second);
    }
}

// The same for fewer columns than there are lanes.
INLINE void widen_few_nibbles(const int as_pairs, const uint8_t *bytes, int64_t columns, const float *scales,
                              const float *offsets, const float *quarters, char *out, int64_t line_bytes) {
    vuint wide = {};
    for (int64_t i = 0; i < columns; i++) wide[i] = bytes[i];
    char lines[2 * LANES * 4] __attribute__((aligned(64)));
    widen_nibbles(as_pairs, wide, scales, offsets, quarters, lines, LANES * 4);
    memcpy(out, lines, columns * 4);
    if (!as_pairs) memcpy(out + line_bytes, lines + LANES * 4, columns * 4);
}

INLINE void pack_nibbles(const int as_pairs, const Layout *layout, const NibbleBlock *block, int64_t dim, int64_t v_dim,
                         int64_t size, int64_t offset, int64_t count, int64_t depth, char *packed_k, char *packed_v) {
    float scales[max64(dim, size)], offsets[max64(dim, size)], quarters[dim];
    widen_codes(block->k_codes, block->k_zeros, dim, scales, offsets);
    if (offset == 0) widen_quarters(block->k_first, dim, quarters);
    int64_t k_pair_bytes = layout->k_line_bytes * (as_pairs ? 1 : 2), v_pair_bytes = layout->v_line_bytes * (as_pairs ? 1 : 2);
    for (int64_t k = 0; k < dim; k += 2) {
        const uint8_t *bytes = block->k + k / 2 * size + offset;
        char *out = packed_k + k / 2 * k_pair_bytes;
        for (int64_t column = 0; column < count; column += LANES) {
            const float *more = offset + column == 0 ? quarters + k : NULL;
            if (count < LANES) {
                widen_few_nibbles(as_pairs, bytes, count, scales + k, offsets + k, more, out, layout->k_line_bytes);
            } else {
                widen_nibbles(as_pairs, widen_unsigned(bytes + column), scales + k, offsets + k, more, out + column * 4,
                              layout->k_line_bytes);
            }
        }
    }
    for (int64_t group = 0; group < num_value_groups(v_dim); group++) {
        int64_t first = group * VALUE_GROUP, end = min64(v_dim, first + VALUE_GROUP);
        widen_codes(block->v_codes + group * size + offset, block->v_zeros + group * size + offset, depth, scales, offsets);
        for (int64_t t = 0; t < depth; t += 2) {
            const uint8_t *bytes = block->v + (offset + t) / 2 * v_dim;
            for (int64_t column = first; column < end; column += LANES) {
                widen_nibbles(as_pairs, widen_unsigned(bytes + column), scales + t, offsets + t, NULL,
                              packed_v + t / 2 * v_pair_bytes + column * 4, layout->v_line_bytes);
            }
        }
    }
}

INLINE void prefetch_bytes(const void *p, int64_t count) {
    for (int64_t i = 0; i < count; i += 64) __builtin_prefetch((const char *)p + i);
}

INLINE void prefetch_nibbles(const NibbleBlock *block, int64_t dim, int64_t v_dim, int64_t size) {
    prefetch_bytes(block->k, dim * size / 2);
    prefetch_bytes(block->v, v_dim * size / 2);
    prefetch_bytes(block->k_codes, dim);
    prefetch_bytes(block->k_zeros, dim);
    prefetch_bytes(block->k_first, dim / 4);
    prefetch_bytes(block->v_codes, num_value_groups(v_dim) * size);
    prefetch_bytes(block->v_zeros, num_value_groups(v_dim) * size);
}

// As pack_tile, of INT4. What the tokens behind these need, up to `limit`, is asked for from memory.
static void pack_nibble_tile(const AttendArgs *args, const Layout *layout, const Group *group, int64_t start, int64_t end,
                             int64_t limit, char *packed_k, char *packed_v) {
    int64_t size = args->block_size, dim = args->head_dim, v_dim = args->v_head_dim;
    int as_pairs = layout->format == B_BF16_DOT;
    const int32_t *table = args->block_table + group->sequence * args->block_table_stride;
    for (int64_t token = start; token < end;) {
        int64_t offset = token % size, count = min64(size - offset, layout->tile_tokens - (token - start));
        int64_t next = token + max64(size, AHEAD_TOKENS), depth = round_up(min64(count, end - token), 2);
        if (next < limit) {
            int64_t place = table[next / size] * args->num_kv_heads + group->head;
            NibbleBlock block = nibble_block(&args->nibbles, args->k, args->v, place, dim, v_dim, size);
            prefetch_nibbles(&block, dim, v_dim, size);
        }
        int64_t place = table[token / size] * args->num_kv_heads + group->head;
        NibbleBlock block = nibble_block(&args->nibbles, args->k, args->v, place, dim, v_dim, size);
        char *k = packed_k + (token - start) * 4, *v = packed_v + (token - start) / (as_pairs ? 2 : 1) * layout->v_line_bytes;
        if (as_pairs) pack_nibbles(1, layout, &block, dim, v_dim, size, offset, count, depth, k, v);
        else pack_nibbles(0, layout, &block, dim, v_dim, size, offset, count, depth, k, v);
        token += count;
    }
}

// Copies the keys of the tokens [start, end) to [head_dim, tile] and their values to [tile, v_head_dim], in the layout's
// format.
static void pack_tile(const AttendArgs *args, const Layout *layout, const Group *group, int64_t start, int64_t end,
                      char *packed_k, char *packed_v) {
    int source = direct_format(args), as_pairs = layout->format == B_BF16_DOT;
    source = source == B_INT8_DOT ? B_INT8_PAIRS : source == B_BF16_DOT ? B_BF16_PAIRS : source;
    int64_t size = args->block_size, dim = args->head_dim, v_dim = args->v_head_dim;
    for (int64_t token = start; token < end;) {
        int64_t offset = token % size, count = min64(size - offset, layout->tile_tokens - (token - start));
        const char *k = b_columns(source, head_block(args, args->k, dim, group, token), offset);
        widen_any(as_pairs, args->kv_dtype, source, k, size, dim, count, packed_k + (token - start) * 4, layout->k_line_bytes);
        const char *v = b_steps(source, head_block(args, args->v, v_dim, group, token), offset, v_dim);
        widen_any(as_pairs, args->kv_dtype, source, v, v_dim, round_up(min64(count, end - token), 2), v_dim,
                  packed_v + (token - start) / (as_pairs ? 2 : 1) * layout->v_line_bytes, layout->v_line_bytes);
        token += count;
    }
}

// Copies the scales of a tile's tokens, of elements as their format gives them. Those of the next tile's, up to `limit`,
// are asked for.
static void gather_scales(const AttendArgs *args, const Group *group, Scales scales, int64_t start, int64_t end,
                          int64_t limit, float *out) {
    float unit = args->kv_dtype == E4M3 ? 256.0f : 1.0f;
    int64_t size = args->block_size, table = group->sequence * args->block_table_stride;
    const float *head = scales.data + group->head * scales.head_stride;
    for (int64_t token = start; token < end;) {
        int64_t offset = token % size, count = min64(size - offset, end - token), next = token + TILE_TOKENS;
        const float *first = head + args->block_table[table + token / size] * scales.block_stride + offset * scales.token_stride;
        if (next < limit) __builtin_prefetch(head + args->block_table[table + next / size] * scales.block_stride);
        for (int64_t i = 0; i < count; i++) out[token - start + i] = first[i * scales.token_stride] * unit;
        token += count;
    }
    // Zeros fill the last vector or tile up, so that no weight is made of what lies there.
    memset(out + (end - start), 0, (round_up(end - start, TILE_STEPS) - (end - start)) * sizeof(float));
}
