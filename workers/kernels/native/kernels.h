// What every instruction set implements, and what a matrix and a layer are. The functions of one set stand in one table; `active()` is the table in use.
#pragma once

#include <cstdint>

namespace dovetail {

enum Isa : int { PLAIN = 0, SSE41 = 1, AVX = 2, AVX2 = 3, AVX512 = 4, VNNI = 5, NEON = 6 };
enum Kind : int { FP32 = 0, FP16 = 1, BF16 = 2, INT8 = 3, CODES8 = 4, CODES4 = 5, CODES3 = 6, CODES2 = 7, BLOCKS = 8, EXACT_BLOCKS = 9 };

// A packed matrix [n out, k in]. The layout is the same for every instruction set.
struct Matrix {
    int32_t kind;
    int32_t n;
    int32_t k;
    int32_t reserved;
    const void* packed;
    const float* scales;  // INT8: [n], else null
    const float* bias;    // [n] or null
};

// A row of logits, and what its tokens are ranked by: with t = (logits - the largest of them) / temperature, or the logits where the temperature is 0, and of t only
// what top-k, top-p and min-p leave, divided by the share,
//   z = (t + noise) / sharpening
struct RankedRow {
    const float* logits;
    uint64_t word;  // from which the noise of each token follows, see protocol/noise.py
    int64_t top_k;  // 0: all
    double top_p;   // 1: all
    float least;    // of t, by min-p; -inf: none
    float temperature, share, sharpening;
    int64_t noisy;  // 0: there is no noise
};

// The `width` tokens of the largest z in each row, best first, the lower token first of equals, with their z or, where `shares` are asked for, the logarithms of the
// shares that e^z has in the sum over all of the row. Where there are fewer than `width` tokens above -inf, values are -inf; where a t is not a number, so are all. A
// first id of -1: rounding decides what top-p leaves of the row, and nothing is found.
struct Ranking {
    const RankedRow* rows;
    int64_t count, size, width, shares;
    int32_t* ids;   // [count, width]
    float* values;  // [count, width]
};

struct Layer;
struct Pass;
struct Norm;
struct Router;
struct Activator;

struct Kernels {
    Isa isa;
    // y [m, n] (rows y_stride floats apart) = x [m, k] (rows x_stride floats apart) W^T + bias
    void (*linear)(const Matrix& matrix, const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t m);
    // see layer.h
    void (*layer)(const Layer& layer, const Pass& pass);
    void (*place)(const Layer& layer, const Pass& pass, float* qkv);
    void (*attention)(const Layer& layer, const Pass& pass, const float* qkv, float* out);
    void (*norm)(int kind, const Norm& norm, const float* x, float* y, int64_t rows, int64_t width, float epsilon);
    void (*gate)(const Activator& activation, const float* x, float* y, int64_t rows, int64_t width);
    void (*route)(const Router& router, const float* x, int64_t rows, int32_t* ids, float* weights, float* margins);
    int64_t (*experts)(const Layer& layer, const float* x, float* y, int64_t rows);
    void (*latent)(const Layer& layer, const Pass& pass, float* given, float* queries, float* out);
    void (*likeliest)(const Ranking& ranking);
    // Whole blocks of a type of GGUF for so many numbers; false, and nothing happens, for a type that is not searched for.
    bool (*search)(int type, const float* x, int64_t numbers, uint8_t* to);
};

extern const Kernels plain_kernels;
#if defined(__x86_64__)
extern const Kernels sse41_kernels, avx_kernels, avx2_kernels, avx512_kernels, vnni_kernels;
#elif defined(__aarch64__)
extern const Kernels neon_kernels;
#endif

const Kernels& active();

// Whether weights are prefetched into L2 and no further. Intel's cores have few places for lines on their way to L1, and prefetches that wait for memory there
// keep the loads of the tiles waiting (Emerald Rapids, fp32 from memory, two builds called in turns in one process: 16 rows take 0.90, 8 rows 0.94, one row 0.93
// of the time).
extern const bool prefetches_to_l2;

// Whether the CPU of the AVX kernels has F16C, which came one generation later.
extern const bool has_f16c;

// Held during a call from outside: threads, scratch and the choice of the instruction set belong to one caller at a time.
struct Turn {
    Turn();
    ~Turn();
};

// Memory of at least `bytes`, 64-byte aligned, that stays valid until the next call with the same slot.
void* scratch(int slot, int64_t bytes);

}  // namespace dovetail
