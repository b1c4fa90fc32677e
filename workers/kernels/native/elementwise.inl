// Norms, activations and rotary embedding: what is computed on each row for itself.
//
// A reduction has sixteen partial results: lane j takes the elements j, j + 16, ..., then `sum` joins the lanes.

namespace DT_NS {

// Sixteen floats of which n are left: the lanes behind them are zeros, and are not written.
static inline F16 take(const float* p, int64_t n) { return n >= LANES ? load(p) : load_first(p, (int)n); }
static inline void put(float* p, F16 x, int64_t n) {
    if (n >= LANES) store(p, x);
    else store_first(p, x, (int)n);
}

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

static inline void rms_norm(const float* x, const float* weight, float* y, int64_t n, float epsilon) {
    F16 squares = zero();
    for (int64_t i = 0; i < n; i += LANES) {
        const F16 v = take(x + i, n - i);
        squares = fma(v, v, squares);
    }
    const F16 scale = set1(1.0f / __builtin_sqrtf(sum(squares) / (float)n + epsilon));
    for (int64_t i = 0; i < n; i += LANES) put(y + i, mul(mul(take(x + i, n - i), scale), take(weight + i, n - i)), n - i);
}

static inline void layer_norm(const float* x, const float* weight, const float* bias, float* y, int64_t n, float epsilon) {
    F16 total = zero();
    for (int64_t i = 0; i < n; i += LANES) total = add(total, take(x + i, n - i));
    const float mean = sum(total) / (float)n;
    F16 squares = zero();
    for (int64_t i = 0; i < n; i += LANES) {
        const F16 v = only(sub(take(x + i, n - i), set1(mean)), n - i);
        squares = fma(v, v, squares);
    }
    const F16 scale = set1(1.0f / __builtin_sqrtf(sum(squares) / (float)n + epsilon));
    for (int64_t i = 0; i < n; i += LANES) {
        const F16 v = mul(mul(sub(take(x + i, n - i), set1(mean)), scale), take(weight + i, n - i));
        put(y + i, bias ? add(v, take(bias + i, n - i)) : v, n - i);
    }
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

template <F16 (*activate)(F16), bool gated>
static inline void activate_range(const float* x, const float* up, float* y, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        const F16 v = activate(take(x + i, n - i));
        put(y + i, gated ? mul(v, take(up + i, n - i)) : v, n - i);
    }
}

// y [rows, width] from x [rows, 2 width], gates first, or [rows, width] where there is no gate.
static void gate(int activation, const float* x, float* y, int64_t rows, int64_t width) {
    constexpr int64_t PIECE = 1024;
    const int64_t stride = dovetail::gated(activation) ? 2 * width : width;
    const int64_t pieces = (width + PIECE - 1) / PIECE;
    each(rows * pieces, rows * width, [&](int64_t unit) {
        const int64_t row = unit / pieces, from = unit % pieces * PIECE, n = width - from < PIECE ? width - from : PIECE;
        const float* in = x + row * stride + from;
        float* out = y + row * width + from;
        if (activation == dovetail::SILU_GATED) activate_range<silu, true>(in, in + width, out, n);
        else if (activation == dovetail::GELU_TANH_GATED) activate_range<gelu_tanh, true>(in, in + width, out, n);
        else if (activation == dovetail::RELU2) activate_range<relu2, false>(in, nullptr, out, n);
        else activate_range<gelu_tanh, false>(in, nullptr, out, n);
    });
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
