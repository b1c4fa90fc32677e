"""Recordings for the simulator: at each position of a reply, decoded a token a round, a tree larger
than any that will be evaluated, and the target's choice. Draft and target share their noise, so one
recording serves every policy, tree and cost. A folder has `recording.json` and a file a reply.

P positions, N nodes of one; position i follows the prompt and the first i + 1 tokens of the reply,
the last of which is the root."""

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import Frozen, Sampling

ABOUT = "recording.json"
SUFFIX = ".npz"

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


class About(Frozen):
    """The origin of a recording; runs that continue it must agree."""

    format: Literal[1] = 1
    target: str
    """Fingerprint."""
    target_model: str
    draft_model: str
    head: bool  # True if the draft reads features of its target: every tree is grown from scratch
    vocabulary_size: Annotated[int, Field(ge=1)]
    end: tuple[int, ...]
    context: Annotated[int, Field(ge=1)]
    sampling: Sampling
    seed: int
    sharpening: Annotated[float, Field(gt=0.0)]
    nodes: Annotated[int, Field(ge=1)]
    """Nodes that were expanded at each position, at least."""
    depth: Annotated[int, Field(ge=1)]
    width: Annotated[int, Field(ge=1)]
    """Children of each node."""
    max_tokens: Annotated[int, Field(ge=1)]


@dataclass(frozen=True, eq=False)
class Position:
    """A draft's tree below one root; the children of a node stand side by side, best first."""

    tokens: Ints
    parents: Ints  # index of the parent, -1: the root
    gains: Floats  # log-probability given the parent
    expanded: NDArray[np.bool_]  # [N] whether the node's children are here. The root's are


@dataclass(frozen=True)
class Recording:
    """One reply: the prompt, the target's tokens, and the draft's tree at each of its positions."""

    id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # tokens of the reply; the first comes with the prompt
    positions: tuple[Position, ...]  # [P] one for each token but the last


@dataclass(frozen=True)
class Library:
    """A recording of several replies, with its description."""

    about: About
    recordings: tuple[Recording, ...] = field(repr=False)


def read_about(path: Path) -> About:
    """Return the description of the recording in a folder; `UserError` if there is none."""
    try:
        return About.model_validate_json((path / ABOUT).read_bytes())
    except OSError:
        raise UserError(
            f"{path} is not a recording: make one with `python tests/simulation record "
            f"--prompts FILE --out {path}` in a checkout"
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise UserError(
            f"{path / ABOUT} is damaged or of another version ({first['msg']})"
        ) from None


def read_library(path: Path, limit: int | None = None) -> Library:
    """The first `limit` replies of a recording; `UserError` names the first invalid file."""
    about = read_about(path)
    files = sorted(path.glob(f"*{SUFFIX}"))[:limit]
    if not files:
        raise UserError(f"the recording {path} has no reply yet")
    return Library(about, tuple(_read(file) for file in files))


def _read(file: Path) -> Recording:
    try:
        with np.load(file, allow_pickle=False) as content:
            found = {name: content[name] for name in content.files}
        positions = tuple(_positions(found))
        tokens = tuple(found["reply"].tolist())
        if len(positions) != len(tokens) - 1:
            raise ValueError(f"{len(positions)} trees of {len(tokens)} tokens")
        return Recording(str(found["id"]), tuple(found["prompt"].tolist()), tokens, positions)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{file} is damaged ({error}): remove it, and record again") from None


def _positions(found: dict[str, Any]) -> Iterator[Position]:
    start = 0
    for stop in found["stops"].tolist():
        tokens, parents, gains, expanded = (
            found[name][start:stop] for name in ("tokens", "parents", "gains", "expanded")
        )
        yield Position(tokens, parents, gains, expanded.astype(bool))
        start = stop
