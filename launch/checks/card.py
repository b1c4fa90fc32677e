"""`dovetail selftest --card`: what each type of a target's weights changes, on a text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dovetail.launch.checks.agreement import LEAST_TEXT, text_of
from dovetail.launch.console.terminal import progress_bar
from dovetail.launch.files.prompts import Prompt
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import TargetSettings
from dovetail.runtime.text.tokenizer import TextCodec

if TYPE_CHECKING:
    from dovetail.workers.models.parity.card import Line

CARD_COLUMNS = ("weights", "MB", "logits off by", "KL, nats", "same first choice")


def measure_card(
    settings: TargetSettings, prompts: Sequence[Prompt], text_tokens: int | None
) -> list["Line"]:
    """Return a line for each type of weights that the target of settings can have; `text_tokens`:
    of the text, None: 256. `UserError` where there is nothing to compare with."""
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
    return (
        line.weights,
        f"{line.size_bytes / 1e6:.1f}",
        f"{line.error:.1e}",
        f"{line.divergence:.1e}",
        f"{line.same:.1%}",
    )
