"""Compares a loaded target with transformers' forward of its checkpoint in fp32 over a long text:
log-probabilities and choices at every position, or, for weights of few bits, the mean difference.
The reference is `workers/models/parity/card.py`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

from dovetail.launch.console.terminal import progress_bar
from dovetail.launch.files.prompts import Prompt
from dovetail.launch.processes.connection import Connection, all_serving, cache_of, weights_of
from dovetail.protocol.errors import CheckpointError, DovetailError, UserError
from dovetail.protocol.messages import (
    Emitted,
    Failed,
    Finished,
    PromptScored,
    TokenLogprobs,
    WorkerState,
)
from dovetail.protocol.settings import Sampling, TargetSettings
from dovetail.runtime.text.tokenizer import TextCodec, codec_of

if TYPE_CHECKING:
    from dovetail.workers.models.checkpoints.checkpoint import Checkpoint

TOP = 20  # tokens of each position whose log-probabilities are compared
REPLY = 32  # tokens that the target appends to the text
LEAST_TEXT, MOST_TEXT = 256, 2048
"""Least and most tokens of a text, which must pass the positions named in config.json."""
BEYOND = 16  # tokens behind the last of these positions
EXACT = 2e-3
"""Largest accepted difference of a log-probability for the checkpoint's own function: rounding."""
MEAN = {
    "int8": 0.1,
    "int4-int8": 0.25,
    "int4-fp32": 0.25,
    "file-int8": 0.1,
    "bf16": 0.05,
    "fp16": 0.05,
}
"""Largest accepted mean difference if matrices or states are rounded: for int8 and int4 three times
that of the embedded target (`dovetail selftest`: 0.032 and 0.082)."""


ROUNDED_CACHE = {"half": 0.01, "q8": 0.05}
"""Largest accepted mean difference if only keys and values are rounded, by cache type."""


@dataclass(frozen=True)
class Agreement:
    """The result of a comparison; without tokens there was none, for the reason `why`."""

    tokens: int = 0
    largest: float = 0.0
    mean: float = 0.0
    tolerance: float = 0.0
    of_mean: bool = False
    """True if the mean difference, not the largest, must stay below the tolerance."""
    first: int | None = None  # the first position that differs too much
    beyond: int | None = None  # a position named in the configuration that the text does not reach
    why: str = ""

    @property
    def ok(self) -> bool | None:
        """True if nothing differs; None if nothing was compared."""
        return None if not self.tokens else self.first is None

    @property
    def remark(self) -> str:
        if not self.tokens:
            return f"the target was not compared with transformers: {self.why}"
        what = "mean" if self.of_mean else "largest"
        found = self.mean if self.of_mean else self.largest
        said = (
            f"{self.tokens} tokens of a text (the {what} difference of a log-probability is "
            f"{found:.1e}, and {self.tolerance:.2g} is accepted)"
        )
        if self.first is not None:
            said = (
                f"the target differs from transformers in fp32 at position {self.first} of {said}"
            )
        else:
            said = f"the target agrees with transformers in fp32 on {said}"
        return said + (
            ""
            if self.beyond is None
            else f"; position {self.beyond} is not reached, --text-tokens "
            f"{self.beyond + BEYOND} would"
        )


def compare(
    tokens: Sequence[int],
    scores: Iterable[TokenLogprobs],
    replied: int,
    rows: Iterator[Any],
    weights: str,
    cache: str = "fp32",
    suppressed: Sequence[int] = (),
) -> Agreement:
    """Compare scores of tokens[1:], of which the last `replied` were chosen greedily, with
    reference logits [part, V] of all tokens, one part after the other. `suppressed`: ids that the
    target never chooses."""
    rounded = MEAN
    if cache in ROUNDED_CACHE:
        rounded = {
            **dict.fromkeys(("fp32", "half", "file-fp32"), ROUNDED_CACHE[cache]),
            **MEAN,
        }
    of_mean, tolerance = weights in rounded, rounded.get(weights, EXACT)
    largest = total = 0.0
    count, first = 0, None
    reference = (row for part in rows for row in part.double().log_softmax(-1))
    for position, (token, score, distribution) in enumerate(
        zip(tokens[1:], scores, reference, strict=False), start=1
    ):
        own = abs(score.logprob - float(distribution[token]))
        difference = max(
            [own, *(abs(logprob - float(distribution[which])) for which, logprob in score.top)]
        )
        if position >= len(tokens) - replied and not of_mean:
            # choices differ where the reference prefers another token
            distribution[[one for one in suppressed if 0 <= one < len(distribution)]] = -inf
            difference = max(difference, float(distribution.max() - distribution[token]))
        largest, total, count = max(largest, difference), total + own, count + 1
        if first is None and not (own if of_mean else difference) <= tolerance:
            first = position
    mean = total / max(1, count)
    return Agreement(
        count, largest, mean, tolerance, of_mean, None if of_mean and mean <= tolerance else first
    )


def agreement_of(
    connection: Connection,
    prompts: Sequence[Prompt],
    text_tokens: int | None,
    tell: Callable[[int, int], None],
) -> Agreement:
    """Compare the target of a connection, on a text made of prompts; `text_tokens`: their number,
    None to choose it by the configuration."""
    from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
    from dovetail.workers.models.checkpoints.choices import suppressed_in
    from dovetail.workers.models.checkpoints.composite import text_part
    from dovetail.workers.models.checkpoints.files import read_json
    from dovetail.workers.models.parity.card import reference_logits
    from dovetail.workers.models.parity.following import UnprovableError, landmarks

    target = all_serving(connection.state.workers, "target")[0]
    try:
        checkpoint = open_checkpoint(target.model)
    except CheckpointError as error:
        return Agreement(why=f"the target's model cannot be read here ({error})")
    if not _same(target, checkpoint):
        return Agreement(
            why=f"{target.model} is not the model that the target loaded: it has changed since, or "
            "this machine has a different one"
        )
    described = connection.client.describe()
    context = described.limits.context
    marks = sorted(
        {
            mark
            for mark in landmarks(text_part(read_json(checkpoint.folder / "config.json")))
            if mark < context - REPLY - BEYOND
        }
    )
    near = max([LEAST_TEXT, *(mark + BEYOND for mark in marks if mark + BEYOND <= MOST_TEXT)])
    count = min(near if text_tokens is None else text_tokens, context - REPLY)
    ids = text_of(codec_of(described), prompts, count)
    scores, reply = _scored(connection, ids)
    whole = [*ids, *reply]
    try:
        found = compare(
            whole,
            scores,
            len(reply),
            reference_logits(replace(checkpoint, context=context), whole, context, tell),
            weights_of(target),
            cache_of(target),
            suppressed_in(checkpoint.folder, checkpoint.vocabulary.end),
        )
    except UnprovableError as error:
        return Agreement(why=str(error))
    left = next((mark for mark in marks if mark >= len(whole)), None)
    return Agreement(**{**found.__dict__, "beyond": left})


def _same(target: WorkerState, checkpoint: "Checkpoint") -> bool:
    from dovetail.workers.models.checkpoints.context import digest_of_second

    digest, told = checkpoint.digest, target.fingerprint.split("/")[0]
    return told in (digest[:16], digest_of_second(digest)[:16])


def text_of(codec: TextCodec, prompts: Sequence[Prompt], count: int) -> tuple[int, ...]:
    """This many tokens of prompts, repeated."""
    once = codec.encode("\n\n".join(turn for prompt in prompts for turn in prompt.turns)) or (0,)
    return tuple(once[index % len(once)] for index in range(max(2, count)))


def _scored(connection: Connection, ids: Sequence[int]) -> tuple[list[TokenLogprobs], list[int]]:
    """Return the target's log-probabilities of a text's tokens but the first and of the tokens that
    it adds, and the added tokens."""
    client, scores, reply = connection.client, list[TokenLogprobs](), list[int]()
    request = client.submit(
        tokens=ids,
        sampling=Sampling(),
        max_tokens=REPLY,
        end=(),
        logprobs=TOP,
        scored=True,
        speculate=False,
        seed=0,
    )
    while True:
        match client.receive(None):
            case PromptScored(logprobs=logprobs):
                scores += logprobs
            case Emitted(tokens=tokens, logprobs=logprobs):
                scores += logprobs
                reply += tokens
            case Finished(request=finished) if finished == request:
                break
            case Failed() as failed:
                raise connection.failure(failed)
    if len(scores) != len(ids) + len(reply) - 1:
        raise DovetailError(
            f"the target scored {len(scores)} of {len(ids) + len(reply) - 1} tokens"
        )
    return scores, reply


if TYPE_CHECKING:
    from dovetail.workers.models.parity.card import Line

CARD_COLUMNS = ("weights", "MB", "logits off by", "KL, nats", "same first choice")


def measure_card(
    settings: TargetSettings, prompts: Sequence[Prompt], text_tokens: int | None
) -> list["Line"]:
    """Return a line for each type of weights that the target of the settings can have;
    `text_tokens`: length of the text, None: 256. `UserError` if there is nothing to compare
    with."""
    from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
    from dovetail.workers.models.checkpoints.configured import read_config
    from dovetail.workers.models.checkpoints.context import context_of
    from dovetail.workers.models.parity.card import TYPES, card_of
    from dovetail.workers.models.parity.following import UnprovableError

    checkpoint = open_checkpoint(settings.model)
    context = context_of(read_config(checkpoint.folder / "config.json"))
    codec = TextCodec(checkpoint.tokenizer, checkpoint.vocabulary)
    text = text_of(codec, prompts, min(text_tokens or LEAST_TEXT, context))
    with progress_bar(1 + len(TYPES), "types of weights") as step:
        try:
            return [*card_of(checkpoint, text, context, settings.activations, step)]
        except UnprovableError as error:
            raise UserError(f"{settings.model}: nothing can be compared: {error}") from None


def card_cells(line: "Line") -> tuple[str, ...]:
    differences = (f"{line.error:.1e}", f"{line.divergence:.1e}", f"{line.same:.1%}")
    return (line.weights, f"{line.size_bytes / 1e6:.1f}", *differences)
