// A decoder layer in one call: norm, qkv, head norms, rotary, cache, attention, output, residual, norm, gate and up, activation, down, residual.

namespace DT_NS {

constexpr int LAYER_SCRATCH = 2;
constexpr int64_t MOST_STREAMS = 8;

// ---- into the cache ----

// The rows of a segment whose slots lie in one block of sixteen.
struct Stretch {
    int64_t row, slot, count;
};

static inline int64_t stretch_count(const dovetail::Segment& s) { return (s.start + s.count - 1) / LANES - s.start / LANES + 1; }

static inline Stretch stretch_of(const dovetail::Segment& s, int64_t number) {
    const int64_t block = (s.start / LANES + number) * LANES;
    const int64_t slot = larger(block, s.start), stop = smaller(block + LANES, s.start + s.count);
    return {s.first_row + slot - s.start, slot, stop - slot};
}

// Norm of a head, if there is one, and rotation; in place.
static inline void place_head(const dovetail::Layer& l, const dovetail::Norm& norm, float* x, int64_t position) {
    if (norm.weight && l.head_norm == dovetail::HEAD_BEFORE_ROPE) rms_norm(x, norm.weight, x, l.head_dim, l.epsilon);
    const int64_t half = l.rotary_dim / 2;
    rotate(x, l.cosines + position * half, l.sines + position * half, l.rotary_dim);
    if (norm.weight && l.head_norm == dovetail::HEAD_AFTER_ROPE) rms_norm(x, norm.weight, x, l.head_dim, l.epsilon);
}

// Where the key and the value of a slot are written; the numbers of the key are sixteen apart.
template <class K>
struct Places {
    K *keys, *values;
};

// A block of keys is far away, a cache line or half of one for each number of a head: they come while heads are rotated.
template <class K>
static inline void fetch_places(const Places<K>& to, int64_t head_dim, int64_t rows) {
    constexpr int64_t step = LINE / (int64_t)sizeof(K);
    for (int64_t d = 0; d < stored<K>(head_dim) * LANES; d += step) __builtin_prefetch(to.keys + d, 1, 3);
    for (int64_t i = 0; i < rows * stored<K>(head_dim); i += step) __builtin_prefetch(to.values + i, 1, 3);
}

// The norm, rotation and growth of a query.
static inline void place_query(const dovetail::Layer& l, float* query, int64_t position) {
    place_head(l, l.query_norm, query, position);
    if (l.query_factors) multiply(query, l.query_factors[position], l.head_dim);
}

// The heads of one key head in some rows: norms, rotation, and into the cache.
template <class K>
static void place_stretch(const dovetail::Layer& l, const dovetail::Pass& pass, const Places<K>& to, const Stretch& rows, int64_t kv_head, float* qkv) {
    const int64_t groups = l.heads / l.kv_heads, stride = row_width(l);
    fetch_places(to, l.head_dim, rows.count);
    for (int64_t i = 0; i < rows.count; i++) {
        float* heads = qkv + (rows.row + i) * stride;
        const int64_t position = pass.positions[rows.row + i];
        for (int64_t head = kv_head * groups; head < (kv_head + 1) * groups; head++) place_query(l, heads + head * l.head_dim, position);
        float* key = heads + (l.heads + kv_head) * l.head_dim;
        place_head(l, l.key_norm, key, position);
        if (l.key_factor != 0.0f) multiply(key, l.key_factor, l.head_dim);
        float* value = key + l.kv_heads * l.head_dim;
        if (l.value_norm.weight) rms_norm(value, l.value_norm.weight, value, l.head_dim, l.epsilon);
        put_head(to.keys + i, LANES, key, l.head_dim);
        put_head(to.values + i * stored<K>(l.head_dim), 1, value, l.head_dim);
    }
}

// Calls body(first, left) for every 16 of n numbers, of which `left` remain.
template <class Body>
static void each_piece(int64_t n, const Body& body) {
    constexpr int64_t PIECE = 1024;
    each((n + PIECE - 1) / PIECE, n, [&](int64_t piece) {
        for (int64_t i = piece * PIECE, stop = smaller(n, i + PIECE); i < stop; i += LANES) body(i, stop - i);
    });
}

// The norms of all queries, and of all keys, of a row together; in place.
static void widely(const dovetail::Layer& l, int64_t rows, float* qkv) {
    const int64_t queries = l.heads * l.head_dim, keys = l.kv_heads * l.head_dim, stride = row_width(l);
    each(rows, rows * stride, [&](int64_t row) {
        float* x = qkv + row * stride;
        if (l.query_norm.weight) rms_norm(x, l.query_norm.weight, x, queries, l.epsilon);
        if (l.key_norm.weight) rms_norm(x + queries, l.key_norm.weight, x + queries, keys, l.epsilon);
    });
}

// Clips n numbers to -limit .. limit.
static void clip(float* x, float limit, int64_t n) {
    each_piece(n, [&](int64_t i, int64_t left) { put(x + i, min(set1(limit), max(set1(-limit), take(x + i, left))), left); });
}

// qkv [rows, (heads + 2 kv_heads) head_dim]: queries and keys get their norms and rotation in place, keys and values go into the caches.
static void place(const dovetail::Layer& l, const dovetail::Pass& pass, float* qkv) {
    if (l.head_norm == dovetail::WIDE_BEFORE_ROPE) widely(l, pass.rows, qkv);
    if (l.clip != 0.0f) clip(qkv, l.clip, (int64_t)pass.rows * row_width(l));
    if (l.reads)
        return each(pass.rows, (int64_t)pass.rows * row_width(l), [&](int64_t row) {
            for (int64_t head = 0; head < l.heads; head++) place_query(l, qkv + row * row_width(l) + head * l.head_dim, pass.positions[row]);
        });
    int64_t stretches = 0;
    for (int32_t i = 0; i < pass.segment_count; i++) stretches += stretch_count(pass.segments[i]);
    const auto place_unit = [&](int64_t unit) {
        const dovetail::Segment* s = pass.segments;
        int64_t number = unit % stretches;
        for (; number >= stretch_count(*s); s++) number -= stretch_count(*s);
        const Stretch rows = stretch_of(*s, number);
        const int64_t kv_head = unit / stretches;
        with_numbers(*s, [&](auto* keys, auto* values) {
            using K = std::remove_pointer_t<decltype(keys)>;
            const int64_t at = head_offset<K>(l, *s, kv_head), width = stored<K>(l.head_dim);
            const int64_t key = at + rows.slot / LANES * LANES * width + rows.slot % LANES, value = at + rows.slot * width;
            place_stretch(l, pass, Places<K>{keys + key, values + value}, rows, kv_head, qkv);
        });
    };
    if (dovetail::shards() > 1) each_at_home(stretches * l.kv_heads, place_unit);
    else each(stretches * l.kv_heads, (int64_t)pass.rows * row_width(l), place_unit);
}

// ---- the layer ----

// The intermediate results of all rows, side by side in one piece of memory. Those that never live together share their place.
struct Buffers {
    float* normed;  // [rows, hidden]
    float* update;  // [rows, hidden]: what a half adds
    float* wide;    // [rows, qkv, what a mixer reads, gate and up, or hidden]
    float* narrow;  // [rows, heads head_dim, what a mixer gives, or intermediate]
    float* first;   // [rows, hidden]: of several streams the one that the layer computes
};

// The first matrix's output for a row, followed by what a CHANNEL_DELTA's two matrices make of the end of it.
static inline int64_t given_width(const dovetail::Layer& l) { return l.qkv.n + l.scan_gate.n + l.scan_decay.n; }

static Buffers buffers(const dovetail::Layer& l, int64_t rows) {
    const int64_t hidden = round_up(rows * l.hidden, LANES);
    const int64_t given = l.beside ? l.beside->given.n : 0, mixed = l.beside ? l.beside->output.k : 0, own = l.input_gate.n;
    const int64_t wide = round_up(rows * larger(larger(l.hidden, larger(given, 2 * own)), larger(given_width(l), larger(l.gate_up.n, l.streams ? MOST_STREAMS * MOST_STREAMS : 0))), LANES);
    const int64_t count = l.streams ? l.streams->count : 0, rank = l.streams ? l.streams->left.n : 0;
    const int64_t narrow = round_up(rows * larger(larger(larger(mixed, count), larger(own, rank)), larger(l.output.k, l.intermediate)), LANES);
    float* memory = (float*)dovetail::scratch(LAYER_SCRATCH, ((l.streams ? 3 : 2) * hidden + wide + narrow) * (int64_t)sizeof(float));
    float* const last = memory + 2 * hidden + wide;
    return {memory, memory + hidden, memory + 2 * hidden, last, last + narrow};
}

// Adds the time since it was last asked to a part of the pass, or to none.
class Laps {
public:
    explicit Laps(int64_t* parts) : parts_(parts), last_(parts ? now() : 0) {}
    void matrix() { lap(0); }
    void attention() { lap(1); }
    void other() { if (parts_) last_ = now(); }

private:
    static int64_t now() { return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
    void lap(int part) {
        if (!parts_) return;
        const int64_t at = now();
        parts_[part] += at - last_;
        last_ = at;
    }

    int64_t* const parts_;
    int64_t last_;
};

// The MLP of x [rows, hidden], or what all rows share of it.
static void dense(const dovetail::Layer& l, const float* x, const Buffers& b, int64_t rows, Laps& laps) {
    laps.other();
    linear(l.gate_up, x, l.hidden, b.wide, l.gate_up.n, rows);
    laps.matrix();
    if (l.cut != 0.0f) each(rows, rows * l.intermediate, [&](int64_t row) { cut_below(b.wide + row * l.gate_up.n, l.intermediate, l.cut); });
    gate(l.activation, b.wide, b.narrow, rows, l.intermediate);
    if (l.inner_norm.weight) norm(l.norm_kind, l.inner_norm, b.narrow, b.narrow, rows, l.intermediate, l.epsilon);
    laps.other();
    linear(l.down, b.narrow, l.intermediate, b.update, l.hidden, rows);
    laps.matrix();
}

// hidden += update, normed first where the layer says so; then the next half's norm of it, if there is one.
static void add_half(const dovetail::Layer& l, float* hidden, float* update, const dovetail::Norm& post, float factor, const dovetail::Norm* next, float* normed,
                     int64_t rows) {
    each(rows, rows * l.hidden, [&](int64_t row) {
        float *h = hidden + row * l.hidden, *u = update + row * l.hidden;
        if (post.weight) normalise(l.norm_kind, post, u, u, l.hidden, l.epsilon);
        if (factor != 0.0f) multiply(u, factor, l.hidden);
        accumulate(h, u, l.hidden);
        if (next) normalise(l.norm_kind, *next, h, normed + row * l.hidden, l.hidden, l.epsilon);
    });
}

// Multiplies x [rows, output.k] by the gates per number or per head [rows, mixer_gate.n], which are activated in place.
static void open_gates(const dovetail::Layer& l, float* gates, float* x, int64_t rows) {
    const bool soft = l.gate_kind == dovetail::BY_SOFTPLUS, whole = l.mixer_gate.n == l.output.k;
    each_piece(rows * l.mixer_gate.n, [&](int64_t i, int64_t left) {
        const F16 given = take(gates + i, left), open = soft ? softplus(given) : sigmoid(given);
        if (whole) put(x + i, mul(take(x + i, left), open), left);
        else put(gates + i, open, left);
    });
    if (whole) return;
    const int64_t width = l.output.k / l.mixer_gate.n;
    each(rows, rows * l.output.k, [&](int64_t row) {
        for (int64_t head = row * l.mixer_gate.n, stop = head + l.mixer_gate.n; head < stop; head++) multiply(x + head * width, gates[head], width);
    });
}

// ---- several streams ----

// The coefficients, into `wide`, that a matrix gives for the first stream.
static void coefficients(const dovetail::Layer& l, const dovetail::Matrix& m, const Buffers& b, int64_t rows) {
    const int64_t count = l.streams->count;
    norm(dovetail::RMS, l.streams->router_norm, b.first, b.normed, rows, l.hidden, l.epsilon);
    linear(l.streams->router, b.normed, l.hidden, b.narrow, count, rows);
    for (int64_t i = 0, n = rows * count; i < n; i += LANES) put(b.narrow + i, tanh(take(b.narrow + i, n - i)), n - i);
    linear(m, b.narrow, count, b.wide, m.n, rows);
}

// Each stream becomes itself plus a mix of all; the first is copied.
static void predict(const dovetail::Layer& l, const dovetail::Pass& pass, const Buffers& b) {
    const int64_t rows = pass.rows, count = l.streams->count, hidden = l.hidden;
    const auto copy_first = [&](int64_t row) { memcpy(b.first + row * hidden, pass.hidden + row * count * hidden, (size_t)hidden * sizeof(float)); };
    for (int64_t row = 0; row < rows; row++) copy_first(row);
    coefficients(l, l.streams->predict, b, rows);
    each(rows, rows * count * hidden, [&](int64_t row) {
        float *streams = pass.hidden + row * count * hidden, *coefs = b.wide + row * count * count;
        for (int64_t i = 0; i < hidden; i += LANES) {
            F16 x[MOST_STREAMS];
            for (int64_t from = 0; from < count; from++) x[from] = take(streams + from * hidden + i, hidden - i);
            for (int64_t to = 0; to < count; to++) {
                F16 mix = zero();
                for (int64_t from = 0; from < count; from++) mix = fma(set1(coefs[to * count + from]), x[from], mix);
                put(streams + to * hidden + i, add(mix, x[to]), hidden - i);
            }
        }
        copy_first(row);
    });
}

// Each stream gets its share of what the first has gained; then that becomes what the layer's own input reads.
static void correct(const dovetail::Layer& l, const dovetail::Pass& pass, const Buffers& b) {
    const int64_t rows = pass.rows, count = l.streams->count, hidden = l.hidden;
    coefficients(l, l.streams->correct, b, rows);
    each(rows, rows * count * hidden, [&](int64_t row) {
        float *streams = pass.hidden + row * count * hidden, *first = b.first + row * hidden;
        for (int64_t i = 0; i < hidden; i += LANES) {
            const F16 gained = sub(take(first + i, hidden - i), take(streams + i, hidden - i));
            for (int64_t to = 0; to < count; to++) {
                float* x = streams + to * hidden + i;
                put(x, fma(set1(b.wide[row * count + to] + 1.0f), gained, take(x, hidden - i)), hidden - i);
            }
            put(first + i, mul(take(streams + i, hidden - i), take(l.streams->scale + i, hidden - i)), hidden - i);
        }
    });
}

// The sum of the states and attention's input, with a low-rank update of that, over the root of 2; then the MLP's norm of it.
static void add_low_rank(const dovetail::Layer& l, float* hidden, const Buffers& b, int64_t rows, Laps& laps) {
    const dovetail::Streams& s = *l.streams;
    laps.other();
    linear(s.left, b.normed, l.hidden, b.narrow, s.left.n, rows);
    linear(s.right, b.narrow, s.left.n, b.update, l.hidden, rows);
    laps.matrix();
    each(rows, rows * l.hidden, [&](int64_t row) {
        float *h = hidden + row * l.hidden, *u = b.update + row * l.hidden, *x = b.normed + row * l.hidden;
        rms_norm(u, s.norm.weight, u, l.hidden, l.epsilon);
        accumulate(u, x, l.hidden);
        accumulate(h, u, l.hidden);
        multiply(h, 0.70710678f, l.hidden);
        normalise(l.norm_kind, l.mlp_norm, h, x, l.hidden, l.epsilon);
    });
}

// What the layer's own input adds, to all streams but the first if there are several: the projection of the activated gate of the states times the input, normed.
static void add_input(const dovetail::Layer& l, const dovetail::Pass& pass, float* hidden, const Buffers& b, Laps& laps) {
    const int64_t rows = pass.rows, width = l.input_gate.n;
    laps.other();
    linear(l.input_gate, pass.hidden, l.hidden, b.wide, 2 * width, rows);
    laps.matrix();
    for (int64_t row = 0; row < rows; row++) memcpy(b.wide + (2 * row + 1) * width, pass.inputs + row * pass.input_stride + l.input_first, (size_t)width * sizeof(float));
    gate(l.activation, b.wide, b.narrow, rows, width);
    laps.other();
    linear(l.input_projection, b.narrow, width, b.update, l.hidden, rows);
    laps.matrix();
    if (!l.streams) return add_half(l, pass.hidden, b.update, l.input_norm, 0.0f, nullptr, nullptr, rows);
    each(rows, rows * l.hidden, [&](int64_t row) {
        float *u = b.update + row * l.hidden, *streams = hidden + row * l.streams->count * l.hidden;
        normalise(l.norm_kind, l.input_norm, u, u, l.hidden, l.epsilon);
        for (int64_t to = 1; to < l.streams->count; to++) accumulate(streams + to * l.hidden, u, l.hidden);
    });
}

// y = first y + second z, [rows, hidden].
static void add_both(float* y, float first, const float* z, float second, int64_t rows, int64_t hidden) {
    each(rows, rows * hidden, [&](int64_t row) {
        for (int64_t i = row * hidden, stop = i + hidden; i < stop; i += LANES)
            put(y + i, fma(set1(second), take(z + i, stop - i), mul(set1(first), take(y + i, stop - i))), stop - i);
    });
}

// The mixer beside attention, added to what that gives.
static void mix_beside(const dovetail::Layer& l, const dovetail::Pass& pass, const Buffers& b, Laps& laps) {
    const dovetail::Beside& m = *l.beside;
    norm(l.norm_kind, m.norm, pass.hidden, b.normed, pass.rows, l.hidden, l.epsilon);
    laps.other();
    linear(m.given, b.normed, l.hidden, b.wide, m.given.n, pass.rows);
    laps.matrix();
    scan(*l.scan, pass, b.wide, m.given.n, b.narrow);
    laps.attention();
    linear(m.output, b.narrow, m.output.k, b.wide, l.hidden, pass.rows);
    laps.matrix();
    add_both(b.update, m.attention_factor, b.wide, m.factor, pass.rows, l.hidden);
}

// What attention or a mixer with a state gives of `input`, into `update`.
static void mix_rows(const dovetail::Layer& l, const dovetail::Pass& pass, const float* input, const Buffers& b, Laps& laps) {
    const int64_t rows = pass.rows, width = given_width(l);
    laps.other();
    linear(l.qkv, input, l.hidden, b.wide, width, rows);
    if (l.scan_gate.packed) {
        const float* low = b.wide + l.qkv.n - 2 * l.scan_gate.k;
        linear(l.scan_gate, low, width, b.wide + l.qkv.n, width, rows);
        linear(l.scan_decay, low + l.scan_gate.k, width, b.wide + l.qkv.n + l.scan_gate.n, width, rows);
    }
    laps.matrix();
    if (l.scan && !l.beside) {
        scan(*l.scan, pass, b.wide, width, b.narrow);
    } else if (l.latent) {
        latent(l, pass, b.wide, nullptr, b.narrow);
    } else {
        place(l, pass, b.wide);
        attention(l, pass, b.wide, b.narrow);
    }
    laps.attention();
    if (l.mixer_gate.packed) {
        linear(l.mixer_gate, input, l.hidden, b.wide, l.mixer_gate.n, rows);
        laps.matrix();
        open_gates(l, b.wide, b.narrow, rows);
    }
    if (l.mixer_norm.weight) norm(l.norm_kind, l.mixer_norm, b.narrow, b.narrow, rows, l.output.k, l.epsilon);
    linear(l.output, b.narrow, l.output.k, b.update, l.hidden, rows);
    laps.matrix();
    if (l.beside) mix_beside(l, pass, b, laps);
}

// Both halves of a layer.
static void halves(const dovetail::Layer& l, const dovetail::Pass& pass, const Buffers& b, Laps& laps) {
    const int64_t rows = pass.rows;
    const float* input = pass.hidden;
    if (l.attention_norm.weight) {
        norm(l.norm_kind, l.attention_norm, pass.hidden, b.normed, rows, l.hidden, l.epsilon);
        input = b.normed;
    }
    if (l.qkv.packed) mix_rows(l, pass, input, b, laps);
    const bool norms = l.mlp_norm.weight, follows = l.qkv.packed && !l.parallel;
    if (norms && !follows) norm(l.norm_kind, l.mlp_norm, pass.hidden, b.normed, rows, l.hidden, l.epsilon);
    if (l.qkv.packed) add_half(l, pass.hidden, b.update, l.post_attention_norm, l.residual, norms && follows && !l.streams ? &l.mlp_norm : nullptr, b.normed, rows);
    if (l.streams) add_low_rank(l, pass.hidden, b, rows, laps);
    if (norms) input = b.normed;
    else if (!l.parallel) input = pass.hidden;
    if (l.gate_up.packed) dense(l, input, b, rows, laps);
    if (l.experts) {
        laps.other();
        const int64_t unique = mix(l, input, pass.hidden, b.update, b.wide, rows);
        if (pass.parts) pass.parts[2] += unique;
        laps.matrix();
    }
    if (l.gate_up.packed || l.experts) add_half(l, pass.hidden, b.update, l.post_mlp_norm, l.mlp_residual, nullptr, nullptr, rows);
}

static void layer(const dovetail::Layer& l, const dovetail::Pass& given) {
    const int64_t rows = given.rows;
    dovetail::Pass pass = given;
    Laps laps(pass.parts);
    const Buffers b = buffers(l, rows);
    if (l.streams) {
        predict(l, given, b);
        pass.hidden = b.first;
    }
    halves(l, pass, b, laps);
    if (l.streams) correct(l, given, b);
    if (l.input_gate.packed) add_input(l, pass, given.hidden, b, laps);
    if (l.scalar != 0.0f) each(rows, rows * l.hidden, [&](int64_t row) { multiply(pass.hidden + row * l.hidden, l.scalar, l.hidden); });
}

}  // namespace DT_NS
