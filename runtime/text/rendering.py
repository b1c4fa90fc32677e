"""The process that renders chat templates, as transformers does but with limits; `templates.py`
runs it as a script.

Templates are Jinja programs from a checkpoint and can harm only this process: the kernel limits its
CPU time and memory, and kills it with its parent. The only door to `jinja2`.
"""

import ctypes
import hashlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
OUT_OF_MEMORY = 3  # exit code of a process that ran out of memory
MARK = 7130295184  # in a trial, this and a number replace a text: templates do not change digits

Content = str | list[dict[str, str]] | None
Message = dict[str, Any]
Repair = Callable[[list[Message]], list[Message]]


class _Limit(Exception):
    """A template exceeded a limit."""


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.CallBlock(self.call_method("_body"), [], [], body)
        return call.set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace without underscored names, through which a template could leave the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        Namespace.__init__(self)
        for name, value in dict(*given, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace may not have a name that begins with _: {name!r}")
        super().__setitem__(name, value)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(8)
def _compiled(text: str) -> Template:
    """Return a template, compiled as transformers does."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(text)


def _rendered(template: Template, most: int, values: Mapping[str, Any]) -> str:
    """Render a template to at most `most` characters."""
    pieces, length = [], 0
    for piece in template.generate(**values):
        length += len(piece)
        if length > most:
            raise _Limit(f"writes more than {most} characters")
        pieces.append(piece)
    return "".join(pieces)


# -- the form of a message -------------------------------------------------------------------------


def _in_form(form: int, content: Content) -> Content:
    """Return a message's content unchanged (0), as one string (1) or as one part (2)."""
    if form == 0:
        return content
    if content is None:
        return ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return text if form == 1 else [{"type": "text", "text": text}]


def _marked(message: Message, first: int) -> tuple[Message, list[str]]:
    """Return a message with marks in place of its non-blank texts and the names of its calls, and
    the marks."""
    content: Content = message["content"]
    marks: list[str] = []

    def mark(text: str) -> str:
        if not text.strip():
            return text
        marks.append(f"{MARK}{first + len(marks):08}")
        return marks[-1]

    if isinstance(content, str):
        content = mark(content)
    elif content is not None:
        content = [{**part, "text": mark(part["text"])} for part in content]
    marked = {**message, "content": content}
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "name": mark(call["function"]["name"])}}
            for call in calls
        ]
    return marked, marks


def _tried(render: Callable[[list[Message]], str], messages: list[Message]) -> str:
    """Render messages; empty if the template rejects their form or their roles."""
    try:
        return render(messages)
    except MemoryError:
        raise
    except Exception:
        return ""


def _shown(render: Callable[[list[Message]], str], messages: Sequence[Message]) -> list[bool]:
    """Return for each message whether the template renders its text, and not a list's repr."""
    marked, every, count = [], [], 0
    for message in messages:
        shown, marks = _marked(message, count)
        count += len(marks)
        marked.append(shown)
        every.append(marks)
    text = _tried(render, marked).lower()
    return [
        all(mark in text and f"'text': '{mark}'" not in text for mark in marks) for marks in every
    ]


def _formed(render: Callable[[list[Message]], str], messages: list[Message]) -> list[Message]:
    """Return the messages with contents in the form that the template expects: unchanged if it
    renders all of them, else as strings or parts, which is found by rendering marks in place of
    texts. Raises `_Limit` for a message whose text has no effect in any form; turns before the last
    reply may be dropped.
    """
    best, found = [False] * len(messages), messages
    for start in range(3):
        forms = [start] * len(messages)
        for _ in range(2):
            tried = [
                {**message, "content": _in_form(form, message["content"])}
                for form, message in zip(forms, messages, strict=True)
            ]
            shown = _shown(render, tried)
            if sum(shown) > sum(best):
                best, found = shown, tried
            if all(shown):
                return found
            forms = [
                form if good else 2 if isinstance(one["content"], str) else 1
                for form, good, one in zip(forms, shown, tried, strict=True)
            ]
    text = render(found)
    for place, good in enumerate(best):
        role, content = messages[place]["role"], found[place]["content"]
        later = [one["role"] for one in messages[place:-1]] if role != "system" else []
        if not good and "tool_calls" in found[place]:
            raise _Limit(f"drops message {place + 1} or its tool calls: leave the calls out")
        if good or "assistant" in later:
            continue
        other = {**found[place], "content": f"x{content}x"}
        changed = [*found[:place], other, *found[place + 1 :]]
        if _tried(render, changed) == text or not isinstance(content, str):
            text = f"drops message {place + 1} (role {role!r:.40})"
            raise _Limit(f"{text}: move its text into another message")
    return found


def render(template: str, most: int, values: Mapping[str, Any]) -> str:
    """Render a template for these values to at most `most` characters."""
    compiled = _compiled(template)
    messages: list[Message] = values["messages"]
    if "developer" not in template:
        system = {"developer": "system"}
        messages = [{**one, "role": system.get(one["role"], one["role"])} for one in messages]

    def attempt(tried: list[Message]) -> str:
        return _rendered(compiled, most, {**values, "messages": tried})

    try:
        return attempt(_formed(attempt, messages))
    except MemoryError:
        raise
    except Exception:
        for repair in REPAIRS:
            repaired = repair(messages)
            if repaired != messages:
                messages = repaired
                if text := _tried(lambda tried: attempt(_formed(attempt, tried)), messages):
                    return text
        raise


# -- conversations that some templates refuse ------------------------------------------------------


def _merged(messages: list[Message]) -> list[Message]:
    """Join the leading system messages."""
    count = next((i for i, one in enumerate(messages) if one["role"] not in SYSTEM), len(messages))
    if count < 2:
        return messages
    texts = [str(_in_form(1, one["content"])) for one in messages[:count]]
    return [{**messages[0], "content": "\n\n".join(texts)}, *messages[count:]]


def _reminded(messages: list[Message]) -> list[Message]:
    """Turn later system messages into a user's, joined with adjacent ones."""
    found, turned = messages[:1], False
    for one in messages[1:]:
        before, turned = turned, one["role"] in SYSTEM
        if turned:
            text = f"<system-reminder>\n{_in_form(1, one['content'])}\n</system-reminder>"
            one = {"role": "user", "content": text}
        if (turned or before) and one["role"] == found[-1]["role"]:
            texts = [str(_in_form(1, part["content"])) for part in (found[-1], one)]
            found[-1] = {**found[-1], "content": "\n\n".join(texts)}
        else:
            found.append(one)
    return found


def _short_ids(messages: list[Message]) -> list[Message]:
    """Give calls ids of nine letters and digits, which Mistral's templates demand."""

    def short(name: Any) -> str:
        return hashlib.sha256(str(name).encode("utf-8", "replace")).hexdigest()[:9]

    found = []
    for one in messages:
        if "tool_call_id" in one:
            one = {**one, "tool_call_id": short(one["tool_call_id"])}
        if calls := one.get("tool_calls"):
            one = {**one, "tool_calls": [{**call, "id": short(call.get("id"))} for call in calls]}
        found.append(one)
    return found


def _text_arguments(messages: list[Message]) -> list[Message]:
    """Give calls their arguments as JSON text, for templates that print them unchanged."""

    def text(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": _tojson(function["arguments"])}}

    return [
        {**one, "tool_calls": [text(call) for call in one["tool_calls"]]}
        if one.get("tool_calls")
        else one
        for one in messages
    ]


SYSTEM = ("system", "developer")
REPAIRS: tuple[Repair, ...] = (_merged, _reminded, _short_ids, _text_arguments)
"""Changes of a conversation that its template refuses, tried one after the other and kept."""


# -- the process -----------------------------------------------------------------------------------


def _answer(job: bytes) -> bytes:
    """Return t and the text, or c, f or l and why: not compiled, failed, or beyond a limit."""
    kind = b"c"
    try:
        template, most, values = json.loads(job)
        _compiled(template)
        kind = b"f"
        return b"t" + render(template, most, values).encode("utf-8", "surrogatepass")
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except _Limit as limit:
        return b"l" + str(limit).encode("utf-8", "replace")
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        return kind + f"{type(error).__name__}: {text}".encode("utf-8", "replace")


def main(parent: int, memory: int, cpu_s: float) -> None:
    """Serve the socket on stdin; `memory`, `cpu_s`: limits in bytes and CPU seconds."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    prctl(PR_SET_NAME, b"dovetail render", 0, 0, 0)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = min(pages * resource.getpagesize() + memory, hard if hard > 0 else sys.maxsize)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with socket.socket(fileno=0) as channel, channel.makefile("rb") as jobs:
        for size in iter(partial(jobs.read, 8), b""):
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            answer = _answer(jobs.read(int.from_bytes(size)))
            signal.setitimer(signal.ITIMER_PROF, 0)
            channel.sendall(len(answer).to_bytes(8) + answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
