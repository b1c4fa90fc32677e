"""Tools and reasoning: every family's calls are found by a round trip, read the same however the
text arrives, and kept to their schemas by a grammar."""

import itertools
import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers.utils.chat_parsing import parse_response

from dovetail.launch.settings.models import TARGET_FOLDER
from dovetail.protocol.errors import RequestError
from dovetail.protocol.grammar import GrammarVocabulary, of_schema
from dovetail.protocol.messages import Constraint, VocabularyFacts, grammar_engine
from dovetail.runtime.http.events import CallArguments, Event, Text, blocks_of
from dovetail.runtime.text.tokenizer import TextCodec
from dovetail.runtime.tools.conversation import ToolUse
from dovetail.runtime.tools.formats import Format, table
from dovetail.runtime.tools.grammars import Refused, constraint_of
from dovetail.runtime.tools.parser import ReplyParser
from dovetail.runtime.tools.support import Support, support_of
from support.tool_templates import MARKERS, NOW, TEMPLATES, WEATHER

TOOLS = (WEATHER, NOW)
FAMILIES = {family.name: family for family in table()[1]}
TEXTS = st.text(st.sampled_from("ab \n<>{}[]\"'\\é|/_:,"), max_size=12)


@cache
def codec(family: str, *, special: bool | None = True) -> TextCodec:
    """The embedded vocabulary with a family's template; `special`: its markers are special tokens.
    None: they are tokens of a text, as in Qwen 3 and DeepSeek V3."""
    tokenizer = Tokenizer.from_file(str(TARGET_FOLDER / "tokenizer.json"))
    special = family != "llama" and special  # whose vocabulary has none of them
    if special is not False:
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(marker, normalized=False) for marker in MARKERS])
    end = "<|call|>" if special and family == "harmony" else "<|begin|>"
    facts = VocabularyFacts(
        digest="",
        size=tokenizer.get_vocab_size(),
        end=(tokenizer.token_to_id(end),),
        template=TEMPLATES.get(family, family),
    )
    return TextCodec(tokenizer.to_str().encode(), facts)


def parser(support: Support, *, thinking: bool = False) -> ReplyParser:
    form = Format(support.thoughts, support.family)
    return ReplyParser(form, lambda index: f"id{index:07}", tools=TOOLS, thinking=thinking)


def read(support: Support, text: str, cuts: Sequence[int] = ()) -> list[tuple[Any, ...]]:
    """The blocks of a reply that arrives in pieces."""
    places = sorted({0, *(cut % (len(text) + 1) for cut in cuts), len(text)})
    reader, events = parser(support), list[Event]()
    for begin, end in itertools.pairwise(places):
        events += reader.feed(text[begin:end])
    return shown([*events, *reader.end()])


def shown(events: Sequence[Event]) -> list[tuple[Any, ...]]:
    return [
        (block.kind, block.call.name, block.call.id, block.text)
        if block.call is not None
        else (block.kind, block.text)
        for block in blocks_of(events)
    ]


def calls(blocks: Sequence[tuple[Any, ...]]) -> list[tuple[str, Any]]:
    return [(block[1], json.loads(block[3])) for block in blocks if block[0] == "call"]


def written(family: str, message: dict[str, Any]) -> str:
    """What the template makes of an assistant's message."""
    text = codec(family)
    asked = {"role": "user", "content": "x"}
    before = text.render_messages([asked], tools=TOOLS, special=True)
    whole = text.render_messages([asked, message], tools=TOOLS, reply=False, special=True)
    assert whole.startswith(before)
    return whole.removeprefix(before).removesuffix("<|end|>\n")


def message(place: str, *, several: bool, thoughts: str = "", content: str = "") -> dict[str, Any]:
    functions: list[tuple[str, Any]] = [("get_weather", {"place": place, "days": 3})]
    functions += [("now", {})] if several else []
    made = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, (name, arguments) in enumerate(functions)
    ]
    told = {"role": "assistant", "content": content or None, "tool_calls": made}
    return {**told, "reasoning_content": thoughts} if thoughts else told


@pytest.mark.parametrize("special", [True, None, False])
@pytest.mark.parametrize("family", TEMPLATES)
def test_a_family_is_found_by_a_round_trip_of_a_call(family: str, special: bool | None) -> None:
    support = support_of(codec(family, special=special))
    assert support.family is not None, support.why_no_tools
    assert support.family.name == family
    assert (support.thoughts is None) == (family == "llama")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("", "no chat template"),
        ("{{ messages[0].content }}", "no place for tools"),
        ("{{ messages[0].content }}{{ tools }}", "no known format"),
        (TEMPLATES["hermes"].replace('"name": ', '"nom": '), 'format hermes: "<tool_call>'),
        (TEMPLATES["hermes"].replace("{{ tool | tojson }}", ""), "does not show tools"),
        (TEMPLATES["phi"].replace("{% if m.tool_calls %}", "{% if m.calls %}"), "its tool calls"),
    ],
)
def test_a_template_without_calls_that_can_be_read_has_no_tools(template: str, why: str) -> None:
    support = support_of(codec(template))
    assert support.family is None
    assert why in support.why_no_tools


@pytest.mark.parametrize("family", TEMPLATES)
@given(place=TEXTS, cuts=st.lists(st.integers(0, 400), max_size=8), several=st.booleans())
@settings(max_examples=12, deadline=None)
def test_what_a_template_writes_is_read_the_same_in_any_pieces(
    family: str, place: str, cuts: list[int], several: bool
) -> None:
    support = support_of(codec(family))
    assert support.family is not None
    several = several and support.family.parallel
    if support.family.arguments != "json":  # a string is what stands between its tags
        place = "".join(one for one in place if one.isalnum() or one in "{}'") or "x"
    thoughts = "hmm a" if support.thoughts is not None else ""
    text = written(family, message(place, several=several, thoughts=thoughts))
    whole = read(support, text)
    if thoughts:
        assert whole.pop(0) == ("reasoning", thoughts)
    expected: list[tuple[str, Any]] = [("get_weather", {"place": place, "days": 3})]
    assert calls(whole) == expected + [("now", {})] * several
    assert [one[0] for one in whole] == ["call"] * (1 + several)
    assert read(support, text, cuts)[bool(thoughts) :] == whole
    assert read(support, text, range(len(text)))[bool(thoughts) :] == whole


@pytest.mark.parametrize("family", [name for name in TEMPLATES if name not in ("harmony", "llama")])
@given(
    text=st.text(st.sampled_from("ab <|_tool_call>[]{}/\n"), max_size=30), cut=st.integers(0, 30)
)
@settings(max_examples=12, deadline=None)
def test_no_text_is_lost(family: str, text: str, cut: int) -> None:
    support = support_of(codec(family))
    found = read(support, text, [cut])
    assert found == read(support, text)
    assert "".join(one[-1] for one in found) in (text, "")
    if not any(marker in text for marker in ("<tool_call>", "[TOOL_CALLS]", "<|tool_call")):
        assert found == ([("text", text)] if text else [])


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        (
            "hermes",
            "<tool_call>\nnot JSON\n</tool_call> and",
            "<tool_call>\nnot JSON\n</tool_call> and",
        ),
        ("hermes", "a <tool_call>", "a<tool_call>"),
        ("mistral_list", "[TOOL_CALLS] [{}", "[TOOL_CALLS] [{}"),
        ("llama", 'so {"name": "f"}', 'so {"name": "f"}'),
    ],
)
def test_what_is_no_call_is_text(family: str, text: str, expected: str) -> None:
    found = read(support_of(codec(family)), text)
    assert [one[0] for one in found] == ["text"] * len(found)
    assert "".join(one[-1] for one in found).replace(" ", "") == expected.replace(" ", "")


def test_a_call_that_is_cut_keeps_its_name_and_what_there_is_of_its_arguments() -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Par'
    (found,) = read(support_of(codec("hermes")), text, [7, 40])
    assert found == ("call", "get_weather", "id0000000", '{"place": "Par')


def test_arguments_in_a_string_keep_their_blanks() -> None:
    text = json.dumps({"name": "get_weather", "arguments": '{"place": "New York"}'})
    (found,) = read(support_of(codec("hermes")), f"<tool_call>{text}</tool_call>", [30, 50])
    assert found == ("call", "get_weather", "id0000000", '{"place": "New York"}')


def test_arguments_leave_while_they_are_written() -> None:
    reader = parser(support_of(codec("hermes")))
    begun = reader.feed('<tool_call>\n{"name": "get_weather", "arguments": {"place": "Pa')
    assert shown(begun) == [("call", "get_weather", "id0000000", '{"place": "Pa')]
    (more,) = reader.feed('ris"')
    assert more == CallArguments(0, 'ris"')


def test_thoughts_that_the_prompt_has_opened_are_reasoning() -> None:
    reader = parser(support_of(codec("hermes")), thinking=True)
    events = (*reader.feed("so it is\n</think>\n\nYes"), *reader.end())
    assert shown(events) == [("reasoning", "so it is"), ("text", "Yes")]


@pytest.mark.parametrize("family", [one for one in TEMPLATES if one not in ("harmony", "olmo")])
def test_calls_are_those_of_transformers(family: str) -> None:
    support = support_of(codec(family))
    assert support.family is not None
    text = written(family, message("Rome", several=support.family.parallel))
    spec = {"start_anchor": "\0", "fields": Format(None, support.family).fields}
    told = parse_response(text, spec, prefix="", tools=[*TOOLS])["tool_calls"]
    flat = [one for part in told for one in (part if isinstance(part, list) else [part])]
    functions = [one.get("function", one) for one in flat]
    assert calls(read(support, text)) == [(one["name"], one["arguments"]) for one in functions]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f(a=1, b='x')\ng.h()", [("f", {"a": 1, "b": "x"}), ("g.h", {})]),
        (
            '[f(a=[true, None, {"b": -1.5}]), f()]',
            [("f", {"a": [True, None, {"b": -1.5}]}), ("f", {})],
        ),
        ("f(1)", None),
        ("f(a=b)", None),
        ("import os", None),
        ("f(a=1", None),
        ("f(**{'a': 1})", None),
        ("f(a={**{}})", None),
        ("f()\nf(a=1e999)", None),
        ("f(a=" + "[" * 5000 + ")", None),
    ],
)
def test_calls_in_python_are_read_and_what_is_none_is_text(text: str, expected: Any) -> None:
    found = read(support_of(codec("olmo")), f"<function_calls>{text}</function_calls>")
    if expected is None:
        assert found == [("text", f"<function_calls>{text}</function_calls>")]
    else:
        assert calls(found) == expected


# -- grammars --------------------------------------------------------------------------------------


def walk(text: TextCodec, grammar: str, seed: int, most: int = 200) -> str | None:
    """A reply of random allowed tokens, which closes what it has opened; None if it did not end."""
    chosen, said = random.Random(seed), list[int]()
    matcher = GrammarVocabulary.of(text.table, text.facts).matcher(grammar)
    closing = [text.encode(one, special=False)[0] for one in ('"', "}", "]", "<", "</", '"}', ">")]
    (end,) = text.facts.end
    while len(said) < most:
        allowed = matcher.allowed()
        free = np.flatnonzero(allowed)
        if allowed[end] and (len(free) == 1 or chosen.random() < 0.5):
            return text.decode(said, special=True)
        close = [token for token in closing if allowed[token]]
        token = int(chosen.choice(close if close and chosen.random() < 0.5 else free))
        if token != end:
            said.append(token)
            matcher.consume([token])
    return None


@pytest.mark.parametrize("special", [True, None, False])
@pytest.mark.parametrize("family", TEMPLATES)
def test_whatever_the_grammar_allows_is_read_as_a_valid_call(
    family: str, special: bool | None
) -> None:
    text = codec(family, special=special)
    support, ended = support_of(text), 0
    assert support.family is not None
    constraint = constraint_of(
        ToolUse(TOOLS, TOOLS, required=True), Support(None, support.family), text, thinking=False
    )
    for seed in range(4):
        if (said := walk(text, constraint.grammar, seed)) is None:
            continue
        ended += 1
        found = read(support, said)
        assert found, said
        assert {one[0] for one in found} == {"call"}, said
        for name, arguments in calls(found):
            if name == "get_weather" and family == "gemma":
                assert {"place", "days"} <= {*arguments} <= {"place", "days", "unit"}
                assert type(arguments["days"]) is int
            elif name == "get_weather":
                jsonschema.validate(arguments, WEATHER["function"]["parameters"])
            else:
                assert (name, arguments) == ("now", {})
    assert ended


@pytest.mark.parametrize("special", [True, None, False])
@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("required", [True, False])
def test_the_grammar_allows_what_the_template_writes(
    family: str, special: bool | None, required: bool
) -> None:
    text = codec(family, special=special)
    support = support_of(text)
    assert support.family is not None
    use = ToolUse(TOOLS, TOOLS, required=required)
    constraint = constraint_of(use, support, text, thinking=False)
    vocabulary = GrammarVocabulary.of(text.table, text.facts)
    several = support.family.parallel
    for thoughts in ("", "hmm") if support.thoughts is not None else ("",):
        reply = written(family, message("Rome", several=several, thoughts=thoughts))
        reply = reply.removesuffix("<|call|>").rstrip("\n").replace("Rome", "Ro</x>me")
        if family == "mistral_list":
            reply = reply.replace(', "id": "call00000"', "").replace(', "id": "call00001"', "")
        if family == "gemma" and not special:
            reply = reply.replace("Ro</x>me", "Rome")
        matcher = vocabulary.matcher(constraint.grammar)
        matcher.consume(text.encode(reply, special=False))
        assert matcher.complete
    matcher = vocabulary.matcher(constraint.grammar)
    plain = ("<|channel|>final<|message|>" if family == "harmony" else "") + "Hello there"
    first = text.encode(plain, special=False)
    if required:
        assert not matcher.allowed()[text.encode("Hello", special=False)[0]]
    else:
        matcher.consume(first)
        assert matcher.complete


def test_a_grammar_allows_the_tools_of_the_choice_alone() -> None:
    text = codec("hermes")
    one = ToolUse(TOOLS, (NOW,), required=True, parallel=False)
    constraint = constraint_of(one, Support(None, FAMILIES["hermes"]), text, thinking=False)
    said = {walk(text, constraint.grammar, seed) or "" for seed in range(6)}
    blank = {"".join(one.split()) for one in said}
    assert blank == {'<tool_call>{"name":"now","arguments":{}}</tool_call>'}


def test_optional_arguments_are_written_in_any_number_once_each() -> None:
    text, support = codec("olmo"), Support(None, FAMILIES["olmo"])
    types = {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"enum": [1]}}
    one = (tool({"type": "object", "properties": types}, strict=False),)
    constraint = constraint_of(ToolUse(one, one, True, False), support, text, thinking=False)
    vocabulary, found = GrammarVocabulary.of(text.table, text.facts), list[str]()
    for some in itertools.product(("a=true", ""), ("b=null", ""), ("c=1", "")):
        found.append(", ".join(filter(None, some)))
        call = f"<function_calls>odd({found[-1]})</function_calls>"
        matcher = vocabulary.matcher(constraint.grammar)
        matcher.consume(text.encode(call, special=False))
        assert matcher.complete
    said = [walk(text, constraint.grammar, seed) for seed in range(8)]
    written = [one.split("(", 1)[1].split(")")[0] for one in said if one is not None]
    assert {one.replace(" ", "") for one in written} <= {one.replace(" ", "") for one in found}


def test_tools_that_take_too_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.runtime.tools.grammars.LATE_S", 0.0)
    text = codec("hermes")
    with pytest.raises(RequestError, match="0 of 2 tools were compiled within 0 s: send fewer"):
        constraint_of(ToolUse(TOOLS, TOOLS), support_of(text), text, thinking=False)


def tool(parameters: Any, *, strict: bool) -> dict[str, Any]:
    function = {"name": "odd", "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def test_an_odd_schema_refuses_a_request_only_if_it_is_strict() -> None:
    text, support = codec("hermes"), Support(None, FAMILIES["hermes"])
    for parameters in (
        {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
        {"$ref": "https://example.org/schema.json"},
        {"type": "string"},
        {"properties": 5},
    ):
        odd = (NOW, tool(parameters, strict=False))
        constraint = constraint_of(ToolUse(odd, odd, True), support, text, thinking=False)
        assert [one[:5] for one in constraint.relaxed] == ["odd: "]
        strict = (NOW, tool(parameters, strict=True))
        with pytest.raises(Refused) as refused:
            constraint_of(ToolUse(strict, strict, True), support, text, thinking=False)
        assert refused.value.place == 1


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("tools", [TOOLS, ()])
def test_the_grammar_of_an_answer_begins_after_thoughts(thinking: bool, tools: Any) -> None:
    text, use = codec("hermes"), ToolUse(tools, tools)
    answer = Constraint(
        grammar=of_schema({"enum": ["yes", "no"]}), engine=grammar_engine(), kind="json"
    )
    made = constraint_of(use, support_of(text), text, thinking=thinking, answer=answer)
    vocabulary = GrammarVocabulary.of(text.table, text.facts)

    def allows(reply: str) -> bool:
        matcher = vocabulary.matcher(made.grammar)
        try:
            matcher.consume(text.encode(reply, special=False))
        except RequestError:
            return False
        return matcher.complete

    thoughts = ("" if thinking else "<think>") + 'so "maybe"\n</think>\n\n'
    assert allows(thoughts + '"yes"')
    assert allows('"yes"') is not thinking
    assert not allows(thoughts + '"maybe"')
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert allows(thoughts + call) is bool(tools)


def test_events_hold_text_as_it_is() -> None:
    assert parser(Support(table()[0][0])).feed("a\n\nb") == (Text("a\n\nb"),)
