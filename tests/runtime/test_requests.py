"""Requests beside those for a plain reply: for the target's facts, for samples of a prompt, for
other ends, for log-probabilities; and the totals over all requests."""

from collections import Counter

import pytest

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import (
    Command,
    Emitted,
    Event,
    Failed,
    Finished,
    Open,
    Opened,
    PromptScored,
    Scored,
    TokenLogprobs,
    Verified,
)
from dovetail.runtime.text.tokenizer import TextCodec
from support.houses import PROMPT, House
from support.scripted import (
    END,
    ROOMY,
    VOCABULARY,
    ScriptedTarget,
    continuation,
    logprobs,
    tokenizer_bytes,
)


def failure(house: House, **options: object) -> Failed:
    house.submit(**options)  # type: ignore[arg-type]
    (failed,) = (reply for reply in house.replies() if isinstance(reply, Failed))
    return failed


def test_a_client_is_told_what_it_needs_to_read_and_write_the_targets_tokens() -> None:
    house = House()
    described = house.client.describe()
    text = TextCodec(described.tokenizer.data, described.vocabulary)
    assert described.tokenizer.data == tokenizer_bytes()
    assert (described.model, described.limits.context, described.vocabulary.end) == (
        "scripted-target",
        512,
        (END,),
    )
    tokens = text.encode("w5 w6 w7")
    result = house.complete(prompt=tokens, vocabulary=described.vocabulary.digest).result
    assert list(result.token_ids) == continuation(tokens, 60)
    assert result.fingerprint == described.fingerprint


def test_a_seed_chosen_by_the_server_is_exact_in_javascript() -> None:
    house = House()
    assert all(house.complete(max_tokens=1, seed=None).result.seed < 1 << 53 for _ in range(8))
    assert house.complete(max_tokens=1, seed=(1 << 63) - 1).result.seed == (1 << 63) - 1


def test_a_target_reports_the_tokens_that_end_its_replies() -> None:
    (target,) = (one for one in House().client.status().workers if "target" in one.roles)
    assert target.ends == ("<end>",)


def test_where_there_is_no_target_a_client_is_told_how_to_start_one() -> None:
    with pytest.raises(RequestError, match="dovetail worker --role target") as caught:
        House(target=False).client.describe()
    assert caught.value.code == "no_target"


def test_tokens_of_another_vocabulary_are_refused() -> None:
    failed = failure(House(), vocabulary="f" * 64)
    assert failed.code == "vocabulary"
    assert "ffffffffffffffff" in failed.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"end": (3, VOCABULARY)},
            f"token id {VOCABULARY} of end is beyond the vocabulary of {VOCABULARY}",
        ),
        ({"scored": True}, "also set the number of alternatives, 0 for none"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_name(
    options: dict[str, object], words: str
) -> None:
    failed = failure(House(), **options)
    assert failed.code == "settings"
    assert words in failed.text


def test_samples_of_a_prompt_have_keys_of_their_own() -> None:
    house = House()
    for sample in (0, 1, 2, 1):
        house.complete(sample=sample)
    assert house.target is not None
    keys = [command.key for command in house.target.seen if isinstance(command, Open)]
    assert len(set(keys)) == 3
    assert keys[1] == keys[3]


def test_a_reply_ends_with_the_ids_that_the_client_names() -> None:
    house = House()
    whole = continuation(PROMPT, 60)
    result = house.complete(end=(whole[4], 1)).result
    first = whole.index(whole[4])
    assert (list(result.token_ids), result.finish_reason) == (whole[: first + 1], "stop")
    assert house.target is not None
    assert [command.end for command in house.target.seen if isinstance(command, Open)] == [
        (whole[4], 1)
    ]
    ended = next(prompt for i in range(1, 90) if END in continuation(prompt := (i, 3), 60))
    endless = house.complete(prompt=ended, end=()).result
    assert (endless.completion_tokens, endless.finish_reason) == (60, "length")
    assert END in endless.token_ids


def test_a_prompt_that_is_only_read_brings_no_token_and_opens_no_draft() -> None:
    house = House()
    result = house.complete(max_tokens=0).result
    assert (result.token_ids, result.text, result.finish_reason, result.rounds) == (
        (),
        "",
        "length",
        0,
    )
    assert 0 < result.time_to_first_token_s <= result.wall_s
    assert house.draft is not None
    assert not any(isinstance(command, Open) for command in house.draft.seen)
    assert house.target is not None
    (opened,) = (command for command in house.target.seen if isinstance(command, Open))
    assert opened.capacity == len(PROMPT) + 1
    assert house.report().sessions == 0


# -- log-probabilities -----------------------------------------------------------------------------


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize(
    "options", [{}, {"speculate": False}, {"stop": ("w4",)}, {"max_tokens": 7}, {"max_tokens": 1}]
)
def test_every_token_comes_with_what_the_target_thinks_of_it(
    top: int, options: dict[str, object]
) -> None:
    house = House()
    house.submit(logprobs=top, **options)  # type: ignore[arg-type]
    replies = house.replies()
    result = next(reply.result for reply in replies if isinstance(reply, Finished))
    emitted = [reply for reply in replies if isinstance(reply, Emitted)]
    assert all(len(reply.logprobs) == len(reply.tokens) for reply in emitted)
    log = [*PROMPT, *result.token_ids]
    assert [said for reply in emitted for said in reply.logprobs] == [
        logprobs(log, place, top) for place in range(len(PROMPT), len(log))
    ]


def test_what_was_not_asked_for_does_not_come() -> None:
    house = House()
    house.submit()
    assert all(reply.logprobs == () for reply in house.replies() if isinstance(reply, Emitted))
    assert house.draft is not None
    house.complete(logprobs=2)
    assert {command.logprobs for command in house.draft.seen if isinstance(command, Open)} == {None}


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("repeat", [1, 3])
def test_the_prompt_is_scored_in_order_and_ahead_of_the_reply(max_tokens: int, repeat: int) -> None:
    house = House(repeat=repeat)
    prompt = (5, 6, 7, 8, 9, 10)
    house.submit(prompt, max_tokens=max_tokens, logprobs=2, scored=True)
    replies = [
        reply for reply in house.replies() if isinstance(reply, PromptScored | Emitted | Finished)
    ]
    scored = [reply for reply in replies if isinstance(reply, PromptScored)]
    assert replies[: len(scored)] == scored
    assert [reply.start for reply in scored] == [1, 3, 5]
    assert [said for reply in scored for said in reply.logprobs] == [
        logprobs(prompt, place, 2) for place in range(1, len(prompt))
    ]
    assert isinstance(replies[-1], Finished)
    assert replies[-1].result.completion_tokens == max_tokens


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    house = House()
    house.submit((5,), max_tokens=0, logprobs=0, scored=True)
    assert [type(reply) for reply in house.replies()] == [Finished]


SAID = TokenLogprobs(logprob=-1.0, top=((3, -0.5), (4, -0.75)))
NONSENSE = {
    "unsaid": (),
    "too-many": (SAID,) * 9,
    "alternatives": (SAID.model_copy(update={"top": ()}),),
    "vocabulary": (SAID.model_copy(update={"top": ((3, -0.5), (VOCABULARY, -0.75))}),),
}


class Careless(ScriptedTarget):
    """Says of tokens what it was not asked for."""

    spoiled: type[Event] = Opened
    said: tuple[TokenLogprobs, ...] = ()

    def work(self, command: Command) -> list[Event]:
        return [self.spoil(event) for event in super().work(command)]

    def spoil(self, event: Event) -> Event:
        if not isinstance(event, self.spoiled):
            return event
        if isinstance(event, Opened):
            return event.model_copy(update={"logprobs": self.said[0] if self.said else None})
        if isinstance(event, Scored):
            return event.model_copy(update={"logprobs": self.said})
        assert isinstance(event, Verified)
        return event.model_copy(
            update={
                "items": tuple(
                    item.model_copy(update={"logprobs": self.said}) for item in event.items
                )
            }
        )


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [
        (kind, said)
        for kind in (Opened, Scored, Verified)
        for said in NONSENSE.values()
        if (kind, said) != (Opened, NONSENSE["too-many"])
    ],
)
def test_log_probabilities_that_cannot_be_end_the_request_with_an_error(
    spoiled: type[Event], said: tuple[TokenLogprobs, ...]
) -> None:
    house = House(target=False)
    target = house.add(Careless, "target")
    assert isinstance(target, Careless)
    target.spoiled, target.said = spoiled, said
    failed = failure(house, logprobs=2, scored=True)
    assert failed.code == "internal"
    assert "the target worker target sent" in failed.text
    report = house.report()
    assert (report.sessions, report.refused, report.failed) == (0, 1, 1)
    assert all(not worker.logs for worker in house.workers)


class Silent(ScriptedTarget):
    def score(self, command: Open, first: int, stop: int) -> list[Event]:
        return []


def test_a_prompt_that_was_to_be_scored_and_was_not_ends_the_request_with_an_error() -> None:
    house = House(target=False)
    house.add(Silent, "target")
    assert (
        "log-probabilities of 0 tokens of a prompt of 3"
        in failure(house, logprobs=0, scored=True).text
    )


# -- what it all came to ---------------------------------------------------------------------------


def test_the_totals_are_the_sums_of_the_results() -> None:
    house = House(limits=ROOMY)
    prompt = tuple(range(5, 30))
    for number in range(20):
        house.submit(
            (*prompt[: 20 + number % 3], number),
            max_tokens=number,
            speculate=bool(number % 4),
            stop=("w7",),
        )
    house.submit((3,) * 600)
    house.client.cancel(house.submit())
    results = [reply.result for reply in house.replies() if isinstance(reply, Finished)]
    totals = house.report().totals
    read = [result for result in results if result.finish_reason != "cancelled"]
    assert len(read) == 20
    assert totals.prompt_tokens == sum(result.prompt_tokens for result in read)
    for name in ("reused_tokens", "completion_tokens", "drafted_tokens", "accepted_tokens"):
        assert getattr(totals, name) == sum(getattr(result, name) for result in results), name
    assert totals.drafts == sum(result.rounds - result.plain_rounds for result in results) > 0
    depths: Counter[int] = Counter()
    for result in results:
        depths.update(
            {
                depth: round(share * result.rounds)
                for depth, share in enumerate(result.accepted_per_position)
            }
        )
    assert totals.accepted_per_depth == tuple(depths[depth] for depth in range(len(depths)))
    assert dict(totals.reasons) == Counter(result.finish_reason for result in results)
    assert totals.refused_requests == 1


def test_the_totals_grow_while_a_reply_does() -> None:
    house = House()
    request = house.submit(max_tokens=300, end=())
    house.coordinator.pump()
    opening = house.coordinator.report().totals
    assert (opening.opening, opening.occupied, opening.prompt_tokens) == (1, 1 / 64, 0)
    seen = []
    for _ in range(12):
        for worker in house.workers:
            worker.step()
        house.coordinator.pump()
        seen.append(house.coordinator.report().totals)
    assert seen[0].opening == 0
    assert seen[0].prompt_tokens == len(PROMPT)
    written = [totals.completion_tokens for totals in seen]
    assert written == sorted(written)
    assert 0 < seen[-1].drafts < seen[-1].completion_tokens
    house.client.cancel(request)
    house.client.complete(request)
    assert house.coordinator.report().totals.occupied == 0.0
