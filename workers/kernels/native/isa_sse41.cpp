// The kernels for x86-64 with SSE4.1: what Xeons of 2008 to 2011 have.
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
#pragma clang attribute push(__attribute__((target("sse4.1,ssse3"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("sse4.1,ssse3")
#endif

#define DT_NS dovetail_sse41
#define DT_SSE 1
#include "all.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace dovetail {
const Kernels sse41_kernels = DT_NS::table(SSE41);
}
#endif
