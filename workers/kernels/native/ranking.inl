// The likeliest tokens of rows of logits, with the noise of the tokens that can be among them: a row is gone over twice, and nothing but the result is written.

#include "cutting.inl"

namespace DT_NS {

constexpr int RANKING_SCRATCH = 8;
constexpr int64_t SLICE = 65536;  // tokens of a row that one thread ranks; the sums of a row do not depend on the threads

// The noise of some tokens of a row: bounds from above, and estimates, whose relative errors are about 1e-6.
struct Heard { alignas(64) float most[STRETCH], about[STRETCH]; };

// What the tokens of a slice come to. The ids and z of the best stand apart.
struct Slice {
    F16 total, wrong;  // of e^(z - base), by estimates where z is not among the best; not a number where one z is none
    float base;
    int32_t* ids;
    float* values;
};

static inline uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}
static inline uint64_t hashed(uint64_t word, int64_t token) { return mixed(word + (uint64_t)(token + 1) * 0x9E3779B97F4A7C15u); }

// The noise of a token, as protocol/noise.py defines it.
static float gumbel(uint64_t word, int64_t token) {
    const double u = ((double)(hashed(word, token) >> 12) + 0.5) * 0x1p-52;
    return (float)-std::log(-std::log1p(-u));
}

static inline int32_t bits_of_float(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

// ln x of an ordinary number as Cephes has it (logf): the relative error is about 1e-7.
static inline float logarithm(float x) {
    const int32_t bits = bits_of_float(x), power = (bits - 0x3f3504f3) >> 23, rest = bits - power * (1 << 23);
    float f;
    memcpy(&f, &rest, 4);
    f -= 1.0f;
    const float squared = f * f, n = (float)power;
    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f, p = p * f + 1.1676998740e-1f, p = p * f - 1.2420140846e-1f, p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f, p = p * f + 2.0000714765e-1f, p = p * f - 2.4999993993e-1f, p = p * f + 3.3333331174e-1f;
    return f + ((p * squared * f - 2.12194440e-4f * n) - 0.5f * squared) + 0.693359375f * n;
}

// The bounds of the noise of some tokens, and where they are asked for estimates.
//
// A bound is no smaller than the noise. With the h of protocol/noise.py, -log1p(-u) >= u, so the noise is at most -ln u. The first 48 bits of h make v <= u, and
// `part` is v rounded twice, at most v (1 + 2^-23). The bits of a float x, as an integer, are 2^23 (127 + e + f) for x = 2^e (1 + f), and e + f <= log2 x; so -ln u
// <= ln 2 (127 - bits / 2^23) + 2^-23, where x is 0 too, since there the bound is 88 and no noise is above 53 ln 2 = 36.8. Conversion of the bits, product and
// difference are rounded by less than 2e-5 together, and the noise itself by 2e-6: 1e-4 is added.
template <class Token>
static inline void hear(uint64_t word, const Token& token, int64_t n, bool estimates, Heard& heard) {
    alignas(64) float parts[STRETCH];
    for (int64_t i = 0; i < n; i++) {
        const uint64_t h = hashed(word, token(i));
        parts[i] = ((float)(int32_t)(h >> 40) + (float)(int32_t)(h >> 16 & 0xffffff) * 0x1p-24f) * 0x1p-24f;
    }
    constexpr float LN2 = 0.69314718f;
    for (int64_t i = 0; i < n; i++) heard.most[i] = (127.0f * LN2 + 1e-4f) - (float)bits_of_float(parts[i]) * (LN2 * 0x1p-23f);
    for (int64_t i = n; i % LANES != 0; i++) heard.most[i] = heard.about[i] = 0.0f;
    if (!estimates) return;
    for (int64_t i = 0; i < n; i++) {
        const float u = parts[i], left = 1.0f - u;
        // log1p(-u) without the error of 1 - u (Kahan)
        heard.about[i] = -logarithm(left == 1.0f ? u : -logarithm(left) * (u / (1.0f - left)));
    }
}

// A token in its place among the best, the earlier one first of equals.
static inline void insert(float value, int32_t token, int32_t* ids, float* values, int64_t width) {
    if (!(values[width - 1] < value)) return;
    int64_t place = width - 1;
    for (; place > 0 && values[place - 1] < value; place--) {
        values[place] = values[place - 1];
        ids[place] = ids[place - 1];
    }
    values[place] = value;
    ids[place] = token;
}

// n numbers of a row, tempered: they are ranked, and added to the total where `shares` are asked for. A bound decides which of them get their noise.
template <class Z, class Token>
static inline void rank(const dovetail::RankedRow& row, const Z& z, const Token& token, int64_t n, const Heard& heard, bool shares, int64_t width, Slice& to) {
    const bool noisy = row.noisy != 0;
    const F16 sharpening = set1(row.sharpening);
    const auto ranked = [&](F16 v, const float* noise) {
        if (noisy) v = add(v, load(noise));
        return row.sharpening == 1.0f ? v : div(v, sharpening);
    };
    F16 total = to.total, wrong = to.wrong;
    for (int64_t i = 0; i < n; i += LANES) {
        const F16 v = z(i), most = ranked(v, heard.most + i);
        F16 about = noisy && shares ? ranked(v, heard.about + i) : most;
        wrong = add(wrong, where_less(v, set1(__builtin_inff()), zero(), v));
        if (any_less(set1(to.values[width - 1]), most)) {
            alignas(64) float own[LANES], bound[LANES], exact[LANES];
            store(own, v), store(bound, most), store(exact, about);
            for (int64_t lane = 0; lane < LANES; lane++) {
                if (!(to.values[width - 1] < bound[lane])) continue;
                exact[lane] = noisy ? (own[lane] + gumbel(row.word, token(i + lane))) / row.sharpening : bound[lane];
                insert(exact[lane], (int32_t)token(i + lane), to.ids, to.values, width);
            }
            about = load(exact);
            if (shares && to.base < to.values[0]) {
                total = mul(total, exp(set1(to.base - to.values[0])));
                to.base = to.values[0];
            }
        }
        if (shares && NEVER < to.base) total = add(total, exp(sub(about, set1(to.base))));
    }
    to.total = total, to.wrong = wrong;
}

// A slice of one row whose tokens may all be chosen.
static inline void rank_whole(const dovetail::RankedRow& row, float largest, int64_t from, int64_t n, const Heard& heard, bool shares, int64_t width, Slice& to) {
    const Tempered tempered{row.logits + from, largest, row.temperature};
    rank(row, [&](int64_t i) { return tempered.at(i, n - i); }, [&](int64_t i) { return from + i; }, n, heard, shares, width, to);
}

// One row of whose tokens some cannot be chosen: only what is left has noise. False: it could not be decided which.
static bool rank_cut(const dovetail::RankedRow& row, float largest, int64_t size, Heard& heard, bool shares, int64_t width, Slice& to) {
    Kept& kept = kept_here(size);
    if (!cut(row, {row.logits, largest, row.temperature}, size, kept)) return false;
    const F16 share = set1(row.share);
    to.wrong = kept.wrong;
    for (int64_t from = 0; from < kept.count; from += STRETCH) {
        const int64_t n = kept.count - from < STRETCH ? kept.count - from : STRETCH;
        const auto token = [&](int64_t i) { return (int64_t)kept.ids[from + i]; };
        if (row.noisy) hear(row.word, token, n, shares, heard);
        rank(row, [&](int64_t i) { return div(first_lanes(kept.z + from + i, n - i), share); }, token, n, heard, shares, width, to);
    }
    return true;
}

// The best of all slices of a row.
static void join(const Slice* slices, int64_t count, bool shares, int64_t width, int32_t* ids, float* values) {
    F16 wrong = zero();
    for (int64_t s = 0; s < count; s++) {
        for (int64_t i = 0; i < width; i++) insert(slices[s].values[i], slices[s].ids[i], ids, values, width);
        wrong = add(wrong, slices[s].wrong);
    }
    const float best = values[0], none = sum(wrong);
    float weight = 0.0f;
    for (int64_t s = 0; s < count; s++)
        if (NEVER < slices[s].base) weight += sum(mul(slices[s].total, exp(set1(slices[s].base - best))));
    const float less = shares ? best + std::log(weight) : 0.0f;
    for (int64_t i = 0; i < width; i++) values[i] = none != none ? none : values[i] - less;
}

static void likeliest(const dovetail::Ranking& r) {
    const int64_t slices = (r.size + SLICE - 1) / SLICE, all = r.count * slices, wide = r.width;
    const auto length = [&](int64_t s) { return r.size - s * SLICE < SLICE ? r.size - s * SLICE : SLICE; };
    char* memory = (char*)dovetail::scratch(RANKING_SCRATCH, all * ((int64_t)sizeof(Slice) + wide * 8 + 4) + r.count * 8 + 64);
    Slice* const found = (Slice*)memory;
    int64_t* const groups = (int64_t*)(found + all);  // rows that follow each other and have the same noise, which is computed once
    float* const values = (float*)(groups + r.count);
    int32_t* const ids = (int32_t*)(values + all * wide);
    float* const tops = (float*)(ids + all * wide);
    int64_t grouped = 0;
    for (int64_t row = 0; row < r.count; row++) {
        const auto shares_noise = [&](const dovetail::RankedRow& with) { return with.noisy && with.word == r.rows[row].word && !cuts(with); };
        if (row == 0 || !shares_noise(r.rows[row - 1]) || !shares_noise(r.rows[row])) groups[grouped++] = row;
    }
    for (int64_t i = 0; i < all; i++) found[i] = {zero(), zero(), NEVER, ids + i * wide, values + i * wide};
    for (int64_t i = 0; i < all * wide; i++) ids[i] = 0, values[i] = NEVER;
    for (int64_t i = 0; i < r.count * wide; i++) r.ids[i] = 0, r.values[i] = NEVER;
    each(all, r.count * r.size, [&](int64_t unit) {
        const dovetail::RankedRow& row = r.rows[unit / slices];
        const int64_t s = unit % slices;
        tops[unit] = row.temperature > 0.0f ? largest_of({row.logits + s * SLICE, 0.0f, 0.0f}, length(s)) : 0.0f;
    });
    for (int64_t row = 0; row < r.count; row++) {
        tops[row] = tops[row * slices];
        for (int64_t s = 1; s < slices; s++) tops[row] = tops[row * slices + s] > tops[row] ? tops[row * slices + s] : tops[row];
    }
    each(grouped * slices, r.count * r.size, [&](int64_t unit) {
        const int64_t group = unit / slices, s = unit % slices, first = groups[group], stop = group + 1 < grouped ? groups[group + 1] : r.count;
        Heard heard;
        if (cuts(r.rows[first])) {
            if (s == 0 && !rank_cut(r.rows[first], tops[first], r.size, heard, r.shares != 0, wide, found[first * slices])) r.ids[first * wide] = -1;
            return;
        }
        for (int64_t from = s * SLICE; from < s * SLICE + length(s); from += STRETCH) {
            const int64_t left = s * SLICE + length(s) - from, n = left < STRETCH ? left : STRETCH;
            if (r.rows[first].noisy) hear(r.rows[first].word, [&](int64_t i) { return from + i; }, n, r.shares != 0, heard);
            for (int64_t row = first; row < stop; row++) rank_whole(r.rows[row], tops[row], from, n, heard, r.shares != 0, wide, found[row * slices + s]);
        }
    });
    for (int64_t row = 0; row < r.count; row++)
        if (r.ids[row * wide] == 0) join(found + row * slices, slices, r.shares != 0, wide, r.ids + row * wide, r.values + row * wide);
}

}  // namespace DT_NS
