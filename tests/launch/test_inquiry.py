"""Asking a coordinator who is there, without waiting for it; played by hand over a link in
memory."""

from dovetail.launch.processes.serving.service import RETRY_S, Inquiry
from dovetail.protocol.codec import REQUEST, encode
from dovetail.protocol.errors import LinkClosed
from dovetail.protocol.links import Link
from dovetail.protocol.messages import Hello, Message, Reported, Status, Welcome
from support.golden import representative
from support.memory_links import MemoryHub, memory_links

EVERY_S = 1.0


class Place:
    """A place at which a coordinator may be."""

    def __init__(self) -> None:
        self.hub: MemoryHub | None = memory_links()
        self.tries = 0
        self.peer = b""

    def connect(self) -> Link:
        self.tries += 1
        if self.hub is None:
            raise LinkClosed("nobody is there")
        return self.hub.connect()

    def arrived(self) -> list[Message]:
        """Return what was asked since the last call."""
        messages = []
        assert self.hub is not None
        while (received := self.hub.receive()) is not None:
            self.peer, frames = received
            messages.append(REQUEST.decode(frames))
        return messages

    def answers(self, message: Message) -> None:
        assert self.hub is not None
        self.hub.send(self.peer, encode(message))


def report(uptime_s: float) -> Reported:
    told: Reported = representative()["reported"]
    return told.model_copy(update={"uptime_s": uptime_s, "address": "memory"})


def types(messages: list[Message]) -> list[type[Message]]:
    return [type(message) for message in messages]


def registered(place: Place, inquiry: Inquiry, now_s: float) -> None:
    assert inquiry.news(now_s, EVERY_S) is None
    assert types(place.arrived()) == [Hello]
    place.answers(Welcome(epoch=1))


def test_it_asks_again_and_again_and_hears_what_is_answered() -> None:
    place = Place()
    inquiry = Inquiry(place.connect)
    registered(place, inquiry, 10.0)
    for second in (11.0, 12.0, 13.0):
        assert inquiry.news(second, EVERY_S) is None
        assert inquiry.news(second + 0.1, EVERY_S) is None
        assert types(place.arrived()) == [Status]
        place.answers(report(second))
        assert inquiry.news(second + 0.2, EVERY_S) == report(second)
        assert inquiry.news(second + 0.3, EVERY_S) is None
        assert place.arrived() == []
    inquiry.close()


def test_one_that_does_not_answer_is_not_waited_for_and_is_asked_but_once() -> None:
    place = Place()
    inquiry = Inquiry(place.connect)
    registered(place, inquiry, 10.0)
    assert [inquiry.news(11.0 + tenths / 10, EVERY_S) for tenths in range(100)] == [None] * 100
    assert (types(place.arrived()), place.tries) == ([Status], 1)
    inquiry.close()


def test_it_comes_back_to_a_coordinator_that_goes_and_comes() -> None:
    place = Place()
    inquiry = Inquiry(place.connect)
    registered(place, inquiry, 10.0)
    assert place.hub is not None
    place.hub.close()
    place.hub = None
    assert [inquiry.news(11.0 + tenths / 10, EVERY_S) for tenths in range(21)] == [None] * 21
    assert place.tries - 1 <= 2.0 / RETRY_S + 1
    place.hub = memory_links()
    registered(place, inquiry, 14.0)
    inquiry.news(15.0, EVERY_S)
    place.arrived()
    place.answers(report(1.0))
    assert inquiry.news(15.1, EVERY_S) == report(1.0)
    inquiry.close()
