"""A prompt that is read in parts, by themselves or in passes with other sessions' trees, is the
same bytes as one that is read at once, and so is what it shares passes with."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol.errors import RequestError, StaleError
from dovetail.protocol.messages import Opened, Read, Reading, ReadItem, Reads, VerifyItem
from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import DraftSettings, Sampling, TargetSettings, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.serving.open_target import open_target_worker
from dovetail.workers.sessions.opener import ReadingStep
from dovetail.workers.sessions.results import First, Part, ScoredPart, Unread, Verdict
from dovetail.workers.verifier import Verifier
from support.architectures import VOCABULARY as TINY_VOCABULARY
from support.architectures import write_tiny
from support.kernels import needs_kernels
from support.models import VOCABULARY, cache_row
from support.opening import opening

pytestmark = needs_kernels

TREE = TreeSettings(policy="dynamic", gamma=12, depth=4, width=4)
MOST = min(VOCABULARY, TINY_VOCABULARY)
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=1.0, repetition_penalty=1.2)}


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("recurrent") / "model"
    write_tiny("qwen3_5_text", folder, max_position_embeddings=256)
    return load_language_model(str(folder), weights="fp32", device="cpu")


def reads_of(model: LanguageModel) -> Reads:
    return Reads(
        taps=(0, 1),
        width=model.hidden_size,
        dtype="bfloat16",
        vocabulary_size=model.vocabulary_size,
    )


def order(model: LanguageModel, number: int, prompt: Sequence[int], **fields: Any) -> Any:
    about = {"features": reads_of(model), "features_from": 0, "logprobs": 2, **fields}
    key = session_key(7, 0, tuple(prompt))
    return opening(number, prompt, key=key, capacity=90, tree=TREE, **about)


@dataclass
class Told:
    """The results of a prefill: features, scores, rows that are done, and the first token."""

    features: list[torch.Tensor] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    done: int = 0
    first: First | None = None

    def hear(self, steps: "Sequence[ReadingStep]") -> None:
        for step in steps:
            match step:
                case Part():
                    assert step.start == sum(map(len, self.features))
                    self.features.append(step.features)
                case ScoredPart():
                    assert step.start == 1 + len(self.scores)
                    self.scores += step.logprobs
                case Unread():
                    assert self.done <= step.done
                    self.done = step.done
                case First():
                    self.first = step

    @property
    def bytes(self) -> tuple[Any, ...]:
        assert self.first is not None
        features = torch.cat(self.features).view(torch.uint8).numpy().tobytes()
        return features, self.scores, self.first


@dataclass
class Other:
    """A session that runs, of which the tokens that will come are known."""

    log: list[int]
    prompt: int
    coming: Sequence[int]
    round: int = 0

    def item(self, rng: random.Random) -> VerifyItem:
        """Return the next round of this session: a tree with right nodes and wrong ones."""
        self.round += 1
        tokens, parents, above = list[int](), list[int](), -1
        place = len(self.log) - self.prompt
        for right in self.coming[place : place + rng.randint(0, 3)]:
            tokens += [(right + 1) % MOST, right]
            parents += [above, above]
            above = len(tokens) - 1
        return VerifyItem(
            session=2,
            round=self.round,
            prefix=len(self.log),
            tokens=tuple(tokens),
            parents=tuple(parents),
        )

    def take(self, item: VerifyItem, verdict: Verdict | RequestError) -> None:
        assert isinstance(verdict, Verdict)
        path = verdict.item.accepted
        self.log += [*(item.tokens[node] for node in path), verdict.item.bonus]
        reply = self.log[self.prompt :]
        assert reply == list(self.coming[: len(reply)])


def alone(
    model: LanguageModel, prompt: Sequence[int], sampling: Sampling, tokens: int
) -> list[int]:
    """The reply of a session that nobody else is beside, token by token."""
    verifier, log = Verifier(model, Spans()), list(prompt)
    *_, first = verifier.open(order(model, 2, prompt, sampling=sampling))
    assert isinstance(first, First)
    log.append(first.token)
    for round in range(1, tokens):
        item = VerifyItem(session=2, round=round, prefix=len(log), tokens=(), parents=())
        (verdict,) = verifier.verify([item])
        assert isinstance(verdict, Verdict)
        log.append(verdict.item.bonus)
    return log[len(prompt) :]


def rows_of(verifier: Verifier, number: int) -> torch.Tensor:
    cache = verifier._sessions[number].cache
    return torch.stack([cache_row(cache, slot) for slot in range(cache.length)])


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", ["llama", "recurrent"])
def test_a_prompt_that_is_read_in_parts_beside_a_stream_is_the_same_bytes(
    kind: str, sampling: str, request: pytest.FixtureRequest
) -> None:
    model: LanguageModel = request.getfixturevalue(kind)
    drawn = SAMPLINGS[sampling]
    stream = [3, 9, 4, 11, 5]
    coming = alone(model, stream, drawn, 60)

    @given(seed=st.integers(0, 1 << 32), scored=st.booleans())
    @settings(deadline=None, max_examples=6)
    def check(seed: int, scored: bool) -> None:
        rng = random.Random(seed)
        prompt = [rng.randrange(3, MOST) for _ in range(rng.randint(1, 60))]
        whole, parts = Told(), Told()
        undisturbed = Verifier(model, Spans())
        about = {"sampling": drawn, "scored": scored}
        whole.hear([*undisturbed.open(order(model, 1, prompt, **about))])
        verifier, other = Verifier(model, Spans()), Other([*stream], len(stream), coming)
        *_, first = verifier.open(order(model, 2, stream, sampling=drawn))
        assert isinstance(first, First)
        other.log.append(first.token)
        parts.hear([*verifier.open(order(model, 1, prompt, read=rng.randint(0, 9), **about))])
        while parts.first is None:
            read = ReadItem(session=1, round=0, start=parts.done, rows=rng.randint(1, 9))
            verifier.check_read(read)
            if rng.random() < 0.3 or len(other.log) > 50:
                parts.hear([*verifier.read(read)])
                continue
            item = other.item(rng)
            verifier.check(item)
            (verdict,), (steps,) = verifier.verify_and_read([item], {}, [read])
            other.take(item, verdict)
            assert not isinstance(steps, RequestError)
            parts.hear(steps)
        assert parts.bytes == whole.bytes
        if kind == "llama":
            assert torch.equal(rows_of(verifier, 1), rows_of(undisturbed, 1))

    check()


def test_features_that_are_computed_anew_in_parts_are_the_same(llama: LanguageModel) -> None:
    prompt, verifier = range(3, 43), Verifier(llama, Spans())
    whole = Told()
    whole.hear([*verifier.open(order(llama, 1, prompt, sampling=Sampling()))])
    reads = reads_of(llama)
    again = Told()
    again.hear([*verifier.refeed(1, reads, 0, 41, round=1, rows=7)])
    while again.done and sum(map(len, again.features)) < 40:
        again.hear([*verifier.read(ReadItem(session=1, round=1, start=again.done, rows=11))])
    assert torch.equal(torch.cat(again.features), torch.cat(whole.features))
    with pytest.raises(StaleError):
        verifier.check_read(ReadItem(session=1, round=1, start=40, rows=1))


def test_a_prompt_that_is_not_wanted_any_more_leaves_nothing(llama: LanguageModel) -> None:
    verifier = Verifier(llama, Spans())
    list(verifier.open(order(llama, 1, range(3, 43), sampling=Sampling(), read=8)))
    assert len(verifier) == 1
    with pytest.raises(RequestError, match="not open"):
        verifier.lend(1)
    verifier.close(1, keep=True)
    assert (len(verifier), len(verifier.kept)) == (0, 0)
    with pytest.raises(RequestError, match="open it first"):
        verifier.check_read(ReadItem(session=1, round=0, start=8, rows=1))


def test_parts_come_one_after_the_other(llama: LanguageModel) -> None:
    verifier = Verifier(llama, Spans())
    list(verifier.open(order(llama, 1, range(3, 43), sampling=Sampling(), read=8)))
    with pytest.raises(StaleError):
        verifier.check_read(ReadItem(session=1, round=0, start=0, rows=1))
    with pytest.raises(RequestError, match="from 9 on"):
        verifier.check_read(ReadItem(session=1, round=0, start=9, rows=1))


def test_workers_say_how_many_rows_they_read_at_a_time_and_how_far_they_are(
    llama_folder: Path,
) -> None:
    target = open_target_worker(TargetSettings(model=str(llama_folder)), name="target", threads=1)
    draft = open_draft_worker(
        DraftSettings(model=str(llama_folder)), name="draft", threads=1, target=str(llama_folder)
    )
    for worker in (target, draft):
        hello = worker.hello(1)
        assert hello.limits is not None
        assert hello.limits.prompt_rows == 256
        fields = {"sampling": Sampling(), "tree": TREE, "capacity": 60}
        (event,) = worker.handle(opening(1, range(3, 43), read=8, **fields))
        assert isinstance(event, Reading)
        assert event.done == 8
        stale = ReadItem(session=1, round=0, start=0, rows=10)
        assert list(worker.handle(Read(epoch=1, item=stale))) == []
        (event,) = worker.handle(Read(epoch=1, item=stale.model_copy(update={"start": 8})))
        assert isinstance(event, Reading)
        (event,) = worker.handle(
            Read(epoch=1, item=ReadItem(session=1, round=0, start=event.done, rows=40))
        )
        assert isinstance(event, Opened)


def test_a_target_of_the_library_reads_prompts_whole(llama_folder: Path) -> None:
    settings = TargetSettings(model=str(llama_folder), backend="library")
    hello = open_target_worker(settings, name="target", threads=1).hello(1)
    assert hello.limits is not None
    assert hello.limits.prompt_rows == 0
