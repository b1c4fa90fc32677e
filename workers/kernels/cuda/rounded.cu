// y = x W^T + bias on a GPU over a W of integer codes, for rows of x in int8: the codes of a
// substitute, in groups of 64 inputs, and the blocks of GGUF files, of 32 inputs. Both are read as
// the CPU's kernels have them in memory (native/grouped.inl, native/blocks.h), and y has the bytes
// that those kernels give: exact sums within a group, and one chain of fma over groups, ascending.
//
// A block of threads computes vectors of 16 outputs for 8 rows, one vector after the other. Its
// warps take turns at DEPTH groups each, which are a tile: a warp computes the exact sums of its
// groups while the others do likewise, then waits for the chain, goes on with it, and hands it over
// to the next warp. Weights are on their way while the groups before them are computed. On matrix
// units a lane has 2 outputs and 2 rows, elsewhere 1 and 4; the bytes are the same.
//
// DT_ROUNDED lines behind this source say which formats there are (own.py and own_blocks.py in
// models/backends/device). Compiled behind numbers.cu and formats.cu.

constexpr int RELAY_ROWS = 8, WARPS = 8, RELAY_THREADS = 32 * WARPS;
constexpr int DEPTH = LANE_OUTPUTS == 2 ? 4 : 1;  // groups of a warp at a time

#if defined(__CUDACC__) && defined(DT_MATRIX_UNITS)
// sums [16 x 8] += codes [16 x 32 or 16] times values [32 or 16 x 8], by a warp: m16n8k32 and
// m16n8k16, whose manual says which numbers a lane holds.
#define DT_MULTIPLY(SHAPE, TYPE, CODES, VALUES, ...)                                      \
    asm("mma.sync.aligned." SHAPE ".row.col.s32." TYPE ".s8.s32 {%0, %1, %2, %3}, " CODES \
        ", " VALUES ", {%0, %1, %2, %3};"                                                 \
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])                      \
        : __VA_ARGS__)
template <bool SIGNED>
static __device__ void multiply_32(int* sums, const unsigned* first, const unsigned* second,
                                   const unsigned* values) {
    if constexpr (SIGNED)
        DT_MULTIPLY("m16n8k32", "s8", "{%4, %5, %6, %7}", "{%8, %9}", "r"(first[0]), "r"(second[0]),
                    "r"(first[1]), "r"(second[1]), "r"(values[0]), "r"(values[1]));
    else
        DT_MULTIPLY("m16n8k32", "u8", "{%4, %5, %6, %7}", "{%8, %9}", "r"(first[0]), "r"(second[0]),
                    "r"(first[1]), "r"(second[1]), "r"(values[0]), "r"(values[1]));
}
template <bool SIGNED>
static __device__ void multiply_16(int* sums, unsigned first, unsigned second, unsigned value) {
    if constexpr (SIGNED)
        DT_MULTIPLY("m16n8k16", "s8", "{%4, %5}", "{%6}", "r"(first), "r"(second), "r"(value));
    else DT_MULTIPLY("m16n8k16", "u8", "{%4, %5}", "{%6}", "r"(first), "r"(second), "r"(value));
}
#endif

#ifdef __CUDACC__
static __device__ void wait_for_chain(int warp) {
    asm volatile("bar.sync %0, 64;" ::"r"(1 + warp) : "memory");
}
static __device__ void hand_over_chain(int warp) {
    asm volatile("bar.arrive %0, 64;" ::"r"(1 + warp) : "memory");
}
#endif

// ---- rows of x

constexpr int ROUND_THREADS = 128;

// Where a group of a row of x lies among all, of which 8 rows lie side by side, and behind them
// those of the next group; the groups of 8 rows are rounded up to a multiple of 4.
static __device__ Int place_of(int row, int group, int groups) {
    return ((Int)(row / RELAY_ROWS) * ((groups + 3) / 4 * 4) + group) * RELAY_ROWS +
           row % RELAY_ROWS;
}

// x [rows, k] -> for each row and group WIDTH / 4 words of four int8, zeros behind the last input,
// with every fourth step side by side, since a lane reads these at once; and four numbers about the
// group: its scale, the scale times the sum of the int8, that sum, and the sum of the first half.
// One warp for each row and group.
template <int WIDTH>
static __device__ void round_row(const float* x, signed char* values, uint4* abouts, Int k,
                                 int groups, int rows) {
    constexpr int STEPS = WIDTH / 4, NUMBERS = WIDTH / 32;
    start_early();
    const int lane = (int)(threadIdx.x % 32), step = NUMBERS * lane / 4;
    const int which = (int)blockIdx.x * (ROUND_THREADS / 32) + (int)threadIdx.x / 32,
              row = which / groups, group = which % groups;
    if (row >= rows) return;
    const Int place = place_of(row, group, groups), at = (Int)group * WIDTH + NUMBERS * lane;
    float own[NUMBERS];
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < NUMBERS; i++) {
        own[i] = at + i < k ? x[(Int)row * k + at + i] : 0.0f;
        const unsigned size = magnitude(own[i]);
        most = size > most ? size : most;
    }
    const RowScale scale = row_scale(largest_of_warp(most));
    signed char* const to =
        values + place * WIDTH + (step % 4 * (STEPS / 4) + step / 4) * 4 + NUMBERS * lane % 4;
    int half = 0;
#pragma unroll
    for (int i = 0; i < NUMBERS; i++) {
        to[i] = (signed char)rounded(own[i], scale.to);
        half += (int)to[i];
    }
    for (int by = 8; by > 0; by /= 2) half += (int)__shfl_xor_sync(0xffffffffu, (unsigned)half, by);
    const int whole = half + (int)__shfl_xor_sync(0xffffffffu, (unsigned)half, 16);
    if (lane == 0)
        abouts[place] = make_uint4(__float_as_uint(scale.from),
                                   __float_as_uint(__fmul_rn(scale.from, __int2float_rn(whole))),
                                   (unsigned)whole, (unsigned)half);
}

#define DT_ROUND(WIDTH)                                                                    \
    extern "C" __global__ void __launch_bounds__(ROUND_THREADS) round_##WIDTH(             \
        const float* x, signed char* values, uint4* abouts, Int k, Int groups, Int rows) { \
        round_row<WIDTH>(x, values, abouts, k, (int)groups, (int)rows);                    \
    }

DT_ROUND(64)
DT_ROUND(32)

// ---- their products

// What a group adds to the chains of a lane: its scaled sums, and what is added to each weight; and
// the factors of both for each row.
template <class F>
struct Links {
    float sums[LANE_OUTPUTS][LANE_ROWS], factors[LANE_ROWS];
    float more[F::HALVES][LANE_OUTPUTS], of_more[F::HALVES][LANE_ROWS];

    __device__ void add_to(float (*chains)[LANE_ROWS]) const {
#pragma unroll
        for (int o = 0; o < LANE_OUTPUTS; o++)
#pragma unroll
            for (int r = 0; r < LANE_ROWS; r++) {
                float& chain = chains[o][r];
                chain = __fmaf_rn(sums[o][r], factors[r], chain);
                if constexpr (F::MORE)
#pragma unroll
                    for (int h = 0; h < F::HALVES; h++)
                        chain = __fmaf_rn(more[h][o], of_more[h][r], chain);
            }
    }
};

// exact [HALVES][LANE_OUTPUTS * LANE_ROWS] += the products of a group. `values`: the group's
// numbers of the lane's row on matrix units, else of each of its rows.
template <class F>
static __device__ void multiply(const F& weights, const unsigned* const* values, const Lane& lane,
                                const unsigned* table, int (*exact)[LANE_OUTPUTS * LANE_ROWS]) {
#ifdef DT_MATRIX_UNITS
    constexpr int MINE = F::STEPS / 4;
    unsigned first[MINE], second[MINE], own[MINE];
#pragma unroll
    for (int j = 0; j < MINE; j++) {
        first[j] = weights.codes(0, j, lane.quarter, table);
        second[j] = weights.codes(1, j, lane.quarter, table);
    }
    if constexpr (MINE == 4) {
        const uint4 four = *(const uint4*)values[0];
        own[0] = four.x, own[1] = four.y, own[2] = four.z, own[3] = four.w;
    } else {
        const uint2 two = *(const uint2*)values[0];
        own[0] = two.x, own[1] = two.y;
    }
    if constexpr (F::HALVES == 2) {
        multiply_16<F::SIGNED>(exact[0], first[0], second[0], own[0]);
        multiply_16<F::SIGNED>(exact[1], first[1], second[1], own[1]);
    } else
#pragma unroll
        for (int j = 0; j < MINE; j += 2)
            multiply_32<F::SIGNED>(exact[0], first + j, second + j, own + j);
#else
    unsigned codes[F::STEPS];
#pragma unroll
    for (int step = 0; step < F::STEPS; step++) codes[step] = weights.codes(0, step, 0, table);
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++)
#pragma unroll
        for (int four = 0; four < F::STEPS / 4; four++) {
            const uint4 found = ((const uint4*)values[r])[four];
            const unsigned own[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int place = 4 * four + i,
                          step = place % (F::STEPS / 4) * 4 + place / (F::STEPS / 4);
                int& sum = exact[step / (F::STEPS / F::HALVES)][r];
                sum = F::SIGNED ? dot_signed(own[i], codes[step], sum)
                                : dot_codes(own[i], codes[step], sum);
            }
        }
#endif
}

// The place of a warp: the groups from `tile` * DEPTH on, of a vector of 16 outputs.
struct Place {
    Int vector;
    int tile;

    // Go on by `turns` tiles. A vector has `tiles` of them; the block has every `apart`th vector.
    __device__ void advance(int turns, int tiles, Int apart) {
        for (tile += turns; tile >= tiles; tile -= tiles) vector += apart;
    }
};

template <class F>
static __device__ void load(F* weights, const char* packed, const Place& at, int groups,
                            const Lane& lane) {
    const int first = at.tile * DEPTH, super = first / SUPER;  // of the whole tile
    const char* const above = packed + at.vector * F::vector_bytes(groups) +
                              (Int)super * (SUPER * F::SIZE + F::SUPER_BYTES);
    const char* const own = above + F::SUPER_BYTES + (first - super * SUPER) * F::SIZE;
    if (first + DEPTH <= groups) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) weights[i].load(own + i * F::SIZE, above, lane);
    } else {
#pragma unroll
        for (int i = 0; i < DEPTH; i++)  // what lies beyond the last group is that one
            weights[i].load(own + smaller(i, groups - 1 - first) * F::SIZE, above, lane);
    }
}

// Where the rows of a lane begin. Rows beyond the last one are read as the last one, and not
// written.
struct Inputs {
#ifdef DT_MATRIX_UNITS
    static constexpr int READ = 1;  // the values of another row than those that it adds up
#else
    static constexpr int READ = LANE_ROWS;
#endif
    const char* values[READ];
    const uint4* abouts[LANE_ROWS];

    __device__ Inputs(const char* all, const uint4* all_abouts, int first_row, int count,
                      int groups, int width, const Lane& lane) {
#pragma unroll
        for (int r = 0; r < LANE_ROWS; r++) {
            const int row = first_row + smaller(lane.row + r * lane.rows_apart, count - 1);
            const Int place = place_of(row, 0, groups);
            abouts[r] = all_abouts + place;
            if constexpr (READ > 1) values[r] = all + place * width;
        }
        if constexpr (READ == 1) {
            const int row = first_row + smaller(lane.output / 2, count - 1);
            values[0] = all + place_of(row, 0, groups) * width + lane.quarter * (width / 4);
        }
    }
};

// What a group adds to the chains of a lane.
template <class F>
static __device__ void link(const F& weights, const Inputs& inputs, int group, const Lane& lane,
                            const unsigned* table, Links<F>& to) {
    int exact[F::HALVES][LANE_OUTPUTS * LANE_ROWS];
#pragma unroll
    for (int r = 0; r < LANE_ROWS; r++) {
        const uint4 found = inputs.abouts[r][group * RELAY_ROWS];
        const int whole = (int)found.z, half = (int)found.w;
        to.factors[r] = __uint_as_float(found.x);
        if constexpr (F::HALVES == 1) to.of_more[0][r] = __uint_as_float(found.y);
        else {
            to.of_more[0][r] = __fmul_rn(to.factors[r], __int2float_rn(half));
            to.of_more[1][r] = __fmul_rn(to.factors[r], __int2float_rn(whole - half));
        }
#pragma unroll
        for (int o = 0; o < LANE_OUTPUTS; o++) {
            exact[0][o * LANE_ROWS + r] = -F::MIDDLE * (F::HALVES == 1 ? whole : half);
            if constexpr (F::HALVES == 2) exact[1][o * LANE_ROWS + r] = -F::MIDDLE * (whole - half);
        }
    }
    const unsigned* own[Inputs::READ];
#pragma unroll
    for (int r = 0; r < Inputs::READ; r++)
        own[r] = (const unsigned*)(inputs.values[r] + group * (RELAY_ROWS * F::WIDTH));
    multiply(weights, own, lane, table, exact);
#pragma unroll
    for (int o = 0; o < LANE_OUTPUTS; o++) {
#pragma unroll
        for (int r = 0; r < LANE_ROWS; r++) {
            const int at = o * LANE_ROWS + r;
            to.sums[o][r] = __fmul_rn(__int2float_rn(exact[0][at]), weights.scale(0, o));
            if constexpr (F::HALVES == 2)
                to.sums[o][r] =
                    __fmaf_rn(__int2float_rn(exact[1][at]), weights.scale(1, o), to.sums[o][r]);
        }
        if constexpr (F::MORE)
#pragma unroll
            for (int h = 0; h < F::HALVES; h++) to.more[h][o] = weights.more(h, o);
    }
}

// A block has every gridDim.x-th vector of outputs, and each of its warps every WARPS-th tile of
// them, so that weights keep coming from the end of one vector to the beginning of the next.
template <class F>
static __device__ void relay(const char* packed, const char* values, const uint4* abouts,
                             const float* bias, float* y, Int n, Int apart, int groups, int rows,
                             const unsigned* table) {
    __shared__ uint4 handed[WARPS][32];
    const int warp = (int)threadIdx.x / 32, in_warp = (int)threadIdx.x % 32;
    const int tiles = (groups + DEPTH - 1) / DEPTH, first_row = (int)blockIdx.y * RELAY_ROWS;
    const Int vectors = (n + VECTOR - 1) / VECTOR;
    const int count = smaller(RELAY_ROWS, rows - first_row);
    const Lane lane = lane_of(in_warp);
    Place at = {blockIdx.x, 0};
    at.advance(warp, tiles, gridDim.x);
    F weights[DEPTH];
    if (at.vector < vectors) load(weights, packed, at, groups, lane);
    start_early();
    const Inputs inputs(values, abouts, first_row, count, groups, F::WIDTH, lane);
    for (bool first = warp == 0; at.vector < vectors; first = false) {
        Links<F> links[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; i++)
            link(weights[i], inputs, at.tile * DEPTH + i, lane, table, links[i]);
        Place next = at;
        next.advance(WARPS, tiles, gridDim.x);
        if (next.vector < vectors) load(weights, packed, next, groups, lane);
        float chains[LANE_OUTPUTS][LANE_ROWS] = {};
        float* const own = &chains[0][0];
        if (!first) wait_for_chain(warp);
        if (at.tile > 0) {
            const uint4 found = handed[warp][in_warp];
            own[0] = __uint_as_float(found.x), own[1] = __uint_as_float(found.y);
            own[2] = __uint_as_float(found.z), own[3] = __uint_as_float(found.w);
        }
#pragma unroll
        for (int i = 0; i < DEPTH; i++)
            if (at.tile * DEPTH + i < groups) links[i].add_to(chains);
        Place behind = at;
        behind.advance(1, tiles, gridDim.x);
        if (behind.vector < vectors) {  // another warp goes on there, if only with another vector
            const int to = (warp + 1) % WARPS;
            handed[to][in_warp] = make_uint4(__float_as_uint(own[0]), __float_as_uint(own[1]),
                                             __float_as_uint(own[2]), __float_as_uint(own[3]));
            hand_over_chain(to);
        }
        if (at.tile == tiles - 1)
#pragma unroll
            for (int i = 0; i < LANE_OUTPUTS * LANE_ROWS; i++) {
                const int row = lane.row + i % LANE_ROWS * lane.rows_apart;
                const Int output = at.vector * VECTOR + lane.output + i / LANE_ROWS;
                if (row < count && output < n)
                    y[(Int)(first_row + row) * apart + output] =
                        bias == nullptr ? own[i] : __fadd_rn(own[i], bias[output]);
            }
        at = next;
    }
}

// `y`: the first of n outputs of the first row; rows of it lie `apart`. What follows TABLE are the
// 16 numbers that codes stand for.
#define DT_ROUNDED(NAME, WIDTH, BITS, MIDDLE, SIGNED, SCALES, TABLE, ...)                          \
    extern "C" __global__ void __launch_bounds__(RELAY_THREADS, 2)                                 \
        NAME(const char* packed, const char* values, const uint4* abouts, const float* bias,       \
             float* y, Int n, Int apart, Int groups, Int rows) {                                   \
        __shared__ unsigned table[4];                                                              \
        if constexpr (TABLE) {                                                                     \
            constexpr unsigned OWN[4] = {__VA_ARGS__};                                             \
            if (threadIdx.x == 0)                                                                  \
                for (int i = 0; i < 4; i++) table[i] = OWN[i];                                     \
            __syncthreads();                                                                       \
        }                                                                                          \
        relay<Format<WIDTH, BITS, MIDDLE, SIGNED, SCALES, TABLE>>(                                 \
            packed, values, abouts, bias, y, n, apart, (int)groups, (int)rows, table);             \
    }
