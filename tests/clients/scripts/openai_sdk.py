"""openai-python: every call that the API has, typed errors, streaming, and the helper that gathers
a stream. Run in an environment that has it."""

import asyncio
import contextlib
import json
import os
import typing
from collections.abc import Callable

import openai
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

URL, MODEL = os.environ["DOVETAIL_URL"], os.environ["DOVETAIL_MODEL"]
SKY = [{"role": "user", "content": "Why is the sky blue?"}]
client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)


def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def chat() -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=SKY, max_tokens=24, temperature=0, seed=1
    )
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content
    usage = reply.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details.accepted_prediction_tokens > 0
    stream = client.chat.completions.create(
        model=MODEL,
        messages=SKY,
        max_tokens=24,
        temperature=0,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == reply.choices[0].message.content
    assert (
        chunks[-1].usage == usage or chunks[-1].usage.completion_tokens == usage.completion_tokens
    )
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][
        -1
    ] == reply.choices[0].finish_reason


def samples() -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=SKY, max_tokens=16, temperature=1, seed=5, n=3
    )
    again = client.chat.completions.create(
        model=MODEL, messages=SKY, max_tokens=16, temperature=1, seed=5, n=3
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert [choice.message.content for choice in reply.choices] == [
        choice.message.content for choice in again.choices
    ]
    assert len({choice.message.content for choice in reply.choices}) > 1


def logprobs() -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=SKY, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens or reply.choices[0].finish_reason == "stop"
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in content)
    assert all(token.logprob == token.top_logprobs[0].logprob for token in content), (
        "at temperature 0 the choice is the likeliest"
    )
    echoed = client.completions.create(
        model=MODEL, prompt="The sky is blue", max_tokens=1, temperature=0, logprobs=2, echo=True
    )
    assert echoed.choices[0].text.startswith("The sky is blue")
    assert echoed.choices[0].logprobs.token_logprobs[0] is None
    assert len(echoed.choices[0].logprobs.tokens) == echoed.usage.prompt_tokens + 1


def text() -> None:
    reply = client.completions.create(
        model=MODEL, prompt=["Once upon", "A cat"], max_tokens=8, temperature=0, stop=["\n\n"]
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    streamed = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(
            model=MODEL, prompt="Once upon", max_tokens=8, temperature=0, stream=True
        )
    )
    assert streamed == reply.choices[0].text


def errors() -> None:
    for call, kind, param in (
        (
            lambda: client.chat.completions.create(model="gpt-4", messages=SKY),
            openai.NotFoundError,
            None,
        ),
        (
            lambda: client.chat.completions.create(model=MODEL, messages=SKY, temperature=-1),
            openai.BadRequestError,
            "temperature",
        ),
        (
            lambda: client.chat.completions.create(
                model=MODEL, messages=SKY, tools=[{"type": "function", "function": {"name": "f"}}]
            ),
            openai.BadRequestError,
            "tools",
        ),
        (
            lambda: client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "word " * 5000}]
            ),
            openai.BadRequestError,
            None,
        ),
    ):
        body = refused(call, kind).body
        assert body["message"], body
        assert param is None or body["param"] == param, body


USUAL = {
    "frequency_penalty": 0,
    "logit_bias": {},
    "metadata": {},
    "modalities": ["text"],
    "n": 1,
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "prompt_cache_key": "x",
    "response_format": {"type": "text"},
    "safety_identifier": "x",
    "service_tier": "auto",
    "store": False,
    "tool_choice": "none",
    "tools": [],
    "top_p": 1,
    "user": "x",
    "verbosity": "medium",
}
"""Fields that ask for nothing that is not done anyway, as programs send them."""


def fields() -> None:
    """Every field that the library knows is known here: done, let pass where it asks for nothing,
    or refused as not supported."""
    expected = client.chat.completions.create(
        model=MODEL, messages=SKY, max_tokens=8, temperature=0
    )
    for usual in (USUAL, dict.fromkeys(USUAL)):
        reply = client.chat.completions.create(
            model=MODEL, messages=SKY, max_tokens=8, temperature=0, **usual
        )
        assert reply.choices[0].message.content == expected.choices[0].message.content
    for params, create in (
        (
            chat_params.CompletionCreateParamsBase,
            lambda extra: client.chat.completions.create(
                model=MODEL, messages=SKY, max_tokens=1, extra_body=extra
            ),
        ),
        (
            text_params.CompletionCreateParamsBase,
            lambda extra: client.completions.create(
                model=MODEL, prompt="x", max_tokens=1, extra_body=extra
            ),
        ),
    ):
        for name in typing.get_type_hints(params):
            create({name: None} if name not in ("model", "messages", "prompt") else {})
            with contextlib.suppress(openai.BadRequestError, openai.NotFoundError):
                create({name: {"unheard": "of"}})
                continue
            error = refused(
                lambda name=name, create=create: create({name: {"unheard": "of"}}),
                openai.APIStatusError,
            )
            assert not error.body["message"].startswith(f"{name} is not a known field"), error.body


def refused(call: Callable[[], object], kind: type[openai.APIStatusError]) -> openai.APIStatusError:
    """The error that a call ends with."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def gathered() -> None:
    """The helper of the library that assembles a stream; it raises where a reply was cut by its
    length."""
    with client.chat.completions.stream(
        model=MODEL, messages=SKY, max_tokens=256, temperature=0
    ) as stream:
        for _ in stream:
            pass
        with contextlib.suppress(openai.LengthFinishReasonError):
            assert stream.get_final_completion().choices[0].message.content


async def together() -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as several:
        replies = await asyncio.gather(
            *(
                several.chat.completions.create(
                    model=MODEL, messages=SKY, max_tokens=12, temperature=0
                )
                for _ in range(6)
            )
        )
        assert len({reply.choices[0].message.content for reply in replies}) == 1
        stream = await several.chat.completions.create(
            model=MODEL, messages=SKY, max_tokens=256, temperature=0, stream=True
        )
        async for _ in stream:
            break
        await stream.close()


for part in (models, chat, samples, logprobs, text, errors, fields, gathered):
    part()
asyncio.run(together())
print(
    json.dumps(
        {
            "version": openai.__version__,
            "what": "chat, text, streams, usage, n, seed, logprobs, echo, stop, typed errors, "
            "every field, stream helper, async, a stream left early",
        }
    )
)
