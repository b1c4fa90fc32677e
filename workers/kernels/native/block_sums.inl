// The exact sums of the products of codes with rows of x in int8 (blocks.h), on every instruction set but the plain one, and the numbers of sixteen outputs.
//
// x86 without VNNI adds pairs of products in 16 bits, for as many steps as the largest code of a format allows.
#include "blocks.h"

namespace DT_NS {

using dovetail::STEPS;
using dovetail::WIDTH;

// ---- numbers of sixteen outputs

#if defined(DT_AVX512)
static inline I16 bytes_of(const char* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
static inline I16 signed_bytes_of(const char* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
static inline I16 times_power(I16 a, int by) { return {_mm512_slli_epi32(a.v, by)}; }
static inline Codes look_up(Codes w, const int8_t* numbers) { return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)numbers)), w.v)}; }
template <int J>
static inline I16 input_of(Codes w) { return {_mm512_and_si512(_mm512_srli_epi32(w.v, 8 * J), _mm512_set1_epi32(255))}; }
template <int J>
static inline I16 signed_input_of(Codes w) { return {_mm512_srai_epi32(_mm512_slli_epi32(w.v, 24 - 8 * J), 24)}; }
#elif defined(DT_AVX2)
static inline I16 bytes_of(const char* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
static inline I16 signed_bytes_of(const char* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
static inline I16 times_power(I16 a, int by) { return {_mm256_slli_epi32(a.a, by), _mm256_slli_epi32(a.b, by)}; }
static inline Codes look_up(Codes w, const int8_t* numbers) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)numbers));
    return {_mm256_shuffle_epi8(table, w.a), _mm256_shuffle_epi8(table, w.b)};
}
template <int J>
static inline I16 input_of(Codes w) {
    const __m256i byte = _mm256_set1_epi32(255);
    return {_mm256_and_si256(_mm256_srli_epi32(w.a, 8 * J), byte), _mm256_and_si256(_mm256_srli_epi32(w.b, 8 * J), byte)};
}
template <int J>
static inline I16 signed_input_of(Codes w) {
    return {_mm256_srai_epi32(_mm256_slli_epi32(w.a, 24 - 8 * J), 24), _mm256_srai_epi32(_mm256_slli_epi32(w.b, 24 - 8 * J), 24)};
}
#elif defined(DT_SSE)
#define DT_EACH(TYPE, EXPRESSION) TYPE r; _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) r.v[i] = (EXPRESSION); return r
static DT_INLINE I16 bytes_of(const char* p) { DT_EACH(I16, _mm_cvtepu8_epi32(_mm_cvtsi32_si128(((const int32_t*)p)[i]))); }
static DT_INLINE I16 signed_bytes_of(const char* p) { DT_EACH(I16, _mm_cvtepi8_epi32(_mm_cvtsi32_si128(((const int32_t*)p)[i]))); }
static DT_INLINE I16 times_power(I16 a, int by) { DT_EACH(I16, _mm_slli_epi32(a.v[i], by)); }
static DT_INLINE Codes look_up(Codes w, const int8_t* numbers) { DT_EACH(Codes, _mm_shuffle_epi8(_mm_load_si128((const __m128i*)numbers), w.v[i])); }
template <int J>
static DT_INLINE I16 input_of(Codes w) { DT_EACH(I16, _mm_and_si128(_mm_srli_epi32(w.v[i], 8 * J), _mm_set1_epi32(255))); }
template <int J>
static DT_INLINE I16 signed_input_of(Codes w) { DT_EACH(I16, _mm_srai_epi32(_mm_slli_epi32(w.v[i], 24 - 8 * J), 24)); }
#elif defined(DT_NEON)
static inline I16 bytes_of(const char* p) {
    const uint8x16_t bytes = vld1q_u8((const uint8_t*)p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
    return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low))),
             vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)))}};
}
static inline I16 signed_bytes_of(const char* p) {
    const int8x16_t bytes = vld1q_s8((const int8_t*)p);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)), vmovl_s16(vget_high_s16(high))}};
}
static inline I16 times_power(I16 a, int by) {
    for (int i = 0; i < 4; i++) a.v[i] = vshlq_s32(a.v[i], vdupq_n_s32(by));
    return a;
}
static inline Codes look_up(Codes w, const int8_t* numbers) {
    const uint8x16_t table = vreinterpretq_u8_s8(vld1q_s8(numbers));
    for (int i = 0; i < 4; i++) w.v[i] = vqtbl1q_u8(table, w.v[i]);
    return w;
}
template <int J>
static inline I16 input_of(Codes w) {
    I16 r;
    for (int i = 0; i < 4; i++) r.v[i] = vreinterpretq_s32_u32(vandq_u32(vshlq_u32(vreinterpretq_u32_u8(w.v[i]), vdupq_n_s32(-8 * J)), vdupq_n_u32(255)));
    return r;
}
template <int J>
static inline I16 signed_input_of(Codes w) {
    I16 r;
    for (int i = 0; i < 4; i++) r.v[i] = vshrq_n_s32(vshlq_s32(vreinterpretq_s32_u8(w.v[i]), vdupq_n_s32(24 - 8 * J)), 24);
    return r;
}
#endif

// Four bits of each output; those of the outputs j and j + 8 share a byte.
static DT_INLINE I16 nibbles_of(const char* p) {
    alignas(16) char own[16];
#if defined(DT_NEON)
    vst1_u8((uint8_t*)own, vand_u8(vld1_u8((const uint8_t*)p), vdup_n_u8(15)));
    vst1_u8((uint8_t*)own + 8, vshr_n_u8(vld1_u8((const uint8_t*)p), 4));
#else
    const __m128i pairs = _mm_loadl_epi64((const __m128i*)p), mask = _mm_set1_epi8(15);
    _mm_store_si128((__m128i*)own, _mm_unpacklo_epi64(_mm_and_si128(pairs, mask), _mm_and_si128(_mm_srli_epi16(pairs, 4), mask)));
#endif
    return bytes_of(own);
}

// ---- the codes of a step

// A plane of one bit or two of each code, moved to the bits from FROM on.
template <int BITS, int FROM, int STEP>
static inline Codes plane_at(const char* plane) {
    constexpr int LOADS = BITS, SHIFT = FROM - STEP / LOADS * BITS;
    const Codes line = load_codes(plane + 64 * (STEP % LOADS));
    if constexpr (SHIFT > 0) return only(up<SHIFT>(line), ((1 << BITS) - 1) << FROM);
    else if constexpr (SHIFT < 0) return only(down<-SHIFT>(line), ((1 << BITS) - 1) << FROM);
    else return only(line, ((1 << BITS) - 1) << FROM);
}

template <class F, int STEP>
static inline Codes codes_of(const char* codes) {
    static_assert(!dovetail::has_book<F>() || F::BITS == 8, "indices are unpacked a block at a time");
    if constexpr (F::BITS == 8) return load_codes(codes + 64 * STEP);
    else if constexpr (F::BITS == 2) return plane_at<2, 0, STEP>(codes);
    else if constexpr (F::BITS == 3) return either(plane_at<2, 0, STEP>(codes), plane_at<1, 2, STEP>(codes + 128));
    else {
        const Codes line = load_codes(codes + 64 * (STEP % 4));
        Codes low;
        if constexpr (STEP < 4) low = only(line, 15);
        else low = only(down<4>(line), 15);
        if constexpr (dovetail::numbers_of<F>() != nullptr) return look_up(low, dovetail::numbers_of<F>());
        else if constexpr (F::BITS == 4) return low;
        else return either(low, plane_at<F::BITS - 4, 4, STEP>(codes + 256));
    }
}

// The codebook entries of a block, as `fours` in blocks.h, or with the choice of input j + 4 in the bits from SECOND_CHOICE up.
#if defined(DT_AVX512)
constexpr int SECOND_CHOICE = 2;
// Looks up twice 32 words of a table by indices of BITS bits; bits of F's indices above the eighth are in `above`, those of the first entry from bit FIRST on.
template <class F, int BITS, int FIRST>
static DT_INLINE void words_at(const uint16_t* table, const __m512i (&index)[2], __m512i above, __m512i (&to)[2]) {
    if constexpr (BITS == 6) {
        const __m512i low = _mm512_loadu_si512(table), high = _mm512_loadu_si512(table + 32);
        for (int i = 0; i < 2; i++) to[i] = _mm512_permutex2var_epi16(low, index[i], high);
    } else {
        __m512i upper[2];
        words_at<F, BITS - 1, FIRST>(table, index, above, to);
        words_at<F, BITS - 1, FIRST>(table + (1 << (BITS - 1)), index, above, upper);
        for (int i = 0; i < 2; i++) {
            const int bit = BITS > 8 ? FIRST + i * (dovetail::index_bits<F>() - 8) + BITS - 9 : BITS - 1;
            to[i] = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(BITS > 8 ? above : index[i], _mm512_set1_epi16((int16_t)(1 << bit))), to[i], upper[i]);
        }
    }
}

// Four entries at a time; those two apart share the words of an output.
template <class F, int ENTRY = 0>
static DT_INLINE void entries_of(const char* codes, __m512i above, Codes* to) {
    if constexpr (ENTRY < dovetail::entries<F>()) {
        constexpr int BITS = dovetail::index_bits<F>();
        const __m512i line = _mm512_loadu_si512(codes + 16 * ENTRY), index[2] = {line, _mm512_srli_epi16(line, 8)};
        const __m512i low = _mm512_set1_epi32(0xffff), high = _mm512_set1_epi32(~0xffff);
        __m512i words[2];
        words_at<F, BITS, ENTRY*(BITS - 8)>(dovetail::book_of<F>().words, index, above, words);
        for (int i = 0; i < 2; i++) {
            to[ENTRY + i].v = _mm512_or_si512(_mm512_slli_epi32(words[i], 12), _mm512_and_si512(words[i], low));
            to[ENTRY + i + 2].v = _mm512_or_si512(_mm512_srli_epi32(words[i], 16), _mm512_and_si512(_mm512_srli_epi32(words[i], 4), high));
        }
        entries_of<F, ENTRY + 4>(codes, above, to);
    }
}
template <class F>
static DT_INLINE void entries_of(const char* codes, Codes* to) {
    __m512i above = _mm512_setzero_si512();
    const char* const behind = codes + 64 * F::BITS;
    if constexpr (dovetail::high_bits<F>() > 0) {
        above = dovetail::high_bits<F>() == 8 ? bytes_of(behind).v : nibbles_of(behind).v;
        above = _mm512_or_si512(above, _mm512_slli_epi32(above, 16 - 2 * (dovetail::index_bits<F>() - 8)));
    }
    entries_of<F>(codes, above, to);
}
#else
constexpr int SECOND_CHOICE = 4;
// Sixteen entries; at(lane) is the index of one. On many processors single loads are faster than gathers.
template <class At>
static DT_INLINE Codes entries_at(const uint32_t* fours, const At& at) {
#if defined(DT_NEON)
    alignas(64) uint32_t found[LANES];
    for (int lane = 0; lane < LANES; lane++) found[lane] = fours[at(lane)];
    return load_codes((const char*)found);
#else
    __m128i v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const auto one = [&](int lane) { return _mm_cvtsi32_si128((int)fours[at(4 * i + lane)]); };
        v[i] = _mm_unpacklo_epi64(_mm_unpacklo_epi32(one(0), one(1)), _mm_unpacklo_epi32(one(2), one(3)));
    }
#if defined(DT_AVX2)
    return {_mm256_set_m128i(v[1], v[0]), _mm256_set_m128i(v[3], v[2])};
#else
    return {{v[0], v[1], v[2], v[3]}};
#endif
#endif
}

// Indices of more than eight bits [entry][output]; `above` has the upper bits of all entries of an output.
template <class F, int ENTRY = 0>
static DT_INLINE void wide_indices(const char* codes, I16 above, uint32_t* to) {
    if constexpr (ENTRY < dovetail::entries<F>()) {
        constexpr int ABOVE = dovetail::index_bits<F>() - 8;
        const I16 moved = times_power(above, 8 - ENTRY * ABOVE);
        Codes high;
        memcpy(&high, &moved, sizeof high);
        high = only(high, (1 << ABOVE) - 1);  // clears all bytes but the second
        I16 index;
        memcpy(&index, &high, sizeof index);
        store_int(to, iadd(index, input_of<ENTRY % 4>(load_codes(codes + 16 * (ENTRY / 4 * 4)))));
        wide_indices<F, ENTRY + 1>(codes, above, to + LANES);
    }
}

template <class F>
static DT_INLINE void entries_of(const char* codes, Codes* to) {
    constexpr int ENTRIES = dovetail::entries<F>();
    const uint32_t* const fours = dovetail::book_of<F>().fours;
    if constexpr (dovetail::high_bits<F>() > 0) {
        alignas(64) uint32_t indices[ENTRIES * LANES];
        const char* const behind = codes + 64 * F::BITS;
        wide_indices<F>(codes, dovetail::high_bits<F>() == 8 ? bytes_of(behind) : nibbles_of(behind), indices);
        asm("" : : "r"(indices) : "memory");  // indices are loaded one by one
#pragma GCC unroll 8
        for (int i = 0; i < ENTRIES; i++) to[i] = entries_at(fours, [&](int lane) { return indices[LANES * i + lane]; });
    } else
#pragma GCC unroll 8
        for (int i = 0; i < ENTRIES; i++) to[i] = entries_at(fours, [&](int lane) { return (uint8_t)codes[64 * (i / 4) + 4 * lane + i % 4]; });
}
#endif

template <class F, int STEP = 0>
static DT_INLINE void unpack_choices(const Codes* entries, const char* signs, Codes* to) {
    if constexpr (STEP < STEPS) {
        Codes own = entries[F::BITS == 3 ? STEP : STEP / 2];
        if constexpr (F::BITS == 2 && STEP % 2 == 1) own = down<SECOND_CHOICE>(own);
#if defined(DT_AVX512) || defined(DT_NEON)
        own = only(own, F::BITS == 3 ? 7 : 3);  // other look-ups ignore the bits above the choice
#endif
        to[STEP] = look_up(either(own, plane_at<1, 3, STEP>(signs)), dovetail::numbers_of<F>());
        unpack_choices<F, STEP + 1>(entries, signs, to);
    }
}

// One byte per code, for several rows; without fused products two of signed codes.
template <class F>
struct Unpacked : F { static constexpr int BITS = 8; };
template <class F>
constexpr bool is_unpacked = false;
template <class F>
constexpr bool is_unpacked<Unpacked<F>> = true;

// ---- exact sums

#if defined(DT_AVX512) && !defined(DT_VNNI)
struct Pairs { __m512i v; };
struct Signed { __m512i size; __mmask64 negative; };
struct Four { __m512i v; };
static inline Four four(const char* x) { return {_mm512_set1_epi32(*(const int32_t*)x)}; }
static inline Signed as_signed(Codes w) { return {_mm512_abs_epi8(w.v), _mm512_movepi8_mask(w.v)}; }
static inline Pairs products(Codes w, Four x) { return {_mm512_maddubs_epi16(w.v, x.v)}; }
static inline Pairs products(Signed w, Four x) { return {_mm512_maddubs_epi16(w.size, _mm512_mask_sub_epi8(x.v, w.negative, _mm512_setzero_si512(), x.v))}; }
static inline Pairs add(Pairs a, Pairs b) { return {_mm512_add_epi16(a.v, b.v)}; }
static inline Four both(Four a, Four b) { return {_mm512_add_epi16(a.v, b.v)}; }
static inline Pairs less(Pairs a, Four b) { return {_mm512_sub_epi16(a.v, b.v)}; }
static inline I16 added(Pairs a) { return {_mm512_madd_epi16(a.v, _mm512_set1_epi16(1))}; }
static DT_INLINE void hold(Pairs& p) { asm("" : "+v"(p.v)); }
#define DT_PAIRS 1
#elif defined(DT_AVX2)
struct Pairs { __m256i a, b; };
struct Signed { Codes size, w; };
struct Four { __m256i v; };
static inline Four four(const char* x) { return {_mm256_set1_epi32(*(const int32_t*)x)}; }
static inline Signed as_signed(Codes w) { return {{_mm256_abs_epi8(w.a), _mm256_abs_epi8(w.b)}, w}; }
static inline Pairs products(Codes w, Four x) { return {_mm256_maddubs_epi16(w.a, x.v), _mm256_maddubs_epi16(w.b, x.v)}; }
static inline Pairs products(Signed w, Four x) {
    return {_mm256_maddubs_epi16(w.size.a, _mm256_sign_epi8(x.v, w.w.a)), _mm256_maddubs_epi16(w.size.b, _mm256_sign_epi8(x.v, w.w.b))};
}
static inline Pairs add(Pairs p, Pairs q) { return {_mm256_add_epi16(p.a, q.a), _mm256_add_epi16(p.b, q.b)}; }
static inline Four both(Four x, Four y) { return {_mm256_add_epi16(x.v, y.v)}; }
static inline Pairs less(Pairs p, Four x) { return {_mm256_sub_epi16(p.a, x.v), _mm256_sub_epi16(p.b, x.v)}; }
static inline I16 added(Pairs p) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(p.a, ones), _mm256_madd_epi16(p.b, ones)};
}
static DT_INLINE void hold(Pairs& p) { asm("" : "+x"(p.a), "+x"(p.b)); }
#define DT_PAIRS 1
#elif defined(DT_SSE)
struct Pairs { __m128i v[4]; };
struct Signed { Codes size, w; };
struct Four { __m128i v; };
static DT_INLINE Four four(const char* x) { return {inputs4(x)}; }
static DT_INLINE Codes sizes(Codes w) { DT_EACH(Codes, _mm_abs_epi8(w.v[i])); }
static DT_INLINE Signed as_signed(Codes w) { return {sizes(w), w}; }
static DT_INLINE Pairs products(Codes w, Four x) { DT_EACH(Pairs, _mm_maddubs_epi16(w.v[i], x.v)); }
static DT_INLINE Pairs products(Signed w, Four x) { DT_EACH(Pairs, _mm_maddubs_epi16(w.size.v[i], _mm_sign_epi8(x.v, w.w.v[i]))); }
// 256 times the signed codes of the inputs 0 and 2 of a step, and of 1 and 3, in 16 bits.
static DT_INLINE Codes even(Codes w) { DT_EACH(Codes, _mm_slli_epi16(w.v[i], 8)); }
static DT_INLINE Codes odd(Codes w) { DT_EACH(Codes, _mm_and_si128(w.v[i], _mm_set1_epi16((int16_t)0xff00))); }
static DT_INLINE I16 wide_products(Codes w, Four x) { DT_EACH(I16, _mm_madd_epi16(w.v[i], x.v)); }
static DT_INLINE I16 over_256(I16 a) { DT_EACH(I16, _mm_srai_epi32(a.v[i], 8)); }
static DT_INLINE Pairs add(Pairs p, Pairs q) { DT_EACH(Pairs, _mm_add_epi16(p.v[i], q.v[i])); }
static DT_INLINE I16 added(Pairs p) { DT_EACH(I16, _mm_madd_epi16(p.v[i], _mm_set1_epi16(1))); }
static DT_INLINE void hold(Pairs& p) { asm("" : "+x"(p.v[0]), "+x"(p.v[1]), "+x"(p.v[2]), "+x"(p.v[3])); }
static DT_INLINE void hold(Codes& w) { asm("" : "+x"(w.v[0]), "+x"(w.v[1]), "+x"(w.v[2]), "+x"(w.v[3])); }  // loaded once for all rows
#undef DT_EACH
#define DT_PAIRS 1
#else
#define DT_PAIRS 0
#endif

template <class F, int STEP = 0>
static DT_INLINE void unpack_codes(const char* codes, Codes* to) {
    if constexpr (dovetail::has_book<F>()) {
        Codes entries[dovetail::entries<F>()];
        entries_of<F>(codes, entries);
        unpack_choices<F>(entries, codes + 16 * dovetail::entries<F>(), to);
    } else if constexpr (STEP < STEPS) {
        to[STEP] = codes_of<F, STEP>(codes);
#if defined(DT_SSE)
        if constexpr (dovetail::signed_codes<F>()) to[STEPS + STEP] = odd(to[STEP]), to[STEP] = even(to[STEP]);
#endif
        unpack_codes<F, STEP + 1>(codes, to);
    }
}

#if defined(DT_VNNI)
constexpr int SIGNED_MIDDLE = 128;  // one side of a product is unsigned
#else
constexpr int SIGNED_MIDDLE = 0;
#endif
template <class F>
constexpr int middle_of() { return dovetail::signed_codes<F>() ? SIGNED_MIDDLE : F::MIDDLE; }
constexpr int power_of(int middle) { return middle <= 1 ? 0 : 1 + power_of(middle / 2); }

#if DT_PAIRS
// Whether sums of pairs may overflow 16 bits before the middle is subtracted: they wrap around, and the result is right again.
template <class F>
constexpr bool wraps() { return PAIR_SUMS > 0 && (F::MIDDLE == 64 || F::MIDDLE == 32); }
// How many steps fit into sums of pairs in 16 bits.
template <class F>
constexpr int together() {
    if (wraps<F>()) return F::MIDDLE == 64 ? 2 : 4;
    return dovetail::signed_codes<F>() ? 1 : F::MOST <= 15 ? 8 : F::MOST <= 31 ? 4 : F::MOST <= 63 ? 2 : 1;
}

// Steps from FIRST on; those before it that are still in 16 bits are in `pairs`.
template <class F, int FIRST, int STEP, int END, int R>
static DT_INLINE void add_steps_of(const char* codes, const char* x, Pairs (&pairs)[R], I16 (&sums)[R]) {
    if constexpr (STEP < END) {
        constexpr int TURN = (STEP - FIRST) % together<F>();
        const Codes w = codes_of<F, STEP>(codes);
        auto factors = [&] {
            if constexpr (dovetail::signed_codes<F>()) return as_signed(w);
            else return w;
        }();
#if defined(DT_SSE)
        if constexpr (R > 1) hold(factors);
#endif
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            Pairs found = products(factors, four(x + input_at(STEP, r, R)));
            if constexpr (TURN > 0) found = add(pairs[r], found);
            if constexpr (TURN < together<F>() - 1 && STEP < END - 1) {
                hold(found);
                pairs[r] = found;
                continue;
            }
#if !defined(DT_SSE)
            constexpr int64_t LESS = STEPS + 4 + STEP / 2;
            if constexpr (wraps<F>()) found = less(found, both(four(x + input_at(LESS, r, R)), four(x + input_at(F::MIDDLE == 64 ? LESS : LESS - 1, r, R))));
#endif
            sums[r] = pinned(STEP - TURN == FIRST ? added(found) : iadd(sums[r], added(found)));
        }
        add_steps_of<F, FIRST, STEP + 1, END, R>(codes, x, pairs, sums);
    }
}

#if defined(DT_SSE)
// Signed codes that are unpacked times inputs in 16 bits: two multiplications where 8 bits take three instructions on the same ports.
template <class F, int R, int STEP = 0>
static DT_INLINE void add_signed_steps(const char* codes, const char* x, I16 (&sums)[R]) {
    if constexpr (STEP < STEPS) {
        Codes w[2] = {load_codes(codes + 64 * STEP), load_codes(codes + 64 * (STEPS + STEP))};
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            hold(w[half]);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const I16 found = wide_products(w[half], four(x + input_at(2 * STEPS + STEPS * half + STEP, r, R)));
                sums[r] = pinned(STEP + half == 0 ? found : iadd(sums[r], found));
            }
        }
        add_signed_steps<F, R, STEP + 1>(codes, x, sums);
    } else {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r] = over_256(sums[r]);
    }
}
#endif
#else
#if defined(DT_VNNI)
static inline I16 add_signed(I16 sum, Codes w, const char* x) { return add_codes(sum, {_mm512_xor_si512(w.v, _mm512_set1_epi8((char)128))}, x); }
#elif defined(DT_NEON)
static inline I16 add_signed(I16 sum, Codes w, const char* x) { return add_codes(sum, w, x); }
#endif

template <class F, int STEP, int END, int R>
static DT_INLINE void add_steps_of(const char* codes, const char* x, I16 (&sums)[R]) {
    if constexpr (STEP < END) {
        const Codes w = codes_of<F, STEP>(codes);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            if constexpr (dovetail::signed_codes<F>()) sums[r] = add_signed(sums[r], w, x + 4 * (STEP * R + r));
            else sums[r] = add_codes(sums[r], w, x + 4 * (STEP * R + r));
        }
        add_steps_of<F, STEP + 1, END, R>(codes, x, sums);
    }
}
#endif

// The sums s of the steps FIRST .. END - 1 for R rows; less[r] is minus the sum of their inputs of a row.
template <class F, int FIRST, int END, int R>
static DT_INLINE void sums_of(const char* codes, const char* x, const I16 (&less)[R], I16 (&sums)[R]) {
    constexpr int MIDDLE = middle_of<F>();
#if DT_PAIRS
#if defined(DT_SSE)
    if constexpr (dovetail::signed_codes<F>() && is_unpacked<F>) add_signed_steps<F, R>(codes, x, sums);
    else
#endif
    {
        Pairs pairs[R];
        add_steps_of<F, FIRST, FIRST, END, R>(codes, x, pairs, sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
        if constexpr (MIDDLE > 0 && !wraps<F>()) sums[r] = iadd(sums[r], times_power(less[r], power_of(MIDDLE)));
#else
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[r] = MIDDLE > 0 ? times_power(less[r], power_of(MIDDLE)) : iset1(0);
    add_steps_of<F, FIRST, END, R>(codes, x, sums);
#endif
}

}  // namespace DT_NS
