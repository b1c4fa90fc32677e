"""`dovetail router` as users have it."""

import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dovetail.launch.commands.router import Listed
from support.patience import PATIENCE_S
from support.served import QUESTION, ask, ready, streamed, told

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "a router needs services: name each with --connect URL"),
        (("--connect", "127.0.0.1:8000"), "'127.0.0.1:8000' is not the URL of a service"),
        (("--connect", "https://x:1"), "'https://x:1' is not the URL of a service"),
        (("--connect", "http://x:1", "--http.host", "0.0.0.0"), "which needs a key"),
    ],
)
def test_a_mistake_is_one_line_with_its_remedy(
    invoke: Run, arguments: tuple[str, ...], words: str
) -> None:
    done = invoke("router", "--http.port=0", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert words in done.stderr


def test_a_file_of_services_is_checked_before_anything_is_served(
    invoke: Run, tmp_path: Path
) -> None:
    file = tmp_path / "services"
    file.write_text("http://127.0.0.1:8000\nelsewhere\n")
    done = invoke("router", "--http.port=0", "--replicas", str(file))
    assert done.returncode == 2
    assert f"{file}: 'elsewhere' is not the URL of a service" in done.stderr


@pytest.mark.slow
def test_two_services_answer_as_one_and_one_of_them_may_go(start: Start, tmp_path: Path) -> None:
    """The texts are those of a service that is asked directly, whoever answers; a service that is
    taken out of the list ends what it has begun, and one that is killed is done without."""
    services = [start("serve", "--http.port=0", "--json") for _ in range(2)]
    urls = [ready(service)["url"] for service in services]
    whole = {seed: streamed(urls[0], seed=seed) for seed in range(6)}
    file = tmp_path / "services"
    file.write_text("\n".join(urls))
    process = start("router", "--http.port=0", "--replicas", str(file))
    assert process.stdout is not None
    router = process.stdout.readline().strip()
    with ThreadPoolExecutor(6) as pool:
        said = pool.map(lambda seed: streamed(router, seed=seed), whole)
        assert dict(zip(whole, said, strict=True)) == whole
    rates = dict.fromkeys(urls)
    while not all(rates.values()):  # told twice a second
        there = ask(router, "/readyz")[1]["replicas"]
        rates = {one["url"]: one["seconds_per_token"] for one in there}
        assert set(rates) == {*urls}

    assert streamed(router, lambda: file.write_text(urls[1]), seed=3) == whole[3]
    told(process, f"the replica {urls[0]} was removed")
    assert streamed(router, seed=4) == whole[4]
    file.write_text("\n".join(urls))
    told(process, f"the replica {urls[0]} gets requests")

    services[1].send_signal(signal.SIGTERM)
    assert services[1].wait(PATIENCE_S) == 0
    for _ in range(4):
        assert ask(router, body=QUESTION)[0] == 200
    services[0].send_signal(signal.SIGTERM)
    assert services[0].wait(PATIENCE_S) == 0
    status, answer = ask(router, body=QUESTION)
    assert status == 503
    assert "replica" in answer["error"]["message"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0


def test_a_list_of_services_that_was_spoilt_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "replicas"
    file.write_text("http://127.0.0.1:1\n  \n")
    listed = Listed((), file)
    assert listed() == ["http://127.0.0.1:1"]
    for _ in range(2):  # a spoilt file, and the same once it has been mended in between
        file.write_text("nonsense\n")
        assert [listed() for _ in range(3)] == [["http://127.0.0.1:1"]] * 3
        (record,) = caplog.records
        assert "'nonsense' is not the URL of a service" in record.getMessage()
        caplog.clear()
        file.write_text("http://127.0.0.1:1\n")
        listed()
    file.unlink()
    assert [listed() for _ in range(3)] == [["http://127.0.0.1:1"]] * 3
    assert len(caplog.records) == 1
