"""The reference of messages, `protocol/MESSAGES.md`, made from the classes themselves.

`PYTHONPATH=tests python tests/support/wire_reference.py` writes it; a test compares the two.
"""

import ast
import importlib
import operator
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from dovetail import protocol
from dovetail.protocol.messages import VERSION, Command, Event, Message, Reply, Request
from dovetail.protocol.settings import Frozen

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "protocol" / "MESSAGES.md"
INTRODUCTION = """# Messages

Protocol version {version}. Every message is a map with `type`, the name in bold below, `epoch`, and
the fields of its table. A field that is left out has the value of the column *else*; a field
without such a value is required. Unknown fields and numbers out of range are refused. Tables of
settings may be empty maps: every setting has a default. [README.md](README.md) describes how
messages travel, and in which order.

This page is made from the classes in this folder:
`PYTHONPATH=tests python tests/support/wire_reference.py`.
"""
NIL = "nil"
BOUNDS = {
    "ge": "from {}",
    "gt": "above {}",
    "le": "to {}",
    "lt": "below {}",
    "min_length": "length from {}",
    "max_length": "length to {}",
}
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}
PARTS = {"Frozen": "", "Message": ""}
ANYWHERE = ("type", "epoch")
"""Fields that every message has, which the text around the reference tells of."""
SIZES = {1 << n: f"2^{n}" for n in range(16, 64)} | {(1 << n) - 1: f"2^{n} - 1" for n in (31, 63)}


class Source:
    """The classes of a module as they are written: bases, fields, sentences."""

    def __init__(self, module: Any) -> None:
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        self.names = vars(module)
        self.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self.aliases: dict[str, tuple[ast.expr, str]] = {}
        for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                said = _text_of(following)
                self.aliases[node.targets[0].id] = (node.value, _sentence(said))


def _text_of(node: ast.AST | None) -> str:
    """Return what a string on a line of its own says; empty: it is none."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return str(node.value.value)
    return ""


def _sentence(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


SOURCES = [
    Source(importlib.import_module(found.name))
    for found in pkgutil.walk_packages(protocol.__path__, "dovetail.protocol.")
]


def reference() -> str:
    """All messages, and what they are made of, as Markdown."""
    lines = [INTRODUCTION.format(version=".".join(map(str, VERSION)))]
    directions = (
        ("Commands, from the coordinator to a worker", Command),
        ("Events, from a worker to the coordinator", Event),
        ("Requests, from a client to the coordinator", Request),
        ("Replies, from the coordinator to a client", Reply),
    )
    told: set[str] = set()
    for heading, union in directions:
        lines += [f"## {heading}", ""]
        for member in get_args(union):
            tag = member.model_fields["type"].default
            if member.__name__ in told:
                lines += [f"**`{tag}`**: as above.", ""]
                continue
            told.add(member.__name__)
            lines += _section(f"`{tag}`", member.__name__)
    parts = _parts(told)
    lines += ["## What messages are made of", "", "| name | type | |", "| --- | --- | --- |"]
    lines += [f"| {name} | {kind} | {said} |" for name, kind, said in _aliases([*told, *parts])]
    lines.append("")
    for name in parts:
        lines += _section(name, name)
    return "\n".join(lines).rstrip() + "\n"


def _section(title: str, name: str) -> list[str]:
    source, node = _find(name)
    said = _sentence(ast.get_docstring(node) or "")
    rows = [row for row in _fields(source, node) if row[0] not in ANYWHERE]
    member = source.names[name]
    framed = getattr(member, "ARRAYS", ()) if issubclass(member, Message) else ()
    if framed:
        said += f" Arrays, in this order: {', '.join(f'`{field}`' for field in framed)}."
    lines = [f"**{title}**: {said}".rstrip(": ").rstrip(), ""]
    if rows:
        lines += ["| field | type | else | |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{field}` | {kind} | {default} | {text} |" for field, kind, default, text in rows
        ]
        lines.append("")
    return lines


def _find(name: str) -> tuple[Source, ast.ClassDef]:
    return next((s, s.classes[name]) for s in SOURCES if name in s.classes)


def _fields(source: Source, node: ast.ClassDef) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and sentence of each, those of the bases first."""
    found: dict[str, tuple[str, str, str, str]] = {}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id not in PARTS and _known(base.id):
            found.update({row[0]: row for row in _fields(*_find(base.id))})
    for at, statement in enumerate(node.body):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if ast.unparse(statement.annotation).startswith("ClassVar"):
            continue
        name, text = statement.target.id, ""
        default = "" if statement.value is None else _default(statement.value)
        if isinstance(statement.value, ast.Call):
            text = _described(statement.value)
        follows = node.body[at + 1] if at + 1 < len(node.body) else None
        text = _sentence(_text_of(follows)) or text
        found[name] = (name, _type(statement.annotation, source), default, text)
    yield from found.values()


def _known(name: str) -> bool:
    return any(name in source.classes for source in SOURCES)


def _default(value: ast.expr) -> str:
    if isinstance(value, ast.Call):
        if not value.args:
            return ""
        return _default(value.args[0]) if ast.unparse(value.func) == "Field" else "its defaults"
    text = ast.unparse(value)
    if text.isupper():
        constants = {name: found for source in SOURCES for name, found in source.names.items()}
        return str(list(VERSION) if text == "VERSION" else constants[text])
    return {"None": NIL, "()": "[]", "True": "true", "False": "false", "''": '""'}.get(text, text)


def _described(call: ast.Call) -> str:
    for keyword in call.keywords:
        if keyword.arg == "description":
            return _sentence(str(ast.literal_eval(keyword.value)))
    return ""


def _type(node: ast.expr, source: Source) -> str:
    """A type in words of MessagePack."""
    match node:
        case ast.Constant(value=None):
            return NIL
        case ast.Name(id=name):
            return {"str": "text"}.get(name, name)
        case ast.BinOp(left=left, right=right):
            return f"{_type(left, source)} or {_type(right, source)}"
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *rest])):
            bounds = [bound for part in rest for bound in _bounds(part, source)]
            return ", ".join([_type(inner, source), *bounds])
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=parts)):
            if isinstance(parts[-1], ast.Constant):
                return f"[{_type(parts[0], source)}, ...]"
            return f"[{', '.join(_type(part, source) for part in parts)}]"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=values):
            items = values.elts if isinstance(values, ast.Tuple) else [values]
            return ", ".join(f'"{ast.literal_eval(item)}"' for item in items)
    raise ValueError(f"no words for the type {ast.unparse(node)}")


def _bounds(node: ast.expr, source: Source) -> Iterator[str]:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "Field":
        for keyword in node.keywords:
            if keyword.arg in BOUNDS:
                value = _number(keyword.value, source)
                yield BOUNDS[keyword.arg].format(SIZES.get(value, value))


def _number(node: ast.expr, source: Source) -> Any:
    """The value of a bound: a number, a constant of the module, or what is computed from these."""
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return source.names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, source)
        case ast.BinOp(left, op, right):
            return OPERATORS[type(op)](_number(left, source), _number(right, source))
    raise ValueError(f"no number in {ast.unparse(node)}")


def _parts(told: set[str]) -> list[str]:
    """The classes that the fields of messages are of, in the order in which they are met."""
    found: list[str] = []
    waiting = list(told)
    while waiting:
        _, node = _find(waiting.pop(0))
        for statement in ast.walk(node):
            if not isinstance(statement, ast.AnnAssign):
                continue
            for name in ast.walk(statement.annotation):
                if isinstance(name, ast.Name) and _is_part(name.id, told) and name.id not in found:
                    found.append(name.id)
                    waiting.append(name.id)
    return sorted(found)


def _is_part(name: str, told: set[str]) -> bool:
    if name in told or not _known(name):
        return False
    source, _ = _find(name)
    return issubclass(source.names[name], Frozen)


def _aliases(classes: list[str]) -> list[tuple[str, str, str]]:
    """Name, type and sentence of the short names that fields have for types."""
    found: dict[str, tuple[str, str, str]] = {}
    waiting = [
        statement.annotation
        for name in classes
        for statement in ast.walk(_find(name)[1])
        if isinstance(statement, ast.AnnAssign)
    ]
    while waiting:
        for node in ast.walk(waiting.pop(0)):
            if not isinstance(node, ast.Name) or node.id in found or _known(node.id):
                continue
            for source in SOURCES:
                if node.id in source.aliases and node.id[0].isupper() and not node.id.isupper():
                    value, said = source.aliases[node.id]
                    found[node.id] = (node.id, _type(value, source), said)
                    waiting.append(value)
                    break
    return sorted(found.values())


def write() -> None:
    PAGE.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    write()
