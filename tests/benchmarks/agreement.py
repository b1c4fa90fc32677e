"""The share of contexts of one text in which the target's choice is among the children that a draft
names, at temperature 0 and at temperature 1.

At temperature 1 both add the same noise, the draft as much of it as it does when it drafts; what
the other rules would accept there stands beside it (`nodes.py`). Rows of a head are the true ones,
of features that the target computed.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.measure import Estimate, ratio_of_sums
from benchmarks.nodes import coupled, matched, rejected
from dovetail.workers.drafters.head import NOISE_SHARE
from dovetail.workers.heads.head import Head, classify, open_head
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from dovetail.workers.models.states import LAST
from dovetail.workers.sessions.wire import narrowed

FIGURE = 0.95
"""Acceptance per node at temperature 1 against temperature 0."""


@dataclass(frozen=True)
class Text:
    """A reply to a prompt, and the key of the noise."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    key: bytes


@dataclass(frozen=True)
class Agreement:
    """The share of contexts where one of so many children is accepted: at temperature 0, and at
    temperature 1 by each rule.

    `ratio` is that of the shared noise against temperature 0; its interval is over replies.
    """

    children: int
    greedy: float
    coupled: float
    matched: float
    rejected: float
    ratio: Estimate

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "ratio": self.ratio.as_json(),
            "figure": FIGURE,
            "holds": self.ratio.reaches(FIGURE),
        }


class Guesser(Protocol):
    """A draft as it is asked here."""

    @property
    def wanted(self) -> tuple[int, ...]:
        """Places of the target whose states it reads."""

    @property
    def noise_share(self) -> float:
        """The share of the noise that it adds when it drafts."""

    def __call__(self, tokens: Tensor, states: Sequence[Tensor]) -> Tensor:
        """tokens [T], states [T, hidden] of the wanted places -> logits [T - 1, V] of what follows
        the tokens from the second on."""


class SmallGuesser:
    """A smaller model."""

    wanted: tuple[int, ...] = ()
    noise_share = 1.0

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def __call__(self, tokens: Tensor, states: Sequence[Tensor]) -> Tensor:
        segment = Segment(self._model.new_cache(len(tokens)), 0, len(tokens))
        return self._model.forward(tokens, torch.arange(len(tokens)), [segment])[1:]


class HeadGuesser:
    """A head of the target's."""

    noise_share = NOISE_SHARE

    def __init__(self, head: Head) -> None:
        self._head = head
        self.wanted = head.spec.taps or (LAST,)

    def __call__(self, tokens: Tensor, states: Sequence[Tensor]) -> Tensor:
        head, count = self._head, len(tokens) - 1
        features = narrowed(torch.cat(tuple(states), dim=-1), head.spec.dtype)[:-1]
        return head.forward(
            tokens[1:],
            features,
            torch.arange(count),
            [Segment(head.new_cache(count), 0, count)],
            true=True,
        ).logits


def open_guesser(draft: str, target: str) -> Guesser:
    """A draft or a head by its folder."""
    if classify(draft) is None:
        return SmallGuesser(load_language_model(draft, weights="stored", device="cpu"))
    return HeadGuesser(open_head(draft, target=target))


def agreements(
    target: str, draft: str, texts: Sequence[Text], children: Sequence[int]
) -> tuple[list[Agreement], float]:
    """Return the agreement for each number of children, over the contexts of all texts, and the
    mean entropy of the target's choices there at temperature 1, in nats."""
    model, guesser = (
        load_language_model(target, weights="fp32", device="cpu"),
        open_guesser(draft, target),
    )
    pairs = [(*_logits(model, guesser, text), text.key) for text in texts if len(text.reply) > 1]
    found = [
        _agreement([_shares(*pair, number, guesser.noise_share) for pair in pairs], number)
        for number in children
    ]
    laws = torch.cat([choices for choices, _, _ in pairs]).log_softmax(-1)
    return found, float(-(laws.exp() * laws).sum(-1).mean())


def _agreement(shares: Sequence[Sequence[Tensor]], children: int) -> Agreement:
    """`shares`: for every text [N] of each rule, temperature 0 first and the shared noise
    second."""
    at_zero, shared, sampled, drawn = (
        float(torch.cat(rule).mean()) for rule in zip(*shares, strict=True)
    )
    ratio = ratio_of_sums(
        [(float(s[1].sum()), len(s[1])) for s in shares],
        [(float(s[0].sum()), len(s[0])) for s in shares],
    )
    return Agreement(children, at_zero, shared, sampled, drawn, ratio)


def _shares(
    choices: Tensor, guesses: Tensor, key: bytes, children: int, noise_share: float
) -> list[Tensor]:
    at_zero, sampled = (
        greedy(choices, guesses, children),
        coupled(choices, guesses, children, key, noise_share),
    )
    return [
        at_zero,
        sampled,
        matched(choices, guesses, children),
        rejected(choices, guesses, children, key),
    ]


@torch.inference_mode()
def _logits(model: LanguageModel, guesser: Guesser, text: Text) -> tuple[Tensor, Tensor]:
    """Return the logits [N, V] of target and draft for every token of the reply but the first,
    which is never drafted."""
    tokens = torch.tensor([*text.prompt, *text.reply])
    first, last = len(text.prompt), len(tokens) - 1
    segment = Segment(model.new_cache(len(tokens)), 0, len(tokens))
    logits, states = model.forward_with_states(
        tokens, torch.arange(len(tokens)), [segment], wanted=guesser.wanted
    )
    guesses = guesser(tokens, [states[place] for place in guesser.wanted])[first - 1 : last - 1]
    return logits[first:last], guesses[:, : logits.shape[1]]


def greedy(choices: Tensor, guesses: Tensor, children: int) -> Tensor:
    """Return [N]: 1 where the largest of choices [N, V] is among the largest `children` of guesses
    [N, V], else 0."""
    named = guesses.topk(children, dim=-1).indices
    return (named == choices.argmax(dim=-1, keepdim=True)).any(dim=-1).double()
