"""The draft worker's rules: which commands count, what they are answered with, and what a worker
says of itself."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from dovetail.protocol.arrays import Array
from dovetail.protocol.codec import COMMAND, EVENT, encode
from dovetail.protocol.errors import CheckpointError, RequestError, SettingsError
from dovetail.protocol.messages import (
    Close,
    Closed,
    Draft,
    Drafted,
    Drain,
    Event,
    Fed,
    Feed,
    Open,
    Opened,
)
from dovetail.protocol.settings import DraftSettings, Sampling, TreeSettings
from dovetail.protocol.spans import NAMES, Spans
from dovetail.protocol.vocabulary import TokenTable
from dovetail.workers import draft as draft_worker
from dovetail.workers import kernels
from dovetail.workers.devices.memory import is_out_of_memory
from dovetail.workers.draft import DraftWorker, Identity
from dovetail.workers.drafters.model import Drafter, DraftSession
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.models.checkpoints.gguf.view import resolved
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.sessions.wire import to_array
from dovetail.workers.speculation.prices import PassTimes
from support.gguf_files import write_gguf
from support.heads import write_head
from support.models import CONTEXT, VOCABULARY

EPOCH = 7
PROMPT = (3, 1, 4)
TREE = TreeSettings(policy="dynamic", gamma=8, depth=3, width=3)


def new_worker(model: LanguageModel) -> DraftWorker[DraftSession]:
    spans = Spans()
    worker = DraftWorker(
        Drafter(model, spans, ahead=True), Identity("tiny", "tiny", "cpu", 1, model.context), spans
    )
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
    content = {
        "epoch": 1,
        "session": 5,
        "round": round_,
        "prefix": prefix,
        "accepted": (),
        "bonus": 2,
        "max_nodes": 8,
        "max_depth": 3,
        "max_width": 3,
    }
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
    assert [name for name, _, _ in drafted.spans] == [
        "root",
        *["level"] * (len(drafted.spans) - 2),
        "draft",
    ]
    assert isinstance(only(worker.handle(Close(epoch=1, session=5))), Closed)
    assert worker.sessions == 0


def test_the_verdict_moves_the_root_and_a_known_bonus_is_a_hit(
    worker: DraftWorker[DraftSession],
) -> None:
    worker.handle(open_())
    first = only(worker.handle(draft(1, prefix=4)))
    assert isinstance(first, Drafted)
    path = next(first.tree.path(n) for n in range(len(first.tree)) if len(first.tree.path(n)) == 2)
    second = only(worker.handle(draft(2, prefix=6, accepted=path[:1], bonus=first.tokens[path[1]])))
    assert isinstance(second, Drafted)
    assert second.hit


def test_a_command_of_a_round_that_is_done_is_counted_and_changes_nothing(
    worker: DraftWorker[DraftSession],
) -> None:
    worker.handle(open_())
    worker.handle(draft(1, prefix=4))
    assert [
        *worker.handle(draft(1, prefix=4)),
        *worker.handle(draft(0, prefix=3)),
        *worker.handle(open_()),
    ] == []
    assert (worker.stale, worker.sessions) == (3, 1)
    assert isinstance(only(worker.handle(draft(2, prefix=5))), Drafted)


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (draft(3, prefix=5), "prefix", "got round 3 after round 1"),
        (draft(2, prefix=9), "prefix", "assumes 9 tokens, but the log here has 5"),
        (draft(2, prefix=7, accepted=(0, 0)), "prefix", r"nodes \(0, 0\) are not a path"),
        (draft(2, prefix=5, bonus=VOCABULARY), "vocabulary", f"token {VOCABULARY}"),
        (draft(2, prefix=5, session=6), "session", "session 6 is not open"),
        (open_(session=6, prompt=(VOCABULARY,)), "vocabulary", f"token {VOCABULARY}"),
        (Drain(epoch=1), "role", "does not take 'drain'"),
    ],
)
def test_a_command_that_cannot_be_done_is_refused_and_changes_nothing(
    worker: DraftWorker[DraftSession], command: Any, code: str, words: str
) -> None:
    worker.handle(open_())
    worker.handle(draft(1, prefix=4))
    with pytest.raises(RequestError, match=words) as refusal:
        worker.handle(COMMAND.decode(encode(command)))
    assert refusal.value.code == code
    assert (worker.stale, worker.sessions) == (0, 1)
    assert isinstance(only(worker.handle(draft(2, prefix=5))), Drafted)


def test_a_session_whose_cache_does_not_fit_is_not_kept(
    worker: DraftWorker[DraftSession], llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.handle(open_())
    with monkeypatch.context() as patch:
        patch.setattr(
            llama, "new_cache", lambda capacity, real=llama.new_cache: real(capacity * 10**9)
        )
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


def test_more_sessions_than_a_worker_holds_are_refused(
    worker: DraftWorker[DraftSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_worker, "MAX_OPEN", 8)
    for session in range(8):
        worker.handle(open_(session=session))
    with pytest.raises(RequestError, match="8 sessions") as refusal:
        worker.handle(open_(session=8))
    assert refusal.value.code == "capacity"


def test_a_prompt_beyond_the_drafts_context_is_opened_and_said_on_stderr(
    worker: DraftWorker[DraftSession], capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = (2,) * (CONTEXT + 4)
    assert isinstance(only(worker.handle(open_(prompt=prompt, capacity=200))), Opened)
    assert (
        capsys.readouterr().err
        == f"tiny: a prompt of {CONTEXT + 4} tokens exceeds the draft's context of {CONTEXT}: "
        "nothing is drafted for it\n"
    )
    drafted = only(worker.handle(draft(1, prefix=CONTEXT + 5)))
    assert isinstance(drafted, Drafted)
    assert drafted.tokens == ()


def test_idle_time_computes_noise_until_nothing_is_left_to_do(
    worker: DraftWorker[DraftSession],
) -> None:
    worker.handle(open_())
    assert not worker.idle()
    worker.handle(open_(session=6, sampling=Sampling(temperature=1.0)))
    worker._held[6].session.ranking.native = False  # the kernels need none of it ahead
    assert [worker.idle() for _ in range(8)] == [True] * 7 + [False]


# -- rounds without it, and time without an order --------------------------------------------------


def test_rounds_in_which_nothing_was_drafted_come_along_and_may_be_missing(
    worker: DraftWorker[DraftSession], llama: LanguageModel
) -> None:
    worker.handle(open_())
    worker.handle(draft(1, prefix=4))
    late = only(worker.handle(draft(4, prefix=8, bonus=7, more=(8, 9, 10))))
    other = new_worker(llama)
    other.handle(open_(prompt=(*PROMPT, 2, 7, 8, 9)))
    expected = only(other.handle(draft(1, prefix=8, bonus=10)))
    assert isinstance(late, Drafted)
    assert isinstance(expected, Drafted)
    assert (late.round, late.tokens, late.parents) == (4, expected.tokens, expected.parents)
    assert worker.handle(draft(3, prefix=9)) == []
    assert worker.stale == 1
    assert isinstance(only(worker.handle(draft(5, prefix=9))), Drafted)


@pytest.mark.parametrize(("command", "code"), [
    (draft(5, prefix=8, more=(7, 8)), "prefix"),
    (draft(4, prefix=7, more=(7, 8, 9)), "prefix"),
    (draft(3, prefix=6, more=(VOCABULARY,)), "vocabulary"),
])  # fmt: skip
def test_more_tokens_that_do_not_fit_are_refused_and_change_nothing(
    worker: DraftWorker[DraftSession], command: Draft, code: str
) -> None:
    worker.handle(open_())
    worker.handle(draft(1, prefix=4))
    with pytest.raises(RequestError) as refusal:
        worker.handle(command)
    assert refusal.value.code == code
    assert isinstance(only(worker.handle(draft(2, prefix=5))), Drafted)


@pytest.mark.parametrize(
    ("many_rows_ns", "expected"), [(100, [[5, 7, 8]] * 2), (900, [[5], [7], [8]] * 2)]
)
def test_idle_time_grows_the_trees_of_those_that_ordered_it_together_or_each_in_turn(
    worker: DraftWorker[DraftSession],
    monkeypatch: pytest.MonkeyPatch,
    many_rows_ns: int,
    expected: list[list[int]],
) -> None:
    """Together, if a pass over the rows of all takes hardly longer."""
    for number, ahead in ((5, True), (6, False), (7, True), (8, True)):
        worker.handle(open_(session=number))
        worker.handle(draft(1, prefix=4, session=number, ahead=ahead))
    times = PassTimes()
    for rows in (1, 2, 4, 8, 16):
        times.add(rows, 100 if rows <= 4 else many_rows_ns)
    monkeypatch.setattr(times, "add", lambda rows, duration_ns: None)
    monkeypatch.setattr(worker.engine._ahead, "_times", times)  # type: ignore[attr-defined]
    monkeypatch.setattr(worker.engine, "_clock", lambda: 0)
    before = {number: len(worker.session(number).tree) for number in (5, 6, 7, 8)}
    turns = []
    for _ in expected:
        assert worker.idle()
        after = {number: len(worker.session(number).tree) for number in (5, 6, 7, 8)}
        turns.append([number for number in after if after[number] != before[number]])
        before = after
    assert turns == expected
    while worker.idle():
        pass
    assert len(worker.session(6).tree) == before[6]


def test_what_grew_ahead_and_was_wasted_is_told_and_adds_up(
    worker: DraftWorker[DraftSession],
) -> None:
    worker.handle(open_())
    first = only(worker.handle(draft(1, prefix=4, ahead=True)))
    assert isinstance(first, Drafted)
    assert (first.ahead, first.wasted, first.hit) == (0, 0, False)
    for _ in range(4):
        worker.idle()
    pool = len(worker.session(5).tree)
    assert pool > first.grown
    tree = worker.session(5).tree
    second = only(
        worker.handle(
            draft(
                2, prefix=6, accepted=(0,), bonus=int(tree.tokens[tree.parents == 0][0]), ahead=True
            )
        )
    )
    assert isinstance(second, Drafted)
    survivors = len(worker.session(5).tree) - second.grown
    assert (second.hit, second.ahead) == (True, pool - first.grown)
    assert 0 < second.wasted <= pool - survivors
    assert len(second.passes) > 1
    assert all(rows >= 1 and duration_ns > 0 for rows, duration_ns in second.passes)
    assert [name for name, _, _ in second.spans][-1] == "draft"
    third = only(
        worker.handle(
            draft(3, prefix=7, bonus=next(v for v in range(48) if tree.child(-1, v) is None))
        )
    )
    assert isinstance(third, Drafted)
    assert (third.hit, third.ahead) == (False, 0)


def test_a_hit_with_enough_below_it_leaves_without_a_pass_where_none_pays(
    worker: DraftWorker[DraftSession],
) -> None:
    worker.handle(open_())
    worker.handle(draft(1, prefix=4, ahead=True))
    while worker.idle():
        pass
    drafted = only(
        worker.handle(
            draft(2, prefix=5, bonus=int(worker.session(5).tree.tokens[0]), rate=1e8, ahead=True)
        )
    )
    assert isinstance(drafted, Drafted)
    assert drafted.hit
    assert drafted.grown == 0
    assert len(drafted.tokens) == 8
    assert [name for name, _, _ in drafted.spans] == ["draft"]


def test_a_draft_on_a_cpu_says_on_which_cores_it_computes(
    worker: DraftWorker[DraftSession],
) -> None:
    assert worker.hello(EPOCH).cores == tuple(sorted(os.sched_getaffinity(0)))


def test_a_worker_introduces_itself_with_what_its_folder_holds(llama_folder: Path) -> None:
    worker = open_draft_worker(
        DraftSettings(model=str(llama_folder), device="cpu"), name="draft-1", threads=1, target=""
    )
    hello = worker.hello(11)
    assert (hello.epoch, hello.roles, hello.name, hello.model, hello.device) == (
        11,
        ("draft",),
        "draft-1",
        str(llama_folder),
        "cpu",
    )
    assert hello.fingerprint is None
    assert hello.limits is not None
    assert hello.limits.context == CONTEXT
    assert hello.vocabulary is not None
    assert hello.vocabulary.size == VOCABULARY
    assert hello.tokenizer is None
    assert hello.table is not None
    tokenizer = (llama_folder / "tokenizer.json").read_bytes()
    assert hello.table.data == TokenTable.read(tokenizer).packed


def test_a_draft_without_a_common_token_is_refused_by_its_worker(
    llama_folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(llama_folder, other)
    content = json.loads((other / "tokenizer.json").read_bytes())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {f"other {t}": i for t, i in vocabulary.items()}
    (other / "tokenizer.json").write_text(json.dumps(content))
    file = tmp_path / "target.gguf"
    write_gguf(llama_folder, file, lambda *_: Type.F32)
    for target, name in ((str(llama_folder),) * 2, (resolved(str(file)), str(file))):
        with pytest.raises(CheckpointError, match=f"no token in common with the target {name}; "):
            open_draft_worker(
                DraftSettings(model=str(other), kind="small", device="cpu"),
                name="draft",
                threads=1,
                target=target,
            )


def test_a_draft_that_looks_up_obeys_the_same_rules() -> None:
    worker = open_draft_worker(DraftSettings(kind="ngram"), name="draft", threads=1, target="")
    hello = worker.hello(EPOCH)
    assert (hello.roles, hello.model, hello.device, hello.vocabulary, hello.tokenizer) == (
        ("draft",),
        "ngram",
        "cpu",
        None,
        None,
    )
    assert isinstance(only(worker.handle(open_(prompt=(3, 1, 4, 1, 5, 3, 1)))), Opened)
    drafted = only(worker.handle(draft(1, prefix=8, bonus=4)))
    assert isinstance(drafted, Drafted)
    assert drafted.tokens[:2] == (1, 5)
    assert [name for name, _, _ in drafted.spans] == ["draft"]
    assert worker.handle(draft(1, prefix=8, bonus=4)) == []
    with pytest.raises(RequestError, match=r"nodes \(1,\) are not a path"):
        worker.handle(draft(2, prefix=10, accepted=(1,)))
    assert isinstance(only(worker.handle(draft(2, prefix=10, accepted=(0,), bonus=5))), Drafted)
    with pytest.raises(RequestError, match="beyond the target's vocabulary"):
        worker.handle(open_(session=6, prompt=(VOCABULARY,)))
    assert not worker.idle()
    assert isinstance(only(worker.handle(Close(epoch=1, session=5))), Closed)
    assert worker.sessions == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (DraftSettings(), "draft.model is empty"),
        (DraftSettings(kind="none", model="x"), "draft.kind is 'none'"),
    ],
)
def test_settings_without_a_draft_are_refused(settings: DraftSettings, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        open_draft_worker(settings, name="draft", threads=1, target="")


# -- heads -----------------------------------------------------------------------------------------


def head_worker(folder: Path, target: Path, **settings: Any) -> DraftWorker[Any]:
    worker = open_draft_worker(
        DraftSettings(model=str(folder), device="cpu", **settings),
        name="draft",
        threads=1,
        target=str(target),
    )
    worker.hello(EPOCH)
    return worker


def features(count: int, width: int = 64) -> Array:
    return to_array(
        torch.randn(count, width, generator=torch.Generator().manual_seed(count)).half()
    )


def feed(start: int, count: int, *, session: int = 5, width: int = 64) -> Feed:
    return Feed(epoch=1, session=session, start=start, features=features(count, width))


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dovetail", "jakiro", "jakiro-star"])
def test_a_head_is_recognised_fed_and_drafts(kind: str, tmp_path: Path, llama_folder: Path) -> None:
    worker = head_worker(write_head(tmp_path, kind), llama_folder)
    hello = worker.hello(EPOCH)
    assert hello.reads is not None
    assert (hello.roles, hello.model, hello.vocabulary, hello.tokenizer) == (
        ("draft",),
        str(tmp_path),
        None,
        None,
    )
    assert (hello.reads.width, hello.reads.dtype, hello.reads.vocabulary_size) == (
        64,
        "float16",
        VOCABULARY,
    )
    row = hello.reads.row
    assert row == (192 if kind == "eagle3" else 64)
    assert isinstance(only(worker.handle(open_())), Opened)
    fed = only(worker.handle(feed(0, 2, width=row)))
    assert isinstance(fed, Fed)
    assert (fed.session, fed.start, [name for name, _, _ in fed.spans]) == (5, 0, ["feed"])
    assert isinstance(only(worker.handle(feed(2, 1, width=row))), Fed)
    first = only(worker.handle(draft(1, prefix=4)))
    assert isinstance(first, Drafted)
    first.tree.check(VOCABULARY)
    assert next(name for name, _, _ in first.spans) == "root"
    path = next(first.tree.path(n) for n in range(len(first.tree)) if len(first.tree.path(n)) == 2)
    second = only(worker.handle(draft(2, prefix=7, accepted=path, features=features(3, row))))
    assert isinstance(second, Drafted)
    assert 0 < len(second.tokens) <= 8


def test_features_that_cannot_be_are_refused_and_change_nothing(
    tmp_path: Path, llama_folder: Path
) -> None:
    worker = head_worker(write_head(tmp_path, "eagle"), llama_folder)
    worker.handle(open_())
    wrong: list[tuple[Any, str, str]] = [
        (draft(1, prefix=4), "prefix", "features of 0 positions have arrived"),
        (feed(1, 2), "prefix", "features from position 1 on"),
        (feed(0, 4), "prefix", "for a log of 3 tokens"),
        (feed(0, 3, width=63), "protocol", "reads float16 in rows of 64"),
        (feed(0, 3, session=6), "session", "session 6 is not open"),
    ]
    for command, code, words in wrong:
        with pytest.raises(RequestError, match=words) as refusal:
            worker.handle(COMMAND.decode(encode(command)))
        assert refusal.value.code == code
    only(worker.handle(feed(0, 3)))
    assert worker.handle(feed(0, 3)) == []
    assert worker.stale == 1
    only(worker.handle(draft(1, prefix=4)))
    for command in (
        draft(2, prefix=5),
        draft(2, prefix=5, features=features(2)),
        draft(2, prefix=6, accepted=(0,), features=features(1)),
        draft(2, prefix=7, accepted=(0,), more=(4,), features=features(2)),
    ):
        with pytest.raises(RequestError, match="positions have arrived, but this round needs"):
            worker.handle(command)
    assert isinstance(
        only(worker.handle(draft(2, prefix=6, accepted=(0,), features=features(2)))), Drafted
    )
    assert isinstance(
        only(worker.handle(draft(4, prefix=9, more=(4, 5), features=features(3)))), Drafted
    )


def test_a_draft_that_reads_nothing_refuses_features(worker: DraftWorker[DraftSession]) -> None:
    worker.handle(open_())
    with pytest.raises(RequestError, match="reads no features") as refusal:
        worker.handle(feed(0, 3))
    assert refusal.value.code == "role"
    with pytest.raises(RequestError, match="features came, but this draft reads none"):
        worker.handle(draft(1, prefix=4, features=features(1)))
    assert isinstance(only(worker.handle(draft(1, prefix=4))), Drafted)


def test_a_session_whose_feed_fails_is_forgotten(
    tmp_path: Path, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise MemoryError

    worker = head_worker(write_head(tmp_path, "eagle"), llama_folder)
    worker.handle(open_())
    monkeypatch.setattr(worker.engine.head, "forward", fail)
    with pytest.raises(MemoryError):
        worker.handle(feed(0, 3))
    assert worker.sessions == 0


@pytest.mark.parametrize(("said", "folder_kind", "words"), [
    ("small", "eagle", "is a head of kind 'eagle'"),
    ("eagle3", "dovetail", "is a head of kind 'dovetail'"),
    ("dovetail", "", "is an ordinary language model"),
])  # fmt: skip
def test_a_kind_that_contradicts_the_folder_is_refused(
    said: str, folder_kind: str, words: str, tmp_path: Path, llama_folder: Path
) -> None:
    folder = write_head(tmp_path, folder_kind) if folder_kind else llama_folder
    with pytest.raises(SettingsError, match=f"^draft.kind = '{said}', but {folder} {words}"):
        head_worker(folder, llama_folder, kind=said)


def test_heads_and_smaller_models_can_have_four_bits(llama_folder: Path, tmp_path: Path) -> None:
    head = head_worker(write_head(tmp_path, "eagle"), llama_folder, weights="int4")
    assert head.engine.head.weights == "int4"
    if kernels.available():
        small = head_worker(llama_folder, llama_folder, weights="int4")
        assert small.engine.model.weights == "int4-int8"


def test_the_contrast_output_can_be_left_alone_and_not_be_wished_for_where_there_is_none(
    tmp_path: Path, llama_folder: Path
) -> None:
    folder = write_head(tmp_path / "a", "jakiro")
    levels = []
    for contrast in ("auto", True, False):
        worker = head_worker(folder, llama_folder, contrast=contrast)
        worker.handle(open_())
        worker.handle(feed(0, 3))
        drafted = only(worker.handle(draft(1, prefix=4)))
        assert isinstance(drafted, Drafted)
        levels.append(drafted.tokens)
    assert levels[0] == levels[1] != levels[2]
    with pytest.raises(
        SettingsError, match=r"draft.contrast = true, but the eagle head .* has no contrast output"
    ):
        head_worker(write_head(tmp_path / "b", "eagle"), llama_folder, contrast=True)


def test_a_head_that_does_not_fit_its_target_is_refused_with_the_shapes_and_what_to_do(
    tmp_path: Path, llama_folder: Path
) -> None:
    folder = write_head(tmp_path, "eagle", hidden=32, target_width=32, head_dim=8)
    with pytest.raises(CheckpointError, match=r"hidden width 32.*hidden width 64"):
        head_worker(folder, llama_folder)


@pytest.mark.parametrize("fine", [False, True])
def test_growth_ahead_is_told_with_the_session_and_the_round_that_it_was_for(
    llama: LanguageModel, fine: bool
) -> None:
    worker = new_worker(llama)
    worker.spans.fine = fine
    worker.handle(open_())
    first = only(worker.handle(draft(1, prefix=4, ahead=True)))
    assert isinstance(first, Drafted)
    assert first.beside == ()
    began_ns = time.monotonic_ns()
    while worker.idle():
        pass
    ended_ns = time.monotonic_ns()
    second = only(worker.handle(draft(2, prefix=5)))
    assert isinstance(second, Drafted)
    told = [(session, round, name) for session, round, (name, _, _) in second.beside]
    assert set(told) <= {(5, 1, "grow"), (None, None, "prepare")}
    assert told.count((5, 1, "grow")) > fine
    assert all(
        began_ns <= start <= start + duration <= ended_ns
        for _, _, (_, start, duration) in second.beside
    )
    assert ("move" in {name for name, _, _ in second.spans}) == fine
    assert {name for name, _, _ in (*second.spans, *first.spans)} <= set(NAMES)
