"""A look-up draft in real processes: it gets a message only if the earlier text has a match for
it."""

from dovetail.protocol.lookup import SearchedLog
from dovetail.protocol.messages import Finished, Recorded
from dovetail.protocol.settings import Sampling, TreeSettings
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
