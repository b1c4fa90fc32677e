// The kernels for x86-64 with AVX-512 and VNNI.
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
#pragma clang attribute push(__attribute__((target("avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#define DT_NS dovetail_vnni
#define DT_AVX512 1
#define DT_VNNI 1
#include "all.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace dovetail {
const Kernels vnni_kernels = DT_NS::table(VNNI);
}
#endif
