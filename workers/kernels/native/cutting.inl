// Which tokens of a row can be chosen: top-k, top-p and min-p, in this order, as `process_logits` of workers/speculation/sampling.py defines them.

namespace DT_NS {

constexpr int64_t STRETCH = 2048;  // tokens whose numbers lie in L1 together
constexpr float NEVER = -__builtin_inff();

// Sixteen floats of which n are left; the lanes behind them are -inf.
static inline F16 first_lanes(const float* p, int64_t n) {
    if (n >= LANES) return load(p);
    alignas(64) float t[LANES];
    store(t, set1(NEVER));
    store_first(t, load_first(p, (int)n), (int)n);
    return load(t);
}

// A row at its temperature: (logits - largest) / temperature, or with a temperature of 0 the logits.
struct Tempered {
    const float* logits;
    float largest, temperature;

    F16 at(int64_t i, int64_t n) const {
        const F16 z = first_lanes(logits + i, n);
        if (temperature == 0.0f) return z;
        return temperature == 1.0f ? sub(z, set1(largest)) : div(sub(z, set1(largest)), set1(temperature));
    }
};

static float largest_of(const Tempered& z, int64_t size) {
    F16 found = set1(NEVER);
    for (int64_t i = 0; i < size; i += LANES) found = max(z.at(i, size - i), found);
    return largest(found);
}

struct Weighed { float z; double weight; };

// The tokens of a row that can be chosen, in order, and room to look for them.
struct Kept {
    int64_t room, count;
    int32_t* ids;
    float* z;
    Weighed* weighed;
    F16 wrong;  // not a number where one z is none
};

// Of this thread.
static Kept& kept_here(int64_t size) {
    static thread_local Kept kept{};
    if (kept.room < size) {
        free(kept.weighed);
        const int64_t room = size + 1;  // a place is written before it is known whether it counts
        kept.weighed = (Weighed*)aligned_alloc(64, (room * (int64_t)(sizeof(Weighed) + 8) + 63) / 64 * 64);
        if (kept.weighed == nullptr) abort();
        kept.z = (float*)(kept.weighed + room), kept.ids = (int32_t*)(kept.z + room), kept.room = size;
    }
    kept.count = 0, kept.wrong = zero();
    return kept;
}

// Where the weights of numbers reach a target, the largest numbers first.
struct Edge {
    float least;  // this number's
    double above, each;  // the weight of the larger ones, and of every one that equals it
};

constexpr int BUCKETS = 2048;

// Leaves of many numbers those of the bucket that the edge is in, and returns the weight of all that are larger.
static double narrow(Weighed* of, int64_t& count, double target) {
    float low = of[0].z, high = of[0].z;
    for (int64_t i = 1; i < count; i++) low = of[i].z < low ? of[i].z : low, high = of[i].z > high ? of[i].z : high;
    const float scale = (float)(BUCKETS - 1) / (high - low);
    if (!(scale > 0.0f && scale < __builtin_inff())) return 0.0;
    const auto bucket = [&](const Weighed& own) { return (int)((high - own.z) * scale); };
    double weights[BUCKETS + 1] = {}, above = 0.0;
    for (int64_t i = 0; i < count; i++) weights[bucket(of[i])] += of[i].weight;
    int edge = 0;
    for (; edge < BUCKETS && above + weights[edge] < target; edge++) above += weights[edge];
    int64_t left = 0;
    for (int64_t i = 0; i < count; i++)
        if (bucket(of[i]) == edge) of[left++] = of[i];
    count = left;
    return above;
}

// By buckets, then by parts, as quicksort goes, but only where the edge is; -inf where all together do not reach the target.
static Edge edge_of(Weighed* of, int64_t count, double target) {
    double above = count > BUCKETS ? narrow(of, count, target) : 0.0;
    for (uint64_t turn = 1; count > 0; turn++) {
        const Weighed pivot = of[(turn * 0x9E3779B97F4A7C15u >> 32) % (uint64_t)count];
        int64_t larger = 0, equal = 0;  // of[0, larger) are, then [larger, larger + equal) are
        double weight = 0.0;
        for (int64_t i = 0; i < count; i++) {
            const Weighed own = of[i];
            if (own.z < pivot.z) continue;
            of[i] = of[larger + equal], of[larger + equal] = own;
            if (own.z == pivot.z) equal++;
            else weight += own.weight, of[larger + equal] = of[larger], of[larger++] = own;
        }
        if (above + weight >= target) {
            count = larger;
            continue;
        }
        if (above + weight + pivot.weight * (double)equal >= target) return {pivot.z, above + weight, pivot.weight};
        above += weight + pivot.weight * (double)equal, of += larger + equal, count -= larger + equal;
    }
    return {NEVER, above, 0.0};
}

// Only tokens of at least `least` stay, of those that equal it the first `equals`.
static void keep(Kept& kept, float least, int64_t equals) {
    int64_t count = 0;
    for (int64_t i = 0; i < kept.count; i++) {
        if (kept.z[i] < least || (kept.z[i] == least && equals-- <= 0)) continue;
        kept.z[count] = kept.z[i], kept.ids[count++] = kept.ids[i];
    }
    kept.count = count;
}

// Only the k largest stay, and what equals the last of them.
static void keep_largest(Kept& kept, int64_t k) {
    for (int64_t i = 0; i < kept.count; i++) kept.weighed[i] = {kept.z[i], 1.0};
    keep(kept, edge_of(kept.weighed, kept.count, (double)k).least, kept.count);
}

static inline bool cuts(const dovetail::RankedRow& row) { return row.temperature > 0.0f && (row.top_k > 0 || row.top_p < 1.0 || row.least > NEVER); }

// False: rounding decides about a token at the edge of top-p, and kept is of no use.
static bool cut(const dovetail::RankedRow& row, const Tempered& tempered, int64_t size, Kept& kept) {
    const int64_t k = row.top_k < size ? row.top_k : 0;
    float low = -__FLT_MAX__;  // nothing below it can be chosen
    if (k == 0) {
        // A token of the nucleus is followed by more than 1 - top_p of all weight, which is at least 1, and `size` tokens below this number weigh less.
        if (row.top_p < 1.0) low = (float)std::log((1.0 - row.top_p) / (double)size) - 0.01f;
        if (low < row.least) low = row.least;
    }
    int64_t most = 2 * k + STRETCH;
    double rest = 0.0;  // the weight of what is below it
    for (int64_t from = 0; from < size; from += STRETCH) {
        const int64_t stop = size - from < STRETCH ? size : from + STRETCH;
        F16 weight = zero();
        for (int64_t i = from; i < stop; i += LANES) {
            const F16 v = tempered.at(i, stop - i);
            kept.wrong = add(kept.wrong, where_less(v, set1(__builtin_inff()), zero(), v));
            if (k == 0 && row.top_p < 1.0) weight = add(weight, where_less(v, set1(low), exp(v), zero()));
            if (!any_less(set1(__builtin_nextafterf(low, NEVER)), v)) continue;
            alignas(64) float t[LANES];
            store(t, v);
            for (int64_t lane = 0; lane < LANES; lane++) {  // without a branch, which would be mispredicted
                kept.z[kept.count] = t[lane], kept.ids[kept.count] = (int32_t)(i + lane);
                kept.count += t[lane] >= low;
            }
        }
        rest += (double)sum(weight);
        if (k > 0 && kept.count > most) {
            keep_largest(kept, k);
            low = kept.z[0];
            for (int64_t i = 1; i < kept.count; i++) low = kept.z[i] < low ? kept.z[i] : low;
            most = 2 * kept.count + STRETCH;
        }
    }
    if (k > 0 && kept.count > k) keep_largest(kept, k);
    if (row.top_p < 1.0) {
        double total = rest;
        for (int64_t i = 0; i < kept.count; i++) kept.weighed[i] = {kept.z[i], std::exp((double)kept.z[i])}, total += kept.weighed[i].weight;
        const double target = row.top_p * total, error = 1e-10 * total + 1e-5 * rest;
        const Edge edge = edge_of(kept.weighed, kept.count, target);
        if (edge.least == NEVER) {
            if (target < edge.above + error) return false;
        } else {
            const int64_t equals = (int64_t)__builtin_ceil((target - edge.above) / edge.each);
            const double reached = edge.above + edge.each * (double)equals;
            if (target > reached - error || target < reached - edge.each + error) return false;
            keep(kept, edge.least, equals);
        }
    }
    keep(kept, row.least, kept.count);
    return true;
}

}  // namespace DT_NS
