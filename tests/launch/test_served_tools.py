"""Tools through real processes: the embedded target with a template that has tools, and
openai-python as the client."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from dovetail.launch.settings.models import TARGET_FOLDER
from support.patience import PATIENCE_S
from support.served import ready
from support.tool_templates import NOW, TEMPLATES

Start = Callable[..., subprocess.Popen[str]]
Client = Callable[..., openai.OpenAI]
ASKED: dict[str, Any] = {"role": "user", "content": "How is the weather in Rome?"}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS},
}
DEMANDED: dict[str, Any] = {
    "messages": [ASKED],
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 120,
    "temperature": 1.0,
}


@pytest.fixture
def client_of(start: Start, tmp_path: Path) -> Iterator[Client]:
    """Returns a client of the embedded target with a family's template, in which there are no
    thoughts; `thought`: what opens one before each reply."""
    with ExitStack() as clients:

        def begin(family: str, *flags: str, thought: str = "") -> openai.OpenAI:
            template = TEMPLATES[family].replace("<think>\n", "").replace("[THINK]", "")
            begun = f"<|assistant|>\n{thought}{{% endif %}}"
            template = template.replace("<|assistant|>\n{% endif %}", begun)
            target = tmp_path / "target"
            shutil.copytree(TARGET_FOLDER, target)
            (target / "chat_template.jinja").write_text(template, encoding="utf-8")
            own = ("--http.port", "0", "--draft.device", "cpu", "--json", *flags)
            url = ready(start("serve", "--target", str(target), *own))["url"]
            return clients.enter_context(
                openai.OpenAI(base_url=f"{url}/v1", api_key="x", timeout=PATIENCE_S, max_retries=0)
            )

        yield begin


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="target", **{**DEMANDED, **fields})


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[Any, list[Any]]:
    """The message of a stream in one piece, and its chunks."""
    chunks = list(ask(client, stream=True, **fields))
    message: dict[str, Any] = {"content": "", "calls": []}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        message["content"] += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(message["calls"])
                message["calls"].append([call.function.name, ""])
            message["calls"][call.index][1] += call.function.arguments
        message["reason"] = choice.finish_reason or message.get("reason")
    return message, chunks


def summary(reply: Any) -> dict[str, Any]:
    (choice,) = reply.choices
    calls = choice.message.tool_calls or ()
    return {
        "content": choice.message.content or "",
        "calls": [[call.function.name, call.function.arguments] for call in calls],
        "reason": choice.finish_reason,
    }


def assert_valid(reply: Any) -> None:
    (choice,) = reply.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert call.function.name == "get_weather"
    assert len(call.id) == 9
    assert call.id.isalnum()
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


def test_a_call_is_demanded_streamed_answered_and_refused(client_of: Client) -> None:
    client = client_of("hermes")
    for seed in range(2):
        whole = ask(client, seed=seed)
        assert_valid(whole)
        alone = {"extra_body": {"dovetail": {"speculate": False}}}
        assert summary(ask(client, seed=seed, **alone)) == summary(whole)
        message, chunks = streamed(client, seed=seed)
        assert message == summary(whole)
        assert chunks[0].choices[0].delta.role == "assistant"
        pieces = [
            call.function.arguments
            for chunk in chunks
            for choice in chunk.choices
            for call in choice.delta.tool_calls or ()
        ]
        assert len(pieces) > 3
    first = ask(client, tools=[NOW], temperature=0).choices[0].message
    (call,) = first.tool_calls
    turn = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
    after = ask(client, messages=[ASKED, first, turn], tools=[NOW], tool_choice="none", seed=2)
    assert after.choices[0].message.content
    named = {"type": "function", "function": {"name": "now"}}
    for tools in ([TOOL, NOW], [NOW, TOOL]):
        named_call = (
            ask(client, tools=tools, tool_choice=named, temperature=0)
            .choices[0]
            .message.tool_calls[0]
        )
        assert named_call.function.name == "now"
    legacy = {"functions": [NOW["function"]], "function_call": {"name": "now"}}
    left_out = dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), openai.omit)
    (choice,) = ask(client, **left_out, **legacy, temperature=0).choices
    assert choice.finish_reason == "function_call"
    assert choice.message.function_call.name == "now"
    assert json.loads(choice.message.function_call.arguments) == {}
    free = ask(client, tool_choice="auto", seed=3)
    assert free.choices[0].message.content or free.choices[0].message.tool_calls
    for fields, param in (
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "tool_choice"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, **fields)
        assert refused.value.param == param


def test_a_thought_ends_at_its_budget(client_of: Client) -> None:
    """With tools and without, whole and streamed, with a draft and without; by default, and under
    the names of vLLM, llama-server and Anthropic."""
    flags = ("--http.reasoning_budget", "3")
    client = client_of("hermes", *flags, thought="<think>\n")
    free = dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), openai.omit)

    def thought(tokens: int | None, **fields: Any) -> Any:
        body = {} if tokens is None else {"thinking_token_budget": tokens}
        body |= {"min_tokens": 20, **fields.pop("own", {})}
        return ask(client, extra_body=body, **fields)

    def thoughts(message: Any) -> str:
        return getattr(message, "reasoning_content", "")

    def tokens(text: str) -> int:
        reply = httpx.post(f"{str(client.base_url)[:-4]}/tokenize", json={"content": text})
        return len(reply.json()["tokens"])

    for fields in (
        {**free, "temperature": 0, "max_tokens": 30},
        {**free, "seed": 1, "max_tokens": 30},
        {"seed": 2},
    ):
        (endless,) = thought(-1, **{**fields, "max_tokens": 24}).choices
        for budget in (12, 0):
            whole = thought(budget, **fields)
            (choice,) = whole.choices
            reasoning = thoughts(choice.message)
            assert endless.message.reasoning_content.startswith(reasoning)
            assert abs(tokens(reasoning) - budget) < 3
            if "tools" in fields:
                assert choice.message.content
            else:
                assert_valid(whole)
            alone = thought(budget, **fields, own={"dovetail": {"speculate": False}})
            assert thoughts(alone.choices[0].message) == reasoning
            assert summary(alone) == summary(whole)
            chunks = list(thought(budget, **fields, stream=True))
            deltas = [one.delta for chunk in chunks for one in chunk.choices]
            assert "".join(map(thoughts, deltas)) == reasoning
            said = "".join(one.content or "" for one in deltas)
            assert said == (choice.message.content or "")
    fields = {**free, "temperature": 0, "max_tokens": 30}
    three = thought(3, **fields).choices[0].message.reasoning_content
    endless = [thought(budget, **fields).choices[0] for budget in (-1, 1 << 40)]
    assert endless[0].message == endless[1].message
    for own in ({}, {"thinking_budget_tokens": 3}, {"reasoning_budget": 3}):
        assert thought(None, own=own, **fields).choices[0].message.reasoning_content == three
    body = {
        "messages": [ASKED],
        "max_tokens": 30,
        "temperature": 0,
        "thinking": {"type": "enabled", "budget_tokens": 3},
    }
    reply = httpx.post(f"{client.base_url}messages", json=body, timeout=PATIENCE_S).json()
    assert reply["content"][0] == {"type": "thinking", "thinking": three, "signature": ""}
    with pytest.raises(openai.BadRequestError, match="mean the same, but differ"):
        thought(3, own={"reasoning_budget": 4})


@pytest.mark.slow
def test_a_stream_with_a_call_is_continued(client_of: Client, tmp_path: Path) -> None:
    flags = ("--coordinator.journal", str(tmp_path / "journal"))
    client = client_of("hermes", *flags)
    url = f"{str(client.base_url).rstrip('/')}/chat/completions"
    body = {**DEMANDED, "stream": True, "seed": 1, "dovetail": {"event_ids": True}}

    def told(**headers: str) -> list[tuple[str, list[Any]]]:
        reply = httpx.post(url, json=body, headers=headers, timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text
        found: list[tuple[str, list[Any]]] = [("", [])]
        for line in reply.text.splitlines():
            if line.startswith("data: {"):
                found[-1][1].append(json.loads(line.removeprefix("data: ")))
            elif line.startswith("id: "):
                found[-1] = (line.removeprefix("id: "), found[-1][1])
                found.append(("", []))
        return found

    def calls(chunks: list[Any]) -> list[Any]:
        return [
            piece
            for chunk in chunks
            for choice in chunk["choices"]
            for piece in choice["delta"].get("tool_calls", ())
        ]

    def joined(pieces: list[Any]) -> str:
        return "".join(piece["function"]["arguments"] for piece in pieces)

    whole = told()
    every = calls([chunk for _, chunks in whole for chunk in chunks])
    assert every[0]["id"]
    for place in range(len(whole) - 1):
        before = calls([chunk for _, chunks in whole[: place + 1] for chunk in chunks])
        rest = told(**{"Last-Event-ID": whole[place][0]})
        after = calls([chunk for _, chunks in rest for chunk in chunks])
        assert joined(before + after) == joined(every)
        assert [one["id"] for one in before + after if "id" in one] == [every[0]["id"]]


@pytest.mark.slow
@pytest.mark.parametrize("family", TEMPLATES)
def test_a_call_of_each_family_is_valid(family: str, client_of: Client) -> None:
    client, valid = client_of(family), 0
    for seed in range(8):
        whole = ask(client, seed=seed, max_tokens=240)
        if whole.choices[0].finish_reason == "length":
            continue
        if family == "gemma":  # whose grammar has no bounds of numbers
            assert [call.function.name for call in whole.choices[0].message.tool_calls]
        else:
            assert_valid(whole)
        assert streamed(client, seed=seed, max_tokens=240)[0] == summary(whole)
        valid += 1
        if valid == 2:
            break
    assert valid, "every reply was cut, such as within thoughts"
