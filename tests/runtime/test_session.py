"""One request's life as values: events in, lists of actions out."""

import pytest
from tokenizers import Tokenizer

from dovetail.protocol.errors import ProtocolError, StaleError, TreeError
from dovetail.protocol.messages import Close, Draft, Drafted, Open, Opened, VerifiedItem, Verify, VerifyItem
from dovetail.protocol.settings import Sampling, SamplingSettings, TreeSettings
from dovetail.runtime.metrics import Accounts
from dovetail.runtime.session import Ask, Emit, Finish, Request, Session, State
from dovetail.runtime.text import Detokenizer
from support.scripted import END, VOCABULARY, tokenizer_bytes


def new_session(
    *, speculating: bool = True, max_tokens: int = 20, stop: tuple[str, ...] = (), tree: TreeSettings | None = None, sampling: Sampling | None = None
) -> Session:
    request = Request(
        prompt=(9, 8),
        key=bytes(16),
        seed=1,
        sampling=sampling or Sampling(),
        max_tokens=max_tokens,
        tree=tree or TreeSettings(policy="dynamic", gamma=4, depth=3, width=2),
        end=(END,),
        vocabulary_size=VOCABULARY,
        stop=stop,
    )
    return Session(
        number=1, epoch=5, request=request, detokenizer=Detokenizer(Tokenizer.from_buffer(tokenizer_bytes())), speculating=speculating, accounts=Accounts(0)
    )


def opened(session: Session, bonus: int = 3) -> list[object]:
    return list(session.opened(Opened(epoch=1, session=1, bonus=bonus, margin=0.5), 10))


def drafted(session: Session, tokens: tuple[int, ...], parents: tuple[int, ...]) -> list[object]:
    event = Drafted(epoch=1, session=1, round=session.round, tokens=tokens, parents=parents, scores=(0.0,) * len(tokens), grown=len(tokens), hit=False)
    return list(session.drafted(event))


def verdict(session: Session, accepted: tuple[int, ...], bonus: int) -> list[object]:
    return list(session.verified(VerifiedItem(session=1, round=session.round, accepted=accepted, bonus=bonus, margins=(0.1,) * (len(accepted) + 1))))


def test_begin_opens_both_workers_and_only_the_target_without_a_draft() -> None:
    assert [(a.role, type(a.command)) for a in new_session().begin() if isinstance(a, Ask)] == [("target", Open), ("draft", Open)]
    assert [a.role for a in new_session(speculating=False).begin() if isinstance(a, Ask)] == ["target"]


def test_workers_are_told_every_processor_and_what_ends_the_reply() -> None:
    asked = SamplingSettings(temperature=0.5, top_k=3, repetition_penalty=1.2, presence_penalty=0.1, logit_bias=((4, 1.0),), min_tokens=3, max_tokens=9)
    for ask in new_session(sampling=asked).begin():
        assert isinstance(ask, Ask)
        assert isinstance(ask.command, Open)
        assert ask.command.end == (END,)
        assert type(ask.command.sampling) is Sampling
        assert ask.command.sampling.model_dump() == {name: getattr(asked, name) for name in Sampling.model_fields}


def test_a_round_is_draft_then_verify_then_commit() -> None:
    session = new_session()
    session.begin()
    emit, ask = opened(session)
    assert emit == Emit((3,), 0, "w3")
    assert isinstance(ask, Ask)
    assert isinstance(ask.command, Draft)
    assert (ask.command.round, ask.command.prefix, ask.command.accepted, ask.command.bonus) == (1, 3, (), 3)
    (ask,) = drafted(session, (4, 5, 6), (-1, 0, -1))
    assert isinstance(ask, Ask)
    assert ask.command == Verify(epoch=5, items=(VerifyItem(session=1, round=1, prefix=3, tokens=(4, 5, 6), parents=(-1, 0, -1)),))
    emit, ask = verdict(session, (0, 1), 7)
    assert emit == Emit((4, 5, 7), 2, " w4 w5 w7")
    assert isinstance(ask, Ask)
    assert isinstance(ask.command, Draft)
    assert (ask.command.round, ask.command.prefix, ask.command.accepted, ask.command.bonus) == (2, 6, (0, 1), 7)
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
    assert emit == Emit((4, END), 2, " w4")
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
        session.verified(VerifiedItem(session=1, round=1, accepted=(0,), bonus=5, margins=(0.1, 0.1)))
    assert session.tokens == [3, 4, 5]


@pytest.mark.parametrize(
    ("tokens", "parents"), [((VOCABULARY,), (-1,)), ((1, 2), (-1, 5)), ((1, 1), (-1, -1)), ((1, 2), (-1,)), ((1, 2, 3, 4, 5), (-1, 0, 1, 2, 3))]
)
def test_a_proposal_that_is_no_tree_or_too_large_is_refused(tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
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
        session.drafted(Drafted(epoch=1, session=1, round=1, tokens=(4, 5), parents=(-1, -1), scores=(-0.5, 1e300), grown=2, hit=False))
    assert session.state is State.DRAFTING


@pytest.mark.parametrize(("accepted", "bonus"), [((1,), 5), ((0, 0), 5), ((7,), 5), ((), VOCABULARY)])
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
