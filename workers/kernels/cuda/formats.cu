// The codes of a weight matrix on a GPU, as the CPU's kernels have them in memory: of a substitute
// in groups of 64 inputs (native/grouped.inl), of a GGUF file in blocks of 32 (native/blocks.h).
//
// Compiled behind numbers.cu.

// On matrix units a lane has two outputs and two rows, elsewhere one and four; DT_SINGLE_OUTPUTS
// in front of this source says that nothing is computed on them.
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800 && !defined(DT_SINGLE_OUTPUTS)
#define DT_MATRIX_UNITS
#endif
#ifdef DT_MATRIX_UNITS
constexpr int LANE_OUTPUTS = 2, LANE_ROWS = 2;
#else
constexpr int LANE_OUTPUTS = 1, LANE_ROWS = 4;
#endif

enum Scales : int { HALF, HALF_AND_MORE, POWER, BYTE, BYTE_AND_LESS, BYTES, BYTES_AND_LESS };

constexpr int SUPER = 8;  // blocks that share scales of scales

// What a lane computes: LANE_OUTPUTS outputs from `output` on, for LANE_ROWS rows from `row` on
// that are `rows_apart` from each other. `quarter`: its quarter of a group's steps, on matrix
// units.
struct Lane {
    int output, row, rows_apart, quarter;
};

static __device__ Lane lane_of(int lane) {
#ifdef DT_MATRIX_UNITS
    return {2 * (lane / 4), 2 * (lane % 4), 1, lane % 4};
#else
    return {lane % VECTOR, lane / VECTOR, 2, 0};
#endif
}

// LANE_OUTPUTS neighbouring numbers, each of so many bits.
template <int BITS>
static __device__ unsigned beside(const char* from) {
    constexpr int ALL = BITS * LANE_OUTPUTS;
    if constexpr (ALL == 32) return *(const unsigned*)from;
    else if constexpr (ALL == 16) return *(const unsigned short*)from;
    else return *(const unsigned char*)from;
}

static __device__ float half_at(unsigned numbers, int which) {
    return half_to_float(numbers >> 16 * which & 0xffffu);
}
static __device__ int byte_at(unsigned numbers, int which) {
    return (int)(numbers >> 8 * which & 255u);
}

// The numbers that four codes of 4 bits stand for.
static __device__ unsigned look_up(unsigned codes, const unsigned* numbers) {
    unsigned found = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 8)
        found |= (numbers[codes >> i >> 2 & 3] >> (codes >> i & 3) * 8 & 255u) << i;
    return found;
}

// Codes of BITS bits lie in a plane of words, step s in word s % COUNT from bit s / COUNT BITS on.
// On matrix units a lane has the words of its quarter's steps of each output, else all words.
template <int COUNT, int BITS>
struct Plane {
#ifdef DT_MATRIX_UNITS
    static constexpr int HELD = COUNT == 0 ? 0 : COUNT < 4 ? 1 : COUNT / 4;
    static __device__ int word(int i, int quarter) {
        return quarter % (COUNT < 4 ? COUNT : 4) + 4 * i;
    }
    // The codes of step quarter + 4 j.
    static __device__ unsigned codes(const unsigned* held, int j, int quarter) {
        if constexpr (COUNT < 4) return cut(held[0], quarter / COUNT + 4 / COUNT * j);
        else return cut(held[j % HELD], j / HELD);
    }
#else
    static constexpr int HELD = COUNT;
    static __device__ int word(int i, int) { return i; }
    static __device__ unsigned codes(const unsigned* held, int step, int) {
        return cut(held[step % COUNT], step / COUNT);
    }
#endif
    static __device__ unsigned cut(unsigned word, int place) {
        constexpr unsigned MASK = BITS == 8 ? 0xffffffffu : ((1u << BITS) - 1) * 0x01010101u;
        return word >> place * BITS & MASK;
    }
};

template <int WIDTH_, int BITS, int MIDDLE_, bool SIGNED_, int SCALES, bool TABLE>
struct Format {
    static constexpr int WIDTH = WIDTH_, STEPS = WIDTH / 4, MIDDLE = MIDDLE_;
    static constexpr bool SIGNED = SIGNED_;
    static constexpr bool TWICE = SCALES >= BYTE;  // scaled
    static constexpr bool LESS = SCALES == BYTE_AND_LESS || SCALES == BYTES_AND_LESS;
    static constexpr bool MORE = LESS || SCALES == HALF_AND_MORE;
    static constexpr int HALVES = SCALES == BYTES || SCALES == BYTES_AND_LESS ? 2 : 1;
    static constexpr int NUMBERS = HALVES * (MORE ? 2 : 1);  // scales of a group and output
    static constexpr int NUMBER_BYTES =
        VECTOR * (SCALES == HALF || SCALES == HALF_AND_MORE ? 2 : 1);
    static constexpr int SCALE_BYTES = NUMBERS * NUMBER_BYTES;
    static constexpr int SIZE = SCALE_BYTES + WIDTH * VECTOR * BITS / 8;
    static constexpr int SUPER_BYTES = !TWICE ? 0 : LESS ? 64 : 32;
    static constexpr int LOW = BITS == 8 ? 8 : BITS >= 4 ? 4 : 2, HIGH = BITS - LOW;
    static constexpr int LOW_WORDS = STEPS * LOW / 8, HIGH_WORDS = STEPS * HIGH / 8;
    typedef Plane<LOW_WORDS, LOW> Low;
    typedef Plane<HIGH_WORDS, HIGH> High;

    // As they lie in memory.
    unsigned low[LANE_OUTPUTS][Low::HELD], high[LANE_OUTPUTS][HIGH == 0 ? 1 : High::HELD];
    unsigned numbers[NUMBERS], super[2];

    static __device__ Int vector_bytes(int groups) {
        return (Int)groups * SIZE + groups / SUPER * SUPER_BYTES;
    }

    // Load the group at an address; the scales of its scales lie `above`.
    __device__ void load(const char* at, const char* above, const Lane& lane) {
        constexpr int BYTES_EACH = NUMBER_BYTES / VECTOR;
#pragma unroll
        for (int i = 0; i < NUMBERS; i++)
            numbers[i] = beside<8 * BYTES_EACH>(at + i * NUMBER_BYTES + BYTES_EACH * lane.output);
        if constexpr (TWICE) {
            super[0] = beside<16>(above + 2 * lane.output);
            if constexpr (LESS) super[1] = beside<16>(above + 32 + 2 * lane.output);
        }
        const char* const codes = at + SCALE_BYTES + 4 * lane.output;
#pragma unroll
        for (int i = 0; i < Low::HELD; i++)
            load_word(codes + 64 * Low::word(i, lane.quarter), low, i);
        if constexpr (HIGH > 0)
#pragma unroll
            for (int i = 0; i < High::HELD; i++)
                load_word(codes + 64 * (LOW_WORDS + High::word(i, lane.quarter)), high, i);
    }

    template <int HELD>
    static __device__ void load_word(const char* from, unsigned (*to)[HELD], int i) {
        if constexpr (LANE_OUTPUTS == 2) {
            const uint2 both = streamed_pair(from);
            to[0][i] = both.x, to[1][i] = both.y;
        } else to[0][i] = streamed(from);
    }

    // The codes of step quarter + 4 j of an output on matrix units, of step j elsewhere.
    __device__ unsigned codes(int output, int j, int quarter, const unsigned* table) const {
        unsigned found = Low::codes(low[output], j, quarter);
        if constexpr (HIGH > 0) found |= High::codes(high[output], j, quarter) << LOW;
        if constexpr (TABLE) found = look_up(found, table);
        return found;
    }

    __device__ float scale(int half, int output) const {
        if constexpr (SCALES == POWER)
            return __fmul_rn(__uint_as_float((unsigned)(byte_at(numbers[0], output) + 1) << 23),
                             0.25f);
        else if constexpr (!TWICE) return half_at(numbers[0], output);
        else {
            const int own = byte_at(numbers[half], output);
            return __fmul_rn(half_at(super[0], output),
                             __int2float_rn(LESS ? own : (int)(signed char)own));
        }
    }

    // What is added to each weight.
    __device__ float more(int half, int output) const {
        if constexpr (!LESS) return half_at(numbers[1], output);
        else {
            const float least = __int2float_rn(byte_at(numbers[HALVES + half], output));
            return __fsub_rn(0.0f, __fmul_rn(half_at(super[1], output), least));
        }
    }
};
