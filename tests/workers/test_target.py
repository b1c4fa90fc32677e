"""The parts of a target worker: settings in, a fingerprint out, and the features that it sends to
those who ask for them."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dovetail.protocol.errors import CheckpointError, RequestError
from dovetail.protocol.messages import (
    Close,
    Event,
    Open,
    Opened,
    Prefilled,
    Reads,
    States,
    Verified,
    Verify,
    VerifyItem,
)
from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import Sampling, TargetSettings, TreeSettings
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.serving.open_target import open_target_worker
from dovetail.workers.sessions.features import (
    PREFILL_ROWS,
    HeldFeatures,
)
from dovetail.workers.sessions.wire import to_tensor
from dovetail.workers.target import TargetWorker
from support.cases import everyday
from support.kernels import needs_kernels
from support.models import VOCABULARY, reference_tokens, tiny_llama


def fingerprint(**settings: str) -> object:
    return open_target_worker(TargetSettings(**settings), name="t", threads=1).hello(1).fingerprint


def test_the_same_settings_give_the_same_fingerprint(llama_folder: Path) -> None:
    assert fingerprint(model=str(llama_folder)) == fingerprint(model=str(llama_folder))


@needs_kernels
@pytest.mark.parametrize(
    ("settings", "cache"),
    [
        ({}, "half"),
        ({"weights": "int8"}, "half"),
        ({"weights": "fp32"}, "fp32"),
        ({"weights": "fp32", "cache": "half"}, "half"),
        ({"cache": "fp32"}, "fp32"),
        ({"backend": "library"}, "fp32"),
    ],
    ids=str,
)
def test_keys_and_values_are_part_of_the_fingerprint_and_in_16_bits_as_weights_are(
    tmp_path: Path, settings: dict[str, str], cache: str
) -> None:
    folder = tiny_llama(tmp_path, dtype=torch.float16)
    worker = open_target_worker(
        TargetSettings(**{"model": str(folder), "weights": "half", **settings}), name="t", threads=1
    )
    print_ = worker.hello(1).fingerprint
    assert print_ is not None
    assert (print_.cache, str(print_).split("/")[-1]) == (cache, cache)
    other = print_.model_copy(update={"cache": "half" if cache == "fp32" else "fp32"})
    assert other != print_
    assert str(other) != str(print_)


def test_keys_and_values_in_16_bits_are_refused_where_the_library_computes(
    llama_folder: Path,
) -> None:
    with pytest.raises(CheckpointError, match=r"target\.cache = 'half' needs the C\+\+ kernels"):
        fingerprint(model=str(llama_folder), backend="library", cache="half")


def test_the_limits_are_those_of_the_model(llama_folder: Path) -> None:
    limits = (
        open_target_worker(TargetSettings(model=str(llama_folder)), name="t", threads=1)
        .hello(1)
        .limits
    )
    assert limits is not None
    assert limits.context == 96


def test_a_target_without_a_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no model is named"):
        fingerprint()


# -- features --------------------------------------------------------------------------------------

LAST = Reads(width=64, dtype="float16", vocabulary_size=VOCABULARY)
TAPS = Reads(taps=(2, 0, 3), width=64, dtype="bfloat16", vocabulary_size=VOCABULARY)
PROMPT = (0, 3, 17, 9, 30)
KINDS: Mapping[int, Reads | None] = {1: None, 2: LAST, 3: TAPS, 4: None, 5: TAPS}
"""The features that each session reads."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("deep"), layers=3, context=400)


@pytest.fixture
def worker(folder: Path) -> TargetWorker:
    worker = open_target_worker(TargetSettings(model=str(folder)), name="t", threads=1)
    worker.hello(1)
    return worker


def opening(session: int, reads: Reads | None, prompt: Sequence[int] = PROMPT) -> Open:
    return Open(
        epoch=1,
        session=session,
        key=session_key(0, 0, prompt),
        prompt=tuple(prompt),
        capacity=len(prompt) + 40,
        vocabulary_size=VOCABULARY,
        sampling=Sampling(),
        tree=TreeSettings(),
        features=reads,
    )


def expected(folder: Path, tokens: Sequence[int], reads: Reads) -> Tensor:
    """transformers' hidden states, side by side."""
    model, before = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        list[Tensor](),
    )
    model.model.norm.register_forward_pre_hook(lambda _norm, args: before.append(args[0]))
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    states = [*states[:-1], *before, states[-1]]
    return torch.cat([states[place][0] for place in reads.taps or (-1,)], dim=1)


def check(found: Tensor, right: Tensor, reads: Reads) -> None:
    assert found.dtype == getattr(torch, reads.dtype)
    torch.testing.assert_close(
        found.float(),
        right.to(found.dtype).float(),
        rtol=2e-2,
        atol=2e-3 * float(right.abs().max()),
    )


@pytest.mark.parametrize("reads", [LAST, TAPS], ids=["last", "taps"])
def test_features_of_a_prompt_leave_part_by_part_while_it_is_read(
    worker: TargetWorker, folder: Path, reads: Reads
) -> None:
    prompt = [(7 * place) % VOCABULARY for place in range(PREFILL_ROWS + 44)]
    events = iter(worker.handle(opening(1, reads, prompt)))
    first, second = next(events), next(events)
    assert isinstance(first, Prefilled)
    assert isinstance(second, Prefilled)
    assert worker.sessions == 0
    (opened,) = events
    assert isinstance(opened, Opened)
    assert (
        opened.bonus == reference_tokens(folder, prompt, 1, key=bytes(16), sampling=Sampling())[0]
    )
    assert worker.sessions == 1
    assert (first.start, second.start) == (0, PREFILL_ROWS)
    check(
        torch.cat([to_tensor(first.features), to_tensor(second.features)]),
        expected(folder, prompt, reads),
        reads,
    )


def test_a_verdict_brings_the_features_of_the_root_and_the_accepted_nodes_in_a_message_for_every_kind(  # noqa: E501
    worker: TargetWorker, folder: Path
) -> None:
    truth = reference_tokens(folder, PROMPT, 6, key=bytes(16), sampling=Sampling())
    for session, reads in KINDS.items():
        *parts, opened = worker.handle(opening(session, reads))
        assert isinstance(opened, Opened)
        assert bool(parts) == (reads is not None)
    wrong = (truth[1] + 1) % VOCABULARY
    trees = {
        session: ((wrong, truth[1], truth[2], wrong), (-1, -1, 1, 2)) if session != 3 else ((), ())
        for session in KINDS
    }
    items = tuple(
        VerifyItem(session=s, round=1, prefix=len(PROMPT) + 1, tokens=tokens, parents=parents)
        for s, (tokens, parents) in trees.items()
    )
    events = worker.handle(Verify(epoch=1, items=items))
    found = {}
    for event in events:
        assert isinstance(event, Verified)
        assert [name for name, _, _ in event.spans] == ["verify", "commit"]
        found[tuple(item.session for item in event.items)] = (
            None if event.features is None else to_tensor(event.features)
        )
        assert [item.accepted for item in event.items] == [
            () if item.session == 3 else (1, 2) for item in event.items
        ]
    assert set(found) == {(1, 4), (2,), (3, 5)}
    assert found[1, 4] is None
    log, root = [*PROMPT, *truth], len(PROMPT)
    for sessions, reads, positions in (
        ((2,), LAST, [root, root + 1, root + 2]),
        ((3, 5), TAPS, [root, root, root + 1, root + 2]),
    ):
        rows = found[sessions]
        assert rows is not None
        check(rows, expected(folder, log, reads)[positions], reads)


def test_features_that_are_held_come_with_the_next_verdict_that_is_not(
    worker: TargetWorker, folder: Path
) -> None:
    """Sessions 2 and 3 hold theirs for different rounds; session 4 reads none."""
    truth = reference_tokens(folder, PROMPT, 7, key=bytes(16), sampling=Sampling())
    log, found = [*PROMPT, *truth], dict[int, list[tuple[int, torch.Tensor | None]]]()
    for session in (2, 3, 4):
        list(worker.handle(opening(session, KINDS[session])))
        found[session] = []
    for round in (1, 2, 3, 4):
        items = tuple(
            VerifyItem(
                session=session,
                round=round,
                prefix=len(PROMPT) + round,
                tokens=(),
                parents=(),
                hold=round < {2: 4, 3: 3, 4: 4}[session],
            )
            for session in found
        )
        for event in worker.handle(Verify(epoch=1, items=items)):
            assert isinstance(event, Verified)
            for item in event.items:
                features = None if event.features is None else to_tensor(event.features)
                assert features is None or len(event.items) == 1
                found[item.session].append((item.held, features))
    assert found[4] == [(0, None)] * 4
    root = len(PROMPT)
    for session, brought in ((2, (0, 0, 0, 4)), (3, (0, 0, 3, 1))):
        at, reads = root, KINDS[session]
        assert reads is not None
        for rows, (held, features) in zip(brought, found[session], strict=True):
            assert (features is None) == (not rows)
            if features is not None:
                assert (held, len(features)) == (rows - 1, rows)
                check(features, expected(folder, log, reads)[at : at + rows], reads)
                at += rows


def test_rows_that_are_held_outlast_the_failure_of_another_session(
    worker: TargetWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = (1, 2)
    for session in sessions:
        list(worker.handle(opening(session, LAST)))

    def round(number: int, *, hold: bool) -> Sequence[Event]:
        items = tuple(
            VerifyItem(
                session=session,
                round=number,
                prefix=len(PROMPT) + number,
                tokens=(),
                parents=(),
                hold=hold,
            )
            for session in sessions
        )
        return tuple(worker.handle(Verify(epoch=1, items=items)))

    for number in (1, 2, 3):
        round(number, hold=True)
    rows, taken = HeldFeatures.rows, list[HeldFeatures]()

    def fails_for_the_second(self: HeldFeatures, reads: Reads) -> Tensor:
        taken.append(self)
        if len(taken) == 2:
            raise MemoryError("no memory for features")
        return rows(self, reads)

    monkeypatch.setattr(HeldFeatures, "rows", fails_for_the_second)
    assert [event.type for event in round(4, hold=False)] == ["failed"] * 2
    (verified,) = round(4, hold=False)
    assert isinstance(verified, Verified)
    assert [item.held for item in verified.items] == [3, 3]


def act(
    worker: TargetWorker,
    drawn: random.Random,
    pairs: Mapping[int, int],
    truth: Sequence[int],
    round: int,
    *,
    last: bool,
) -> dict[int, tuple[int, Tensor | None]]:
    """Verify a round of sessions and their twins in two passes. `pairs`: the tokens that each has
    committed, by its number. Both get the same tree, and the twin holds nothing. Return the tokens
    that each commits and the features that come with them."""
    items = []
    for session, committed in pairs.items():
        right, wrong = truth[committed], (truth[committed] + 1) % VOCABULARY
        tokens, parents = drawn.choice([((), ()), ((wrong, right), (-1, -1)), ((right,), (-1,))])
        item = VerifyItem(
            session=session,
            round=round,
            prefix=len(PROMPT) + committed,
            tokens=tokens,
            parents=parents,
            hold=not last and drawn.random() < 0.7,
        )
        items += [item, item.model_copy(update={"session": session + 100, "hold": False})]
    drawn.shuffle(items)
    cut, found = drawn.randrange(1, len(items)), dict[int, tuple[int, Tensor | None]]()
    for part in (items[:cut], items[cut:]):
        for event in worker.handle(Verify(epoch=1, items=tuple(part))):
            assert isinstance(event, Verified)
            rows = None if event.features is None else to_tensor(event.features)
            for item in event.items:
                count = item.held + 1 + len(item.accepted)
                shown, rows = (None, None) if rows is None else (rows[:count], rows[count:])
                found[item.session] = 1 + len(item.accepted), shown
    return found


@pytest.mark.parametrize("seed", everyday(range(4), 0))
def test_what_was_held_is_what_a_session_shows_that_holds_nothing(
    worker: TargetWorker, folder: Path, seed: int
) -> None:
    """Sessions of both kinds of features and their twins, in passes of any order; some end in the
    midst."""
    drawn, rounds = random.Random(seed), 12
    truth = reference_tokens(folder, PROMPT, 2 * rounds + 2, key=bytes(16), sampling=Sampling())
    pairs, shown = dict.fromkeys(range(1, 7), 1), dict[int, list[Tensor]]()
    for session in pairs:
        for twin in (session, session + 100):
            list(worker.handle(opening(twin, LAST if session % 2 else TAPS)))
            shown[twin] = []
    for round in range(1, rounds + 1):
        found = act(worker, drawn, pairs, truth, round, last=round == rounds)
        for session, (tokens, features) in found.items():
            if features is not None:
                shown[session].append(features)
            if session < 100:
                assert tokens == found[session + 100][0]
                pairs[session] += tokens
        if round % 4 == 0 and drawn.random() < 0.5:
            del pairs[session := drawn.choice([*pairs])]
            list(worker.handle(Close(epoch=1, session=session)))
            list(worker.handle(Close(epoch=1, session=session + 100)))
    for session in pairs:
        assert torch.equal(torch.cat(shown[session]), torch.cat(shown[session + 100]))
    assert any(len(shown[session]) < len(shown[session + 100]) for session in pairs)


@pytest.mark.parametrize(
    "change", [{"width": 65}, {"taps": (4,)}, {"vocabulary_size": VOCABULARY + 1}]
)
def test_features_that_the_model_does_not_have_are_refused(
    worker: TargetWorker, change: dict[str, object]
) -> None:
    with pytest.raises(RequestError, match="64, vocabulary 48 and 3 layers") as caught:
        list(worker.handle(opening(1, LAST.model_copy(update=change))))
    assert caught.value.code == "settings"
    assert worker.sessions == 0


def test_a_target_reports_its_states(worker: TargetWorker, folder: Path) -> None:
    assert worker.hello(1).states == States(
        width=64, layers=3, checkpoint=open_checkpoint(str(folder)).digest
    )
