"""Ranks a node's children: the draft's logits under the target's processors and noise, or drawn
tokens under rejection sampling. The calibration of the scores is learned from the target's
choices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.protocol.messages import Open
from dovetail.protocol.settings import Sampling
from dovetail.workers.kernels import ranking
from dovetail.workers.models.backends.device.levels import DeviceRanking, Fetched
from dovetail.workers.speculation.constrained import Constrained
from dovetail.workers.speculation.growth import Floats, GrowingTree, Ints, Nodes, likeliest
from dovetail.workers.speculation.history import looks_back
from dovetail.workers.speculation.noise import Noise, NoiseCache
from dovetail.workers.speculation.rejection import Draws
from dovetail.workers.speculation.sampling import (
    MASKED,
    SMALLEST_TEMPERATURE,
    LookingBack,
    process_logits,
    tempered,
)
from dovetail.workers.speculation.score_calibration import (
    Expectations,
    LogitRows,
    Scales,
    ScoreCalibration,
    class_of,
    fixed,
)

Doubles = NDArray[np.float64]


@dataclass
class Ranking:
    """Ranks or draws the children of a session's nodes."""

    sampling: Sampling
    scales: Scales
    """For each level, the divisor of the logits and the share of the target's noise that is added.
    They may change when the root moves."""
    vocabulary_size: int
    native: bool  # True if the C++ kernels rank
    noise: NoiseCache | None  # None for greedy decoding
    looking_back: LookingBack | None  # the processors that look back; None: there are none
    draws: Draws | None
    """The draws of a session under rejection sampling; None: children are ranked."""
    score_calibration: ScoreCalibration | None
    """Provides the scales, and learns from the target's choices; None: the scales are fixed."""
    expected: Expectations

    @classmethod
    def begin(
        cls,
        order: Open,
        *,
        most_tokens: int,
        score_calibration: ScoreCalibration,
        device: torch.device,
        constrained: Constrained | None,
    ) -> "Ranking":
        """Start the ranking of a new session. Ids at or beyond the target's vocabulary or
        `most_tokens` (the draft's) are not ranked. With `sharpening` "auto", `score_calibration`
        provides the scales and learns from the session, unless its children are drawn.
        `constrained`: the grammar of the reply, if the draft masks its tokens."""
        key, sampling, sharpening = order.key, order.sampling, order.tree.sharpening
        vocabulary_size = min(order.vocabulary_size, most_tokens)
        noise = (
            NoiseCache(key, vocabulary_size, device)
            if sampling.temperature > 0 and not sampling.rejects
            else None
        )
        back = (
            LookingBack(
                *(sampling, order.prompt, order.end, vocabulary_size, device),
                replied=order.replied,
                constrained=constrained,
            )
            if looks_back(sampling) or constrained is not None
            else None
        )
        return cls(
            sampling=sampling,
            scales=score_calibration.scales(sampled=noise is not None)
            if sharpening == "auto"
            else fixed(replace(score_calibration.start, sharpening=sharpening)),
            vocabulary_size=vocabulary_size,
            native=ranking.ranks(device),
            noise=noise,
            looking_back=back,
            draws=Draws(key) if sampling.rejects else None,
            score_calibration=score_calibration
            if sharpening == "auto" and not sampling.rejects
            else None,
            expected=Expectations(sampling),
        )

    def commit(self, tokens: Sequence[int], length: int) -> None:
        """Note that the log has grown by `tokens` to `length`; the tree must still be the one that
        predicted them."""
        if self.score_calibration is not None:
            self.score_calibration.add(self.expected.settle(tokens))
            self.scales = self.score_calibration.scales(sampled=self.noise is not None)
        if self.looking_back is not None:
            self.looking_back.extend(tokens)
        if self.noise is not None:
            self.noise.drop_before(length)
        if self.draws is not None:
            self.draws.begin(length)

    def for_device(
        self, tree: GrowingTree, nodes: Nodes, root: int, width: int
    ) -> DeviceRanking | None:
        """Return the ranking of the children of `nodes` for the device that computes their logits;
        None: the host ranks, because logits are processed or children drawn."""
        if self.looking_back is not None or self._cuts or self.draws is not None:
            return None
        levels = tree.levels_of(nodes)
        shares, sharpenings = self._scales_of(levels)
        temperatures = shares
        if self.noise is not None:
            temperatures = np.maximum(self.sampling.temperature * shares, SMALLEST_TEMPERATURE)
        return DeviceRanking(
            width,
            self.vocabulary_size,
            temperatures.astype(np.float32),
            sharpenings.astype(np.float32),
            None
            if self.noise is None
            else [self.noise.at(root + level).row for level in levels.tolist()],
        )

    def _scales_of(self, levels: Ints) -> tuple[Doubles, Doubles]:
        """Return shares and sharpenings [N] with which the children of nodes on `levels` rank by (z
        / share + noise) / sharpening: (z + share * noise) / (sharpening * share)."""
        scales = [self.scales[depth] for depth in class_of(levels + 1).tolist()]
        sharpenings = np.array([scale.sharpening for scale in scales])
        if self.noise is None:
            return np.array([1.0] * levels.size), sharpenings
        shares = np.array([scale.noise_share for scale in scales])
        return shares, sharpenings / shares

    @property
    def plain(self) -> bool:
        """Whether the logits of a position suffice to rank its tokens: no processor looks back, and
        nothing is drawn."""
        return self.looking_back is None and self.draws is None

    def likeliest(self, logits: Tensor, level: int, root: int, width: int) -> tuple[Ints, Floats]:
        """Return ids and gains [1, K] of the likeliest tokens after nodes on `level`, from logits
        [1, V]. `root`: as in `children`."""
        noise = None if self.noise is None else [self.noise.at(root + level)]
        levels = np.array([level], np.int32)
        return self._likeliest(logits[:, : self.vocabulary_size], noise, levels, width)

    def divisor(self, level: int) -> float:
        """Return the number by which logits after nodes on `level` are divided to be ranked."""
        depth_class = int(class_of(np.array([level + 1], np.int32))[0])
        heat: float = self.sampling.temperature or 1.0
        return self.scales[depth_class].sharpening * heat

    def note(
        self,
        tree: GrowingTree,
        nodes: Nodes,
        logits: LogitRows,
        root: int,
        tokens: Ints,
        gains: Floats,
    ) -> None:
        """Note the children of `nodes`, from whose outcome the scales are learned."""
        if self.score_calibration is None:
            return
        noise = None
        if self.noise is not None:
            noise = [self.noise.at(root + level) for level in tree.levels_of(nodes).tolist()]
        self.expected.note(tree, nodes, logits, noise, tokens, gains)

    @property
    def _cuts(self) -> bool:
        """Whether truncation excludes some tokens."""
        return self.sampling.temperature > 0 and self.sampling.truncates

    def children(
        self,
        logits: Tensor,
        tree: GrowingTree,
        nodes: Nodes,
        root: int,
        width: int,
        best: Fetched | None = None,
    ) -> tuple[Ints, Floats]:
        """Return ids and gains [N, K] of the likeliest tokens after `nodes`, best first, or of
        drawn ones, from logits [N, V]. `root`: the position of the root's children. `best`: what a
        device has ranked for `for_device`; None: the host ranks."""
        if best is not None and self.score_calibration is None:
            tokens, gains = best.take()
            return tokens[:, :width], gains[:, :width]
        logits = logits[:, : self.vocabulary_size]
        if self.looking_back is not None:
            logits = self.looking_back.process(
                logits, [tree.path_tokens(node) for node in nodes.tolist()]
            )
            if self.looking_back.constrained and bool((logits.amax(-1) == MASKED).any()):
                return self._of_living(logits, tree, nodes, root, width)
        return self._children(logits, tree, nodes, root, width, best)

    def _of_living(
        self, logits: Tensor, tree: GrowingTree, nodes: Nodes, root: int, width: int
    ) -> tuple[Ints, Floats]:
        """Return the children of `nodes`, of which some have none, since the grammar allows none of
        the draft's tokens."""
        count = min(width, logits.shape[1])
        tokens = np.zeros((len(nodes), count), np.int32)
        gains = np.full((len(nodes), count), -np.inf, np.float32)
        alive = np.flatnonzero((logits.amax(-1) != MASKED).cpu().numpy())
        if len(alive):
            own = logits[torch.from_numpy(alive)]
            tokens[alive], gains[alive] = self._children(own, tree, nodes[alive], root, width)
        return tokens, gains

    def _children(
        self,
        logits: Tensor,
        tree: GrowingTree,
        nodes: Nodes,
        root: int,
        width: int,
        best: Fetched | None = None,
    ) -> tuple[Ints, Floats]:
        """Return `children` from logits [N, V] after the processors that look back."""
        if self.draws is not None:
            return self.draws.children(nodes, process_logits(logits, self.sampling), width)
        levels = tree.levels_of(nodes)
        noise = (
            None
            if self.noise is None
            else [self.noise.at(root + level) for level in levels.tolist()]
        )
        if best is None:
            tokens, gains = self._likeliest(logits, noise, levels, width)
        else:
            tokens, gains = best.take()
            tokens, gains = tokens[:, :width], gains[:, :width]
        if self.score_calibration is not None:
            self.expected.note(tree, nodes, logits, noise, tokens, gains)
        return tokens, gains

    def _likeliest(
        self, logits: Tensor, noise: Sequence[Noise] | None, levels: Ints, width: int
    ) -> tuple[Ints, Floats]:
        """Rank the children of nodes on `levels` [N]."""
        shares, sharpenings = self._scales_of(levels)
        if self.native:
            words = None if noise is None else [own.word for own in noise]
            tokens, gains = ranking.likeliest(
                logits,
                width,
                sampling=self.sampling,
                words=words,
                share=shares,
                sharpening=sharpenings,
            )
            if (tokens[:, 0] >= 0).all():
                return tokens, gains
        share, sharpening = (
            torch.from_numpy(own.astype(np.float32)).to(logits.device).unsqueeze(1)
            for own in (shares, sharpenings)
        )
        if self._cuts:
            logits = process_logits(logits, self.sampling) / share
        elif self.sampling.temperature > 0.0:
            logits = tempered(logits.float(), self.sampling.temperature * share)
        rows = None if noise is None else [own.row for own in noise]
        return likeliest(logits, width, noise=rows, sharpening=sharpening)

    def prepare(self, first: int, count: int) -> bool:
        """Precompute the noise of one of the positions first..first+count-1. Return False if all is
        computed, or if the kernels rank, which compute noise themselves."""
        self.expected.name()
        return not self.native and self.noise is not None and self.noise.prepare(first, count)
