"""Completion of command lines in shells, from a table of commands and options that is made once for
each installation, since importing all commands takes seconds."""

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

import dovetail.protocol
from dovetail.protocol.files import cache_folder, write_kept

FOLDER = "completion"  # of the tables, in the cache folder
MOST_KEPT = 2  # tables of other installations
DEFINING = [
    Path(__file__).parent.parent / "commands",
    Path(__file__).parent.parent / "settings",
    Path(dovetail.protocol.__file__).parent / "settings",
]
"""The folders of the sources that define commands and options."""
MODELS = "models"  # stands for models of this machine among the values of an option
MODEL_OPTIONS = ("--target", "--target.model", "--draft", "--draft.model")
SCRIPTS = {
    "bash": """_dovetail() {
    local IFS=$'\\n'
    COMPREPLY=($(dovetail completion --words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    [[ ${COMPREPLY[0]} == */ ]] && compopt -o nospace
}
complete -o default -F _dovetail dovetail
""",
    "zsh": """#compdef dovetail
_dovetail() {
    local -a found
    found=("${(@f)$(dovetail completion --words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    [[ -n $found ]] && compadd -- $found || _files
}
compdef _dovetail dovetail
""",
    "fish": """function __dovetail
    dovetail completion --words -- (commandline -opc)[2..] (commandline -ct) 2>/dev/null
end
complete -c dovetail -f -n 'count (__dovetail)' -a '(__dovetail)'
complete -c dovetail -F -n 'not count (__dovetail)'
""",
}
"""Shell -> the script that asks for completions."""

ARGUMENTS = {"model": [MODELS], "shell": [*SCRIPTS]}  # values of arguments, by name
Entry = dict[str, Any]
"""What can follow a command: `words`, and `options` with their values; None: it takes none."""


def complete(words: Sequence[str], table: Mapping[str, Entry]) -> list[str]:
    """Return the completions of the last word; empty if the shell completes file names."""
    *before, last = words or [""]
    path, rest = "", [*before]
    while rest and (deeper := f"{path} {rest[0]}".strip()) in table:
        path, rest = deeper, rest[1:]
    entry = table[path]
    if last == "=" and rest:  # bash separates --option=value
        rest, last = [*rest, "="], ""
    if len(rest) > 1 and rest[-1] == "=":
        rest = rest[:-1]
    elif last.startswith("--") and "=" in last:
        option, _, value = last.partition("=")
        return [f"{option}={one}" for one in _values(entry["options"].get(option, []), value)]
    if rest and (values := entry["options"].get(rest[-1])) is not None:
        return _values(values, last)
    if last.startswith("-"):
        return [option for option in entry["options"] if option.startswith(last)]
    return _values(entry["words"], last)


def _values(values: Sequence[str], start: str) -> list[str]:
    found = [value for value in values if value != MODELS and value.startswith(start)]
    return [*found, *(_models(start) if MODELS in values else [])]


def _models(start: str) -> Iterator[str]:
    """Yield the models of this machine that begin like this: hub ids in the cache, GGUF files, and
    folders, which may be models or contain some."""
    for folder in sorted(_hub_cache().glob("models--*")):
        name = "/".join(folder.name.split("--")[1:])
        if name.startswith(start):
            yield name
    parent, _, name = start.rpartition("/")
    place = Path(f"{parent}/" if "/" in start else ".").expanduser()
    for path in sorted(place.iterdir()) if place.is_dir() else []:
        if path.name.startswith(name) and (name.startswith(".") or path.name[0] != "."):
            shown = start[: len(start) - len(name)] + path.name
            if path.is_dir():
                yield f"{shown}/"
            elif path.name.lower().endswith(".gguf"):
                yield shown


def _hub_cache() -> Path:
    """Return the folder of the Hugging Face cache, as huggingface_hub does, which takes long to
    import."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{base}/huggingface"
    return Path(given or f"{home}/hub").expanduser()


def table_of(group: click.Group) -> dict[str, Entry]:
    """Return the kept table, or make it."""
    files = (path for folder in DEFINING for path in folder.glob("*.py"))
    stamp = [__file__, max(path.stat().st_mtime_ns for path in files)]
    file = cache_folder() / FOLDER / f"{zlib.crc32(__file__.encode()):08x}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # there is none, or it is damaged
        kept = json.loads(file.read_bytes())
        if kept["stamp"] == stamp:
            table: dict[str, Entry] = kept["table"]
            return table
    table = dict(_entries(group, "", click.Context(group)))
    with suppress(OSError):  # without a cache it is made each time
        write_kept(file, json.dumps({"stamp": stamp, "table": table}).encode(), MOST_KEPT)
    return table


def _entries(command: click.Command, path: str, ctx: click.Context) -> Iterator[tuple[str, Entry]]:
    """Yield the words and options of a command and of those below it."""
    words: list[str] = []
    if isinstance(command, click.Group):
        words = command.list_commands(ctx)
        for name in words:
            below = command.get_command(ctx, name)
            if below is not None and not below.hidden:
                yield from _entries(below, f"{path} {name}".strip(), ctx)
    options = {}
    for parameter in command.get_params(ctx):
        if isinstance(parameter, click.Argument):
            words += ARGUMENTS.get(str(parameter.name), _choices(parameter))
        elif isinstance(parameter, click.Option) and not parameter.hidden:
            values = None if parameter.is_flag else _choices(parameter)
            for name in (*parameter.opts, *parameter.secondary_opts):
                if name.startswith("--"):
                    options[name] = values
    yield path, {"words": words, "options": options}


def _choices(parameter: click.Parameter) -> list[str]:
    from dovetail.launch.settings.catalog import SETTINGS  # takes long to import

    if isinstance(parameter.type, click.Choice):
        return [str(choice) for choice in parameter.type.choices]
    names = [name.removeprefix("--") for name in parameter.opts]
    setting = next((SETTINGS[name] for name in names if name in SETTINGS), None)
    words = setting.words if setting is not None else []
    words += SETTINGS["draft.kind"].words if "--draft" in parameter.opts else []
    models = [MODELS] if {*parameter.opts} & {*MODEL_OPTIONS} else []
    return [*dict.fromkeys([*words, *models])]
