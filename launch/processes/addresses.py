"""Finds the holder of an address before anything is started, so that the error names the process
and what to do.

Whoever listens in earnest finds out for certain; what happens between the look and that is told in
their words.
"""

import errno
import socket

import psutil

from dovetail.launch.files.directory import announcements
from dovetail.protocol.errors import UserError
from dovetail.protocol.links.addresses import host_and_port
from dovetail.protocol.settings import CoordinatorSettings

LAST_PORT = 65535
ANY = ("0", "*")
"""Ports that stand for one that is free."""
ANYWHERE = ("0.0.0.0", "[::]", "*")
"""Hosts that stand for all addresses of a machine."""
SERVE = "dovetail:serve"
"""The process name of `dovetail serve`."""


def check_port(host: str, port: int, *, remedy: str) -> None:
    """`UserError` if somebody listens at this port already. What else may be wrong with the address
    is left to whoever listens there."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
            tried.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return
            raise UserError(f"{host} port {port} is in use by {_holder(port)}: {remedy}") from None


def check_coordinator(listen: str, *, remedy: str) -> None:
    """`UserError` if a coordinator of this user, or anybody at a port of tcp, listens there
    already."""
    if (found := next((a for a in announcements() if a.address == listen), None)) is not None:
        raise UserError(
            f"{listen} is held by your coordinator (pid {found.pid}): stop it with `kill "
            f"{found.pid}`, {remedy}"
        )
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    if listen.startswith("tcp://") and port.isdigit() and int(port) <= LAST_PORT:
        check_port(host.strip("[]").replace("*", "0.0.0.0"), int(port), remedy=f"stop it, {remedy}")


def check_pair(flag: str, address: str, settings: CoordinatorSettings) -> None:
    """`UserError` for a coordinator that could not be one of a pair with the one at an address,
    which a flag has named. A port that is chosen at the start is one that nobody could know."""
    for name, one in ((flag, address), ("--listen", settings.listen)):
        if not one.startswith("tcp://"):
            raise UserError(
                f"{name} {one}: a coordinator and its standby are on machines of their own; write "
                f"{name} tcp://HOST:PORT"
            )
        try:
            host, port = host_and_port(one)
        except UserError:
            raise UserError(f"{name} {one!r} is not one tcp://HOST:PORT: name both") from None
        if name == flag and (host in ANYWHERE or port in ANY):
            raise UserError(
                f"{flag} {address}: others have to find it there, so name its machine and its port"
            )
    if is_here(address, settings.listen):
        raise UserError(
            f"{flag} {address} with --listen {settings.listen}: that is one address, and each of a "
            "pair has its own"
        )
    if settings.journal == "off":
        raise UserError(
            f"{flag} {address} with coordinator.journal = 'off': a standby copies the journal; "
            "leave that setting out"
        )


def is_here(address: str, own: str) -> bool:
    """Return whether a tcp address is our own, perhaps by another name of this machine."""
    (host, _, port), (own_host, _, own_port) = (one[6:].rpartition(":") for one in (address, own))
    names = {"127.0.0.1", "localhost", "[::1]", *ANYWHERE, socket.gethostname()}
    same = host == own_host or {host, own_host} <= names
    return port == own_port and port not in ANY and same


def same_place(one: str, other: str) -> bool:
    """Return whether two tcp addresses lead to one place, perhaps by two names of its machine."""
    (host, port), (other_host, other_port) = (host_and_port(address) for address in (one, other))
    return port == other_port and (host == other_host or bool(_found(host) & _found(other_host)))


def _found(host: str) -> set[str]:
    """Return the numbers of a host; none if it is not known here."""
    try:
        return {str(at[4][0]) for at in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return set()


def _holder(port: int) -> str:
    """Name the process that listens at a port, or the supervisor of that process. Only root sees
    the processes of others."""
    found = (
        c.pid
        for c in psutil.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port and c.pid is not None
    )
    pid = next(found, None)
    if pid is None:
        return "a process that is not yours"
    try:
        process = psutil.Process(pid)
        parent = process.parent()
        return (
            f"`dovetail serve` (pid {parent.pid})"
            if parent is not None and parent.name() == SERVE
            else f"{process.name()} (pid {pid})"
        )
    except psutil.Error:
        return f"pid {pid}"
