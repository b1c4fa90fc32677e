"""The parts of a decoder layer of transformers: its linears, norms and activation, found by their
names and by trying."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu, softplus

from dovetail.workers.kernels import Kind
from dovetail.workers.kernels.layer import normalise
from dovetail.workers.kernels.layer_plan import Activation, Norm, NormKind
from dovetail.workers.models.backends.experts import ExpertParts, part_of, tensor_of
from dovetail.workers.models.families.description import Experts, LayerSpec, Mlp, Norms
from dovetail.workers.models.parity.following import UnsupportedError

EXACT_KINDS = {torch.float32: Kind.FP32, torch.float16: Kind.FP16, torch.bfloat16: Kind.BF16}
"""The kind that holds weights of a type as they are."""


class LayerParts:
    """The parts of a decoder layer: those that a description names, or without one found by their
    usual names."""

    def __init__(self, layer: nn.Module, spec: LayerSpec | None = None) -> None:
        self.spec = spec
        self.order: Tensor | None = None
        """int64 [head_dim]: where each number of a head of queries and keys stands in the
        checkpoint; None: in place."""
        self.rows: Sequence[Tensor | None] = (None,)
        """For each linear of queries, keys and values int64 [out]: where the outputs of the kernels
        stand in the checkpoint; None: in place."""
        self.experts: ExpertParts | None = None
        self.sinks: Tensor | None = None
        """float32 [heads]: scores without a value."""
        self.value_norm: Norm | None = None
        self.scalar = 1.0
        """The factor of what the layer gives."""
        self.numbers = (0.0, 0.0)
        """The numbers of the activation."""
        if spec is None:
            self._find(layer)
        else:
            self._take(layer, spec)

    def _take(self, layer: nn.Module, spec: LayerSpec) -> None:
        attention, norms = spec.attention, spec.norms
        self.linears = {
            "qkv": [_linear(layer, name) for name in attention.qkv],
            "output": [_linear(layer, attention.output)],
        }
        self.rows = [None] * len(attention.qkv)
        if attention.by_head:
            parts = torch.arange(3 * attention.heads * attention.head_dim)
            parts = parts.view(attention.heads, 3, attention.head_dim).transpose(0, 1)
            self._reorder([parts.flatten()])
        self._take_mlp(layer, spec.mlp)
        query, key = attention.norms or (None, None)
        named = {
            "attention_norm": norms.pre_mixer,
            "post_attention_norm": norms.post_mixer,
            "mlp_norm": norms.pre_mlp,
            "post_mlp_norm": norms.post_mlp,
            "query_norm": query,
            "key_norm": key,
        }
        self.norms = {
            part: part_of(layer, name) for part, name in named.items() if name is not None
        }
        if attention.sinks is not None:
            self.sinks = tensor_of(layer, attention.sinks).float().contiguous()
        if attention.norms_values:
            self.value_norm = Norm(torch.ones(attention.head_dim))
        if spec.scalar is not None:
            self.scalar = float(tensor_of(layer, spec.scalar))

    def _take_mlp(self, layer: nn.Module, said: Mlp | Experts) -> None:
        mlp = said.shared if isinstance(said, Experts) else said
        if mlp is not None:
            self.linears["gate_up"] = [_linear(layer, name) for name in mlp.gate_up]
            self.linears["down"] = [_linear(layer, mlp.down)]
        if isinstance(said, Experts):
            self.experts, self.numbers = ExpertParts(layer, said), said.numbers
            named = (said.input_norm, said.output_norm, said.shared_norm)
            self.experts.norms = [
                None if name is None else Norm(_weight_of(part_of(layer, name))) for name in named
            ]
        elif said.function is not None:
            self.numbers = _xielu_numbers(part_of(layer, said.function))
        self.activation = said.activation

    def interleave(self, rotated: int, head_dim: int) -> None:
        """Reorder the rows of queries and keys, of whose heads the first `rotated` numbers are
        turned in pairs of neighbours, so that pairs are halves: scores are the same sums."""
        if len(self.linears["qkv"]) != 3 or "query_norm" in self.norms:
            raise UnsupportedError(
                "the kernels cannot rotate neighbours in queries and keys that are fused or normed"
            )
        self.order = torch.cat(
            [
                torch.arange(0, rotated, 2),
                torch.arange(1, rotated, 2),
                torch.arange(rotated, head_dim),
            ]
        )
        queries, keys, _ = (part.out_features for part in self.linears["qkv"])
        self._reorder([by_heads(self.order, queries), by_heads(self.order, keys), None])

    def _reorder(self, rows: Sequence[Tensor | None]) -> None:
        """Have the outputs of the linears of queries, keys and values in other orders."""
        self.rows = rows
        for part, order in zip(self.linears["qkv"], rows, strict=True):
            if order is None:
                continue
            if len(order) != part.out_features:
                raise UnsupportedError(
                    f"a linear of {part.out_features} outputs, where {len(order)} are due"
                )
            part.weight = nn.Parameter(part.weight.detach()[order], requires_grad=False)
            if part.bias is not None:
                part.bias = nn.Parameter(part.bias.detach()[order], requires_grad=False)

    def norm(self, module: nn.Module) -> tuple[NormKind, Norm, float]:
        """Return kind, weights and epsilon of one of the norms around the halves."""
        return read_norm(module) if self.spec is None else described_norm(module, self.spec.norms)

    def _find(self, layer: nn.Module) -> None:
        self.attention: Any = part_named(layer, "self_attn", "attn")
        mlp = part_named(layer, "mlp")
        self.linears = {
            "qkv": linears_of(
                self.attention, ("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("c_attn",)
            ),
            "output": linears_of(self.attention, ("o_proj",), ("c_proj",)),
            "gate_up": linears_of(mlp, ("gate_proj", "up_proj"), ("gate_up_proj",), ("c_fc",)),
            "down": linears_of(mlp, ("down_proj",), ("c_proj",)),
        }
        """The linears that each matrix of the kernels is packed of."""
        self.rows = [None] * len(self.linears["qkv"])
        self.activation = read_activation(
            part_named(mlp, "act_fn", "activation_fn", "act"), gated=not hasattr(mlp, "c_fc")
        )
        self.norms = self._norms(layer)

    def _norms(self, layer: nn.Module) -> dict[str, nn.Module]:
        names = {"attention_norm": part_named(layer, "input_layernorm", "ln_1")}
        if hasattr(layer, "pre_feedforward_layernorm"):
            names["post_attention_norm"] = part_named(layer, "post_attention_layernorm")
            names["mlp_norm"] = part_named(layer, "pre_feedforward_layernorm")
            names["post_mlp_norm"] = part_named(layer, "post_feedforward_layernorm")
        else:
            names["mlp_norm"] = part_named(layer, "post_attention_layernorm", "ln_2")
        if hasattr(self.attention, "q_norm"):
            names |= {"query_norm": self.attention.q_norm, "key_norm": self.attention.k_norm}
        return names


def _xielu_numbers(function: Any) -> tuple[float, float]:
    """Return the factors of the squares of what is positive, and of what is negative."""
    learned = (getattr(function, name, None) for name in ("alpha_p", "alpha_n"))
    positive, negative = (
        softplus(part.detach().float()).item() if isinstance(part, Tensor) else None
        for part in learned
    )
    if positive is None or negative is None or float(function.beta) != 0.5:
        raise UnsupportedError(f"the activation {type(function).__name__}")
    return positive, 0.5 + negative


def _linear(layer: nn.Module, name: str) -> nn.Linear:
    found = part_of(layer, name)
    if type(found) is not nn.Linear:
        raise UnsupportedError(f"{name} of {type(layer).__name__} is not a linear layer")
    return found


def by_heads(order: Tensor, width: int) -> Tensor:
    """Return the order [width] of the numbers of all heads, by that of one."""
    return (torch.arange(0, width, len(order)).unsqueeze(1) + order).flatten()


def _weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a norm, float32 [width]: ones where it has a shape and no weights."""
    weight, shape = getattr(module, "weight", None), getattr(module, "normalized_shape", None)
    if weight is None and isinstance(shape, tuple):
        return torch.ones(shape)
    if not isinstance(weight, Tensor):
        raise UnsupportedError(f"a norm of type {type(module).__name__} without weights")
    return weight.detach().float().contiguous()


def described_norm(module: nn.Module, norms: Norms) -> tuple[NormKind, Norm, float]:
    """Return kind, weights and epsilon of a norm that a description knows."""
    weight, bias = _weight_of(module), getattr(module, "bias", None)
    weight = 1.0 + weight if norms.plus_one else weight
    return (
        norms.kind,
        Norm(weight, None if bias is None else bias.detach().float().contiguous()),
        norms.epsilon,
    )


def part_named(module: nn.Module, *names: str) -> Any:
    """The first of these parts that a module has."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise UnsupportedError(f"{type(module).__name__} has no {' or '.join(names)}")


def linears_of(module: nn.Module, *choices: Sequence[str]) -> list[nn.Linear]:
    """The linears of the first choice that a module has all of."""
    for names in choices:
        found = [getattr(module, name, None) for name in names]
        if all(type(part) is nn.Linear for part in found):
            return found  # type: ignore[return-value]
    raise UnsupportedError(
        f"{type(module).__name__} has no linears "
        f"{' or '.join('+'.join(names) for names in choices)}"
    )


def refuse_apart(parts: "LayerParts") -> None:
    """`UnsupportedError` for a layer with parts that are computed on one CPU, by their own
    weights, and nowhere else."""
    found = {
        "of experts": parts.experts,
        "with sinks": parts.sinks,
        "with normed values": parts.value_norm,
    }
    for what, part in found.items():
        if part is not None:
            raise UnsupportedError(f"layers {what} are computed on one CPU by their own weights")


def exact_kind(parts: "LayerParts") -> Kind:
    """The kind that holds all weights of a layer as they are."""
    types = {part.weight.dtype for linears in parts.linears.values() for part in linears}
    return EXACT_KINDS[types.pop()] if len(types) == 1 else Kind.FP32


def read_norm(module: nn.Module) -> tuple[NormKind, Norm, float]:
    """Kind, weights and epsilon of a norm; RMS norms are told by trying: some multiply by their
    weight, Gemma's by one more."""
    weight: Any = getattr(module, "weight", None)
    if isinstance(module, nn.LayerNorm) and weight is not None:
        bias = None if module.bias is None else module.bias.detach().float().contiguous()
        return NormKind.LAYER_NORM, Norm(weight.detach().float().contiguous(), bias), module.eps
    epsilon: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or not isinstance(epsilon, float):
        raise UnsupportedError(f"a norm of type {type(module).__name__}")
    x = torch.randn(2, weight.shape[0], generator=torch.Generator().manual_seed(1))
    expected = module(x).float()
    for weights in (weight.detach().float().contiguous(), 1.0 + weight.detach().float()):
        if torch.allclose(
            normalise(NormKind.RMS, Norm(weights), x, epsilon), expected, rtol=1e-4, atol=1e-5
        ):
            return NormKind.RMS, Norm(weights), epsilon
    raise UnsupportedError(f"a norm of type {type(module).__name__}")


def read_activation(function: Callable[[Tensor], Tensor], *, gated: bool) -> Activation:
    """Which of the kernels' activations a function is, told by trying."""
    x = torch.linspace(-6, 6, 97)
    y = function(x)
    if torch.allclose(y, gelu(x, approximate="tanh"), atol=1e-5):
        return Activation.GELU_TANH_GATED if gated else Activation.GELU_TANH
    if gated and torch.allclose(y, silu(x), atol=1e-5):
        return Activation.SILU_GATED
    raise UnsupportedError(f"the activation {type(function).__name__}")
