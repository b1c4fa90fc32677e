// The kernels for x86-64 with AVX, and F16C where available: Xeons E5 of 2012 and 2013, which have neither AVX2 nor FMA.
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
#pragma clang attribute push(__attribute__((target("avx"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx")
#endif

#define DT_NS dovetail_avx
#define DT_SSE 1
#define DT_AVX 1
#include "all.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace dovetail {
const Kernels avx_kernels = DT_NS::table(AVX);
}
#endif
