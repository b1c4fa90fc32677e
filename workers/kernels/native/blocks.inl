// y = x W^T + bias over a W whose weights are the blocks of a GGUF file (blocks.h), in one function for all formats.
//
// BLOCKS: a row of x is rounded to int8, each 32 of its inputs with a scale D of their own; X is the sum of 32 of these integers, and E = D X. The sum s of their
// products with codes less the middle is an exact integer, whatever adds it up. Then, blocks in ascending order from y = 0, w being a scale and m what is added:
//   one scale for 32 inputs:  y = fma(s w, D, y), and with minima  y = fma(m, E, y)
//   one for each 16:          y = fma(fma(s1, w1, s0 w0), D, y), and with minima  y = fma(m0, E0, y), y = fma(m1, E1, y)
// EXACT_BLOCKS: weights are computed in fp32, (code - middle) w, plus m, a few at a time, and multiplied as a matrix of FP32 is, with the same bytes.
//
// So a row has the same bytes whatever its neighbours, the threads and the instruction set are.
#include "blocks.h"

namespace DT_NS {

// Packed x: numbers of four bytes of a row and block, and the byte where a step of a row of a tile begins.
#if defined(DT_SSE)
constexpr int PAIR_SUMS = 0;
constexpr int64_t BLOCK_VALUES = 4 * dovetail::STEPS;
constexpr int64_t input_at(int64_t step, int64_t row, int64_t) { return 4 * (step + BLOCK_VALUES * row); }
#else
#if defined(DT_AVX2) || (defined(DT_AVX512) && !defined(DT_VNNI))
constexpr int PAIR_SUMS = dovetail::STEPS / 2;
#else
constexpr int PAIR_SUMS = 0;
#endif
constexpr int64_t BLOCK_VALUES = dovetail::STEPS + 4 + PAIR_SUMS;
constexpr int64_t input_at(int64_t step, int64_t row, int64_t rows) { return 4 * (step * rows + row); }
#endif

}  // namespace DT_NS

#if defined(DT_AVX512) || defined(DT_AVX2) || defined(DT_NEON) || defined(DT_SSE)
#define DT_LANES 1
#include "block_sums.inl"
#else
#define DT_LANES 0
#endif

namespace DT_NS {

using dovetail::STEPS;
using dovetail::WIDTH;

#if DT_LANES

// ---- the scales of a block, once for 32 inputs or for each 16 of them

struct Scale {
    F16 w[2], m[2];
};

template <class F>
static DT_INLINE Scale scale_of(const char* p, F16 d, F16 dmin) {
    using namespace dovetail;
    Scale s;
    if constexpr (F::SCALES == HALF) s.w[0] = load_half((const uint16_t*)p);
    else if constexpr (F::SCALES == HALF_AND_MORE) s.w[0] = load_half((const uint16_t*)p), s.m[0] = load_half((const uint16_t*)(p + 32));
    else if constexpr (F::SCALES == POWER) s.w[0] = mul(as_float(shift_left_23(iadd(bytes_of(p), iset1(1)))), set1(0.25f));
    else if constexpr (F::SCALES == BYTE) s.w[0] = mul(d, to_float(signed_bytes_of(p)));
    else if constexpr (F::SCALES == BYTE_AND_LESS) {
        s.w[0] = mul(d, to_float(bytes_of(p)));
        s.m[0] = sub(zero(), mul(dmin, to_float(bytes_of(p + 16))));
    } else if constexpr (F::SCALES == BYTES) {
        s.w[0] = mul(d, to_float(signed_bytes_of(p)));
        s.w[1] = mul(d, to_float(signed_bytes_of(p + 16)));
    } else if constexpr (in_nibbles(F::SCALES))
        for (int i = 0; i <= by_sixteens(F::SCALES); i++) s.w[i] = mul(d, add(to_float(nibbles_of(p + 8 * i)), set1(0.5f)));
    else
        for (int i = 0; i < 2; i++) {
            s.w[i] = mul(d, to_float(bytes_of(p + 16 * i)));
            s.m[i] = sub(zero(), mul(dmin, to_float(bytes_of(p + 32 + 16 * i))));
        }
    return s;
}
template <class F>
constexpr bool adds() { return dovetail::with_minima(F::SCALES) || F::SCALES == dovetail::HALF_AND_MORE; }

// Goes from block to block of a vector of outputs.
template <class F>
struct Walker {
    const char* at;
    F16 d, dmin;

    explicit Walker(const char* first) : at(first), d(zero()), dmin(zero()) {}
    // The block `b` is begun: its scales stand at `at`.
    inline void begin(int64_t b) {
        if constexpr (dovetail::scaled_twice(F::SCALES)) {
            if (b % dovetail::SUPER != 0) return;
            d = load_half((const uint16_t*)at);
            if constexpr (dovetail::in_nibbles(F::SCALES)) d = mul(d, set1(dovetail::unit_of<F>()));
            if constexpr (dovetail::with_minima(F::SCALES)) dmin = load_half((const uint16_t*)(at + 32));
            at += dovetail::super_bytes<F>();
        }
    }
    const char* codes() const { return at + dovetail::scales_bytes(F::SCALES); }
    void end() { at += dovetail::part_block_bytes<F>(); }
};

#endif

// ---- packed x: for each tile and block the int8 values [step][row of the tile], then D, E, -X, and -X of the first 16 for each row. Where products are summed in
// 16 bits also 32 times the sum of the inputs 0 and 1 of each two steps, and of the inputs 2 and 3, in 16 bits (see `wraps`). Without fused products
// each row has all of this to itself, then D and E as doubles, D negative where sums might not be normal floats, and the values in 16 bits: 0 and 2 of each
// step, and 1 and 3.

constexpr int64_t BLOCKS_AHEAD = 6144;  // bytes from a block to its prefetch

#if defined(DT_AVX512)
constexpr int BLOCK_ROWS = 8;
#elif defined(DT_SSE)
constexpr int BLOCK_ROWS = 16;
#else
constexpr int BLOCK_ROWS = DT_LANES ? 4 : 1;
#endif

using BlockCut = TileCut<BLOCK_VALUES>;

static inline BlockCut block_cut(const Matrix& m, int64_t rows) { return {rows, (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, m.k / WIDTH}; }
static inline int64_t block_x_bytes(const Matrix& m, int64_t rows) { return 4 * BLOCK_VALUES * (m.k / WIDTH) * rows; }

static void pack_block(const float* x, char* packed, int64_t height, int64_t row) {
    const RowScale scale = row_scale(x, WIDTH);
    int32_t values[WIDTH], half = 0, whole = 0;
    int8_t bytes[WIDTH];
    for (int i = 0; i < WIDTH; i++) values[i] = (int32_t)(x[i] * scale.to + dovetail::ROUNDER - dovetail::ROUNDER);
    for (int i = 0; i < WIDTH; i++) bytes[i] = (int8_t)values[i];
    for (int i = 0; i < WIDTH / 2; i++) half -= values[i];
    for (int i = 0; i < WIDTH; i++) whole -= values[i];
    for (int s = 0; s < STEPS; s++) memcpy(packed + 4 * (s * height + row), bytes + 4 * s, 4);
    const float about[2] = {scale.from, scale.from * (float)-whole};
    memcpy(packed + 4 * (STEPS * height + row), about, 4);
    memcpy(packed + 4 * ((STEPS + 1) * height + row), about + 1, 4);
    memcpy(packed + 4 * ((STEPS + 2) * height + row), &whole, 4);
    memcpy(packed + 4 * ((STEPS + 3) * height + row), &half, 4);
    for (int i = 0; i < PAIR_SUMS; i++) {
        const int32_t* const v = values + 8 * i;
        const int16_t pairs[2] = {(int16_t)(32 * (v[0] + v[1] + v[4] + v[5])), (int16_t)(32 * (v[2] + v[3] + v[6] + v[7]))};
        memcpy(packed + 4 * ((STEPS + 4 + i) * height + row), pairs, 4);
    }
#if defined(DT_SSE)
    // All numbers of a sum are multiples of 2^-27, as scales are, times the last bit of D: zero, or normal. No weight is larger than 2^24.
    const bool normal = about[0] == 0 || (about[0] >= 0x1p-76f && about[0] <= 0x1p60f);
    const double wide[2] = {normal ? about[0] : -__builtin_fabs(about[0]), about[1]};
    memcpy(packed + 4 * (STEPS + 4), wide, sizeof wide);
    int16_t pairs[2][WIDTH / 2];
    for (int i = 0; i < WIDTH; i++) pairs[i % 2][i / 2] = (int16_t)values[i];
    memcpy(packed + 4 * (STEPS + 8), pairs, sizeof pairs);
#endif
}

// The blocks first .. end of all rows.
static void pack_blocks_of(const BlockCut& cut, const float* x, int64_t x_stride, int64_t first, int64_t end, char* packed) {
    for (int64_t t = 0; t < cut.tiles; t++)
        for (int64_t r = 0; r < cut.height(t); r++)
            for (int64_t b = first; b < end; b++) {
                const float* const from = x + (cut.row(t) + r) * x_stride + b * WIDTH;
#if defined(DT_SSE)
                pack_block(from, packed + cut.at(t, b) + 4 * BLOCK_VALUES * r, 1, 0);
#else
                pack_block(from, packed + cut.at(t, b), cut.height(t), r);
#endif
            }
}

#if DT_LANES

// ---- one tile: R rows, sixteen outputs, all blocks

template <class F, int R>
static DT_INLINE void add_block(const char* codes, const Scale& scale, const char* x, F16 (&y)[R]) {
    const char* const about = x + 4 * STEPS * R;
    const float* const factors = (const float*)about;
    const int32_t* const less = (const int32_t*)(about + 8 * R);
    I16 whole[R], sums[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) whole[r] = iset1(less[r]);
    if constexpr (!dovetail::by_sixteens(F::SCALES)) {
        sums_of<F, 0, STEPS, R>(codes, x, whole, sums);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            y[r] = fma(mul(to_float(sums[r]), scale.w[0]), set1(factors[r]), y[r]);
            if constexpr (adds<F>()) y[r] = fma(scale.m[0], set1(factors[R + r]), y[r]);
        }
    } else {
        I16 first[R], second[R];
        F16 t[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) first[r] = iset1(less[R + r]), second[r] = iset1(less[r] - less[R + r]);
        sums_of<F, 0, STEPS / 2, R>(codes, x, first, sums);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) t[r] = mul(to_float(sums[r]), scale.w[0]);
        sums_of<F, STEPS / 2, STEPS, R>(codes, x, second, sums);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            y[r] = fma(fma(to_float(sums[r]), scale.w[1], t[r]), set1(factors[r]), y[r]);
            if constexpr (adds<F>()) {
                y[r] = fma(scale.m[0], set1(factors[r] * (float)-less[R + r]), y[r]);
                y[r] = fma(scale.m[1], set1(factors[r] * (float)(less[R + r] - less[r])), y[r]);
            }
        }
    }
}

#if defined(DT_SSE)

// Without fused products: sums are doubles that hold floats, so nothing is converted between blocks. The integers of all rows come first, then their
// products, since the processor has few of either under way at a time.

// A row's sums of 32 inputs times their scale; where 16 share a scale, scaled sums of the first 16 and plain sums of the others.
template <class F, int R>
static DT_INLINE void scaled_sums(const char* codes, const Scale& scale, const char* x, F16 (*to)[2]) {
    constexpr bool HALVES = dovetail::by_sixteens(F::SCALES);
    I16 less[R], rest[R], sums[R];
    for (int r = 0; r < R; r++) {
        const int32_t* const own = (const int32_t*)(x + 4 * (BLOCK_VALUES * r + STEPS + 2));
        less[r] = iset1(own[HALVES]), rest[r] = iset1(own[0] - own[1]);
    }
    sums_of<F, 0, HALVES ? STEPS / 2 : STEPS, R>(codes, x, less, sums);
    for (int r = 0; r < R; r++) to[r][0] = mul(to_float(sums[r]), scale.w[0]);
    if constexpr (HALVES) {
        sums_of<F, STEPS / 2, STEPS, R>(codes, x, rest, sums);
        for (int r = 0; r < R; r++) to[r][1] = to_float(sums[r]);
    }
}

// Four registers of sums at a time, or what half as many registers hold.
#if defined(DT_AVX)
constexpr int AT_ONCE = 4;
#else
constexpr int AT_ONCE = 2;
#endif
struct Few { Doubles v[AT_ONCE]; };

// What stands for a float: itself, 2^-29 of it, which saves a product, or itself where a, b and c made 2^-29 of it.
enum Size { PLAIN, SMALL, GROWN };

// a b + c, each rounded to a float, or `doubt` where that may be wrong.
template <Size SIZE, class A, class B>
static DT_INLINE Few fused(const A& a, const B& b, Few c, Doubt& doubt) {
    constexpr double LARGE = SIZE == GROWN ? 0x1p58 : 0x1p29;
#pragma GCC unroll 4
    for (int i = 0; i < AT_ONCE; i++) c.v[i] = plus(times(a(i), b(i)), c.v[i]);
#pragma GCC unroll 2
    for (int i = 0; i < AT_ONCE; i += 2) doubt = either(doubt, half_way(c.v[i], c.v[i + 1]));
    // A difference from 2^29 times as much has no bits below a float's, and is rounded to the even one of two.
#pragma GCC unroll 4
    for (int i = 0; i < AT_ONCE; i++)
        c.v[i] = SIZE == SMALL ? minus(c.v[i], times(c.v[i], all_of(1 - 0x1p-29))) : minus(times(c.v[i], all_of(LARGE)), times(c.v[i], all_of(LARGE - LARGE * 0x1p-29)));
    return c;
}

// The scales of a block for what follows: w 2^29 times as large where 16 inputs share it, and m in doubles, 2^-29 of it.
template <class F>
struct WideScale {
    static constexpr bool HALVES = dovetail::by_sixteens(F::SCALES), MINIMA = dovetail::with_minima(F::SCALES);
    F16 d;
    Doubles dmin[4], more[2][4];
    Scale scale;

    DT_INLINE void take(const Walker<F>& walker, int64_t b) {
        if (dovetail::scaled_twice(F::SCALES) && b % dovetail::SUPER == 0) {
            d = HALVES ? mul(walker.d, set1(0x1p29f)) : walker.d;
            for (int i = 0; MINIMA && i < 4; i++) dmin[i] = times(doubles(walker.dmin.v[i]), all_of(-0x1p-29));
        }
        scale = scale_of<F>(walker.at, d, walker.dmin);
        for (int half = 0; adds<F>() && half <= HALVES; half++) {
            const I16 minima = MINIMA ? bytes_of(walker.at + (HALVES ? 32 : 16) + 16 * half) : I16{};
            for (int i = 0; i < 4; i++) more[half][i] = MINIMA ? times(doubles(minima.v[i]), dmin[i]) : times(doubles(scale.m[half].v[i]), all_of(0x1p-29));
        }
    }
};

// The products of a row. Returns false and leaves y unchanged where one needs the slower exact sum.
template <class F>
static DT_INLINE bool add_products(const F16 (&sums)[2], const F16 (&w)[2], const Doubles (&more)[2][4], const char* x, Doubles (&y)[4]) {
    constexpr bool HALVES = dovetail::by_sixteens(F::SCALES);
    const float* const factors = (const float*)(x + 4 * STEPS);
    const int32_t* const less = (const int32_t*)(factors + 2);
    const double* const wide = (const double*)(factors + 4);
    Few found[4 / AT_ONCE];
    Doubt doubt{}, exact{};  // scales are at most 2^19 times the last bit of d, and sums 2^17: a double holds the sum of two products, and halves are no doubt
#pragma GCC unroll 2
    for (int first = 0; first < 4; first += AT_ONCE) {
        Few p, s;
#pragma GCC unroll 4
        for (int i = 0; i < AT_ONCE; i++) p.v[i] = doubles(sums[0].v[first + i]), s.v[i] = y[first + i];
        if constexpr (HALVES) p = fused<SMALL>([&](int i) { return doubles(sums[1].v[first + i]); }, [&](int i) { return doubles(w[1].v[first + i]); }, p, exact);
        s = fused<adds<F>() ? SMALL : PLAIN>([&](int i) { return p.v[i]; }, [&](int) { return all_of(wide[0]); }, s, doubt);
        const float inputs[2] = {(float)-less[1], (float)(less[1] - less[0])};
        const double first_factor = HALVES ? factors[0] * inputs[0] : wide[1];
        if constexpr (adds<F>()) s = fused<GROWN>([&](int i) { return more[0][first + i]; }, [&](int) { return all_of(first_factor); }, s, doubt);
        if constexpr (adds<F>() && HALVES)
            s = fused<PLAIN>([&](int i) { return more[1][first + i]; }, [&](int) { return all_of(0x1p29 * (factors[0] * inputs[1])); }, s, doubt);
        found[first / AT_ONCE] = s;
    }
    if (__builtin_expect(any(doubt) || ((const int32_t*)wide)[1] < 0, 0)) return false;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) y[i] = found[i / AT_ONCE].v[i % AT_ONCE];
    return true;
}

// Returns whether add_products may go on: it makes no number of an infinite one, and a positive zero of a negative one.
template <class F, class Own>
static __attribute__((noinline)) bool add_block_exactly(const char* codes, const Walker<F>& walker, const char* x, Doubles (&y)[4]) {
    F16 own[1];
    for (int i = 0; i < 4; i++) own[0].v[i] = floats(y[i]);
    add_block<Own, 1>(codes, scale_of<F>(walker.at, walker.d, walker.dmin), x, own);
    uint32_t bits[LANES];
    memcpy(bits, own, sizeof bits);
    bool usual = true;
    for (int i = 0; i < 4; i++) y[i] = doubles(own[0].v[i]);
    for (uint32_t number : bits) usual &= number != 1u << 31 && number << 1 != 0xffu << 24;
    return usual;
}

// MOST: one row, whose codes are used as they are unpacked unless they are indices, or up to BLOCK_ROWS.
template <class F, int MOST>
static void row_tile(int64_t rows, const TileRun& run) {
    constexpr int64_t BYTES = dovetail::part_block_bytes<F>();
    constexpr bool UNPACKS = MOST > 1 || dovetail::has_book<F>();
    using Own = std::conditional_t<UNPACKS, Unpacked<F>, F>;
    Walker<F> walker(run.packed);
    WideScale<F> scales;
    const char* x = run.x;
    Doubles y[MOST][4];
    F16 sums[MOST][2];
    bool finite[MOST];
    for (int64_t r = 0; r < rows; r++) finite[r] = true;
    for (int64_t r = 0; r < rows; r++)
        for (int i = 0; i < 4; i++) y[r][i] = all_of(0);
    for (int64_t b = 0; b < run.blocks; b++, x += 4 * BLOCK_VALUES * rows) {
        walker.begin(b);
        if (run.ahead)
            for (int64_t line = 0; line < BYTES; line += 64) __builtin_prefetch(walker.at + BLOCKS_AHEAD + line, 0, 3);
        scales.take(walker, b);
        const Scale& scale = scales.scale;
        const bool wild = F::SCALES == dovetail::POWER && (any_less(scale.w[0], set1(0x1p-24f)) || any_less(set1(0x1p24f), scale.w[0]));
        const char* codes = walker.codes();
        Codes unpacked[2 * STEPS];
        if constexpr (UNPACKS) {
            unpack_codes<F>(codes, unpacked);
            codes = (const char*)unpacked;
            asm("" : "+r"(codes) : : "memory");  // reloaded from memory: there are more codes than registers
        }
        const auto row = [&](int64_t r) { return x + 4 * BLOCK_VALUES * r; };
        int64_t summed = 0;
        if constexpr (MOST > 1)
            for (; summed + 2 <= rows; summed += 2) scaled_sums<Own, 2>(codes, scale, row(summed), sums + summed);
        if (summed < rows) scaled_sums<Own, 1>(codes, scale, row(summed), sums + summed);
        for (int64_t r = 0; r < rows; r++)
            if (wild || !finite[r] || !add_products<Own>(sums[r], scale.w, scales.more, row(r), y[r])) finite[r] = add_block_exactly<F, Own>(codes, walker, row(r), y[r]);
        walker.end();
    }
    for (int64_t r = 0; r < rows; r++) {
        F16 own;
        for (int i = 0; i < 4; i++) own.v[i] = floats(y[r][i]);
        run.finish(r, own);
    }
}

template <class F>
static void run_block_tile(int64_t rows, const TileRun& run) {
    if (rows == 1) row_tile<F, 1>(1, run);
    else row_tile<F, BLOCK_ROWS>(rows, run);
}

#else

template <class F, int R>
static void block_tile(const TileRun& run) {
    constexpr int64_t BYTES = dovetail::part_block_bytes<F>();
    Walker<F> walker(run.packed);
    const char* x = run.x;
    F16 y[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) y[r] = zero();
    for (int64_t b = 0; b < run.blocks; b++, x += 4 * BLOCK_VALUES * R) {
        walker.begin(b);
        if (run.ahead)
            for (int64_t line = 0; line < BYTES; line += 64) __builtin_prefetch(walker.at + BLOCKS_AHEAD + line, 0, 3);
        add_block<F, R>(walker.codes(), scale_of<F>(walker.at, walker.d, walker.dmin), x, y);
        walker.end();
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) run.finish(r, y[r]);
}

template <class F, int R = BLOCK_ROWS>
static void run_block_tile(int64_t rows, const TileRun& run) {
    if constexpr (R > 0) {
        if (rows == R) block_tile<F, R>(run);
        else run_block_tile<F, R - 1>(rows, run);
    }
}

// ---- blocks that several tiles go over: their codes are unpacked once, a few blocks at a time, which stay in the L1 cache meanwhile

struct UnpackedBlock {
    Scale scale;
    Codes codes[STEPS];
};
constexpr int64_t UNPACKED = 16;  // blocks at a time

// The tiles from which on this is faster, for formats whose scales have scales; 0: it never is. Codebook indices are always unpacked like this. (Zen 4, weights in the cache, at 64 rows: with AVX2 Q4_K 0.93 of
// the time and Q6_K 0.84, with AVX-512 0.95; with VNNI it gains nothing, and neither do the codes of Q4_0 and Q8_0.)
#if defined(DT_AVX2)
constexpr int64_t SHARING = 4;
#elif defined(DT_AVX512) && !defined(DT_VNNI)
constexpr int64_t SHARING = 8;
#else
constexpr int64_t SHARING = 0;
#endif
template <class F>
constexpr int64_t sharing() { return dovetail::has_book<F>() ? 1 : dovetail::scaled_twice(F::SCALES) ? SHARING : 0; }

template <class F, int R = BLOCK_ROWS>
static void add_unpacked(int64_t rows, const UnpackedBlock* blocks, int64_t count, const char* x, float* sums) {
    if constexpr (R > 0) {
        if (rows != R) return add_unpacked<F, R - 1>(rows, blocks, count, x, sums);
        F16 y[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) y[r] = load(sums + r * LANES);
        for (int64_t b = 0; b < count; b++) add_block<Unpacked<F>, R>((const char*)blocks[b].codes, blocks[b].scale, x + 4 * BLOCK_VALUES * R * b, y);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) store(sums + r * LANES, y[r]);
    }
}

// All tiles of sixteen outputs; sums [rows][sixteen].
template <class F>
static void shared_tiles(const BlockCut& cut, const char* x, const char* packed, float* sums) {
    UnpackedBlock unpacked[UNPACKED];
    Walker<F> walker(packed);
    for (int64_t r = 0; r < cut.rows; r++) store(sums + r * LANES, zero());
    for (int64_t from = 0, b = 0; b < cut.blocks; from = b) {
        for (; b < cut.blocks && b < from + UNPACKED; b++) {
            walker.begin(b);
            for (int64_t line = 0; line < dovetail::part_block_bytes<F>(); line += 64) __builtin_prefetch(walker.at + BLOCKS_AHEAD + line, 0, 3);
            unpacked[b - from].scale = scale_of<F>(walker.at, walker.d, walker.dmin);
            unpack_codes<F>(walker.codes(), unpacked[b - from].codes);
            walker.end();
        }
        for (int64_t t = 0; t < cut.tiles; t++) add_unpacked<F>(cut.height(t), unpacked, b - from, x + cut.at(t, from), sums + cut.row(t) * LANES);
    }
}

#endif

// ---- weights in fp32

template <class F, int STEP, int J>
static DT_INLINE void widen_input(Codes w, const Scale& scale, float* out, int64_t stride) {
    constexpr int HALF = dovetail::by_sixteens(F::SCALES) ? STEP / (STEPS / 2) : 0;
    const I16 code = dovetail::signed_codes<F>() ? signed_input_of<J>(w) : iadd(input_of<J>(w), iset1(-F::MIDDLE));
    F16 weight = mul(to_float(code), scale.w[HALF]);
    if constexpr (adds<F>()) weight = add(weight, scale.m[HALF]);
    store(out + (4 * STEP + J) * stride, weight);
}

template <class F, int STEP = 0>
static DT_INLINE void widen_steps(const char* codes, const Scale& scale, float* out, int64_t stride) {
    if constexpr (STEP < STEPS) {
        const Codes w = codes_of<F, STEP>(codes);
        widen_input<F, STEP, 0>(w, scale, out, stride);
        widen_input<F, STEP, 1>(w, scale, out, stride);
        widen_input<F, STEP, 2>(w, scale, out, stride);
        widen_input<F, STEP, 3>(w, scale, out, stride);
        widen_steps<F, STEP + 1>(codes, scale, out, stride);
    }
}

// The weights of `count` blocks from `first` on, out [32 count] of sixteen outputs, `stride` floats apart.
template <class F>
static void widen_blocks(Walker<F>& walker, int64_t first, int64_t count, float* out, int64_t stride) {
    for (int64_t b = first; b < first + count; b++, out += WIDTH * stride) {
        walker.begin(b);
        for (int64_t line = 0; line < dovetail::part_block_bytes<F>(); line += 64) __builtin_prefetch(walker.at + BLOCKS_AHEAD + line, 0, 3);
        const Scale scale = scale_of<F>(walker.at, walker.d, walker.dmin);
        if constexpr (dovetail::has_book<F>()) {
            Codes own[STEPS];
            unpack_codes<F>(walker.codes(), own);
            widen_steps<Unpacked<F>>((const char*)own, scale, out, stride);
        } else widen_steps<F>(walker.codes(), scale, out, stride);
        walker.end();
    }
}

#endif

// ---- the columns of one thread

struct BlockPass {
    const Matrix& matrix;
    int64_t rows;
    const char* x;  // packed: as `BlockCut` says, or of EXACT_BLOCKS as `Cut` does, and as it is where there are no lanes
    float* y;
    int64_t y_stride;
};

#if DT_LANES

// The vectors first .. end of a part.
template <class F>
static void int8_columns(const BlockPass& pass, const dovetail::Part& part, int64_t first, int64_t end) {
    const BlockCut cut = block_cut(pass.matrix, pass.rows);
    const char* packed = (const char*)pass.matrix.packed + part.offset + first * dovetail::vector_bytes_of<F>(cut.blocks);
    for (int64_t v = first; v < end; v++, packed += dovetail::vector_bytes_of<F>(cut.blocks)) {
        const int64_t column = part.first + v * LANES, left = part.count - v * LANES;
        const float* const bias = pass.matrix.bias == nullptr ? nullptr : pass.matrix.bias + column;
        TileRun run = {pass.x, packed, cut.blocks, pass.y + column, pass.y_stride, left, bias, true};
#if !defined(DT_SSE)
        if constexpr (sharing<F>() > 0)
            if (cut.tiles >= sharing<F>()) {
                alignas(64) float sums[CHUNK * LANES];
                shared_tiles<F>(cut, pass.x, packed, sums);
                for (int64_t r = 0; r < pass.rows; r++) run.finish(r, load(sums + r * LANES));
                continue;
            }
        if constexpr (sharing<F>() != 1)
#endif
            for (int64_t t = 0; t < cut.tiles; t++, run.ahead = false) {
                run.x = pass.x + cut.at(t, 0), run.y = pass.y + cut.row(t) * pass.y_stride + column;
                run_block_tile<F>(cut.height(t), run);
            }
    }
}

// Up to three of them at a time, in pieces that stay in the L1 cache while every tile goes over them.
template <class F>
static void exact_columns(const BlockPass& pass, const dovetail::Part& part, int64_t first, int64_t end) {
    alignas(64) float sums[CHUNK * PANEL], widened[BLOCK * PANEL];
    const Cut cut = cut_of<dovetail::FP32>(pass.matrix, pass.rows);
    const int64_t bytes = dovetail::vector_bytes_of<F>(pass.matrix.k / WIDTH);
    const char* const packed = (const char*)pass.matrix.packed + part.offset;
    const bool wide = cut.height(cut.tiles - 1) <= Step<dovetail::FP32>::WIDE_ROWS;
    for (int64_t v = first; v < end;) {
        const int64_t vectors = wide && end - v >= 3 ? 3 : 1;
        Walker<F> walkers[3] = {Walker<F>(packed + v * bytes), Walker<F>(packed + (v + 1) * bytes), Walker<F>(packed + (v + 2) * bytes)};
        for (int64_t block = 0; block < cut.steps; block += BLOCK) {
            for (int64_t c = 0; c < vectors; c++) widen_blocks<F>(walkers[c], block / WIDTH, cut.length(block) / WIDTH, widened + c * LANES, vectors * LANES);
            for (int64_t t = 0; t < cut.tiles; t++)
                tile_of<dovetail::FP32>(cut.height(t), vectors == 3)({pass.x + 4 * cut.at(block, t), (const char*)widened, vectors * 4 * LANES, cut.length(block),
                                                                      sums + cut.row(t) * PANEL, block == 0, (const char*)widened, 0});
        }
        const Matrix own{dovetail::FP32, part.count, pass.matrix.k, 0, nullptr, nullptr, pass.matrix.bias == nullptr ? nullptr : pass.matrix.bias + part.first};
        finish<dovetail::FP32>({own, cut, nullptr, nullptr, pass.y + part.first, pass.y_stride}, v * LANES, vectors * LANES, sums);
        v += vectors;
    }
}

static void part_columns(const BlockPass& pass, const dovetail::Part& part, int64_t first, int64_t end) {
    dovetail::with_format(part.type, [&](auto format) {
        if (pass.matrix.kind == dovetail::BLOCKS) int8_columns<decltype(format)>(pass, part, first, end);
        else exact_columns<decltype(format)>(pass, part, first, end);
    });
}

#else  // a block after the other as it is written above

static float add_rounded(const dovetail::Block& w, const char* x, float y) {
    float factors[2];  // D and E
    int32_t sums[2] = {0, 0}, inputs[2] = {0, 0};
    memcpy(factors, x + WIDTH, sizeof factors);
    for (int i = 0; i < WIDTH; i++) {
        const int half = w.halves ? i / 16 : 0;
        sums[half] += w.codes[i] * (int8_t)x[i];
        inputs[half] += (int8_t)x[i];
    }
    const float whole = (float)sums[0] * w.scale[0];
    y = __builtin_fmaf(w.halves ? __builtin_fmaf((float)sums[1], w.scale[1], whole) : whole, factors[0], y);
    for (int half = 0; w.adds && half <= w.halves; half++) y = __builtin_fmaf(w.more[half], factors[0] * (float)inputs[half], y);
    return y;
}

static float add_exactly(const dovetail::Block& w, const char* x, float y) {
    for (int i = 0; i < WIDTH; i++) {
        float input, weight = (float)w.codes[i] * w.scale[i / 16];
        memcpy(&input, x + 4 * i, 4);
        if (w.adds) weight += w.more[i / 16];
        y = __builtin_fmaf(input, weight, y);
    }
    return y;
}

static void part_columns(const BlockPass& pass, const dovetail::Part& part, int64_t first, int64_t end) {
    const Matrix& m = pass.matrix;
    const int64_t blocks = m.k / WIDTH, last = end * LANES < part.count ? end * LANES : part.count;
    float y[CHUNK];
    for (int64_t column = first * LANES; column < last; column++) {
        for (int64_t r = 0; r < pass.rows; r++) y[r] = 0;
        for (int64_t b = 0; b < blocks; b++) {
            const dovetail::Block w = dovetail::block_of(m, part, column, b);
            for (int64_t r = 0; r < pass.rows; r++) {
                if (m.kind == dovetail::BLOCKS) y[r] = add_rounded(w, pass.x + 4 * BLOCK_VALUES * (blocks * r + b), y[r]);
                else y[r] = add_exactly(w, pass.x + 4 * (m.k * r + b * WIDTH), y[r]);
            }
        }
        for (int64_t r = 0; r < pass.rows; r++) {
            if (m.bias != nullptr) y[r] += m.bias[part.first + column];
            pass.y[r * pass.y_stride + part.first + column] = y[r];
        }
    }
}

#endif

// The vectors first .. end of all parts of blocks.
static void block_columns(const BlockPass& pass, int64_t first, int64_t end) {
    const dovetail::Parts& parts = dovetail::parts_of(pass.matrix);
    for (int64_t i = 0; i < parts.count; i++) {
        const dovetail::Part& part = parts.part[i];
        if (part.type < 0) continue;
        const int64_t from = first - part.vectors, until = end - part.vectors, most = dovetail::padded(part.count) / LANES;
        const int64_t low = from < 0 ? 0 : from, high = until < most ? until : most;
        if (low < high) part_columns(pass, part, low, high);
    }
}

// ---- the whole

static void prepare_blocks(const Matrix& m, const float* x, int64_t x_stride, int64_t rows, char* packed, int part, int parts) {
    const int64_t blocks = m.k / WIDTH;
    if (m.kind == dovetail::BLOCKS) return pack_blocks_of(block_cut(m, rows), x, x_stride, blocks * part / parts, blocks * (part + 1) / parts, packed);
#if DT_LANES
    const Cut cut = cut_of<dovetail::FP32>(m, rows);
    const int64_t pieces = (cut.steps + BLOCK - 1) / BLOCK;
    for (int64_t b = pieces * part / parts; b < pieces * (part + 1) / parts; b++) pack_floats(cut, x, x_stride, b * BLOCK, (float*)packed);
#else
    for (int64_t r = rows * part / parts; r < rows * (part + 1) / parts; r++) memcpy(packed + 4 * m.k * r, x + r * x_stride, 4 * m.k);
#endif
}

static inline int64_t part_x_bytes(const Matrix& m, int64_t rows) { return m.kind == dovetail::BLOCKS ? block_x_bytes(m, rows) : 4 * rows * m.k; }

static void block_chunk(const Matrix& m, const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows) {
    const dovetail::Parts& parts = dovetail::parts_of(m);
    if (parts.vectors == 0) return;
    char* const packed = (char*)dovetail::scratch(0, part_x_bytes(m, rows));
    auto pack = [&](int part, int count) { prepare_blocks(m, x, x_stride, rows, packed, part, count); };
    if (rows * m.k < SERIAL_VALUES) pack(0, 1);
    else dovetail::parallel(pack);
    in_pieces(parts.vectors, [&](int64_t from, int64_t to) { block_columns({m, rows, packed, y, y_stride}, from, to); });
}

// Parts of plain numbers are multiplied as matrices of their own.
static void plain_parts(const Matrix& m, const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows) {
    const dovetail::Parts& parts = dovetail::parts_of(m);
    for (int64_t i = 0; i < parts.count; i++) {
        const dovetail::Part& part = parts.part[i];
        if (part.type >= 0) continue;
        const Matrix own{-1 - part.type, part.count, m.k, 0, (const char*)m.packed + part.offset, nullptr, m.bias == nullptr ? nullptr : m.bias + part.first};
        if (own.kind == dovetail::FP32) chunks<dovetail::FP32>(own, x, x_stride, y + part.first, y_stride, rows);
        else if (own.kind == dovetail::FP16) chunks<dovetail::FP16>(own, x, x_stride, y + part.first, y_stride, rows);
        else chunks<dovetail::BF16>(own, x, x_stride, y + part.first, y_stride, rows);
    }
}

static void block_chunks(const Matrix& m, const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows) {
    for (int64_t from = 0; from < rows; from += CHUNK)
        block_chunk(m, x + from * x_stride, x_stride, y + from * y_stride, y_stride, rows - from < CHUNK ? rows - from : CHUNK);
    plain_parts(m, x, x_stride, y, y_stride, rows);
}

}  // namespace DT_NS

#undef DT_LANES
