// y = x W^T + bias on a GPU over the blocks of a GGUF file, for rows of x in fp32: the file's own
// function, with the bytes of the CPU's kernels (native/blocks.inl, EXACT_BLOCKS). A weight is
// (code - middle) times its scale, plus what is added to it, each rounded to fp32; a sum is one
// chain of fma along k, ascending. So a row has the same bytes whatever its neighbours are.
//
// A block of threads computes a vector of 16 outputs for 8 rows, or 8 times ROWS. SUPER blocks of
// weights at a time are widened into shared memory, each by 16 threads, and then every thread goes
// on with the chains of one output.
//
// DT_EXACT lines behind this source say which formats there are (own_blocks.py in
// models/backends/device). Compiled behind numbers.cu and formats.cu, with DT_SINGLE_OUTPUTS.

constexpr int EXACT_GROUPS = 8, EXACT_THREADS = VECTOR * EXACT_GROUPS;
static_assert(EXACT_GROUPS == SUPER, "a thread widens one of the blocks that share scales");

// The weights of an output in the block at an address, to [inputs of the block][VECTOR].
template <class F>
static __device__ void widen_block(const char* at, const char* above, int output,
                                   const unsigned* table, float* to) {
    F block;
    block.load(at, above, {output, 0, 0, 0});
#pragma unroll
    for (int step = 0; step < F::STEPS; step++) {
        const unsigned codes = block.codes(0, step, 0, table);
        const int half = step / (F::STEPS / F::HALVES);
        const float scale = block.scale(half, 0);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int code = byte_at(codes, j);
            float weight = __fmul_rn(
                __int2float_rn(F::SIGNED ? (int)(signed char)code : code - F::MIDDLE), scale);
            if constexpr (F::MORE) weight = __fadd_rn(weight, block.more(half, 0));
            to[(4 * step + j) * VECTOR] = weight;
        }
    }
}

// Rows of x begin at multiples of 16 bytes. Rows beyond the last one are computed as the last one,
// and not written.
template <class F, int ROWS>
static __device__ void exact(const char* packed, const float* x, const float* bias, float* y, Int n,
                             Int apart, int blocks, int rows, const unsigned* table) {
    __shared__ float widened[SUPER * F::WIDTH * VECTOR];
    start_early();
    const int output = (int)threadIdx.x % VECTOR, group = (int)threadIdx.x / VECTOR;
    const Int column = (Int)blockIdx.x * VECTOR + output, k = (Int)blocks * F::WIDTH;
    const int first_row = (int)blockIdx.y * EXACT_GROUPS * ROWS + group;
    const char* at = packed + (Int)blockIdx.x * F::vector_bytes(blocks);
    const float* values[ROWS];
    float sums[ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        values[r] = x + smaller(first_row + r * EXACT_GROUPS, rows - 1) * k;
    for (int block = 0; block < blocks; block += SUPER) {
        const int count = smaller(SUPER, blocks - block);
        if (group < count)
            widen_block<F>(at + F::SUPER_BYTES + group * F::SIZE, at, output, table,
                           widened + group * F::WIDTH * VECTOR + output);
        at += F::SUPER_BYTES + SUPER * F::SIZE;
        __syncthreads();
        if (first_row < rows)
#pragma unroll 4
            for (int i = 0; i < count * F::WIDTH; i += 4) {
                float weights[4];
#pragma unroll
                for (int j = 0; j < 4; j++) weights[j] = widened[(i + j) * VECTOR + output];
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const uint4 four = *(const uint4*)(values[r] + i);
                    sums[r] = __fmaf_rn(__uint_as_float(four.x), weights[0], sums[r]);
                    sums[r] = __fmaf_rn(__uint_as_float(four.y), weights[1], sums[r]);
                    sums[r] = __fmaf_rn(__uint_as_float(four.z), weights[2], sums[r]);
                    sums[r] = __fmaf_rn(__uint_as_float(four.w), weights[3], sums[r]);
                }
            }
#pragma unroll
        for (int r = 0; r < ROWS; r++) values[r] += SUPER * F::WIDTH;
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int row = first_row + r * EXACT_GROUPS;
        if (row < rows && column < n)
            y[row * apart + column] = bias == nullptr ? sums[r] : __fadd_rn(sums[r], bias[column]);
    }
}

// As DT_ROUNDED in rounded.cu. `y`: the first of n outputs of the first row; rows of it lie `apart`.
#define DT_EXACT_ROWS(NAME, ROWS, TABLE, FORMAT, ...)                                             \
    extern "C" __global__ void __launch_bounds__(EXACT_THREADS)                                   \
        NAME(const char* packed, const float* x, const float* bias, float* y, Int n, Int apart,   \
             Int blocks, Int rows) {                                                              \
        __shared__ unsigned table[4];                                                             \
        if constexpr (TABLE) {                                                                    \
            constexpr unsigned OWN[4] = {__VA_ARGS__};                                            \
            if (threadIdx.x == 0)                                                                 \
                for (int i = 0; i < 4; i++) table[i] = OWN[i];                                    \
            __syncthreads();                                                                      \
        }                                                                                         \
        exact<FORMAT, ROWS>(packed, x, bias, y, n, apart, (int)blocks, (int)rows, table);         \
    }
#define DT_EXACT(NAME, WIDTH, BITS, MIDDLE, SIGNED, SCALES, TABLE, ...)                           \
    typedef Format<WIDTH, BITS, MIDDLE, SIGNED, SCALES, TABLE> NAME##_format;                     \
    DT_EXACT_ROWS(NAME##_8, 1, TABLE, NAME##_format, __VA_ARGS__)                                 \
    DT_EXACT_ROWS(NAME##_32, 4, TABLE, NAME##_format, __VA_ARGS__)
