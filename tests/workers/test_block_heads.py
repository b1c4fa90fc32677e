"""Drafters that predict several positions in one pass, against a slow version of each."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.noise import gumbel
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.workers import kernels
from dovetail.workers.heads.block.drafter import BlockDrafter, BlockSession
from dovetail.workers.heads.head import Head, classify, open_head
from dovetail.workers.sessions.wire import TYPES, to_array
from dovetail.workers.speculation.proposal import Order, Proposal, Shape
from support.block_heads import DRAFTERS, Oracle, config_of, tensors_of, write_drafter
from support.gguf_blocks import write_gguf_drafter
from support.heads import write_files
from support.models import VOCABULARY
from support.opening import opening
from support.parallel_heads import logits_of, write_parallel_head

BACKENDS = ["library", *(["kernels"] if kernels.available() else [])]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
KEY = bytes(range(16))
TREE = TreeSettings(policy="goodput", gamma=40, depth=3, width=4)
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8)
CLOSE = 1e-4
IN_FILES = ("dflash-z-lab", "dflash-two-sided", "dflash-causal", "dspark-deepspec", "dflash2")


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

    def __init__(
        self,
        head: Head,
        *,
        sampling: Sampling = GREEDY,
        prompt: Sequence[int] = PROMPT,
        **more: bool,
    ) -> None:
        self.engine, self.log = BlockDrafter(head, Spans(), **more), list(prompt)
        self.random = torch.Generator().manual_seed(1)
        self.features = torch.empty(0, self.engine.reads.row)
        self.sampling = sampling
        order = opening(
            *(1, prompt),
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
        self.engine.feed(self.session, 0, to_array(self.more(len(prompt))))

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
    after the previous one, best first."""
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


def test_a_lattice_serves_processors_that_look_back_and_drawn_children(
    open_drafter: Callable[..., tuple[Head, Oracle]],
) -> None:
    head, _ = open_drafter("dspark-deepspec")
    banned = Sampling(temperature=0.8, repetition_penalty=1.3, logit_bias=((2, -100.0),))
    story = Story(head, sampling=banned)
    proposal = story.engine.draft(story.session, (), 7, Shape(40, 3, 4))
    assert len(proposal.tree) == 40
    assert 2 not in proposal.tree.tokens
    drawn = Story(head, sampling=Sampling(temperature=1.0, acceptance="rejection"))
    proposal = drawn.engine.draft(drawn.session, (), 7, Shape(12, 3, 2))
    assert proposal.probabilities is not None
    assert proposal.probabilities.shape[0] == 1 + len(proposal.tree)


@pytest.mark.parametrize("name", ["dflash-z-lab", "dspark-deepspec"])
def test_what_is_found_in_the_log_joins_the_lattice_and_goes_on_below_it(
    open_drafter: Callable[..., tuple[Head, Oracle]], name: str
) -> None:
    head, oracle = open_drafter(name)
    story = Story(head, prompt=[*PROMPT, *PROMPT[:3]], merges=True)
    ((_, proposal),) = story.engine.draft_all([story.order(PROMPT[3])])
    assert not isinstance(proposal, Exception)
    tree = proposal.tree
    paths = {tuple(tree.tokens[above] for above in tree.path(n)): n for n in range(len(tree))}
    assert (*PROMPT[4:], *PROMPT[:2]) in paths
    assert max(tree.depths) > head.spec.levels
    both = [(own, paths[path]) for own, path in best_paths(oracle, story, 3, 4) if path in paths]
    assert len(both) > 10
    assert all(proposal.scores[node] >= own - CLOSE for own, node in both)


def test_several_sessions_share_a_pass_and_get_what_each_gets_alone(
    open_drafter: Callable[..., tuple[Head, Oracle]],
) -> None:
    head, _ = open_drafter("dflash2")
    alone = Story(head).engine, Story(head)
    expected = alone[1].engine.draft(alone[1].session, (), 7, Shape(20, 4, 4))
    together = [Story(head) for _ in range(3)]
    engine = together[0].engine
    orders = [Order(story.session, (), 7, Shape(20, 4, 4)) for story in together]
    found = [outcome for _, outcome in engine.draft_all(orders)]
    assert [one.tree for one in found] == [expected.tree] * 3  # type: ignore[union-attr]


def test_scores_are_learned_from_verdicts(
    open_drafter: Callable[..., tuple[Head, Oracle]],
) -> None:
    for name in ("dflash-z-lab", "dspark-deepspec"):
        story = Story(open_drafter(name)[0], sampling=SAMPLED)
        list(story.engine.draft_all([story.order(7)]))
        for _ in range(4):
            list(story.engine.draft_all([story.order(11, (0,))]))
        while story.engine.learn():
            pass
        assert story.engine.score_calibration.nodes(sampled=True)[:2] == (4, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    {
        "no block_size": ({"block_size": None}, "has no block_size in config.json"),
        "a huge block": (
            {"block_size": 1 << 20},
            "block_size 1048576 in config.json: it should be 2",
        ),
        "mask": (
            {"mask_token_id": VOCABULARY},
            "mask_token_id 48 in config.json, which is outside",
        ),
        "no mask": ({"dflash_config": {"target_layer_ids": [0]}}, "has no mask_token_id"),
        "no taps": ({"dflash_config": {"mask_token_id": 5}}, "has no target_layer_ids"),
        "taps": ({"target_layer_ids": [0, 7]}, r"layers \[1, 8\], but .* has 2 layers"),
        "another target": (
            {"target_layer_ids": [0]},
            "a target of hidden width 128 and vocabulary",
        ),
        "kind of layer": ({"layer_types": ["linear", "full_attention"]}, "has layer_types"),
        "too few": ({"layer_types": ["full_attention"]}, "should name each of 2 layers"),
        "no window": ({"layer_types": ["sliding_attention"] * 2}, "no sliding_window"),
        "unnamed windows": ({"use_sliding_window": True}, "no layer_types"),
        "interleaved": ({"is_neox_style": False}, "rotates neighbouring pairs"),
        "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        "layers": ({"num_hidden_layers": 3}, r"lacks layers\.2\."),
    }.values(),
)
def test_a_drafter_that_cannot_be_computed_is_refused_in_one_line(
    tmp_path: Path, llama_folder: Path, change: dict[str, Any], words: str
) -> None:
    drafter = replace(DRAFTERS["dflash-z-lab"], config=change)
    with pytest.raises(CheckpointError, match=words) as refused:
        open_head(str(write_drafter(tmp_path, drafter)), target=str(llama_folder))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "tensor", "found", "words"),
    [
        ("dflash-z-lab", "layers.1.mlp.up_proj.weight", None, "lacks layers.1.mlp.up_proj.weight"),
        (
            "dflash-z-lab",
            "prefix_gru.weight",
            torch.ones(2, 2),
            "unknown tensors prefix_gru.weight",
        ),
        ("dflash-z-lab", "layers.0.self_attn.q_norm.weight", torch.ones(3), "wrong shape for"),
        ("dflash-z-lab", "norm.weight", torch.full((64,), torch.nan), "NaN"),
        ("dspark-deepspec", "markov_head.markov_w2.weight", torch.ones(4, 8), "wrong shape for"),
        ("dspark-deepspec", "markov_head.gate_proj.weight", torch.ones(4, 8), "unknown tensors"),
        ("dflash2", "layers.0.mlp_conv.base_kernel", torch.ones(2, 3, 64), "wrong shape for"),
        ("dflash2", "candidate_selector.successor_codebook", None, "lacks candidate_selector.succ"),
    ],
)
def test_a_drafter_with_strange_tensors_is_refused_and_they_are_named(
    tmp_path: Path, llama_folder: Path, name: str, tensor: str, found: Tensor | None, words: str
) -> None:
    drafter = DRAFTERS[name]
    tensors = tensors_of(drafter)
    tensors.pop(tensor, None)
    if found is not None:
        tensors[tensor] = found
    write_files(tmp_path, tensors, config_of(drafter))
    with pytest.raises(CheckpointError, match=words):
        open_head(str(tmp_path), target=str(llama_folder))


def test_a_convolution_longer_than_a_block_reads_zeros_before_it(
    tmp_path: Path, llama_folder: Path
) -> None:
    short = DRAFTERS["dflash2"]
    found = []
    for taps in (5, 8):  # a block has 5 rows
        drafter = replace(short, config={**short.config, "conv_kernel_size": taps})
        tensors = tensors_of(drafter)
        for name in [name for name in tensors if name.endswith("_conv.base_kernel")]:
            tensors[name] = torch.cat([tensors[name], torch.ones(2, taps - 2, 64)], dim=1)
            dynamic = torch.zeros(2 * taps * 4, 64)
            tensors[name.replace("base_kernel", "kernel_projection.weight")] = dynamic
        write_files(tmp_path / str(taps), tensors, config_of(drafter))
        head = open_head(str(tmp_path / str(taps)), target=str(llama_folder), weights="fp32")
        story = Story(head)
        found.append(story.engine.draft(story.session, (), 7, Shape(20, 4, 4)))
    assert found[0].tree == found[1].tree
    assert found[0].scores == found[1].scores


def test_a_gated_markov_head_is_refused_by_its_name(tmp_path: Path, llama_folder: Path) -> None:
    drafter = replace(DRAFTERS["dspark-deepspec"], config={"markov_head_type": "gated"})
    with pytest.raises(CheckpointError, match="markov_head_type 'gated'"):
        open_head(str(write_drafter(tmp_path, drafter)), target=str(llama_folder))


@torch.inference_mode()
def test_muse_glimmers_drafter_has_the_states_of_transformers(
    tmp_path: Path, llama_folder: Path
) -> None:
    """Its windows are shorter than the context, and both sides of a window are seen."""
    config = MuseGlimmerAssistantConfig(
        **{**config_of(DRAFTERS["dflash-z-lab"]), "block_size": 5, "mask_token_id": 5},
        target_layer_ids=[0, 1],
        sliding_window=6,
        hidden_act="silu",
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    torch.manual_seed(3)
    theirs = MuseGlimmerAssistantModel(config).eval()
    theirs.save_pretrained(tmp_path)
    head = open_head(str(tmp_path), target=str(llama_folder), weights="fp32")
    story = Story(head)
    assert head.spec.kind == "dflash"
    order = story.order(7)
    story.engine.draft_all([order]).__next__()
    embedding = load_file(llama_folder / "model.safetensors")["model.embed_tokens.weight"]
    memory = DFlashCache(config=config)
    memory.set_previous_accepted_tokens(len(PROMPT))
    found = theirs(
        cache=memory,
        use_cache=True,
        noise_embeds=embedding[torch.tensor([7, 5, 5, 5, 5])][None],
        context_hidden_states=story.features[None],
        position_ids=torch.arange(len(PROMPT) + 5)[None],
    ).last_hidden_state
    assert story.session.lattice is not None
    torch.testing.assert_close(story.session.lattice.states, found[0, 1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", IN_FILES)
def test_a_drafter_in_a_gguf_file_proposes_what_its_folder_does(
    open_drafter: Callable[..., tuple[Head, Oracle]], tmp_path: Path, llama_folder: Path, name: str
) -> None:
    file = write_gguf_drafter(tmp_path / "draft.gguf", DRAFTERS[name])
    assert classify(str(file)) == DRAFTERS[name].kind
    heads = open_head(str(file), target=str(llama_folder), weights="fp32"), open_drafter(name)[0]
    found, expected = (
        story.engine.draft(story.session, (), 7, Shape(40, 3, 4)) for story in map(Story, heads)
    )
    assert found.tree == expected.tree
    assert found.scores == expected.scores


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"target_layers": None}, r"key dflash\.target_layers is missing"),
        ({"target_layers": [1, 5]}, "has 2 layers: use the drafter"),
        ({"hyper_connection.count": 4}, "hyper-connections"),
        ({"attention.scale": 0.5}, "the scale 0.5, instead of 0.25"),
        ({"rope.dimension_sections": [4, 4, 0, 0]}, "several dimensions"),
        ({"magic": 7}, r"key dflash\.magic is not known"),
        ({"block_size": 4000}, "block_size 4000"),
    ],
)
def test_a_gguf_file_of_a_drafter_that_cannot_be_computed_is_refused(
    tmp_path: Path, llama_folder: Path, facts: dict[str, Any], words: str
) -> None:
    file = write_gguf_drafter(tmp_path / "draft.gguf", DRAFTERS["dflash-z-lab"], **facts)
    with pytest.raises(CheckpointError, match=words):
        open_head(str(file), target=str(llama_folder))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parallel_head_has_the_logits_of_one_causal_pass_wherever_the_root_moves(
    tmp_path: Path, llama_folder: Path, backend: str
) -> None:
    folder = write_parallel_head(tmp_path)
    story = Story(open_head(str(folder), target=str(llama_folder), weights="fp32", backend=backend))
    embedding = load_file(llama_folder / "model.safetensors")["model.embed_tokens.weight"].double()
    assert story.engine.head.spec.kind == "peagle"
    for bonus, accepted in [(7, ()), (11, (0,)), (2, ())]:
        ((_, proposal),) = story.engine.draft_all([story.order(bonus, accepted)])
        assert isinstance(proposal, Proposal)
        expected = logits_of(folder, embedding, story.log, story.features[: len(story.log) - 1])
        assert story.session.lattice is not None
        found = story.session.lattice.logits.double()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert story.session.cache.length == len(story.log) - 1
