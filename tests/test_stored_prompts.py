"""Cached prompts that outlive the processes, with the embedded pair: after a restart a request that
begins with one is answered as by a service that reads everything."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail.protocol.messages import Finished
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from dovetail.runtime.text.tokenizer import TextCodec
from support.architectures import VARIED, write_tiny
from support.cases import everyday
from support.kernels import needs_kernels
from support.stacks import POLL_S, PROMPTS, running

BLOCKS = 6
TREE = TreeSettings(policy="dynamic", insist=True)
HEAD = {"draft.device": "cpu", "draft.kind": "dovetail"}
DRAFTS = {"none": {"draft.kind": "none"}, "small": {"draft.device": "cpu"}, "head": HEAD}


def prompt_of(client: Client, *more: str) -> tuple[int, ...]:
    described = client.describe()
    text = TextCodec(described.tokenizer.data, described.vocabulary)
    prompt = text.encode_turns([" ".join(turns[0] for turns in PROMPTS[:20])])
    prompt = prompt[: 64 * BLOCKS + 5]  # without a whole block in the reply
    return (*prompt, *(token for words in more for token in text.encode(words)))


def answer(client: Client, prompt: Sequence[int], owner: str = "", salt: str = "") -> Finished:
    wish: dict[str, Any] = {"max_tokens": 30, "seed": 3, "end": (), "tree": TREE}
    sampling = Sampling(temperature=1.0)
    return client.complete(
        client.submit(tokens=tuple(prompt), sampling=sampling, owner=owner, salt=salt, **wish)
    )


def wait_until_written(folder: Path) -> None:
    """Wait until each worker has written all blocks of the prompt."""
    while min(map(len, ([*one.glob("*.safetensors")] for one in folder.iterdir()))) < BLOCKS:
        time.sleep(POLL_S)


@pytest.mark.parametrize("draft", everyday(DRAFTS, "head"))
def test_after_a_restart_a_prompt_is_taken_from_disk_and_answered_as_if_it_were_read(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its owner only, and requests of the same salt."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = {"cache.disk": "100MB", "coordinator.journal": "off", **DRAFTS[draft]}
    with running(flags) as client:
        prompts = prompt_of(client), prompt_of(client, " Once")
        first = answer(client, prompts[0], "alice")
        assert (first.result.reused_tokens, first.result.reused_from) == (0, "")
        wait_until_written(tmp_path / "dovetail" / "prompts")
    with running(flags) as client:
        fresh = [answer(client, prompt, f"owner {place}") for place, prompt in enumerate(prompts)]
        fresh.append(answer(client, prompts[0], "alice", "salt"))
        again = [answer(client, prompt, "alice") for prompt in prompts]
        salted = answer(client, prompts[0], "alice", "salt")
    assert [one.result.reused_tokens for one in fresh] == [0, 0, 0]
    assert salted.result.reused_from == "session"
    assert [one.result.reused_from for one in again] == ["disk", "session"]
    assert again[0].result.reused_tokens == 64 * BLOCKS
    for one, wanted in zip((*again, first), (*fresh[:2], fresh[0]), strict=True):
        assert one.result.token_ids == wanted.result.token_ids
        assert one.margins == wanted.margins
        assert one.result.accepted_tokens > 0 or draft == "none"


@needs_kernels
def test_a_target_with_states_goes_on_from_the_last_whole_block_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kind = "qwen3_5_text"
    write_tiny(kind, tmp_path / "model", **(VARIED[kind] | {"max_position_embeddings": 1024}))
    flags = {"target.model": str(tmp_path / "model"), "target.weights": "fp32"}
    flags |= {"draft.kind": "ngram", "cache.disk": "100MB", "coordinator.journal": "off"}
    prompt = tuple(2 + place * place % 41 for place in range(64 * BLOCKS + 30))
    longer = (*prompt, 7, 8, 9)
    with running(flags) as client:
        answer(client, prompt, "alice")
        folder = tmp_path / "dovetail" / "prompts"
        while len([*folder.glob("*/*.safetensors")]) <= BLOCKS:
            time.sleep(POLL_S)
    with running(flags) as client:
        fresh, again = (answer(client, longer, owner) for owner in ("bob", "alice"))
    for path in folder.glob("*/*.safetensors"):
        path.write_bytes(path.read_bytes()[:-9])
    with running(flags) as client:
        last = answer(client, longer, "alice")
        while not (damaged := sum(one.damaged_blocks for one in client.status().workers)):
            time.sleep(POLL_S)
    assert (again.result.reused_from, again.result.reused_tokens) == ("disk", 64 * BLOCKS)
    assert (fresh.result.reused_tokens, again.margins) == (0, fresh.margins)
    assert again.result.token_ids == fresh.result.token_ids == last.result.token_ids
    assert (last.result.reused_tokens, damaged) == (0, 1)
