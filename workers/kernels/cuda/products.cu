// y = x W^T + bias on a GPU, over the packed matrices of the CPU's kernels as they lie in memory
// (native/packing.h), with the bytes that those kernels give.
//
// A sum of 16-bit weights is one chain of fma along k, ascending, as in native/linear.inl; one of
// int8 is an exact integer. So a row has the same bytes whatever its neighbours are, on every
// architecture, and the same as on the CPU.
//
// Weights come through shared memory as they lie, and are widened in registers. DT_PRODUCT lines
// behind this source say which shapes of blocks there are (models/backends/device/own.py).
// Arguments are addresses and 64-bit integers. Compiled behind numbers.cu.

constexpr int FP16 = 1, BF16 = 2, INT8 = 3;  // kernels.h

// One step of a sum: an x and a weight of 32 bits each; of INT8 four of both.
template <int KIND>
struct Step {
    typedef float Sum;
    static __device__ Sum add(unsigned x, unsigned w, Sum sum) {
        return __fmaf_rn(__uint_as_float(x), __uint_as_float(w), sum);
    }
    static __device__ float value(Sum sum, const float*, const float*, Int, Int) { return sum; }
};

template <>
struct Step<INT8> {
    typedef int Sum;
    static __device__ Sum add(unsigned x, unsigned w, Sum sum) { return dot_signed(x, w, sum); }
    static __device__ float value(Sum sum, const float* row_scales, const float* scales, Int row,
                                  Int column) {
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

// ---- 16 bits, int8

// A block computes VECTORS vectors of a panel for GROUPS * ROWS rows, each thread COLUMNS outputs
// of ROWS rows, GROUPS apart. STEPS steps of weights and rows are a stage; as many stages as there
// is shared memory for are on their way together. Rows of x begin at multiples of 16 bytes.
template <int KIND, int VECTORS, int COLUMNS, int ROWS, int GROUPS, int STEPS>
static __device__ void product(const char* packed, const unsigned* x, const float* row_scales,
                               const float* scales, const float* bias, float* y, Int n,
                               Int all_steps, Int rows) {
    constexpr int BYTES = KIND == INT8 ? 4 : 2, WIDTH = VECTORS * VECTOR, ACROSS = WIDTH / COLUMNS,
                  THREADS = ACROSS * GROUPS, TILE = GROUPS * ROWS;
    constexpr int PARTS = WIDTH * BYTES / 16,
                  FOURS = STEPS / 4;  // copies of a step of weights, and of a row of x
    constexpr int STRIDE =
        STEPS + 4;  // words of a row of x: the rows of neighbouring groups lie in other banks
    constexpr int STAGE = STEPS * PARTS, X_STAGE = TILE * STRIDE / 4;
    constexpr int FITTING = SHARED_BYTES / 16 / (STAGE + X_STAGE),
                  STAGES = FITTING > 2 ? FITTING : 2;
    static_assert(THREADS % PARTS == 0 && STAGE % THREADS == 0 && THREADS % FOURS == 0,
                  "a thread copies the same part of each step and row");
    typedef typename Step<KIND>::Sum Sum;
    __shared__ uint4 weight_tiles[STAGES][STAGE];
    __shared__ uint4 x_tiles[STAGES][X_STAGE];

    start_early();
    const int thread = (int)threadIdx.x, group = thread / ACROSS,
              column = thread % ACROSS * COLUMNS;
    const Int first_row = (Int)blockIdx.y * TILE, first_column = (Int)blockIdx.x * WIDTH,
              panel = first_column / PANEL * PANEL;
    const Int columns = (n + VECTOR - 1) / VECTOR * VECTOR;
    const int steps = (int)all_steps, row_words = (steps + 3) / 4 * 4,
              step_bytes = smaller(PANEL, columns - panel) * BYTES;
    const int part = thread % PARTS, from_step = thread / PARTS;  // of the weights that it copies
    const int four = thread % FOURS, from_row = thread / FOURS,
              left = smaller(TILE, rows - first_row);  // of the rows
    const bool copies = first_column + part * (16 / BYTES) < columns;
    const bool busy = group < left && first_column + column < columns;
    const char* weights = packed + panel * all_steps * BYTES + (first_column - panel) * BYTES +
                          (Int)from_step * step_bytes + part * 16;
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
                    fetch(&weight_tiles[filled][thread + i * THREADS],
                          weights + (Int)(i * (THREADS / PARTS)) * step_bytes);
            weights += STEPS * step_bytes;
#pragma unroll
            for (int row = from_row; row < from_row + TILE; row += THREADS / FOURS)
                if (row < left && ahead + 4 * four < steps)
                    fetch(&x_tiles[filled][row * (STRIDE / 4) + four],
                          values + (Int)row * row_words + ahead);
        }
        end_group();
        filled = filled + 1 == STAGES ? 0 : filled + 1;
        if (step < 0) continue;
        const char* const tile = (const char*)weight_tiles[at] + column * BYTES;
        const uint4* const rows_of_x = x_tiles[at] + group * (STRIDE / 4);
        at = at + 1 == STAGES ? 0 : at + 1;
        if (!busy) continue;
        if (step + STEPS <= steps) {
#pragma unroll(ROWS* COLUMNS > 8 ? 2 : STEPS / 4)
            for (int s = 0; s < STEPS; s += 4) {
                uint4 fours[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    fours[r] = rows_of_x[r * GROUPS * (STRIDE / 4) + s / 4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    unsigned w[COLUMNS];
                    widen<KIND, COLUMNS>(tile + (s + j) * WIDTH * BYTES, w);
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
                        const unsigned value = j == 0   ? fours[r].x
                                               : j == 1 ? fours[r].y
                                               : j == 2 ? fours[r].z
                                                        : fours[r].w;
#pragma unroll
                        for (int c = 0; c < COLUMNS; c++)
                            sums[r][c] = Step<KIND>::add(value, w[c], sums[r][c]);
                    }
                }
            }
        } else {
#pragma unroll 1
            for (int s = 0; s < steps - step;
                 s++) {  // never a step too many: adding 0 would turn -0 into 0
                unsigned w[COLUMNS];
                widen<KIND, COLUMNS>(tile + s * WIDTH * BYTES, w);
#pragma unroll
                for (int r = 0; r < ROWS; r++)
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++)
                        sums[r][c] = Step<KIND>::add(
                            ((const unsigned*)(rows_of_x + r * GROUPS * (STRIDE / 4)))[s], w[c],
                            sums[r][c]);
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

#define DT_PRODUCT(NAME, KIND, VECTORS, COLUMNS, ROWS, GROUPS, STEPS)                             \
    extern "C" __global__ void __launch_bounds__(VECTORS* VECTOR / COLUMNS * GROUPS)              \
        NAME(const char* packed, const unsigned* x, const float* row_scales, const float* scales, \
             const float* bias, float* y, Int n, Int steps, Int rows) {                           \
        product<KIND, VECTORS, COLUMNS, ROWS, GROUPS, STEPS>(packed, x, row_scales, scales, bias, \
                                                             y, n, steps, rows);                  \
    }

// ---- rows of x as int8

constexpr int ROW_THREADS = 512;

// x [rows, k] -> words [rows, (k + 3) / 4 up to a multiple of 4] of four int8 each, zeros behind
// the last, and a scale of each row; a block a row.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    round_rows(const float* x, unsigned* words, float* scales, Int k) {
    __shared__ unsigned of_warps[ROW_THREADS / 32];
    start_early();
    const float* const own = x + (Int)blockIdx.x * k;
    unsigned most = 0;
    for (Int i = threadIdx.x; i < k; i += ROW_THREADS) {
        const unsigned size = magnitude(own[i]);
        most = size > most ? size : most;
    }
    most = largest_of_warp(most);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
    __syncthreads();
    for (int warp = 0; warp < ROW_THREADS / 32; warp++)
        most = of_warps[warp] > most ? of_warps[warp] : most;
    const RowScale scale = row_scale(most);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale.from;
    const Int steps = (k + 15) / 16 * 4;
    for (Int step = threadIdx.x; step < steps; step += ROW_THREADS) {
        unsigned word = 0;
        for (int j = 0; j < 4; j++)
            if (4 * step + j < k)
                word |= ((unsigned)rounded(own[4 * step + j], scale.to) & 255u) << 8 * j;
        words[(Int)blockIdx.x * steps + step] = word;
    }
}
