"""Sets up an environment for each client, starts the server once, runs the clients' scripts against
it, and says which saw what they should.

Environments are kept in --environments, so that a second run takes seconds. A script is told of the
server by variables: `DOVETAIL_URL` (with /v1), `DOVETAIL_MODEL` and `DOVETAIL_TOKENIZER` (the
folder of the embedded target).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from agents.sandbox import install
from agents.serving import serving_agents

from clients.catalogue import BY_NAME, CLIENTS, ClientKind
from clients.scores import largest_difference
from clients.server import serving
from dovetail.launch.console.terminal import note, print_table, progress_bar
from dovetail.launch.settings.models import DEMO_FOLDER

TARGET = DEMO_FOLDER / "target"
SCORES_MAY_DIFFER = 1e-3
"""Nats by which a log-likelihood may differ from transformers': sums of a hundred log-probabilities
in fp32, in another order."""
SCRIPT_TIMEOUT_S = 600.0


@click.command()
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([*BY_NAME]),
    help="Clients to try; can be repeated.  [default: all]",
)
@click.option(
    "--environments",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder that keeps their environments.  [default: one that goes]",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout instead of a table."
)
def main(only: tuple[str, ...], environments: Path | None, as_json: bool) -> None:
    """Run clients that people have against `dovetail serve` with the embedded models."""
    chosen = [BY_NAME[name] for name in only] or [*CLIENTS]
    with ExitStack() as opened:
        folder = environments or Path(
            opened.enter_context(tempfile.TemporaryDirectory(prefix="dovetail-clients-"))
        )
        step = opened.enter_context(progress_bar(2 * len(chosen), "steps"))
        pythons = {}
        for client in chosen:
            step(f"installing {client.name}")
            pythons[client] = environment_of(client, folder)
        rows = []
        for tools in (False, True):
            group = [client for client in chosen if client.tools is tools]
            if not group:
                continue
            with serving_agents() if tools else serving() as url:
                for client in group:
                    step(client.name)
                    rows.append(try_client(client, pythons[client], url))
    if as_json:
        click.echo(json.dumps({"clients": rows}))
    else:
        print_table(
            ("client", "version", "ok", "seconds", "what"),
            [(r["client"], r["version"], r["ok"], r["seconds"], r["what"]) for r in rows],
        )
    sys.exit(0 if all(row["ok"] for row in rows) else 1)


def environment_of(client: ClientKind, folder: Path) -> Path:
    """The Python of the client's environment, or its `node_modules`, made if it is not there."""
    home = folder.resolve() / client.name
    if client.program == "node":
        return install(home, client.requirements)
    if client.program == "java":
        return home
    python, complete = home / "bin" / "python", home / "complete"
    if not complete.exists() or complete.read_text(encoding="utf-8") != "\n".join(
        client.requirements
    ):
        note(f"installing {' '.join(client.requirements)}")
        venv.create(home, with_pip=True, clear=True)
        subprocess.run(
            [
                str(python),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                *client.requirements,
            ],
            check=True,
            stdin=subprocess.DEVNULL,
        )
        complete.write_text("\n".join(client.requirements), encoding="utf-8")
    return python


def try_client(client: ClientKind, python: Path, url: str) -> Mapping[str, Any]:
    """Run its script; the last line that it prints is a JSON object of its version, of what it did,
    and of what is to be checked here."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dovetail-client-") as folder:
        told = {
            "DOVETAIL_URL": f"{url}/v1",
            "DOVETAIL_MODEL": "dovetail",
            "DOVETAIL_TOKENIZER": str(TARGET),
            "NODE_MODULES": str(python),
            "HOME": folder,
            "PATH": f"{python.parent}:{os.environ['PATH']}",
        }
        done = subprocess.run(
            [str(python) if client.program == "python" else client.program, str(client.path)],
            env={
                **told,
                "HF_HUB_OFFLINE": "1",
                "HF_DATASETS_OFFLINE": "1",
                "NO_COLOR": "1",
                "LANG": "C.UTF-8",
            },
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SCRIPT_TIMEOUT_S,
        )
    row = {
        "client": client.name,
        "version": "",
        "ok": done.returncode == 0,
        "seconds": round(time.monotonic() - began_s, 1),
        "what": "",
    }
    if done.returncode:
        return {**row, "what": "\n".join((done.stdout + done.stderr).splitlines()[-30:])}
    said = json.loads(done.stdout.splitlines()[-1])
    if "scores" in said:
        difference = largest_difference(TARGET, said["scores"])
        row["ok"] = difference <= SCORES_MAY_DIFFER
        said["what"] += f"; log-likelihoods within {difference:.1g} nats of transformers'"
    return {**row, "version": said["version"], "what": said["what"]}
