// Attention on a GPU over keys and values of 16 bits, which are widened as they are read, for query
// rows that see the slots of a cache by a mask.
//
//   score[s]  = one chain over d of fma(q[d], k[s][d]), times scale; -inf where the mask says so
//   weight[s] = exp(score[s] - largest), exactly 0 where the mask hides s
//   out[d]    = one chain over s of fma(weight[s], v[s][d]), times 1 / the chain of the weights'
//   sum (and of a sink's weight, which has no value)
//
// Hidden slots change no chain, so that a row's numbers follow from the slots that it sees, in
// their order: not from its neighbours, nor from the slots between. Three functions, one after the
// other, with the scores in memory between them. Rows are query heads of one key head, one head
// behind the other.
//
// Keys and values of all rows lie in one cache, or those of each token where `places` says, so that
// tokens of several sessions share a launch.
//
// Compiled behind numbers.cu.

constexpr int SLOTS = 64, ROWS = 8;  // of a block
constexpr int THREADS = 128, VALUE_THREADS = 160, COLUMNS = 64;
constexpr float HIDDEN = -3.0e38f;  // scores below are of slots that are not seen

// e^x for x <= 0 (native/lanes.h): x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial of degree 6 in
// r. Below -87 exactly 0.
static __device__ float exp_of(float x) {
    if (!(x >= -87.0f)) return x != x ? x : 0.0f;
    const float rounder = 12582912.0f;
    const float n = __fsub_rn(__fadd_rn(__fmul_rn(x, 1.44269504f), rounder), rounder);
    float r = __fmaf_rn(n, -0.693359375f, x);
    r = __fmaf_rn(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = __fmaf_rn(p, r, 1.3981999507e-3f);
    p = __fmaf_rn(p, r, 8.3334519073e-3f);
    p = __fmaf_rn(p, r, 4.1665795894e-2f);
    p = __fmaf_rn(p, r, 1.6666665459e-1f);
    p = __fmaf_rn(p, r, 5.0000001201e-1f);
    p = __fadd_rn(__fmaf_rn(__fmul_rn(r, r), p, r), 1.0f);
    return __fmul_rn(p, __uint_as_float((unsigned)((int)n + 127) << 23));
}

// The cache of a token's session: where it begins, the slots of each of its heads, and how many of
// them may be read.
struct Place {
    Int address, slots, stop;
};

// The rows of a key head as blocks take them: as they come, or, where tokens have places, token by
// token, so that rows with the same keys are neighbours.
struct Order {
    const Place* places;
    Int of_head, groups;

    __device__ Int row(Int at) const {
        return places == nullptr ? at : at % groups * of_head + at / groups;
    }
};

// Rows of a block from `first` on that read the same keys or values, and where these lie.
struct Run {
    const unsigned short* numbers;
    Int stop;
    int to;  // behind the last of them
};

// The run that begins with row `from` of the `count` rows from `first` on. `apart`: numbers between
// two heads of `numbers`, or, with places, the number of the first head.
static __device__ Run run_of(const Order& order, Int first, int from, int count,
                             const unsigned short* numbers, Int apart, Int head, Int slots,
                             Int width) {
    if (order.places == nullptr) return {numbers + head * apart, slots, count};
    const Place own = order.places[(first + from) / order.groups];
    int to = from + 1;
    while (to < count && order.places[(first + to) / order.groups].address == own.address) to++;
    return {(const unsigned short*)own.address + (apart + head) * own.slots * width,
            own.stop < slots ? own.stop : slots, to};
}

// Scores of 8 rows with 64 slots: each thread one slot, for four rows. `apart`: numbers between the
// keys of two heads; `mask` [rows, mask_apart] or null; `places` [of_head] or null, and then
// `apart` is the number of the first head, and slots behind the last that may be read are hidden.
template <int MOST>
static __device__ void scores_of(const float* queries, const unsigned short* keys, Int apart,
                                 const float* mask, Int mask_apart, float* scores, Int rows,
                                 Int slots, Int width, Int scale_bits, Int of_head,
                                 const Place* places) {
    constexpr int STRIDE =
        MOST / 2 + 1;  // words of a key: those of neighbouring slots lie in other banks
    __shared__ unsigned key_tile[SLOTS * STRIDE];
    __shared__ float query_tile[ROWS][MOST];
    start_early();
    const int thread = (int)threadIdx.x, words = (int)(width / 2), slot = thread % SLOTS,
              first = thread / SLOTS * (ROWS / 2);
    const Int first_slot = (Int)blockIdx.x * SLOTS, row_blocks = (rows + ROWS - 1) / ROWS;
    const Int head = blockIdx.y / row_blocks, first_row = blockIdx.y % row_blocks * ROWS;
    const int count = smaller(ROWS, rows - first_row);
    const Order order = {places, of_head, rows / of_head};
    for (int i = thread; i < ROWS * width; i += THREADS) {
        const int row = i / (int)width;
        const Int from = row < count ? (head * rows + order.row(first_row + row)) * width : 0;
        query_tile[row][i % (int)width] = row < count ? queries[from + i % (int)width] : 0.0f;
    }
    for (int from = 0; from < count;) {
        const Run run = run_of(order, first_row, from, count, keys, apart, head, slots, width);
        const int there = smaller(SLOTS, run.stop - first_slot);
        const unsigned* const own = (const unsigned*)(run.numbers + first_slot * width);
        if (from > 0) __syncthreads();
        for (int i = thread; i < there * words; i += THREADS)
            key_tile[i / words * STRIDE + i % words] = own[i];
        __syncthreads();
        float sums[ROWS / 2] = {};
        const bool reads = slot < there && first < run.to && first + ROWS / 2 > from;
#pragma unroll 4
        for (int word = 0; word < (reads ? words : 0); word++) {
            const unsigned both = key_tile[slot * STRIDE + word];
            const float low = half_to_float(both & 0xffffu), high = half_to_float(both >> 16);
#pragma unroll
            for (int r = 0; r < ROWS / 2; r++) {
                sums[r] = __fmaf_rn(query_tile[first + r][2 * word], low, sums[r]);
                sums[r] = __fmaf_rn(query_tile[first + r][2 * word + 1], high, sums[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS / 2; r++) {
            const Int at = first_slot + slot;
            if (first + r < from || first + r >= run.to || at >= slots) continue;
            const Int row = order.row(first_row + first + r);
            const bool hidden =
                slot >= there || (mask != nullptr && mask[row * mask_apart + at] < HIDDEN);
            scores[(head * rows + row) * slots + at] =
                hidden ? __uint_as_float(0xff800000u)
                       : __fmul_rn(sums[r], __uint_as_float((unsigned)scale_bits));
        }
        from = run.to;
    }
}

#define DT_SCORES(MOST)                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS) scores_##MOST(                    \
        const float* queries, const unsigned short* keys, Int apart, const float* mask,     \
        Int mask_apart, float* scores, Int rows, Int slots, Int width, Int scale_bits,      \
        Int of_head, const Place* places) {                                                 \
        scores_of<MOST>(queries, keys, apart, mask, mask_apart, scores, rows, slots, width, \
                        scale_bits, of_head, places);                                       \
    }

DT_SCORES(128)
DT_SCORES(256)

// Scores of a row become weights, in place; a block a row. `sinks` [heads] of this row's head, or
// null; `sink_weights`: what becomes of them.
extern "C" __global__ void __launch_bounds__(THREADS)
    weights_of(float* scores, const float* sinks, float* sink_weights, Int slots,
               Int rows_of_head) {
    __shared__ float of_warps[THREADS / 32];
    start_early();
    float* const own = scores + (Int)blockIdx.x * slots;
    const float sink =
        sinks == nullptr ? __uint_as_float(0xff800000u) : sinks[blockIdx.x / rows_of_head];
    float most = sink;
    for (Int s = threadIdx.x; s < slots; s += THREADS) most = larger(own[s], most);
    for (int by = 16; by > 0; by /= 2)
        most =
            larger(__uint_as_float(__shfl_xor_sync(0xffffffffu, __float_as_uint(most), by)), most);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
    __syncthreads();
    for (int warp = 0; warp < THREADS / 32; warp++) most = larger(of_warps[warp], most);
    for (Int s = threadIdx.x; s < slots; s += THREADS) {
        const float score = own[s];
        own[s] = score < HIDDEN ? 0.0f : exp_of(__fsub_rn(score, most));
    }
    if (sinks != nullptr && threadIdx.x == 0)
        sink_weights[blockIdx.x] = exp_of(__fsub_rn(sink, most));
}

// The weighted values of 8 rows: each of 128 threads has two columns of two rows, and a warp beside
// them adds up the weights. 64 slots lie in shared memory, while the next ones are on their way
// into registers. Every `of_head` rows are of another query head; a token's heads lie side by side
// in `out`, and tokens `apart_out`. `places` and `apart`: as of scores.
extern "C" __global__ void __launch_bounds__(VALUE_THREADS)
    values_of(const float* weights, const unsigned short* values, Int apart,
              const float* sink_weights, float* out, Int rows, Int slots, Int width,
              Int of_head, Int apart_out, const Place* places) {
    constexpr int CHUNKS = COLUMNS / 8, LOADS = SLOTS * CHUNKS / THREADS,
                  NUMBERS = ROWS * SLOTS / THREADS;
    __shared__ uint4 value_tile[SLOTS * CHUNKS];
    __shared__ uint4 weight_tile[ROWS * SLOTS / 4];
    __shared__ float totals[ROWS];
    start_early();
    const unsigned* const value_words = (const unsigned*)value_tile;
    float* const weight_numbers = (float*)weight_tile;
    const int thread = (int)threadIdx.x, word = thread % 32, warp = thread / 32;
    const Int first_column = (Int)blockIdx.x * COLUMNS, row_blocks = (rows + ROWS - 1) / ROWS;
    const Int head = blockIdx.y / row_blocks, first_row = blockIdx.y % row_blocks * ROWS;
    const int count = smaller(ROWS, rows - first_row),
              chunks = smaller(COLUMNS, width - first_column) / 8;
    const bool sums_weights = warp == THREADS / 32;
    const Order order = {places, of_head, rows / of_head};

    uint4 next_values[LOADS];
    float next_weights[NUMBERS], sums[2][2] = {}, total = 0.0f;
    const float* own_weights[NUMBERS];
#pragma unroll
    for (int i = 0; i < NUMBERS; i++) {
        const int row = (thread + i * THREADS) / SLOTS;
        const Int own_row = row < count ? order.row(first_row + row) : 0;
        own_weights[i] = weights + (head * rows + own_row) * slots;
    }
    for (int first = 0; first < count;) {
        const Run run = run_of(order, first_row, first, count, values, apart, head, slots, width);
        const unsigned short* const own = run.numbers + first_column;
        for (Int slot = -SLOTS; slot < run.stop; slot += SLOTS) {
            if (slot >= 0) {  // what was on its way has come
                __syncthreads();
                if (!sums_weights) {
#pragma unroll
                    for (int i = 0; i < LOADS; i++)
                        value_tile[thread + i * THREADS] = next_values[i];
#pragma unroll
                    for (int i = 0; i < NUMBERS; i++)
                        weight_numbers[thread + i * THREADS] = next_weights[i];
                }
                __syncthreads();
            }
            const Int ahead = slot + SLOTS;
            if (ahead < run.stop && !sums_weights) {
#pragma unroll
                for (int i = 0; i < LOADS; i++) {
                    const int at = thread + i * THREADS, chunk = at % CHUNKS;
                    const Int from = ahead + at / CHUNKS;
                    next_values[i] = from < run.stop && chunk < chunks
                                         ? *(const uint4*)(own + from * width + 8 * chunk)
                                         : make_uint4(0u, 0u, 0u, 0u);
                }
#pragma unroll
                for (int i = 0; i < NUMBERS; i++) {
                    const int at = thread + i * THREADS, row = at / SLOTS;
                    const Int from = ahead + at % SLOTS;
                    next_weights[i] = row >= first && row < run.to && from < run.stop
                                          ? own_weights[i][from]
                                          : 0.0f;
                }
            }
            if (slot < 0) continue;
            // weights behind the last slot and of rows of other runs are 0, and change neither a
            // sum nor a chain
            if (sums_weights) {
                for (int four = 0; four < SLOTS / 4 && word < count; four++) {
                    const uint4 bits = weight_tile[word * SLOTS / 4 + four];
                    total = __fadd_rn(__fadd_rn(total, __uint_as_float(bits.x)),
                                      __uint_as_float(bits.y));
                    total = __fadd_rn(__fadd_rn(total, __uint_as_float(bits.z)),
                                      __uint_as_float(bits.w));
                }
                continue;
            }
#pragma unroll 4
            for (int four = 0; four < SLOTS / 4; four++) {
                float own_weights_of[2][4];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const uint4 bits = weight_tile[((2 * warp + r) * SLOTS) / 4 + four];
                    own_weights_of[r][0] = __uint_as_float(bits.x),
                    own_weights_of[r][1] = __uint_as_float(bits.y);
                    own_weights_of[r][2] = __uint_as_float(bits.z),
                    own_weights_of[r][3] = __uint_as_float(bits.w);
                }
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    const unsigned both = value_words[(4 * four + s) * (COLUMNS / 2) + word];
                    const float low = half_to_float(both & 0xffffu),
                                high = half_to_float(both >> 16);
#pragma unroll
                    for (int r = 0; r < 2;
                         r++) {  // adding 0 would turn -0 into 0; chosen, not branched on: the
                                 // chains of a warp go on side by side
                        const float weight = own_weights_of[r][s];
                        const float one = __fmaf_rn(weight, low, sums[r][0]),
                                    two = __fmaf_rn(weight, high, sums[r][1]);
                        sums[r][0] = weight == 0.0f ? sums[r][0] : one;
                        sums[r][1] = weight == 0.0f ? sums[r][1] : two;
                    }
                }
            }
        }
        first = run.to;
    }
    if (sums_weights && word < count) {
        const Int row = head * rows + order.row(first_row + word);
        totals[word] =
            __fdiv_rn(1.0f, sink_weights == nullptr ? total : __fadd_rn(total, sink_weights[row]));
    }
    __syncthreads();
    if (sums_weights || 2 * word >= width - first_column) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = 2 * warp + r;
        if (row >= count) continue;
        const Int own_row = order.row(first_row + row),
                  query_head = head * order.groups + own_row / of_head;
        float* const to =
            out + own_row % of_head * apart_out + query_head * width + first_column + 2 * word;
        to[0] = __fmul_rn(sums[r][0], totals[row]);
        to[1] = __fmul_rn(sums[r][1], totals[row]);
    }
}
