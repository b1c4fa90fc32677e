// The likeliest tokens of rows of logits and their log-probabilities: a few runs over a row that stays in the cache, and nothing but the result is written.

namespace DT_NS {

constexpr float NEVER = -__builtin_inff();

// The z of one row, as `Ranking` has it.
struct Scored {
    const float *logits, *noise;
    float largest, temperature, sharpening;

    // Sixteen from i on, of which n are left; the lanes behind them are -inf.
    F16 at(int64_t i, int64_t n) const {
        F16 z = take(logits + i, n);
        if (temperature > 0.0f) z = div(sub(z, set1(largest)), set1(temperature));
        if (noise) z = add(z, take(noise + i, n));
        if (sharpening != 1.0f) z = div(z, set1(sharpening));
        if (n >= LANES) return z;
        alignas(64) float t[LANES];
        store(t, set1(NEVER));
        store_first(t, z, (int)n);
        return load(t);
    }
};

static float largest_of(const Scored& z, int64_t size) {
    F16 found = set1(NEVER);
    for (int64_t i = 0; i < size; i += LANES) found = max(z.at(i, size - i), found);
    return largest(found);
}

// A token in its place among the best, the earlier one first of equals.
static inline void insert(float value, int32_t token, int32_t* ids, float* values, int64_t width) {
    int64_t place = width - 1;
    for (; place > 0 && values[place - 1] < value; place--) {
        values[place] = values[place - 1];
        ids[place] = ids[place - 1];
    }
    values[place] = value;
    ids[place] = token;
}

// The ids and z of the best, best first; where there are fewer, z is -inf.
static void collect(const Scored& z, int64_t size, int32_t* ids, float* values, int64_t width) {
    for (int64_t i = 0; i < width; i++) {
        ids[i] = 0;
        values[i] = NEVER;
    }
    for (int64_t i = 0; i < size; i += LANES) {
        const F16 v = z.at(i, size - i);
        if (!any_less(set1(values[width - 1]), v)) continue;
        alignas(64) float t[LANES];
        store(t, v);
        for (int64_t lane = 0; lane < LANES; lane++)
            if (values[width - 1] < t[lane]) insert(t[lane], (int32_t)(i + lane), ids, values, width);
    }
}

// The sum of e^(z - best); not a number where one z is none.
static float weight_of(const Scored& z, int64_t size, float best) {
    F16 total = zero();
    for (int64_t i = 0; i < size; i += LANES) {
        const F16 v = z.at(i, size - i);
        total = add(total, where_less(v, set1(__builtin_inff()), exp(sub(v, set1(best))), v));
    }
    return sum(total);
}

static void likeliest(const dovetail::Ranking& r) {
    each(r.rows, r.rows * r.size, [&](int64_t row) {
        int32_t* ids = r.ids + row * r.width;
        float* gains = r.gains + row * r.width;
        const float* logits = r.logits + row * r.stride;
        const float largest = r.temperature > 0.0f ? largest_of({logits, nullptr, 0.0f, 0.0f, 1.0f}, r.size) : 0.0f;
        const Scored z{logits, r.noise ? r.noise[row] : nullptr, largest, r.temperature, r.sharpening};
        collect(z, r.size, ids, gains, r.width);
        const float best = gains[0], weight = std::log(weight_of(z, r.size, best));
        for (int64_t i = 0; i < r.width; i++) gains[i] = gains[i] - best - weight;
    });
}

}  // namespace DT_NS
