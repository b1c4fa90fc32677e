"""Records the requests of coding agents, replays them to `dovetail serve`, and runs the agents
against it.

An agent runs in a network namespace that has loopback only, with an empty home. Its package is kept
in --environments.
"""

import json
import sys
from pathlib import Path

import click

from agents.catalogue import AGENTS, BY_NAME, AgentKind
from agents.normalised import normalised
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
