"""`--help` is short and grouped, `--help-all` whole, and what other programs call an option is
answered with its name here."""

import importlib
import re
from collections.abc import Iterator

import click
import pytest

from dovetail.launch import cli
from dovetail.launch.console import migration
from dovetail.launch.console.help import FEW
from dovetail.protocol.settings import DRAFT_KINDS

HEADING = re.compile(r"^(\w.*):$", re.MULTILINE)
OPTION = re.compile(r"^  (?:-\w, )?(--[\w.-]+)", re.MULTILINE)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command that can be typed, those of groups among them."""
    for name in cli.COMMANDS:
        command = importlib.import_module(f"dovetail.launch.commands.{name}").command
        yield from _leaves(name, command)


def _leaves(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for inner, part in command.commands.items():
            yield from _leaves(f"{name} {inner}", part)
    else:
        yield name, command


ALL = dict(commands())


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ALL)
def test_help_shows_about_a_dozen_options_and_help_all_every_one(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    options = (p for p in ALL[name].params if isinstance(p, click.Option) and not p.hidden)
    visible = {max(option.opts, key=len) for option in options}
    short, full = (help_of(capsys, *name.split(), length) for length in ("--help", "--help-all"))
    shown = len(visible & set(OPTION.findall(short)))
    assert shown <= FEW
    assert {option for option in visible if option not in full} == set()
    assert not re.search(r"\{[A-Z_]+\}", full)  # of a string that should be formatted
    further = re.search(r"(\d+) further options", short)
    assert (int(further[1]) if further else 0) == len(visible) - shown


def test_options_are_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    for name, length, headings in (
        ("generate", "--help", ["Options", "Models", "Decoding", "Serving"]),
        ("serve", "--help", ["Options", "Models", "Serving"]),
        ("serve", "--help-all", ["Options", "Models", "Decoding", "Serving"]),
    ):
        assert HEADING.findall(help_of(capsys, name, length)) == headings


def test_the_list_of_commands_is_in_groups_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(capsys, "--help")
    assert HEADING.findall(shown) == ["Options", *cli.GROUPS]
    assert re.findall(r"^  (\w+)  ", shown, re.MULTILINE) == list(cli.COMMANDS)
    assert help_of(capsys, "--help-all") == shown


@pytest.mark.parametrize("group", [("config",), ("config", "export"), ("train",)])
def test_the_list_of_a_group_is_not_cut_off(
    group: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "..." not in help_of(capsys, *group, "--help").partition("Commands:")[2]


def test_the_words_of_a_table_stand_in_the_full_help_and_the_short_one_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "Columns of --csv:" in help_of(capsys, "bench", "--help-all")
    short = help_of(capsys, "bench", "--help")
    assert "Columns of --csv:" not in short
    assert "dovetail bench --help-all" in short


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "-m", "model.gguf"), ("-m (llama-server)", "--target MODEL", "GGUF")),
        (("serve", "-ngl", "99"), ("-ngl", "--target.split.layers N")),
        (("serve", "--n-gpu-layers=99"), ("--n-gpu-layers", "--target.split.layers N")),
        (("serve", "-c", "4096"), ("4096", "--target.context N")),
        (("serve", "-c4096"), ("4096", "--target.context N")),
        (("serve", "-ctk", "q8_0"), ("-ctk", "--target.cache fp32", "`q8` (q8_0)")),
        (("serve", "--ctx-size", "4096"), ("--ctx-size", "--target.context N")),
        (("serve", "-hf", "ggml-org/x"), ("-hf", "--target ID")),
        (("serve", "-md", "draft.gguf"), ("-md", "--draft MODEL")),
        (("serve", "--draft", "16"), ("--draft 16", "--tree.gamma")),
        (("serve", "--draft", "draft-mtp"), ("--draft draft-mtp", "did you mean mtp?")),
        (("serve", "--draft", "nextn"), ("--draft nextn", "did you mean mtp?")),
        (("serve", "--draft", "ngram-mod"), ("--draft ngram-mod", "did you mean ngram?")),
        (("serve", "-lcd", "cache"), ("-lcd", "--coordinator.lookup_memory")),
        (("serve", "--draft-max", "16"), ("--draft-max", "--tree.gamma N")),
        (("serve", "--tensor-parallel-size", "2"), ("vLLM", "one GPU")),
        (("serve", "--max-model-len", "4096"), ("vLLM", "--target.context N")),
        (("serve", "--speculative-config", "{}"), ("vLLM", "--draft MODEL")),
        (("serve", "--port", "8080"), ("--port", "--http.port N")),
        (("generate", "-p", "hello"), ("-p ", "dovetail generate PROMPT")),
        (("serve", "-v"), ("-v ", "dovetail top")),
        (("-v",), ("-v ", "dovetail top")),
        (("serve", "--n-cpu-moe", "8"), ("--n-cpu-moe", "--experts-on-cpu true")),
        (("serve", "-ot", "exps=CPU"), ("-ot", "--experts-on-cpu true")),
        (("calibrate", "Qwen/Qwen3-0.6B"), ("Qwen/Qwen3-0.6B", "--target MODEL")),
        (("generate", "--temp", "0.8", "hello"), ("--temp", "--temperature T")),
        (("generate", "-n", "64", "hello"), ("-n ", "--max-tokens N")),
        (("-m", "model.gguf"), ("-m ", "--target MODEL")),
        (("run", "llama3.2"), ("'run'", "dovetail chat --target MODEL")),
        (("ps",), ("'ps'", "dovetail status")),
    ],
)
def test_what_others_call_an_option_is_answered_with_its_name_here(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert cli.run(arguments) == 2
    said, complaint = capsys.readouterr()
    assert said == ""
    assert len(complaint.splitlines()) == 1
    assert all(word in complaint for word in words), complaint


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "worker", "bench", "top"])
def test_every_foreign_option_is_answered_on_every_command_without_it(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    own = {opt for p in ALL[command].params for opt in p.opts}
    for foreign in migration.names().options:
        for name in {*foreign.names} - own:
            assert cli.run((command, name, "7")) == 2
            assert foreign.here in capsys.readouterr().err, (command, name)


@pytest.mark.parametrize(
    "command", [("serve", "--standby", "tcp://b:1"), ("coordinator", "--standby-of=tcp://a:1")]
)
def test_an_option_that_has_been_removed_is_answered_with_what_replaces_it(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert cli.run(command) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"{command[1].partition('=')[0]} has been removed: requests outlive" in said


def test_two_addresses_are_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(("status", "--connect=tcp://a:1,tcp://b:1")) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "'tcp://a:1,tcp://b:1' is not a tcp address: write tcp://HOST:PORT" in said


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("serve --no-such-option", "`dovetail serve` has no option --no-such-option: `dovetail "),
        ("config export grafana --target x", "`dovetail config export grafana` has no option "),
        ("doctor grafana", "`dovetail doctor` takes no argument 'grafana'"),
    ],
)
def test_what_no_command_takes_is_named_with_the_help_to_read(
    capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    assert cli.run(command.split()) == 2
    (complaint,) = capsys.readouterr().err.splitlines()
    assert said in complaint
    assert "--help` " in complaint


def test_the_hints_name_options_and_commands_that_there_are() -> None:
    options = {opt for command in ALL.values() for p in command.params for opt in p.opts}
    texts = [foreign.here for foreign in migration.names().options] + list(
        migration.names().commands.values()
    )
    named = {option for text in texts for option in re.findall(r"(?<![\w-])--[a-z][\w.-]*", text)}
    assert named <= options
    assert named >= {"--target", "--tree.gamma", "--http.port"}  # found at all
    run = {name for text in texts for name in re.findall(r"`dovetail (\w+)", text)}
    assert run <= set(cli.COMMANDS)
    kinds = {kind for text in texts for kind in re.findall(r"`--draft ([a-z]\w*)", text)}
    assert kinds <= set(DRAFT_KINDS)


def test_a_name_stands_in_the_table_once_and_is_not_one_of_ours_on_serve() -> None:
    names = [name for foreign in migration.names().options for name in foreign.names]
    assert len(names) == len(set(names))
    ours = {opt for p in ALL["serve"].params for opt in p.opts} | {"-h"}
    assert ours & set(names) == {"-c"}
    assert set(migration.names().commands) & set(cli.COMMANDS) == set()
