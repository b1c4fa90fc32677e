"""The standing of the whole service: whether it ends, and what whoever started it says of its other
parts."""

from dataclasses import dataclass, field

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Role, Supervised


@dataclass
class Service:
    """The standing that holds for all sessions of one coordinator."""

    epoch: int
    ending: bool = False
    """True if nothing begins any more."""
    given_up: str = ""
    """Why whoever started us ends the service: what is missing does not come back. Empty: it does
    not end it."""
    drained: set[Role] = field(default_factory=set)
    """Roles of which an operator drained a worker, until the next one registers."""
    supervised: Supervised = field(default_factory=Supervised)
    """The last words of whoever started us; `supervised_ns`: when they came."""
    supervised_ns: int = 0

    def refusal(self) -> RequestError:
        """Return why nothing begins any more."""
        why = self.given_up
        return RequestError(
            "ending", f"the service is ending: {why}" if why else "the coordinator is ending"
        )
