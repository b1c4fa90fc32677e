"""Reads a client's request into tokens, checked against its target's limits. Independent of
sessions and sockets."""

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Constraint, Submit
from dovetail.protocol.noise import random_seed, session_key
from dovetail.protocol.prefixes import digest_of
from dovetail.protocol.settings import misfit
from dovetail.runtime.engine.faults import one_line, reraise_exits
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.session.request import Request, begun, check_ids, check_least, too_long


def read_request(submit: Submit, target: Worker, client: str = "", sharing: str = "off") -> Request:
    """Return a client's request in tokens. Raises `RequestError` if it exceeds the target's limits.
    `client`: its key, empty over ipc; `sharing`: with whose requests it may share cached rows: key
    (the same owner's), all or off."""
    if submit.vocabulary not in ("", target.facts.digest):
        has, asked = target.facts.digest[:16], submit.vocabulary[:16]
        text = (
            f"the token ids are from the vocabulary {asked}, but the target {target.model} has "
            f"{has}: query the target and tokenize the prompt again"
        )
        raise RequestError("vocabulary", text)
    context = target.limits.context
    least = sum(map(target.spelling.least_tokens, (submit.text or "", *(submit.turns or ()))))
    prompt = _prompt(submit, target) if least < context else ()
    if max(least, len(prompt)) >= context:
        raise too_long(f"{len(prompt)}" if prompt else f"at least {least}", context)
    check_ids("the prompt", prompt, target.facts.size)
    _check_sampling(submit, target)
    seed = random_seed() if submit.seed is None else submit.seed
    owner = f"{client}/{submit.owner}"
    scope = scope_of(submit, owner, sharing)
    return Request(
        prompt=prompt,
        key=session_key(seed, submit.sample, prompt),
        seed=seed,
        sampling=submit.sampling,
        max_tokens=min(submit.max_tokens, context - len(prompt)),
        tree=submit.tree,
        end=target.facts.end if submit.end is None else submit.end,
        vocabulary_size=target.facts.size,
        stop=submit.stop,
        record=submit.record,
        progress=submit.progress,
        logprobs=submit.logprobs,
        scored=submit.scored,
        owner=owner,
        scope=scope,
        blocks=b"" if sharing == "off" else digest_of(scope),
        constraint=submit.constraint,
    )


def scope_of(submit: Submit, owner: str, sharing: str) -> str:
    """Return the scope in which a request shares cached rows; see `read_request`."""
    scope = "" if sharing == "all" else owner
    return f"{scope}\n{submit.salt}" if submit.salt else scope


def _check_sampling(submit: Submit, target: Worker) -> None:
    sampling = submit.sampling
    check_ids("logit_bias", (token for token, _ in sampling.logit_bias), target.facts.size)
    check_ids("end", submit.end or (), target.facts.size)
    if submit.scored and submit.logprobs is None:
        raise RequestError(
            "settings",
            "log-probabilities of the prompt were requested without those of tokens: also set "
            "the number of alternatives, 0 for none",
        )
    if (why := misfit(sampling, submit.tree)) is not None:
        raise RequestError("settings", why)
    if isinstance(submit.tree.thresholds, str) and submit.tree.thresholds:
        text = (
            f"tree.thresholds is the name of a file, {submit.tree.thresholds[:200]!r}, which "
            "only commands read: send the numbers in it"
        )
        raise RequestError("settings", text)
    check_least(sampling.min_tokens, submit.max_tokens)
    if submit.constraint is not None:
        _check_constraint(submit, submit.constraint, target)


def _check_constraint(submit: Submit, constraint: Constraint, target: Worker) -> None:
    if not target.obeys(constraint):
        has = target.hello.grammars or "no library for grammars"
        text = (
            f"the grammar was compiled by {constraint.engine}, and the target {target.name} has "
            f"{has}: install the same version on both machines"
        )
        raise RequestError("constraint", text)
    end = target.facts.end if constraint.grammar else ()
    if ignored := set(end).difference(end if submit.end is None else submit.end):
        text = f"a grammar ends with one of the model's end tokens, but {min(ignored)} does "
        raise RequestError("constraint", f"{text}not end this reply: add it to `end`")


def attempt(
    submit: Submit, target: Worker, client: str = "", sharing: str = "off"
) -> Request | RequestError:
    """Return the result or the error of `read_request`."""
    try:
        return read_request(submit, target, client, sharing)
    except RequestError as error:
        return error
    except BaseException as error:
        # a tokenizer is in effect a program from the checkpoint: a panic affects only this request
        reraise_exits(error)
        return RequestError("internal", f"the prompt could not be read: {one_line(error)}")


def _prompt(submit: Submit, target: Worker) -> tuple[int, ...]:
    given = [f for f in (submit.tokens, submit.text, submit.turns) if f is not None]
    if len(given) != 1:
        raise RequestError(
            "settings", "a request has a prompt in exactly one form: token ids, text or turns"
        )
    if submit.tokens is not None:
        prompt = submit.tokens
    elif submit.text is not None:
        prompt = target.text().encode(submit.text)
    else:
        prompt = target.text().encode_turns(submit.turns or ())
    return begun(prompt, target.facts.begin)
