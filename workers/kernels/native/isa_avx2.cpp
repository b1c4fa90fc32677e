// The kernels for x86-64 with AVX2, FMA and F16C.
#if defined(__x86_64__)
#include "layer.h"
#include "pool.h"

#include <immintrin.h>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define DT_NS dovetail_avx2
#define DT_AVX2 1
#include "all.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace dovetail {
const Kernels avx2_kernels = DT_NS::table(AVX2);
}
#endif
