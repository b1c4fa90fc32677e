"""Settings as flags of a command, and the help that shows them."""

import difflib
import os
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, get_origin

import click

from dovetail.launch.console.help import Grouped
from dovetail.launch.console.migration import context_size
from dovetail.launch.settings.catalog import ALL_SECTIONS, SETTINGS, Setting, names_in
from dovetail.launch.settings.configure import configure
from dovetail.launch.settings.several import Several
from dovetail.protocol.errors import SettingsError
from dovetail.protocol.settings import DRAFT_KINDS

GROUPS = {
    "target": "Models",
    "draft": "Models",
    "memory": "Models",
    "cache": "Models",
    "tree": "Decoding",
    "sampling": "Decoding",
    "coordinator": "Serving",
    "http": "Serving",
    "ray": "Serving",
}
"""Section -> the heading of its options in the help."""
MODELS = ("target.model", "target.weights")
REPLIES = ("sampling.temperature", "sampling.max_tokens")
BASIC = (*MODELS, "memory.vram", "tree.policy", *REPLIES)
"""Settings in `--help` unless a command names its own; the others are in `--help-all`."""
DEMONSTRATED = (*MODELS, *REPLIES)
"""Settings in `--help` of commands that newcomers run with the embedded pair."""
LONGEST_METAVAR = 24  # characters; longer kinds of values are called TEXT in help
LISTENING = ("http.host", "http.port", "http.api_key_file", "http.model")
SERVING = (*MODELS, *LISTENING, "coordinator.listen", "coordinator.keys")
"""Settings in `--help` of `serve` and exports: models, and addresses for clients and workers."""
HERE = tuple(section for section in ALL_SECTIONS if section != "ray")
"""Sections of the settings of a command whose processes run on this machine."""
DECODING_SECTIONS = tuple(section for section in HERE if section != "http")
"""Sections of the settings of a command that decodes without a server."""
SHORT_FORMS = {
    "target.model": "--target",
    "target.weights": "--weights",
    "target.backend": "--backend",
    "target.split.experts_on_cpu": "--experts-on-cpu",
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


class SettingsFile(click.Path):
    """A settings file; a value of other programs' `-c` is recognised and rejected."""

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
    shown: Sequence[str] = BASIC,
    stratified: bool = True,
    named: bool = False,
    several: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the flags of these sections or settings and `--config`, and the settings in
    force as `configuration`. `without`: short forms used otherwise; `shown`: settings in its
    `--help`; `stratified`: whether `heterospec` needs thresholds; `named`: whether the target may
    be named without a flag; `several`: several may be, which are passed as `models`."""
    stratified = stratified and "tree" in sections

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def with_configuration(config: Path | None, model: Any = None, **parameters: Any) -> Any:
            given = take_settings(parameters)
            local = parameters.get("connect") is None and parameters.get("url") is None
            read = partial(configure, flags=given, file=config, stratified=stratified)
            if several:
                parameters["models"] = several_named = Several(model, read)
                sources = several_named.sources
                local = local and len(sources) < 2
                model = sources[0] if len(sources) == 1 else None
            return function(configuration=read(model=model, demo=local), **parameters)

        decorated: Callable[..., Any] = with_configuration
        if named or several:
            decorated = click.argument("model", required=False, nargs=-1 if several else 1)(
                decorated
            )
        for option in reversed(_options(sections, without, shown)):
            decorated = option(decorated)
        return decorated

    return decorate


def take_settings(parameters: dict[str, Any]) -> dict[str, str]:
    """Takes the settings out of a command's parameters: dotted name -> text of the given ones."""
    flags = {
        name: parameters.pop(_parameter(name))
        for name in SETTINGS
        if _parameter(name) in parameters
    }
    given = {name: text for name, text in flags.items() if text not in (None, ())}
    given = {name: ",".join(t) if isinstance(t, tuple) else t for name, t in given.items()}
    if (draft_short := parameters.pop("draft_short", None)) is not None:
        name = "draft.kind" if draft_short in DRAFT_KINDS else "draft.model"
        _check_misspelling(draft_short)
        if given.setdefault(name, draft_short) != draft_short:
            both = f"--draft {draft_short} and --{name} {given[name]}"
            raise SettingsError(f"{both} name two drafts: leave one out")
    return given


def _options(
    sections: Sequence[str], without: Sequence[str], shown: Sequence[str]
) -> list[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    file = SettingsFile(dir_okay=False, path_type=Path)
    options: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = [
        click.option("-c", "--config", type=file, cls=Grouped, help="TOML file of settings.")
    ]
    for name in names_in(sections):
        setting = SETTINGS[name]
        group = GROUPS[name.partition(".")[0]]
        short = SHORT_FORMS.get(name)
        forms = [setting.flag, *([] if short is None or short in without else [short])]
        default = "empty" if setting.default in ("", ()) else setting.default
        text = f"{setting.field.description}  [default: {default}]"
        options.append(
            click.option(
                *forms,
                _parameter(name),
                metavar=_metavar(setting),
                multiple=setting.is_table,
                cls=Grouped,
                group=group,
                rare=name not in shown or short in without,
                help=text,
            )
        )
        if name == "draft.model":
            text = "the draft by its model, or by its kind, such as mtp (the checkpoint's own "
            text += "layer) or ngram (a look-up); auto: the best that is on this machine; none: "
            text += "the target alone"
            shown_as: dict[str, Any] = {"metavar": "MODEL|KIND|none", "cls": Grouped}
            own = click.option("--draft", "draft_short", **shown_as, group=group, help=text)
            options.append(own)
    return options


ELSEWHERE = {"simple": "small", "nextn": "mtp", "lookup": "ngram", "look-up": "ngram"}
"""Names of kinds of drafts in other programs -> ours."""


def _check_misspelling(draft: str) -> None:
    """`SettingsError` if `draft` is a number or a misspelt kind, and not a folder: it would be
    looked up on the hub."""
    if draft in DRAFT_KINDS or Path(draft).expanduser().exists():
        return
    neither = f"--draft {draft} is neither a kind of draft nor a folder"
    if draft.isdigit():
        raise SettingsError(f"{neither}: --tree.gamma sets how many nodes are verified")
    other = draft.removeprefix("draft-")  # as llama-server writes `draft-mtp`
    other = "ngram" if other.startswith("ngram-") else ELSEWHERE.get(other, other)
    if near := difflib.get_close_matches(other, DRAFT_KINDS, 1, 0.75):
        hub = f"(a model of the hub: --draft.model {draft})"
        raise SettingsError(f"{neither}: did you mean {near[0]}? {hub}")


def _parameter(name: str) -> str:
    return "setting_" + name.replace(".", "__")


def _metavar(setting: Setting) -> str:
    if setting.is_table:
        return "A=B"
    if get_origin(setting.field.annotation) is tuple:
        return "A,B,..."
    together = "|".join(_kind(words) for words in setting.alternatives)
    return together if len(together) <= LONGEST_METAVAR else "TEXT"


def _kind(words: str) -> str:
    if words.startswith("'"):
        return words.strip("'")
    kinds = {"a whole number": "INTEGER", "a number": "NUMBER", "true or false": "true|false"}
    return next((kind for said, kind in kinds.items() if words.startswith(said)), "TEXT")
