"""The dashboard shows what there is."""

import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dovetail.launch import cli
from dovetail.launch.commands.config import GRAFANA
from dovetail.runtime.http.exposition import Exposition
from support.golden import representative

METRIC = re.compile(r"\b(?:dovetail_|vllm:)\w+")


def exposed() -> set[str]:
    """Every name that /metrics has once a request was answered."""
    exposition = Exposition()
    watch = exposition.watch("demo", 0.0)
    watch.tokens(1)
    watch.tokens(1)
    watch.ended()
    page = exposition.text(
        representative()["reported"], "demo", answering=1, connections=1, let_go=1
    ).decode()
    return {
        sample.name for family in text_string_to_metric_families(page) for sample in family.samples
    }


def test_every_metric_of_the_dashboard_is_one_that_is_exposed() -> None:
    board = json.loads(GRAFANA.read_text(encoding="utf-8"))
    named = {
        metric
        for panel in board["panels"]
        for target in panel["targets"]
        for metric in METRIC.findall(target["expr"])
    }
    assert len(named) > 20
    assert named <= exposed()


def test_panels_lie_side_by_side_and_have_numbers_of_their_own() -> None:
    panels = json.loads(GRAFANA.read_text(encoding="utf-8"))["panels"]
    places = [[panel["gridPos"][axis] for axis in "xywh"] for panel in panels]
    cells = [
        (column, row)
        for x, y, w, h in places
        for column in range(x, x + w)
        for row in range(y, y + h)
    ]
    assert len(cells) == len({*cells})
    assert max(column for column, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_dashboard_is_printed_for_grafana_to_import(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "export", "grafana"]) == 0
    assert json.loads(capsys.readouterr().out)["uid"] == "dovetail"
