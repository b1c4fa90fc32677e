"""A draft model with another vocabulary than its target's.

Within a tree, a draft's token stands for the target's token of the same bytes; other tokens of the
draft are never proposed (TLI; Timor et al., arXiv 2502.05202). The committed log is decoded and
tokenised for the draft, with the tokens that its whole text would have. Special tokens are mapped
by role, never by spelling: the beginning of a text, its end and that of a turn, and what begins
turns in the chat template. Others are not part of the draft's text. V_t and V_d are the sizes of
the two vocabularies."""

import codecs
import math
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.vocabulary import BYTE_TOKEN
from dovetail.workers.models.checkpoints.gguf.view import spelled
from dovetail.workers.models.checkpoints.hub import find_folder, local_folder
from dovetail.workers.models.checkpoints.tokenizer import read_language, table_in
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Segment

WINDOW = 256
"""More characters than a change at the end of a text reaches back, which is a few words."""
NO_TOKEN = -1
LEAST_MASS = 0.1
"""A draft is refused if its shared tokens have less than this share of its probability: hardly one
proposal in ten could be accepted."""
SAMPLE = (
    "The mill stands where the river leaves the wood. In 1897 its owner, Mr. Hale, wrote: "
    '"Nobody has asked for bread this week."\n\ndef area(width, height):\n    return width * '
    "height  # in metres\n"
)
"""The text over which that share is measured."""


class Vocabulary:
    """The tokens of a model as bytes, and the roles of its special ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer, self.table, self.facts = read_language(folder)
        try:
            pieces = self.table.pieces()
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        self.pieces = {token: one for token, one in pieces.items() if token < self.facts.size}
        ends, template = self.facts.end, self.facts.template
        places = {token: template.find(one) for one, token in self.table.special.items()}
        named = [token for token in sorted(places, key=places.__getitem__) if places[token] >= 0]
        self.ends = {end: "turn" for end in ends if end in named}
        self.ends |= {end: "text" for end in ends if end not in named}
        others = [token for token in named if token not in ends]
        self.opening = [token for token in others if token != self.facts.begin] or others
        """The other special tokens of the chat template, which begin turns, in its order."""

    @cached_property
    def of_piece(self) -> dict[bytes, int]:
        """Return the token of each piece; a byte token only where no other
        token spells the byte."""
        found: dict[bytes, int] = {}
        for token, piece in self.pieces.items():
            if piece not in found or BYTE_TOKEN.fullmatch(self.table.spelling(found[piece]) or ""):
                found[piece] = token
        return found

    def roles_in(self, draft: "Vocabulary", prefix: Sequence[int]) -> dict[int, int]:
        """Return the draft's special token for each special token with a role, the ends of turns
        first. `prefix`: what the draft's tokenizer puts before a text in any case."""
        ends = {role: end for end, role in reversed(draft.ends.items())}
        last = next(iter(ends.values()), None)
        roles = {end: ends.get(role, last) for end, role in self.ends.items()}
        if len(self.opening) == len(draft.opening):
            roles |= dict(zip(self.opening, draft.opening, strict=True))
        if self.facts.begin is not None and not prefix and draft.facts.begin not in draft.opening:
            roles.setdefault(self.facts.begin, draft.facts.begin)
        return {token: own for token, own in roles.items() if own is not None}


class Translation:
    """Maps a target's tokens to a draft's, and the draft's logits to the target's tokens."""

    def __init__(self, draft: Vocabulary, target: Vocabulary) -> None:
        self.facts, self.table, self.pieces = target.facts, target.table, target.pieces
        try:
            self._tokenizer = Tokenizer.from_buffer(draft.tokenizer)
        except Exception as error:  # the library raises bare Exception for unreadable input
            raise CheckpointError(
                f"{draft.folder}: tokenizer.json cannot be read: {error}"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        around, begin = self._tokenizer.encode("").ids, draft.facts.begin
        self._tokenizer.encode_special_tokens = True
        self.prefix = around[:1] if begin is not None and around[:1] == [begin] else []
        """What the draft's tokenizer puts before a text."""
        self.first = next((token for token in (begin, *draft.ends) if token is not None), 0)
        """What it reads if there is no text yet."""
        self.byte_tokens = [draft.of_piece.get(bytes([byte])) for byte in range(256)]
        self.roles = target.roles_in(draft, self.prefix)
        same = {
            token: draft.of_piece[piece]
            for piece, token in target.of_piece.items()
            if piece in draft.of_piece
        }
        self.own: NDArray[np.int64] = np.full(target.facts.size, NO_TOKEN, np.int64)
        """The draft's token for each of the target's [V_t]; -1: none."""
        for token, own in (*same.items(), *self.roles.items()):
            self.own[token] = own
        proposed = {own: token for token, own in reversed(self.roles.items())}
        proposed.update((own, token) for token, own in same.items())
        self.shared = len(same)  # tokens of equal bytes
        self._targets = torch.tensor([*proposed.values()], dtype=torch.int64)
        self._drafts = torch.tensor([*proposed], dtype=torch.int64)

    @property
    def count(self) -> int:
        """Return how many of the target's tokens the draft can propose."""
        return len(self._targets)

    def encode(self, text: str) -> list[int]:
        """Return a text in the draft's tokens, in which special tokens are ordinary text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def logits(self, own: Tensor) -> Tensor:
        """Return the target's logits [N, V_t] for the draft's [N, V_d]; -inf for tokens that it
        cannot propose."""
        self._targets, self._drafts = self._targets.to(own.device), self._drafts.to(own.device)
        found = own.new_full((len(own), len(self.own)), -math.inf)
        return found.index_copy_(1, self._targets, own.index_select(1, self._drafts))

    def mass(self, model: LanguageModel) -> float:
        """Return the share of the draft's probability on tokens that it can propose."""
        ids = [*self.prefix, *self.encode(SAMPLE)][: model.context]
        places, segment = torch.arange(len(ids)), Segment(model.new_cache(len(ids)), 0, len(ids))
        logits = model.forward(torch.tensor(ids), places, [segment])
        return float(
            logits.softmax(-1).index_select(1, self._drafts.to(logits.device)).sum(-1).mean()
        )


class Retokenised:
    """The log of a session in a draft's tokens, which may change before the end as it grows."""

    def __init__(self, translation: Translation, log: Sequence[int]) -> None:
        self.tokens = [*translation.prefix]
        self.waiting = False
        """Whether the log ends with a part of a character for which the draft has no tokens."""
        self._translation = translation
        self._begin()
        self.extend(log)

    def _begin(self) -> None:
        """Begin a text after the tokens so far."""
        self._fixed, self._text, self._skipped = len(self.tokens), "", 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def extend(self, log: Sequence[int]) -> int:
        """Append the target's tokens `log`; return how many of the draft's first tokens are still
        the same."""
        fixed, before = self._fixed, self.tokens[self._fixed :]
        own, run = self._translation, bytearray()
        for token in log:
            if (special := own.roles.get(token)) is None:
                run += own.pieces.get(token, b"")
            else:
                self._read(bytes(run), final=True)
                self.tokens.append(special)
                self._begin()
                run.clear()
        self._read(bytes(run))
        if not self.tokens:
            self.tokens.append(own.first)
        return fixed + shared_length(before, self.tokens[fixed:])

    def _read(self, run: bytes, *, final: bool = False) -> None:
        """Append bytes to the text, and tokenise the part of it that is not fixed."""
        self._text += self._decoder.decode(run, final)
        window = self._translation.encode(self._text)[self._skipped :]
        rest = [self._translation.byte_tokens[byte] for byte in self._decoder.getstate()[0]]
        self.waiting = None in rest
        self.tokens[self._fixed :] = [*window, *(one for one in rest if one is not None)]
        if len(self._text) > 2 * WINDOW:
            self._fix(window)

    def _fix(self, window: Sequence[int]) -> None:
        """Fix the tokens of all but the last words of the text, if these alone have the same
        tokens, except for the first few."""
        stop = len(self._text) - WINDOW
        start = self._text.rfind(" ", stop - WINDOW, stop)
        rest = self._text[start if start >= 0 else stop :]
        tokens = self._translation.encode(rest)
        same = shared_length(window[::-1], tokens[::-1])
        if 2 * same >= len(tokens):
            self._fixed += len(window) - same
            self._text, self._skipped = rest, len(tokens) - same


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first tokens two sequences have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def open_translation(draft: str, target: str) -> Translation | None:
    """Return the translation between the vocabularies of a draft and its target (folders or hub
    ids); None if they are equal, or if the target is not on this machine, in which case the
    coordinator compares them. Raises `CheckpointError` if they have no token in common."""
    if not target or (folder := local_folder(target)) is None:
        return None
    own = find_folder(draft)
    if table_in(own).digest == table_in(folder).digest:
        return None
    translation = Translation(Vocabulary(own), Vocabulary(folder))
    if not translation.shared:
        raise CheckpointError(
            f"the draft {spelled(draft)} has no token in common with the target "
            f"{spelled(target)}; choose another draft"
        )
    return translation


def described(translation: Translation, model: LanguageModel, draft: str, target: str) -> str:
    """Return what a draft of another vocabulary can propose, to follow its name; raise
    `CheckpointError` if that is too little."""
    mass = translation.mass(model)
    shares = (
        f"{translation.count} of the target's {translation.facts.size} tokens, {mass:.0%} of its "
        "own probability"
    )
    if mass < LEAST_MASS:
        raise CheckpointError(
            f"the draft {spelled(draft)} shares with the target {spelled(target)} only {shares}; "
            "choose another draft"
        )
    return f"proposes {shares}"
