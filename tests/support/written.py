"""A reply in the form of an API, from the events of which it consists."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from dovetail.protocol.arrays import Array
from dovetail.protocol.messages import Described, Finished, VocabularyFacts
from dovetail.protocol.settings import SamplingSettings, TreeSettings
from dovetail.runtime.http.apis.writers import OpenWriter
from dovetail.runtime.http.asked import RequestTarget
from dovetail.runtime.http.bodies import ChatBody
from dovetail.runtime.http.events import Event
from dovetail.runtime.http.orders import Defaults, chat_order
from dovetail.runtime.http.replies import Part
from dovetail.runtime.text.tokenizer import codec_of
from support import golden
from support.scripted import tokenizer_bytes
from support.web import TEMPLATE

MODEL = "scripted-target"
MESSAGES = [{"role": "user", "content": "w5 w6"}]


@cache
def described_target() -> RequestTarget:
    described = golden.representative()["described"]
    assert isinstance(described, Described)
    tokenizer = tokenizer_bytes()
    facts = VocabularyFacts(digest="0", size=97, end=(0,), template=TEMPLATE)
    changed = described.model_copy(
        update={
            "model": MODEL,
            "vocabulary": facts,
            "tokenizer": Array(dtype="uint8", shape=(len(tokenizer),), data=tokenizer),
            "table": None,
        }
    )
    return RequestTarget(changed, codec_of(changed))


def written(
    write: OpenWriter,
    events: Sequence[Event],
    *,
    pieces: int = 1,
    stream: bool = True,
    name: str = "",
) -> bytes:
    """What a writer makes of a reply, in parts of this many events; `name`: its id."""
    options = {"stream_options": {"include_usage": True}} if stream else {}
    body = ChatBody.model_validate({"messages": MESSAGES, "stream": stream, **options})
    target = described_target()
    order = chat_order(body, target, Defaults(SamplingSettings(), TreeSettings()))
    writer = write(replace(order, name=name or order.name), target, MODEL, ())
    (reply,) = writer.replies
    finished = golden.representative()["finished"]
    assert isinstance(finished, Finished)
    result = finished.result.model_copy(update={"finish_reason": "stop", "token_ids": (5, 0)})
    parts = [Part(tuple(events[at : at + pieces])) for at in range(0, len(events), pieces)]
    last = reply.hear(finished.model_copy(update={"result": result}))
    if not stream:
        for part in (*parts, last):
            writer.keep(reply, part)
        return json.dumps(writer.whole()).encode()
    text = writer.opening()
    text += "".join(writer.lines(reply, part) for part in (*parts, last))
    return text.encode() + writer.last_lines()
