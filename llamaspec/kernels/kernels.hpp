// What the instruction sets share: the layout of quantized activations, one product, and the table of kernels.
//
// Files of an instruction set are compiled with its flags. They must not instantiate templates or inline functions
// with external linkage (std::min, for example): the linker would keep one copy for all, which may not run here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace llamaspec {

// Types of weights, numbered as in GGUF files.
enum Type : int {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
    Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, BF16 = 30, MXFP4 = 39, N_TYPES = 40,
};

constexpr int UNIT = 32;         // activations that have a scale of their own
constexpr int MAX_COLUMNS = 64;  // of a product; wider ones are computed in parts
constexpr int MAX_LANES = 16;    // rows that are computed together
constexpr size_t BYTES_AHEAD = 24576;  // weights are read ahead at least this far, and at least a panel of rows

// 32 activations of a column: x[i] = scale * q[i]. What follows depends on the type of the weights (`Aux`).
struct Activations {
    int8_t q[UNIT];
    float scale;
    union {
        int32_t bias[2];  // -offset times the sum of the q, of each half or (only bias[0]) of all
        float sum[2];     // scale times the sum of the q, of each half or (only sum[0]) of all
    };
};
static_assert(sizeof(Activations) == 44, "loads of four bytes must not cross cache lines");

typedef int32_t __attribute__((may_alias)) Four;  // four activations that are multiplied at once

struct Table { alignas(16) uint8_t values[16]; };  // what weights of four bits stand for

// What a type of weights needs besides q and scale.
struct Aux {
    int offset;    // stored weights are the true ones plus this
    bool halves;   // 16 weights share a scale, not 32
    bool has_min;  // weights have a minimum, which is multiplied by the sum of the activations
};

// out[c][r] = sum over k of weights[r][k] * column c [k], for a range of rows that begins at a multiple of MAX_LANES.
struct Product {
    const uint8_t *weights;         // of row 0
    size_t row_bytes;               // from one row to the next
    int64_t n_rows, n_inputs;       // [n_rows, n_inputs]
    int n_columns;                  // <= MAX_COLUMNS
    const Activations *quantized;   // [n_inputs / UNIT, n_columns], for quantized weights
    const float *const *columns;    // [n_columns][n_inputs], for others
    float *const *out;              // [n_columns][n_rows]
    const uint8_t *next;            // the rows to read ahead; nullptr = in the order of memory
};

// softmax(scale * q K + mask) V for each row: a head at a position. Strides are in bytes.
struct Attention {
    int n_heads, heads_per_kv, key_length, value_length;
    int64_t n_cells;
    const char *q;  // float32
    size_t q_position_bytes, q_head_bytes;
    const uint8_t *keys, *values;
    size_t key_cell_bytes, key_head_bytes, value_cell_bytes, value_head_bytes;
    int key_type, value_type;       // F16, BF16 or Q8_0
    const char *mask;               // f16 [positions, n_cells]; nullptr = every position sees every cell
    size_t mask_bytes;
    const float *slopes, *sinks;    // of each head; nullptr = none
    float scale, softcap;           // softcap 0 = none
    float *out;                     // [positions, n_heads, value_length]

    const uint16_t *mask_at(int position) const {
        return reinterpret_cast<const uint16_t *>(mask + position * mask_bytes);
    }
    size_t scratch_bytes(size_t n_heads, size_t n_positions) const {
        const size_t n = n_cells + MAX_LANES, n_rows = n_heads * n_positions;
        return 13 * n + 4 * n * (n_positions + n_rows) + n_rows * (key_length + value_length) * 4 + key_length * 64 +
               8 * 64;
    }
};

using Kernel = void (*)(const Product &, int64_t first_row, int64_t end_row);

struct Level {
    const char *name;
    int lanes;                // rows that are computed together; a product has at least as many
    Kernel kernels[N_TYPES];  // nullptr = not covered
    Aux aux[N_TYPES];
    // Attention of some heads, which share keys and values, at some positions. Lengths are multiples of 16, of
    // Q8_0 of 32, and scratch is aligned to 64.
    void (*attend)(const Attention &, int head, int n_heads, int position, int n_positions, char *scratch);
    // Quantize units of one column; unit i goes to out[i * stride].
    void (*quantize)(const float *x, int64_t n_units, Aux aux, Activations *out, size_t stride);
};

extern const Level AVX512, AVX_VNNI, AVX2, NEON_DOTPROD;  // those of other processors are not in the library

// The instruction sets that this processor may have, the best first; the last one has no level.
struct Choice {
    const Level *level;
    bool (*is_here)();
};
extern const Choice *const choices;
extern const char *const too_old;  // of a processor that has none of them

}  // namespace llamaspec
