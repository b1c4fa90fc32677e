// How units of work go to the threads. Within a shard, threads take units as they come, so that one that is held up leaves the rest to the others. The weights
// of another shard lie in another node's memory, so a thread takes its units only if that shard is held up.
#include <atomic>

#include "shards.h"

namespace DT_NS {

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// So many units of columns for each thread.
constexpr int64_t UNITS = 16;

static inline int64_t threads_of(int shard) { return dovetail::first_part(shard + 1) - dovetail::first_part(shard); }

// A shard's range of some columns, cut into pieces.
struct Share {
    int64_t first, count, pieces;
    int64_t at(int64_t piece) const { return first + count * piece / pieces; }
};

// The share of a shard of the n columns of each of `turns` matrices.
static inline Share share_of(int64_t n, int shard, int64_t turns = 1) {
    const int64_t first = dovetail::share_begin(n, shard), count = dovetail::share_begin(n, shard + 1) - first;
    return {first, count, dovetail::threads() == 1 && turns == 1 ? smaller(count, 1) : smaller(count, (UNITS * threads_of(shard) + turns - 1) / turns)};
}

// What is next of a shard's units, on a cache line of its own.
struct alignas(64) Next {
    std::atomic<int64_t> unit{0};
};

// body(shard, unit, part) for each of the units(shard) units of every shard. A shard that has more than a unit for each of its threads left when another has
// none is held up: reading those units from the other node, at half the speed, takes no longer than waiting.
template <class Units, class Body>
static void take_shares(const Units& units, const Body& body) {
    Next next[dovetail::MOST_SHARDS];
    auto take = [&](int part, int) {
        const int own = dovetail::shard_of(part), count = dovetail::shards();
        for (int turn = 0; turn < count; turn++) {
            const int shard = (own + turn) % count;
            const int64_t n = units(shard), end = turn == 0 ? n : n - threads_of(shard);
            std::atomic<int64_t>& at = next[shard].unit;
            for (int64_t unit; at.load(std::memory_order_relaxed) < end && (unit = at.fetch_add(1, std::memory_order_relaxed)) < n;) body(shard, unit, part);
        }
    };
    dovetail::parallel(take);
}

// The same by the calling thread alone.
template <class Units, class Body>
static void take_all(const Units& units, const Body& body) {
    for (int shard = 0; shard < dovetail::shards(); shard++)
        for (int64_t unit = 0, n = units(shard); unit < n; unit++) body(shard, unit, 0);
}

// body(unit) for each of n units that read no weights.
template <class Body>
static void take_turns(int64_t n, const Body& body) {
    std::atomic<int64_t> next{0};
    auto take = [&](int, int) {
        for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < n;) body(unit);
    };
    dovetail::parallel(take);
}

// body(from, to) for ranges that make up the columns 0 .. n.
template <class Body>
static void in_pieces(int64_t n, const Body& body) {
    take_shares([&](int shard) { return share_of(n, shard).pieces; },
                [&](int shard, int64_t piece, int) {
                    const Share own = share_of(n, shard);
                    body(own.at(piece), own.at(piece + 1));
                });
}

// body(i, from, to) for ranges that make up the columns 0 .. n of each of `count` matrices.
template <class Body>
static void in_pieces_of_each(int64_t count, int64_t n, const Body& body) {
    take_shares([&](int shard) { return count * share_of(n, shard, count).pieces; },
                [&](int shard, int64_t unit, int) {
                    const Share own = share_of(n, shard, count);
                    body(unit / own.pieces, own.at(unit % own.pieces), own.at(unit % own.pieces + 1));
                });
}

}  // namespace DT_NS
