// y = x W^T + bias on a GPU over a W whose weights are the blocks of a GGUF file, as the CPU's kernels have them in memory (native/blocks.h), with the bytes
// that those kernels give (native/blocks.inl says which function it is: rows of x in int8, 32 inputs with a scale, exact sums, fma in ascending order).
//
// The formats are those of models/backends/device/own_blocks.py, which puts a line of DT_BLOCKS for each behind this source.
//
// Compiled as products.cu is, and behind it.

enum Scales : int { HALF, HALF_AND_MORE, POWER, BYTE, BYTE_AND_LESS, BYTES, BYTES_AND_LESS };  // blocks.h

constexpr int WIDTH = 32, BLOCK_STEPS = 8, SUPER = 8;  // inputs of a block, steps of four inputs in it, and blocks that share scales of scales

// x [rows, k] -> words [rows, blocks, 8] of four int8 each, and about each block D, E = D X, X, and the sum of its first 16 inputs; a warp a block.
extern "C" __global__ void __launch_bounds__(ROUND_THREADS) round_blocks(const float* x, signed char* values, uint4* abouts, Int k, Int blocks, Int rows) {
    const int lane = (int)(threadIdx.x % 32);
    const Int which = (Int)blockIdx.x * (ROUND_THREADS / 32) + threadIdx.x / 32;
    if (which >= rows * blocks) return;
    const float value = x[which / blocks * k + which % blocks * WIDTH + lane];
    const RowScale scale = row_scale(largest_of_warp(magnitude(value)));
    const int own = rounded(value, scale.to);
    values[which * WIDTH + lane] = (signed char)own;
    int half = (int)(signed char)own;
    for (int by = 8; by > 0; by /= 2) half += (int)__shfl_xor_sync(0xffffffffu, (unsigned)half, by);
    const int whole = half + (int)__shfl_xor_sync(0xffffffffu, (unsigned)half, 16);
    if (lane == 0)
        abouts[which] = make_uint4(__float_as_uint(scale.from), __float_as_uint(__fmul_rn(scale.from, __int2float_rn(whole))), (unsigned)whole, (unsigned)half);
}

template <int BITS>
static __device__ unsigned codes_of_step(const unsigned* words, int step) {
    if constexpr (BITS == 8) return words[step];
    else if constexpr (BITS < 4) {
        const unsigned low = words[step % 2] >> step / 2 * 2 & 0x03030303u;
        if constexpr (BITS == 2) return low;
        else return low | (words[2] >> step & 0x01010101u) << 2;
    } else {
        const unsigned low = words[step % 4] >> step / 4 * 4 & 0x0f0f0f0fu;
        if constexpr (BITS == 4) return low;
        else if constexpr (BITS == 5) return low | (words[4] >> step & 0x01010101u) << 4;
        else return low | (words[4 + step % 2] >> step / 2 * 2 & 0x03030303u) << 4;
    }
}

// The numbers that four codes of 4 bits stand for.
static __device__ unsigned look_up(unsigned codes, const unsigned* numbers) {
    unsigned found = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 8) found |= (numbers[codes >> i >> 2 & 3] >> (codes >> i & 3) * 8 & 255u) << i;
    return found;
}

constexpr int BLOCK_ROWS = 8, BLOCKS_AT_ONCE = 32, BLOCK_WARPS = 8, BLOCKS_OF_WARP = BLOCKS_AT_ONCE / BLOCK_WARPS, BLOCK_THREADS = BLOCK_WARPS * 32;

// A block of threads computes 16 outputs for BLOCK_ROWS rows, BLOCKS_AT_ONCE blocks of inputs at a time: each warp the exact sums of some of these, half of its
// lanes of every other row, from codes that have come into its registers meanwhile; then each thread the chain of one row and output over them.
template <int BITS, int MIDDLE, bool SIGNED, int SCALES, bool TABLE>
static __device__ void block_product(const char* packed, const uint4* x, const uint4* abouts, const float* bias, float* y, Int n, Int apart, Int all_blocks,
                                     Int rows, const unsigned* numbers) {
    constexpr bool TWICE = SCALES >= BYTE, LESS = SCALES == BYTE_AND_LESS || SCALES == BYTES_AND_LESS, MORE = LESS || SCALES == HALF_AND_MORE;
    constexpr int HALVES = SCALES == BYTES || SCALES == BYTES_AND_LESS ? 2 : 1;
    constexpr int SCALE_BYTES = SCALES == POWER || SCALES == BYTE ? 16 : SCALES == HALF || SCALES == BYTE_AND_LESS || SCALES == BYTES ? 32 : 64;
    constexpr int SIZE = SCALE_BYTES + 64 * BITS, SUPER_BYTES = !TWICE ? 0 : LESS ? 64 : 32;
    __shared__ float scaled[BLOCKS_AT_ONCE][BLOCK_ROWS][VECTOR];
    __shared__ float added[MORE ? BLOCKS_AT_ONCE : 1][HALVES][VECTOR];
    __shared__ uint4 about[BLOCK_ROWS][BLOCKS_AT_ONCE];
    const int thread = (int)threadIdx.x, lane = thread % 32, output = lane % VECTOR, odd = lane / VECTOR, slot = thread / 32 * BLOCKS_OF_WARP;
    const int of_row = thread / BLOCKS_AT_ONCE, of_block = thread % BLOCKS_AT_ONCE;          // the about that it brings
    const int row = thread / VECTOR, column = thread % VECTOR;                               // the chain that it computes
    const Int first_row = (Int)blockIdx.y * BLOCK_ROWS;
    const int count = smaller(BLOCK_ROWS, rows - first_row), blocks = (int)all_blocks;
    const char* const own = packed + (Int)blockIdx.x * (all_blocks * SIZE + all_blocks / SUPER * SUPER_BYTES);
    unsigned words[BLOCKS_OF_WARP][BITS];
    float scales[BLOCKS_OF_WARP][HALVES], more[BLOCKS_OF_WARP][HALVES];
    uint4 next_about = make_uint4(0, 0, 0, 0);
    float sum = 0.0f;
    for (int tile = -BLOCKS_AT_ONCE; tile < blocks; tile += BLOCKS_AT_ONCE) {
        if (tile >= 0) {
            about[of_row][of_block] = next_about;
#pragma unroll
            for (int i = 0; i < BLOCKS_OF_WARP; i++) {
                const int block = tile + slot + i;
                if (block >= blocks) continue;
                unsigned codes[BLOCK_STEPS];
#pragma unroll
                for (int step = 0; step < BLOCK_STEPS; step++) {
                    codes[step] = codes_of_step<BITS>(words[i], step);
                    if constexpr (TABLE) codes[step] = look_up(codes[step], numbers);
                }
                for (int r = odd; r < count; r += 2) {
                    const Int at = (first_row + r) * all_blocks + block;
                    const uint4 low = x[2 * at], high = x[2 * at + 1];
                    const unsigned inputs[BLOCK_STEPS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
                    const uint4 sums = abouts[at];
                    int found[HALVES];
                    if constexpr (HALVES == 1) found[0] = -MIDDLE * (int)sums.z;
                    else found[0] = -MIDDLE * (int)sums.w, found[1] = -MIDDLE * ((int)sums.z - (int)sums.w);
#pragma unroll
                    for (int step = 0; step < BLOCK_STEPS; step++) {
                        int& into = found[step / (BLOCK_STEPS / HALVES)];
                        into = SIGNED ? dot_signed(inputs[step], codes[step], into) : dot_codes(inputs[step], codes[step], into);
                    }
                    float whole = __fmul_rn(__int2float_rn(found[0]), scales[i][0]);
                    if constexpr (HALVES == 2) whole = __fmaf_rn(__int2float_rn(found[1]), scales[i][1], whole);
                    scaled[slot + i][r][output] = whole;
                }
                if constexpr (MORE)
                    if (odd == 0)
#pragma unroll
                        for (int h = 0; h < HALVES; h++) added[slot + i][h][output] = more[i][h];
            }
        }
        const int ahead = tile + BLOCKS_AT_ONCE;
#pragma unroll
        for (int i = 0; i < BLOCKS_OF_WARP; i++) {
            const int block = ahead + slot + i;
            if (block >= blocks) continue;
            const char* const at = own + (Int)block * SIZE + (Int)(block / SUPER + 1) * SUPER_BYTES;
#pragma unroll
            for (int j = 0; j < BITS; j++) words[i][j] = *(const unsigned*)(at + SCALE_BYTES + 64 * j + 4 * output);
            if constexpr (SCALES == HALF || SCALES == HALF_AND_MORE) scales[i][0] = half_to_float(((const unsigned short*)at)[output]);
            if constexpr (SCALES == HALF_AND_MORE) more[i][0] = half_to_float(((const unsigned short*)at)[VECTOR + output]);
            if constexpr (SCALES == POWER) scales[i][0] = __fmul_rn(__uint_as_float(((unsigned)((const unsigned char*)at)[output] + 1u) << 23), 0.25f);
            if constexpr (TWICE) {
                const unsigned short* const super = (const unsigned short*)(own + (Int)(block / SUPER) * (SUPER * SIZE + SUPER_BYTES));
                const float d = half_to_float(super[output]);
#pragma unroll
                for (int h = 0; h < HALVES; h++) {
                    const int place = VECTOR * h + output;
                    const int scale = LESS ? (int)((const unsigned char*)at)[place] : (int)((const signed char*)at)[place];
                    scales[i][h] = __fmul_rn(d, __int2float_rn(scale));
                    if constexpr (LESS) {
                        const int least = (int)((const unsigned char*)at)[VECTOR * HALVES + place];
                        more[i][h] = __fsub_rn(0.0f, __fmul_rn(half_to_float(super[VECTOR + output]), __int2float_rn(least)));
                    }
                }
            }
        }
        if (of_row < count && ahead + of_block < blocks) next_about = abouts[(first_row + of_row) * all_blocks + ahead + of_block];
        if (tile < 0) continue;
        __syncthreads();
        const int there = smaller(BLOCKS_AT_ONCE, blocks - tile);
        if (row < count)
#pragma unroll 8
            for (int block = 0; block < there; block++) {
                const uint4 found = about[row][block];
                const float factor = __uint_as_float(found.x);
                sum = __fmaf_rn(scaled[block][row][column], factor, sum);
                if constexpr (MORE && HALVES == 1) sum = __fmaf_rn(added[block][0][column], __uint_as_float(found.y), sum);
                if constexpr (MORE && HALVES == 2) {
                    sum = __fmaf_rn(added[block][0][column], __fmul_rn(factor, __int2float_rn((int)found.w)), sum);
                    sum = __fmaf_rn(added[block][1][column], __fmul_rn(factor, __int2float_rn((int)found.z - (int)found.w)), sum);
                }
            }
        __syncthreads();
    }
    const Int first = (Int)blockIdx.x * VECTOR + column;
    if (row < count && first < n) y[(first_row + row) * apart + first] = bias == nullptr ? sum : __fadd_rn(sum, bias[first]);
}

// y: the part's first output of the first row; rows of it lie `apart`.
#define DT_BLOCKS(NAME, BITS, MIDDLE, SIGNED, SCALES, TABLE, ...)                                                                                        \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) blocks_##NAME(const char* packed, const uint4* x, const uint4* abouts, const float* bias,  \
                                                                              float* y, Int n, Int apart, Int blocks, Int rows) {                         \
        __shared__ unsigned numbers[4];                                                                                                                   \
        if constexpr (TABLE) {                                                                                                                            \
            constexpr unsigned OWN[4] = {__VA_ARGS__};                                                                                                    \
            if (threadIdx.x == 0)                                                                                                                         \
                for (int i = 0; i < 4; i++) numbers[i] = OWN[i];                                                                                          \
            __syncthreads();                                                                                                                              \
        }                                                                                                                                                 \
        block_product<BITS, MIDDLE, SIGNED, SCALES, TABLE>(packed, x, abouts, bias, y, n, apart, blocks, rows, numbers);                                   \
    }
