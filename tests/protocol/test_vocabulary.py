"""Vocabularies as tokenizer.json files of the four kinds give them."""

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.vocabulary import LARGEST_ID, TokenTable, read_vocabulary, vocabulary_digest


def tokenizer(vocabulary: Any, **more: Any) -> bytes:
    return json.dumps({"model": {"type": "any", "vocab": vocabulary}, **more}).encode()


def test_a_mapping_of_tokens_to_ids_is_read() -> None:
    assert read_vocabulary(tokenizer({"a": 0, "b": 1})) == {0: "a", 1: "b"}


def test_a_unigram_list_of_pieces_is_numbered_in_order() -> None:
    assert read_vocabulary(tokenizer([["<unk>", 0.0], ["a", -1.5]])) == {0: "<unk>", 1: "a"}


def test_added_tokens_belong_to_the_vocabulary() -> None:
    assert read_vocabulary(tokenizer({"a": 0}, added_tokens=[{"id": 1, "content": "<|end|>"}])) == {
        0: "a",
        1: "<|end|>",
    }


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"null",
        b"[]",
        b"{}",
        b'{"model": {}}',
        b'{"model": 3}',
        b'{"model": {"vocab": 3}}',
        b'{"model": {"vocab": [3]}}',
        b'{"model": {"vocab": [[]]}}',
        b'{"model": {"vocab": {"a": "b"}}}',
        b'{"model": {"vocab": {"a": []}}}',
        b'{"model": {"vocab": {}}, "added_tokens": [{"id": 1}]}',
        b'{"model": {"vocab": {}}, "added_tokens": 1}',
        b'{"model": {"vocab": {}}, "added_tokens": [{"id": 1, "content": 2}]}',
        b"[" * 100000,
    ],
)
def test_what_holds_no_vocabulary_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        read_vocabulary(content)


def test_the_digest_depends_on_ids_and_tokens_and_on_nothing_else() -> None:
    assert vocabulary_digest({0: "a", 1: "b"}) == vocabulary_digest({1: "b", 0: "a"})
    others = [{0: "a"}, {0: "b", 1: "a"}, {0: "a", 2: "b"}, {0: "a", 1: "b", 2: "c"}]
    assert len({vocabulary_digest(v) for v in [{0: "a", 1: "b"}, *others]}) == 5


def test_the_digest_of_one_vocabulary_never_changes() -> None:
    assert (
        vocabulary_digest({0: "a", 1: "é", 300: "世"})
        == "b7c016e26007d0bd9a3dc945fb8c67dde8f29e40080775323fca11930db7f03e"
    )


def test_tokens_with_lone_surrogates_have_a_digest() -> None:
    assert len(vocabulary_digest({0: "\ud800"})) == 64


def test_differences_name_the_first_ids_in_order() -> None:
    target = TokenTable.of({0: "a", 1: "b", 2: "c", 3: "d", 4: "e"})
    draft = TokenTable.of({0: "a", 1: "B", 3: "D", 4: "E"})
    assert target.differences(draft) == [
        "id 1 is 'b' in the target and 'B' in the draft",
        "id 2 is 'c' in the target and no token in the draft",
        "id 3 is 'd' in the target and 'D' in the draft",
    ]
    assert target.differences(target) == []


VOCABULARIES = st.dictionaries(st.integers(0, LARGEST_ID), st.text(max_size=6), max_size=40)


@given(VOCABULARIES, st.data())
def test_a_packed_table_spells_as_the_vocabulary_does(
    vocabulary: dict[int, str], data: st.DataObject
) -> None:
    ids = st.sampled_from(sorted(vocabulary) or [0])
    special = data.draw(st.lists(ids, unique=True, max_size=3)) if vocabulary else []
    table = TokenTable.of(vocabulary, special, special[1:], {"type": "Fuse"})
    for read in (table, TokenTable.unpacked(table.packed)):
        assert read.digest == vocabulary_digest(vocabulary)
        assert {token: read.spelling(token) for token in read} == vocabulary
        assert all(read.spelling(one) is None for one in (-1, 7, 1 << 32) if one not in vocabulary)
        assert {*read.special} == {vocabulary[one] for one in special}
        assert {*read.added} == {vocabulary[one] for one in special[1:]}
        assert read.decoder == {"type": "Fuse"}
        assert read.longest == max([1, *(len(one.encode()) for one in vocabulary.values())])


@given(st.binary(max_size=60))
def test_an_invalid_table_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="the token table cannot be read"):
        TokenTable.unpacked(content)


def test_a_table_that_is_cut_short_is_refused() -> None:
    whole = TokenTable.of({0: "a", 5: "bc"}).packed
    for end in range(len(whole)):
        with pytest.raises(CheckpointError):
            TokenTable.unpacked(whole[:end])


@pytest.mark.parametrize(
    ("about", "ids", "ends", "spelt"),
    [
        ({"digest": 1, "special": []}, [0, 1], [1, 2], b"ab"),
        ({"digest": "d", "special": [7]}, [0, 1], [1, 2], b"ab"),
        ({"digest": "d", "special": 7}, [0, 1], [1, 2], b"ab"),
        ({"special": []}, [0, 1], [1, 2], b"ab"),
        ({"digest": "d", "special": []}, [1, 0], [1, 2], b"ab"),
        ({"digest": "d", "special": []}, [0, 1], [2, 1], b"ab"),
        ({"digest": "d", "special": []}, [0, 1], [1, 9], b"ab"),
        ({"digest": "d", "special": []}, [0, 1], [1, 2], b"\xff\xff"),
        ({"digest": "d", "special": []}, [0, 1], [1, 2], "\u00e9".encode()),
    ],
)
def test_a_table_whose_tokens_could_not_be_spelt_is_refused(
    about: dict[str, Any], ids: list[int], ends: list[int], spelt: bytes
) -> None:
    packed = TokenTable(about, array("I", ids), array("I", ends), spelt).packed
    with pytest.raises(CheckpointError, match="the token table cannot be read"):
        TokenTable.unpacked(packed)
