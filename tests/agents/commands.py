"""Records the requests of coding agents, replays them to `dovetail serve`, and runs the agents
against it.

An agent runs in a network namespace that has loopback only, with an empty home. Its package is kept
in --environments.
"""

import json
import sys
import time
from pathlib import Path

import click

from agents.catalogue import AGENTS, BY_NAME, FILE, AgentKind
from agents.forcing import CHOICES, forcing
from agents.normalised import normalised
from agents.replayed import replay
from agents.sandbox import environment_of, isolate, place, run_agent
from agents.scripted import scripted
from agents.serving import serving_agents
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
    with serving_agents() as url:
        for agent in _chosen(only):
            file = agent.recording if agent.public else private and private / agent.recording.name
            if file is None:
                continue
            began_s = time.monotonic()
            replies = replay(url, file)
            tokens = f"{replies[0].prompt:,}"
            rows.append((agent.name, len(replies), tokens, round(time.monotonic() - began_s, 1)))
    print_table(("agent", "replies", "tokens of the first prompt", "seconds"), rows)


@main.command()
@only_option
@environments_option
@click.option(
    "--model",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="GGUF file to serve in place of the model for agents.",
)
def live(only: tuple[str, ...], environments: Path, model: Path | None) -> None:
    """Run each agent against `dovetail serve`; the file that it is to write must be there.

    A proxy forces the call that writes the file; the model chooses the word in it.
    """
    chosen = _chosen(only)
    modules = {agent: environment_of(agent, environments) for agent in chosen}
    isolate()
    rows = []
    with serving_agents(model) as url:
        for agent in chosen:
            began_s = time.monotonic()
            with place() as at, forcing(url, agent.calls(at.work)[0]) as (front, trouble):
                try:
                    run_agent(agent, modules[agent], at, front)
                except SystemExit as error:
                    trouble.append(str(error))
                file = at.work / FILE
                written = file.read_text(encoding="utf-8").strip() if file.exists() else ""
            ok = written in CHOICES and not trouble
            seconds = round(time.monotonic() - began_s, 1)
            rows.append((agent.name, ok, seconds, written, "\n".join(trouble)))
    print_table(("agent", "ok", "seconds", "wrote", "what went wrong"), rows)
    sys.exit(0 if all(row[1] for row in rows) else 1)
