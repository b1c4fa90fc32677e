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

LAST_PORT = 65535
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
