"""`dovetail status` on a narrow terminal."""

import pytest

from dovetail.launch.commands.status import _show
from dovetail.launch.console import terminal
from support.golden import representative

HEADINGS = (
    "worker",
    "roles",
    "model",
    "weights",
    "host",
    "device",
    "CPU s",
    "MB",
    "busy",
    "sessions",
    "trip us",
    "clock us",
    "bytes/round",
    "drafting",
    "tokens/s",
    "predicted",
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
