"""A server over HTTP that answers, refuses, breaks off or is none of ours: what the person in front
of it is told."""

import io
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.launch.chat.answering import PLAIN, Answer, Manner
from dovetail.launch.chat.web import WebAnswerer, WebServer, answerer_at, api_key, check_flags
from dovetail.launch.commands.chat import Chat
from dovetail.launch.settings.configure import configure
from dovetail.protocol.errors import DovetailError, UserError
from dovetail.protocol.messages import Result
from dovetail.protocol.settings import Sampling, SamplingSettings, TreeSettings
from dovetail.runtime.http.apis.writers import metrics_of
from support.golden import representative
from support.site import DONE, Script, chunk, event, scripted

MANNER = Manner(
    Sampling(temperature=0.5), 16, TreeSettings(), seed=3, stop=("END",), speculate=False
)


def ask(server: Script, key: str = "") -> tuple[Answer, list[tuple[str, bool]]]:
    shown: list[tuple[str, bool]] = []
    answer = WebAnswerer(server.url, key).answer(
        ("Hello.", "Hi", "And?"), MANNER, lambda *piece: shown.append(piece)
    )
    return answer, shown


def test_a_server_without_a_chat_template_continues_the_text_in_chat_and_in_generate() -> None:
    refusal = b'{"error": {"message": "the model has no chat template: use /v1/completions"}}'
    reply = b': reading\n\ndata:{"choices": [{"index": 0, "text": "one"}]}\n\n' + DONE
    with scripted(400, refusal, (200, reply)) as server:
        answerer = WebAnswerer(server.url, "")
        assert answerer.no_chats() == PLAIN
        assert answerer.answer(("Hello.", "Hi", "And?"), MANNER, lambda *_: None).text == "one"
    path, _, body = server.asked[1]
    assert (path, body["prompt"]) == ("/v1/completions", "Hello.\nHi\nAnd?")
    assert not {"messages", "max_completion_tokens"}.intersection(body)


@pytest.mark.parametrize(
    ("flags", "model", "asks"), [({}, "b", 1), ({"target.model": "a"}, "a", 0)]
)
def test_of_several_models_the_named_one_replies_or_else_the_loaded_one(
    flags: dict[str, str], model: str, asks: int
) -> None:
    with scripted(200, b"{}", (200, chunk("Hi") + DONE)) as server:
        server.states = {"a": "unloaded", "b": "loaded"}
        server.replies = server.replies[1 - asks :]
        answerer = answerer_at(server.url, configure(flags=flags, environment={}))
        assert answerer.no_chats() == ""
        assert answerer.answer(("Hello.",), MANNER, lambda *_: None).text == "Hi"
    paths = [path for path, _, _ in server.asked]
    assert paths == [*["/tokenize"][:asks], "/v1/chat/completions"]
    assert {body["model"] for _, _, body in server.asked} == {model}


def test_a_reply_is_shown_as_it_comes_with_its_colours_and_its_figures() -> None:
    result: Result = representative()["finished"].result.model_copy(
        update={"text": "one two", "token_ids": (5, 6)}
    )
    said = (
        chunk("one ", [(5, "one ", True)])
        + chunk("two", [(6, "two", False)])
        + event({"choices": [], "metrics": metrics_of(result, 15, failure=True)})
        + DONE
    )
    with scripted(200, said) as server:
        answer, shown = ask(server, "secret")
    assert shown == [("one ", True), ("two", False)]
    assert answer == Answer("one two", result)
    ((path, authorization, body),) = server.asked
    assert (path, authorization) == ("/v1/chat/completions", "Bearer secret")
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert (body["temperature"], body["seed"], body["stop"], body["dovetail"]["speculate"]) == (
        0.5,
        3,
        ["END"],
        False,
    )


def test_a_server_is_told_what_the_user_has_said_and_decides_the_rest() -> None:
    said = frozenset({"temperature"})
    manner = replace(MANNER, said=said, template={"enable_thinking": False})
    with scripted(200, chunk("Hi") + DONE) as server:
        WebAnswerer(server.url, "").answer(("Hello.",), manner, lambda *_: None)
    ((_, _, body),) = server.asked
    assert body["temperature"] == 0.5
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert not {*SamplingSettings.model_fields, "max_completion_tokens"} & {*body} - said


def test_which_defaults_of_the_server_hold_is_told() -> None:
    held = {**SamplingSettings().model_dump(mode="json"), "temperature": 0.6, "top_k": 20}
    with scripted(200, DONE) as server:
        server.sampling = held
        answerer = WebAnswerer(server.url, "")
        nothing = replace(MANNER, said=frozenset())
        assert answerer.defaults(nothing) == "sampling by the server: temperature 0.6, top_k 20"
        assert answerer.defaults(replace(nothing, said=frozenset({"temperature"}))) == (
            "sampling by the server: top_k 20"
        )
        assert answerer.defaults(MANNER) == ""


def test_a_server_that_tells_nothing_of_drafts_is_taken_at_its_word() -> None:
    plain = event({"choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}]})
    with scripted(200, plain + DONE) as server:
        assert ask(server) == (Answer("Hi"), [("Hi", False)])


@pytest.mark.parametrize(
    ("status", "body", "mistake", "words"),
    [
        (
            400,
            b'{"error": {"message": "the prompt is \\u001b[2Jlong"}}',
            True,
            r"the prompt is \?\[2Jlong",
        ),
        (
            401,
            b'{"error": {"message": "no"}}',
            True,
            r"refuses a request without an API key: name its file with --http.api_key_file, or "
            r"set DOVETAIL_API_KEY",
        ),
        (500, b'{"error": {"message": "no room"}}', False, "the server failed: no room"),
        (
            503,
            b'{"error": {"message": "no target"}}',
            False,
            "the server cannot answer now: no target",
        ),
        (429, b'{"error": {"message": "full"}}', False, "the server cannot answer now: full"),
        (500, b"<html>", False, "did not answer with a JSON object: '<html>'"),
        (200, chunk("Hi"), False, "closed the connection within a reply"),
        (
            200,
            chunk("Hi") + event({"error": {"message": "lost"}}),
            False,
            "the server failed: lost",
        ),
        (200, b"data: [1]\n\n", False, "did not answer with a JSON object"),
    ],
)
def test_what_goes_wrong_is_told(status: int, body: bytes, mistake: bool, words: str) -> None:
    with scripted(status, body) as server, pytest.raises(DovetailError, match=words) as caught:
        ask(server)
    assert isinstance(caught.value, UserError) is mistake


@pytest.mark.parametrize(
    "url", ["http://", "http://h:port", "http://u@h", "http://h?x=1", "ftp://h"]
)
def test_what_is_no_url_is_told(url: str) -> None:
    with pytest.raises(UserError, match=r"is not (a|the) URL.*write http://HOST:PORT"):
        WebAnswerer(url, "")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"220 mail\x1b]0;mine\x07" + b"!" * 900 + b"\n", r"does not speak HTTP; .*mail\?]0;.*!$"),
        (b"", "closed the connection: Remote end"),
        (None, "has sent nothing for 0.2 s"),
    ],
)
def test_what_is_no_server_is_named(answer: bytes | None, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        site = WebServer(f"http://127.0.0.1:{server.getsockname()[1]}", "", silence_s=0.2)

        def say() -> None:
            with server.accept()[0] as client:
                client.recv(1 << 16)
                if answer is not None:
                    client.sendall(answer)
                else:
                    client.recv(1)

        thread = threading.Thread(target=say)
        thread.start()
        with pytest.raises(DovetailError, match=words) as caught:
            site.get("/v1/models")
        thread.join()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_the_key_comes_from_the_file_or_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_API_KEY", "from the environment")
    assert api_key(configure(environment={})) == "from the environment"
    (tmp_path / "keys").write_text("\nfirst\nsecond\n")
    assert (
        api_key(configure(flags={"http.api_key_file": str(tmp_path / "keys")}, environment={}))
        == "first"
    )
    with pytest.raises(UserError, match="cannot be read"):
        api_key(configure(flags={"http.api_key_file": str(tmp_path / "none")}, environment={}))


def test_settings_of_the_server_are_refused_and_wishes_are_not() -> None:
    check_flags(
        configure(
            flags={"draft.kind": "none", "sampling.temperature": "0.5", "http.api_key_file": "x"},
            environment={},
            demo=False,
        )
    )
    for name, text in {
        "tree.gamma": "3",
        "target.weights": "half",
        "draft.kind": "ngram",
        "sampling.acceptance": "coupled",
    }.items():
        with pytest.raises(UserError, match=f"the server decides --{name}"):
            check_flags(configure(flags={name: text}, environment={}, demo=False))


def test_a_question_is_asked_again_when_a_worker_has_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello.\nAnd?\n/retry\nThen?\n"))
    hi, away = (
        (200, chunk("Hi") + DONE),
        (503, b'{"error": {"message": "no target worker is there"}}'),
    )
    with scripted(*hi, away, hi) as server:
        Chat(WebAnswerer(server.url, ""), MANNER, as_json=False).talk()
    assert (
        "the server cannot answer now: no target worker is there\n/retry asks the question "
        "again\n" in capsys.readouterr().err
    )
    asked = [[message["content"] for message in body["messages"]] for _, _, body in server.asked]
    assert asked == [
        ["Hello."],
        ["Hello.", "Hi", "And?"],
        ["Hello.", "Hi", "And?"],
        ["Hello.", "Hi", "And?", "Hi", "Then?"],
    ]
