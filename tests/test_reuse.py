"""Conversations with the embedded pair, in real processes: a turn that goes on from the last one is
answered as one that reads everything anew."""

from contextlib import nullcontext

import pytest

from dovetail.protocol.messages import Failed, Finished
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from dovetail.runtime.text.tokenizer import TextCodec
from support.cases import everyday
from support.patience import PATIENCE_S
from support.stacks import PROMPTS, running

TOKENS = 40
HEAD = {"draft.device": "cpu", "draft.kind": "dovetail"}
QUESTIONS = (" And then?", " Why is that so? Say it in other words.")


def answer(
    client: Client, prompt: tuple[int, ...], *, anew: bool, temperature: float, tree: TreeSettings
) -> Finished:
    """`anew`: the prompt is scored as well, and so all of it is read."""
    sampling = Sampling(temperature=temperature)
    return client.complete(
        client.submit(
            tokens=prompt,
            sampling=sampling,
            max_tokens=TOKENS,
            seed=3,
            end=(),
            tree=tree,
            scored=anew,
            logprobs=0 if anew else None,
        )
    )


@pytest.mark.parametrize("temperature", everyday([0.0, 1.0], 1.0))
def test_the_turns_of_a_conversation_are_the_same_whether_they_go_on_from_the_last_or_read_everything(  # noqa: E501
    client: Client, temperature: float
) -> None:
    described = client.describe()
    assert described.limits.kept > 0
    text = TextCodec(described.tokenizer.data, described.vocabulary)
    tree = TreeSettings(policy="dynamic", insist=True)
    log = text.encode_turns(PROMPTS[0])
    for question in ("", *QUESTIONS):
        prompt = (*log, *(text.encode(question) if question else ()))
        anew = answer(client, prompt, anew=True, temperature=temperature, tree=tree)
        again = answer(client, prompt, anew=False, temperature=temperature, tree=tree)
        assert again.result.token_ids == anew.result.token_ids
        assert again.margins == anew.margins
        assert anew.result.reused_tokens == 0
        if question:
            assert again.result.reused_tokens >= len(log) // 2
        assert again.result.accepted_tokens > 0
        log = (*prompt, *again.result.token_ids)


@pytest.mark.parametrize("draft", everyday(["small", "dovetail"], "small"))
def test_requests_at_once_that_begin_alike_read_that_once_and_are_answered_as_alone(
    client: Client, draft: str
) -> None:
    """All of a key: some as samples of one prompt, some that go another way, one that is
    cancelled."""
    with nullcontext(client) if draft == "small" else running(HEAD) as client:
        before = client.status()
        text = TextCodec((described := client.describe()).tokenizer.data, described.vocabulary)
        begins = text.encode_turns([" ".join(turns[0] for turns in PROMPTS[:8])])
        prompts = [(*begins, *text.encode(words)) for words in ("", "", " Once", *QUESTIONS)]
        tree = TreeSettings(policy="dynamic", insist=True)
        for temperature in (0.0, 1.0):
            alone = [
                answer(client, prompt, anew=True, temperature=temperature, tree=tree)
                for prompt in prompts
            ]
            asked = {"max_tokens": TOKENS, "seed": 3, "end": (), "tree": tree}
            sampling = Sampling(temperature=temperature)
            requests = [
                client.submit(tokens=prompt, sampling=sampling, **asked)  # type: ignore[arg-type]
                for prompt in prompts
            ]
            gone = client.submit(tokens=(*begins, 5), sampling=sampling, **asked)  # type: ignore[arg-type]
            client.cancel(gone)
            ends: dict[int, Finished] = {}
            while not ends.keys() >= {*requests}:
                reply = client.receive(PATIENCE_S)
                assert reply is not None
                assert not isinstance(reply, Failed) or reply.session == gone, reply
                if isinstance(reply, Finished):
                    ends[reply.request] = reply
            together = [ends[request] for request in requests]
            for one, wanted in zip(together, alone, strict=True):
                assert one.result.token_ids == wanted.result.token_ids
                assert one.margins == wanted.margins
            assert sum(one.result.reused_tokens >= len(begins) - 2 for one in together) >= 4
        status = client.status()
        assert (status.stale, status.failed) == (before.stale, before.failed)
