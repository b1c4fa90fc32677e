// Everything that is compiled once for each instruction set.
#include "lanes.h"

#include "linear.inl"

#include "elementwise.inl"

#include "attention.inl"

#include "products.inl"

#include "experts.inl"

#include "walk.inl"

#include "scan.inl"

#include "latent.inl"

#include "layer.inl"

#include "ranking.inl"

#include "search.inl"

namespace DT_NS {

static constexpr dovetail::Kernels table(dovetail::Isa isa) { return {isa, linear, layer, place, attention, norm, gate, route, experts, latent, likeliest, search}; }

}  // namespace DT_NS
