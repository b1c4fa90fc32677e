// Blocks of a GGUF file -> the layout of blocks.h, and their numbers in fp32.
//
// Each format has one function that takes a block apart; layout and numbers follow from the facts in blocks.h. Formats: ggml's ggml-common.h.
#include "blocks.h"

#include "codebooks.h"

#include <cmath>
#include <cstring>

namespace dovetail {
namespace {

template <int COUNT>
constexpr Book book(const char (&text)[COUNT], uint32_t base) {
    Book made{};
    uint32_t number = 0;
    int found = 0;
    for (int i = 0; i < COUNT - 1; i++) {
        if (text[i] == '+') {
            number += 52;
            continue;
        }
        number += static_cast<uint32_t>(text[i] < 'a' ? text[i] - 'A' : text[i] - 'a' + 26);
        uint32_t rest = number, fours = 0, words = 0;
        for (int j = 0; rest > 0; j++, rest /= base) fours |= rest % base << (8 * (j % 4) + 4 * (j / 4));
        for (int j = 0; j < 4; j++) words |= ((fours >> 8 * j & 15) | (fours >> 8 * j & 0xf0) >> 2) << 4 * (j % 2 * 2 + j / 2);
        made.fours[found] = fours, made.words[found++] = static_cast<uint16_t>(words);
    }
    return made;
}

// A block of the file, one code a byte. Scales and minima are those of 32 inputs or of 16.
struct Taken {
    uint8_t codes[256];
    uint16_t indices[64];  // of a codebook; `codes` then has their choices, plus 8 for a minus
    uint16_t d, less;      // fp16
    uint8_t scales[16], minima[16];
};

inline uint16_t half_at(const uint8_t* p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
    return bits;
}

// Input j has the lower half of byte j, input j + 16 the upper one.
inline void take_nibbles(const uint8_t* p, uint8_t* codes) {
    for (int j = 0; j < 16; j++) codes[j] = p[j] & 15;
    for (int j = 0; j < 16; j++) codes[16 + j] = p[j] >> 4;
}

// Each 32 bytes have the codes of two times 32 inputs.
inline void take_pairs(const uint8_t* p, uint8_t* codes) {
    for (int i = 0; i < 4; i++, p += 32, codes += 64) {
        for (int j = 0; j < 32; j++) codes[j] = p[j] & 15;
        for (int j = 0; j < 32; j++) codes[32 + j] = p[j] >> 4;
    }
}

// Each 32 bytes have two bits of four times 32 inputs.
inline void take_quarters(const uint8_t* p, uint8_t* codes) {
    for (int i = 0; i < 2; i++, p += 32)
        for (int shift = 0; shift < 8; shift += 2, codes += 32)
            for (int j = 0; j < 32; j++) codes[j] = p[j] >> shift & 3;
}

inline void add_fifth(const uint8_t* p, uint8_t* codes) {
    uint32_t bits;
    memcpy(&bits, p, 4);
    for (int j = 0; j < 32; j++) codes[j] |= static_cast<uint8_t>((bits >> j & 1) << 4);
}

// Scales and minima of six bits in twelve bytes.
inline void take_sixes(const uint8_t* p, Taken& to) {
    for (int b = 0; b < 4; b++) {
        to.scales[b] = p[b] & 63;
        to.minima[b] = p[b + 4] & 63;
        to.scales[b + 4] = static_cast<uint8_t>((p[b + 8] & 15) | p[b] >> 6 << 4);
        to.minima[b + 4] = static_cast<uint8_t>(p[b + 8] >> 4 | p[b + 4] >> 6 << 4);
    }
}

inline void take(Q8_0, const uint8_t* p, Taken& to) {
    to.d = half_at(p);
    memcpy(to.codes, p + 2, 32);
}
inline void take(Q4_0, const uint8_t* p, Taken& to) {
    to.d = half_at(p);
    take_nibbles(p + 2, to.codes);
}
inline void take(Q4_1, const uint8_t* p, Taken& to) {
    to.d = half_at(p), to.less = half_at(p + 2);
    take_nibbles(p + 4, to.codes);
}
inline void take(Q5_0, const uint8_t* p, Taken& to) {
    to.d = half_at(p);
    take_nibbles(p + 6, to.codes);
    add_fifth(p + 2, to.codes);
}
inline void take(Q5_1, const uint8_t* p, Taken& to) {
    to.d = half_at(p), to.less = half_at(p + 2);
    take_nibbles(p + 8, to.codes);
    add_fifth(p + 4, to.codes);
}
inline void take(Q4_K, const uint8_t* p, Taken& to) {
    to.d = half_at(p), to.less = half_at(p + 2);
    take_sixes(p + 4, to);
    take_pairs(p + 16, to.codes);
}
inline void take(Q5_K, const uint8_t* p, Taken& to) {
    to.d = half_at(p), to.less = half_at(p + 2);
    take_sixes(p + 4, to);
    take_pairs(p + 48, to.codes);
    for (int b = 0; b < 8; b++)
        for (int j = 0; j < 32; j++) to.codes[32 * b + j] |= static_cast<uint8_t>((p[16 + j] >> b & 1) << 4);
}
inline void take(Q6_K, const uint8_t* p, Taken& to) {
    uint8_t high[256];
    take_quarters(p + 128, high);
    for (int h = 0; h < 2; h++, p += 64)
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 32; j++) {
                const int at = 128 * h + 32 * i + j;
                to.codes[at] = static_cast<uint8_t>((p[32 * (i & 1) + j] >> 4 * (i >> 1) & 15) | high[at] << 4);
            }
    p -= 128;
    memcpy(to.scales, p + 192, 16);
    to.d = half_at(p + 208);
}
inline void take(Q3_K, const uint8_t* p, Taken& to) {
    take_quarters(p + 32, to.codes);
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 32; j++) to.codes[32 * i + j] |= static_cast<uint8_t>((p[j] >> i & 1) << 2);
    for (int i = 0; i < 16; i++) {
        const int low = p[96 + i % 8] >> 4 * (i / 8) & 15, high = p[104 + i % 4] >> 2 * (i / 4) & 3;
        to.scales[i] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    to.d = half_at(p + 108);
}
inline void take(Q2_K, const uint8_t* p, Taken& to) {
    take_quarters(p + 16, to.codes);
    for (int i = 0; i < 16; i++) to.scales[i] = p[i] & 15, to.minima[i] = p[i] >> 4;
    to.d = half_at(p + 80), to.less = half_at(p + 82);
}
inline void take(IQ4_NL, const uint8_t* p, Taken& to) { take(Q4_0{}, p, to); }
inline void take(IQ4_XS, const uint8_t* p, Taken& to) {
    to.d = half_at(p);
    const int high = half_at(p + 2);
    for (int b = 0; b < 8; b++) {
        to.scales[b] = static_cast<uint8_t>(((p[4 + b / 2] >> 4 * (b & 1) & 15) | (high >> 2 * b & 3) << 4) - 32);
        take_nibbles(p + 8 + 16 * b, to.codes + 32 * b);
    }
}

inline uint32_t word_at(const uint8_t* p) {
    uint32_t bits;
    memcpy(&bits, p, 4);
    return bits;
}

// Indices -> codes. `signs` has a bit for each input.
template <class F>
inline void choose(const uint8_t* signs, int count, Taken& to) {
    constexpr int EACH = entry_inputs<F>();
    for (int i = 0; i < count; i++) {
        const int at = i % EACH;
        const uint32_t choice = book_of<F>().fours[to.indices[i / EACH]] >> (8 * (at % 4) + 4 * (at / 4)) & (EACH == 8 ? 3 : 7);
        to.codes[i] = static_cast<uint8_t>(choice | (signs[i / 8] >> i % 8 & 1) << 3);
    }
}

// Seven signs, and an eighth that makes the number of minuses even.
inline uint8_t even_signs(uint32_t seven) { return static_cast<uint8_t>((seven & 127) | static_cast<uint32_t>(__builtin_parity(seven & 127)) << 7); }

// For every 32 inputs, a word with four groups of seven signs and a scale.
template <class F>
inline void choose_even(const uint8_t* words, int apart, Taken& to) {
    uint8_t signs[32];
    for (int i = 0; i < 32; i++) signs[i] = even_signs(word_at(words + i / 4 * apart) >> 7 * (i % 4));
    for (int b = 0; b < 8; b++) to.scales[b] = static_cast<uint8_t>(word_at(words + b * apart) >> 28);
    choose<F>(signs, 256, to);
}

inline void take_nibble_pairs(const uint8_t* p, int count, Taken& to) {
    for (int i = 0; i < count; i++) to.scales[i] = p[i / 2] >> i % 2 * 4 & 15;
}

inline void take(IQ2_XXS, const uint8_t* p, Taken& to) {
    to.d = half_at(p);
    for (int i = 0; i < 32; i++) to.indices[i] = p[2 + i / 4 * 8 + i % 4];
    choose_even<IQ2_XXS>(p + 6, 8, to);
}
inline void take(IQ3_XXS, const uint8_t* p, Taken& to) {
    to.d = half_at(p);
    for (int i = 0; i < 64; i++) to.indices[i] = p[2 + i];
    choose_even<IQ3_XXS>(p + 66, 4, to);
}
inline void take(IQ2_XS, const uint8_t* p, Taken& to) {
    uint8_t signs[32];
    to.d = half_at(p);
    for (int i = 0; i < 32; i++) to.indices[i] = half_at(p + 2 + 2 * i) & 511, signs[i] = even_signs(half_at(p + 2 + 2 * i) >> 9);
    take_nibble_pairs(p + 66, 16, to);
    choose<IQ2_XS>(signs, 256, to);
}
inline void take(IQ2_S, const uint8_t* p, Taken& to) {
    to.d = half_at(p);
    for (int i = 0; i < 32; i++) to.indices[i] = static_cast<uint16_t>(p[2 + i] | (p[66 + i / 4] >> 2 * (i % 4) & 3) << 8);
    take_nibble_pairs(p + 74, 16, to);
    choose<IQ2_S>(p + 34, 256, to);
}
inline void take(IQ3_S, const uint8_t* p, Taken& to) {
    to.d = half_at(p);
    for (int i = 0; i < 64; i++) to.indices[i] = static_cast<uint16_t>(p[2 + i] | (p[66 + i / 8] >> i % 8 & 1) << 8);
    take_nibble_pairs(p + 106, 8, to);
    choose<IQ3_S>(p + 74, 256, to);
}
// Each byte has `count` base-3 digits as a fraction of 256; the first digits of all bytes come first.
inline uint8_t* take_digits(const uint8_t* p, int bytes, int count, uint8_t* codes) {
    for (int power = 1; count > 0; count--, power *= 3)
        for (int j = 0; j < bytes; j++) *codes++ = static_cast<uint8_t>((p[j] * power & 255) * 3 >> 8);
    return codes;
}
inline void take(TQ1_0, const uint8_t* p, Taken& to) {
    to.d = half_at(p + 52);
    take_digits(p + 48, 4, 4, take_digits(p + 32, 16, 5, take_digits(p, 32, 5, to.codes)));
}
inline void take(TQ2_0, const uint8_t* p, Taken& to) {
    to.d = half_at(p + 64);
    take_quarters(p, to.codes);
}
inline void take(MXFP4, const uint8_t* p, Taken& to) {
    to.scales[0] = p[0];
    take_nibbles(p + 1, to.codes);
}

// Above it a number of MXFP4 is infinite, or would become so in a product.
constexpr int LARGEST_POWER = 252;

// Where d stands in a block.
template <class F>
constexpr int d_at() {
    return F::TYPE == Q6_K::TYPE ? 208 : F::TYPE == Q3_K::TYPE ? 108 : F::TYPE == Q2_K::TYPE ? 80 : F::TYPE == TQ1_0::TYPE ? 52 : F::TYPE == TQ2_0::TYPE ? 64 : 0;
}

template <class F>
bool is_finite(const uint8_t* p) {
    const auto finite = [](uint16_t bits) { return (bits & 0x7c00) != 0x7c00; };
    if constexpr (F::SCALES == POWER) return p[0] <= LARGEST_POWER;
    else return finite(half_at(p + d_at<F>())) && (!(with_minima(F::SCALES) || F::SCALES == HALF_AND_MORE) || finite(half_at(p + d_at<F>() + 2)));
}

template <class F>
int64_t wrong_row_of(const uint8_t* source, int64_t count, int64_t k) {
    for (int64_t row = 0; row < count; row++)
        for (int64_t u = 0; u < k / F::NUMBERS; u++, source += F::SIZE)
            if (!is_finite<F>(source)) return row;
    return -1;
}

// A plane of `bits` bits of the eight steps of one output, of codes that are shifted down by `from` first.
inline void put_plane(const uint8_t* codes, int bits, int from, char* plane) {
    for (int line = 0; line < bits; line++) {
        uint32_t word = 0;
        for (int step = line, shift = 0; step < STEPS; step += bits, shift += bits) {
            uint32_t four;
            memcpy(&four, codes + 4 * step, 4);
            word |= (four >> from & 0x01010101u * ((1u << bits) - 1)) << shift;
        }
        memcpy(plane + 64 * line, &word, 4);
    }
}

// Four bits of one of sixteen outputs.
inline void put_nibble(int value, int64_t lane, char* out) {
    const int shift = lane < 8 ? 0 : 4;
    out[lane % 8] = static_cast<char>((out[lane % 8] & 0xf0 >> shift) | value << shift);
}
inline int get_nibble(const char* p, int64_t lane) { return static_cast<uint8_t>(p[lane % 8]) >> (lane < 8 ? 0 : 4) & 15; }

// The indices of a codebook and the signs of 32 inputs of one output.
template <class F>
inline void put_indices(const Taken& from, int block, int64_t lane, char* out) {
    int high = 0;
    for (int i = 0; i < entries<F>(); i++) {
        const int index = from.indices[entries<F>() * block + i];
        out[64 * (i / 4) + 4 * lane + i % 4] = static_cast<char>(index);
        high |= (index >> 8) << i * (index_bits<F>() - 8);
    }
    put_plane(from.codes + WIDTH * block, 1, 3, out + 16 * entries<F>() + 4 * lane);
    char* const behind = out + 64 * F::BITS;
    if constexpr (high_bits<F>() == 8) behind[lane] = static_cast<char>(high);
    else if constexpr (high_bits<F>() == 4) put_nibble(high, lane, behind);
}

// The codes of 32 inputs of one output; `out` is that of its four bytes in the first line.
template <class F>
inline void put_codes(const uint8_t* codes, char* out) {
    if constexpr (F::BITS == 8)
        for (int step = 0; step < STEPS; step++) memcpy(out + 64 * step, codes + 4 * step, 4);
    else if constexpr (F::BITS < 4) {
        put_plane(codes, 2, 0, out);
        if constexpr (F::BITS == 3) put_plane(codes, 1, 2, out + 128);
    } else {
        put_plane(codes, 4, 0, out);
        if constexpr (F::BITS > 4) put_plane(codes, F::BITS - 4, 4, out + 256);
    }
}

template <class F>
inline void put_scales(const Taken& from, int block, int64_t lane, char* out) {
    const int own = by_sixteens(F::SCALES) ? 2 * block : block;
    if constexpr (F::SCALES == HALF || F::SCALES == HALF_AND_MORE) {
        memcpy(out + 2 * lane, &from.d, 2);
        if constexpr (F::SCALES == HALF_AND_MORE) memcpy(out + 32 + 2 * lane, &from.less, 2);
    } else if constexpr (in_nibbles(F::SCALES)) {
        for (int i = 0; i <= by_sixteens(F::SCALES); i++) put_nibble(from.scales[own + i], lane, out + 8 * i);
    } else {
        out[lane] = static_cast<char>(from.scales[own]);
        if constexpr (F::SCALES == BYTE_AND_LESS) out[16 + lane] = static_cast<char>(from.minima[own]);
        if constexpr (by_sixteens(F::SCALES)) out[16 + lane] = static_cast<char>(from.scales[own + 1]);
        if constexpr (F::SCALES == BYTES_AND_LESS) {
            out[32 + lane] = static_cast<char>(from.minima[own]);
            out[48 + lane] = static_cast<char>(from.minima[own + 1]);
        }
    }
}

template <class F>
void pack_rows(const uint8_t* source, int64_t first, int64_t count, int64_t k, char* part) {
    constexpr int BLOCKS_OF = F::NUMBERS / WIDTH;
    const int64_t units = k / F::NUMBERS, row_bytes = units * F::SIZE, vector = vector_bytes_of<F>(k / WIDTH);
    Taken block{};
    for (int64_t from = 0; from < count; from += VECTOR) {
        char* out = part + (first + from) / VECTOR * vector;
        for (int64_t u = 0; u < units; u++, out += super_bytes<F>() + BLOCKS_OF * part_block_bytes<F>())
            for (int64_t lane = 0; lane < VECTOR && from + lane < count; lane++) {
                take(F{}, source + (from + lane) * row_bytes + u * F::SIZE, block);
                if constexpr (scaled_twice(F::SCALES)) {
                    memcpy(out + 2 * lane, &block.d, 2);
                    if constexpr (with_minima(F::SCALES)) memcpy(out + 32 + 2 * lane, &block.less, 2);
                }
                char* own = out + super_bytes<F>();
                for (int b = 0; b < BLOCKS_OF; b++, own += part_block_bytes<F>()) {
                    put_scales<F>(block, b, lane, own);
                    if constexpr (has_book<F>()) put_indices<F>(block, b, lane, own + scales_bytes(F::SCALES));
                    else put_codes<F>(block.codes + WIDTH * b, own + scales_bytes(F::SCALES) + 4 * lane);
                }
            }
    }
}

template <class F>
inline int32_t number_of(uint8_t code) {
    if constexpr (numbers_of<F>() != nullptr) return numbers_of<F>()[code] - F::MIDDLE;
    else if constexpr (signed_codes<F>()) return static_cast<int8_t>(code);
    else return code - F::MIDDLE;
}

// The scale of 32 inputs or of 16, and what is added.
template <class F>
inline void scale_of(const Taken& b, int own, float& scale, float& more) {
    more = 0;
    if constexpr (F::SCALES == POWER) scale = std::ldexp(1.0f, b.scales[0] - 128);
    else if constexpr (in_nibbles(F::SCALES)) scale = widened(FP16, b.d) * unit_of<F>() * (static_cast<float>(b.scales[own]) + 0.5f);
    else if constexpr (!scaled_twice(F::SCALES)) {
        scale = widened(FP16, b.d);
        if constexpr (F::SCALES == HALF_AND_MORE) more = widened(FP16, b.less);
    } else {
        scale = widened(FP16, b.d) * (with_minima(F::SCALES) ? static_cast<float>(b.scales[own]) : static_cast<float>(static_cast<int8_t>(b.scales[own])));
        if constexpr (with_minima(F::SCALES)) more = -(widened(FP16, b.less) * static_cast<float>(b.minima[own]));
    }
}

// The other way round: a block of one output out of the packed ones.
inline void get_plane(const char* plane, int bits, int from, uint8_t* codes) {
    for (int step = 0; step < STEPS; step++)
        for (int at = 0; at < 4; at++)
            codes[4 * step + at] |= static_cast<uint8_t>((static_cast<uint8_t>(plane[64 * (step % bits) + at]) >> step / bits * bits & ((1 << bits) - 1)) << from);
}

template <class F>
inline void get_codes(const char* packed, uint8_t* codes) {
    memset(codes, 0, WIDTH);
    if constexpr (F::BITS == 8)
        for (int step = 0; step < STEPS; step++) memcpy(codes + 4 * step, packed + 64 * step, 4);
    else if constexpr (F::BITS < 4) {
        get_plane(packed, 2, 0, codes);
        if constexpr (F::BITS == 3) get_plane(packed + 128, 1, 2, codes);
    } else {
        get_plane(packed, 4, 0, codes);
        if constexpr (F::BITS > 4) get_plane(packed + 256, F::BITS - 4, 4, codes);
    }
}

template <class F>
inline void get_indices(const char* packed, int64_t lane, Taken& to) {
    constexpr int ABOVE = index_bits<F>() - 8;
    const char *const signs = packed + 16 * entries<F>(), *const behind = packed + 64 * F::BITS;
    int high = 0;
    if constexpr (high_bits<F>() == 8) high = static_cast<uint8_t>(behind[lane]);
    else if constexpr (high_bits<F>() == 4) high = get_nibble(behind, lane);
    uint8_t own[4] = {};
    for (int i = 0; i < entries<F>(); i++)
        to.indices[i] = static_cast<uint16_t>(static_cast<uint8_t>(packed[64 * (i / 4) + 4 * lane + i % 4]) | (high >> i * ABOVE & ((1 << ABOVE) - 1)) << 8);
    for (int i = 0; i < WIDTH; i++) own[i / 8] |= static_cast<uint8_t>((static_cast<uint8_t>(signs[4 * lane + i % 4]) >> i / 4 & 1) << i % 8);
    choose<F>(own, WIDTH, to);
}

template <class F>
inline void get_scales(const char* p, int64_t lane, Taken& to) {
    if constexpr (F::SCALES == HALF || F::SCALES == HALF_AND_MORE) {
        memcpy(&to.d, p + 2 * lane, 2);
        if constexpr (F::SCALES == HALF_AND_MORE) memcpy(&to.less, p + 32 + 2 * lane, 2);
    } else if constexpr (in_nibbles(F::SCALES)) {
        for (int i = 0; i <= by_sixteens(F::SCALES); i++) to.scales[i] = static_cast<uint8_t>(get_nibble(p + 8 * i, lane));
    } else {
        to.scales[0] = static_cast<uint8_t>(p[lane]);
        if constexpr (F::SCALES == BYTE_AND_LESS) to.minima[0] = static_cast<uint8_t>(p[16 + lane]);
        if constexpr (by_sixteens(F::SCALES)) to.scales[1] = static_cast<uint8_t>(p[16 + lane]);
        if constexpr (F::SCALES == BYTES_AND_LESS) to.minima[0] = static_cast<uint8_t>(p[32 + lane]), to.minima[1] = static_cast<uint8_t>(p[48 + lane]);
    }
}

// `count` numbers of a block, each OWN of them with scales of their own.
template <class F>
inline void put_numbers(const Taken& block, int count, float* out) {
    constexpr int OWN = by_sixteens(F::SCALES) ? 16 : 32;
    for (int from = 0; from < count; from += OWN) {
        float scale, more;
        scale_of<F>(block, from / OWN, scale, more);
        for (int i = from; i < from + OWN; i++) {
            out[i] = static_cast<float>(number_of<F>(block.codes[i])) * scale;
            if (with_minima(F::SCALES) || F::SCALES == HALF_AND_MORE) out[i] += more;
        }
    }
}

// Block b of the blocks of a vector of outputs.
template <class F>
Taken take_back(const char* vector, int64_t b, int64_t lane) {
    const char* const super = vector + b / SUPER * (SUPER * part_block_bytes<F>() + super_bytes<F>());
    const char* const at = scaled_twice(F::SCALES) ? super + super_bytes<F>() + b % SUPER * part_block_bytes<F>() : vector + b * part_block_bytes<F>();
    Taken block{};
    if (scaled_twice(F::SCALES)) memcpy(&block.d, super + 2 * lane, 2);
    if (with_minima(F::SCALES)) memcpy(&block.less, super + 32 + 2 * lane, 2);
    get_scales<F>(at, lane, block);
    const char* const codes = at + scales_bytes(F::SCALES);
    if constexpr (has_book<F>()) get_indices<F>(codes, lane, block);
    else get_codes<F>(codes + 4 * lane, block.codes);
    return block;
}

template <class F>
void unpack_row_of(const char* part, int64_t row, int64_t k, float* out) {
    const char* const vector = part + row / VECTOR * vector_bytes_of<F>(k / WIDTH);
    for (int64_t b = 0; b < k / WIDTH; b++, out += WIDTH) put_numbers<F>(take_back<F>(vector, b, row % VECTOR), WIDTH, out);
}

template <class F>
void take_block(const char* part, int64_t row, int64_t b, int64_t k, Block& to) {
    const Taken block = take_back<F>(part + row / VECTOR * vector_bytes_of<F>(k / WIDTH), b, row % VECTOR);
    for (int i = 0; i < WIDTH; i++) to.codes[i] = number_of<F>(block.codes[i]);
    to.halves = by_sixteens(F::SCALES), to.adds = with_minima(F::SCALES) || F::SCALES == HALF_AND_MORE;
    for (int i = 0; i < 2; i++) scale_of<F>(block, by_sixteens(F::SCALES) ? i : 0, to.scale[i], to.more[i]);
}

template <class F>
void unpack_rows(const uint8_t* source, int64_t count, int64_t k, float* out) {
    Taken block{};
    for (int64_t u = 0; u < count * (k / F::NUMBERS); u++, source += F::SIZE, out += F::NUMBERS) {
        take(F{}, source, block);
        put_numbers<F>(block, F::NUMBERS, out);
    }
}

}  // namespace

constexpr Book IQ2_XXS_BOOK = book(IQ2_XXS_ENTRIES, 3), IQ2_XS_BOOK = book(IQ2_XS_ENTRIES, 3), IQ2_S_BOOK = book(IQ2_S_ENTRIES, 3);
constexpr Book IQ3_XXS_BOOK = book(IQ3_XXS_ENTRIES, 8), IQ3_S_BOOK = book(IQ3_S_ENTRIES, 8);

int64_t part_bytes(int type, int64_t n, int64_t k) {
    int64_t bytes = 0;
    if (type < 0) return packed_bytes(-1 - type, n, k);
    with_format(type, [&](auto format) { bytes = padded(n) / VECTOR * vector_bytes_of<decltype(format)>(k / WIDTH); });
    return bytes;
}

int64_t wrong_row(int type, const uint8_t* source, int64_t count, int64_t k) {
    int64_t wrong = -1;
    with_format(type, [&](auto format) { wrong = wrong_row_of<decltype(format)>(source, count, k); });
    return wrong;
}

void pack_blocks(int type, const uint8_t* source, int64_t first, int64_t count, int64_t k, char* part) {
    with_format(type, [&](auto format) { pack_rows<decltype(format)>(source, first, count, k, part); });
}

void unpack_part_row(const Matrix& m, int64_t row, float* out) {
    const Parts& parts = parts_of(m);
    int64_t i = 0;
    while (row >= parts.part[i].first + parts.part[i].count) i++;
    const Part& part = parts.part[i];
    const char* const packed = static_cast<const char*>(m.packed) + part.offset;
    if (part.type < 0) return unpack_row({-1 - part.type, part.count, m.k, 0, packed, nullptr, nullptr}, row - part.first, out);
    with_format(part.type, [&](auto format) { unpack_row_of<decltype(format)>(packed, row - part.first, m.k, out); });
}

Block block_of(const Matrix& m, const Part& part, int64_t output, int64_t block) {
    Block found;
    with_format(part.type, [&](auto format) { take_block<decltype(format)>(static_cast<const char*>(m.packed) + part.offset, output, block, m.k, found); });
    return found;
}

void unpack_blocks(int type, const uint8_t* source, int64_t count, int64_t k, float* out) {
    with_format(type, [&](auto format) { unpack_rows<decltype(format)>(source, count, k, out); });
}

}  // namespace dovetail
