"""Beats of what is computed, and the watchdog over processes that stop beating; each in a process
of its own, since that is what it ends."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dovetail.workers import progress
from dovetail.workers.heads.head import open_head
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from dovetail.workers.progress import DEAF, Abandoned, beat, heard
from support.heads import write_head
from support.patience import PATIENCE_S

STUCK_S = 1.0
SCRIPT = """
import ctypes, sys, threading, time
from dovetail.workers.progress import Watchdog
watchdog = Watchdog("target worker a", {stuck_s})
watchdog.start()
print("on", flush=True)
{work}
print("done", flush=True)
"""
FOR_EVER = """
def go_round_and_round():
    while True:
        pass
watchdog.beat()
with watchdog.work():
    go_round_and_round()
"""
DEADLOCK = """
lock = threading.Lock()
def wait_for_myself():
    lock.acquire()
    lock.acquire()
with watchdog.work():
    wait_for_myself()
"""
HOLDS_THE_LOCK = """
watchdog.beat()
with watchdog.work():
    ctypes.PyDLL(None).sleep(1000)
"""
BEATS = """
end = time.monotonic() + 2 * {stuck_s}
with watchdog.work():
    print("working", flush=True)
    while time.monotonic() < end:
        time.sleep({stuck_s} / 8)
        watchdog.beat()
"""
MANY = """
end = time.monotonic() + 2 * {stuck_s}
while time.monotonic() < end:
    with watchdog.work():
        time.sleep({stuck_s} / 8)
    watchdog.beat()
"""
IDLE = """
watchdog.beat()
time.sleep({deaf} * {stuck_s} + 1)
"""


def run(work: str) -> "subprocess.Popen[str]":
    """A process that has begun with what it does."""
    script = SCRIPT.replace("{work}", work).format(stuck_s=STUCK_S, deaf=DEAF)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    return process


@pytest.mark.parametrize(
    ("work", "where"),
    [(FOR_EVER, "go_round_and_round"), (DEADLOCK, "wait_for_myself")],
    ids=["for ever", "deadlock"],
)
def test_a_process_that_gets_nowhere_says_where_it_is_and_ends(work: str, where: str) -> None:
    began_s = time.monotonic()
    process = run(work)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert time.monotonic() - began_s >= STUCK_S
    assert said.startswith(
        f"target worker a has made no progress for {STUCK_S:g} s (coordinator.stuck_s) and "
        "exits; its stack:\n"
    )
    assert f"in {where}\n" in said


def test_a_process_that_holds_the_interpreter_for_ever_ends_too() -> None:
    _, said = (process := run(HOLDS_THE_LOCK)).communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert said.startswith("Timeout")


@pytest.mark.parametrize("work", [BEATS, MANY, IDLE], ids=["beats", "many small things", "nothing"])
def test_a_process_that_gets_on_or_has_nothing_to_do_is_left_alone(work: str) -> None:
    said, complaints = (process := run(work)).communicate(timeout=PATIENCE_S)
    assert (process.returncode, said.endswith("done\n"), complaints) == (0, True, "")


def test_the_time_for_which_a_process_was_stopped_does_not_count() -> None:
    process = run(BEATS)
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2 * STUCK_S)
    process.send_signal(signal.SIGCONT)
    said, complaints = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, said, complaints) == (0, "done\n", "")


# -- beats -----------------------------------------------------------------------------------------


def beats_of(work: Callable[[], object]) -> int:
    count = [0]

    def note() -> None:
        count[0] += 1

    with heard(note):
        work()
    beat()
    return count[0]


@pytest.mark.parametrize("backend", ["auto", "library"])
def test_every_layer_of_a_pass_beats(backend: str, llama_folder: Path) -> None:
    model = load_language_model(str(llama_folder), weights="fp32", device="cpu", backend=backend)
    assert beats_of(lambda: a_pass(model)) == model.layers


def test_a_pass_of_a_head_beats(llama_folder: Path, tmp_path: Path) -> None:
    head = open_head(
        str(write_head(tmp_path, "eagle")), target=str(llama_folder), weights="fp32", device="cpu"
    )
    features = torch.zeros(2, head.spec.feature_width)
    cache = head.new_cache(2)
    assert (
        beats_of(
            lambda: head.forward(
                torch.tensor([1, 2]), features, torch.arange(2), [Segment(cache, 0, 2)], true=True
            )
        )
        >= 1
    )


def a_pass(model: LanguageModel) -> torch.Tensor:
    return model.forward(torch.tensor([3, 5]), torch.arange(2), [Segment(model.new_cache(2), 0, 2)])


@pytest.mark.parametrize("backend", ["auto", "library"])
def test_a_pass_that_is_given_up_hurts_none_that_follow(backend: str, llama_folder: Path) -> None:
    model = load_language_model(str(llama_folder), weights="fp32", device="cpu", backend=backend)
    expected = a_pass(model)

    def give_up() -> None:
        raise Abandoned

    with pytest.raises(Abandoned), heard(give_up):
        a_pass(model)
    assert torch.equal(a_pass(model), expected)
    assert progress._thread.listener is None
