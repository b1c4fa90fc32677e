"""Finds the holder of an address before anything is started, so that the error names the process
and what to do.

This is a check ahead of time: the process that listens finds out for certain.
"""

import errno
import socket

import psutil

from dovetail.launch.files.directory import announcements
from dovetail.protocol.errors import UserError

LAST_PORT = 65535
SERVE = "dovetail:serve"  # the process name of `dovetail serve`


def check_port(host: str, port: int, *, remedy: str) -> None:
    """`UserError` if a process listens at this port already. Other errors of the address are
    reported by the process that listens."""
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
    """`UserError` if a coordinator of this user listens there already, or any process at a tcp
    port."""
    if (found := next((a for a in announcements() if a.address == listen), None)) is not None:
        raise UserError(
            f"{listen} is held by your coordinator (pid {found.pid}): stop it with `kill "
            f"{found.pid}`, {remedy}"
        )
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    if listen.startswith("tcp://") and port.isdigit() and int(port) <= LAST_PORT:
        check_port(host.strip("[]").replace("*", "0.0.0.0"), int(port), remedy=f"stop it, {remedy}")


def _holder(port: int) -> str:
    """Name the process that listens at a port, or its supervisor. Only root sees other users'
    processes."""
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
