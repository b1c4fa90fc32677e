"""Requests to the coordinator, each with who is told of it and what has been told; and the target
that they are decoded with."""

from collections.abc import Callable
from dataclasses import dataclass

from dovetail.protocol.messages import Described, Emitted, Failed, Finished, PromptScored, Submit
from dovetail.protocol.messages import Told as ToldPart
from dovetail.runtime.text.tokenizer import TextCodec

Told = Emitted | PromptScored | Finished | Failed


@dataclass(frozen=True)
class Target:
    """The target that requests are decoded with at present."""

    described: Described
    text: TextCodec

    @property
    def context(self) -> int:
        """Tokens of prompt and reply together."""
        return self.described.limits.context


@dataclass
class Asked:
    """A request that has not ended."""

    submit: Submit
    tell: Callable[[Told], None]
    told: ToldPart
    """The part of its reply that has been told."""

    def count(self, reply: Emitted | PromptScored) -> None:
        """Note what is told."""
        self.told = self.told.after(reply)

    @property
    def again(self) -> Submit:
        """Return what another coordinator is sent."""
        return self.submit.model_copy(update={"told": self.told, "again": True})
