"""The messages against their golden bytes, and the bounds on what they may say."""

import re
from typing import Any, get_args

import msgpack
import pytest
from pydantic import ValidationError

from dovetail.protocol import codec, messages
from dovetail.protocol.arrays import MAX_ARRAY_BYTES
from dovetail.protocol.codec import Dialect
from dovetail.protocol.messages import Drafted, Hello, Message, Open, Submit, VerifyItem
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.tree import TokenTree
from support import golden
from support.wire_reference import PAGE, reference


def test_the_page_of_messages_is_made_from_their_classes() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "run: PYTHONPATH=tests python tests/support/wire_reference.py"
    )


DIALECTS: dict[str, tuple[Dialect[Any], tuple[type[Message], ...]]] = {
    "command": (codec.COMMAND, get_args(messages.Command)),
    "event": (codec.EVENT, get_args(messages.Event)),
    "request": (codec.REQUEST, get_args(messages.Request)),
    "reply": (codec.REPLY, get_args(messages.Reply)),
}
REPRESENTATIVE = golden.representative()
READS = REPRESENTATIVE["hello"].reads.model_dump()
CASES = [
    (dialect, name)
    for dialect, (_, members) in DIALECTS.items()
    for name, message in REPRESENTATIVE.items()
    if type(message) in members
]


@pytest.mark.parametrize(("dialect", "name"), CASES)
def test_golden_bytes_decode_to_their_message(dialect: str, name: str) -> None:
    frames = golden.unpack_frames((golden.FOLDER / f"{name}.bin").read_bytes())
    assert DIALECTS[dialect][0].decode(frames) == REPRESENTATIVE[name]


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_message_encodes_to_its_golden_bytes(name: str) -> None:
    assert (
        golden.pack_frames(codec.encode(REPRESENTATIVE[name]))
        == (golden.FOLDER / f"{name}.bin").read_bytes()
    )


def test_every_message_type_has_golden_bytes_and_no_file_is_left_over() -> None:
    every = {member for _, members in DIALECTS.values() for member in members}
    assert {type(message) for message in REPRESENTATIVE.values()} == every
    assert {path.stem for path in golden.FOLDER.iterdir()} == set(REPRESENTATIVE)


@pytest.mark.parametrize("name", [name for name in REPRESENTATIVE if name != "hello-client"])
def test_golden_messages_use_every_field(name: str) -> None:
    message = REPRESENTATIVE[name]
    assert {
        field for field in type(message).model_fields if field not in message.model_fields_set
    } <= {"type", "version", "round"}


def test_the_tag_of_a_message_is_its_name() -> None:
    for _, members in DIALECTS.values():
        for member in members:
            assert (
                member.model_fields["type"].default
                == re.sub(r"(?<!^)(?=[A-Z])", "_", member.__name__).lower()
            )


def test_tuples_stop_at_their_first_wrong_item() -> None:
    """Otherwise a hostile message of a million wrong items costs a million complaints."""
    with pytest.raises(ValidationError) as caught:
        Submit.model_validate({**REPRESENTATIVE["submit"].model_dump(), "tokens": ("x",) * 1000})
    assert caught.value.error_count() == 1


def test_a_message_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        REPRESENTATIVE["close"].session = 4


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("close", {"epoch": -1}),
        ("close", {"epoch": 1 << 63}),
        ("close", {"session": 1.0}),
        ("close", {"session": True}),
        ("close", {"extra": 1}),
        ("open", {"key": bytes(15)}),
        ("open", {"prompt": ()}),
        ("open", {"prompt": (1 << 31,)}),
        ("open", {"prompt": (-1,)}),
        ("open", {"round": -1}),
        ("open", {"replied": -1}),
        ("open", {"replied": 3}),
        ("open", {"features_from": -1}),
        ("refeed", {"start": -1}),
        ("refeed", {"prefix": 1.0}),
        ("draft", {"deadline_ms": 0.0}),
        ("draft", {"deadline_ms": float("inf")}),
        ("drafted", {"parents": (-2,)}),
        ("drafted", {"scores": (float("nan"),)}),
        ("drafted", {"tokens": (1,) * (messages.MAX_NODES + 1)}),
        ("drafted", {"spans": (("x" * 65, 0, 0),)}),
        ("drafted", {"beside": ((-1, 0, ("grow", 0, 0)),)}),
        ("probed", {"beside": ((None, None, ("grow", 0, 0)),) * (messages.MAX_SPANS + 1)}),
        ("look", {"after": -1}),
        ("seen", {"workers": ({"name": "x"},)}),
        ("verify", {"items": ()}),
        ("failed", {"code": "whatever"}),
        ("hello", {"roles": ()}),
        ("hello", {"roles": ("coordinator",)}),
        ("hello", {"version": (1,)}),
        ("hello", {"reads": {**READS, "taps": (0,) * (messages.MAX_TAPS + 1)}}),
        ("hello", {"reads": {**READS, "taps": (messages.MAX_LAYERS + 1,)}}),
        ("hello", {"reads": {**READS, "taps": (-1,)}}),
        ("hello", {"reads": {**READS, "taps": (0, 1, 2), "width": messages.MAX_WIDTH}}),
        ("hello", {"reads": {**READS, "dtype": "float32"}}),
        ("hello", {"states": {"width": 0, "layers": 1}}),
        ("feed", {"features": None}),
        ("feed", {"round": -1}),
        ("prefilled", {"start": -1}),
        ("submit", {"max_tokens": -1}),
        ("submit", {"stop": ("",)}),
    ],
)
def test_a_value_out_of_bounds_is_refused(name: str, change: dict[str, Any]) -> None:
    message = REPRESENTATIVE[name]
    with pytest.raises(ValidationError):
        type(message).model_validate({**message.model_dump(), **change})


def test_the_longest_row_of_features_travels_in_parts_of_a_prompt_and_of_a_path() -> None:
    """256 rows of a prompt are read at a time, and a path has at most 128 nodes."""
    longest = messages.Reads(
        taps=(0, 1), width=messages.MAX_WIDTH, dtype="float16", vocabulary_size=1
    )
    assert longest.row == messages.MAX_ROW
    assert 256 * 2 * longest.row <= MAX_ARRAY_BYTES <= codec.MAX_FRAME_BYTES


def test_a_hello_without_a_model_needs_no_more_than_a_name() -> None:
    assert Hello(epoch=0, roles=("client",), name="", host="", pid=0).tokenizer is None


def test_drafted_and_verify_items_carry_trees() -> None:
    drafted = Drafted(
        epoch=0,
        session=0,
        round=1,
        tokens=(1, 2),
        parents=(-1, 0),
        scores=(-1.0, -2.0),
        grown=2,
        hit=False,
    )
    assert (
        drafted.tree
        == VerifyItem(session=0, round=1, prefix=1, tokens=(1, 2), parents=(-1, 0)).tree
        == TokenTree((1, 2), (-1, 0))
    )


def test_a_fingerprint_in_words_tells_apart_what_computes_differently() -> None:
    fingerprint = REPRESENTATIVE["hello"].fingerprint
    changed = [
        fingerprint.model_copy(update={field: "other"}) for field in type(fingerprint).model_fields
    ]
    assert len({str(f) for f in (fingerprint, *changed)}) == 1 + len(changed)


def test_a_message_is_a_map_that_any_messagepack_reader_understands() -> None:
    opened = Open(
        epoch=1,
        session=2,
        key=bytes(16),
        prompt=(3,),
        capacity=9,
        vocabulary_size=4,
        sampling=Sampling(),
        tree=TreeSettings(),
    )
    (body,) = codec.encode(opened)
    assert msgpack.unpackb(body)["prompt"] == [3]
