"""The way to a coordinator that is at one of several addresses: itself, or the standby that has
taken over from it."""

import re
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from dovetail.protocol.errors import LinkClosed, UserError
from dovetail.protocol.links.sockets import CONNECT_TIMEOUT_S

L = TypeVar("L")
"""A link, or what has one."""

BETWEEN = re.compile(r",(?=\s*(?:ipc|tcp)://)")
"""The comma between two addresses; a path may have others."""


def split_addresses(addresses: str) -> list[str]:
    """Return the addresses that are separated by commas; `UserError` if one is missing, or there
    twice."""
    each = [one.strip() for one in BETWEEN.split(addresses)]
    for one in each:
        if one.endswith(","):
            raise UserError(f"no address follows the last comma of {addresses!r}: remove the comma")
        if each.count(one) > 1:
            raise UserError(f"{addresses!r} has {one} twice: name each coordinator once")
    return each


class Way(Generic[L]):
    """The addresses of a coordinator and its standby, each of which is tried after the other. One
    thread uses it."""

    def __init__(self, addresses: str, connect: Callable[[str, float], L]) -> None:
        """`addresses`: separated by commas; `connect` opens a link to one of them within so many
        seconds, or raises `LinkClosed`."""
        self._addresses = split_addresses(addresses)
        self._connect = connect
        self._next = 0

    def first(self) -> L:
        """Return a link to the first address where somebody answers; `LinkClosed` with the reason
        of each if nobody does anywhere."""
        timeout_s, reasons = CONNECT_TIMEOUT_S / len(self._addresses), list[LinkClosed]()
        for _ in self._addresses:
            try:
                return self.again(timeout_s)
            except LinkClosed as reason:
                reasons.append(reason)
        raise reasons[0] if len(reasons) == 1 else self.nobody([*map(str, reasons)])

    def again(self, timeout_s: float) -> L:
        """Return a link to the address behind the one that was tried last; `LinkClosed` if nobody
        answers there."""
        address = self._addresses[self._next % len(self._addresses)]
        self._next += 1
        return self._connect(address, timeout_s)

    def nobody(self, reasons: Sequence[str]) -> LinkClosed:
        """Return the error that nobody leads at any of the addresses, with the reason of each."""
        if len(reasons) == 1:
            return LinkClosed(reasons[0])
        return LinkClosed(
            f"no coordinator leads at {' or '.join(self._addresses)}: {_together(reasons)}"
        )


def _together(reasons: Sequence[str]) -> str:
    """Return reasons in one line; the remedy behind the last colon of each once, if it is one for
    all."""
    whats, _, remedies = zip(*(reason.rpartition(": ") for reason in reasons), strict=True)
    if len({*remedies}) > 1 or not all(whats):
        return "; ".join(reasons)
    return f"{'; '.join(whats)}: {remedies[0]}"
