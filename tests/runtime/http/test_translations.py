"""Requests of other APIs, translated into chats."""

import json
from typing import Any

import pytest

from dovetail.runtime.http.apis.anthropic import CountBody
from dovetail.runtime.http.apis.ollama import OllamaChatBody
from dovetail.runtime.http.apis.responses import ResponsesBody
from dovetail.runtime.http.apis.translation import arguments_of
from dovetail.runtime.http.errors import ApiError

HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "look"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "I must.",
        "tool_calls": [
            {
                "id": "abcdefgh1",
                "type": "function",
                "function": {"name": "read", "arguments": '{"path": "x"}'},
            }
        ],
    },
    {"role": "tool", "content": "empty", "tool_call_id": "abcdefgh1"},
    {"role": "user", "content": "go on"},
]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "read", "description": "d", "parameters": SCHEMA}}


def test_a_conversation_of_anthropic_s_api_becomes_a_chat() -> None:
    messages = CountBody.model_validate(
        {
            "messages": [
                {"role": "user", "content": "look"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "I must.", "signature": ""},
                        {"type": "text", "text": "I look."},
                        {
                            "type": "tool_use",
                            "id": "abcdefgh1",
                            "name": "read",
                            "input": {"path": "x"},
                        },
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "abcdefgh1", "content": "empty"},
                        {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
                    ],
                },
            ],
            "tools": [{"name": "read", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        }
    ).chat()
    assert messages["messages"] == HISTORY
    assert messages["tools"] == [TOOL]
    assert (messages["tool_choice"], messages["parallel_tool_calls"]) == ("required", False)


def test_a_conversation_of_the_responses_api_becomes_a_chat() -> None:
    responses, left_out = ResponsesBody.model_validate(
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
                {
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "I must."}],
                },
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "I look."}],
                },
                {
                    "type": "function_call",
                    "call_id": "abcdefgh1",
                    "name": "read",
                    "arguments": '{"path": "x"}',
                },
                {"type": "function_call_output", "call_id": "abcdefgh1", "output": "empty"},
                {"role": "user", "content": "go on"},
            ],
            "tools": [
                {"type": "function", "name": "read", "description": "d", "parameters": SCHEMA},
                {"type": "web_search"},
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
            ],
            "tool_choice": {"type": "function", "name": "read"},
        }
    ).chat()
    assert responses["messages"] == HISTORY
    assert responses["tools"] == [TOOL, {"type": "function", "function": {"name": "n__f"}}]
    assert left_out == ["web_search"]
    assert responses["tool_choice"] == {"type": "function", "function": {"name": "read"}}


def test_a_conversation_of_ollama_s_api_becomes_a_chat() -> None:
    function = {"name": "read", "arguments": {"path": "x"}}
    chat = OllamaChatBody.model_validate(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": "look"},
                {
                    "role": "assistant",
                    "content": "I look.",
                    "thinking": "I must.",
                    "tool_calls": [{"function": function}],
                },
                {"role": "tool", "content": "empty", "tool_name": "read"},
                {"role": "user", "content": "go on"},
            ],
            "tools": [TOOL],
        }
    ).chat()
    number = chat["messages"][2]["tool_call_id"]
    assert len(number) == 9
    assert json.loads(json.dumps(chat["messages"]).replace(number, "abcdefgh1")) == HISTORY
    assert chat["tools"] == [TOOL]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0. has 'item_reference'"),
        ({"input": "x", "conversation": "c"}, "conversation is not supported"),
        ({"input": "x", "truncation": "auto"}, "truncation is not supported: send disabled"),
        ({"input": "x", "tools": [{}]}, "tools.0. has no type"),
        ({"input": "x", "text": {"format": "json_object"}}, "text.format has no type: send text"),
        ({"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice has 'web_search'"),
    ],
)
def test_what_the_responses_api_cannot_serve_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words):
        ResponsesBody.model_validate(fields).chat()


def test_a_choice_of_tools_is_kept_without_functions() -> None:
    given = {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}
    chat, _ = ResponsesBody.model_validate(given).chat()
    assert (chat["tools"], chat["tool_choice"]) == (None, "required")


def test_a_result_of_a_tool_needs_its_call() -> None:
    body = {"model": "m", "messages": [{"role": "tool", "content": "x"}]}
    with pytest.raises(ApiError, match=r"messages\[0\] is a result without a call"):
        OllamaChatBody.model_validate(body).chat()


def test_an_error_in_content_names_the_field_of_the_request() -> None:
    body = ResponsesBody.model_validate({"input": [{"role": "user", "content": 5}]})
    with pytest.raises(ApiError, match="neither a string nor a list") as refused:
        body.chat()
    assert refused.value.param == "input"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"path": "x"}', {"path": "x"}),
        ('{"path": "x", "lines": [1, ', {"path": "x", "lines": [1]}),
        ("<parameter=path>\nx", {"INVALID_JSON": "<parameter=path>\nx"}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
        ('{"a": 1, "b": "x', {"a": 1}),
        ("", {}),
    ],
)
def test_arguments_are_an_object_whatever_the_model_wrote(
    text: str, arguments: dict[str, Any]
) -> None:
    assert arguments_of(text) == arguments


@pytest.mark.parametrize("calls", [5, [5], [{}], [{"function": "f"}], {"function": {"name": "f"}}])
def test_ollama_s_calls_of_another_form_are_refused_or_read(calls: Any) -> None:
    messages = [{"role": "assistant", "tool_calls": calls}]
    body = OllamaChatBody.model_validate({"model": "m", "messages": messages})
    if isinstance(calls, dict):
        assert body.chat()["messages"][0]["tool_calls"][0]["function"]["name"] == "f"
        return
    with pytest.raises(ApiError, match="tool_calls without a function"):
        body.chat()


@pytest.mark.parametrize("tools", [5, "x", [5], {"name": "f"}])
def test_a_namespace_whose_tools_are_no_list_of_objects_is_refused(tools: Any) -> None:
    given = {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": tools}]}
    with pytest.raises(ApiError, match="no list of objects"):
        ResponsesBody.model_validate(given).chat()
