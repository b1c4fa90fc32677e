// Attention on a GPU over keys and values of 16 bits, which are widened as they are read, for query
// rows that see the slots of a cache by a mask.
//
//   score[s]  = one chain over d of fma(q[d], k[s][d]), times scale; -inf where the mask says so
//   weight[s] = exp(score[s] - largest), exactly 0 where the mask hides s
//   out[d]    = one chain over s of fma(weight[s], v[s][d]), times 1 / the chain of the weights'
//   sum (and of a sink's weight, which has no value)
//
// Hidden slots change no chain, so that a row's numbers follow from the slots that it sees, in
// their order: not from its neighbours, nor from the slots between. Two functions, one after the
// other, with the scores in memory between them. Rows are query heads of one key head, one head
// behind the other; a block has 8 of them.
//
// Keys and values of all rows lie in one cache, or those of each token where `places` says, so that
// tokens of several sessions share a launch.
//
// Compiled behind numbers.cu.

constexpr int SLOTS = 64, ROWS = 8;  // of a block
constexpr int THREADS = 128, VALUE_THREADS = 256, COLUMNS = 32;
constexpr int STAGES = 4;  // tiles of values that are on their way, or read
constexpr float HIDDEN = -3.0e38f;  // scores below are of slots that are not seen

// e^x for x <= 0 (native/lanes.h): x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial of degree 6 in
// r. Below -87 exactly 0.
static __device__ float exp_of(float x) {
    const bool small = !(x >= -87.0f);
    const float rounder = 12582912.0f, given = small ? 0.0f : x;
    const float n = __fsub_rn(__fadd_rn(__fmul_rn(given, 1.44269504f), rounder), rounder);
    float r = __fmaf_rn(n, -0.693359375f, given);
    r = __fmaf_rn(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = __fmaf_rn(p, r, 1.3981999507e-3f);
    p = __fmaf_rn(p, r, 8.3334519073e-3f);
    p = __fmaf_rn(p, r, 4.1665795894e-2f);
    p = __fmaf_rn(p, r, 1.6666665459e-1f);
    p = __fmaf_rn(p, r, 5.0000001201e-1f);
    p = __fadd_rn(__fmaf_rn(__fmul_rn(r, r), p, r), 1.0f);
    const float found = __fmul_rn(p, __uint_as_float((unsigned)((int)n + 127) << 23));
    return small ? (x != x ? x : 0.0f) : found;
}

// The cache of a token's session: where it begins, the slots of each of its heads, and how many of
// them may be read.
struct Place {
    Int address, slots, stop;
};

// A row of a block: its number among those of its key head, and the keys or values that it reads.
struct Row {
    const unsigned short* numbers;
    int number, stop;
};

// The rows of a block: `count` of those of a key head, from `first` on.
struct Block {
    int head, first, count;

    __device__ Block(int rows) {
        const int blocks = (rows + ROWS - 1) / ROWS;
        head = (int)blockIdx.y / blocks, first = (int)blockIdx.y % blocks * ROWS;
        count = smaller(ROWS, rows - first);
    }
};

// Find the rows of a block, which no kernel in front of this one writes. With places they go token
// by token, so that rows with the same keys are neighbours. `apart`: numbers between two heads of
// `numbers`, or, with places, the number of the first head. Every thread has to wait before it
// reads what it did not find itself.
static __device__ void find_rows(Row* found, const Block& block, int rows,
                                 const unsigned short* numbers, Int apart, int slots, int width,
                                 int of_head, const Place* places) {
    const int thread = (int)threadIdx.x;
    if (thread >= block.count) return;
    const int at = block.first + thread;
    if (places == nullptr) {
        found[thread] = {numbers + block.head * apart, at, slots};
        return;
    }
    const int groups = rows / of_head, token = at / groups;
    const Place own = places[token];
    found[thread] = {(const unsigned short*)own.address + (apart + block.head) * own.slots * width,
                     at % groups * of_head + token, smaller(own.stop, slots)};
}

// The end of the rows that read what row `from` reads.
static __device__ int end_of_run(const Row* rows, int from, int count) {
    int to = from + 1;
    while (to < count && rows[to].numbers == rows[from].numbers) to++;
    return to;
}

// Four numbers of a tile.
static __device__ void four_of(const uint4& bits, float* to) {
    to[0] = __uint_as_float(bits.x), to[1] = __uint_as_float(bits.y);
    to[2] = __uint_as_float(bits.z), to[3] = __uint_as_float(bits.w);
}

// Scores lie in rows that begin at multiples of 16 bytes, with -inf behind the last.
static __device__ Int row_of_scores(int slots) { return (slots + 3) / 4 * 4; }

// Scores of 8 rows with 64 slots: each thread one slot, for four rows. `mask` [rows, mask_apart] or
// null; `places` [of_head] or null, and then slots behind the last that may be read are hidden.
template <int MOST>
static __device__ void scores_of(const float* queries, const unsigned short* keys, Int apart,
                                 const float* mask, Int mask_apart, float* scores, int rows,
                                 int slots, int width, float scale, int of_head,
                                 const Place* places) {
    constexpr int CHUNKS = MOST / 8, FOURS = MOST / 4;
    constexpr int STRIDE = CHUNKS + 1;  // chunks of neighbouring slots lie in other banks
    __shared__ uint4 key_tile[SLOTS * STRIDE];
    __shared__ uint4 query_tile[ROWS * FOURS];
    __shared__ Row found[ROWS];
    const int thread = (int)threadIdx.x, slot = thread % SLOTS, first = thread / SLOTS * (ROWS / 2);
    const int first_slot = (int)blockIdx.x * SLOTS, at = first_slot + slot, chunks = width / 8;
    const Block block(rows);
    find_rows(found, block, rows, keys, apart, slots, width, of_head, places);
    start_early();
    __syncthreads();
    for (int i = thread; i < ROWS * FOURS; i += THREADS) {
        const int row = i / FOURS, four = i % FOURS;
        if (row >= block.count || four >= 2 * chunks) query_tile[i] = make_uint4(0u, 0u, 0u, 0u);
        else
            fetch(&query_tile[i],
                  queries + ((Int)block.head * rows + found[row].number) * width + 4 * four);
    }
    bool hidden[ROWS / 2];
#pragma unroll
    for (int r = 0; r < ROWS / 2; r++)
        hidden[r] = mask != nullptr && first + r < block.count && at < slots &&
                    mask[found[first + r].number * mask_apart + at] < HIDDEN;
    for (int from = 0, to; from < block.count; from = to) {
        to = end_of_run(found, from, block.count);
        const int there = smaller(SLOTS, found[from].stop - first_slot);
        const unsigned short* const own = found[from].numbers + (Int)first_slot * width;
        if (from > 0) __syncthreads();
#pragma unroll
        for (int i = 0; i < SLOTS * CHUNKS / THREADS; i++) {
            const int which = (thread + i * THREADS) / CHUNKS,
                      chunk = (thread + i * THREADS) % CHUNKS;
            if (which < there && chunk < chunks)
                fetch(&key_tile[which * STRIDE + chunk], own + which * width + 8 * chunk);
        }
        end_group();
        wait_for_groups<0>();
        __syncthreads();
        float sums[ROWS / 2] = {};
        const bool reads = slot < there && first < to && first + ROWS / 2 > from;
#pragma unroll 2
        for (int chunk = 0; chunk < (reads ? chunks : 0); chunk++) {
            const uint4 eight = key_tile[slot * STRIDE + chunk];
            const unsigned pairs[4] = {eight.x, eight.y, eight.z, eight.w};
            float key[8];
#pragma unroll
            for (int i = 0; i < 8; i++)
                key[i] = half_to_float(pairs[i / 2] >> i % 2 * 16 & 0xffffu);
#pragma unroll
            for (int r = 0; r < ROWS / 2; r++) {
                float query[8];
                four_of(query_tile[(first + r) * FOURS + 2 * chunk], query);
                four_of(query_tile[(first + r) * FOURS + 2 * chunk + 1], query + 4);
#pragma unroll
                for (int i = 0; i < 8; i++) sums[r] = __fmaf_rn(query[i], key[i], sums[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS / 2; r++) {
            if (first + r < from || first + r >= to || at >= row_of_scores(slots)) continue;
            const Int row = (Int)block.head * rows + found[first + r].number;
            scores[row * row_of_scores(slots) + at] = slot >= there || hidden[r]
                                                          ? __uint_as_float(0xff800000u)
                                                          : __fmul_rn(sums[r], scale);
        }
    }
}

#define DT_SCORES(MOST)                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) scores_##MOST(                           \
        const float* queries, const unsigned short* keys, Int apart, const float* mask,            \
        Int mask_apart, float* scores, Int rows, Int slots, Int width, Int scale_bits,             \
        Int of_head, const Place* places) {                                                        \
        scores_of<MOST>(queries, keys, apart, mask, mask_apart, scores, (int)rows, (int)slots,     \
                        (int)width, __uint_as_float((unsigned)scale_bits), (int)of_head, places);  \
    }

DT_SCORES(128)
DT_SCORES(256)

// Loads of four scores that a lane has on their way together, and the scores that a warp has so.
constexpr int LOOKS = 4, LOOKED = 32 * 4 * LOOKS;

// The largest of a row's scores, and of `most`, by a warp.
static __device__ float largest_of(const float* scores, int slots, float most) {
    const int lane = (int)threadIdx.x % 32;
    for (int slot = 4 * lane; slot < slots; slot += LOOKED) {
        uint4 seen[LOOKS];
#pragma unroll
        for (int i = 0; i < LOOKS; i++)
            seen[i] =
                *(const uint4*)(scores + smaller(slot + i * LOOKED / LOOKS, slots - 1) / 4 * 4);
#pragma unroll
        for (int i = 0; i < LOOKS; i++) {
            float four[4];
            four_of(seen[i], four);
#pragma unroll
            for (int j = 0; j < 4; j++) most = larger(four[j], most);
        }
    }
    for (int by = 16; by > 0; by /= 2)
        most =
            larger(__uint_as_float(__shfl_xor_sync(0xffffffffu, __float_as_uint(most), by)), most);
    return most;
}

// Values of 8 rows with the weights that their scores are: each warp 32 columns of a row. Half of
// its lanes make weights of the scores that they have fetched. `sinks`: one for each query head, or
// null. A token's heads lie side by side in `out`, and tokens `apart_out`. `apart` and `places`: as
// of scores.
extern "C" __global__ void __launch_bounds__(VALUE_THREADS)
    values_of(const float* scores, const unsigned short* values, Int apart, const float* sinks,
              float* out, Int all_rows, Int all_slots, Int all_width, Int all_of_head,
              Int apart_out, const Place* places) {
    constexpr int CHUNKS = COLUMNS / 8, FOURS = SLOTS / 4;
    static_assert(SLOTS * CHUNKS == VALUE_THREADS, "a thread fetches a chunk");
    __shared__ uint4 value_tiles[STAGES][SLOTS * CHUNKS];
    __shared__ uint4 weight_tiles[STAGES][ROWS * FOURS];
    __shared__ Row found[ROWS];
    const int rows = (int)all_rows, slots = (int)all_slots, width = (int)all_width,
              of_head = (int)all_of_head;
    const int thread = (int)threadIdx.x, lane = thread % 32, mine = thread / 32;
    const int first_column = (int)blockIdx.x * COLUMNS, chunk = thread % CHUNKS;
    const Block block(rows);
    find_rows(found, block, rows, values, apart, slots, width, of_head, places);
    __syncthreads();
    const int number = found[smaller(mine, block.count - 1)].number;
    const int head = block.head * (rows / of_head) + number / of_head, token = number % of_head;
    const float sink = sinks == nullptr ? __uint_as_float(0xff800000u) : sinks[head];
    const float* const own_scores =
        scores + ((Int)block.head * rows + number) * row_of_scores(slots);
    const bool fetches = first_column + 8 * chunk < width;
    start_early();

    float sum = 0.0f, total = 0.0f;
    const float most = largest_of(own_scores, slots, sink);
    for (int from = 0, to; from < block.count; from = to) {
        to = end_of_run(found, from, block.count);
        const int stop = found[from].stop;
        const unsigned short* const own =
            found[from].numbers + first_column + (Int)(thread / CHUNKS) * width + 8 * chunk;
        const bool adds = mine >= from && mine < to;
        int filled = 0, read = 0;
        if (from > 0) __syncthreads();
        for (int slot = -(STAGES - 1) * SLOTS; slot < stop; slot += SLOTS) {
            if (slot >= 0) {
                wait_for_groups<STAGES - 2>();
                __syncthreads();
            }
            const int ahead = slot + (STAGES - 1) * SLOTS;
            if (fetches && ahead + thread / CHUNKS < stop)
                fetch(&value_tiles[filled][thread], own + (Int)ahead * width);
            if (adds && lane < FOURS && ahead + 4 * lane < stop)
                fetch(&weight_tiles[filled][mine * FOURS + lane], own_scores + ahead + 4 * lane);
            end_group();
            filled = (filled + 1) % STAGES;
            if (slot < 0) continue;
            uint4* const weights = weight_tiles[read] + mine * FOURS;
            const unsigned short* const numbers = (const unsigned short*)value_tiles[read] + lane;
            read = (read + 1) % STAGES;
            if (!adds) continue;
            if (lane < FOURS) {
                float four[4];
                four_of(weights[lane], four);
#pragma unroll
                for (int i = 0; i < 4; i++) {  // exp of HIDDEN is exactly 0
                    const bool seen = slot + 4 * lane + i < stop && !(four[i] < HIDDEN);
                    four[i] = exp_of(seen ? __fsub_rn(four[i], most) : HIDDEN);
                }
                weights[lane] = make_uint4(__float_as_uint(four[0]), __float_as_uint(four[1]),
                                           __float_as_uint(four[2]), __float_as_uint(four[3]));
            }
            __syncwarp();
#pragma unroll 4
            for (int next = 0; next < FOURS; next++) {
                float four[4];
                four_of(weights[next], four);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float value = half_to_float(numbers[(4 * next + i) * COLUMNS]);
                    // what no row sees may be no number
                    if (four[i] != 0.0f) sum = __fmaf_rn(four[i], value, sum);
                    total = __fadd_rn(total, four[i]);
                }
            }
        }
    }
    if (mine >= block.count || first_column + lane >= width) return;
    if (sinks != nullptr) total = __fadd_rn(total, exp_of(__fsub_rn(sink, most)));
    out[token * apart_out + (Int)head * width + first_column + lane] =
        __fmul_rn(sum, __fdiv_rn(1.0f, total));
}
