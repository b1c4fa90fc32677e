// Where a weight stands in a packed matrix. The layout is the same for every instruction set.
//
// Panels of PANEL columns (outputs), the last one narrower in vectors of 16; within a panel one step after another, k ascending: a step is one k (int8: four,
// side by side for each column) for all columns of the panel. INT8 has -128 times the sum of each column's weights behind the panels, as int32.
//
// CODES8 to CODES2 have no panels: for each vector of 16 columns one block after another, each of GROUP inputs: a scale and an offset of each column as fp16,
// then the codes. The last group may be longer than the inputs. A step is four inputs, side by side for each column; of 4 bits, bytes 64 j .. 64 j + 63 hold step j in their low and step j + 8 in their high
// bits, and so on for 2 bits; of 3 bits the lower two stand as those of 2 bits do, and the upper one in a plane of its own behind them.
#pragma once

#include "kernels.h"

#include <cstring>

namespace dovetail {

constexpr int64_t PANEL = 48, VECTOR = 16;

constexpr int64_t vector_bytes(int kind) { return kind == FP16 || kind == BF16 ? 2 * VECTOR : 4 * VECTOR; }  // of one step
constexpr int64_t steps_of(int kind, int64_t k) { return kind == INT8 ? (k + 3) / 4 : k; }
constexpr int64_t padded(int64_t n) { return (n + VECTOR - 1) / VECTOR * VECTOR; }
constexpr int64_t panels_of(int64_t n) { return (n + PANEL - 1) / PANEL; }
constexpr int64_t panel_width(int64_t n, int64_t panel) { return padded(n) - panel * PANEL < PANEL ? padded(n) - panel * PANEL : PANEL; }
constexpr int64_t weights_bytes(int kind, int64_t n, int64_t k) { return padded(n) / VECTOR * steps_of(kind, k) * vector_bytes(kind); }
constexpr int64_t packed_bytes(int kind, int64_t n, int64_t k) { return weights_bytes(kind, n, k) + (kind == INT8 ? padded(n) * 4 : 0); }

constexpr int64_t GROUP = 64;
constexpr int bits_of(int kind) { return kind == CODES8 ? 8 : kind == CODES4 ? 4 : kind == CODES3 ? 3 : kind == CODES2 ? 2 : 0; }  // of a code, 0: it has none
constexpr int64_t plane_bytes(int bits) { return GROUP * VECTOR * bits / 8; }
constexpr int64_t block_bytes(int bits) { return 4 * VECTOR + plane_bytes(bits); }
constexpr int64_t groups_of(int64_t k) { return (k + GROUP - 1) / GROUP; }
constexpr int64_t codes_bytes(int kind, int64_t n, int64_t k) { return padded(n) / VECTOR * groups_of(k) * block_bytes(bits_of(kind)); }
inline const char* blocks_at(const Matrix& m, int64_t vector) {
    return (const char*)m.packed + vector * groups_of(m.k) * block_bytes(bits_of(m.kind));
}

inline const char* weights_at(const Matrix& m, int64_t panel, int64_t step) {
    const int64_t bytes = vector_bytes(m.kind);
    return (const char*)m.packed + panel * (PANEL / VECTOR) * steps_of(m.kind, m.k) * bytes + step * panel_width(m.n, panel) / VECTOR * bytes;
}
inline const int32_t* column_starts(const Matrix& m) { return (const int32_t*)((const char*)m.packed + weights_bytes(m.kind, m.n, m.k)); }

// Adding and subtracting 1.5 * 2^23 rounds a float below 2^22 to the nearest integer, ties to even, with no library and the same on every machine.
constexpr float ROUNDER = 12582912.0f;

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// A finite number of 16 bits as fp32, exactly: the exponent of fp16 is moved by a multiplication, which has subnormal numbers right too.
static inline float widened(int stored, uint16_t bits) {
    if (stored == BF16) return from_bits(static_cast<uint32_t>(bits) << 16);
    const float size = from_bits(static_cast<uint32_t>(bits & 0x7fff) << 13) * from_bits(0x77800000u);
    return bits & 0x8000 ? -size : size;
}

// Rows first .. first + count of a matrix [n, k], of a source [count, k] whose numbers are of the kind `stored`: FP32, FP16 or BF16 for FP32 and INT8, else `kind`
// itself. INT8 also sets scales[first ...].
void pack(int kind, int stored, const void* source, int64_t first, int64_t count, int64_t n, int64_t k, void* packed, float* scales);

// The same by the calling thread alone. A caller packs parts of a matrix that share no column of 16 on several threads.
void pack_alone(int kind, int stored, const void* source, int64_t first, int64_t count, int64_t n, int64_t k, void* packed, float* scales);

// out [k] is row `row` of a matrix of FP32, FP16, BF16, INT8 or blocks, as it is multiplied with.
void unpack_row(const Matrix& matrix, int64_t row, float* out);

// The same of codes [count, k up to a whole group], one a byte, with scales and offsets [count, groups] as raw fp16: weight = (code - 2^(bits - 1)) scale +
// offset. What stands beyond k does not count.
void pack_codes(int kind, const uint8_t* codes, const uint16_t* scales, const uint16_t* offsets, int64_t first, int64_t count, int64_t k, void* packed);

}  // namespace dovetail
