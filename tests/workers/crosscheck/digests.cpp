// Prints one line for each case: what was computed, and a digest of the bytes of the result. Two builds of the kernels, for two machines, print the same.
#include "kernels.h"
#include "layer.h"
#include "packing.h"
#include "pool.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

using namespace dovetail;

extern "C" {
int dt_isas();
int dt_use_isa(int isa);
void dt_linear(const Matrix*, const float*, int64_t, float*, int64_t, int64_t);
void dt_layer(const Layer*, const Pass*);
void dt_rank(const Ranking*);
void dt_rotary_table(const float*, int64_t, float, int64_t, float*, float*);
}

namespace {

uint64_t state = 1;

// Between -1 and 1, by SplitMix64.
float number() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<float>(static_cast<int32_t>((z ^ (z >> 31)) >> 40) - (1 << 23)) / (1 << 23);
}

std::vector<float> numbers(size_t count, float size = 1.0f) {
    std::vector<float> values(count);
    for (float& value : values) value = number() * size;
    return values;
}

uint64_t digest(const std::vector<float>& values) {
    uint64_t h = 0xcbf29ce484222325u;
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(values.data());
    for (size_t i = 0; i < values.size() * sizeof(float); i++) h = (h ^ bytes[i]) * 0x100000001b3u;
    return h;
}

// A packed matrix with all that it points to.
struct Packed {
    std::vector<char> memory;
    std::vector<float> scales, bias;
    Matrix matrix{};

    Packed(int kind, int n, int k) : memory(packed_bytes(kind, n, k) + 64), scales(n), bias(numbers(n)) {
        std::vector<float> rows = numbers(static_cast<size_t>(n) * k, 0.1f);
        std::vector<uint16_t> bits(rows.size());
        for (size_t i = 0; i < rows.size(); i++) {
            uint32_t word;
            memcpy(&word, &rows[i], 4);
            bits[i] = static_cast<uint16_t>(word >> 16);
            // as fp16 some of these would not be numbers: their exponent keeps its sign and four bits
            if (kind == FP16) bits[i] &= 0xbfff;
        }
        char* start = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
        const bool half = kind == FP16 || kind == BF16;
        const void* source = half ? static_cast<const void*>(bits.data()) : rows.data();
        pack(kind, half ? kind : FP32, source, 0, n, n, k, start, scales.data());
        matrix = {kind, n, k, 0, start, kind == INT8 ? scales.data() : nullptr, bias.data()};
    }
};

void linears() {
    for (int kind : {FP32, FP16, BF16, INT8})
        for (auto [n, k] : {std::pair{64, 96}, {100, 37}, {33, 1030}}) {
            const Packed packed(kind, n, k);
            for (int m : {1, 2, 5, 8, 17, 70}) {
                const std::vector<float> x = numbers(static_cast<size_t>(m) * k);
                std::vector<float> y(static_cast<size_t>(m) * n);
                dt_linear(&packed.matrix, x.data(), k, y.data(), n, m);
                printf("linear kind %d n %d k %d m %d: %016llx\n", kind, n, k, m, static_cast<unsigned long long>(digest(y)));
            }
        }
}

void codes() {
    for (int kind : {CODES8, CODES4, CODES3, CODES2})
        for (auto [n, k] : {std::pair{64, 128}, {33, 704}}) {
            const std::vector<float> source = numbers(static_cast<size_t>(n) * k), bias = numbers(n);
            std::vector<uint8_t> codes(source.size());
            for (size_t i = 0; i < codes.size(); i++) {
                uint32_t word;
                memcpy(&word, &source[i], 4);
                codes[i] = static_cast<uint8_t>((word >> 8) & ((1u << bits_of(kind)) - 1));
            }
            std::vector<uint16_t> scales(static_cast<size_t>(n) * k / GROUP), offsets(scales.size());
            for (size_t i = 0; i < scales.size(); i++) {  // between 1/256 and 1/128, and between -1/64 and 1/64
                scales[i] = static_cast<uint16_t>(0x1c00 | (codes[i] << 4 & 0x3ff));
                offsets[i] = static_cast<uint16_t>(0x2400 | codes[i] << 5 | (i % 2 ? 0x8000 : 0));
            }
            std::vector<char> memory(static_cast<size_t>(codes_bytes(kind, n, k)) + 64);
            char* start = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
            pack_codes(kind, codes.data(), scales.data(), offsets.data(), 0, n, k, start);
            const Matrix matrix{kind, n, k, 0, start, nullptr, bias.data()};
            for (int m : {1, 2, 5, 8, 17, 70}) {
                const std::vector<float> x = numbers(static_cast<size_t>(m) * k);
                std::vector<float> y(static_cast<size_t>(m) * n);
                dt_linear(&matrix, x.data(), k, y.data(), n, m);
                printf("codes kind %d n %d k %d m %d: %016llx\n", kind, n, k, m, static_cast<unsigned long long>(digest(y)));
            }
        }
}

// Forty rows of a prompt, then a tree of four behind them.
void layer(int kind, int activation, float softcap, int window) {
    const int hidden = 48, heads = 4, kv_heads = 2, head_dim = 20, intermediate = 56, capacity = 64, prompt = 40, tree = 4;
    const bool gated = activation != GELU_TANH;
    const Packed qkv(kind, (heads + 2 * kv_heads) * head_dim, hidden), output(kind, hidden, heads * head_dim);
    const Packed gate_up(kind, (gated ? 2 : 1) * intermediate, hidden), down(kind, hidden, intermediate);
    const std::vector<float> frequencies = numbers(head_dim / 2), weight = numbers(hidden), head_weight = numbers(head_dim);
    std::vector<float> cosines(capacity * head_dim / 2), sines(cosines.size()), keys(capacity * kv_heads * head_dim), values(keys.size());
    dt_rotary_table(frequencies.data(), head_dim / 2, 1.0f, capacity, cosines.data(), sines.data());
    Layer l{};
    l.hidden = hidden, l.heads = heads, l.kv_heads = kv_heads, l.head_dim = head_dim, l.intermediate = intermediate, l.rotary_dim = head_dim;
    l.window = window, l.norm_kind = gated ? RMS : LAYER_NORM, l.activation = {activation, 0.0f, 0.0f, 0}, l.epsilon = 1e-6f, l.scale = 0.25f, l.softcap = softcap;
    l.cosines = cosines.data(), l.sines = sines.data();
    l.attention_norm = l.mlp_norm = {weight.data(), nullptr};
    l.query_norm = l.key_norm = {head_weight.data(), nullptr};
    l.qkv = qkv.matrix, l.output = output.matrix, l.gate_up = gate_up.matrix, l.down = down.matrix;
    std::vector<int64_t> positions(prompt + tree);
    for (int i = 0; i < prompt; i++) positions[i] = i;
    Segment segment{0, prompt, 0, 0, capacity, 0, keys.data(), values.data(), nullptr, nullptr};
    std::vector<float> rows = numbers(static_cast<size_t>(prompt) * hidden);
    Pass pass{rows.data(), positions.data(), &segment, prompt, 1};
    dt_layer(&l, &pass);
    printf("layer kind %d activation %d softcap %g window %d, prompt: %016llx\n", kind, activation, softcap, window, static_cast<unsigned long long>(digest(rows)));
    const int32_t offsets[] = {0, 1, 3, 5, 8}, slots[] = {40, 40, 41, 40, 42, 40, 41, 43};
    const int64_t depths[] = {40, 41, 41, 42};
    segment = {0, tree, prompt, prompt, capacity, 0, keys.data(), values.data(), nullptr, nullptr, 0, 0, offsets, slots, nullptr};
    rows = numbers(static_cast<size_t>(tree) * hidden);
    pass = {rows.data(), depths, &segment, tree, 1};
    dt_layer(&l, &pass);
    printf("layer kind %d activation %d softcap %g window %d, tree: %016llx\n", kind, activation, softcap, window, static_cast<unsigned long long>(digest(rows)));
    printf("cache: %016llx %016llx\n", static_cast<unsigned long long>(digest(keys)), static_cast<unsigned long long>(digest(values)));
}

}  // namespace

// Without an argument: the numbers of the instruction sets that are here. With one: the digests by that instruction set.
void ranking() {
    constexpr int SIZE = 70001, WIDTH = 8;
    const std::vector<float> logits = numbers(2 * SIZE, 12.0f);
    for (int cut = 0; cut < 4; cut++)
        for (int shares = 0; shares < 2; shares++) {
            std::vector<RankedRow> rows;
            for (uint64_t row = 0; row < 2; row++)
                rows.push_back({&logits[row * SIZE], 77 + row, cut == 1 ? 300 : 0, cut == 2 ? 0.9 : 1.0, cut == 3 ? -5.0f : -__builtin_inff(), 0.8f, 0.9f, 1.1f, 1});
            std::vector<float> values(2 * WIDTH), ids(2 * WIDTH);
            std::vector<int32_t> found(2 * WIDTH);
            const Ranking asked{rows.data(), 2, SIZE, WIDTH, shares, found.data(), values.data()};
            dt_rank(&asked);
            for (int i = 0; i < 2 * WIDTH; i++) ids[i] = static_cast<float>(found[i]);
            printf("ranking %d %d: %016llx %016llx\n", cut, shares, (unsigned long long)digest(ids), (unsigned long long)digest(values));
        }
}

int main(int count, char** arguments) {
    if (count < 2) {
        for (int isa = 0; isa < 8; isa++)
            if (dt_isas() >> isa & 1) printf("%d\n", isa);
        return 0;
    }
    if (dt_use_isa(atoi(arguments[1])) < 0) return 1;
    linears();
    codes();
    ranking();
    for (int kind : {FP32, FP16, BF16, INT8}) {
        layer(kind, SILU_GATED, 0.0f, 0);
        layer(kind, GELU_TANH_GATED, 5.0f, 24);
        layer(kind, GELU_TANH, 0.0f, 0);
    }
}
