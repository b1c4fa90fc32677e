"""The settings in force (flag `--tree.gamma 6` > variable `DOVETAIL_TREE__GAMMA` > `--config FILE`
> default) and their origins. The embedded pair has a settings file, which the user's overrides."""

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dovetail.launch.processes import forked
from dovetail.launch.settings.catalog import ALL_SECTIONS, PREFIX, SETTINGS, Setting, names_in
from dovetail.launch.settings.models import DEMO_FOLDER, keeps_blocks
from dovetail.launch.settings.thresholds import thresholds_of
from dovetail.protocol.errors import SettingsError
from dovetail.protocol.files import read_text
from dovetail.protocol.settings import Settings, misfit
from dovetail.workers.devices.registry import entry_of, known
from dovetail.workers.models.checkpoints.gguf.view import FILE, resolved, spelled

OTHERS: Mapping[str, Sequence[str]] = {
    "target.device": (),
    "target.split.device": ("",),
    "target.prefill": ("auto", "local"),
    "draft.device": ("auto",),
}
"""Settings that name a device -> their other values."""


def check_devices(settings: Settings, origins: Mapping[str, str]) -> None:
    """Refuse a setting that does not name a device; `SettingsError` has its name, value and origin.
    The worker checks whether the device exists."""
    target, draft = settings.target, settings.draft
    given = (target.device, target.split.device, target.prefill, draft.device)
    for (name, others), value in zip(OTHERS.items(), given, strict=True):
        if value in others or entry_of(value) is not None:
            continue
        words = known(*filter(None, others))
        empty = ", or leave it empty" if "" in others else ""
        raise SettingsError(f"{name} = {value!r} ({origins[name]}): write {words}{empty}")


DEMO_SETTINGS = DEMO_FOLDER / "settings.toml"
BY_FILE = "the GGUF file"  # the origin of weights determined by a target's file
PATHS = {
    *("target.model", "draft.model", "tree.thresholds", "http.api_key_file"),
    *("coordinator.journal", "coordinator.record", "coordinator.keys"),
}
"""Settings that name a file or a folder."""
SWITCHES = ("true", "false", "yes", "no", "on", "off")
POSITIONAL = "MODEL"  # the origin of a target given as an argument


@dataclass(frozen=True)
class Configuration:
    """The settings in force; `origins` has the origin of every dotted name: a flag, a variable, a
    file, the demo's file, a model's file or a default."""

    settings: Settings
    origins: Mapping[str, str]
    local: bool = True
    """True if this command starts the workers with these settings."""
    thresholds: str | tuple[float, ...] = ""
    """`tree.thresholds` as given; the settings contain only numbers, so no file name is sent."""

    def value(self, name: str) -> Any:
        if name == "tree.thresholds":
            return self.thresholds
        return reduce(getattr, name.split("."), self.settings)

    def given(self, name: str) -> bool:
        return self.origins[name] not in ("default", "demo", BY_FILE)

    def arguments(self, *sections: str) -> list[str]:
        """The flags that give another command the same settings, whatever its environment and
        defaults."""
        names = (
            n for n in SETTINGS if n.split(".")[0] in sections and self.origins[n] != "default"
        )
        return [f"--{name}={SETTINGS[name].flag_text(self.value(name))}" for name in names]

    def typed(self, *sections: str) -> list[str]:
        """Return these flags in the user's form: a GGUF file instead of its view."""
        parts = (flag.partition("=") for flag in self.arguments(*sections))
        return [f"{name}={spelled(value)}" for name, _, value in parts]

    def over(self, origin: str, values: Mapping[str, Any]) -> "Configuration":
        """These settings with some replaced, by dotted name."""
        given = {**{name: self.value(name) for name in SETTINGS}, **values}
        return _validated(
            given, {**self.origins, **dict.fromkeys(values, origin)}, self.local
        ).stratified()

    def stratified(self) -> "Configuration":
        """Return the configuration with the thresholds of `heterospec` read; `SettingsError` if
        there are none for its draft."""
        if not self.settings.tree.traits.by_entropy or self.settings.draft.kind == "none":
            return self
        found = thresholds_of(self.thresholds, self.settings, local=self.local)
        return replace(self, settings=_with_thresholds(self.settings, found))


def configure(
    *,
    flags: Mapping[str, str] | None = None,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    model: str | None = None,
    demo: bool = True,
    stratified: bool = True,
) -> Configuration:
    """Merge all sources; `flags` are dotted names and texts. `SettingsError` names setting, value,
    origin and remedy. `model`: a target named without a flag; `demo`: whether no target means the
    embedded one; `stratified`: whether `heterospec` needs its thresholds."""
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
    if model is not None:
        if (named := (flags or {}).get("target.model", model)) != model:
            raise SettingsError(f"{model} and --target {named} name two targets: leave out one")
        layers.append((POSITIONAL, {"target.model": parse_setting("target.model", model, "MODEL")}))
    if demo and not any(values.get("target.model") for _, values in layers):
        layers.insert(0, ("demo", read_file(DEMO_SETTINGS)))
    values: dict[str, Any] = {}
    origins = dict.fromkeys(SETTINGS, "default")
    for origin, layer in layers:
        values.update(layer)
        origins.update(dict.fromkeys(layer, origin))
    for name in ("target.model", "draft.model"):
        if demo and isinstance(model := values.get(name), str):
            values[name] = resolved(model, making=forked.expect_proof)
    merged = _validated(values, origins, demo)
    if demo and origins["target.weights"] == "default" and keeps_blocks(merged.settings.target):
        values["target.weights"], origins["target.weights"] = FILE, BY_FILE
        merged = _validated(values, origins, demo)
    return merged.stratified() if stratified else merged


def parse_setting(name: str, text: str, origin: str) -> Any:
    """Parse a text as the setting of this dotted name; `SettingsError` if there is no such setting
    or the text is invalid."""
    return _setting(name, origin).parse(text, origin)


def read_file(path: Path) -> dict[str, Any]:
    """Dotted name -> value of a TOML file of settings."""
    try:
        content = tomllib.loads(read_text(path, f"the settings file {path}"))
    except OSError as error:
        raise SettingsError(f"the settings file {path} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"the settings file {path} is not TOML: {error}") from None
    values: dict[str, Any] = {}
    for section, part in content.items():
        if section not in ALL_SECTIONS:
            remedy = _suggest(section, ALL_SECTIONS) or "choose " + ", ".join(ALL_SECTIONS)
            raise SettingsError(f"{section} in {path} is not a section of the settings: {remedy}")
        if not isinstance(part, dict):
            name = names_in([section])[0]
            example = f"{name.split('.')[1]} = {json.dumps(SETTINGS[name].default)}"
            text = f"{section} in {path} must be a table"
            raise SettingsError(f"{text}: [{section}] and lines such as {example}")
        values |= {_setting(name, str(path)).name: value for name, value in _flat(section, part)}
    return values


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a table and its subtables; a setting may itself be a table."""
    if isinstance(value, dict) and name not in SETTINGS and (value or name in ALL_SECTIONS):
        for key, part in value.items():
            yield from _flat(f"{name}.{key}", part)
    else:
        yield name, value


def _variables(environment: Mapping[str, str]) -> list[tuple[Setting, str]]:
    """The settings among the variables. Other variables may have our prefix (Kubernetes sets such
    names for services), but without two underscores."""
    by_name = {s.variable: s for s in SETTINGS.values()}
    collapsed = {name.replace("__", "_"): name for name in by_name}
    found = []
    for name, text in environment.items():
        if name in by_name:
            found.append((by_name[name], text))
        elif name in collapsed or (name.startswith(PREFIX) and "__" in name):
            near = f"did you mean {collapsed[name]}?" if name in collapsed else ""
            near = near or _suggest(name, by_name) or "see `dovetail config show` for their names"
            raise SettingsError(f"the variable {name} = {text!r} is not a setting: {near}")
    return found


def _setting(name: str, origin: str) -> Setting:
    if name not in SETTINGS:
        near = _suggest(name, SETTINGS) or "see `dovetail config show` for all of them"
        raise SettingsError(f"there is no setting {name!r} ({origin}): {near}")
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
    check_devices(settings, origins)
    for name in PATHS & values.keys():
        written = str(values[name]).lower()
        if written in SWITCHES and (name, written) != ("coordinator.journal", "off"):
            text = f"{name} = {values[name]!r} ({origins[name]}) looks like a switch"
            raise SettingsError(f"{text}, and names a path: write ./{values[name]} for that path")
    settings = _with_queues(settings, origins)
    named = settings.tree.thresholds
    return Configuration(
        _with_thresholds(settings, "" if isinstance(named, str) else named), origins, local, named
    )


def _with_queues(settings: Settings, origins: Mapping[str, str]) -> Settings:
    """Return the settings with each key's queue limited to the whole queue's limit; `SettingsError`
    if the user set more."""
    own = settings.coordinator
    if own.key_queue <= own.queue:
        return settings
    if (origin := origins["coordinator.key_queue"]) != "default":
        raise SettingsError(
            f"coordinator.key_queue = {own.key_queue} ({origin}) is more than coordinator.queue = "
            f"{own.queue} ({origins['coordinator.queue']})"
        )
    coordinator = own.model_copy(update={"key_queue": own.queue})
    return settings.model_copy(update={"coordinator": coordinator})


def _with_thresholds(settings: Settings, thresholds: str | tuple[float, ...]) -> Settings:
    return settings.model_copy(
        update={"tree": settings.tree.model_copy(update={"thresholds": thresholds})}
    )


def _explain(error: ValidationError, values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    where = [str(part) for part in error.errors(include_url=False)[0]["loc"]]
    starts = (".".join(where[:length]) for length in range(len(where), 0, -1))
    name = next(name for name in starts if name in SETTINGS)
    return SETTINGS[name].complaint(error, values[name], origins[name])
