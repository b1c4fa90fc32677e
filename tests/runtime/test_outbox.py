"""The messages that wait for a client, and the order in which they leave."""

from dovetail.protocol.errors import PeerBusy
from dovetail.protocol.messages import (
    Emitted,
    Failed,
    Message,
    PromptScored,
    Recorded,
    RoundRecord,
    TokenLogprobs,
)
from dovetail.runtime.fleet.outbox import (
    EMIT_EVERY_NS,
    MAX_JOINED,
    RECORD_EVERY_NS,
    Outbox,
    size_of,
)

RECORD = RoundRecord(
    round=1, prefix=3, tokens=(), parents=(), scores=(), verified=0, accepted=(), bonus=5
)


def emitted(*tokens: int, request: int = 1) -> Emitted:
    return Emitted(
        epoch=1,
        request=request,
        tokens=tokens,
        drafted=(True,) * len(tokens),
        text="".join(f"w{t} " for t in tokens),
    )


def test_text_of_a_request_that_waits_becomes_one_message() -> None:
    box, sent = Outbox(), list[Message]()
    for message in (emitted(1), emitted(2, 3), emitted(4, request=2), emitted(5)):
        box.add(message)
    box.send(sent.append, 1)
    assert sent == [emitted(1, 2, 3, 5), emitted(4, request=2)]
    assert len(box) == 0


def test_log_probabilities_stay_beside_their_tokens() -> None:
    box, sent = Outbox(), list[Message]()
    for token in (3, 4):
        box.add(
            emitted(token).model_copy(
                update={"logprobs": (TokenLogprobs(logprob=-token, top=((token, -token),)),)}
            )
        )
    box.send(sent.append, 1)
    (message,) = sent
    assert isinstance(message, Emitted)
    assert [
        (token, said.logprob) for token, said in zip(message.tokens, message.logprobs, strict=True)
    ] == [(3, -3), (4, -4)]


def test_text_never_passes_what_was_said_of_its_request_before() -> None:
    box, sent = Outbox(), list[Message]()
    scored = PromptScored(epoch=1, request=1, start=1, logprobs=())
    for message in (emitted(1), scored, emitted(2)):
        box.add(message)
    box.send(sent.append, 1)
    assert sent == [emitted(1), scored, emitted(2)]


def test_text_waits_a_little_the_first_of_a_request_and_anything_else_do_not() -> None:
    box, began_ns = Outbox(), EMIT_EVERY_NS * 5
    box.add(emitted(1))
    assert box.due(1)
    box.send(lambda _: None, began_ns)
    box.add(emitted(2))
    assert not box.due(began_ns + EMIT_EVERY_NS - 1)
    assert box.due(began_ns + box.patience_ns)
    box.add(emitted(7, request=2))
    assert box.due(began_ns + 1)
    box.send(lambda _: None, began_ns)
    box.add(Failed(epoch=1, session=1, code="internal", text="no"))
    assert box.due(began_ns + 1)
    box.send(lambda _: None, began_ns)
    box.add(emitted(8, request=2))
    assert not box.due(began_ns + 1)
    box.add(emitted(9))
    assert box.due(began_ns + 1), "a number that ended may be used again"


def test_somebody_is_reminded_once_until_it_is_sent_and_again_if_it_cannot_wait_as_long() -> None:
    box = Outbox()
    box.add(emitted(1))
    box.send(lambda _: None, 1)
    box.add(emitted(2))
    assert [box.remind(), box.remind()] == [True, False]
    box.add(Recorded(epoch=1, request=1, record=RECORD))
    assert [box.remind(), box.remind()] == [True, False]
    assert box.patience_ns == RECORD_EVERY_NS
    box.send(lambda _: None, 1)
    assert box.remind()


def test_what_a_full_queue_does_not_take_stays_first() -> None:
    box, sent = Outbox(), list[Message]()

    def one(message: Message) -> None:
        if sent:
            raise PeerBusy("full")
        sent.append(message)

    box.add(emitted(1))
    box.add(emitted(2, request=2))
    box.send(one, 1)
    assert (sent, len(box)) == ([emitted(1)], 1)
    sent.clear()
    box.send(one, 2)
    assert sent == [emitted(2, request=2)]


def test_pieces_are_bounded_and_waiting_messages_are_counted_in_bytes() -> None:
    box, sent = Outbox(), list[Message]()
    tokens = tuple(range(1, 1001))
    for _ in range(20):
        box.add(emitted(*tokens))
    assert box.bytes == 20 * size_of(emitted(*tokens)) > 20 * 36_000
    box.send(sent.append, 1)
    assert box.bytes == 0
    assert (
        max(len(message.tokens) for message in sent if isinstance(message, Emitted))
        < MAX_JOINED + 1000
    )
    assert (
        sum((message.tokens for message in sent if isinstance(message, Emitted)), ()) == tokens * 20
    )


def test_what_cannot_be_said_is_dropped_with_all_else_of_its_request() -> None:
    box, sent = Outbox(), list[Message]()
    failed = Failed(epoch=1, session=1, code="internal", text="no")
    for message in (emitted(1), emitted(2, 3, request=2), failed):
        box.add(message)
    assert box.requests == {1, 2}
    assert box.drop() == 1
    assert box.bytes == size_of(emitted(2, 3, request=2))
    box.send(sent.append, 1)
    assert sent == [emitted(2, 3, request=2)]


def test_what_waits_about_one_request_can_be_forgotten() -> None:
    box, sent = Outbox(), list[Message]()
    for message in (emitted(2, 3, request=2), emitted(1), emitted(4, request=2)):
        box.add(message)
    box.forget(2)
    assert (box.requests, box.bytes) == ({1}, size_of(emitted(1)))
    box.send(sent.append, 1)
    assert sent == [emitted(1)]
