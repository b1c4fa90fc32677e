"""The replies of /v1/chat/completions and /v1/completions, through a real server and a scripted
target, whose own continuation is the oracle."""

import re
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from support.scripted import END, VOCABULARY, ScriptedTarget, continuation, logprobs
from support.web import CHAT, Api, Backend, api, backend

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "w5 w6"}]
PROMPT = (5, 6)


def words(tokens: Any) -> str:
    """The text of scripted tokens behind others."""
    return "".join(f" w{token}" for token in tokens if token != END)


def sample(prompt: tuple[int, ...], most: int, *, without_end: bool = False) -> list[int]:
    """A continuation, which must not end by itself before `most` tokens where a test is about
    something else."""
    tokens = continuation(prompt, most)
    assert not without_end or END not in tokens
    return tokens


def joined(events: list[Any], index: int = 0) -> str:
    """The text that the chunks of a stream say of one choice."""
    choices = [
        choice
        for event in events
        if event != "[DONE]"
        for choice in event["choices"]
        if choice["index"] == index
    ]
    return "".join(
        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        for choice in choices
    )


# -- chats -----------------------------------------------------------------------------------------


def test_a_chat_is_what_the_target_alone_would_say(server: Api) -> None:
    reply = server.chat(max_tokens=20)
    expected = continuation(CHAT, 20)
    assert reply["object"] == "chat.completion"
    assert reply["choices"][0]["message"] == {
        "role": "assistant",
        "content": words(expected),
        "refusal": None,
    }
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["prompt_tokens"] == len(CHAT)
    assert reply["usage"]["completion_tokens"] == len(expected)
    assert reply["usage"]["total_tokens"] == len(CHAT) + len(expected)


def test_a_chat_ends_where_the_target_ends_it(server: Api) -> None:
    expected = continuation(CHAT, 400)
    assert expected[-1] == END
    reply = server.chat(max_tokens=400)
    assert reply["choices"][0]["message"]["content"] == words(expected)
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_a_stream_says_the_same_in_openais_chunks(server: Api) -> None:
    events = server.stream(CHATS, messages=MESSAGES, max_tokens=20)
    chunks = events[:-1]
    assert events[-1] == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (
        len(chunks) - 1
    ) + ["length"]
    assert (
        len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks})
        == 1
    )
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert joined(events) == words(continuation(CHAT, 20))
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_comes_in_a_chunk_of_its_own_where_it_is_wanted(server: Api) -> None:
    *chunks, usage, done = server.stream(
        CHATS, messages=MESSAGES, max_tokens=20, stream_options={"include_usage": True}
    )
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 20


def test_every_chunk_counts_where_that_is_wanted(server: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.stream(CHATS, messages=MESSAGES, max_tokens=20, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 20


def test_system_messages_and_parts_are_read(server: Api) -> None:
    parts = [{"type": "text", "text": "w5"}, {"type": "text", "text": " w6"}]
    messages = [{"role": "system", "content": "w3"}, {"role": "user", "content": parts}]
    reply = server.ask(CHATS, messages=messages, max_tokens=10)
    assert reply["choices"][0]["message"]["content"] == words(continuation((1, 3, 1, 5, 6, 2), 10))


def test_max_completion_tokens_is_max_tokens(server: Api) -> None:
    assert server.chat(max_completion_tokens=3)["usage"]["completion_tokens"] == 3


def test_several_replies_have_their_own_indices_whole_and_streamed(server: Api) -> None:
    reply = server.chat(max_tokens=5, n=3)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert reply["usage"]["prompt_tokens"] == len(CHAT)
    assert reply["usage"]["completion_tokens"] == 15
    assert all(choice["metrics"]["completion_tokens"] == 5 for choice in reply["choices"])
    events = server.stream(CHATS, messages=MESSAGES, max_tokens=5, n=3)
    assert [joined(events, index) for index in range(3)] == [words(continuation(CHAT, 5))] * 3


def test_more_replies_than_are_decoded_at_a_time_all_come(server: Api) -> None:
    assert [choice["index"] for choice in server.chat(max_tokens=2, n=40)["choices"]] == list(
        range(40)
    )


def test_a_reply_says_what_its_draft_brought(server: Api) -> None:
    reply = server.chat(max_tokens=20)
    metrics, usage = reply["metrics"], reply["usage"]["completion_tokens_details"]
    assert metrics["accepted_tokens"] > 0
    assert usage["accepted_prediction_tokens"] == metrics["accepted_tokens"]
    assert (
        usage["rejected_prediction_tokens"]
        == metrics["drafted_tokens"] - metrics["accepted_tokens"]
    )
    told = metrics["speculative_decoding"]
    assert told["mean_acceptance_length"] == pytest.approx(
        1 + told["num_accepted_draft_tokens"] / told["num_spec_steps"]
    )
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"]
    assert (
        sum(length * count for length, count in enumerate(told["acceptance_histogram"]))
        == told["num_accepted_draft_tokens"]
    )


def test_a_request_may_do_without_its_draft_and_reads_the_same(server: Api) -> None:
    alone = server.chat(max_tokens=20, dovetail={"speculate": False})
    assert alone["metrics"]["drafted_tokens"] == 0
    assert alone["choices"][0]["message"] == server.chat(max_tokens=20)["choices"][0]["message"]


def test_chunks_say_which_tokens_were_drafted_where_that_is_wanted(server: Api) -> None:
    events = server.stream(CHATS, messages=MESSAGES, max_tokens=20, dovetail={"drafted": True})
    told = [event["choices"][0]["dovetail"] for event in events[1:-1]]
    assert [token for part in told for token in part["tokens"]] == continuation(CHAT, 20)
    assert "".join(text for part in told for text in part["texts"]) == joined(events)
    assert 0 < sum(drafted for part in told for drafted in part["drafted"]) < 20


# -- texts -----------------------------------------------------------------------------------------


def test_a_prompt_is_continued_whichever_form_it_has(server: Api) -> None:
    expected = words(continuation(PROMPT, 8))
    for prompt in ("w5 w6", ["w5 w6"], [5, 6], [[5, 6]]):
        reply = server.complete(prompt, max_tokens=8)
        assert reply["object"] == "text_completion"
        assert [choice["text"] for choice in reply["choices"]] == [expected]


def test_a_text_has_sixteen_tokens_where_it_is_not_said(server: Api) -> None:
    assert server.complete()["usage"]["completion_tokens"] == len(continuation(PROMPT, 16))


def test_several_prompts_are_answered_in_their_order(server: Api) -> None:
    reply = server.complete([[5, 6], [7], [8, 9, 10]], max_tokens=4, n=2)
    expected = [
        words(continuation(prompt, 4)) for prompt in (PROMPT, (7,), (8, 9, 10)) for _ in range(2)
    ]
    assert [choice["text"] for choice in reply["choices"]] == expected
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert reply["usage"]["prompt_tokens"] == 6


def test_a_streamed_text_has_no_opening_chunk(server: Api) -> None:
    events = server.stream(TEXTS, prompt=[5, 6], max_tokens=8)
    assert events[0]["choices"][0]["text"] != ""
    assert joined(events) == words(continuation(PROMPT, 8))
    assert events[-2]["choices"][0]["finish_reason"] == "length"


def test_a_stop_string_cuts_text_and_tokens(server: Api) -> None:
    said = sample(PROMPT, 10, without_end=True)
    stop = f"w{said[4]}"
    reply = server.complete([5, 6], max_tokens=10, stop=[stop, "never"], logprobs=0)
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == words(said[:4]) + " "
    assert [token.strip() for token in choice["logprobs"]["tokens"]] == [
        f"w{token}" for token in said[:5]
    ]
    assert joined(server.stream(TEXTS, prompt=[5, 6], max_tokens=10, stop=stop)) == choice["text"]


def test_a_stop_token_ends_and_what_ends_usually_need_not(server: Api) -> None:
    said = continuation(CHAT, 400)
    at = 5
    reply = server.chat(max_tokens=10, stop_token_ids=[said[at]])
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["choices"][0]["message"]["content"] == words(said[: said.index(said[at])])
    longer = server.chat(max_tokens=len(said) + 5, ignore_eos=True)
    assert longer["usage"]["completion_tokens"] == len(said) + 5


# -- log-probabilities -----------------------------------------------------------------------------


def test_log_probabilities_of_a_chat_are_the_targets(server: Api) -> None:
    said = sample(CHAT, 6, without_end=True)
    log = [*CHAT, *said]
    content = server.chat(max_tokens=6, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"][
        "content"
    ]
    expected = [logprobs(log, place, 3) for place in range(len(CHAT), len(log))]
    assert [entry["logprob"] for entry in content] == [scores.logprob for scores in expected]
    assert [[top["logprob"] for top in entry["top_logprobs"]] for entry in content] == [
        [p for _, p in scores.top] for scores in expected
    ]
    assert [[top["token"] for top in entry["top_logprobs"]] for entry in content] == [
        [f" w{t}" for t, _ in scores.top] for scores in expected
    ]
    assert "".join(entry["token"] for entry in content) == words(said)
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)


def test_streamed_log_probabilities_are_those_of_the_whole_reply(server: Api) -> None:
    whole = server.chat(max_tokens=12, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"][
        "content"
    ]
    events = server.stream(CHATS, messages=MESSAGES, max_tokens=12, logprobs=True, top_logprobs=2)
    parts = [event["choices"][0]["logprobs"] for event in events[:-1]]
    assert [entry for part in parts if part for entry in part["content"]] == whole


def test_an_echo_scores_the_prompt(server: Api) -> None:
    prompt = (5, 6, 7, 8, 9)
    reply = server.complete(list(prompt), max_tokens=1, echo=True, logprobs=1)["choices"][0]
    log = [*prompt, *continuation(prompt, 1)]
    told = reply["logprobs"]
    assert reply["text"] == words(log)[1:]
    assert told["token_logprobs"] == [
        None,
        *(logprobs(log, place, 1).logprob for place in range(1, len(log))),
    ]
    assert told["top_logprobs"][0] is None
    for place, top in enumerate(told["top_logprobs"][1:], 1):
        best, probability = logprobs(log, place, 1).top[0]
        assert top == {f" w{log[place]}": logprobs(log, place, 1).logprob, f" w{best}": probability}
    assert told["text_offset"] == [0, 2, 5, 8, 11, 14]


def test_a_prompt_can_be_scored_without_a_reply(server: Api) -> None:
    reply = server.complete("w5 w6 w7", max_tokens=0, echo=True, logprobs=2)
    assert reply["choices"][0]["text"] == "w5 w6 w7"
    assert len(reply["choices"][0]["logprobs"]["tokens"]) == 3
    assert reply["usage"]["completion_tokens"] == 0


def test_an_echo_is_streamed_before_the_reply(server: Api) -> None:
    whole = server.complete("w5 w6", max_tokens=5, echo=True, logprobs=1)["choices"][0]
    events = server.stream(TEXTS, prompt="w5 w6", max_tokens=5, echo=True, logprobs=1)
    parts = [
        event["choices"][0]["logprobs"] for event in events[:-1] if event["choices"][0]["logprobs"]
    ]
    assert joined(events) == whole["text"]
    assert [token for part in parts for token in part["tokens"]] == whole["logprobs"]["tokens"]
    assert [offset for part in parts for offset in part["text_offset"]] == whole["logprobs"][
        "text_offset"
    ]


FOREIGN = re.compile("Input should|validation|Field required|String should|valid string")
"""Words of a library's, which say neither the value nor the remedy."""


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a"] * 10**5}, "stop"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {str(VOCABULARY): 1}}, "logit_bias"),
        ({"logit_bias": {"w5": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
        ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"best_of": 2}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"echo": True}, "echo"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "w5 " * 600}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
    ],
)
def test_what_a_chat_cannot_have_is_refused_by_its_name(
    server: Api, fields: dict[str, Any], param: str
) -> None:
    error = server.refusal(CHATS, {"messages": MESSAGES, **fields})
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert not FOREIGN.search(error["message"]), error["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": "hot"}, 'temperature is "hot": send a number'),
        ({"temperature": -1}, "temperature is -1: send at least 0"),
        ({"n": 10**9}, "n is 1000000000: send at most 128"),
        ({"max_tokens": 10.5}, "max_tokens is 10.5: send a whole number"),
        ({"max_tokens": True}, "max_tokens is true: send a whole number"),
        ({"max_tokens": -2}, "max_tokens is -2: send at least -1"),
        ({"max_tokens": 1 << 63}, f"max_tokens is {1 << 63}: send at most {(1 << 63) - 1}"),
        ({"messages": []}, "messages is empty: send at least one item"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"seed": 1.5}, "seed is 1.5: send a whole number"),
        ({"stop": [""]}, "stop[0] is empty: send at least one character"),
        ({"logit_bias": {"w5": 1}}, 'logit_bias has the key "w5": send token ids as keys'),
        ({"stream": "perhaps"}, 'stream is "perhaps": send true or false'),
        (
            {"min_tokens": 5, "max_tokens": 4},
            "min_tokens (5) is more than max_tokens (4): lower one or raise the other",
        ),
    ],
)
def test_a_refusal_says_the_value_and_the_remedy(
    server: Api, fields: dict[str, Any], words: str
) -> None:
    assert server.refusal(CHATS, {"messages": MESSAGES, **fields})["message"] == words


@pytest.mark.parametrize(
    ("path", "fields", "param", "asked"),
    [
        (CHATS, {"max_tokens": 600}, "max_tokens", 600),
        (CHATS, {"max_completion_tokens": 509}, "max_completion_tokens", 509),
        (CHATS, {"max_tokens": 4, "max_completion_tokens": 600}, "max_completion_tokens", 600),
        (CHATS, {"max_tokens": 600, "stream": True, "n": 2}, "max_tokens", 600),
        (CHATS, {"min_tokens": 512}, "min_tokens", 512),
        (TEXTS, {"max_tokens": 600}, "max_tokens", 600),
    ],
)
def test_a_reply_that_cannot_fit_behind_its_prompt_is_refused_with_the_largest_that_does(
    server: Api, path: str, fields: dict[str, Any], param: str, asked: int
) -> None:
    prompts = {CHATS: {"messages": MESSAGES}, TEXTS: {"prompt": ["w5", "w5 w6 w7 w8"]}}
    error = server.refusal(path, {**prompts[path], **fields, "dovetail": {"fit": False}})
    length = {CHATS: len(CHAT), TEXTS: 4}[path]
    assert error["message"] == (
        f"the prompt has {length} tokens and {param} is {asked}, which is {length + asked - 512} "
        f"more than the context of 512 holds: send at most {512 - length}, or a shorter prompt"
    )
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_a_reply_may_fill_the_context_and_reports_a_lowered_max_tokens(server: Api) -> None:
    room = 512 - len(CHAT)
    replies = [
        server.chat(ignore_eos=True, **fields)
        for fields in (
            {"max_tokens": room},
            {"max_tokens": -1},
            {},
            {"max_tokens": 600, "dovetail": {"fit": True}},
            {"max_completion_tokens": 10**9},
        )
    ]
    assert [reply["usage"]["completion_tokens"] for reply in replies] == [room] * 5
    assert {reply["choices"][0]["finish_reason"] for reply in replies} == {"length"}
    assert [reply["metrics"].get("max_tokens") for reply in replies] == [None] * 3 + [room] * 2
    events = server.stream(CHATS, messages=MESSAGES, max_tokens=600, n=2)
    begun = [event["metrics"] for event in events if event != "[DONE]" and "metrics" in event]
    assert [metrics["max_tokens"] for metrics in begun] == [room] * 4
    texts = server.complete(["w5", "w5 w6 w7"], max_tokens=510, ignore_eos=True)["choices"]
    assert [choice["metrics"].get("max_tokens") for choice in texts] == [None, 509]
    error = server.refusal(TEXTS, {"prompt": "w5", "max_tokens": 600, "min_tokens": 512})
    assert (error["param"], error["code"]) == ("min_tokens", "context_length_exceeded")


def test_a_path_that_takes_another_method_says_which(server: Api) -> None:
    reply = server.client.get(CHATS)
    assert reply.status_code == 405
    assert reply.json()["error"]["message"] == f"GET {CHATS} is not served here: use POST"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal"])
def test_a_part_that_is_no_text_is_refused_in_one_sentence(server: Api, kind: str) -> None:
    content = [{"type": "text", "text": "w5"}, {"type": kind, kind: {}}]
    error = server.refusal(CHATS, {"messages": [{"role": "user", "content": content}]})
    assert error["param"] == "messages[0].content[1].type"
    assert error["message"] == (
        f"messages[0].content[1].type: a part of type '{kind}' cannot be read, since the model "
        "reads text only: send parts of type 'text'"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [VOCABULARY]}, "prompt"),
        ({"prompt": [1] * 600}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["w5"] * 200}, "prompt"),
        ({"prompt": ["w5"] * 100, "n": 2}, "n"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "w5", "suffix": "w6"}, "suffix"),
        ({"prompt": "w5", "logprobs": 21}, "logprobs"),
        ({"prompt": "w5", "max_tokens": -2}, "max_tokens"),
        ({}, "prompt"),
    ],
)
def test_what_a_text_cannot_have_is_refused_by_its_name(
    server: Api, fields: dict[str, Any], param: str
) -> None:
    assert server.refusal(TEXTS, fields)["param"] == param


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, "a"], 'prompt[1] is "a": send a whole number'),
        (["a", 1], "prompt[1] is 1: send a string"),
        ([[1], [2, "a"]], 'prompt[1][1] is "a": send a whole number'),
        ([1.5], "prompt[0] is 1.5: send a string, a whole number or a list"),
        ({"a": 1}, 'prompt is {"a": 1}: send a string or a list'),
    ],
)
def test_of_a_value_that_has_several_forms_the_wrong_part_is_named_with_what_it_may_be(
    server: Api, prompt: Any, message: str
) -> None:
    assert server.refusal(TEXTS, {"prompt": prompt})["message"] == message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'{"prompt": "w5", "temperature": NaN}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_what_is_no_body_is_refused(server: Api, body: bytes) -> None:
    reply = server.client.post(TEXTS, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    words = reply.json()["error"]["message"]
    whole = ("the body is not a JSON object", "the body is not valid JSON")
    assert words.startswith((*whole, "temperature is NaN: send a finite number", "the prompt has"))
    assert not FOREIGN.search(words), words


def test_what_means_nothing_is_ignored(server: Api) -> None:
    fields = {
        "user": "me",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "tools": [],
        "response_format": {"type": "text"},
        "unheard_of": None,
        "store": True,
    }
    assert server.chat(max_tokens=5, **fields)["usage"]["completion_tokens"] == 5


def test_another_model_is_not_found(server: Api) -> None:
    error = server.refusal(CHATS, {"messages": MESSAGES, "model": "gpt-4o"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert server.chat(max_tokens=2, model="scripted-target")["model"] == "scripted-target"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/opt/site-packages/dovetail/launch/demo/target", "demo"),
        ("/models/target", "target"),
        ("./Llama-3.2-1B/", "Llama-3.2-1B"),
        ("org/model", "org/model"),
    ],
)
def test_a_target_has_the_name_of_its_folder_and_the_embedded_one_its_own(
    model: str, name: str
) -> None:
    with backend(target=False) as house, api(house.address) as server:
        house.add(ScriptedTarget, "target", model=model)
        assert server.chat(max_tokens=2, model=name)["model"] == name


# -- the other routes ------------------------------------------------------------------------------


def test_models_are_listed_and_looked_up(server: Api) -> None:
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["id"] == "scripted-target"
    assert model["max_model_len"] == 512
    assert server.client.get("/v1/models/scripted-target").json() == model
    assert server.client.get("/v1/models/other/one").status_code == 404


def test_where_no_texts_are_kept_none_are_reported_as_forgotten(server: Api) -> None:
    reply = server.client.delete("/v1/lookup_memory")
    assert (reply.status_code, reply.json()) == (200, {"deleted": False})


def test_a_chat_template_is_given_what_the_request_has_for_it(server: Api) -> None:
    chat = {"messages": MESSAGES}
    for values in ({}, {"enable_thinking": True}):
        asked = {**chat, "chat_template_kwargs": values}
        assert server.ask("/tokenize", **asked) == server.ask("/tokenize", **chat)
    for name in ("messages", "add_generation_prompt", "tools"):
        refused = server.refusal(
            "/v1/chat/completions", {**chat, "chat_template_kwargs": {name: 1}}
        )
        assert refused["param"] == "chat_template_kwargs"
        assert f"{name} may not be among them" in refused["message"]


def test_texts_are_tokenized_and_back(server: Api) -> None:
    assert server.ask("/tokenize", prompt="w5 w6", return_token_strs=True) == {
        "count": 2,
        "max_model_len": 512,
        "tokens": [5, 6],
        "token_strs": ["w5", "w6"],
    }
    assert server.ask("/tokenize", messages=MESSAGES)["tokens"] == list(CHAT)
    assert server.ask("/tokenize", messages=MESSAGES, add_generation_prompt=False)[
        "tokens"
    ] == list(CHAT[:-1])
    assert server.ask("/detokenize", tokens=[5, 6, END])["prompt"] == "w5 w6 <end>"
    assert server.refusal("/detokenize", {"tokens": [VOCABULARY]})["param"] == "tokens"
    assert server.refusal("/tokenize", {})["param"] == "prompt"


def test_the_server_says_how_it_is(server: Api) -> None:
    assert server.client.get("/health").content == b""
    expected = {
        "ready": True,
        "status": "ready",
        "degraded": False,
        "missing": [],
        "faults": [],
        "loading": [],
    }
    state = server.client.get("/readyz").json()
    load = state.pop("load")
    assert state == expected
    assert (load["sessions"], load["queued"]) == (0, 0)
    assert server.client.get("/load").json() == {"server_load": 0}
    assert "version" in server.client.get("/version").json()
    assert server.client.get("/nowhere").json()["error"]["type"] == "not_found_error"
    assert server.client.get(CHATS).status_code == 405


def test_metrics_count_tokens_and_drafts(server: Api, house: Backend) -> None:
    before = {
        name: server.metric(name)
        for name in (
            "vllm:generation_tokens_total",
            "vllm:spec_decode_num_drafts_total",
            "dovetail_prompt_tokens_total",
        )
    }
    reply = server.chat(max_tokens=20)
    assert (
        server.metric("vllm:generation_tokens_total") - before["vllm:generation_tokens_total"] == 20
    )
    assert server.metric("dovetail_prompt_tokens_total") - before[
        "dovetail_prompt_tokens_total"
    ] == len(CHAT)
    steps = reply["metrics"]["speculative_decoding"]["num_spec_steps"]
    assert (
        server.metric("vllm:spec_decode_num_drafts_total")
        - before["vllm:spec_decode_num_drafts_total"]
        == steps
    )
    assert server.metric("vllm:time_to_first_token_seconds_count") > 0
    assert server.metric("vllm:inter_token_latency_seconds_count") > 0
    assert server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total") > 0
    assert server.metric("dovetail_up") == 1


def test_the_document_names_every_error_and_no_other(server: Api) -> None:
    document = server.client.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path
            assert {"200", "401"} <= operation["responses"].keys(), path
    assert {"400", "404", "413", "429", "500", "503", "504"} <= document["paths"][CHATS]["post"][
        "responses"
    ].keys()
    answers = document["paths"][CHATS]["post"]["responses"]
    for status in ("429", "503"):
        assert answers[status]["headers"]["Retry-After"]["schema"] == {"type": "integer"}
    assert document["components"]["schemas"]["ChatBody"]["properties"]["temperature"]


CHATTED = {"messages": MESSAGES, "max_tokens": 6}
CONTINUED = {"prompt": "w5 w6", "max_tokens": 6}
MORE = {
    "dovetail": {"drafted": True},
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "n": 2,
}


@pytest.mark.parametrize(
    ("path", "fields", "whole", "chunk"),
    [
        (CHATS, CHATTED, ChatCompletion, ChatCompletionChunk),
        (
            CHATS,
            {**CHATTED, **MORE, "logprobs": True, "top_logprobs": 2},
            ChatCompletion,
            ChatCompletionChunk,
        ),
        (TEXTS, CONTINUED, Completion, Completion),
        (TEXTS, {**CONTINUED, **MORE, "logprobs": 2}, Completion, Completion),
    ],
)
def test_whole_and_streamed_answers_are_of_openais_types(
    server: Api, path: str, fields: dict[str, Any], whole: type[BaseModel], chunk: type[BaseModel]
) -> None:
    """Beside their fields there are only ours."""
    own = {"metrics", *(("dovetail",) if "dovetail" in fields else ())}
    asked = {name: value for name, value in fields.items() if name != "stream_options"}
    assert unknown(whole.model_validate(server.ask(path, **asked), strict=True)) <= own
    assert server.refusal(path, {**asked, "n": 0}).keys() == {"message", "type", "param", "code"}
    *chunks, last = server.stream(path, **fields)
    assert last == "[DONE]"
    for told in chunks:
        for choice in told["choices"] if chunk is Completion else ():
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # which the type lacks
        assert unknown(chunk.model_validate(told, strict=True)) <= own


def unknown(value: Any) -> set[str]:
    """The fields of an answer, wherever in it, that its type does not have."""
    if isinstance(value, list):
        return set().union(*map(unknown, value))
    if not isinstance(value, BaseModel):
        return set()
    fields = (getattr(value, name) for name in type(value).model_fields)
    return set(value.model_extra or ()).union(*map(unknown, fields))
