"""Recorded sessions of coding agents, replayed to a real server; agents themselves, by `python
tests/agents`."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents.catalogue import AGENTS, FILE, LINE, AgentKind
from agents.dialects import DIALECTS
from agents.forcing import CHOICES, forced
from agents.model import write_model
from agents.normalised import HOME, MODULES, normalised
from agents.replayed import Poster, read_session, replay
from agents.scripted import THOUGHT, scripted

from support.stacks import started
from support.web import api

PUBLIC = [agent for agent in AGENTS if agent.public]
WORK = Path(HOME) / "work"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = write_model(tmp_path_factory.mktemp("agents") / "model")
    flags = {"target.model": str(model), "draft.kind": "ngram", "draft.device": "cpu"}
    with started(flags) as (stack, _), api(stack.address, "--http.model=dovetail") as served:
        yield served.url


@pytest.mark.parametrize("agent", PUBLIC, ids=lambda agent: agent.name)
def test_a_recorded_session_is_served_and_each_request_reuses_the_one_before(
    agent: AgentKind, url: str
) -> None:
    assert replay(url, agent.recording)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_sdks_read_the_replies_that_agents_are_recorded_with(agent: AgentKind) -> None:
    calls = agent.calls(WORK)
    dialect = DIALECTS[agent.route]
    body = {
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": one.tool}} for one in calls],
        },
        "/v1/responses": {
            "input": [{"type": "message", "role": "user", "content": "x"}],
            "tools": [{"type": "function", "name": one.tool} for one in calls],
        },
        "/v1/messages": {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"name": one.tool, "input_schema": {}} for one in calls],
        },
    }[agent.route]
    with scripted(calls) as (address, requests):
        reply = Poster(address).post(
            {"path": agent.route, "headers": {}}, {**body, "model": "dovetail", "stream": True}
        )
    assert [json.loads(written) for _, _, written in reply.calls] == [calls[0].arguments]
    assert reply.thought in (THOUGHT, "")
    assert set(dialect.tools(requests[0]["body"])) == {one.tool for one in calls}


@pytest.mark.parametrize("agent", PUBLIC, ids=lambda agent: agent.name)
def test_a_recording_holds_nothing_of_the_machine_that_made_it(agent: AgentKind) -> None:
    requests = [json.loads(line) for line in agent.recording.read_text("utf-8").splitlines()]
    assert normalised(requests, Path(HOME), Path(MODULES)) == requests
    assert "dovetail-agent-" not in agent.recording.read_text("utf-8")


@pytest.mark.parametrize("agent", PUBLIC, ids=lambda agent: agent.name)
def test_the_task_of_an_agent_is_forced_once_and_then_its_answer(agent: AgentKind) -> None:
    call = agent.calls(WORK)[0]
    dialect = DIALECTS[agent.route]
    session = [one["body"] for one in read_session(agent.recording)]
    session = [body for body in session if dialect.tools(body)]
    (first, *later) = [forced(dialect, body, call) for body in session]
    narrow = dialect.tools(first)[call.tool]
    lists = [value["enum"] for value in narrow["properties"].values()]
    assert sorted(len(values) for values in lists)[-1] == len(CHOICES)
    assert any(FILE in value for values in lists for value in values)
    assert any(LINE in value for values in lists for value in values)
    assert all(body["tool_choice"] == "none" for body in later)
