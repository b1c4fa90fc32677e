// Attention over the cache for the rows of several sessions.
//
// Keys and values are cached as floats, halves or 8-bit codes (K below), and widened as they are loaded: everything is computed in floats. A cache of latents has
// rows alone: a whole row is a key, and its beginning is the value.
// A row sees logical positions 0 .. n - 1: the slots of the prefix, then those of its path. Its bytes follow from these alone:
//   score[p]  = one chain over d of fma(q[d], k[p][d]), times scale, soft-capped
//   weight[p] = exp(score[p] - largest), summed with lane p mod 16, and then that of the head's sink, which has no value
//   out[d]    = one chain over p of fma(weight[p], v[p][d]), times 1 / sum
// What a window hides is not in the chains. Everything else is order of work: a unit is some query rows of one key head (several heads share it, and rows
// of a head lie side by side), scores are computed by slot for several rows and blocks of positions at once, and values are summed over the slots
// that rows have in common for several rows at once, before each row goes its own path.

namespace DT_NS {

constexpr int ATTENTION_SCRATCH = 1;

// Register tiles: query rows by blocks of positions, and rows by blocks of head_dim.
#if defined(DT_AVX512)
constexpr int SCORE_ROWS = 6, SCORE_BLOCKS = 4, VALUE_ROWS = 3, VALUE_BLOCKS = 8;
#elif defined(DT_AVX2)
constexpr int SCORE_ROWS = 3, SCORE_BLOCKS = 2, VALUE_ROWS = 3, VALUE_BLOCKS = 2;
#else
constexpr int SCORE_ROWS = 2, SCORE_BLOCKS = 2, VALUE_ROWS = 2, VALUE_BLOCKS = 2;
#endif
constexpr int UNIT_ROWS = 48;           // query rows of a unit, at most
// Floats of scores that a unit may have. Beyond a quarter of a million they leave the caches of a core, which costs 16 bytes for a row and position, where
// another unit would read keys and values once more: 512 bytes and more for a position.
constexpr int64_t UNIT_SCORES = 1 << 23;
constexpr int64_t LINE = 64;            // bytes
constexpr int64_t VALUE_RUN = 64;       // positions whose values are used by all rows of a unit before the next are read

// A query row of a unit.
struct Row {
    const float* query;
    float* out;           // [head_dim], where the result goes
    const int32_t* path;   // slots of the positions from `common` on
    int32_t from, common;  // positions from .. n - 1 are seen; those before `common` are slots of the same number
    int32_t n, stop;       // its slots are less than `stop`
    const float* sink;     // a score without a value; or null
};

// A unit's memory.
struct Desk {
    float* scores;  // [rows][stride] by slot, then by position
    float* queries;  // tiles of SCORE_ROWS rows, each [head_dim][rows of the tile]
    float* sums;    // [rows][padded value_dim]
    float* path;    // [stride]
    float* panel;   // [VALUE_RUN][head_dim]: keys or values that several tiles read, widened once; latents as keys
    int64_t stride, padded;
};

// Codes come in blocks of BLOCK_OF_CODES numbers of a head, the last of which may be shorter: a number is its code times the scale of its block, which is the upper half
// of a float, so that the product is exact. A head's codes are followed by the lower and the upper byte of each scale; in blocks of keys, sixteen of each side by side.
constexpr int64_t BLOCK_OF_CODES = 32;

// How many K a head of n numbers takes.
template <class K>
static inline int64_t stored(int64_t n) { return sizeof(K) == 1 ? n + 2 * ((n + BLOCK_OF_CODES - 1) / BLOCK_OF_CODES) : n; }

// The keys and values of one layer and key head, as if slot 0 were the first.
template <class K>
struct Slots {
    const K* keys;    // null: they are the values, which are latents
    const K* values;  // stored(head_dim) from row to row

    const K* scored() const { return keys ? keys : values; }  // LANES stored(head_dim) for sixteen of them
};

template <class K>
struct Unit {
    Slots<K> begin, own;  // those before slot `shared`, and from there on
    int64_t shared;
    const K* next;  // what the next unit will probably read first
    const Row* rows;
    int64_t count, head_dim, value_dim;
    Desk desk;

    int64_t width() const { return stored<K>(head_dim); }
    const Slots<K>& at(int64_t slot) const { return slot < shared ? begin : own; }
    int64_t end_at(int64_t slot, int64_t stop) const { return slot < shared ? smaller(shared, stop) : stop; }  // of the slots that lie side by side
};

static inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// What the next step will read, brought nearer while this one computes: `lines` of 64 bytes for each turn of a tile's loop.
struct Ahead {
    const char* from;
    int64_t lines;

    void fetch(int64_t turn) const {
        for (const char *p = from + turn * lines * LINE, *end = p + lines * LINE; p < end; p += LINE) __builtin_prefetch(p, 0, 2);
    }
};

// The share of one of `tiles` tiles with `turns` turns each in fetching `count` numbers.
template <class K>
static inline Ahead share_ahead(const K* from, int64_t count, int64_t turns, int64_t tile, int64_t tiles) {
    const int64_t lines = count * (int64_t)sizeof(K) / LINE;
    const int64_t each_turn = (lines + turns * tiles - 1) / (turns * tiles), begins = tile * turns * each_turn;
    return {(const char*)from + begins * LINE, begins < lines ? each_turn : 0};
}

// Sixteen numbers of a cache, or the first n < 16 and zeros.
static inline F16 widen(const float* p) { return load(p); }
static inline F16 widen(const uint16_t* p) { return load_half(p); }
static inline F16 widen_first(const float* p, int n) { return load_first(p, n); }
static inline F16 widen_first(const uint16_t* p, int n) {
    uint16_t t[LANES] = {};
    memcpy(t, p, (size_t)n * sizeof *p);
    return load_half(t);
}

#if defined(DT_AVX512) || defined(DT_AVX2) || defined(DT_SSE) || defined(DT_NEON)
static inline F16 widen(const int8_t* p) { return to_float(signed_bytes_of((const char*)p)); }
#else
static inline F16 widen(const int8_t* p) {
    F16 r;
    for (int i = 0; i < LANES; i++) r.v[i] = p[i];
    return r;
}
#endif

static inline F16 widen_first(const int8_t* p, int n) {
    int8_t t[LANES] = {};
    memcpy(t, p, (size_t)n);
    return widen(t);
}

static inline float scale_from(uint32_t low, uint32_t high) {
    const uint32_t bits = low << 16 | high << 24;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

// The scale of the block of a row that number d of the head is in.
static inline F16 scale_of_row(const int8_t* row, int64_t head_dim, int64_t d) {
    const uint8_t* p = (const uint8_t*)row + head_dim + d / BLOCK_OF_CODES * 2;
    return set1(scale_from(p[0], p[1]));
}

// The same for sixteen keys side by side.
static inline F16 scales_of_keys(const int8_t* keys, int64_t head_dim, int64_t d) {
    const uint8_t* p = (const uint8_t*)keys + (head_dim + d / BLOCK_OF_CODES * 2) * LANES;
    alignas(64) float scales[LANES];
    for (int i = 0; i < LANES; i++) scales[i] = scale_from(p[i], p[LANES + i]);
    return load(scales);
}

// `count` numbers of a row as floats, from number `from` on, where a block begins.
static inline void decode_row(const int8_t* row, int64_t head_dim, int64_t from, int64_t count, float* to) {
    for (int64_t d = from, left = count; left > 0; d += LANES, left -= LANES) {
        const F16 codes = left < LANES ? widen_first(row + d, (int)left) : widen(row + d);
        put(to + d - from, mul(codes, scale_of_row(row, head_dim, d)), left);
    }
}

// Writes the n numbers of a head to a cache, `step` apart.
static inline void put_head(float* to, int64_t step, const float* x, int64_t n) {
    for (int64_t d = 0; d < n; d++) to[d * step] = x[d];
}
static inline void put_head(uint16_t* to, int64_t step, const float* x, int64_t n) {
    for (int64_t d = 0; d < n; d++) to[d * step] = nearest_half(x[d]);
}
// A scale is a 127th of the largest number of its block, rounded up. The scale of a block with a NaN or an infinity is NaN.
static inline void put_head(int8_t* to, int64_t step, const float* x, int64_t n) {
    const F16 infinite = set1(__builtin_inff());
    const auto size = [&](F16 a) { return where_less(abs(a), infinite, abs(a), infinite); };
    int8_t* scales = to + n * step;
    for (int64_t d = 0; d < n; d += BLOCK_OF_CODES, scales += 2 * step) {
        const int64_t count = smaller(BLOCK_OF_CODES, n - d);
        F16 low = take(x + d, count), high = count > LANES ? take(x + d + LANES, count - LANES) : zero();
        const float most = largest(max(size(low), size(high)));
        const bool finite = most < __builtin_inff();
        const float least = most / 127.0f;
        uint32_t bits;
        memcpy(&bits, &least, sizeof bits);
        bits = finite ? (bits + 0xffff) >> 16 : 0x7fc0;
        const float scale = scale_from(bits & 255, bits >> 8);
        alignas(64) int32_t codes[BLOCK_OF_CODES];
        if (!finite) low = high = zero();
        const F16 by = set1(finite && most > 0.0f ? scale : 1.0f);
        store_int(codes, to_int(rint(div(low, by))));
        store_int(codes + LANES, to_int(rint(div(high, by))));
        for (int64_t i = 0; i < count; i++) to[(d + i) * step] = (int8_t)codes[i];
        scales[0] = (int8_t)(bits & 255), scales[step] = (int8_t)(bits >> 8);
    }
}

// ---- scores ----

// scores [R][16 B] of R queries ([head_dim][R]) with B blocks of keys
template <int R, int B, class K>
static inline void score_tile(const float* queries, const K* keys, int64_t head_dim, const Ahead& ahead, float* scores, int64_t stride) {
    F16 sums[R][B];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) sums[r][b] = zero();
    const int64_t block = stored<K>(head_dim) * LANES;
    [[maybe_unused]] F16 scales[B];
    for (int64_t d = 0; d < head_dim; d++) {
        ahead.fetch(d);
        F16 k[B];
        if constexpr (sizeof(K) == 1)
            if (d % BLOCK_OF_CODES == 0)
                for (int b = 0; b < B; b++) scales[b] = scales_of_keys(keys + b * block, head_dim, d);
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) {
            k[b] = widen(keys + b * block + d * LANES);
            if constexpr (sizeof(K) == 1) k[b] = mul(k[b], scales[b]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const F16 q = set1(queries[d * R + r]);
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) sums[r][b] = fma(q, k[b], sums[r][b]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) store(scores + r * stride + b * LANES, sums[r][b]);
}

template <int R, class K>
static inline void score_rows(const float* queries, const K* keys, int64_t head_dim, int64_t blocks, const Ahead& ahead, float* scores, int64_t stride) {
    if (blocks == SCORE_BLOCKS) return score_tile<R, SCORE_BLOCKS>(queries, keys, head_dim, ahead, scores, stride);
    for (int64_t b = 0; b < blocks; b++) score_tile<R, 1>(queries, keys + b * stored<K>(head_dim) * LANES, head_dim, ahead, scores + b * LANES, stride);
}

template <int R, class K>
static void score(int64_t rows, const float* queries, const K* keys, int64_t head_dim, int64_t blocks, const Ahead& ahead, float* scores, int64_t stride) {
    if (rows == R) score_rows<R>(queries, keys, head_dim, blocks, ahead, scores, stride);
    else if constexpr (R > 1) score<R - 1>(rows, queries, keys, head_dim, blocks, ahead, scores, stride);
}

template <class K>
static void lay_out_queries(const Unit<K>& u) {
    for (int64_t first = 0; first < u.count; first += SCORE_ROWS) {
        const int64_t rows = smaller(SCORE_ROWS, u.count - first);
        float* tile = u.desk.queries + first * u.head_dim;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t d = 0; d < u.head_dim; d++) tile[d * rows + r] = u.rows[first + r].query[d];
    }
}

// `rows` rows of a head, or blocks of sixteen keys, as floats: other types are widened if more than one tile reads them.
static inline const float* widened(const float* numbers, int64_t, int64_t, int64_t, float*) { return numbers; }
static inline const float* widened(const uint16_t* numbers, int64_t rows, int64_t width, int64_t tiles, float* panel) {
    if (tiles == 1) return nullptr;
    const int64_t count = rows * width;
    for (int64_t i = 0; i < count; i += LANES) put(panel + i, i + LANES <= count ? widen(numbers + i) : widen_first(numbers + i, (int)(count - i)), count - i);
    return panel;
}
static inline const float* widened(const int8_t* codes, int64_t rows, int64_t width, int64_t tiles, float* panel) {
    if (tiles == 1) return nullptr;
    for (int64_t row = 0; row < rows; row++) decode_row(codes + row * stored<int8_t>(width), width, 0, width, panel + row * width);
    return panel;
}
template <class K>
static inline const float* widened_keys(const K* keys, int64_t blocks, int64_t head_dim, int64_t tiles, float* panel) {
    return widened(keys, blocks, head_dim * LANES, tiles, panel);
}
static inline const float* widened_keys(const int8_t* keys, int64_t blocks, int64_t head_dim, int64_t tiles, float* panel) {
    if (tiles == 1) return nullptr;
    float* to = panel;
    for (int64_t b = 0; b < blocks; b++, keys += stored<int8_t>(head_dim) * LANES) {
        F16 scales = zero();
        for (int64_t d = 0; d < head_dim; d++, to += LANES) {
            if (d % BLOCK_OF_CODES == 0) scales = scales_of_keys(keys, head_dim, d);
            store(to, mul(widen(keys + d * LANES), scales));
        }
    }
    return panel;
}

// Blocks of sixteen latents [16][width] become blocks of keys [width][16].
template <class K>
static inline const float* turned(const K* rows, int64_t blocks, int64_t width, float* panel) {
    for (int64_t b = 0; b < blocks; b++) {
        const K* from = rows + b * LANES * width;
        float* to = panel + b * LANES * width;
        int64_t d = 0;
        for (; d + TURNED <= width; d += TURNED) turn(from + d, width, to + d * LANES);
        for (; d < width; d++)
            for (int64_t i = 0; i < LANES; i++) to[d * LANES + i] = widen_one(from[i * width + d]);
    }
    return panel;
}
static inline const float* turned(const int8_t* rows, int64_t blocks, int64_t width, float* panel) {
    alignas(64) float part[LANES * BLOCK_OF_CODES];
    for (int64_t b = 0; b < blocks; b++, rows += LANES * stored<int8_t>(width))
        for (int64_t d = 0; d < width; d += BLOCK_OF_CODES) {
            const int64_t count = smaller(BLOCK_OF_CODES, width - d);
            for (int64_t i = 0; i < LANES; i++) decode_row(rows + i * stored<int8_t>(width), width, d, count, part + i * count);
            turned((const float*)part, 1, count, panel + (b * width + d) * LANES);
        }
    return panel;
}

// All rows with the blocks from `block` on, as far as they see them.
template <class K>
static void score_blocks(const Unit<K>& u, int64_t block, int64_t last, const K* next) {
    const int64_t panel = u.width() * LANES, tiles = (u.count + SCORE_ROWS - 1) / SCORE_ROWS;
    const Slots<K>& slots = u.at(block * LANES);
    const K* keys = slots.scored() + block * panel;
    const int64_t all = smaller(SCORE_BLOCKS, last - block);
    const float* wide = slots.keys ? widened_keys(keys, all, u.head_dim, tiles, u.desk.panel) : turned(keys, all, u.head_dim, u.desk.panel);
    for (int64_t first = 0; first < u.count; first += SCORE_ROWS) {
        const int64_t rows = smaller(SCORE_ROWS, u.count - first);
        int64_t seen = 0;
        for (int64_t r = first; r < first + rows; r++) seen = larger(seen, (u.rows[r].stop + LANES - 1) / LANES);
        const int64_t blocks = smaller(all, seen - block);
        if (blocks <= 0) continue;
        const Ahead ahead = share_ahead(next, SCORE_BLOCKS * panel, u.head_dim, first / SCORE_ROWS, tiles);
        const float* queries = u.desk.queries + first * u.head_dim;
        float* scores = u.desk.scores + first * u.desk.stride + block * LANES;
        if (wide) score<SCORE_ROWS>(rows, queries, wide, u.head_dim, blocks, ahead, scores, u.desk.stride);
        else score<SCORE_ROWS>(rows, queries, keys, u.head_dim, blocks, ahead, scores, u.desk.stride);
    }
}

// Blocks of keys outside, so that each is read from memory once; behind the last come the values.
template <class K>
static void score_slots(const Unit<K>& u) {
    lay_out_queries(u);
    int64_t from = INT64_MAX, stop = 0;
    for (int64_t r = 0; r < u.count; r++) {
        from = smaller(from, smaller(u.rows[r].from, u.rows[r].common));  // a window may begin on the path, whose slots are in any order
        stop = larger(stop, u.rows[r].stop);
    }
    const int64_t last = (stop + LANES - 1) / LANES;
    for (int64_t block = from / LANES, end; block < last; block = end) {
        end = u.end_at(block * LANES, smaller(block + SCORE_BLOCKS, last) * LANES) / LANES;
        score_blocks(u, block, end, end < last ? u.at(end * LANES).scored() + end * u.width() * LANES : u.at(from).values);
    }
}

// ---- from scores to weights ----

// A row's scores move from slots to positions.
static inline void follow_scores(const Row& row, float* scores, float* path) {
    const int64_t length = row.n - row.common;
    for (int64_t i = 0; i < length; i++) path[i] = scores[row.path[i]];
    for (int64_t i = 0; i < length; i++) scores[row.common + i] = path[i];
}

// Scale and cap, in place; the largest. What is -inf stays so.
static inline float finish_scores(float* scores, int64_t from, int64_t stop, float scale, float softcap) {
    F16 top = set1(-__builtin_inff());
    for (int64_t p = from; p < stop; p += LANES) {
        const F16 raw = mul(load(scores + p), set1(scale));
        const F16 s = softcap == 0.0f ? raw : where_less(raw, set1(-3e38f), raw, mul(tanh(div(raw, set1(softcap))), set1(softcap)));
        store(scores + p, s);
        top = max(top, s);
    }
    return largest(top);
}

// Scores of a row become weights; one over their sum. Blocks that are seen in part are filled up with -inf, whose weight is exactly 0.
static float weigh(const Row& row, float* scores, float scale, float softcap) {
    const int64_t first = row.from / LANES * LANES, last = round_up(row.n, LANES);
    for (int64_t p = first; p < row.from; p++) scores[p] = -__builtin_inff();
    for (int64_t p = row.n; p < last; p++) scores[p] = -__builtin_inff();
    const float most = finish_scores(scores, first, last, scale, softcap);
    const F16 top = set1(row.sink && *row.sink > most ? *row.sink : most);
    F16 total = zero();
    for (int64_t p = first; p < last; p += LANES) {
        const F16 weight = exp(sub(load(scores + p), top));
        store(scores + p, weight);
        total = add(total, weight);
    }
    return 1.0f / (row.sink ? sum(total) + largest(exp(sub(set1(*row.sink), top))) : sum(total));
}

// ---- values ----

// Where the values of consecutive positions stand: one after the other, or in the slots of a path.
template <class K>
struct InOrder {
    const K* values;
    int64_t head_dim, width;

    const K* at(int64_t p) const { return values + p * stored<K>(head_dim); }
};
template <class K>
struct OnPath {
    const K* values;
    int64_t head_dim, width;
    const int32_t* slots;

    const K* at(int64_t p) const { return values + slots[p] * stored<K>(head_dim); }
};

// The weights of some rows, and the sums that they go into.
struct Mix {
    const float* weights;
    float* sums;
    int64_t stride, padded;  // from row to row
};

// sums [R][16 B] from column d on continue over n positions; only the first `left` < 16 numbers of the last block exist where it is not whole
template <int R, int B, bool whole, class Source>
static inline void value_tile(const Mix& mix, const Source& source, int64_t n, int64_t d, const Ahead& ahead, int left) {
    F16 s[R][B];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) s[r][b] = load(mix.sums + r * mix.padded + d + b * LANES);
    for (int64_t p = 0; p < n; p++) {
        ahead.fetch(p);
        const auto* row = source.at(p);
        F16 v[B];
        [[maybe_unused]] F16 scale;  // of two of these vectors: d is a multiple of BLOCK_OF_CODES unless B = 1
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) {
            v[b] = whole ? widen(row + d + b * LANES) : widen_first(row + d + b * LANES, left);
            if constexpr (sizeof *row == 1) {
                if (b % 2 == 0) scale = scale_of_row(row, source.head_dim, d + b * LANES);
                v[b] = mul(v[b], scale);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const F16 w = set1(mix.weights[r * mix.stride + p]);
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) s[r][b] = fma(w, v[b], s[r][b]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) store(mix.sums + r * mix.padded + d + b * LANES, s[r][b]);
}

// All of a value, by the widest tiles that fit.
template <int R, class Source>
static void value_rows(const Mix& mix, const Source& source, int64_t n, const Ahead& ahead) {
    const int64_t width = source.width;
    int64_t d = 0;
    for (; d + VALUE_BLOCKS * LANES <= width; d += VALUE_BLOCKS * LANES) value_tile<R, VALUE_BLOCKS, true>(mix, source, n, d, d == 0 ? ahead : Ahead{}, 0);
    if constexpr (VALUE_BLOCKS > 4)
        for (; d + 4 * LANES <= width; d += 4 * LANES) value_tile<R, 4, true>(mix, source, n, d, d == 0 ? ahead : Ahead{}, 0);
    if constexpr (VALUE_BLOCKS > 2)
        for (; d + 2 * LANES <= width; d += 2 * LANES) value_tile<R, 2, true>(mix, source, n, d, d == 0 ? ahead : Ahead{}, 0);
    for (; d + LANES <= width; d += LANES) value_tile<R, 1, true>(mix, source, n, d, {}, 0);
    if (d < width) value_tile<R, 1, false>(mix, source, n, d, {}, (int)(width - d));
}

template <int R, class K>
static void value(int64_t rows, const Mix& mix, const InOrder<K>& source, int64_t n, const Ahead& ahead) {
    if (rows == R) value_rows<R>(mix, source, n, ahead);
    else if constexpr (R > 1) value<R - 1>(rows, mix, source, n, ahead);
}

template <class K>
static inline Mix mix_of(const Unit<K>& u, int64_t row, int64_t position) {
    return {u.desk.scores + row * u.desk.stride + position, u.desk.sums + row * u.desk.padded, u.desk.stride, u.desk.padded};
}

// Rows first .. first + rows - 1 of a unit continue over the slots from .. stop - 1.
template <class K>
static void sum_values(const Unit<K>& u, int64_t first, int64_t rows, int64_t from, int64_t stop, const Ahead& ahead) {
    for (int64_t end; from < stop; from = end) {
        end = u.end_at(from, stop);
        value<VALUE_ROWS>(rows, mix_of(u, first, from), InOrder<K>{u.at(from).values + from * u.width(), u.head_dim, u.value_dim}, end - from, ahead);
    }
}

// The positions that all rows of a tile see as slots: from the last of their beginnings to the first of their paths.
struct Shared {
    int64_t from, stop;
};
static inline Shared shared(const Row* rows, int64_t count) {
    Shared s = {rows[0].from, rows[0].common};
    for (int64_t r = 1; r < count; r++) {
        s.from = larger(s.from, rows[r].from);
        s.stop = smaller(s.stop, rows[r].common);
    }
    return s;
}

// What a row sees from position `from` on, behind the slots that its tile shares.
template <class K>
static void follow_values(const Unit<K>& u, int64_t r, int64_t from) {
    const Row& row = u.rows[r];
    sum_values(u, r, 1, from, row.common, {});
    const int64_t p = larger(from, row.common);
    if (p < row.n) value_rows<1>(mix_of(u, r, p), OnPath<K>{u.own.values, u.head_dim, u.value_dim, row.path + (p - row.common)}, row.n - p, {});
}

template <class K>
static void mix_values(const Unit<K>& u) {
    memset(u.desk.sums, 0, (size_t)(u.count * u.desk.padded) * sizeof(float));
    Shared tiles[UNIT_ROWS];
    int64_t from = INT64_MAX, stop = 0;
    for (int64_t first = 0; first < u.count; first += VALUE_ROWS) {
        const int64_t rows = smaller(VALUE_ROWS, u.count - first);
        const Shared t = tiles[first] = shared(u.rows + first, rows);
        for (int64_t r = first; r < first + rows; r++) sum_values(u, r, 1, u.rows[r].from, smaller(t.from, t.stop), {});
        from = smaller(from, t.from);
        stop = larger(stop, t.stop);
    }
    const int64_t count = (u.count + VALUE_ROWS - 1) / VALUE_ROWS;
    for (int64_t p = from, run; p < stop; p = run) {
        run = u.end_at(p, smaller(p + VALUE_RUN, stop));
        const float* wide = widened(u.at(p).values + p * u.width(), run - p, u.head_dim, count, u.desk.panel);
        const K* next = run < stop ? u.at(run).values + run * u.width() : u.next;
        for (int64_t first = 0; first < u.count; first += VALUE_ROWS) {
            const Ahead ahead = share_ahead(next, VALUE_RUN * u.width(), VALUE_RUN, first / VALUE_ROWS, count);
            const int64_t rows = smaller(VALUE_ROWS, u.count - first), begin = larger(p, tiles[first].from), end = smaller(run, tiles[first].stop);
            if (wide && begin < end) value<VALUE_ROWS>(rows, mix_of(u, first, begin), InOrder<float>{wide + (begin - p) * u.head_dim, u.head_dim, u.value_dim}, end - begin, ahead);
            else sum_values(u, first, rows, begin, end, ahead);
        }
    }
    for (int64_t r = 0; r < u.count; r++) follow_values(u, r, larger(tiles[r / VALUE_ROWS * VALUE_ROWS].stop, u.rows[r].from));
}

// ---- units ----

template <class K>
static void attend_unit(const Unit<K>& u, float scale, float softcap) {
    score_slots(u);
    float inverse[UNIT_ROWS];
    for (int64_t r = 0; r < u.count; r++) {
        float* scores = u.desk.scores + r * u.desk.stride;
        follow_scores(u.rows[r], scores, u.desk.path);
        inverse[r] = weigh(u.rows[r], scores, scale, softcap);
    }
    mix_values(u);
    for (int64_t r = 0; r < u.count; r++)
        for (int64_t d = 0; d < u.value_dim; d += LANES)  // + 0 makes a zero positive: how many products underflowed before it is nobody's business
            put(u.rows[r].out + d, add(mul(load(u.desk.sums + r * u.desk.padded + d), set1(inverse[r])), zero()), u.value_dim - d);
}

static Row row_of(const dovetail::Layer& l, const dovetail::Segment& s, int64_t i) {
    Row row = {};
    if (s.path_offsets) {
        row.path = s.path_slots + s.path_offsets[i];
        row.common = s.prefix;
        row.n = s.prefix + s.path_offsets[i + 1] - s.path_offsets[i];
        for (int32_t p = row.common; p < row.n; p++) row.stop = (int32_t)larger(row.stop, row.path[p - row.common] + 1);
        row.stop = (int32_t)larger(row.stop, row.common);
    } else {
        row.common = row.n = row.stop = s.start + (int32_t)i + 1;
    }
    row.from = l.window > 0 && row.n > l.window ? row.n - l.window : 0;
    if (l.chunk > 0) row.from = (int32_t)larger(row.from, (row.n - 1) / l.chunk * l.chunk);
    return row;
}

// Numbers of a row of queries and, where the layer has its own, keys and values.
static inline int64_t row_width(const dovetail::Layer& l) { return (l.heads + (l.reads || l.latent ? 0 : 2 * l.kv_heads)) * l.head_dim; }

// Where a key head of the layer begins in a row of a cache.
template <class K>
static inline int64_t head_begin(const dovetail::Layer& l, int64_t kv_head) { return (sizeof(K) == 1 ? l.codes_before : l.before) + kv_head * stored<K>(l.head_dim); }

// Where slot 0 of a key head of the layer would be in the cache of a session, which begins with slot `shared`.
template <class K>
static inline int64_t head_offset(const dovetail::Layer& l, const dovetail::Segment& s, int64_t kv_head) {
    return head_begin<K>(l, kv_head) * s.capacity - s.shared * stored<K>(l.head_dim);
}

// Where the slots of a key head begin, of those that are shared and of the session's own.
template <class K>
static inline Slots<K> shared_slots(const dovetail::Layer& l, const dovetail::Segment& s, int64_t kv_head, const K*) {
    const int64_t at = head_begin<K>(l, kv_head) * s.shared_capacity;
    return {l.latent ? nullptr : (const K*)s.shared_keys + at, (const K*)s.shared_values + at};
}
template <class K>
static inline Slots<K> own_slots(const dovetail::Layer& l, const dovetail::Segment& s, int64_t kv_head, const K* keys, const K* values) {
    const int64_t at = head_offset<K>(l, s, kv_head);
    return {l.latent ? nullptr : keys + at, values + at};
}

// Calls `use` with the keys and values of a segment's cache as what they are.
template <class Use>
static inline void with_numbers(const dovetail::Segment& s, const Use& use) {
    if (s.kind == dovetail::FP16) use((uint16_t*)s.keys, (uint16_t*)s.values);
    else if (s.kind == dovetail::INT8) use((int8_t*)s.keys, (int8_t*)s.values);
    else use((float*)s.keys, (float*)s.values);
}

// How a pass is cut into units. The bytes of a row do not depend on it.
struct Plan {
    const dovetail::Layer* layer;
    const dovetail::Pass* pass;
    const float* qkv;
    float* out;
    int64_t threads;

    int64_t groups() const { return layer->heads / layer->kv_heads; }
    int64_t value_dim() const { return layer->latent ? layer->latent->rank : layer->head_dim; }
    int64_t stride(const dovetail::Segment& s) const { return round_up(s.start + s.count, LANES) + LANES; }
    int64_t rows(const dovetail::Segment& s) const { return s.count * groups(); }
    // As many as use a tile well and leave every thread something to do; less than a tile only where there are not enough for all.
    int64_t unit_rows(const dovetail::Segment& s) const {
        const int64_t all = rows(s) * layer->kv_heads, most = smaller(UNIT_ROWS, larger(SCORE_ROWS, UNIT_SCORES / stride(s)));
        const int64_t fair = threads == 1 ? most : smaller(most, all / (2 * threads));
        return fair >= SCORE_ROWS ? fair / SCORE_ROWS * SCORE_ROWS : smaller(SCORE_ROWS, larger(1, all / threads));
    }
    int64_t ranges(const dovetail::Segment& s) const { return (rows(s) + unit_rows(s) - 1) / unit_rows(s); }
    int64_t units(const dovetail::Segment& s) const { return ranges(s) * layer->kv_heads; }
};

static Desk desk_at(float* memory, int64_t rows, int64_t stride, int64_t head_dim, int64_t value_dim) {
    Desk desk;
    desk.stride = stride;
    desk.padded = round_up(value_dim, LANES);
    desk.sums = memory;
    desk.scores = desk.sums + rows * desk.padded;
    desk.path = desk.scores + rows * stride;
    desk.queries = desk.path + stride;
    desk.panel = desk.queries + rows * head_dim;
    return desk;
}

static int64_t desk_floats(int64_t rows, int64_t stride, int64_t head_dim) {
    return round_up(rows * (round_up(head_dim, LANES) + stride + head_dim) + stride + VALUE_RUN * head_dim, LANES);
}

static void attend_range(const Plan& plan, const dovetail::Segment& s, int64_t kv_head, int64_t first, float* memory) {
    const dovetail::Layer& l = *plan.layer;
    const int64_t head_dim = l.head_dim, value_dim = plan.value_dim(), groups = plan.groups(), count = smaller(plan.unit_rows(s), plan.rows(s) - first);
    Row rows[UNIT_ROWS];
    for (int64_t r = 0; r < count; r++) {
        const int64_t i = (first + r) / groups, head = kv_head * groups + (first + r) % groups, row = s.first_row + i;
        rows[r] = row_of(l, s, i);
        rows[r].sink = l.sinks ? l.sinks + head : nullptr;
        rows[r].query = plan.qkv + row * row_width(l) + head * head_dim;
        rows[r].out = plan.out + (row * l.heads + head) * value_dim;
    }
    const Desk desk = desk_at(memory, count, plan.stride(s), head_dim, value_dim);
    with_numbers(s, [&](auto* keys, auto* values) {
        using K = std::remove_pointer_t<decltype(keys)>;
        const Slots<K> own = own_slots<K>(l, s, kv_head, keys, values);
        const K* next = s.shared ? shared_slots<K>(l, s, kv_head + 1, keys).scored() : own.scored() + s.capacity * stored<K>(head_dim);
        attend_unit(Unit<K>{shared_slots<K>(l, s, kv_head, keys), own, s.shared, next, rows, count, head_dim, value_dim, desk}, l.scale, l.softcap);
    });
}

// Of a segment's units, which go through one key head after the other, a shard has those of its heads.
static int64_t units_of(const Plan& plan, int shard) {
    int64_t units = 0;
    for (int32_t i = 0; i < plan.pass->segment_count; i++) {
        const int64_t all = plan.units(plan.pass->segments[i]);
        units += dovetail::share_begin(all, shard + 1) - dovetail::share_begin(all, shard);
    }
    return units;
}

static void attend_numbered(const Plan& plan, int shard, int64_t number, float* memory) {
    for (const dovetail::Segment* s = plan.pass->segments;; s++) {
        const int64_t all = plan.units(*s), first = dovetail::share_begin(all, shard), count = dovetail::share_begin(all, shard + 1) - first;
        const int64_t unit = first + number, ranges = plan.ranges(*s);
        if (number < count) return attend_range(plan, *s, unit / ranges, unit % ranges * plan.unit_rows(*s), memory);
        number -= count;
    }
}

// out [rows, heads head_dim] from qkv [rows, (heads + 2 kv_heads) head_dim], whose keys and values are in the caches already; over latents
// [rows, heads rank] from queries [rows, heads head_dim].
static void attention(const dovetail::Layer& l, const dovetail::Pass& pass, const float* qkv, float* out) {
    const Plan plan = {&l, &pass, qkv, out, dovetail::threads()};
    int64_t work = 0, floats = 0;
    for (int32_t i = 0; i < pass.segment_count; i++) {
        const dovetail::Segment& s = pass.segments[i];
        work += plan.rows(s) * plan.stride(s) * l.kv_heads;
        floats = larger(floats, desk_floats(smaller(plan.unit_rows(s), plan.rows(s)), plan.stride(s), l.head_dim));
    }
    float* memory = (float*)dovetail::scratch(ATTENTION_SCRATCH, plan.threads * floats * (int64_t)sizeof(float));
    const auto units = [&](int shard) { return units_of(plan, shard); };
    const auto attend = [&](int shard, int64_t unit, int part) { attend_numbered(plan, shard, unit, memory + part * floats); };
    if (work < WORTH_SHARING / 4) take_all(units, attend);
    else take_shares(units, attend);
}

}  // namespace DT_NS
