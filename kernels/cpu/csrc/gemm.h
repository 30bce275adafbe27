// C (+)= A × B for some rows of A, the only matrix products that attention needs: queries × keys and weights × values.
//
// B is read in place, wherever its blocks lie: of keys, LANES columns lie together; of values, a segment of steps does.
// The columns of C are lanes and the rows of B are steps of the sum, so that a column never sees another one's B:
// whatever stands in unused slots of a block stays in their own columns.
#pragma once

#include "elements.h"

// A line of B is one step, or a pair of steps of a column side by side, so that a shift and a mask widen them.
enum {
    B_FP32,
    B_FP16,
    B_BF16_PAIRS,
    B_BF16_DOT,    // pairs, and A is pairs of bf16 too, for the processor's dot product of pairs
    B_INT8_PAIRS,
    B_INT8_DOT,    // pairs, and A is pairs of 16-bit integers with a scale a row: products and sums are integers
    B_E4M3,        // 2^-8 times the numbers, as halves have a smaller exponent for the same bits
    B_E5M2,
    NUM_B_FORMATS,
};

// 6 × 4 accumulators fit 32 registers beside B and a factor of A; 6 × 2 fit 16.
#define MAX_TILE_ROWS 6
#if LANES == 16
#define MAX_TILE_VECTORS 4
#else
#define MAX_TILE_VECTORS 2
#endif

typedef vfloat Sums[MAX_TILE_ROWS][MAX_TILE_VECTORS];

typedef struct {
    const void *a;          // [rows, lda] floats, or pairs
    const float *a_scales;  // one a row, for B_INT8_DOT alone
    const char *const *b;   // where each LANES columns begin, or each `segment` steps
    float *c;               // [rows, ldc]
    int64_t lda, ldc, rows, columns, depth;
    int64_t alike;       // rows that register tiles are cut from: they never span two such runs of rows
    int64_t line_bytes;  // from a line of B to the next
    int64_t segment;     // steps that lie together; even
    int64_t ahead;       // entries of b in front of the product that are asked for from memory; 0: none
} Product;

INLINE int is_dot(int format) { return format == B_BF16_DOT || format == B_INT8_DOT; }
INLINE int is_paired(int format) { return is_dot(format) || format == B_BF16_PAIRS || format == B_INT8_PAIRS; }
INLINE int steps_per_line(int format) { return is_paired(format) ? 2 : 1; }

// Bytes of one column of one line.
INLINE int64_t column_bytes(int format) {
    if (format == B_E4M3 || format == B_E5M2) return 1;
    return format == B_FP16 || format == B_INT8_PAIRS || format == B_INT8_DOT ? 2 : 4;
}

// LANES columns of a step. `line` is the step's, or its pair's, of which it is the second or not.
INLINE vfloat load_step(int format, const char *line, int is_second) {
    if (format == B_FP32) return load((const float *)line);
    if (format == B_FP16) return half_to_float((const uint16_t *)line);
    if (format == B_E4M3) return e4m3_to_float((const uint8_t *)line);
    if (format == B_E5M2) return e5m2_to_float((const uint8_t *)line);
    if (format == B_INT8_PAIRS) {
        vint pairs = (vint)widen_bytes((const int8_t *)line);
        return __builtin_convertvector((is_second ? pairs : pairs << 16) >> 16, vfloat);
    }
    vuint pairs = *(const vuint_any *)line;
    return is_second ? (vfloat)(pairs & 0xffff0000) : (vfloat)(pairs << 16);
}

// LANES columns of a pair of steps, for dot products.
INLINE vuint load_pair(int format, const char *line) {
    if (format == B_INT8_DOT) return widen_bytes((const int8_t *)line);
    return *(const vuint_any *)line;
}

// Adds one step to the sums of a tile. Each factor of A is used up before the next is loaded: registers are few.
INLINE void add_step(const int format, const int rows, const int vectors, const float *a, int64_t lda,
                     const char *const line[], int64_t offset, int is_second, Sums sums) {
    vfloat step[MAX_TILE_VECTORS];
#pragma GCC unroll 4
    for (int n = 0; n < vectors; n++) step[n] = load_step(format, line[n] + offset, is_second);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        vfloat factor = splat(a[r * lda]);
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) sums[r][n] += factor * step[n];
    }
}

// Adds a pair of steps, of which the second counts only if `has_second`: it may be no step and hold anything.
INLINE void add_pair(const int format, const int rows, const int vectors, const uint32_t *a, int64_t lda,
                     const char *const line[], int64_t offset, const int has_second, Sums sums) {
    vuint step[MAX_TILE_VECTORS];
#pragma GCC unroll 4
    for (int n = 0; n < vectors; n++) {
        step[n] = load_pair(format, line[n] + offset);
        if (!has_second) step[n] &= 0xffff;
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        vuint factor = a[r * lda] - (vuint){};
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) {
            sums[r][n] = format == B_INT8_DOT ? (vfloat)dot_shorts((vint)sums[r][n], (vint)factor, (vint)step[n])
                                              : dot_pairs(sums[r][n], factor, step[n]);
        }
    }
}

// Adds `depth` steps that lie together. `next` is where memory is asked for, or null. One line a vector and step of it:
// many at once would fill the queue of outstanding misses, and the processor would wait for memory instead of multiplying.
INLINE void add_lines(const int format, const int rows, const int vectors, const void *a, int64_t lda,
                      const char *const line[], const char *const next[], int64_t line_bytes, int64_t depth, Sums sums,
                      Sums more) {
    const int64_t second = is_paired(format) ? 0 : line_bytes;
    const float *factor = a;
    int64_t offset = 0;
    for (int64_t k = depth; k > 1; k -= 2) {
        if (next) {
#pragma GCC unroll 4
            for (int n = 0; n < vectors; n++) {
                __builtin_prefetch(next[n] + offset);
                if (second) __builtin_prefetch(next[n] + offset + second);
            }
        }
        if (is_dot(format)) {
            add_pair(format, rows, vectors, (const uint32_t *)factor, lda, line, offset, 1, sums);
            factor++;
        } else {
            add_step(format, rows, vectors, factor, lda, line, offset, 0, sums);
            add_step(format, rows, vectors, factor + 1, lda, line, offset + second, 1, more);
            factor += 2;
        }
        offset += second + line_bytes;
    }
    if (depth % 2 == 0) return;
    if (is_dot(format)) add_pair(format, rows, vectors, (const uint32_t *)factor, lda, line, offset, 0, sums);
    else add_step(format, rows, vectors, factor, lda, line, offset, 0, sums);
}

// Few rows need a second set of sums to hide the latency of a multiply-add.
INLINE int has_two_sets(int format, int rows, int vectors) { return !is_dot(format) && rows * vectors <= 4; }

// Whether a row's bits are the same in any tiles that are cut from whole runs of `alike` rows: always but where a second
// set of sums comes and goes with the number of rows.
INLINE int may_mix_rows(int format, int64_t alike, int64_t v_dim) {
    return is_dot(format) || (alike >= 3 && v_dim % (2 * LANES) == 0);  // 3 rows × 2 vectors are more than 4 already
}

INLINE void begin_tile(const int rows, const int vectors, Sums sums) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) sums[r][n] = splat(0.0f);
    }
}

INLINE void end_tile(const int format, const int rows, const int vectors, const Product *p, int64_t row, int64_t column,
                     Sums sums, Sums more, const int accumulates) {
    float *c = p->c + row * p->ldc + column;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) {
            vfloat sum = sums[r][n];
            if (has_two_sets(format, rows, vectors)) sum += more[r][n];
            if (format == B_INT8_DOT) sum = __builtin_convertvector((vint)sum, vfloat) * p->a_scales[row + r];
            float *place = c + r * p->ldc + n * LANES;
            put(place, accumulates ? load(place) + sum : sum);
        }
    }
}

// A tile of C = A × B whose columns lie in groups. All of format, rows and vectors are constants where this is inlined.
INLINE void columns_tile(const int format, const int rows, const int vectors, const Product *p, int64_t row, int64_t column) {
    Sums sums, more;
    begin_tile(rows, vectors, sums);
    begin_tile(rows, vectors, more);
    const char *const *line = p->b + column / LANES, *const *next = p->ahead ? line + p->ahead : NULL;
    add_lines(format, rows, vectors, (const float *)p->a + row * p->lda, p->lda, line, next, p->line_bytes, p->depth, sums,
              has_two_sets(format, rows, vectors) ? more : sums);
    end_tile(format, rows, vectors, p, row, column, sums, more, 0);
}

// A tile of C += A × B whose steps lie in segments.
INLINE void steps_tile(const int format, const int rows, const int vectors, const Product *p, int64_t row, int64_t column) {
    Sums sums, more;
    begin_tile(rows, vectors, sums);
    begin_tile(rows, vectors, more);
    const float *a = (const float *)p->a + row * p->lda;
    int64_t factors = is_dot(format) ? p->segment / 2 : p->segment;
    for (int64_t k = 0, i = 0; k < p->depth; k += p->segment, i++) {
        const char *line[MAX_TILE_VECTORS], *next[MAX_TILE_VECTORS];
        const char *ahead = p->b[i + p->ahead];
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) {
            line[n] = p->b[i] + (column + n * LANES) * column_bytes(format);
            next[n] = ahead + (column + n * LANES) * column_bytes(format);
        }
        int64_t depth = p->depth - k < p->segment ? p->depth - k : p->segment;
        add_lines(format, rows, vectors, a, p->lda, line, p->ahead ? next : NULL, p->line_bytes, depth, sums,
                  has_two_sets(format, rows, vectors) ? more : sums);
        a += factors;
    }
    end_tile(format, rows, vectors, p, row, column, sums, more, 1);
}

typedef void tile_fn(const Product *p, int64_t row, int64_t column);

#define DEFINE_TILE(kind, format, rows, vectors)                                                                   \
    static void kind##_##format##_##rows##_##vectors(const Product *p, int64_t row, int64_t column) {               \
        kind##_tile(format, rows, vectors, p, row, column);                                                         \
    }
#define DEFINE_ROWS(kind, format, vectors)                                                                         \
    DEFINE_TILE(kind, format, 1, vectors) DEFINE_TILE(kind, format, 2, vectors) DEFINE_TILE(kind, format, 3, vectors) \
    DEFINE_TILE(kind, format, 4, vectors) DEFINE_TILE(kind, format, 5, vectors) DEFINE_TILE(kind, format, 6, vectors)
#define LIST_ROWS(kind, format, vectors)                                                                           \
    {kind##_##format##_1_##vectors, kind##_##format##_2_##vectors, kind##_##format##_3_##vectors,                   \
     kind##_##format##_4_##vectors, kind##_##format##_5_##vectors, kind##_##format##_6_##vectors}

#if MAX_TILE_VECTORS == 4
#define DEFINE_TILES(format)                                                                                       \
    DEFINE_ROWS(columns, format, 4)                                                                                 \
    DEFINE_ROWS(steps, format, 1) DEFINE_ROWS(steps, format, 2) DEFINE_ROWS(steps, format, 4)
#define LIST_COLUMNS(format) LIST_ROWS(columns, format, 4)
#define LIST_STEPS(format) {LIST_ROWS(steps, format, 1), LIST_ROWS(steps, format, 2), LIST_ROWS(steps, format, 4)}
#else
#define DEFINE_TILES(format)                                                                                       \
    DEFINE_ROWS(columns, format, 2) DEFINE_ROWS(steps, format, 1) DEFINE_ROWS(steps, format, 2)
#define LIST_COLUMNS(format) LIST_ROWS(columns, format, 2)
#define LIST_STEPS(format) {LIST_ROWS(steps, format, 1), LIST_ROWS(steps, format, 2)}
#endif

DEFINE_TILES(B_FP32)
DEFINE_TILES(B_FP16)
DEFINE_TILES(B_BF16_PAIRS)
DEFINE_TILES(B_BF16_DOT)
DEFINE_TILES(B_INT8_PAIRS)
DEFINE_TILES(B_INT8_DOT)
DEFINE_TILES(B_E4M3)
DEFINE_TILES(B_E5M2)

static tile_fn *const columns_tiles[NUM_B_FORMATS][MAX_TILE_ROWS] = {
    LIST_COLUMNS(B_FP32),       LIST_COLUMNS(B_FP16),     LIST_COLUMNS(B_BF16_PAIRS), LIST_COLUMNS(B_BF16_DOT),
    LIST_COLUMNS(B_INT8_PAIRS), LIST_COLUMNS(B_INT8_DOT), LIST_COLUMNS(B_E4M3),       LIST_COLUMNS(B_E5M2),
};
static tile_fn *const steps_tiles[NUM_B_FORMATS][MAX_TILE_VECTORS / 2 + 1][MAX_TILE_ROWS] = {
    LIST_STEPS(B_FP32),       LIST_STEPS(B_FP16),     LIST_STEPS(B_BF16_PAIRS), LIST_STEPS(B_BF16_DOT),
    LIST_STEPS(B_INT8_PAIRS), LIST_STEPS(B_INT8_DOT), LIST_STEPS(B_E4M3),       LIST_STEPS(B_E5M2),
};

#define COLUMNS_STEP (LANES * MAX_TILE_VECTORS)

// Runs a tile function on all rows, cut evenly.
INLINE void run_tiles(tile_fn *const *tiles, const Product *p, int64_t column) {
    int64_t num_chunks = (p->alike + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    for (int64_t row = 0; row < p->rows; row += p->alike) {
        for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
            int64_t first = p->alike * chunk / num_chunks, count = p->alike * (chunk + 1) / num_chunks - first;
            tiles[count - 1](p, row + first, column);
        }
    }
}

// C[rows, columns] = A[rows, depth] × B[depth, columns]. Writes whole tiles: C has room for, and b entries for, columns
// up to the next multiple of COLUMNS_STEP.
static void multiply_columns(int format, const Product *p) {
    for (int64_t column = 0; column < p->columns; column += COLUMNS_STEP) run_tiles(columns_tiles[format], p, column);
}

// C[rows, columns] += A[rows, depth] × B[depth, columns]; columns are a multiple of LANES.
static void multiply_steps(int format, const Product *p) {
    for (int64_t column = 0; column < p->columns;) {
        int kind = MAX_TILE_VECTORS / 2;
        while ((LANES << kind) > p->columns - column) kind--;
        run_tiles(steps_tiles[format][kind], p, column);
        column += LANES << kind;
    }
}
