"""`dovetail bench --concurrency`: a server under load, by the figures of `vllm bench serve`."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from dovetail.launch.bench.load.measured import LoadRun, levels_of, row, run, show, with_speedups
from dovetail.launch.bench.load.served import Reply, ask
from dovetail.launch.chat import web
from dovetail.launch.chat.web import WebServer
from dovetail.launch.cli import run as command_line
from dovetail.protocol.errors import UserError
from support.patience import PATIENCE_S
from support.site import DONE, chunk, event, scripted
from support.web import api, backend

POLL_S = 0.2
USAGE = {"prompt_tokens": 10, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}


def ticking(*times_s: float) -> Any:
    """A clock that says these times, one after the other."""
    return iter(times_s).__next__


def reply(number: int, chunks_s: Sequence[float], tokens: int, text: str = "x") -> Reply:
    """A reply that began at 0 and ended with its last chunk."""
    usage = {"prompt_tokens": 10, "completion_tokens": tokens}
    return Reply(number, 0.0, [*chunks_s], chunks_s[-1], text, usage)


def test_latencies_are_those_of_the_chunks_that_carry_text() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    last = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    usage = event({"choices": [], "usage": USAGE})
    said = role + chunk("one two ") + chunk("three") + chunk(" four") + last + usage + DONE
    clock = ticking(100.0, 100.1, 101.0, 102.0, 104.0, 104.5, 105.0, 106.0)
    with scripted(200, said) as server:
        found = ask(WebServer(server.url, "secret"), {"model": "tiny"}, 3, clock)
    assert (found.error, found.text, found.number) == ("", "one two three four", 3)
    assert (found.ttft_s, found.itls_s, found.latency_s) == (1.0, [1.0, 2.0], 5.0)
    assert found.tpot_s == (5.0 - 1.0) / (7 - 1)
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (10, 4, 7)
    ((path, key, body),) = server.asked
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (429, b'{"error": {"message": "the queue is full"}}', "HTTP 429", "the queue is full"),
        (502, b"<html> bad\n gateway", "HTTP 502", "<html> bad gateway"),
        (200, chunk("Hi"), "broken off", "the stream ended before its [DONE]"),
        (200, chunk("Hi") + event({"error": {"message": "l"}}), "error in the stream", "l"),
        (200, b"data: {\n\n", "not JSON", "{"),
        (200, b"data: " + b"[" * 10**5 + b"\n\n", "not JSON", "[" * 300),
        (200, event({"choices": [7]}), "not a chunk", '{"choices": [7]}'),
        (
            200,
            event({"choices": [{"delta": "Hi"}]}),
            "not a chunk",
            '{"choices": [{"delta": "Hi"}]}',
        ),
        (200, chunk("Hi") * 100, "too long", "no end after 0 MiB of the stream"),
        (200, b"data: " + b"7" * 9000, "too long", "no end after 0 MiB of the stream"),
    ],
)
def test_a_request_that_fails_is_named(
    status: int, body: bytes, error: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if error == "too long":
        monkeypatch.setattr(web, "MOST_BYTES", 8000)
    with scripted(status, body) as server:
        site = WebServer(server.url, "")
        found = ask(site, {}, 0)
    assert (found.error, found.words) == (error, words)
    assert ask(site, {}, 0).error == "connection"


@pytest.mark.parametrize(
    "usage",
    [[1], 7, "x", {}, *({"completion_tokens": count} for count in (-3, 10**400, "7", None, 1.5))],
)
def test_usage_that_cannot_be_is_none(usage: object) -> None:
    with scripted(200, chunk("Hi") + event({"choices": [], "usage": usage}) + DONE) as server:
        found = ask(WebServer(server.url, ""), {}, 0)
    assert (found.error, found.output_tokens) == ("", 1)
    assert row("server", 1, [LoadRun((found,), 1.0)])["total_output_tokens"] == 1


def test_so_many_requests_are_under_way_at_once_and_each_is_asked_once() -> None:
    together, asked = threading.Barrier(3), []

    def wait_for_others(number: int) -> Reply:
        asked.append(number)
        together.wait(PATIENCE_S)
        assert together.n_waiting < 3
        return reply(number, [1.0], 1)

    load = run(wait_for_others, 9, 3, lambda: None)
    assert sorted(asked) == sorted(found.number for found in load.replies) == [*range(9)]
    assert not load.interrupted


def test_an_interrupted_load_has_what_had_ended_and_asks_no_more() -> None:
    asked: list[int] = []
    steps = iter(range(9))

    def answer(number: int) -> Reply:
        asked.append(number)
        return reply(number, [1.0], 1)

    def step() -> None:
        if next(steps) == 1:
            raise KeyboardInterrupt

    load = run(answer, 10_000, 1, step)
    assert load.interrupted
    assert [found.number for found in load.replies] == [0, 1]
    assert len(asked) < 10_000


def test_a_mistake_of_ours_is_no_failure_of_the_server() -> None:
    with pytest.raises(ZeroDivisionError):
        run(lambda number: reply(number, [1 / number], 1), 2, 1, lambda: None)


def test_the_figures_have_the_names_and_the_meaning_of_vllm_bench_serve() -> None:
    failed = Reply(2, 0.0, error="HTTP 429", words="full")
    load = LoadRun((reply(0, [1.0, 2.0], 5), reply(1, [3.0, 4.0, 7.0], 3), failed), 10.0)
    found = row("draft", 2, [load])
    assert (found["completed"], found["failed"], found["duration"]) == (2, 1, 10.0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 8)
    assert (found["request_throughput"], found["output_throughput"]) == (0.2, 0.8)
    assert (found["median_ttft_ms"], found["p99_ttft_ms"]) == (2000.0, 2980.0)
    assert found["median_tpot_ms"] == (250.0 + 2000.0) / 2
    assert (found["median_itl_ms"], found["mean_e2el_ms"]) == (1000.0, 4500.0)
    assert found["tokens_per_chunk"] == 8 / 5
    assert found["errors"] == [{"error": "HTTP 429", "count": 1, "words": "full"}]


def test_a_draft_is_compared_with_the_target_alone_at_the_same_concurrency() -> None:
    alone, drafted = LoadRun((reply(0, [1.0], 10),), 4.0), LoadRun((reply(0, [1.0], 10, "y"),), 2.0)
    rows = [row("none", 2, [alone]), row("draft", 2, [drafted]), row("draft", 4, [drafted])]
    texts = {("none", 2): {0: "x"}, ("draft", 2): {0: "y"}, ("draft", 4): {0: "y"}}
    told = [(row["speedup"], row["differ"]) for row in with_speedups(rows, texts, "none")]
    assert told == [(1.0, 0), (2.0, 1), (None, None)]


def test_what_failed_is_said_beside_the_table(capfd: pytest.CaptureFixture[str]) -> None:
    failed = [Reply(number, 0.0, error="HTTP 429", words="try later") for number in range(2)]
    rows = with_speedups([row("none", 8, [LoadRun((*failed,), 1.0)])], {("none", 8): {}}, "none")
    show({"rows": rows, "lost": "", "interrupted": True})
    out, said = capfd.readouterr()
    assert "tokens/s" in out
    (told,) = (line.split() for line in out.splitlines() if line.split()[:1] == ["none"])
    assert told == ["none", "8", "0", "2", *["-"] * 11], "nothing was measured"
    assert (
        "FAILED: none, 8 at once: 2 requests with HTTP 429, its queue was full: try later" in said
    )
    assert "interrupted" in said


@pytest.mark.parametrize("text", ["", "0", "1,1", "1,x", "-1", "1,,2", "4097", "9" * 5000])
def test_what_is_no_list_of_concurrencies_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--concurrency"):
        levels_of(text)


def test_a_dovetail_somewhere_is_measured_with_and_without_its_draft(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text('{"id": "a", "turns": ["w5 w6"]}\n{"id": "b", "turns": ["w7"]}\n')
    with backend() as house, api(house.address, "--policy=dynamic") as server:
        options = ["--concurrency=1,3", "--requests=2", "--max-tokens=6", f"--prompts={few}"]
        code = command_line(["bench", "--url", server.url, "--json", *options])
    told = json.loads(capfd.readouterr().out)
    assert code == 0
    rows = [(row["max_concurrency"], row["method"], row["completed"]) for row in told["rows"]]
    assert rows == [(1, "none", 2), (1, "draft", 2), (3, "none", 3), (3, "draft", 3)]
    assert all(row["speedup"] > 0 and row["differ"] == 0 for row in told["rows"])


def test_another_server_is_measured_as_it_is_and_its_refusals_are_a_failure(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good, full = chunk("Hi") + chunk("!") + DONE, b'{"error": {"message": "full"}}'
    out = tmp_path / "out.json"
    with scripted(200, good, (200, good), (429, full)) as server:
        options = ["--concurrency=1", "--requests=3", f"--out={out}"]
        code = command_line(["bench", "--url", server.url, "--temperature=0.5", *options])
    assert code == 1
    assert "1 at once: 2 requests with HTTP 429" in capfd.readouterr().err
    told = json.loads(out.read_text())
    ((method, completed, failed),) = [
        (row["method"], row["completed"], row["failed"]) for row in told["rows"]
    ]
    assert (method, completed, failed) == ("server", 1, 2)
    assert [request["error"] for request in told["requests"]] == ["", "HTTP 429", "HTTP 429"]
    assert all("dovetail" not in body for _, _, body in server.asked)
    assert {body["temperature"] for _, _, body in server.asked} == {0.5}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--requests=3"], "--requests belongs to --concurrency"),
        (["--concurrency="], "--concurrency '': write different numbers"),
        (["--concurrency=2", "--method=small"], "--method cannot be combined with --concurrency"),
        (["--concurrency=2", "--temperature=0", "--temperature=1"], "one temperature"),
        (["--url=http://127.0.0.1:9", "--tree.gamma=3"], "the server decides --tree.gamma"),
        (["--url=http://127.0.0.1:9", "somewhere"], "has its own model"),
        (["--url=http://127.0.0.1:9"], "no server answers"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command_line(["bench", *options]) == 2
    assert words in capfd.readouterr().err


@pytest.mark.slow
def test_an_interrupted_run_tells_what_there_is_and_leaves_nothing_behind() -> None:
    command = [sys.executable, "-P", "-m", "dovetail.launch.cli", "bench", "--concurrency=2"]
    with subprocess.Popen(
        [*command, "--requests=10000", "--max-tokens=8"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        server = _answering(process)
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "tokens/s" in out, "interrupted" in said) == (130, True, True)
    assert not server.is_running()


def _answering(process: "subprocess.Popen[str]") -> psutil.Process:
    """The HTTP process of a benchmark, once it has answered some requests."""
    while True:
        assert process.poll() is None
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
        for child in psutil.Process(process.pid).children():
            ports = [found.laddr.port for found in child.net_connections() if not found.raddr]
            if ports and _answered(ports[0]) > 4:
                return child


def _answered(port: int) -> float:
    """The requests that a server has answered."""
    said = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    return sum(
        float(line.split()[-1])
        for line in said.splitlines()
        if line.startswith("dovetail_requests_finished_total ")
    )
