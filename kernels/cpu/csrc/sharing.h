// Items of different sequences that attend to the same blocks, joined into one that reads them once.
//
// Decodes of sequences with a common prefix are joined wherever a whole split of the context lies in the same blocks and
// every one of them sees all of it. The rows of a product do not know of one another, and splits stay where they are, so
// a sequence gives the same bits with and without others to share with.
#pragma once

#include <string.h>

#include "plan.h"

// Whether all the rows of an item see all of its context, so that it is one of those that can be alike.
INLINE int may_share(const AttendArgs *args, const Plan *plan, const Item *item) {
    const Group *group = &plan->groups[item->group];
    int64_t seen = args->sliding_window ? group->first_position + 1 - args->sliding_window : 0;
    return group->num_queries == 1 && item->end - item->start == SPLIT_TOKENS_FEW_ROWS && item->start >= seen;
}

INLINE const int32_t *item_blocks(const AttendArgs *args, const Plan *plan, const Item *item) {
    int64_t sequence = plan->groups[item->group].sequence;
    return args->block_table + sequence * args->block_table_stride + item->start / args->block_size;
}

// Where the item that was last seen to begin with a block stands in the table, whose length is a power of two.
INLINE int32_t *find_place(const Plan *plan, int32_t block) {
    return &plan->last_seen[(uint32_t)block * 2654435769u >> (32 - plan->table_bits)];
}

// Sequences that an item has at most. With as many threads as there are items, sharing would leave some without work.
static int64_t max_shared(const AttendArgs *args, const Plan *plan) {
    // int8's products gain nothing, and lose as fewer items are shared out between threads less evenly.
    if (group_size(args) > MAX_SHARED_GROUP || args->kv_dtype == INT8) return 1;
    return min64(MAX_ITEM_ROWS / group_size(args), plan->num_items / (MIN_ITEMS_PER_THREAD * args->num_threads));
}

// Joins the items that attend to the same blocks: `next` leads from one to the others, all of which have a place in it.
static void share_contexts(const AttendArgs *args, Plan *plan) {
    int64_t heads = args->num_kv_heads, most = max_shared(args, plan);
    if (most < 2) return;
    memset(plan->last_seen, -1, sizeof(int32_t) << plan->table_bits);
    for (int64_t i = 0; i < plan->num_items; i += heads) {  // those of one context follow one another
        Item *item = &plan->items[i];
        if (!may_share(args, plan, item)) continue;
        const int32_t *blocks = item_blocks(args, plan, item);
        int32_t *place = find_place(plan, blocks[0]);
        Item *other = *place < 0 ? NULL : &plan->items[*place];
        *place = (int32_t)i;
        if (!other || other->start != item->start || other->num_shared == most) continue;
        int64_t bytes = (item->end - item->start) / args->block_size * (int64_t)sizeof(int32_t);
        if (memcmp(blocks, item_blocks(args, plan, other), bytes) != 0) continue;
        for (int64_t head = 0; head < heads; head++) {
            item[head].next = other - plan->items + head;
            item[head].num_shared = other[head].num_shared + 1;
            other[head].num_shared = 0;
        }
    }
}

// Lists the items that stand for themselves or for others too.
static void order_items(Plan *plan) {
    plan->num_ordered = 0;
    for (int64_t i = 0; i < plan->num_items; i++) {
        if (plan->items[i].num_shared) plan->order[plan->num_ordered++] = (int32_t)i;
    }
}
