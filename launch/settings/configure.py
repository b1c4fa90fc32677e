"""The settings in force: flag > environment > file > default, and where each of them came from.

Every setting is a flag by its dotted name (`--tree.gamma 6`), a variable (`DOVETAIL_TREE__GAMMA=6`)
and a key of a TOML file (`--config FILE`). The embedded pair of models comes with a file of its
own, which lies beneath the user's while no target is named. Knows what a setting is called and what
it may be (from `protocol/settings.py`), not what it does.
"""

import difflib
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import click
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from dovetail.launch.console.help import Grouped, HelpCommand
from dovetail.launch.console.migration import context_size
from dovetail.launch.settings.embedded import DEMO_FOLDER
from dovetail.launch.settings.thresholds import thresholds_of
from dovetail.protocol.errors import SettingsError
from dovetail.protocol.files import decode
from dovetail.protocol.settings import DRAFT_KINDS, Frozen, Settings, misfit

DEMO_SETTINGS = DEMO_FOLDER / "settings.toml"
PREFIX = "DOVETAIL_"
SEVERAL = "one or more"
ALL_SECTIONS = tuple(Settings.model_fields)
GROUPS = {
    "target": "Models",
    "draft": "Models",
    "memory": "Models",
    "tree": "Decoding",
    "sampling": "Decoding",
    "coordinator": "Serving",
    "http": "Serving",
}
"""Section -> the heading of its options in the help."""
BASIC = (
    "target.model",
    "target.weights",
    "memory.vram",
    "tree.policy",
    "sampling.temperature",
    "sampling.max_tokens",
)
"""Settings that `--help` shows; `--help-all` has the others."""
SettingsCommand = HelpCommand
LISTENING = ("http.host", "http.port", "http.api_key_file", "http.model")
"""Settings that `--help` of a server shows as well."""
DECODING_SECTIONS = tuple(section for section in ALL_SECTIONS if section != "http")
"""Those of whoever decodes without a server."""
SHORT_FORMS = {
    "target.model": "--target",
    "target.weights": "--weights",
    "target.backend": "--backend",
    "target.inflate": "--inflate",
    "tree.policy": "--policy",
    "tree.gamma": "--gamma",
    "sampling.temperature": "--temperature",
    "sampling.top_k": "--top-k",
    "sampling.top_p": "--top-p",
    "sampling.min_p": "--min-p",
    "sampling.repetition_penalty": "--repetition-penalty",
    "sampling.presence_penalty": "--presence-penalty",
    "sampling.frequency_penalty": "--frequency-penalty",
    "sampling.logit_bias": "--logit-bias",
    "sampling.min_tokens": "--min-tokens",
    "sampling.max_tokens": "--max-tokens",
    "coordinator.listen": "--listen",
    "coordinator.keys": "--keys",
    "coordinator.record": "--record-messages",
}


@dataclass(frozen=True)
class Setting:
    """One leaf of the tree of settings."""

    name: str
    field: FieldInfo

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper().replace(".", "__")

    @property
    def default(self) -> Any:
        return self.field.default

    @cached_property
    def type(self) -> Any:
        return (
            Annotated[self.field.annotation, *self.field.metadata]
            if self.field.metadata
            else self.field.annotation
        )

    @cached_property
    def expected(self) -> str:
        """In words, what the setting may be."""
        return " or ".join(_expected(self.type))

    @property
    def is_table(self) -> bool:
        """Whether it maps things to things: a flag for it can be given several times."""
        return (
            get_origin(self.field.annotation) is tuple
            and get_origin(get_args(self.field.annotation)[0]) is tuple
        )

    def parse(self, text: str, origin: str) -> Any:
        """The value that a flag or a variable spells; `SettingsError` if it spells none."""
        try:
            return TypeAdapter(self.type).validate_strings(text)
        except ValidationError as error:
            raise SettingsError(self.complaint(error, text, origin)) from None

    def complaint(self, error: ValidationError, value: Any, origin: str) -> str:
        """What is wrong with a value, and what would be right."""
        first = error.errors(include_url=False)[0]
        if first["type"] == "value_error":
            return (
                f"{self.name} = {value!r} ({origin}): "
                f"{str(first['msg']).removeprefix('Value error, ')}"
            )
        return f"{self.name} = {value!r} ({origin}) is not possible: write {self.expected}"

    def flag_text(self, value: Any) -> str:
        """The text that `parse` reads as this value."""
        if isinstance(value, tuple):
            return ",".join(
                f"{part[0]}={part[1]!r}" if self.is_table else str(part) for part in value
            )
        return str(value)

    def toml(self, value: Any) -> str:
        """The value as a TOML file has it."""
        if not self.is_table:
            return json.dumps(list(value) if isinstance(value, tuple) else value)
        return (
            f"{{ {', '.join(f'{key} = {number!r}' for key, number in value)} }}" if value else "{}"
        )


def _settings() -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for section, part in Settings.model_fields.items():
        found.update(_leaves(section, part))
    return found


def _leaves(name: str, info: FieldInfo) -> dict[str, Setting]:
    """A setting, or those of a table of settings."""
    model = info.annotation
    if not (isinstance(model, type) and issubclass(model, Frozen)):
        return {name: Setting(name, info)}
    return {
        found: leaf
        for key, part in model.model_fields.items()
        for found, leaf in _leaves(f"{name}.{key}", part).items()
    }


SETTINGS = _settings()
"""Dotted name -> setting, in the order of the model."""


@dataclass(frozen=True)
class Configuration:
    """The settings in force; `origins` says for every dotted name whether it came from a flag, a
    variable, a file, the demo's file or a default."""

    settings: Settings
    origins: Mapping[str, str]
    local: bool = True
    """Whether the workers are started with these settings; else somebody else has started them,
    with settings of their own."""
    thresholds: str | tuple[float, ...] = ""
    """`tree.thresholds` as it was given. The settings have the numbers, or nothing where they are
    not needed: no name of a file leaves this process."""

    def value(self, name: str) -> Any:
        if name == "tree.thresholds":
            return self.thresholds
        return reduce(getattr, name.split("."), self.settings)

    def given(self, name: str) -> bool:
        """Whether the user said it, by whatever means."""
        return self.origins[name] not in ("default", "demo")

    def arguments(self, *sections: str) -> list[str]:
        """The flags that give another command the same settings, whatever its environment and
        defaults say."""
        names = (
            n for n in SETTINGS if n.split(".")[0] in sections and self.origins[n] != "default"
        )
        return [f"--{name}={SETTINGS[name].flag_text(self.value(name))}" for name in names]

    def over(self, origin: str, values: Mapping[str, Any]) -> "Configuration":
        """These settings with some replaced, by dotted name."""
        given = {**{name: self.value(name) for name in SETTINGS}, **values}
        return _validated(
            given, {**self.origins, **dict.fromkeys(values, origin)}, self.local
        ).stratified()

    def stratified(self) -> "Configuration":
        """The same with the thresholds of `heterospec` read; `SettingsError` if there are none that
        hold for its draft."""
        if self.settings.tree.policy != "heterospec" or self.settings.draft.kind == "none":
            return self
        found = thresholds_of(self.thresholds, self.settings, local=self.local)
        return replace(self, settings=_with_thresholds(self.settings, found))


def configure(
    *,
    flags: Mapping[str, str] | None = None,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    demo: bool = True,
    stratified: bool = True,
) -> Configuration:
    """Merge all sources; `flags` are dotted names and texts. `SettingsError` names the setting, the
    value, where it came from and the remedy.

    `demo`: whether no named target means the embedded one; it does not where the workers are
    somebody else's. `stratified`: whether the thresholds of `heterospec` are needed.
    """
    environment = os.environ if environment is None else environment
    layers: list[tuple[str, dict[str, Any]]] = []
    if file is not None:
        layers.append((str(file), read_file(file)))
    layers += [
        (s.variable, {s.name: s.parse(text, s.variable)}) for s, text in _variables(environment)
    ]
    layers += [
        (f"--{name}", {name: parse_setting(name, text, f"--{name}")})
        for name, text in (flags or {}).items()
    ]
    if demo and not any(values.get("target.model") for _, values in layers):
        layers.insert(0, ("demo", read_file(DEMO_SETTINGS)))
    values: dict[str, Any] = {}
    origins = dict.fromkeys(SETTINGS, "default")
    for origin, layer in layers:
        values.update(layer)
        origins.update(dict.fromkeys(layer, origin))
    merged = _validated(values, origins, demo)
    return merged.stratified() if stratified else merged


def parse_setting(name: str, text: str, origin: str) -> Any:
    """The value that a text spells for the setting of this dotted name; `SettingsError` if there is
    no such setting or the text spells none."""
    return _setting(name, origin).parse(text, origin)


def read_file(path: Path) -> dict[str, Any]:
    """Dotted name -> value of a TOML file of settings."""
    try:
        content = tomllib.loads(decode(path.read_bytes(), f"the settings file {path}"))
    except OSError as error:
        raise SettingsError(f"the settings file {path} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"the settings file {path} is no TOML: {error}") from None
    values: dict[str, Any] = {}
    for section, part in content.items():
        if section in ALL_SECTIONS and not isinstance(part, dict):
            name = _names([section])[0]
            example = f"{name.split('.')[1]} = {json.dumps(SETTINGS[name].default)}"
            raise SettingsError(
                f"{section} in {path} must be a table: write [{section}] on a line, and below "
                f"it lines such as {example}"
            )
        if section not in ALL_SECTIONS:
            raise SettingsError(
                f"{section} in {path} is no section of the settings: "
                f"{_suggest(section, ALL_SECTIONS) or 'choose ' + ', '.join(ALL_SECTIONS)}"
            )
        values.update(
            {_setting(name, str(path)).name: value for name, value in _flat(section, part)}
        )
    return values


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a table and of the tables in it; a setting may itself be a table,
    and none in itself."""
    if isinstance(value, dict) and name not in SETTINGS and (value or name in ALL_SECTIONS):
        for key, part in value.items():
            yield from _flat(f"{name}.{key}", part)
    else:
        yield name, value


def _variables(environment: Mapping[str, str]) -> list[tuple[Setting, str]]:
    """The settings among the variables. Others may begin with our prefix (Kubernetes names a
    service's address so), but not with two underscores in it."""
    by_name = {s.variable: s for s in SETTINGS.values()}
    collapsed = {name.replace("__", "_"): name for name in by_name}
    found = []
    for name, text in environment.items():
        if name in by_name:
            found.append((by_name[name], text))
        elif name in collapsed:
            raise SettingsError(
                f"the variable {name} = {text!r} is no setting: did you mean {collapsed[name]}?"
            )
        elif name.startswith(PREFIX) and "__" in name:
            raise SettingsError(
                f"the variable {name} = {text!r} is no setting: "
                f"{_suggest(name, by_name) or 'see `dovetail config show` for their names'}"
            )
    return found


def _setting(name: str, origin: str) -> Setting:
    if name not in SETTINGS:
        raise SettingsError(
            f"there is no setting {name!r} ({origin}): "
            f"{_suggest(name, SETTINGS) or 'see `dovetail config show` for all of them'}"
        )
    return SETTINGS[name]


def _suggest(name: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def _validated(values: Mapping[str, Any], origins: Mapping[str, str], local: bool) -> Configuration:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *tables, key = name.split(".")
        reduce(lambda inner, table: inner.setdefault(table, {}), tables, tree)[key] = value
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_explain(error, values, origins)) from None
    if (text := misfit(settings.sampling, settings.tree, settings.draft.kind)) is not None:
        raise SettingsError(text)
    named = settings.tree.thresholds
    return Configuration(
        _with_thresholds(settings, "" if isinstance(named, str) else named), origins, local, named
    )


def _with_thresholds(settings: Settings, thresholds: str | tuple[float, ...]) -> Settings:
    return settings.model_copy(
        update={"tree": settings.tree.model_copy(update={"thresholds": thresholds})}
    )


def _explain(error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    where = [str(part) for part in error.errors(include_url=False)[0]["loc"]]
    name = next(
        name
        for length in range(len(where), 0, -1)
        if (name := ".".join(where[:length])) in SETTINGS
    )
    return SETTINGS[name].complaint(error, values[name], origins[name])


def _expected(kind: Any) -> list[str]:
    if get_origin(kind) is Annotated:
        inner, *metadata = get_args(kind)
        bounds = [
            m
            for part in metadata
            for m in (part.metadata if isinstance(part, FieldInfo) else [part])
        ]
        return [_bounded(words, bounds) for words in _expected(inner)]
    if get_origin(kind) is Literal:
        return [repr(value) for value in get_args(kind)]
    if get_origin(kind) is tuple and get_origin(get_args(kind)[0]) is not tuple:
        return [
            f"{SEVERAL} with commas between them, each {' or '.join(_expected(get_args(kind)[0]))}"
        ]
    if get_origin(kind) is tuple:  # of pairs
        key, value = (_expected(part)[0] for part in get_args(get_args(kind)[0]))
        return [f"{SEVERAL} of A=B with commas between them, A {key} and B {value}"]
    if get_args(kind):
        return [words for part in get_args(kind) for words in _expected(part)]
    return [{int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")]


def _bounded(words: str, bounds: Sequence[Any]) -> str:
    found = {
        key: getattr(b, key)
        for b in bounds
        for key in ("ge", "gt", "le", "lt", "max_length")
        if getattr(b, key, None) is not None
    }
    low = (
        f" from {found['ge']}"
        if "ge" in found
        else f" above {found['gt']}"
        if "gt" in found
        else ""
    )
    high = (
        f" to {found['le']}" if "le" in found else f" below {found['lt']}" if "lt" in found else ""
    )
    many = (
        f", at most {found['max_length']} of them"
        if "max_length" in found and words.startswith(SEVERAL)
        else ""
    )
    return words + low + high + many


# -- flags -----------------------------------------------------------------------------------------


class SettingsFile(click.Path):
    """A file of settings; what another program means by `-c` is told from it."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        hint = None if Path(value).exists() else context_size(os.fspath(value))
        if hint is not None:
            raise click.UsageError(hint, ctx)
        return super().convert(value, param, ctx)


def settings_flags(
    *sections: str,
    without: Sequence[str] = (),
    shown: Sequence[str] = (),
    stratified: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command the flags of these sections, or of single settings by their dotted names, and
    `--config`, and calls it with the settings in force as `configuration`.

    `without` are short forms that the command has another use for, `shown` the settings that its
    `--help` has beside those of `BASIC`. `stratified`: whether a command
    that has flags for the tree needs the thresholds of `heterospec`.
    """
    stratified = stratified and "tree" in sections

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def with_configuration(config: Path | None, **parameters: Any) -> Any:
            given = take_settings(parameters)
            local = parameters.get("connect") is None
            return function(
                configuration=configure(
                    flags=given, file=config, demo=local, stratified=stratified
                ),
                **parameters,
            )

        decorated: Callable[..., Any] = with_configuration
        for option in reversed(_options(sections, without, shown)):
            decorated = option(decorated)
        return decorated

    return decorate


def take_settings(parameters: dict[str, Any]) -> dict[str, str]:
    """Takes the settings out of a command's parameters: dotted name -> text of those that were
    given."""
    flags = {
        name: parameters.pop(_parameter(name))
        for name in SETTINGS
        if _parameter(name) in parameters
    }
    texts = {
        name: ",".join(text) or None if isinstance(text, tuple) else text
        for name, text in flags.items()
    }
    given = {name: text for name, text in texts.items() if text is not None}
    if (draft_short := parameters.pop("draft_short", None)) is not None:
        name = "draft.kind" if draft_short in DRAFT_KINDS else "draft.model"
        _check_misspelling(draft_short)
        if given.setdefault(name, draft_short) != draft_short:
            raise SettingsError(
                f"--draft {draft_short} and --{name} {given[name]} name two drafts: leave one "
                "of them out"
            )
    return given


def _options(
    sections: Sequence[str], without: Sequence[str], shown: Sequence[str]
) -> list[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    file = SettingsFile(dir_okay=False, path_type=Path)
    options: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = [
        click.option("-c", "--config", type=file, cls=Grouped, help="TOML file of settings.")
    ]
    for name in _names(sections):
        setting = SETTINGS[name]
        group = GROUPS[name.partition(".")[0]]
        short = SHORT_FORMS.get(name)
        forms = [setting.flag, *([] if short is None or short in without else [short])]
        text = (
            f"{setting.field.description}  [default: "
            f"{'empty' if setting.default in ('', ()) else setting.default}]"
        )
        options.append(
            click.option(
                *forms,
                _parameter(name),
                metavar=_metavar(setting),
                multiple=setting.is_table,
                cls=Grouped,
                group=group,
                rare=name not in (*BASIC, *shown),
                help=text,
            )
        )
        if name == "draft.model":
            text = (
                "the draft by its kind (such as dovetail, a head, or ngram, a look-up) or "
                "its model; none decodes with the target alone"
            )
            options.append(
                click.option(
                    "--draft",
                    "draft_short",
                    metavar="MODEL|KIND|none",
                    cls=Grouped,
                    group=group,
                    help=text,
                )
            )
    return options


def _check_misspelling(draft: str) -> None:
    """`SettingsError` if `draft` is a number, or nearly a kind, and no folder: it would be looked
    for on the hub."""
    if draft.isdigit() and not Path(draft).exists():
        raise SettingsError(
            f"--draft {draft} is no kind of draft and no folder: --draft names the draft, and "
            "--tree.gamma says how many nodes are verified"
        )
    near: list[str] = (
        []
        if draft in DRAFT_KINDS or Path(draft).expanduser().exists()
        else difflib.get_close_matches(draft, DRAFT_KINDS, 1, 0.75)
    )
    if near:
        raise SettingsError(
            f"--draft {draft} is no kind of draft and no folder: did you mean {near[0]}? (a "
            f"model of the hub: --draft.model {draft})"
        )


def _names(sections: Sequence[str]) -> list[str]:
    return [name for name in SETTINGS if name in sections or name.split(".")[0] in sections]


def _parameter(name: str) -> str:
    return "setting_" + name.replace(".", "__")


def _metavar(setting: Setting) -> str:
    if setting.is_table:
        return "A=B"
    if get_origin(setting.field.annotation) is tuple:
        return "A,B,..."
    kinds = {"whole number": "INTEGER", "number": "NUMBER"}
    return next((metavar for words, metavar in kinds.items() if words in setting.expected), "TEXT")
