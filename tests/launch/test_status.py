"""`dovetail status` on a narrow terminal."""

from pathlib import Path

import pytest

from dovetail.launch import cli
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


def test_it_says_who_leads_in_which_term_and_how_far_the_standby_is_behind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = representative()["reported"]
    _show(report)
    shown = capsys.readouterr().out
    assert "leads in term 2" in shown
    assert "tcp://192.0.2.2:5555 on second copies the journal, 512 bytes and 0.25 s behind" in shown
    _show(report.model_copy(update={"standby": None}))
    assert "if this coordinator is lost nobody takes over" in capsys.readouterr().out
    _show(report.model_copy(update={"standby": None, "term": 0}))
    assert "standby     " not in capsys.readouterr().out


def test_of_several_addresses_it_says_that_nobody_leads_at_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.protocol.links.ways.CONNECT_TIMEOUT_S", 1.0)
    first, second = (f"ipc://{tmp_path}/{name}" for name in ("first", "second"))
    assert cli.run(("status", f"--connect={first},{second}")) == 1
    said = capsys.readouterr().err
    assert f"no coordinator leads at {first} or {second}" in said
    assert said.count("start it, or correct the address") == 1
    assert "Traceback" not in said
