// What an attention call is given, and how its work is cut into items.
//
// An item is some queries of a sequence, one KV head and some of the context. The query heads that share a KV head are
// the rows of one item, so that its keys and values are read once. Long contexts are split between items whose partial
// results are merged afterwards (Flash-Decoding). The cuts depend on a sequence's own lengths alone: the same sequence
// gives the same bits in every batch and with every number of threads.
#pragma once

#include <stddef.h>

#include "nibbles.h"
#include "quantize.h"

enum {
    MAX_ITEM_ROWS = 192,  // query × head rows of an item, when one token's heads are not more
    FEW_ROWS = 32,
    SPLIT_TOKENS_FEW_ROWS = 1024,  // context of an item of few rows; a multiple of every block size
    SPLIT_TOKENS_MANY_ROWS = 4096,  // enough rows that merging partial results is cheap
    MAX_SHARED_GROUP = 12,          // rows of a sequence that may be joined with those of others
    MIN_ITEMS_PER_THREAD = 4,       // that joining leaves, where there were as many
};

enum { TILES_OF_DECODES = 1, TILES_OF_PROMPTS = 2 };  // of groups with one query, and with more

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
    Nibbles nibbles;  // of INT4
    int32_t q_dtype, kv_dtype, num_threads;
    float scale, softcap;  // softcap 0 is none
    int32_t tiles;         // TILES_OF_DECODES and TILES_OF_PROMPTS: where products of bf16 are made by tiles
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
    int64_t next;               // an item of another sequence that is done with this one; -1: none
    int64_t num_shared;         // sequences of this item and those behind it; 0 if it is done with another one
} Item;

typedef struct {
    Group *groups;
    Item *items;
    int32_t *order;      // the items that are done by themselves
    int32_t *last_seen;  // items by the first block of their context, 2^table_bits of them; -1: none
    float *partials;
    int64_t num_groups, num_items, num_ordered, partial_floats, table_bits;
} Plan;

INLINE int64_t group_size(const AttendArgs *args) { return args->num_heads / args->num_kv_heads; }
INLINE int64_t max_rows(const AttendArgs *args) { return max64(MAX_ITEM_ROWS, group_size(args)); }

// Adds some queries of a sequence: a group for each KV head. `group` is that of the first.
static void add_groups(const AttendArgs *args, Plan *plan, Group group) {
    int64_t end = group.first_position + group.num_queries, start = 0;
    if (args->sliding_window) {
        start = max64(0, group.first_position - args->sliding_window + 1) / args->block_size * args->block_size;
    }
    int64_t rows = group.num_queries * group_size(args), heads = args->num_kv_heads;
    int64_t split = rows <= FEW_ROWS ? SPLIT_TOKENS_FEW_ROWS : SPLIT_TOKENS_MANY_ROWS;
    group.num_items = (end - 1) / split - start / split + 1;
    group.num_open = group.num_items;
    int64_t item_floats = group.num_items > 1 ? rows * (args->v_head_dim + 2) : 0;
    // Heads of the same context follow one another: they are neighbours in memory, and processors fetch beyond what is read.
    for (int64_t i = 0; i < group.num_items; i++) {
        int64_t item_end = min64(end, (start / split + 1) * split);
        for (int64_t head = heads - 1; head >= 0; head--) {
            int64_t partial = plan->partial_floats + (head * group.num_items + i) * item_floats;
            Item item = {plan->num_groups + head, start, item_end, item_floats ? partial : -1, -1, 1};
            if (plan->items) plan->items[plan->num_items] = item;
            plan->num_items++;
        }
        start = item_end;
    }
    for (group.head = 0; group.head < heads; group.head++) {
        group.partial = plan->partial_floats;
        if (plan->groups) plan->groups[plan->num_groups] = group;
        plan->num_groups++;
        plan->partial_floats += group.num_items * item_floats;
    }
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
            add_groups(args, plan, (Group){sequence, 0, query, min64(step, end - query), query + offset, 0, 0, 0});
        }
    }
}
