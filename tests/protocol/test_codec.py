"""The codec: what is valid comes back the same, and of what is not only `DecodeError` is ever seen,
in bounded time and memory."""

import tracemalloc
from itertools import pairwise
from math import prod
from random import Random
from typing import Any, get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dovetail.protocol import codec, messages
from dovetail.protocol.arrays import ITEM_BYTES, Array, stack
from dovetail.protocol.codec import COMMAND, EVENT, REPLY, REQUEST, Dialect, encode
from dovetail.protocol.errors import DecodeError, ProtocolError
from dovetail.protocol.messages import Closed, Emitted, Message, Probe, Submit
from dovetail.protocol.settings import Sampling, SamplingSettings, TreeSettings
from support import golden
from support.strategies import messages_of


@given(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 5), max_size=4))
def test_an_array_has_the_bytes_of_its_dtype_and_shape(dtype: str, shape: list[int]) -> None:
    data = bytes(prod(shape) * ITEM_BYTES[dtype])
    assert Array.model_validate({"dtype": dtype, "shape": tuple(shape), "data": data}).data == data


@given(
    st.sampled_from(sorted(ITEM_BYTES)),
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(0, 5000),
)
def test_any_other_number_of_bytes_is_refused(dtype: str, shape: list[int], length: int) -> None:
    if length != prod(shape) * ITEM_BYTES[dtype]:
        with pytest.raises(ValidationError, match="bytes, not"):
            Array.model_validate({"dtype": dtype, "shape": tuple(shape), "data": bytes(length)})


@pytest.mark.parametrize(
    "content",
    [
        {"dtype": "object", "shape": (1,), "data": bytes(8)},
        {"dtype": "float64", "shape": (1,), "data": bytes(8)},
        {"dtype": "uint8", "shape": (-1,), "data": b""},
        {"dtype": "uint8", "shape": (1, 1, 1, 1, 1), "data": b"x"},
        {"dtype": "uint8", "shape": ((1 << 32) + 1,), "data": b""},
        {"dtype": "uint8", "shape": (1 << 32, 1 << 32, 1 << 32, 1 << 32), "data": b""},
        {"dtype": "uint8", "shape": (True,), "data": b"x"},
        {"dtype": "uint8", "shape": (1,), "data": "x"},
    ],
)
def test_what_is_no_array_is_refused(content: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Array.model_validate(content)


def test_numpy_reads_the_bytes_in_place() -> None:
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    array = Array(dtype="float32", shape=(2, 3), data=values.tobytes())
    assert np.array_equal(np.frombuffer(array.data, "<f4").reshape(array.shape), values)


@given(
    st.sampled_from(sorted(ITEM_BYTES)),
    st.integers(1, 6),
    st.integers(0, 3),
    st.sets(st.integers(1, 5)),
    st.randoms(),
)
def test_rows_that_were_cut_out_can_be_put_together_again(
    dtype: str, rows: int, width: int, cuts: set[int], random: Random
) -> None:
    array = Array.model_validate(
        {
            "dtype": dtype,
            "shape": (rows, width),
            "data": random.randbytes(rows * width * ITEM_BYTES[dtype]),
        }
    )
    places = [0, *sorted(cut for cut in cuts if cut < rows), rows]
    parts = [array.rows(start, stop) for start, stop in pairwise(places)]
    assert [part.shape for part in parts] == [
        (stop - start, width) for start, stop in pairwise(places)
    ]
    assert stack(parts) == array


def test_a_row_is_cut_out_at_its_place() -> None:
    array = Array(dtype="float16", shape=(3, 2), data=b"aabbccddeeff")
    assert array.rows(1, 2) == Array(dtype="float16", shape=(1, 2), data=b"ccdd")


def test_rows_of_an_array_have_its_fields_in_their_order() -> None:
    array = Array(dtype="uint8", shape=(2, 1), data=b"ab")
    for made in (array.rows(0, 1), stack([array, array])):
        assert [*vars(made)] == [*vars(array)] == [*Array.model_fields]


DIALECTS: list[tuple[Dialect[Any], tuple[type[Message], ...]]] = [
    (COMMAND, get_args(messages.Command)),
    (EVENT, get_args(messages.Event)),
    (REQUEST, get_args(messages.Request)),
    (REPLY, get_args(messages.Reply)),
]
MEMBERS = [
    pytest.param(dialect, member, id=f"{i}-{member.__name__}")
    for i, (dialect, members) in enumerate(DIALECTS)
    for member in members
]
REPRESENTATIVE = golden.representative()
HELLO = REPRESENTATIVE["hello"].model_copy(update={"table": None})  # with one array
CLOSED = {"type": "closed", "epoch": 1, "session": 2}
FINISHED = REPRESENTATIVE["finished"].model_dump()

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
structures = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.binary(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


def refused_or_decoded(dialect: Dialect[Any], frames: list[bytes]) -> Message | None:
    """The message, or None for a DecodeError of one printable line; every other exception
    passes."""
    complaint = "none"
    try:
        message: Message | None = dialect.decode(frames)
    except DecodeError as error:
        message, complaint = None, str(error)
    assert complaint.isprintable()
    assert len(complaint) < 1000
    return message


# -- valid messages --------------------------------------------------------------------------------


@pytest.mark.parametrize(("dialect", "member"), MEMBERS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_every_message_survives_the_wire(
    dialect: Dialect[Any], member: type[Message], data: st.DataObject
) -> None:
    message = data.draw(messages_of(member))
    frames = encode(message)
    assert dialect.decode(frames) == message
    assert encode(dialect.decode(frames)) == frames


def test_the_bytes_of_an_array_travel_in_a_frame_of_their_own() -> None:
    hello = HELLO
    body, raw = encode(hello)
    assert raw == hello.tokenizer.data
    assert "data" not in msgpack.unpackb(body)["tokenizer"]


def test_two_arrays_travel_in_the_order_of_their_names_and_one_may_be_missing() -> None:
    drafted = REPRESENTATIVE["drafted"]
    assert encode(drafted)[1:] == [drafted.candidates.data, drafted.probabilities.data]
    lone = drafted.model_copy(update={"candidates": None})
    body, raw = encode(lone)
    assert EVENT.decode([body, raw]) == lone
    for frames in ([body], [body, raw, raw], encode(drafted)[:2]):
        assert refused_or_decoded(EVENT, frames) is None


def test_a_message_of_the_largest_tuples_fits() -> None:
    finished = REPRESENTATIVE["finished"]
    many = 400_000
    result = finished.result.model_copy(update={"token_ids": (70_000,) * many})
    own = finished.spans[0].model_copy(
        update={"shared": ()}
    )  # what is kept of a request says of every pass that it was the request's
    largest = finished.model_copy(
        update={"result": result, "margins": (0.5,) * many, "spans": (own,) * (1 << 16)}
    )
    assert REPLY.decode(encode(largest)) == largest


def test_a_message_beyond_the_limit_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match=r"'emitted' of .* beyond the limit"):
        encode(
            Emitted(
                epoch=1,
                request=1,
                tokens=(1 << 30,) * messages.MAX_TOKENS,
                drafted=(False,) * messages.MAX_TOKENS,
                text="世" * messages.MAX_TEXT,
            )
        )


# -- hostile bytes ---------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(DIALECTS), st.lists(st.binary(max_size=64), max_size=6))
def test_random_bytes_are_refused(
    dialect: tuple[Dialect[Any], object], frames: list[bytes]
) -> None:
    assert refused_or_decoded(dialect[0], frames) is None


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(DIALECTS), structures, st.lists(st.binary(max_size=8), max_size=2))
def test_random_structures_are_refused(
    dialect: tuple[Dialect[Any], object], structure: Any, raw: list[bytes]
) -> None:
    assert refused_or_decoded(dialect[0], [msgpack.packb(structure), *raw]) is None


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(DIALECTS), st.data())
def test_mutated_messages_are_refused_or_are_other_valid_messages(
    dialect: tuple[Dialect[Any], tuple[type[Message], ...]], data: st.DataObject
) -> None:
    message = data.draw(
        st.sampled_from([m for m in REPRESENTATIVE.values() if type(m) in dialect[1]])
    )
    frames = [bytearray(frame) for frame in encode(message)]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        at = data.draw(st.integers(0, len(frame)))
        kind = data.draw(st.sampled_from(["overwrite", "delete", "insert"]))
        if kind == "insert":
            frame[at:at] = data.draw(st.binary(min_size=1, max_size=5))
        elif kind == "delete":
            del frame[at : at + data.draw(st.integers(1, 5))]
        else:
            frame[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
    decoded = refused_or_decoded(dialect[0], [bytes(frame) for frame in frames])
    if decoded is not None:
        assert dialect[0].decode(encode(decoded)) == decoded


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(DIALECTS), st.data())
def test_a_field_of_another_type_is_refused_or_valid(
    dialect: tuple[Dialect[Any], tuple[type[Message], ...]], data: st.DataObject
) -> None:
    message = data.draw(
        st.sampled_from([m for m in REPRESENTATIVE.values() if type(m) in dialect[1]])
    )
    body = msgpack.unpackb(encode(message)[0])
    body[data.draw(st.sampled_from(sorted(body)) | st.text(max_size=4))] = data.draw(structures)
    decoded = refused_or_decoded(dialect[0], [msgpack.packb(body), *encode(message)[1:]])
    assert decoded is None or dialect[0].decode(encode(decoded)) == decoded


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_every_truncation_of_a_message_is_refused(name: str) -> None:
    message = REPRESENTATIVE[name]
    dialect = next(d for d, members in DIALECTS if type(message) in members)
    body, *raw = encode(message)
    for length in range(len(body)):
        assert refused_or_decoded(dialect, [body[:length], *raw]) is None
    assert refused_or_decoded(dialect, [body + b"\xc0", *raw]) is None
    assert refused_or_decoded(dialect, [body, *(frame[:-1] for frame in raw), b""]) is None


@pytest.mark.parametrize("length", [0, 5, 6])
def test_a_number_of_frames_that_no_message_has_is_refused(length: int) -> None:
    with pytest.raises(DecodeError, match=f"1 to 4 frames, not {length}"):
        EVENT.decode(encode(Closed(epoch=1, session=2)) * length)


def test_array_frames_must_match_the_arrays_of_the_body() -> None:
    body, raw = encode(HELLO)
    inlined = msgpack.unpackb(body)
    inlined["tokenizer"]["data"] = raw
    for frames in (
        [body],
        [body, raw, raw],
        [body, raw + b"x"],
        [body, b""],
        [msgpack.packb(inlined)],
        [msgpack.packb(inlined), raw],
        [*encode(Closed(epoch=1, session=2)), raw],
    ):
        with pytest.raises(DecodeError):
            EVENT.decode(frames)


@pytest.mark.parametrize(
    "change",
    [
        {"session": True},
        {"session": "2"},
        {"session": 2.0},
        {"session": float("nan")},
        {"session": None},
        {"session": -1},
        {"session": (1 << 64) - 1},
        {"epoch": msgpack.Timestamp(1)},
        {"epoch": msgpack.ExtType(5, b"x")},
        {"type": "close"},
        {"type": "whatever\nforged line"},
        {"type": 3},
        {"type": None},
        {"type": ["closed"]},
        {"type": {"closed": 1}},
        {"more": 1},
        {"": 1},
        {"new\nline": 1},
    ],
)
def test_a_wrong_type_tag_or_field_is_refused(change: dict[str, Any]) -> None:
    assert refused_or_decoded(EVENT, [msgpack.packb({**CLOSED, **change})]) is None


def test_a_message_of_another_dialect_is_refused() -> None:
    for frames in (encode(Probe(epoch=1, sent_ns=2)), encode(REPRESENTATIVE["submit"])):
        with pytest.raises(DecodeError, match="does not match any of the expected tags"):
            EVENT.decode(frames)


def test_of_a_key_that_comes_twice_the_last_counts_and_is_checked() -> None:
    assert EVENT.decode(
        [b"\x84\xa4type\xa6closed\xa5epoch\x01\xa7session\x01\xa7session\x02"]
    ) == Closed(epoch=1, session=2)
    with pytest.raises(DecodeError):
        EVENT.decode([b"\x84\xa4type\xa6closed\xa5epoch\x01\xa7session\x01\xa7session\xa1x"])


def test_keys_that_are_no_text_are_refused() -> None:
    for key in (b"\x01", b"\xc4\x07session", b"\xc0", b"\x91\x01"):
        with pytest.raises(DecodeError):
            EVENT.decode([b"\x83\xa4type\xa6closed\xa5epoch\x01" + key + b"\x02"])


def test_bytes_that_are_no_utf8_are_refused() -> None:
    with pytest.raises(DecodeError, match="not MessagePack: UnicodeDecodeError"):
        EVENT.decode([b"\x83\xa4type\xa6closed\xa5epoch\x01\xa7session\xa2\xff\xfe"])


def under(key: str, payload: bytes) -> bytes:
    """A `finished` whose field `key` is this MessagePack."""
    return (
        b"\x82" + msgpack.packb("type") + msgpack.packb("finished") + msgpack.packb(key) + payload
    )


def array(item: bytes, count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + item * count


@pytest.mark.parametrize(
    ("body", "most_mib"),
    [
        pytest.param(b"\xdd\xff\xff\xff\xff", 1, id="five bytes that claim 2^32 items"),
        pytest.param(b"\xdf\xff\xff\xff\xff", 1, id="five bytes that claim 2^32 fields"),
        pytest.param(b"\xdb\xff\xff\xff\xff", 1, id="five bytes that claim 4 GiB of text"),
        pytest.param(b"\xc6\xff\xff\xff\xff", 1, id="five bytes that claim 4 GiB"),
        pytest.param(b"\x91" * 200_000, 2, id="arrays nested 200000 deep"),
        pytest.param(b"\x81\xa1a" * 200_000, 2, id="maps nested 200000 deep"),
        pytest.param(
            b"\xdd\x00\x10\x00\x00" * 900 + bytes(1 << 20),
            16,
            id="900 nested arrays that claim a million items each",
        ),
        pytest.param(
            under("margins", array(b"\xc0", (1 << 24) - 100)), 64, id="16 million nothings"
        ),
        pytest.param(under("margins", array(b"\xa2ab", 1 << 19)), 80, id="half a million strings"),
        pytest.param(
            under("margins", array(array(b"\xc0", 8), 1 << 20)), 160, id="a million arrays"
        ),
        pytest.param(under("margins", array(b"\x81\xa1a\xc0", 1 << 20)), 128, id="a million maps"),
        pytest.param(
            under("text", msgpack.packb("a" * ((1 << 24) - 100))), 64, id="16 MiB of text"
        ),
        pytest.param(msgpack.packb({"type": "a" * ((1 << 24) - 100)}), 96, id="a tag of 16 MiB"),
        pytest.param(
            b"\xde\x01\x01" + b"".join(msgpack.packb(f"{i}") + b"\xc0" for i in range(257)),
            1,
            id="257 fields",
        ),
        pytest.param(bytes((1 << 24) + 1), 1, id="a body beyond 16 MiB"),
    ],
)
def test_a_hostile_body_costs_bounded_memory(body: bytes, most_mib: int) -> None:
    tracemalloc.start()
    try:
        assert refused_or_decoded(REPLY, [body]) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most_mib << 20


def test_more_items_than_the_largest_message_has_are_refused() -> None:
    body = {**FINISHED, "margins": [[0] * messages.MAX_TOKENS] * 5}
    with pytest.raises(DecodeError, match=f"more than {codec.MAX_ITEMS} items"):
        REPLY.decode([msgpack.packb(body)])


def test_a_million_wrong_items_are_one_complaint() -> None:
    with pytest.raises(DecodeError, match=r"^finished\.margins\.0: "):
        REPLY.decode([msgpack.packb({**FINISHED, "margins": ["x"] * messages.MAX_TOKENS})])


def test_a_frame_beyond_the_limit_is_refused_unread() -> None:
    body, _ = encode(HELLO)
    with pytest.raises(DecodeError, match="beyond the limit"):
        EVENT.decode([body, bytes(codec.MAX_FRAME_BYTES + 1)])


def test_settings_with_more_fields_than_a_message_declares_are_packed_as_it_declares_them() -> None:
    fields = {"epoch": 1, "request": 1, "tokens": (1,), "max_tokens": 4, "tree": TreeSettings()}
    more = Submit(sampling=SamplingSettings(temperature=0.5, max_tokens=9), **fields)
    assert REQUEST.decode(encode(more)) == Submit(sampling=Sampling(temperature=0.5), **fields)
