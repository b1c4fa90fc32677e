// Prints one line for each case: what was computed, and a digest of the bytes of the result. Two builds of the kernels, for two machines, print the same.
#include "blocks.h"
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
int dt_search(int, const float*, int64_t, uint8_t*);
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

template <class Number>
unsigned long long digest(const std::vector<Number>& values) {
    unsigned long long h = 0xcbf29ce484222325u;
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(values.data());
    for (size_t i = 0; i < values.size() * sizeof(Number); i++) h = (h ^ bytes[i]) * 0x100000001b3u;
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
                printf("linear kind %d n %d k %d m %d: %016llx\n", kind, n, k, m, digest(y));
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
                printf("codes kind %d n %d k %d m %d: %016llx\n", kind, n, k, m, digest(y));
            }
        }
}

// Blocks of every type, their rows rounded to 8 bits and as they are.
void blocks() {
    for (int type = 0; type < 40; type++)
        with_format(type, [&](auto format) {
            using F = decltype(format);
            const int n = 37, k = 512;
            const std::vector<float> numbers_of_blocks = numbers(static_cast<size_t>(n) * k), bias = numbers(n);
            std::vector<uint8_t> source(numbers_of_blocks.size() / F::NUMBERS * F::SIZE);
            if (!dt_search(type, numbers_of_blocks.data(), n * k, source.data()))
                for (size_t i = 0; i < source.size(); i++)  // every fp16 is below 2 and is a number; MXFP4 begins with a power of two
                    source[i] = type == MXFP4::TYPE && i % F::SIZE == 0 ? 120 + i % 5 : (static_cast<int>(numbers_of_blocks[i % (n * k)] * 128) + 128) & 0xbf;
            printf("blocks of type %d: %016llx\n", type, digest(source));
            const int64_t offset = 128, bytes = part_bytes(type, n, k);
            std::vector<char> memory(offset + bytes + 64);
            char* const start = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
            *reinterpret_cast<Parts*>(start) = {1, padded(n) / VECTOR, {{type, 0, n, 0, offset}}};
            pack_blocks(type, source.data(), 0, n, k, start + offset);
            for (int kind : {BLOCKS, EXACT_BLOCKS}) {
                const Matrix matrix{kind, n, k, 0, start, nullptr, bias.data()};
                for (int m : {1, 4, 9, 20}) {
                    const std::vector<float> x = numbers(static_cast<size_t>(m) * k);
                    std::vector<float> y(static_cast<size_t>(m) * n);
                    dt_linear(&matrix, x.data(), k, y.data(), n, m);
                    printf("blocks of type %d kind %d m %d: %016llx\n", type, kind, m, digest(y));
                }
            }
        });
}

// Forty rows of a prompt through a layer whose attention or MLP is another one.
void through(const char* what, const Layer& l, const States* states = nullptr, int cache = FP32) {
    const int rows = 40, capacity = 48;
    std::vector<float> hidden = numbers(static_cast<size_t>(rows) * l.hidden), keys(static_cast<size_t>(capacity) * (l.kv_heads + 1) * (l.head_dim + 1)), values(keys.size());
    std::vector<int64_t> positions(rows);
    for (int i = 0; i < rows; i++) positions[i] = i;
    const Segment segment{0, rows, 0, 0, capacity, cache, keys.data(), values.data(), nullptr, nullptr, 0, 0, nullptr, nullptr, states};
    const Pass pass{hidden.data(), positions.data(), &segment, rows, 1};
    dt_layer(&l, &pass);
    printf("%s: %016llx\n", what, digest(hidden));
}

Layer plain_layer(int hidden, const std::vector<float>& weight) {
    Layer l{};
    l.hidden = hidden, l.norm_kind = RMS, l.activation = {SILU_GATED, 0.0f, 0.0f, 0}, l.epsilon = 1e-6f, l.scale = 0.25f;
    l.attention_norm = l.mlp_norm = {weight.data(), nullptr};
    return l;
}

void experts(int kind, int score) {
    const int hidden = 48, intermediate = 24, count = 6;
    const std::vector<float> weight = numbers(hidden), correction = numbers(count);
    std::vector<Packed> made;
    made.reserve(2 * count);
    std::vector<Matrix> gate_up, down;
    for (int i = 0; i < count; i++) {
        gate_up.push_back(made.emplace_back(kind, 2 * intermediate, hidden).matrix), down.push_back(made.emplace_back(kind, hidden, intermediate).matrix);
        gate_up[i].bias = down[i].bias = nullptr;
    }
    const Packed logits(FP32, count, hidden);
    Experts e{};
    e.router.logits = logits.matrix, e.router.correction = score == SIGMOID ? correction.data() : nullptr;
    e.router.score = score, e.router.chosen = 2, e.router.groups = e.router.chosen_groups = 1, e.router.normalised = score == SIGMOID, e.router.scale = 1.5f;
    e.gate_up = gate_up.data(), e.down = down.data();
    Layer l = plain_layer(hidden, weight);
    l.experts = &e, l.intermediate = intermediate;
    through("experts", l);
}

void states(int rule) {
    const int hidden = 48, heads = 2, key_dim = 12, value_dim = 20, values = heads * value_dim, taps = 4;
    const int channels = rule == SHORT_CONVOLUTION ? 32 : 2 * heads * key_dim + values, steps = rule == GATED_DELTA ? 2 * heads : heads;
    const Packed given(FP32, rule == SHORT_CONVOLUTION ? 3 * channels : channels + values + steps, hidden), output(FP32, hidden, rule == SHORT_CONVOLUTION ? channels : values);
    const std::vector<float> weight = numbers(hidden), taps_weights = numbers(taps * channels), step_bias = numbers(heads), skip = numbers(heads), norm = numbers(values);
    std::vector<float> decay = numbers(heads);
    for (float& value : decay) value = -1.0f - value * value;
    Scan c{};
    c.rule = rule, c.taps = taps, c.channels = channels, c.taps_weights = taps_weights.data(), c.epsilon = 1e-6f, c.query_scale = 0.5f;
    if (rule != SHORT_CONVOLUTION) {
        c.key_heads = c.value_heads = heads, c.key_dim = key_dim, c.value_dim = value_dim, c.norm_width = value_dim;
        c.decay = decay.data(), c.step_bias = step_bias.data(), c.skip = rule == SELECTIVE ? skip.data() : nullptr, c.norm_weight = norm.data();
    }
    std::vector<float> state(heads * 32 * key_dim + 16), factors(64 * 512);
    int64_t folded = 0;
    const States s{state.data(), factors.data(), &folded, 64, 40, nullptr, 0, 0};
    Layer l = plain_layer(hidden, weight);
    l.mlp_norm = {}, l.qkv = given.matrix, l.output = output.matrix, l.scan = &c;
    through("states", l, &s);
    printf("states of rule %d: %016llx %016llx\n", rule, digest(state), digest(factors));
}

void latents() {
    const int hidden = 48, heads = 3, rank = 24, plain = 12, rotary = 8, value_dim = 20, capacity = 48;
    const Packed given(FP32, heads * (plain + rotary) + rank + rotary, hidden), output(FP32, hidden, heads * value_dim);
    std::vector<Packed> made;
    made.reserve(2 * heads);
    std::vector<Matrix> key_up, value_up;
    for (int i = 0; i < heads; i++) {
        key_up.push_back(made.emplace_back(FP32, rank, plain).matrix), value_up.push_back(made.emplace_back(FP32, value_dim, rank).matrix);
        key_up[i].bias = value_up[i].bias = nullptr;
    }
    const std::vector<float> weight = numbers(hidden), latent_weight = numbers(rank), frequencies = numbers(rotary / 2);
    std::vector<float> cosines(capacity * rotary / 2), sines(cosines.size());
    dt_rotary_table(frequencies.data(), rotary / 2, 1.0f, capacity, cosines.data(), sines.data());
    Latent a{};
    a.rank = rank, a.plain = plain, a.value_dim = value_dim, a.epsilon = 1e-6f, a.latent_norm = {latent_weight.data(), nullptr}, a.key_up = key_up.data(), a.value_up = value_up.data();
    Layer l = plain_layer(hidden, weight);
    l.mlp_norm = {}, l.heads = heads, l.kv_heads = 1, l.head_dim = rank + rotary, l.rotary_dim = rotary, l.cosines = cosines.data(), l.sines = sines.data();
    l.qkv = given.matrix, l.output = output.matrix, l.latent = &a;
    for (int cache : {FP32, FP16, INT8}) through("latents", l, nullptr, cache);
}

// Forty rows of a prompt, then a tree of four behind them.
void layer(int kind, int activation, float softcap, int window, int cache = FP32) {
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
    Segment segment{0, prompt, 0, 0, capacity, cache, keys.data(), values.data(), nullptr, nullptr};
    std::vector<float> rows = numbers(static_cast<size_t>(prompt) * hidden);
    Pass pass{rows.data(), positions.data(), &segment, prompt, 1};
    dt_layer(&l, &pass);
    printf("layer kind %d activation %d softcap %g window %d, prompt: %016llx\n", kind, activation, softcap, window, digest(rows));
    const int32_t offsets[] = {0, 1, 3, 5, 8}, slots[] = {40, 40, 41, 40, 42, 40, 41, 43};
    const int64_t depths[] = {40, 41, 41, 42};
    segment = {0, tree, prompt, prompt, capacity, cache, keys.data(), values.data(), nullptr, nullptr, 0, 0, offsets, slots, nullptr};
    rows = numbers(static_cast<size_t>(tree) * hidden);
    pass = {rows.data(), depths, &segment, tree, 1};
    dt_layer(&l, &pass);
    printf("layer kind %d activation %d softcap %g window %d, tree: %016llx\n", kind, activation, softcap, window, digest(rows));
    printf("cache: %016llx %016llx\n", digest(keys), digest(values));
}

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
            printf("ranking %d %d: %016llx %016llx\n", cut, shares, digest(ids), digest(values));
        }
}

}  // namespace

// Without an argument: the numbers of the instruction sets that are here. With one: the digests by that instruction set.
int main(int count, char** arguments) {
    if (count < 2) {
        for (int isa = 0; isa < 8; isa++)
            if (dt_isas() >> isa & 1) printf("%d\n", isa);
        return 0;
    }
    if (dt_use_isa(atoi(arguments[1])) < 0) return 1;
    linears();
    codes();
    blocks();
    ranking();
    for (int kind : {FP32, FP16, BF16, INT8})
        for (int score : {SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN}) experts(kind, score);
    for (int rule : {GATED_DELTA, SELECTIVE, SHORT_CONVOLUTION}) states(rule);
    latents();
    for (int kind : {FP32, FP16, BF16, INT8}) {
        layer(kind, SILU_GATED, 0.0f, 0);
        layer(kind, GELU_TANH_GATED, 5.0f, 24);
        layer(kind, GELU_TANH, 0.0f, 0);
    }
    for (int cache : {FP16, INT8}) layer(FP32, SILU_GATED, 0.0f, 24, cache);
}
