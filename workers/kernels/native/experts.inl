// Experts: of each row some are chosen by its scores, and the rows of each go through its matrices together.
//
// Scores, choice and weights are of a row alone, a matrix gives a row the same bytes in any company, and a row's outputs are added by ascending index, then to
// what all rows share: so is the sum of them the same bytes whatever rows are beside it.

namespace DT_NS {

constexpr int EXPERTS_SCRATCH = 3, ROUTER_SCRATCH = 4;
constexpr float NOTHING = -__builtin_inff();

static inline float lesser(float a, float b) { return b < a ? b : a; }

// ---- the router ----

// y = e^x / sum of e^x; x and y may be the same.
static void softmax(const float* x, float* y, int64_t n) {
    float top = x[0];
    for (int64_t i = 1; i < n; i++) top = x[i] > top ? x[i] : top;
    F16 total = zero();
    for (int64_t i = 0; i < n; i += LANES) {
        const F16 e = only(exp(sub(take(x + i, n - i), set1(top))), n - i);
        put(y + i, e, n - i);
        total = add(total, e);
    }
    const F16 all = set1(sum(total));
    for (int64_t i = 0; i < n; i += LANES) put(y + i, div(take(y + i, n - i), all), n - i);
}

static void sigmoid(float* x, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) put(x + i, div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), take(x + i, n - i))))), n - i);
}

// The index of the largest of those values that are not taken, the lower one of equals.
static inline int64_t best_of(const float* values, const char* taken, int64_t n) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

// Marks the `count` largest of n values; how much the last of them is above the next.
static float mark_best(const float* values, char* taken, int64_t n, int64_t count) {
    float last = 0.0f;
    for (int64_t i = 0; i < n; i++) taken[i] = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t best = best_of(values, taken, n);
        taken[best] = 1;
        last = values[best];
    }
    return count < n ? last - values[best_of(values, taken, n)] : -NOTHING;
}

// How far the largest of n values is from the smallest.
static float range_of(const float* values, int64_t n) {
    float low = values[0], high = values[0];
    for (int64_t i = 1; i < n; i++) low = lesser(low, values[i]), high = values[i] > high ? values[i] : high;
    return high - low;
}

// The sum of the two best of a group, or the best alone.
static inline float worth(const float* values, int64_t n, bool best_alone) {
    float first = NOTHING, second = NOTHING;
    for (int64_t i = 0; i < n; i++) {
        if (values[i] > first) second = first, first = values[i];
        else if (values[i] > second) second = values[i];
    }
    return n > 1 && !best_alone ? first + second : first;
}

// Leaves nothing of the values of groups that are not among the best; the margin of that choice.
static float close_groups(const dovetail::Router& r, float* values, float* worths, char* taken) {
    const int64_t size = r.logits.n / r.groups;
    for (int64_t group = 0; group < r.groups; group++) worths[group] = worth(values + group * size, size, r.best_alone);
    const float margin = mark_best(worths, taken, r.groups, r.chosen_groups);
    for (int64_t i = 0; i < r.logits.n; i++)
        if (!taken[i / size]) values[i] = NOTHING;
    return margin;
}

// What a row's choice takes: [experts] each.
struct Choice {
    float *scores, *values, *worths;
    char* taken;
};

// The weights of a row's experts, of their scores in place.
static void weigh_experts(const dovetail::Router& r, const int32_t* ids, float* weights) {
    if (r.score == dovetail::SOFTMAX_OF_CHOSEN) softmax(weights, weights, r.chosen);
    if (r.score == dovetail::SIGMOID_OF_CHOSEN) sigmoid(weights, r.chosen);
    if (r.normalised) {
        float total = 0.0f;
        for (int64_t i = 0; i < r.chosen; i++) total += weights[i];
        total = total + r.added_sum < r.least_sum ? r.least_sum : total + r.added_sum;
        for (int64_t i = 0; i < r.chosen; i++) weights[i] /= total;
    }
    for (int64_t i = 0; i < r.chosen; i++) weights[i] *= r.scales ? r.scale * r.scales[ids[i]] : r.scale;
}

// SparseMixer's weight of a chosen expert: its share of the softmax over its logit and those just below it. `margin` becomes the smallest distance to that bound.
static float mixed_share(const dovetail::Router& r, const Choice& c, int64_t id, float& margin) {
    const float own = c.scores[id];
    for (int64_t i = 0; i < r.logits.n; i++) {
        const float score = c.scores[i], size = __builtin_fabsf(score), beyond = own - score - 2.0f * r.jitter * (size < own ? own : size);
        const bool before = score > own || (score == own && i < id);
        c.values[i] = before || beyond > 0.0f ? NOTHING : score;
        if (!before && i != id) margin = lesser(margin, __builtin_fabsf(beyond));
    }
    softmax(c.values, c.values, r.logits.n);
    return c.values[id];
}

// The experts of a row by its logits, ascending, and their weights; the margin of the choice, about as one of logits, of which small ones are taken for larger.
static float choose(const dovetail::Router& r, const Choice& c, int32_t* ids, float* weights) {
    const int64_t n = r.logits.n;
    if (r.softcap != 0.0f)
        for (int64_t i = 0; i < n; i += LANES) put(c.scores + i, mul(set1(r.softcap), tanh(div(take(c.scores + i, n - i), set1(r.softcap)))), n - i);
    const float unit = lesser(1.0f, 0.25f * range_of(c.scores, n) + 1e-20f);
    if (r.score == dovetail::SOFTMAX) softmax(c.scores, c.scores, n);
    if (r.score == dovetail::SIGMOID) sigmoid(c.scores, n);
    for (int64_t i = 0; i < n; i++) c.values[i] = r.correction ? c.scores[i] + r.correction[i] : c.scores[i];
    float margin = r.groups > 1 ? close_groups(r, c.values, c.worths, c.taken) : -NOTHING;
    margin = lesser(margin, mark_best(c.values, c.taken, n, r.chosen));
    float least = -NOTHING, score = 0.0f;  // of the one that was chosen last
    for (int64_t i = 0, found = 0; i < n; i++) {
        if (!c.taken[i]) continue;
        if (c.values[i] < least) least = c.values[i], score = c.scores[i];
        weights[found] = c.scores[i];
        ids[found++] = (int32_t)i;
    }
    if (r.score == dovetail::SPARSE_MIXER)
        for (int64_t i = 0; i < r.chosen; i++) weights[i] = mixed_share(r, c, ids[i], margin);
    weigh_experts(r, ids, weights);
    const float slope = r.score == dovetail::SIGMOID ? score * (1.0f - score) + 0.01f : r.score == dovetail::SOFTMAX && least > 0.0f ? least : 1.0f;
    return margin / slope / unit;
}

// Of each row of x [rows, hidden] its experts [rows, chosen], their weights, and, where they are asked for, margins [rows].
static void route(const dovetail::Router& r, const float* x, int64_t rows, int32_t* ids, float* weights, float* margins) {
    const int64_t n = r.logits.n, hidden = r.logits.k, width = round_up(n, LANES);
    float* logits = (float*)dovetail::scratch(ROUTER_SCRATCH, (rows * 4 * width + (r.norm.weight ? rows * hidden : 0)) * (int64_t)sizeof(float));
    if (r.norm.weight) {
        float* normed = logits + rows * 4 * width;
        norm(dovetail::RMS, r.norm, x, normed, rows, hidden, r.epsilon);
        x = normed;
    }
    linear(r.logits, x, r.logits.k, logits, n, rows);
    each(rows, rows * n * r.chosen, [&](int64_t row) {
        float* own = logits + rows * width + row * 3 * width;
        const Choice c = {logits + row * n, own, own + width, (char*)(own + 2 * width)};
        const float margin = choose(r, c, ids + row * r.chosen, weights + row * r.chosen);
        if (margins) margins[row] = margin;
    });
}

// ---- the experts ----

// The rows of each expert, in order: those of expert e have the ranks first[e] .. first[e + 1], and places[rank] is a row times `chosen` and which of its experts
// this is.
static void list_rows(const int32_t* ids, int64_t count, int64_t experts, int32_t* first, int32_t* places) {
    for (int64_t e = 0; e <= experts; e++) first[e] = 0;
    for (int64_t i = 0; i < count; i++) first[ids[i] + 1]++;
    for (int64_t e = 0; e < experts; e++) first[e + 1] += first[e];
    for (int64_t i = 0; i < count; i++) places[first[ids[i]]++] = (int32_t)i;
    for (int64_t e = experts; e > 0; e--) first[e] = first[e - 1];
    first[0] = 0;
}

// So many places are computed at a time, so that what a long prompt takes does not grow with it.
constexpr int64_t BATCH = 512;

// What the rows of the experts take: for each place of a batch what its expert is given, the units of it before and after they are gated, and what it gives.
struct Bench {
    float *x, *wide, *narrow, *y;
    float* read;     // [rows, hidden or width], what experts read where that has a norm of its own, or another width
    float* sum;      // [rows, width], what the experts of each row add up to where that is no [rows, hidden]
    float* weights;  // [rows, chosen]
    int32_t *ids, *places, *ranks, *first;
    Product* products;
    char* packed;
};

static Bench bench(const dovetail::Layer& l, int64_t rows) {
    const dovetail::Experts& e = *l.experts;
    const int64_t total = rows * e.router.chosen, batch = smaller(total, BATCH), lists = round_up(total, LANES);
    const int64_t width = e.gate_up->k, first = round_up(e.router.logits.n + 1, LANES);
    const int64_t read = e.before.packed ? rows * width : e.input_norm.weight ? rows * l.hidden : 0, sum = e.behind.packed ? rows * width : 0;
    const int64_t numbers = batch * (2 * width + e.gate_up->n + e.down->k) + read + sum + 4 * lists + first;
    const int64_t bytes = batch * ((int64_t)sizeof(Product) + larger(row_bytes(*e.gate_up), row_bytes(*e.down)));
    float* memory = (float*)dovetail::scratch(EXPERTS_SCRATCH, round_up(numbers, LANES) * (int64_t)sizeof(float) + bytes);
    Bench b;
    b.x = memory, b.y = b.x + batch * width, b.wide = b.y + batch * width, b.narrow = b.wide + batch * e.gate_up->n, b.read = b.narrow + batch * e.down->k;
    b.sum = b.read + read;
    b.weights = b.sum + sum;
    b.ids = (int32_t*)(b.weights + lists), b.places = b.ids + lists, b.ranks = b.places + lists, b.first = b.ranks + lists;
    b.products = (Product*)(memory + round_up(numbers, LANES)), b.packed = (char*)(b.products + batch);
    return b;
}

// y += weight x
static inline void add_weighted(float* y, float weight, const float* x, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) put(y + i, fma(set1(weight), take(x + i, n - i), take(y + i, n - i)), n - i);
}

// Some of the ranks, first .. end, whose experts begin with `expert`.
struct Batch {
    int64_t expert, first, end;
};

// The products of a batch with one of the two matrices of its experts, x [ranks, k] to y [ranks, n].
static void run_batch(const Batch& batch, const dovetail::Matrix* matrices, const Bench& b, const float* x, float* y) {
    int64_t count = 0;
    char* packed = b.packed;
    for (int64_t expert = batch.expert, rank = batch.first; rank < batch.end;) {
        const dovetail::Matrix& m = matrices[expert];
        const int64_t stop = smaller(batch.end, b.first[expert + 1]), rows = smaller(stop - rank, CHUNK), at = rank - batch.first;
        if (rows > 0) b.products[count++] = {&m, x + at * m.k, m.k, y + at * m.n, m.n, rows, packed};
        packed += rows * row_bytes(m), rank += rows;
        if (rank == b.first[expert + 1]) expert++;
    }
    run_products(b.products, count);
}

// The outputs of each row's experts of x [rows, width], added to y by their weights; a batch of experts after the other, each row's by ascending index.
static void run_experts(const dovetail::Layer& l, const Bench& b, const float* x, float* y, int64_t rows) {
    const dovetail::Experts& e = *l.experts;
    const int64_t width = e.gate_up->k, chosen = e.router.chosen, total = rows * chosen;
    for (Batch batch = {0, 0, 0}; batch.first < total; batch.first = batch.end) {
        batch.end = smaller(batch.first + BATCH, total);
        while (b.first[batch.expert + 1] <= batch.first) batch.expert++;
        const int64_t count = batch.end - batch.first;
        each(count, count * width, [&](int64_t i) {
            const int32_t place = b.places[batch.first + i];
            memcpy(b.x + i * width, x + place / chosen * width, (size_t)width * sizeof(float));
            if (e.router.scales_input) multiply(b.x + i * width, b.weights[place], width);
        });
        run_batch(batch, e.gate_up, b, b.x, b.wide);
        gate(l.activation, b.wide, b.narrow, count, e.down->k);
        run_batch(batch, e.down, b, b.narrow, b.y);
        each(rows, count * width, [&](int64_t row) {
            for (int64_t i = row * chosen; i < (row + 1) * chosen; i++)
                if (b.ranks[i] >= batch.first && b.ranks[i] < batch.end) {
                    const float weight = e.router.scales_input ? 1.0f : b.weights[i];
                    add_weighted(y + row * width, weight, b.y + (b.ranks[i] - batch.first) * width, width);
                }
        });
    }
}

// y [rows, hidden] is what the experts of each row of x give; x are the states before the half's norm where experts have a norm of their own. How many of them
// rows went through.
static int64_t experts(const dovetail::Layer& l, const float* x, float* y, int64_t rows) {
    const dovetail::Experts& e = *l.experts;
    const Bench b = bench(l, rows);
    route(e.router, x, rows, b.ids, b.weights, nullptr);
    list_rows(b.ids, rows * e.router.chosen, e.router.logits.n, b.first, b.places);
    for (int64_t rank = 0; rank < rows * e.router.chosen; rank++) b.ranks[b.places[rank]] = (int32_t)rank;
    if (e.input_norm.weight) {
        norm(l.norm_kind, e.input_norm, x, b.read, rows, l.hidden, l.epsilon);
        x = b.read;
    }
    if (e.before.packed) {
        linear(e.before, x, l.hidden, b.read, e.before.n, rows);
        x = b.read;
    }
    float* sum = e.behind.packed ? b.sum : y;
    memset(sum, 0, (size_t)(rows * e.gate_up->k) * sizeof(float));
    run_experts(l, b, x, sum, rows);
    if (e.behind.packed) linear(e.behind, sum, e.behind.k, y, l.hidden, rows);
    if (e.output_norm.weight) norm(l.norm_kind, e.output_norm, y, y, rows, l.hidden, l.epsilon);
    int64_t unique = 0;
    for (int64_t expert = 0; expert < e.router.logits.n; expert++) unique += b.first[expert + 1] > b.first[expert];
    return unique;
}

// What all rows share, y [rows, hidden] of x, times its gate, and with its norm.
static void settle_shared(const dovetail::Layer& l, const float* x, float* y, int64_t rows) {
    const dovetail::Experts& e = *l.experts;
    if (e.shared_gate.packed) {
        float* gates = (float*)dovetail::scratch(ROUTER_SCRATCH, rows * (int64_t)sizeof(float));
        linear(e.shared_gate, x, l.hidden, gates, 1, rows);
        sigmoid(gates, rows);
        each(rows, rows * l.hidden, [&](int64_t row) { multiply(y + row * l.hidden, gates[row], l.hidden); });
    }
    if (e.shared_norm.weight) norm(l.norm_kind, e.shared_norm, y, y, rows, l.hidden, l.epsilon);
}

// y [rows, hidden], which is what all rows share where they share something, becomes the sum of that and of what the experts of each row of x give; `states` are
// those before the half's norm, `sum` is memory of the same size as y. How many experts rows went through.
static int64_t mix(const dovetail::Layer& l, const float* x, const float* states, float* y, float* sum, int64_t rows) {
    const float* read = l.experts->input_norm.weight ? states : x;
    if (!l.gate_up.packed) return experts(l, read, y, rows);
    settle_shared(l, x, y, rows);
    const int64_t unique = experts(l, read, sum, rows);
    each(rows, rows * l.hidden, [&](int64_t row) { accumulate(y + row * l.hidden, sum + row * l.hidden, l.hidden); });
    return unique;
}

}  // namespace DT_NS
