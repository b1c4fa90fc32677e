"""What a new head begins with: the target's last layers, and a fusion that weighs feature and
embedding alike. Knows names and shapes; trains nothing.

A head's state is a feature: what the final norm has made of the residual stream. So what the
target's layers write is scaled as that norm scales it, and what they read is scaled back; the
head's first pass is then about what the target's last layers would make of the feature. EAGLE-3's
state is a residual stream, so that its layer takes over the target's last one as it is.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dovetail.workers.training.folder import TargetParts
from dovetail.workers.training.heads import DovetailHead, Eagle3Head, EagleHead, Head

READS = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
WRITES = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
STREAM = 8.0
"""Root mean square of a residual stream near its end where nothing better is known; training mends
what is wrong with it."""


@torch.no_grad()
def begin_from_target(head: Head, target: TargetParts, stream: float = STREAM) -> int:
    """Set what the target can say of a new head, and leave the rest random; how many tensors of the
    target's layers were taken over."""
    final = target.read("norm.weight").float()
    if isinstance(head, Eagle3Head):
        return _continue_stream(head, target, final)
    typical = final.square().mean().sqrt()
    if isinstance(
        head, EagleHead
    ):  # an embedding that is small beside the feature would be learned last
        embedding = target.frozen.embedding.float().square().mean().sqrt()
        head.fc.weight[:, : head.shape.hidden] *= typical / embedding
    if isinstance(head, DovetailHead):  # the gate is open half, so twice the feature is the feature
        head.W_1.copy_(2 * torch.eye(head.shape.hidden))
        head.W_z.zero_()
    parameters, taken = dict(head.named_parameters()), 0
    for name, value in _layers(head, target, final, float(typical), stream):
        if name in parameters and parameters[name].shape == value.shape:
            parameters[name].copy_(value)
            taken += 1
    return taken


def _continue_stream(head: Eagle3Head, target: TargetParts, final: Tensor) -> int:
    """EAGLE-3 begins as the target's last layer behind the highest tap, with the final norm; what
    it makes of the embedding is still random."""
    hidden, source = head.shape.hidden, f"layers.{int(target.config['num_hidden_layers']) - 1}."
    head.fc.weight.zero_()[:, -hidden:] = torch.eye(hidden)
    head.norm.weight.copy_(final)
    parameters, taken = dict(head.midlayer.named_parameters()), 1
    parameters["hidden_norm.weight"].copy_(target.read(source + "input_layernorm.weight").float())
    for part in target.parts(source):
        goal = parameters.get(part)
        if (
            goal is None or part == "input_layernorm.weight"
        ):  # the head's of that name is the embedding's
            continue
        value = target.read(source + part).float()
        if part in READS:
            goal[:, hidden:] = value
        elif goal.shape == value.shape:
            goal.copy_(value)
        taken += 1
    return taken


def _layers(
    head: Head, target: TargetParts, final: Tensor, typical: float, stream: float
) -> Iterator[tuple[str, Tensor]]:
    """The target's last layers by the names that they have in the head."""
    depth, blocks = int(target.config["num_hidden_layers"]), head.shape.blocks
    for block in range(blocks):
        source, goal = f"layers.{depth - blocks + block}.", f"layers.{block}."
        for part in target.parts(source):
            value = target.read(source + part).float()
            if part in WRITES:
                value = value * (final / stream)[:, None]
            elif part in READS and block == 0:  # whose input no norm prepares
                value = value * (target.read(source + "input_layernorm.weight").float() / final)
            elif part.endswith("layernorm.weight"):
                value = value * typical / final
            yield goal + part, value
