// Rows of a matrix as a checkpoint has them [count, k] -> the layout of packing.h.
#include "blocks.h"
#include "packing.h"
#include "pool.h"

#include <cmath>
#include <cstdlib>
#include <cstring>

namespace dovetail {
namespace {

// Sixteen steps of one column lie side by side in the source and far apart in the panel; a square in the L1 cache turns them, so that both sides are touched
// a line at a time.
constexpr int64_t SIDE = 16;

// The columns first..end of one vector, column c at source + (c - first) * steps; `T` is one step of one column. Columns end..fill become zero.
template <class T>
void pack_vector(const T* source, int64_t first, int64_t end, int64_t fill, int64_t steps, T* out, int64_t stride) {
    alignas(64) T square[SIDE][VECTOR] = {};
    for (int64_t from = 0; from < steps; from += SIDE) {
        const int64_t length = steps - from < SIDE ? steps - from : SIDE;
        for (int64_t c = first; c < end; c++) {
            const T* column = source + (c - first) * steps + from;
            for (int64_t s = 0; s < length; s++) square[s][c] = column[s];
        }
        for (int64_t s = 0; s < length; s++) memcpy(out + (from + s) * stride + first, &square[s][first], (fill - first) * sizeof(T));
    }
}

// The weights of one output as int8, symmetric; its scale, and -128 times its sum.
struct Quantised { float scale; int32_t start; };

Quantised quantise(const float* w, int64_t k, int8_t* q) {
    float most = 0;
    for (int64_t i = 0; i < k; i++) most = std::fabs(w[i]) > most ? std::fabs(w[i]) : most;
    const float to = most < 1e-30f ? 0.0f : 127.0f / most;
    int32_t sum = 0;
    for (int64_t i = 0; i < k; i++) {
        const float nearest = (w[i] * to + ROUNDER) - ROUNDER;
        q[i] = static_cast<int8_t>(nearest);
        sum += q[i];
    }
    return {most < 1e-30f ? 0.0f : most / 127.0f, -128 * sum};
}

// What pack() packs, vector by vector.
struct Rows {
    int kind;
    int stored;
    const void* source;
    int64_t first, end, n, k;
    char* packed;
    float* scales;

    // Row `row` of the source in fp32; `memory` [k] holds it where it was stored otherwise.
    const float* floats(int64_t row, float* memory) const {
        if (stored == FP32) return static_cast<const float*>(source) + row * k;
        const uint16_t* const bits = static_cast<const uint16_t*>(source) + row * k;
        if (stored == BF16) for (int64_t i = 0; i < k; i++) memory[i] = widened(BF16, bits[i]);
        else for (int64_t i = 0; i < k; i++) memory[i] = widened(FP16, bits[i]);
        return memory;
    }

    // `bytes`: memory for sixteen rows as int8 or, where they are widened first, as fp32; `memory`: for one in fp32.
    void pack_vector_of(int64_t vector, int8_t* bytes, float* memory) const {
        const int64_t column = vector * VECTOR, low = first > column ? first : column, high = end < column + VECTOR ? end : column + VECTOR;
        const int64_t fill = high == n ? VECTOR : high - column;
        const Matrix m{kind, static_cast<int32_t>(n), static_cast<int32_t>(k), 0, packed, scales, nullptr};
        const int64_t panel = column / PANEL, stride = panel_width(n, panel);
        char* const out = const_cast<char*>(weights_at(m, panel, 0)) + (column - panel * PANEL) / VECTOR * vector_bytes(kind);
        const int64_t at = low - column, until = high - column, skip = (low - first) * k;
        if (kind == FP32 && stored != FP32) {
            float* const wide = reinterpret_cast<float*>(bytes);
            for (int64_t c = low; c < high; c++) floats(c - first, wide + (c - low) * k);
            return pack_vector(reinterpret_cast<const uint32_t*>(wide), at, until, fill, k, reinterpret_cast<uint32_t*>(out), stride);
        }
        if (kind == FP32) return pack_vector(static_cast<const uint32_t*>(source) + skip, at, until, fill, k, reinterpret_cast<uint32_t*>(out), stride);
        if (kind != INT8) return pack_vector(static_cast<const uint16_t*>(source) + skip, at, until, fill, k, reinterpret_cast<uint16_t*>(out), stride);
        const int64_t steps = steps_of(kind, k);
        int32_t* const starts = const_cast<int32_t*>(column_starts(m));
        for (int64_t c = low; c < high; c++) {
            int8_t* const q = bytes + (c - low) * steps * 4;
            const Quantised row = quantise(floats(c - first, memory), k, q);
            memset(q + k, 0, steps * 4 - k);
            scales[c] = row.scale;
            starts[c] = row.start;
        }
        for (int64_t c = high; c < column + fill; c++) starts[c] = 0;
        pack_vector(reinterpret_cast<const uint32_t*>(bytes), at, until, fill, steps, reinterpret_cast<uint32_t*>(out), stride);
    }
};

// A part of the vectors of some rows.
void pack_part(const Rows& rows, int part, int parts) {
    const int64_t from = rows.first / VECTOR, vectors = (rows.end + VECTOR - 1) / VECTOR - from, inputs = (rows.k + 3) / 4 * 4;
    float* const memory = static_cast<float*>(malloc(inputs * (VECTOR + 1) * sizeof(float)));
    for (int64_t v = from + vectors * part / parts; v < from + vectors * (part + 1) / parts; v++)
        rows.pack_vector_of(v, reinterpret_cast<int8_t*>(memory + inputs), memory);
    free(memory);
}

// The steps of one column in a plane of `bits` bits, of codes that are shifted down by `from` first; bytes 64 j belong to steps j, j + loads, ...
void pack_plane(const uint8_t* codes, int bits, int from, char* plane) {
    const int loads = static_cast<int>(plane_bytes(bits) / 64), steps = GROUP / 4;
    for (int j = 0; j < loads; j++)
        for (int at = 0; at < 4; at++) {
            int byte = 0;
            for (int step = j, shift = 0; step < steps; step += loads, shift += bits) byte |= (codes[4 * step + at] >> from & ((1 << bits) - 1)) << shift;
            plane[64 * j + at] = static_cast<char>(byte);
        }
}

}  // namespace

void pack_codes(int kind, const uint8_t* codes, const uint16_t* scales, const uint16_t* offsets, int64_t first, int64_t count, int64_t k, void* packed) {
    const int bits = bits_of(kind);
    const int64_t groups = groups_of(k);
    auto body = [&](int part, int parts) {
        for (int64_t row = count * part / parts; row < count * (part + 1) / parts; row++) {
            const int64_t vector = (first + row) / VECTOR, lane = (first + row) % VECTOR;
            char* block = static_cast<char*>(packed) + vector * groups * block_bytes(bits);
            for (int64_t g = 0; g < groups; g++, block += block_bytes(bits)) {
                memcpy(block + 2 * lane, scales + row * groups + g, 2);
                memcpy(block + 2 * (VECTOR + lane), offsets + row * groups + g, 2);
                const uint8_t* const group = codes + (row * groups + g) * GROUP;
                char* const plane = block + 4 * VECTOR + 4 * lane;
                if (bits != 3) pack_plane(group, bits, 0, plane);
                else {
                    pack_plane(group, 2, 0, plane);
                    pack_plane(group, 1, 2, plane + plane_bytes(2));
                }
            }
        }
    };
    parallel(body);
}

void pack(int kind, int stored, const void* source, int64_t first, int64_t count, int64_t n, int64_t k, void* packed, float* scales) {
    const Rows rows{kind, stored, source, first, first + count, n, k, static_cast<char*>(packed), scales};
    auto body = [&](int part, int parts) { pack_part(rows, part, parts); };
    parallel(body);
}

void pack_alone(int kind, int stored, const void* source, int64_t first, int64_t count, int64_t n, int64_t k, void* packed, float* scales) {
    pack_part({kind, stored, source, first, first + count, n, k, static_cast<char*>(packed), scales}, 0, 1);
}

void unpack_row(const Matrix& m, int64_t row, float* out) {
    if (m.kind == BLOCKS || m.kind == EXACT_BLOCKS) return unpack_part_row(m, row, out);
    const int64_t panel = row / PANEL, lane = row % PANEL, width = panel_width(m.n, panel);
    const char* const weights = weights_at(m, panel, 0);
    for (int64_t i = 0; i < m.k; i++) {
        if (m.kind == INT8) out[i] = static_cast<float>(static_cast<int8_t>(weights[4 * (i / 4 * width + lane) + i % 4])) * m.scales[row];
        else if (m.kind == FP32) memcpy(out + i, weights + 4 * (i * width + lane), 4);
        else {
            uint16_t bits;
            memcpy(&bits, weights + 2 * (i * width + lane), 2);
            out[i] = widened(m.kind, bits);
        }
    }
}

}  // namespace dovetail
