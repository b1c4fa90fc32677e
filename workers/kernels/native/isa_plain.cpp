// The kernels in plain C++, for every machine and for none in particular.
#include "layer.h"
#include "pool.h"

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define DT_NS dovetail_plain
#include "all.inl"

namespace dovetail {
const Kernels plain_kernels = DT_NS::table(PLAIN);
}
