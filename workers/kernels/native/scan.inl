// Mixers with a state, over the rows of a tree.
//
// The bytes of a row follow from the rows on its path alone:
//   convolution  one chain over the taps, the oldest first, then the bias
//   decay        e^(decay step), step = softplus(a + bias)
//   remembered   a (S^T k), its sum in two chains over i mod 2, which are then added; S^T (a k) with an a for each number of the key
//   state        S = fma(k, what is added, a S)
//   output       S^T q, in two chains
// Everything else is order of work. Columns of a state never mix, so that a unit is a block of columns of one head: it is read from memory once, what was committed
// since is added by its factors, and then the rows of the tree are walked (`walk.inl`).

namespace DT_NS {

constexpr int SCAN_SCRATCH = 5, WALK_SCRATCH = 6;

#if defined(DT_AVX512)
constexpr int SCAN_BLOCKS = 2;
#else
constexpr int SCAN_BLOCKS = 1;
#endif
constexpr int CHAINS = 2;

// ---- rules ----

static inline bool by_channel(const dovetail::Scan& c) { return c.rule == dovetail::CHANNEL_DELTA; }
static inline bool is_delta(const dovetail::Scan& c) { return c.rule == dovetail::GATED_DELTA || by_channel(c); }
static inline int64_t head_decays(const dovetail::Scan& c) { return by_channel(c) ? c.key_dim : 1; }
static inline int64_t decays(const dovetail::Scan& c) { return c.value_heads * head_decays(c); }
static inline int64_t step_width(const dovetail::Scan& c) { return (by_channel(c) ? 2 : 1) * decays(c) + c.value_heads; }

// ---- factors ----

struct Factors {
    int64_t key, added, decay, all;  // where they stand in a row, and its floats
};
static inline Factors factors_of(const dovetail::Scan& c) {
    Factors f;
    f.key = round_up(c.channels, LANES);
    f.added = f.key + round_up((int64_t)c.key_heads * c.key_dim, LANES);
    f.decay = f.added + c.value_heads * round_up(c.value_dim, LANES);
    f.all = f.decay + round_up(decays(c), LANES);
    return f;
}

static inline float* factors_at(const dovetail::Scan& c, const dovetail::States& s, int64_t slot) {
    if (s.lent && slot >= s.lent_first) return s.lent + c.row_before * s.lent_room + (slot - s.lent_first) * factors_of(c).all;
    return s.factors + c.row_before * s.ring + slot % s.ring * factors_of(c).all;
}

// ---- from a row of the matrix to a query, a key, a value, a decay and a step ----

// What a pass has of all rows.
struct ScanRows {
    float* given;  // [rows][stride] by the matrix
    int64_t stride;
    float* mixed;  // [rows][channels] behind the convolution
    float* steps;  // [rows][step_width]: the decays, the factors of values, and keys times their decays
    float* out;    // [rows][value_heads value_dim], or the channels of a convolution
};

// 1 / (1 + e^-x)
static inline F16 sigmoid(F16 x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

// ln(1 + e^x) = max(x, 0) + ln(1 + t) with t = e^-|x|, by the series of 2 artanh(t / (2 + t)).
static inline F16 softplus(F16 x) {
    const F16 t = exp(sub(zero(), abs(x))), u = div(t, add(set1(2.0f), t)), z = mul(u, u);
    F16 p = set1(1.0f / 15.0f);
    for (const float c : {1.0f / 13.0f, 1.0f / 11.0f, 1.0f / 9.0f, 1.0f / 7.0f, 0.2f, 1.0f / 3.0f, 1.0f}) p = fma(p, z, set1(c));
    return add(max(zero(), x), mul(mul(set1(2.0f), u), p));
}

// The slot of a row's ancestor so many rows before it, or -1.
static inline int64_t ancestor(const dovetail::Segment& s, int64_t i, int64_t back) {
    if (!s.path_offsets) return s.start + i - back;
    const int64_t length = s.path_offsets[i + 1] - s.path_offsets[i];
    return back < length ? s.path_slots[s.path_offsets[i + 1] - 1 - back] : s.prefix - 1 - (back - length);
}

static inline const float* input_at(const dovetail::Scan& c, const dovetail::Segment& s, const ScanRows& rows, int64_t slot) {
    return slot < s.start ? factors_at(c, *s.states, slot) : rows.given + (s.first_row + slot - s.start) * rows.stride;
}

constexpr int MOST_TAPS = 16;

// The rows that the convolution sees, the oldest first, and their weights.
struct Taps {
    const float *inputs[MOST_TAPS], *weights[MOST_TAPS];
    int count;
};

// COUNT 0: as many as there are.
template <int COUNT>
static void convolve(const dovetail::Scan& c, const Taps& taps, float* y) {
    const int count = COUNT ? COUNT : taps.count;
    const auto convolve_channels = [&](int64_t d, int64_t left) __attribute__((always_inline)) {
        F16 x = zero();
#pragma GCC unroll 4
        for (int t = 0; t < count; t++) x = fma(take(taps.weights[t] + d, left), take(taps.inputs[t] + d, left), x);
        if (c.taps_bias) x = add(x, take(c.taps_bias + d, left));
        put(y + d, c.rule == dovetail::SHORT_CONVOLUTION ? x : silu(x), left);
    };
    int64_t d = 0;
    for (; d + LANES <= c.channels; d += LANES) convolve_channels(d, LANES);
    if (d < c.channels) convolve_channels(d, c.channels - d);
}

static void convolve(const dovetail::Scan& c, const dovetail::Segment& s, const ScanRows& rows, int64_t i, float* y) {
    Taps taps;
    taps.count = 0;
    for (int64_t back = c.taps - 1; back >= 0; back--) {  // a row before the first one would add 0
        const int64_t slot = ancestor(s, i, back);
        if (slot < 0) continue;
        taps.inputs[taps.count] = input_at(c, s, rows, slot);
        taps.weights[taps.count++] = c.taps_weights + (c.taps - 1 - back) * (int64_t)c.channels;
    }
    if (taps.count == 4) convolve<4>(c, taps, y);
    else convolve<0>(c, taps, y);
}

// x / sqrt(sum of squares + 1e-6), times a factor.
static inline void normalise_length(float* x, int64_t n, float factor) {
    F16 squares = zero();
    for (int64_t i = 0; i < n; i += LANES) {
        const F16 v = take(x + i, n - i);
        squares = fma(v, v, squares);
    }
    const F16 scale = set1(1.0f / __builtin_sqrtf(sum(squares) + 1e-6f));
    for (int64_t i = 0; i < n; i += LANES) put(x + i, mul(mul(take(x + i, n - i), scale), set1(factor)), n - i);
}

// A decay for each number of a key.
static void take_channel_steps(const dovetail::Scan& c, const float* given, const float* keys, float* steps) {
    const float *b = given + c.channels, *raw = b + c.value_heads + 2 * c.low + (int64_t)c.value_heads * c.value_dim;
    float *factors = steps + decays(c), *decayed = factors + c.value_heads;
    for (int64_t h = 0; h < c.value_heads; h += LANES) put(factors + h, mul(set1(c.step_factor), sigmoid(take(b + h, c.value_heads - h))), c.value_heads - h);
    for (int64_t head = 0; head < c.value_heads; head++) {
        const float* key = keys + head / (c.value_heads / c.key_heads) * c.key_dim;
        for (int64_t i = 0; i < c.key_dim; i += LANES) {
            const int64_t at = head * c.key_dim + i, left = c.key_dim - i;
            const F16 a = exp(mul(set1(c.decay[head]), softplus(add(take(raw + at, left), take(c.step_bias + at, left)))));
            put(steps + at, a, left);
            put(decayed + at, mul(a, take(key + i, left)), left);
        }
    }
}

static void take_steps(const dovetail::Scan& c, const float* given, float* decays, float* factors) {
    const bool delta = c.rule == dovetail::GATED_DELTA;
    const float* raw = given + c.channels + (int64_t)c.value_heads * c.value_dim;
    for (int64_t h = 0; h < c.value_heads; h += LANES) {
        const int64_t left = c.value_heads - h;
        const F16 step = softplus(add(take(raw + (delta ? c.value_heads : 0) + h, left), take(c.step_bias + h, left)));
        put(decays + h, exp(mul(take(c.decay + h, left), step)), left);
        put(factors + h, delta ? mul(set1(c.step_factor), sigmoid(take(raw + h, left))) : step, left);
    }
}

static void prepare_row(const dovetail::Scan& c, const dovetail::Segment& s, const ScanRows& rows, int64_t i) {
    const int64_t row = s.first_row + i;
    float* mixed = rows.mixed + row * c.channels;
    convolve(c, s, rows, i, mixed);
    if (c.rule == dovetail::SHORT_CONVOLUTION) return;
    if (is_delta(c))
        for (int64_t head = 0; head < 2 * c.key_heads; head++)
            normalise_length(mixed + head * c.key_dim, c.key_dim, head < c.key_heads ? c.query_scale : 1.0f);
    float* steps = rows.steps + row * step_width(c);
    if (by_channel(c)) take_channel_steps(c, rows.given + row * rows.stride, mixed + (int64_t)c.key_heads * c.key_dim, steps);
    else take_steps(c, rows.given + row * rows.stride, steps, steps + c.value_heads);
}

// ---- the state ----

// Sums over the numbers of a key or a query, of the even ones and of the odd ones.
struct Chains {
    F16 sums[SCAN_BLOCKS][CHAINS];

    DT_INLINE void clear() {
#pragma GCC unroll 2
        for (int b = 0; b < SCAN_BLOCKS; b++) sums[b][0] = sums[b][1] = zero();
    }
    DT_INLINE void take(int b, int j, float number, F16 state) { sums[b][j] = fma(set1(number), state, sums[b][j]); }
    DT_INLINE F16 joined(int b) const { return add(sums[b][0], sums[b][1]); }
};

// Where the columns of a unit stand, in blocks that are `stride` apart.
struct Place {
    float* at;
    int64_t stride;

    DT_INLINE float* number(int b, int64_t i) const { return at + b * stride + i * LANES; }
};

// What a state is renewed by. Sums that are asked for later are begun with each number of it.
struct Renewal {
    const float *decays, *key, *query, *next_key;
    F16 added[SCAN_BLOCKS];
};

// S^T k
static DT_INLINE void look_up(const Place& state, const float* key, int64_t n, Chains& found) {
    Chains c;
    c.clear();
    const auto take = [&](int64_t i, int j) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int b = 0; b < SCAN_BLOCKS; b++) c.take(b, j, key[i], load(state.number(b, i)));
    };
    int64_t i = 0;
    for (; i + CHAINS <= n; i += CHAINS) take(i, 0), take(i + 1, 1);
    if (i < n) take(i, 0);
    found = c;
}

// S = a S + k added, from one place to another, and while its numbers are in registers S^T q and S^T k of the next key. EACH: with an a for each i.
template <bool EACH, bool READS, bool GOES_ON>
static DT_INLINE void renew(const Place& from, const Place& to, const Renewal& r, int64_t n, Chains& read, Chains& found) {
    const F16 one = set1(*r.decays);
    Chains q, k;
    if (READS) q.clear();
    if (GOES_ON) k.clear();
    const auto take = [&](int64_t i, int j) __attribute__((always_inline)) {
        const F16 decay = EACH ? set1(r.decays[i]) : one;
#pragma GCC unroll 2
        for (int b = 0; b < SCAN_BLOCKS; b++) {
            const F16 x = fma(set1(r.key[i]), r.added[b], mul(decay, load(from.number(b, i))));
            store(to.number(b, i), x);
            if (READS) q.take(b, j, r.query[i], x);
            if (GOES_ON) k.take(b, j, r.next_key[i], x);
        }
    };
    int64_t i = 0;
    for (; i + CHAINS <= n; i += CHAINS) take(i, 0), take(i + 1, 1);
    if (i < n) take(i, 0);
    if (READS) read = q;
    if (GOES_ON) found = k;
}

template <bool READS>
static DT_INLINE void renew(bool each, const Place& from, const Place& to, const Renewal& r, int64_t n, Chains& read, Chains& found) {
    if (each) r.next_key ? renew<true, READS, true>(from, to, r, n, read, found) : renew<true, READS, false>(from, to, r, n, read, found);
    else r.next_key ? renew<false, READS, true>(from, to, r, n, read, found) : renew<false, READS, false>(from, to, r, n, read, found);
}

// Some columns of one head's state in one session.
struct ScanUnit {
    const dovetail::Scan* scan;
    const dovetail::Segment* segment;
    const Walk* walk;
    int64_t head, key_head, column;  // the first of them
    float* desk;                     // [blocks][SCAN_BLOCKS][key_dim][16]
};

static inline F16 take_columns(const float* p, int64_t left) { return left > 0 ? take(p, left) : zero(); }

// What the convolution gave of a row.
struct MixedRow {
    const float *query, *key, *value;
};

static inline MixedRow mixed_row(const ScanUnit& u, const ScanRows& rows, int64_t row) {
    const dovetail::Scan& c = *u.scan;
    const int64_t keys = (int64_t)c.key_heads * c.key_dim;
    const float* mixed = rows.mixed + row * c.channels;
    return {mixed + u.key_head * c.key_dim, mixed + keys + u.key_head * c.key_dim, mixed + 2 * keys + u.head * c.value_dim};
}

// The key by which a row reads a state, times the decays if there is one per number.
static inline const float* looking_up(const ScanUnit& u, const ScanRows& rows, int64_t row) {
    const dovetail::Scan& c = *u.scan;
    if (!by_channel(c)) return mixed_row(u, rows, row).key;
    return rows.steps + row * step_width(c) + decays(c) + c.value_heads + u.head * c.key_dim;
}

// Rows are far apart: the next one comes while this one is computed.
static inline void fetch_row(const ScanUnit& u, const MixedRow& row) {
    constexpr int64_t step = LINE / (int64_t)sizeof(float);
    for (int64_t i = 0; i < u.scan->key_dim; i += step) __builtin_prefetch(row.query + i), __builtin_prefetch(row.key + i);
    __builtin_prefetch(row.value + u.column);
}

// A row of the pass. `found` is S^T k of it, and behind it of the next key where there is one.
static void step_row(const ScanUnit& u, const ScanRows& rows, const Hop& hop, const Place& from, const Place& to, const float* next_key, Chains& found) {
    const dovetail::Scan& c = *u.scan;
    const bool delta = is_delta(c), each = by_channel(c);
    const MixedRow mixed = mixed_row(u, rows, hop.row);
    const float* steps = rows.steps + (int64_t)hop.row * step_width(c);
    Renewal r = {steps + u.head * head_decays(c), mixed.key, mixed.query, next_key, {}};
    const F16 factor = set1(steps[decays(c) + u.head]);
    float* kept = u.walk->in_place ? nullptr : factors_at(c, *u.segment->states, hop.slot) + factors_of(c).added + u.head * round_up(c.value_dim, LANES);
    for (int b = 0; b < SCAN_BLOCKS; b++) {
        const int64_t d = u.column + b * LANES;
        const F16 v = take_columns(mixed.value + d, c.value_dim - d);
        const F16 remembered = each ? found.joined(b) : mul(set1(*r.decays), found.joined(b));
        r.added[b] = mul(factor, delta ? sub(v, remembered) : v);
        if (kept && d < c.value_dim) store(kept + d, r.added[b]);
    }
    Chains read;
    renew<true>(each, from, to, r, c.key_dim, read, found);
    float* out = rows.out + ((int64_t)hop.row * c.value_heads + u.head) * c.value_dim;
    for (int b = 0; b < SCAN_BLOCKS; b++) {
        const int64_t d = u.column + b * LANES;
        if (d >= c.value_dim) break;
        const F16 o = read.joined(b);
        put(out + d, c.skip ? fma(set1(c.skip[u.head]), take(mixed.value + d, c.value_dim - d), o) : o, c.value_dim - d);
    }
}

// A row of an earlier pass, by its factors.
static void replay(const ScanUnit& u, const Hop& hop, const Place& from, const Place& to, const float* next_key, Chains& found) {
    const dovetail::Scan& c = *u.scan;
    const Factors f = factors_of(c);
    const float* row = factors_at(c, *u.segment->states, hop.slot);
    const float* kept = row + f.added + u.head * round_up(c.value_dim, LANES) + u.column;
    Renewal r = {row + f.decay + u.head * head_decays(c), row + f.key + u.key_head * c.key_dim, nullptr, next_key, {}};
    for (int b = 0; b < SCAN_BLOCKS; b++) r.added[b] = u.column + b * LANES < c.value_dim ? load(kept + b * LANES) : zero();
    renew<false>(by_channel(c), from, to, r, c.key_dim, found, found);
}

static inline int64_t head_blocks(const dovetail::Scan& c) { return round_up(round_up(c.value_dim, LANES) / LANES, SCAN_BLOCKS); }

// A last block that is missing to a whole unit is computed on a block of the desk that nobody reads.
static void scan_unit(const ScanUnit& u, const ScanRows& rows) {
    const dovetail::Scan& c = *u.scan;
    const int64_t block = (int64_t)c.key_dim * LANES, columns = round_up(c.value_dim, LANES);
    float* session = u.segment->states->state + c.state_before + (u.head * columns + u.column) * c.key_dim;
    const int64_t behind = SCAN_BLOCKS == 1 || u.column + SCAN_BLOCKS * LANES <= columns ? block : u.desk - session;
    float* desk = behind == block ? u.desk : u.desk + block;
    const auto place = [&](int32_t number) {
        return number == SESSION ? Place{session, behind} : Place{desk + number * SCAN_BLOCKS * block, block};
    };
    Chains found;
    found.clear();
    bool known = false;  // `found` is S^T k of the hop
    for (const Hop *hop = u.walk->hops, *end = hop + u.walk->count; hop < end; hop++) {
        const Place from = place(hop->from), to = place(hop->to);
        const Hop* next = hop + 1 < end && hop[1].row >= 0 ? hop + 1 : nullptr;
        const float* next_key = nullptr;
        if (hop + 2 < end && hop[2].row >= 0) fetch_row(u, mixed_row(u, rows, hop[2].row));
        if (next && is_delta(c) && next->from == hop->to) next_key = looking_up(u, rows, next->row);
        if (hop->row < 0) {
            replay(u, *hop, from, to, next_key, found);
        } else {
            if (is_delta(c) && !known) look_up(from, looking_up(u, rows, hop->row), c.key_dim, found);
            step_row(u, rows, *hop, from, to, next_key, found);
        }
        known = next_key != nullptr;
    }
}

// ---- behind the state ----

// Gate and norm, into the row itself.
static void finish_row(const dovetail::Scan& c, const float* gates, float* x) {
    const int64_t width = (int64_t)c.value_heads * c.value_dim;
    if (by_channel(c)) gates += c.value_heads + 2 * c.low;
    if (c.gate_first)
        for (int64_t d = 0; d < width; d += LANES) put(x + d, mul(take(x + d, width - d), silu(take(gates + d, width - d))), width - d);
    for (int64_t d = 0, n = 0; c.norm_weight && d < width; d += c.norm_width, n++)
        rms_norm(x + d, c.norm_weight + n * c.norm_stride, x + d, c.norm_width, c.epsilon);
    if (!c.gate_first)
        for (int64_t d = 0; d < width; d += LANES) {
            const F16 gate = take(gates + d, width - d);
            put(x + d, mul(take(x + d, width - d), by_channel(c) ? sigmoid(gate) : silu(gate)), width - d);
        }
}

static void keep_factors(const dovetail::Scan& c, const dovetail::Segment& s, const ScanRows& rows, int64_t i, bool in_place) {
    if (in_place && i + c.taps - 1 < s.count) return;
    const int64_t row = s.first_row + i;
    const Factors f = factors_of(c);
    float* kept = factors_at(c, *s.states, s.start + i);
    memcpy(kept, rows.given + row * rows.stride, (size_t)c.channels * sizeof(float));
    if (in_place || c.rule == dovetail::SHORT_CONVOLUTION) return;
    const int64_t keys = (int64_t)c.key_heads * c.key_dim;
    memcpy(kept + f.key, rows.mixed + row * c.channels + keys, (size_t)keys * sizeof(float));
    memcpy(kept + f.decay, rows.steps + row * step_width(c), (size_t)decays(c) * sizeof(float));
}

static void multiply_rows(const float* x, const float* y, float* to, int64_t n) {
    for (int64_t d = 0; d < n; d += LANES) put(to + d, mul(take(x + d, n - d), take(y + d, n - d)), n - d);
}

static void finish(const dovetail::Scan& c, const dovetail::Segment& s, const ScanRows& rows, int64_t i, bool in_place) {
    const int64_t row = s.first_row + i;
    const float* given = rows.given + row * rows.stride;
    if (c.rule == dovetail::SHORT_CONVOLUTION) multiply_rows(given + c.channels, rows.mixed + row * c.channels, rows.out + row * c.channels, c.channels);
    else finish_row(c, given + c.channels, rows.out + row * c.value_heads * c.value_dim);
    keep_factors(c, s, rows, i, in_place);
}

// body(segment, its number, a row of it) for all rows of a pass.
template <class Body>
static void each_row(const dovetail::Pass& pass, int64_t work, const Body& body) {
    each(pass.rows, work, [&](int64_t row) {
        int64_t number = 0;
        while (row >= pass.segments[number].first_row + pass.segments[number].count) number++;
        body(pass.segments[number], number, row - pass.segments[number].first_row);
    });
}

// Of a segment's units, which go through one head after the other, a shard has those of its heads.
static void scan_units(const dovetail::Scan& c, const dovetail::Pass& pass, const ScanRows& rows, const Walk* walks) {
    const int64_t parts = head_blocks(c) / SCAN_BLOCKS, places = c.value_heads * parts, block = (int64_t)c.key_dim * LANES;
    int64_t blocks = 0, hops = 0;
    for (int32_t i = 0; i < pass.segment_count; i++) {
        blocks = larger(blocks, walks[i].blocks);
        hops += walks[i].count;
    }
    const int64_t floats = (blocks * SCAN_BLOCKS + 1) * block;
    float* memory = (float*)dovetail::scratch(WALK_SCRATCH, dovetail::threads() * floats * (int64_t)sizeof(float));
    const auto count = [&](int shard) { return dovetail::share_begin(places, shard + 1) - dovetail::share_begin(places, shard); };
    const auto units = [&](int shard) { return pass.segment_count * count(shard); };
    const auto walk = [&](int shard, int64_t unit, int part) {
        const int64_t segment = unit / count(shard), place = dovetail::share_begin(places, shard) + unit % count(shard);
        const int64_t head = place / parts, key_head = head / (c.value_heads / c.key_heads), column = place % parts * SCAN_BLOCKS * LANES;
        scan_unit({&c, pass.segments + segment, walks + segment, head, key_head, column, memory + part * floats}, rows);
    };
    if (hops * c.value_heads * c.value_dim * c.key_dim < WORTH_SHARING) take_all(units, walk);
    else take_shares(units, walk);
}

// out [rows, value_heads value_dim], or [rows, channels] of a convolution alone, from given [rows, stride], whose first part is overwritten by a convolution.
static void scan(const dovetail::Scan& c, const dovetail::Pass& pass, float* given, int64_t stride, float* out) {
    const int64_t rows = pass.rows, floats = round_up(rows * c.channels, LANES) + round_up(rows * step_width(c), LANES);
    const int64_t table = round_up(pass.segment_count * (int64_t)sizeof(Walk), 64);
    int64_t bytes = table + floats * (int64_t)sizeof(float);
    for (int32_t i = 0; i < pass.segment_count; i++) {
        const dovetail::Segment& s = pass.segments[i];
        bytes += walk_bytes(slots_behind(s, s.states->folded[c.index]));
    }
    char* memory = (char*)dovetail::scratch(SCAN_SCRATCH, bytes);
    Walk* walks = (Walk*)memory;
    ScanRows all = {given, stride, (float*)(memory + table), nullptr, out};
    all.steps = all.mixed + round_up(rows * c.channels, LANES);
    char* at = (char*)(all.mixed + floats);
    for (int32_t i = 0; i < pass.segment_count; i++) {
        const dovetail::Segment& s = pass.segments[i];
        const int64_t folded = s.states->folded[c.index];
        walks[i] = walk_of(s, folded, at);
        at += walk_bytes(slots_behind(s, folded));
    }
    const int64_t work = rows * c.channels * c.taps;
    if (c.given_factors) each(rows, work, [&](int64_t row) { multiply_rows(given + row * stride, c.given_factors, given + row * stride, stride); });
    if (c.rule == dovetail::SHORT_CONVOLUTION)
        each(rows, work, [&](int64_t row) { multiply_rows(given + row * stride, given + row * stride + 2 * c.channels, given + row * stride, c.channels); });
    each_row(pass, work, [&](const dovetail::Segment& s, int64_t, int64_t i) { prepare_row(c, s, all, i); });
    if (c.rule != dovetail::SHORT_CONVOLUTION) scan_units(c, pass, all, walks);
    each_row(pass, work, [&](const dovetail::Segment& s, int64_t number, int64_t i) { finish(c, s, all, i, walks[number].in_place); });
    for (int32_t i = 0; i < pass.segment_count; i++) {
        int64_t& folded = pass.segments[i].states->folded[c.index];
        folded = larger(folded, pass.segments[i].states->fold);
    }
}

}  // namespace DT_NS
