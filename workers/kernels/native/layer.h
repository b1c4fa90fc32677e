// What a decoder layer is and what a pass is: the structures that `layer.py` mirrors field by field.
//
// The cache of a session holds, for each layer and key head, the keys in blocks of sixteen positions side by side,
//   keys   [kv_heads][capacity / 16][head_dim][16]
//   values [kv_heads][capacity][head_dim]
// one layer behind the other, so that lanes run along positions where scores are computed and along head_dim where values are summed. Capacity is a multiple of 16.
// Layers with latents have no keys there: a row's values are [capacity][head_dim], the latent and behind it the rotated key of all heads.
// Sessions that begin alike may hold the rows of that beginning once: the slots below `shared` then lie in a cache of their own, of `shared_capacity` slots,
// and the session's own cache begins with slot `shared`.
// They are floats; or halves: computed rows are then rounded to the nearest half, ties to even, and clamped to the largest one; or 8-bit codes, where the codes of a
// head are followed by 2 ceil(head_dim / 32) bytes of scales (attention.inl).
#pragma once

#include "kernels.h"
#include "scan.h"

#include <cstdint>

namespace dovetail {

enum NormKind : int { RMS = 0, LAYER_NORM = 1 };
enum HeadNorm : int { HEAD_BEFORE_ROPE = 0, HEAD_AFTER_ROPE = 1, WIDE_BEFORE_ROPE = 2 };
enum Activation : int { SILU_GATED = 0, GELU_TANH_GATED = 1, GELU_TANH = 2, RELU2 = 3, GELU = 4, XIELU = 5, SWIGLU_CLAMPED = 6, RELU = 7, RELU2_GATED = 8 };
enum MixerGate : int { BY_SIGMOID = 0, BY_SOFTPLUS = 1 };

constexpr bool gated(int activation) {
    return activation == SILU_GATED || activation == GELU_TANH_GATED || activation == SWIGLU_CLAMPED || activation == RELU2_GATED;
}

// An activation with its two numbers: of SILU_GATED the factor of the gate, or 0 for none; of XIELU the factors of what is positive and of what is negative; of
// SWIGLU_CLAMPED the factor within the sigmoid and the limit.
struct Activator {
    int32_t kind;
    float first, second;
    int32_t reserved;
};

struct Norm {
    const float* weight;  // null: there is no such norm
    const float* bias;    // LAYER_NORM: [width] or null
};

enum Score : int { SOFTMAX = 0, SIGMOID = 1, SOFTMAX_OF_CHOSEN = 2, SIGMOID_OF_CHOSEN = 3, SPARSE_MIXER = 4 };

// By which experts a row is computed, and the weight of each. The `chosen` experts of the largest scores are, each with its correction, the lower index first
// of equals; where there are groups, only those of the `chosen_groups` groups in which the two best add up to most, or of which the best is best.
struct Router {
    Matrix logits;            // [experts, hidden]
    const float* correction;  // [experts], of the choice alone; or null
    int32_t score, chosen, groups, chosen_groups;
    int32_t normalised;  // weights are divided by their sum, to which added_sum is added, or by least_sum where that is more
    float least_sum, scale;
    float epsilon;           // of the norm
    int32_t scales_input;    // what an expert reads is multiplied by its weight, and not what it gives
    int32_t best_alone;      // a group is worth what its best is
    float added_sum;
    Norm norm;            // RMS, of what the router reads; may be missing
    const float* scales;  // [experts], by which the weights are multiplied; or null
    float softcap;        // logits become softcap tanh(logit / softcap); 0: no softcap
    float jitter;         // of SPARSE_MIXER: the softmax leaves out logits that are lower, relative to the larger magnitude, by more than twice this
};

// An MLP of which each row is computed by a few experts; their outputs are added by ascending index, and then
// to that of the MLP which all rows share.
struct Experts {
    Router router;
    const Matrix* gate_up;  // [experts] of matrices as the layer's
    const Matrix* down;
    Matrix shared_gate;  // [1, hidden]: what all rows share is multiplied by the sigmoid of it; packed null: it is not
    Norm input_norm, output_norm, shared_norm;  // each may be missing; with an input norm router and experts read the states before the half's norm
    Matrix before, behind;  // [width, hidden] and [hidden, width], of what experts of another width read and of the sum of what they give; packed null: there are none
};

// A mixer with a state beside attention: both read the same states, each through a norm of its own, and what both give is added.
struct Beside {
    Norm norm;
    Matrix given;   // what the mixer reads
    Matrix output;  // [hidden, what it gives]
    float factor, attention_factor;  // of what the mixer and of what attention adds
};

// Attention over latents, from which the keys and values of all heads would follow by matrices: in the place of those matrices queries go through the first, and
// what was attended to through the second.
struct Latent {
    int32_t rank;       // numbers of a latent
    int32_t plain;      // numbers of a head's query that are not rotated; the layer's rotary_dim are, behind them
    int32_t value_dim;  // numbers of a head's value
    float epsilon;      // of the two norms
    Norm query_norm;    // RMS, [query_up.k], of what `qkv` gives first; may be missing
    Norm latent_norm;   // RMS, [rank]
    Matrix query_up;    // [heads (plain + rotary_dim), ...], queries of that; packed null: it is the queries
    const Matrix* key_up;    // [heads] of [rank, plain]
    const Matrix* value_up;  // [heads] of [value_dim, rank]
};

// Several states per token, side by side in a row (AltUp). Each first becomes itself plus a mix of all; the layer computes the first one, and each state gets a
// share of what the first has gained. Coefficients are a matrix's output for the tanh of a router's. Attention's input, with a low-rank update of it (LAuReL), is
// added to attention's result, and the sum divided by the root of 2. The layer's own input reads the first state times `scale` and is added to the others.
struct Streams {
    int32_t count;
    int32_t reserved;
    Matrix router;            // [count, hidden]
    Matrix predict, correct;  // [count count, count] and [count, count]
    Matrix left, right;       // [rank, hidden] and [hidden, rank]
    Norm router_norm, norm;   // RMS: of what the router reads, and of the low-rank update
    const float* scale;       // [hidden]
};

struct Layer {
    int64_t before;        // the numbers that a row's keys take in the layers before this one in a cache
    int64_t codes_before;  // the bytes that they take as codes
    int32_t hidden, heads, kv_heads, head_dim, intermediate;
    int32_t rotary_dim;  // how many of head_dim are rotated; 0: none
    int32_t window;      // a position sees itself and window - 1 before it; 0: all
    int32_t norm_kind;
    Activator activation;
    float epsilon, scale, softcap;  // scores are multiplied by scale; softcap 0: none
    float scalar;                   // the layer's result is multiplied by it; 0: it is not
    const float* cosines;  // [context, rotary_dim / 2]
    const float* sines;
    Norm attention_norm, post_attention_norm, mlp_norm, post_mlp_norm;  // each may be missing; the post norms are on what a half adds
    Norm query_norm, key_norm;                                          // [head_dim] on each head, or [heads head_dim] and [kv_heads head_dim] if wide; always RMS
    Matrix qkv;      // [(heads + 2 kv_heads) head_dim, hidden], or [heads head_dim, hidden] if it reads another's keys and values; packed null: there is no first half
    Matrix output;   // [hidden, heads head_dim]
    Matrix gate_up;  // [2 intermediate, hidden], the gate's rows first; without a gate [intermediate, hidden]; packed null: experts are all of the MLP, or there is none
    Matrix down;     // [hidden, intermediate]
    float residual;     // what the first half adds is multiplied by it; 0: it is not
    int32_t head_norm;  // where the norms of queries and keys stand
    int32_t parallel;   // the MLP reads what attention read, and not its sum
    int32_t chunk;      // a position sees those before it back to a multiple of chunk; 0: all
    const Experts* experts;  // null: there are none
    const float* query_factors;  // [context], of queries; or null
    const float* sinks;          // [heads], scores that no value belongs to; or null
    Norm value_norm;             // [head_dim] on each head; RMS; may be missing
    const Scan* scan;            // in the place of attention, behind `qkv`, or beside it; null: there is none
    const Beside* beside;        // null: the mixer with a state, if there is one, stands in the place of attention
    const Latent* latent;        // `qkv` gives queries, or what becomes them, and then a latent and a key; kv_heads is 1, head_dim rank + rotary_dim; null: there is none
    Matrix mixer_gate;           // [heads head_dim or heads, hidden], the gates of attention's result, before `gate_kind`; packed null: there are none
    float key_factor;            // keys, behind norm and rotation, are multiplied by it; 0: they are not
    float mlp_residual;          // what the MLP adds is multiplied by it; 0: it is not
    Matrix input_gate, input_projection;  // [width, hidden] and [hidden, width] of the layer's own input; packed null: there is none
    Norm input_norm;                      // of what that adds
    int32_t input_first;                  // where its input begins in a row of all of them
    int32_t reads;  // the keys and values, which `before` says, are another layer's, and `qkv` gives queries alone
    float clip;         // queries, keys and values are clipped to -clip .. clip after wide norms; 0: no clipping
    int32_t gate_kind;  // of mixer_gate
    Matrix scan_gate, scan_decay;  // of a CHANNEL_DELTA, [value_heads value_dim, low] and [value_heads key_dim, low]; packed null: there are none
    Norm mixer_norm, inner_norm;  // [output.k] of what `output` reads and [intermediate] of what `down` reads; either may be missing
    const Streams* streams;  // null: a token has one state
    float cut;               // gates are lessened by their mean plus this many deviations, and what is then negative is 0; 0: they are not
};

// The rows of one session in a pass. They are written to slots start .. start + count - 1.
// A row sees the slots 0 .. prefix - 1 and then those of its path, in this order, itself last. Without paths row i sees slots 0 .. start + i.
struct Segment {
    int32_t first_row, count, start, prefix, capacity;
    int32_t kind;   // of the cache's numbers: FP32, FP16 or INT8
    void* keys;     // of the whole cache
    void* values;
    void* shared_keys;  // of the shared beginning, which is only read
    void* shared_values;
    int32_t shared, shared_capacity;  // shared: a multiple of 16, at most start and prefix
    const int32_t* path_offsets;  // [count + 1] into path_slots, or null
    const int32_t* path_slots;
    const States* states;  // of layers with one; null where there are none
};

struct Pass {
    float* hidden;             // [rows, hidden], or [rows, streams hidden]; in place
    const int64_t* positions;  // [rows], into the rotary table
    const Segment* segments;
    int32_t rows, segment_count;
    const float* inputs;  // [rows, input_stride], of layers with inputs of their own; or null
    int64_t input_stride;
    int64_t* parts;  // nanoseconds of the matrices, those of attention, and the experts that rows go through are added to these three; null: nobody asks
};

}  // namespace dovetail
