"""Multi-token prediction (MTP, NextN; DeepSeek-V3's report, section 2.2): one matrix over the
normed embedding and state, then a decoder layer of the target's own kind, a norm and an output
head.

The first level reads the target's state after its final norm, later ones the layer's result after
the norm: this is how llama.cpp (b11434) runs all families that are supported here."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.workers.heads.kind import HeadKind
from dovetail.workers.heads.spec import HeadSpec, Shapes, TargetShape

if TYPE_CHECKING:
    from dovetail.workers.heads.parts import Body, HeadParts, Inputs, Outcome


FUSION = re.compile(
    r"(mtp\.fc|layers\.\d+\.eh_proj|mtp_linear_proj\.0|mtp_layers\.0\.input_proj)\.weight"
)
"""The names of the matrix that joins embedding and state, without the prefix of a model."""


@dataclass(frozen=True, kw_only=True)
class MtpSpec(HeadSpec):
    """An MTP layer."""

    normed: bool  # the output head, and the next level, read the layer's result after a norm


class Mtp(HeadKind):
    """MTP layers of published checkpoints."""

    name, title, spec, layer = "mtp", "MTP", MtpSpec, "mtp_layers.0."

    def recognises(self, shapes: Shapes) -> bool:
        """Return whether there is an MTP layer without the rest of its model."""
        found = any(FUSION.fullmatch(name) for name in shapes)
        return found and not any(name.startswith("layers.0.") for name in shapes)

    def fields(self, config: Any, shapes: Shapes, target: TargetShape) -> dict[str, Any]:
        return {"normed": True}  # as in the only layout of a layer's own folder

    def body(self, parts: "HeadParts") -> "Body":
        import torch

        tensors, spec = parts.checkpoint.tensors, parts.checkpoint.spec
        assert isinstance(spec, MtpSpec)
        engine: Any = parts.engine
        fuse = engine.precise(tensors["fusion"])
        norms = [
            engine.norm(tensors[name], spec.epsilon) for name in ("embedding_norm", "state_norm")
        ]

        def body(inputs: "Inputs") -> "Outcome":
            given = (inputs.embedded, inputs.features)
            both = [norm(one.contiguous()) for norm, one in zip(norms, given, strict=True)]
            states = fuse(torch.cat(both, dim=-1))
            states = engine.layers(states, inputs.seen, inputs.rows)
            if not spec.normed or len(states) == 0:
                return inputs.outcome(states)
            normed = engine.final_norm(states)
            return inputs.outcome(states if engine.raw else normed, normed)

        return body


MTP = Mtp()
