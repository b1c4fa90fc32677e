"""The command `legacy`: what `dovetail plan` predicts of old machines that it has never seen, by
their data sheets alone, beside what others published of them.

`legacy.toml` has the machines, the models and what others published of them, with sources;
`legacy-predictions.json` what was predicted before anything was compared.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
from click.testing import CliRunner

from benchmarks.options import Command, options, report
from dovetail.launch.commands.plan import command as plan
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.protocol.errors import UserError

HERE = Path(__file__).resolve().parent
REPORTS, PREDICTIONS = HERE / "legacy.toml", HERE / "legacy-predictions.json"
KEY = ("processor", "model", "weights")
"""The fields of a report that no two reports share."""
MACHINE = ("channels", "mt_s", "cores", "ghz", "isa")
"""The fields of a report that become its machine's description."""
SOCKETS, SEVERAL = ("one socket", "several"), ("two", "eight")
CONTEXT = 4096


@click.command(cls=Command)
@click.option("--predict", "anew", is_flag=True, help="Predict anew, and keep that.")
@options("json")
def legacy(anew: bool, as_json: bool) -> None:
    """The tokens/s that `dovetail plan --machine` predicted of every machine and model of
    legacy.toml, over what was measured there."""
    known = tomllib.loads(REPORTS.read_text(encoding="utf-8"))
    if anew:
        keep_predictions(known)
    predictions = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
    rows = [
        {
            **{name: one[name] for name in KEY},
            "sockets": SOCKETS[one["processor"].rpartition(", ")[2] in SEVERAL],
            "predicted": found["predicted"],
            "measured": one["tokens_per_s"],
            "ratio": found["predicted"] / one["tokens_per_s"],
        }
        for one, found in zip(known["reports"], predictions, strict=True)
    ]
    result = {"rows": rows, "spread": spread(rows)}
    report(result, as_json, lambda: show(result))


def keep_predictions(known: Mapping[str, Any]) -> None:
    """Predict every report, and write that."""
    found = []
    with progress_bar(len(known["reports"]), "reports") as step:
        for one in known["reports"]:
            step(one["processor"])
            own = {name: one[name] for name in KEY}
            found.append({**own, "predicted": predict(one, known["models"][one["model"]])})
    lines = ",\n".join(map(json.dumps, found))
    PREDICTIONS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def spread(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the median of predicted over measured, the quartiles and both ends, of all rows, of
    those of one socket and of those of several."""
    told = []
    for name in ("all", *SOCKETS):
        ratios = [row["ratio"] for row in rows if name in ("all", row["sockets"])]
        low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        ends = {"least": min(ratios), "most": max(ratios)}
        told.append(
            {"machines": name, "rows": len(ratios), "median": median, "low": low, "high": high}
            | ends
        )
    return told


def predict(one: Mapping[str, Any], model: Mapping[str, Any]) -> float:
    """Return the tokens/s of the target alone that `dovetail plan` expects of a report's machine
    and model."""
    with TemporaryDirectory(prefix="dovetail-legacy-") as place:
        folder, machine = Path(place), Path(place) / "machine.toml"
        config = {"dtype": "float16", "max_position_embeddings": CONTEXT, **model}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        described = "\n".join(f"{name} = {json.dumps(one[name])}" for name in MACHINE)
        machine.write_text(
            f'title = "{one["processor"]}"\nweights = "half"\n\n[processor]\n{described}\n',
            encoding="utf-8",
        )
        asked = ["--machine", str(machine), "--target", place, "--gguf-size", one["file"]]
        told = CliRunner().invoke(plan, [*asked, "--draft", "none", "--json"])
    if told.exit_code:
        raise UserError(f"{one['processor']}, {one['model']}: {told.exception or told.output}")
    every = json.loads(told.stdout)["alternatives"]
    return round(next(a["tokens_per_s"] for a in every if a["name"] == "target alone"), 3)


def show(result: Mapping[str, Any]) -> None:
    print_table(
        (*KEY, "sockets", "predicted tokens/s", "measured", "predicted / measured"),
        [tuple(row.values()) for row in sorted(result["rows"], key=lambda row: row["ratio"])],
    )
    headings = ("machines", "rows", "median", "a quarter below", "above", "least", "most")
    print_table(headings, [tuple(row.values()) for row in result["spread"]])
