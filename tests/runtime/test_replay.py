"""Recordings in the session logic of today. Those in `tests/recorded` have to go as they went;
where one goes another way, the first difference is named."""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from dovetail.protocol.codec import COMMAND, EVENT, REPLY, encode
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Emitted, Finished
from dovetail.runtime.record.recorder import Recorder
from dovetail.runtime.record.recording import Recording, Said, Step, read_recording
from dovetail.runtime.record.replay import Replay, ReplayDifference
from dovetail.runtime.session.draft_sync import DraftSync
from dovetail.runtime.session.session import Session
from explore import coordinators, world
from explore.drawing import draw
from explore.sabotage import Panic, Sabotage
from explore.schedules import Fault, Schedule, Wish
from support.houses import DYNAMIC, House
from support.recorded import correct, recordings
from support.scripted import READS, ROOMY, ScriptedTarget

SKY = next(path for path in recordings() if path.name == "sky.messages")


def play(path: Path) -> Replay:
    playback = Replay(read_recording(path))
    playback.play()
    return playback


def altered(
    recording: Recording, out: Path, change: Callable[[Any], Any]
) -> ReplayDifference | None:
    """Play a recording with each entry changed, or left out where `change` returns None; return the
    first difference."""
    entries = tuple(new for entry in recording.entries if (new := change(entry)) is not None)
    return Replay(Recording(out, recording.begin, entries)).play()


@pytest.mark.parametrize("path", recordings(), ids=lambda path: path.stem)
def test_what_was_recorded_goes_as_it_went(path: Path) -> None:
    playback = play(path)
    assert playback.difference is None
    assert playback.taken


@pytest.mark.parametrize("reads", [None, READS])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"record": True},
        {"logprobs": 2, "scored": True},
        {"stop": (" w",)},
        {"speculate": False},
        {"max_tokens": 0},
        {"max_tokens": 1},
        {"tree": DYNAMIC.model_copy(update={"policy": "goodput", "insist": False})},
    ],
    ids=str,
)
def test_any_request_goes_as_it_went(tmp_path: Path, asked: dict[str, Any], reads: Any) -> None:
    recorder = Recorder(tmp_path)
    house = House(reads=reads, limits=ROOMY, recorder=recorder)
    tokens = [
        house.complete(**asked).result.token_ids for _ in range(2)
    ]  # the second goes on from the first
    recorder.close()
    played = [play(path) for path in sorted(tmp_path.iterdir())]
    assert [playback.difference for playback in played] == [None, None]
    assert [tuple(playback.session.tokens) for playback in played] == tokens


@pytest.mark.parametrize("speculate", [True, False])
def test_sessions_in_passes_together_go_as_they_went(tmp_path: Path, speculate: bool) -> None:
    recorder = Recorder(tmp_path)
    house = House(reads=READS, recorder=recorder)
    for prompt in ((5, 6, 7), (9, 8), (3, 4, 5, 6)):
        house.submit(prompt, speculate=speculate)
    house.replies()
    recorder.close()
    assert [play(path).difference for path in tmp_path.iterdir()] == [None] * 3


def test_a_session_that_moved_goes_as_it_went(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    house = House(recorder=recorder)
    assert house.target is not None
    house.submit()
    for _ in range(6):
        house.coordinator.pump()
        for worker in house.workers:
            worker.step()
    house.lose(house.target)
    house.add(ScriptedTarget, "target", name="another")
    (finished,) = [reply for reply in house.replies() if isinstance(reply, Finished)]
    recorder.close()
    assert finished.result.moves == 1
    (path,) = tmp_path.iterdir()
    playback = play(path)
    assert playback.difference is None
    assert {taken.step.name for taken in playback.taken} >= {"target_lost", "recovered"}


MEANT = tuple(f"{fault.__name__}: " for fault in (Sabotage, Panic))
"""Beginnings of what is recorded of an event in which the coordinator is meant to fail; the session
logic alone does not fail."""


def play_schedule(schedule: Schedule, folder: Path, patch: pytest.MonkeyPatch) -> int:
    """Have a schedule of faults recorded and every session played; how many there were."""
    recorders: list[Recorder] = []
    bare = coordinators.open_coordinator

    def recorded(*about: Any) -> Any:
        coordinator = bare(*about)
        recorders.append(Recorder(folder, clock_ns=about[1].clock))
        coordinator._recorder = recorders[-1]
        return coordinator

    with patch.context() as inner:
        inner.setattr(coordinators, "open_coordinator", recorded)
        world.play(schedule)
    for recorder in recorders:
        recorder.close()
    found = sorted(folder.iterdir())
    for path in found:
        difference = play(path).difference
        assert difference is None or difference.recorded.startswith(MEANT)
    return len(found)


@pytest.mark.parametrize("reads", [False, True])
def test_sessions_under_faults_go_as_they_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    long = Wish(tokens=40)
    faults = [
        (40, Fault("kill", who=0)),
        (30, Fault("cut", who=2)),
        (20, Fault("stop", who=1, for_ms=4000)),
        (9, Fault("babble", who=2)),
        (9, Fault("cancel")),
    ]
    schedule = Schedule(
        targets=2,
        drafts=1,
        reads=reads,
        steps=((0, long), (3, Wish(prompt=(9, 9), tokens=24)), *faults),
    )
    assert play_schedule(schedule, tmp_path, monkeypatch) >= 2


def test_a_session_whose_client_had_scores_from_an_earlier_coordinator_goes_as_it_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert play_schedule(draw(0, 201), tmp_path, monkeypatch) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_sessions_under_any_faults_go_as_they_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    played = 0
    for number in range(50 * part, 50 * part + 50):
        folder = tmp_path / str(number)
        folder.mkdir()
        played += play_schedule(draw(0, number), folder, monkeypatch)
    assert played >= 50


# -- differences -----------------------------------------------------------------------------------


def is_said(entry: object, direction: str, kind: bytes) -> bool:
    return isinstance(entry, Said) and entry.type == direction and kind in entry.frames[0][:80]


def test_another_verdict_brings_other_tokens_and_that_is_named(tmp_path: Path) -> None:
    recording = read_recording(SKY)
    place = next(
        at
        for at, entry in enumerate(recording.entries, start=1)
        if is_said(entry, "in", b"verified")
    )

    def change(entry: Any) -> Any:
        if entry is not recording.entries[place - 1]:
            return entry
        event: Any = EVENT.decode(entry.frames)
        (item,) = event.items
        other = event.model_copy(
            update={"items": (item.model_copy(update={"bonus": item.bonus + 1}),)}
        )
        return entry.model_copy(update={"frames": tuple(encode(other))})

    difference = altered(recording, tmp_path / "x", change)
    assert difference is not None
    assert difference.entry > place
    assert difference.where == "step verified of round 1" or difference.where.startswith(
        "step verified"
    )
    assert "emit" in difference.recorded
    assert "emit" in difference.now


def test_another_command_is_named_with_the_field_that_differs(tmp_path: Path) -> None:
    recording = read_recording(SKY)

    def change(entry: Any) -> Any:
        if not is_said(entry, "out", b"\xa5draft"):
            return entry
        command: Any = COMMAND.decode(entry.frames)
        if command.round != 2:
            return entry
        return entry.model_copy(
            update={"frames": tuple(encode(command.model_copy(update={"max_width": 3})))}
        )

    difference = altered(recording, tmp_path / "x", change)
    assert difference is not None
    assert "max_width" in difference.where
    assert difference.recorded == "3"


def test_a_command_that_nothing_asks_for_is_named(tmp_path: Path) -> None:
    recording = read_recording(SKY)
    first = next(entry for entry in recording.entries if is_said(entry, "out", b"verify"))
    twice = [
        new
        for entry in recording.entries
        for new in ((entry, entry) if entry is first else (entry,))
    ]
    difference = Replay(Recording(tmp_path / "x", recording.begin, tuple(twice))).play()
    assert difference is not None
    assert (difference.recorded, difference.now) == ("a command", "none")


def test_other_words_to_the_client_are_named(tmp_path: Path) -> None:
    recording = read_recording(SKY)

    def change(entry: Any) -> Any:
        if not is_said(entry, "out", b"emitted"):
            return entry
        told = Emitted.model_validate(REPLY.decode(entry.frames))
        return entry.model_copy(
            update={
                "frames": tuple(encode(told.model_copy(update={"text": told.text.upper() + "!"})))
            }
        )

    difference = altered(recording, tmp_path / "x", change)
    assert difference is not None
    assert difference.where == "text sent to the client"


def test_a_step_that_is_left_out_is_noticed(tmp_path: Path) -> None:
    recording = read_recording(SKY)
    second = [
        entry for entry in recording.entries if isinstance(entry, Step) and entry.name == "verified"
    ][1]
    assert (
        altered(recording, tmp_path / "x", lambda entry: None if entry is second else entry)
        is not None
    )


# -- a failing schedule becomes a test -------------------------------------------------------------


def test_a_recording_of_a_fault_of_ours_is_kept_as_a_test_of_what_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session logic goes wrong in a round, is recorded, and mended: what is kept passes with
    the mended logic alone."""
    right = DraftSync.order

    def wrong(self: DraftSync, *arguments: Any, round: int, **named: Any) -> Any:
        order = right(self, *arguments, round=round, **named)
        return order.model_copy(update={"max_depth": 1}) if round == 3 else order

    recorder = Recorder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(DraftSync, "order", wrong)
        House(recorder=recorder).complete()
        recorder.close()
        (path,) = tmp_path.iterdir()
        assert play(path).difference is None, "the same logic goes the same way"
    difference = play(path).difference
    assert difference is not None
    assert "draft" in difference.where
    assert "max_depth" in difference.where
    correct(path, tmp_path / "kept.messages")
    assert play(tmp_path / "kept.messages").difference is None
    with monkeypatch.context() as patch:
        patch.setattr(DraftSync, "order", wrong)
        again = play(tmp_path / "kept.messages").difference
    assert again is not None
    assert "max_depth" in again.where
    assert again.recorded == difference.now


@pytest.mark.parametrize("error", [ZeroDivisionError, Panic])
def test_a_recording_of_an_exception_of_ours_is_kept_as_a_test_of_what_is_right(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Session._commit

    def wrong(self: Session, *arguments: Any, **named: Any) -> Any:
        if self.round == 2:
            raise error("a bug")
        return right(self, *arguments, **named)

    recorder = Recorder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "_commit", wrong)
        house = House(recorder=recorder)
        house.submit()
        house.replies()
        recorder.close()
    (path,) = tmp_path.iterdir()
    difference = play(path).difference
    assert difference is not None
    assert difference.recorded == f"{error.__name__}: a bug"
    correct(path, tmp_path / "kept.messages")
    assert play(tmp_path / "kept.messages").difference is None


NONSENSE = (None, -1, 2**63 - 1, 1.5, math.nan, "x", b"", (), {"a": 1})


@pytest.mark.parametrize("name", ["opened", "verified", "next_round", "recovered"])
def test_a_step_whose_arguments_make_no_sense_is_refused_or_goes_another_way(
    tmp_path: Path, name: str
) -> None:
    recording, refused = read_recording(SKY), []
    for arguments in ((), *((value,) * 3 for value in NONSENSE)):

        def change(entry: Any, arguments: tuple[Any, ...] = arguments) -> Any:
            if not isinstance(entry, Step) or entry.name not in (name, "cancel"):
                return entry
            return entry.model_copy(update={"name": name, "arguments": arguments})

        try:
            altered(recording, tmp_path / "altered", change)
        except UserError as error:
            refused.append(str(error))
    assert refused or name == "recovered"
    for said in refused:
        assert "is damaged: its entry" in said or "lacks the verdict of round" in said
        assert "\n" not in said


def test_a_recording_that_does_not_name_a_peer_is_refused(tmp_path: Path) -> None:
    entries = [*msgpack.Unpacker(io.BytesIO(SKY.read_bytes()))]
    path = tmp_path / "altered.messages"
    for gone in (entry for entry in entries if entry["type"] == "peer"):
        path.write_bytes(b"".join(msgpack.packb(entry) for entry in entries if entry is not gone))
        with pytest.raises(UserError, match=f"is from peer {gone['number']}, which has no entry"):
            read_recording(path)
