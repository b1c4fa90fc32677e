"""The command `legacy`: what `dovetail plan` predicts of old machines that it has never seen, by
their data sheets alone.

`legacy.toml` has the machines, the models and what others published of them, with sources;
`legacy-predictions.json` what was predicted before anything was compared.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from click.testing import CliRunner

from benchmarks.options import Command, options, report
from dovetail.launch.commands.plan import command as plan
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.protocol.errors import UserError

HERE = Path(__file__).resolve().parent
REPORTS, PREDICTIONS = HERE / "legacy.toml", HERE / "legacy-predictions.json"
KEY = ("processor", "model", "weights")
"""What tells a report from the others."""
MACHINE = ("channels", "mt_s", "cores", "ghz", "isa")
"""What a description of a machine has of a report."""
CONTEXT = 4096


@click.command(cls=Command)
@options("json")
def legacy(as_json: bool) -> None:
    """Predict the tokens/s of every machine and model of legacy.toml by `dovetail plan --machine`
    and keep them in legacy-predictions.json."""
    known = tomllib.loads(REPORTS.read_text(encoding="utf-8"))
    found = []
    with progress_bar(len(known["reports"]), "reports") as step:
        for one in known["reports"]:
            step(one["processor"])
            own = {name: one[name] for name in KEY}
            found.append({**own, "predicted": predict(one, known["models"][one["model"]])})
    lines = ",\n".join(map(json.dumps, found))
    PREDICTIONS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    report({"rows": found}, as_json, lambda: show(found))


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


def show(found: list[dict[str, Any]]) -> None:
    print_table((*KEY, "predicted tokens/s"), [tuple(one.values()) for one in found])
