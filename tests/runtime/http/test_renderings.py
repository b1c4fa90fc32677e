"""Chats through a real server whose target has a hostile template, none, or an unusable one: they
are refused with a reason, and other requests are unaffected."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.runtime.http.bodies import CompletionBody
from dovetail.runtime.http.service import Service
from support.scripted import ScriptedTarget, continuation
from support.web import Api, api, backend

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "w5 w6"}]
BODY = {"messages": MESSAGES, "max_tokens": 4}
LASTING = (
    "{% if evil %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ messages[0].content }}"
)
BOMB = (
    "{% if evil %}{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}"
    "{% endfor %}{{ n.x }}{% endif %}{{ messages[0].content }}"
)


def refusal(server: Api, body: dict[str, Any], path: str = CHATS) -> str:
    """The message with which a request is refused, status 400."""
    answer = server.client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize(
    "template",
    [LASTING, pytest.param(BOMB, marks=pytest.mark.slow)],
    ids=["a loop", "lists of lists"],
)
def test_while_a_template_runs_for_ever_others_are_answered(template: str) -> None:
    with backend(target=False) as house:
        house.add(ScriptedTarget, "target", template=template)
        with api(house.address) as server:
            expected = server.chat("w5 w6", max_tokens=4)["choices"][0]["message"]
            evil, refused = {**BODY, "chat_template_kwargs": {"evil": True}}, list[str]()
            threads = [
                threading.Thread(target=lambda: refused.append(refusal(server, evil)))
                for _ in range(2)
            ]
            threads[0].start()
            for _ in range(3):
                assert server.client.get("/v1/models").status_code == 200
                assert server.ask(TEXTS, prompt="w5 w6", max_tokens=4)["choices"][0]["text"]
            assert server.chat("w5 w6", max_tokens=4)["choices"][0]["message"] == expected
            assert not refused
            threads[1].start()
            for thread in threads:
                thread.join()
            words = "the chat template of the target takes more than 1 s of CPU time"
            assert refused == [words] * 2


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("", "the model has no chat template: use /v1/completions, or `dovetail generate --raw`"),
        ("{{ messages | evil }}", "No filter named 'evil'.): use /v1/completions, or"),
        ("{{ messages[0].content is evil }}", "No test named 'evil'.): use /v1/completions, or"),
        ("{{ raise_exception('the model has several (rag)') }}", "the model has several (rag)"),
        ("{{ messages[0].text }}", "drops message 1 (role 'user')"),
    ],
)
def test_without_a_usable_template_chats_are_refused_and_completions_served(
    template: str, words: str
) -> None:
    with backend(target=False) as house:
        house.add(ScriptedTarget, "target", template=template)
        with api(house.address) as server:
            for path in (CHATS, "/tokenize"):
                assert words in refusal(server, {"messages": MESSAGES}, path)
            reply = server.ask(TEXTS, prompt="w5 w6", max_tokens=4)["choices"][0]["text"]
            assert reply.split() == [f"w{token}" for token in continuation((5, 6), 4)]


def test_parts_are_read_by_a_template_that_iterates_over_them() -> None:
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    with backend(target=False) as house:
        house.add(ScriptedTarget, "target", template=template)
        with api(house.address) as server:
            parts = [{"type": "text", "text": text} for text in ("w5", " w6")]
            for content in ("w5 w6", parts):
                messages = [{"role": "user", "content": content}]
                asked = server.ask("/tokenize", messages=messages)
                assert asked["tokens"] == [5, 6]
            parts.append({"type": "image_url", "image_url": {"url": "data:,"}})
            wrong = refusal(server, {"messages": [{"role": "user", "content": parts}]})
            assert "a part of type 'image_url' cannot be read" in wrong
            assert "\n" not in wrong


def test_long_prompts_of_one_key_leave_a_thread_to_those_of_another() -> None:
    terms: Any = SimpleNamespace(dashboard="off")
    service, gate = Service(None, terms, None), threading.Event()  # type: ignore[arg-type]
    body = CompletionBody(prompt="w" * 9000)

    async def play() -> None:
        flood = [asyncio.create_task(service._read(gate.wait, body, "a")) for _ in range(40)]
        try:
            async with asyncio.timeout(60):
                assert await service._read(lambda: "read", body, "b") == "read"
            assert not any(one.done() for one in flood)
        finally:
            gate.set()
            await asyncio.gather(*flood)

    asyncio.run(play())
