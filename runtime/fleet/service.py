"""The state of the service: whether it ends, and its supervisor's report."""

from dataclasses import dataclass, field

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Role, Supervised


@dataclass
class Service:
    """State that concerns all sessions of one coordinator."""

    epoch: int
    ending: bool = False  # True if nothing new begins
    given_up: str = ""
    """Why the supervisor ends the service: a missing part will not return. Empty if it does not."""
    drained: set[Role] = field(default_factory=set)
    """Roles of which an operator drained a worker, until the next one registers."""
    supervised: Supervised = field(default_factory=Supervised)
    """The last report of the supervisor; `supervised_ns`: its time."""
    supervised_ns: int = 0

    def refusal(self) -> RequestError:
        """Return why nothing new begins."""
        why = self.given_up
        return RequestError(
            "ending", f"the service is ending: {why}" if why else "the coordinator is ending"
        )
