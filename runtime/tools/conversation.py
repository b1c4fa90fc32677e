"""A chat request's messages and tools as a chat template gets them, and how its reply is read."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.runtime.http.bodies import ChatBody, ChatMessage, NamedFunction, ToolChoice
from dovetail.runtime.http.errors import ApiError
from dovetail.runtime.tools.formats import Format, Thoughts
from dovetail.runtime.tools.parser import ReplyParser, load_parser
from dovetail.runtime.tools.support import Support

ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
ID_LENGTH = 9  # of a call's id: Mistral's templates accept no other
Tool = Mapping[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and which of them its reply may or must call."""

    shown: Sequence[Tool] = ()
    """Those in the prompt."""
    callable: Sequence[Tool] = ()
    required: bool = False
    parallel: bool = True
    legacy: bool = False
    """True if the request has `functions`, so that the reply has a `function_call`."""


@dataclass(frozen=True)
class Reading:
    """How the text of a reply is read."""

    form: Format
    use: ToolUse = ToolUse()
    thinking: bool = False
    """True if the prompt ends within thoughts."""

    def parser(self, reply: str) -> ReplyParser:
        """Return the parser of a reply with this name, from which the ids of its calls follow."""

        def name_call(index: int) -> str:
            number = int.from_bytes(hashlib.sha256(f"{reply}/{index}".encode()).digest())
            return "".join(ID_LETTERS[number // 62**i % 62] for i in range(ID_LENGTH))

        return ReplyParser(self.form, name_call, tools=self.use.callable, thinking=self.thinking)


def tool_use(body: ChatBody) -> ToolUse:
    """Return the tools of a request; raise `ApiError` for a choice that they do not allow."""
    legacy = not body.tools and bool(body.functions)
    if body.tools and body.functions:
        raise ApiError(400, "tools and functions are given: leave functions out", param="functions")
    functions = [{"type": "function", "function": one} for one in body.functions or ()]
    shown = tuple(body.tools or functions)
    field = "function_call" if legacy else "tool_choice"
    choice = body.function_call if legacy else body.tool_choice
    names = [one["function"]["name"] for one in shown]
    if twice := next((name for name in names if names.count(name) > 1), None):
        param = "functions" if legacy else "tools"
        raise ApiError(400, f"two tools are named {twice!r}: leave one out", param=param)
    if not shown:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, f"{field} needs tools: send tools, too", param=field)
        return ToolUse()
    wanted, required = _chosen(choice, names)
    if unknown := next((name for name in wanted if name not in names), None):
        raise ApiError(400, f"{field} names {unknown!r}, which is not in tools", param=field)
    return ToolUse(
        shown,
        tuple(one for one in shown if one["function"]["name"] in wanted),
        required,
        body.parallel_tool_calls is not False and not legacy and not _names_one(choice),
        legacy,
    )


def _names_one(choice: Any) -> bool:
    return isinstance(choice, NamedFunction) or getattr(choice, "function", None) is not None


def _chosen(choice: Any, names: Sequence[str]) -> tuple[Sequence[str], bool]:
    """Return the names of the tools that may be called, and whether one must be."""
    match choice:
        case "none":
            return (), False
        case NamedFunction(name=name) | ToolChoice(function=NamedFunction(name=name)):
            return (name,), True
        case ToolChoice(allowed_tools=subset) if subset is not None:
            return [one.function.name for one in subset.tools], subset.mode == "required"
    return names, choice == "required"


def reading_of(use: ToolUse, support: Support, rendered: str, *, split: bool) -> Reading | None:
    """Return how a reply is read; None: as plain text. `split`: thoughts are kept apart."""
    thoughts = support.thoughts if split else None
    family = support.family if use.callable else None
    if thoughts is None and family is None:
        return None
    load_parser()
    return Reading(Format(thoughts, family), use, is_thinking(thoughts, rendered))


def is_thinking(thoughts: Thoughts | None, rendered: str) -> bool:
    """Return whether a prompt ends within thoughts, which its template has opened."""
    return thoughts is not None and rendered.rstrip().endswith(thoughts.open)


def check_support(use: ToolUse, support: Support) -> None:
    """Raise `ApiError` if a model cannot call tools, but a request has some."""
    if use.shown and support.family is None:
        raise ApiError(
            400,
            f"this model cannot call tools, since {support.why_no_tools}: leave tools out",
            param="functions" if use.legacy else "tools",
            code="unsupported_parameter",
        )


def thinking_values(body: ChatBody) -> dict[str, Any]:
    """Return the values for a chat template that have their own fields in a request."""
    effort, enabled = body.reasoning_effort, body.enable_thinking
    if enabled is None and effort == "none":
        enabled = False
    values = {"reasoning_effort": effort, "enable_thinking": enabled, "thinking": enabled}
    return {name: value for name, value in values.items() if value is not None}


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them: arguments as objects, reasoning under all of
    its names, functions as tools."""
    found: list[dict[str, Any]] = []
    called = ""
    for number, message in enumerate(messages):
        parts = message.content
        content: Any = parts
        if isinstance(parts, list):
            content = [{"type": "text", "text": part.text} for part in parts]
        one: dict[str, Any] = {"role": message.role, "content": content}
        if message.name is not None:
            one["name"] = message.name
        if message.role in ("tool", "function"):
            one |= {"role": "tool", "tool_call_id": message.tool_call_id or called}
        if calls := message.calls:
            ids = [call.id or f"call{number:03}{place:02}" for place, call in enumerate(calls)]
            called = ids[0]
            one["tool_calls"] = [
                {
                    "id": index,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _object(call.function.arguments),
                    },
                }
                for index, call in zip(ids, calls, strict=True)
            ]
        if (thoughts := message.thoughts) is not None:
            one |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thoughts)
        found.append(one)
    return found


def _object(arguments: str | Mapping[str, Any] | None) -> Any:
    """Return the arguments of a call as an object, or as they are if they are none."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
