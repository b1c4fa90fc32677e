"""`dovetail replay`: a recorded session once more, by the session logic and by workers, and what is
said where it goes another way."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail.protocol.messages import (
    Close,
    Draft,
    Event,
    Finished,
    Hello,
    Message,
    Open,
    Reads,
    Verified,
)
from dovetail.runtime.record.recorder import Recorder
from dovetail.runtime.record.recording import Recording, Step, read_recording
from dovetail.runtime.record.replay import Asked
from replay.exchanges import Role, parts_of
from replay.worker import Outcome, play
from support.houses import House
from support.recorded import recordings
from support.scripted import READS, ScriptedDraft, ScriptedTarget, ScriptedWorker, hello

Run = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parents[2]
SKY = next(path for path in recordings() if path.name == "sky.messages")
DETERMINED = ("--draft.ahead=false", "--tree.sharpening=1.0", "--tree.insist=true")
"""With these and the embedded pair's policy a proposal hangs on nothing but the text."""


class Player:
    """A scripted worker that is asked directly; `say_otherwise` may change what it answers."""

    def __init__(
        self,
        worker: ScriptedWorker,
        say_otherwise: Callable[[Event], Event] = lambda event: event,
        **changes: Any,
    ) -> None:
        self.hello: Hello = hello(worker.role, epoch=worker.epoch, **changes)
        self._worker, self._say_otherwise = worker, say_otherwise
        worker.limits = self.hello.limits
        self.asked: list[Message] = []

    def say(self, message: Message) -> None:
        if isinstance(message, Close):
            self._worker.handle(message)

    def ask(self, command: Asked, session: int) -> Sequence[Event]:
        self.asked.append(command)
        return [self._say_otherwise(event) for event in self._worker.handle(command)]


def a_target(**changes: Any) -> Player:
    return Player(ScriptedTarget(None, "target", epoch=7), **changes)  # type: ignore[arg-type]


def a_draft(reads: Reads | None = None, *, wrong_after: int = 3) -> Player:
    worker = ScriptedDraft(None, "draft", epoch=8)  # type: ignore[arg-type]
    worker.reads, worker.wrong_after = reads, wrong_after
    return Player(worker)


def recorded(
    folder: Path,
    *,
    lose: bool = False,
    requests: int = 1,
    options: dict[str, Any] | None = None,
    **house: Any,
) -> list[Recording]:
    """Sessions of a scripted pair. `lose`: another target takes over in the midst."""
    recorder = Recorder(folder)
    there = House(recorder=recorder, **house)
    for _ in range(requests):
        there.submit(**(options or {}))
        for _ in range(6 if lose else 0):
            there.coordinator.pump()
            for worker in there.workers:
                worker.step()
        if lose:
            assert there.target is not None
            there.lose(there.target)
            there.add(ScriptedTarget, "target", name="another")
        assert any(isinstance(reply, Finished) for reply in there.replies())
    recorder.close()
    return sorted(map(read_recording, folder.iterdir()), key=lambda found: found.begin.session)


def requested_early(recording: Recording) -> bool:
    """Return whether passes were requested before the last verdict arrived."""
    return any(isinstance(e, Step) and e.name == "verify_early" for e in recording.entries)


def rehearsed(recording: Recording, role: Role, player: Player) -> Outcome:
    return play(recording, parts_of(recording, role), role, player)


@pytest.mark.parametrize("reads", [None, READS])
@pytest.mark.parametrize(
    "options", [{}, {"logprobs": 2, "scored": True}, {"speculate": False}], ids=str
)
def test_a_target_that_does_the_same_is_found_to(
    tmp_path: Path, options: dict[str, Any], reads: Reads | None
) -> None:
    (recording,) = recorded(tmp_path, reads=reads, options=options)
    assert requested_early(recording) == ("speculate" in options)
    player = a_target()
    outcome = rehearsed(recording, "target", player)
    assert outcome.difference is None
    assert outcome.same_fingerprint
    assert outcome.answers == len(player.asked), "a wasted pass beyond the end is answered, too"
    assert outcome.tokens >= 20


@pytest.mark.parametrize("reads", [None, READS])
def test_a_draft_that_does_the_same_is_found_to(tmp_path: Path, reads: Reads | None) -> None:
    (recording,) = recorded(tmp_path, reads=reads)
    outcome = rehearsed(recording, "draft", a_draft(reads))
    assert outcome.difference is None
    assert outcome.proposals == outcome.same_proposals > 3


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("reads", [None, READS])
def test_a_session_that_moved_is_played_to_one_worker_in_parts(
    tmp_path: Path, reads: Reads | None, speculate: bool
) -> None:
    (recording,) = recorded(tmp_path, lose=True, reads=reads, options={"speculate": speculate})
    assert requested_early(recording) != speculate
    assert [part.peer.hello.name for part in parts_of(recording, "target")] == ["target", "another"]
    player = a_target()
    assert rehearsed(recording, "target", player).difference is None
    assert sum(isinstance(command, Open) for command in player.asked) == 2


def test_another_token_of_a_target_is_named_and_ends_it(tmp_path: Path) -> None:
    (recording,) = recorded(tmp_path)

    def otherwise(event: Event) -> Event:
        if not isinstance(event, Verified) or event.items[0].round != 3:
            return event
        item = event.items[0]
        return event.model_copy(
            update={"items": (item.model_copy(update={"bonus": item.bonus % 90 + 1}),)}
        )

    player = a_target(say_otherwise=otherwise)
    outcome = rehearsed(recording, "target", player)
    assert outcome.difference is not None
    assert outcome.difference.where == "verify of round 3, bonus"
    assert "margin 1" in outcome.difference.recorded
    assert len(player.asked) == 4, "what came later was asked of something else"


@pytest.mark.parametrize("reads", [None, READS])
@pytest.mark.parametrize("wrong_after", [0, 1, 5])
def test_a_draft_that_proposes_otherwise_is_told_what_was_committed_all_the_same(
    tmp_path: Path, reads: Reads | None, wrong_after: int
) -> None:
    """The scripted draft checks its log and features at every order."""
    (recording,) = recorded(tmp_path, reads=reads)
    outcome = rehearsed(recording, "draft", a_draft(reads, wrong_after=wrong_after))
    assert outcome.difference is not None
    assert outcome.difference.where == "draft of round 1, tokens"
    assert outcome.same_proposals < outcome.proposals
    (part,) = parts_of(recording, "draft")
    assert outcome.proposals == sum(
        isinstance(exchange.command, Draft) for exchange in part.exchanges
    ), "it went on to the end"


def test_the_command_plays_a_recording_into_the_session_logic(invoke: Run) -> None:
    done = invoke("replay", str(SKY))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "the same throughout"
    told = json.loads(invoke("replay", str(SKY), "--json").stdout)
    assert (told["played"], told["same"], told["difference"], told["whole"], told["tokens"]) == (
        "session",
        True,
        None,
        True,
        16,
    )


def test_the_command_names_the_first_difference(invoke: Run, tmp_path: Path) -> None:
    content = SKY.read_bytes()
    changed = tmp_path / "changed.messages"
    place = content.index(b"max_width", content.index(b"\xa5draft")) + len(b"max_width")
    changed.write_bytes(content[:place] + bytes([content[place] + 1]) + content[place + 1 :])
    done = invoke("replay", str(changed), "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert not told["same"]
    assert "max_width" in told["difference"]["where"]
    assert "the first difference: entry" in invoke("replay", str(changed)).stdout


def to_worker(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tests" / "replay"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_recording_is_played_to_a_real_target() -> None:
    done = to_worker(str(SKY), "--worker", "target", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["played"], told["same"], told["tokens"]) == ("target", True, 16)


@pytest.mark.parametrize("name", ["missing", "text"])
def test_what_is_no_recording_is_told_in_a_line(invoke: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "text").write_text("hello")
    done = invoke("replay", str(tmp_path / name))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "recording" in done.stderr


def test_a_coordinator_that_cannot_record_says_so_and_does_not_start(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = run("coordinator", "--record-messages", str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "coordinator.record" in done.stderr


@pytest.mark.slow
def test_a_recording_that_could_not_be_written_is_told_by_the_command_that_asked_for_it(
    run: Run, tmp_path: Path
) -> None:
    asked = ("--draft", "none", "--max-tokens", "3", "--coordinator.record", str(tmp_path), "Hi")
    for prefix, said in ((), 0), (("prlimit", "--fsize=40960"), 1):
        done = run("generate", *asked, command_prefix=prefix)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("ends early: File too large") == said


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["small", "dovetail", "ngram", "none"])
def test_what_a_real_pair_did_is_done_again_by_each_of_its_workers(
    run: Run, tmp_path: Path, draft: str
) -> None:
    asked = [
        "--draft",
        draft,
        *DETERMINED,
        *shlex.split("--temperature 1 --seed 3 --max-tokens 40 --record-messages"),
        str(tmp_path / "made"),
    ]
    assert run("generate", *asked, "Tell me about a fox.").returncode == 0
    (path,) = (tmp_path / "made").iterdir()
    assert run("replay", str(path)).returncode == 0
    assert draft != "none" or requested_early(read_recording(path))
    to_draft = [] if draft == "none" else [["--worker", "draft", "--draft", draft]]
    for flags in (["--worker", "target"], *to_draft):
        done = to_worker(str(path), *flags)
        assert done.returncode == 0, done.stdout + done.stderr
