"""Fields of other servers: what would change a reply and is not done is refused by its name,
whatever it is called; what changes none is let pass."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from dovetail.runtime.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from dovetail.runtime.http.constraints import wanted
from dovetail.runtime.http.errors import ApiError, complaint
from dovetail.runtime.http.fields import BENIGN, INSTEAD, RENAMED, UNSERVED

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
TEXT: dict[str, Any] = {"prompt": "hello"}
ASKED: dict[str, Any] = {
    # OpenAI's
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy"},
    "prediction": {"type": "content", "content": "x"},
    "moderation": {"model": "omni-moderation-latest"},
    "web_search_options": {},
    "reasoning_effort": "high",
    "verbosity": "low",
    # llama-server's
    "samplers": ["top_k"],
    "typical_p": 0.9,
    "top_n_sigma": 1.0,
    "mirostat": 2,
    "xtc_probability": 0.5,
    "dry_multiplier": 0.8,
    "dynatemp_range": 0.5,
    "repeat_last_n": 16,
    "n_probs": 3,
    "min_keep": 5,
    "t_max_predict_ms": 10,
    "lora": [{"id": 0, "scale": 1.0}],
    "image_data": [{"data": "", "id": 1}],
    "return_tokens": True,
    # vLLM's
    "use_beam_search": True,
    "length_penalty": 0.5,
    "bad_words": ["a"],
    "allowed_token_ids": [1],
    "logits_processors": ["a.b"],
    "chat_template": "{{ x }}",
    "documents": [{"text": "x"}],
    "add_generation_prompt": False,
    "continue_final_message": True,
    "truncate_prompt_tokens": 5,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "prompt_logprobs": 1,
    # SGLang's
    "stop_regex": ["a"],
    "min_new_tokens": 3,
    "custom_logit_processor": "x",
    "lora_path": "x",
    "structural_tag": "x",
    # TGI's, Ollama's, routers'
    "do_sample": True,
    "watermark": True,
    "truncate": 5,
    "adapter_id": "x",
    "top_n_tokens": 4,
    "options": {"num_ctx": 5},
    "format": "json",
    "top_a": 0.5,
    "transforms": ["middle-out"],
    "thinking": {"type": "enabled"},
    # nobody's
    "gramar": "x",
    "Temperature": 0.0,
    "temprature": 0.0,
    "stop_word": "x",
    "": 1,
    "x" * 500: 1,
}


@pytest.mark.parametrize(
    ("kind", "body", "name"),
    [
        pytest.param(kind, body, name, id=f"{label}-{name[:40] or 'no name'}")
        for label, kind, body in (("chat", ChatBody, CHAT), ("text", CompletionBody, TEXT))
        for name in ASKED
        if name not in kind.model_fields
    ],
)
def test_what_would_change_a_reply_and_is_not_done_is_refused_by_its_name(
    kind: type[BaseModel], body: dict[str, Any], name: str
) -> None:
    with pytest.raises(ApiError) as refused:
        kind.model_validate({**body, name: ASKED[name]})
    assert refused.value.status == 400
    assert refused.value.param == name[:64]
    assert refused.value.code in ("unsupported_parameter", "unknown_parameter")


@pytest.mark.parametrize(
    ("kind", "body"), [(ChatBody, CHAT), (CompletionBody, TEXT)], ids=["chat", "text"]
)
def test_what_asks_for_nothing_is_let_pass(kind: type[BaseModel], body: dict[str, Any]) -> None:
    for name, nothings in UNSERVED.items():
        for nothing in (None, *nothings):
            found = kind.model_validate({**body, name: nothing}).model_dump(exclude={name})
            assert found == kind.model_validate(body).model_dump(exclude={name}), name
    more = {**dict.fromkeys(BENIGN, "x"), "unheard_of": None}
    assert kind.model_validate({**body, **more}) == kind.model_validate(body)


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (ChatBody, {**CHAT, "prompt": "x"}, "prompt"),
        (CompletionBody, {**TEXT, "messages": []}, "messages"),
        (CompletionBody, {**TEXT, "max_completion_tokens": 5}, "max_completion_tokens"),
        (CompletionBody, {**TEXT, "top_logprobs": 5}, "top_logprobs"),
        (ChatBody, {**CHAT, "echo": True}, "echo"),
        (ChatBody, {**CHAT, "suffix": "x"}, "suffix"),
        (ChatBody, {**CHAT, "stream": True, "stream_options": {"usage": True}}, "stream_options"),
        (ChatBody, {**CHAT, "dovetail": {"draft": True}}, "dovetail"),
        (
            ChatBody,
            {"messages": [{"role": "assistant", "content": "x", "prefix": True}]},
            "messages",
        ),
        (ChatBody, {"messages": [{"role": "user", "content": "x", "images": ["x"]}]}, "messages"),
        (
            ChatBody,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "x", "image_url": "x"}]}
                ]
            },
            "messages",
        ),
        (TokenizeBody, {"text": "x"}, "text"),
        (DetokenizeBody, {"tokens": [1], "skip_special_tokens": False}, "skip_special_tokens"),
    ],
)
def test_so_is_what_another_path_or_a_part_of_a_body_knows(
    kind: type[BaseModel], body: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as refused:
        kind.model_validate(body)
    assert refused.value.param == param


@pytest.mark.parametrize("name", INSTEAD)
@pytest.mark.parametrize(
    ("kind", "body"), [(ChatBody, CHAT), (CompletionBody, TEXT)], ids=["chat", "text"]
)
def test_a_field_that_has_another_name_here_is_refused_with_that_name(
    kind: type[BaseModel], body: dict[str, Any], name: str
) -> None:
    with pytest.raises(ApiError) as refused:
        kind.model_validate({**body, name: 3})
    assert f"send {INSTEAD[name]}" in str(refused.value)
    served = set(ChatBody.model_fields) | set(CompletionBody.model_fields)
    assert name not in served
    first = INSTEAD[name].split(",")[0]
    assert first in served or " " in first


@pytest.mark.parametrize(
    ("kind", "body"), [(ChatBody, CHAT), (CompletionBody, TEXT)], ids=["chat", "text"]
)
def test_a_field_of_another_server_with_the_same_meaning_is_accepted(
    kind: type[BaseModel], body: dict[str, Any]
) -> None:
    values: dict[str, Any] = {"max_tokens": 5, "repetition_penalty": 1.5, "stop": ["x"]}
    values |= {"seed": 7, "thinking_token_budget": 5}
    for name, here in RENAMED.items():
        if here not in kind.model_fields:  # completions have no thoughts
            with pytest.raises(ApiError, match=f"{here} is not supported"):
                kind.model_validate({**body, name: 5})
            continue
        read = kind.model_validate({**body, name: values[here]})
        assert read == kind.model_validate({**body, here: values[here]})
        with pytest.raises(ApiError, match=f"{name} and {here} mean the same, but differ"):
            kind.model_validate({**body, name: values[here], here: 9})


def test_a_window_of_penalties_is_refused_where_it_would_matter() -> None:
    for window, accepted in ((64, False), (0, False), (-1, True)):
        fields = {**TEXT, "repeat_penalty": 1.5, "repeat_last_n": window}
        if accepted:
            CompletionBody.model_validate(fields)
            continue
        with pytest.raises(ApiError, match="repeat_last_n is not supported"):
            CompletionBody.model_validate(fields)
        CompletionBody.model_validate({**fields, "repeat_penalty": 1})


def test_a_reply_may_be_sent_back_as_it_came() -> None:
    reply: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "reasoning_content": None,
        "name": "x",
    }
    body = ChatBody.model_validate({"messages": [*CHAT["messages"], reply, *CHAT["messages"]]})
    message = body.messages[1]
    assert (message.content, message.name, message.calls, message.thoughts) == ("x", "x", [], None)


def test_a_choice_with_a_lone_surrogate_is_refused() -> None:
    body = CompletionBody.model_validate({**TEXT, "guided_choice": ["\ud800"]})
    with pytest.raises(ApiError, match=r"guided_choice: .* lone surrogates"):
        wanted(body)


def test_the_error_about_a_tool_s_name_says_what_a_name_is() -> None:
    wrong = {**CHAT, "tools": [{"type": "function", "function": {"name": "a b"}}]}
    with pytest.raises(ValidationError) as refused:
        ChatBody.model_validate(wrong)
    said = complaint(refused.value.errors()[0])
    assert said.startswith(' is "a b": send a text that matches ^[A-Za-z0-9_.:/-]')
