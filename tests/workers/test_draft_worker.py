"""The draft worker's rules: which commands count, what they are answered with, and what a worker says of itself."""

from pathlib import Path
from typing import Any

import pytest

from dovetail.protocol.codec import COMMAND, EVENT, encode
from dovetail.protocol.errors import RequestError, SettingsError
from dovetail.protocol.messages import Close, Closed, Draft, Drafted, Drain, Event, Open, Opened
from dovetail.protocol.settings import DraftSettings, Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.workers.devices import is_out_of_memory
from dovetail.workers.draft import MAX_OPEN, DraftWorker, Identity, open_draft_worker
from dovetail.workers.drafter import Drafter, DraftSession
from dovetail.workers.models.language_model import LanguageModel
from support.models import CONTEXT, VOCABULARY

EPOCH = 7
PROMPT = (3, 1, 4)
TREE = TreeSettings(gamma=8, depth=3, width=3)


def new_worker(model: LanguageModel) -> DraftWorker[DraftSession]:
    spans = Spans()
    worker = DraftWorker(Drafter(model, spans), Identity("tiny", "tiny", "cpu", 1, model.context), spans)
    worker.hello(EPOCH)
    return worker


@pytest.fixture
def worker(llama: LanguageModel) -> DraftWorker[DraftSession]:
    return new_worker(llama)


def open_(**changes: Any) -> Open:
    content = {
        "epoch": 1,
        "session": 5,
        "key": bytes(16),
        "prompt": PROMPT,
        "capacity": 40,
        "vocabulary_size": VOCABULARY,
        "sampling": Sampling(),
        "tree": TREE,
    }
    return Open(**{**content, **changes})


def draft(round_: int, *, prefix: int, **changes: Any) -> Draft:
    content = {"epoch": 1, "session": 5, "round": round_, "prefix": prefix, "accepted": (), "bonus": 2, "max_nodes": 8, "max_depth": 3, "max_width": 3}
    return Draft(**{**content, **changes})


def only(events: Any) -> Event:
    [event] = events
    return EVENT.decode(encode(event))


def test_a_session_is_opened_drafted_for_and_closed(worker: DraftWorker[DraftSession]) -> None:
    opened = only(worker.handle(open_()))
    assert isinstance(opened, Opened)
    assert (opened.epoch, opened.session, opened.bonus) == (EPOCH, 5, None)
    assert [name for name, _, _ in opened.spans] == ["prefill"]
    assert worker.sessions == 1
    drafted = only(worker.handle(draft(1, prefix=4)))
    assert isinstance(drafted, Drafted)
    drafted.tree.check(VOCABULARY)
    assert 0 < len(drafted.tokens) <= 8
    assert list(drafted.scores) == sorted(drafted.scores, reverse=True)
    assert (drafted.epoch, drafted.session, drafted.round, drafted.hit) == (EPOCH, 5, 1, False)
    assert drafted.grown >= len(drafted.tokens)
    assert [name for name, _, _ in drafted.spans] == ["root", *["level"] * (len(drafted.spans) - 2), "draft"]
    assert isinstance(only(worker.handle(Close(epoch=1, session=5))), Closed)
    assert worker.sessions == 0


def test_the_verdict_moves_the_root_and_a_known_bonus_is_a_hit(worker: DraftWorker[DraftSession]) -> None:
    worker.handle(open_())
    first = only(worker.handle(draft(1, prefix=4)))
    assert isinstance(first, Drafted)
    path = next(first.tree.path(n) for n in range(len(first.tree)) if len(first.tree.path(n)) == 2)
    second = only(worker.handle(draft(2, prefix=6, accepted=path[:1], bonus=first.tokens[path[1]])))
    assert isinstance(second, Drafted)
    assert second.hit


def test_a_command_of_a_round_that_is_done_is_counted_and_changes_nothing(worker: DraftWorker[DraftSession]) -> None:
    worker.handle(open_())
    worker.handle(draft(1, prefix=4))
    assert [*worker.handle(draft(1, prefix=4)), *worker.handle(draft(0, prefix=3)), *worker.handle(open_())] == []
    assert (worker.stale, worker.sessions) == (3, 1)
    assert isinstance(only(worker.handle(draft(2, prefix=5))), Drafted)


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (draft(3, prefix=5), "prefix", "round 3 was asked for after round 1"),
        (draft(2, prefix=9), "prefix", "assumes 9 tokens, the log here has 5"),
        (draft(2, prefix=7, accepted=(0, 0)), "prefix", r"nodes \(0, 0\) are no path"),
        (draft(2, prefix=5, bonus=VOCABULARY), "vocabulary", f"token {VOCABULARY}"),
        (draft(2, prefix=5, session=6), "session", "session 6 is not open"),
        (open_(session=6, prompt=(VOCABULARY,)), "vocabulary", f"token {VOCABULARY}"),
        (Drain(epoch=1), "role", "does not do 'drain'"),
    ],
)
def test_a_command_that_cannot_be_done_is_refused_and_changes_nothing(worker: DraftWorker[DraftSession], command: Any, code: str, words: str) -> None:
    worker.handle(open_())
    worker.handle(draft(1, prefix=4))
    with pytest.raises(RequestError, match=words) as refusal:
        worker.handle(COMMAND.decode(encode(command)))
    assert refusal.value.code == code
    assert (worker.stale, worker.sessions) == (0, 1)
    assert isinstance(only(worker.handle(draft(2, prefix=5))), Drafted)


def test_a_session_whose_cache_does_not_fit_is_not_kept(worker: DraftWorker[DraftSession], llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.handle(open_())
    with monkeypatch.context() as patch:
        patch.setattr(llama, "new_cache", lambda capacity, real=llama.new_cache: real(capacity * 10**9))
        with pytest.raises((RuntimeError, MemoryError)) as failure:
            worker.handle(open_(session=6))
    assert is_out_of_memory(failure.value)
    assert worker.sessions == 1
    assert isinstance(only(worker.handle(draft(1, prefix=4))), Drafted)
    assert isinstance(only(worker.handle(open_(session=6))), Opened)


def test_a_session_whose_round_fails_is_forgotten_and_the_others_go_on(
    worker: DraftWorker[DraftSession], llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise MemoryError

    worker.handle(open_())
    worker.handle(open_(session=6))
    with monkeypatch.context() as patch:
        patch.setattr(llama, "forward", fail)
        with pytest.raises(MemoryError):
            worker.handle(draft(1, prefix=4))
    assert worker.sessions == 1
    assert isinstance(only(worker.handle(draft(1, prefix=4, session=6))), Drafted)


def test_an_unknown_session_is_closed_already(worker: DraftWorker[DraftSession]) -> None:
    assert only(worker.handle(Close(epoch=1, session=99))) == Closed(epoch=EPOCH, session=99)


def test_more_sessions_than_a_worker_holds_are_refused(worker: DraftWorker[DraftSession]) -> None:
    for session in range(MAX_OPEN):
        worker.handle(open_(session=session))
    with pytest.raises(RequestError, match="64 sessions") as refusal:
        worker.handle(open_(session=MAX_OPEN))
    assert refusal.value.code == "capacity"


def test_sessions_keep_their_own_logs(worker: DraftWorker[DraftSession]) -> None:
    worker.handle(open_())
    worker.handle(open_(session=6, prompt=(9, 9, 9, 9)))
    for round_ in (1, 2, 3):
        mine, other = only(worker.handle(draft(round_, prefix=3 + round_))), only(worker.handle(draft(round_, prefix=4 + round_, session=6)))
        assert isinstance(mine, Drafted)
        assert isinstance(other, Drafted)
        assert (mine.session, other.session) == (5, 6)


def test_a_prompt_beyond_the_drafts_context_is_opened_and_said_on_stderr(worker: DraftWorker[DraftSession], capsys: pytest.CaptureFixture[str]) -> None:
    prompt = (2,) * (CONTEXT + 4)
    assert isinstance(only(worker.handle(open_(prompt=prompt, capacity=200))), Opened)
    assert capsys.readouterr().err == f"tiny: a prompt of {CONTEXT + 4} tokens exceeds the draft's context of {CONTEXT}: nothing is drafted for it\n"
    drafted = only(worker.handle(draft(1, prefix=CONTEXT + 5)))
    assert isinstance(drafted, Drafted)
    assert drafted.tokens == ()


def test_a_session_whose_logits_are_not_numbers_is_forgotten(worker: DraftWorker[DraftSession], llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.handle(open_())
    monkeypatch.setattr(llama, "forward", lambda *arguments, real=llama.forward, **named: real(*arguments, **named) * float("nan"))
    with pytest.raises(FloatingPointError):
        worker.handle(draft(1, prefix=4))
    with pytest.raises(RequestError, match="not open"):
        worker.handle(draft(1, prefix=4))


def test_idle_time_computes_noise_until_nothing_is_left_to_do(worker: DraftWorker[DraftSession]) -> None:
    worker.handle(open_())
    assert not worker.idle()
    worker.handle(open_(session=6, sampling=Sampling(temperature=1.0)))
    assert [worker.idle() for _ in range(8)] == [True] * 7 + [False]


def test_a_worker_introduces_itself_with_what_its_folder_holds(llama_folder: Path) -> None:
    worker = open_draft_worker(DraftSettings(model=str(llama_folder), device="cpu"), name="draft-1", threads=1)
    hello = worker.hello(11)
    assert (hello.epoch, hello.roles, hello.name, hello.model, hello.device) == (11, ("draft",), "draft-1", str(llama_folder), "cpu")
    assert hello.fingerprint is None
    assert hello.limits is not None
    assert hello.limits.context == CONTEXT
    assert hello.vocabulary is not None
    assert hello.vocabulary.size == VOCABULARY
    assert hello.tokenizer is not None
    assert hello.tokenizer.data == (llama_folder / "tokenizer.json").read_bytes()


def test_a_draft_that_looks_up_obeys_the_same_rules() -> None:
    worker = open_draft_worker(DraftSettings(kind="ngram"), name="draft", threads=1)
    hello = worker.hello(EPOCH)
    assert (hello.roles, hello.model, hello.device, hello.vocabulary, hello.tokenizer) == (("draft",), "ngram", "cpu", None, None)
    assert isinstance(only(worker.handle(open_(prompt=(3, 1, 4, 1, 5, 3, 1)))), Opened)
    drafted = only(worker.handle(draft(1, prefix=8, bonus=4)))
    assert isinstance(drafted, Drafted)
    assert drafted.tokens[:2] == (1, 5)
    assert [name for name, _, _ in drafted.spans] == ["draft"]
    assert worker.handle(draft(1, prefix=8, bonus=4)) == []
    with pytest.raises(RequestError, match=r"nodes \(1,\) are no path"):
        worker.handle(draft(2, prefix=10, accepted=(1,)))
    assert isinstance(only(worker.handle(draft(2, prefix=10, accepted=(0,), bonus=5))), Drafted)
    with pytest.raises(RequestError, match="beyond the target's vocabulary"):
        worker.handle(open_(session=6, prompt=(VOCABULARY,)))
    assert not worker.idle()
    assert isinstance(only(worker.handle(Close(epoch=1, session=5))), Closed)
    assert worker.sessions == 0


@pytest.mark.parametrize(("settings", "words"), [(DraftSettings(), "draft.model is empty"), (DraftSettings(kind="none", model="x"), "draft.kind is 'none'")])
def test_settings_without_a_draft_are_refused(settings: DraftSettings, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        open_draft_worker(settings, name="draft", threads=1)
