"""The memory of earlier texts against a plain search in all of them."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol.lookup import LONGEST, OCCURRENCES
from dovetail.runtime.session.lookup_memory import SIZES, TOKEN_BYTES, LookupMemory

VOCABULARY = "v"
TEXTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), max_size=40)), max_size=6
)


def remembering(texts: Sequence[tuple[str, Sequence[int]]], tokens: int = 10_000) -> LookupMemory:
    """A memory with room for this many tokens that has indexed all texts."""
    memory = LookupMemory(tokens * TOKEN_BYTES)
    for owner, text in texts:
        memory.add(owner, VOCABULARY, text)
        memory.step(1 << 30)
    return memory


def searched(
    texts: Sequence[Sequence[int]], log: Sequence[int], most: int
) -> list[tuple[int, ...]]:
    """Return what should be found in an owner's texts, by looking everywhere."""
    places = []
    for age, text in enumerate(texts):
        for end in range(1, len(text)):
            n = 0
            while n < min(end, len(log), LONGEST) and text[end - 1 - n] == log[-1 - n]:
                n += 1
            size = next((size for size in SIZES if n >= size), None)
            if size is not None:
                places.append((-size, -age, -end, (n, *text[end : end + most])))
    return [found for *_, found in sorted(places)[:OCCURRENCES]]


def numbered(texts: Sequence[tuple[str, Sequence[int]]]) -> list[tuple[str, list[int]]]:
    """The texts, each after a token of its own, so that no text begins like the last one."""
    return [(owner, [100 + n, *text]) for n, (owner, text) in enumerate(texts)]


@settings(max_examples=200, deadline=None)
@given(texts=TEXTS, log=st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_all_and_only_the_texts_of_the_same_owner_are_found(
    texts: list[tuple[str, list[int]]], log: list[int]
) -> None:
    every = numbered(texts)
    memory = remembering(every)
    for owner in "ab":
        own = [text for whose, text in every if whose == owner]
        found = memory.find(owner, VOCABULARY, log, 5)
        expected = searched(own, log, 5)
        assert [*found] == expected
        assert memory.find(owner, "another", log, 5) == ()


@settings(max_examples=200, deadline=None)
@given(texts=TEXTS, log=st.lists(st.integers(0, 2), min_size=3, max_size=20))
def test_a_memory_that_is_full_drops_the_oldest_and_never_joins_two_texts(
    texts: list[tuple[str, list[int]]], log: list[int]
) -> None:
    every = numbered(texts)
    memory = remembering(every, tokens=50)
    for owner in "ab":
        own = [text for whose, text in every if whose == owner]
        for match, *after in memory.find(owner, VOCABULARY, log, 5):
            assert any(
                (*log[-match:], *after) == tuple(text[i : i + match + len(after)])
                for text in own
                for i in range(len(text))
            )


def test_what_was_forgotten_is_not_found_and_that_of_others_still_is() -> None:
    text = [*range(20)]
    memory = remembering([("a", text), ("b", text)])
    memory.add("a", VOCABULARY, [5, *text])  # waits to be indexed
    assert memory.forget("a")
    assert not memory.forget("a")
    memory.step(1 << 30)
    assert memory.find("a", VOCABULARY, text[:9], 4) == ()
    assert memory.find("b", VOCABULARY, text[:9], 4) == ((9, 9, 10, 11, 12),)


def test_the_turns_of_a_conversation_are_indexed_once() -> None:
    first = [*range(200)]
    memory = remembering([("a", first), ("a", [*first, *range(300, 400)])])
    assert len(memory.find("a", VOCABULARY, first[50:60], 4)) == 1
    assert memory.find("a", VOCABULARY, [*first[190:], 300, 301], 2) == ((12, 302, 303),)


def test_a_text_is_indexed_a_few_tokens_at_a_time() -> None:
    memory = LookupMemory(1 << 20)
    memory.add("a", VOCABULARY, [*range(1000)])
    memory.step(500)
    assert memory.find("a", VOCABULARY, [*range(480, 490)], 2) == ((10, 490, 491),)
    assert memory.find("a", VOCABULARY, [*range(600, 610)], 2) == ()
    memory.step(501)
    assert memory.find("a", VOCABULARY, [*range(600, 610)], 2) == ((10, 610, 611),)
