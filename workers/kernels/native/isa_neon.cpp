// The kernels for aarch64.
#if defined(__aarch64__)
#include "layer.h"
#include "pool.h"

#include <arm_neon.h>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define DT_NS dovetail_neon
#define DT_NEON 1
#include "all.inl"

namespace dovetail {
const Kernels neon_kernels = DT_NS::table(NEON);
}
#endif
