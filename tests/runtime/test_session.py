"""One request's life as values: events in, lists of actions out."""

from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models

from dovetail.protocol.arrays import Array
from dovetail.protocol.codec import encode
from dovetail.protocol.errors import ProtocolError, StaleError, TreeError
from dovetail.protocol.messages import (
    Close,
    Draft,
    Drafted,
    Feed,
    Open,
    Opened,
    Prefilled,
    Refed,
    Refeed,
    Scored,
    TokenLogprobs,
    VerifiedItem,
    Verify,
    VerifyItem,
)
from dovetail.protocol.settings import Sampling, SamplingSettings, TreeSettings
from dovetail.runtime.control.rounds import Plan
from dovetail.runtime.session.actions import Ask, Emit, Finish, NextRound, Score
from dovetail.runtime.session.draft_sync import DraftSync, Joining, UnreadableFeatures
from dovetail.runtime.session.request import Request
from dovetail.runtime.session.session import Session
from dovetail.runtime.session.state import State
from dovetail.runtime.telemetry.metrics import Accounts
from support.scripted import END, READS, VOCABULARY, features, tokenizer_bytes
from support.spelt import detokenizer_of

PLAN = Plan()


def new_session(
    *,
    speculating: bool = True,
    max_tokens: int = 20,
    stop: tuple[str, ...] = (),
    tree: TreeSettings | None = None,
    sampling: Sampling | None = None,
    prompt: tuple[int, ...] = (9, 8),
    logprobs: int | None = None,
    scored: bool = False,
) -> Session:
    request = Request(
        prompt=prompt,
        key=bytes(16),
        seed=1,
        sampling=sampling or Sampling(),
        max_tokens=max_tokens,
        tree=tree or TreeSettings(policy="dynamic", insist=True, gamma=4, depth=3, width=2),
        end=(END,),
        vocabulary_size=VOCABULARY,
        stop=stop,
        logprobs=logprobs,
        scored=scored,
    )
    draft_sync = DraftSync(len(request.prompt)) if speculating else None
    detokenizer = detokenizer_of(Tokenizer.from_buffer(tokenizer_bytes()))
    return Session(
        number=1,
        epoch=5,
        request=request,
        detokenizer=detokenizer,
        accounts=Accounts(0),
        draft_sync=draft_sync,
    )


def going_on(
    session: Session,
    actions: Sequence[object],
    plan: Plan | None = PLAN,
    joining: Joining | None = None,
) -> list[object]:
    """These actions, and in place of the question for the next round those that begin it."""
    if not isinstance(actions[-1], NextRound):
        return [*actions]
    assert session.state in (State.READY, State.BETWEEN)
    return [*actions[:-1], *session.next_round(plan, joining)]


def opened(
    session: Session,
    bonus: int = 3,
    *,
    round: int = 0,
    margin: float = 0.5,
    plan: Plan | None = PLAN,
) -> list[object]:
    event = Opened(epoch=1, session=1, round=round, bonus=bonus, margin=margin)
    return going_on(session, session.opened(event, 10), plan)


def drafted(session: Session, tokens: tuple[int, ...], parents: tuple[int, ...]) -> list[object]:
    event = Drafted(
        epoch=1,
        session=1,
        round=session.round,
        tokens=tokens,
        parents=parents,
        scores=(0.0,) * len(tokens),
        grown=len(tokens),
        hit=False,
    )
    return list(session.drafted(event))


def verdict(
    session: Session,
    accepted: tuple[int, ...],
    bonus: int,
    *,
    features: Array | None = None,
    plan: Plan | None = PLAN,
    joining: Joining | None = None,
) -> list[object]:
    item = VerifiedItem(
        session=1,
        round=session.round,
        accepted=accepted,
        bonus=bonus,
        margins=(0.1,) * (len(accepted) + 1),
    )
    return going_on(session, session.verified(item, features), plan, joining)


def test_begin_opens_both_workers_and_only_the_target_without_a_draft() -> None:
    assert [(a.role, type(a.command)) for a in new_session().begin() if isinstance(a, Ask)] == [
        ("target", Open),
        ("draft", Open),
    ]
    assert [a.role for a in new_session(speculating=False).begin() if isinstance(a, Ask)] == [
        "target"
    ]


def test_workers_are_told_every_processor_and_what_ends_the_reply() -> None:
    asked = SamplingSettings(
        temperature=0.5,
        top_k=3,
        repetition_penalty=1.2,
        presence_penalty=0.1,
        logit_bias=((4, 1.0),),
        min_tokens=3,
        max_tokens=9,
    )
    for ask in new_session(sampling=asked).begin():
        assert isinstance(ask, Ask)
        assert isinstance(ask.command, Open)
        assert ask.command.end == (END,)
        assert type(ask.command.sampling) is Sampling
        assert ask.command.sampling.model_dump() == {
            name: getattr(asked, name) for name in Sampling.model_fields
        }


def test_a_round_is_draft_then_verify_then_commit() -> None:
    session = new_session()
    session.begin()
    emit, ask = opened(session)
    assert (emit.tokens, emit.drafted, emit.text) == ((3,), 0, "w3")
    assert isinstance(ask, Ask)
    assert isinstance(ask.command, Draft)
    assert (ask.command.round, ask.command.prefix, ask.command.accepted, ask.command.bonus) == (
        1,
        3,
        (),
        3,
    )
    (ask,) = drafted(session, (4, 5, 6), (-1, 0, -1))
    assert isinstance(ask, Ask)
    checked = Verify(
        epoch=5,
        items=(VerifyItem(session=1, round=1, prefix=3, tokens=(4, 5, 6), parents=(-1, 0, -1)),),
    )
    assert ask.command == checked
    assert encode(ask.command) == encode(checked)
    emit, ask = verdict(session, (0, 1), 7)
    assert (emit.tokens, emit.drafted, emit.text) == ((4, 5, 7), 2, " w4 w5 w7")
    assert isinstance(ask, Ask)
    assert isinstance(ask.command, Draft)
    assert (ask.command.round, ask.command.prefix, ask.command.accepted, ask.command.bonus) == (
        2,
        6,
        (0, 1),
        7,
    )
    assert session.tokens == [3, 4, 5, 7]


def test_the_last_token_is_not_drafted_for() -> None:
    session = new_session(max_tokens=2)
    session.begin()
    _, ask = opened(session)
    assert isinstance(ask, Ask)
    assert isinstance(ask.command, Verify)
    assert ask.command.items[0].tokens == ()


def test_a_proposal_never_reaches_beyond_the_length_limit() -> None:
    session = new_session(max_tokens=3)
    session.begin()
    _, ask = opened(session)
    assert isinstance(ask, Ask)
    assert isinstance(ask.command, Draft)
    assert ask.command.max_depth == 1


def test_an_end_token_inside_an_accepted_path_cuts_there() -> None:
    session = new_session()
    session.begin()
    opened(session)
    drafted(session, (4, END, 6), (-1, 0, 1))
    emit, finish, *closes = verdict(session, (0, 1, 2), 7)
    assert (emit.tokens, emit.drafted, emit.text) == ((4, END), 2, " w4")
    assert finish == Finish("stop")
    assert [type(c.command) for c in closes if isinstance(c, Ask)] == [Close, Close]
    assert session.tokens == [3, 4, END]
    assert session.accounts.accepted == 2


def test_a_stop_string_that_spans_rounds_is_never_shown() -> None:
    session = new_session(stop=("w4 w5",))
    session.begin()
    opened(session)
    drafted(session, (), ())
    emit, _ = verdict(session, (), 4)
    assert isinstance(emit, Emit)
    assert emit.text == " "
    drafted(session, (), ())
    *_, finish, _, _ = verdict(session, (), 5)
    assert finish == Finish("stop")
    assert session.text == "w3 "
    assert session.tokens == [3, 4, 5]


def test_held_back_text_is_shown_when_the_reply_ends_otherwise() -> None:
    session = new_session(stop=("w4 w5",), max_tokens=2)
    session.begin()
    opened(session)
    verdict(session, (), 4)
    assert session.text == "w3 w4"


def test_late_and_duplicate_events_are_stale_and_change_nothing() -> None:
    session = new_session()
    session.begin()
    opened(session)
    with pytest.raises(StaleError):
        opened(session)
    drafted(session, (4,), (-1,))
    with pytest.raises(StaleError):
        drafted(session, (4,), (-1,))
    verdict(session, (0,), 5)
    with pytest.raises(StaleError):
        session.verified(
            VerifiedItem(session=1, round=1, accepted=(0,), bonus=5, margins=(0.1, 0.1))
        )
    assert session.tokens == [3, 4, 5]


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ((VOCABULARY,), (-1,)),
        ((1, 2), (-1, 5)),
        ((1, 1), (-1, -1)),
        ((1, 2), (-1,)),
        ((1, 2, 3, 4, 5), (-1, 0, 1, 2, 3)),
    ],
)
def test_a_proposal_that_is_no_tree_or_too_large_is_refused(
    tokens: tuple[int, ...], parents: tuple[int, ...]
) -> None:
    session = new_session()
    session.begin()
    opened(session)
    with pytest.raises(TreeError):
        drafted(session, tokens, parents)
    assert session.state is State.DRAFTING


def test_a_proposal_that_promises_more_than_certainty_is_refused() -> None:
    session = new_session()
    session.begin()
    opened(session)
    with pytest.raises(ProtocolError, match=r"the score 1e\+300"):
        session.drafted(
            Drafted(
                epoch=1,
                session=1,
                round=1,
                tokens=(4, 5),
                parents=(-1, -1),
                scores=(-0.5, 1e300),
                grown=2,
                hit=False,
            )
        )
    assert session.state is State.DRAFTING


@pytest.mark.parametrize(
    ("accepted", "bonus"), [((1,), 5), ((0, 0), 5), ((7,), 5), ((), VOCABULARY)]
)
def test_a_verdict_that_fits_no_path_is_refused(accepted: tuple[int, ...], bonus: int) -> None:
    session = new_session()
    session.begin()
    opened(session)
    drafted(session, (4, 5), (-1, 0))
    with pytest.raises(ProtocolError):
        verdict(session, accepted, bonus)
    assert session.tokens == [3]


def test_when_the_draft_is_lost_the_round_is_verified_without_a_tree() -> None:
    session = new_session()
    session.begin()
    opened(session)
    (ask,) = session.draft_lost()
    assert isinstance(ask, Ask)
    assert isinstance(ask.command, Verify)
    _, ask = verdict(session, (), 4)
    assert isinstance(ask, Ask)
    assert ask.role == "target"


def test_cancelling_twice_does_nothing_the_second_time() -> None:
    session = new_session()
    session.begin()
    opened(session)
    assert Finish("cancelled") in session.cancel()
    assert session.cancel() == []


def test_a_session_between_two_rounds_waits_to_be_told_how_the_next_is_drafted() -> None:
    session = new_session()
    with pytest.raises(RuntimeError, match="not between rounds"):
        session.next_round(PLAN)
    session.begin()
    *_, last = session.opened(Opened(epoch=1, session=1, bonus=3, margin=0.5), 10)
    assert isinstance(last, NextRound)
    assert (session.state, session.round) == (State.READY, 1)
    with pytest.raises(StaleError):
        drafted(session, (4,), (-1,))
    ((role, order),) = commands(session.next_round(Plan(deadline_ms=7.0)))
    assert role == "draft"
    assert isinstance(order, Draft)
    assert order.deadline_ms == 7.0


# -- workers that are lost and found ---------------------------------------------------------------


def commands(actions: Sequence[object]) -> list[tuple[str, object]]:
    return [(action.role, action.command) for action in actions if isinstance(action, Ask)]


@pytest.mark.parametrize("lost_in", [State.DRAFTING, State.VERIFYING])
def test_the_first_token_of_another_target_is_the_verdict_of_the_round_that_was_lost(
    lost_in: State,
) -> None:
    session = new_session()
    session.begin()
    opened(session)
    if lost_in is State.VERIFYING:
        drafted(session, (4, 5), (-1, 0))
    assert session.state is lost_in
    assert session.target_lost() == []
    assert session.state is State.WAITING
    ((role, command),) = commands(session.recovered("another"))
    assert role == "target"
    assert isinstance(command, Open)
    assert (command.prompt, command.replied, command.round, command.capacity) == (
        (9, 8, 3),
        1,
        1,
        session.request.capacity,
    )
    with pytest.raises(StaleError):
        session.opened(Opened(epoch=2, session=1, round=0, bonus=4), 20)
    emitted, ask = opened(session, 4, round=1, margin=0.25)
    assert isinstance(emitted, Emit)
    assert (emitted.tokens, emitted.drafted) == ((4,), 0)
    assert isinstance(ask, Ask)
    assert isinstance(ask.command, Draft)
    assert (
        ask.command.round,
        ask.command.prefix,
        ask.command.accepted,
        ask.command.bonus,
        ask.command.more,
    ) == (2, 4, (), 4, ())
    assert (session.moves, session.tokens, session.margins) == (1, [3, 4], [0.5, 0.25])


def test_what_was_committed_without_an_order_still_reaches_the_draft_behind_a_move() -> None:
    session = new_session()
    session.begin()
    opened(session, plan=None)
    verdict(session, (), 4, plan=None)
    session.target_lost()
    session.recovered("another")
    *_, ask = opened(session, 5, round=2)
    assert isinstance(ask, Ask)
    assert isinstance(ask.command, Draft)
    assert (ask.command.round, ask.command.prefix, ask.command.bonus, ask.command.more) == (
        3,
        5,
        3,
        (4, 5),
    )


def test_nothing_that_the_lost_target_was_to_say_is_listened_to_any_more() -> None:
    session = new_session()
    session.begin()
    opened(session)
    drafted(session, (4,), (-1,))
    session.target_lost()
    for event in (
        lambda: verdict(session, (0,), 5),
        lambda: drafted(session, (4,), (-1,)),
        lambda: opened(session),
    ):
        with pytest.raises(StaleError):
            event()
    session.recovered("another")
    for event in (
        lambda: verdict(session, (0,), 5),
        lambda: drafted(session, (4,), (-1,)),
        lambda: opened(session),
    ):
        with pytest.raises(StaleError):
            event()
    assert session.tokens == [3]


def test_a_draft_that_is_found_reads_the_log_up_to_the_root_while_a_round_goes_by() -> None:
    session = new_session(speculating=False)
    session.begin()
    opened(session)
    (_, opening), (role, verify) = commands(verdict(session, (), 4, joining=Joining()))
    assert isinstance(opening, Open)
    assert (opening.prompt, opening.replied, opening.round) == ((9, 8, 3), 1, 1)
    assert role == "target"
    assert isinstance(verify, Verify)
    ((_, order),) = commands(verdict(session, (), 5))
    assert isinstance(order, Draft)
    assert (order.round, order.prefix, order.accepted, order.bonus, order.more) == (
        3,
        5,
        (),
        4,
        (5,),
    )


def test_a_draft_that_reads_its_target_is_fed_what_is_computed_anew_and_has_the_verdicts_behind_it() -> (  # noqa: E501
    None
):
    session = new_session(speculating=False)
    session.begin()
    opened(session)
    (_, opening), (_, refeed), (_, verify) = commands(
        verdict(session, (), 4, joining=Joining(READS))
    )
    assert isinstance(opening, Open)
    assert isinstance(refeed, Refeed)
    assert isinstance(verify, Verify)
    assert (refeed.round, refeed.start, refeed.prefix, refeed.features) == (2, 0, 4, READS)
    log = (9, 8, 3, 4, 5)
    ((_, feed),) = commands(
        session.prefilled(
            Prefilled(epoch=1, session=1, round=2, start=0, features=features(log, 0, 2, READS))
        )
    )
    assert isinstance(feed, Feed)
    assert (feed.round, feed.start) == (1, 0)
    with pytest.raises(ProtocolError):
        session.prefilled(
            Prefilled(epoch=1, session=1, round=2, start=2, features=features(log, 2, 4, READS))
        )
    session.prefilled(
        Prefilled(epoch=1, session=1, round=2, start=2, features=features(log, 2, 3, READS))
    )
    assert session.refed(Refed(epoch=1, session=1, round=2)) == []
    ((_, order),) = commands(verdict(session, (), 5, features=features(log, 3, 4, READS)))
    assert isinstance(order, Draft)
    assert (order.bonus, order.more, order.features) == (4, (5,), features(log, 3, 4, READS))


def test_features_that_do_not_cover_the_log_are_not_taken_for_all_of_them() -> None:
    session = new_session(speculating=False)
    session.begin()
    opened(session)
    verdict(session, (), 4, joining=Joining(READS))
    session.prefilled(
        Prefilled(epoch=1, session=1, round=2, start=0, features=features((9, 8, 3), 0, 2, READS))
    )
    with pytest.raises(ProtocolError, match="features of 2 tokens, but 3 were requested"):
        session.refed(Refed(epoch=1, session=1, round=2))


def test_another_target_shows_what_the_lost_one_had_not() -> None:
    log = (9, 8, 3, 4, 5)
    session = new_session(speculating=False)
    session.begin()
    opened(session)
    verdict(session, (), 4, joining=Joining(READS))
    session.prefilled(
        Prefilled(epoch=1, session=1, round=2, start=0, features=features(log, 0, 1, READS))
    )
    session.target_lost()
    ((_, command),) = commands(session.recovered("another"))
    assert isinstance(command, Open)
    assert (command.prompt, command.round, command.features, command.features_from) == (
        log[:4],
        2,
        READS,
        1,
    )
    ((_, feed),) = commands(
        session.prefilled(
            Prefilled(epoch=2, session=1, round=2, start=1, features=features(log, 1, 4, READS))
        )
    )
    assert isinstance(feed, Feed)
    assert feed.features == features(log, 1, 3, READS), "the root's row belongs to the verdict"
    assert session.complete
    ((_, order),) = commands(opened(session, 5, round=2))
    assert isinstance(order, Draft)
    assert (order.bonus, order.more, order.features) == (4, (5,), features(log, 3, 4, READS))


def test_what_was_told_of_the_prompt_is_not_told_again_by_another_target() -> None:
    session = new_session(logprobs=0, scored=True, prompt=(9, 8, 7, 6))
    session.begin()
    said = [TokenLogprobs(logprob=-float(place)) for place in range(4)]
    assert session.scored(Scored(epoch=1, session=1, start=1, logprobs=(said[1], said[2]))) == [
        Score(1, (said[1], said[2]))
    ]
    assert not session.unheard
    session.target_lost()
    ((_, command),) = commands(session.recovered("another"))
    assert isinstance(command, Open)
    assert command.scored
    assert session.scored(Scored(epoch=2, session=1, start=1, logprobs=(said[1],))) == []
    assert session.scored(Scored(epoch=2, session=1, start=2, logprobs=(said[2], said[3]))) == [
        Score(3, (said[3],))
    ]


def test_a_reply_names_the_targets_that_differ_in_the_order_in_which_they_served() -> None:
    session = new_session(speculating=False)
    session.fingerprint = "one"
    session.begin()
    opened(session)
    for served, fingerprint in enumerate(("one", "two", "two", "one")):
        session.target_lost()
        session.recovered(fingerprint)
        opened(session, 4, round=1 + served)
    session.target_lost()
    session.recovered("three")
    result = session.result(30, "cancelled")
    assert (result.fingerprint, result.fingerprints, result.moves) == (
        "one",
        ("one", "two", "one"),
        4,
    ), "the third has not said anything"


@pytest.mark.parametrize(
    ("max_tokens", "bonus", "committed"), [(9, 8, None), (9, END, None), (3, 8, 2)]
)
def test_the_record_of_the_last_round_says_how_much_of_its_path_is_in_the_reply(
    max_tokens: int, bonus: int, committed: int | None
) -> None:
    session = new_session(max_tokens=max_tokens)
    session.begin()
    opened(session)
    drafted(session, (4, 5, 6), (-1, 0, 1))
    verdict(session, (0, 1, 2), bonus)
    assert session.ended is not None
    record = session.ended.record()
    assert (record.committed, record.brought, len(session.tokens)) == (
        committed,
        committed or 4,
        1 + (committed or 4),
    )


def test_a_stop_within_the_path_ends_what_its_round_brought() -> None:
    session = new_session()
    session.begin()
    opened(session)
    drafted(session, (4, END, 6), (-1, 0, 1))
    verdict(session, (0, 1, 2), 8)
    assert session.ended is not None
    assert session.ended.record().brought == 2 == len(session.tokens) - 1


# -- replies spelt in bytes ------------------------------------------------------------------------


def spelt_in_bytes(stop: tuple[str, ...]) -> Session:
    """A session over a vocabulary as Llama 2 has it: 3 is a newline, 4 the first byte of a longer
    character, 5 a letter."""
    words = {"<end>": END, "\u2581a": 1, "\u2581b": 2, "<0x0A>": 3, "<0xF0>": 4, "<0x41>": 5}
    tokenizer = Tokenizer(models.WordLevel(words, "<end>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    session = new_session(speculating=False, stop=stop)
    session.reply.detokenizer = detokenizer_of(tokenizer)
    session.begin()
    return session


def shown(actions: Sequence[object]) -> str:
    return "".join(action.text for action in actions if isinstance(action, Emit))


@pytest.mark.parametrize("stop", ["\n", "a\n", "\nA"])
def test_a_stop_string_spelt_in_bytes_ends_the_reply_with_the_token_that_completes_it(
    stop: str,
) -> None:
    session = spelt_in_bytes((stop,))
    said = shown(opened(session, bonus=1))
    for token in (3, 5, 1):
        if session.state is not State.DONE:
            said += shown(verdict(session, (), token))
    text = "a\nA a"
    assert session.state is State.DONE
    assert said == text[: text.index(stop)]
    assert len(session.tokens) == text.index(stop) + len(stop)


def test_a_stop_string_does_not_match_across_a_broken_character() -> None:
    session = spelt_in_bytes(("\nA",))
    said = shown(opened(session, bonus=1)) + "".join(
        shown(verdict(session, (), token)) for token in (3, 4, 5, 2)
    )
    assert session.state is State.VERIFYING
    assert said == "a\n\ufffdA b"


# -- features that the target holds ----------------------------------------------------------------

LOG = (9, 8, 3, 4, 5, 6, 7)


def reading() -> Session:
    """A session whose draft reads features, which have come for its prompt, in its second round."""
    session = new_session()
    assert session.draft_sync is not None
    session.draft_sync.reads = READS
    session.begin()
    session.prefilled(
        Prefilled(epoch=1, session=1, round=0, start=0, features=features(LOG, 0, 2, READS))
    )
    opened(session, plan=None)
    return session


def chosen(session: Session, bonus: int, *, held: int = 0, rows: int = 0) -> None:
    """The target chooses one token more, and sends so many rows of features."""
    item = VerifiedItem(
        session=1, round=session.round, accepted=(), bonus=bonus, margins=(0.1,), held=held
    )
    at = session.length
    sent = features(LOG, at - rows, at, READS) if rows else None
    session.verified(item, sent)


def holding() -> Session:
    """A session in its fourth round, whose target holds the features of the last two."""
    session = reading()
    chosen(session, 4, rows=1)
    for bonus in (5, 6):
        (ask,) = session.next_round(None, None, hold=True)
        assert isinstance(ask, Ask)
        assert isinstance(ask.command, Verify)
        assert ask.command.items[0].hold
        chosen(session, bonus)
    assert session.holding
    return session


def test_held_features_come_with_the_next_verdict_that_is_not_held() -> None:
    session = holding()
    row = READS.row * 2
    assert session.held_bytes == 3 * row
    session.next_round(None)
    chosen(session, 7, held=2, rows=3)
    assert not session.holding
    assert session.held_bytes == 4 * row
    (ask,) = session.next_round(Plan())
    assert isinstance(ask, Ask)
    assert isinstance(ask.command, Draft)
    assert (ask.command.more, ask.command.features) == ((4, 5, 6, 7), features(LOG, 2, 6, READS))


def test_features_that_lack_held_rows_are_not_what_the_draft_reads() -> None:
    session = holding()
    session.next_round(None)
    item = VerifiedItem(session=1, round=session.round, accepted=(), bonus=7, margins=(0.1,))
    for sent in features(LOG, 5, 6, READS), None:
        with pytest.raises(UnreadableFeatures):
            session.verified(item, sent)
    assert session.state is State.VERIFYING


def test_features_that_were_held_for_a_lost_draft_do_not_concern_the_next() -> None:
    session = holding()
    session.draft_lost()
    session.next_round(None, Joining())
    item = VerifiedItem(
        session=1, round=session.round, accepted=(), bonus=7, margins=(0.1,), held=2
    )
    session.verified(item, features(LOG, 3, 6, READS))
    assert session.held_bytes == 0
    (ask,) = session.next_round(Plan())
    assert isinstance(ask, Ask)
    assert isinstance(ask.command, Draft)
    assert ask.command.features is None


def test_another_target_shows_what_the_lost_one_held() -> None:
    session = holding()
    session.next_round(None)
    session.target_lost()
    (ask,) = session.recovered("another")
    assert isinstance(ask, Ask)
    assert isinstance(ask.command, Open)
    assert (ask.command.prompt, ask.command.features_from) == (LOG[:6], 3)
    for start, stop in ((3, 5), (5, 6)):
        session.prefilled(
            Prefilled(
                epoch=2,
                session=1,
                round=session.round,
                start=start,
                features=features(LOG, start, stop, READS),
            )
        )
    assert session.complete
    (ask,) = (a for a in opened(session, 7, round=session.round) if isinstance(a, Ask))
    assert isinstance(ask.command, Draft)
    assert ask.command.features == features(LOG, 2, 6, READS)
