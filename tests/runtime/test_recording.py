"""The recordings that a coordinator makes of its sessions: everything, in order, for its owner
alone, within bounds, and in nobody's way."""

import inspect
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol import keys
from dovetail.protocol.codec import COMMAND, EVENT, REPLY, REQUEST
from dovetail.protocol.errors import UserError
from dovetail.protocol.links import open_hub, open_link
from dovetail.protocol.messages import Emitted, Finished, Probe, Submit, Welcome
from dovetail.runtime.client import Client
from dovetail.runtime.engine.coordinator import Coordinator
from dovetail.runtime.record import recording as tape
from dovetail.runtime.record import writer as scribe
from dovetail.runtime.record.recorder import STEPS, Recorder
from dovetail.runtime.record.recording import Recording, Said, Step, read_recording
from dovetail.runtime.session.actions import Action, Ask
from dovetail.runtime.session.session import Session
from support.houses import House
from support.recorded import recordings
from support.scripted import READS, ScriptedTarget, continuation, tokenizer_bytes
from support.web import api, backend

SKY = next(path for path in recordings() if path.name == "sky.messages")


@contextmanager
def recording(folder: Path, **options: Any) -> Iterator[House]:
    """A house whose sessions are recorded; the files are there when the block is left."""
    recorder = Recorder(folder)
    try:
        yield House(recorder=recorder, **options)
    finally:
        recorder.close()


def read_all(folder: Path) -> list[Recording]:
    """The recordings of a folder, by session."""
    return sorted(map(read_recording, folder.iterdir()), key=lambda found: found.begin.session)


def said(found: Recording, direction: str, role: str) -> list[Any]:
    """The messages of one direction, to or from peers of this role."""
    dialects = {("in", "client"): REQUEST, ("out", "client"): REPLY}
    dialect: Any = dialects.get((direction, role), EVENT if direction == "in" else COMMAND)
    entries = [
        entry for entry in found.entries if isinstance(entry, Said) and entry.type == direction
    ]
    return [
        dialect.decode(entry.frames) for entry in entries if role in found.peers[entry.peer].roles
    ]


def test_every_method_that_changes_a_session_is_a_step() -> None:
    methods = {
        name: method
        for name, method in inspect.getmembers(Session, inspect.isfunction)
        if not name.startswith("_")
    }
    returned = {name: get_type_hints(method)["return"] for name, method in methods.items()}
    assert {name for name, what in returned.items() if what in (list[Action], list[Ask])} == set(
        STEPS
    )


@pytest.mark.parametrize("reads", [None, READS])
def test_a_recording_has_all_messages_of_its_session_as_they_were(
    tmp_path: Path, reads: Any
) -> None:
    with recording(tmp_path / "made", reads=reads) as house:
        request = house.submit(record=True)
        replies = [reply for reply in house.replies() if not isinstance(reply, Welcome)]
        house.run()
    (found,) = read_all(tmp_path / "made")
    assert found.whole
    for worker in house.workers:
        assert said(found, "out", worker.role) == [
            command for command in worker.seen if not isinstance(command, Probe | Welcome)
        ]
        assert said(found, "in", worker.role)
    assert said(found, "out", "client") == replies
    (submit,) = said(found, "in", "client")
    assert isinstance(submit, Submit)
    assert submit.request == request
    assert found.tokenizer == tokenizer_bytes()
    times = [entry.at for entry in found.entries if isinstance(entry, Said | Step)]
    assert times == sorted(times)


def test_sessions_that_share_passes_have_files_of_their_own(tmp_path: Path) -> None:
    prompts = ((5, 6, 7), (9, 8), (3, 4, 5, 6))
    with recording(tmp_path) as house:
        for prompt in prompts:
            house.submit(prompt, speculate=False)
        house.replies()
    found = read_all(tmp_path)
    assert [one.begin.session for one in found] == [1, 2, 3]
    assert any(
        len(verify.items) > 1
        for one in found
        for verify in said(one, "out", "target")
        if verify.type == "verify"
    )
    for one, prompt in zip(found, prompts, strict=True):
        told = [
            token
            for reply in said(one, "out", "client")
            if isinstance(reply, Emitted)
            for token in reply.tokens
        ]
        assert told == continuation(prompt, 60)


def test_only_its_owner_can_read_a_recording(tmp_path: Path) -> None:
    with recording(tmp_path / "made") as house:
        house.complete()
    (path,) = (tmp_path / "made").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700


def test_a_recording_is_written_while_its_session_runs(tmp_path: Path) -> None:
    with recording(tmp_path) as house:
        house.submit()
        house.coordinator.pump()
        house.coordinator.tick()
        recorder = house.coordinator._recorder
        assert recorder is not None
        recorder._writer.close()  # once everything that was handed over is written
        (found,) = read_all(tmp_path)
        assert not found.whole
        assert said(found, "out", "target")
        recorder._writer = scribe.FileWriter(tmp_path / "later")


def test_a_session_that_ended_is_closed_and_one_that_follows_has_its_own(tmp_path: Path) -> None:
    with recording(tmp_path) as house:
        for _ in range(3):
            house.complete()
            for _ in range(2):
                house.coordinator.tick()
                house.run()
        recorder = house.coordinator._recorder
        assert recorder is not None
        assert not recorder._files
        assert not recorder._requests
        assert not recorder._submitted
    assert [found.whole for found in read_all(tmp_path)] == [True] * 3


def test_a_recording_that_grows_too_large_ends_and_its_session_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tape, "MAX_FILE_BYTES", 6000)
    with recording(tmp_path) as house:
        assert list(house.complete().result.token_ids) == continuation((5, 6, 7), 60)
    (found,) = read_all(tmp_path)
    assert not found.whole
    assert "grown beyond" in found.words
    assert found.path.stat().st_size < 6000 + len(tape.deflated(tokenizer_bytes())) + 100


def test_the_oldest_recordings_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recording(tmp_path) as house:
        house.complete()
    size = next(tmp_path.iterdir()).stat().st_size
    monkeypatch.setattr(scribe, "MAX_FOLDER_BYTES", 4 * size)
    other = tmp_path / "notes.txt"
    other.write_bytes(bytes(8 * size))
    with recording(tmp_path) as house:
        for _ in range(7):
            house.complete()
            for _ in range(2):
                house.coordinator.tick()
    found = sorted(tmp_path.glob(f"*{tape.SUFFIX}"))
    assert 2 <= len(found) <= 4
    assert sum(path.stat().st_size for path in found) <= 4 * size
    assert max(read_recording(path).begin.session for path in found) == 7, "the youngest stays"
    assert other.exists()


def test_a_disk_that_refuses_costs_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with recording(tmp_path / "made") as house:
        (tmp_path / "made").rmdir()
        assert list(house.complete().result.token_ids) == continuation((5, 6, 7), 60)
    assert [record.getMessage().split(":")[-1].strip() for record in caplog.records] == [
        "No such file or directory"
    ]


def test_what_cannot_be_removed_stays_and_costs_no_later_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stays = tmp_path / f"a{tape.SUFFIX}"
    stays.mkdir()
    monkeypatch.setattr(scribe, "MAX_FOLDER_BYTES", 0)
    one, other = tmp_path / f"b{tape.SUFFIX}", tmp_path / f"c{tape.SUFFIX}"
    writer = scribe.FileWriter(tmp_path)

    def fail() -> bytes:
        raise OSError("no space left")

    writer.add(one, [b"some"])
    writer._queue.put(scribe._Piece(one, 1, fail))
    writer.add(other, [b"more"])
    writer.close()
    assert f"the recording {stays} could not be removed to make room: Is a directory" in caplog.text
    assert "ends early: no space left" in caplog.text
    assert stays.is_dir()
    assert writer._written == 9, "the thread has gone on"


def test_a_disk_that_does_not_keep_up_costs_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scribe, "MAX_WAITING_BYTES", 0)
    with recording(tmp_path) as house:
        assert list(house.complete().result.token_ids) == continuation((5, 6, 7), 60)
    assert not any(
        read_recording(path).whole for path in tmp_path.iterdir() if path.stat().st_size > 10_000
    )


def test_what_cannot_be_recorded_disturbs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(entry: object) -> bytes:
        raise OverflowError("a bug")

    with recording(tmp_path) as house, monkeypatch.context() as patch:
        patch.setattr(tape, "pack_entry", fail)
        assert list(house.complete().result.token_ids) == continuation((5, 6, 7), 60)
        house.coordinator._recorder._files.clear()  # type: ignore[union-attr]
    assert "could not be recorded" in caplog.text


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_had_is_told_at_once(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"coordinator\.record"):
        Recorder(tmp_path / place)


def test_no_key_of_a_link_is_in_a_recording(tmp_path: Path) -> None:
    """Over tcp, where everybody has one."""
    folder = tmp_path / "keys"
    keys.generate_keys(folder)
    secrets = [
        part.encode()
        for path in folder.iterdir()
        for part in path.read_text().replace('"', " ").split()
        if len(part) >= 40
    ]
    assert len(secrets) >= 4
    recorder = Recorder(tmp_path / "made")
    hub = open_hub("tcp://127.0.0.1:*", keys=folder)
    links = [open_link(hub.address, keys=folder, role=role) for role in ("target", "client")]
    try:
        coordinator = Coordinator(hub, recorder=recorder)
        target = ScriptedTarget(links[0], "target", epoch=7)
        target.register()
        receive = links[1].receive

        def after_the_others(timeout_s: float | None) -> list[bytes] | None:
            while (frames := receive(0.001)) is None:
                coordinator.pump()
                target.step()
            return frames

        links[1].receive = after_the_others  # type: ignore[method-assign]
        while target.coordinator_epoch == -1:
            coordinator.pump()
            target.step()
        client = Client(links[1])
        finished = client.complete(client.submit(tokens=(5, 6, 7), max_tokens=9, seed=1))
        assert isinstance(finished, Finished)
    finally:
        for link in links:
            link.close()
        hub.close()
        recorder.close()
    (path,) = (tmp_path / "made").iterdir()
    content = path.read_bytes()
    assert b"emitted" in content
    assert not [secret for secret in secrets if secret in content]


def test_no_key_of_the_http_api_is_in_a_recording(tmp_path: Path) -> None:
    secret = "a-key-that-nobody-is-to-read-0123456789"
    (tmp_path / "keys").touch(mode=0o600)
    (tmp_path / "keys").write_text(f"{secret}\n")
    recorder = Recorder(tmp_path / "made")
    with backend() as house:
        with house.still() as coordinator:
            coordinator._recorder = recorder
        with api(house.address, f"--http.api_key_file={tmp_path / 'keys'}") as served:
            served.client.headers["Authorization"] = f"Bearer {secret}"
            assert served.chat()["choices"]
    recorder.close()
    content = b"".join(path.read_bytes() for path in (tmp_path / "made").iterdir())
    assert b"emitted" in content
    assert secret.encode() not in content


# -- reading it back -------------------------------------------------------------------------------


def test_a_file_that_ends_anywhere_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """A coordinator that was killed leaves such a file."""
    content, whole = SKY.read_bytes(), read_recording(SKY)
    torn = tmp_path / SKY.name
    for size in range(1, len(content), 997):
        torn.write_bytes(content[:size])
        if size < 997:  # the first entry is longer than a byte, and shorter than this
            with pytest.raises(UserError, match="not a recording"):
                read_recording(torn)
            continue
        found = read_recording(torn)
        assert found.entries == whole.entries[: len(found.entries)]
        assert not found.whole


@given(place=st.integers(0, SKY.stat().st_size - 1), value=st.integers(0, 255))
@settings(max_examples=150, deadline=None, database=None, derandomize=True)
def test_a_file_that_was_tampered_with_is_refused_in_a_line_or_read(
    tmp_path_factory: pytest.TempPathFactory, place: int, value: int
) -> None:
    content = bytearray(SKY.read_bytes())
    content[place] = value
    path = tmp_path_factory.mktemp("tampered") / SKY.name
    path.write_bytes(content)
    complaint = ""
    try:
        assert read_recording(path).tokenizer
    except UserError as error:
        complaint = str(error)
    assert "\n" not in complaint


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\x00" * 100,
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
        tape.pack_entry({"type": "recording", "format": 99}),
    ],
)
def test_something_else_is_no_recording(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError, match="recording"):
        read_recording(tmp_path / "x")


def test_a_recording_of_another_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(tape.pack_entry({"type": "recording", "format": 1}))
    with pytest.raises(UserError) as refused:
        read_recording(tmp_path / "x")
    assert str(refused.value) == (
        f"the recording {tmp_path / 'x'} has format 1, this release reads {tape.FORMAT}: use the "
        "release that wrote it"
    )


def test_a_recording_is_the_list_of_a_sessions_events(tmp_path: Path) -> None:
    """Each round ends with the question for the next one, which is an event of its own."""
    with recording(tmp_path) as house:
        house.complete(max_tokens=9)
    (found,) = read_all(tmp_path)
    steps = [entry for entry in found.entries if isinstance(entry, Step)]
    asked = [step.actions[-1:] == (("next_round",),) for step in steps]
    answered = [step.name == "next_round" for step in steps]
    assert sum(asked) >= 2
    assert asked[:-1] == answered[1:]
    assert all(step.arguments[0] for step in steps if step.name == "next_round")
