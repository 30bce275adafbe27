// Writes new keys and values into their slots, quantized as the KV dtype says.

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

EXPORT void pagedkv_store(const StoreArgs *args) {
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
