"""`dovetail bench --concurrency` from its plan to what it writes."""

import json
from pathlib import Path

import click

from dovetail.launch.bench.load.measured import Plan, measure
from dovetail.launch.bench.load.served import served
from dovetail.launch.bench.load.table import draw, show
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.files import writing

INTERRUPTED = 130


def measure_and_tell(
    configuration: Configuration,
    url: str | None,
    plan: Plan,
    out: Path | None,
    plot: Path | None,
    *,
    as_json: bool,
) -> int:
    """Measure a server under load and show the result; return the exit code. `out` gets the figures
    of every request too."""
    with served(configuration, url) as server:
        found = measure(server, plan)
        result = {
            "url": server.site.url,
            "model": server.model,
            **plan.told,
            "rows": found.rows(),
            "interrupted": found.interrupted,
            "lost": found.lost,
        }
    if out is not None:
        with writing(out, "the result"):
            out.write_text(json.dumps({**result, "requests": found.requests()}), encoding="utf-8")
    if plot is not None:
        with writing(plot, "the plot"):
            plot.write_text(draw(result), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(result))
    else:
        show(result)
    if found.interrupted:
        return INTERRUPTED
    return 1 if found.lost or any(row["failed"] for row in result["rows"]) else 0
