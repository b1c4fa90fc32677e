"""Records the requests of coding agents, replays them to `dovetail serve`, and runs the agents
against it.

An agent runs in a network namespace that has loopback only, with an empty home. Its package is kept
in --environments.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from clients.server import serving

from agents.catalogue import AGENTS, BY_NAME, AgentKind
from agents.model import write_model
from agents.normalised import normalised
from agents.replayed import replay
from agents.sandbox import environment_of, isolate, place, run_agent
from agents.scripted import scripted
from dovetail.launch.console.terminal import print_table


@click.group()
def main() -> None:
    """Coding agents against `dovetail serve`."""


def _chosen(only: tuple[str, ...]) -> list[AgentKind]:
    return [BY_NAME[name] for name in only] or [*AGENTS]


only_option = click.option(
    "--only",
    multiple=True,
    type=click.Choice([*BY_NAME]),
    help="Agents to try; can be repeated.  [default: all]",
)
environments_option = click.option(
    "--environments",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder that keeps their packages.",
)


@main.command()
@only_option
@environments_option
@click.option(
    "--private",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for recordings that may not be published.  [default: they are not kept]",
)
def record(only: tuple[str, ...], environments: Path, private: Path | None) -> None:
    """Record each agent's requests to a server that answers by a script."""
    chosen = _chosen(only)
    modules = {agent: environment_of(agent, environments) for agent in chosen}
    isolate()
    rows = []
    for agent in chosen:
        with place() as at, scripted(agent.calls(at.work)) as (url, requests):
            run_agent(agent, modules[agent], at, url)
            kept = normalised(requests, at.home, modules[agent])
            changed = sorted(path.name for path in at.work.iterdir())
        lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in kept)
        file = agent.recording if agent.public else private and private / agent.recording.name
        if file is not None:
            file.write_text(lines, encoding="utf-8")
        rows.append((agent.name, agent.version, len(kept), len(lines), " ".join(changed)))
    print_table(("agent", "version", "requests", "bytes", "files written"), rows)
    sys.exit(0 if all(row[-1] for row in rows) else 1)


@contextmanager
def served() -> Iterator[str]:
    """The URL of a server with the model for agents."""
    with tempfile.TemporaryDirectory(prefix="dovetail-agents-") as folder:
        model = write_model(Path(folder) / "model")
        with serving(f"--target.model={model}", "--draft.kind=ngram") as url:
            yield url


@main.command("replay")
@only_option
@click.option(
    "--private",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with recordings that may not be published.  [default: they are left out]",
)
def replay_command(only: tuple[str, ...], private: Path | None) -> None:
    """Post the recorded requests to `dovetail serve`, and check the replies with the SDKs."""
    rows = []
    with served() as url:
        for agent in _chosen(only):
            file = agent.recording if agent.public else private and private / agent.recording.name
            if file is None:
                continue
            began_s = time.monotonic()
            replies = replay(url, file)
            tokens = f"{replies[0].prompt:,}"
            rows.append((agent.name, len(replies), tokens, round(time.monotonic() - began_s, 1)))
    print_table(("agent", "replies", "tokens of the first prompt", "seconds"), rows)
