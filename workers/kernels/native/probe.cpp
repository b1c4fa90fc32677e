// What this machine can do at best on the threads in use: arithmetic of the instructions that the kernels use, and reading memory. For `calibrate`.
#include "kernels.h"
#include "pool.h"

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// Keeps a value alive without storing it.
template <class T>
inline void keep(T& value) {
#if defined(__x86_64__)
    asm volatile("" : "+x"(value));
#elif defined(__aarch64__)
    asm volatile("" : "+w"(value));
#else
    asm volatile("" : "+m"(value));
#endif
}

enum Arithmetic : int { FP32_FMA = 0, INT8_DOT = 1, BF16_DOT = 2 };
constexpr int CHAINS = 12;  // enough for a latency of 5 cycles on two units, and within 16 registers beside the operands

// Each of these does `rounds` times one step of CHAINS independent sums, and returns how many operations a step has: a multiply and an add are two.

double plain_fma(int64_t rounds) {
    float sums[CHAINS] = {};
    for (int64_t r = 0; r < rounds; r++)
        for (int c = 0; c < CHAINS; c++) sums[c] = std::fma(sums[c], 0.5f, 1.0f);
    for (float& sum : sums) asm volatile("" : "+m"(sum));
    return 2.0 * CHAINS;
}

double plain_int8(int64_t rounds) {
    int32_t sums[CHAINS] = {};
    volatile int8_t seed = 3;
    const int8_t a = seed, b = static_cast<int8_t>(seed + 1);
    for (int64_t r = 0; r < rounds; r++)
        for (int c = 0; c < CHAINS; c++) {
            sums[c] += a * b;
            asm volatile("" : "+r"(sums[c]));
        }
    return 2.0 * CHAINS;
}

#if defined(__x86_64__)

// Without FMA: products and sums of doubles, each rounded to a float.
template <class Doubles>
inline __attribute__((always_inline)) double fused_by_doubles(int64_t rounds) {
    Doubles sums[CHAINS] = {};
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) {
            const Doubles sum = sums[c] * 0.5 + 1.0, large = sum * 0x1p29;
            sums[c] = large - (large - sum);
            keep(sums[c]);
        }
    }
    for (auto& sum : sums) keep(sum);
    return 2.0 * CHAINS * (sizeof(Doubles) / sizeof(double));
}

double sse_fma(int64_t rounds) { return fused_by_doubles<__m128d>(rounds); }
__attribute__((target("avx"))) double avx_fma(int64_t rounds) { return fused_by_doubles<__m256d>(rounds); }

__attribute__((target("ssse3"))) double sse_int8(int64_t rounds) {
    __m128i sums[CHAINS] = {}, a = _mm_set1_epi8(3), b = _mm_set1_epi8(4), ones = _mm_set1_epi16(1);
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) {
            keep(a);
            sums[c] = _mm_add_epi32(sums[c], _mm_madd_epi16(_mm_maddubs_epi16(a, b), ones));
        }
    }
    for (auto& sum : sums) keep(sum);
    return 2.0 * CHAINS * 16;
}

__attribute__((target("avx2,fma"))) double avx2_fma(int64_t rounds) {
    __m256 sums[CHAINS] = {}, half = _mm256_set1_ps(0.5f), one = _mm256_set1_ps(1.0f);
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) sums[c] = _mm256_fmadd_ps(sums[c], half, one);
    }
    for (auto& sum : sums) keep(sum);
    return 2.0 * CHAINS * 8;
}

// Without VNNI: pairs of bytes to 16 bits, pairs of those to 32, and the sum.
__attribute__((target("avx2"))) double avx2_int8(int64_t rounds) {
    __m256i sums[CHAINS] = {}, a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(4), ones = _mm256_set1_epi16(1);
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) {
            keep(a);
            sums[c] = _mm256_add_epi32(sums[c], _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
        }
    }
    for (auto& sum : sums) keep(sum);
    return 2.0 * CHAINS * 32;
}

__attribute__((target("avx512f"))) double avx512_fma(int64_t rounds) {
    __m512 sums[CHAINS] = {}, half = _mm512_set1_ps(0.5f), one = _mm512_set1_ps(1.0f);
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) sums[c] = _mm512_fmadd_ps(sums[c], half, one);
    }
    for (auto& sum : sums) asm volatile("" : "+v"(sum));
    return 2.0 * CHAINS * 16;
}

__attribute__((target("avx512f,avx512bw"))) double avx512_int8(int64_t rounds) {
    __m512i sums[CHAINS] = {}, a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(4), ones = _mm512_set1_epi16(1);
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) {
            asm volatile("" : "+v"(a));
            sums[c] = _mm512_add_epi32(sums[c], _mm512_madd_epi16(_mm512_maddubs_epi16(a, b), ones));
        }
    }
    for (auto& sum : sums) asm volatile("" : "+v"(sum));
    return 2.0 * CHAINS * 64;
}

__attribute__((target("avx512f,avx512vnni"))) double vnni_int8(int64_t rounds) {
    __m512i sums[CHAINS] = {}, a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(4);
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) sums[c] = _mm512_dpbusd_epi32(sums[c], a, b);
    }
    for (auto& sum : sums) asm volatile("" : "+v"(sum));
    return 2.0 * CHAINS * 64;
}

__attribute__((target("avx512f,avx512bf16"))) double avx512_bf16(int64_t rounds) {
    __m512 sums[CHAINS] = {};
    const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.5f));
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) sums[c] = _mm512_dpbf16_ps(sums[c], a, a);
    }
    for (auto& sum : sums) asm volatile("" : "+v"(sum));
    return 2.0 * CHAINS * 32;
}

__attribute__((target("avx2"))) void avx2_read(const char* from, int64_t bytes) {
    __m256i sums[8] = {};
    for (int64_t at = 0; at + 256 <= bytes; at += 256) {
        for (int line = 0; line < 4; line++) _mm_prefetch(from + at + 2048 + line * 64, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int c = 0; c < 8; c++) sums[c] = _mm256_xor_si256(sums[c], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at + c * 32)));
    }
    for (auto& sum : sums) keep(sum);
}

__attribute__((target("avx512f"))) void avx512_read(const char* from, int64_t bytes) {
    __m512i sums[8] = {};
    for (int64_t at = 0; at + 512 <= bytes; at += 512) {
        for (int line = 0; line < 8; line++) _mm_prefetch(from + at + 4096 + line * 64, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int c = 0; c < 8; c++) sums[c] = _mm512_xor_si512(sums[c], _mm512_loadu_si512(from + at + c * 64));
    }
    for (auto& sum : sums) asm volatile("" : "+v"(sum));
}

#elif defined(__aarch64__)

double neon_fma(int64_t rounds) {
    float32x4_t sums[CHAINS] = {}, half = vdupq_n_f32(0.5f), one = vdupq_n_f32(1.0f);
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) sums[c] = vfmaq_f32(one, sums[c], half);
    }
    for (auto& sum : sums) keep(sum);
    return 2.0 * CHAINS * 4;
}

// Without the dot product of newer cores: bytes to 16 bits, and pairs of those onto the sum.
double neon_int8(int64_t rounds) {
    int32x4_t sums[CHAINS] = {};
    int8x8_t a = vdup_n_s8(3), b = vdup_n_s8(4);
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++) {
            keep(a);
            sums[c] = vpadalq_s16(sums[c], vmull_s8(a, b));
        }
    }
    for (auto& sum : sums) keep(sum);
    return 2.0 * CHAINS * 8;
}

#endif

void plain_read(const char* from, int64_t bytes) {
    uint64_t sums[8] = {};
    for (int64_t at = 0; at + 64 <= bytes; at += 64) {
        uint64_t words[8];
        memcpy(words, from + at, sizeof words);
        for (int c = 0; c < 8; c++) sums[c] ^= words[c];
    }
    for (auto& sum : sums) asm volatile("" : "+m"(sum));
}

using Step = double (*)(int64_t rounds);
using Read = void (*)(const char* from, int64_t bytes);

Step step_of(int arithmetic) {
    const int isa = dovetail::active().isa;
#if defined(__x86_64__)
    if (arithmetic == BF16_DOT) return isa >= dovetail::AVX512 && __builtin_cpu_supports("avx512bf16") ? avx512_bf16 : nullptr;
    const bool bytes = arithmetic == INT8_DOT;
    switch (isa) {
        case dovetail::SSE41: return bytes ? sse_int8 : sse_fma;
        case dovetail::AVX: return bytes ? sse_int8 : avx_fma;
        case dovetail::AVX2: return bytes ? avx2_int8 : avx2_fma;
        case dovetail::AVX512: return bytes ? avx512_int8 : avx512_fma;
        case dovetail::VNNI: return bytes ? vnni_int8 : avx512_fma;
        default: return bytes ? plain_int8 : plain_fma;
    }
#else
    if (arithmetic == BF16_DOT) return nullptr;
#if defined(__aarch64__)
    if (isa == dovetail::NEON) return arithmetic == INT8_DOT ? neon_int8 : neon_fma;
#endif
    (void)isa;
    return arithmetic == INT8_DOT ? plain_int8 : plain_fma;
#endif
}

Read read_of() {
#if defined(__x86_64__)
    const int isa = dovetail::active().isa;
    return isa >= dovetail::AVX512 ? avx512_read : isa == dovetail::AVX2 ? avx2_read : plain_read;
#else
    return plain_read;
#endif
}

}  // namespace

extern "C" {

// Do `rounds` steps on every thread; the operations of all of them together, or 0 where the machine or the instruction set in use has no such arithmetic.
double dt_probe_arithmetic(int arithmetic, int64_t rounds) {
    const dovetail::Turn mine;
    const Step step = step_of(arithmetic);
    if (step == nullptr) return 0.0;
    struct {
        Step step;
        int64_t rounds;
        double operations;
        void operator()(int part, int) {
            const double each = step(rounds);
            if (part == 0) operations = each;
        }
    } body{step, rounds, 0.0};
    dovetail::parallel(body);
    return body.operations * static_cast<double>(rounds) * dovetail::threads();
}

// Read `bytes` of memory once, every thread its share.
void dt_probe_read(const void* memory, int64_t bytes) {
    const dovetail::Turn mine;
    struct {
        Read read;
        const char* memory;
        int64_t bytes;
        void operator()(int part, int parts) {
            const int64_t share = bytes / parts / 4096 * 4096;
            read(memory + part * share, share);
        }
    } body{read_of(), static_cast<const char*>(memory), bytes};
    dovetail::parallel(body);
}
}
