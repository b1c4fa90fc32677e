"""The substitute of a small model: what it computes, what is kept of it, and where it cannot be."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dovetail.workers import kernels
from dovetail.workers.devices.memory import HELD
from dovetail.workers.models.backends import packing
from dovetail.workers.models.checkpoints.checkpoint import load_tensors, save_tensors
from dovetail.workers.models.checkpoints.configured import decoder_layers
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from dovetail.workers.models.substitutes.quantize import quantise
from dovetail.workers.models.substitutes.substitute import load_substitute
from support.architectures import VARIED, write_tiny
from support.models import tiny_llama, transformers_model

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")
ROUNDED = 0.08
"""The largest change of the logits of these models by rows of 8 bits (bf16 on torch's products);
their weights are ten times the usual ones, and 0.03 to 0.065 were measured."""
TOKENS = torch.tensor([3, 14, 15, 9, 26, 5, 35, 8])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target"), intermediate_size=128)


def logits(model: LanguageModel) -> Tensor:
    count = len(TOKENS)
    return model.forward(TOKENS, torch.arange(count), [Segment(model.new_cache(count), 0, count)])


def slow_logits(folder: Path, bits: int) -> Tensor:
    """transformers' own model, each of its layers' weights put in place of by what its codes stand
    for."""
    model = copy.deepcopy(transformers_model(folder))
    for part in model.model.layers.modules():
        if isinstance(part, nn.Linear):
            part.weight = nn.Parameter(
                quantise(part.weight.float(), bits).weight(), requires_grad=False
            )
    with torch.inference_mode():
        found: Tensor = model(TOKENS.unsqueeze(0)).logits[0]
    return found


@needs_kernels
@pytest.mark.parametrize(("weights", "bits"), [("int8", 8), ("int4", 4), ("int3", 3), ("int2", 2)])
def test_a_substitute_computes_what_its_codes_stand_for(
    folder: Path, tmp_path: Path, weights: str, bits: int
) -> None:
    found, expected = (
        logits(load_substitute(str(folder), weights=weights, device="cpu", folder=tmp_path)[0]),
        slow_logits(folder, bits),
    )
    assert float((found - expected).norm() / expected.norm()) < ROUNDED
    assert (
        bits > 4
        or float(
            (found - logits(load_language_model(str(folder), weights="fp32", device="cpu"))).norm()
            / expected.norm()
        )
        > 2 * ROUNDED
    )


@needs_kernels
@pytest.mark.parametrize(
    "kind",
    [
        *("qwen3_5_text", "lfm2", "youtu", "cohere2", "lfm2_moe"),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (
                *("bamba", "falcon_h1", "minicpm3", "exaone4", "glm4", "gpt_neox"),
                *("nemotron_h", "deepseek_v3"),
            )
        ),
    ],
)
def test_layers_of_every_kind_compute_what_their_codes_stand_for(kind: str, tmp_path: Path) -> None:
    """States, latents, gates, experts, and rows that are reordered."""
    write_tiny(kind, tmp_path, **VARIED.get(kind, {}))
    found = load_substitute(str(tmp_path), weights="int8", device="cpu")[0]
    assert found.backend == "kernels"
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").float()
    layers = decoder_layers(model)[1]
    for part in layers.modules():
        if isinstance(part, nn.Linear):
            part.weight = nn.Parameter(quantise(part.weight, 8).weight(), requires_grad=False)
    for stack in [part.data for part in layers.parameters() if part.ndim == 3]:
        if stack.shape[1] > 1:  # no convolution
            stack.copy_(torch.stack([quantise(matrix, 8).weight() for matrix in stack]))
    with torch.inference_mode():
        expected = model(TOKENS.unsqueeze(0)).logits[0]
    assert float((logits(found) - expected).norm() / expected.norm()) < 2 * ROUNDED


@needs_kernels
def test_experts_that_were_quantised_once_are_read_the_next_time(tmp_path: Path) -> None:
    write_tiny("mixtral", tmp_path / "m", num_hidden_layers=1)
    found, weights = list[Tensor](), list[int]()
    for _ in range(2):
        model, made = load_substitute(
            str(tmp_path / "m"), weights="int4", device="cpu", folder=tmp_path / "kept"
        )
        found.append(logits(model))
        weights.append(made.weights)
    assert weights[1] == 0
    assert torch.equal(*found)
    assert made.folder is not None
    (file,) = made.folder.glob("experts-*")
    file.write_bytes(file.read_bytes()[:-100])
    again, mended = load_substitute(
        str(tmp_path / "m"), weights="int4", device="cpu", folder=tmp_path / "kept"
    )
    assert 0 < mended.weights < weights[0]
    assert torch.equal(logits(again), found[0])


@pytest.mark.parametrize(("weights", "bits"), [("int8", 8), ("int3", 3)])
def test_on_torchs_products_it_computes_the_same_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, bits: int
) -> None:
    monkeypatch.setattr(packing, "reason_against", lambda kind: "they are not built")
    folder = tiny_llama(
        tmp_path, intermediate_size=104
    )  # neither whole groups of inputs, nor as many outputs as torch's layout wants
    found, expected = (
        logits(load_substitute(str(folder), weights=weights, device="cpu", folder=tmp_path)[0]),
        slow_logits(folder, bits),
    )
    assert float((found - expected).norm() / expected.norm()) < ROUNDED


def test_what_was_quantised_once_is_read_the_next_time(folder: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    first, made = load_substitute(
        str(folder),
        weights="int4",
        device="cpu",
        folder=tmp_path,
        tell=lambda done, of: told.append((done, of)),
    )
    assert (made.made, told) == (2, [(1, 2), (2, 2)])
    assert (
        f"quantised 2 layers, 0.1 million weights, to 4 bits in {made.seconds:.1f} s, saved in "
        f"{made.folder}" in made.report("draft")
    )
    again, nothing = load_substitute(str(folder), weights="int4", device="cpu", folder=tmp_path)
    assert (nothing.made, nothing.report("draft")) == (0, "")
    assert torch.equal(logits(first), logits(again))


def test_other_bits_and_another_checkpoint_are_kept_apart(folder: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other", intermediate_size=128, seed=1)
    kept = tmp_path / "kept"
    kinds = [(folder, "int4"), (folder, "int2"), (other, "int4")]
    for source, weights in kinds:
        assert load_substitute(str(source), weights=weights, device="cpu", folder=kept)[1].made > 0
    assert len([*kept.iterdir()]) == len(kinds)


def test_a_layer_whose_file_is_not_whole_is_quantised_again(folder: Path, tmp_path: Path) -> None:
    _, made = load_substitute(str(folder), weights="int4", device="cpu", folder=tmp_path)
    assert made.folder is not None
    first, second = sorted(made.folder.iterdir())
    first.write_bytes(first.read_bytes()[:-100])
    second.unlink()
    (made.folder / "tmpabc").mkdir()
    (made.folder / "tmpabc" / second.name).write_bytes(
        b"half of it"
    )  # what a process that was killed left
    assert load_substitute(str(folder), weights="int4", device="cpu", folder=tmp_path)[1].made == 2
    assert load_substitute(str(folder), weights="int4", device="cpu", folder=tmp_path)[1].made == 0


@pytest.mark.parametrize(
    "damage",
    [Tensor.double, lambda scales: torch.full_like(scales, torch.nan)],
    ids=["double", "nan"],
)
def test_a_layer_whose_scales_are_of_another_type_or_no_numbers_is_quantised_again(
    folder: Path, tmp_path: Path, damage: Callable[[Tensor], Tensor]
) -> None:
    whole, made = load_substitute(str(folder), weights="int4", device="cpu", folder=tmp_path)
    assert made.folder is not None
    file = min(made.folder.iterdir())
    tensors = load_tensors(file)
    save_tensors(
        file,
        {
            name: damage(content) if name.endswith("scales") else content
            for name, content in tensors.items()
        },
    )
    again, mended = load_substitute(str(folder), weights="int4", device="cpu", folder=tmp_path)
    assert mended.made == 1
    assert torch.equal(logits(again), logits(whole))


def test_where_nothing_can_be_kept_it_is_made_anew_each_time(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in (None, tmp_path / "file"):
        made = load_substitute(str(folder), weights="int4", device="cpu", folder=place)[1]
        assert made.made == 2
        assert made.report("draft").endswith("not kept")


@needs_kernels
@pytest.mark.parametrize(("weights", "bits"), [("int4", 4), ("int2", 2)])
def test_inputs_that_do_not_divide_into_groups_are_filled_up(
    tmp_path: Path, weights: str, bits: int
) -> None:
    folder = tiny_llama(tmp_path / "odd", intermediate_size=104)
    for _ in range(2):  # quantised, and read
        found, expected = (
            logits(load_substitute(str(folder), weights=weights, device="cpu", folder=tmp_path)[0]),
            slow_logits(folder, bits),
        )
        assert float((found - expected).norm() / expected.norm()) < ROUNDED


@pytest.mark.gpu
def test_on_a_gpu_it_computes_the_same_function(folder: Path, tmp_path: Path) -> None:
    """The pretended GPU takes the codes that were made on the CPU: a GPU searches in other types,
    and finds others."""
    load_substitute(str(folder), weights="int4", device="cpu", folder=tmp_path)
    found, expected = (
        logits(
            load_substitute(str(folder), weights="int4", device="cuda:0", folder=tmp_path)[0]
        ).cpu(),
        slow_logits(folder, 4),
    )
    assert float((found - expected).norm() / expected.norm()) < ROUNDED


@needs_kernels
def test_a_device_has_back_what_quantising_a_layer_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr(HELD, "_caches", {lambda: given_back.append(True)})
    model, _ = load_substitute(str(tiny_llama(tmp_path)), weights="int4", device="cpu")
    assert len(given_back) == model.layers
