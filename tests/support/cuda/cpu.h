// CUDA on a CPU, for tests: put before a source of workers/kernels/cuda by g++ (-include). A block's threads are fibers of one thread of the system, which
// go on in the order of their numbers to the next barrier or shuffle; blocks come one after the other. What one thread writes between two barriers the next
// one sees at once: a barrier that is missing shows where a later thread writes what an earlier one reads, and in DT_BACKWARDS the other way round.
#undef _FORTIFY_SOURCE  // which forbids longjmp to another stack
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <setjmp.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

struct Index {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(8) float2 {
    float x, y;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static Index threadIdx, blockIdx, gridDim;

// ---- numbers, each rounded as its name says

static inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline float __int2float_rn(int a) { return (float)a; }
static inline float half_to_float(unsigned bits) {
    if ((bits & 0x7c00u) == 0x7c00u) return __uint_as_float((bits & 0x8000u) << 16 | 0x7f800000u | (bits & 0x3ffu) << 13);
    const float size = __uint_as_float((bits & 0x7fffu) << 13) * __uint_as_float(0x77800000u);
    return bits & 0x8000u ? -size : size;
}
// Rounds a number that is no larger than the largest half to the nearest half, of two to the even one.
static inline unsigned short half_of(float value) {
    const unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return 0x7fff;
    if (size < 0x38800000u) return (unsigned short)(sign | (unsigned)std::nearbyint(__uint_as_float(size) * 16777216.0f));  // in steps of 2^-24
    return (unsigned short)(sign | ((size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13));
}

// ---- threads

namespace cpu {

constexpr size_t STACK_BYTES = 64 << 10;

// A fiber is begun once, and then runs a thread of each block. Fibers change by _longjmp, which asks nothing of the kernel, as swapcontext does for signals.
struct Fiber {
    jmp_buf place;
    bool begun = false;
    std::vector<char> stack = std::vector<char>(STACK_BYTES);
    bool waiting, done;  // waiting: at a barrier
    unsigned turn;       // of exchanges
    unsigned takes;      // of a chain
};

static std::vector<Fiber> fibers;
static jmp_buf scheduler;
static unsigned current, exchanged[2][1024][6], arrivals[32];
static void (*function)(int64_t, ...);
static const int64_t* arguments;

static void pause() {
    if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
}

static void run_threads() {
    using Int = int64_t;
    for (;; pause()) {
        const int64_t* a = arguments;
        ((void (*)(Int, Int, Int, Int, Int, Int, Int, Int, Int, Int, Int, Int, Int, Int, Int, Int, Int, Int))function)(
            a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16], a[17]);
        fibers[current].done = true;
    }
}

static void go_on(Fiber& fiber) {
    if (_setjmp(scheduler) != 0) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = fiber.stack.data();
    start.uc_stack.ss_size = fiber.stack.size();
    makecontext(&start, run_threads, 0);
    setcontext(&start);
}

// Every thread of a block, to its next pause; past a barrier when all are there. False if none is left.
static bool advance(unsigned threads, bool backwards) {
    bool left = false, ran = false;
    for (unsigned i = 0; i < threads; i++) {
        current = backwards ? threads - 1 - i : i;
        Fiber& fiber = fibers[current];
        if (fiber.done) continue;
        left = true;
        if (fiber.waiting) continue;
        ran = true;
        threadIdx = {current, 0, 0};
        go_on(fiber);
    }
    if (!ran)
        for (unsigned i = 0; i < threads; i++) fibers[i].waiting = false;
    return left;
}

// Show others COUNT numbers, and see theirs: [thread][number].
template <int COUNT>
static const unsigned (*show(const unsigned (&values)[COUNT]))[6] {
    auto* const place = exchanged[fibers[current].turn++ % 2];  // the next exchange has another one, as some threads are there before others have read
    for (int i = 0; i < COUNT; i++) place[current][i] = values[i];
    pause();
    return place;
}

static unsigned exchange(unsigned value, unsigned from) { return show<1>({value})[from][0]; }

// sums [16 x 8] += codes [16 x 16 STEPS] times values of a warp, whose lane 4 i + j has four codes of each of the rows i and i + 8 at inputs 4 j (and 16 + 4 j),
// as many values of column i, and the sums of those rows with columns 2 j and 2 j + 1.
template <bool SIGNED, int STEPS>
static void multiply(int* sums, const unsigned* first, const unsigned* second, const unsigned* values) {
    unsigned own[6] = {};
    for (int i = 0; i < STEPS; i++) own[i] = first[i], own[2 + i] = second[i], own[4 + i] = values[i];
    const unsigned(*const all)[6] = show(own);
    const unsigned warp = current / 32 * 32, row = current % 32 / 4, column = current % 4 * 2;
    for (unsigned i = 0; i < 4; i++)
        for (unsigned lane = 0; lane < 4; lane++)
            for (int step = 0; step < STEPS; step++)
                for (int at = 0; at < 32; at += 8) {
                    const unsigned code = all[warp + 4 * row + lane][2 * (i / 2) + step] >> at & 255u;
                    const unsigned value = all[warp + 4 * (column + i % 2) + lane][4 + step] >> at & 255u;
                    sums[i] += (SIGNED ? (int)(int8_t)code : (int)code) * (int)(int8_t)value;
                }
}

}  // namespace cpu

static inline void __syncthreads() {
    cpu::fibers[cpu::current].waiting = true;
    cpu::pause();
}

static inline unsigned __shfl_xor_sync(unsigned, unsigned value, int by) { return cpu::exchange(value, threadIdx.x ^ (unsigned)by); }
static inline void __syncwarp() { cpu::exchange(0, threadIdx.x); }
static inline unsigned __shfl_sync(unsigned, unsigned value, int lane) { return cpu::exchange(value, threadIdx.x / 32 * 32 + (unsigned)lane); }

template <bool SIGNED>
static void multiply_32(int* sums, const unsigned* first, const unsigned* second, const unsigned* values) {
    cpu::multiply<SIGNED, 2>(sums, first, second, values);
}
template <bool SIGNED>
static void multiply_16(int* sums, unsigned first, unsigned second, unsigned value) {
    cpu::multiply<SIGNED, 1>(sums, &first, &second, &value);
}

// A warp waits until all threads of another one have handed over to it once more.
static inline void hand_over_chain(int warp) { cpu::arrivals[warp]++; }
static inline void wait_for_chain(int warp) {
    cpu::Fiber& fiber = cpu::fibers[cpu::current];
    fiber.takes++;
    while (cpu::arrivals[warp] < 32 * fiber.takes) cpu::pause();
}

// Run a kernel that takes up to 18 addresses or integers.
extern "C" void launch(void* function, const int64_t* arguments, int64_t columns, int64_t rows, int64_t threads) {
    const bool backwards = getenv("DT_BACKWARDS") != nullptr;
    gridDim = {(unsigned)columns, (unsigned)rows, 1};
    cpu::function = (void (*)(int64_t, ...))function;
    cpu::arguments = arguments;
    if (cpu::fibers.size() < (size_t)threads) cpu::fibers = std::vector<cpu::Fiber>(threads);
    for (int64_t y = 0; y < rows; y++)
        for (int64_t x = 0; x < columns; x++) {
            blockIdx = {(unsigned)x, (unsigned)y, 0};
            for (unsigned& count : cpu::arrivals) count = 0;
            for (int64_t i = 0; i < threads; i++) {
                cpu::Fiber& fiber = cpu::fibers[i];
                fiber.waiting = fiber.done = false;
                fiber.turn = fiber.takes = 0;
            }
            while (cpu::advance((unsigned)threads, backwards)) {
            }
        }
}
