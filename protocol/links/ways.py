"""The way to a coordinator that is at one of several addresses: itself, or the standby that has
taken over from it."""

import re
from collections.abc import Callable

from dovetail.protocol.errors import LinkClosed, UserError
from dovetail.protocol.links import Link
from dovetail.protocol.links.sockets import CONNECT_TIMEOUT_S

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


class Way:
    """The addresses of a coordinator and its standby, each of which is tried after the other. One
    thread uses it."""

    def __init__(self, addresses: str, connect: Callable[[str, float], Link]) -> None:
        """`addresses`: separated by commas; `connect` opens a link to one of them within so many
        seconds, or raises `LinkClosed`."""
        self._addresses = split_addresses(addresses)
        self._connect = connect
        self._next = 0

    def first(self) -> Link:
        """Return a link to the first address where somebody answers; `LinkClosed` if nobody does
        anywhere."""
        timeout_s = CONNECT_TIMEOUT_S / len(self._addresses)
        for _ in self._addresses[1:]:
            try:
                return self.again(timeout_s)
            except LinkClosed:
                continue
        return self.again(timeout_s)

    def again(self, timeout_s: float) -> Link:
        """Return a link to the address behind the one that was tried last; `LinkClosed` if nobody
        answers there."""
        address = self._addresses[self._next % len(self._addresses)]
        self._next += 1
        return self._connect(address, timeout_s)
