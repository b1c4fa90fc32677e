"""Coordinators that are killed under streams, as real processes over a real model: no text differs,
whatever was killed and when."""

import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.by_hand import CHATS, ByHand, Stream, bodies, by_hand, slower, together
from support.patience import PATIENCE_S


def kill_and_compare(service: ByHand, asked: list[dict[str, Any]], kills: int, seed: int) -> str:
    """Kill the coordinator so often while these streams run, again and again; what was found, in
    words."""
    whole = [Stream(body).read(service.url).outcome for body in asked]
    assert all(reason == "length" for _, reason, _ in whole), whole
    draw, done, pauses = random.Random(seed), 0, []
    while done < kills:
        service.until_ready()
        streams, threads = accepted(service, asked)
        while any(thread.is_alive() for thread in threads):
            time.sleep(draw.uniform(0.1, 1.5))
            if done < kills and any(thread.is_alive() for thread in threads):
                service.kill("coordinator")
                service.coordinate()
                done += 1
        assert outcomes(streams, threads) == whole
        pauses += [stream.longest_pause_s for stream in streams]
    return (
        f"{done} kills, {len(pauses)} streams, 0 texts differ; longest pause of a stream: median "
        f"{statistics.median(pauses):.2f} s, most {max(pauses):.2f} s"
    )


def accepted(
    service: ByHand, asked: list[dict[str, Any]]
) -> tuple[list[Stream], list[threading.Thread]]:
    """Return streams that run together, once the coordinator has accepted all of them, and the
    threads that read them."""
    streams, threads = together(service, asked)
    while not all(stream.heard_s for stream in streams):
        time.sleep(0.01)
    return streams, threads


def outcomes(streams: list[Stream], threads: list[threading.Thread]) -> list[object]:
    """Return how streams have ended."""
    for thread in threads:
        thread.join()
    return [stream.outcome for stream in streams]


def test_streams_go_on_when_the_coordinator_is_killed(tmp_path: Path) -> None:
    """The draft looks up: it starts in a moment."""
    with by_hand(tmp_path, workers=("--draft.kind=ngram",)) as service:
        kill_and_compare(service, bodies(2, 200), kills=1, seed=1)


@pytest.mark.slow
def test_streams_go_on_over_tcp_with_keys_when_the_coordinator_is_killed(tmp_path: Path) -> None:
    with by_hand(tmp_path, workers=slower(), tcp=True) as service:
        kill_and_compare(service, bodies(2, 150), kills=3, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_eight_streams_go_on_when_the_coordinator_is_killed_a_hundred_times_in_four_parts(
    tmp_path: Path, part: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with by_hand(tmp_path, workers=slower()) as service:
        found = kill_and_compare(service, bodies(8, 150), kills=25, seed=part)
    with capsys.disabled():
        print(f"\n{found}")


@pytest.mark.slow
def test_a_swap_whose_coordinator_is_killed_is_given_up_and_says_so(tmp_path: Path) -> None:
    asked = bodies(2, 400)
    with by_hand(tmp_path, workers=slower()) as service:
        whole = [Stream(body).read(service.url).outcome for body in asked]
        streams, threads = accepted(service, asked)
        command = [sys.executable, "-P", "-m", "dovetail.launch.cli", "swap", "--role=draft"]
        swap = subprocess.Popen(
            [*command, "--draft=dovetail", f"--connect={service.address}"],
            stderr=subprocess.PIPE,
            text=True,
        )
        while not (newcomer := psutil.Process(swap.pid).children()):
            time.sleep(0.01)
        service.kill("coordinator")
        service.coordinate()
        said = swap.communicate(timeout=PATIENCE_S)[1]
        assert (swap.returncode, "swap, and draft-2 is stopped: swap again" in said) == (1, True)
        assert not newcomer[0].is_running()
        assert outcomes(streams, threads) == whole
        service.until_ready()
        assert service.processes["draft"].poll() is None


@pytest.mark.slow
def test_a_drain_whose_coordinator_is_killed_is_given_up_and_says_so(tmp_path: Path) -> None:
    asked = bodies(2, 400)
    with by_hand(tmp_path, workers=slower()) as service:
        whole = [Stream(body).read(service.url).outcome for body in asked]
        streams, threads = accepted(service, asked)
        command = [sys.executable, "-P", "-m", "dovetail.launch.cli", "drain", "target", "--last"]
        drain = subprocess.Popen(
            [*command, f"--connect={service.address}"], stderr=subprocess.PIPE, text=True
        )
        assert drain.stderr is not None
        assert drain.stderr.readline() == "sessions that end on target: 2\n"
        service.kill("coordinator")
        service.coordinate()
        said = drain.communicate(timeout=PATIENCE_S)[1]
        assert (drain.returncode, "still shows target, drain it again" in said) == (1, True)
        assert outcomes(streams, threads) == whole
        service.until_ready()
        assert service.processes["target"].poll() is None


@pytest.mark.slow
def test_a_client_that_was_cut_off_goes_on_by_event_id_or_by_the_id_of_the_response(
    tmp_path: Path,
) -> None:
    """The server of HTTP is killed too: another one finds the reply."""
    body = {**bodies(2, 80)[1], "dovetail": {"event_ids": True}}
    with by_hand(tmp_path, workers=slower()) as service:
        whole = Stream(body).read(service.url)
        for killed in ((), ("coordinator",), ("http",), ("coordinator", "http")):
            cut = Stream(body).read(service.url, most=6)
            assert cut.event
            assert cut.finish_reason is None
            assert whole.text.startswith(cut.text)
            for name in killed:
                service.kill(name)
            if "coordinator" in killed:
                service.coordinate()
            if "http" in killed:
                service.serve_http()
            service.until_ready()
            rest = Stream(body).read(service.url, headers={"Last-Event-ID": cut.event})
            assert (cut.text + rest.text, rest.finish_reason, rest.error) == (
                whole.text,
                whole.finish_reason,
                "",
            )
            assert rest.name == cut.name
            again = httpx.get(
                f"{service.url}{CHATS}/{cut.name}", timeout=PATIENCE_S, trust_env=False
            ).json()
            assert again["choices"][0]["message"]["content"] == whole.text
            assert again["id"] == cut.name
            assert again["metrics"]["seed"] == body["seed"]
        unknown = httpx.get(f"{service.url}{CHATS}/chatcmpl-0", timeout=PATIENCE_S, trust_env=False)
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "reply_not_found"
