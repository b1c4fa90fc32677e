// What Python calls of a decoder layer: the layer, its parts one by one, and the table of its rotary angles.
#include "layer.h"
#include "pool.h"

#include <cmath>
#include <cstdint>
#include <cstring>

using namespace dovetail;

namespace {

struct Angle {
    double sine, cosine;
};

// Sine and cosine by x = n pi/2 + r, |r| <= pi/4, pi/2 in three parts of which the first two have 33 bits, and the Taylor series of r to degree 17.
// Only operations that IEEE 754 rounds exactly, so that a table has the same bytes wherever it is built.
Angle angle(double x) {
    const double n = std::floor(x * 0.63661977236758134308 + 0.5);
    const double r = ((x - n * 1.57079632673412561417) - n * 6.07710050630396597660e-11) - n * 2.02226624879595063154e-21;
    const double z = r * r;
    double sine = 1.0, cosine = 1.0;
    for (int k = 16; k >= 2; k -= 2) sine = 1.0 - sine * z / ((k + 1) * k);
    for (int k = 16; k >= 2; k -= 2) cosine = 1.0 - cosine * z / (k * (k - 1));
    sine *= r;
    switch (static_cast<int64_t>(n) & 3) {
        case 0: return {sine, cosine};
        case 1: return {cosine, -sine};
        case 2: return {-sine, -cosine};
        default: return {-cosine, sine};
    }
}

// With `exp` and polynomials as in elementwise.inl but for fused products: compiled once, and for any CPU.
float tanh_of(float u) {
    const float a = std::fabs(u), z = u * u;
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f, p = p * z - 5.37397155531e-2f, p = p * z + 1.33314422036e-1f, p = p * z - 3.33332819422e-1f;
    const float t = a > 10.0f ? 20.0f : a + a;
    const int32_t n = static_cast<int32_t>(t * 1.44269504f + 0.5f), bits = (n + 127) << 23;
    const float r = (t - static_cast<float>(n) * 0.693359375f) + static_cast<float>(n) * 2.12194440e-4f;
    float power, e = 1.9875691500e-4f;
    memcpy(&power, &bits, 4);
    e = e * r + 1.3981999507e-3f, e = e * r + 8.3334519073e-3f, e = e * r + 4.1665795894e-2f, e = e * r + 1.6666665459e-1f, e = e * r + 5.0000001201e-1f;
    e = (r * r * e + r + 1.0f) * power;
    return a < 0.625f ? p * z * u + u : std::copysign(1.0f - 2.0f / (e + 1.0f), u);
}

}  // namespace

extern "C" {

// Numbers x [count] become tanh x.
void dt_tanh(float* x, int64_t count) {
    const Turn mine;
    auto body = [&](int part, int parts) {
        for (int64_t i = count * part / parts, stop = count * (part + 1) / parts; i < stop; i++) x[i] = tanh_of(x[i]);
    };
    parallel(body);
}

// Rows of y [rows, width] are scaled to the root mean square of those of x; their own mean square counts as `least` at least. Sums are of doubles, in order.
void dt_match(const float* x, float* y, int64_t rows, int64_t width, float least) {
    for (const float* end = x + rows * width; x < end; x += width, y += width) {
        double wanted = 0.0, found = 0.0;
        for (int64_t i = 0; i < width; i++) wanted += (double)x[i] * x[i], found += (double)y[i] * y[i];
        const double n = static_cast<double>(width), by = std::sqrt(wanted / n / (found / n > least ? found / n : least));
        for (int64_t i = 0; i < width; i++) y[i] *= static_cast<float>(by);
    }
}

void dt_layer(const Layer* layer, const Pass* pass) {
    const Turn mine;
    active().layer(*layer, *pass);
}

// The parts of a layer, as dt_layer calls them.

void dt_place(const Layer* layer, const Pass* pass, float* qkv) {
    const Turn mine;
    active().place(*layer, *pass, qkv);
}

void dt_attention(const Layer* layer, const Pass* pass, const float* qkv, float* out) {
    const Turn mine;
    active().attention(*layer, *pass, qkv, out);
}

// Attention over latents: given [rows, qkv.n] becomes queries [rows, heads head_dim], in memory of the caller's, and out [rows, heads value_dim].
void dt_latent(const Layer* layer, const Pass* pass, float* given, float* queries, float* out) {
    const Turn mine;
    active().latent(*layer, *pass, given, queries, out);
}

// y [rows, width]; x may be y.
void dt_norm(int32_t kind, const Norm* norm, const float* x, float* y, int64_t rows, int64_t width, float epsilon) {
    const Turn mine;
    active().norm(kind, *norm, x, y, rows, width, epsilon);
}

void dt_gate(const Activator* activation, const float* x, float* y, int64_t rows, int64_t width) {
    const Turn mine;
    active().gate(*activation, x, y, rows, width);
}

// Of each row of x [rows, hidden] the experts ids [rows, chosen], ascending, their weights, and the margin by which the last of them was chosen.
void dt_route(const Router* router, const float* x, int64_t rows, int32_t* ids, float* weights, float* margins) {
    const Turn mine;
    active().route(*router, x, rows, ids, weights, margins);
}

// y [rows, hidden] is what the experts of each row of x give; x is what the half's norm gives, or the states before it where experts have a norm of their own.
void dt_experts(const Layer* layer, const float* x, float* y, int64_t rows) {
    const Turn mine;
    active().experts(*layer, x, y, rows);
}

// The bytes of a `Layer`, by which a caller knows that both mean the same fields.
int64_t dt_layer_bytes() { return sizeof(Layer); }

// cosines, sines [context, pairs]: of position times frequency, rounded to float as the models were trained with, and times scaling.
void dt_rotary_table(const float* frequencies, int64_t pairs, float scaling, int64_t context, float* cosines, float* sines) {
    for (int64_t position = 0; position < context; position++)
        for (int64_t j = 0; j < pairs; j++) {
            const Angle a = angle(static_cast<double>(static_cast<float>(position) * frequencies[j]));
            cosines[position * pairs + j] = static_cast<float>(a.cosine) * scaling;
            sines[position * pairs + j] = static_cast<float>(a.sine) * scaling;
        }
}

}  // extern "C"
