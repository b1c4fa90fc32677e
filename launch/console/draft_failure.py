"""The warning that the draft of a reply failed: the text is the same, only slower."""

from collections.abc import Iterable

from dovetail.protocol.errors import printable
from dovetail.protocol.messages import DraftFailure, Result


def failure_told(failure: DraftFailure) -> str:
    """Return a warning of one line."""
    when = f"in round {failure.round}, {failure.after_s:.2f} s after the request arrived"
    return (
        f"warning: the draft worker {printable(failure.draft)} failed {when}: "
        f"{printable(failure.error)}; all tokens are still the target's"
    )


def first_failure(results: Iterable[Result]) -> tuple[int, DraftFailure | None]:
    """Return the number of replies whose draft failed, and the first failure."""
    found = [result.draft_failure for result in results if result.draft_failure is not None]
    return len(found), next(iter(found), None)
