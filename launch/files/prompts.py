"""Files of prompts: one JSON object `{"id", "turns"}` per line; other keys are ignored. A bad line
is reported by its number."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.protocol.errors import UserError
from dovetail.protocol.files import decode, unread

REMEDY = 'write a line such as {"id": "a", "turns": ["Why is the sky blue?"]} for each prompt'


@dataclass(frozen=True)
class Prompt:
    """The turns of a user; each turn is answered before the next."""

    id: str
    turns: tuple[str, ...]


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, in order; `UserError` names the first invalid line."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"the prompts in {path} cannot be read: "
            + unread(error, "name a file of prompts, one JSON object per line")
        ) from None
    lines = decode(content, str(path)).split(
        "\n"
    )  # not splitlines: U+2028 and similar may occur in JSON
    prompts = [
        _prompt(f"{path} line {number}", line)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise UserError(f"{path} holds no prompts: {REMEDY}")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UserError(f"{path} has two prompts of id {prompt.id!r}: give each its own")
        seen.add(prompt.id)
    return prompts


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded: JSON's \\ud800 and bytes of the command line that are
    no UTF-8 become lone surrogates, which no encoding has."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _prompt(where: str, line: str) -> Prompt:
    try:
        content: Any = json.loads(line)
    except json.JSONDecodeError as error:
        what = f"is not JSON ({error.msg}, column {error.colno})"
        raise UserError(f"{where} {what}: {REMEDY}") from None
    except ValueError as error:  # a number with more digits than Python reads
        raise UserError(f"{where} has a number that is too long: {REMEDY}") from error
    except RecursionError:
        raise UserError(f"{where} is nested too deeply to be a prompt: {REMEDY}") from None
    if not isinstance(content, dict) or not isinstance(content.get("id"), str) or not content["id"]:
        raise UserError(f"{where} is not a prompt: {REMEDY}")
    turns = content.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise UserError(f'{where}: the "turns" of {content["id"]!r} are not a list of texts')
    if not all(is_unicode(text) for text in (content["id"], *turns)):
        raise UserError(f'{where}: "id" or "turns" of {content["id"]!r} have lone surrogates')
    return Prompt(content["id"], tuple(turns))
