"""A disk that becomes full while something is written is told with the name of the file and a
remedy, whatever is written."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dovetail.launch.bench.journal import open_journal
from dovetail.launch.commands import profile, stratify
from dovetail.launch.files.records import open_answers, open_records
from dovetail.launch.planning.recording import About
from dovetail.launch.settings.thresholds import write_thresholds
from dovetail.protocol.errors import OutputError
from dovetail.protocol.messages import RoundRecord
from dovetail.protocol.settings import Sampling
from dovetail.runtime.telemetry.trace import write_trace
from simulation.folder import Folder

RECORD = RoundRecord(
    round=1, prefix=3, tokens=(), parents=(), scores=(), verified=0, accepted=(), bonus=5
)


@contextmanager
def no_room() -> Iterator[None]:
    """No file of this process can grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def answers(path: Path) -> None:
    with open_answers(path) as file, no_room():
        file.write("a", [])


def records(path: Path) -> None:
    with open_records(path) as file, no_room():
        file.write("a", 0, RECORD)


def journal(path: Path) -> None:
    with open_journal(path, {"version": "1"}) as file, no_room():
        file.end({"format": 1})


def rounds(path: Path) -> None:
    with no_room(), stratify._kept(path, {"target": "x"}) as (_, keep):
        keep(stratify.Reply("a", ()))


def thresholds(path: Path) -> None:
    with no_room():
        write_thresholds(path, [0.5], {"holds_for": {}}, [])


def trace(path: Path) -> None:
    with no_room():
        write_trace(path, [])


def report(path: Path) -> None:
    with no_room():
        profile._write_text(path, "<svg>")


@pytest.mark.parametrize("write", [answers, records, journal, rounds, thresholds, trace, report])
def test_whatever_writes_names_its_file_when_there_is_no_room(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "out"
    with pytest.raises(
        OutputError,
        match=f"^cannot write .* to {path}: File too large; raise the limit of a file's size",
    ):
        write(path)


def test_the_folder_of_a_recording_that_cannot_be_begun_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    about = About(
        target="t", target_model="t", draft_model="d", head=False, vocabulary_size=9, end=(), context=9, sampling=Sampling(), seed=0, sharpening=1.0,  # noqa: E501
        nodes=1, depth=1, width=1, max_tokens=1,
    )  # fmt: skip
    with pytest.raises(
        Exception,
        match=r"a recording cannot be written to .*file/out: Not a directory; a part of that "
        r"path is a file",
    ):
        Folder(tmp_path / "file" / "out", about)
