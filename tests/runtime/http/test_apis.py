"""Other APIs than OpenAI's completions: what their own clients read, from a server and from every
kind of event."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from dovetail.protocol.messages import Emitted
from dovetail.protocol.settings import SamplingSettings, TreeSettings
from dovetail.runtime.http.apis.anthropic import MessagesWriter
from dovetail.runtime.http.apis.ollama import OllamaWriter
from dovetail.runtime.http.apis.openai import ChatWriter
from dovetail.runtime.http.apis.responses import ResponsesBody, ResponsesWriter
from dovetail.runtime.http.apis.writers import OpenWriter
from dovetail.runtime.http.asked import Aliases
from dovetail.runtime.http.bodies import ChatBody
from dovetail.runtime.http.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    Event,
    Reasoning,
    Text,
    joined,
    size,
    without,
)
from dovetail.runtime.http.orders import Defaults, chat_order
from dovetail.runtime.tools.conversation import Reading
from dovetail.runtime.tools.formats import Format, Thoughts
from support.scripted import ScriptedTarget, continuation
from support.site import scripted
from support.web import CHAT, TEMPLATE, Api, Backend, api, backend
from support.written import MESSAGES, MODEL, described_target, written

ASKED: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}
REPLY = "".join(f" w{token}" for token in continuation(CHAT, 5))
KEY = "0123456789abcdef"
SAID: Sequence[Event] = (
    Reasoning("I must "),
    Reasoning("look."),
    Text("Let me "),
    Text("see."),
    CallBegun(0, "abcdefgh1", "read"),
    CallArguments(0, '{"path": '),
    CallArguments(0, '"é.txt"}'),
    CallEnded(0),
    CallBegun(1, "abcdefgh2", "list"),
    CallEnded(1),
)
"""A reply with everything that a reply can have."""
CALLS = [("abcdefgh1", "read", {"path": "é.txt"}), ("abcdefgh2", "list", {})]


# -- a server --------------------------------------------------------------------------------------


def test_anthropics_client_reads_replies_whole_and_streamed(server: Api) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": MESSAGES}
        whole = client.messages.create(**asked)
        assert [block.text for block in whole.content if block.type == "text"] == [REPLY]
        assert whole.stop_reason == "max_tokens"
        assert (whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)) == len(CHAT)
        assert client.messages.count_tokens(**ASKED).input_tokens == len(CHAT)
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == REPLY
            assert stream.get_final_message().usage.output_tokens == 5


def test_a_model_without_thoughts_needs_no_budget_for_them(server: Api) -> None:
    """Anthropic's clients always send one."""
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5}
    for budget in (0, -1):
        whole = server.chat("w5 w6", max_tokens=5, thinking_token_budget=budget)
        assert whole["choices"][0]["message"]["content"] == REPLY
    wrong = server.refusal("/v1/chat/completions", {**body, "reasoning_budget": 9})
    assert (wrong["param"], wrong["code"]) == ("thinking_token_budget", "unsupported_parameter")
    assert "writes no thoughts" in wrong["message"]
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        reply = client.messages.create(**body, thinking={"type": "enabled", "budget_tokens": 1024})
        for budget in ("many", -2, 1.5):
            with pytest.raises(anthropic.BadRequestError, match="thinking_token_budget is"):
                client.messages.create(
                    **body, thinking={"type": "enabled", "budget_tokens": budget}
                )
    assert [block.text for block in reply.content if block.type == "text"] == [REPLY]


def test_a_stop_string_is_named_to_anthropics_client(server: Api) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        word = REPLY.split()[2]
        reply = client.messages.create(
            model=MODEL,
            max_tokens=5,
            messages=MESSAGES,  # type: ignore[arg-type]
            stop_sequences=["w0w0", word],
        )
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", word)


def test_system_prompts_are_read_without_the_line_for_anthropics_billing(server: Api) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=2;"}
        counted = [
            client.messages.count_tokens(**ASKED, system=system).input_tokens  # type: ignore[arg-type]
            for system in ("w3 w4", [billing, {"type": "text", "text": "w3 w4"}])
        ]
        assert counted == [len(CHAT) + 3] * 2


def test_the_responses_api_is_read_by_openais_client(server: Api) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        whole = client.responses.create(
            model=MODEL, input="w5 w6", max_output_tokens=5, tools=[{"type": "web_search"}]
        )
        assert whole.output_text == REPLY
        assert whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert whole.metadata == {"tools_left_out": "web_search"}
        text = ""
        for number, event in enumerate(
            client.responses.create(
                model=MODEL,
                input=[{"role": "user", "content": "w5 w6"}],
                max_output_tokens=5,
                stream=True,
            )
        ):
            assert event.sequence_number == number
            text += event.delta if event.type == "response.output_text.delta" else ""
        assert text == REPLY
        assert event.type == "response.incomplete"
        assert event.response.output_text == REPLY


def test_ollamas_bodies_need_no_content_type_except_from_web_pages(server: Api) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "stream": False}).encode()
    with httpx.Client(base_url=server.url) as client:
        assert client.post("/api/chat", content=body, headers=form).json()["done"]
        foreign = form | {"origin": "https://elsewhere.example"}
        assert client.post("/api/chat", content=body, headers=foreign).status_code == 400


def test_ollamas_client_reads_chats_and_prompts_whole_and_streamed(server: Api) -> None:
    with ollama.Client(host=server.url) as client:
        options = {"num_predict": 5, "num_ctx": 4096}
        chat = partial(client.chat, model=f"{MODEL}:latest", messages=MESSAGES, options=options)
        whole = chat()
        assert (whole.message.content, whole.done_reason) == (REPLY, "length")
        assert (whole.prompt_eval_count, whole.eval_count) == (len(CHAT), 5)
        parts = [*chat(stream=True)]
        assert "".join(part.message.content or "" for part in parts) == REPLY
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
        generate = partial(client.generate, model=MODEL, prompt="w5 w6", options=options)
        assert generate().response == REPLY
        raw = "".join(f" w{token}" for token in continuation([5, 6], 5))
        assert generate(raw=True).response == raw
        assert "".join(part.response or "" for part in generate(raw=True, stream=True)) == raw
        assert client.generate(model=MODEL).done_reason == "load"
        assert [one.model for one in client.list().models] == [MODEL]
        assert [one.context_length for one in client.ps().models] == [512]
        shown = client.show(MODEL)
        assert (shown.modelinfo or {})["dovetail.context_length"] == 512
        assert shown.capabilities == ["completion"]  # its template has no place for tools


def test_llama_servers_own_routes_answer_in_its_form(server: Api) -> None:
    text = "".join(f" w{token}" for token in continuation([5, 6], 4))
    asked = {"prompt": "w5 w6", "n_predict": 4}
    whole = server.ask("/completion", **asked)
    assert (whole["content"], whole["stop_type"], whole["tokens_predicted"]) == (text, "limit", 4)
    assert whole["timings"]["predicted_n"] == 4
    parts = server.stream("/completion", **asked)
    assert "".join(part["content"] for part in parts) == text
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    word = text.split()[2]
    stopped = server.ask("/completion", **asked, stop=[word])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    assert server.ask("/apply-template", messages=MESSAGES) == {"prompt": "w1 w5 w6 w2"}
    assert server.ask("/tokenize", content="w5 w6") == {"tokens": [5, 6]}
    pieces = server.ask("/tokenize", content="w5 w6", with_pieces=True)["tokens"]
    assert pieces == [{"id": 5, "piece": " w5"}, {"id": 6, "piece": " w6"}]
    props = server.client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["chat_template"] == TEMPLATE
    slots = server.client.get("/slots").json()
    assert len(slots) == props["total_slots"]
    assert not any(slot["is_processing"] for slot in slots)


def test_paths_without_v1_are_those_with_it(server: Api) -> None:
    same = {"max_tokens": 3, "seed": 1}
    for path, fields in (
        ("/chat/completions", {"messages": MESSAGES}),
        ("/completions", {"prompt": "w5"}),
    ):
        one, other = (server.ask(prefix + path, **fields, **same) for prefix in ("", "/v1"))
        assert one["choices"] == other["choices"]
    assert server.client.get("/models").json() == server.client.get("/v1/models").json()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0] has the role 'tool'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0] has 'image': send text or tool_result",
        ),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "x"}]}, "cannot be prefilled"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0] has the type"),
        ({"stop_sequences": [""]}, "stop_sequences[0] is empty"),
        ({"sed": 1}, "sed is not a known field here"),
        ({"max_tokens": None}, "max_tokens"),
    ],
)
def test_a_wrong_request_is_refused_in_anthropics_form(
    server: Api, change: dict[str, Any], words: str
) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": MESSAGES, **change}
    reply = server.client.post("/v1/messages", json=body)
    assert reply.status_code == 400
    error = reply.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert words in error["error"]["message"]


def test_errors_have_the_form_of_the_api_that_was_called(server: Api) -> None:
    wrong: dict[str, Any] = {"model": "x", "messages": MESSAGES}
    words = "^there is no model 'x' here"
    with (
        anthropic.Anthropic(base_url=server.url, api_key="x") as claude,
        pytest.raises(anthropic.NotFoundError, match=words[1:]),
    ):
        claude.messages.create(**wrong, max_tokens=5)
    with (
        ollama.Client(host=server.url) as local,
        pytest.raises(ollama.ResponseError, match=words) as refused,
    ):
        local.chat(**wrong)
    assert refused.value.status_code == 404
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        with pytest.raises(openai.NotFoundError, match="there is no model 'x' here"):
            client.responses.create(model="x", input="w5")
        with pytest.raises(openai.BadRequestError, match="nothing is stored here"):
            client.responses.create(model=MODEL, input="w5", previous_response_id="resp_1")
    embeddings = "embeddings are not computed"
    for path, words, inside in (
        ("/v1/embeddings", embeddings, True),
        ("/api/embed", embeddings, False),
        ("/api/pull", "`dovetail pull` on the server's machine", False),
    ):
        reply = server.client.post(path, json={})
        error = reply.json()["error"]
        assert reply.status_code == 404
        assert words in (error["message"] if inside else error)


def test_a_key_is_also_read_where_anthropics_client_sends_it(
    house: Backend, tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n", encoding="utf-8")
    keys.chmod(0o600)
    with api(house.address, f"--http.api_key_file={keys}") as keyed:
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": MESSAGES}
        for given in ({"api_key": KEY}, {"auth_token": KEY}):
            with anthropic.Anthropic(base_url=keyed.url, **given) as client:  # type: ignore[arg-type]
                assert client.messages.create(**asked).stop_reason == "max_tokens"
        with (
            anthropic.Anthropic(base_url=keyed.url, api_key="wrong") as client,
            pytest.raises(anthropic.AuthenticationError, match="is missing or wrong"),
        ):
            client.messages.create(**asked)


def test_an_alias_is_served_and_another_name_is_not(house: Backend) -> None:
    flag = f"--http.aliases=gpt-4o,claude-*={MODEL},small=another"
    with api(house.address, flag) as named:
        for name, status in (("gpt-4o", 200), ("claude-x-1", 200), ("small", 404), ("gpt-4", 404)):
            body = {"messages": MESSAGES, "max_tokens": 1, "model": name}
            assert named.client.post("/v1/chat/completions", json=body).status_code == status
        listed = [model["id"] for model in named.client.get("/v1/models").json()["data"]]
        assert listed == [MODEL, "gpt-4o"]
    with pytest.raises(ValueError, match="write NAME=MODEL"):
        Aliases.read("=x")


# -- a prompt that is read in parts ----------------------------------------------------------------


def test_a_stream_has_the_progress_of_its_prompt_if_it_is_requested() -> None:
    prompt = [7] * 300
    limits = {"context": 512, "prompt_rows": 16}
    with backend(target=False, draft=False) as house, api(house.address) as server:
        house.add(ScriptedTarget, "target", limits=limits)
        for path, fields in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w7 " * 300}]}),
            ("/v1/completions", {"prompt": prompt}),
            ("/completion", {"prompt": prompt}),
        ):
            asked = {**fields, "max_tokens": 1, "return_progress": True}
            told = [part for part in server.stream(path, **asked) if part != "[DONE]"]
            progress = [part["prompt_progress"] for part in told if "prompt_progress" in part]
            assert progress, path
            for part in progress:
                assert part["total"] >= 300 > part["processed"] >= part["cache"]
            assert "prompt_progress" not in told[-1]
            plain = server.stream(path, **fields, max_tokens=1)
            assert not any("prompt_progress" in part for part in plain if part != "[DONE]")


# -- every kind of event ---------------------------------------------------------------------------


@contextmanager
def answering(content: bytes, *, stream: bool) -> Iterator[str]:
    """The address of a server that answers every request with this."""
    with scripted(200, content) as site:
        site.kind = "text/event-stream" if stream else "application/json"
        yield site.url


Read = tuple[str, str, list[Any], str]
"""Reasoning, text, calls (id, name, arguments) and the reason why a reply ended."""


def by_chat(url: str, *, stream: bool) -> Read:
    with openai.OpenAI(base_url=url, api_key="x") as client:
        if stream:
            with client.chat.completions.stream(model="x", messages=[]) as chunks:
                chunks.until_done()
                (choice,) = chunks.get_final_completion().choices
        else:
            (choice,) = client.chat.completions.create(model="x", messages=[]).choices  # type: ignore[assignment]
    called: Any = choice.message.tool_calls or ()
    calls = [(c.id, c.function.name, json.loads(c.function.arguments or "{}")) for c in called]
    thought = (choice.message.model_extra or {})["reasoning_content"]
    return thought, choice.message.content or "", calls, choice.finish_reason


def by_anthropic(url: str, *, stream: bool) -> Read:
    asked: Any = {"model": "x", "max_tokens": 1, "messages": []}
    with anthropic.Anthropic(base_url=url, api_key="x") as client:
        if stream:
            with client.messages.stream(**asked) as told:
                message: Any = told.get_final_message()
        else:
            message = client.messages.create(**asked)
    found: dict[str, list[Any]] = {"thinking": [], "text": [], "tool_use": []}
    for block in message.content:
        found[block.type].append(block)
    calls = [(block.id, block.name, block.input) for block in found["tool_use"]]
    thoughts = "".join(block.thinking for block in found["thinking"])
    return thoughts, "".join(b.text for b in found["text"]), calls, message.stop_reason


def by_responses(url: str, *, stream: bool) -> Read:
    with openai.OpenAI(base_url=url, api_key="x") as client:
        if stream:
            with client.responses.stream(model="x", input="x") as told:
                told.until_done()
                response: Any = told.get_final_response()
        else:
            response = client.responses.create(model="x", input="x")
    items: dict[str, list[Any]] = {"reasoning": [], "message": [], "function_call": []}
    for item in response.output:
        items[item.type].append(item)
    calls = [(c.call_id, c.name, json.loads(c.arguments)) for c in items["function_call"]]
    thoughts = [part.text for item in items["reasoning"] for part in item.content]
    return "".join(thoughts), response.output_text, calls, response.status


def by_ollama(url: str, *, stream: bool) -> Read:
    with ollama.Client(host=url) as client:
        parts = [*client.chat("x", stream=True)] if stream else [client.chat("x")]
    called = [one.function for part in parts for one in part.message.tool_calls or ()]
    calls = [(None, one.name, dict(one.arguments)) for one in called]
    texts = "".join(part.message.content or "" for part in parts)
    thoughts = "".join(part.message.thinking or "" for part in parts)
    return thoughts, texts, calls, parts[-1].done_reason or ""


RESPONSES = partial(ResponsesWriter, asked=ResponsesBody(input="x"), left_out=())


@pytest.mark.parametrize(
    ("write", "read", "reason"),
    [
        (ChatWriter, by_chat, "tool_calls"),
        (MessagesWriter, by_anthropic, "tool_use"),
        (RESPONSES, by_responses, "completed"),
        (OllamaWriter, by_ollama, "stop"),
    ],
    ids=["chat", "messages", "responses", "ollama"],
)
def test_reasoning_text_and_calls_arrive_in_any_pieces(
    write: OpenWriter, read: Callable[..., Read], reason: str
) -> None:
    for stream, pieces in ((False, 1), (True, 1), (True, 3), (True, len(SAID))):
        content = written(write, SAID, pieces=pieces, stream=stream)
        calls = [call if write is not OllamaWriter else (None, *call[1:]) for call in CALLS]
        with answering(content, stream=stream) as url:
            got = read(url, stream=stream)
        assert got == ("I must look.", "Let me see.", calls, reason)


def test_the_salt_of_the_prompt_cache_is_passed_on() -> None:
    asked = ResponsesBody(input="x", cache_salt="tenant 7").chat()[0]
    for fields in (
        {k: v for k, v in asked.items() if v is not None},
        {**ASKED, "cache_salt": None},
    ):
        body = ChatBody.model_validate(fields)
        order = chat_order(body, described_target(), Defaults(SamplingSettings(), TreeSettings()))
        assert [one.salt for one in order.submits] == [fields["cache_salt"] or ""]


@pytest.mark.parametrize("pieces", [1, 5])
def test_the_tokens_of_reasoning_are_counted(pieces: int) -> None:
    target = described_target()
    body = ChatBody.model_validate({"messages": MESSAGES})
    order = chat_order(body, target, Defaults(SamplingSettings(), TreeSettings()))
    order = replace(order, reading=Reading(Format(Thoughts("w5", "w6"))))
    writer, tokens = ChatWriter(order, target, MODEL), (5, 7, 8, 6, 9)
    (reply,) = writer.replies
    events: list[Event] = []
    for at in range(0, len(tokens), pieces):
        some = tokens[at : at + pieces]
        text = "".join(f" w{token}" for token in some)
        drafted = (False,) * len(some)
        part = reply.hear(Emitted(epoch=0, request=1, tokens=some, text=text, drafted=drafted))
        events += part.events if part is not None else ()
    assert joined(events) == (Reasoning("w7 w8"), Text("w9"))
    assert reply.reasoning_tokens == 3
    assert writer.usage()["completion_tokens_details"]["reasoning_tokens"] == 3


def test_events_without_their_beginning_are_the_rest() -> None:
    whole = sum(map(size, SAID))
    for cut in range(whole + 1):
        rest = without(SAID, cut)
        assert sum(map(size, rest)) == whole - cut
        assert without(rest, whole - cut) == ()
