"""Tokens of a round by tree: from recorded rounds (`python tests/simulation record`), or assumed as
in Sequoia (Chen et al., 2024): the target's choice is the k-th child with probability p q^k, q =
decay (1 - p), independent of everything else; p is fitted to a published acceptance length. A
recording has, at each position of a reply decoded one token per round, a tree larger than any that
will be evaluated, and the target's choice. Draft and target share their noise, so one recording
serves every policy, tree and cost. A folder has `recording.json` and one file per reply. P
positions, N nodes at one; position i follows the prompt and the first i + 1 tokens of the reply,
the last of which is the root."""

import heapq
import json
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from dovetail.launch.planning.planner import Tree
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import Frozen, Sampling
from dovetail.protocol.settings.tree import POLICIES
from dovetail.protocol.tree import ROOT
from dovetail.workers.heads.kind import Figures
from dovetail.workers.heads.registry import KINDS

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
    """The minimum number of nodes expanded at each position."""
    depth: Annotated[int, Field(ge=1)]
    width: Annotated[int, Field(ge=1)]
    """Children of each node."""
    max_tokens: Annotated[int, Field(ge=1)]


@dataclass(frozen=True, eq=False)
class Position:
    """A draft's tree below one root; the children of a node are adjacent, best first."""

    tokens: Ints
    parents: Ints  # index of the parent, -1: the root
    gains: Floats  # log-probability given the parent
    expanded: NDArray[
        np.bool_
    ]  # [N] whether the node's children are included; the root's always are


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
        remedy = f"python tests/simulation record --prompts FILE --out {path}"
        why = f"{path} is not a recording: make one with `{remedy}` in a checkout"
        raise UserError(why) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        why = f"is damaged or of another version ({first['msg']})"
        raise UserError(f"{path / ABOUT} {why}") from None


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


KEPT = 32
"""Children kept per node by a small model that drafts ahead (`workers/drafters/tree.py`)."""
STEPS = 40  # bisections of the interval of p


class Acceptance(Protocol):
    """The acceptance of one draft."""

    @property
    def origin(self) -> str:
        """Describe the source of the numbers."""

    def tokens(self, tree: Tree) -> float:
        """Return the tokens of a round, including the target's own."""

    def passes(self, tree: Tree, ahead: float) -> Iterable[tuple[int, float]]:
        """Return (rows, number per round) of the draft passes for which a proposal waits, for the
        planner's `Draft`."""


@dataclass(frozen=True)
class Published:
    """An acceptance length that a paper reports of a kind of draft, at T = 0 on MT-bench."""

    tokens: float
    tree: Tree
    where: str  # the source, with its texts and temperature
    decay: float = 0.4
    """Fitted to EAGLE-2's 3.95 with 15 and 4.49 with 59 nodes (Dovetail paper, Tables 3 and 6)."""


BENCH = ", on MT-bench at T = 0"
BLOCKS_FROM = "vllm-project/speculators#1014: Qwen3.5-4B on GSM8K"
PUBLISHED = {
    "small": Published(
        4.85,
        Tree("budget", 15, 16, 10),
        "Dovetail paper, Table 10: TinyLlama with Llama-2 7B, whose 7.43 with 127 nodes gives "
        "the decay" + BENCH,
        0.8,
    ),
    "mtp": Published(
        2.94,
        Tree("dynamic", 3, 3, 1),
        "ROCm/ATOM pull request 1764: DeepSeek-R1, chains of three tokens",
    ),
    "substitute": Published(
        27.08, Tree("beam", 288, 48, 6), "SubSpec paper, Table 5: Qwen2.5 7B" + BENCH, 0.8
    ),
    **{
        kind: Published(tokens, Tree("dynamic", nodes, nodes, 1), BLOCKS_FROM)
        for kind, tokens, nodes in (("dflash", 4.99, 15), ("dspark", 5.69, 7), ("dflash2", 6.2, 7))
    },
}


def published(kind: str, blocks: int = 1) -> Published:
    """Return the known figures of drafts of a kind; `blocks`: the number of a head's blocks, if
    several."""
    if kind in PUBLISHED:
        return PUBLISHED[kind]
    figures = figures_of(kind)
    tokens, tree = figures.tokens[min(blocks, len(figures.tokens)) - 1], Tree(*figures.tree)
    return Published(tokens, tree, figures.source.format(blocks=blocks) + BENCH)


def trained(folder: Path) -> Published | None:
    """Return the acceptance length of a head's chains at the end of its training, from the record
    in its folder; None without one."""
    try:
        last = json.loads((folder / "training.json").read_bytes())["checks"][-1]
        tokens, depth = float(last["length"]), len(last["at"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    where = "simulated when it was trained, on held-out text at T = 0"
    return Published(tokens, Tree("dynamic", depth, depth, 1), where)


def figures_of(kind: str) -> Figures:
    """Return a paper's figures for a kind of head; `UserError` if there are none."""
    if (figures := KINDS[kind].figures) is None:
        raise UserError(
            f"no figures are known for a {kind} head: run dovetail bench --draft {kind}"
        )
    return figures


@dataclass(frozen=True)
class Assumed:
    """Children with their own probabilities of acceptance."""

    first: float  # p
    decay: float
    origin: str

    @classmethod
    def of(cls, source: Published) -> "Assumed":
        low, high = 0.0, 1.0
        for _ in range(STEPS):
            middle = (low + high) / 2
            less = _brought(middle, source.decay, source.tree) < source.tokens
            low, high = (middle, high) if less else (low, middle)
        return cls(
            low,
            source.decay,
            f"assumed: {source.tokens:g} tokens a round with {source.tree.gamma} nodes "
            f"({source.where})",
        )

    def tokens(self, tree: Tree) -> float:
        return _brought(self.first, self.decay, tree)

    def passes(self, tree: Tree, ahead: float) -> Iterable[tuple[int, float]]:
        """Return the passes of the whole tree: nothing is assumed to be kept from drafting
        ahead."""
        return tree.passes()


@cache
def _brought(first: float, decay: float, tree: Tree) -> float:
    """1 and the worth of the best nodes, best first."""
    ranks = [first * (decay * (1.0 - first)) ** rank for rank in range(tree.width)]
    total, taken, heap = 1.0, 0, [(-ranks[0], 1.0, 0, 1)]
    while heap and taken < tree.gamma:
        worth, parent, rank, level = heapq.heappop(heap)
        total, taken = total - worth, taken + 1
        if rank + 1 < len(ranks):
            heapq.heappush(heap, (-parent * ranks[rank + 1], parent, rank + 1, level))
        if level < tree.depth:
            heapq.heappush(heap, (worth * ranks[0], -worth, 0, level + 1))
    return total


UNCOUNTED = Assumed(0.0, 0.0, "not counted: depends on how repetitive a text is")
"""The acceptance of a look-up, which is assumed never to find anything."""


class Recorded:
    """A recorded draft: rounds walk through its recorded trees, from root to root."""

    def __init__(self, library: Library, name: str) -> None:
        self.library = library
        self._passes: dict[tuple[Tree, int], Mapping[int, float]] = {}
        self.origin = f"recorded: {len(library.recordings)} replies in {name}"
        self._replies = [
            [_Walk(recording, place) for place in range(len(recording.positions))]
            for recording in library.recordings
        ]

    def tokens(self, tree: Tree) -> float:
        """Return the tokens of a round. Every level is as wide as the tree allows, including nodes
        that `dynamic` would not have expanded."""
        tokens = rounds = 0
        for walks in self._replies:
            place = 0
            while place < len(walks):
                brought = min(1 + walks[place].accepted(tree), len(walks) - place)
                place, tokens, rounds = place + brought, tokens + brought, rounds + 1
        return tokens / rounds

    def passes(self, tree: Tree, ahead: float) -> Iterable[tuple[int, float]]:
        """Return the passes of the recorded trees. A head's guesses from its own guesses were not
        recorded, so here it drafts nothing ahead."""
        nodes = 0 if self.library.about.head else round(ahead)
        if (tree, nodes) not in self._passes:
            self._passes[tree, nodes] = self._count_passes(tree, nodes)
        return self._passes[tree, nodes].items()

    def _count_passes(self, tree: Tree, ahead: int) -> Mapping[int, float]:
        counts: Counter[int] = Counter()
        rounds = 0
        for walks in self._replies:
            place, least = 0, np.inf
            while place < len(walks):
                walk = walks[place]
                grown = walk.growth(tree, ahead=least <= 0.0)
                passes = [int((scores < least).sum()) for scores in grown]
                counts.update(passes)
                accepted = walk.accepted(tree)
                least = walk.least_below(accepted, tree, least, ahead + sum(passes))
                place, rounds = place + 1 + accepted, rounds + 1
        return {rows: count / rounds for rows, count in counts.items() if rows}

    def reaches(self, tree: Tree) -> bool:
        """Return whether a tree of this size was recorded."""
        about = self.library.about
        return tree.gamma <= about.nodes and tree.depth <= about.depth and tree.width <= about.width


class _Walk:
    """One position's tree, and the target's own path in it."""

    def __init__(self, recording: Recording, place: int) -> None:
        self._position: Position = recording.positions[place]
        self._said = recording.tokens[place + 1 :]
        self._places: dict[tuple[int, int], Sequence[int]] = {}

    def accepted(self, tree: Tree) -> int:
        """Nodes of the path that are in a tree: for a beam those kept at each level, for other
        policies those among its best."""
        if POLICIES[tree.policy].full_levels:
            return sum(1 for _ in self._beam(tree))
        key = (tree.depth, tree.width)
        if key not in self._places:
            self._places[key] = self._best_places(*key)
        return sum(place < tree.gamma for place in self._places[key])

    def _best_places(self, depth: int, width: int) -> list[int]:
        """Return for each node of the path the number of nodes of such a tree that rank higher."""
        there = (self._levels <= depth) & (self._ranks < width)
        path = [node for node in self._path if there[node]]
        scores = self._scores[there]
        return [int((scores > self._scores[node]).sum()) for node in path]

    def _beam(self, tree: Tree) -> Iterator[int]:
        """Nodes of the path, as long as they are among the best `width` of their level."""
        for level, node in enumerate(self._path[: tree.depth], 1):
            others = self._scores[(self._levels == level) & (self._ranks < tree.width)]
            if int((others > self._scores[node]).sum()) >= tree.width:
                return
            yield node

    def growth(self, tree: Tree, *, ahead: bool) -> Iterator[Floats]:
        """Yield the scores of the nodes that each pass expands: the root (0), then the best of each
        level among the best so far. `ahead`: nodes that have been expanded already."""
        yield np.zeros(1, np.float32)
        traits = POLICIES[tree.policy]
        if traits.full_levels:
            yield from (np.full(rows, -np.inf, np.float32) for rows, _ in [*tree.passes()][1:])
            return
        if not traits.pass_a_level:
            inner = np.sort(self._scores[self._offered(tree) & (self._levels < tree.depth)])[::-1]
            yield from (inner[at : at + tree.width] for at in range(0, len(inner), tree.width))
            return
        for level in range(1, tree.depth):
            whole = self._offered(tree if ahead else replace(tree, depth=level))
            offered = whole & (self._levels == level)
            if not offered.any():
                return
            yield np.sort(self._scores[offered])[-tree.width :]

    def least_below(self, accepted: int, tree: Tree, least: float, more: int) -> float:
        """Return the score from which on nodes of the next tree, after `accepted` nodes, are
        already expanded, if in this tree those from `least` on and the best `more` others are: a
        small model predicts the same below any root."""
        if accepted >= len(self._path):
            return float(np.inf)
        pool = np.sort(self._scores[self._ranks < max(tree.width, KEPT)])[::-1]
        expanded = min(len(pool), more + int((pool >= least).sum()))
        return float(pool[expanded - 1] - self._scores[self._path[accepted]])

    def _offered(self, tree: Tree) -> NDArray[np.bool_]:
        """Return which nodes are among the best of such a tree."""
        inside = (self._levels <= tree.depth) & (self._ranks < tree.width)
        best = np.sort(self._scores[inside])[-tree.gamma :]
        return inside & (self._scores >= best[0]) if len(best) else inside

    @cached_property
    def _path(self) -> list[int]:
        found, node = [], ROOT
        for token in self._said:
            children = np.flatnonzero(
                (self._position.parents == node) & (self._position.tokens == token)
            )
            if not len(children):
                break
            node = int(children[0])
            found.append(node)
        return found

    @cached_property
    def _levels(self) -> NDArray[np.int32]:
        return self._tables[0]

    @cached_property
    def _scores(self) -> NDArray[np.float32]:
        return self._tables[1]

    @cached_property
    def _ranks(self) -> NDArray[np.int32]:
        parents = self._position.parents
        first = np.flatnonzero(np.diff(parents, prepend=-2) != 0)
        starts = np.repeat(first, np.diff(np.append(first, len(parents))))
        ranks: NDArray[np.int32] = (np.arange(len(parents)) - starts).astype(np.int32)
        return ranks

    @cached_property
    def _tables(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Levels and path log-probabilities, found level by level."""
        parents = self._position.parents
        levels = (parents == ROOT).astype(np.int32)
        scores = np.where(levels, self._position.gains, np.float32(0.0)).astype(np.float32)
        while len(below := np.flatnonzero((levels == 0) & (levels[parents] > 0))):
            levels[below] = levels[parents[below]] + 1
            scores[below] = scores[parents[below]] + self._position.gains[below]
        return levels, scores
