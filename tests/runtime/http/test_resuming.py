"""Clients that were cut off and come back: for any event, what came before it and what comes behind
it are the whole reply."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dovetail.runtime.http.errors import ApiError
from dovetail.runtime.http.resuming import StreamPlace, event_id, read_event_id
from dovetail.runtime.journal.database import Database
from dovetail.runtime.journal.journal import Journal
from support.web import Api, Backend, api, backend, events

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
CHAT = {"messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 9, "ignore_eos": True}
TEXT = {"prompt": "w5 w6", "max_tokens": 9, "ignore_eos": True}
IDS = {"dovetail": {"event_ids": True}}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    with backend(journal=Journal(Database(tmp_path_factory.mktemp("journal")))) as house:
        yield house


@pytest.fixture(scope="module")
def server(house: Backend) -> Iterator[Api]:
    with api(house.address) as server:
        yield server


def told(reply: httpx.Response) -> list[tuple[str, Any]]:
    """The events of a stream, each with its id."""
    assert reply.status_code == 200, reply.read()
    found: list[tuple[str, Any]] = []
    for line in reply.iter_lines():
        if line.startswith("data: {"):
            found.append(("", next(events(_lines(line)))))
        elif line.startswith("id: "):
            found[-1] = (line.removeprefix("id: "), found[-1][1])
    return found


def _lines(line: str) -> Any:
    return httpx.Response(200, text=f"{line}\n")


def pieces(found: list[tuple[str, Any]], choices: int = 1) -> list[tuple[str, list[Any], Any]]:
    """The text of each choice, its log-probabilities, and how it ended."""
    texts = [""] * choices
    scores: list[list[Any]] = [[] for _ in range(choices)]
    ends: list[Any] = [None] * choices
    for _, chunk in found:
        for choice in chunk["choices"]:
            index = choice["index"]
            delta = choice.get("delta", {}).get("content") or choice.get("text") or ""
            texts[index] += delta
            own = choice.get("logprobs") or {}
            scores[index] += own.get("content") or own.get("tokens") or []
            ends[index] = choice["finish_reason"] or ends[index]
    return list(zip(texts, scores, ends, strict=True))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHATS, CHAT),
    "chat with logprobs": (CHATS, {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "text": (TEXTS, {**TEXT, "logprobs": 1}),
    "two choices": (CHATS, {**CHAT, "n": 2, "temperature": 1.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_comes_behind_an_event_and_before_it_is_the_whole_reply(
    server: Api, case: str
) -> None:
    path, body = CASES[case]
    choices = body.get("n", 1)
    asked = {**body, **IDS, "stream": True}
    with server.client.stream("POST", path, json=asked) as reply:
        whole = told(reply)
    name = whole[0][1]["id"]
    assert whole[-1][0].count("e") >= 1
    for place, (event, _) in enumerate(whole):
        if not event:
            continue
        headers = {"last-event-id": event}
        for method, where, more in (
            ("POST", path, {"json": asked}),
            ("GET", f"{path}/{name}?stream=true", {}),
        ):
            with server.client.stream(method, where, headers=headers, **more) as reply:
                rest = told(reply)
            assert all(chunk["id"] == name for _, chunk in rest)
            assert pieces(whole[: place + 1] + rest, choices) == pieces(whole, choices)


def test_a_response_is_told_again_whole_by_its_id_and_the_characters_that_a_client_has(
    server: Api,
) -> None:
    said = server.chat(max_tokens=9, ignore_eos=True)
    again = server.client.get(f"{CHATS}/{said['id']}").json()
    text = said["choices"][0]["message"]["content"]
    assert again["choices"] == said["choices"]
    assert (again["id"], again["created"]) == (said["id"], said["created"])
    with server.client.stream(
        "GET", f"{CHATS}/{said['id']}?stream=true", headers={"last-event-id": "7"}
    ) as reply:
        ((rest, _, reason),) = pieces(told(reply))
    assert (text[:7] + rest, reason) == (text, "length")


@pytest.mark.parametrize("path", [CHATS, TEXTS])
def test_a_get_with_the_id_of_an_event_is_a_stream_unless_it_says_otherwise(
    server: Api, path: str
) -> None:
    body = CHAT if path == CHATS else TEXT
    said = server.client.post(path, json=body).json()
    where, headers = f"{path}/{said['id']}", {"last-event-id": "7"}
    with server.client.stream("GET", where, headers=headers) as reply:
        ((rest, _, _),) = pieces(told(reply))
    choice = said["choices"][0]
    text = choice["message"]["content"] if path == CHATS else choice["text"]
    assert text[:7] + rest == text
    whole = server.client.get(f"{where}?stream=false", headers=headers)
    assert whole.json()["choices"] == said["choices"]


def test_a_stream_has_no_event_ids_unless_they_are_asked_for(server: Api) -> None:
    with server.client.stream("POST", CHATS, json={**CHAT, "stream": True}) as reply:
        assert not any(line.startswith("id:") for line in reply.iter_lines())


@pytest.mark.parametrize(
    ("method", "path", "event", "status", "code"),
    [
        ("GET", f"{CHATS}/chatcmpl-unknown", "", 404, "reply_not_found"),
        ("GET", f"{CHATS}/chatcmpl-unknown", "chatcmpl-other:3.1", 400, "invalid_event_id"),
        ("POST", CHATS, "12", 400, "invalid_event_id"),
        ("POST", CHATS, "chatcmpl-1:many", 400, "invalid_event_id"),
        ("POST", CHATS, "chatcmpl-1:3.1", 404, "reply_not_found"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    server: Api, method: str, path: str, event: str, status: int, code: str
) -> None:
    headers = {"last-event-id": event} if event else {}
    body = {"json": CHAT} if method == "POST" else {}
    refused = server.client.request(method, path, headers=headers, **body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    if status == 404:
        assert "'chatcmpl-unknown'" in refused.text or "'chatcmpl-1'" in refused.text


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("99999", "99999 characters and 0 tokens of"),
        ("3.99", "3 characters and 99 tokens of"),
        ("2.0e", "2 characters and 0 tokens, to its end, of"),
    ],
)
def test_an_event_id_that_its_reply_does_not_have_is_an_error_of_the_stream(
    server: Api, place: str, words: str
) -> None:
    said = server.chat(max_tokens=9, ignore_eos=True)
    name, whole = said["id"], len(said["choices"][0]["message"]["content"])
    headers = {"last-event-id": f"{name}:{place}"}
    with server.client.stream("GET", f"{CHATS}/{name}?stream=true", headers=headers) as reply:
        error = told(reply)[-1][1]["error"]
    assert error["code"] == "invalid_event_id"
    reply_words = f"a reply of {whole} characters and 0 tokens: send"
    assert f"counts {words} {reply_words}" in error["message"]


@pytest.mark.parametrize("other", [{"max_tokens": 8}, {"temperature": 0.7}, {"seed": 1}, {"n": 2}])
def test_an_event_id_of_another_request_is_refused(server: Api, other: dict[str, Any]) -> None:
    name = server.client.post(CHATS, json=CHAT).json()["id"]
    headers = {"last-event-id": f"{name}:3.0"}
    refused = server.client.post(CHATS, json={**CHAT, **other}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_event_id")
    assert "another request" in refused.text
    assert server.client.post(CHATS, json=CHAT, headers=headers).json()["id"] == name


def test_a_request_that_is_too_long_to_be_kept_is_answered_and_not_told_again(server: Api) -> None:
    said = server.client.post(CHATS, json={**CHAT, "chat_template_kwargs": {"a": "é" * 800_000}})
    assert said.json()["choices"][0]["finish_reason"] == "length"
    again = server.client.get(f"{CHATS}/{said.json()['id']}")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "reply_not_found")
    assert "too long to be kept" in again.text
    assert server.chat(max_tokens=3)["choices"]


def test_an_id_that_is_too_long_for_any_reply_is_not_known(server: Api) -> None:
    name = "long" * 200
    got = server.client.get(f"{CHATS}/{name}")
    sent = server.client.post(CHATS, json=CHAT, headers={"last-event-id": f"{name}:3.1"})
    for refused in (got, sent):
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "reply_not_found")


def test_an_event_id_reads_as_it_was_written() -> None:
    places = (StreamPlace(7, 3), None, StreamPlace(0, 0), StreamPlace(12, 5, ended=True))
    name, read = read_event_id(event_id("chatcmpl-1", places))
    assert (name, read) == ("chatcmpl-1", places)
    with pytest.raises(ApiError, match="is not the id of an event"):
        read_event_id("chatcmpl-1:1.2,x")


def test_without_a_journal_no_reply_is_known(tmp_path: Path) -> None:
    with backend() as house, api(house.address) as server:
        said = server.chat(max_tokens=3)
        assert server.client.get(f"{CHATS}/{said['id']}").status_code == 404


def test_each_chunk_of_a_resumable_stream_has_an_id(server: Api) -> None:
    found = told(server.client.post(CHATS, json={**CHAT, **IDS, "stream": True, "n": 2}))
    assert all(name for name, _ in found)
    assert len({name for name, _ in found}) == len(found)
