"""`dovetail chat`: as a filter, in a terminal, and over HTTP."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dovetail.launch.supervise import Stack, Supervisor
from dovetail.runtime.client import Client
from support.stacks import complete_all

Run = Callable[..., subprocess.CompletedProcess[str]]

QUESTIONS = ("Tell me a story about a small owl.", "And what did it eat?")
COMMAND = ("python", "-P", "-m", "dovetail.launch.cli")
COLOUR = re.compile(r"\x1b\[36m|\x1b\[0m")
MODES = re.compile(r"\x1b\[\?2004[hl]\r?")
"""What readline says to the terminal."""
SPECULATED = ("--policy", "dynamic")
"""The embedded target is so cheap that no tree pays."""
TALK_S = 60.0


def texts(client: Client, questions: tuple[str, ...], tokens: int, *, seed: int | None = None) -> list[str]:
    """What the target alone says to each of these questions, as a conversation."""
    turns: list[str] = []
    for question in questions:
        turns.append(question)
        (finished,) = complete_all(client, [client.submit(turns=turns, max_tokens=tokens, seed=seed, speculate=False)])
        turns.append(finished.result.text)
    return turns[1::2]


def test_lines_are_answered_as_a_conversation(run: Run, stack: Stack, client: Client) -> None:
    done = run("chat", "--connect", stack.address, "--max-tokens", "12", input="\n".join((QUESTIONS[0], "", "/draft off", QUESTIONS[1], "/quit", "not read")))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(text + "\n" * (not text.endswith("\n")) for text in texts(client, QUESTIONS, 12))


def test_the_results_are_json_lines_on_request(run: Run, stack: Stack) -> None:
    script = f"{QUESTIONS[0]}\n/seed 7\n/temperature 0.9\n{QUESTIONS[1]}\n/retry\n/draft off\n/clear\n{QUESTIONS[0]}\n"
    done = run("chat", "--connect", stack.address, "--max-tokens", "12", "--json", *SPECULATED, input=script)
    assert done.returncode == 0, done.stderr
    first, second, third, last = map(json.loads, done.stdout.splitlines())
    assert (second["seed"], third["seed"]) == (7, 7)
    assert second["token_ids"] == third["token_ids"]
    assert second["prompt_tokens"] > first["prompt_tokens"] == last["prompt_tokens"]
    assert first["drafted_tokens"] > 0 == last["drafted_tokens"]


@pytest.mark.parametrize(
    ("script", "words"),
    [("/sats\n", "did you mean /stats?"), ("/temperature hot\n", "temperature"), ("/seed -1\n", "/seed -1"), ("long " * 2000, "the prompt has")],
)
def test_the_first_mistake_in_a_script_ends_it(run: Run, stack: Stack, script: str, words: str) -> None:
    done = run("chat", "--connect", stack.address, input=script)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr


def test_a_conversation_is_saved_once(run: Run, stack: Stack, tmp_path: Path) -> None:
    script = f"{QUESTIONS[0]}\n/save {tmp_path / 'talk.json'}\n/save {tmp_path / 'talk.json'}\n"
    done = run("chat", "--connect", stack.address, "--max-tokens", "8", input=script)
    assert (done.returncode, "is there already" in done.stderr) == (2, True)
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["turns"] == [QUESTIONS[0], done.stdout.removesuffix("\n")]
    assert saved["results"][0]["completion_tokens"] <= 8


def test_the_figures_of_replies_are_a_table(run: Run, stack: Stack) -> None:
    done = run("chat", "--connect", stack.address, "--max-tokens", "8", input=f"/stats\n{QUESTIONS[0]}\n{QUESTIONS[1]}\n/stats\n")
    assert "there is no reply yet" in done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    table = rows[next(index for index, row in enumerate(rows) if "tokens/s" in row) :]
    assert [row[0] for row in table if row and row[0].isdigit()] == ["1", "2"]
    assert {"tau", "acceptance", "hit", "reused", "verify"} <= {*table[0]}


# -- in a terminal -----------------------------------------------------------------------------------------------------------------------------


class Terminal:
    """A person in front of `dovetail chat`."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        pid, self._screen = pty.fork()
        if pid == 0:
            os.execvpe(COMMAND[0], [*COMMAND, "chat", *arguments], environment)
        self.pid, self.seen, self._read = pid, "", 0

    def wait_for(self, pattern: str) -> str:
        """What came up to this, since the last call."""
        end_s = time.monotonic() + TALK_S
        while (found := re.compile(pattern).search(self.seen, self._read)) is None:
            ready, _, _ = select.select([self._screen], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, f"{pattern!r} did not come: {self.seen!r}"
            try:
                self.seen = MODES.sub("", self.seen + os.read(self._screen, 65536).decode(errors="replace").replace("\r\n", "\n"))
            except OSError:  # the other end was closed
                raise AssertionError(f"{pattern!r} did not come: {self.seen!r}") from None
        came, self._read = self.seen[self._read : found.start()], found.end()
        return came

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def end(self) -> int:
        """The exit code, once it ends."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self._screen)
        return os.waitstatus_to_exitcode(status)


@pytest.fixture
def terminal(environment: dict[str, str], stack: Stack, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Begins a conversation with the embedded pair in a terminal that knows colours."""
    person = {**environment, "XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "xterm"}
    person.pop("NO_COLOR", None)

    def begin(*arguments: str, connect: str = stack.address, **more: str) -> Terminal:
        begun = Terminal({**person, **more}, "--connect", connect, *arguments)
        begun.wait_for("you> ")
        return begun

    return begin  # type: ignore[return-value]


def test_in_a_terminal_drafted_tokens_are_coloured_and_the_text_is_the_same(terminal: Callable[..., Terminal], client: Client, tmp_path: Path) -> None:
    person = terminal("--max-tokens", "16", *SPECULATED)
    (expected,) = texts(client, QUESTIONS[:1], 16)
    assert "target demo (fp32)" in person.seen
    assert "proposed is in \x1b[36mthis colour\x1b[0m" in person.seen
    person.type(QUESTIONS[0] + "\n")
    person.wait_for(r"owl\.\n")
    shown = person.wait_for("you> ")
    assert COLOUR.sub("", shown).startswith(expected)
    assert "\x1b[36m" in shown
    person.type("/nonsense\n")
    person.wait_for("there is no command /nonsense")
    person.wait_for("you> ")
    person.type("\x04")
    assert person.end() == 0
    history = tmp_path / "state" / "dovetail" / "chat_history"
    assert history.read_text().splitlines() == [QUESTIONS[0], "/nonsense"]
    assert history.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("over_http", [False, True])
def test_ctrl_c_interrupts_a_reply_and_keeps_what_was_said(
    terminal: Callable[..., Terminal], stack: Stack, url: str, client: Client, tmp_path: Path, over_http: bool
) -> None:
    cancelled = client.status().cancelled
    person = terminal("--max-tokens", "450", "--temperature", "50", connect=url if over_http else stack.address, NO_COLOR="1")
    for _ in range(5):  # every token is about equally likely; a reply that ends by itself before Ctrl-C proves nothing: ask again
        person.type("/clear\n")
        person.wait_for("you> ")
        person.type("Hello.\n")
        person.wait_for(r"Hello\.\n.")  # the reply has begun
        os.kill(person.pid, signal.SIGINT)
        if "interrupted" in person.wait_for("you> "):
            break
    else:
        raise AssertionError("no reply was interrupted")
    person.type(f"/save {tmp_path / 'talk.json'}\n")
    person.wait_for("has what was said")
    person.wait_for("you> ")
    person.type("/quit\n")
    assert person.end() == 0
    assert "\x1b[36m" not in person.seen
    turns = json.loads((tmp_path / "talk.json").read_text())["turns"]
    assert turns == [] or (turns[0] == "Hello." and turns[1])
    while (state := client.status()).sessions:
        os.sched_yield()
    assert state.cancelled == cancelled + 1


# -- over HTTP ---------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(stack: Stack) -> Iterator[str]:
    """The HTTP API of the embedded pair."""
    with Supervisor() as supervisor:
        child = supervisor.start("http", ["http", f"--connect={stack.address}", "--http.port=0", "--tree.policy=dynamic"], reads=True)
        assert child.process.stdout is not None
        yield child.process.stdout.readline().decode().strip()


def test_over_http_a_conversation_is_the_same(run: Run, stack: Stack, url: str) -> None:
    script = f"{QUESTIONS[0]}\n{QUESTIONS[1]}\n/draft off\n/clear\n{QUESTIONS[0]}\n"
    options = ("--max-tokens", "12", "--temperature", "0.8", "--seed", "3", "--json")
    here = [json.loads(line) for line in run("chat", "--connect", stack.address, *options, *SPECULATED, input=script).stdout.splitlines()]
    done = run("chat", "--connect", url, *options, input=script)
    assert done.returncode == 0, done.stderr
    there = [json.loads(line) for line in done.stdout.splitlines()]
    same = ("text", "token_ids", "prompt_tokens", "completion_tokens", "finish_reason", "seed", "fingerprint")
    assert [[reply[name] for name in same] for reply in there] == [[reply[name] for name in same] for reply in here]
    assert [list(reply) for reply in there] == [list(reply) for reply in here]
    assert there[0]["drafted_tokens"] > 0 == there[2]["drafted_tokens"]


def test_generate_works_over_http_too(run: Run, stack: Stack, url: str) -> None:
    options = (QUESTIONS[0], "--max-tokens", "12", "--seed", "3", "--temperature", "0.8")
    done = run("generate", *options, "--connect", url)
    assert done.stdout == run("generate", *options, "--connect", stack.address).stdout
    assert f"at {url}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("chat", "--tree.gamma", "3"), "--tree.gamma is the server's to decide"),
        (("chat", "--draft", "ngram"), "--draft.kind is the server's to decide"),
        (("generate", "x", "--raw"), "need the coordinator"),
        (("status",), "this command speaks with its coordinator"),
    ],
)
def test_what_a_url_cannot_do_is_told(run: Run, url: str, arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments, "--connect", url, input="Hello.\n")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert words in done.stderr


def test_a_server_that_is_not_there_is_one_line(run: Run) -> None:
    done = run("chat", "--connect", "http://127.0.0.1:1", input="Hello.\n")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "nobody answers at http://127.0.0.1:1" in done.stderr
