// Sixteen float lanes on whatever the machine has: one AVX-512 register, two AVX2 ones, four of 128 bits (NEON, AVX, SSE4.1), or an array.
//
// Every operation here is correctly rounded by IEEE 754 (add, mul, fma, div, sqrt, conversions) or works on bits, so a lane holds the same bytes on every
// instruction set. Nothing that is approximate (rcp, rsqrt, a library's exp) may come in, and nothing is reassociated: the compiler gets
// -ffp-contract=off and no fast-math, and sums over lanes have one written order. The standard headers come before any target pragma, and everything is
// in a namespace of its instruction set: an inline function of two sets under one name would leave the linker to choose.
#pragma once

#ifndef DT_NS
#error "define DT_NS, the namespace of the instruction set, before including lanes.h"
#endif

#define DT_INLINE inline __attribute__((always_inline))

namespace DT_NS {

constexpr int LANES = 16;

// `pinned`: a sum stays in its register from step to step. GCC would put all additions behind all products otherwise, and these into memory meanwhile.

#if defined(DT_AVX512)

struct F16 { __m512 v; };
struct I16 { __m512i v; };

static inline F16 zero() { return {_mm512_setzero_ps()}; }
static inline F16 set1(float a) { return {_mm512_set1_ps(a)}; }
static inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
static inline F16 load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p)}; }
static inline void store_first(float* p, F16 a, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a.v); }
static inline F16 load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
static inline F16 load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
static inline F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline F16 abs(F16 a) { return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff)))}; }
static inline F16 rint(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
static inline I16 to_int(F16 a) { return {_mm512_cvtps_epi32(a.v)}; }
static inline F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline I16 iset1(int32_t a) { return {_mm512_set1_epi32(a)}; }
static inline I16 load_int(const void* p) { return {_mm512_loadu_si512(p)}; }
static inline void store_int(void* p, I16 a) { _mm512_storeu_si512(p, a.v); }
static inline I16 iadd(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline I16 shift_left_23(I16 a) { return {_mm512_slli_epi32(a.v, 23)}; }
static inline F16 as_float(I16 a) { return {_mm512_castsi512_ps(a.v)}; }
static inline F16 where_less(F16 a, F16 b, F16 yes, F16 no) { return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)}; }
static inline bool any_less(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ) != 0; }
static DT_INLINE I16 pinned(I16 a) { asm("" : "+v"(a.v)); return a; }

#elif defined(DT_AVX2)

struct F16 { __m256 a, b; };
struct I16 { __m256i a, b; };

static inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
static inline F16 load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline __m256 bf16_8(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline F16 load_bf16(const uint16_t* p) { return {bf16_8(p), bf16_8(p + 8)}; }
static inline F16 add(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline F16 sub(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline F16 mul(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline F16 div(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline F16 abs(F16 x) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
static inline F16 rint(F16 x) {
    return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline I16 to_int(F16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
static inline F16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline I16 iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline I16 load_int(const void* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)}; }
static inline void store_int(void* p, I16 x) { _mm256_storeu_si256((__m256i*)p, x.a); _mm256_storeu_si256((__m256i*)p + 1, x.b); }
static inline I16 iadd(I16 x, I16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
static inline I16 shift_left_23(I16 x) { return {_mm256_slli_epi32(x.a, 23), _mm256_slli_epi32(x.b, 23)}; }
static inline F16 as_float(I16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
static inline F16 where_less(F16 x, F16 y, F16 yes, F16 no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)), _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
static inline bool any_less(F16 x, F16 y) {
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))) != 0;
}
static DT_INLINE I16 pinned(I16 x) { asm("" : "+x"(x.a), "+x"(x.b)); return x; }

#elif defined(DT_NEON)

struct F16 { float32x4_t v[4]; };
struct I16 { int32x4_t v[4]; };

#define DT_EACH(TYPE, EXPRESSION) TYPE r; for (int i = 0; i < 4; i++) r.v[i] = (EXPRESSION); return r
static inline F16 zero() { DT_EACH(F16, vdupq_n_f32(0.0f)); }
static inline F16 set1(float a) { DT_EACH(F16, vdupq_n_f32(a)); }
static inline F16 load(const float* p) { DT_EACH(F16, vld1q_f32(p + 4 * i)); }
static inline void store(float* p, F16 a) { for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]); }
static inline F16 load_half(const uint16_t* p) { DT_EACH(F16, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
static inline F16 load_bf16(const uint16_t* p) { DT_EACH(F16, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))); }
static inline F16 add(F16 a, F16 b) { DT_EACH(F16, vaddq_f32(a.v[i], b.v[i])); }
static inline F16 sub(F16 a, F16 b) { DT_EACH(F16, vsubq_f32(a.v[i], b.v[i])); }
static inline F16 mul(F16 a, F16 b) { DT_EACH(F16, vmulq_f32(a.v[i], b.v[i])); }
static inline F16 div(F16 a, F16 b) { DT_EACH(F16, vdivq_f32(a.v[i], b.v[i])); }
static inline F16 fma(F16 a, F16 b, F16 c) { DT_EACH(F16, vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
// x86 takes the second operand where the comparison fails, and so does this
static inline F16 max(F16 a, F16 b) { DT_EACH(F16, vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
static inline F16 min(F16 a, F16 b) { DT_EACH(F16, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
static inline F16 abs(F16 a) { DT_EACH(F16, vabsq_f32(a.v[i])); }
static inline F16 rint(F16 a) { DT_EACH(F16, vrndnq_f32(a.v[i])); }
static inline I16 to_int(F16 a) { DT_EACH(I16, vcvtnq_s32_f32(a.v[i])); }
static inline F16 to_float(I16 a) { DT_EACH(F16, vcvtq_f32_s32(a.v[i])); }
static inline I16 iset1(int32_t a) { DT_EACH(I16, vdupq_n_s32(a)); }
static inline I16 load_int(const void* p) { DT_EACH(I16, vld1q_s32((const int32_t*)p + 4 * i)); }
static inline void store_int(void* p, I16 a) { for (int i = 0; i < 4; i++) vst1q_s32((int32_t*)p + 4 * i, a.v[i]); }
static inline I16 iadd(I16 a, I16 b) { DT_EACH(I16, vaddq_s32(a.v[i], b.v[i])); }
static inline I16 shift_left_23(I16 a) { DT_EACH(I16, vshlq_n_s32(a.v[i], 23)); }
static inline F16 as_float(I16 a) { DT_EACH(F16, vreinterpretq_f32_s32(a.v[i])); }
static inline F16 where_less(F16 a, F16 b, F16 yes, F16 no) { DT_EACH(F16, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), yes.v[i], no.v[i])); }
static inline bool any_less(F16 a, F16 b) {
    uint32x4_t less = vdupq_n_u32(0);
    for (int i = 0; i < 4; i++) less = vorrq_u32(less, vcltq_f32(a.v[i], b.v[i]));
    return vmaxvq_u32(less) != 0;
}
#undef DT_EACH

#elif defined(DT_SSE)  // SSE4.1, or AVX where DT_AVX is defined, too: neither has fused products

struct F16 { __m128 v[4]; };
struct I16 { __m128i v[4]; };

#define DT_EACH(TYPE, EXPRESSION) TYPE r; _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) r.v[i] = (EXPRESSION); return r
static DT_INLINE F16 zero() { DT_EACH(F16, _mm_setzero_ps()); }
static DT_INLINE F16 set1(float a) { DT_EACH(F16, _mm_set1_ps(a)); }
static DT_INLINE F16 load(const float* p) { DT_EACH(F16, _mm_loadu_ps(p + 4 * i)); }
static DT_INLINE void store(float* p, F16 a) { for (int i = 0; i < 4; i++) _mm_storeu_ps(p + 4 * i, a.v[i]); }
// Without F16C by integers: a multiplication by a power of two would be slow where the half is subnormal, as scales of weights often are.
static DT_INLINE __m128 half4(const uint16_t* p) {
#if defined(DT_AVX)
    if (dovetail::has_f16c) {
        __m128 wide;
        asm("vcvtph2ps %1, %0" : "=x"(wide) : "m"(*(const uint64_t*)p));
        return wide;
    }
#endif
    const __m128i h = _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)p)), size = _mm_and_si128(h, _mm_set1_epi32(0x7fff));
    const __m128i small = _mm_cmplt_epi32(size, _mm_set1_epi32(0x400)), special = _mm_cmpgt_epi32(size, _mm_set1_epi32(0x7bff));
    const __m128i bias = _mm_set1_epi32(112 << 23);  // once, twice for what is not finite
    const __m128i bits = _mm_add_epi32(_mm_add_epi32(_mm_slli_epi32(size, 13), bias), _mm_and_si128(special, bias));
    const __m128 wide = _mm_castsi128_ps(_mm_sub_epi32(bits, _mm_slli_epi32(small, 23)));  // a subnormal half, and 2^-14
    return _mm_or_ps(_mm_sub_ps(wide, _mm_and_ps(_mm_castsi128_ps(small), _mm_set1_ps(0x1p-14f))), _mm_castsi128_ps(_mm_slli_epi32(_mm_xor_si128(h, size), 16)));
}
static DT_INLINE F16 load_half(const uint16_t* p) { DT_EACH(F16, half4(p + 4 * i)); }
static DT_INLINE F16 load_bf16(const uint16_t* p) { DT_EACH(F16, _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)(p + 4 * i))), 16))); }
static DT_INLINE F16 add(F16 a, F16 b) { DT_EACH(F16, _mm_add_ps(a.v[i], b.v[i])); }
static DT_INLINE F16 sub(F16 a, F16 b) { DT_EACH(F16, _mm_sub_ps(a.v[i], b.v[i])); }
static DT_INLINE F16 mul(F16 a, F16 b) { DT_EACH(F16, _mm_mul_ps(a.v[i], b.v[i])); }
static DT_INLINE F16 div(F16 a, F16 b) { DT_EACH(F16, _mm_div_ps(a.v[i], b.v[i])); }
static DT_INLINE F16 max(F16 a, F16 b) { DT_EACH(F16, _mm_max_ps(a.v[i], b.v[i])); }
static DT_INLINE F16 min(F16 a, F16 b) { DT_EACH(F16, _mm_min_ps(a.v[i], b.v[i])); }
static DT_INLINE F16 abs(F16 a) { DT_EACH(F16, _mm_and_ps(a.v[i], _mm_castsi128_ps(_mm_set1_epi32(0x7fffffff)))); }
static DT_INLINE F16 rint(F16 a) { DT_EACH(F16, _mm_round_ps(a.v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
static DT_INLINE I16 to_int(F16 a) { DT_EACH(I16, _mm_cvtps_epi32(a.v[i])); }
static DT_INLINE F16 to_float(I16 a) { DT_EACH(F16, _mm_cvtepi32_ps(a.v[i])); }
static DT_INLINE I16 iset1(int32_t a) { DT_EACH(I16, _mm_set1_epi32(a)); }
static DT_INLINE I16 load_int(const void* p) { DT_EACH(I16, _mm_loadu_si128((const __m128i*)p + i)); }
static DT_INLINE void store_int(void* p, I16 a) { for (int i = 0; i < 4; i++) _mm_storeu_si128((__m128i*)p + i, a.v[i]); }
static DT_INLINE I16 iadd(I16 a, I16 b) { DT_EACH(I16, _mm_add_epi32(a.v[i], b.v[i])); }
static DT_INLINE I16 shift_left_23(I16 a) { DT_EACH(I16, _mm_slli_epi32(a.v[i], 23)); }
static DT_INLINE F16 as_float(I16 a) { DT_EACH(F16, _mm_castsi128_ps(a.v[i])); }
static DT_INLINE F16 where_less(F16 a, F16 b, F16 yes, F16 no) { DT_EACH(F16, _mm_blendv_ps(no.v[i], yes.v[i], _mm_cmplt_ps(a.v[i], b.v[i]))); }
static DT_INLINE bool any_less(F16 a, F16 b) {
    __m128 less = _mm_setzero_ps();
    for (int i = 0; i < 4; i++) less = _mm_or_ps(less, _mm_cmplt_ps(a.v[i], b.v[i]));
    return _mm_movemask_ps(less) != 0;
}
static DT_INLINE I16 pinned(I16 a) { asm("" : "+x"(a.v[0]), "+x"(a.v[1]), "+x"(a.v[2]), "+x"(a.v[3])); return a; }
#undef DT_EACH

// Four bytes, four times.
static DT_INLINE __m128i inputs4(const char* p) {
#if defined(DT_AVX)
    return _mm_castps_si128(_mm_broadcast_ss((const float*)p));
#else
    return _mm_set1_epi32(*(const int32_t*)p);
#endif
}

// a b + c rounded once. The product of two floats is exact as a double, and the sum, rounded to a double and then to a float, is right but for two cases, which
// are recognised by their bits and corrected by the error of the sum: the double lies half way between two floats, or the float is below the normal ones.
static __attribute__((noinline)) __m128 fused_exactly(__m128 a, __m128 b, __m128 c) {
    alignas(16) float x[4], y[4], z[4];
    _mm_store_ps(x, a), _mm_store_ps(y, b), _mm_store_ps(z, c);
    for (int i = 0; i < 4; i++) {
        const double product = (double)x[i] * (double)y[i], sum = product + (double)z[i], from = sum - product;
        const double error = (product - (sum - from)) + ((double)z[i] - from);
        int64_t bits;
        memcpy(&bits, &sum, 8);
        if ((error > 0 || error < 0) && (bits & 1) == 0) bits += (error > 0) == (sum > 0) ? 1 : -1;  // a sum that is not exact ends in an odd bit: no longer half way
        double odd;
        memcpy(&odd, &bits, 8);
        z[i] = (float)odd;
    }
    return _mm_load_ps(z);
}

#if defined(DT_AVX)
using Doubles = __m256d;  // of four lanes
using Doubt = __m256;
static DT_INLINE Doubles doubles(__m128 a) { return _mm256_cvtps_pd(a); }
static DT_INLINE Doubles doubles(__m128i a) { return _mm256_cvtepi32_pd(a); }
static DT_INLINE Doubles all_of(double a) { return _mm256_set1_pd(a); }
static DT_INLINE Doubles plus(Doubles a, Doubles b) { return _mm256_add_pd(a, b); }
static DT_INLINE Doubles minus(Doubles a, Doubles b) { return _mm256_sub_pd(a, b); }
static DT_INLINE Doubles times(Doubles a, Doubles b) { return _mm256_mul_pd(a, b); }
static DT_INLINE __m128 floats(Doubles a) { return _mm256_cvtpd_ps(a); }
// All bits where one of eight doubles lies half way between two floats: 1 and 28 zeros below a float's bits. With all above them set, no number is subnormal.
static DT_INLINE Doubt half_way(Doubles a, Doubles b) {
    const __m256 low = _mm256_shuffle_ps(_mm256_castpd_ps(a), _mm256_castpd_ps(b), 0x88);
    return _mm256_cmp_ps(_mm256_or_ps(low, _mm256_castsi256_ps(_mm256_set1_epi32((int)0xe0000000))), _mm256_castsi256_ps(_mm256_set1_epi32((int)0xf0000000)), _CMP_EQ_OQ);
}
static DT_INLINE Doubt either(Doubt a, Doubt b) { return _mm256_or_ps(a, b); }
static DT_INLINE bool any(Doubt a) { return _mm256_movemask_ps(a) != 0; }
#else
struct Doubles { __m128d a, b; };
using Doubt = __m128i;
static DT_INLINE Doubles doubles(__m128 a) { return {_mm_cvtps_pd(a), _mm_cvtps_pd(_mm_movehl_ps(a, a))}; }
static DT_INLINE Doubles doubles(__m128i a) { return {_mm_cvtepi32_pd(a), _mm_cvtepi32_pd(_mm_unpackhi_epi64(a, a))}; }
static DT_INLINE Doubles all_of(double a) { return {_mm_set1_pd(a), _mm_set1_pd(a)}; }
static DT_INLINE Doubles plus(Doubles a, Doubles b) { return {_mm_add_pd(a.a, b.a), _mm_add_pd(a.b, b.b)}; }
static DT_INLINE Doubles minus(Doubles a, Doubles b) { return {_mm_sub_pd(a.a, b.a), _mm_sub_pd(a.b, b.b)}; }
static DT_INLINE Doubles times(Doubles a, Doubles b) { return {_mm_mul_pd(a.a, b.a), _mm_mul_pd(a.b, b.b)}; }
static DT_INLINE __m128 floats(Doubles a) { return _mm_movelh_ps(_mm_cvtpd_ps(a.a), _mm_cvtpd_ps(a.b)); }
static DT_INLINE Doubt half_way(Doubles a) {
    const __m128i low = _mm_castps_si128(_mm_shuffle_ps(_mm_castpd_ps(a.a), _mm_castpd_ps(a.b), 0x88));
    return _mm_cmpeq_epi32(_mm_or_si128(low, _mm_set1_epi32((int)0xe0000000)), _mm_set1_epi32((int)0xf0000000));
}
static DT_INLINE Doubt half_way(Doubles a, Doubles b) { return _mm_or_si128(half_way(a), half_way(b)); }
static DT_INLINE Doubt either(Doubt a, Doubt b) { return _mm_or_si128(a, b); }
static DT_INLINE bool any(Doubt a) { return _mm_movemask_epi8(a) != 0; }
#endif

static DT_INLINE F16 fma(F16 a, F16 b, F16 c) {
    F16 r;
    Doubles sums[4];
    __m128 least = _mm_set1_ps(1.0f);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        sums[i] = plus(times(doubles(a.v[i]), doubles(b.v[i])), doubles(c.v[i]));
        r.v[i] = floats(sums[i]);
        least = _mm_min_ps(_mm_and_ps(r.v[i], _mm_castsi128_ps(_mm_set1_epi32(0x7fffffff))), least);  // the second, where the first is no number
    }
    if (__builtin_expect(any(either(half_way(sums[0], sums[1]), half_way(sums[2], sums[3]))) || _mm_movemask_ps(_mm_cmple_ps(least, _mm_set1_ps(0x1p-126f))) != 0, 0))
        for (int i = 0; i < 4; i++) r.v[i] = fused_exactly(a.v[i], b.v[i], c.v[i]);
    return r;
}

#else  // plain C++: right everywhere, fast nowhere

struct F16 { float v[LANES]; };
struct I16 { int32_t v[LANES]; };

static inline float bits_to_float(uint32_t b) { float f; memcpy(&f, &b, 4); return f; }
static inline float half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
    if (exponent == 31) return bits_to_float(sign | 0x7f800000 | mantissa << 13);
    if (exponent != 0) return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
    const float small = (float)mantissa * 0x1p-24f;
    return sign ? -small : small;
}

#define DT_EACH(TYPE, EXPRESSION) TYPE r; for (int i = 0; i < LANES; i++) r.v[i] = (EXPRESSION); return r
static inline F16 zero() { DT_EACH(F16, 0.0f); }
static inline F16 set1(float a) { DT_EACH(F16, a); }
static inline F16 load(const float* p) { DT_EACH(F16, p[i]); }
static inline void store(float* p, F16 a) { for (int i = 0; i < LANES; i++) p[i] = a.v[i]; }
static inline F16 load_half(const uint16_t* p) { DT_EACH(F16, half_to_float(p[i])); }
static inline F16 load_bf16(const uint16_t* p) { DT_EACH(F16, bits_to_float((uint32_t)p[i] << 16)); }
static inline F16 add(F16 a, F16 b) { DT_EACH(F16, a.v[i] + b.v[i]); }
static inline F16 sub(F16 a, F16 b) { DT_EACH(F16, a.v[i] - b.v[i]); }
static inline F16 mul(F16 a, F16 b) { DT_EACH(F16, a.v[i] * b.v[i]); }
static inline F16 div(F16 a, F16 b) { DT_EACH(F16, a.v[i] / b.v[i]); }
static inline F16 fma(F16 a, F16 b, F16 c) { DT_EACH(F16, __builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
static inline F16 max(F16 a, F16 b) { DT_EACH(F16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline F16 min(F16 a, F16 b) { DT_EACH(F16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
static inline F16 abs(F16 a) { DT_EACH(F16, __builtin_fabsf(a.v[i])); }
static inline F16 rint(F16 a) { DT_EACH(F16, __builtin_nearbyintf(a.v[i])); }
static inline I16 to_int(F16 a) { DT_EACH(I16, (int32_t)__builtin_nearbyintf(a.v[i])); }
static inline F16 to_float(I16 a) { DT_EACH(F16, (float)a.v[i]); }
static inline I16 iset1(int32_t a) { DT_EACH(I16, a); }
static inline I16 load_int(const void* p) { I16 r; memcpy(r.v, p, sizeof r.v); return r; }
static inline void store_int(void* p, I16 a) { memcpy(p, a.v, sizeof a.v); }
static inline I16 iadd(I16 a, I16 b) { DT_EACH(I16, a.v[i] + b.v[i]); }
static inline I16 shift_left_23(I16 a) { DT_EACH(I16, (int32_t)((uint32_t)a.v[i] << 23)); }
static inline F16 as_float(I16 a) { DT_EACH(F16, bits_to_float((uint32_t)a.v[i])); }
static inline F16 where_less(F16 a, F16 b, F16 yes, F16 no) { DT_EACH(F16, a.v[i] < b.v[i] ? yes.v[i] : no.v[i]); }
static inline bool any_less(F16 a, F16 b) {
    bool less = false;
    for (int i = 0; i < LANES; i++) less |= a.v[i] < b.v[i];
    return less;
}
#undef DT_EACH

#endif

#if !defined(DT_AVX512)
static inline F16 load_first(const float* p, int n) {
    alignas(64) float t[LANES] = {};
    for (int i = 0; i < n; i++) t[i] = p[i];
    return load(t);
}
static inline void store_first(float* p, F16 a, int n) {
    alignas(64) float t[LANES];
    store(t, a);
    for (int i = 0; i < n; i++) p[i] = t[i];
}
#endif

// Sixteen floats of which n are left: the lanes behind them are zeros, and are not written.
static inline F16 take(const float* p, int64_t n) { return n >= LANES ? load(p) : load_first(p, (int)n); }
static inline void put(float* p, F16 x, int64_t n) {
    if (n >= LANES) store(p, x);
    else store_first(p, x, (int)n);
}

// One number of a cache.
static inline float widen_one(float x) { return x; }
static inline float widen_one(uint16_t x) {
    const uint16_t t[LANES] = {x};
    alignas(64) float wide[LANES];
    store(wide, load_half(t));
    return wide[0];
}

// Sixteen rows of TURNED numbers, `stride` apart, become TURNED rows of sixteen.
#if defined(DT_AVX512) || defined(DT_AVX2)
constexpr int TURNED = 8;
static inline __m256 eight(const float* p) { return _mm256_loadu_ps(p); }
static inline __m256 eight(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
template <class K>
static inline void turn_eight(const K* from, int64_t stride, float* to) {
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = eight(from + i * stride);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44), a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44), a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * LANES, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * LANES, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}
template <class K>
static inline void turn(const K* from, int64_t stride, float* to) {
    turn_eight(from, stride, to);
    turn_eight(from + 8 * stride, stride, to + 8);
}
#elif defined(DT_SSE)
constexpr int TURNED = 4;
static DT_INLINE __m128 four(const float* p) { return _mm_loadu_ps(p); }
static DT_INLINE __m128 four(const uint16_t* p) { return half4(p); }
template <class K>
static inline void turn(const K* from, int64_t stride, float* to) {
    for (const float* end = to + LANES; to < end; from += 4 * stride, to += 4) {
        __m128 a = four(from), b = four(from + stride), c = four(from + 2 * stride), d = four(from + 3 * stride);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        _mm_storeu_ps(to, a), _mm_storeu_ps(to + LANES, b), _mm_storeu_ps(to + 2 * LANES, c), _mm_storeu_ps(to + 3 * LANES, d);
    }
}
#else
constexpr int TURNED = LANES;
static inline void turn(const float* from, int64_t stride, float* to) {
    for (int i = 0; i < LANES; i++)
        for (int d = 0; d < LANES; d++) to[d * LANES + i] = from[i * stride + d];
}
static inline void turn(const uint16_t* from, int64_t stride, float* to) {
    alignas(64) float row[LANES];
    for (int i = 0; i < LANES; i++) {
        store(row, load_half(from + i * stride));
        for (int d = 0; d < LANES; d++) to[d * LANES + i] = row[d];
    }
}
#endif

// The half nearest to x, the even one of two. Beyond the largest it is the largest, so that no number becomes infinite; what is not a number stays so.
static inline uint16_t nearest_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (size >= 0x477fe000) return (uint16_t)(sign | 0x7bff);  // 65504
    if (size < 0x38800000) {  // 2^-14: below it halves are multiples of 2^-24, as floats are from 0.5 to 1
        float small;
        memcpy(&small, &size, 4);
        small += 0.5f;
        memcpy(&bits, &small, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    return (uint16_t)(sign | (((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10)));
}

// Lane i plus lane i + 8, then + 4, + 2, + 1: the one order in which sixteen partial sums become one.
static inline float sum(F16 a) {
    alignas(64) float t[LANES];
    store(t, a);
    for (int step = 8; step > 0; step /= 2)
        for (int i = 0; i < step; i++) t[i] += t[i + step];
    return t[0];
}

static inline float largest(F16 a) {
    alignas(64) float t[LANES];
    store(t, a);
    for (int i = 1; i < LANES; i++) t[0] = t[i] > t[0] ? t[i] : t[0];
    return t[0];
}

// e^x by x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial of degree 6 in r (relative error about 1e-7). Below -87 exactly 0, -inf included.
static inline F16 exp(F16 x) {
    const F16 low = set1(-87.0f);
    const F16 c = min(max(x, low), set1(88.0f));
    const F16 n = rint(mul(c, set1(1.44269504f)));
    F16 r = fma(n, set1(-0.693359375f), c);
    r = fma(n, set1(2.12194440e-4f), r);
    F16 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), set1(1.0f));
    return where_less(x, low, zero(), mul(p, as_float(shift_left_23(iadd(to_int(n), iset1(127))))));
}

}  // namespace DT_NS
