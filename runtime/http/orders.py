"""Turns a body into token ids of its prompts, and a Submit for each reply. Pure; long prompts take
time. Whatever is invalid raises an `ApiError` that names the field."""

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import (
    MAX_ENDS,
    MAX_TEXT,
    MAX_TOKENS,
    Constraint,
    Submit,
    ThoughtBudget,
    grammar_engine,
)
from dovetail.protocol.noise import random_seed
from dovetail.protocol.settings import Sampling, SamplingSettings, TreeSettings
from dovetail.runtime.http.asked import RequestTarget
from dovetail.runtime.http.bodies import (
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    Decoding,
    TokenizeBody,
    Wishes,
)
from dovetail.runtime.http.errors import ApiError
from dovetail.runtime.session.request import begun, check_ids, check_least, too_long
from dovetail.runtime.text.tokenizer import NO_VALUES, against_values
from dovetail.runtime.tools.conversation import (
    Reading,
    check_support,
    is_thinking,
    reading_of,
    template_messages,
    thinking_values,
    tool_use,
)
from dovetail.runtime.tools.grammars import Refused, constraint_of
from dovetail.runtime.tools.support import support_of

COMPLETION_TOKENS = 16  # tokens of a text completion without `max_tokens`: OpenAI's default
OVERRIDES = (
    *("temperature", "top_p", "min_p", "min_tokens", "presence_penalty", "frequency_penalty"),
    "repetition_penalty",
)

Kind = Literal["chat", "text"]
ID_PREFIXES: Mapping[Kind, str] = {"chat": "chatcmpl", "text": "cmpl"}


@dataclass(frozen=True)
class Defaults:
    """The defaults of a request."""

    sampling: SamplingSettings
    tree: TreeSettings
    speculate: bool = True
    ahead: bool | None = None
    """True if drafting continues while the target verifies; None: if that pays off."""
    template: Mapping[str, Any] = field(default_factory=dict)  # values for the chat template
    fit: bool = True
    """False: refuse a max_tokens that does not fit into the context instead of lowering it."""
    special_tokens: bool = False
    """True: control tokens in messages are control tokens of the prompt."""
    reasoning: Literal["split", "inline"] = "split"
    """Whether thoughts are kept apart from the text of a reply."""
    reasoning_budget: int = -1
    """Tokens of a reply's thought; -1: no limit."""
    tools: Literal["constrained", "free"] = "constrained"
    """Whether a grammar keeps calls to the tools' schemas."""


@dataclass(frozen=True)
class Order:
    """A request in tokens: one Submit for each reply, grouped by prompt."""

    kind: Kind
    submits: tuple[Submit, ...]
    copies: int  # replies to each prompt
    stream: bool
    usage_chunk: bool
    usage_always: bool
    wishes: Wishes
    progress: bool = False  # whether a stream has the progress of its prompt
    logprobs: int | None = None  # the number of alternatives with log-probabilities for each token
    echo: tuple[str, ...] | None = None  # the prompts as text, if returned before the replies
    name: str = ""  # the id of the response, which is unguessable
    asked: int = 0  # the max_tokens of the request; 0 if it has none
    reading: Reading | None = None  # how the replies are read; None: as plain text
    created: int = 0  # when the request arrived, in seconds since 1970

    @property
    def echoed(self) -> bool:
        return self.echo is not None

    def under(self, constraint: Constraint) -> "Order":
        """Return the order with a grammar for all its replies."""
        update = {"constraint": constraint}
        return replace(self, submits=tuple(one.model_copy(update=update) for one in self.submits))

    def prompt(self, index: int) -> str:
        """Return the prompt's text, if it is returned before the reply; else empty."""
        return self.echo[index // self.copies] if self.echo is not None else ""


def chat_order(
    body: ChatBody,
    target: RequestTarget,
    defaults: Defaults,
    owner: str = "",
    answer: Constraint | None = None,
) -> Order:
    """Return the request of a chat completion. `answer`: the grammar that it has."""
    _check_best_of(body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            400, "top_logprobs needs logprobs: set logprobs to true", param="top_logprobs"
        )
    prompt, reading, constraint = _conversation(body, target, defaults, answer)
    most = getattr(body, _length_field(body)) or defaults.sampling.max_tokens
    _check_room(body, [prompt], target, defaults)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    order = _order(
        "chat", body, [prompt], target, defaults, owner=owner, most=most, logprobs=logprobs
    )
    order = order if constraint is None else order.under(constraint)
    return replace(order, reading=reading)


def completion_order(
    body: CompletionBody, target: RequestTarget, defaults: Defaults, owner: str = ""
) -> Order:
    """Return the request of a text completion."""
    _check_best_of(body)
    prompts = [_prompt(prompt, target) for prompt in _prompts(body)]
    if len(prompts) * body.copies > MAX_CHOICES:
        raise ApiError(
            400,
            f"{len(prompts)} prompts with n = {body.copies} make more than {MAX_CHOICES} replies: "
            "send several requests",
            param="n",
        )
    most = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    _check_room(body, prompts, target, defaults)
    echo = None
    if body.echo:
        echo = tuple(
            given if isinstance(given, str) else target.text.prompt_text(given)
            for given in _prompts(body)
        )
    return _order(
        "text",
        body,
        prompts,
        target,
        defaults,
        owner=owner,
        most=most,
        logprobs=body.logprobs,
        echo=echo,
    )


def tokens_of(body: TokenizeBody, target: RequestTarget, defaults: Defaults) -> tuple[int, ...]:
    """Return the token ids of a text or of messages."""
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise ApiError(400, "give either a prompt or messages", param="prompt")
    with _refusing(given[0]):
        if body.content is not None:
            return target.text.encode(body.content, special=body.add_special)
        if body.prompt is not None:
            return target.text.encode(body.prompt, special=body.add_special_tokens)
        text = _rendered(body, target, defaults, tools=body.tools, reply=body.add_generation_prompt)
        return target.text.encode_rendered(text)


def _order(
    kind: Kind,
    body: Decoding,
    prompts: Sequence[tuple[int, ...]],
    target: RequestTarget,
    defaults: Defaults,
    *,
    owner: str,
    most: int,
    logprobs: int | None,
    echo: tuple[str, ...] | None = None,
) -> Order:
    wishes = body.dovetail or Wishes()
    most = MAX_TOKENS if most < 0 else min(most, MAX_TOKENS)
    sampling = _sampling(body, target, defaults.sampling)
    if body.min_tokens is None:  # a default, which must not refuse a short reply
        least = min(sampling.min_tokens, most)
        sampling = sampling.model_copy(update={"min_tokens": least})
    with _refusing("min_tokens"):
        check_least(sampling.min_tokens, most)
    seed = random_seed() if body.seed is None else body.seed % (1 << 63)
    end = _end(body, target)

    def submit(prompt: tuple[int, ...], sample: int) -> Submit:
        return Submit(
            epoch=0,
            request=0,
            tokens=prompt,
            sampling=sampling,
            max_tokens=most,
            stop=body.stops,
            seed=seed,
            sample=sample,
            owner=owner,
            salt=body.cache_salt or "",
            end=end,
            vocabulary=target.described.vocabulary.digest,
            logprobs=logprobs,
            scored=echo is not None and logprobs is not None,
            tree=defaults.tree,
            speculate=defaults.speculate and wishes.speculate,
            ahead=defaults.ahead,
            progress=True,
        )

    return Order(
        kind=kind,
        submits=tuple(
            submit(prompt, sample) for prompt in prompts for sample in range(body.copies)
        ),
        copies=body.copies,
        stream=bool(body.stream),
        usage_chunk=body.usage_chunk,
        usage_always=body.usage_always,
        wishes=wishes,
        progress=bool(body.return_progress and body.stream),
        logprobs=logprobs,
        echo=echo,
        asked=getattr(body, _length_field(body)) or 0,
        name=f"{ID_PREFIXES[kind]}-{secrets.token_hex(16)}",
        created=int(time.time()),
    )


def _check_room(
    body: Decoding, prompts: Iterable[tuple[int, ...]], target: RequestTarget, defaults: Defaults
) -> None:
    """Refuse a min_tokens that does not fit, and such a max_tokens if it may not be lowered."""
    longest = max(map(len, prompts))
    room = target.context - longest
    wishes, named = body.dovetail or Wishes(), _length_field(body)
    if (defaults.fit if wishes.fit is None else wishes.fit) or not getattr(body, named):
        named = "min_tokens"
    asked = getattr(body, named)
    if asked is None or asked <= room:
        return
    raise ApiError(
        400,
        f"the prompt has {longest} tokens and {named} is {asked}, which is "
        f"{longest + asked - target.context} more than the context of {target.context} holds: "
        f"send at most {room}, or a shorter prompt",
        param=named,
        code="context_length_exceeded",
    )


def _length_field(body: Decoding) -> str:
    """Return the name of the field that limits the reply's length."""
    chat = isinstance(body, ChatBody) and body.max_completion_tokens is not None
    return "max_completion_tokens" if chat else "max_tokens"


def _check_best_of(body: Decoding) -> None:
    if body.best_of is not None and body.best_of != body.copies:
        text = (
            f"best_of is {body.best_of} and n is {body.copies}: replies are not ranked here, "
            "set n to the number of replies"
        )
        raise ApiError(400, text, param="best_of", code="unsupported_parameter")
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            400,
            "stream_options are for streams: set stream to true, or leave them out",
            param="stream_options",
        )


def _sampling(body: Decoding, target: RequestTarget, base: SamplingSettings) -> Sampling:
    """Return the processors of a request: its fields, and the settings for the others."""
    said = {name: value for name in OVERRIDES if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        said["top_k"] = max(0, body.top_k)
    if body.logit_bias is not None:
        with _refusing("logit_bias"):
            check_ids("logit_bias", map(int, body.logit_bias), target.described.vocabulary.size)
        said["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
        if len(said["logit_bias"]) < len(body.logit_bias):
            raise ApiError(
                400, "logit_bias names a token id twice: leave one out", param="logit_bias"
            )
    return Sampling(**{**{name: getattr(base, name) for name in Sampling.model_fields}, **said})


def _end(body: Decoding, target: RequestTarget) -> tuple[int, ...] | None:
    """Return the ids that end the reply, if they differ from the target's."""
    if not body.ignore_eos and not body.stop_token_ids:
        return None
    with _refusing("stop_token_ids"):
        size = target.described.vocabulary.size
        check_ids("stop_token_ids", body.stop_token_ids or (), size)
    own = () if body.ignore_eos else target.described.vocabulary.end
    ends = tuple(dict.fromkeys((*own, *(body.stop_token_ids or ()))))
    if len(ends) > MAX_ENDS:
        raise ApiError(
            400,
            f"{len(ends)} tokens would end the reply, {len(own)} of them the target's own, but the "
            f"limit is {MAX_ENDS}: name fewer in stop_token_ids",
            param="stop_token_ids",
        )
    return ends


# -- prompts ---------------------------------------------------------------------------------------


def _conversation(
    body: ChatBody, target: RequestTarget, defaults: Defaults, answer: Constraint | None
) -> tuple[tuple[int, ...], Reading | None, Constraint | None]:
    """Return the prompt of a chat, how its reply is read, and the grammar of the whole reply."""
    use = tool_use(body)
    support = support_of(target.text)
    check_support(use, support)
    with _refusing("messages"):
        text = _rendered(
            body, target, defaults, tools=use.shown or None, values=thinking_values(body)
        )
        prompt = _checked(target.text.encode_rendered(text), target)
    reading = reading_of(use, support, text, split=defaults.reasoning == "split")
    if use.required and answer is not None:
        why = "tool_choice requires a call, but the reply has a grammar: leave one of them out"
        raise ApiError(400, why, param="tool_choice")
    if use.callable and defaults.tools == "free":
        if use.required:
            why = "tool_choice cannot require a call without a grammar (http.tools is free)"
            raise ApiError(400, f"{why}: leave tool_choice out", param="tool_choice")
        use = replace(use, callable=())
    thinking, constraint = is_thinking(support.thoughts, text), answer
    if use.callable or (answer is not None and support.thoughts is not None):
        if body.ignore_eos:
            why = "a reply with tools ends where their grammar does: leave ignore_eos out"
            raise ApiError(400, why, param="ignore_eos")
        with _refusing("tools"):
            try:
                constraint = constraint_of(
                    use, support, target.text, thinking=thinking, answer=answer
                )
            except Refused as error:
                param, code = f"tools[{error.place}].function.parameters", "unsupported_schema"
                raise ApiError(400, f"{param}: {error}", param=param, code=code) from None
    return prompt, reading, _budgeted(constraint, body, target, defaults, thinking=thinking)


def _budgeted(
    constraint: Constraint | None,
    body: ChatBody,
    target: RequestTarget,
    defaults: Defaults,
    *,
    thinking: bool,
) -> Constraint | None:
    """Return a constraint with the budget of a reply's thought, if it has one that it can exceed.
    `thinking`: the prompt ends within the thought."""
    given, thoughts = body.thinking_token_budget, support_of(target.text).thoughts
    if thoughts is None and given is not None and given > 0:
        why = "this model writes no thoughts that are known here: leave thinking_token_budget out"
        raise ApiError(400, why, param="thinking_token_budget", code="unsupported_parameter")
    most = defaults.reasoning_budget if given is None else given
    if thoughts is None or not 0 <= most < target.context:
        return constraint
    own = ThoughtBudget(tokens=most, open=thoughts.open, close=thoughts.close, begun=thinking)
    free = Constraint(grammar="", engine=grammar_engine(), kind="reasoning")
    return (constraint or free).model_copy(update={"thoughts": own})


def _rendered(
    body: ChatBody | TokenizeBody,
    target: RequestTarget,
    defaults: Defaults,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    values: Mapping[str, Any] = NO_VALUES,
    reply: bool = True,
) -> str:
    """Return messages in the target's chat template."""
    messages = template_messages(body.messages or ())
    _check_length(_texts([messages, tools]), target)
    given = _template_values(body.chat_template_kwargs, target, defaults.template)
    text = target.text.render_messages(
        messages,
        tools=tools,
        reply=reply,
        values={**given, **values},
        special=defaults.special_tokens,
    )
    _check_length([text], target)
    return text


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts within a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


@contextmanager
def _refusing(param: str) -> Iterator[None]:
    """Turn a `RequestError` into the API error about a field."""
    try:
        yield
    except RequestError as error:
        if error.code == "internal":
            raise ApiError(500, str(error)) from None
        code = "context_length_exceeded" if error.code == "prompt_too_long" else None
        raise ApiError(400, str(error), param=param, code=code) from None


def _template_values(
    given: Mapping[str, Any] | None, target: RequestTarget, defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the additional variables of a request for the chat template, with the defaults."""
    if why_not := against_values(given or {}, target.described.vocabulary.template):
        raise ApiError(400, f"chat_template_kwargs: {why_not}", param="chat_template_kwargs")
    return {**defaults, **(given or {})}


def _prompts(body: CompletionBody) -> Sequence[str | list[int]]:
    """Return the prompts one by one, given in any of the four forms."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [given]
    return given


def _prompt(given: str | list[int], target: RequestTarget) -> tuple[int, ...]:
    with _refusing("prompt"):
        if not isinstance(given, str):
            return _checked(tuple(given), target)
        _check_length([given], target)
        return _checked(target.text.encode(given), target)


def _check_length(texts: Iterable[str], target: RequestTarget) -> None:
    """Refuse prompts that cannot fit before tokenizing them, which is slow for very long ones."""
    sizes = [(len(text), target.text.least_tokens(text)) for text in texts]
    least = sum(least for _, least in sizes)
    if least >= target.context or sum(size for size, _ in sizes) > MAX_TEXT:
        raise too_long(f"at least {least}", target.context)


def _checked(prompt: tuple[int, ...], target: RequestTarget) -> tuple[int, ...]:
    """Return a prompt that the target can read."""
    prompt = begun(prompt, target.described.vocabulary.begin)
    if len(prompt) >= min(target.context, MAX_TOKENS):
        raise too_long(f"{len(prompt)}", target.context)
    check_ids("the prompt", prompt, target.described.vocabulary.size)
    return prompt
