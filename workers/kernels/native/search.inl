// Numbers become blocks of GGUF: the scale, and the minimum where the format has minima, with which the codes of a block are off by least, are searched for.
//
// Sixteen blocks stand side by side, one a lane, and no lane sees another: the bytes are the same for every instruction set and wherever a block stands. For each
// of several steps between codes the numbers are rounded to codes, and the straight line through codes and numbers is fitted by weighted least squares; the line
// with the least error stays (the idea of llama.cpp's K-quants, ggml-quants.c). Then scales become what the format holds of them, and codes are rounded by those.

namespace DT_NS {

constexpr float LEAST = 1e-30f;  // a range below it is none
constexpr int INWARD = 10;  // steps of a tenth of a code by which the range of a search is narrowed, and widened

// Up to 32 numbers of sixteen blocks, and how much the error of each counts.
struct Sixteen {
    alignas(64) float x[32][LANES], weight[32][LANES];
};

// A number is about scale code + more.
struct Fit { F16 scale, more; };

static inline F16 held(F16 x, float low, float high) { return min(max(x, set1(low)), set1(high)); }

static inline F16 to_whole(F16 x) { return sub(add(x, set1(dovetail::ROUNDER)), set1(dovetail::ROUNDER)); }

// a b - c d
static inline F16 crossed(F16 a, F16 b, F16 c, F16 d) { return sub(mul(a, b), mul(c, d)); }

// Codes 0 .. 15 of 32 inputs, more <= 0. An error counts by the size of its number and the sizes of all.
static Fit fit_with_minima(Sixteen& of) {
    constexpr int INPUTS = 32;
    constexpr float most = 15.0f;
    F16 low = zero(), high = load(of.x[0]), squares = zero();
    for (int i = 0; i < INPUTS; i++) {
        const F16 x = load(of.x[i]);
        low = min(low, x), high = max(high, x), squares = add(squares, mul(x, x));
    }
    alignas(64) float usual[LANES];
    store(usual, mul(squares, set1(1.0f / INPUTS)));
    for (float& u : usual) u = __builtin_sqrtf(u);
    F16 w = zero(), wx = zero(), wxx = zero();
    for (int i = 0; i < INPUTS; i++) {
        const F16 x = load(of.x[i]), own = add(load(usual), abs(x)), times = mul(own, x);
        store(of.weight[i], own);
        w = add(w, own), wx = add(wx, times), wxx = add(wxx, mul(times, x));
    }
    const F16 range = sub(high, low), none = zero();
    Fit best{div(range, set1(most)), low};
    F16 least = set1(__builtin_inff());
    for (int t = -INWARD; t <= INWARD; t++) {
        const F16 to = where_less(set1(LEAST), range, div(set1(most + 0.1f * (float)t), range), none);
        F16 wq = zero(), wqq = zero(), wqx = zero();
        for (int i = 0; i < INPUTS; i++) {
            const F16 x = load(of.x[i]), q = to_whole(held(mul(to, sub(x, low)), 0.0f, most)), times = mul(load(of.weight[i]), q);
            wq = add(wq, times), wqq = add(wqq, mul(times, q)), wqx = add(wqx, mul(times, x));
        }
        const F16 one = set1(1.0f), under = crossed(w, wqq, wq, wq), divisor = where_less(none, under, under, one);
        F16 scale = div(crossed(w, wqx, wx, wq), divisor), more = div(crossed(wqq, wx, wq, wqx), divisor);
        scale = where_less(none, more, div(wqx, where_less(none, wqq, wqq, one)), scale), more = min(more, none);
        // of w (scale q + more - x)^2 in all
        const F16 mixed = sub(mul(scale, sub(mul(more, wq), wqx)), mul(more, wx));
        const F16 error = add(add(wxx, mul(mul(scale, scale), wqq)), add(mul(mul(more, more), w), add(mixed, mixed)));
        const F16 able = where_less(none, under, error, set1(__builtin_inff()));
        best.scale = where_less(able, least, max(scale, none), best.scale), best.more = where_less(able, least, more, best.more);
        least = where_less(able, least, able, least);
    }
    return best;
}

// Codes -middle .. middle - 1; the scale has the sign with which the largest number is -middle. An error counts by the square of its number.
template <int INPUTS>
static Fit fit_symmetric(Sixteen& of, float middle) {
    F16 low = zero(), high = zero();
    for (int i = 0; i < INPUTS; i++) low = min(low, load(of.x[i])), high = max(high, load(of.x[i]));
    const F16 none = zero(), peak = where_less(high, abs(low), low, high), size = abs(peak);
    for (int i = 0; i < INPUTS; i++) store(of.weight[i], mul(load(of.x[i]), load(of.x[i])));
    const F16 divisor = where_less(set1(LEAST), size, peak, set1(1.0f));
    Fit best{div(peak, set1(-middle)), none};
    F16 most = none;
    for (int t = -INWARD; t <= INWARD; t++) {
        const F16 to = div(set1(-(middle + 0.1f * (float)t)), divisor);
        F16 wqq = zero(), wqx = zero();
        for (int i = 0; i < INPUTS; i++) {
            const F16 x = load(of.x[i]), q = to_whole(held(mul(to, x), -middle, middle - 1.0f)), times = mul(load(of.weight[i]), q);
            wqq = add(wqq, mul(times, q)), wqx = add(wqx, mul(times, x));
        }
        const F16 scale = div(wqx, where_less(none, wqq, wqq, set1(1.0f))), gain = mul(scale, wqx);
        best.scale = where_less(most, gain, scale, best.scale);
        most = where_less(most, gain, gain, most);
    }
    return best;
}

// A half that is no smaller than x.
static inline uint16_t half_beyond(float x) {
    const uint16_t bits = nearest_half(x);
    return __builtin_fabsf(dovetail::widened(dovetail::FP16, bits)) < __builtin_fabsf(x) && (bits & 0x7fff) < 0x7bff ? (uint16_t)(bits + 1) : bits;
}

static inline float size_of(uint16_t half) { return dovetail::widened(dovetail::FP16, half); }

// round(x / scale) from low to high; 0 where the scale is 0.
static inline float code_of(float x, float scale, float low, float high) {
    const float q = scale != 0.0f ? x / scale : 0.0f;
    const float inside = q < low ? low : q > high ? high : q;
    return (inside + dovetail::ROUNDER) - dovetail::ROUNDER;
}

// Codes of a block in the order of its numbers.
static inline void codes_of(const float* x, int64_t count, float scale, float more, float low, float high, uint8_t* codes) {
    for (int64_t i = 0; i < count; i++) codes[i] = (uint8_t)(int)(code_of(x[i] - more, scale, low, high) - low);
}

static inline void put_half(uint8_t* to, uint16_t half) { memcpy(to, &half, 2); }

// Block b of a group: what its lane found, and its numbers.
struct Found {
    float scale, more;
    const float* x;
};

static inline void put_nibbles(const uint8_t* codes, uint8_t* to) {
    for (int j = 0; j < 16; j++) to[j] = (uint8_t)((codes[j] & 15) | (codes[j + 16] & 15) << 4);
}
static inline void put_fifth(const uint8_t* codes, uint8_t* to) {
    uint32_t bits = 0;
    for (int j = 0; j < 32; j++) bits |= (uint32_t)(codes[j] >> 4 & 1) << j;
    memcpy(to, &bits, 4);
}

// `found`: the blocks of 32 or 16 numbers that a block of the file is made of.
static void put_block(dovetail::Q5_0, const Found* found, uint8_t* to) {
    const uint16_t d = nearest_half(found->scale);
    uint8_t codes[32];
    codes_of(found->x, 32, size_of(d), 0.0f, -16.0f, 15.0f, codes);
    put_half(to, d), put_fifth(codes, to + 2), put_nibbles(codes, to + 6);
}
static void put_block(dovetail::Q8_0, const Found* found, uint8_t* to) {
    float most = 0.0f;
    for (int i = 0; i < 32; i++) most = __builtin_fabsf(found->x[i]) > most ? __builtin_fabsf(found->x[i]) : most;
    const uint16_t d = half_beyond(most / 127.0f);
    put_half(to, d);
    for (int i = 0; i < 32; i++) to[2 + i] = (uint8_t)(int8_t)(int)code_of(found->x[i], size_of(d), -127.0f, 127.0f);
}
static void put_block(dovetail::Q4_K, const Found* found, uint8_t* to) {
    float scale = 0.0f, less = 0.0f;
    for (int b = 0; b < 8; b++) scale = found[b].scale > scale ? found[b].scale : scale, less = -found[b].more > less ? -found[b].more : less;
    const uint16_t d = half_beyond(scale / 63.0f), dmin = half_beyond(less / 63.0f);
    uint8_t sixes[2][8], codes[256];
    for (int b = 0; b < 8; b++) {
        const float own = code_of(found[b].scale, size_of(d), 0.0f, 63.0f), minimum = code_of(-found[b].more, size_of(dmin), 0.0f, 63.0f);
        sixes[0][b] = (uint8_t)(int)own, sixes[1][b] = (uint8_t)(int)minimum;
        codes_of(found[b].x, 32, size_of(d) * own, -(size_of(dmin) * minimum), 0.0f, 15.0f, codes + 32 * b);
    }
    put_half(to, d), put_half(to + 2, dmin);
    for (int b = 0; b < 4; b++)
        for (int which = 0; which < 2; which++) to[4 + 4 * which + b] = (uint8_t)(sixes[which][b] | sixes[which][b + 4] >> 4 << 6);
    for (int b = 4; b < 8; b++) to[8 + b] = (uint8_t)((sixes[0][b] & 15) | (sixes[1][b] & 15) << 4);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 32; j++) to[16 + 32 * i + j] = (uint8_t)(codes[64 * i + j] | codes[64 * i + 32 + j] << 4);
}
static void put_block(dovetail::Q6_K, const Found* found, uint8_t* to) {
    float scale = 0.0f;
    for (int b = 0; b < 16; b++) scale = __builtin_fabsf(found[b].scale) > __builtin_fabsf(scale) ? found[b].scale : scale;
    const uint16_t d = half_beyond(scale / -128.0f);
    uint8_t codes[256];
    for (int b = 0; b < 16; b++) {
        const float own = code_of(found[b].scale, size_of(d), -128.0f, 127.0f);
        to[192 + b] = (uint8_t)(int8_t)(int)own;
        codes_of(found[b].x, 16, size_of(d) * own, 0.0f, -32.0f, 31.0f, codes + 16 * b);
    }
    for (int h = 0; h < 2; h++)
        for (int j = 0; j < 64; j++) {
            const uint8_t* const own = codes + 128 * h + j;
            to[64 * h + j] = (uint8_t)((own[0] & 15) | (own[64] & 15) << 4);
        }
    for (int h = 0; h < 2; h++)
        for (int j = 0; j < 32; j++) {
            uint8_t high = 0;
            for (int i = 0; i < 4; i++) high |= (uint8_t)(codes[128 * h + 32 * i + j] >> 4 << 2 * i);
            to[128 + 32 * h + j] = high;
        }
    put_half(to + 208, d);
}

static Fit fit(dovetail::Q4_K, Sixteen& of) { return fit_with_minima(of); }
static Fit fit(dovetail::Q5_0, Sixteen& of) { return fit_symmetric<32>(of, 16.0f); }
static Fit fit(dovetail::Q6_K, Sixteen& of) { return fit_symmetric<16>(of, 32.0f); }
static Fit fit(dovetail::Q8_0, Sixteen&) { return {zero(), zero()}; }

// `count` blocks of the format, one behind the other.
template <class F>
static void search_blocks(const float* x, int64_t count, uint8_t* to) {
    constexpr int INPUTS = F::SCALES == dovetail::BYTES ? 16 : 32;
    constexpr int OWN = F::NUMBERS / INPUTS, WHOLE = LANES / OWN;  // lanes of a block, and blocks side by side
    Sixteen of;
    for (int64_t first = 0; first < count; first += WHOLE) {
        const int64_t lanes = (count - first < WHOLE ? count - first : WHOLE) * OWN;
        for (int i = 0; i < INPUTS; i++)
            for (int64_t lane = 0; lane < LANES; lane++) of.x[i][lane] = lane < lanes ? x[lane * INPUTS + i] : 0.0f;
        const Fit best = fit(F{}, of);
        alignas(64) float scale[LANES], more[LANES];
        store(scale, best.scale), store(more, best.more);
        Found found[LANES];
        for (int lane = 0; lane < lanes; lane++) found[lane] = {scale[lane], more[lane], x + lane * INPUTS};
        for (int lane = 0; lane < lanes; lane += OWN, to += F::SIZE) put_block(F{}, found + lane, to);
        x += WHOLE * F::NUMBERS;
    }
}

static bool search(int type, const float* x, int64_t numbers, uint8_t* to) {
    switch (type) {
        case dovetail::Q5_0::TYPE: search_blocks<dovetail::Q5_0>(x, numbers / 32, to); return true;
        case dovetail::Q8_0::TYPE: search_blocks<dovetail::Q8_0>(x, numbers / 32, to); return true;
        case dovetail::Q4_K::TYPE: search_blocks<dovetail::Q4_K>(x, numbers / 256, to); return true;
        case dovetail::Q6_K::TYPE: search_blocks<dovetail::Q6_K>(x, numbers / 256, to); return true;
        default: return false;
    }
}

}  // namespace DT_NS
