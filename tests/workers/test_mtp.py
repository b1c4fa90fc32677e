"""MTP layers of every supported family against transformers' own layer over whole paths, in the
names of each public layout and as GGUF files; and what is refused."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from dovetail.protocol.errors import CheckpointError, UserError
from dovetail.protocol.settings import DraftSettings, Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.runtime.client import Client
from dovetail.workers.devices.opening import open_device
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.heads.head import Head, classify
from dovetail.workers.heads.mtp.drafter import MtpDrafter, gain_of_raw
from dovetail.workers.heads.mtp.layers import open_mtp
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Paths, Segment
from dovetail.workers.sessions.wire import TYPES, to_array
from dovetail.workers.speculation.proposal import Shape
from pretended.device import POSSIBLE
from support.architectures import VOCABULARY, write_varied
from support.cases import everyday
from support.kernels import needs_kernels
from support.mtp import LAYOUTS, Slow, write_mtp, write_mtp_gguf
from support.opening import opening
from support.stacks import complete_all, running

pytestmark = needs_kernels
CLOSE, HIDDEN, LENGTH = 2e-5, 64, 9
KIND = "qwen3_5_text"


def opened(folder: Path, weights: str = "fp32", **given: Any) -> Head:
    return open_mtp(
        str(given.pop("source", folder)),
        target=str(folder),
        weights=weights,
        device=open_device("cpu", 1),
        **given,
    )


def random_rows(count: int = LENGTH) -> tuple[list[int], Tensor]:
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (count,), generator=random).tolist()
    return tokens, torch.randn(count, HIDDEN, generator=random).half().float()


def check(head: Head, slow: Slow) -> None:
    """True rows and a tree of two guessed branches give what their paths give."""
    tokens, states = random_rows()
    cache = head.new_cache(LENGTH + 2)
    positions = torch.arange(LENGTH)
    rows = [Segment(cache, 0, LENGTH)]
    found = head.forward(torch.tensor(tokens), states, positions, rows, true=True)
    cache.keep(range(LENGTH), LENGTH)
    for row in (0, 4, LENGTH - 1):
        expected = slow(tokens[: row + 1], states[: row + 1])
        logits = found.logits[row].cpu()
        torch.testing.assert_close(logits, expected[0], rtol=CLOSE, atol=CLOSE)
    branches = [5, 11]
    paths = Paths.of(LENGTH, [[LENGTH], [LENGTH + 1]])
    guessed = head.forward(
        torch.tensor(branches),
        found.states[-1:].repeat(2, 1),
        torch.tensor([LENGTH, LENGTH]),
        [Segment(cache, LENGTH, 2, paths)],
        true=False,
    )
    given = torch.cat([states, expected[1][None]])
    for branch, logits in zip(branches, guessed.logits, strict=True):
        wanted = slow([*tokens, branch], given)[0]
        torch.testing.assert_close(logits.cpu(), wanted, rtol=10 * CLOSE, atol=10 * CLOSE)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_layer_computes_what_transformers_layer_computes(tmp_path: Path, kind: str) -> None:
    slow = write_mtp(kind, tmp_path / "model")
    check(opened(tmp_path / "model"), slow)


@pytest.mark.skipif(not POSSIBLE, reason="torch cannot be told of a device from Python")
@pytest.mark.parametrize("kind", everyday(LAYOUTS, "nemotron_h", "cohere2_moe"))
def test_a_layer_computes_the_same_on_a_gpu(tmp_path: Path, kind: str) -> None:
    slow = write_mtp(kind, folder := tmp_path / "model")
    place = open_device("pretended", 1)
    check(open_mtp(str(folder), target=str(folder), weights="fp32", device=place), slow)


OF_TRANSFORMERS = {"mellum": None, "glm4_moe": r"layers\.4\.", "deepseek_v3": r"layers\.4\."}
"""Model type -> the MTP layer's keys, which a class ignores by their number in a large model."""


@pytest.mark.parametrize("kind", everyday(OF_TRANSFORMERS, "deepseek_v3"))
def test_a_layer_computes_what_transformers_multi_token_prediction_does(
    tmp_path: Path, kind: str
) -> None:
    write_mtp(kind, tmp_path / "model")
    whole = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager", dtype=torch.float32
    )
    if (pattern := OF_TRANSFORMERS[kind]) is not None:
        whole._keys_to_ignore_on_load_unexpected = [pattern]
    theirs = MtpModel.from_pretrained(whole.eval()).eval()
    tokens, states = random_rows()
    given, positions = torch.tensor(tokens), torch.arange(LENGTH)
    with torch.inference_mode():
        rows = theirs.forward_layer(
            0, states[None], 1 + positions[None], None, input_ids=given[None]
        )
        expected = theirs._project_to_logits(rows)[0]
    head = opened(tmp_path / "model")
    own = [Segment(head.new_cache(LENGTH), 0, LENGTH)]
    found = head.forward(given, states, positions, own, true=True)
    torch.testing.assert_close(found.logits, expected, rtol=CLOSE, atol=CLOSE)


IN_FILES: dict[str, dict[str, Any]] = {
    KIND: {},
    "qwen3_5_moe_text": {},
    "qwen3_next": {"mlp_only_layers": []},
    "glm4_moe": {},
    "deepseek_v3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "hy_v3": {},
    "exaone_moe": {},
    "exaone4": {},
    "glm4_moe bailingmoe2": {"use_qk_norm": True},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "num_hidden_layers": 4,
        "use_bias": False,
        "mlp_bias": False,
    },
}


@pytest.mark.parametrize("kind", everyday(IN_FILES, KIND, "deepseek_v3"))
def test_the_last_block_of_a_gguf_file_is_the_layer_of_its_checkpoint(
    tmp_path: Path, kind: str
) -> None:
    fields, (kind, _, architecture) = IN_FILES[kind], kind.partition(" ")
    slow = write_mtp(kind, tmp_path / "model", **fields)
    more: dict[str, Any] = {"architecture": architecture} if architecture else {}
    write_mtp_gguf(kind, tmp_path / "model", file := tmp_path / "model.gguf", **more)
    check(opened(file), slow)


@pytest.mark.parametrize("target", ["model", "trunk.gguf"])
def test_a_file_of_an_mtp_layer_alone_drafts_for_its_target(tmp_path: Path, target: str) -> None:
    """For a folder of safetensors, too, whatever layer that has."""
    slow = write_mtp(KIND, tmp_path / "model")
    write_mtp_gguf(KIND, tmp_path / "model", alone := tmp_path / "mtp-x.gguf", trunk=False)
    write_mtp_gguf(KIND, tmp_path / "model", tmp_path / "trunk.gguf")
    assert classify(str(alone)) == "mtp"
    assert classify(str(tmp_path / target)) is None
    check(opened(tmp_path / target, source=alone), slow)
    with pytest.raises(CheckpointError, match="it is a draft head, which --draft takes"):
        load_language_model(str(alone), weights="fp32", device="cpu")


SPECULATORS = {
    "mtp.fc.": "mtp_layers.0.input_proj.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.norm.": "mtp_layers.0.final_layernorm.",
    "mtp.layers.0.": "mtp_layers.0.",
}
"""Parts of Qwen's names, and those of the speculators library."""


def test_a_layer_in_the_names_of_speculators_is_the_same(tmp_path: Path) -> None:
    slow = write_mtp(KIND, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    own = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    for part, instead in SPECULATORS.items():
        own = {name.replace(part, instead): tensor for name, tensor in own.items()}
    (alone := tmp_path / "alone").mkdir()
    save_file(own, alone / "model.safetensors", metadata={"format": "pt"})
    (alone / "config.json").write_text(json.dumps({"speculators_model_type": "mtp"}))
    assert classify(str(alone)) == "mtp"
    check(opened(tmp_path / "model", source=alone), slow)


@pytest.mark.parametrize("kind", ["glm4_moe", KIND])
def test_a_greedy_chain_is_that_of_the_slow_version(tmp_path: Path, kind: str) -> None:
    slow = write_mtp(kind, tmp_path / "model")
    engine = HeadDrafter(opened(tmp_path / "model"), Spans(), contrast=False)
    tokens, states = random_rows()
    tree = TreeSettings(policy="dynamic", gamma=4, depth=4, width=1)
    session = engine.open(
        opening(
            *(0, tokens),
            capacity=60,
            vocabulary_size=VOCABULARY,
            key=bytes(16),
            sampling=Sampling(),
            tree=tree,
            end=(),
        )
    )
    rows = states.to(TYPES[engine.reads.dtype])
    engine.feed(session, 0, to_array(rows))
    log, given = list(tokens), rows
    for bonus in (7, 30, 12):
        proposal = engine.draft(session, (), bonus, Shape(4, 4, 1))
        log.append(bonus)
        assert [*proposal.tree.tokens] == slow.chain(log, given.float(), 4)
        more = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(bonus))
        given = torch.cat([given, more.to(given.dtype)])
        engine.take_features(session, to_array(given[-1:]))


@pytest.mark.parametrize("raw", [False, True])
def test_the_variant_of_deepseeks_layer_is_settled_by_a_text(tmp_path: Path, raw: bool) -> None:
    """By one that the second level always foresees if it is `raw`, or if it is not."""
    write_mtp("deepseek_v3", folder := tmp_path / "model")
    weight = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3))
    norm = "model.layers.4.shared_head.norm.weight"
    changed(folder, lambda t: t.update({norm: weight}))
    tensors, (names, _) = load_file(folder / "model.safetensors"), LAYOUTS["deepseek_v3"]
    slow = Slow("deepseek_v3", tmp_path / "model-alone", tensors, names)
    (*log, _), states = random_rows(65)
    log = log[:3]
    right = {False: 0, True: 0}
    for row in range(64):
        guesses = {}
        for kind in right:
            state = slow(log[1 : row + 2], states[: row + 1], raw=kind)[1]
            given = torch.cat([states[: row + 1], state[None]])
            guesses[kind] = int(slow(log[1 : row + 3], given)[0].argmax())
        log.append(guesses[raw])
        right = {kind: count + (guesses[kind] == log[-1]) for kind, count in right.items()}
    settings = DraftSettings(kind="mtp", device="cpu", weights="fp32")
    profile = tmp_path / "profile.json"

    def opened_drafter() -> MtpDrafter:
        more: dict[str, Any] = {"threads": 1, "profile": profile}
        worker = open_draft_worker(settings, name="draft", target=str(folder), **more)
        assert isinstance(worker.engine, MtpDrafter)
        return worker.engine

    engine, states = opened_drafter(), states[:64]
    gain, _ = gain_of_raw(engine.layer, torch.tensor(log), states)
    assert gain == pytest.approx((right[True] - right[False]) / 64)
    tree = TreeSettings(policy="dynamic", gamma=4, depth=4, width=1)
    order = {"capacity": 80, "vocabulary_size": VOCABULARY, "key": bytes(16), "end": ()}
    session = engine.open(opening(0, log, **order, sampling=Sampling(), tree=tree))
    engine.feed(session, 0, to_array(states.to(TYPES[engine.reads.dtype])))
    assert engine.learn()
    assert opened_drafter().layer.raw == engine.layer.raw == raw
    assert opened_drafter().layer.probed


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


HOSTILE: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no norm": (lambda t: t.pop("mtp.pre_fc_norm_hidden.weight"), "lacks tensor mtp.pre_fc_norm_h"),
    "narrow": (
        lambda t: t.update({"mtp.fc.weight": torch.ones(64, 64)}),
        r"tensor mtp.fc.weight has the shape \[64, 64\] instead of \[64, 128\]",
    ),
    "no matrix": (
        lambda t: t.pop("mtp.layers.0.mlp.up_proj.weight"),
        "lacks tensors of its architecture, such as mtp.layers.0.mlp.up_proj.weight",
    ),
    "misshapen": (
        lambda t: t.update({"mtp.layers.0.mlp.up_proj.weight": torch.ones(3, 64)}),
        r"mtp.layers.0.mlp.up_proj.weight has the shape \[3, 64\]",
    ),
    "unknown in the layer": (
        lambda t: t.update({"mtp.layers.0.extra.weight": torch.ones(3)}),
        "has tensor mtp.layers.0.extra.weight, which a layer of model type qwen3_5_text does not",
    ),
    "unknown": (
        lambda t: t.update({"mtp.gate.weight": torch.ones(3)}),
        "has tensor mtp.gate.weight, which no supported MTP layer has",
    ),
    "two": (
        lambda t: t.update({"mtp.layers.1.input_layernorm.weight": torch.ones(64)}),
        "has 2 MTP layers in a chain, and one is supported",
    ),
    "not a number": (
        lambda t: t["mtp.layers.0.mlp.up_proj.weight"].fill_(float("nan")),
        "tensor mtp.layers.0.mlp.up_proj.weight holds NaN or infinite values",
    ),
    "none": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith("mtp.")],
        r"has no MTP layer \(tensors such as mtp.fc.weight or model.layers.4.eh_proj.weight\)",
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_mtp(KIND, folder := tmp_path_factory.mktemp("mtp") / "model")
    return folder


@pytest.mark.parametrize("how", HOSTILE)
def test_a_layer_that_is_not_one_is_refused_by_name(
    tmp_path: Path, written: Path, how: str
) -> None:
    change, words = HOSTILE[how]
    changed(Path(shutil.copytree(written, tmp_path / "model")), change)
    with pytest.raises(CheckpointError, match=words) as refused:
        opened(tmp_path / "model")
    assert str(tmp_path / "model") in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_hidden_layers", "4", "num_hidden_layers is '4'; it must be an integer"),
        ("num_hidden_layers", None, "num_hidden_layers is None; it must be an integer"),
        ("hidden_size", [64], r"hidden_size is \[64\]; it must be an integer"),
        ("hidden_size", None, "hidden_size is None; it must be an integer"),
        ("mtp_num_hidden_layers", "one", "mtp_num_hidden_layers is 'one'; it must be an integer"),
    ],
)
def test_a_configuration_of_other_types_is_refused_in_one_line(
    tmp_path: Path, written: Path, key: str, value: object, words: str
) -> None:
    folder = Path(shutil.copytree(written, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words) as refused:
        opened(folder)
    assert "\n" not in str(refused.value)


def test_a_family_whose_layer_is_not_computed_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_varied("qwen3_moe", tmp_path / "model")
    changed(folder, lambda t: t.update({"mtp.fc.weight": torch.ones(64, 128)}))
    with pytest.raises(CheckpointError, match="layer of model type qwen3_moe is not computed"):
        opened(folder)


@pytest.mark.parametrize("weights", ["int8", "int4", "bf16"])
def test_fewer_bits_leave_most_first_choices(tmp_path: Path, weights: str) -> None:
    """The fusion keeps 8 bits when the layer has 4."""
    write_mtp("glm4_moe", tmp_path / "model", dtype=torch.bfloat16)
    tokens, states = random_rows(24)
    found = []
    for kind in ("fp32", weights):
        head = opened(tmp_path / "model", kind)
        rows = [Segment(head.new_cache(24), 0, 24)]
        found.append(head.forward(torch.tensor(tokens), states, torch.arange(24), rows, true=True))
    exact, rounded = found
    apart = (exact.logits - rounded.logits).norm() / exact.logits.norm()
    assert apart < {"int8": 0.1, "int4": 0.3, "bf16": 0.02}[weights]
    same = (exact.logits.argmax(1) == rounded.logits.argmax(1)).float().mean()
    assert same >= 0.6


def test_a_worker_of_kind_mtp_reads_its_target_alone(written: Path) -> None:
    settings = DraftSettings(kind="mtp", device="cpu")
    worker = open_draft_worker(settings, name="draft", threads=1, target=str(written))
    hello = worker.hello(0)
    assert hello.reads is not None
    assert (hello.reads.width, hello.reads.taps, hello.reads.vocabulary_size) == (64, (), 48)
    with pytest.raises(UserError, match="has no MTP layer"):
        open_draft_worker(
            settings, name="draft", threads=1, target=str(written.with_name("model-alone"))
        )


TREE = TreeSettings(policy="dynamic", insist=True, gamma=40, depth=4, width=12)


def ask(client: Client, tokens: Sequence[int], temperature: float, *, speculate: bool) -> int:
    return client.submit(
        tokens=tuple(tokens),
        sampling=Sampling(temperature=temperature),
        max_tokens=24,
        seed=3,
        end=(),
        tree=TREE,
        speculate=speculate,
    )


LOSSLESS = (
    *("qwen3_next", "deepseek_v3", "glm4_moe", "exaone_moe", "exaone4", "cohere2_moe"),
    *("sarvam_moe", "nemotron_h", "mellum", "ernie4_5_moe", "hy_v3", "glm4_moe_lite"),
)


@pytest.mark.parametrize("kind", everyday(LOSSLESS, "qwen3_next"))
def test_text_is_that_of_the_target_alone_also_in_the_next_turn(tmp_path: Path, kind: str) -> None:
    """A target with recurrent layers among them; the second turn begins with the first."""
    write_mtp(kind, tmp_path / "model")
    flags = {"target.model": str(tmp_path / "model"), "draft.kind": "mtp", "draft.device": "cpu"}
    with running(flags) as client:
        prompts = [[*range(3, 30)]] * 2
        for _ in range(2):
            cases = [(p, t) for p, t in zip(prompts, (0.0, 1.0), strict=True)]
            alone = complete_all(client, [ask(client, *c, speculate=False) for c in cases])
            drafted = complete_all(client, [ask(client, *c, speculate=True) for c in cases])
            rounds = [sum(end.result.rounds for end in ends) for ends in (drafted, alone)]
            assert rounds[0] < rounds[1]
            for one, other in zip(alone, drafted, strict=True):
                assert other.result.token_ids == one.result.token_ids
                assert one.result.drafted_tokens == 0 < other.result.drafted_tokens
            prompts = [
                [*p, *one.result.token_ids, 9, 10] for p, one in zip(prompts, alone, strict=True)
            ]
