// A mixer with a state, which stands in the place of attention: a short convolution over the last rows, and behind it, for each value head, a matrix that decays
// and is added to. The structures that `states.py` mirrors field by field.
//
// Of each session there is one state, which holds the rows up to the `folded` of each layer, and for the rows behind them what they add to it: a row's factors.
//   state   [layers][value_heads][value_dim / 16][key_dim][16], one layer behind the other
//   factors [layers][ring][row]: the convolution's input [channels], the key [key_heads key_dim], what it adds [value_heads value_dim], the decays,
//           each rounded up to 16 floats; slot s of the cache stands in row s mod ring, or where rows are lent in row s - lent_first of these
// The factors of the taps - 1 rows before `folded` are there too, for the convolution.
#pragma once

#include "kernels.h"

#include <cstdint>

namespace dovetail {

// GATED_DELTA: S = a S + k (b (v - (a S)^T k)), o = S^T q. CHANNEL_DELTA: the same with an a for each number of the key. SELECTIVE (Mamba-2): S = a S + k (step v), o = S^T q + skip v. SHORT_CONVOLUTION: there is no S.
enum ScanRule : int { GATED_DELTA = 0, SELECTIVE = 1, SHORT_CONVOLUTION = 2, CHANNEL_DELTA = 3 };

// What the matrix before it gives of a row:
//   GATED_DELTA       [query | key | value | gate | b | a], the first three go through the convolution
//   CHANNEL_DELTA     [query | key | value | b | low gate | low a], likewise, followed by what two matrices make of the low ones: [gate | a]
//   SELECTIVE         [query | key | value | gate | step], likewise
//   SHORT_CONVOLUTION [before | behind | x], each as wide as the convolution: behind * convolution(before * x)
struct Scan {
    int64_t state_before;  // floats of a session's state of the layers with one before this layer
    int64_t row_before;    // floats of a row's factors of those layers
    int32_t index;         // of this layer among them
    int32_t rule;
    int32_t taps, channels;  // of the convolution
    int32_t key_heads, value_heads, key_dim, value_dim;
    int32_t norm_width;  // numbers that have a norm together
    int32_t gate_first;  // the norm is of what has been multiplied by the gate
    float epsilon, query_scale, step_factor;  // step_factor: of the gated delta rule's b
    int32_t low;  // width of the low gate, and of the low a
    const float* taps_weights;  // [taps][channels], the oldest row's first
    const float* taps_bias;     // [channels], or null
    const float* decay;         // [value_heads], of which a row has e^(decay step)
    const float* step_bias;     // [value_heads], of CHANNEL_DELTA [value_heads key_dim]
    const float* skip;          // [value_heads], or null
    const float* given_factors; // of all that the matrix gives of a row; or null
    const float* norm_weight;   // [norm_width], or [value_heads value_dim]; or null
    int64_t norm_stride;        // floats from the weights of a norm to those of the next
};

// The state of a session.
struct States {
    float* state;
    float* factors;
    int64_t* folded;  // of each layer, how many rows its state holds
    int32_t ring;     // rows of factors that there is room for
    int32_t fold;     // the pass is to take the rows up to this slot into the state; its last one where all rows of the segment are committed
    float* lent;      // [layers][lent_room][row]: the factors of the slots from lent_first on, which are another model's over the same state; or null
    int32_t lent_first, lent_room;
};

}  // namespace dovetail
