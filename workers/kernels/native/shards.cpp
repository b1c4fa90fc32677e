#include "shards.h"

#include "blocks.h"
#include "packing.h"

#include <atomic>
#include <cerrno>
#include <thread>
#include <vector>

#include <sys/syscall.h>
#include <unistd.h>

namespace dovetail {
namespace {

constexpr int BIND = 2;                 // of set_mempolicy(2)
constexpr int64_t SMALL_PAGE = 4096;    // or a part of one
constexpr int64_t LOOKED_AFTER = 61, MOST_LOOKED = 256;
constexpr int WORD = 8 * sizeof(unsigned long);

using Mask = std::vector<unsigned long>;

struct Shard {
    Mask cores;
    int count;
    int node;
};

std::vector<Shard>& declared = *new std::vector<Shard>;  // never destroyed, as threads are not: see pool.cpp
Mask& before = *new Mask;                                // the cores of the thread that declared them
int first_parts[MOST_SHARDS + 1] = {0, 1};
std::atomic<int64_t> looked{0}, home{0};
std::atomic<int> refused{0};

void set_bit(Mask& mask, int bit) {
    if (mask.size() <= static_cast<size_t>(bit / WORD)) mask.resize(bit / WORD + 1);
    mask[bit / WORD] |= 1ul << bit % WORD;
}

int bind_cores(const Mask& cores) { return syscall(SYS_sched_setaffinity, 0, cores.size() * sizeof(long), cores.data()) < 0 ? errno : 0; }

Mask cores_of_this_thread() {
    Mask mask(1024 / WORD);
    for (;;) {
        const long bytes = syscall(SYS_sched_getaffinity, 0, mask.size() * sizeof(long), mask.data());
        if (bytes > 0) return Mask(mask.begin(), mask.begin() + bytes / sizeof(long));
        if (errno != EINVAL) return {};
        mask.resize(2 * mask.size());
    }
}

// Has this thread take memory from a node, if the system permits a policy.
void bind_memory(int node) {
    Mask nodes;
    set_bit(nodes, node);
    if (syscall(SYS_set_mempolicy, BIND, nodes.data(), nodes.size() * WORD + 1) < 0) refused = errno;
}

// Counts which of some pages lie on their node, if the system tells.
void look(std::vector<void*>& pages, int node) {
    std::vector<int> found(pages.size());
    if (syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, found.data(), 0) < 0) return;
    for (const int at : found) {
        if (at < 0) continue;
        looked++;
        home += at == node;
    }
}

// Touches the pages of one shard.
struct Toucher {
    const Spread& memory;
    int64_t page;
    std::vector<void*> sample;
    int64_t touched;

    // The pages whose middle lies in low .. high. from .. to is all of the contiguous memory: of a page at its ends only the part in there counts.
    void touch(const char* from, const char* to, char* low, const char* high) {
        for (uintptr_t p = (uintptr_t)low / page * page; p < (uintptr_t)high; p += page) {
            uintptr_t middle = p + page / 2;
            if (middle < (uintptr_t)from) middle = (uintptr_t)from;
            if (middle >= (uintptr_t)to) middle = (uintptr_t)to - 1;
            if (middle < (uintptr_t)low || middle >= (uintptr_t)high) continue;
            touch_page(p < (uintptr_t)low ? low : (char*)p, p + page < (uintptr_t)high ? (char*)p + page : high);
        }
    }

    void touch_page(char* low, const char* high) {
        for (char* p = low; p < high; p = (char*)((uintptr_t)p / SMALL_PAGE * SMALL_PAGE + SMALL_PAGE)) {
            *(volatile char*)p = 0;
            if (touched++ % LOOKED_AFTER == 0 && (int64_t)sample.size() < MOST_LOOKED) sample.push_back((void*)((uintptr_t)p / SMALL_PAGE * SMALL_PAGE));
        }
    }

    void touch_shard(int shard) {
        const Spread& m = memory;
        const int64_t low = within(share_begin(m.all, shard)), high = within(share_begin(m.all, shard + 1));
        if (low >= high) return;
        for (int64_t item = 0; item < m.items; item++) {
            char* const at = m.start + item * m.stride;
            const int64_t end = m.end ? m.end : m.count * m.bytes;
            if (m.used == m.bytes) touch(at, at + end, at + low * m.bytes, at + (high * m.bytes < end ? high * m.bytes : end));
            else
                for (int64_t unit = low; unit < high; unit++) touch(at + unit * m.bytes, at + unit * m.bytes + m.used, at + unit * m.bytes, at + unit * m.bytes + m.used);
        }
    }

    int64_t within(int64_t unit) const { return unit < memory.first ? 0 : unit - memory.first < memory.count ? unit - memory.first : memory.count; }
};

void spread_plain(const Matrix& m, int64_t items, int64_t stride, int64_t page) {
    const int64_t panels = panels_of(m.n), bytes = PANEL / VECTOR * steps_of(m.kind, m.k) * vector_bytes(m.kind);
    spread({(char*)m.packed, items, stride, panels, 0, panels, bytes, bytes, weights_bytes(m.kind, m.n, m.k)}, page);
}

void spread_parts(const Matrix& m, int64_t items, int64_t stride, int64_t page) {
    const Parts& parts = parts_of(m);
    for (int64_t i = 0; i < parts.count; i++) {
        const Part& part = parts.part[i];
        char* const at = (char*)m.packed + part.offset;
        const int64_t bytes = part.type < 0 ? 0 : part_bytes(part.type, VECTOR, m.k);
        if (part.type < 0) spread_plain({-1 - part.type, part.count, m.k, 0, at, nullptr, nullptr}, items, stride, page);
        else spread({at, items, stride, parts.vectors, part.vectors, padded(part.count) / VECTOR, bytes, bytes, 0}, page);
    }
}

}  // namespace

int declare_shards(const ShardCores* shards, int count) {
    std::vector<Shard> wanted;
    for (int i = 0; i < count; i++) {
        wanted.push_back({{}, shards[i].count, shards[i].node});
        for (int32_t c = 0; c < shards[i].count; c++) set_bit(wanted.back().cores, shards[i].cores[c]);
        int error = 0;
        std::thread([&] { error = bind_cores(wanted.back().cores); }).join();
        if (error != 0) return error;
    }
    if (declared.empty()) before = cores_of_this_thread();
    else if (wanted.empty()) bind_cores(before);
    declared = std::move(wanted);
    looked = home = 0;
    refused = 0;
    return 0;
}

void divide_threads(int threads) {
    int64_t all = 0, cores = 0;
    for (const Shard& shard : declared) all += shard.count;
    first_parts[0] = 0;
    for (int i = 0; i < shards(); i++) {
        cores += declared.empty() ? 1 : declared[i].count;
        first_parts[i + 1] = declared.empty() ? threads : static_cast<int>((threads * cores + all - 1) / all);
    }
}

int shards() { return declared.empty() ? 1 : static_cast<int>(declared.size()); }
int first_part(int shard) { return first_parts[shard]; }
int shard_of(int part) {
    int shard = 0;
    while (part >= first_parts[shard + 1]) shard++;
    return shard;
}
int64_t share_begin(int64_t n, int shard) { return n * first_parts[shard] / first_parts[shards()]; }
int settle(int part) { return declared.empty() ? 0 : bind_cores(declared[shard_of(part)].cores); }

// A thread for each shard, since a memory policy belongs to a thread, and so do its cores, which decide where no policy is permitted.
void spread(const Spread& memory, int64_t page) {
    if (declared.empty()) return;
    std::vector<std::thread> threads;
    for (int shard = 0; shard < shards(); shard++)
        threads.emplace_back([&memory, page, shard] {
            const Shard& own = declared[shard];
            bind_cores(own.cores);
            if (own.node >= 0) bind_memory(own.node);
            Toucher toucher{memory, page, {}, 0};
            toucher.touch_shard(shard);
            if (own.node >= 0) look(toucher.sample, own.node);
        });
    for (std::thread& thread : threads) thread.join();
}

void spread_matrices(const Matrix& m, int64_t items, int64_t stride, int64_t page) {
    if (declared.empty()) return;
    if (m.kind == BLOCKS || m.kind == EXACT_BLOCKS) return spread_parts(m, items, stride, page);
    if (bits_of(m.kind) == 0) return spread_plain(m, items, stride, page);
    const int64_t vectors = padded(m.n) / VECTOR, bytes = groups_of(m.k) * block_bytes(bits_of(m.kind));
    spread({(char*)m.packed, items, stride, vectors, 0, vectors, bytes, bytes, 0}, page);
}

Placed placed() { return {looked, home, refused, 0}; }

}  // namespace dovetail
