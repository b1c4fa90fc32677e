"""The listening socket of the HTTP API, and errors about it."""

import errno
import socket

from dovetail.protocol.errors import UserError

BACKLOG = 4096
SEND_BUFFER_BYTES = 64 << 10
"""Bytes that the kernel buffers for a client that does not read: enough for a stream."""
FIRST_FREE_PORT = 1024  # lower ports need an administrator
OWN_ADDRESS = (
    "set --http.host to 127.0.0.1 for clients on this machine, or to 0.0.0.0 for other "
    "machines, too"
)
OTHER_PORT = "choose another port with --http.port (0: any free one)"


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; raise `UserError` if that is impossible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"http.host = {host!r} is neither an address nor a known name ({why}): {OWN_ADDRESS}"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UserError(refusal(host, port, error)) from None
    return listener


def refusal(host: str, port: int, error: OSError) -> str:
    """Return in one sentence why we cannot listen at an address, and what to do."""
    match error.errno:
        case errno.EADDRNOTAVAIL:
            return f"http.host = {host!r} is not an address of this machine: {OWN_ADDRESS}"
        case errno.EACCES if port < FIRST_FREE_PORT:
            return (
                f"http.port = {port} is below {FIRST_FREE_PORT}, where this user may not listen: "
                f"choose a port from {FIRST_FREE_PORT} on with --http.port"
            )
        case errno.EADDRINUSE:
            return f"{host} port {port} is in use: stop the process that uses it, or {OTHER_PORT}"
        case _:
            return (
                f"cannot listen at {host} port {port} ({error.strerror}): {OWN_ADDRESS}, or "
                f"{OTHER_PORT}"
            )
