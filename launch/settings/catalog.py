"""All settings: names, types, defaults, and descriptions of their values."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from dovetail.protocol.errors import SettingsError
from dovetail.protocol.interruptions import uninterrupted
from dovetail.protocol.settings import Frozen, Settings

PREFIX = "DOVETAIL_"
SEVERAL = "one or more"
ALL_SECTIONS = tuple(Settings.model_fields)


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
        if self.field.metadata:
            return Annotated[self.field.annotation, *self.field.metadata]
        return self.field.annotation

    @cached_property
    def expected(self) -> str:
        return " or ".join(self.alternatives)

    @property
    def alternatives(self) -> list[str]:
        """Describe each kind of value that the setting takes; words are quoted."""
        return _expected(self.type)

    @property
    def words(self) -> list[str]:
        """Return the words among its values."""
        kinds = self.alternatives
        quoted = [kind.strip("'") for kind in kinds if kind.startswith("'")]
        checks = [getattr(part, "func", None) for part in self.field.metadata]
        named = [word for check in checks if isinstance(check, partial) for word in check.args[0]]
        return [*quoted, *named, *(("true", "false") if "true or false" in kinds else ())]

    @property
    def is_table(self) -> bool:
        """True if it is a mapping; its flag can then be repeated."""
        return (
            get_origin(self.field.annotation) is tuple
            and get_origin(get_args(self.field.annotation)[0]) is tuple
        )

    def parse(self, text: str, origin: str) -> Any:
        """Parse the text of a flag or variable; `SettingsError` if it is invalid."""
        with uninterrupted():
            adapter: TypeAdapter[Any] = TypeAdapter(self.type)
        try:
            return adapter.validate_strings(text)
        except ValidationError as error:
            raise SettingsError(self.complaint(error, text, origin)) from None

    def complaint(self, error: ValidationError, value: Any, origin: str) -> str:
        first = error.errors(include_url=False)[0]
        given = f"{self.name} = {value!r} ({origin})"
        if first["type"] == "value_error":
            return f"{given}: {str(first['msg']).removeprefix('Value error, ')}"
        return f"{given} is not possible: write {self.expected}"

    def flag_text(self, value: Any) -> str:
        """The text that `parse` reads as this value."""
        if not isinstance(value, tuple):
            return str(value)
        return ",".join(f"{p[0]}={p[1]!r}" if self.is_table else str(p) for p in value)

    def toml(self, value: Any) -> str:
        if not self.is_table:
            return json.dumps(list(value) if isinstance(value, tuple) else value)
        pairs = ", ".join(f"{key} = {number!r}" for key, number in value)
        return f"{{ {pairs} }}" if value else "{}"


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


SETTINGS: dict[str, Setting] = {}  # dotted name -> setting, in the order of the model
for _section, _part in Settings.model_fields.items():
    SETTINGS |= _leaves(_section, _part)


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
    most = " and at most {}" if "gt" in found else " of at most {}"
    ends = {
        "ge": " from {}",
        "gt": " above {}",
        "le": " to {}" if "ge" in found else most,
        "lt": " and below {}" if found.keys() & {"ge", "gt"} else " below {}",
    }
    written = {key: int(v) if v == int(v) else v for key, v in found.items()}
    range_ = "".join(end.format(written[key]) for key, end in ends.items() if key in found)
    many = (
        f", at most {found['max_length']} of them"
        if "max_length" in found and words.startswith(SEVERAL)
        else ""
    )
    return words + range_ + many


def names_in(sections: Sequence[str]) -> list[str]:
    return [name for name in SETTINGS if name in sections or name.split(".")[0] in sections]
