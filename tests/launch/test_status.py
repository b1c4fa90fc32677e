"""`dovetail status` on a narrow terminal."""

import shlex

import pytest

from dovetail.launch.commands.status import _show
from dovetail.launch.console import terminal
from dovetail.launch.processes.connection import kernels_of, slow_kernels
from support.golden import representative

WHY = "this processor has no SSE4.1, and they are many times slower"
HEADINGS = (
    *shlex.split("worker roles model weights host device kernels"),
    "CPU s",
    "RSS MB",
    "busy",
    "sessions",
    "trip us",
    "clock us",
    *shlex.split("bytes/round drafting tokens/s predicted"),
)


def test_its_headings_are_whole_in_eighty_columns_and_its_figures_plain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = representative()["reported"]
    slow = report.model_copy(
        update={
            "workers": tuple(
                worker.model_copy(update={"round_trip_us": 70_349.6}) for worker in report.workers
            )
        }
    )
    monkeypatch.setattr(terminal, "WIDTH_WITHOUT_TERMINAL", 80)
    _show(slow)
    shown = capsys.readouterr().out
    assert not [heading for heading in HEADINGS if heading not in shown]
    assert "70350" in shown
    for words in ("fp16", "coordinator", "62"):
        assert words in shown


def test_kernels_are_named_and_slow_ones_are_a_warning_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = representative()["reported"]
    slow = report.workers[0].model_copy(update={"name": "old", "kernels": f"plain C++: {WHY}"})
    state = report.model_copy(update={"workers": (*report.workers, slow)})
    _show(state)
    shown = capsys.readouterr().out
    assert "AVX-512 VNNI" in shown
    assert f"warning     kernels of old: plain C++: {WHY}\n" in shown
    target = report.workers[0].name
    assert kernels_of(state) == f"kernels AVX-512 VNNI ({target}), plain C++ (old)"
    assert slow_kernels(report) == []
