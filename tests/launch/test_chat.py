"""`dovetail chat`: as a filter, in a terminal, and over HTTP."""

import io
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.launch.chat.answering import (
    COMMANDS,
    Answer,
    Answerer,
    Command,
    Conversation,
    CoordinatorAnswerer,
    Exchange,
    Manner,
    Paint,
    Show,
    parse,
)
from dovetail.launch.commands.chat import Chat, harmless, print_stats
from dovetail.launch.processes.connection import Connection
from dovetail.launch.processes.stack import Stack
from dovetail.launch.processes.supervise import Supervisor
from dovetail.protocol.errors import DovetailError, RequestError, UserError
from dovetail.protocol.links import open_link
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.golden import representative
from support.patience import PATIENCE_S
from support.scripted import continuation
from support.stacks import complete_all
from support.web import CHAT, backend

Run = Callable[..., subprocess.CompletedProcess[str]]

QUESTIONS = ("Tell me a story about a small owl.", "And what did it eat?")
COMMAND = (sys.executable, "-P", "-m", "dovetail.launch.cli")
COLOUR = re.compile(r"\x1b\[36m|\x1b\[0m")
MODES = re.compile(r"\x1b\[\?2004[hl]\r?")
"""Codes that readline sends to the terminal."""
SPECULATED = ("--policy", "dynamic", "--tree.insist", "true")
"""The embedded target is so cheap that no tree pays."""


def texts(
    client: Client, questions: tuple[str, ...], tokens: int, *, seed: int | None = None
) -> list[str]:
    """Return what the target alone says to each of these questions, as a conversation."""
    turns: list[str] = []
    for question in questions:
        turns.append(question)
        (finished,) = complete_all(
            client, [client.submit(turns=turns, max_tokens=tokens, seed=seed, speculate=False)]
        )
        turns.append(finished.result.text)
    return turns[1::2]


def test_lines_are_answered_as_a_conversation(run: Run, stack: Stack, client: Client) -> None:
    done = run(
        "chat",
        "--connect",
        stack.address,
        "--max-tokens",
        "12",
        input="\n".join((QUESTIONS[0], "", "/draft off", QUESTIONS[1], "/quit", "not read")),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(
        text + "\n" * (not text.endswith("\n")) for text in texts(client, QUESTIONS, 12)
    )


def test_the_results_are_json_lines_on_request(invoke: Run, stack: Stack) -> None:
    script = (
        f"{QUESTIONS[0]}\n/seed 7\n/temperature 0.9\n{QUESTIONS[1]}\n/retry\n/draft "
        f"off\n/clear\n{QUESTIONS[0]}\n"
    )
    done = invoke(
        "chat",
        "--connect",
        stack.address,
        "--max-tokens",
        "12",
        "--json",
        *SPECULATED,
        input=script,
    )
    assert done.returncode == 0, done.stderr
    first, second, third, last = map(json.loads, done.stdout.splitlines())
    assert (second["seed"], third["seed"]) == (7, 7)
    assert second["token_ids"] == third["token_ids"]
    assert second["prompt_tokens"] > first["prompt_tokens"] == last["prompt_tokens"]
    assert first["drafted_tokens"] > 0 == last["drafted_tokens"]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("/sats\n", "did you mean /stats?"),
        ("/temperature hot\n", "temperature"),
        ("/seed -1\n", "/seed -1"),
        ("long " * 2000, "the prompt has"),
    ],
)
def test_the_first_mistake_in_a_script_ends_it(
    invoke: Run, stack: Stack, script: str, words: str
) -> None:
    done = invoke("chat", "--connect", stack.address, input=script)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr


def test_a_conversation_is_saved_once(invoke: Run, stack: Stack, tmp_path: Path) -> None:
    script = f"{QUESTIONS[0]}\n/save {tmp_path / 'talk.json'}\n/save {tmp_path / 'talk.json'}\n"
    done = invoke("chat", "--connect", stack.address, "--max-tokens", "8", input=script)
    assert (done.returncode, "already exists" in done.stderr) == (2, True)
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["turns"] == [QUESTIONS[0], done.stdout.removesuffix("\n")]
    assert saved["results"][0]["completion_tokens"] <= 8


def test_the_figures_of_replies_are_a_table(invoke: Run, stack: Stack) -> None:
    done = invoke(
        "chat",
        "--connect",
        stack.address,
        "--max-tokens",
        "8",
        input=f"/stats\n{QUESTIONS[0]}\n{QUESTIONS[1]}\n/stats\n",
    )
    assert "there is no reply yet" in done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    table = rows[next(index for index, row in enumerate(rows) if "tokens/s" in row) :]
    assert {"tau", "accepted", "hit", "reused"} <= {*table[0]}
    assert [row[0] for row in table if row and row[0].isdigit()] == ["1", "2"] * 2, (
        "what they brought, and where their time went"
    )


def test_the_figures_of_replies_fit_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """However large they are: where nothing is a terminal's width, nothing is folded, and the lines
    are as long as they would like to be."""
    modest = representative()["finished"].result
    large = {
        "completion_tokens": 123456,
        "tokens_per_s": 12345.678,
        "tau": 17 / 3,
        "acceptance_rate": 1.0,
        "hit_rate": 0.98765,
    }
    large |= {
        "time_to_first_token_s": 123.456789,
        "prompt_tokens": 123456,
        "reused_tokens": 123456,
        "wall_s": 12345.678,
        "queue_s": 12345.678,
    }
    print_stats([modest, *[modest.model_copy(update=large)] * 11, None])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    rows = [row for line in lines if (row := line.split()) and row[0].isdigit()]
    assert [row[0] for row in rows] == [str(number) for number in range(3, 13)] * 2
    assert rows[-11] == ["12", "123456", "12346", "5.67", "100", "99", "123457", "123456", "123456"]


class Scripted:
    """Answers each question with the next of these replies, or raises it; keeps what it was
    asked."""

    def __init__(self, *replies: Answer | DovetailError) -> None:
        self._replies = iter(replies)
        self.asked: list[tuple[str, ...]] = []

    def models(self) -> str:
        return "a script"

    def answer(self, turns: Sequence[str], manner: Manner, show: Show) -> Answer:
        self.asked.append(tuple(turns))
        reply = next(self._replies)
        show("half a" if isinstance(reply, DovetailError) else reply.text, False)
        if isinstance(reply, DovetailError):
            raise reply
        return reply


@pytest.fixture
def talk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """A conversation with somebody, of these lines: what is said on stdout and on stderr, but for
    the greeting and the prompts."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def talk(
        answerer: Answerer, *lines: str, seed: int | None = None, temperature: float = 0.0
    ) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        Chat(
            answerer,
            Manner(Sampling(temperature=temperature), 16, TreeSettings(), seed),
            as_json=False,
        ).talk()
        said, told = capsys.readouterr()
        return said, told.replace("you> ", "").split("Ctrl-D ends\n")[1]

    return talk


def test_every_change_is_told_and_so_is_what_holds(talk: Callable[..., tuple[str, str]]) -> None:
    lines = (
        "/draft",
        "/draft off",
        "/temperature",
        "/temperature 0.8",
        "/temperature",
        "/seed",
        "/seed 3",
        "/seed random",
        "/clear",
        "/exit",
        "not read",
    )
    _, told = talk(Scripted(), *lines)
    off, random = "draft off: the target decodes alone", "seed random: another one for each reply"
    held = [
        "draft on",
        off,
        "temperature 0: greedy",
        "temperature 0.8",
        "temperature 0.8",
        random,
        "seed 3",
        random,
        "the conversation is cleared",
    ]
    assert told.splitlines() == held


def test_retry_says_that_a_reply_will_be_the_same_only_where_it_will(
    talk: Callable[..., tuple[str, str]],
) -> None:
    same = "the reply will be the same: "
    _, told = talk(
        Scripted(*[Answer("Hi")] * 4), "Hello.", "/retry", "/temperature 0.8", "/retry", "/retry"
    )
    assert [line for line in told.splitlines() if same in line] == [
        f"{same}/temperature 0.7 allows a different one"
    ]
    _, told = talk(
        Scripted(*[Answer("Hi")] * 3),
        "Hello.",
        "/draft off",
        "/retry",
        "/seed 4",
        "/retry",
        seed=3,
        temperature=0.8,
    )
    assert [line for line in told.splitlines() if same in line] == [
        f"{same}/seed random allows a different one"
    ]


def test_a_question_that_nobody_could_answer_is_kept_and_can_be_asked_again(
    talk: Callable[..., tuple[str, str]],
) -> None:
    somebody = Scripted(
        Answer("Hi"),
        DovetailError("no target"),
        DovetailError("no target"),
        Answer("More"),
        Answer("End"),
    )
    said, told = talk(somebody, "Hello.", "And?", "/retry", "/retry", "Then?")
    assert told == "no target\n/retry asks the question again\n" * 2
    assert somebody.asked == [
        ("Hello.",),
        *[("Hello.", "Hi", "And?")] * 3,
        ("Hello.", "Hi", "And?", "More", "Then?"),
    ]
    assert said == "Hi\nhalf a\nhalf a\nMore\nEnd\n\n"


def test_a_reply_is_not_lost_where_it_cannot_be_taken_back(
    talk: Callable[..., tuple[str, str]],
) -> None:
    for failure in (
        DovetailError("no target"),
        RequestError("settings", "no"),
        Answer("", interrupted=True),
    ):
        somebody = Scripted(Answer("Hi"), failure, Answer("More"))
        talk(somebody, "Hello.", "/retry", "And?")
        assert somebody.asked == [("Hello.",), ("Hello.",), ("Hello.", "Hi", "And?")]


def test_a_mistake_is_not_asked_again(talk: Callable[..., tuple[str, str]]) -> None:
    somebody = Scripted(Answer("Hi"), RequestError("prompt_too_long", "too long"), Answer("Ho"))
    _, told = talk(somebody, "Hello.", "A long one.", "/retry")
    assert told.splitlines()[0] == "too long"
    assert somebody.asked == [("Hello.",), ("Hello.", "Hi", "A long one."), ("Hello.",)]


class Terminal:
    """A person in front of `dovetail chat`."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        pid, self._screen = pty.fork()
        if pid == 0:
            os.execvpe(COMMAND[0], [*COMMAND, "chat", *arguments], environment)
        self.pid, self.seen, self._read = pid, "", 0

    def wait_for(self, pattern: str) -> str:
        """Return what came up to this pattern since the last call."""
        end_s = time.monotonic() + PATIENCE_S
        while (found := re.compile(pattern).search(self.seen, self._read)) is None:
            ready, _, _ = select.select([self._screen], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, f"{pattern!r} did not come: {self.seen!r}"
            try:
                self.seen = MODES.sub(
                    "",
                    self.seen
                    + os.read(self._screen, 65536).decode(errors="replace").replace("\r\n", "\n"),
                )
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
def terminal(
    environment: dict[str, str], stack: Stack, tmp_path: Path
) -> Iterator[Callable[..., Terminal]]:
    """Begins a conversation with the embedded pair in a terminal that knows colours."""
    person = {**environment, "XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "xterm"}
    person.pop("NO_COLOR", None)

    def begin(*arguments: str, connect: str = stack.address, **more: str) -> Terminal:
        begun = Terminal({**person, **more}, "--connect", connect, *arguments)
        begun.wait_for("you> ")
        return begun

    return begin  # type: ignore[return-value]


def test_in_a_terminal_drafted_tokens_are_coloured_and_the_text_is_the_same(
    terminal: Callable[..., Terminal], client: Client, tmp_path: Path
) -> None:
    person = terminal("--max-tokens", "16", *SPECULATED)
    (expected,) = texts(client, QUESTIONS[:1], 16)
    assert "target demo (fp32)" in person.seen
    assert "proposed by the draft is in \x1b[36mthis colour\x1b[0m" in person.seen
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
    terminal: Callable[..., Terminal],
    stack: Stack,
    url: str,
    client: Client,
    tmp_path: Path,
    over_http: bool,
) -> None:
    cancelled = client.status().cancelled
    person = terminal(
        *shlex.split("--max-tokens 450 --temperature 50"),
        connect=url if over_http else stack.address,
        NO_COLOR="1",
    )
    # every token is about equally likely; a reply that ends by itself before Ctrl-C proves nothing
    for _ in range(100):
        person.type("/clear\n")
        person.wait_for("you> ")
        person.type("Hello.\n")
        person.wait_for(r"Hello\.\n(?s:.)")  # the reply has begun, perhaps with a newline
        os.kill(person.pid, signal.SIGINT)
        if "interrupted" in person.wait_for("you> "):
            break
    else:
        raise AssertionError("no reply was interrupted")
    person.type(f"/save {tmp_path / 'talk.json'}\n")
    person.wait_for("the conversation is saved in")
    person.wait_for("you> ")
    person.type("/quit\n")
    assert person.end() == 0
    assert "\x1b[36m" not in person.seen
    turns = json.loads((tmp_path / "talk.json").read_text())["turns"]
    assert turns == [] or (turns[0] == "Hello." and turns[1])
    while (state := client.status()).sessions:
        os.sched_yield()
    assert state.cancelled == cancelled + 1


@pytest.fixture(scope="module")
def url(stack: Stack) -> Iterator[str]:
    """The HTTP API of the embedded pair."""
    with Supervisor() as supervisor:
        child = supervisor.start(
            "http",
            [
                "http",
                f"--connect={stack.address}",
                "--http.port=0",
                "--tree.policy=dynamic",
                "--tree.insist=true",
            ],
            reads=True,
        )
        assert child.process.stdout is not None
        yield child.process.stdout.readline().decode().strip()


def test_over_http_a_conversation_is_the_same(invoke: Run, stack: Stack, url: str) -> None:
    script = f"{QUESTIONS[0]}\n{QUESTIONS[1]}\n/draft off\n/clear\n{QUESTIONS[0]}\n"
    options = ("--max-tokens", "12", "--temperature", "0.8", "--seed", "3", "--json")
    here = [
        json.loads(line)
        for line in invoke(
            "chat", "--connect", stack.address, *options, *SPECULATED, input=script
        ).stdout.splitlines()
    ]
    done = invoke("chat", "--connect", url, *options, input=script)
    assert done.returncode == 0, done.stderr
    there = [json.loads(line) for line in done.stdout.splitlines()]
    same = (
        *shlex.split(
            "text token_ids prompt_tokens completion_tokens finish_reason seed fingerprint"
        ),
    )
    assert [[reply[name] for name in same] for reply in there] == [
        [reply[name] for name in same] for reply in here
    ]
    assert [list(reply) for reply in there] == [list(reply) for reply in here]
    assert there[0]["drafted_tokens"] > 0 == there[2]["drafted_tokens"]


def test_generate_works_over_http_too(invoke: Run, stack: Stack, url: str) -> None:
    options = (QUESTIONS[0], "--max-tokens", "12", "--seed", "3", "--temperature", "0.8")
    done = invoke("generate", *options, "--connect", url)
    assert done.stdout == invoke("generate", *options, "--connect", stack.address).stdout
    assert f"at {url}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("chat", "--tree.gamma", "3"), "the server decides --tree.gamma"),
        (("chat", "--draft", "ngram"), "the server decides --draft.kind"),
        (("generate", "x", "--trace", "x.json"), "--trace does not work with"),
        (("status",), "on the server's machine, leave out --connect"),
    ],
)
def test_what_a_url_cannot_do_is_told(
    invoke: Run, url: str, arguments: tuple[str, ...], words: str
) -> None:
    done = invoke(*arguments, "--connect", url, input="Hello.\n")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert words in done.stderr


def test_a_server_that_is_not_there_is_one_line(invoke: Run) -> None:
    done = invoke("chat", "--connect", "http://127.0.0.1:1", input="Hello.\n")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no server answers at http://127.0.0.1:1" in done.stderr


def test_pieces_of_a_reply_are_split_before_words() -> None:
    pieces: list[str] = []
    with backend() as house, Client(open_link(house.address, role="client")) as client:
        answerer = CoordinatorAnswerer(Connection(client, client.status()))
        tree = TreeSettings(policy="dynamic", insist=True)
        held = f" w{continuation(CHAT, 1)[0]} x"  # which has the first word wait for the second
        manner = Manner(Sampling(), 24, tree, stop=(held,))
        answer = answerer.answer(("w5 w6",), manner, lambda piece, _drafted: pieces.append(piece))
    assert "".join(pieces) == answer.text
    assert len(pieces) > 2
    assert all(re.fullmatch(r"( w\d+)+", piece) for piece in pieces)


GREEDY = Manner(Sampling(temperature=0.0), 16, TreeSettings())
PIECES = st.lists(st.tuples(st.text("ab \nü", max_size=4), st.booleans()), max_size=20)


def warm(temperature: float = 0.5, *, acceptance: Any = "coupled", **more: Any) -> Manner:
    return replace(
        GREEDY, sampling=Sampling(temperature=temperature, acceptance=acceptance), **more
    )


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("Hello there\n", "Hello there"),
        ("   \n", None),
        ("//etc is a folder", "/etc is a folder"),
        ("/stats\n", Command("stats")),
        ("/draft off", Command("draft", "off")),
        (" /temperature  0.7 ", Command("temperature", "0.7")),
        ("/save my talk.json", Command("save", "my talk.json")),
        ("/temperature", Command("temperature")),
        ("/exit", Command("quit")),
    ],
)
def test_a_line_is_a_question_a_command_or_nothing(
    line: str, meaning: Command | str | None
) -> None:
    assert parse(line) == meaning


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/sats", r"there is no command /sats: did you mean /stats\?"),
        ("/x", "there is no command /x: /help lists"),
        ("/save", "/save is not possible: write /save FILE"),
        ("/exot", r"did you mean /exit\?"),
        ("/draft maybe", r"/draft maybe is not possible: write /draft on\|off"),
        ("/clear all", "/clear all is not possible: write /clear$"),
        ("/", "there is no command /:"),
    ],
)
def test_a_command_that_is_none_is_answered_with_what_is(line: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(line)


def test_every_command_is_read_with_its_argument() -> None:
    for name, (wanted, _) in COMMANDS.items():
        argument = wanted.strip("[]").split("|")[0]
        assert parse(f"/{name} {argument}") == Command(name, argument)


def test_turns_alternate_and_the_last_can_be_taken_back() -> None:
    first = Conversation().with_answer("Hello.", GREEDY, Answer("Hi"))
    both = first.with_answer("More.", GREEDY, Answer("Once up", interrupted=True))
    assert both.turns_with("Go on.") == ("Hello.", "Hi", "More.", "Once up", "Go on.")
    before, last = both.taken_back()
    assert (before, last.question) == (first, "More.")
    with pytest.raises(UserError, match="there is no question"):
        Conversation().taken_back()


@pytest.mark.parametrize(
    ("asked", "again", "same"),
    [
        (GREEDY, GREEDY, True),
        (GREEDY, replace(GREEDY, seed=3, speculate=False), True),
        (GREEDY, warm(seed=7), False),
        (warm(), warm(), False),
        (warm(), warm(seed=7), True),  # which is the seed that the reply tells
        (warm(seed=7), warm(seed=7, speculate=False), True),
        (warm(seed=7), warm(seed=8), False),
        (warm(seed=7), warm(0.9, seed=7), False),
        (warm(seed=7), GREEDY, False),
        (warm(acceptance="rejection", seed=7), warm(acceptance="rejection", seed=7), False),
    ],
)
def test_a_question_gets_the_same_answer_where_chance_has_no_part(
    asked: Manner, again: Manner, same: bool
) -> None:
    result = representative()["finished"].result.model_copy(update={"seed": 7})
    assert Exchange("Hello.", asked, Answer("Hi", result)).is_repeated_in(again) is same
    assert not Exchange("Hello.", asked, Answer("H", result, interrupted=True)).is_repeated_in(
        again
    )


def test_without_figures_a_seed_that_was_not_asked_for_is_unknown() -> None:
    assert not Exchange("Hello.", warm(), Answer("Hi")).is_repeated_in(warm())
    assert Exchange("Hello.", warm(seed=3), Answer("Hi")).is_repeated_in(warm(seed=3))


def test_a_conversation_is_saved_with_its_figures() -> None:
    result = representative()["finished"].result
    conversation = (
        Conversation()
        .with_answer("Hello.", GREEDY, Answer("Hi", result))
        .with_answer("More.", GREEDY, Answer("Wh", interrupted=True))
    )
    saved = json.loads(conversation.as_json())
    assert saved["turns"] == ["Hello.", "Hi", "More.", "Wh"]
    assert saved["results"] == [json.loads(json.dumps(result.model_dump())), None]


@given(PIECES, st.lists(st.integers(0, 9)), st.text("ab", max_size=3))
def test_every_character_has_the_colour_of_the_token_that_spelt_it(
    pieces: list[tuple[str, bool]], lengths: list[int], rest: str
) -> None:
    """However the text is cut into messages, and whatever comes behind the tokens."""
    whole = "".join(text for text, _ in pieces) + rest
    expected = [flag for text, flag in pieces for _ in text] + [False] * len(rest)
    paint, shown = Paint(), []
    paint.push(pieces)
    left = whole
    for length in (*lengths, len(whole)):
        shown += paint.take(left[:length])
        left = left[length:]
    assert "".join(text for text, _ in shown) == whole
    assert [flag for text, flag in shown for _ in text] == expected


def test_text_that_is_held_back_is_coloured_when_it_comes() -> None:
    paint = Paint()
    paint.push([("one ", True), ("two", False)])
    assert paint.take("one") == [("one", True)]
    paint.push([(" three", True)])
    assert paint.take(" tw") == [(" ", True), ("tw", False)]
    assert paint.take("o th") == [("o", False), (" th", True)]


def test_no_reply_commands_the_terminal() -> None:
    assert (
        harmless("a\tb\nc\x1b[2J\x07\x9b1m\x7f é👩‍🚀")
        == "a\tb\nc\ufffd[2J\ufffd\ufffd1m\ufffd é👩‍🚀"
    )
