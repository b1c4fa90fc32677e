"""What a model's chat template can do with thoughts and tools, by a round trip of a known call."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dovetail.protocol.errors import RequestError
from dovetail.runtime.http.events import blocks_of
from dovetail.runtime.text.tokenizer import NO_TEMPLATE, TextCodec
from dovetail.runtime.tools.formats import Family, Format, Thoughts, table
from dovetail.runtime.tools.parser import ReplyParser

NAME, ARGUMENTS = "probe_tool", {"place": "Zürich <1>", "count": 3}
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A tool that tests the template.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A name."},
                "count": {"type": "integer", "description": "A number."},
            },
            "required": ["place", "count"],
        },
    },
}
USER = {"role": "user", "content": "probe"}
CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}


@dataclass(frozen=True)
class Support:
    """What a model's chat template can do."""

    thoughts: Thoughts | None = None
    family: Family | None = None
    why_no_tools: str = ""
    """Empty if there is a family."""

    @property
    def described(self) -> dict[str, Any]:
        """Return it for `/props` and the like."""
        return {
            "tools": self.family.name if self.family is not None else None,
            "parallel_tool_calls": self.family is not None and self.family.parallel,
            "reasoning": self.thoughts.open if self.thoughts is not None else None,
            "why_no_tools": self.why_no_tools or None,
        }


@lru_cache(8)
def support_of(text: TextCodec) -> Support:
    """Return what the chat template of a model can do, by rendering a call and reading it back."""
    template = text.facts.template
    thoughts, families = table()
    in_template = (one for one in thoughts if one.open in template)
    in_vocabulary = (one for one in thoughts if _are_tokens(one, text))
    own = next(in_template, None) or next(in_vocabulary, None)
    if not template:
        return Support(own, None, NO_TEMPLATE)
    if "tools" not in template:
        return Support(own, None, "its chat template has no place for tools")
    why = "its chat template writes calls in no known format"
    for number, family in enumerate(_fitting(families, template)):
        found = _round_trip(text, Format(own, family))
        if not found:
            return Support(own, family)
        why = found if not number else why
    return Support(own, None, why)


def _are_tokens(thoughts: Thoughts, text: TextCodec) -> bool:
    return text.has_token(thoughts.open) and text.has_token(thoughts.close)


def _fitting(families: Sequence[Family], template: str) -> list[Family]:
    return [one for one in families if all(marker in template for marker in one.markers)]


def _round_trip(text: TextCodec, form: Format) -> str:
    """Return why a known call is not read back from the text that the template makes of it."""
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    try:
        prompt = text.render_messages([USER], tools=[TOOL])
        whole = text.render_messages([USER, message], tools=[TOOL], reply=False)
    except RequestError as error:
        return str(error)
    if NAME not in prompt:
        return "its chat template does not show tools"
    pairs = enumerate(zip(prompt, whole, strict=False))
    cut = next((place for place, (one, other) in pairs if one != other), len(prompt))
    for marker in sorted(filter(None, form.markers), key=len):
        place = whole.find(marker, max(0, cut - len(marker) + 1))
        cut = place if 0 <= place < cut else cut
    reply = whole[cut:]
    for end in filter(None, map(text.token, text.facts.end)):
        reply = reply.partition(end)[0]
    parser = ReplyParser(form, lambda _: str(CALL["id"]), tools=[TOOL])
    calls = [one for one in blocks_of((*parser.feed(reply), *parser.end())) if one.call is not None]
    if [(one.call.name, _read(one.text)) for one in calls if one.call] == [(NAME, ARGUMENTS)]:
        return ""
    shown = json.dumps(reply[:200], ensure_ascii=False)
    name = form.family.name if form.family is not None else ""
    return f"the call that its chat template writes cannot be read in the format {name}: {shown}"


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
