"""Chat templates: programs in Jinja that a checkpoint brings, run where they reach nothing outside,
for a while, and with bounded memory.

jinja2's sandbox keeps a template from what lies behind attributes, and from changing what it is
given. It bounds neither time nor memory - a few nested loops run for years, thirty doublings fill
every machine -, so that is done here: between any two statements the time of the thread is looked
at, and whatever is made counts towards a limit, before it is made where it can be many times what
it is made of. Filters that no chat template needs are not there. The only door to `jinja2`.
"""

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CPU_S = 2.0
"""Processor seconds of one rendering. Templates of today's models take less than a millisecond."""
TICKS = 16
"""Statements, or KiB that are made, between two looks at the clock."""
MAX_MADE = 1 << 26
"""Characters, and items eight times, of all that a rendering makes: a dozen copies of the longest
prompt that fits any context."""
MAX_WIDTH = 1024
"""Most characters that something is filled up or indented to."""
_ITEM = 8

FILTERS = frozenset(
    (
        *(
            "abs",
            "capitalize",
            "count",
            "d",
            "default",
            "dictsort",
            "e",
            "escape",
            "first",
            "float",
            "forceescape",
            "groupby",
            "indent",
            "int",
        ),
        *(
            "items",
            "join",
            "last",
            "length",
            "list",
            "lower",
            "map",
            "max",
            "min",
            "reject",
            "rejectattr",
            "replace",
            "reverse",
            "round",
            "safe",
            "select",
        ),
        *(
            "selectattr",
            "sort",
            "string",
            "sum",
            "title",
            "tojson",
            "trim",
            "truncate",
            "unique",
            "upper",
            "urlencode",
            "wordcount",
        ),
    )
)
WIDENING = frozenset(("center", "expandtabs", "format_map", "ljust", "rjust", "translate", "zfill"))
"""Methods of text that make much of little."""
_WIDE_FORMAT = re.compile(r"%[-+ #.\d]*(\d{4}|\*)|\{[^}]*(\d{4}|\{)")
"""A format with a width of four digits, or one that is given with the values."""


class ChatTemplate:
    """A template, read; `ValueError` in one line if it is none."""

    def __init__(self, text: str) -> None:
        self._environment = _Sandbox()
        try:
            self._template = self._environment.from_string(text)
        except Exception as error:
            # beside jinja2's own errors those of the Python that it is made into: nested too deep,
            # too many blocks
            raise ValueError(
                f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            ) from None

    def render(self, **values: Any) -> str:
        """The text for these values; raises whatever the template raises, and `SecurityError` where
        it is stopped."""
        with self._environment.metered():
            return self._template.render(**values)


class _Meter(threading.local):
    """The processor time and memory that the rendering in this thread may still use."""

    left = ticks = 0
    until_s = 0.0


class _Sandbox(ImmutableSandboxedEnvironment):
    """The dialect of transformers: blocks trimmed, `raise_exception` and `strftime_now` at hand."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self._meter, self.tick = _Meter(), self._tick
        self.globals = {
            name: self.globals[name] for name in ("range", "dict", "namespace", "joiner", "cycler")
        }
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda pattern: datetime.now().astimezone().strftime(pattern),
        }
        self.filters = {
            name: self._metered(name, made)
            for name, made in self.filters.items()
            if name in FILTERS
        }

    # -- time --------------------------------------------------------------------------------------

    def metered(self) -> "_Rendering":
        """For the length of a block, this thread renders."""
        return _Rendering(self._meter)

    def _tick(self, work: int = 1) -> None:
        """Stands before every statement of a template; now and then, by how much work there was,
        the clock is looked at."""
        meter = self._meter
        meter.ticks += work
        if meter.ticks >= TICKS:
            meter.ticks = 0
            if time.thread_time() > meter.until_s:
                raise SecurityError(f"a chat template may not take longer than {MAX_CPU_S:g} s")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Joining().visit(super()._parse(source, name, filename))
        for node in [template, *template.find_all(nodes.Node)]:
            for field in ("body", "else_"):
                statements = getattr(node, field, None)
                if isinstance(statements, list):
                    setattr(
                        node,
                        field,
                        [
                            each
                            for statement in statements
                            for each in (self._ticking(statement), statement)
                        ],
                    )
        return template

    @staticmethod
    def _ticking(statement: nodes.Node) -> nodes.Node:
        call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        return (
            nodes.ExprStmt(call).set_lineno(statement.lineno).set_environment(statement.environment)  # type: ignore[arg-type]
        )

    # -- memory ------------------------------------------------------------------------------------

    def _spend(self, size: int) -> None:
        self._tick(size >> 10)
        self._meter.left -= size
        if self._meter.left < 0:
            raise SecurityError(f"a chat template may not make more than {MAX_MADE} characters")

    def _made(self, value: Any) -> Any:
        self._spend(_size(value))
        return value

    def concat(self, parts: Iterable[str]) -> str:
        """Return what jinja2 puts the parts of a text together with."""
        kept = []
        for part in parts:
            self._spend(len(part))
            kept.append(part)
        return "".join(kept)

    def joined(self, *parts: Any) -> str:
        """Return what `~` makes."""
        return self.concat(map(str, parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("a chat template may not compute powers")
        if operator == "%" and isinstance(left, str):
            _check_format(left, [right])
        if operator == "*" and isinstance(left, int | float) and isinstance(right, int | float):
            if _size(left) + _size(right) > MAX_WIDTH:
                raise SecurityError(
                    f"a chat template may not compute numbers of more than {MAX_WIDTH} bytes"
                )
        elif operator == "*":
            self._foresee(_times(left) * _times(right))
        return self._made(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (
            isinstance(obj, str) and attr in WIDENING
        )

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format_ = super().wrap_str_format(value)
        if format_ is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, [*args, *kwargs.values()])
            return format_(*args, **kwargs)

        return checked

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        if function is self.tick:
            return self._tick()
        of = getattr(function, "__self__", None)
        if isinstance(of, str) and args:
            if function.__name__ == "replace":
                self._foresee_replace(of, *args)
            elif function.__name__ == "join":
                args = (self._foresee_join(args[0], of),)
        return self._made(super().call(context, function, *args, **kwargs))

    def _metered(self, name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that looks ahead and counts."""
        first = int(
            hasattr(make, "jinja_pass_arg")
        )  # what jinja2 itself passes to it stands before the value

        @functools.wraps(make)
        def metered(*args: Any, **kwargs: Any) -> Any:
            value = self._looked_ahead(name, args[first], args[first + 1 :], kwargs)
            return self._made(make(*args[:first], value, *args[first + 1 :], **kwargs))

        return metered

    def _looked_ahead(
        self, name: str, value: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """The value of a filter whose result is foreseeably small enough; one that had to be run
        through for that, as a list."""
        given = [*args, *kwargs.values()]
        match name:
            case "indent" | "round" | "tojson" | "truncate":
                if any(
                    isinstance(number, int | float) and abs(number) > MAX_WIDTH for number in given
                ):
                    raise SecurityError(f"a chat template may not {name} by more than {MAX_WIDTH}")
                if name == "indent":
                    self._foresee((str(value).count("\n") + 1) * sum(map(_times, given)))
            case "replace":
                self._foresee_replace(str(value), *given)
            case "join":
                return self._foresee_join(value, kwargs.get("d", args[0] if args else ""))
            case "sum" if any(
                not isinstance(start, int | float) for start in (*args[1:], kwargs.get("start", 0))
            ):
                raise SecurityError("a chat template may sum numbers only")
        return value

    def _foresee_replace(self, text: str, old: Any = "", new: Any = "", *_: Any) -> None:
        self._foresee(len(text) + (text.count(str(old)) + 1) * len(str(new)))

    def _foresee_join(self, items: Any, separator: Any) -> list[Any]:
        kept = list(items)
        self._foresee(
            sum(len(item) if isinstance(item, str) else 1 for item in kept)
            + len(kept) * len(str(separator))
        )
        return kept

    def _foresee(self, size: int) -> None:
        """Refuses what would not fit before it is made."""
        if size > self._meter.left:
            raise SecurityError(f"a chat template may not make more than {MAX_MADE} characters")


class _Joining(NodeTransformer):
    """Has `a ~ b` done where it is counted."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None)
        return call.set_lineno(node.lineno).set_environment(node.environment)  # type: ignore[arg-type]


class _Rendering:
    """Winds a meter up, and puts it back as it was."""

    def __init__(self, meter: _Meter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._before = self._meter.left, self._meter.until_s
        self._meter.left, self._meter.until_s = MAX_MADE, time.thread_time() + MAX_CPU_S

    def __exit__(self, *_: object) -> None:
        self._meter.left, self._meter.until_s = self._before


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _size(value: Any) -> int:
    """Return the size of what was made."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return 1 + value.bit_length() // 8
    return _ITEM * len(value) if isinstance(value, list | tuple | dict | set) else 1


def _times(value: Any) -> int:
    """Return what a product with this is as long as."""
    return (
        len(value)
        if isinstance(value, str | bytes | list | tuple)
        else abs(int(value))
        if isinstance(value, int | float)
        else 1
    )


def _check_format(text: Any, values: Sequence[Any]) -> None:
    """Passes a format that makes nothing wide and repeats nothing long."""
    if (
        not isinstance(text, str)
        or _WIDE_FORMAT.search(text)
        or len(text) * sum(len(str(value)) for value in values) > MAX_MADE
    ):
        raise SecurityError("a chat template may not fill a text up to a width like this")
