"""Recordings as tests: a file of `tests/recorded` is one, since `tests/runtime/test_replay.py`
plays all of them into the session logic.

What a coordinator recorded (coordinator.record) is put there as it is, under a name that says what
happened. If what happened was wrong, mend the session logic, see with `dovetail replay FILE` where
it now goes another way, and if that is right, keep the recording up to there, with what is right:

    python tests/support/recorded.py FILE NAME

`sky.messages` is an example. It was made, and is made anew when a release cannot read it any more,
by

    dovetail generate --policy dynamic --tree.insist true --draft dovetail --draft.ahead false
    --tree.sharpening 1.0 --temperature 1 --seed 7 --max-tokens 16 \
        --record-messages FOLDER "Why is the sky blue?"
"""

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "recorded"


def recordings() -> list[Path]:
    """The files of the folder."""
    return sorted(FOLDER.glob("*.messages"))


def correct(source: Path, out: Path) -> None:
    """Keep a recording with the actions of today, each command as a whole, up to the first that are
    others than those recorded, or to its end."""
    tape, playback = (
        importlib.import_module(f"dovetail.runtime.{name}")
        for name in ("record.recording", "record.replay")
    )
    recording = tape.read_recording(source)
    played = playback.Replay(recording)
    played.play()
    today = iter(played.taken)
    last = played.difference.entry if played.difference is not None else 1 + len(recording.entries)
    kept: list[Any] = [recording.begin]
    for place, entry in enumerate(recording.entries, start=1):
        if isinstance(entry, tape.Step) and (done := next(today, None)) is not None:
            kept.append(done.step)
        elif (
            not isinstance(entry, tape.Step | tape.LastEntry)
            and (not isinstance(entry, tape.Said) or entry.type == "in")
            and place < last
        ):
            kept.append(entry)
    kept.append(
        tape.LastEntry(
            whole=True,
            why=f"kept of {source.name}, up to where the session logic was wrong"
            if played.difference
            else "the session has ended",
        )
    )
    out.write_bytes(b"".join(tape.pack_entry(entry.model_dump()) for entry in kept))


def main(source: str, name: str) -> None:
    out = (FOLDER / name).with_suffix(".messages")
    correct(Path(source), out)
    sys.stdout.write(f"{out}\n")


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # gives a bare checkout its import name, as conftest.py does for the tests
        (Path(folder) / "dovetail").symlink_to(FOLDER.parents[1], target_is_directory=True)
        sys.path.insert(0, folder)
        main(*sys.argv[1:])
