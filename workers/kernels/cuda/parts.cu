// What happens to the rows of a decoder layer between its products, on a GPU: a norm, the rotation
// of queries and keys and their way into a cache, and the gate of an MLP. Each is one launch where
// torch's operations are two to eleven, which cost more than the numbers that they move.
//
// A row has the same bytes whatever its neighbours are: its sums are added up in an order that
// depends on its width alone. Every rounding is spelled out.
//
// Compiled behind numbers.cu.

constexpr int NORM_THREADS = 512, TURN_THREADS = 128, GATE_THREADS = 256;
constexpr int WARP = 32, HELD = 16;  // numbers of a thread of a norm
constexpr int PLACE = 3;             // numbers of a place
constexpr float MOST_HALF = 65504.0f;

static __device__ float sum_of_warp(float value) {
    for (int by = WARP / 2; by > 0; by /= 2)
        value = __fadd_rn(
            value, __uint_as_float(__shfl_xor_sync(0xffffffffu, __float_as_uint(value), by)));
    return value;
}

static __device__ float sum_of_block(float value, float* of_warps) {
    value = sum_of_warp(value);
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = value;
    __syncthreads();
    float sum = of_warps[0];
    for (int warp = 1; warp < NORM_THREADS / WARP; warp++) sum = __fadd_rn(sum, of_warps[warp]);
    return sum;
}

static __device__ float inverse_root(float mean, Int epsilon) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, __uint_as_float((unsigned)epsilon))));
}

// y = norm of x [rows, width], a block a row: by root mean square, or where `centred` by mean and
// variance. `bias`: [width] or null; `update`: [rows, width], which is added to x first, or null. A
// thread holds its numbers in registers, so that memory is waited for once.
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    norm_rows(float* x, const float* update, const float* weight, const float* bias, float* y,
              Int width, Int centred, Int epsilon) {
    __shared__ float of_warps[2][NORM_THREADS / WARP];
    start_early();
    const Int first = (Int)blockIdx.x * width, thread = threadIdx.x;
    float values[HELD], weights[HELD], mean = 0.0f, sum = 0.0f;
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        const Int i = thread + j * NORM_THREADS;
        values[j] = i < width ? x[first + i] : 0.0f;
        weights[j] = i < width ? weight[i] : 0.0f;
        if (update == nullptr || i >= width) continue;
        values[j] = __fadd_rn(values[j], update[first + i]);
        x[first + i] = values[j];
    }
    if (centred) {
#pragma unroll
        for (int j = 0; j < HELD; j++) sum = __fadd_rn(sum, values[j]);
        mean = __fdiv_rn(sum_of_block(sum, of_warps[0]), (float)width);
        sum = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        if (thread + j * NORM_THREADS < width) values[j] = __fsub_rn(values[j], mean);
        sum = __fmaf_rn(values[j], values[j], sum);
    }
    const float factor =
        inverse_root(__fdiv_rn(sum_of_block(sum, of_warps[1]), (float)width), epsilon);
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        const Int i = thread + j * NORM_THREADS;
        if (i >= width) continue;
        const float value = __fmul_rn(__fmul_rn(values[j], factor), weights[j]);
        y[first + i] = bias == nullptr ? value : __fadd_rn(value, bias[i]);
    }
}

static __device__ void store(void* to, Int at, float value, bool halves) {
    if (!halves) {
        ((float*)to)[at] = value;
        return;
    }
    const float most = value > MOST_HALF ? MOST_HALF : value;
    ((unsigned short*)to)[at] = half_of(most < -MOST_HALF ? -MOST_HALF : most);
}

// The heads of a row of qkv [rows, heads + 2 kv_heads, width], a warp a head. Queries and keys are
// normed where there are weights [width], and the pairs (j, j + half) turned by the angles [rows,
// half]; queries go to query [heads, rows, width], keys and values to their row's slot of
// [kv_heads, slots, width], whose heads lie `apart`, as halves or fp32. With `places` [rows] these
// lie in caches of their own, behind `apart` heads, keys first: {address, slots of a head, ...}.
extern "C" __global__ void __launch_bounds__(TURN_THREADS)
    turn_rows(const float* qkv, const float* cosines, const float* sines, const float* query_weight,
              const float* key_weight, const Int* slots, float* query, void* keys, void* values,
              Int apart, Int rows, Int heads, Int kv_heads, Int width, Int half, Int epsilon,
              Int halves, const Int* places) {
    start_early();
    const Int row = blockIdx.x, head = (Int)blockIdx.y * (TURN_THREADS / WARP) + threadIdx.x / WARP,
              all = heads + 2 * kv_heads;
    if (head >= all) return;
    const int lane = (int)(threadIdx.x % WARP);
    const bool is_query = head < heads, is_value = head >= heads + kv_heads;
    const float* const own = qkv + (row * all + head) * width;
    const float* const weight = is_query ? query_weight : is_value ? nullptr : key_weight;
    float factor = 1.0f;
    if (weight != nullptr) {
        float sum = 0.0f;
        for (Int i = lane; i < width; i += WARP) sum = __fmaf_rn(own[i], own[i], sum);
        factor = inverse_root(__fdiv_rn(sum_of_warp(sum), (float)width), epsilon);
    }
    const Int own_head = is_value ? head - heads - kv_heads : head - heads;
    void* to = is_value ? values : keys;
    Int first = own_head * apart;
    if (places != nullptr) {
        to = (void*)places[PLACE * row];
        first = (apart + own_head + (is_value ? kv_heads : 0)) * places[PLACE * row + 1] * width;
    }
    for (Int i = lane; i < width; i += WARP) {
        const bool turned = !is_value && i < 2 * half, second = i >= half;
        float value = weight == nullptr ? own[i] : __fmul_rn(__fmul_rn(own[i], factor), weight[i]);
        if (turned) {
            const Int other = second ? i - half : i + half,
                      angle = row * half + (second ? i - half : i);
            const float beside = weight == nullptr
                                     ? own[other]
                                     : __fmul_rn(__fmul_rn(own[other], factor), weight[other]);
            const float product = __fmul_rn(value, cosines[angle]);
            value = __fmaf_rn(second ? beside : -beside, sines[angle], product);
        }
        if (is_query) query[(head * rows + row) * width + i] = value;
        else store(to, first + slots[row] * width + i, value, halves != 0);
    }
}

// Rows [rows, width] to the addresses that `places` has for them, or from there.
extern "C" __global__ void __launch_bounds__(GATE_THREADS)
    move_rows(const Int* places, float* x, Int width, Int there) {
    start_early();
    const Int row = blockIdx.x, i = (Int)blockIdx.y * GATE_THREADS + threadIdx.x;
    if (i >= width) return;
    float* const own = (float*)places[row];
    if (there) own[i] = x[row * width + i];
    else x[row * width + i] = own[i];
}

// y [rows, units] = silu(gate) up, of x [rows, 2 units], the gates first.
extern "C" __global__ void __launch_bounds__(GATE_THREADS)
    gate_rows(const float* x, float* y, Int units) {
    start_early();
    const Int row = blockIdx.x, unit = (Int)blockIdx.y * GATE_THREADS + threadIdx.x;
    if (unit >= units) return;
    const float gate = x[row * 2 * units + unit], up = x[row * 2 * units + units + unit];
    y[row * units + unit] = __fmul_rn(__fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate))), up);
}

// y = x in 16 bits, `brains`: bf16; the largest number of the type stands for those beyond it.
extern "C" __global__ void __launch_bounds__(GATE_THREADS)
    narrow_rows(const float* x, unsigned short* y, Int size, Int brains) {
    start_early();
    const Int i = (Int)blockIdx.x * GATE_THREADS + threadIdx.x;
    if (i >= size) return;
    const float most = brains ? __uint_as_float(0x7f7f0000u) : MOST_HALF;
    const float value = x[i] > most ? most : x[i] < -most ? -most : x[i];
    const unsigned bits = __float_as_uint(value);
    y[i] = brains ? (unsigned short)(value != value ? 0x7fc0u
                                                    : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)
                  : half_of(value);
}
