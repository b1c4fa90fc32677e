"""A draft that reads its target's own keys and values: what it computes, and that neither writes
where the other reads."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import VerifyItem
from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import TokenTree
from dovetail.workers.devices.opening import open_device
from dovetail.workers.drafters.shared import Lent, SharedDrafter, SharedSession
from dovetail.workers.models.backends.blob import named
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.recurrent import PENDING
from dovetail.workers.models.segment import Segment
from dovetail.workers.models.substitutes.substitute import (
    load_device_substitute,
    load_substitute,
    share,
    shared_cache,
)
from dovetail.workers.sessions.results import First, Verdict
from dovetail.workers.speculation.growth import NO_ROW
from dovetail.workers.speculation.proposal import Shape
from dovetail.workers.verifier import Verifier
from pretended.device import POSSIBLE
from support.architectures import VARIED, write_tiny, write_varied
from support.cases import everyday
from support.kernels import needs_kernels
from support.models import VOCABULARY, cache_row
from support.opening import opening

PROMPT = (0, 3, 17, 9, 30)
KEY = session_key(7, 0, PROMPT)
TREE = TreeSettings(policy="dynamic", gamma=12, depth=4, width=4)
SHAPE, CHAIN = Shape(12, 4, 4), Shape(4, 4, 1)
CAPACITY = 70
SHARING = (
    *("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_text", "qwen3_next", "bamba", "falcon_h1"),
    *("kimi_linear", "nemotron_h", "gemma4_text small", "llama4_text"),
)
"""Mixtures, latents, states, layers of one half, and layers that read others'."""
TIE = 0.03
"""Of the range of logits: below this products in bf16, of other rows at once, may choose either."""
OpenPair = Callable[[Path, str], tuple[LanguageModel, LanguageModel]]
SAMPLINGS = {"greedy": Sampling(), "warm": Sampling(temperature=1.0)}


class Pair:
    """A target and, as its draft, the same model over the same cache: a draft that would always be
    right, but for what the test has it propose."""

    def __init__(
        self,
        model: LanguageModel,
        sampling: Sampling,
        prompt: Sequence[int] = PROMPT,
        *,
        draft: LanguageModel | None = None,
    ) -> None:
        """`draft`: another model over the same cache, in place of the target."""
        self.model, self.sampling, self.round = model, sampling, 0
        self.verifier, self.engine = (
            Verifier(model, Spans()),
            SharedDrafter(model if draft is None else draft, Spans(), ahead=True),
        )
        self.engine.borrow = self.borrow
        self.verifier.rows_beside = self.engine.rows_beside
        self.session = self.open_draft(prompt)
        self.log = [*prompt, self.open_target(prompt)]

    def borrow(self, number: int) -> Lent:
        log, cache, first = self.verifier.lend(number)
        return Lent(log, shared_cache(cache), first)

    def open_target(self, prompt: Sequence[int]) -> int:
        (first,) = self.verifier.open(
            opening(1, prompt, key=KEY, capacity=CAPACITY, sampling=self.sampling, tree=TREE)
        )
        assert isinstance(first, First)
        return first.token

    def open_draft(self, prompt: Sequence[int]) -> SharedSession:
        session = self.engine.open(
            opening(
                1,
                prompt,
                capacity=CAPACITY,
                vocabulary_size=VOCABULARY,
                key=KEY,
                sampling=self.sampling,
                tree=TREE,
            )
        )
        session.number = 1
        return session

    def verify(self, tree: TokenTree) -> tuple[Sequence[int], int]:
        """Accepted nodes and bonus."""
        self.round += 1
        item = VerifyItem(
            session=1,
            round=self.round,
            prefix=len(self.log),
            tokens=tree.tokens,
            parents=tree.parents,
        )
        self.verifier.check(item)
        (verdict,) = self.verifier.verify([item])
        assert isinstance(verdict, Verdict)
        self.log += (*(tree.tokens[node] for node in verdict.item.accepted), verdict.item.bonus)
        return verdict.item.accepted, verdict.item.bonus

    def row_of(self, path: Sequence[int]) -> torch.Tensor:
        """Keys and values of the last token of `path`, from a causal pass."""
        cache = self.model.new_cache(len(path))
        self.model.forward(
            torch.tensor(path), torch.arange(len(path)), [Segment(cache, 0, len(path))]
        )
        return cache_row(cache, len(path) - 1)

    def check(self) -> None:
        """Every committed row is what a plain pass gives, byte for byte, and so is every row of the
        draft's tree."""
        cache, tree, session = self.session.cache, self.session.tree, self.session
        for slot in range(cache.length):
            assert torch.equal(cache_row(cache, slot), self.row_of(self.log[: slot + 1]))
        if session.rooted:
            assert torch.equal(cache_row(cache, session.first), self.row_of(session.log))
        for node in range(len(tree)):
            if tree.rows[node] != NO_ROW:
                path = [*session.log, *tree.path_tokens(node)]
                assert torch.equal(
                    cache_row(cache, session.first + 1 + int(tree.rows[node])), self.row_of(path)
                )


def alone(model: LanguageModel, sampling: Sampling) -> list[int]:
    """Return what the target writes without a draft."""
    pair = Pair(model, sampling)
    while len(pair.log) < CAPACITY - 14:
        pair.verify(TokenTree())
    return pair.log


@pytest.fixture(scope="module")
def hybrid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LanguageModel:
    """A model of layers with states and others."""
    folder = tmp_path_factory.mktemp("hybrid")
    write_tiny(request.param, folder, **VARIED[request.param])
    return load_language_model(str(folder), weights="fp32", device="cpu")


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("seed", everyday(range(3), 0))
def test_what_is_committed_and_what_is_drafted_never_overwrite_each_other(
    llama: LanguageModel, sampling: Sampling, seed: int
) -> None:
    check_that_nothing_is_overwritten(llama, sampling, seed)


@needs_kernels
@pytest.mark.parametrize(
    ("hybrid", "name"),
    [
        ("qwen3_5_text", "warm"),
        pytest.param("falcon_h1", "greedy", marks=pytest.mark.slow),
        pytest.param("lfm2", "warm", marks=pytest.mark.slow),
    ],
    indirect=["hybrid"],
)
def test_states_are_the_targets_and_rows_behind_them_the_drafts(
    hybrid: LanguageModel, name: str
) -> None:
    sampling = SAMPLINGS[name]
    check_that_nothing_is_overwritten(hybrid, sampling, 1)
    pair = Pair(hybrid, sampling)
    pair.engine.draft(pair.session, (), pair.log[-1], SHAPE)
    missed = [pair.verify(TokenTree())[1] for _ in range(2 * PENDING)]
    assert not pair.engine.grow_all_ahead(
        [pair.session]
    )  # the states hold rows it does not know of
    proposal = pair.engine.draft(pair.session, (), missed[0], CHAIN, more=missed[1:])
    pair.check()
    assert len(pair.verify(proposal.tree)[0]) == CHAIN.depth


def check_that_nothing_is_overwritten(model: LanguageModel, sampling: Sampling, seed: int) -> None:
    rng, pair, expected = random.Random(seed), Pair(model, sampling), alone(model, sampling)
    accepted, bonus = (), pair.log[-1]
    hits = 0
    while len(pair.log) < CAPACITY - 20:
        shape = SHAPE if rng.random() < 0.7 else Shape(3, 2, 2)
        proposal = pair.engine.draft(pair.session, accepted, bonus, shape, ahead=True)
        hits += proposal.hit
        pair.check()
        for _ in range(rng.randint(0, 3)):
            pair.engine.grow_all_ahead([pair.session])
        pair.check()
        accepted, bonus = pair.verify(proposal.tree)
        if rng.random() < 0.5:
            pair.engine.grow_all_ahead(
                [pair.session]
            )  # the verdict is there, and the draft has not been told
        pair.check()
    assert hits
    assert pair.log == expected[: len(pair.log)]


def substituted(folder: Path, bits: str) -> tuple[LanguageModel, LanguageModel]:
    """A target and its substitute on the CPU."""
    target = load_language_model(str(folder), weights="fp32", device="cpu")
    substitute = load_substitute(str(folder), weights=bits, device="cpu")[0]
    share(substitute, target)
    return target, substitute


def substituted_there(folder: Path, bits: str) -> tuple[LanguageModel, LanguageModel]:
    """The same on a pretended GPU, which keeps every other layer of the target and streams the
    others."""
    device = open_device("pretended", 1)
    config = json.loads((folder / "config.json").read_text())
    layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
    places = [(Place.STREAMED, Place.RESIDENT)[index % 2] for index in range(layers)]
    target = load_language_model(
        str(folder),
        weights="fp32",
        device="cpu",
        stage=lambda *_: Staging(places, device.transfer()),
    )
    substitute, _, shared = load_device_substitute(target, device.capture, weights=bits)
    assert shared == layers // 2
    return target, substitute


def behind(pair: Pair, draft: LanguageModel, path: Sequence[int]) -> torch.Tensor:
    """The logits [V] of a substitute after the log and a path, in a session of its own: the target
    reads what is committed, and the substitute the rest, token by token."""
    tokens, first = torch.tensor([*pair.log, *path]), len(pair.log) - 1
    cache = pair.model.new_cache(len(tokens))
    pair.model.forward(tokens[:first], torch.arange(first), [Segment(cache, 0, first)])
    cache.keep(range(first), first)
    for slot in range(first, len(tokens)):
        row = Segment(shared_cache(cache), slot, 1)
        logits = draft.forward(tokens[slot : slot + 1], torch.tensor([slot]), [row])
        cache.keep([slot], 1)
    return logits[-1].cpu()


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "open_pair"),
    everyday(
        [(kind, where) for kind in SHARING for where in (substituted, substituted_there)],
        ("qwen3_moe", substituted),
        ("qwen3_5_text", substituted),
    ),
)
def test_a_substitute_proposes_what_its_codes_choose_after_the_targets_rows(
    kind: str, open_pair: OpenPair, tmp_path: Path
) -> None:
    """And neither its trees nor the temperature change what the target writes. Only nodes of
    earlier trees have rows behind the draft's own: here greedy trees begin afresh."""
    if open_pair is substituted_there and not POSSIBLE:
        pytest.skip("this version of torch cannot be told of a device from Python")
    pytest.importorskip("hqq", reason="hqq is not installed: pip install 'dovetail-llm[subspec]'")
    target, draft = open_pair(write_varied(kind, tmp_path), "int4")
    for name, sampling in SAMPLINGS.items():
        pair, expected = Pair(target, sampling, draft=draft), alone(target, sampling)
        accepted, bonus = (), pair.log[-1]
        while len(pair.log) < len(PROMPT) + 2 * PENDING:
            if name == "greedy":
                pair.session, accepted = pair.open_draft(pair.log[:-1]), ()
            states = getattr(pair.borrow(1).cache, "states", None)
            before = None if states is None else states.state.clone()
            tree = pair.engine.draft(pair.session, accepted, bonus, SHAPE).tree
            assert before is None or torch.equal(states.state, before)
            for parent, children in tree.children.items() if name == "greedy" else ():
                path = [tree.tokens[node] for node in tree.path(parent)]
                logits = behind(pair, draft, path)
                tie = TIE * (logits.max() - logits.min()) if draft.device.type != "cpu" else 0.0
                least = logits.topk(len(children)).values[-1] - tie
                assert logits[[*children]].min() >= least
            accepted, bonus = pair.verify(tree)
        assert pair.log == expected[: len(pair.log)]


@needs_kernels
def test_what_a_substitute_has_exactly_is_its_targets(tmp_path: Path) -> None:
    """Routers, the heads' matrices of latents, and the table of the layers' own inputs."""
    for kind, names in (
        ("deepseek_v3", ("latent.key_up.0", "latent.value_up.1", "experts.router.logits")),
        ("qwen3_next", ("experts.router.logits", "experts.shared_gate")),
    ):
        backs = [
            model.back_end for model in substituted(write_varied(kind, tmp_path / kind), "int4")
        ]
        assert all(isinstance(back, Kernels) for back in backs)
        whole, coded = (named(back._layers[-1].plan) for back in backs)
        assert all(coded[name] is whole[name] for name in names)
        assert coded["output"] is not whole["output"]


def test_a_draft_that_is_the_target_is_always_right(llama: LanguageModel) -> None:
    pair = Pair(llama, Sampling())
    accepted, bonus = (), pair.log[-1]
    for _ in range(5):
        accepted, bonus = pair.verify(pair.engine.draft(pair.session, accepted, bonus, CHAIN).tree)
        assert len(accepted) == CHAIN.depth


def test_a_draft_that_was_left_out_goes_on_from_what_the_target_has(llama: LanguageModel) -> None:
    pair = Pair(llama, Sampling())
    pair.engine.draft(pair.session, (), pair.log[-1], SHAPE)
    missed = [pair.verify(TokenTree())[1] for _ in range(3)]
    proposal = pair.engine.draft(pair.session, (), missed[0], CHAIN, more=missed[1:])
    pair.check()
    assert len(pair.verify(proposal.tree)[0]) == CHAIN.depth


def test_without_the_targets_session_nothing_is_drafted(llama: LanguageModel) -> None:
    pair = Pair(llama, Sampling())
    pair.engine.draft(pair.session, (), pair.log[-1], SHAPE)
    pair.verifier.close(1)
    with pytest.raises(RequestError, match="session 1 is not open"):
        pair.engine.draft(pair.session, (), 5, SHAPE)


def test_nothing_grows_ahead_in_a_cache_whose_session_the_target_has_ended(
    llama: LanguageModel,
) -> None:
    pair = Pair(llama, Sampling())
    pair.engine.draft(pair.session, (), pair.log[-1], CHAIN, ahead=True)
    cache = pair.session.cache
    pair.verifier.close(1)
    pair.open_target(PROMPT)  # the rows behind it may be anybody's by now
    rows = pair.session.tree.rows_used
    before = [cache_row(cache, slot) for slot in range(cache.length, pair.session.first + 1 + rows)]
    assert not pair.engine.grow_all_ahead([pair.session])
    assert pair.session.tree.rows_used == rows
    assert all(
        torch.equal(row, cache_row(cache, slot))
        for slot, row in enumerate(before, start=cache.length)
    )


def test_a_target_that_has_another_log_is_told_apart(llama: LanguageModel) -> None:
    pair = Pair(llama, Sampling())
    other = (pair.log[-1] + 1) % VOCABULARY
    with pytest.raises(RequestError, match="another log"):
        pair.engine.draft(pair.session, (), other, SHAPE)


def test_a_session_that_was_opened_anew_is_opened_anew_by_the_draft(llama: LanguageModel) -> None:
    pair = Pair(llama, Sampling())
    pair.engine.draft(pair.session, (), pair.log[-1], SHAPE)
    pair.verify(TokenTree())
    pair.verifier.close(1)
    pair.open_target(pair.log[:-1])
    with pytest.raises(RequestError, match="was reopened by its target"):
        pair.engine.draft(pair.session, (), pair.log[-1], SHAPE)
    again = pair.open_draft(pair.log[:-1])
    proposal = pair.engine.draft(again, (), pair.log[-1], SHAPE)
    assert len(proposal.tree) == SHAPE.nodes


def test_rows_of_dead_nodes_are_free_again(llama: LanguageModel) -> None:
    pair = Pair(llama, Sampling())
    accepted, bonus, free = (), pair.log[-1], []
    for _ in range(6):
        proposal = pair.engine.draft(pair.session, accepted, bonus, SHAPE)
        free.append(pair.session.free_rows)
        accepted, bonus = pair.verify(proposal.tree)
    assert min(free[1:]) >= pair.session.own - 1 - 2 * SHAPE.width * SHAPE.depth
