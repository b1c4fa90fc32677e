// y = x W^T + bias on a GPU, over the packed matrices of the CPU's kernels as they lie in memory (native/packing.h), with the bytes that those kernels give.
//
// A sum of 16-bit weights is one chain of fma along k, ascending, as in native/linear.inl; one of int8 is an exact integer; one of codes is the chain
// over groups of native/grouped.inl. So a row has the same bytes whatever its neighbours are, on every architecture, and the same as on the CPU. Nothing here
// may be contracted or reordered by a compiler: every rounding is spelled out (__fmaf_rn and its like).
//
// Weights come through shared memory as they lie, and are widened in registers. Which shapes of blocks there are, models/backends/device/own.py says, by
// DT_PRODUCT lines behind this source. Arguments are addresses and 64-bit integers.
//
// Compiled by NVRTC for the card that is there (workers/devices/nvidia); by g++ with tests/support/cuda/cpu.h before it in tests. Neither has a header at hand.

typedef long long Int;

constexpr int FP16 = 1, BF16 = 2, INT8 = 3;  // kernels.h
constexpr int PANEL = 48, VECTOR = 16;       // packing.h: outputs of a panel, and of a vector
constexpr float ROUNDER = 12582912.0f;       // packing.h

static __device__ int smaller(Int a, Int b) { return (int)(a < b ? a : b); }

// ---- numbers

#ifdef __CUDACC__
static __device__ float half_to_float(unsigned bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
}

#if __CUDA_ARCH__ >= 610
static __device__ int dot_signed(unsigned x, unsigned w, int sum) { return __dp4a((int)x, (int)w, sum); }
static __device__ int dot_codes(unsigned x, unsigned codes, int sum) {
    int result;
    asm("dp4a.s32.u32 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(codes), "r"(sum));
    return result;
}
#define DT_HAS_DOT
#endif
#endif

#ifndef DT_HAS_DOT
// Four signed bytes of x times four of w, signed or not, added up.
static __device__ int dot_signed(unsigned x, unsigned w, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int)(signed char)(x >> i & 255) * (int)(signed char)(w >> i & 255);
    return sum;
}
static __device__ int dot_codes(unsigned x, unsigned codes, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int)(signed char)(x >> i & 255) * (int)(codes >> i & 255);
    return sum;
}
#endif

// One step of a sum: an x and a weight of 32 bits each; of INT8 four of both.
template <int KIND>
struct Step {
    typedef float Sum;
    static __device__ Sum add(unsigned x, unsigned w, Sum sum) { return __fmaf_rn(__uint_as_float(x), __uint_as_float(w), sum); }
    static __device__ float value(Sum sum, const float*, const float*, Int, Int) { return sum; }
};

template <>
struct Step<INT8> {
    typedef int Sum;
    static __device__ Sum add(unsigned x, unsigned w, Sum sum) { return dot_signed(x, w, sum); }
    static __device__ float value(Sum sum, const float* row_scales, const float* scales, Int row, Int column) {
        return __fmul_rn(__int2float_rn(sum), __fmul_rn(row_scales[row], scales[column]));
    }
};

// The lower and the upper weight of 16 bits in a word, as the bits of an fp32.
template <int KIND>
static __device__ unsigned low_half(unsigned word) {
    return KIND == BF16 ? word << 16 : __float_as_uint(half_to_float(word & 0xffffu));
}
template <int KIND>
static __device__ unsigned high_half(unsigned word) {
    return KIND == BF16 ? word & 0xffff0000u : __float_as_uint(half_to_float(word >> 16));
}

// The weights of one step and of COLUMNS outputs side by side, as words of 32 bits.
template <int KIND, int COLUMNS>
static __device__ void widen(const char* from, unsigned* to) {
    if constexpr (KIND == INT8) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) to[c] = ((const unsigned*)from)[c];
    } else if constexpr (COLUMNS == 1) {
        to[0] = low_half<KIND>(*(const unsigned short*)from);
    } else {
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 2) {
            const unsigned pair = ((const unsigned*)from)[c / 2];
            to[c] = low_half<KIND>(pair), to[c + 1] = high_half<KIND>(pair);
        }
    }
}

// ---- from memory into shared memory, 16 bytes at a time: on their way until as many groups of copies are left as the caller allows

#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
constexpr int SHARED_BYTES = 48 << 10;  // that a block has on every card
static __device__ void fetch(uint4* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
static __device__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
static __device__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
#else  // at once; so that several blocks of a multiprocessor take turns in waiting, each has less
constexpr int SHARED_BYTES = 16 << 10;
static __device__ void fetch(uint4* to, const void* from) { *to = *(const uint4*)from; }
static __device__ void end_group() {}
template <int LEFT>
static __device__ void wait_for_groups() {}
#endif

// ---- 16 bits, int8

// A block computes VECTORS vectors of a panel for GROUPS * ROWS rows, each thread COLUMNS outputs of ROWS rows, GROUPS apart. STEPS steps of weights and rows
// are a stage; as many stages as there is shared memory for are on their way together. Rows of x begin at multiples of 16 bytes.
template <int KIND, int VECTORS, int COLUMNS, int ROWS, int GROUPS, int STEPS>
static __device__ void product(const char* packed, const unsigned* x, const float* row_scales, const float* scales, const float* bias, float* y, Int n,
                               Int all_steps, Int rows) {
    constexpr int BYTES = KIND == INT8 ? 4 : 2, WIDTH = VECTORS * VECTOR, ACROSS = WIDTH / COLUMNS, THREADS = ACROSS * GROUPS, TILE = GROUPS * ROWS;
    constexpr int PARTS = WIDTH * BYTES / 16, FOURS = STEPS / 4;  // copies of a step of weights, and of a row of x
    constexpr int STRIDE = STEPS + 4;                             // words of a row of x: the rows of neighbouring groups lie in other banks
    constexpr int STAGE = STEPS * PARTS, X_STAGE = TILE * STRIDE / 4;
    constexpr int FITTING = SHARED_BYTES / 16 / (STAGE + X_STAGE), STAGES = FITTING > 2 ? FITTING : 2;
    static_assert(THREADS % PARTS == 0 && STAGE % THREADS == 0 && THREADS % FOURS == 0, "a thread copies the same part of each step and row");
    typedef typename Step<KIND>::Sum Sum;
    __shared__ uint4 weight_tiles[STAGES][STAGE];
    __shared__ uint4 x_tiles[STAGES][X_STAGE];

    const int thread = (int)threadIdx.x, group = thread / ACROSS, column = thread % ACROSS * COLUMNS;
    const Int first_row = (Int)blockIdx.y * TILE, first_column = (Int)blockIdx.x * WIDTH, panel = first_column / PANEL * PANEL;
    const Int columns = (n + VECTOR - 1) / VECTOR * VECTOR;
    const int steps = (int)all_steps, row_words = (steps + 3) / 4 * 4, step_bytes = smaller(PANEL, columns - panel) * BYTES;
    const int part = thread % PARTS, from_step = thread / PARTS;                                        // of the weights that it copies
    const int four = thread % FOURS, from_row = thread / FOURS, left = smaller(TILE, rows - first_row);  // of the rows
    const bool copies = first_column + part * (16 / BYTES) < columns;
    const bool busy = group < left && first_column + column < columns;
    const char* weights = packed + panel * all_steps * BYTES + (first_column - panel) * BYTES + (Int)from_step * step_bytes + part * 16;
    const unsigned* const values = x + first_row * row_words + 4 * four;

    Sum sums[ROWS][COLUMNS];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = 0;

    int filled = 0, at = 0;
    for (int step = -(STAGES - 1) * STEPS; step < steps; step += STEPS) {
        const int ahead = step + (STAGES - 1) * STEPS;
        if (step >= 0) {
            wait_for_groups<STAGES - 2>();
            __syncthreads();
        }
        if (ahead < steps) {
#pragma unroll
            for (int i = 0; i < STAGE / THREADS; i++)
                if (copies && ahead + from_step + i * (THREADS / PARTS) < steps)
                    fetch(&weight_tiles[filled][thread + i * THREADS], weights + (Int)(i * (THREADS / PARTS)) * step_bytes);
            weights += STEPS * step_bytes;
#pragma unroll
            for (int row = from_row; row < from_row + TILE; row += THREADS / FOURS)
                if (row < left && ahead + 4 * four < steps) fetch(&x_tiles[filled][row * (STRIDE / 4) + four], values + (Int)row * row_words + ahead);
        }
        end_group();
        filled = filled + 1 == STAGES ? 0 : filled + 1;
        if (step < 0) continue;
        const char* const tile = (const char*)weight_tiles[at] + column * BYTES;
        const uint4* const rows_of_x = x_tiles[at] + group * (STRIDE / 4);
        at = at + 1 == STAGES ? 0 : at + 1;
        if (!busy) continue;
        if (step + STEPS <= steps) {
#pragma unroll(ROWS * COLUMNS > 8 ? 2 : STEPS / 4)
            for (int s = 0; s < STEPS; s += 4) {
                uint4 fours[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; r++) fours[r] = rows_of_x[r * GROUPS * (STRIDE / 4) + s / 4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    unsigned w[COLUMNS];
                    widen<KIND, COLUMNS>(tile + (s + j) * WIDTH * BYTES, w);
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
                        const unsigned value = j == 0 ? fours[r].x : j == 1 ? fours[r].y : j == 2 ? fours[r].z : fours[r].w;
#pragma unroll
                        for (int c = 0; c < COLUMNS; c++) sums[r][c] = Step<KIND>::add(value, w[c], sums[r][c]);
                    }
                }
            }
        } else {
#pragma unroll 1
            for (int s = 0; s < steps - step; s++) {  // never a step too many: adding 0 would turn -0 into 0
                unsigned w[COLUMNS];
                widen<KIND, COLUMNS>(tile + s * WIDTH * BYTES, w);
#pragma unroll
                for (int r = 0; r < ROWS; r++)
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++)
                        sums[r][c] = Step<KIND>::add(((const unsigned*)(rows_of_x + r * GROUPS * (STRIDE / 4)))[s], w[c], sums[r][c]);
            }
        }
    }
    if (!busy) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const Int row = first_row + group + r * GROUPS, output = first_column + column + c;
            if (row >= rows || output >= n) continue;
            const float value = Step<KIND>::value(sums[r][c], row_scales, scales, row, output);
            y[row * n + output] = bias == nullptr ? value : __fadd_rn(value, bias[output]);
        }
}

#define DT_PRODUCT(NAME, KIND, VECTORS, COLUMNS, ROWS, GROUPS, STEPS)                                                                             \
    extern "C" __global__ void __launch_bounds__(VECTORS * VECTOR / COLUMNS * GROUPS)                                                                   \
        NAME(const char* packed, const unsigned* x, const float* row_scales, const float* scales, const float* bias, float* y, Int n, Int steps, \
                      Int rows) {                                                                                                                       \
        product<KIND, VECTORS, COLUMNS, ROWS, GROUPS, STEPS>(packed, x, row_scales, scales, bias, y, n, steps, rows);                                    \
    }

// ---- rows of x as int8

// 127 / the largest magnitude, and its inverse (native/linear.inl, row_scale). Magnitudes are compared as integers: the same order, and NaN above all.
struct RowScale {
    float to, from;
};

static __device__ RowScale row_scale(unsigned most) {
    RowScale scale = {0.0f, 0.0f};
    const float size = __uint_as_float(most);
    if (most >= 0x7f800000u) scale.from = __uint_as_float(0x7fc00000u);  // not finite: neither is the result
    else if (size >= 1e-30f) scale.to = __fdiv_rn(127.0f, size), scale.from = __fdiv_rn(size, 127.0f);
    return scale;
}

static __device__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
static __device__ int rounded(float x, float to) { return (int)__fsub_rn(__fadd_rn(__fmul_rn(x, to), ROUNDER), ROUNDER); }

static __device__ unsigned largest_of_warp(unsigned value) {
    for (int by = 16; by > 0; by /= 2) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, value, by);
        value = other > value ? other : value;
    }
    return value;
}

constexpr int ROW_THREADS = 512;

// x [rows, k] -> words [rows, (k + 3) / 4 up to a multiple of 4] of four int8 each, zeros behind the last, and a scale of each row; a block a row.
extern "C" __global__ void __launch_bounds__(ROW_THREADS) round_rows(const float* x, unsigned* words, float* scales, Int k) {
    __shared__ unsigned of_warps[ROW_THREADS / 32];
    const float* const own = x + (Int)blockIdx.x * k;
    unsigned most = 0;
    for (Int i = threadIdx.x; i < k; i += ROW_THREADS) {
        const unsigned size = magnitude(own[i]);
        most = size > most ? size : most;
    }
    most = largest_of_warp(most);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
    __syncthreads();
    for (int warp = 0; warp < ROW_THREADS / 32; warp++) most = of_warps[warp] > most ? of_warps[warp] : most;
    const RowScale scale = row_scale(most);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale.from;
    const Int steps = (k + 15) / 16 * 4;
    for (Int step = threadIdx.x; step < steps; step += ROW_THREADS) {
        unsigned word = 0;
        for (int j = 0; j < 4; j++)
            if (4 * step + j < k) word |= ((unsigned)rounded(own[4 * step + j], scale.to) & 255u) << 8 * j;
        words[(Int)blockIdx.x * steps + step] = word;
    }
}

// ---- codes of 8, 4, 3 or 2 bits in groups of 64 inputs

constexpr int GROUP = 64, GROUP_STEPS = GROUP / 4;
constexpr int ROUND_THREADS = 128;

// x [rows, k] -> for each row and group 16 words of four int8, zeros behind the last input, every fourth step side by side, which a lane of `coded` reads at
// once; and of the group {scale, scale times the sum of the int8, that sum, 0}. A warp a row and group.
extern "C" __global__ void __launch_bounds__(ROUND_THREADS) round_groups(const float* x, unsigned short* pairs, uint4* abouts, Int k, Int groups, Int rows) {
    const int lane = (int)(threadIdx.x % 32);
    const Int which = (Int)blockIdx.x * (ROUND_THREADS / 32) + threadIdx.x / 32;
    if (which >= rows * groups) return;
    const Int row = which / groups, at = which % groups * GROUP + 2 * lane;
    const float first = at < k ? x[row * k + at] : 0.0f, second = at + 1 < k ? x[row * k + at + 1] : 0.0f;
    const unsigned a = magnitude(first), b = magnitude(second);
    const RowScale scale = row_scale(largest_of_warp(a > b ? a : b));
    const signed char low = (signed char)rounded(first, scale.to), high = (signed char)rounded(second, scale.to);
    const int place = lane / 2 % 4 * 8 + lane / 8 * 2 + lane % 2;
    pairs[which * (GROUP / 2) + place] = (unsigned short)(((unsigned)low & 255u) | ((unsigned)high & 255u) << 8);
    int sum = (int)low + (int)high;
    for (int by = 16; by > 0; by /= 2) sum += (int)__shfl_xor_sync(0xffffffffu, (unsigned)sum, by);
    if (lane == 0) abouts[which] = make_uint4(__float_as_uint(scale.from), __float_as_uint(__fmul_rn(scale.from, __int2float_rn(sum))), (unsigned)sum, 0u);
}

// sums [16 x 8] += codes [16 x 32] times values [32 x 8], by a warp: m16n8k32 of the matrix units, whose manual says which numbers a lane holds. Lane 4 i + j
// has four codes of each of the rows i and i + 8 at inputs 4 j and 16 + 4 j, as many values of column i, and the sums of those rows with columns 2 j and
// 2 j + 1.
static __device__ void add_product(int* sums, const unsigned* codes, const unsigned* codes_below, unsigned first, unsigned second) {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(codes[0]), "r"(codes_below[0]), "r"(codes[1]), "r"(codes_below[1]), "r"(first), "r"(second));
#else
    const int lane = (int)(threadIdx.x % 32), row = lane / 4 * 4, column = lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const unsigned above = __shfl_sync(0xffffffffu, codes[half], row + j), below = __shfl_sync(0xffffffffu, codes_below[half], row + j);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const unsigned value = __shfl_sync(0xffffffffu, half == 0 ? first : second, column + 4 * c + j);
                sums[c] = dot_codes(value, above, sums[c]);
                sums[2 + c] = dot_codes(value, below, sums[2 + c]);
            }
        }
#endif
}

constexpr int CODE_ROWS = 8, AT_ONCE = 32, OF_WARP = 32 / CODE_ROWS;  // rows of a block, and groups at a time: of a block, and of a warp of it
constexpr int CODE_THREADS = AT_ONCE / OF_WARP * 32;

// A block computes one vector of outputs for CODE_ROWS rows, AT_ONCE groups at a time: each warp the integer sums of some groups, from codes and rows that
// have come into its registers meanwhile; then each thread the chain of one row and output over these groups.
template <int BITS>
static __device__ void coded(const char* packed, const uint4* x, const uint4* abouts, const float* bias, float* y, Int n, Int all_groups, Int rows) {
    constexpr int WORDS = BITS == 3 ? 2 : BITS / 2;  // of an output and lane
    constexpr int BLOCK_BYTES = 4 * VECTOR + BITS * 128, MIDDLE = 1 << (BITS - 1), PAIRS = VECTOR / 2;
    constexpr unsigned MASK = BITS == 8 ? 0xffffffffu : ((1u << BITS) - 1) * 0x01010101u;
    __shared__ uint4 about[CODE_ROWS][AT_ONCE];
    __shared__ float2 scaled[AT_ONCE][CODE_ROWS][PAIRS + 2];  // two more: the lanes of a warp write to different banks
    __shared__ float2 offsets[AT_ONCE][PAIRS];
    const int thread = (int)threadIdx.x, lane = thread % 32, pair = lane / 4, quarter = lane % 4, slot = thread / 32 * OF_WARP;
    const int of_row = thread / AT_ONCE, of_group = thread % AT_ONCE;  // the about that it brings
    const int row = thread / VECTOR, column = thread % VECTOR;         // the chain that it computes
    const Int first_row = (Int)blockIdx.y * CODE_ROWS;
    const int count = smaller(CODE_ROWS, rows - first_row), groups = (int)all_groups;
    // where the next ones lie
    const char* block = packed + ((Int)blockIdx.x * all_groups + slot) * BLOCK_BYTES + 4 * pair;
    const uint4* own_x = x + ((first_row + pair) * all_groups + slot) * (GROUP_STEPS / 4) + quarter;
    const uint4* of_rows[2] = {abouts + (first_row + 2 * quarter) * all_groups + slot, abouts + (first_row + 2 * quarter + 1) * all_groups + slot};
    const uint4* own_about = abouts + (first_row + of_row) * all_groups + of_group;
    unsigned words[OF_WARP][2][WORDS], scales[OF_WARP], starts[OF_WARP];  // of two outputs; scales and offsets as they lie
    uint4 values[OF_WARP], next_about = make_uint4(0, 0, 0, 0);
    unsigned whole[OF_WARP][2];  // of two rows, their sums
    float sum = 0.0f;
    for (int tile = -AT_ONCE; tile < groups; tile += AT_ONCE) {
        if (tile >= 0) {
            about[of_row][of_group] = next_about;
#pragma unroll
            for (int i = 0; i < OF_WARP; i++) {
                if (tile + slot + i >= groups) continue;
                unsigned codes[2][4];  // of a step each: quarter, and every fourth behind it
#pragma unroll
                for (int c = 0; c < 2; c++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const unsigned* const own = words[i][c];
                        if constexpr (BITS == 3) codes[c][j] = (own[0] >> 2 * j & 0x03030303u) | (own[1] >> (quarter / 2 + 2 * j) & 0x01010101u) << 2;
                        else codes[c][j] = own[j % WORDS] >> j / WORDS * BITS & MASK;
                    }
                const int left = -MIDDLE * (int)whole[i][0], right = -MIDDLE * (int)whole[i][1];
                int sums[4] = {left, right, left, right};
                add_product(sums, codes[0], codes[1], values[i].x, values[i].y);
                add_product(sums, codes[0] + 2, codes[1] + 2, values[i].z, values[i].w);
                const float first = half_to_float(scales[i] & 0xffffu), second = half_to_float(scales[i] >> 16);
#pragma unroll
                for (int r = 0; r < 2; r++)
                    scaled[slot + i][2 * quarter + r][pair] =
                        make_float2(__fmul_rn(__int2float_rn(sums[r]), first), __fmul_rn(__int2float_rn(sums[2 + r]), second));
                if (quarter == 0) offsets[slot + i][pair] = make_float2(half_to_float(starts[i] & 0xffffu), half_to_float(starts[i] >> 16));
            }
        }
        const int ahead = tile + AT_ONCE;
#pragma unroll
        for (int i = 0; i < OF_WARP; i++) {
            if (ahead + slot + i >= groups) continue;
            scales[i] = *(const unsigned*)(block + i * BLOCK_BYTES), starts[i] = *(const unsigned*)(block + i * BLOCK_BYTES + 2 * VECTOR);
            const char* const plane = block + i * BLOCK_BYTES + 4 * VECTOR + 4 * pair;
#pragma unroll
            for (int j = 0; j < WORDS; j++) {
                const uint2 both = *(const uint2*)(plane + 64 * (BITS == 3 && j == 1 ? 4 + quarter % 2 : quarter + 4 * j));
                words[i][0][j] = both.x, words[i][1][j] = both.y;
            }
            values[i] = pair < count ? own_x[i * (GROUP_STEPS / 4)] : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int r = 0; r < 2; r++) whole[i][r] = 2 * quarter + r < count ? of_rows[r][i].z : 0;
        }
        if (of_row < count && ahead + of_group < groups) next_about = *own_about;
        block += AT_ONCE * BLOCK_BYTES, own_x += AT_ONCE * (GROUP_STEPS / 4), of_rows[0] += AT_ONCE, of_rows[1] += AT_ONCE, own_about += AT_ONCE;
        if (tile < 0) continue;
        __syncthreads();
        const int there = smaller(AT_ONCE, groups - tile);
        if (row < count)
#pragma unroll 8
            for (int group = 0; group < there; group++) {
                const uint4 found = about[row][group];
                sum = __fmaf_rn(((const float*)scaled[group][row])[column], __uint_as_float(found.x), sum);
                sum = __fmaf_rn(((const float*)offsets[group])[column], __uint_as_float(found.y), sum);
            }
        __syncthreads();
    }
    const Int output = (Int)blockIdx.x * VECTOR + column;
    if (row < count && output < n) y[(first_row + row) * n + output] = bias == nullptr ? sum : __fadd_rn(sum, bias[output]);
}

#define DT_CODED(BITS)                                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(CODE_THREADS) codes##BITS(const char* packed, const uint4* x, const uint4* abouts, const float* bias,  \
                                                                           float* y, Int n, Int groups, Int rows) {                                     \
        coded<BITS>(packed, x, abouts, bias, y, n, groups, rows);                                                                                       \
    }

DT_CODED(8)
DT_CODED(4)
DT_CODED(3)
DT_CODED(2)
