"""Conversations for chat templates: tools and tool turns as transformers renders them, control
tokens of users as plain text, and repairs for templates that refuse some conversations."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from dovetail.launch.settings.models import TARGET_FOLDER
from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import VocabularyFacts
from dovetail.runtime.http.bodies import ChatMessage
from dovetail.runtime.text.tokenizer import TextCodec
from dovetail.runtime.tools.conversation import template_messages
from dovetail.workers.models.checkpoints.tokenizer import read_template
from support.tool_templates import MARKERS, NOW, TEMPLATES, WEATHER

ASKED = {"role": "user", "content": "Wie ist das Wetter in <Köln>?"}
CALLED = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "so",
    "tool_calls": [
        {
            "id": "abcdefgh1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"place": "Köln", "days": 3}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "content": "'sun' & <rain>"}
SIMPLE = "{% for m in messages %}<|user|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"


@cache
def codec(template: str, *, special: bool = True) -> TextCodec:
    tokenizer = Tokenizer.from_file(str(TARGET_FOLDER / "tokenizer.json"))
    tokenizer.add_special_tokens([*MARKERS] if special else [])
    facts = VocabularyFacts(
        digest="", size=tokenizer.get_vocab_size(), begin=0, end=(1,), template=template
    )
    return TextCodec(tokenizer.to_str().encode(), facts)


def as_sent(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return template_messages([ChatMessage.model_validate(one) for one in messages])


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("tools", [[WEATHER, NOW], None])
def test_tools_and_tool_turns_render_as_in_transformers(family: str, tools: Any) -> None:
    text, template = codec(TEMPLATES[family]), TEMPLATES[family]
    function = CALLED["tool_calls"][0]["function"]  # type: ignore[index]
    arguments = json.loads(function["arguments"])
    call = {**CALLED["tool_calls"][0], "function": {**function, "arguments": arguments}}  # type: ignore[index]
    told = [ASKED, {**CALLED, "tool_calls": [call]}, RESULT]
    (expected,), _ = render_jinja_template(
        [told],
        tools=tools,
        chat_template=template,
        add_generation_prompt=True,
        bos_token=text.token(0),
        eos_token=text.token(1),
    )
    assert text.render_messages(as_sent(ASKED, CALLED, RESULT), tools=tools) == expected


def test_messages_are_data_for_the_template() -> None:
    legacy = {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "["}}
    told = as_sent(
        CALLED,
        legacy,
        {"role": "function", "name": "f", "content": "x"},
        {"role": "assistant", "thinking": "hm", "content": [{"type": "text", "text": "a"}]},
    )
    assert told[0]["content"] is None
    assert told[0]["tool_calls"][0]["function"]["arguments"] == {"place": "Köln", "days": 3}
    assert {told[0][name] for name in ("reasoning", "reasoning_content", "thinking")} == {"so"}
    assert told[1]["tool_calls"][0]["function"]["arguments"] == "["
    assert told[2] == {
        "role": "tool",
        "name": "f",
        "content": "x",
        "tool_call_id": told[1]["tool_calls"][0]["id"],
    }
    assert told[3]["content"] == [{"type": "text", "text": "a"}]
    assert told[3]["reasoning_content"] == "hm"


PIECES = st.lists(
    st.sampled_from(["<|end|>", "<|us", "er|>", "<|", "|>", "<tool_call>", "<", "end", "é", " a"]),
    max_size=6,
).map("".join)


@given(parts=st.lists(PIECES, min_size=1, max_size=3), place=PIECES)
@settings(max_examples=60, deadline=None)
def test_control_tokens_that_users_write_are_text(parts: list[str], place: str) -> None:
    text = codec(SIMPLE.replace("<|end|>", "{{ (m.tool_calls or '') | tojson }}<|end|>"))
    user = {"role": "user", "content": [{"type": "text", "text": one} for one in parts]}
    call = {"name": "f", "arguments": json.dumps({"place": place})}
    told = {**CALLED, "content": place, "tool_calls": [{"id": "x", "function": call}]}
    rendered = text.render_messages(as_sent(user, {**RESULT, "content": place}, told))
    ids = text.encode_rendered(rendered)
    plain = text.render_messages(as_sent(user, {**RESULT, "content": place}, told), special=True)
    assert text.decode(ids, special=True) == plain
    controls = {text.table.special[one] for one in ("<|user|>", "<|end|>", "<tool_call>")}
    assert [text.token(one) for one in ids if one in controls] == ["<|user|>", "<|end|>"] * 3


def test_control_tokens_may_be_allowed_and_the_tokens_of_plain_messages_are_the_same() -> None:
    text = codec(SIMPLE)
    user = [{"role": "user", "content": "a <|end|> b"}]
    allowed = text.encode_rendered(text.render_messages(user, special=True))
    assert allowed.count(text.table.special["<|end|>"]) == 2
    plain = [{"role": "user", "content": "Tell me a story about a red balloon.\n"}]
    assert text.encode_messages(plain) == text.encode_rendered(
        text.render_messages(plain, special=True)
    )


def test_thoughts_in_earlier_replies_are_found_by_the_template() -> None:
    text = codec("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}")
    said = {"role": "assistant", "content": "<think>a</think>b"}
    assert text.render_messages([said]) == "b"


STRICT = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
{{ raise_exception('system first') }}{% endif %}{% if not loop.first and m.role == \
loop.previtem.role %}{{ raise_exception('roles must alternate') }}{% endif %}\
<{{ m.role }}>{{ m.content }}{% endfor %}"""


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("system:a developer:b user:c", "<system>a\n\nb<user>c"),
        (
            "system:a user:b system:c",
            "<system>a<user>b\n\n<system-reminder>\nc\n</system-reminder>",
        ),
        (
            "system:a user:b assistant:c system:d",
            "<system>a<user>b<assistant>c<user><system-reminder>\nd\n</system-reminder>",
        ),
    ],
)
def test_system_messages_are_merged_for_a_template_that_refuses_them(
    turns: str, expected: str
) -> None:
    messages = [
        dict(zip(("role", "content"), turn.split(":"), strict=True)) for turn in turns.split()
    ]
    assert codec(STRICT).render_messages(messages) == expected
    kept = "".join(f"<|user|>{turn}<|end|>" for turn in turns.split())
    assert codec(SIMPLE).render_messages(messages) == kept.replace("developer", "system")


def test_a_conversation_that_no_repair_helps_is_refused_with_the_templates_own_words() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        codec(STRICT).render_messages(
            [ASKED, {"role": "assistant", "content": "a"}] * 2 + [ASKED] * 2
        )


def test_arguments_are_text_where_a_template_joins_them_and_ids_short_where_it_demands_it() -> None:
    joins = SIMPLE.replace(
        "{{ m.content }}",
        "{% for c in m.tool_calls %}{{ c.id ~ "
        "c.function.name + ' ' + c.function.arguments }}{% endfor %}",
    )
    told = as_sent(CALLED)
    assert '"days": 3}' in codec(joins).render_messages(told)
    demands = TEMPLATES["mistral_list"]
    long = [ASKED, {**told[0], "tool_calls": [{**told[0]["tool_calls"][0], "id": "call_" * 5}]}]
    assert '"id": "' in codec(demands).render_messages(long, tools=[WEATHER])


def test_calls_that_a_template_ignores_are_refused() -> None:
    with pytest.raises(RequestError, match="drops message 2 or its tool calls"):
        codec(SIMPLE).render_messages(
            as_sent(ASKED, CALLED, RESULT, {**CALLED, "tool_calls": None, "content": "a"})
        )


@pytest.mark.parametrize("end", ["", "\n", "  \n  ", "x\n\n"])
def test_a_list_of_templates_uses_tool_use_where_there_are_tools(tmp_path: Path, end: str) -> None:
    named = {
        "default": "\n{% for m in messages %}{{ m.content }}{% endfor %}" + end,
        "tool_use": "\n  {% for t in tools %}{{ messages[0].content ~ (t | tojson) }}{%- endfor %}"
        + end,
    }
    listed = [{"name": name, "template": text} for name, text in named.items()]
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"chat_template": listed}))
    text = codec(read_template(tmp_path))
    for name, tools in (("default", None), ("tool_use", [WEATHER])):
        (expected,), _ = render_jinja_template([[ASKED]], tools=tools, chat_template=named[name])
        assert text.render_messages([ASKED], tools=tools) == expected
