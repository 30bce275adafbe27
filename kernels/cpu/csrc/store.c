// Writes new keys and values into their slots, quantized as the KV dtype says.

#include "nibbles.h"
#include "quantize.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct {
    const void *source;  // [num_tokens, num_kv_heads, dim]
    void *cache;
    int64_t token_stride, head_stride, dim;
    Scales scales;
} Side;  // keys or values

typedef struct {
    Side k, v;
    Nibbles nibbles;              // of INT4
    const int64_t *slot_mapping;  // negative is stored nowhere
    int64_t num_tokens, num_kv_heads, block_size;
    int32_t dtype, kv_dtype, num_threads;
} StoreArgs;

INLINE int is_paired_dtype(int kv_dtype) { return kv_dtype == BF16 || kv_dtype == INT8; }

// Keys lie channel by channel, [dim, block_size]; bf16 and int8 in pairs of channels, [dim / 2, block_size, 2].
// Values lie token by token, [block_size, dim]; bf16 and int8 in pairs of tokens, [block_size / 2, dim, 2].
INLINE int64_t element_index(int kv_dtype, int is_key, int64_t channel, int64_t offset, int64_t dim, int64_t block_size) {
    int64_t step = is_key ? channel : offset, column = is_key ? offset : channel, columns = is_key ? block_size : dim;
    return is_paired_dtype(kv_dtype) ? (step / 2 * columns + column) * 2 + step % 2 : step * columns + column;
}

// Equal 16-bit dtypes are moved as they are, so that every NaN stays what it is.
INLINE void convert(int to, void *target, int64_t i, int from, const void *source, int64_t j) {
    if (to == from && to != FP32) ((uint16_t *)target)[i] = ((const uint16_t *)source)[j];
    else set_element(to, target, i, get_element(from, source, j));
}

// Writes a row as elements of 8 bits, with the scale at *scale or, if `fits_scale`, one that is put there.
INLINE void quantize_row(const int dtype, const int kv_dtype, const int is_key, const void *source, int64_t first,
                         uint8_t *target, int64_t dim, int64_t offset, int64_t block_size, float *scale, int fits_scale) {
    float row[dim];
    for (int64_t i = 0; i < dim; i++) row[i] = get_element(dtype, source, first + i);
    if (fits_scale) *scale = fit_scale(kv_dtype, row, dim);
    for (int64_t i = 0; i < dim; i += LANES) put(row + i, round_to_elements(kv_dtype, load(row + i) / *scale));
    for (int64_t i = 0; i < dim; i++) {
        target[element_index(kv_dtype, is_key, i, offset, dim, block_size)] = element_byte(kv_dtype, row[i]);
    }
}

INLINE void store_side(const StoreArgs *args, const Side *side, const int dtype, const int kv_dtype, const int is_key,
                       int64_t token, int64_t head) {
    int64_t size = args->block_size, dim = side->dim;
    int64_t block = args->slot_mapping[token] / size, offset = args->slot_mapping[token] % size;
    int64_t first = token * side->token_stride + head * side->head_stride;
    char *target = (char *)side->cache + (block * args->num_kv_heads + head) * dim * size * element_bytes(kv_dtype);
    if (is_scaled(kv_dtype)) {
        const Scales *scales = &side->scales;
        int64_t place = block * scales->block_stride + head * scales->head_stride + offset * scales->token_stride;
        quantize_row(dtype, kv_dtype, is_key, side->source, first, (uint8_t *)target, dim, offset, size,
                     scales->data + place, scales->token_stride != 0);
        return;
    }
    for (int64_t i = 0; i < dim; i++) {
        convert(kv_dtype, target, element_index(kv_dtype, is_key, i, offset, dim, size), dtype, side->source, first + i);
    }
}

INLINE void store_head(const StoreArgs *args, const int dtype, const int kv_dtype, int64_t token, int64_t head) {
    store_side(args, &args->k, dtype, kv_dtype, 1, token, head);
    store_side(args, &args->v, dtype, kv_dtype, 0, token, head);
}

INLINE void store_as(const StoreArgs *args, const int kv_dtype, int64_t token, int64_t head) {
    if (args->dtype == FP32) store_head(args, FP32, kv_dtype, token, head);
    else if (args->dtype == BF16) store_head(args, BF16, kv_dtype, token, head);
    else store_head(args, FP16, kv_dtype, token, head);
}

// --------------------------------------------------------------------------------------------------------------- int4

// Reads what a block's first tokens were stored as: numbers [count][dim].
static void read_keys(const NibbleBlock *block, int64_t count, int64_t dim, int64_t size, float *numbers) {
    float scales[dim], offsets[dim], quarters[dim];
    widen_codes(block->k_codes, block->k_zeros, dim, scales, offsets);
    widen_quarters(block->k_first, dim, quarters);
    for (int64_t t = 0; t < count; t++) {
        for (int64_t i = 0; i < dim; i++) {
            float element = (float)(block->k[i / 2 * size + t] >> i % 2 * 4 & 15);
            if (t == 0) element += quarters[i];
            numbers[t * dim + i] = (element + offsets[i]) * scales[i];
        }
    }
}

// Writes elements [count][dim], whole ones and of the first token quarters.
static void write_keys(const NibbleBlock *block, int64_t count, int64_t dim, int64_t size, const float *elements) {
    for (int64_t i = 0; i < dim; i += 2) {
        uint8_t *bytes = block->k + i / 2 * size;
        for (int64_t t = 0; t < count; t++) {
            bytes[t] = (uint8_t)((uint8_t)elements[t * dim + i] | (uint8_t)elements[t * dim + i + 1] << 4);
        }
    }
    memset(block->k_first, 0, dim / 4);
    for (int64_t i = 0; i < dim; i++) {
        int quarters = (int)(elements[i] * 4) & 3;
        block->k_first[i / 4] |= (uint8_t)(quarters << i % 4 * 2);
    }
}

// Quantizes a block's keys anew: `numbers` [count][dim], the first `num_old` of which it holds.
static void store_keys(const NibbleBlock *block, int64_t num_old, int64_t count, int64_t dim, int64_t size, float *numbers) {
    for (int64_t i = 0; i < dim; i += LANES) {
        vint code = {}, least = (vint){} + NO_CODE;
        vfloat zero;
        if (num_old) {
            for (int lane = 0; lane < LANES; lane++) least[lane] = block->k_codes[i + lane];
        }
        quantize_key_channels(numbers + i, dim, count, least, &code, &zero);
        for (int lane = 0; lane < LANES; lane++) {
            block->k_codes[i + lane] = (int8_t)code[lane];
            block->k_zeros[i + lane] = (int8_t)zero[lane];
        }
    }
    write_keys(block, count, dim, size, numbers);
}

// Quantizes a token's values, which it rotates.
static void store_values(const NibbleBlock *block, int64_t offset, int64_t dim, int64_t size, float *numbers) {
    rotate(numbers, dim);
    for (int64_t group = 0; group < num_value_groups(dim); group++) {
        int64_t first = group * VALUE_GROUP, place = group * size + offset;
        int64_t count = dim - first < VALUE_GROUP ? dim - first : VALUE_GROUP;
        quantize_value_group(numbers + first, count, block->v_codes + place, block->v_zeros + place);
    }
    uint8_t *bytes = block->v + offset / 2 * dim;
    for (int64_t i = 0; i < dim; i++) {
        uint8_t element = (uint8_t)numbers[i];
        bytes[i] = (uint8_t)(offset % 2 ? (bytes[i] & 15) | element << 4 : (bytes[i] & 0xf0) | element);
    }
}

INLINE void read_row(const StoreArgs *args, const Side *side, int64_t token, int64_t head, float *row) {
    int64_t first = token * side->token_stride + head * side->head_stride;
    for (int64_t i = 0; i < side->dim; i += LANES) put(row + i, get_numbers(args->dtype, side->source, first + i));
}

// Stores the tokens [start, end) of one block.
static void store_in_block(const StoreArgs *args, int64_t start, int64_t end, int64_t head) {
    int64_t size = args->block_size, dim = args->k.dim, v_dim = args->v.dim;
    int64_t place = args->slot_mapping[start] / size * args->num_kv_heads + head;
    NibbleBlock block = nibble_block(&args->nibbles, args->k.cache, args->v.cache, place, dim, v_dim, size);
    int64_t num_old = size, count = 0;
    for (int64_t token = start; token < end; token++) {
        int64_t offset = args->slot_mapping[token] % size;
        num_old = offset < num_old ? offset : num_old;
        count = offset + 1 > count ? offset + 1 : count;
    }
    float keys[count * dim], values[v_dim];
    read_keys(&block, count, dim, size, keys);
    for (int64_t token = start; token < end; token++) {
        int64_t offset = args->slot_mapping[token] % size;
        read_row(args, &args->k, token, head, keys + offset * dim);
        read_row(args, &args->v, token, head, values);
        store_values(&block, offset, v_dim, size, values);
    }
    store_keys(&block, num_old, count, dim, size, keys);
}

// The end of the tokens from `start` on that go to the same block: a block is quantized as a whole, by one thread.
INLINE int64_t block_end(const StoreArgs *args, int64_t start) {
    int64_t end = start + 1, block = args->slot_mapping[start] / args->block_size;
    while (end < args->num_tokens && args->slot_mapping[end] >= 0 && args->slot_mapping[end] / args->block_size == block) end++;
    return end;
}

// Tokens that begin a block's; others are stored along with them.
INLINE int begins_block(const StoreArgs *args, int64_t token) {
    if (args->slot_mapping[token] < 0) return 0;
    if (token == 0 || args->slot_mapping[token - 1] < 0) return 1;
    return args->slot_mapping[token - 1] / args->block_size != args->slot_mapping[token] / args->block_size;
}

static void store_nibbles(const StoreArgs *args) {
#pragma omp parallel for num_threads(args->num_threads) if (args->num_tokens >= 16) schedule(dynamic, 16)
    for (int64_t token = 0; token < args->num_tokens; token++) {
        if (!begins_block(args, token)) continue;
        int64_t end = block_end(args, token);
        for (int64_t head = 0; head < args->num_kv_heads; head++) store_in_block(args, token, end, head);
    }
}

EXPORT void pagedkv_store(const StoreArgs *args) {
    if (args->kv_dtype == INT4) {
        store_nibbles(args);
        return;
    }
    // Waking threads takes longer than a few tokens do.
#pragma omp parallel for num_threads(args->num_threads) if (args->num_tokens >= 64) schedule(static)
    for (int64_t token = 0; token < args->num_tokens; token++) {
        if (args->slot_mapping[token] < 0) continue;
        for (int64_t head = 0; head < args->num_kv_heads; head++) {
            switch (args->kv_dtype) {
                case FP32: store_as(args, FP32, token, head); break;
                case BF16: store_as(args, BF16, token, head); break;
                case FP16: store_as(args, FP16, token, head); break;
                case INT8: store_as(args, INT8, token, head); break;
                case E4M3: store_as(args, E4M3, token, head); break;
                case E5M2: store_as(args, E5M2, token, head); break;
            }
        }
    }
}
