// Experts: of each row some are chosen by its scores, and the rows of each go through its matrices together.
//
// Scores, choice and weights are of a row alone, a matrix gives a row the same bytes in any company, and a row's outputs are added by ascending index: so is the
// sum of them the same bytes whatever rows are beside it.

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

// The sum of the two best of a group.
static inline float worth(const float* values, int64_t n) {
    float first = NOTHING, second = NOTHING;
    for (int64_t i = 0; i < n; i++) {
        if (values[i] > first) second = first, first = values[i];
        else if (values[i] > second) second = values[i];
    }
    return n > 1 ? first + second : first;
}

// Leaves nothing of the values of groups that are not among the best; the margin of that choice.
static float close_groups(const dovetail::Router& r, float* values, float* worths, char* taken) {
    const int64_t size = r.logits.n / r.groups;
    for (int64_t group = 0; group < r.groups; group++) worths[group] = worth(values + group * size, size);
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
        total = total < r.least_sum ? r.least_sum : total;
        for (int64_t i = 0; i < r.chosen; i++) weights[i] /= total;
    }
    for (int64_t i = 0; i < r.chosen; i++) weights[i] *= r.scales ? r.scale * r.scales[ids[i]] : r.scale;
}

// The experts of a row by its logits, ascending, and their weights; the margin of the choice: of probabilities, which may be small, as a share of the one that was
// chosen last.
static float choose(const dovetail::Router& r, const Choice& c, int32_t* ids, float* weights) {
    const int64_t n = r.logits.n;
    if (r.score == dovetail::SOFTMAX) softmax(c.scores, c.scores, n);
    if (r.score == dovetail::SIGMOID) sigmoid(c.scores, n);
    for (int64_t i = 0; i < n; i++) c.values[i] = r.correction ? c.scores[i] + r.correction[i] : c.scores[i];
    float margin = r.groups > 1 ? close_groups(r, c.values, c.worths, c.taken) : -NOTHING;
    margin = lesser(margin, mark_best(c.values, c.taken, n, r.chosen));
    float least = -NOTHING;
    for (int64_t i = 0, found = 0; i < n; i++) {
        if (!c.taken[i]) continue;
        least = lesser(least, c.values[i]);
        weights[found] = c.scores[i];
        ids[found++] = (int32_t)i;
    }
    weigh_experts(r, ids, weights);
    return r.score == dovetail::SOFTMAX && least > 0.0f ? margin / least : margin;
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

// The rows of each expert, in order: those of expert e are places[first[e]] .. places[first[e + 1]], each a row times `chosen` and which of its experts this is.
static void list_rows(const int32_t* ids, int64_t count, int64_t experts, int32_t* first, int32_t* places) {
    for (int64_t e = 0; e <= experts; e++) first[e] = 0;
    for (int64_t i = 0; i < count; i++) first[ids[i] + 1]++;
    for (int64_t e = 0; e < experts; e++) first[e + 1] += first[e];
    for (int64_t i = 0; i < count; i++) places[first[ids[i]]++] = (int32_t)i;
    for (int64_t e = experts; e > 0; e--) first[e] = first[e - 1];
    first[0] = 0;
}

// What the rows of one expert take.
struct Bench {
    float *x, *wide, *narrow, *y, *read, *sum;
    float* weights;  // [rows, chosen]
    int32_t *ids, *places, *first;
};

static Bench bench(const dovetail::Layer& l, int64_t rows) {
    const dovetail::Experts& e = *l.experts;
    const int64_t hidden = round_up(rows * l.hidden, LANES), wide = round_up(rows * e.gate_up->n, LANES), narrow = round_up(rows * e.down->k, LANES);
    const int64_t chosen = round_up(rows * e.router.chosen, LANES), first = round_up(e.router.logits.n + 1, LANES);
    float* memory = (float*)dovetail::scratch(EXPERTS_SCRATCH, (4 * hidden + wide + narrow + 3 * chosen + first) * (int64_t)sizeof(float));
    Bench b;
    b.x = memory, b.y = b.x + hidden, b.read = b.y + hidden, b.sum = b.read + hidden, b.wide = b.sum + hidden, b.narrow = b.wide + wide, b.weights = b.narrow + narrow;
    b.ids = (int32_t*)(b.weights + chosen), b.places = b.ids + chosen, b.first = b.places + chosen;
    return b;
}

// y += weight x
static inline void add_weighted(float* y, float weight, const float* x, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) put(y + i, fma(set1(weight), take(x + i, n - i), take(y + i, n - i)), n - i);
}

// The rows at `places` through one expert, added to y by their weights.
static void run_expert(const dovetail::Layer& l, int64_t expert, const Bench& b, const int32_t* places, int64_t count, const float* x, float* y) {
    const dovetail::Matrix &gate_up = l.experts->gate_up[expert], &down = l.experts->down[expert];
    const int64_t chosen = l.experts->router.chosen, bytes = l.hidden * (int64_t)sizeof(float);
    const bool scales_input = l.experts->router.scales_input;
    each(count, count * l.hidden, [&](int64_t i) {
        memcpy(b.x + i * l.hidden, x + places[i] / chosen * l.hidden, (size_t)bytes);
        if (scales_input) multiply(b.x + i * l.hidden, b.weights[places[i]], l.hidden);
    });
    linear(gate_up, b.x, l.hidden, b.wide, gate_up.n, count);
    gate(l.activation, b.wide, b.narrow, count, down.k);
    linear(down, b.narrow, down.k, b.y, l.hidden, count);
    each(count, count * l.hidden, [&](int64_t i) {
        add_weighted(y + places[i] / chosen * l.hidden, scales_input ? 1.0f : b.weights[places[i]], b.y + i * l.hidden, l.hidden);
    });
}

// y [rows, hidden] is what all rows share, times its gate, or nothing where they share nothing.
static void begin_sum(const dovetail::Layer& l, const float* x, float* y, int64_t rows, float* gates) {
    const dovetail::Matrix& gate = l.experts->shared_gate;
    if (!l.gate_up.packed) memset(y, 0, (size_t)(rows * l.hidden) * sizeof(float));
    else if (gate.packed) {
        linear(gate, x, l.hidden, gates, 1, rows);
        sigmoid(gates, rows);
        each(rows, rows * l.hidden, [&](int64_t row) { multiply(y + row * l.hidden, gates[row], l.hidden); });
    }
}

// y [rows, hidden], which is what all rows share, becomes that and the outputs of each row's experts of x; `states` are those before the half's norm.
static void mix(const dovetail::Layer& l, const float* x, const float* states, float* y, int64_t rows) {
    const dovetail::Experts& e = *l.experts;
    const Bench b = bench(l, rows);
    begin_sum(l, x, y, rows, b.y);
    if (e.shared_norm.weight) norm(l.norm_kind, e.shared_norm, y, y, rows, l.hidden, l.epsilon);
    route(e.router, e.input_norm.weight ? states : x, rows, b.ids, b.weights, nullptr);
    if (e.input_norm.weight) {
        norm(l.norm_kind, e.input_norm, states, b.read, rows, l.hidden, l.epsilon);
        x = b.read;
    }
    float* sum = e.output_norm.weight ? b.sum : y;
    if (sum != y) memset(sum, 0, (size_t)(rows * l.hidden) * sizeof(float));
    list_rows(b.ids, rows * e.router.chosen, e.router.logits.n, b.first, b.places);
    for (int64_t expert = 0; expert < e.router.logits.n; expert++)
        if (const int64_t count = b.first[expert + 1] - b.first[expert]) run_expert(l, expert, b, b.places + b.first[expert], count, x, sum);
    if (sum == y) return;
    norm(l.norm_kind, e.output_norm, sum, sum, rows, l.hidden, l.epsilon);
    each(rows, rows * l.hidden, [&](int64_t row) { accumulate(y + row * l.hidden, sum + row * l.hidden, l.hidden); });
}

}  // namespace DT_NS
