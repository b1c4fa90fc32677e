"""Mixtures of experts on the kernels: which experts a row goes through, the same bytes whatever
rows are beside it, transformers' tokens, and checkpoints that lack a part of an expert."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.messages import VerifyItem
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.workers import kernels
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.experts import Choice, route
from dovetail.workers.kernels.layer_plan import LayerPlan, RouterPlan, Score
from dovetail.workers.models.backends import fused
from dovetail.workers.models.backends.packing import DTYPES, check_rows
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.checkpoints.configured import decoder_layers
from dovetail.workers.models.checkpoints.footprint import in_pieces, read_tensors, weights_bytes
from dovetail.workers.models.checkpoints.loader import open_skeleton
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model, random_language_model
from dovetail.workers.models.parity.following import UnsupportedError
from dovetail.workers.progress import hearing_loads
from dovetail.workers.sessions.results import First
from dovetail.workers.verifier import Verifier
from support.architectures import VOCABULARY, write_tiny
from support.decoded import logits_of
from support.models import reference_logits
from support.opening import opening

pytestmark = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")

KEY = bytes(range(16))
MOST_ROWS = 64
TYPES = {"fp32": torch.float32, "half": torch.bfloat16, "int8": torch.float32}
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def load(
    folder: Path, weights: str = "fp32", backend: str = "kernels", **more: Any
) -> LanguageModel:
    return load_language_model(str(folder), weights=weights, device="cpu", backend=backend, **more)


def tokens(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


# the router


def router(experts: int = 8, chosen: int = 2, **fields: Any) -> RouterPlan:
    """A router whose logits are the rows that it is given."""
    matrix = PackedMatrix(Kind.FP32, experts, experts)
    matrix.pack(torch.eye(experts))
    return RouterPlan(matrix, chosen, **fields)


def dense(choice: Choice, experts: int) -> Tensor:
    """The weights [rows, experts] of a choice, 0 for what is not chosen."""
    return torch.zeros(len(choice.ids), experts).scatter(1, choice.ids.long(), choice.weights)


def test_of_equal_experts_the_lower_ids_are_chosen() -> None:
    rows = torch.tensor([[1.0] * 8, [0, 3, 3, 3, 0, 0, 0, 0], [2, 0, 0, 5, 0, 2, 0, 2]])
    for score in Score:
        assert route(router(score=score), rows).ids.tolist() == [[0, 1], [1, 2], [0, 3]]


def test_the_margin_tells_how_near_to_a_tie_a_choice_was() -> None:
    rows = torch.tensor([[4.0, 2.0, 1.5, 0, 0, 0, 0, 0], [4.0, 1.0, 1.0, 0, 0, 0, 0, 0]])
    margins = route(router(score=Score.SOFTMAX_OF_CHOSEN), rows).margins
    assert margins.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("score", [Score.SOFTMAX, Score.SIGMOID])
def test_margins_of_scores_are_about_those_of_their_logits(score: Score) -> None:
    """Scores of hundreds of experts lie so close together that their own margins tell nothing."""
    rows = torch.tensor([[2.05, 2.0, 1.95, 0, 0, 0, 0, -2], [-2, -2.05, -2.1, -6, -6, -6, -6, -6]])
    margins = route(router(score=score), rows).margins
    assert all(0.03 < margin < 0.06 for margin in margins.tolist())


def test_a_router_of_small_logits_is_no_nearer_to_ties() -> None:
    rows = torch.tensor([[4.0, 2.0, 1.0, 0, 0, 0, 0, 0], [0.04, 0.02, 0.01, 0, 0, 0, 0, 0]])
    margins = route(router(score=Score.SOFTMAX_OF_CHOSEN), rows).margins
    torch.testing.assert_close(margins, torch.tensor([1.0, 1.0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("score", Score)
def test_weights_are_those_of_the_plain_formula(score: Score, normalised: bool) -> None:
    x = torch.randn(33, 40, generator=torch.Generator().manual_seed(1))
    fields: dict[str, Any] = {"score": score, "normalised": normalised, "jitter": 0.3}
    found = dense(route(router(40, 5, scale=1.5, **fields), x), 40)
    scores = x.softmax(-1) if score is Score.SOFTMAX else x.sigmoid()
    scores = x if score in (Score.SOFTMAX_OF_CHOSEN, Score.SPARSE_MIXER) else scores
    best, ids = scores.topk(5, dim=-1)
    if score is Score.SPARSE_MIXER:
        left = x.clone()
        for place in range(5):
            top, size = best[:, place : place + 1].clone(), x.abs().maximum(left.amax(-1, True))
            near = left.masked_fill((top - x) / size > 2 * 0.3, float("-inf"))
            best[:, place] = near.softmax(-1).gather(-1, ids[:, place, None]).squeeze(-1)
            left.scatter_(1, ids[:, place, None], float("-inf"))
    best = best.softmax(-1) if score is Score.SOFTMAX_OF_CHOSEN else best
    best = best / best.sum(-1, keepdim=True) if normalised else best
    expected = torch.zeros(33, 40).scatter(1, ids, 1.5 * best)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_correction_changes_the_choice_and_no_weight() -> None:
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    correction = torch.tensor([9.0, 0.0, 0.0, 0.0])
    choice = route(router(4, 2, score=Score.SIGMOID, correction=correction), x)
    assert choice.ids.tolist() == [[0, 3]]
    torch.testing.assert_close(choice.weights, x[:, [0, 3]].sigmoid())


def test_experts_are_chosen_within_the_groups_whose_two_best_are_best() -> None:
    x = torch.tensor([[9.0, 0.0, 0.0, 5.0, 6.0, 0.0]])  # the best expert is not in the best group
    choice = route(router(6, 2, score=Score.SOFTMAX_OF_CHOSEN, groups=2, chosen_groups=1), x)
    assert choice.ids.tolist() == [[3, 4]]


def test_a_router_that_cannot_choose_is_refused() -> None:
    with pytest.raises(ValueError, match="9 of 8 experts"):
        route(router(8, 9), torch.zeros(1, 8))


# bytes


@pytest.fixture
def threads() -> Iterator[None]:
    before = kernels.threads()
    yield
    kernels.set_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("weights", TYPES)
def test_a_row_has_the_same_bytes_among_any_number_of_rows_and_threads(
    weights: str, tmp_path: Path
) -> None:
    write_tiny(
        *("qwen3_moe", tmp_path / "m"),
        dtype=TYPES[weights],
        num_experts=8,
        moe_intermediate_size=31,  # no multiple of any step of the kernels
    )
    model, ids = load(tmp_path / "m", weights), tokens(MOST_ROWS)
    alone = logits_of(model, ids, 1)
    for rows in range(2, MOST_ROWS + 1):
        kernels.set_threads(1 + rows % 3)
        assert torch.equal(logits_of(model, ids, rows), alone), rows


@pytest.mark.parametrize("kind", ["qwen3_moe", "llama4_text"])
def test_rows_of_several_batches_have_the_bytes_that_each_has_alone(
    kind: str, tmp_path: Path
) -> None:
    write_tiny(kind, tmp_path / "m", num_local_experts=8, num_experts_per_tok=7)
    model, ids = load(tmp_path / "m"), tokens(90)  # 630 places, of which 512 are computed at a time
    assert torch.equal(logits_of(model, ids, 90), logits_of(model, ids, 1))


# tokens


def chosen_by_transformers(folder: Path, ids: list[int], rows: int) -> int:
    """Return how many experts, over all layers, the last rows go through in transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = 0
    for logits in model(torch.tensor([ids]), output_router_logits=True).router_logits:
        found += len(logits[-rows:].topk(model.config.num_experts_per_tok).indices.unique())
    return found


@torch.inference_mode()
def test_a_verdict_tells_how_many_experts_its_pass_went_through(tmp_path: Path) -> None:
    write_tiny("qwen3_moe", tmp_path / "m")
    model, prompt, drafted = load(tmp_path / "m"), tokens(12), tokens(16)[12:]
    assert model.routing is not None
    verifier, tree = Verifier(model, Spans()), TreeSettings(policy="dynamic", gamma=4, depth=4)
    (first,) = verifier.open(
        opening(1, tuple(prompt), key=KEY, capacity=90, sampling=Sampling(), tree=tree)
    )
    assert isinstance(first, First)
    verifier.take_experts()
    item = VerifyItem(
        session=1, round=1, prefix=13, tokens=tuple(drafted), parents=(-1, *range(len(drafted) - 1))
    )
    verifier.verify([item])
    expected = chosen_by_transformers(tmp_path / "m", [*prompt, first.token, *drafted], 5)
    assert verifier.take_experts() == expected
    assert model.routing.row < expected <= model.routing.most
    assert verifier.take_experts() == 0


def decoder_plans(model: LanguageModel) -> list[LayerPlan]:
    assert isinstance(model.back_end, fused.Kernels)
    return [layer.plan for layer in model.back_end._layers]


# checkpoints


def rewrite(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def test_no_layer_has_numbers_before_it_is_filled(tmp_path: Path) -> None:
    write_tiny("qwen3_moe", tmp_path / "m")
    skeleton = open_skeleton(open_checkpoint(str(tmp_path / "m")))
    assert all(part.is_meta for part in decoder_layers(skeleton.model)[1].parameters())


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    write_tiny("qwen3_moe", tmp_path / "m")
    rewrite(tmp_path / "m", lambda tensors: tensors.pop(EXPERT))
    with pytest.raises(
        CheckpointError, match=f"lacks tensor {EXPERT}, which its config.json calls for"
    ):
        load(tmp_path / "m")


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    write_tiny("qwen3_moe", tmp_path / "m")
    rewrite(tmp_path / "m", lambda tensors: tensors.update({EXPERT: torch.ones(5, 64)}))
    with pytest.raises(CheckpointError, match=f"{EXPERT} has the shape .5, 64., where"):
        load(tmp_path / "m")


def stack(tensors: dict[str, Tensor]) -> None:
    """Bring the experts of every layer into one tensor, as transformers has them in memory."""

    def taken(at: str, *names: str) -> Tensor:
        return torch.cat([tensors.pop(f"{at}.{name}.weight") for name in names])

    for layer in range(4):
        at = f"model.layers.{layer}.mlp.experts"
        gate_up = torch.stack([taken(f"{at}.{e}", "gate_proj", "up_proj") for e in range(4)])
        down = torch.stack([taken(f"{at}.{e}", "down_proj") for e in range(4)])
        tensors |= {f"{at}.gate_up_proj": gate_up, f"{at}.down_proj": down}


def test_experts_in_one_tensor_a_layer_are_read_too(tmp_path: Path) -> None:
    write_tiny("qwen3_moe", tmp_path / "m")
    one_by_one = logits_of(load(tmp_path / "m"), tokens(20), 20)
    rewrite(tmp_path / "m", stack)
    assert torch.equal(logits_of(load(tmp_path / "m"), tokens(20), 20), one_by_one)


def test_a_mixture_of_one_expert_is_read(tmp_path: Path) -> None:
    write_tiny("mixtral", tmp_path / "m", num_local_experts=1, num_experts_per_tok=1)
    found = logits_of(load(tmp_path / "m"), tokens(20), 20)
    expected = reference_logits(tmp_path / "m", tokens(20))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_experts_in_fp64_are_those_in_fp32(weights: str, tmp_path: Path) -> None:
    write_tiny("qwen3_moe", tmp_path / "m")
    single = logits_of(load(tmp_path / "m", weights), tokens(20), 20)
    rewrite(
        tmp_path / "m",
        lambda tensors: tensors.update({name: t.double() for name, t in tensors.items()}),
    )
    assert torch.equal(logits_of(load(tmp_path / "m", weights), tokens(20), 20), single)


def write_in_blocks(folder: Path) -> dict[str, Tensor]:
    """Put random experts in MXFP4 into a checkpoint of gpt-oss; what transformers reads of them."""
    write_tiny("gpt_oss", folder, dtype=torch.bfloat16)
    generator, plain = torch.Generator().manual_seed(3), dict[str, Tensor]()

    def pack(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("up_proj", "down_proj"))]:
            experts, inputs, outputs = tensors.pop(name).shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(256, (*shape, 16), generator=generator).byte()
            scales = torch.randint(122, 126, shape, generator=generator).byte()
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales).contiguous()

    rewrite(folder, pack)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return plain


def test_experts_in_mxfp4_are_what_transformers_reads_of_them(tmp_path: Path) -> None:
    plain = write_in_blocks(tmp_path / "m")
    skeleton = open_skeleton(open_checkpoint(str(tmp_path / "m")))
    for name, expected in plain.items():
        assert torch.equal(skeleton.read(name), expected)
    found = logits_of(load(tmp_path / "m", "half"), tokens(20), 20)
    write_tiny("gpt_oss", tmp_path / "plain", dtype=torch.bfloat16)
    kept = load_file(tmp_path / "m" / "model.safetensors")
    others = {name: tensor for name, tensor in kept.items() if "proj_" not in name}
    biases = {name: tensor for name, tensor in kept.items() if name.endswith("proj_bias")}
    rewrite(tmp_path / "plain", lambda tensors: tensors.update({**others, **biases, **plain}))
    assert torch.equal(found, logits_of(load(tmp_path / "plain", "half"), tokens(20), 20))


def test_experts_in_mxfp4_are_computed_from_their_blocks(tmp_path: Path) -> None:
    """They are packed one by one, and take what they take in the file."""
    write_in_blocks(tmp_path / "m")
    exact = logits_of(load(tmp_path / "m"), tokens(20), 20)
    assert torch.equal(
        logits_of(load(tmp_path / "m", "file", activations="fp32"), tokens(20), 20), exact
    )
    rounded = load(tmp_path / "m", "file")
    found = logits_of(rounded, tokens(20), 20)
    moved = (found - exact).norm(dim=1) / exact.norm(dim=1)
    assert 0 < float(moved.quantile(0.25)) < 0.2
    assert torch.equal(logits_of(rounded, tokens(20), 1), found)
    tensors = read_tensors(tmp_path / "m")
    numbers = sum(tensor.numbers for tensor in tensors if tensor.name.endswith("_blocks"))
    saved = weights_bytes(tensors, "half") - weights_bytes(tensors, "file")
    assert saved == pytest.approx(numbers * (2 - 17 / 32), rel=0.25)  # rows by 16
    with pytest.raises(CheckpointError, match="are blocks already"):
        load(tmp_path / "m", "int4")


@pytest.mark.parametrize("weights", ["fp32", "file"])
def test_a_block_whose_power_of_two_is_no_number_is_named(weights: str, tmp_path: Path) -> None:
    write_in_blocks(tmp_path / "m")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    rewrite(tmp_path / "m", lambda tensors: tensors[name].view(-1)[5:6].fill_(255))
    with pytest.raises(CheckpointError, match=f"no number in tensor {name}"):
        load(tmp_path / "m", weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [Kind.FP32, Kind.FP16, Kind.BF16, Kind.INT8])
def test_a_matrix_is_packed_by_one_thread_as_by_all(kind: Kind, dtype: torch.dtype) -> None:
    if kind in (Kind.FP16, Kind.BF16):
        dtype = DTYPES[kind]
    generator = torch.Generator().manual_seed(5)
    for shape in ((37, 48), (100, 33), (16, 3)):
        weight = (torch.randn(shape, generator=generator) ** 3).to(dtype)
        weight[0, :2] = torch.tensor([0.0, 1e-7])  # subnormal in fp16
        alone, together, widened = (PackedMatrix(kind, *shape) for _ in range(3))
        alone.pack_alone(weight)
        together.pack(weight)
        widened.pack(weight.to(DTYPES[kind]))
        assert bytes(alone.memory) == bytes(together.memory) == bytes(widened.memory)
        check_rows("experts'", alone, weight)
        with pytest.raises(UnsupportedError, match="experts' weights differs"):
            check_rows("experts'", alone, weight.roll(1, 0))


# random weights


@pytest.mark.parametrize("weights", ["half", "int8"])
def test_a_model_of_random_experts_is_made_one_by_one_and_tells_how_far_it_is(
    weights: str, tmp_path: Path
) -> None:
    write_tiny("qwen3_moe", tmp_path / "m", dtype=torch.bfloat16)
    (tmp_path / "m" / "model.safetensors").unlink()
    heard: list[tuple[str, int, int]] = []
    with hearing_loads(lambda *told: heard.append(told)):
        model = random_language_model(tmp_path / "m", weights=weights, layers=2)
    assert model.backend == "kernels"
    _, done, total = next(told for told in reversed(heard) if told[2])  # proving counts no bytes
    assert 0.9 * total < done <= total
    assert len({told[1] for told in heard}) > 8 * 2  # experts are counted one by one
    layer = decoder_plans(model)[0]
    assert layer.experts is not None
    first, second = (matrix.row(0) for matrix in layer.experts.down[:2])
    assert not (first == second).all()
    assert 0.5 < float(first.std()) * first.size**0.5 < 2.0


# memory


@pytest.mark.parametrize("weights", ["half", "int8"])
def test_the_estimate_of_memory_counts_experts_as_they_are_packed(
    weights: str, tmp_path: Path
) -> None:
    write_tiny("qwen3_moe", tmp_path / "m", dtype=torch.bfloat16)
    assert in_pieces(tmp_path / "m")
    tensors = read_tensors(tmp_path / "m")
    numbers = sum(tensor.numbers for tensor in tensors if tensor.is_expert)
    whole = weights_bytes(tensors, weights) - weights_bytes(
        [tensor for tensor in tensors if not tensor.is_expert], weights
    )
    number = {"half": 2, "int8": 1}[weights]
    assert number * numbers <= whole <= 1.5 * number * numbers
