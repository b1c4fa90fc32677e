// y = x W^T + bias over a packed W, for 1 to any number of rows, with the same bytes for a row whatever its neighbours are.
//
// Every sum runs along k in ascending order through one chain of fma (int8: exact integers); lanes run along outputs. All the rest - how many rows share a
// tile, where the sum is interrupted and carried through memory, which thread has which columns - only changes when the links of a chain are computed.
//
// The weights stream from memory once per CHUNK rows. A tile is R rows by one to three vectors of 16 columns, its sums in registers. With a single tile the
// weights go straight through it. With several, a block of BLOCK steps of one panel stays in the L1 cache while every tile goes over it, and meanwhile the
// next block is prefetched, so that the memory works while the tiles compute. x is packed so that a tile reads it in one sweep: rows that lie 16 KB apart
// would evict each other from L1.
#include "packing.h"

#include "shares.inl"

namespace DT_NS {

using dovetail::Kind;
using dovetail::Matrix;
using dovetail::PANEL;

constexpr int64_t CHUNK = 128;                // rows that share one pass over the weights
constexpr int64_t BLOCK = 128;                // steps, at most; 24 KB of fp32 weights
constexpr int64_t WIDEN_TILES = 8;            // above, 16-bit weights are widened once per block and not by every tile; on Zen 5 both cost the same
constexpr int64_t BEAT = 8;                   // steps between two groups of prefetches
constexpr int64_t DISTANCE = 8192;            // bytes from a load to its prefetch in a single tile; Zen 5: 4096 loses 20 % at 4 rows of 16 bits, 12288 5 % at 1

// ---- what one step (one k, or four for int8) of a tile is, for each kind of weights

template <int KIND>
struct Step {  // fp32, fp16, bf16
    using Sum = F16;
    using Weights = F16;
    using X = F16;
#if defined(DT_AVX512)
    static constexpr int ROWS = 8, WIDE_ROWS = 8;
#elif defined(DT_AVX2) || defined(DT_NEON)
    static constexpr int ROWS = 6, WIDE_ROWS = 2;
#elif defined(DT_SSE)
    static constexpr int ROWS = 2, WIDE_ROWS = 1;
#else
    static constexpr int ROWS = 4, WIDE_ROWS = 4;
#endif
    static Sum none() { return zero(); }
    static Sum load_sum(const float* p) { return load(p); }
    static void store_sum(float* p, Sum a) { store(p, a); }
    static X broadcast(const char* p) { return set1(*(const float*)p); }
    static Weights weights(const char* p) {
        if constexpr (KIND == dovetail::FP32) return load((const float*)p);
        else if constexpr (KIND == dovetail::FP16) return load_half((const uint16_t*)p);
        else return load_bf16((const uint16_t*)p);
    }
    static Sum add_product(X x, Weights w, Sum sum) { return fma(x, w, sum); }
};

// int8: x is s8 in -127..127, four of one row side by side; the weights too, four of one column. vpdpbusd wants one side unsigned: x + 128, and the sums
// start at -128 times the sum of the column, which the packing has computed. Without it |w| times x with w's sign: two such products fit in 16 bits.
template <>
struct Step<dovetail::INT8> {
    using Sum = I16;
#if defined(DT_VNNI)
    static constexpr int ROWS = 8, WIDE_ROWS = 8, OFFSET = 128;
    using Weights = __m512i;
    using X = __m512i;
    static Weights weights(const char* p) { return _mm512_loadu_si512(p); }
    static X broadcast(const char* p) { return _mm512_set1_epi32(*(const int32_t*)p); }
    static Sum add_product(X x, Weights w, Sum sum) { return {_mm512_dpbusd_epi32(sum.v, x, w)}; }
#elif defined(DT_AVX512)
    static constexpr int ROWS = 8, WIDE_ROWS = 8, OFFSET = 0;
    struct Weights { __m512i size; __mmask64 negative; };
    using X = __m512i;
    static Weights weights(const char* p) {
        const __m512i w = _mm512_loadu_si512(p);
        return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
    }
    static X broadcast(const char* p) { return _mm512_set1_epi32(*(const int32_t*)p); }
    static Sum add_product(X x, Weights w, Sum sum) {
        const __m512i pairs = _mm512_maddubs_epi16(w.size, _mm512_mask_sub_epi8(x, w.negative, _mm512_setzero_si512(), x));
        return pinned({_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))});
    }
#elif defined(DT_AVX2)
    static constexpr int ROWS = 4, WIDE_ROWS = 2, OFFSET = 0;
    struct Weights { __m256i a, b; };
    using X = __m256i;
    static Weights weights(const char* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))}; }
    static X broadcast(const char* p) { return _mm256_set1_epi32(*(const int32_t*)p); }
    static __m256i products(X x, __m256i w) {
        return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), _mm256_set1_epi16(1));
    }
    static Sum add_product(X x, Weights w, Sum sum) { return pinned({_mm256_add_epi32(sum.a, products(x, w.a)), _mm256_add_epi32(sum.b, products(x, w.b))}); }
#elif defined(DT_SSE)
    static constexpr int ROWS = 2, WIDE_ROWS = 1, OFFSET = 0;
    struct Weights { __m128i v[4]; };
    using X = __m128i;
    static DT_INLINE Weights weights(const char* p) {
        Weights w;
        for (int i = 0; i < 4; i++) w.v[i] = _mm_loadu_si128((const __m128i*)p + i);
        return w;
    }
    static DT_INLINE X broadcast(const char* p) { return inputs4(p); }
    static DT_INLINE Sum add_product(X x, Weights w, Sum sum) {
        for (int i = 0; i < 4; i++)
            sum.v[i] = _mm_add_epi32(sum.v[i], _mm_madd_epi16(_mm_maddubs_epi16(_mm_abs_epi8(w.v[i]), _mm_sign_epi8(x, w.v[i])), _mm_set1_epi16(1)));
        return sum;
    }
#elif defined(DT_NEON)
    static constexpr int ROWS = 4, WIDE_ROWS = 1, OFFSET = 0;
    struct Weights { int8x16_t v[4]; };
    using X = int8x8_t;
    static Weights weights(const char* p) {
        Weights w;
        for (int i = 0; i < 4; i++) w.v[i] = vld1q_s8((const int8_t*)p + 16 * i);
        return w;
    }
    static X broadcast(const char* p) { return vreinterpret_s8_s32(vdup_n_s32(*(const int32_t*)p)); }
    static Sum add_product(X x, Weights w, Sum sum) {
        for (int i = 0; i < 4; i++) {
            const int16x8_t low = vmull_s8(vget_low_s8(w.v[i]), x), high = vmull_s8(vget_high_s8(w.v[i]), x);
            sum.v[i] = vpadalq_s16(sum.v[i], vpaddq_s16(low, high));
        }
        return sum;
    }
#else
    static constexpr int ROWS = 4, WIDE_ROWS = 4, OFFSET = 0;
    using Weights = const int8_t*;
    using X = const int8_t*;
    static Weights weights(const char* p) { return (const int8_t*)p; }
    static X broadcast(const char* p) { return (const int8_t*)p; }
    static Sum add_product(X x, Weights w, Sum sum) {
        for (int i = 0; i < LANES; i++)
            for (int j = 0; j < 4; j++) sum.v[i] += x[j] * w[4 * i + j];
        return sum;
    }
#endif
    static Sum none() { return iset1(0); }
    static Sum load_sum(const float* p) { return load_int(p); }
    static void store_sum(float* p, Sum a) { store_int(p, a); }
};

// ---- one tile: R rows, C vectors of columns, `steps` steps

struct Run {
    const char* x;        // [steps][R] values of four bytes
    const char* weights;  // the first column's vector; steps are `stride` bytes apart
    int64_t stride;
    int64_t steps;
    float* sums;          // [R][PANEL], carried from block to block
    bool first;           // the sums begin here
    const char* ahead;    // what the memory should fetch meanwhile: `lines` lines every BEAT steps
    int64_t lines;
};

template <int KIND, int R, int C>
static void tile(const Run& run) {
    using S = Step<KIND>;
    constexpr int VECTOR = dovetail::vector_bytes(KIND);
    typename S::Sum sums[R][C];
    const char* x = run.x;
    const char* weights = run.weights;
    const char* ahead = run.ahead;
    const int64_t stride = run.stride, lines = run.lines;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 3
        for (int c = 0; c < C; c++) sums[r][c] = run.first ? S::none() : S::load_sum(run.sums + r * PANEL + c * LANES);

    const auto step = [&]() __attribute__((always_inline)) {
        // whichever is less stays in registers meanwhile
        if constexpr (R < C) {
            typename S::X values[R];
#pragma GCC unroll 3
            for (int r = 0; r < R; r++) values[r] = S::broadcast(x + 4 * r);
#pragma GCC unroll 3
            for (int c = 0; c < C; c++) {
                const typename S::Weights w = S::weights(weights + c * VECTOR);
#pragma GCC unroll 3
                for (int r = 0; r < R; r++) sums[r][c] = S::add_product(values[r], w, sums[r][c]);
            }
        } else {
            typename S::Weights w[C];
#pragma GCC unroll 3
            for (int c = 0; c < C; c++) w[c] = S::weights(weights + c * VECTOR);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const typename S::X value = S::broadcast(x + 4 * r);
#pragma GCC unroll 3
                for (int c = 0; c < C; c++) sums[r][c] = S::add_product(value, w[c], sums[r][c]);
            }
        }
        x += 4 * R;
        weights += stride;
    };
    int64_t left = run.steps;
    for (; left >= BEAT; left -= BEAT) {
        if (dovetail::prefetches_to_l2)
            for (int64_t i = 0; i < lines; i++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        else
            for (int64_t i = 0; i < lines; i++, ahead += 64) __builtin_prefetch(ahead, 0, 3);
        for (int i = 0; i < BEAT; i++) step();
    }
    for (; left > 0; left--) step();

#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 3
        for (int c = 0; c < C; c++) S::store_sum(run.sums + r * PANEL + c * LANES, sums[r][c]);
}

using Tile = void (*)(const Run&);

// The tile of so many rows, as wide as a panel or one vector wide.
template <int KIND, int R = Step<KIND>::ROWS>
static Tile tile_of(int64_t rows, bool wide) {
    if constexpr (R == 0) return nullptr;
    else if (rows != R) return tile_of<KIND, R - 1>(rows, wide);
    else if constexpr (R <= Step<KIND>::WIDE_ROWS) return wide ? tile<KIND, R, 3> : tile<KIND, R, 1>;
    else return tile<KIND, R, 1>;
}

// ---- how the rows of a chunk are cut into tiles, and where packed x is

struct Cut {
    int64_t rows, tiles, steps, block;
    int64_t row(int64_t tile) const { return tile * rows / tiles; }
    int64_t height(int64_t tile) const { return row(tile + 1) - row(tile); }
    int64_t length(int64_t from) const { return steps - from < block ? steps - from : block; }
    // Values before those of a tile in the block from a step on; x is [block][tile][step][row of the tile].
    int64_t at(int64_t from, int64_t tile) const { return from * rows + row(tile) * length(from); }
};

static void pack_floats(const Cut& cut, const float* x, int64_t x_stride, int64_t block, float* packed) {
    for (int64_t t = 0; t < cut.tiles; t++) {
        const int64_t height = cut.height(t);
        const float* rows = x + cut.row(t) * x_stride + block;
        float* out = packed + cut.at(block, t);
        for (int64_t s = 0; s < cut.length(block); s++)
            for (int64_t r = 0; r < height; r++) *out++ = rows[r * x_stride + s];
    }
}

// 127 / the largest magnitude of a row, and its inverse. Magnitudes are compared as integers: the same order, and NaN above all, so that it is not lost.
struct RowScale { float to, from; };

static RowScale row_scale(const float* x, int64_t k) {
    uint32_t most = 0;
    for (int64_t i = 0; i < k; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float size;
    memcpy(&size, &most, 4);
    if (most >= 0x7f800000) return {0.0f, __builtin_nanf("")};  // not finite: neither is the result
    if (size < 1e-30f) return {0.0f, 0.0f};
    return {127.0f / size, size / 127.0f};
}

static void pack_bytes(const Cut& cut, const float* x, int64_t k, int64_t row, float to, char* packed) {
    int64_t t = row * cut.tiles / cut.rows;
    while (cut.row(t + 1) <= row) t++;
    const int64_t height = cut.height(t);
    for (int64_t block = 0; block < cut.steps; block += cut.block) {
        const int64_t length = cut.length(block), first = 4 * block, count = k - first < 4 * length ? k - first : 4 * length;
        int8_t values[4 * BLOCK] = {};  // where x ends within a step a weight of zero stands against it
        constexpr int OFFSET = Step<dovetail::INT8>::OFFSET;
        for (int64_t i = 0; i < count; i++) values[i] = (int8_t)((int)(x[first + i] * to + dovetail::ROUNDER - dovetail::ROUNDER) + OFFSET);
        char* out = packed + 4 * (cut.at(block, t) + row - cut.row(t));
        for (int64_t s = 0; s < length; s++, out += 4 * height) memcpy(out, values + 4 * s, 4);
    }
}

// ---- the columns of one thread

struct Pass {
    const Matrix& matrix;
    Cut cut;
    const char* x;            // packed
    const float* row_scales;  // INT8: [rows]
    float* y;
    int64_t y_stride;
};

template <int KIND>
static void finish(const Pass& pass, int64_t column, int64_t width, const float* sums) {
    const Matrix& m = pass.matrix;
    for (int64_t c = 0; c < width; c += LANES, column += LANES) {
        const int64_t count = m.n - column;
        F16 scales = zero(), bias = zero();
        I16 start = iset1(0);
        if constexpr (KIND == dovetail::INT8) {
            scales = take(m.scales + column, count);
            if constexpr (Step<KIND>::OFFSET != 0) start = load_int((const float*)dovetail::column_starts(m) + column);
        }
        if (m.bias != nullptr) bias = take(m.bias + column, count);
        for (int64_t r = 0; r < pass.cut.rows; r++) {
            const float* sum = sums + r * PANEL + c;
            F16 value;
            if constexpr (KIND == dovetail::INT8) value = mul(to_float(iadd(load_int(sum), start)), mul(set1(pass.row_scales[r]), scales));
            else value = load(sum);
            if (m.bias != nullptr) value = add(value, bias);
            put(pass.y + r * pass.y_stride + column, value, count);
        }
    }
}

// The sums of all rows and of one panel's columns. TILES is the kind of weights that the tiles see: KIND, or FP32 where they are widened first.
template <int KIND, int TILES>
static void panel(const Cut& cut, const char* x, const char* weights, int64_t width, float* sums) {
    alignas(64) float widened[KIND == TILES ? 1 : BLOCK * PANEL];
    constexpr int VECTOR = dovetail::vector_bytes(TILES);
    const int64_t vectors = width / LANES, stride = vectors * VECTOR, bytes = vectors * dovetail::vector_bytes(KIND);  // of a step
    const bool wide = vectors == 3 && cut.height(cut.tiles - 1) <= Step<TILES>::WIDE_ROWS;  // no tile is higher than the last
    const int64_t turns = cut.tiles * (wide ? 1 : vectors), lines = (bytes * BEAT / 64 + turns - 1) / turns;
    if (KIND == TILES && turns == 1) return tile_of<TILES>(cut.rows, wide)({x, weights, stride, cut.steps, sums, true, weights + DISTANCE, lines});
    for (int64_t block = 0; block < cut.steps; block += cut.block) {
        const int64_t steps = cut.length(block);
        const char* source = weights + block * bytes;
        const char* ahead = source + steps * bytes;
        if constexpr (KIND != TILES) {
            for (int64_t i = 0; i < steps * vectors; i++) store(widened + i * LANES, Step<KIND>::weights(source + i * 2 * LANES));
            source = (const char*)widened;
        }
        for (int64_t t = 0; t < cut.tiles; t++)
            for (int64_t c = 0; c < vectors; c += wide ? 3 : 1) {
                const Tile run = tile_of<TILES>(cut.height(t), wide);
                run({x + 4 * cut.at(block, t), source + c * VECTOR, stride, steps, sums + cut.row(t) * PANEL + c * LANES, block == 0, ahead, lines});
                ahead += lines * 64 * (steps / BEAT);
            }
    }
}

template <int KIND>
static void columns(const Pass& pass, int64_t first_panel, int64_t end_panel) {
    alignas(64) float sums[CHUNK * PANEL];
    constexpr int WIDENED = KIND == dovetail::INT8 ? dovetail::INT8 : dovetail::FP32;
    for (int64_t p = first_panel; p < end_panel; p++) {
        const char* weights = dovetail::weights_at(pass.matrix, p, 0);
        const int64_t width = dovetail::panel_width(pass.matrix.n, p);
        if (pass.cut.tiles > WIDEN_TILES) panel<KIND, WIDENED>(pass.cut, pass.x, weights, width, sums);
        else panel<KIND, KIND>(pass.cut, pass.x, weights, width, sums);
        finish<KIND>(pass, p * PANEL, width, sums);
    }
}

// ---- the whole

// Below this many values one thread packs x faster than several meet.
constexpr int64_t SERIAL_VALUES = 32768;

// Where L1 has 32 KB, bytes are multiplied so fast that the block that is fetched meanwhile has to have its place in it, too.
#if defined(DT_AVX2) || defined(DT_SSE)
constexpr int64_t BYTES_BLOCK = 64;
#else
constexpr int64_t BYTES_BLOCK = BLOCK;
#endif

template <int KIND>
static Cut cut_of(const Matrix& m, int64_t rows) {
    const int64_t tiles = (rows + Step<KIND>::ROWS - 1) / Step<KIND>::ROWS;
    return {rows, tiles, dovetail::steps_of(KIND, m.k), KIND == dovetail::INT8 ? BYTES_BLOCK : BLOCK};
}

// Bytes of the packed x of a chunk, with the scales of its rows.
template <int KIND>
static int64_t packed_x_bytes(const Matrix& m, int64_t rows) {
    const int64_t values = rows * dovetail::steps_of(KIND, m.k);
    return 4 * (KIND == dovetail::INT8 ? values + rows : rows > 1 ? values : 0);
}

// The rows of x become ready for the columns, in memory of `packed_x_bytes`; `share` runs pack(part, parts).
template <int KIND, class Share>
static void prepare(Pass& pass, const float* x, int64_t x_stride, char* memory, const Share& share) {
    const Cut& cut = pass.cut;
    const int64_t k = pass.matrix.k;
    if constexpr (KIND == dovetail::INT8) {
        float* scales = (float*)(memory + 4 * cut.rows * cut.steps);
        auto pack = [&](int part, int parts) {
            for (int64_t r = cut.rows * part / parts; r < cut.rows * (part + 1) / parts; r++) {
                const RowScale scale = row_scale(x + r * x_stride, k);
                scales[r] = scale.from;
                pack_bytes(cut, x + r * x_stride, k, r, scale.to, memory);
            }
        };
        share(pack);
        pass.x = memory;
        pass.row_scales = scales;
    } else if (cut.rows > 1) {
        auto pack = [&](int part, int parts) {
            const int64_t blocks = (cut.steps + cut.block - 1) / cut.block;
            for (int64_t b = blocks * part / parts; b < blocks * (part + 1) / parts; b++) pack_floats(cut, x, x_stride, b * cut.block, (float*)memory);
        };
        share(pack);
        pass.x = memory;
    }
}

template <int KIND>
static void chunk(const Matrix& m, const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows) {
    Pass pass{m, cut_of<KIND>(m, rows), (const char*)x, nullptr, y, y_stride};
    prepare<KIND>(pass, x, x_stride, (char*)dovetail::scratch(0, packed_x_bytes<KIND>(m, rows)), [&](auto& pack) {
        if (rows * m.k < SERIAL_VALUES) pack(0, 1);
        else dovetail::parallel(pack);
    });
    const int64_t panels = dovetail::panels_of(m.n);
    in_pieces(panels, [&](int64_t from, int64_t to) { columns<KIND>(pass, from, to); });
}

template <int KIND>
static void chunks(const Matrix& m, const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows) {
    for (int64_t from = 0; from < rows; from += CHUNK)
        chunk<KIND>(m, x + from * x_stride, x_stride, y + from * y_stride, y_stride, rows - from < CHUNK ? rows - from : CHUNK);
}

}  // namespace DT_NS

#include "grouped.inl"

#include "blocks.inl"

namespace DT_NS {

static void linear(const Matrix& m, const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows) {
    switch (m.kind) {
        case dovetail::FP32: return chunks<dovetail::FP32>(m, x, x_stride, y, y_stride, rows);
        case dovetail::FP16: return chunks<dovetail::FP16>(m, x, x_stride, y, y_stride, rows);
        case dovetail::BF16: return chunks<dovetail::BF16>(m, x, x_stride, y, y_stride, rows);
        case dovetail::INT8: return chunks<dovetail::INT8>(m, x, x_stride, y, y_stride, rows);
        case dovetail::CODES8: return group_chunks<8>(m, x, x_stride, y, y_stride, rows);
        case dovetail::CODES4: return group_chunks<4>(m, x, x_stride, y, y_stride, rows);
        case dovetail::CODES3: return group_chunks<3>(m, x, x_stride, y, y_stride, rows);
        case dovetail::CODES2: return group_chunks<2>(m, x, x_stride, y, y_stride, rows);
        default: return block_chunks(m, x, x_stride, y, y_stride, rows);
    }
}

}  // namespace DT_NS
