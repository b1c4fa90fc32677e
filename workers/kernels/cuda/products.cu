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

#define DT_PRODUCT(NAME, KIND, TILE, VECTORS, COLUMNS, ROWS, GROUPS, STEPS)                                                                             \
    extern "C" __global__ void __launch_bounds__(VECTORS * VECTOR / COLUMNS * GROUPS)                                                                   \
        NAME##_##TILE(const char* packed, const unsigned* x, const float* row_scales, const float* scales, const float* bias, float* y, Int n, Int steps, \
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

// x [rows, k] -> for each row and group 16 words of four int8, zeros behind the last input, and of it {scale, scale times the sum of the int8, that sum, 0};
// a warp a row and group.
extern "C" __global__ void __launch_bounds__(ROUND_THREADS) round_groups(const float* x, unsigned short* pairs, uint4* abouts, Int k, Int groups, Int rows) {
    const int lane = (int)(threadIdx.x % 32);
    const Int which = (Int)blockIdx.x * (ROUND_THREADS / 32) + threadIdx.x / 32;
    if (which >= rows * groups) return;
    const Int row = which / groups, at = which % groups * GROUP + 2 * lane;
    const float first = at < k ? x[row * k + at] : 0.0f, second = at + 1 < k ? x[row * k + at + 1] : 0.0f;
    const unsigned a = magnitude(first), b = magnitude(second);
    const RowScale scale = row_scale(largest_of_warp(a > b ? a : b));
    const signed char low = (signed char)rounded(first, scale.to), high = (signed char)rounded(second, scale.to);
    pairs[which * (GROUP / 2) + lane] = (unsigned short)(((unsigned)low & 255u) | ((unsigned)high & 255u) << 8);
    int sum = (int)low + (int)high;
    for (int by = 16; by > 0; by /= 2) sum += (int)__shfl_xor_sync(0xffffffffu, (unsigned)sum, by);
    if (lane == 0) abouts[which] = make_uint4(__float_as_uint(scale.from), __float_as_uint(__fmul_rn(scale.from, __int2float_rn(sum))), (unsigned)sum, 0u);
}

// A word of the plane of so many bits at a step: the codes of four inputs of one output.
template <int BITS>
static __device__ unsigned code_word(const unsigned* plane, int step) {
    constexpr int LOADS = 2 * BITS;  // words of an output in the plane of a block
    constexpr unsigned MASK = BITS == 8 ? 0xffffffffu : ((1u << BITS) - 1) * 0x01010101u;
    return plane[step % LOADS] >> step / LOADS * BITS & MASK;
}

constexpr int CODE_ROWS = 8;  // of a block

// A block computes one vector of outputs for CODE_ROWS rows, AT_ONCE groups at a time: each thread the integer sums of one group and two outputs, for all
// rows, which it reads from memory, as nobody else needs them; then each the chain of one row and output over these groups.
template <int BITS, int AT_ONCE>
static __device__ void coded(const char* packed, const uint4* x, const uint4* abouts, const float* bias, float* y, Int n, Int groups, Int rows) {
    constexpr int WORDS = 2 * BITS, BLOCK_BYTES = 4 * VECTOR + WORDS * 64, MIDDLE = 1 << (BITS - 1), PAIRS = VECTOR / 2, FOURS = GROUP_STEPS / 4;
    static_assert(AT_ONCE * PAIRS >= CODE_ROWS * VECTOR, "there is a thread for every row and output");
    __shared__ uint4 about[CODE_ROWS][AT_ONCE];
    __shared__ float scaled[AT_ONCE][CODE_ROWS + 1][VECTOR];  // one more: neighbouring groups lie in other banks
    __shared__ float offsets[AT_ONCE][VECTOR];
    const int thread = (int)threadIdx.x, slot = thread / PAIRS, pair = thread % PAIRS;
    const int of_row = thread / AT_ONCE, of_group = thread % AT_ONCE;  // the about that it brings
    const int row = thread / VECTOR, column = thread % VECTOR;         // the chain that it computes
    const Int first_row = (Int)blockIdx.y * CODE_ROWS;
    const int count = smaller(CODE_ROWS, rows - first_row);
    const char* const blocks = packed + (Int)blockIdx.x * groups * BLOCK_BYTES;
    unsigned next[2][WORDS], next_scales = 0, next_offsets = 0;
    uint4 next_about = make_uint4(0, 0, 0, 0);
    float sum = 0.0f;
    for (Int tile = -AT_ONCE; tile < groups; tile += AT_ONCE) {
        unsigned codes[2][GROUP_STEPS];
        const unsigned both_scales = next_scales, both_offsets = next_offsets;
        if (tile >= 0) {
            about[of_row][of_group] = next_about;
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int step = 0; step < GROUP_STEPS; step++)
                    codes[c][step] = BITS == 3 ? code_word<2>(next[c], step) | code_word<1>(next[c] + 4 * (BITS == 3), step) << 2 : code_word<BITS>(next[c], step);
        }
        const Int ahead = tile + AT_ONCE;
        if (ahead + slot < groups) {
            const unsigned* const block = (const unsigned*)(blocks + (ahead + slot) * BLOCK_BYTES);
            next_scales = block[pair], next_offsets = block[PAIRS + pair];
#pragma unroll
            for (int i = 0; i < WORDS; i++) {
                const uint2 two = ((const uint2*)(block + VECTOR))[i * PAIRS + pair];
                next[0][i] = two.x, next[1][i] = two.y;
            }
        }
        if (of_row < count && ahead + of_group < groups) next_about = abouts[(first_row + of_row) * groups + ahead + of_group];
        if (tile < 0) continue;
        __syncthreads();
        const int there = smaller(AT_ONCE, groups - tile);
        if (slot < there) {
            const float first = half_to_float(both_scales & 0xffffu), second = half_to_float(both_scales >> 16);
            offsets[slot][2 * pair] = half_to_float(both_offsets & 0xffffu), offsets[slot][2 * pair + 1] = half_to_float(both_offsets >> 16);
#pragma unroll 2
            for (int r = 0; r < count; r++) {
                const uint4* const values = x + ((first_row + r) * groups + tile + slot) * FOURS;
                uint4 fours[FOURS];
#pragma unroll
                for (int i = 0; i < FOURS; i++) fours[i] = values[i];
                int sums[2];
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    sums[c] = -MIDDLE * (int)about[r][slot].z;
#pragma unroll
                    for (int i = 0; i < FOURS; i++) {
                        sums[c] = dot_codes(fours[i].x, codes[c][4 * i], sums[c]);
                        sums[c] = dot_codes(fours[i].y, codes[c][4 * i + 1], sums[c]);
                        sums[c] = dot_codes(fours[i].z, codes[c][4 * i + 2], sums[c]);
                        sums[c] = dot_codes(fours[i].w, codes[c][4 * i + 3], sums[c]);
                    }
                }
                scaled[slot][r][2 * pair] = __fmul_rn(__int2float_rn(sums[0]), first);
                scaled[slot][r][2 * pair + 1] = __fmul_rn(__int2float_rn(sums[1]), second);
            }
        }
        __syncthreads();
        if (row < count)
#pragma unroll 4
            for (int group = 0; group < there; group++) {
                const uint4 found = about[row][group];
                sum = __fmaf_rn(scaled[group][row][column], __uint_as_float(found.x), sum);
                sum = __fmaf_rn(offsets[group][column], __uint_as_float(found.y), sum);
            }
        __syncthreads();
    }
    const Int output = (Int)blockIdx.x * VECTOR + column;
    if (row < count && output < n) y[(first_row + row) * n + output] = bias == nullptr ? sum : __fadd_rn(sum, bias[output]);
}

#define DT_CODED(BITS, AT_ONCE)                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(AT_ONCE * VECTOR / 2) codes##BITS(const char* packed, const uint4* x, const uint4* abouts,             \
                                                                                   const float* bias, float* y, Int n, Int groups, Int rows) {          \
        coded<BITS, AT_ONCE>(packed, x, abouts, bias, y, n, groups, rows);                                                                              \
    }

DT_CODED(8, 32)
DT_CODED(4, 32)
DT_CODED(3, 32)
DT_CODED(2, 32)
