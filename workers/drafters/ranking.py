"""The children that a draft gives a node: its logits under the target's processors and with the
target's noise, ranked, or drawn where the target accepts by rejection.

How sure the draft may be, the scores' calibration, is learned from what the target chose.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dovetail.protocol.messages import Open
from dovetail.protocol.settings import Sampling
from dovetail.workers import kernels
from dovetail.workers.kernels import ranking
from dovetail.workers.models.backends.device.ranked import DeviceRanking, Fetched
from dovetail.workers.speculation.growth import (
    Floats,
    GrowingTree,
    Ints,
    Nodes,
    likeliest,
)
from dovetail.workers.speculation.noise import NoiseCache
from dovetail.workers.speculation.rejection import Draws
from dovetail.workers.speculation.sampling import (
    SMALLEST_TEMPERATURE,
    LookingBack,
    process_logits,
)
from dovetail.workers.speculation.score_calibration import (
    CLASS_OF,
    DEEPEST,
    Expectations,
    Scale,
    Scales,
    ScoreCalibration,
    class_of,
    fixed,
)


@dataclass
class Ranking:
    """Ranks or draws the children of a session's nodes."""

    sampling: Sampling
    scales: Scales
    """The divisor of the logits, and the share of the target's noise that is added, on each level;
    those of a tree change when its root moves."""
    vocabulary_size: int
    rank: Callable[..., tuple[Ints, Floats]]
    """`growth.likeliest`, or the kernels' of the same arguments."""
    processed: bool
    """True if more is done to the logits than the ranking does on its way."""
    noise: NoiseCache | None
    """None: greedy."""
    looking_back: LookingBack | None
    """None: no processor looks back."""
    draws: Draws | None
    """The draws of a session under rejection; None: children are ranked, not drawn."""
    score_calibration: ScoreCalibration | None
    """Gives the scales, and learns from what the target chose; None: they are fixed."""
    expected: Expectations

    @classmethod
    def begin(
        cls,
        order: Open,
        *,
        most_tokens: int,
        score_calibration: ScoreCalibration,
        device: torch.device,
    ) -> "Ranking":
        """Return the ranking of a new session. No id at or beyond the target's vocabulary or
        `most_tokens`, the draft's, has a rank.

        A `sharpening` of "auto" is that of `score_calibration`, which learns from the session
        unless its children are drawn.
        """
        key, sampling, sharpening = order.key, order.sampling, order.tree.sharpening
        vocabulary_size = min(order.vocabulary_size, most_tokens)
        noise = (
            NoiseCache(key, vocabulary_size, device)
            if sampling.temperature > 0 and not sampling.rejects
            else None
        )
        back = (
            LookingBack(
                sampling, order.prompt, order.end, vocabulary_size, device, replied=order.replied
            )
            if sampling.looks_back
            else None
        )
        rank = ranking.likeliest if device.type == "cpu" and kernels.available() else likeliest
        processed = sampling.temperature > 0 and (sampling.truncates or sampling.rejects)
        return cls(
            sampling=sampling,
            scales=score_calibration.scales(sampled=noise is not None)
            if sharpening == "auto"
            else fixed(replace(score_calibration.start, sharpening=sharpening)),
            vocabulary_size=vocabulary_size,
            rank=rank,
            processed=processed,
            noise=noise,
            looking_back=back,
            draws=Draws(key) if sampling.rejects else None,
            score_calibration=score_calibration
            if sharpening == "auto" and not sampling.rejects
            else None,
            expected=Expectations(0.0 if processed else sampling.temperature),
        )

    def commit(self, tokens: Sequence[int], length: int) -> None:
        """The log has grown by `tokens` to `length`; the tree is still the one that they were
        guessed by."""
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
        None: it is the host's, because logits are processed or children are drawn."""
        if self.looking_back is not None or self.processed or self.draws is not None:
            return None
        levels = tree.levels_of(nodes).tolist()
        of = {level: self.scales[CLASS_OF[min(level + 1, DEEPEST)]] for level in set(levels)}
        scales = [of[level] for level in levels]
        if self.noise is None:
            temperatures, sharpenings = [1.0] * len(scales), [scale.sharpening for scale in scales]
        else:
            least, heat = SMALLEST_TEMPERATURE, self.sampling.temperature
            temperatures, sharpenings = (
                [max(heat * scale.noise_share, least) for scale in scales],
                [scale.sharpening / scale.noise_share for scale in scales],
            )
        return DeviceRanking(
            width,
            self.vocabulary_size,
            np.array(temperatures, np.float32),
            np.array(sharpenings, np.float32),
            self._noise_of(levels, root),
        )

    def _noise_of(self, levels: Sequence[int], root: int) -> Sequence[Tensor] | None:
        """Return the noise of the children of nodes on these levels."""
        if self.noise is None:
            return None
        return [self.noise.row(root + level) for level in levels]

    def children(
        self,
        logits: Tensor,
        tree: GrowingTree,
        nodes: Nodes,
        root: int,
        width: int,
        best: Fetched | None = None,
    ) -> tuple[Ints, Floats]:
        """Return the likeliest tokens after `nodes`, best first, or tokens drawn: ids and gains
        [N, K] by logits [N, V]. Below the root stands position `root`. `best`: what a
        device has found that was asked by `for_device`; None: the host ranks."""
        if best is not None and self.score_calibration is None:
            tokens, gains = best.take()
            return tokens[:, :width], gains[:, :width]
        logits = logits[:, : self.vocabulary_size]
        if self.looking_back is not None:
            logits = self.looking_back.process(
                logits, [tree.path_tokens(node) for node in nodes.tolist()]
            )
        if self.processed:
            logits = process_logits(logits, self.sampling)
        if self.draws is not None:
            return self.draws.children(nodes, logits, width)
        levels = tree.levels_of(nodes)
        noise = self._noise_of(levels.tolist(), root)
        if best is None:
            tokens, gains = self._likeliest(logits, noise, class_of(levels + 1), width)
        else:
            tokens, gains = best.take()
            tokens, gains = tokens[:, :width], gains[:, :width]
        if self.score_calibration is not None:
            self.expected.note(tree, nodes, logits, noise, tokens, gains)
        return tokens, gains

    def _likeliest(
        self, logits: Tensor, noise: Sequence[Tensor] | None, classes: Ints, width: int
    ) -> tuple[Ints, Floats]:
        """Rank by the scale of each row's depth class; rows [N, V] of one scale go together."""
        scales = [self.scales[depth_class] for depth_class in classes.tolist()]
        if len(different := set(scales)) == 1:
            return self._by_scale(logits, noise, scales[0], width)
        parts = []
        for scale in different:
            rows = [row for row, its in enumerate(scales) if its == scale]
            parts.append(
                (
                    rows,
                    *self._by_scale(
                        logits[rows],
                        None if noise is None else [noise[row] for row in rows],
                        scale,
                        width,
                    ),
                )
            )
        order = np.argsort(np.concatenate([rows for rows, _, _ in parts]))
        return np.concatenate([tokens for _, tokens, _ in parts])[order], np.concatenate(
            [gains for _, _, gains in parts]
        )[order]

    def _by_scale(
        self, logits: Tensor, noise: Sequence[Tensor] | None, scale: Scale, width: int
    ) -> tuple[Ints, Floats]:
        if noise is None:
            return self.rank(
                logits, width, temperature=0.0, noise=None, sharpening=scale.sharpening
            )
        # (z + share * noise) / sharpening, with the share moved to what stands beside the noise
        share = scale.noise_share
        if self.processed:
            logits, temperature = logits / share, 0.0
        else:
            temperature = self.sampling.temperature * share
        return self.rank(
            logits, width, temperature=temperature, noise=noise, sharpening=scale.sharpening / share
        )

    def prepare(self, first: int, count: int) -> bool:
        """Compute the noise of one of the positions first..first+count-1; False if there is none to
        compute."""
        self.expected.name()
        return self.noise is not None and self.noise.prepare(first, count)
