"""The fate of a request when its client, its deadline, the coordinator, the target or the server
itself goes."""

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dovetail.protocol.messages import Fingerprint, Supervised
from dovetail.protocol.settings import CoordinatorSettings
from dovetail.runtime.http.gateway import FRESH_S
from support.cases import everyday
from support.patience import PATIENCE_S
from support.scripted import ScriptedTarget, continuation
from support.web import CHAT, Api, Backend, api, backend, events

CHATS = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def slow(house: Backend) -> Iterator[Backend]:
    """The shared target, which thinks a while about every command."""
    house.token_s = 0.02
    yield house
    house.token_s = 0.0
    house.held = False
    house.until_idle()


@contextlib.contextmanager
def asked(server: Api, **fields: object) -> Iterator[socket.socket]:
    """A connection on which a request has been sent, and nothing been read."""
    body = json.dumps({**BODY, **fields}).encode()
    with socket.create_connection(server.address) as connection:
        connection.sendall(
            b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            % CHATS.encode()
        )
        connection.sendall(b"content-length: %d\r\n\r\n%s" % (len(body), body))
        yield connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_frees_both_workers(
    server: Api, slow: Backend, stream: bool, n: int
) -> None:
    with asked(server, stream=stream, n=n):
        slow.until(lambda: slow.sessions == n)
    slow.until_idle()
    assert server.client.get("/load").json() == {"server_load": 0}


def test_a_client_that_leaves_while_its_prompt_is_read_is_forgotten(
    server: Api, slow: Backend
) -> None:
    with slow.still():
        slow.held = True
    with asked(server, stream=True):
        slow.until(lambda: slow.sessions == 1)
    slow.until(lambda: slow.sessions == 0)
    with slow.still():
        slow.held = False
    slow.until_idle()


def test_a_request_that_takes_too_long_is_ended(slow: Backend) -> None:
    with api(slow.address, "--http.deadline_s=0.5") as server:
        late = server.client.post(CHATS, json=BODY)
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "timeout"
        slow.until_idle()
        *_, last = server.stream(CHATS, **BODY)
        assert last["error"]["code"] == "timeout"
        slow.until_idle()


def test_a_full_target_is_told_with_a_time_to_come_back() -> None:
    with backend(target=False, settings=CoordinatorSettings(queue=0)) as house:
        house.add(ScriptedTarget, "target", limits={"context": 512, "sessions": 1})
        house.token_s = 0.02
        with api(house.address) as server, asked(server, stream=True):
            house.until(lambda: house.sessions == 1)
            refused = server.client.post(CHATS, json=BODY)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1


def test_without_a_target_nothing_is_served_and_with_one_it_is() -> None:
    with backend(target=False) as house, api(house.address) as server:
        refused = server.client.post(CHATS, json=BODY)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/readyz").status_code == 503
        assert "target" in server.client.get("/readyz").json()["missing"][0]
        house.add(ScriptedTarget, "target")
        assert server.client.get("/readyz").status_code == 200
        assert server.chat(max_tokens=5)["usage"]["completion_tokens"] == 5


def test_a_target_that_is_lost_and_not_made_good_ends_a_stream_with_an_error() -> None:
    with (
        backend(settings=CoordinatorSettings(recovery_s=0.0)) as house,
        api(house.address) as server,
    ):
        house.token_s = 0.02
        with server.client.stream("POST", CHATS, json={**BODY, "stream": True}) as reply:
            said = events(reply)
            next(said)
            house.lose(house.workers[0])
            *_, last = said
        assert last["error"]["type"] == "server_error"
        assert server.client.post(CHATS, json=BODY).status_code == 503


def test_a_target_of_another_vocabulary_is_asked_in_its_own_tokens() -> None:
    with backend() as house, api(house.address) as server:
        assert server.chat("w5 w6", max_tokens=5)["choices"][0]["message"]["content"].startswith(
            " w"
        )
        for worker in [*house.workers]:
            house.lose(worker)
        house.until(lambda: not house.coordinator.registry.workers)
        house.add(ScriptedTarget, "target", prefix="v", template="{{ messages[0].content }}")
        reply = server.chat("v5 v6", max_tokens=5)
        assert reply["choices"][0]["message"]["content"] == "".join(
            f" v{token}" for token in continuation((5, 6), 5)
        )


@pytest.mark.parametrize("stream", everyday([True, False], True))
def test_the_first_reply_of_another_target_is_told_as_its_own(stream: bool) -> None:
    other = Fingerprint(checkpoint="1" * 64, weights="int8", kernels="scripted")
    with backend() as house, api(house.address) as server:
        assert server.chat(max_tokens=5)["system_fingerprint"].startswith("0000")
        house.add(ScriptedTarget, "target", fingerprint=other, model="other")
        house.lose(house.workers[0])
        house.until(lambda: len(house.coordinator.registry.workers) == 2)
        time.sleep(FRESH_S)
        if not stream:
            replies = [server.chat(max_tokens=5)]
        else:
            with server.client.stream(
                "POST", CHATS, json={**BODY, "stream": True, "max_tokens": 5}
            ) as reply:
                replies = [chunk for chunk in events(reply) if chunk != "[DONE]"]
        assert {(reply["system_fingerprint"], reply["model"]) for reply in replies} == {
            (str(other), "other")
        }


def test_a_draft_that_is_missing_degrades_and_is_no_reason_not_to_serve() -> None:
    with backend() as house, api(house.address) as server:
        house.lose(house.workers[1])
        house.until(lambda: house.coordinator.report().degraded)
        state = server.client.get("/readyz")
        assert state.status_code == 200
        assert state.json()["degraded"]
        assert server.chat(max_tokens=5)["usage"]["completion_tokens"] == 5


def test_a_coordinator_that_comes_back_is_found_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("hub")
    folder.chmod(0o700)
    address = f"ipc://{folder}/c"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.closing(Backend(address=address)))
        server = stack.enter_context(api(address))
        first.token_s = 0.02
        with server.client.stream("POST", CHATS, json={**BODY, "stream": True}) as reply:
            said = events(reply)
            next(said)
            first.close()
            *_, last = said
        assert last["error"]["type"] == "server_error"
        while server.client.get("/health").status_code != 503:
            pass  # the request failed first, and the loss of the link is not noticed yet
        assert server.client.get("/readyz").status_code == 503
        assert server.client.post(CHATS, json=BODY).status_code == 503
        assert server.metric("dovetail_up") == 0
        second = stack.enter_context(contextlib.closing(Backend(address=address)))
        second.until(lambda: len(second.coordinator.registry.clients) == 1)
        while server.client.get("/health").status_code != 200:
            pass  # it has said Hello, and has not been welcomed yet
        assert server.chat(max_tokens=5)["choices"][0]["message"]["content"] == "".join(
            f" w{token}" for token in continuation(CHAT, 5)
        )


@pytest.mark.parametrize("path", everyday([CHATS, "/v1/completions"], CHATS))
def test_a_stream_that_is_cut_says_by_whose_loss_and_has_told_its_seed(path: str) -> None:
    with backend() as house, api(house.address) as server:
        house.token_s = 0.02
        asked = {key: value for key, value in BODY.items() if key != "messages" or path == CHATS}
        asked |= {"stream": True, "n": 2, **({} if path == CHATS else {"prompt": "w5 w6"})}
        first: dict[int, dict[str, Any]] = {}
        with server.client.stream("POST", path, json=asked) as reply:
            said = events(reply)
            while len(first) < 2:
                chunk = next(said)
                first.setdefault(chunk["choices"][0]["index"], chunk)
            house.die()
            *_, last = said
        assert last["error"]["message"].startswith("the coordinator was lost during this request")
        assert first[0]["metrics"]["seed"] == first[1]["metrics"]["seed"] >= 0


def test_the_seed_of_the_first_chunk_is_that_of_the_last(server: Api) -> None:
    chunks = server.stream(CHATS, **{**BODY, "max_tokens": 5})
    told = [
        chunk["metrics"]["seed"] for chunk in chunks if chunk != "[DONE]" and "metrics" in chunk
    ]
    assert len(told) == 2
    assert told[0] == told[1]
    assert told[0] < 1 << 53
    given = server.stream(CHATS, **{**BODY, "max_tokens": 5, "seed": 77})
    assert given[0]["metrics"] == {"seed": 77}


def test_while_a_service_gives_up_new_requests_hear_why() -> None:
    with backend() as house, api(house.address) as server:
        with house.still() as coordinator:
            coordinator.supervised(Supervised(ending="the target worker ended 6 times"))
        refused = server.client.post(CHATS, json=BODY)
        assert refused.status_code == 503
        assert (
            refused.json()["error"]["message"]
            == "the service is ending: the target worker ended 6 times"
        )


def test_a_signal_lets_what_runs_end(slow: Backend) -> None:
    with (
        api(slow.address) as server,
        server.client.stream(
            "POST", CHATS, json={**BODY, "stream": True, "max_tokens": 30}
        ) as reply,
    ):
        said = events(reply)
        next(said)
        server.process.send_signal(signal.SIGTERM)
        assert [*said][-1] == "[DONE]"
        assert server.process.wait(PATIENCE_S) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", trust_env=False)


def test_a_signal_ends_what_does_not_end_by_itself(slow: Backend) -> None:
    with slow.still():
        slow.token_s = 0.2
    with (
        api(slow.address) as server,
        server.client.stream("POST", CHATS, json={**BODY, "stream": True}) as reply,
    ):
        said = events(reply)
        next(said)
        server.process.send_signal(signal.SIGTERM)
        *_, last = said
        assert last["error"]["code"] == "unavailable"
        assert server.process.wait(PATIENCE_S) == 0


def test_many_clients_at_once_get_their_own_replies(server: Api) -> None:
    prompts = [(5, 6, token) for token in range(10, 42)]
    found: dict[tuple[int, ...], str] = {}

    def ask(prompt: tuple[int, ...]) -> None:
        found[prompt] = server.complete(list(prompt), max_tokens=12)["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {
        prompt: "".join(f" w{token}" for token in continuation(prompt, 12) if token)
        for prompt in prompts
    }
