"""A client's request in tokens, checked against what its target can hold. Knows no sessions and no sockets."""

import secrets

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Submit
from dovetail.protocol.noise import session_key
from dovetail.runtime.registry import Worker
from dovetail.runtime.session import Request
from dovetail.runtime.text import TextCodec


def read_request(submit: Submit, target: Worker) -> Request:
    """A client's request in tokens, within the limits of the target; `RequestError` names what does not fit."""
    prompt = _prompt(submit, target.text)
    context = target.limits.context
    if len(prompt) >= context:
        raise RequestError(
            "prompt_too_long", f"the prompt has {len(prompt)} tokens, the target {target.hello.model} holds {context}: shorten it to at most {context - 1}"
        )
    if (bad := next((t for t in prompt if t >= target.facts.size), None)) is not None:
        raise RequestError("settings", f"token id {bad} of the prompt is beyond the vocabulary of {target.facts.size}")
    seed = secrets.randbits(63) if submit.seed is None else submit.seed
    return Request(
        prompt=prompt,
        key=session_key(seed, 0, prompt),
        seed=seed,
        sampling=submit.sampling,
        max_tokens=min(submit.max_tokens, context - len(prompt)),
        tree=submit.tree,
        end=target.facts.end,
        vocabulary_size=target.facts.size,
        stop=submit.stop,
    )


def _prompt(submit: Submit, text: TextCodec) -> tuple[int, ...]:
    given = [f for f in (submit.tokens, submit.text, submit.turns) if f is not None]
    if len(given) != 1:
        raise RequestError("settings", "a request has a prompt in exactly one form: token ids, text or turns")
    if submit.tokens is not None:
        prompt = submit.tokens
    elif submit.text is not None:
        prompt = text.encode(submit.text)
    else:
        prompt = text.encode_turns(submit.turns or ())
    if not prompt and text.facts.begin is not None:
        prompt = (text.facts.begin,)
    if not prompt:
        raise RequestError("settings", "the prompt is empty, and the target has no token that begins a text: give it at least one token")
    return prompt
