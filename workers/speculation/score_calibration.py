"""The calibration of a draft's scores: the numbers that turn its logits into probabilities, fitted
to the target's choices during speculation.

The score of a child is log_softmax(z / s) with z = log q'(v) + h g(v): s is the sharpening, h the
share of the target's noise g that the draft adds (greedy: z are the logits, and h has no effect).
Both are maximum-likelihood estimates. A node with a known outcome - the root, and every node on the
target's path - adds log softmax(z / s)[y] if the target's choice y is one of its children in the
tree, else log(1 - the sum over these children), at least log 1e-6. Nodes that were not reached add
nothing. The sums are kept at every point of a grid of (s, h), so the fit is exact; at the best h, s
is refined by a parabola in log s through the highest point and its two neighbours. All sums decay
with every node, so that about the last `MEMORY` count.

Each depth class has its own sums, separately for greedy and sampled replies: deeper down a head
reads its own guesses, and above temperature 0 the ranking of children includes noise. They belong
to a draft: all sessions of an engine add to them.

Outcomes are evaluated in small steps while the worker waits (`ScoreCalibration.learn`). Proposals
only store references: `Expectations` keeps the rankings below the nodes of one session's tree until
the root moves. Independent of models, messages and clocks."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.protocol.settings import Sampling
from dovetail.workers.speculation.growth import Branches, Floats, GrowingTree, Ints, Nodes
from dovetail.workers.speculation.noise import Noise
from dovetail.workers.speculation.sampling import process_logits

Likelihoods = NDArray[np.float64]

GRID: Likelihoods = np.geomspace(0.05, 3.0, 20)
"""Sharpenings at which the likelihood is known. Fits seen: 0.05 for a target's own copy in 4 bits,
0.5 for its first 6 of 8 layers."""
SHARES = (0.25, 0.5, 0.75, 1.0)  # shares of the noise
LEAST = 1e-6  # the minimum probability left for a choice that is not a child
MEMORY = 500  # the memory in nodes: each new one takes 1 / MEMORY off the weight of earlier ones
PRIOR = 32.0
"""The weight of the prior, in nodes that each give log s and h one unit of Fisher information."""
CLASSES = 4  # depth classes: children on level 1, on 2, on 3 and 4, and below
DEEPEST = 5
CLASS_OF = np.array((0, 0, 1, 2, 2, 3), np.int32)
"""The depth class by level; the last one is for all levels from `DEEPEST` on."""
WORK = 1 << 17
"""Maximum number of exponentials in a call of `learn`, but at least one point of the grid: half a
millisecond of a core."""
BACKLOG = 1 << 20
"""If more logits than this are waiting, whole rounds are skipped: skipping a part of one would
favour hits or misses."""
REMEMBERED = 1 << 22
"""Maximum number of logits of a session's passes kept until the root moves, 16 MiB; further passes
are ignored."""
NO_CHILD = -1
NEGLIGIBLE = -80.0
"""Smaller results become 0: subnormal float32 numbers take a processor eight times as long."""


@dataclass(frozen=True)
class Scale:
    """The divisor of logits, and the share of the noise that is added before."""

    sharpening: float
    noise_share: float = 1.0


Scales = tuple[Scale, ...]  # one for each depth class


def fixed(scale: Scale) -> Scales:
    """Return a scale that holds on every level."""
    return (scale,) * CLASSES


def class_of(levels: Ints) -> Ints:
    """Return the depth class of children on `levels`, which are 1 or more."""
    classes: Ints = CLASS_OF[np.minimum(levels, DEEPEST)]
    return classes


@dataclass(frozen=True)
class Observation:
    """The ranking of a node's children, and the target's choice."""

    depth_class: int
    logits: Tensor  # [V], after the processors that look back
    sampling: Sampling  # the other processors
    noise: Noise | None  # None for greedy decoding
    children: Ints  # token ids, padded with NO_CHILD
    choice: int

    @cached_property
    def processed(self) -> Tensor:
        """The logits [V] after all processors, float32."""
        return process_logits(self.logits.float().unsqueeze(0), self.sampling)[0]

    def z(self, share: float) -> Tensor:
        """Return the logits [V] with that share of the noise, float32, the largest 0."""
        z = self.processed
        z = z if self.noise is None else z.add(self.noise.row, alpha=share)
        return z - z.max()

    def likelihoods(self, z: Tensor, sharpenings: Likelihoods) -> Likelihoods:
        """Return the logarithm of the outcome's probability at each of `sharpenings` [S], for z
        [V], at most 0."""
        divided = z / torch.from_numpy(sharpenings).to(z.device, torch.float32)[:, None]
        total = divided.clamp(min=NEGLIGIBLE).logsumexp(-1)
        tokens = self.children[self.children != NO_CHILD]
        logs = (
            (divided[:, torch.from_numpy(tokens.astype(np.int64)).to(z.device)] - total[:, None])
            .cpu()
            .double()
            .numpy()
        )
        hit = np.flatnonzero(tokens == self.choice)
        found: Likelihoods = (
            logs[:, hit[0]] if len(hit) else np.log(np.maximum(1.0 - np.exp(logs).sum(-1), LEAST))
        )
        return found


class _Fit:
    """The sums of one depth class, greedy or sampled."""

    def __init__(self, start: Scale, shares: tuple[float, ...]) -> None:
        """`shares`: the candidates; a single one is fixed."""
        self.shares = shares
        away = (np.array(shares)[:, None] - start.noise_share) ** 2 if len(shares) > 1 else 0.0
        self.sums: Likelihoods = -PRIOR / 2 * (np.log(GRID / start.sharpening)[None] ** 2 + away)
        self.nodes = 0

    def add(self, likelihoods: Likelihoods) -> None:
        """Add one more node [shares, S]."""
        self.sums *= 1.0 - 1.0 / MEMORY
        self.sums += likelihoods
        self.nodes += 1

    def best(self) -> Scale:
        """Return the most likely scale."""
        share, point = np.unravel_index(int(self.sums.argmax()), self.sums.shape)
        step = np.log(GRID[1] / GRID[0])
        return Scale(
            float(GRID[point] * np.exp(step * peak(self.sums[share], int(point)))),
            self.shares[share],
        )


def peak(values: Likelihoods, highest: int) -> float:
    """Return the maximum of a parabola through the point `highest` and its neighbours, as an offset
    from it in points; 0 at an end of the grid or on a plateau."""
    if not 0 < highest < len(values) - 1:
        return 0.0
    before, there, after = values[highest - 1 : highest + 2].tolist()
    bend = before - 2 * there + after
    return (before - after) / (2 * bend) if bend < 0 else 0.0


class ScoreCalibration:
    """The scales of one draft."""

    def __init__(self, start: Scale) -> None:
        """`start`: the prior for drafts of this kind; its share has no effect on greedy
        decoding."""
        self.start = start
        self._fits = {
            sampled: [
                _Fit(start, SHARES if sampled else (start.noise_share,)) for _ in range(CLASSES)
            ]
            for sampled in (False, True)
        }
        self._scales = {
            sampled: tuple(fit.best() for fit in fits) for sampled, fits in self._fits.items()
        }
        self._waiting: deque[Observation] = deque()
        self._work: Iterator[None] | None = None

    def scales(self, *, sampled: bool) -> Scales:
        """Return the best scales so far."""
        return self._scales[sampled]

    def nodes(self, *, sampled: bool) -> tuple[int, ...]:
        """Return the number of nodes learned from, by depth class."""
        return tuple(fit.nodes for fit in self._fits[sampled])

    def add(self, observations: Sequence[Observation]) -> None:
        """Add the observations of a round, to be learned from as a whole later, or not at all."""
        if sum(len(observation.logits) for observation in self._waiting) < BACKLOG:
            self._waiting.extend(observations)

    def learn(self) -> bool:
        """Learn from a part of the waiting observations; return False if there are none."""
        if self._work is None:
            if not self._waiting:
                return False
            self._work = self._learn_from(self._waiting.popleft())
        if next(self._work, self) is self:
            self._work = None
        return True

    def _learn_from(self, observation: Observation) -> Iterator[None]:
        """Learn from one observation, yielding after every step."""
        sampled, depth_class = observation.noise is not None, observation.depth_class
        fit, step = self._fits[sampled][depth_class], max(1, WORK // len(observation.logits))
        found = np.empty_like(fit.sums)
        for row, share in enumerate(fit.shares):
            z = observation.z(share)
            for first in range(0, len(GRID), step):
                found[row, first : first + step] = observation.likelihoods(
                    z, GRID[first : first + step]
                )
                yield
        if not np.isfinite(found).all():  # NaN would stay in the sums for good
            return
        fit.add(found)
        before = self._scales[sampled]
        self._scales[sampled] = (*before[:depth_class], fit.best(), *before[depth_class + 1 :])


class LogitRows(Protocol):
    """Logits [N, V] of nodes: a tensor, or rows that are made when they are asked for."""

    def numel(self) -> int:
        """Return how many numbers are kept in memory."""

    def __getitem__(self, row: int, /) -> Tensor:
        """Return the logits [V] of a node."""


@dataclass
class _Pass:
    """A pass of the model over `nodes`, with the ranking of their children."""

    logits: LogitRows
    noise: Sequence[Noise] | None
    children: Ints
    classes: Ints
    rows: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The tokens from below the root down to a node -> its row in the pass."""


class Expectations:
    """The rankings below the nodes of one session's tree, until the target's choices are known."""

    def __init__(self, sampling: Sampling) -> None:
        """`sampling`: the logits have been through its processors that look back."""
        self._sampling = sampling
        self._passes: list[_Pass] = []
        self._unnamed: list[tuple[_Pass, Branches, Nodes]] = []
        """Passes whose nodes are still identified by their places in the tree at that time."""

    def note(
        self,
        tree: GrowingTree,
        nodes: Nodes,
        logits: LogitRows,
        noise: Sequence[Noise] | None,
        tokens: Ints,
        gains: Floats,
    ) -> None:
        """Note that the draft has logits [N, V] after `nodes` [N] of `tree`, which must not be
        modified later, and children with `tokens` [N, K]."""
        if not np.isfinite(tree.gains).any():  # the root's children are ranked for the first time
            self._passes, self._unnamed = [], []
        if logits.numel() + sum(past.logits.numel() for past in self._passes) > REMEMBERED:
            return
        children = np.where(np.isfinite(gains), tokens, np.int32(NO_CHILD))
        new = _Pass(logits, noise, children, class_of(tree.levels_of(nodes) + 1))
        self._passes.append(new)
        self._unnamed.append((new, tree.branches(), nodes))

    def name(self) -> None:
        """Identify the nodes by their paths: preferably while nothing waits, at the latest before
        the root moves."""
        for named, branches, nodes in self._unnamed:
            named.rows = {branches.path(node): row for row, node in enumerate(nodes.tolist())}
        self._unnamed.clear()

    def settle(self, committed: Sequence[int]) -> list[Observation]:
        """Return the observations that follow from the target's choices `committed`, before the
        root moves to the last of them."""
        self.name()
        chosen = tuple(committed)
        found = [self._observe(chosen[:depth], choice) for depth, choice in enumerate(chosen)]
        for past in self._passes:
            past.rows = {
                path[len(chosen) :]: row
                for path, row in past.rows.items()
                if path[: len(chosen)] == chosen
            }
        self._passes = [past for past in self._passes if past.rows]
        return [observation for observation in found if observation is not None]

    def _observe(self, path: tuple[int, ...], choice: int) -> Observation | None:
        """Return the node at the end of `path`, as it was last ranked; None if it never was."""
        for past in reversed(self._passes):
            if (row := past.rows.get(path)) is not None:
                noise = None if past.noise is None else past.noise[row]
                return Observation(
                    int(past.classes[row]),
                    past.logits[row],
                    self._sampling,
                    noise,
                    past.children[row],
                    choice,
                )
        return None
