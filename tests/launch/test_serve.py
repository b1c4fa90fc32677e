"""`dovetail serve`: everything under one roof, kept running, and ended without a trace."""

import errno
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from safetensors.torch import load_file, save_file

from dovetail.launch.chat.answering import PLAIN
from dovetail.launch.processes.preflight import check_coordinator, check_port
from dovetail.launch.processes.serving.service import registered
from dovetail.launch.processes.serving.watch import MOST_RESTARTS
from dovetail.launch.processes.supervise import LOG_BYTES, Supervisor
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from dovetail.protocol.links import open_link
from dovetail.runtime.client import Client
from dovetail.runtime.http.serving.listening import refusal
from support.golden import a_worker
from support.inflated import as_flags, inflated, kept_pair
from support.models import tiny_llama
from support.patience import PATIENCE_S
from support.served import QUESTION, ask, assert_nothing_is_left, ready, told

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

IMPATIENT = (
    sys.executable,
    "-P",
    "-c",
    "from dovetail.launch import cli; from dovetail.launch.processes.serving import watch; "
    "watch.FIRST_PAUSE_S = 0.01; cli.main()",
)
PATIENT = (
    *IMPATIENT[:3],
    "from dovetail.launch import cli; from dovetail.launch.processes import supervise; "
    "supervise.GRACE_S = 1e6; cli.main()",
)
PAIR = ("--http.port", "0", "--draft.device", "cpu", "--json")


def open_coordinator(address: str) -> Client:
    return Client(open_link(address, role="client"))


def test_a_server_is_found_used_kept_running_and_ends_without_a_trace(
    start: Start, run: Run, tmp_path: Path
) -> None:
    process = start("serve", *PAIR)
    found = ready(process)
    assert set(found["pids"]) == {"coordinator", "http", "target worker", "draft worker"}
    named = {psutil.Process(pid) for pid in (process.pid, *found["pids"].values())}
    assert {(" ".join(one.cmdline()).strip(), one.name()) for one in named} == {
        ("dovetail serve", "dovetail:serve"),
        ("dovetail coordinator", "dovetail:coordi"),
        ("dovetail http", "dovetail:http"),
        ("dovetail target demo", "dovetail:target"),
        ("dovetail draft demo", "dovetail:draft"),
    }
    status, answer = ask(found["url"], body=QUESTION)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] <= 8

    shown = run("status")
    assert (shown.returncode, f"http        {found['url']}" in shown.stdout) == (0, True), (
        shown.stderr
    )
    second = run("serve", "--http.port", str(urlsplit(found["url"]).port))
    assert (second.returncode, second.stdout, second.stderr.count("\n")) == (2, "", 1)
    assert (
        f"in use by `dovetail serve` (pid {process.pid}): stop it, or choose another port"
        in second.stderr
    )

    os.kill(found["pids"]["draft worker"], signal.SIGKILL)
    told(process, "the draft worker was killed by SIGKILL; it is restarted in 0.5 s")
    while "SIGKILL" not in str(
        (state := ask(found["url"], "/readyz"))[1]["faults"]
    ):  # the coordinator alone knows less
        time.sleep(0.01)
    assert (state[0], state[1]["ready"], state[1]["degraded"]) == (200, True, True)
    (fault,) = state[1]["faults"]
    assert (fault["part"], fault["why"].startswith("it was killed by SIGKILL")) == (
        "draft worker",
        True,
    )
    assert ask(found["url"], body=QUESTION)[0] == 200
    told(process, "the draft worker is ready again")
    workers = {
        worker["name"]: worker["pid"]
        for worker in json.loads(run("status", "--json").stdout)["workers"]
    }
    assert workers["target"] == found["pids"]["target worker"]
    assert workers["draft"] not in (found["pids"]["draft worker"], None)

    process.terminate()
    assert process.wait(PATIENCE_S) == 0, process.communicate()
    assert_nothing_is_left([*found["pids"].values(), workers["draft"]], tmp_path)


@pytest.mark.slow
def test_a_service_outlives_its_draft_and_gives_up_without_its_target_when_all_have_heard_why(
    start: Start, tmp_path: Path
) -> None:
    models = {name: tmp_path / name for name in ("target", "draft")}
    for name, folder in models.items():
        shutil.copytree(kept_pair("256MiB") / name, folder)
    flags = (f"--target={models['target']}", f"--draft={models['draft']}")
    process = start("serve", *PAIR, *flags, command=IMPATIENT)
    found = ready(process)

    shutil.rmtree(models["draft"])
    os.kill(found["pids"]["draft worker"], signal.SIGKILL)
    for _ in range(MOST_RESTARTS + 2):
        told(process, "the draft worker ended with exit code 2; it is restarted in")
    status, state = ask(found["url"], "/readyz")
    assert (status, state["ready"], state["degraded"]) == (200, True, True)
    assert any(
        fault["part"] == "draft worker" and str(models["draft"]) in fault["why"]
        for fault in state["faults"]
    )
    assert ask(found["url"], body=QUESTION)[0] == 200

    place = urlsplit(found["url"])
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=PATIENCE_S)
    body = {**QUESTION, "max_tokens": 200, "min_tokens": 200, "stream": True}
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    stream = connection.getresponse()
    assert stream.readline().startswith(b"data: ")
    shutil.rmtree(models["target"])
    os.kill(found["pids"]["target worker"], signal.SIGKILL)
    *_, last = (line for line in stream if line.strip())
    assert (
        "the service is ending: the target worker ended 6 times within 5 minutes"
        in json.loads(last[6:])["error"]["message"]
    )
    connection.close()
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    (sentence,) = (line for line in said.splitlines() if line.startswith("dovetail: "))
    assert "the target worker ended 6 times within 5 minutes, and is not restarted" in sentence
    assert str(models["target"]) in sentence
    assert_nothing_is_left([*found["pids"].values()], tmp_path)


@pytest.mark.slow
def test_a_coordinator_that_is_lost_comes_back_to_its_address_and_its_workers_to_it(
    start: Start, run: Run, tmp_path: Path
) -> None:
    """No model is loaded again."""
    process = start("serve", *PAIR, "--draft", "ngram")
    found = ready(process)
    assert ask(found["url"], body=QUESTION)[0] == 200
    os.kill(found["pids"]["coordinator"], signal.SIGKILL)
    told(process, "the coordinator was killed by SIGKILL; it is restarted in 0.5 s")
    for _ in range(3):
        told(process, "is ready again")
    assert ask(found["url"], body=QUESTION)[0] == 200
    after = json.loads(run("status", "--json").stdout)
    assert after["address"] == found["address"]
    assert {worker["pid"] for worker in after["workers"]} == {
        found["pids"]["target worker"],
        found["pids"]["draft worker"],
    }
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    assert_nothing_is_left([*found["pids"].values(), after["pid"]], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft worker", "target worker", "coordinator", "http"])
def test_a_part_that_is_alive_and_gone_is_replaced(name: str, start: Start, tmp_path: Path) -> None:
    process = start("serve", *PAIR, "--draft", "ngram", "--coordinator.stuck_s", "3")
    found = ready(process)
    os.kill(found["pids"][name], signal.SIGSTOP)
    told(process, f"the {name} is alive but did not respond for 3 s")
    told(process, f"the {name} was killed by SIGKILL; it is restarted")
    for _ in range(3 if name == "coordinator" else 1):  # its workers come back to it
        told(process, "is ready again")
    assert ask(found["url"], body=QUESTION)[0] == 200
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    assert_nothing_is_left([*found["pids"].values()], tmp_path)


@pytest.mark.slow
def test_a_part_that_is_stopped_for_a_short_time_is_left_alone(
    start: Start, run: Run, tmp_path: Path
) -> None:
    process = start("serve", *PAIR, "--draft", "ngram")
    found = ready(process)
    os.kill(found["pids"]["target worker"], signal.SIGSTOP)
    told(process, "the coordinator has lost the target worker")
    os.kill(found["pids"]["target worker"], signal.SIGCONT)
    told(process, "the target worker is ready again")
    assert ask(found["url"], body=QUESTION)[0] == 200
    workers = {
        worker["name"]: worker["pid"]
        for worker in json.loads(run("status", "--json").stdout)["workers"]
    }
    assert workers["target"] == found["pids"]["target worker"]
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    assert_nothing_is_left([*found["pids"].values()], tmp_path)


@pytest.mark.slow
def test_a_request_that_runs_is_finished_and_no_other_begins(start: Start, tmp_path: Path) -> None:
    process = start("serve", *PAIR, *as_flags(inflated("256MiB", "none")))
    found = ready(process)
    place = urlsplit(found["url"])
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=PATIENCE_S)
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps({**QUESTION, "max_tokens": 24, "min_tokens": 24}),
        {"Content-Type": "application/json"},
    )
    with open_coordinator(found["address"]) as coordinator:
        while coordinator.status().sessions == 0:
            time.sleep(0.01)
    process.terminate()
    told(process, "ending:")
    response = connection.getresponse()
    assert json.loads(response.read())["usage"]["completion_tokens"] == 24
    connection.close()
    assert process.wait(PATIENCE_S) == 0
    assert_nothing_is_left([*found["pids"].values()], tmp_path)


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_no_process_and_no_file_that_the_next_command_minds(
    start: Start, run: Run, tmp_path: Path
) -> None:
    process = start("serve", *PAIR, "--draft", "none")
    found = ready(process)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(
        [psutil.Process(pid) for pid in found["pids"].values() if psutil.pid_exists(pid)],
        timeout=PATIENCE_S,
    )
    assert not alive
    assert run("status").returncode == 2
    assert_nothing_is_left([], tmp_path)


@pytest.mark.slow
def test_a_second_signal_does_not_wait(start: Start, tmp_path: Path) -> None:
    process = start("serve", *PAIR, "--draft", "none", command=PATIENT)
    found = ready(process)
    os.kill(found["pids"]["http"], signal.SIGSTOP)
    process.terminate()
    told(process, "ending:")
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    assert_nothing_is_left([*found["pids"].values()], tmp_path)


@pytest.mark.slow
def test_what_cannot_start_is_told_in_its_own_words_and_nothing_is_left(
    run: Run, tmp_path: Path
) -> None:
    """A fault that only the values of the weights show is found when the worker loads them."""
    broken = tiny_llama(tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    done = run("serve", "--http.port", "0", "--target", str(broken), "--draft", "none")
    assert (done.returncode, done.stdout) == (2, "")
    loading, failed = done.stderr.splitlines()
    assert "loading models: target worker" in loading
    assert failed.startswith("dovetail: the target worker: ")
    assert str(broken) in failed
    assert "holds NaN" in failed
    assert_nothing_is_left([], tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--http.host", "0.0.0.0", "--http.port", "0"), "which needs a key"),
        (
            ("--http.host", "192.0.2.1", "--http.port", "0"),
            "dovetail: http.host = '192.0.2.1' is not an address of this machine: set --http.host "
            "to 127.0.0.1",
        ),
        (
            ("--http.host", "no such name", "--http.port", "0"),
            "dovetail: http.host = 'no such name' is neither an address nor a known name",
        ),
        (("--http.port", "70000"), "write a whole number from 0 to 65535"),
        (("--listen", "tcp://127.0.0.1:*", "--http.port", "0"), "requires keys"),
        (("--target", "/no/such/model", "--draft", "none"), "/no/such/model"),
        (("--ray.replicas", "2"), "--ray.replicas is for a Ray cluster: add --engine ray"),
    ],
)
def test_a_mistake_is_one_line_before_a_model_is_loaded(
    invoke: Run, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    done = invoke("serve", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert words in done.stderr
    assert_nothing_is_left([], tmp_path)


def test_a_port_of_the_administrators_is_refused_with_those_that_are_free() -> None:
    words = refusal("127.0.0.1", 80, PermissionError(errno.EACCES, "Permission denied"))
    assert words.startswith("http.port = 80 is below 1024, where this user may not listen: ")
    assert words.endswith("choose a port from 1024 on with --http.port")


def test_a_port_that_is_taken_is_told_with_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"127.0.0.1 port {port} is in use by .*\(pid {os.getpid()}\): go away"
        ):
            check_port("127.0.0.1", port, remedy="go away")
        with pytest.raises(UserError, match=f"port {port} is in use .*: stop it, or go away"):
            check_coordinator(f"tcp://127.0.0.1:{port}", remedy="or go away")
    check_port("127.0.0.1", port, remedy="go away")
    check_port("127.0.0.1", 0, remedy="go away")


def test_an_address_that_a_coordinator_has_is_told_with_its_pid(
    start: Start, invoke: Run, temporary: Path
) -> None:
    (temporary / "private").mkdir(mode=0o700)
    listen = f"ipc://{temporary / 'private' / 'hub'}"
    coordinator = start("coordinator", "--listen", listen)
    assert coordinator.stdout is not None
    coordinator.stdout.readline()
    done = invoke("serve", "--listen", listen, "--http.port", "0")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert (
        f"{listen} is held by your coordinator (pid {coordinator.pid}): stop it with "
        f"`kill {coordinator.pid}`" in done.stderr
    )


@pytest.mark.slow
def test_a_swap_in_place_of_a_lost_worker_has_the_settings_of_the_service(
    start: Start, run: Run, tmp_path: Path
) -> None:
    """It waits for `serve` to restart a lost worker, and starts one itself if the worker was
    drained."""
    folder = shutil.copytree(DEMO_FOLDER / "target", tmp_path / "model")
    given = ("--target", str(folder), "--target.context=512")
    process = start("serve", *PAIR, *given, "--draft=ngram")
    found = ready(process)
    (before,) = targets(run)
    os.kill(found["pids"]["target worker"], signal.SIGKILL)
    told(process, "the target worker was killed by SIGKILL")
    waited = run("swap", "--role=target", "--json")
    assert waited.returncode == 0, waited.stderr
    assert "waiting for `dovetail serve`, which restarts the target worker" in waited.stderr
    assert run("drain", "target", "--last").returncode == 0
    swapped = run("swap", "--role=target", "--json")
    assert swapped.returncode == 0, swapped.stderr
    for done in (waited, swapped):
        assert json.loads(done.stdout)["model"] == str(folder)
    (after,) = targets(run)
    same = ("model", "fingerprint", "binding", "threads")
    assert [after[name] for name in same] == [before[name] for name in same]
    assert ask(found["url"], "/v1/models")[1]["data"][0]["id"] == "model"
    assert ask(found["url"], "/v1/models")[1]["data"][0]["max_model_len"] == 512


def targets(run: Run) -> list[dict[str, Any]]:
    workers = json.loads(run("status", "--json").stdout)["workers"]
    return [worker for worker in workers if "target" in worker["roles"]]


CRAMPED = """
import sys
from pathlib import Path
from dovetail.launch import cli
from dovetail.launch.processes.serving import local, watch
from dovetail.protocol.memory import Room
local.read_room = lambda: Room(int(Path(sys.argv.pop(1)).read_text()), "available on this machine")
watch.LONGEST_PAUSE_S = 1.0
cli.main()
"""


@pytest.mark.slow
def test_a_worker_is_not_started_again_into_memory_that_it_does_not_fit_into(
    start: Start, tmp_path: Path
) -> None:
    room = tmp_path / "room"
    room.write_text("100000000")
    script = CRAMPED.replace("sys.argv.pop(1)", repr(str(room)))
    process = start("serve", *PAIR, command=(sys.executable, "-P", "-c", script))
    found = ready(process)
    os.kill(found["pids"]["target worker"], signal.SIGKILL)
    told(
        process,
        "the target worker was not started; the next attempt is in",
        "GB of memory, and there are 0.1 GB available on this machine",
    )
    why = ""
    while (
        "was not started: the target with fp32 weights takes" not in why
    ):  # at first, that it was killed
        status, state = ask(found["url"], "/readyz")
        assert status == 503
        (why,) = [
            fault["why"] for fault in state["faults"] if fault["part"] == "target worker"
        ] or [""]
        time.sleep(0.01)
    room.write_text("100000000000")
    told(process, "the target worker is ready again")
    assert ask(found["url"], body=QUESTION)[0] == 200


@pytest.mark.slow
def test_a_draft_that_is_swapped_in_while_the_former_one_waits_to_be_started_again_stays_alone(
    start: Start, run: Run, tmp_path: Path
) -> None:
    models = {name: tmp_path / name for name in ("target", "draft")}
    for name, folder in models.items():
        shutil.copytree(DEMO_FOLDER / name, folder)
    process = start(
        "serve",
        *PAIR,
        f"--target={models['target']}",
        f"--draft={models['draft']}",
        "--coordinator.stuck_s=2",
    )
    found = ready(process)
    shutil.move(models["draft"], tmp_path / "elsewhere")
    os.kill(found["pids"]["draft worker"], signal.SIGKILL)
    told(process, "the draft worker ended with exit code 2; it is restarted in 16 s")
    shutil.move(tmp_path / "elsewhere", models["draft"])

    swapped = run(
        "swap", "--role=draft", "--draft=ngram", f"--connect={found['address']}", "--json"
    )
    assert swapped.returncode == 0, swapped.stderr
    told(
        process,
        "another worker has replaced the draft worker, which is not restarted while it serves",
    )
    workers = json.loads(run("status", "--json").stdout)["workers"]
    assert [worker["pid"] for worker in workers if "draft" in worker["roles"]] == [
        json.loads(swapped.stdout)["pid"]
    ]
    assert not ask(found["url"], "/readyz")[1]["degraded"]

    os.kill(json.loads(swapped.stdout)["pid"], signal.SIGKILL)
    told(process, "no worker replaces the draft worker any longer; it is restarted")
    told(process, "the draft worker is ready again")


def test_a_worker_of_another_machine_is_not_taken_for_ours_that_has_its_number() -> None:
    workers = [a_worker(host, pid, host=host) for host, pid in (("box", 7), ("here", 8))]
    ours = {"target worker": ("here", 7), "draft worker": ("here", 8)}
    assert registered(ours, workers) == {"draft worker"}


def test_what_a_process_says_is_heard_line_by_line_to_the_last_word() -> None:
    with Supervisor() as supervisor:
        child = supervisor.start("odd", [], module="dovetail.launch.no_such_module")
        child.process.wait()
        supervisor.end([child])
        assert child.listen()[-1].endswith("No module named dovetail.launch.no_such_module")
        assert child.listen() == []


def test_a_process_that_says_much_fills_no_disk() -> None:
    with Supervisor() as supervisor:
        child = supervisor.start("odd", [], module="dovetail.launch.no_such_module")
        child.process.wait()
        child.listen()
        for number in range(4):
            os.write(child.log.fileno(), b"x" * LOG_BYTES + b"\n%d\n" % number)
            heard = child.listen() + child.listen()
            assert heard[-1] == str(number)
        assert os.fstat(child.log.fileno()).st_size <= LOG_BYTES + 8


@pytest.mark.slow
def test_a_model_without_a_chat_template_says_so_once_and_serves_completions(
    start: Start, run: Run, invoke: Run, tmp_path: Path
) -> None:
    folder = shutil.copytree(DEMO_FOLDER / "target", tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    target, words = ("--target", str(folder), "--draft", "none"), "the model has no chat template"
    process = start("serve", *PAIR, *target)
    url = ready(process)["url"]
    told(process, f"chats are refused, completions are served: {words}")
    chat = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    status, refused = ask(url, body=chat)
    assert status == 400
    assert refused["error"]["message"].startswith(f"{words}: use /v1/completions")
    assert ask(url, "/v1/completions", {"prompt": "Once upon"})[0] == 200
    address = ("--max-tokens", "4")
    for asked in (("--connect", url), ()):
        done = run("chat", *asked, *address, input="Once upon\n")
        plain = [run("generate", *asked, *raw, *address, "Once upon") for raw in ((), ("--raw",))]
        assert done.stdout == plain[0].stdout == plain[1].stdout != ""
        assert done.stderr.count(PLAIN) == plain[0].stderr.count(PLAIN) == 1, done.stderr
        assert words not in plain[1].stderr
    planned = invoke("plan", *target[:2])
    assert f"completions are served: {words}" in planned.stdout
