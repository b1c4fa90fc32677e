"""Reads a draft head from disk strictly, together with the tensors that it shares with its target.
Of the target only config.json, the headers of its weight files and the one or two shared tensors
are read. Computes nothing."""

import logging
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.heads.config import HeadConfig, MisfitError, RotaryConfig, read_config
from dovetail.workers.heads.engines import Rotation
from dovetail.workers.heads.files import HeadFiles, open_files
from dovetail.workers.heads.kind import HeadKind
from dovetail.workers.heads.parts import HeadCheckpoint
from dovetail.workers.heads.registry import KINDS, kind_of_tensors, titles
from dovetail.workers.heads.spec import (
    IGNORED,
    HeadSpec,
    TargetShape,
    listed,
    plain_name,
    refuse_strange,
)
from dovetail.workers.kernels.exact import ExactPowers
from dovetail.workers.models import transformers
from dovetail.workers.models.checkpoints.architecture import refuse_content
from dovetail.workers.models.checkpoints.checkpoint import stored_tensors
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.gguf.view import blaming_the_file, spelled
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.checkpoints.stored import COUNT_TYPES, FLOAT_TYPES, Stored

EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.word_embeddings.weight",
    "embed_tokens.weight",
    "transformer.wte.weight",
    "wte.weight",
    "model.decoder.embed_tokens.weight",
    "backbone.embeddings.weight",
)
OUTPUTS = ("lm_head.weight", "embed_out.weight", "output.weight")
"""The families' names of the embedding and of the output head; a model without the latter ties it
to the embedding."""
LARGE = 1 << 24  # tables with more numbers are not widened to 32 bits
TABLES = ("d2t", "t2d")  # tables of token ids; all other tensors are weights

log = logging.getLogger(__name__)


def open_head_checkpoint(
    source: str, *, target: str, weights: str, allow_bin: bool = False
) -> HeadCheckpoint:
    """Return the head in `source` for the model in `target` (folders or hub ids); raise
    `CheckpointError` in one line for anything wrong with it. `weights` (a type of weights) and the
    stored types decide the 16-bit type of the features."""
    files = open_files(source, allow_bin=allow_bin)
    with blaming_the_file(files.folder):
        try:
            return _read(spelled(source), files, Target(target), weights)
        except MisfitError as error:
            raise CheckpointError(f"{spelled(source)} {error}") from None


class Target:
    """The target's shape, and the tensors that a head may share with it, read on demand."""

    def __init__(self, source: str) -> None:
        folder = find_folder(source)
        config = text_part(read_json(folder / "config.json"))
        refuse_content(config, folder / "config.json")
        self._stored = stored_tensors(folder)
        self._embedding = next((name for name in EMBEDDINGS if name in self._stored), "")
        if not self._embedding:
            known = f"no embedding under a known name ({EMBEDDINGS[0]}, ...)"
            raise CheckpointError(
                f"{source} has {known}, which a draft head needs; choose another draft"
            )
        tied = config.get("tie_word_embeddings") is True
        self._output = next(
            (name for name in OUTPUTS if name in self._stored and not tied), self._embedding
        )
        for name in (self._embedding, self._output):
            stored = self._stored[name]
            if (
                stored.kind not in FLOAT_TYPES
                or len(stored.shape) != 2
                or stored.shape != self._stored[self._embedding].shape
            ):
                found = (
                    f"{name} is {stored.kind} {list(stored.shape)}, not a matrix of floats, which "
                    "a draft head needs from its target"
                )
                raise CheckpointError(f"{source}: {found}; use weights that are stored as floats")
        rows, width = self._stored[self._embedding].shape
        layers = config.get("num_hidden_layers") or config.get("n_layer")
        if type(layers) is not int or layers < 1:
            raise CheckpointError(
                f"{source} has no num_hidden_layers in config.json; take the config.json that "
                "belongs to the weights"
            )
        self.shape = TargetShape(spelled(source), width, layers, rows)
        self.type = FLOAT_TYPES.get(self._stored[self._embedding].kind, torch.float32)

    def embedding(self) -> Tensor:
        """[V, width] as stored."""
        return read_shared(self._stored[self._embedding], self._embedding, checked=True)

    def output(self, embedding: Tensor) -> Tensor:
        """[V, width] as stored: `embedding` itself if the two are tied."""
        return (
            embedding
            if self._output == self._embedding
            else read_shared(self._stored[self._output], self._output, checked=True)
        )


def read_shared(stored: Stored, name: str, *, checked: bool = False) -> Tensor:
    """Return a target's tensor as stored; a large one decoded from blocks is returned in fp16,
    since fp32 would take twice the memory."""
    found = stored.read(name, checked=checked)
    decoded = type(stored) is not Stored and found.dtype == torch.float32
    return found.half() if decoded and found.numel() > LARGE else found


def _read(source: str, files: HeadFiles, target: Target, weights: str) -> HeadCheckpoint:
    kind = kind_of_tensors(files.shapes)
    if kind is None:
        raise MisfitError(
            f"is not a draft head of a known kind ({titles()}): its tensors are those of another "
            "model"
        )
    names = _names(kind, files.shapes)
    shapes = {plain: files.shapes[name] for plain, name in names.items()}
    config = read_config(files.config, kind.config)
    dtype = _feature_type(weights, files, target)
    spec = kind.read_spec(config, shapes, target.shape, dtype)
    kind.check(spec, config, shapes, target.shape)
    for note in kind.notes(config):
        log.warning("%s: %s", source, note)
    refuse_strange(spec, kind.groups(spec, config), shapes)
    _refuse_types({plain: files.types[name] for plain, name in names.items()})
    rotation = Rotation(
        *frequencies(config, heads=spec.heads, head_dim=spec.head_dim, context=spec.context)
    )
    tensors = {plain: files.read(name) for plain, name in names.items()}
    embedding, output = _shared(
        source,
        spec,
        _set(tensors.pop("embed_tokens.weight", None)),
        tensors.pop("lm_head.weight", None),
        target,
    )
    tokens = _tokens(spec, tensors.pop("d2t", None), tensors.pop("t2d", None))
    return HeadCheckpoint(
        source,
        files.digest,
        config.dovetail.trained_for,
        spec,
        rotation,
        tensors,
        embedding,
        output,
        tokens,
        files.coded,
    )


def _set(embedding: Tensor | None) -> Tensor | None:
    """Return an embedding; None if it is only a placeholder for the target's, all NaN. Raises
    `MisfitError` if a part of it is not finite."""
    if embedding is None or bool(embedding.isnan().all()):
        return None
    if not bool(embedding.isfinite().all()):
        raise MisfitError("has NaN or infinite values in embed_tokens.weight; convert it again")
    return embedding


def _names(kind: HeadKind, names: Iterable[str]) -> dict[str, str]:
    """Return each tensor's name in the checkpoint by its kind's name for it. Raises `MisfitError`
    if two names mean the same tensor."""
    found: dict[str, str] = {}
    for name in names:
        plain = kind.rename(plain_name(name))
        if plain in found:
            raise MisfitError(f"has both {found[plain]} and {name}, which mean the same tensor")
        if not IGNORED.fullmatch(plain):
            found[plain] = name
    return found


def _refuse_types(types: Mapping[str, torch.dtype | None]) -> None:
    """Raise `MisfitError` unless tables of token ids are integers and weights are floats."""
    wrong = [
        name
        for name, kind in types.items()
        if kind not in (COUNT_TYPES if name in TABLES else FLOAT_TYPES).values()
    ]
    if wrong:
        found = ", ".join(
            sorted({str(types[name] or "another type").removeprefix("torch.") for name in wrong})
        )
        raise MisfitError(
            f"has numbers of the wrong type ({found}) in {listed(wrong)}: weights are floats, "
            f"{' and '.join(TABLES)} integers; convert it again"
        )


def _feature_type(weights: str, files: HeadFiles, target: Target) -> Literal["float16", "bfloat16"]:
    """Return the requested type, else that of the head's matrices, else the target's: residual
    streams of a bf16 model can exceed fp16."""
    if weights in ("fp16", "bf16"):
        return "float16" if weights == "fp16" else "bfloat16"
    types = {files.types[name] for name, shape in files.shapes.items() if len(shape) == 2}
    if torch.bfloat16 in types or (torch.float16 not in types and target.type == torch.bfloat16):
        return "bfloat16"
    return "float16"


def _shared(
    source: str, spec: HeadSpec, embedding: Tensor | None, output: Tensor | None, target: Target
) -> tuple[Tensor, Tensor]:
    """Return the embedding and the output head, the head's own where it has them; equal ones become
    one tensor."""
    theirs = target.embedding() if spec.target_width == spec.hidden else None
    if embedding is None:
        embedding = theirs
    elif theirs is not None:
        if torch.equal(embedding.float(), theirs.float()):
            embedding = theirs
        elif not KINDS[spec.kind].own_embedding:
            apart = float((embedding.float() - theirs.float()).abs().max())
            log.warning(
                "%s: its embedding differs from that of %s by up to %.2g; was it trained for "
                "another model?",
                source,
                target.shape.name,
                apart,
            )
    if embedding is None:
        raise MisfitError(
            f"lacks embed_tokens.weight, which {target.shape.name} of hidden width "
            f"{spec.target_width} cannot give to a head of {spec.hidden}"
        )
    if output is None:
        output = target.output(embedding if theirs is None else theirs)
    if (
        output.shape == embedding.shape
        and output.dtype == embedding.dtype
        and torch.equal(output, embedding)
    ):
        output = embedding
    return embedding, output


def _tokens(spec: HeadSpec, offsets: Tensor | None, known: Tensor | None) -> Tensor | None:
    """Return the target's ids of the draft vocabulary, from d2t (the offset to add to each id) and
    t2d (the mask of known ids), checked against each other."""
    if offsets is None:
        return None
    ids = offsets.long() + torch.arange(len(offsets))
    if (
        not bool((ids[1:] > ids[:-1]).all())
        or int(ids[0]) < 0
        or int(ids[-1]) >= spec.vocabulary_size
    ):
        raise MisfitError(
            "has a d2t whose ids do not ascend within the target's vocabulary of "
            f"{spec.vocabulary_size}"
        )
    if known is not None and not (
        int(known.bool().sum()) == len(ids) and bool(known.bool()[ids].all())
    ):
        raise MisfitError("has a t2d that does not name the tokens of its d2t")
    return None if len(ids) == spec.vocabulary_size else ids


THETA = 10000.0  # the base if a configuration has none, as in the EAGLE family's code
TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def frequencies(
    config: HeadConfig, *, heads: int, head_dim: int, context: int
) -> tuple[Tensor, float]:
    """Return frequencies [rotary_dim / 2] in fp32 and the factor of cosines and sines; `dynamic`
    keeps its values within the context. Takes `rope_parameters` (transformers 5) or `rope_theta`
    and `rope_scaling` (before). 2 <= rotary_dim <= head_dim; raises `MisfitError` for invalid
    values."""
    rotary = config.rope_parameters or config.rope_scaling or RotaryConfig()
    kind, theta = (
        rotary.rope_type or rotary.type or "default",
        rotary.rope_theta or config.rope_theta or THETA,
    )
    if kind not in TYPES:
        raise MisfitError(f"has rotary positions of type {kind!r}; known are {', '.join(TYPES)}")
    share = rotary.partial_rotary_factor or config.partial_rotary_factor or 1.0
    size = int(head_dim * share)
    if size < 2 or size % 2:
        raise MisfitError(
            f"has partial_rotary_factor {share} in config.json, which rotates {size} of the "
            f"{head_dim} numbers of a head: not an even number"
        )
    factors, attention = rotary.short_factor, rotary.attention_factor or 0.0
    if kind == "longrope" and not (
        len(factors) == size // 2 and factors == rotary.long_factor and attention
    ):
        raise MisfitError(
            f"has rotary positions of type {kind!r}, which need {size // 2} factors that are the "
            "same for short and long texts, and an attention_factor; see config.json"
        )
    if kind in ("default", "longrope"):
        with ExactPowers():
            plain = theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        return (plain, 1.0) if kind == "default" else (plain / torch.tensor(factors), attention)
    ignored = {"type", "short_factor", "long_factor"}
    parameters = rotary.model_dump(exclude=ignored, exclude_none=True) | {
        "rope_type": kind,
        "rope_theta": theta,
        "partial_rotary_factor": share,
    }
    try:
        layer = transformers.LlamaConfig(
            hidden_size=heads * head_dim,
            num_attention_heads=heads,
            head_dim=head_dim,
            max_position_embeddings=context,
            rope_parameters=parameters,
        )
        with ExactPowers():
            found, scaling = transformers.ROPE_INIT_FUNCTIONS[kind](layer, torch.device("cpu"))
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise MisfitError(
            f"has rotary positions of type {kind!r} that cannot be computed "
            f"({type(error).__name__}: {error}); see config.json"
        ) from error
    if (
        found.shape != (size // 2,)
        or not bool(found.isfinite().all())
        or not 0.0 < scaling < float("inf")
    ):
        raise MisfitError(
            f"has rotary positions of type {kind!r} whose frequencies are not numbers; see "
            "config.json"
        )
    return found.float(), float(scaling)
