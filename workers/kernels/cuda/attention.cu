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
constexpr int THREADS = 128;
constexpr int LANES = 16, COLUMNS = 2 * LANES;  // threads of a row of values, and its columns
constexpr int STAGES = 4;                       // tiles of values that are on their way, or read
constexpr int TOGETHER = 16;  // slots whose values are read in front of their sums
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

// Loads of four scores that a lane has on their way together, and the scores that a row's lanes
// have so.
constexpr int LOOKS = 8, LOOKED = LANES * 4 * LOOKS;

// The largest of a row's scores, and of `most`, by the lanes of the row.
static __device__ float largest_of(const float* scores, int slots, float most) {
    const int lane = (int)threadIdx.x % LANES;
    for (int slot = 4 * lane; slot < slots; slot += LOOKED) {
        uint4 seen[LOOKS];
#pragma unroll
        for (int i = 0; i < LOOKS; i++) {
            const int at = slot + i * LOOKED / LOOKS;
            seen[i] = *(const uint4*)(scores + (at < slots ? at : slot));
        }
#pragma unroll
        for (int i = 0; i < LOOKS; i++) {
            float four[4];
            four_of(seen[i], four);
#pragma unroll
            for (int j = 0; j < 4; j++) most = fmaxf(four[j], most);
        }
    }
    for (int by = LANES / 2; by > 0; by /= 2)
        most = fmaxf(most,
                     __uint_as_float(__shfl_xor_sync(0xffffffffu, __float_as_uint(most), by)));
    return most;
}

// Add the values of a tile to the sums of two columns, and their weights to `total`. `pairs`: two
// columns of a slot, those of the next slot LANES further on.
static __device__ void add_up(float* sums, float& total, const uint4* weights,
                              const unsigned* pairs) {
#pragma unroll 2
    for (int first = 0; first < SLOTS; first += TOGETHER) {
        float weight[TOGETHER];
        unsigned pair[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i += 4) four_of(weights[(first + i) / 4], weight + i);
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) pair[i] = pairs[(first + i) * LANES];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            total = __fadd_rn(total, weight[i]);
            // what no row sees may be no number; -0 changes no sum
            if (weight[i] == 0.0f) pair[i] = 0x80008000u;
            sums[0] = __fmaf_rn(weight[i], half_to_float(pair[i] & 0xffffu), sums[0]);
            sums[1] = __fmaf_rn(weight[i], half_to_float(pair[i] >> 16), sums[1]);
        }
    }
}

// Values of 8 rows with the weights that their scores are: each half of a warp 32 columns of a row,
// a lane two of them. A lane makes weights of four scores of a tile. `sinks`: one for each query
// head, or null. A token's heads lie side by side in `out`, and tokens `apart_out`. `apart` and
// `places`: as of scores.
extern "C" __global__ void __launch_bounds__(THREADS)
    values_of(const float* scores, const unsigned short* values, Int apart, const float* sinks,
              float* out, Int all_rows, Int all_slots, Int all_width, Int all_of_head,
              Int apart_out, const Place* places) {
    constexpr int CHUNKS = COLUMNS / 8, FOURS = SLOTS / 4, AHEAD = (STAGES - 1) * SLOTS;
    static_assert(ROWS * LANES == THREADS && FOURS == LANES, "a lane fetches four scores");
    __shared__ uint4 value_tiles[STAGES][SLOTS * CHUNKS];
    __shared__ uint4 weight_tiles[STAGES][ROWS * FOURS];
    __shared__ Row found[ROWS];
    const int rows = (int)all_rows, slots = (int)all_slots, width = (int)all_width,
              of_head = (int)all_of_head;
    const int thread = (int)threadIdx.x, lane = thread % LANES, mine = thread / LANES;
    const int first_column = (int)blockIdx.x * COLUMNS, chunk = thread % CHUNKS;
    const bool fetches = first_column + 8 * chunk < width;
    const Block block(rows);
    find_rows(found, block, rows, values, apart, slots, width, of_head, places);
    __syncthreads();
    const int number = found[smaller(mine, block.count - 1)].number;
    const int head = block.head * (rows / of_head) + number / of_head, token = number % of_head;
    const float sink = sinks == nullptr ? __uint_as_float(0xff800000u) : sinks[head];
    const float* const own_scores =
        scores + ((Int)block.head * rows + number) * row_of_scores(slots);

    float sums[2] = {}, total = 0.0f, most = sink;
    for (int from = 0, to; from < block.count; from = to) {
        to = end_of_run(found, from, block.count);
        const int stop = found[from].stop;
        const unsigned short* const own = found[from].numbers + first_column + 8 * chunk;
        const bool adds = mine >= from && mine < to;
        const auto fetch_values = [&](int slot) {
#pragma unroll
            for (int i = 0; i < SLOTS * CHUNKS; i += THREADS) {
                const int which = slot + (thread + i) / CHUNKS;
                uint4* const tile = value_tiles[slot / SLOTS % STAGES];
                if (fetches && which < stop) fetch(&tile[thread + i], own + (Int)which * width);
            }
        };
        const auto fetch_scores = [&](int slot) {
            if (adds && slot + 4 * lane < stop)
                fetch(&weight_tiles[slot / SLOTS % STAGES][thread], own_scores + slot + 4 * lane);
            end_group();
        };
        if (from > 0) __syncthreads();
        for (int slot = 0; slot < AHEAD; slot += SLOTS) fetch_values(slot);
        if (from == 0) {  // what wrote the values is done: the scores have waited for it
            start_early();
            most = largest_of(own_scores, slots, sink);
        }
        for (int slot = 0; slot < AHEAD; slot += SLOTS) fetch_scores(slot);
        for (int slot = 0; slot < stop; slot += SLOTS) {
            wait_for_groups<STAGES - 2>();
            __syncthreads();
            fetch_values(slot + AHEAD);
            fetch_scores(slot + AHEAD);
            const uint4* const numbers = value_tiles[slot / SLOTS % STAGES];
            uint4* const weights = weight_tiles[slot / SLOTS % STAGES] + mine * FOURS;
            if (adds) {
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
            if (adds) add_up(sums, total, weights, (const unsigned*)numbers + lane);
        }
    }
    const int column = first_column + 2 * lane;
    if (mine >= block.count || column >= width) return;
    if (sinks != nullptr) total = __fadd_rn(total, exp_of(__fsub_rn(sink, most)));
    float* const own_out = out + token * apart_out + (Int)head * width + column;
#pragma unroll
    for (int i = 0; i < 2; i++) own_out[i] = __fmul_rn(sums[i], __fdiv_rn(1.0f, total));
}
