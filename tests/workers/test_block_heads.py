"""Drafters that predict several positions in one pass, against a slow version of each."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dovetail.protocol.noise import gumbel
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.workers import kernels
from dovetail.workers.drafters.block import BlockDrafter, BlockSession
from dovetail.workers.heads.head import Head, open_head
from dovetail.workers.sessions.wire import TYPES, to_array
from dovetail.workers.speculation.proposal import Order, Shape
from support.block_heads import DRAFTERS, Oracle, write_drafter
from support.models import VOCABULARY
from support.opening import opening

BACKENDS = ["library", *(["kernels"] if kernels.available() else [])]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
KEY = bytes(range(16))
TREE = TreeSettings(policy="goodput", gamma=40, depth=3, width=4)
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8)
CLOSE = 1e-4


@pytest.fixture(scope="module")
def open_drafter(
    tmp_path_factory: pytest.TempPathFactory, llama_folder: Path
) -> Callable[..., tuple[Head, Oracle]]:
    target = load_file(llama_folder / "model.safetensors")

    @cache
    def opened(name: str, backend: str = "auto") -> tuple[Head, Oracle]:
        folder = write_drafter(tmp_path_factory.mktemp(name), name)
        head = open_head(str(folder), target=str(llama_folder), weights="fp32", backend=backend)
        embedding = target["model.embed_tokens.weight"].double()
        output = target.get("lm_head.weight", embedding).double()
        tensors = load_file(folder / "model.safetensors")
        return head, Oracle(DRAFTERS[name], tensors, embedding, output)

    return opened


class Story:
    """A session and the truth about it."""

    def __init__(self, head: Head, *, sampling: Sampling = GREEDY) -> None:
        self.engine, self.log = BlockDrafter(head, Spans()), list(PROMPT)
        self.random = torch.Generator().manual_seed(1)
        self.features = torch.empty(0, self.engine.reads.row)
        self.sampling = sampling
        order = opening(
            *(1, PROMPT),
            capacity=60,
            vocabulary_size=VOCABULARY,
            key=KEY,
            sampling=sampling,
            tree=TREE,
            end=(1, 30),
            replied=0,
            kept=0,
        )
        session = self.engine.open(order)
        assert isinstance(session, BlockSession)
        self.session = session
        self.engine.feed(self.session, 0, to_array(self.more(len(PROMPT))))

    def more(self, count: int) -> Tensor:
        """Return features of the next positions, as they travel."""
        reads = self.engine.reads
        new = torch.randn(count, reads.row, generator=self.random).to(TYPES[reads.dtype])
        self.features = torch.cat([self.features, new.float()])
        return new

    def order(
        self, bonus: int, accepted: tuple[int, ...] = (), shape: Shape | None = None
    ) -> Order:
        """Return an order for the next round, whose features have arrived."""
        tree, offered = self.session.tree, self.session.offered
        self.log += [int(tree.tokens[offered[node]]) for node in accepted] + [bonus]
        if (missing := len(self.log) - 1 - len(self.features)) > 0:
            self.engine.take_features(self.session, to_array(self.more(missing)))
        return Order(self.session, accepted, bonus, shape or Shape(40, 3, 4))


def best_paths(oracle: Oracle, story: Story, depth: int, width: int) -> list[tuple[float, tuple]]:
    """Return (score, tokens) of all paths of up to `depth` tokens, each among the best `width`
    behind the one before, best first."""
    logits, states = oracle.block(story.log, story.features[: len(story.log) - 1])
    scale = story.session.ranking.scales[0]
    found: list[tuple[float, tuple]] = []

    def go_on(path: tuple[int, ...], score: float) -> None:
        if len(path) == min(depth, len(logits)):
            return
        z, heat = logits[len(path)], story.sampling.temperature or 1.0
        if story.sampling.temperature:
            position = len(story.log) + len(path)
            noise = torch.tensor([gumbel(KEY, position, v) for v in range(VOCABULARY)])
            z = z / heat + scale.noise_share * noise
        chosen = z.topk(oracle.candidates).indices
        z = z.clone()
        z[chosen] += oracle.pairs((path or (story.log[-1],))[-1], states[len(path)])[chosen] / heat
        gains = (z / scale.sharpening).log_softmax(0)[chosen]
        best = gains.topk(width)
        for gain, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            if gain > float("-inf"):
                path_ = (*path, int(chosen[place]))
                found.append((score + gain, path_))
                go_on(path_, score + gain)

    go_on((), 0.0)
    return sorted(found, key=lambda node: -node[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_proposal_has_the_best_paths_of_the_lattice_wherever_the_root_moves(
    open_drafter: Callable[..., tuple[Head, Oracle]], name: str, backend: str, sampling: Sampling
) -> None:
    head, oracle = open_drafter(name, backend)
    story = Story(head, sampling=sampling)
    for round_, (accepted, bonus) in enumerate([((), 7), ((0,), 11), ((), 2), ((0,), 40)]):
        proposal = story.engine.draft_all([story.order(bonus, accepted)])
        ((_, outcome),) = proposal
        assert not isinstance(outcome, Exception), outcome
        expected = best_paths(oracle, story, 3, 4)[:40]
        found = [
            (score, tuple(outcome.tree.tokens[above] for above in outcome.tree.path(node)))
            for node, score in enumerate(outcome.scores)
        ]
        assert [score for score, _ in found] == pytest.approx(
            [score for score, _ in expected], abs=CLOSE
        ), round_
        assert {path for _, path in found[:30]} <= {path for _, path in expected}
