// Pairs of vectors of 128 bits: NEON with dot products. One lane is one row of weights. Two vectors share the loads of a
// column and hide the latency of a sum.
#pragma once

#include <arm_neon.h>

#include "kernels.hpp"

namespace {

struct I { int32x4_t a, b; };    // 8 int32
struct F { float32x4_t a, b; };  // 8 float32
using H = uint16x8_t;            // 8 half floats
constexpr int LANES = 8, N_REGISTERS = 16;  // pairs
constexpr bool MULTIPLIES_SIGNED = true;    // stored weights

inline int8x16_t bytes(int32x4_t x) { return vreinterpretq_s8_s32(x); }
inline uint32x4_t bits(int32x4_t x) { return vreinterpretq_u32_s32(x); }
inline uint32x4_t bits(float32x4_t x) { return vreinterpretq_u32_f32(x); }
inline int32x4_t signed_bits(uint32x4_t x) { return vreinterpretq_s32_u32(x); }
inline float32x4_t float_bits(uint32x4_t x) { return vreinterpretq_f32_u32(x); }

inline I ints(int x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline F floats(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline F zeros() { return floats(0.0f); }
inline F to_float(I x) { return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b)}; }
inline F half_to_float(H x) {
    const float16x8_t halves = vreinterpretq_f16_u16(x);
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
inline F bits_to_float(I x) { return {vreinterpretq_f32_s32(x.a), vreinterpretq_f32_s32(x.b)}; }
inline F multiply(F x, F y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
inline F multiply_add(F x, F y, F z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
inline F subtract_product(F x, F y, F z) { return {vfmsq_f32(z.a, x.a, y.a), vfmsq_f32(z.b, x.b, y.b)}; }  // z - x * y
inline F add(F x, F y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
inline F load(const float *p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store(float *p, F x) { vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b); }
inline void store_from(float *p, F x, int first) {
    float lanes[LANES];
    store(lanes, x);
    for (int i = first; i < LANES; i++) p[i] = lanes[i];
}
inline I load_ints(const void *p) { return {vld1q_s32((const int32_t *)p), vld1q_s32((const int32_t *)p + 4)}; }
inline H load_halves(const uint16_t *p) { return vld1q_u16(p); }
inline I band(I x, I y) { return {vandq_s32(x.a, y.a), vandq_s32(x.b, y.b)}; }
inline I bor(I x, I y) { return {vorrq_s32(x.a, y.a), vorrq_s32(x.b, y.b)}; }
inline I bor_band(I x, I y, I mask) { return bor(x, band(y, mask)); }  // x | y & mask
inline I flip(I x, I y) { return {veorq_s32(x.a, y.a), veorq_s32(x.b, y.b)}; }
inline I subtract(I x, I y) { return {vsubq_s32(x.a, y.a), vsubq_s32(x.b, y.b)}; }
template <int N> inline I right(I x) {
    if constexpr (N == 0) return x;
    else return {signed_bits(vshrq_n_u32(bits(x.a), N)), signed_bits(vshrq_n_u32(bits(x.b), N))};
}
template <int N> inline I left(I x) { return {vshlq_n_s32(x.a, N), vshlq_n_s32(x.b, N)}; }
template <int N> inline I right_signed(I x) { return {vshrq_n_s32(x.a, N), vshrq_n_s32(x.b, N)}; }
inline I high_nibbles(I x) {
    return {vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(x.a), 4)),
            vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(x.b), 4))};
}
inline I look_up(const llamaspec::Table &table, I x) {
    const int8x16_t values = vreinterpretq_s8_u8(vld1q_u8(table.values));
    return {vreinterpretq_s32_s8(vqtbl1q_s8(values, vreinterpretq_u8_s32(x.a))),
            vreinterpretq_s32_s8(vqtbl1q_s8(values, vreinterpretq_u8_s32(x.b)))};
}
inline I select_less(I x, I limit, I yes, I no) {  // unsigned
    return {vbslq_s32(vcltq_u32(bits(x.a), bits(limit.a)), yes.a, no.a),
            vbslq_s32(vcltq_u32(bits(x.b), bits(limit.b)), yes.b, no.b)};
}
inline I shift_left(I x, I by) { return {vshlq_s32(x.a, by.a), vshlq_s32(x.b, by.b)}; }  // by < 128

// Set bit 4 of byte j of each lane if bit SHIFT + j of `bits` is set, j = 0..3.
template <int SHIFT> inline int32x4_t add_fifth_bits(int32x4_t x, int32x4_t bits) {
    constexpr uint8_t B = SHIFT / 8;
    const uint8x16_t index = {B, B, B, B, B + 4, B + 4, B + 4, B + 4, B + 8, B + 8, B + 8, B + 8, B + 12, B + 12, B + 12, B + 12};
    const uint8x16_t mask = vreinterpretq_u8_u32(vdupq_n_u32(0x08040201u << SHIFT % 8));
    const uint8x16_t set = vtstq_u8(vqtbl1q_u8(vreinterpretq_u8_s32(bits), index), mask);
    return vorrq_s32(x, vreinterpretq_s32_u8(vandq_u8(set, vdupq_n_u8(16))));
}
template <int SHIFT> inline I add_fifth_bits(I x, I bits) {
    return {add_fifth_bits<SHIFT>(x.a, bits.a), add_fifth_bits<SHIFT>(x.b, bits.b)};
}

inline int32x4_t four_ints(const uint8_t *p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
template <int32x4_t I::*HALF> inline void transpose(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d, I *out) {
    const int32x4_t ac = vzip1q_s32(a, c), bd = vzip1q_s32(b, d), ac2 = vzip2q_s32(a, c), bd2 = vzip2q_s32(b, d);
    out[0].*HALF = vzip1q_s32(ac, bd), out[1].*HALF = vzip2q_s32(ac, bd);
    out[2].*HALF = vzip1q_s32(ac2, bd2), out[3].*HALF = vzip2q_s32(ac2, bd2);
}

// Load 16 bytes of each row; out[g] has bytes 4 g to 4 g + 3 of row r in lane r.
inline void load_rows(const uint8_t *p, size_t row_bytes, I *out) {
    transpose<&I::a>(four_ints(p), four_ints(p + row_bytes), four_ints(p + 2 * row_bytes), four_ints(p + 3 * row_bytes), out);
    p += 4 * row_bytes;
    transpose<&I::b>(four_ints(p), four_ints(p + row_bytes), four_ints(p + 2 * row_bytes), four_ints(p + 3 * row_bytes), out);
}

// The same for rows anywhere.
inline void load_cells(const uint8_t *const *p, size_t offset, I *out) {
    transpose<&I::a>(four_ints(p[0] + offset), four_ints(p[1] + offset), four_ints(p[2] + offset), four_ints(p[3] + offset), out);
    transpose<&I::b>(four_ints(p[4] + offset), four_ints(p[5] + offset), four_ints(p[6] + offset), four_ints(p[7] + offset), out);
}

inline H low_halves(I x) { return vuzp1q_u16(vreinterpretq_u16_s32(x.a), vreinterpretq_u16_s32(x.b)); }  // of each lane
inline H high_halves(I x) { return vuzp2q_u16(vreinterpretq_u16_s32(x.a), vreinterpretq_u16_s32(x.b)); }

// p + the sum over 4 vectors of four products of weights with activations in each lane.
template <int MAX> inline I half_dot(I p, const I *w, const int8_t *q) {
    const int8x16_t x = vld1q_s8(q);
    p.a = vdotq_laneq_s32(p.a, bytes(w[0].a), x, 0), p.b = vdotq_laneq_s32(p.b, bytes(w[0].b), x, 0);
    p.a = vdotq_laneq_s32(p.a, bytes(w[1].a), x, 1), p.b = vdotq_laneq_s32(p.b, bytes(w[1].b), x, 1);
    p.a = vdotq_laneq_s32(p.a, bytes(w[2].a), x, 2), p.b = vdotq_laneq_s32(p.b, bytes(w[2].b), x, 2);
    p.a = vdotq_laneq_s32(p.a, bytes(w[3].a), x, 3), p.b = vdotq_laneq_s32(p.b, bytes(w[3].b), x, 3);
    return p;
}
template <int MAX> inline I dot(I p, const I *w, const int8_t *q) {  // over 8 vectors
    return half_dot<MAX>(half_dot<MAX>(p, w, q), w + 4, q + 16);
}

inline float32x4_t greater(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline F at_least(F x, F least) { return {greater(least.a, x.a), greater(least.b, x.b)}; }  // NaN stays NaN
inline F nearest(F x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b)}; }
inline float32x4_t power_of_two(float32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
inline F power_of_two(F n) { return {power_of_two(n.a), power_of_two(n.b)}; }
inline F subtract_floats(F x, F y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
inline F divide(F x, F y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
inline F absolute(F x) { return {vabsq_f32(x.a), vabsq_f32(x.b)}; }
inline F with_sign_of(F x, F sign) {
    const uint32x4_t number = vdupq_n_u32(0x7fffffff);
    return {vbslq_f32(number, x.a, sign.a), vbslq_f32(number, x.b, sign.b)};
}
inline uint32x4_t is_none(float32x4_t x) { return vceqq_f32(x, vdupq_n_f32(-__builtin_inff())); }
inline F none_where_none(F mask, F x) {  // minus infinity where the mask is
    return {vbslq_f32(is_none(mask.a), mask.a, x.a), vbslq_f32(is_none(mask.b), mask.b, x.b)};
}
inline F zero_where_none(F score, F x) {
    return {float_bits(vbicq_u32(bits(x.a), is_none(score.a))), float_bits(vbicq_u32(bits(x.b), is_none(score.b)))};
}
inline float greatest_lane(F x) { return vmaxvq_f32(vmaxq_f32(x.a, x.b)); }
inline float first_lane(F x) { return vgetq_lane_f32(x.a, 0); }
inline float half_to_float_scalar(uint16_t x) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(x))), 0); }
inline F load_half(const uint16_t *p) { return half_to_float(vld1q_u16(p)); }
inline I load_signed_bytes(const uint8_t *p) {
    const int16x8_t x = vmovl_s8(vld1_s8((const int8_t *)p));
    return {vmovl_s16(vget_low_s16(x)), vmovl_high_s16(x)};
}
inline F load_brain(const uint16_t *p) {
    const uint16x8_t x = vld1q_u16(p);
    return {float_bits(vshll_n_u16(vget_low_u16(x), 16)), float_bits(vshll_high_n_u16(x, 16))};
}

// The greatest of 32 absolute values. As integers, NaN is the greatest.
inline float greatest_of_unit(const float *x) {
    uint32x4_t greatest = vdupq_n_u32(0);
    for (int i = 0; i < 32; i += 4) greatest = vmaxq_u32(greatest, bits(vabsq_f32(vld1q_f32(x + i))));
    return vgetq_lane_f32(float_bits(vdupq_n_u32(vmaxvq_u32(greatest))), 0);
}

// q[i] = x[i] * factor as the nearest integer; sums of each half.
inline void round_unit(const float *x, float factor, int8_t *out, int *sums) {
    for (int h = 0; h < 2; h++, x += 16, out += 16) {
        int32x4_t q[4];
        for (int i = 0; i < 4; i++) q[i] = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 4 * i), factor));
        const int16x8_t low = vcombine_s16(vmovn_s32(q[0]), vmovn_s32(q[1]));
        const int16x8_t high = vcombine_s16(vmovn_s32(q[2]), vmovn_s32(q[3]));
        const int8x16_t packed = vcombine_s8(vmovn_s16(low), vmovn_s16(high));
        vst1q_s8(out, packed), sums[h] = vaddlvq_s8(packed);
    }
}

// 16 partial sums of a product of floats, of which each has every 16th input.
struct Sums {
    F x, y;
    void clear() { x = y = zeros(); }
    void add(Sums w, Sums a) { x = multiply_add(w.x, a.x, x), y = multiply_add(w.y, a.y, y); }
    static Sums load(const float *p) { return {::load(p), ::load(p + 8)}; }
    static Sums load_half(const uint16_t *p) { return {::load_half(p), ::load_half(p + 8)}; }
    static Sums load_brain(const uint16_t *p) { return {::load_brain(p), ::load_brain(p + 8)}; }
    void save(float *p) const { store(p, x), store(p + 8, y); }
    float total() const {  // pairwise, the same on every instruction set
        const F eight = ::add(x, y);
        const float32x4_t four = vaddq_f32(eight.a, eight.b);
        const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
        return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
    }
};
constexpr int TILE_COLUMNS = 2;  // of a product of floats: 2 x 2 x 2 pairs of sums and their factors fit into the registers

}  // namespace
