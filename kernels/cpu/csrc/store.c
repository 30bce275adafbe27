// Writes new keys and values into their slots, and says what the library was compiled for.

#include "simd.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct {
    const void *k, *v;           // [num_tokens, num_kv_heads, dim]
    void *k_cache, *v_cache;
    const int64_t *slot_mapping;  // negative is stored nowhere
    int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
    int64_t num_tokens, num_kv_heads, head_dim, v_head_dim, block_size;
    int32_t dtype, kv_dtype, num_threads;
} StoreArgs;

// Keys lie channel by channel, [dim, block_size]; bf16 in pairs of channels, [dim / 2, block_size, 2].
INLINE int64_t key_index(int kv_dtype, int64_t channel, int64_t offset, int64_t block_size) {
    if (kv_dtype == BF16) return (channel / 2 * block_size + offset) * 2 + channel % 2;
    return channel * block_size + offset;
}

// Values lie token by token, [block_size, dim]; bf16 in pairs of tokens, [block_size / 2, dim, 2].
INLINE int64_t value_index(int kv_dtype, int64_t channel, int64_t offset, int64_t dim) {
    if (kv_dtype == BF16) return (offset / 2 * dim + channel) * 2 + offset % 2;
    return offset * dim + channel;
}

// Equal 16-bit dtypes are moved as they are, so that every NaN stays what it is.
INLINE void convert(int to, void *target, int64_t i, int from, const void *source, int64_t j) {
    if (to == from && to != FP32) ((uint16_t *)target)[i] = ((const uint16_t *)source)[j];
    else set_element(to, target, i, get_element(from, source, j));
}

INLINE void store_head(const StoreArgs *args, const int dtype, const int kv_dtype, int64_t token, int64_t head) {
    int64_t slot = args->slot_mapping[token], size = args->block_size;
    int64_t block = slot / size, offset = slot % size, place = block * args->num_kv_heads + head;
    int64_t k_first = token * args->k_token_stride + head * args->k_head_stride;
    int64_t v_first = token * args->v_token_stride + head * args->v_head_stride;
    char *k = (char *)args->k_cache + place * args->head_dim * size * element_bytes(kv_dtype);
    char *v = (char *)args->v_cache + place * args->v_head_dim * size * element_bytes(kv_dtype);
    for (int64_t i = 0; i < args->head_dim; i++) {
        convert(kv_dtype, k, key_index(kv_dtype, i, offset, size), dtype, args->k, k_first + i);
    }
    for (int64_t i = 0; i < args->v_head_dim; i++) {
        convert(kv_dtype, v, value_index(kv_dtype, i, offset, args->v_head_dim), dtype, args->v, v_first + i);
    }
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
            if (args->kv_dtype == FP32) store_as(args, FP32, token, head);
            else if (args->kv_dtype == BF16) store_as(args, BF16, token, head);
            else store_as(args, FP16, token, head);
        }
    }
}
