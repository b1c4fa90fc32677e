// y = x W^T + bias over a W of 8, 4, 3 or 2 bits in groups of 64 inputs: W = (code - middle) scale + offset, as packing.h lays it out.
//
// A row of x is rounded to int8, each group of its inputs with a scale of its own, so that the sums within a group are exact integers; groups are added up in
// ascending order, two fma each. So a row has the same bytes whatever its neighbours, the threads and the instruction set are. Codes are widened in registers
// as they are used, for one tile of rows at a time.
#include "packing.h"

namespace DT_NS {

using dovetail::GROUP;

constexpr int GROUP_STEPS = GROUP / 4;  // a step is four inputs of sixteen outputs

// ---- 64 bytes: four codes of each of sixteen outputs

#if defined(DT_AVX512)
struct Codes { __m512i v; };
static inline Codes load_codes(const char* p) { return {_mm512_loadu_si512(p)}; }
template <int BY>
static inline Codes down(Codes a) { return {_mm512_srli_epi16(a.v, BY)}; }
template <int BY>
static inline Codes up(Codes a) { return {_mm512_slli_epi16(a.v, BY)}; }
static inline Codes only(Codes a, int mask) { return {_mm512_and_si512(a.v, _mm512_set1_epi8((char)mask))}; }
static inline Codes either(Codes a, Codes b) { return {_mm512_or_si512(a.v, b.v)}; }
#if defined(DT_VNNI)
static inline I16 add_codes(I16 sum, Codes w, const char* x) { return {_mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(*(const int32_t*)x))}; }
#else
static inline I16 add_codes(I16 sum, Codes w, const char* x) {  // codes below 128 only: pairs of products stay within 16 bits
    const __m512i pairs = _mm512_maddubs_epi16(w.v, _mm512_set1_epi32(*(const int32_t*)x));
    return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
#endif
#elif defined(DT_AVX2)
struct Codes { __m256i a, b; };
static inline Codes load_codes(const char* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))}; }
template <int BY>
static inline Codes down(Codes w) { return {_mm256_srli_epi16(w.a, BY), _mm256_srli_epi16(w.b, BY)}; }
template <int BY>
static inline Codes up(Codes w) { return {_mm256_slli_epi16(w.a, BY), _mm256_slli_epi16(w.b, BY)}; }
static inline Codes only(Codes w, int mask) {
    const __m256i m = _mm256_set1_epi8((char)mask);
    return {_mm256_and_si256(w.a, m), _mm256_and_si256(w.b, m)};
}
static inline Codes either(Codes w, Codes u) { return {_mm256_or_si256(w.a, u.a), _mm256_or_si256(w.b, u.b)}; }
static inline __m256i quads(__m256i w, __m256i x) { return _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)); }
static inline I16 add_codes(I16 sum, Codes w, const char* x) {
    const __m256i values = _mm256_set1_epi32(*(const int32_t*)x);
    return {_mm256_add_epi32(sum.a, quads(w.a, values)), _mm256_add_epi32(sum.b, quads(w.b, values))};
}
#elif defined(DT_SSE)
struct Codes { __m128i v[4]; };
#define DT_EACH(EXPRESSION) Codes r; _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) r.v[i] = (EXPRESSION); return r
static DT_INLINE Codes load_codes(const char* p) { DT_EACH(_mm_loadu_si128((const __m128i*)p + i)); }
template <int BY>
static DT_INLINE Codes down(Codes a) { DT_EACH(_mm_srli_epi16(a.v[i], BY)); }
template <int BY>
static DT_INLINE Codes up(Codes a) { DT_EACH(_mm_slli_epi16(a.v[i], BY)); }
static DT_INLINE Codes only(Codes a, int mask) { DT_EACH(_mm_and_si128(a.v[i], _mm_set1_epi8((char)mask))); }
static DT_INLINE Codes either(Codes a, Codes b) { DT_EACH(_mm_or_si128(a.v[i], b.v[i])); }
#undef DT_EACH
static DT_INLINE I16 add_codes(I16 sum, Codes w, const char* x) {
    const __m128i values = inputs4(x);
    for (int i = 0; i < 4; i++) sum.v[i] = _mm_add_epi32(sum.v[i], _mm_madd_epi16(_mm_maddubs_epi16(w.v[i], values), _mm_set1_epi16(1)));
    return sum;
}
#elif defined(DT_NEON)
struct Codes { uint8x16_t v[4]; };
#define DT_EACH(EXPRESSION) Codes r; for (int i = 0; i < 4; i++) r.v[i] = (EXPRESSION); return r
static inline Codes load_codes(const char* p) { DT_EACH(vld1q_u8((const uint8_t*)p + 16 * i)); }
template <int BY>
static inline Codes down(Codes a) { DT_EACH(vshlq_u8(a.v[i], vdupq_n_s8(-BY))); }
template <int BY>
static inline Codes up(Codes a) { DT_EACH(vshlq_u8(a.v[i], vdupq_n_s8(BY))); }
static inline Codes only(Codes a, int mask) { DT_EACH(vandq_u8(a.v[i], vdupq_n_u8((uint8_t)mask))); }
static inline Codes either(Codes a, Codes b) { DT_EACH(vorrq_u8(a.v[i], b.v[i])); }
#undef DT_EACH
static inline I16 add_codes(I16 sum, Codes w, const char* x) {  // codes below 128 only
    const int8x8_t values = vreinterpret_s8_s32(vdup_n_s32(*(const int32_t*)x));
    for (int i = 0; i < 4; i++) {
        const int8x16_t codes = vreinterpretq_s8_u8(w.v[i]);
        const int16x8_t low = vmull_s8(vget_low_s8(codes), values), high = vmull_s8(vget_high_s8(codes), values);
        sum.v[i] = vaddq_s32(sum.v[i], vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
    }
    return sum;
}
#else
struct Codes { uint8_t v[4 * LANES]; };
#define DT_EACH(EXPRESSION) Codes r; for (int i = 0; i < 4 * LANES; i++) r.v[i] = (uint8_t)(EXPRESSION); return r
static inline Codes load_codes(const char* p) { DT_EACH(p[i]); }
template <int BY>
static inline Codes down(Codes a) { DT_EACH(a.v[i] >> BY); }
template <int BY>
static inline Codes up(Codes a) { DT_EACH(a.v[i] << BY); }
static inline Codes only(Codes a, int mask) { DT_EACH(a.v[i] & mask); }
static inline Codes either(Codes a, Codes b) { DT_EACH(a.v[i] | b.v[i]); }
#undef DT_EACH
static inline I16 add_codes(I16 sum, Codes w, const char* x) {
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < 4; j++) sum.v[i] += (int)w.v[4 * i + j] * (int8_t)x[j];
    return sum;
}
#endif

// The codes of one step, of so many bits each, as one plane of a block has them.
template <int BITS, int STEP>
static inline Codes plane(const char* block) {
    constexpr int LOADS = dovetail::plane_bytes(BITS) / 64, SHIFT = STEP / LOADS * BITS;
    return only(down<SHIFT>(load_codes(block + 64 * (STEP % LOADS))), (1 << BITS) - 1);
}

// The same step of R rows added to their sums; x is [step][R] times four bytes.
template <int BITS, int STEP, int R>
static inline void add_step(const char* block, const char* x, I16 (&sums)[R]) {
    const char* values = x + 4 * STEP * R;
    if constexpr (BITS == 8) {
#if defined(DT_VNNI)
        const Codes w = load_codes(block + 64 * STEP);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r] = add_codes(sums[r], w, values + 4 * r);
#else
        const Codes w = load_codes(block + 64 * STEP), low = only(w, 15), high = only(down<4>(w), 15);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const I16 sixteenths = add_codes(iset1(0), high, values + 4 * r);
            const I16 twos = iadd(sixteenths, sixteenths), fours = iadd(twos, twos), eights = iadd(fours, fours);
            sums[r] = add_codes(iadd(sums[r], iadd(eights, eights)), low, values + 4 * r);
        }
#endif
    } else {
        Codes w;
        if constexpr (BITS == 3) w = either(plane<2, STEP>(block), up<2>(plane<1, STEP>(block + dovetail::plane_bytes(2))));
        else w = plane<BITS, STEP>(block);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r] = add_codes(sums[r], w, values + 4 * r);
    }
}

// All steps, those that lie in the same bytes one after the other.
template <int BITS, int R, int... INDEX>
static inline void add_steps(const char* block, const char* x, I16 (&sums)[R], std::integer_sequence<int, INDEX...>) {
    constexpr int TURNS = BITS == 3 ? 4 : 8 / BITS;
    (add_step<BITS, INDEX % TURNS * (GROUP_STEPS / TURNS) + INDEX / TURNS, R>(block, x, sums), ...);
}

// ---- packed x: for each tile and group the int8 values [step][row of the tile], then of each row the scale, the scale times the sum of the values, and
// -middle times that sum.

constexpr int64_t GROUP_VALUES = GROUP_STEPS + 3;  // of four bytes, for each row

// Tiles of rows; packed x has VALUES for each row and block.
template <int64_t VALUES>
struct TileCut {
    int64_t rows, tiles, blocks;
    int64_t row(int64_t tile) const { return tile * rows / tiles; }
    int64_t height(int64_t tile) const { return row(tile + 1) - row(tile); }
    int64_t at(int64_t tile, int64_t block) const { return 4 * VALUES * (blocks * row(tile) + block * height(tile)); }
};

static void pack_group(const float* x, int64_t count, char* packed, int64_t height, int64_t row, int middle) {
    float whole[GROUP] = {};
    if (count < GROUP) {  // zeros behind the last input
        memcpy(whole, x, count * sizeof(float));
        x = whole;
    }
    const RowScale scale = row_scale(x, GROUP);
    int32_t sum = 0;
    for (int s = 0; s < GROUP_STEPS; s++) {
        int8_t values[4];
        for (int j = 0; j < 4; j++) {
            values[j] = (int8_t)(int)(x[4 * s + j] * scale.to + dovetail::ROUNDER - dovetail::ROUNDER);
            sum += values[j];
        }
        memcpy(packed + 4 * (s * height + row), values, 4);
    }
    const float about[2] = {scale.from, scale.from * (float)sum};
    const int32_t start = -middle * sum;
    memcpy(packed + 4 * (GROUP_STEPS * height + row), about, 4);
    memcpy(packed + 4 * ((GROUP_STEPS + 1) * height + row), about + 1, 4);
    memcpy(packed + 4 * ((GROUP_STEPS + 2) * height + row), &start, 4);
}

// ---- one tile: R rows, sixteen outputs, all groups

struct TileRun {
    const char* x;       // packed, of the tile
    const char* packed;  // of the sixteen outputs
    int64_t blocks;
    float* y;            // of the tile's first row and the first output
    int64_t y_stride, count;  // outputs
    const float* bias;   // of them, or null
    bool ahead;          // the memory fetches what comes next

    DT_INLINE void finish(int64_t row, F16 sums) const { put(y + row * y_stride, bias == nullptr ? sums : add(sums, take(bias, count)), count); }
};

constexpr int64_t GROUPS_AHEAD = 4096;  // bytes from a block to its prefetch

template <int BITS, int R>
static void group_tile(const TileRun& run) {
    constexpr int64_t BYTES = dovetail::block_bytes(BITS);
    const char* x = run.x;
    const char* block = run.packed;
    F16 y[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) y[r] = zero();
    for (int64_t g = 0; g < run.blocks; g++, block += BYTES, x += 4 * GROUP_VALUES * R) {
        if (run.ahead)
            for (int64_t line = 0; line < BYTES; line += 64) __builtin_prefetch(block + GROUPS_AHEAD + line, 0, 3);
        const char* about = x + 4 * GROUP_STEPS * R;
        I16 sums[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r] = iset1(*(const int32_t*)(about + 4 * (2 * R + r)));
        add_steps<BITS, R>(block + 64, x, sums, std::make_integer_sequence<int, GROUP_STEPS>{});
        const F16 scale = load_half((const uint16_t*)block), offset = load_half((const uint16_t*)(block + 32));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            y[r] = fma(mul(to_float(sums[r]), scale), set1(*(const float*)(about + 4 * r)), y[r]);
            y[r] = fma(offset, set1(*(const float*)(about + 4 * (R + r))), y[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) run.finish(r, y[r]);
}

#if defined(DT_AVX512)
constexpr int GROUP_ROWS = 8;
#elif defined(DT_AVX2) || defined(DT_NEON) || defined(DT_SSE)
constexpr int GROUP_ROWS = 4;
#else
constexpr int GROUP_ROWS = 1;  // without registers to keep more in; the code of several would take a minute to compile
#endif

template <int BITS, int R = GROUP_ROWS>
static void run_group_tile(int64_t rows, const TileRun& run) {
    if constexpr (R > 0) {
        if (rows == R) group_tile<BITS, R>(run);
        else run_group_tile<BITS, R - 1>(rows, run);
    }
}

// ---- the whole

template <int BITS>
static void group_chunk(const Matrix& m, const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows) {
    const TileCut<GROUP_VALUES> cut{rows, (rows + GROUP_ROWS - 1) / GROUP_ROWS, dovetail::groups_of(m.k)};
    char* const packed = (char*)dovetail::scratch(0, cut.at(cut.tiles, 0));
    auto pack = [&](int part, int parts) {
        for (int64_t t = 0; t < cut.tiles; t++)
            for (int64_t g = cut.blocks * part / parts; g < cut.blocks * (part + 1) / parts; g++)
                for (int64_t r = 0; r < cut.height(t); r++)
                    pack_group(x + (cut.row(t) + r) * x_stride + g * GROUP, m.k - g * GROUP < GROUP ? m.k - g * GROUP : GROUP, packed + cut.at(t, g), cut.height(t), r, 1 << (BITS - 1));
    };
    if (rows * m.k < SERIAL_VALUES) pack(0, 1);
    else dovetail::parallel(pack);
    const int64_t vectors = dovetail::padded(m.n) / LANES;
    in_pieces(vectors, [&](int64_t from, int64_t to) {
        for (int64_t v = from; v < to; v++) {
            const int64_t column = v * LANES;
            const char* blocks = dovetail::blocks_at(m, v);
            for (int64_t t = 0; t < cut.tiles; t++)
                run_group_tile<BITS>(cut.height(t), {packed + cut.at(t, 0), blocks, cut.blocks, y + cut.row(t) * y_stride + column, y_stride, m.n - column,
                                                     m.bias == nullptr ? nullptr : m.bias + column, t == 0});
        }
    });
}

template <int BITS>
static void group_chunks(const Matrix& m, const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows) {
    for (int64_t from = 0; from < rows; from += CHUNK)
        group_chunk<BITS>(m, x + from * x_stride, x_stride, y + from * y_stride, y_stride, rows - from < CHUNK ? rows - from : CHUNK);
}

}  // namespace DT_NS
