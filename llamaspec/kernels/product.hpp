// Products of weights with few columns, for one instruction set. A file of that set includes its vectors, then this.
//
// Weights are read as the file has them. LANES rows are computed together, one in each lane: their bytes are
// transposed once, then each column costs a few instructions. Sums of 32 (or 16) products are exact integers. They
// are scaled and added in the order of the inputs, so the result of a row and a column depends on nothing else: not
// on other columns, threads or the instruction set.
#pragma once

#include "attention.hpp"
#include "kernels.hpp"

namespace {

using namespace llamaspec;

inline F half(const uint8_t *p, size_t row_bytes) {  // one half float of each row
    alignas(32) uint16_t x[LANES];
    for (int r = 0; r < LANES; r++) __builtin_memcpy(x + r, p + r * row_bytes, 2);
    return half_to_float(load_halves(x));
}

inline I word(const uint8_t *p, size_t row_bytes) {  // four bytes of each row
    alignas(64) uint32_t x[LANES];
    for (int r = 0; r < LANES; r++) __builtin_memcpy(x + r, p + r * row_bytes, 4);
    return load_ints(x);
}

template <int J> inline I byte(I x) { return band(right<8 * J>(x), ints(255)); }

// Each type of weights says how many it has in a block, its bytes, and how its stored weights differ from the true
// ones (`Aux`). A step is the part of a block that is unpacked at once: UNITS_IN_STEP times 32 inputs.
//     begin(p)              read the scales of a block
//     unpack<STEP>(p, w)    w[8 u + g]: inputs 4 g to 4 g + 3 of the step's unit u
//     unit<STEP>(u)         index of this unit in the block
//     scale<STEP>(u, half)  scales; `minimum` likewise
template <int OFFSET, bool HALVES, bool HAS_MIN, int MOST> struct Weights {
    static constexpr Aux aux{OFFSET, HALVES, HAS_MIN};
    static constexpr int MAX = MOST;  // greatest stored weight
};

inline void nibbles(const I *x, I *low, I *high) {
    for (int g = 0; g < 4; g++) low[g] = band(x[g], ints(0x0f0f0f0f)), high[g] = high_nibbles(x[g]);
}

struct BlockQ4K : Weights<0, false, true, 15> {
    static constexpr int LENGTH = 256, BYTES = 144, STEPS = 4, UNITS_IN_STEP = 2;
    F scales[8], minima[8];

    void begin(const uint8_t *p, size_t row_bytes) {
        I x[4];
        load_rows(p, row_bytes, x);
        const F d = half_to_float(low_halves(x[0])), least = half_to_float(high_halves(x[0]));
        // 6 bits each, as llama.cpp packs eight scales and eight minima into 12 bytes
        const I six = ints(0x3f3f3f3f), low = ints(0x0f0f0f0f), high = ints(0x30303030);
        const I s0 = band(x[1], six), m0 = band(x[2], six);
        const I s1 = bor(band(x[3], low), band(right<2>(x[1]), high));
        const I m1 = bor(band(right<4>(x[3]), low), band(right<2>(x[2]), high));
        spread(s0, d, scales), spread(s1, d, scales + 4), spread(m0, least, minima), spread(m1, least, minima + 4);
    }
    static void spread(I x, F d, F *out) {
        out[0] = multiply(to_float(byte<0>(x)), d), out[1] = multiply(to_float(byte<1>(x)), d);
        out[2] = multiply(to_float(byte<2>(x)), d), out[3] = multiply(to_float(byte<3>(x)), d);
    }
    template <int STEP> void unpack(const uint8_t *p, size_t row_bytes, I *w) {
        I x[8];
        load_rows(p + 16 + 32 * STEP, row_bytes, x), load_rows(p + 32 + 32 * STEP, row_bytes, x + 4);
        nibbles(x, w, w + 8), nibbles(x + 4, w + 4, w + 12);
    }
    template <int STEP> static constexpr int unit(int u) { return 2 * STEP + u; }
    template <int STEP> F scale(int u, int) const { return scales[2 * STEP + u]; }
    template <int STEP> F minimum(int u, int) const { return minima[2 * STEP + u]; }
};

struct BlockQ5K : Weights<0, false, true, 31> {
    static constexpr int LENGTH = 256, BYTES = 176, STEPS = 4, UNITS_IN_STEP = 2;
    BlockQ4K header;
    I fifth[8];

    void begin(const uint8_t *p, size_t row_bytes) {
        header.begin(p, row_bytes);
        load_rows(p + 16, row_bytes, fifth), load_rows(p + 32, row_bytes, fifth + 4);
    }
    template <int STEP> void unpack(const uint8_t *p, size_t row_bytes, I *w) {
        header.unpack<STEP>(p + 32, row_bytes, w);
        const I bit = ints(0x10101010);
        for (int g = 0; g < 8; g++) {
            w[g] = bor_band(w[g], shift<4 - 2 * STEP>(fifth[g]), bit);
            w[8 + g] = bor_band(w[8 + g], shift<3 - 2 * STEP>(fifth[g]), bit);
        }
    }
    template <int N> static I shift(I x) {
        if constexpr (N >= 0) return left<N>(x);
        else return right<-N>(x);
    }
    template <int STEP> static constexpr int unit(int u) { return 2 * STEP + u; }
    template <int STEP> F scale(int u, int) const { return header.scales[2 * STEP + u]; }
    template <int STEP> F minimum(int u, int) const { return header.minima[2 * STEP + u]; }
};

struct BlockQ6K : Weights<32, true, false, 63> {
    static constexpr int LENGTH = 256, BYTES = 210, STEPS = 4, UNITS_IN_STEP = 2;
    F scales[16];
    I bits[8];  // high bits of the half

    void begin(const uint8_t *p, size_t row_bytes) {
        I x[4];
        load_rows(p + 192, row_bytes, x);
        spread_signed(x, half(p + 208, row_bytes), scales);
    }
    // Step 2 h + s: units 4 h + s (low nibbles) and 4 h + s + 2 (high nibbles) of half h.
    template <int STEP> void unpack(const uint8_t *p, size_t row_bytes, I *w) {
        constexpr int h = STEP / 2, s = STEP % 2;
        I x[8];
        const uint8_t *low = p + 64 * h + 32 * s, *high = p + 128 + 32 * h;
        load_rows(low, row_bytes, x), load_rows(low + 16, row_bytes, x + 4);
        if (s == 0) load_rows(high, row_bytes, bits), load_rows(high + 16, row_bytes, bits + 4);
        nibbles(x, w, w + 8), nibbles(x + 4, w + 4, w + 12);
        const I mask = ints(0x30303030);
        for (int g = 0; g < 8; g++) {
            w[g] = bor_band(w[g], left<4 - 2 * s>(bits[g]), mask);
            w[8 + g] = bor_band(w[8 + g], s ? right<2>(bits[g]) : bits[g], mask);
        }
    }
    template <int STEP> static constexpr int unit(int u) { return 4 * (STEP / 2) + STEP % 2 + 2 * u; }
    template <int STEP> F scale(int u, int half) const { return scales[2 * unit<STEP>(u) + half]; }
    template <int STEP> F minimum(int, int) const { return zeros(); }
};

struct BlockQ3K : Weights<4, true, false, 7> {
    static constexpr int LENGTH = 256, BYTES = 110, STEPS = 4, UNITS_IN_STEP = 2;
    F scales[16];
    I high[8], x[8];  // third bits of all, the other two of the half

    void begin(const uint8_t *p, size_t row_bytes) {
        I x[4];
        load_rows(p + 92, row_bytes, x);  // four bytes of qs, then 12 of scales
        const I low = ints(0x0f0f0f0f), two = ints(0x30303030), a = x[1], b = x[2], c = x[3];
        I six[4] = {bor(band(a, low), band(left<4>(c), two)), bor(band(b, low), band(left<2>(c), two)),
                    bor(band(right<4>(a), low), band(c, two)), bor(band(right<4>(b), low), band(right<2>(c), two))};
        const F d = half(p + 108, row_bytes);
        for (int i = 0; i < 4; i++) {
            const I x = six[i];
            const I bytes[4] = {byte<0>(x), byte<1>(x), byte<2>(x), byte<3>(x)};
            for (int j = 0; j < 4; j++) scales[4 * i + j] = multiply(to_float(subtract(bytes[j], ints(32))), d);
        }
        load_rows(p, row_bytes, high), load_rows(p + 16, row_bytes, high + 4);
    }
    // Step 2 h + s: units 4 h + 2 s and 4 h + 2 s + 1, which are two bits each of the same 32 bytes.
    template <int STEP> void unpack(const uint8_t *p, size_t row_bytes, I *w) {
        constexpr int h = STEP / 2, s = STEP % 2;
        if (s == 0) load_rows(p + 32 + 32 * h, row_bytes, x), load_rows(p + 48 + 32 * h, row_bytes, x + 4);
        for (int g = 0; g < 8; g++) {
            w[g] = bor(band(right<4 * s>(x[g]), ints(0x03030303)), bit<4 * h + 2 * s>(high[g]));
            w[8 + g] = bor(band(right<4 * s + 2>(x[g]), ints(0x03030303)), bit<4 * h + 2 * s + 1>(high[g]));
        }
    }
    template <int N> static I bit(I x) {  // bit N of each byte, as bit 2
        if constexpr (N >= 2) return band(right<N - 2>(x), ints(0x04040404));
        else return band(left<2 - N>(x), ints(0x04040404));
    }
    template <int STEP> static constexpr int unit(int u) { return 2 * STEP + u; }
    template <int STEP> F scale(int u, int half) const { return scales[2 * unit<STEP>(u) + half]; }
    template <int STEP> F minimum(int, int) const { return zeros(); }
};

struct BlockQ2K : Weights<0, true, true, 3> {
    static constexpr int LENGTH = 256, BYTES = 84, STEPS = 4, UNITS_IN_STEP = 2;
    F scales[16], minima[16];
    I x[8];  // two bits of the half

    void begin(const uint8_t *p, size_t row_bytes) {
        I x[4], low[4], high[4];
        load_rows(p, row_bytes, x);
        nibbles(x, low, high);
        const I both = word(p + 80, row_bytes);
        spread_signed(low, half_to_float(low_halves(both)), scales);
        spread_signed(high, half_to_float(high_halves(both)), minima);
    }
    template <int STEP> void unpack(const uint8_t *p, size_t row_bytes, I *w) {
        constexpr int h = STEP / 2, s = STEP % 2;
        if (s == 0) load_rows(p + 16 + 32 * h, row_bytes, x), load_rows(p + 32 + 32 * h, row_bytes, x + 4);
        for (int g = 0; g < 8; g++) {
            w[g] = band(right<4 * s>(x[g]), ints(0x03030303));
            w[8 + g] = band(right<4 * s + 2>(x[g]), ints(0x03030303));
        }
    }
    template <int STEP> static constexpr int unit(int u) { return 2 * STEP + u; }
    template <int STEP> F scale(int u, int half) const { return scales[2 * unit<STEP>(u) + half]; }
    template <int STEP> F minimum(int u, int half) const { return minima[2 * unit<STEP>(u) + half]; }
};

// Blocks of 32 weights, one step each.
template <class Scales, int N_BYTES> struct ShortBlock : Scales {
    static constexpr int LENGTH = 32, BYTES = N_BYTES, STEPS = 1, UNITS_IN_STEP = 1;
    F scale_, minimum_ = zeros();
    template <int> static constexpr int unit(int) { return 0; }
    template <int> F scale(int, int) const { return scale_; }
    template <int> F minimum(int, int) const { return minimum_; }
    static void halves(const uint8_t *p, size_t row_bytes, I *w) {  // low nibbles first, then high ones
        I x[4];
        load_rows(p, row_bytes, x);
        nibbles(x, w, w + 4);
    }
    void begin_with_minimum(const uint8_t *p, size_t row_bytes) {  // w = scale q + m, so the minimum is -m
        const I both = word(p, row_bytes);
        scale_ = half_to_float(low_halves(both));
        minimum_ = multiply(half_to_float(high_halves(both)), floats(-1.0f));
    }
};

struct BlockQ40 : ShortBlock<Weights<8, false, false, 15>, 18> {
    void begin(const uint8_t *p, size_t row_bytes) { scale_ = half(p, row_bytes); }
    template <int> void unpack(const uint8_t *p, size_t row_bytes, I *w) { halves(p + 2, row_bytes, w); }
};

struct BlockQ41 : ShortBlock<Weights<0, false, true, 15>, 20> {
    void begin(const uint8_t *p, size_t row_bytes) { begin_with_minimum(p, row_bytes); }
    template <int> void unpack(const uint8_t *p, size_t row_bytes, I *w) { halves(p + 4, row_bytes, w); }
};

inline void add_fifth(I bits, I *w) {
    w[0] = add_fifth_bits<0>(w[0], bits), w[1] = add_fifth_bits<4>(w[1], bits);
    w[2] = add_fifth_bits<8>(w[2], bits), w[3] = add_fifth_bits<12>(w[3], bits);
    w[4] = add_fifth_bits<16>(w[4], bits), w[5] = add_fifth_bits<20>(w[5], bits);
    w[6] = add_fifth_bits<24>(w[6], bits), w[7] = add_fifth_bits<28>(w[7], bits);
}

struct BlockQ50 : ShortBlock<Weights<16, false, false, 31>, 22> {
    void begin(const uint8_t *p, size_t row_bytes) { scale_ = half(p, row_bytes); }
    template <int> void unpack(const uint8_t *p, size_t row_bytes, I *w) {
        halves(p + 6, row_bytes, w);
        add_fifth(word(p + 2, row_bytes), w);
    }
};

struct BlockQ51 : ShortBlock<Weights<0, false, true, 31>, 24> {
    void begin(const uint8_t *p, size_t row_bytes) { begin_with_minimum(p, row_bytes); }
    template <int> void unpack(const uint8_t *p, size_t row_bytes, I *w) {
        halves(p + 8, row_bytes, w);
        add_fifth(word(p + 4, row_bytes), w);
    }
};

struct BlockQ80 : ShortBlock<Weights<MULTIPLIES_SIGNED ? 0 : 128, false, false, MULTIPLIES_SIGNED ? 128 : 255>, 34> {
    void begin(const uint8_t *p, size_t row_bytes) { scale_ = half(p, row_bytes); }
    template <int> void unpack(const uint8_t *p, size_t row_bytes, I *w) {
        load_rows(p + 2, row_bytes, w), load_rows(p + 18, row_bytes, w + 4);
        if (!MULTIPLIES_SIGNED)
            for (int g = 0; g < 8; g++) w[g] = flip(w[g], ints(static_cast<int>(0x80808080)));
    }
};

// Tables of stored weights. Both are llama.cpp's values plus an offset.
using Nonlinear = Weights<MULTIPLIES_SIGNED ? 0 : 128, false, false, MULTIPLIES_SIGNED ? 128 : 255>;
constexpr Table shifted(int offset, const int (&values)[16]) {
    Table table{};
    for (int i = 0; i < 16; i++) table.values[i] = static_cast<uint8_t>(offset + values[i]);
    return table;
}
constexpr Table NONLINEAR =
    shifted(Nonlinear::aux.offset, {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113});
constexpr Table FP4 = shifted(12, {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12});  // doubled

struct BlockIQ4NL : ShortBlock<Nonlinear, 18> {
    void begin(const uint8_t *p, size_t row_bytes) { scale_ = half(p, row_bytes); }
    template <int> void unpack(const uint8_t *p, size_t row_bytes, I *w) {
        halves(p + 2, row_bytes, w);
        for (int g = 0; g < 8; g++) w[g] = look_up(NONLINEAR, w[g]);
    }
};

struct BlockMXFP4 : ShortBlock<Weights<12, false, false, 24>, 17> {
    void begin(const uint8_t *p, size_t row_bytes) {  // a power of two, halved because the table has doubled values
        alignas(64) int32_t e[LANES];
        for (int r = 0; r < LANES; r++) e[r] = p[r * row_bytes];
        const I x = load_ints(e), normal = left<23>(subtract(x, ints(1)));
        scale_ = bits_to_float(select_less(x, ints(2), shift_left(ints(0x00200000), x), normal));
    }
    template <int> void unpack(const uint8_t *p, size_t row_bytes, I *w) {
        halves(p + 1, row_bytes, w);
        for (int g = 0; g < 8; g++) w[g] = look_up(FP4, w[g]);
    }
};

struct BlockIQ4XS : Nonlinear {
    static constexpr int LENGTH = 256, BYTES = 136, STEPS = 8, UNITS_IN_STEP = 1;
    F scales[8];

    void begin(const uint8_t *p, size_t row_bytes) {
        I x[4];
        load_rows(p, row_bytes, x);  // d, two high bits each, four low bits each, eight bytes of qs
        const F d = half_to_float(low_halves(x[0]));
        const I high = right<16>(x[0]), low = x[1];
        scales[0] = one<0>(low, high, d), scales[1] = one<1>(low, high, d), scales[2] = one<2>(low, high, d);
        scales[3] = one<3>(low, high, d), scales[4] = one<4>(low, high, d), scales[5] = one<5>(low, high, d);
        scales[6] = one<6>(low, high, d), scales[7] = one<7>(low, high, d);
    }
    template <int J> static F one(I low, I high, F d) {
        const I x = bor(band(right<4 * J>(low), ints(15)), left<4>(band(right<2 * J>(high), ints(3))));
        return multiply(to_float(subtract(x, ints(32))), d);
    }
    template <int STEP> void unpack(const uint8_t *p, size_t row_bytes, I *w) {
        I x[4];
        load_rows(p + 8 + 16 * STEP, row_bytes, x);
        nibbles(x, w, w + 4);
        for (int g = 0; g < 8; g++) w[g] = look_up(NONLINEAR, w[g]);
    }
    template <int STEP> static constexpr int unit(int) { return STEP; }
    template <int STEP> F scale(int, int) const { return scales[STEP]; }
    template <int STEP> F minimum(int, int) const { return zeros(); }
};

// Add the products of one unit and one column to their sum.
template <class Block, int STEP>
inline F add_unit(const Block &block, int u, const I *w, const Activations &x, F sum) {
    constexpr Aux aux = Block::aux;
    for (int h = 0; h < (aux.halves ? 2 : 1); h++) {
        const I start = aux.offset ? ints(x.bias[h]) : ints(0);
        const I products = aux.halves ? half_dot<Block::MAX>(start, w + 4 * h, x.q + 16 * h) : dot<Block::MAX>(start, w, x.q);
        const F scaled = multiply(to_float(products), floats(x.scale));
        sum = multiply_add(scaled, block.template scale<STEP>(u, h), sum);
        if (aux.has_min) sum = subtract_product(floats(x.sum[h]), block.template minimum<STEP>(u, h), sum);
    }
    return sum;
}

// Add the products of one step with all columns to their sums.
template <class Block, int STEP>
inline void add_step(Block &block, const uint8_t *p, size_t row_bytes, const Activations *a, int n, F *sums) {
    constexpr int UNITS = Block::UNITS_IN_STEP, TOGETHER = UNITS * 8 <= N_REGISTERS / 2 ? UNITS : 1;
    I w[8 * UNITS];
    block.template unpack<STEP>(p, row_bytes, w);
    for (int first = 0; first < UNITS; first += TOGETHER)
        for (int c = 0; c < n; c++) {
            F sum = sums[c];
            for (int u = first; u < first + TOGETHER; u++)
                sum = add_unit<Block, STEP>(block, u, w + 8 * u, a[Block::template unit<STEP>(u) * n + c], sum);
            sums[c] = sum;
        }
}

// Weights are read ahead into the second cache: the first one has no room for them. Usually a thread computes panels
// that lie one after the other.
template <class Block, int STEP>
inline void read_ahead(const uint8_t *p, size_t row_bytes, const uint8_t *next) {
    constexpr int BYTES = LANES * Block::BYTES / Block::STEPS, ROWS = LANES / Block::STEPS;
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(next + STEP * BYTES + i, 0, 2);
    // Blocks that begin anywhere in a line are late in the first cache.
    if (Block::LENGTH == 256 && Block::BYTES % 8)
        for (int r = STEP * ROWS; r < (STEP + 1) * ROWS; r++)
            for (int i = 0; i < Block::BYTES; i += 64)
                __builtin_prefetch(p + r * row_bytes + Block::BYTES + i);
}

template <class Block, int STEP = 0>
inline void add_steps(Block &block, const uint8_t *p, size_t row_bytes, const uint8_t *next, const Activations *a, int n,
                      F *sums) {
    if constexpr (STEP < Block::STEPS) {
        read_ahead<Block, STEP>(p, row_bytes, next);
        add_step<Block, STEP>(block, p, row_bytes, a, n, sums);
        add_steps<Block, STEP + 1>(block, p, row_bytes, next, a, n, sums);
    }
}

template <class Block> void quantized_product(const Product &t, int64_t first, int64_t end) {
    const int n = t.n_columns;
    const size_t panel = LANES * t.row_bytes, ahead = panel < BYTES_AHEAD ? BYTES_AHEAD : panel;
    for (int64_t r = first; r < end; r += LANES) {
        // The last panel begins early enough to be whole; only its new rows are stored.
        const int64_t at = r + LANES <= t.n_rows ? r : t.n_rows - LANES;
        const uint8_t *p = t.weights + at * t.row_bytes, *next = t.next ? t.next + (at - first) * t.row_bytes : p + ahead;
        const Activations *a = t.quantized;
        F sums[MAX_COLUMNS];
        for (int c = 0; c < n; c++) sums[c] = zeros();
        for (int64_t k = 0; k < t.n_inputs; k += Block::LENGTH) {
            Block block;
            block.begin(p, t.row_bytes);
            add_steps(block, p, t.row_bytes, next, a, n, sums);
            p += Block::BYTES, next += LANES * Block::BYTES, a += Block::LENGTH / UNIT * n;
        }
        for (int c = 0; c < n; c++)
            if (at == r) store(t.out[c] + at, sums[c]);
            else store_from(t.out[c] + at, sums[c], static_cast<int>(r - at));
    }
}

// Weights that are floats

using LoadSums = Sums (*)(const uint8_t *, int64_t);
inline Sums load_f32(const uint8_t *p, int64_t k) { return Sums::load((const float *)p + k); }
inline Sums load_f16(const uint8_t *p, int64_t k) { return Sums::load_half((const uint16_t *)p + k); }
inline Sums load_bf16(const uint8_t *p, int64_t k) { return Sums::load_brain((const uint16_t *)p + k); }

// Rows that share the columns of a tile while these are in the fastest cache, and inputs that are taken at once. Sums
// wait in memory between two parts of the inputs, which changes no result.
constexpr int ROWS_TOGETHER = 16;
constexpr int64_t INPUTS = 1024;
struct Tile {
    const uint8_t *weights;   // of its first row
    size_t row_bytes;
    const float *const *columns;
    float *const *out;
    int64_t row, k, k_end, n_inputs;
    float *sums;  // [rows][MAX_COLUMNS][16], of the tile's first row and column
};

template <LoadSums LOAD, int ROWS, int COLUMNS> inline void multiply_tile(const Tile &t) {
    Sums sums[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++)
            if (t.k) sums[r][c] = Sums::load(t.sums + 16 * (MAX_COLUMNS * r + c));
            else sums[r][c].clear();
    for (int64_t k = t.k; k < t.k_end; k += 16) {
        Sums w[ROWS];
        for (int r = 0; r < ROWS; r++) w[r] = LOAD(t.weights + r * t.row_bytes, k);
        for (int c = 0; c < COLUMNS; c++) {
            const Sums x = Sums::load(t.columns[c] + k);
            for (int r = 0; r < ROWS; r++) sums[r][c].add(w[r], x);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++)
            if (t.k_end < t.n_inputs) sums[r][c].save(t.sums + 16 * (MAX_COLUMNS * r + c));
            else t.out[c][t.row + r] = sums[r][c].total();
}

template <LoadSums LOAD, int ROWS, int COLUMNS = TILE_COLUMNS> inline void multiply_tile_of(int n, const Tile &t) {
    if constexpr (COLUMNS > 0) {
        if (n == COLUMNS) multiply_tile<LOAD, ROWS, COLUMNS>(t);
        else multiply_tile_of<LOAD, ROWS, COLUMNS - 1>(n, t);
    }
}

template <LoadSums LOAD> void float_product(const Product &p, int64_t first, int64_t end) {
    constexpr int ROWS = LANES / 4;  // of a tile
    const int n_tiles = (p.n_columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    alignas(64) float sums[ROWS_TOGETHER * MAX_COLUMNS * 16];
    for (; first < end; first += ROWS_TOGETHER) {
        const int n_rows = static_cast<int>(end - first < ROWS_TOGETHER ? end - first : ROWS_TOGETHER);
        for (int64_t k = 0; k < p.n_inputs; k += INPUTS) {
            const int64_t k_end = p.n_inputs - k < INPUTS ? p.n_inputs : k + INPUTS;
            for (int i = 0; i < n_tiles; i++) {  // tiles of nearly equal width
                const int c = p.n_columns * i / n_tiles, n = p.n_columns * (i + 1) / n_tiles - c;
                for (int r = 0; r < n_rows;) {
                    const Tile tile{p.weights + (first + r) * p.row_bytes, p.row_bytes, p.columns + c, p.out + c,
                                    first + r, k, k_end, p.n_inputs, sums + 16 * (MAX_COLUMNS * r + c)};
                    if (n_rows - r >= ROWS) multiply_tile_of<LOAD, ROWS>(n, tile), r += ROWS;
                    else multiply_tile_of<LOAD, 1>(n, tile), r++;
                }
            }
        }
    }
}

// x[i] = scale * q[i] with the greatest |q| = 127. If any x is NaN or infinite, the scale is NaN.
void quantize(const float *x, int64_t n_units, Aux aux, Activations *out, size_t stride) {
    for (int64_t unit = 0; unit < n_units; unit++, x += UNIT, out += stride) {
        const float greatest = greatest_of_unit(x);
        out->scale = greatest / 127.0f;
        if (!(greatest <= __FLT_MAX__)) {  // a product with it is NaN
            out->scale = __builtin_nanf("");
            for (int i = 0; i < UNIT; i++) out->q[i] = 0;
            for (int h = 0; h < 2; h++)
                if (aux.has_min) out->sum[h] = out->scale;
                else out->bias[h] = 0;
            continue;
        }
        // Below this 127 / greatest overflows. Weights that are multiplied by it leave nothing anyway.
        int sum[2];
        round_unit(x, greatest > 1e-35f ? 127.0f / greatest : 0.0f, out->q, sum);
        if (!aux.halves) sum[0] += sum[1], sum[1] = 0;
        for (int h = 0; h < 2; h++)
            if (aux.has_min) out->sum[h] = out->scale * static_cast<float>(sum[h]);
            else out->bias[h] = -aux.offset * sum[h];
    }
}

constexpr Level make_level(const char *name) {
    Level level{name, LANES, {}, {}, attend, quantize};
#define ADD(TYPE, BLOCK) level.kernels[TYPE] = quantized_product<BLOCK>, level.aux[TYPE] = BLOCK::aux
    ADD(Q4_0, BlockQ40), ADD(Q4_1, BlockQ41), ADD(Q5_0, BlockQ50), ADD(Q5_1, BlockQ51), ADD(Q8_0, BlockQ80);
    ADD(Q2_K, BlockQ2K), ADD(Q3_K, BlockQ3K), ADD(Q4_K, BlockQ4K), ADD(Q5_K, BlockQ5K), ADD(Q6_K, BlockQ6K);
    ADD(IQ4_NL, BlockIQ4NL), ADD(IQ4_XS, BlockIQ4XS), ADD(MXFP4, BlockMXFP4);
#undef ADD
    level.kernels[F32] = float_product<load_f32>;
    level.kernels[F16] = float_product<load_f16>;
    level.kernels[BF16] = float_product<load_bf16>;
    return level;
}

}  // namespace
