// Attention over latents: of a row a cache holds one latent and one rotated key, which all heads share, and no key or value of a head.
//
// A head's key would be a matrix times the latent, and so would its value. A query goes through the first matrix in its place, once, and what was attended to, a
// sum of latents, through the second. So attention is that of many query heads over one key head, whose keys are rows [latent | rotated key] and whose values are
// the latents. All of a row's numbers follow from the row and the slots that it sees, in the orders of `linear` and `attention`.

namespace DT_NS {

constexpr int LATENT_SCRATCH = 7;

struct LatentDesk {
    float* wide;     // [rows, heads (plain + rotary_dim)]: queries, where a matrix makes them
    float* queries;  // [rows, heads head_dim], which go over the cache
    float* mixed;    // [rows, heads rank]
    Product* products;
    char* packed;
};

static LatentDesk latent_desk(const dovetail::Layer& l, int64_t rows) {
    const dovetail::Latent& a = *l.latent;
    const int64_t chunk = l.heads * smaller(rows, CHUNK);
    const int64_t wide = rows * a.query_up.n, queries = rows * l.heads * l.head_dim, numbers = round_up(wide + queries + rows * l.heads * a.rank, LANES);
    const int64_t bytes = l.heads * (int64_t)sizeof(Product) + chunk * larger(row_bytes(*a.key_up), row_bytes(*a.value_up));
    float* memory = (float*)dovetail::scratch(LATENT_SCRATCH, numbers * (int64_t)sizeof(float) + bytes);
    LatentDesk desk = {memory, memory + wide, memory + wide + queries, (Product*)(memory + numbers), nullptr};
    desk.packed = (char*)(desk.products + l.heads);
    return desk;
}

// Rows of numbers, `stride` from row to row; those of a head are `step` behind those of the head before it.
struct Heads {
    float* at;
    int64_t stride, step;
};

// Each head of x by the matrix of that head.
static void by_head(const dovetail::Layer& l, const dovetail::Matrix* matrices, const Heads& x, const Heads& y, int64_t rows, const LatentDesk& desk) {
    for (int64_t from = 0; from < rows; from += CHUNK) {
        const int64_t count = smaller(CHUNK, rows - from);
        for (int64_t head = 0; head < l.heads; head++) {
            const float* own = x.at + from * x.stride + head * x.step;
            float* to = y.at + from * y.stride + head * y.step;
            desk.products[head] = {matrices + head, own, x.stride, to, y.stride, count, desk.packed + head * count * row_bytes(*matrices)};
        }
        run_products(desk.products, l.heads);
    }
}

// The latent of a row gets its norm and the key its rotation, in place; both go into the cache.
static void place_latent(const dovetail::Layer& l, const dovetail::Pass& pass, int64_t row, float* given) {
    const dovetail::Latent& a = *l.latent;
    const int64_t half = l.rotary_dim / 2, position = pass.positions[row];
    rms_norm(given, a.latent_norm.weight, given, a.rank, a.epsilon);
    if (l.cosines) rotate(given + a.rank, l.cosines + position * half, l.sines + position * half, l.rotary_dim);
    const dovetail::Segment* s = pass.segments;
    while (row >= s->first_row + s->count) s++;
    const int64_t slot = s->start + row - s->first_row;
    with_numbers(*s, [&](auto*, auto* values) {
        using K = std::remove_pointer_t<decltype(values)>;
        put_head(values + head_offset<K>(l, *s, 0) + slot * stored<K>(l.head_dim), 1, given, l.head_dim);
    });
}

// The rotated ends of a row's queries go behind the numbers that meet latents; all of a query grows with its position.
static void place_ends(const dovetail::Layer& l, int64_t position, float* x, float* queries) {
    const dovetail::Latent& a = *l.latent;
    const int64_t half = l.rotary_dim / 2, step = a.plain + l.rotary_dim;
    for (int64_t head = 0; head < l.heads; head++, x += step) {
        float* end = queries + head * l.head_dim + a.rank;
        if (l.query_factors) multiply(x, l.query_factors[position], step);
        memcpy(end, x + a.plain, (size_t)l.rotary_dim * sizeof(float));
        if (l.cosines) rotate(end, l.cosines + position * half, l.sines + position * half, l.rotary_dim);
    }
}

// given [rows, qkv.n] becomes out [rows, heads value_dim]; `queries` [rows, heads head_dim] are left where the caller wants them, or nowhere.
static void latent(const dovetail::Layer& l, const dovetail::Pass& pass, float* given, float* queries, float* out) {
    const dovetail::Latent& a = *l.latent;
    const LatentDesk desk = latent_desk(l, pass.rows);
    const int64_t rows = pass.rows, width = l.qkv.n, own = width - l.head_dim, step = a.plain + l.rotary_dim;
    Heads wide = {given, width, step};
    const Heads absorbed = {queries ? queries : desk.queries, (int64_t)l.heads * l.head_dim, l.head_dim};
    const Heads mixed = {desk.mixed, (int64_t)l.heads * a.rank, a.rank}, result = {out, (int64_t)l.heads * a.value_dim, a.value_dim};
    if (a.query_up.packed) {
        if (a.query_norm.weight)
            each(rows, rows * own, [&](int64_t row) { rms_norm(given + row * width, a.query_norm.weight, given + row * width, own, a.epsilon); });
        linear(a.query_up, given, width, desk.wide, a.query_up.n, rows);
        wide = {desk.wide, a.query_up.n, step};
    }
    each(rows, rows * (l.heads * step + l.head_dim), [&](int64_t row) {
        place_latent(l, pass, row, given + row * width + own);
        place_ends(l, pass.positions[row], wide.at + row * wide.stride, absorbed.at + row * absorbed.stride);
    });
    by_head(l, a.key_up, wide, absorbed, rows, desk);
    attention(l, pass, absorbed.at, mixed.at);
    by_head(l, a.value_up, mixed, result, rows, desk);
}

}  // namespace DT_NS
