// Attention over cells of type f16, bf16 or q8_0, for one instruction set. Included after the vectors.
//
// A row is one head of one position. Its scores are found first, then its greatest score, then the weighted sum of
// the values, cell by cell in ascending order. A cell that a row may not see adds exactly nothing. So the result does
// not depend on the other positions of the evaluation, on where cells lie, or on threads.
#pragma once

#include "kernels.hpp"

namespace {

using namespace llamaspec;

constexpr uint16_t MINUS_INFINITY = 0xfc00;  // f16
constexpr int ROWS_OF_SCORES = 8;         // that are computed together
constexpr int VECTORS = N_REGISTERS / 8;  // of values that are computed together
constexpr int ROWS_OF_VALUES = (N_REGISTERS - VECTORS - 2) / VECTORS;

// e^x for x <= 0, with an error of about one unit in the last place (Cephes' polynomial). NaN stays NaN.
inline F exponential(F x) {
    x = at_least(x, floats(-87.0f));
    const F n = nearest(multiply(x, floats(1.44269504f)));
    F r = subtract_product(n, floats(0.693359375f), x);
    r = subtract_product(n, floats(-2.12194440e-4f), r);
    F y = floats(1.9875691500e-4f);
    y = multiply_add(y, r, floats(1.3981999507e-3f)), y = multiply_add(y, r, floats(8.3334519073e-3f));
    y = multiply_add(y, r, floats(4.1665795894e-2f)), y = multiply_add(y, r, floats(1.6666665459e-1f));
    y = multiply_add(y, r, floats(5.0000001201e-1f));
    y = add(multiply_add(y, multiply(r, r), r), floats(1.0f));
    return multiply(y, power_of_two(n));
}

template <int J> inline F signed_byte(I x) { return to_float(right_signed<24>(left<24 - 8 * J>(x))); }

inline void spread_signed(const I *x, F scale, F *out) {  // 16 bytes of each lane
    for (int i = 0; i < 4; i++) {
        out[4 * i] = multiply(signed_byte<0>(x[i]), scale), out[4 * i + 1] = multiply(signed_byte<1>(x[i]), scale);
        out[4 * i + 2] = multiply(signed_byte<2>(x[i]), scale), out[4 * i + 3] = multiply(signed_byte<3>(x[i]), scale);
    }
}

// Each type of cells says how to read them as floats, exactly.
//     transpose(cells, length, out)   keys of LANES cells: out[d] has element d of each
//     load(value, d)                  LANES elements of a value, from element d on

struct HalfCells {
    static F low(I x) { return half_to_float(low_halves(x)); }
    static F high(I x) { return half_to_float(high_halves(x)); }
    static F load(const uint8_t *value, int d) { return load_half((const uint16_t *)value + d); }
};

struct BrainCells {
    static F low(I x) { return bits_to_float(left<16>(x)); }
    static F high(I x) { return bits_to_float(band(x, ints(static_cast<int>(0xffff0000)))); }
    static F load(const uint8_t *value, int d) { return load_brain((const uint16_t *)value + d); }
};

template <class Of16Bits> struct Cells : Of16Bits {
    static void transpose(const uint8_t *const *cells, int length, F *out) {
        for (int d = 0; d < length; d += 8, out += 8) {
            I x[4];
            load_cells(cells, 2 * d, x);
            for (int i = 0; i < 4; i++) out[2 * i] = Of16Bits::low(x[i]), out[2 * i + 1] = Of16Bits::high(x[i]);
        }
    }
};

struct CellsQ80 {  // blocks of a scale, as f16, and 32 bytes
    static constexpr int LENGTH = 32, BYTES = 34;

    static void transpose(const uint8_t *const *cells, int length, F *out) {
        for (size_t at = 0; at < static_cast<size_t>(length) / LENGTH * BYTES; at += BYTES, out += LENGTH) {
            alignas(32) uint16_t scales[LANES];
            for (int r = 0; r < LANES; r++) __builtin_memcpy(scales + r, cells[r] + at, 2);
            const F scale = half_to_float(load_halves(scales));
            I x[4];
            load_cells(cells, at + 2, x), spread_signed(x, scale, out);
            load_cells(cells, at + 18, x), spread_signed(x, scale, out + 16);
        }
    }
    static F load(const uint8_t *value, int d) {
        const uint8_t *block = value + d / LENGTH * BYTES;
        uint16_t scale;
        __builtin_memcpy(&scale, block, 2);
        return multiply(to_float(load_signed_bytes(block + 2 + d % LENGTH)), floats(half_to_float_scalar(scale)));
    }
};

template <int ROWS> inline void find_scores(const F *keys, const float *q, int length, float *out, size_t stride) {
    F sums[ROWS];
    for (int r = 0; r < ROWS; r++) sums[r] = zeros();
    for (int d = 0; d < length; d++)
        for (int r = 0; r < ROWS; r++) sums[r] = multiply_add(keys[d], floats(q[r * length + d]), sums[r]);
    for (int r = 0; r < ROWS; r++) store(out + r * stride, sums[r]);
}
template <int ROWS = ROWS_OF_SCORES>
inline void find_scores_of(int n, const F *keys, const float *q, int length, float *out, size_t stride) {
    if constexpr (ROWS > 0) {
        if (n == ROWS) find_scores<ROWS>(keys, q, length, out, stride);
        else find_scores_of<ROWS - 1>(n, keys, q, length, out, stride);
    }
}

// The sum of weight times value over all cells, for N vectors of each value from element d on, and ROWS rows.
template <class C, int ROWS, int N>
inline void add_values(const uint8_t *const *cells, const uint8_t *is_shared, int64_t n_cells, int d, const float *weights, size_t stride,
                       float *out, size_t out_stride) {
    F sums[ROWS][N];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < N; i++) sums[r][i] = zeros();
    for (int64_t c = 0; c < n_cells; c++) {
        F v[N];
        for (int i = 0; i < N; i++) v[i] = C::load(cells[c], d + LANES * i);
        for (int r = 0; r < ROWS; r++) {
            // A value that this row does not see may be NaN.
            if (!is_shared[c] && weights[r * stride + c] == 0.0f) continue;
            const F w = floats(weights[r * stride + c]);
            for (int i = 0; i < N; i++) sums[r][i] = multiply_add(v[i], w, sums[r][i]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < N; i++) store(out + r * out_stride + LANES * i, sums[r][i]);
}
template <class C, int N, int ROWS = ROWS_OF_VALUES>
inline void add_values_of(int n, const uint8_t *const *cells, const uint8_t *is_shared, int64_t n_cells, int d, const float *weights,
                          size_t stride, float *out, size_t out_stride) {
    if constexpr (ROWS > 0) {
        if (n == ROWS) add_values<C, ROWS, N>(cells, is_shared, n_cells, d, weights, stride, out, out_stride);
        else add_values_of<C, N, ROWS - 1>(n, cells, is_shared, n_cells, d, weights, stride, out, out_stride);
    }
}

// What attention needs of a type of cells.
struct CellType {
    decltype(&CellsQ80::transpose) transpose;
    decltype(&add_values_of<CellsQ80, 1>) add_one, add_many;  // vectors
};
template <class C> constexpr CellType CELL_TYPE{C::transpose, add_values_of<C, 1>, add_values_of<C, VECTORS>};

inline const CellType &cell_type(int type) {
    if (type == Q8_0) return CELL_TYPE<CellsQ80>;
    return type == BF16 ? CELL_TYPE<Cells<BrainCells>> : CELL_TYPE<Cells<HalfCells>>;
}

// tanh, from e^(-2 |x|): its error is absolute, because the result is added to numbers of any size.
inline F hyperbolic_tangent(F x) {
    const F e = exponential(multiply(absolute(x), floats(-2.0f)));
    return with_sign_of(divide(subtract_floats(floats(1.0f), e), add(floats(1.0f), e)), x);
}

// Turn the dot products of a row, of a multiple of LANES cells, into e^(score - greatest score); return the latter.
inline float find_weights(const Attention &a, int head, const float *mask, int64_t n, float *scores) {
    const F slope = floats(a.slopes ? a.slopes[head] : 1.0f);
    F greatest = floats(a.sinks ? a.sinks[head] : -__builtin_inff());
    for (int64_t c = 0; c < n; c += LANES) {
        F s = multiply(load(scores + c), floats(a.scale));
        if (a.softcap != 0.0f) s = multiply(hyperbolic_tangent(s), floats(a.softcap));
        const F m = load(mask + c);
        s = none_where_none(m, add(s, multiply(slope, m)));
        store(scores + c, s), greatest = at_least(greatest, s);
    }
    const float most = greatest_lane(greatest);
    for (int64_t c = 0; c < n; c += LANES) {
        const F s = load(scores + c);
        store(scores + c, zero_where_none(s, exponential(subtract_floats(s, floats(most)))));
    }
    return most;
}

// Divide the weights of up to ROWS_OF_SCORES rows by their sums. These are added up cell by cell, because cells that a
// row does not see may lie between.
inline void normalize(const Attention &a, const int *heads, const float *greatest, int n_rows, int64_t n, float *weights,
                      size_t stride) {
    float sums[ROWS_OF_SCORES] = {};
    const float *rows[ROWS_OF_SCORES];
    for (int r = 0; r < ROWS_OF_SCORES; r++) rows[r] = weights + (r < n_rows ? r : 0) * stride;
    for (int64_t c = 0; c < n; c++)
        for (int r = 0; r < ROWS_OF_SCORES; r++) sums[r] += rows[r][c];
    for (int r = 0; r < n_rows; r++) {
        if (a.sinks) sums[r] += first_lane(exponential(floats(a.sinks[heads[r]] - greatest[r])));
        const F inverse = floats(sums[r] == 0.0f ? 0.0f : 1.0f / sums[r]);
        float *row = weights + r * stride;
        for (int64_t c = 0; c < n; c += LANES) store(row + c, multiply(load(row + c), inverse));
    }
}

struct Scratch {
    char *next;
    template <class T> T *take(size_t n) {
        T *p = (T *)next;
        next += (n * sizeof(T) + 63) / 64 * 64;
        return p;
    }
};

// Heads [head, head + n_heads), which share keys and values, at positions [position, position + n_positions).
void attend(const Attention &a, int head, int n_heads, int position, int n_positions, char *scratch) {
    const int n_rows = n_heads * n_positions, kv = head / a.heads_per_kv;
    const CellType &key_type = cell_type(a.key_type), &value_type = cell_type(a.value_type);
    // Cells that some position sees
    Scratch memory{scratch};
    int32_t *index = memory.take<int32_t>(a.n_cells + 1);
    uint8_t *is_shared = memory.take<uint8_t>(a.n_cells + 1);  // whether all of them see it
    int64_t n = 0;
    for (int64_t c = 0; c < a.n_cells; c++) {
        int n_seeing = a.mask ? 0 : n_positions;
        for (int i = 0; a.mask && i < n_positions; i++) n_seeing += a.mask_at(position + i)[c] != MINUS_INFINITY;
        index[n] = static_cast<int32_t>(c), is_shared[n] = n_seeing == n_positions;
        n += n_seeing > 0;
    }
    const size_t stride = (n + LANES - 1) / LANES * LANES;
    const uint8_t **cells = memory.take<const uint8_t *>(stride);
    float *mask = memory.take<float>(n_positions * stride), *q = memory.take<float>((size_t)n_rows * a.key_length);
    F *keys = memory.take<F>(a.key_length);
    float *out = memory.take<float>((size_t)n_rows * a.value_length), *scores = memory.take<float>(n_rows * stride);
    for (int i = 0; i < n_positions; i++) {
        float *m = mask + i * stride;
        for (int64_t c = 0; c < n; c++) m[c] = a.mask ? half_to_float_scalar(a.mask_at(position + i)[index[c]]) : 0.0f;
        for (size_t c = n; c < stride; c++) m[c] = -__builtin_inff();
    }
    for (int i = 0; i < n_positions; i++)
        for (int h = 0; h < n_heads; h++)
            __builtin_memcpy(q + (size_t)(i * n_heads + h) * a.key_length,
                             a.q + (position + i) * a.q_position_bytes + (head + h) * a.q_head_bytes,
                             a.key_length * sizeof(float));
    for (int64_t c = 0; c < n; c++) cells[c] = a.keys + index[c] * a.key_cell_bytes + kv * a.key_head_bytes;
    for (int64_t c = n; c % LANES; c++) cells[c] = n ? cells[n - 1] : a.keys;
    for (int64_t c = 0; c < n; c += LANES) {
        key_type.transpose(cells + c, a.key_length, keys);
        for (int r = 0; r < n_rows; r += ROWS_OF_SCORES)
            find_scores_of(n_rows - r < ROWS_OF_SCORES ? n_rows - r : ROWS_OF_SCORES, keys, q + (size_t)r * a.key_length,
                           a.key_length, scores + r * stride + c, stride);
    }
    for (int first = 0; first < n_rows; first += ROWS_OF_SCORES) {
        const int some = n_rows - first < ROWS_OF_SCORES ? n_rows - first : ROWS_OF_SCORES;
        int heads[ROWS_OF_SCORES];
        float greatest[ROWS_OF_SCORES];
        for (int i = 0; i < some; i++) {
            const int r = first + i;
            heads[i] = head + r % n_heads;
            greatest[i] = find_weights(a, heads[i], mask + r / n_heads * stride, stride, scores + r * stride);
        }
        normalize(a, heads, greatest, some, n, scores + first * stride, stride);
    }
    for (int64_t c = 0; c < n; c++) cells[c] = a.values + index[c] * a.value_cell_bytes + kv * a.value_head_bytes;
    for (int d = 0; d < a.value_length;) {
        const bool many = a.value_length - d >= VECTORS * LANES;
        for (int r = 0; r < n_rows; r += ROWS_OF_VALUES) {
            const int some = n_rows - r < ROWS_OF_VALUES ? n_rows - r : ROWS_OF_VALUES;
            const auto add_to = many ? value_type.add_many : value_type.add_one;
            add_to(some, cells, is_shared, n, d, scores + r * stride, stride, out + (size_t)r * a.value_length + d,
                   a.value_length);
        }
        d += many ? VECTORS * LANES : LANES;
    }
    for (int i = 0; i < n_positions; i++)
        __builtin_memcpy(a.out + (size_t)((position + i) * a.n_heads + head) * a.value_length,
                         out + (size_t)i * n_heads * a.value_length, n_heads * a.value_length * sizeof(float));
}

}  // namespace
