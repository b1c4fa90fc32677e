// The beginning of every source for a GPU: arithmetic in which each rounding is spelled out, and
// copies between memories. A compiler may contract or reorder nothing here or in what follows.
//
// Compiled by NVRTC for the card that is there (workers/devices/nvidia); in tests by g++
// behind tests/support/cuda/cpu.h. No headers are included.

typedef long long Int;

constexpr int PANEL = 48, VECTOR = 16;  // native/packing.h: outputs of a panel, and of a vector
constexpr float ROUNDER = 12582912.0f;  // packing.h

static __device__ int smaller(Int a, Int b) { return (int)(a < b ? a : b); }

// A kernel may start while the one before it on the stream still runs, and waits here until that
// one is done, so this comes before a kernel touches anything that another one reads or writes. The
// next kernel may start from here on; any earlier, it would only wait where this one is to compute.
static __device__ void start_early() {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#ifdef __CUDACC__
static __device__ float half_to_float(unsigned bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
}
static __device__ unsigned short half_of(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

// Four signed bytes of x times four of w, signed or not, added up.
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 610
static __device__ int dot_signed(unsigned x, unsigned w, int sum) {
    return __dp4a((int)x, (int)w, sum);
}
static __device__ int dot_codes(unsigned x, unsigned codes, int sum) {
    int result;
    asm("dp4a.s32.u32 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(codes), "r"(sum));
    return result;
}
#else
static __device__ int dot_signed(unsigned x, unsigned w, int sum) {
    for (int i = 0; i < 32; i += 8)
        sum += (int)(signed char)(x >> i & 255) * (int)(signed char)(w >> i & 255);
    return sum;
}
static __device__ int dot_codes(unsigned x, unsigned codes, int sum) {
    for (int i = 0; i < 32; i += 8)
        sum += (int)(signed char)(x >> i & 255) * (int)(codes >> i & 255);
    return sum;
}
#endif

// ---- rows as int8

// 127 / the largest magnitude, and its inverse (native/linear.inl, row_scale). Magnitudes are
// compared as integers: the same order, and NaN above all.
struct RowScale {
    float to, from;
};

static __device__ RowScale row_scale(unsigned most) {
    RowScale scale = {0.0f, 0.0f};
    const float size = __uint_as_float(most);
    if (most >= 0x7f800000u) scale.from = __uint_as_float(0x7fc00000u);  // nor is the result finite
    else if (size >= 1e-30f)
        scale.to = __fdiv_rn(127.0f, size), scale.from = __fdiv_rn(size, 127.0f);
    return scale;
}

static __device__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
static __device__ int rounded(float x, float to) {
    return (int)__fsub_rn(__fadd_rn(__fmul_rn(x, to), ROUNDER), ROUNDER);
}

static __device__ unsigned largest_of_warp(unsigned value) {
    for (int by = 16; by > 0; by /= 2) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, value, by);
        value = other > value ? other : value;
    }
    return value;
}

// ---- memory

// Reads of what is needed only once, which push nothing out of the nearest cache.
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 700
static __device__ unsigned streamed(const char* from) {
    unsigned word;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(from));
    return word;
}
static __device__ uint2 streamed_pair(const char* from) {
    uint2 pair;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(pair.x), "=r"(pair.y)
                 : "l"(from));
    return pair;
}
#else
static __device__ unsigned streamed(const char* from) { return *(const unsigned*)from; }
static __device__ uint2 streamed_pair(const char* from) { return *(const uint2*)from; }
#endif

// Copies into shared memory, 16 bytes at a time, which go on while the block computes.
// `wait_for_groups` returns once at most LEFT groups of copies are unfinished.
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
constexpr int SHARED_BYTES = 48 << 10;  // a block has that on every card
static __device__ void fetch(uint4* to, const void* from) {
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)),
        "l"(from)
        : "memory");
}
static __device__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
static __device__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
#else  // copied at once; blocks have less, so that several on a multiprocessor take turns waiting
constexpr int SHARED_BYTES = 16 << 10;
static __device__ void fetch(uint4* to, const void* from) { *to = *(const uint4*)from; }
static __device__ void end_group() {}
template <int LEFT>
static __device__ void wait_for_groups() {}
#endif
