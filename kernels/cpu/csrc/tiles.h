// Tiles: registers of up to 16 rows of 64 bytes, and their product of pairs of bf16 (AMX of x86). With SOFTWARE_TILES the
// same in plain C, to the same bits, so that layouts and edges run on any processor.
//
// A product adds A[rows, pairs] × B[pairs, columns] to C[rows, columns]: A holds 4 bytes (two steps of a row) a place, B one
// line for each pair of steps, with 4 bytes (the two steps of a column) a place, and C floats. B is how keys, values and
// weights lie in memory. The sums of a row do not depend on how many rows there are; their order is that of the processor's
// documentation:
//
//     even = 0, odd = 0; for each pair: even = fma(a.even, b.even, even), odd = fma(a.odd, b.odd, odd); c = c + (even + odd)
//
// Numbers below the smallest normal one are zero, before and after each operation. NaN and infinities are as in IEEE 754.
#pragma once

#include <errno.h>
#include <pthread.h>

#include "elements.h"

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef SOFTWARE_TILES
#define HAS_TILES 1
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__) && defined(__x86_64__)
#define HAS_TILES 1
#define HARDWARE_TILES 1
#else
#define HAS_TILES 0
#endif

#ifndef REFUSED_TILES
#define REFUSED_TILES 0  // an error number: the operating system is taken to refuse tiles with it, for tests
#endif

enum { NUM_TILES = 8, TILE_ROWS_MAX = 16, TILE_COLUMNS = 16, TILE_PAIRS = 16, TILE_BYTES = 1024 };

// The shape of each tile, as the processor reads it.
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

_Static_assert(sizeof(TileConfig) == 64, "the processor reads 64 bytes");

INLINE void set_tile(TileConfig *config, int tile, int64_t rows, int64_t row_bytes) {
    config->palette = 1;
    config->rows[tile] = (uint8_t)rows;
    config->row_bytes[tile] = (uint16_t)row_bytes;
}

// ---------------------------------------------------------------------------------------------------------- permission

// Asks the operating system for this process's use of tiles. Returns 0 or an error number.
INLINE int request_tiles(void) {
    if (REFUSED_TILES) return REFUSED_TILES;
#ifdef HARDWARE_TILES
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? errno : 0;
#else
    return HAS_TILES ? 0 : ENOSYS;
#endif
}

static int tiles_error;

static void request_tiles_once(void) { tiles_error = request_tiles(); }

// 0 where tiles may be used, or the error number of the refusal; ENOSYS: there are none. The first call asks, for all
// threads of the process; using a tile before that ends the process.
static int find_tiles_error(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, request_tiles_once);
    return tiles_error;
}

// --------------------------------------------------------------------------------------------------------- instructions
//
// Tiles are named by constants from 0 to NUM_TILES - 1. Each thread has its own: it configures them before use, which
// clears them, and releases them afterwards, or they would be saved at each of its context switches.

#ifdef HARDWARE_TILES

// The clobber of memory is needed, unlike with the compilers' own intrinsics: what is loaded must have been written.
INLINE void configure_tiles(const TileConfig *config) { __asm__ volatile("ldtilecfg %0" : : "m"(*config) : "memory"); }
INLINE void release_tiles(void) { __asm__ volatile("tilerelease" : : : "memory"); }
INLINE void tile_zero(const int tile) { __asm__ volatile("tilezero %%tmm%c0" : : "i"(tile)); }

// `stride_bytes` lie from a row in memory to the next.
INLINE void tile_load(const int tile, const void *p, int64_t stride_bytes) {
    __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(tile), "r"(p), "r"(stride_bytes) : "memory");
}

INLINE void tile_store(const int tile, void *p, int64_t stride_bytes) {
    __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(tile), "r"(p), "r"(stride_bytes) : "memory");
}

// c += a × b.
INLINE void tile_dot_bf16(const int c, const int a, const int b) {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

#elif HAS_TILES

typedef struct {
    TileConfig config;
    char tiles[NUM_TILES][TILE_ROWS_MAX][64];
} SoftwareTiles;

static __thread SoftwareTiles software_tiles;

INLINE void configure_tiles(const TileConfig *config) {
    software_tiles = (SoftwareTiles){.config = *config};
    for (int tile = 0; tile < NUM_TILES; tile++) {
        if (config->rows[tile] > TILE_ROWS_MAX || config->row_bytes[tile] > 64) __builtin_trap();
    }
}

INLINE void release_tiles(void) { software_tiles = (SoftwareTiles){0}; }

// A tile without a shape can't be used: the processor, too, faults.
INLINE int64_t tile_rows(int tile) {
    if (!software_tiles.config.palette || !software_tiles.config.rows[tile]) __builtin_trap();
    return software_tiles.config.rows[tile];
}

INLINE int64_t tile_row_bytes(int tile) { return software_tiles.config.row_bytes[tile]; }

INLINE void tile_zero(const int tile) {
    (void)tile_rows(tile);
    memset(software_tiles.tiles[tile], 0, TILE_BYTES);
}

INLINE void tile_load(const int tile, const void *p, int64_t stride_bytes) {
    tile_zero(tile);
    for (int64_t row = 0; row < tile_rows(tile); row++) {
        memcpy(software_tiles.tiles[tile][row], (const char *)p + row * stride_bytes, tile_row_bytes(tile));
    }
}

INLINE void tile_store(const int tile, void *p, int64_t stride_bytes) {
    for (int64_t row = 0; row < tile_rows(tile); row++) {
        memcpy((char *)p + row * stride_bytes, software_tiles.tiles[tile][row], tile_row_bytes(tile));
    }
}

INLINE float flush_denormal(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
INLINE float even_of(uint32_t pair) { return flush_denormal(bits_to_float(pair << 16)); }
INLINE float odd_of(uint32_t pair) { return flush_denormal(bits_to_float(pair & 0xffff0000)); }

__attribute__((noinline)) static void tile_dot_bf16(const int c, const int a, const int b) {
    int64_t columns = tile_row_bytes(c) / 4, pairs = tile_row_bytes(a) / 4;
    float b_even[TILE_PAIRS][TILE_COLUMNS], b_odd[TILE_PAIRS][TILE_COLUMNS];
    if (tile_rows(a) != tile_rows(c) || tile_rows(b) != pairs || tile_row_bytes(b) != tile_row_bytes(c)) __builtin_trap();
    for (int64_t k = 0; k < pairs; k++) {
        uint32_t line[TILE_COLUMNS];
        memcpy(line, software_tiles.tiles[b][k], sizeof line);
        for (int n = 0; n < TILE_COLUMNS; n++) {
            b_even[k][n] = even_of(line[n]);
            b_odd[k][n] = odd_of(line[n]);
        }
    }
    for (int64_t row = 0; row < tile_rows(c); row++) {
        uint32_t a_pairs[TILE_PAIRS];
        float even[TILE_COLUMNS] = {0}, odd[TILE_COLUMNS] = {0}, sums[TILE_COLUMNS];
        memcpy(a_pairs, software_tiles.tiles[a][row], sizeof a_pairs);
        memcpy(sums, software_tiles.tiles[c][row], sizeof sums);
        for (int64_t k = 0; k < pairs; k++) {
            float a_even = even_of(a_pairs[k]), a_odd = odd_of(a_pairs[k]);
            for (int n = 0; n < TILE_COLUMNS; n++) {
                even[n] = flush_denormal(fmaf(a_even, b_even[k][n], even[n]));
                odd[n] = flush_denormal(fmaf(a_odd, b_odd[k][n], odd[n]));
            }
        }
        for (int64_t n = 0; n < columns; n++) {
            sums[n] = flush_denormal(flush_denormal(sums[n]) + flush_denormal(even[n] + odd[n]));
        }
        memcpy(software_tiles.tiles[c][row], sums, sizeof sums);
    }
}

#endif
