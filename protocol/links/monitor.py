"""The connection events that libzmq reports for a socket."""

import struct
from contextlib import suppress

import zmq

from dovetail.protocol.links.addresses import Socket

Context = zmq.Context[Socket]

GONE = zmq.EVENT_DISCONNECTED
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""Without EVENT_HANDSHAKE_FAILED_PROTOCOL: libzmq (4.3.5) also reports it for a frame that was
altered in transit, but then does not close the connection and aborts the process at the next
heartbeat."""


class Monitor:
    """The connection events of one socket."""

    def __init__(self, context: Context, watched: Socket, events: int) -> None:
        endpoint = f"inproc://monitor-{id(self)}"
        self._watched = watched
        watched.monitor(endpoint, events)
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(
            zmq.RCVHWM, 0
        )  # a full queue would stop the I/O thread, and with it all links
        self.socket.connect(endpoint)
        self.take()  # the descriptor fires only after a read that found nothing

    def fileno(self) -> int:
        return int(self.socket.getsockopt(zmq.FD))

    def take(self) -> list[tuple[int, int]]:
        """Return the (event, value) pairs since the last call."""
        taken: list[tuple[int, int]] = []
        with suppress(zmq.Again):
            while True:
                header, _endpoint = self.socket.recv_multipart(zmq.NOBLOCK)
                taken.append(struct.unpack("=Hi", header))
        return taken

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close(0)
