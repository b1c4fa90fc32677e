"""Ranks a node's children: the draft's logits under the target's processors and noise, or drawn
tokens under rejection sampling. The calibration of the scores is learned from the target's
choices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dovetail.protocol.messages import Open
from dovetail.protocol.settings import Sampling
from dovetail.workers.kernels import ranking
from dovetail.workers.models.backends.device.levels import DeviceRanking, Fetched
from dovetail.workers.speculation.growth import Floats, GrowingTree, Ints, Nodes, likeliest
from dovetail.workers.speculation.history import looks_back
from dovetail.workers.speculation.noise import Noise, NoiseCache
from dovetail.workers.speculation.rejection import Draws
from dovetail.workers.speculation.sampling import SMALLEST_TEMPERATURE, LookingBack, process_logits
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
    ) -> "Ranking":
        """Start the ranking of a new session. Ids at or beyond the target's vocabulary or
        `most_tokens` (the draft's) are not ranked. With `sharpening` "auto", `score_calibration`
        provides the scales and learns from the session, unless its children are drawn."""
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
            if looks_back(sampling)
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
            None if self.noise is None else [self.noise.at(root + level).row for level in levels],
        )

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
        if self.draws is not None:
            return self.draws.children(nodes, process_logits(logits, self.sampling), width)
        levels = tree.levels_of(nodes)
        noise = (
            None
            if self.noise is None
            else [self.noise.at(root + level) for level in levels.tolist()]
        )
        if best is None:
            tokens, gains = self._likeliest(logits, noise, class_of(levels + 1), width)
        else:
            tokens, gains = best.take()
            tokens, gains = tokens[:, :width], gains[:, :width]
        if self.score_calibration is not None:
            self.expected.note(tree, nodes, logits, noise, tokens, gains)
        return tokens, gains

    def _likeliest(
        self, logits: Tensor, noise: Sequence[Noise] | None, classes: Ints, width: int
    ) -> tuple[Ints, Floats]:
        """Rank with the scale of each row's depth class; rows [N, V] with the same scale are ranked
        together."""
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
        self, logits: Tensor, noise: Sequence[Noise] | None, scale: Scale, width: int
    ) -> tuple[Ints, Floats]:
        # (z + share * noise) / sharpening, with the share moved to the factor of the noise
        share = 1.0 if noise is None else scale.noise_share
        sharpening = scale.sharpening / share
        if self.native:
            words = None if noise is None else [own.word for own in noise]
            tokens, gains = ranking.likeliest(
                logits,
                width,
                sampling=self.sampling,
                words=words,
                share=share,
                sharpening=sharpening,
            )
            if (tokens[:, 0] >= 0).all():
                return tokens, gains
        rows = None if noise is None else [own.row for own in noise]
        if self._cuts:
            logits, temperature = process_logits(logits, self.sampling) / share, 0.0
        else:
            temperature = self.sampling.temperature * share
        return likeliest(logits, width, temperature=temperature, noise=rows, sharpening=sharpening)

    def prepare(self, first: int, count: int) -> bool:
        """Precompute the noise of one of the positions first..first+count-1. Return False if there
        is none to compute, or the kernels rank, which compute noise themselves."""
        self.expected.name()
        return not self.native and self.noise is not None and self.noise.prepare(first, count)
