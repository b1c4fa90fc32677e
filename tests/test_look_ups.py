"""A look-up draft in real processes: it gets a message only if the earlier text has a match for
it."""

import pytest

from dovetail.protocol.lookup import SearchedLog
from dovetail.protocol.messages import Finished, Forgotten, Recorded
from dovetail.protocol.settings import Sampling, TreeSettings
from support.cases import everyday
from support.patience import PATIENCE_S
from support.stacks import started


def test_a_look_up_is_asked_only_where_it_finds_something() -> None:
    asked, rounds = list[list[int]](), 0
    with started({"draft.kind": "ngram"}) as (_, client):
        for number in range(12):
            prompt = [*range(100 + 30 * number, 120 + 30 * number)]
            sampling = Sampling(temperature=float(number % 2))
            client.submit(
                tokens=prompt,
                max_tokens=64,
                end=(),
                seed=number,
                sampling=sampling,
                tree=TreeSettings(),
                record=True,
            )
            records = []
            while not isinstance(reply := client.receive(PATIENCE_S), Finished):
                records += [reply.record] if isinstance(reply, Recorded) else []
            log = [*prompt, *reply.result.token_ids]
            asked += [log[: record.prefix] for record in records if record.draft_ns]
            rounds += len(records)
    assert rounds > 200
    assert asked
    assert all(SearchedLog(log).chances(1, 0.05) for log in asked)


@pytest.mark.parametrize("kind", everyday(["ngram", "dovetail"], "dovetail"))
def test_a_reply_is_found_in_earlier_texts_of_the_same_key_until_they_are_forgotten(
    kind: str,
) -> None:
    """And no token changes, with a look-up alone or one whose guesses join a head's tree."""
    with started({"draft.kind": kind, "coordinator.lookup_memory": "16MB"}) as (_, client):
        for temperature in (0.0, 1.0):
            told = list[tuple[int, ...]]()

            def rounds(owner: str, sampling: Sampling, told: list[tuple[int, ...]]) -> int:
                client.submit(
                    tokens=[*range(300, 330)],
                    max_tokens=32,
                    end=(),
                    seed=1,
                    sampling=sampling,
                    tree=TreeSettings(insist=True),
                    owner=owner,
                )
                while not isinstance(reply := client.receive(PATIENCE_S), Finished):
                    assert reply is not None
                told.append(reply.result.token_ids)
                return reply.result.rounds

            sampling = Sampling(temperature=temperature)
            first, again = (rounds("one", sampling, told) for _ in range(2))
            another = rounds("another", sampling, told)
            client.forget("one")
            forgotten = client.receive(PATIENCE_S)
            assert isinstance(forgotten, Forgotten)
            assert forgotten.found
            assert again < min(first, another, rounds("one", sampling, told))
            assert len({*told}) == 1
