// y = x W^T + bias on a GPU, over the packed matrices of the CPU's kernels as they lie in memory (native/packing.h), with the bytes that those kernels give.
//
// A sum of 16-bit weights is one chain of fma along k, ascending, as in native/linear.inl; one of int8 is an exact integer; one of codes is the chain
// over groups of native/grouped.inl. So a row has the same bytes whatever its neighbours are, on every architecture, and the same as on the CPU. Nothing here
// may be contracted or reordered by a compiler: every rounding is spelled out (__fmaf_rn and its like).
//
// Each weight is read from memory once for every 4, 16, 32 or 64 rows, and widened in shared memory. Arguments are addresses and 64-bit integers.
//
// Compiled by NVRTC for the card that is there (workers/devices/nvidia); by g++ with tests/support/cuda/cpu.h before it in tests. Neither has a header at hand.

typedef long long Int;

constexpr int FP16 = 1, BF16 = 2, INT8 = 3;  // kernels.h
constexpr int PANEL = 48, VECTOR = 16;       // packing.h: outputs of a panel, and of a vector
constexpr int THREADS = 192;
constexpr float ROUNDER = 12582912.0f;                 // packing.h

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

// Sixteen bytes of packed weights as words of 32 bits: four, or eight of 16-bit weights.
template <int KIND>
static __device__ void widen(uint4 from, uint4* to) {
    if constexpr (KIND == INT8) {
        to[0] = from;
    } else {
        to[0] = make_uint4(low_half<KIND>(from.x), high_half<KIND>(from.x), low_half<KIND>(from.y), high_half<KIND>(from.y));
        to[1] = make_uint4(low_half<KIND>(from.z), high_half<KIND>(from.z), low_half<KIND>(from.w), high_half<KIND>(from.w));
    }
}

// ---- 16 bits, int8

// A block computes one panel of outputs for TILE rows: each thread of GROUPS groups COLUMNS outputs of ROWS rows. STEPS steps of the panel and of the rows lie
// in shared memory, while the next ones are already on their way into the registers of all threads.
template <int KIND, int COLUMNS, int ROWS, int GROUPS, int STEPS>
static __device__ void product(const char* packed, const unsigned* x, const float* row_scales, const float* scales, const float* bias, float* y, Int n,
                               Int steps, Int rows) {
    constexpr int ACROSS = PANEL / COLUMNS, TILE = GROUPS * ROWS;
    static_assert(GROUPS * ACROSS <= THREADS, "there are no more threads");
    constexpr int BYTES = KIND == INT8 ? 4 : 2, WIDE = 4 / BYTES;  // of a step; WIDE: words that a loaded one becomes
    constexpr int STRIDE = STEPS + 4;  // words of a row of x: the rows of neighbouring groups lie in other banks
    constexpr int LOADS = (STEPS * PANEL * BYTES / 16 + THREADS - 1) / THREADS, VALUES = (TILE * STEPS + THREADS - 1) / THREADS;
    typedef typename Step<KIND>::Sum Sum;
    __shared__ uint4 weight_tile[STEPS * PANEL / 4];
    __shared__ uint4 x_tile[TILE * STRIDE / 4];
    const unsigned* const tile = (const unsigned*)weight_tile;
    unsigned* const x_words = (unsigned*)x_tile;

    const int thread = (int)threadIdx.x, group = thread / ACROSS, column = thread % ACROSS * COLUMNS;
    const Int first_row = (Int)blockIdx.y * TILE, first_column = (Int)blockIdx.x * PANEL;
    const int width = smaller(PANEL, (n + VECTOR - 1) / VECTOR * VECTOR - first_column);
    const char* const weights = packed + first_column * steps * BYTES;
    const bool busy = group < GROUPS && first_row + group < rows && column < width;

    uint4 next_weights[LOADS];
    unsigned next_x[VALUES];
    Sum sums[ROWS][COLUMNS];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = 0;

    for (Int step = -STEPS; step < steps; step += STEPS) {
        if (step >= 0) {  // what was on its way has come
            const int chunks = smaller(STEPS, steps - step) * width * BYTES / 16;
            __syncthreads();
#pragma unroll
            for (int i = 0; i < LOADS; i++)
                if (thread + i * THREADS < chunks) widen<KIND>(next_weights[i], weight_tile + (thread + i * THREADS) * WIDE);
#pragma unroll
            for (int i = 0; i < VALUES; i++) {
                const int at = thread + i * THREADS;
                if (at < TILE * STEPS) x_words[at / STEPS * STRIDE + at % STEPS] = next_x[i];
            }
            __syncthreads();
        }
        const Int ahead = step + STEPS;
        if (ahead < steps) {
            const int chunks = smaller(STEPS, steps - ahead) * width * BYTES / 16;
            const uint4* const source = (const uint4*)(weights + ahead * width * BYTES);
#pragma unroll
            for (int i = 0; i < LOADS; i++)
                if (thread + i * THREADS < chunks) next_weights[i] = source[thread + i * THREADS];
#pragma unroll
            for (int i = 0; i < VALUES; i++) {
                const int at = thread + i * THREADS;
                const Int row = first_row + at / STEPS, k = ahead + at % STEPS;
                next_x[i] = at < TILE * STEPS && row < rows && k < steps ? x[row * steps + k] : 0u;
            }
        }
        if (step < 0 || !busy) continue;
        const int count = smaller(STEPS, steps - step);
        int s = 0;
#pragma unroll(COLUMNS == 1 ? 4 : 1)
        for (; s + 4 <= count; s += 4) {
            unsigned values[ROWS][4];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const uint4 four = x_tile[((group + r * GROUPS) * STRIDE + s) / 4];
                values[r][0] = four.x, values[r][1] = four.y, values[r][2] = four.z, values[r][3] = four.w;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                unsigned w[COLUMNS];
                if (COLUMNS == 4) {
                    const uint4 four = weight_tile[((s + j) * width + column) / 4];
                    w[0] = four.x, w[1 % COLUMNS] = four.y, w[2 % COLUMNS] = four.z, w[3 % COLUMNS] = four.w;
                } else {
                    w[0] = tile[(s + j) * width + column];
                }
#pragma unroll
                for (int r = 0; r < ROWS; r++)
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) sums[r][c] = Step<KIND>::add(values[r][j], w[c], sums[r][c]);
            }
        }
        for (; s < count; s++)  // never a step too many: adding 0 would turn -0 into 0
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int c = 0; c < COLUMNS; c++)
                    sums[r][c] = Step<KIND>::add(x_words[(group + r * GROUPS) * STRIDE + s], tile[s * width + column + c], sums[r][c]);
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

#define DT_PRODUCT(NAME, KIND, TILE, COLUMNS, ROWS, GROUPS, STEPS)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME##_##TILE(const char* packed, const unsigned* x, const float* row_scales,                \
                                                                        const float* scales, const float* bias, float* y, Int n, Int steps, Int rows) { \
        product<KIND, COLUMNS, ROWS, GROUPS, STEPS>(packed, x, row_scales, scales, bias, y, n, steps, rows);                                                   \
    }
// Of 16 rows half of the threads compute: each number that they read from shared memory meets two of the other side.
#define DT_PRODUCTS(NAME, KIND)               \
    DT_PRODUCT(NAME, KIND, 4, 1, 1, 4, 128)   \
    DT_PRODUCT(NAME, KIND, 16, 4, 2, 8, 64)   \
    DT_PRODUCT(NAME, KIND, 32, 4, 2, 16, 64)  \
    DT_PRODUCT(NAME, KIND, 64, 4, 4, 16, 32)

DT_PRODUCTS(fp16, FP16)
DT_PRODUCTS(bf16, BF16)
DT_PRODUCTS(int8, INT8)

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

// x [rows, k] -> words [rows, (k + 3) / 4] of four int8 each, zeros behind the last, and a scale of each row; a block a row.
extern "C" __global__ void __launch_bounds__(THREADS) round_rows(const float* x, unsigned* words, float* scales, Int k) {
    __shared__ unsigned of_warps[THREADS / 32];
    const float* const own = x + (Int)blockIdx.x * k;
    unsigned most = 0;
    for (Int i = threadIdx.x; i < k; i += THREADS) {
        const unsigned size = magnitude(own[i]);
        most = size > most ? size : most;
    }
    most = largest_of_warp(most);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
    __syncthreads();
    for (int warp = 0; warp < THREADS / 32; warp++) most = of_warps[warp] > most ? of_warps[warp] : most;
    const RowScale scale = row_scale(most);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale.from;
    const Int steps = (k + 3) / 4;
    for (Int step = threadIdx.x; step < steps; step += THREADS) {
        unsigned word = 0;
        for (int j = 0; j < 4; j++)
            if (4 * step + j < k) word |= ((unsigned)rounded(own[4 * step + j], scale.to) & 255u) << 8 * j;
        words[(Int)blockIdx.x * steps + step] = word;
    }
}

// ---- codes of 8, 4, 3 or 2 bits in groups of 64 inputs

constexpr int GROUP = 64, GROUP_STEPS = GROUP / 4;
constexpr int AT_ONCE = 8;                            // groups of a tile, and rows of a block
constexpr int CODE_THREADS = AT_ONCE * VECTOR;

// x [rows, k] -> for each row and group 16 words of four int8, zeros behind the last input, and of it {scale, scale times the sum of the int8, that sum, 0};
// a warp a row and group.
extern "C" __global__ void __launch_bounds__(CODE_THREADS) round_groups(const float* x, unsigned short* pairs, uint4* abouts, Int k, Int groups, Int rows) {
    const int lane = (int)(threadIdx.x % 32);
    const Int which = (Int)blockIdx.x * (CODE_THREADS / 32) + threadIdx.x / 32;
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

// A block computes one vector of outputs for AT_ONCE rows: each thread the integer sums of one group and output, for all rows; then each the chain of one row
// and output over these groups.
template <int BITS>
static __device__ void coded(const char* packed, const unsigned* x, const uint4* abouts, const float* bias, float* y, Int n, Int groups, Int rows) {
    constexpr int WORDS = 2 * BITS, BLOCK_BYTES = 4 * VECTOR + WORDS * 64, MIDDLE = 1 << (BITS - 1);
    __shared__ unsigned values[AT_ONCE][AT_ONCE][GROUP_STEPS];  // row, group, step
    __shared__ uint4 about[AT_ONCE][AT_ONCE];
    __shared__ float scaled[AT_ONCE][AT_ONCE][VECTOR];          // group, row, output
    __shared__ float offsets[AT_ONCE][VECTOR];
    const int column = (int)(threadIdx.x % VECTOR), slot = (int)(threadIdx.x / VECTOR);
    const Int first_row = (Int)blockIdx.y * AT_ONCE;
    const int count = smaller(AT_ONCE, rows - first_row);
    const char* const blocks = packed + (Int)blockIdx.x * groups * BLOCK_BYTES;
    unsigned next[WORDS], next_scale = 0, next_offset = 0;
    float sum = 0.0f;
    for (Int tile = -AT_ONCE; tile < groups; tile += AT_ONCE) {
        unsigned words[WORDS];
        const unsigned scale = next_scale, offset = next_offset;
#pragma unroll
        for (int i = 0; i < WORDS; i++) words[i] = tile < 0 ? 0u : next[i];
        const Int ahead = tile + AT_ONCE + slot;
        if (ahead < groups) {
            const char* const block = blocks + ahead * BLOCK_BYTES;
            next_scale = ((const unsigned short*)block)[column];
            next_offset = ((const unsigned short*)block)[VECTOR + column];
#pragma unroll
            for (int i = 0; i < WORDS; i++) next[i] = ((const unsigned*)(block + 4 * VECTOR))[i * VECTOR + column];
        }
        if (tile < 0) continue;
        const int there = smaller(AT_ONCE, groups - tile);
        for (int i = (int)threadIdx.x; i < count * there * GROUP_STEPS; i += CODE_THREADS) {
            const int row = i / (there * GROUP_STEPS), rest = i % (there * GROUP_STEPS);
            values[row][rest / GROUP_STEPS][rest % GROUP_STEPS] = x[((first_row + row) * groups + tile) * GROUP_STEPS + rest];
        }
        if (slot < count && column < there) about[slot][column] = abouts[(first_row + slot) * groups + tile + column];
        __syncthreads();
        if (slot < there) {
            unsigned codes[GROUP_STEPS];
#pragma unroll
            for (int step = 0; step < GROUP_STEPS; step++)
                codes[step] = BITS == 3 ? code_word<2>(words, step) | code_word<1>(words + 4 * (BITS == 3), step) << 2 : code_word<BITS>(words, step);
            const float factor = half_to_float(scale);
            offsets[slot][column] = half_to_float(offset);
            for (int row = 0; row < count; row++) {
                int whole = -MIDDLE * (int)about[row][slot].z;
#pragma unroll
                for (int step = 0; step < GROUP_STEPS; step++) whole = dot_codes(values[row][slot][step], codes[step], whole);
                scaled[slot][row][column] = __fmul_rn(__int2float_rn(whole), factor);
            }
        }
        __syncthreads();
        if (slot < count)
            for (int group = 0; group < there; group++) {
                const uint4 of_row = about[slot][group];
                sum = __fmaf_rn(scaled[group][slot][column], __uint_as_float(of_row.x), sum);
                sum = __fmaf_rn(offsets[group][column], __uint_as_float(of_row.y), sum);
            }
        __syncthreads();
    }
    const Int output = (Int)blockIdx.x * VECTOR + column;
    if (slot < count && output < n) y[(first_row + slot) * n + output] = bias == nullptr ? sum : __fadd_rn(sum, bias[output]);
}

#define DT_CODED(BITS)                                                                                                                                \
    extern "C" __global__ void __launch_bounds__(CODE_THREADS) codes##BITS(const char* packed, const unsigned* x, const uint4* abouts, const float* bias, \
                                                                           float* y, Int n, Int groups, Int rows) {                                   \
        coded<BITS>(packed, x, abouts, bias, y, n, groups, rows);                                                                                     \
    }

DT_CODED(8)
DT_CODED(4)
DT_CODED(3)
DT_CODED(2)
