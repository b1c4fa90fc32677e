// The C face of the linears and of the ranking, and what all kernels share: the instruction set in use, the threads, scratch memory, and one caller at a time.
#include "blocks.h"
#include "kernels.h"
#include "packing.h"
#include "pool.h"
#include "shards.h"

#include <cstdlib>
#include <mutex>
#include <vector>

namespace dovetail {
namespace {

const Kernels* table_of(int isa) {
    switch (isa) {
        case PLAIN: return &plain_kernels;
#if defined(__x86_64__)
        case SSE41: return __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3") ? &sse41_kernels : nullptr;
        case AVX: return __builtin_cpu_supports("avx") ? &avx_kernels : nullptr;
        case AVX2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") ? &avx2_kernels : nullptr;
        case AVX512:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                           __builtin_cpu_supports("avx512vl") && table_of(AVX2) != nullptr
                       ? &avx512_kernels
                       : nullptr;
        case VNNI: return __builtin_cpu_supports("avx512vnni") && table_of(AVX512) != nullptr ? &vnni_kernels : nullptr;
#elif defined(__aarch64__)
        case NEON: return &neon_kernels;
#endif
        default: return nullptr;
    }
}

const Kernels* best() {
    for (const int isa : {NEON, VNNI, AVX512, AVX2, AVX, SSE41})
        if (const Kernels* table = table_of(isa)) return table;
    return &plain_kernels;
}

const Kernels* in_use = best();
std::mutex turn;

struct Buffer { void* memory = nullptr; int64_t bytes = 0; };
std::vector<Buffer> buffers;

}  // namespace

const Kernels& active() { return *in_use; }

#if defined(__x86_64__)
const bool prefetches_to_l2 = __builtin_cpu_is("intel"), has_f16c = __builtin_cpu_supports("f16c");
#else
const bool prefetches_to_l2 = false, has_f16c = false;
#endif

Turn::Turn() { turn.lock(); }
Turn::~Turn() { turn.unlock(); }

void* scratch(int slot, int64_t bytes) {
    if (static_cast<size_t>(slot) >= buffers.size()) buffers.resize(slot + 1);
    Buffer& buffer = buffers[slot];
    if (buffer.bytes < bytes) {
        free(buffer.memory);
        buffer.bytes = (bytes + 4095) / 4096 * 4096;
        buffer.memory = aligned_alloc(64, buffer.bytes);
        if (buffer.memory == nullptr) abort();  // as the kernel's own overcommit would
    }
    return buffer.memory;
}

}  // namespace dovetail

using namespace dovetail;

extern "C" {

// The instruction sets that this build and this machine have, as bits 1 << Isa.
int dt_isas() {
    int bits = 0;
    for (int isa = PLAIN; isa <= NEON; isa++)
        if (table_of(isa) != nullptr) bits |= 1 << isa;
    return bits;
}
int dt_best_isa() { return best()->isa; }
int dt_isa() { return in_use->isa; }

// -1, and nothing changes, where the machine lacks it.
int dt_use_isa(int isa) {
    const Turn mine;
    const Kernels* const table = table_of(isa);
    if (table == nullptr) return -1;
    in_use = table;
    return isa;
}

void dt_set_threads(int count) {
    const Turn mine;
    set_threads(count);
}
int dt_threads() { return threads(); }

// Divides the threads among these shards; with a count of 0 nothing is divided any more. Returns 0, or an errno, and then nothing has changed.
int dt_set_shards(const ShardCores* wanted, int count) {
    const Turn mine;
    const int error = declare_shards(wanted, count);
    if (error == 0) set_threads(threads());
    return error;
}
int dt_shards() { return shards(); }
int dt_settle() { return settle(0); }

// Neither shares anything with another caller.
void dt_spread(const Spread* memory, int64_t page) { spread(*memory, page); }
void dt_spread_matrices(const Matrix* matrix, int64_t items, int64_t stride, int64_t page) { spread_matrices(*matrix, items, stride, page); }
void dt_placed(Placed* found) { *found = placed(); }

int64_t dt_packed_bytes(int kind, int64_t n, int64_t k) { return bits_of(kind) != 0 ? codes_bytes(kind, n, k) : packed_bytes(kind, n, k); }

void dt_pack(int kind, int stored, const void* source, int64_t first_row, int64_t count, int64_t n, int64_t k, void* packed, float* scales) {
    const Turn mine;
    pack(kind, stored, source, first_row, count, n, k, packed, scales);
}

// Neither shares anything with another caller.
void dt_pack_alone(int kind, int stored, const void* source, int64_t first_row, int64_t count, int64_t n, int64_t k, void* packed, float* scales) {
    pack_alone(kind, stored, source, first_row, count, n, k, packed, scales);
}
void dt_unpack_row(const Matrix* matrix, int64_t row, float* out) { unpack_row(*matrix, row, out); }

// Of a part of a matrix of blocks: ggml's type, or of plain numbers -1 - Kind. 0: there are no kernels for the type.
int64_t dt_part_bytes(int type, int64_t n, int64_t k) { return part_bytes(type, n, k); }

// None of these shares anything with another caller.
void dt_pack_blocks(int type, const uint8_t* source, int64_t first, int64_t count, int64_t k, char* part) { pack_blocks(type, source, first, count, k, part); }
int64_t dt_wrong_row(int type, const uint8_t* source, int64_t count, int64_t k) { return wrong_row(type, source, count, k); }
void dt_unpack_blocks(int type, const uint8_t* source, int64_t count, int64_t k, float* out) { unpack_blocks(type, source, count, k, out); }

// Shares nothing with another caller either. 0: the type is not searched for.
int dt_search(int type, const float* x, int64_t numbers, uint8_t* to) { return active().search(type, x, numbers, to); }

void dt_pack_codes(
    int kind, const uint8_t* codes, const uint16_t* scales, const uint16_t* offsets, int64_t first_row, int64_t count, int64_t k, void* packed) {
    const Turn mine;
    pack_codes(kind, codes, scales, offsets, first_row, count, k, packed);
}

void dt_linear(const Matrix* matrix, const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t rows) {
    const Turn mine;
    active().linear(*matrix, x, x_stride, y, y_stride, rows);
}
void dt_rank(const Ranking* ranking) {
    const Turn mine;
    active().likeliest(*ranking);
}
}
