"""EAGLE-1/2 (Li et al. 2024): one matrix over the concatenated embedding and last hidden state,
then one decoder layer."""

from typing import TYPE_CHECKING

from dovetail.workers.heads.kind import SERVER, Figures, HeadKind
from dovetail.workers.heads.spec import Shapes

if TYPE_CHECKING:
    from dovetail.workers.heads.parts import Body, HeadParts


class Eagle(HeadKind):
    """EAGLE-1/2 in the format of its public checkpoints."""

    name, title = "eagle", "EAGLE-1/2"
    figures = Figures((3.95,), SERVER, "Dovetail paper, Table 6: EAGLE-2 with Llama-2 7B")

    def recognises(self, shapes: Shapes) -> bool:
        fusion = shapes.get("fc.weight", ())
        return (
            "layers.0.self_attn.q_proj.weight" in shapes
            and "layers.0.input_layernorm.weight" not in shapes
            and len(fusion) == 2
            and fusion[1] == 2 * fusion[0]
        )

    def body(self, parts: "HeadParts") -> "Body":
        return parts.layered(parts.concatenation())


EAGLE = Eagle()
