// Vectors of 256 bits: AVX2, and AVX-VNNI if the compiler's flags have it. One lane is one row of weights.
#pragma once

#include "x86.hpp"

namespace {

using I = __m256i;  // 8 int32
using F = __m256;   // 8 float32
using H = __m128i;  // 8 half floats
constexpr int LANES = 8, N_REGISTERS = 16;
#ifdef __AVXVNNI__
constexpr bool MULTIPLIES_SIGNED = false;  // stored weights must be unsigned
#else
constexpr bool MULTIPLIES_SIGNED = true;  // weights above 127 would overflow 16 bits
#endif

inline I ints(int x) { return _mm256_set1_epi32(x); }
inline F floats(float x) { return _mm256_set1_ps(x); }
inline F zeros() { return _mm256_setzero_ps(); }
inline F to_float(I x) { return _mm256_cvtepi32_ps(x); }
inline F half_to_float(H x) { return _mm256_cvtph_ps(x); }
inline F bits_to_float(I x) { return _mm256_castsi256_ps(x); }
inline F multiply(F x, F y) { return _mm256_mul_ps(x, y); }
inline F multiply_add(F x, F y, F z) { return _mm256_fmadd_ps(x, y, z); }
inline F subtract_product(F x, F y, F z) { return _mm256_fnmadd_ps(x, y, z); }  // z - x * y
inline F add(F x, F y) { return _mm256_add_ps(x, y); }
inline F load(const float *p) { return _mm256_loadu_ps(p); }
inline void store(float *p, F x) { _mm256_storeu_ps(p, x); }
inline void store_from(float *p, F x, int first) {
    const I lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_maskstore_ps(p, _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(first - 1)), x);
}
inline I load_ints(const void *p) { return _mm256_loadu_si256((const I *)p); }
inline H load_halves(const uint16_t *p) { return _mm_loadu_si128((const H *)p); }
inline I band(I x, I y) { return _mm256_and_si256(x, y); }
inline I bor(I x, I y) { return _mm256_or_si256(x, y); }
inline I bor_band(I x, I y, I mask) { return _mm256_or_si256(x, _mm256_and_si256(y, mask)); }  // x | y & mask
inline I flip(I x, I y) { return _mm256_xor_si256(x, y); }
inline I subtract(I x, I y) { return _mm256_sub_epi32(x, y); }
template <int N> inline I right(I x) { return _mm256_srli_epi32(x, N); }
template <int N> inline I left(I x) { return _mm256_slli_epi32(x, N); }
template <int N> inline I right_signed(I x) { return _mm256_srai_epi32(x, N); }
inline I high_nibbles(I x) { return band(right<4>(x), ints(0x0f0f0f0f)); }
inline I look_up(const llamaspec::Table &table, I x) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_table(table)), x);
}
inline I select_less(I x, I limit, I yes, I no) {  // both below 2^31
    return _mm256_blendv_epi8(no, yes, _mm256_cmpgt_epi32(limit, x));
}
inline I shift_left(I x, I by) { return _mm256_sllv_epi32(x, by); }

// Set bit 4 of byte j of each lane if bit SHIFT + j of `bits` is set, j = 0..3.
template <int SHIFT> inline I add_fifth_bits(I x, I bits) {
    const I byte = _mm256_shuffle_epi8(bits, _mm256_broadcastsi128_si256(_mm_setr_epi8(
        SHIFT / 8, SHIFT / 8, SHIFT / 8, SHIFT / 8, 4 + SHIFT / 8, 4 + SHIFT / 8, 4 + SHIFT / 8, 4 + SHIFT / 8,
        8 + SHIFT / 8, 8 + SHIFT / 8, 8 + SHIFT / 8, 8 + SHIFT / 8, 12 + SHIFT / 8, 12 + SHIFT / 8, 12 + SHIFT / 8,
        12 + SHIFT / 8)));
    const I mask = _mm256_set1_epi32(0x08040201 << SHIFT % 8);
    const I set = _mm256_cmpeq_epi8(_mm256_and_si256(byte, mask), mask);
    return _mm256_or_si256(x, _mm256_and_si256(set, _mm256_set1_epi8(16)));
}

inline I two_rows(const uint8_t *p, size_t row_bytes) {  // 16 bytes of rows 0 and 4
    const I x = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return _mm256_inserti128_si256(x, _mm_loadu_si128((const __m128i *)(p + 4 * row_bytes)), 1);
}

inline void transpose(I a, I b, I c, I d, I *out) {
    const I ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
    const I ab2 = _mm256_unpackhi_epi32(a, b), cd2 = _mm256_unpackhi_epi32(c, d);
    out[0] = _mm256_unpacklo_epi64(ab, cd), out[1] = _mm256_unpackhi_epi64(ab, cd);
    out[2] = _mm256_unpacklo_epi64(ab2, cd2), out[3] = _mm256_unpackhi_epi64(ab2, cd2);
}

// Load 16 bytes of each row; out[g] has bytes 4 g to 4 g + 3 of row r in lane r.
inline void load_rows(const uint8_t *p, size_t row_bytes, I *out) {
    transpose(two_rows(p, row_bytes), two_rows(p + row_bytes, row_bytes), two_rows(p + 2 * row_bytes, row_bytes),
              two_rows(p + 3 * row_bytes, row_bytes), out);
}

inline H packed_halves(I x) {  // each lane has 16 bits
    const I packed = _mm256_packus_epi32(x, x);
    return _mm_unpacklo_epi64(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
}
inline H low_halves(I x) { return packed_halves(_mm256_and_si256(x, _mm256_set1_epi32(0xffff))); }
inline H high_halves(I x) { return packed_halves(_mm256_srli_epi32(x, 16)); }

#ifdef __AVXVNNI__
// p + the sum over N vectors of four products of unsigned weights with signed activations in each lane.
template <int MAX, int N> inline I dots(I p, const I *w, const int8_t *q) {
    const llamaspec::Four *four = (const llamaspec::Four *)q;
    for (int g = 0; g < N; g++) p = _mm256_dpbusd_avx_epi32(p, w[g], _mm256_set1_epi32(four[g]));
    return p;
}
#else
// The same. Two products fit into 16 bits, and so do sums of them if weights are small (at most MAX). Weights that
// need eight bits are signed (MAX = 128).
template <int MAX, int N> inline I dots(I p, const I *w, const int8_t *q) {
    const llamaspec::Four *four = (const llamaspec::Four *)q;
    constexpr int FITTING = 32767 / (MAX * 127 * 2);
    constexpr int TOGETHER = FITTING >= N ? N : FITTING >= 4 ? 4 : FITTING >= 2 ? 2 : 1;
    const I ones = _mm256_set1_epi16(1);
    for (int g = 0; g < N; g += TOGETHER) {
        I sum = _mm256_setzero_si256();
        for (int i = g; i < g + TOGETHER; i++) {
            const I a = _mm256_set1_epi32(four[i]);
            const I products = MAX > 127 ? _mm256_maddubs_epi16(_mm256_abs_epi8(w[i]), _mm256_sign_epi8(a, w[i]))
                                         : _mm256_maddubs_epi16(w[i], a);
            sum = i == g ? products : _mm256_add_epi16(sum, products);
        }
        p = _mm256_add_epi32(p, _mm256_madd_epi16(sum, ones));
    }
    return p;
}
#endif
template <int MAX> inline I dot(I p, const I *w, const int8_t *q) { return dots<MAX, 8>(p, w, q); }
template <int MAX> inline I half_dot(I p, const I *w, const int8_t *q) { return dots<MAX, 4>(p, w, q); }

// The same as `load_rows` for rows anywhere.
inline I two_cells(const uint8_t *const *p, size_t offset) {
    const I x = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(p[0] + offset)));
    return _mm256_inserti128_si256(x, _mm_loadu_si128((const __m128i *)(p[4] + offset)), 1);
}
inline void load_cells(const uint8_t *const *p, size_t offset, I *out) {
    transpose(two_cells(p, offset), two_cells(p + 1, offset), two_cells(p + 2, offset), two_cells(p + 3, offset), out);
}

inline F at_least(F x, F least) { return _mm256_max_ps(least, x); }  // NaN stays NaN
inline F nearest(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F power_of_two(F n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F subtract_floats(F x, F y) { return _mm256_sub_ps(x, y); }
inline F divide(F x, F y) { return _mm256_div_ps(x, y); }
inline F absolute(F x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline F with_sign_of(F x, F sign) { return _mm256_or_ps(x, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f))); }
inline F is_none(F x) { return _mm256_cmp_ps(x, _mm256_set1_ps(-__builtin_inff()), _CMP_EQ_OQ); }
inline F none_where_none(F mask, F x) {  // minus infinity where the mask is
    return _mm256_blendv_ps(x, _mm256_set1_ps(-__builtin_inff()), is_none(mask));
}
inline F zero_where_none(F score, F x) { return _mm256_andnot_ps(is_none(score), x); }
inline float greatest_lane(F x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
inline float first_lane(F x) { return _mm256_cvtss_f32(x); }
inline F load_half(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
inline I load_signed_bytes(const uint8_t *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
inline F load_brain(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

// 16 partial sums of a product of floats, of which each has every 16th input.
struct Sums {
    F x, y;
    void clear() { x = y = _mm256_setzero_ps(); }
    void add(Sums w, Sums a) { x = _mm256_fmadd_ps(w.x, a.x, x), y = _mm256_fmadd_ps(w.y, a.y, y); }
    static Sums load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static Sums load_half(const uint16_t *p) { return {::load_half(p), ::load_half(p + 8)}; }
    static Sums load_brain(const uint16_t *p) { return {::load_brain(p), ::load_brain(p + 8)}; }
    void save(float *p) const { _mm256_storeu_ps(p, x), _mm256_storeu_ps(p + 8, y); }
    float total() const { return total_of_eight(_mm256_add_ps(x, y)); }  // pairwise, the same on every instruction set
};
constexpr int TILE_COLUMNS = 2;  // of a product of floats: 2 x 2 x 2 sums and their factors fit into the registers

}  // namespace
