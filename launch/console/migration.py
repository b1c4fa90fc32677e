"""Names in llama-server, vLLM and ollama, and ours (`foreign.toml`): for errors, and for `dovetail
config foreign`."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click


@dataclass(frozen=True)
class Foreign:
    """Options of another program with the same meaning, and the equivalent here."""

    written: str  # their names, separated by spaces
    whose: str
    here: str

    @property
    def names(self) -> list[str]:
        return self.written.split()


@dataclass(frozen=True)
class Names:
    """The content of `foreign.toml`."""

    options: Sequence[Foreign]
    commands: Mapping[str, str]  # commands of ollama and vLLM, and the equivalent here
    removed: Mapping[str, str]  # options of earlier releases, and their replacements

    def option(self, name: str) -> Foreign | None:
        """Return the entry of an option of another program."""
        return next((one for one in self.options if name in one.names), None)


@cache
def names() -> Names:
    """Return the names of other programs, which are read on demand."""
    table = tomllib.loads(Path(__file__).with_name("foreign.toml").read_text(encoding="utf-8"))
    options = [Foreign(*row) for row in table["options"]]
    return Names(options, table["commands"], table["removed"])


def advice(arguments: Sequence[str], option: str) -> str | None:
    """Return the equivalent of an unknown `option` of another program or an earlier release, or
    None. The parser reports one letter of `-ngl`, so the option is looked up in `arguments`."""
    if option in names().removed:
        return f"{option} has been removed: {names().removed[option]}"
    for name in _candidates(arguments, option):
        if (foreign := names().option(name)) is not None:
            return f"there is no option {name} ({foreign.whose}); in dovetail: {foreign.here}"
    return None


def _candidates(arguments: Sequence[str], option: str) -> Iterator[str]:
    letters = len(option) == 2
    for argument in arguments:
        name = argument.partition("=")[0]
        if name == option or (letters and name[:2].count("-") == 1 and option[1] in name[1:]):
            yield name


def context_size(value: str) -> str | None:
    """Return advice for `-c VALUE` that is not a settings file: a context size, or the rest of an
    option such as `-ctk`; None if it is neither."""
    if value.isdigit():
        own = names().option("--max-model-len")
        assert own is not None
        return f"-c names a settings file, and {value} is not one: {own.here}"
    return advice((f"-c{value}",), "-c")


def extra_argument(message: str, context: click.Context | None) -> str | None:
    """Return `message` with a remedy if it rejects an extra argument; else None."""
    if context is None or "unexpected extra argument" not in message:
        return None
    if not any("--target" in parameter.opts for parameter in context.command.params):
        path, given = context.command_path, message.partition("(")[2].rstrip(").")
        return f"`{path}` takes no argument {given!r}: `{path} --help` describes it"
    prompt = any(parameter.name == "prompt" for parameter in context.command.params)
    quotes = "put quotes around the prompt; " if prompt else ""
    return f"{message.rstrip('.')}: {quotes}name a model with --target MODEL"
