// Norms, activations and rotary embedding: what is computed on each row for itself.
//
// A reduction has sixteen partial results: lane j takes the elements j, j + 16, ..., then `sum` joins the lanes.

namespace DT_NS {

// The first n lanes, and zeros.
static inline F16 only(F16 x, int64_t n) {
    alignas(64) float t[LANES] = {};
    if (n >= LANES) return x;
    store_first(t, x, (int)n);
    return load(t);
}

// Where a part's share of n units begins.
static inline int64_t share(int64_t n, int part, int parts) { return n * part / parts; }

// body(unit) for each of n units, on all threads where there are `work` elements enough to pay for waking them.
constexpr int64_t WORTH_SHARING = 32768;
template <class Body>
static inline void each(int64_t n, int64_t work, const Body& body) {
    auto run_part = [&](int part, int parts) {
        for (int64_t unit = share(n, part, parts); unit < share(n, part + 1, parts); unit++) body(unit);
    };
    if (work < WORTH_SHARING) run_part(0, 1);
    else dovetail::parallel(run_part);
}

// body(unit) for each of n units, by a thread of the shard that has it, since the first writer decides on which node fresh memory lies.
template <class Body>
static inline void each_at_home(int64_t n, const Body& body) {
    auto run_part = [&](int part, int parts) {
        for (int64_t unit = share(n, part, parts); unit < share(n, part + 1, parts); unit++) body(unit);
    };
    dovetail::parallel_at_home(run_part);
}

static inline void rms_norm(const float* x, const float* weight, float* y, int64_t n, float epsilon) {
    F16 squares = zero();
    for (int64_t i = 0; i < n; i += LANES) {
        const F16 v = take(x + i, n - i);
        squares = fma(v, v, squares);
    }
    const F16 scale = set1(1.0f / __builtin_sqrtf(sum(squares) / (float)n + epsilon));
    for (int64_t i = 0; i < n; i += LANES) put(y + i, mul(mul(take(x + i, n - i), scale), take(weight + i, n - i)), n - i);
}

static inline float mean_of(const float* x, int64_t n) {
    F16 total = zero();
    for (int64_t i = 0; i < n; i += LANES) total = add(total, take(x + i, n - i));
    return sum(total) / (float)n;
}

static inline float variance_of(const float* x, int64_t n, float mean) {
    F16 squares = zero();
    for (int64_t i = 0; i < n; i += LANES) {
        const F16 v = only(sub(take(x + i, n - i), set1(mean)), n - i);
        squares = fma(v, v, squares);
    }
    return sum(squares) / (float)n;
}

static inline void layer_norm(const float* x, const float* weight, const float* bias, float* y, int64_t n, float epsilon) {
    const float mean = mean_of(x, n);
    const F16 scale = set1(1.0f / __builtin_sqrtf(variance_of(x, n, mean) + epsilon));
    for (int64_t i = 0; i < n; i += LANES) {
        const F16 v = mul(mul(sub(take(x + i, n - i), set1(mean)), scale), take(weight + i, n - i));
        put(y + i, bias ? add(v, take(bias + i, n - i)) : v, n - i);
    }
}

// x is lessened by its mean plus `deviations` standard deviations; what is then negative becomes 0.
static inline void cut_below(float* x, int64_t n, float deviations) {
    const float mean = mean_of(x, n), beyond = deviations * __builtin_sqrtf(variance_of(x, n, mean));
    const F16 least = set1(mean + beyond);
    for (int64_t i = 0; i < n; i += LANES) put(x + i, max(zero(), sub(take(x + i, n - i), least)), n - i);
}

// x and y may be the same.
static void normalise(int kind, const dovetail::Norm& norm, const float* x, float* y, int64_t n, float epsilon) {
    if (kind == dovetail::RMS) rms_norm(x, norm.weight, y, n, epsilon);
    else layer_norm(x, norm.weight, norm.bias, y, n, epsilon);
}

static void norm(int kind, const dovetail::Norm& norm, const float* x, float* y, int64_t rows, int64_t width, float epsilon) {
    each(rows, rows * width, [&](int64_t row) { normalise(kind, norm, x + row * width, y + row * width, width, epsilon); });
}

// Below -100 both activations vanish, but the largest value of `exp` does not outweigh every float; what is not a number stays so.
static inline F16 bounded(F16 x) { return max(set1(-100.0f), x); }

// x / (1 + e^-x)
static inline F16 silu(F16 x) { return div(bounded(x), add(set1(1.0f), exp(sub(zero(), x)))); }

// x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^-2u)
static inline F16 gelu_tanh(F16 x) {
    const F16 cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
    return div(bounded(x), add(set1(1.0f), exp(mul(cubic, set1(-1.59576912f)))));
}

// What is no number stays so.
static inline F16 relu2(F16 x) { return where_less(x, zero(), zero(), mul(x, x)); }

static inline F16 relu(F16 x) { return where_less(x, zero(), zero(), x); }

// An odd polynomial where |x| is small, for 1 - 2 / (e^2x + 1) loses digits there.
static inline F16 tanh(F16 x) {
    const F16 z = mul(x, x);
    F16 p = set1(-5.70498872745e-3f);
    p = fma(p, z, set1(2.06390887954e-2f));
    p = fma(p, z, set1(-5.37397155531e-2f));
    p = fma(p, z, set1(1.33314422036e-1f));
    p = fma(p, z, set1(-3.33332819422e-1f));
    const F16 small = fma(mul(p, z), x, x);
    const F16 large = sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f))));
    return where_less(abs(x), set1(0.625f), small, large);
}

// The distribution function of the normal distribution by 7.1.26 of Abramowitz and Stegun, whose error is below 1e-7: of |x| its tail, e^(-x^2 / 2) times a polynomial.
static inline F16 gelu(F16 x) {
    const F16 u = mul(abs(x), set1(0.70710678f)), t = div(set1(1.0f), fma(u, set1(0.3275911f), set1(1.0f)));
    F16 p = set1(0.5307027145f);
    p = fma(p, t, set1(-0.7265760135f));
    p = fma(p, t, set1(0.7107068705f));
    p = fma(p, t, set1(-0.142248368f));
    p = fma(p, t, set1(0.127414796f));
    const F16 tail = mul(mul(p, t), exp(sub(zero(), mul(u, u))));
    return mul(x, where_less(x, zero(), tail, sub(set1(1.0f), tail)));
}

// e^x - 1 - x of what is not positive: its series where |x| is small.
static inline F16 exp_beyond(F16 x) {
    F16 p = set1(2.7557319e-6f);
    for (const float c : {2.4801587e-5f, 1.9841270e-4f, 1.3888889e-3f, 8.3333333e-3f, 4.1666667e-2f, 1.6666667e-1f, 0.5f}) p = fma(p, x, set1(c));
    return where_less(x, set1(-0.7f), sub(sub(exp(x), set1(1.0f)), x), mul(mul(x, x), p));
}

// positive x^2 + x / 2, and negative (e^x - 1 - x) + x / 2 of what is not positive; the exponent is at most -1e-6.
static inline F16 xielu(F16 x, F16 positive, F16 negative) {
    const F16 half = mul(x, set1(0.5f)), low = min(set1(-1e-6f), x);
    const F16 beyond = add(exp_beyond(low), sub(low, x));
    return where_less(zero(), x, fma(mul(x, x), positive, half), fma(beyond, negative, half));
}

// (up + 1) gate / (1 + e^(-factor gate)), both within the limit.
static inline F16 swiglu_clamped(F16 gate, F16 up, F16 factor, F16 limit) {
    const F16 g = min(limit, bounded(gate)), u = max(sub(zero(), limit), min(limit, up));
    return mul(add(u, set1(1.0f)), div(g, add(set1(1.0f), exp(sub(zero(), mul(factor, g))))));
}

// y [rows, width] from x [rows, 2 width], gates first, or [rows, width] where there is no gate; `activate` is given a gate and what it is for.
template <bool gated, class Activate>
static void activate_rows(const float* x, float* y, int64_t rows, int64_t width, const Activate& activate) {
    constexpr int64_t PIECE = 1024;
    const int64_t pieces = (width + PIECE - 1) / PIECE;
    each(rows * pieces, rows * width, [&](int64_t unit) {
        const int64_t row = unit / pieces, from = unit % pieces * PIECE, stop = width - from < PIECE ? width : from + PIECE;
        const float* in = x + row * (gated ? 2 * width : width);
        for (int64_t i = from; i < stop; i += LANES) {
            const F16 v = take(in + i, stop - i);
            put(y + row * width + i, activate(v, gated ? take(in + width + i, stop - i) : v), stop - i);
        }
    });
}

static void gate(const dovetail::Activator& activation, const float* x, float* y, int64_t rows, int64_t width) {
    const F16 first = set1(activation.first), second = set1(activation.second);
    switch (activation.kind) {
        case dovetail::SILU_GATED:
            if (activation.first != 0.0f) return activate_rows<true>(x, y, rows, width, [&](F16 g, F16 up) { return mul(silu(mul(g, first)), up); });
            return activate_rows<true>(x, y, rows, width, [](F16 g, F16 up) { return mul(silu(g), up); });
        case dovetail::GELU_TANH_GATED: return activate_rows<true>(x, y, rows, width, [](F16 g, F16 up) { return mul(gelu_tanh(g), up); });
        case dovetail::SWIGLU_CLAMPED: return activate_rows<true>(x, y, rows, width, [&](F16 g, F16 up) { return swiglu_clamped(g, up, first, second); });
        case dovetail::RELU2_GATED: return activate_rows<true>(x, y, rows, width, [](F16 g, F16 up) { return mul(relu2(g), up); });
        case dovetail::RELU: return activate_rows<false>(x, y, rows, width, [](F16 v, F16) { return relu(v); });
        case dovetail::RELU2: return activate_rows<false>(x, y, rows, width, [](F16 v, F16) { return relu2(v); });
        case dovetail::GELU: return activate_rows<false>(x, y, rows, width, [](F16 v, F16) { return gelu(v); });
        case dovetail::XIELU: return activate_rows<false>(x, y, rows, width, [&](F16 v, F16) { return xielu(v, first, second); });
        default: return activate_rows<false>(x, y, rows, width, [](F16 v, F16) { return gelu_tanh(v); });
    }
}

// One head: the pairs (j, j + rotary_dim / 2) are turned by the angle whose cosine and sine stand at j.
static inline void rotate(float* x, const float* cosines, const float* sines, int64_t rotary_dim) {
    const int64_t half = rotary_dim / 2;
    for (int64_t j = 0; j < half; j += LANES) {
        const int64_t n = half - j;
        const F16 c = take(cosines + j, n), s = take(sines + j, n), a = take(x + j, n), b = take(x + half + j, n);
        put(x + j, sub(mul(a, c), mul(b, s)), n);
        put(x + half + j, add(mul(b, c), mul(a, s)), n);
    }
}

static inline void multiply(float* x, float by, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) put(x + i, mul(take(x + i, n - i), set1(by)), n - i);
}

static inline void accumulate(float* x, const float* y, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) put(x + i, add(take(x + i, n - i), take(y + i, n - i)), n - i);
}

}  // namespace DT_NS
