// The blocks of GGUF files: what each format is, and how the kernels lay it out. A weight is (code - middle) scale, less a minimum where the format has minima.
//
// A packed matrix is a list of parts, ranges of outputs of one type each, so that linears of several types that read the same inputs are one matrix. A part of
// blocks has, for each vector of 16 outputs, one block of 32 inputs after another: in front of every 256 inputs of a format with scales of scales these as fp16
// (16 d, and 16 dmin where there are minima), then for each block its scales (see `Scales`) and its codes. A step is four inputs, side by side for each output,
// eight of them in a block: of 4 bits, bytes 64 j .. 64 j + 63 hold step j in their low and step j + 4 in their high halves. More bits stand in planes of their
// own behind those: of the fifth, bit j of a byte is that of step j; of the fifth and sixth, bytes 64 j .. hold steps j, j + 2, j + 4 and j + 6. Formats of 2 bits
// have that plane alone, those of 3 the other behind it. Parts of plain numbers lie as packing.h says.
//
// IQ2 and IQ3 have codebook indices in place of codes: a byte for every 8 or 4 inputs, where byte 4 i + j of line l of output i belongs to entry 4 l + j; then
// the signs, a plane of one bit, and the bits of the indices above the eighth: one byte for all entries of an output, or four bits for IQ2_XS.
#pragma once

#include "packing.h"

namespace dovetail {

constexpr int64_t WIDTH = 32, STEPS = 8;  // inputs of a block, and steps

enum Scales : int {
    HALF,           // 16 fp16
    HALF_AND_MORE,  // 16 fp16, and 16 fp16 that are added
    POWER,          // 16 u8 e, of 2^(e - 128)
    BYTE,           // 16 s8, times d
    BYTE_AND_LESS,  // 16 u8, times d, and 16 u8, times dmin, that are taken away
    BYTES,          // 16 s8 of the first 16 inputs and 16 of the others, times d
    BYTES_AND_LESS,  // 2 x 16 u8, times d, and 2 x 16, times dmin, to subtract
    NIBBLE,          // 16 u4 s, outputs j and j + 8 in one byte, for (s + 1/2) d times the unit of the format
    NIBBLES          // the same for the first 16 inputs, then for the others
};

constexpr int64_t scales_bytes(Scales s) {
    return s == NIBBLE ? 8 : s == POWER || s == BYTE || s == NIBBLES ? 16 : s == HALF || s == BYTE_AND_LESS || s == BYTES ? 32 : 64;
}
constexpr bool scaled_twice(Scales s) { return s >= BYTE; }
constexpr bool with_minima(Scales s) { return s == BYTE_AND_LESS || s == BYTES_AND_LESS; }
constexpr bool by_sixteens(Scales s) { return s == BYTES || s == BYTES_AND_LESS || s == NIBBLES; }
constexpr bool in_nibbles(Scales s) { return s >= NIBBLE; }

// NUMBERS and SIZE are those of a block of the file. MOST: the largest code that is multiplied. A SIGNED code is a number as it is; TABLE has the numbers of codes.
struct Q4_0 { static constexpr int TYPE = 2, NUMBERS = 32, SIZE = 18, BITS = 4, MIDDLE = 8, MOST = 15; static constexpr Scales SCALES = HALF; };
struct Q4_1 { static constexpr int TYPE = 3, NUMBERS = 32, SIZE = 20, BITS = 4, MIDDLE = 0, MOST = 15; static constexpr Scales SCALES = HALF_AND_MORE; };
struct Q5_0 { static constexpr int TYPE = 6, NUMBERS = 32, SIZE = 22, BITS = 5, MIDDLE = 16, MOST = 31; static constexpr Scales SCALES = HALF; };
struct Q5_1 { static constexpr int TYPE = 7, NUMBERS = 32, SIZE = 24, BITS = 5, MIDDLE = 0, MOST = 31; static constexpr Scales SCALES = HALF_AND_MORE; };
struct Q8_0 { static constexpr int TYPE = 8, NUMBERS = 32, SIZE = 34, BITS = 8, MIDDLE = 0, MOST = 0; static constexpr Scales SCALES = HALF; };
struct Q2_K { static constexpr int TYPE = 10, NUMBERS = 256, SIZE = 84, BITS = 2, MIDDLE = 0, MOST = 3; static constexpr Scales SCALES = BYTES_AND_LESS; };
struct Q3_K { static constexpr int TYPE = 11, NUMBERS = 256, SIZE = 110, BITS = 3, MIDDLE = 4, MOST = 7; static constexpr Scales SCALES = BYTES; };
struct Q4_K { static constexpr int TYPE = 12, NUMBERS = 256, SIZE = 144, BITS = 4, MIDDLE = 0, MOST = 15; static constexpr Scales SCALES = BYTE_AND_LESS; };
struct Q5_K { static constexpr int TYPE = 13, NUMBERS = 256, SIZE = 176, BITS = 5, MIDDLE = 0, MOST = 31; static constexpr Scales SCALES = BYTE_AND_LESS; };
struct Q6_K { static constexpr int TYPE = 14, NUMBERS = 256, SIZE = 210, BITS = 6, MIDDLE = 32, MOST = 63; static constexpr Scales SCALES = BYTES; };
struct IQ4_NL { static constexpr int TYPE = 20, NUMBERS = 32, SIZE = 18, BITS = 4, MIDDLE = 0, MOST = 0; static constexpr Scales SCALES = HALF; };
struct IQ4_XS { static constexpr int TYPE = 23, NUMBERS = 256, SIZE = 136, BITS = 4, MIDDLE = 0, MOST = 0; static constexpr Scales SCALES = BYTE; };
struct IQ2_XXS { static constexpr int TYPE = 16, NUMBERS = 256, SIZE = 66, BITS = 2, MIDDLE = 64, MOST = 107; static constexpr Scales SCALES = NIBBLE; };
struct IQ2_XS { static constexpr int TYPE = 17, NUMBERS = 256, SIZE = 74, BITS = 2, MIDDLE = 64, MOST = 107; static constexpr Scales SCALES = NIBBLES; };
struct IQ3_XXS { static constexpr int TYPE = 18, NUMBERS = 256, SIZE = 98, BITS = 3, MIDDLE = 32, MOST = 63; static constexpr Scales SCALES = NIBBLE; };
struct IQ3_S { static constexpr int TYPE = 21, NUMBERS = 256, SIZE = 110, BITS = 3, MIDDLE = 16, MOST = 31; static constexpr Scales SCALES = NIBBLE; };
struct IQ2_S { static constexpr int TYPE = 22, NUMBERS = 256, SIZE = 82, BITS = 2, MIDDLE = 64, MOST = 107; static constexpr Scales SCALES = NIBBLES; };
struct TQ1_0 { static constexpr int TYPE = 34, NUMBERS = 256, SIZE = 54, BITS = 2, MIDDLE = 1, MOST = 3; static constexpr Scales SCALES = HALF; };
struct TQ2_0 { static constexpr int TYPE = 35, NUMBERS = 256, SIZE = 66, BITS = 2, MIDDLE = 1, MOST = 3; static constexpr Scales SCALES = HALF; };
struct MXFP4 { static constexpr int TYPE = 39, NUMBERS = 32, SIZE = 17, BITS = 4, MIDDLE = 16, MOST = 28; static constexpr Scales SCALES = POWER; };

template <class F>
constexpr bool signed_codes() { return F::MOST == 0; }

// Bits of a codebook index; 0: no codebook. Below: inputs per index, indices per block, and the bits above the eighth of all indices of an output and block.
template <class F>
constexpr int index_bits() {
    return F::TYPE == IQ2_XXS::TYPE || F::TYPE == IQ3_XXS::TYPE ? 8 : F::TYPE == IQ2_XS::TYPE || F::TYPE == IQ3_S::TYPE ? 9 : F::TYPE == IQ2_S::TYPE ? 10 : 0;
}
template <class F>
constexpr bool has_book() { return index_bits<F>() > 0; }
template <class F>
constexpr int entry_inputs() { return F::BITS == 2 ? 8 : 4; }
template <class F>
constexpr int entries() { return (int)WIDTH / entry_inputs<F>(); }
template <class F>
constexpr int high_bits() { return has_book<F>() ? (index_bits<F>() - 8) * entries<F>() : 0; }
template <class F>
constexpr float unit_of() { return F::TYPE == IQ3_XXS::TYPE ? 1.0f : F::TYPE == IQ3_S::TYPE ? 2.0f : 0.25f; }

// The entries of a codebook. `fours` has the choice of input j in byte j, and from bit 4 on that of input j + 4 (IQ2);
// `words` the choices of the inputs 0, 2, 1 and 3 in four bits each, for IQ2 plus four times those of the inputs four after them.
struct Book {
    uint16_t words[1024];
    uint32_t fours[1024];
};
extern const Book IQ2_XXS_BOOK, IQ2_XS_BOOK, IQ2_S_BOOK, IQ3_XXS_BOOK, IQ3_S_BOOK;
template <class F>
inline const Book& book_of() {
    return F::TYPE == IQ2_XXS::TYPE ? IQ2_XXS_BOOK : F::TYPE == IQ2_XS::TYPE ? IQ2_XS_BOOK : F::TYPE == IQ2_S::TYPE ? IQ2_S_BOOK : F::TYPE == IQ3_XXS::TYPE ? IQ3_XXS_BOOK : IQ3_S_BOOK;
}

// The numbers that codes stand for, plus the MIDDLE if any; null: they stand for themselves. With a codebook: those of the choices, then of the same with a
// minus; half of them for IQ3_XXS, whose unit is twice as large.
alignas(16) constexpr int8_t IQ4_NUMBERS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(16) constexpr int8_t MXFP4_NUMBERS[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
alignas(16) constexpr int8_t IQ2_NUMBERS[16] = {72, 89, 107, 0, 72, 89, 107, 0, 56, 39, 21, 0, 56, 39, 21, 0};
alignas(16) constexpr int8_t IQ3_XXS_NUMBERS[16] = {34, 38, 42, 46, 50, 54, 58, 63, 30, 26, 22, 18, 14, 10, 6, 1};
alignas(16) constexpr int8_t IQ3_S_NUMBERS[16] = {17, 19, 21, 23, 25, 27, 29, 31, 15, 13, 11, 9, 7, 5, 3, 1};
template <class F>
constexpr const int8_t* numbers_of() {
    if (has_book<F>()) return F::BITS == 2 ? IQ2_NUMBERS : F::TYPE == IQ3_XXS::TYPE ? IQ3_XXS_NUMBERS : IQ3_S_NUMBERS;
    return F::TYPE == IQ4_NL::TYPE || F::TYPE == IQ4_XS::TYPE ? IQ4_NUMBERS : F::TYPE == MXFP4::TYPE ? MXFP4_NUMBERS : nullptr;
}

constexpr int64_t SUPER = 8;  // blocks that share scales of scales
template <class F>
constexpr int64_t super_bytes() { return !scaled_twice(F::SCALES) ? 0 : with_minima(F::SCALES) ? 64 : 32; }
template <class F>
constexpr int64_t part_block_bytes() { return scales_bytes(F::SCALES) + STEPS * 64 * F::BITS / 8 + high_bits<F>() * VECTOR / 8; }
// Of the blocks of a vector of outputs.
template <class F>
constexpr int64_t vector_bytes_of(int64_t blocks) { return blocks * part_block_bytes<F>() + blocks / SUPER * super_bytes<F>(); }

// body(format) for a type of blocks; false, and nothing happens, for any other.
template <class Body>
bool with_format(int type, const Body& body) {
    switch (type) {
        case Q4_0::TYPE: body(Q4_0{}); return true;
        case Q4_1::TYPE: body(Q4_1{}); return true;
        case Q5_0::TYPE: body(Q5_0{}); return true;
        case Q5_1::TYPE: body(Q5_1{}); return true;
        case Q8_0::TYPE: body(Q8_0{}); return true;
        case Q2_K::TYPE: body(Q2_K{}); return true;
        case Q3_K::TYPE: body(Q3_K{}); return true;
        case Q4_K::TYPE: body(Q4_K{}); return true;
        case Q5_K::TYPE: body(Q5_K{}); return true;
        case Q6_K::TYPE: body(Q6_K{}); return true;
        case IQ4_NL::TYPE: body(IQ4_NL{}); return true;
        case IQ4_XS::TYPE: body(IQ4_XS{}); return true;
        case IQ2_XXS::TYPE: body(IQ2_XXS{}); return true;
        case IQ2_XS::TYPE: body(IQ2_XS{}); return true;
        case IQ3_XXS::TYPE: body(IQ3_XXS{}); return true;
        case IQ3_S::TYPE: body(IQ3_S{}); return true;
        case IQ2_S::TYPE: body(IQ2_S{}); return true;
        case TQ1_0::TYPE: body(TQ1_0{}); return true;
        case TQ2_0::TYPE: body(TQ2_0{}); return true;
        case MXFP4::TYPE: body(MXFP4{}); return true;
        default: return false;
    }
}

// A range of the outputs of a matrix whose weights are all of one type.
struct Part {
    int32_t type;  // ggml's number, or of plain numbers -1 - Kind
    int32_t first, count;
    int32_t vectors;  // of parts before this one, those of plain numbers left out
    int64_t offset;   // from the beginning of the list
};

// What `packed` of a matrix of parts begins with.
struct Parts {
    int64_t count;
    int64_t vectors;  // of all parts of blocks
    Part part[1];
};

inline const Parts& parts_of(const Matrix& m) { return *(const Parts*)m.packed; }

// Bytes of a part of n outputs; 0 for a type that has no kernels.
int64_t part_bytes(int type, int64_t n, int64_t k);

// The first of some rows, as a file has them, with a block that stands for numbers that are not finite, or nearly so; -1: there is none.
int64_t wrong_row(int type, const uint8_t* source, int64_t count, int64_t k);

// Rows first .. first + count of a part, as a file has them, by the calling thread alone; `first` is a multiple of 16.
void pack_blocks(int type, const uint8_t* source, int64_t first, int64_t count, int64_t k, char* part);

// out [k] is a row of a matrix of parts.
void unpack_part_row(const Matrix& matrix, int64_t row, float* out);

// 32 inputs of one output, taken out of a part: codes less the middle, and of each 16 of them the scale and what is added, if anything is.
struct Block {
    int32_t codes[WIDTH];
    float scale[2], more[2];
    bool halves, adds;  // each 16 have a scale of their own
};
Block block_of(const Matrix& matrix, const Part& part, int64_t output, int64_t block);

// out [count, k] of rows as a file has them.
void unpack_blocks(int type, const uint8_t* source, int64_t count, int64_t k, float* out);

}  // namespace dovetail
