"""The target beside transformers' own forward: a model that computes another function is found,
with the position where it begins."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dovetail.launch.checks.agreement import Agreement, compare
from dovetail.protocol.messages import TokenLogprobs
from dovetail.workers import kernels
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.parity.card import reference_logits
from dovetail.workers.models.segment import Segment
from support.architectures import write_varied
from support.models import CONTEXT, tiny_mistral
from support.zoo import TOKENS

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")


def scores_of(model: LanguageModel, tokens: Sequence[int]) -> list[TokenLogprobs]:
    """Return what a model says of each token of a text but the first, and of the three likeliest
    there."""
    segment = Segment(model.new_cache(len(tokens)), 0, len(tokens))
    laws: Tensor = model.forward(
        torch.tensor(tokens), torch.arange(len(tokens)), [segment]
    ).log_softmax(-1)
    scores = []
    for law, token in zip(laws, tokens[1:], strict=False):
        best, which = law.topk(3)
        top = tuple(zip(which.tolist(), (min(0.0, x) for x in best.tolist()), strict=True))
        scores.append(TokenLogprobs(logprob=min(0.0, float(law[token])), top=top))
    return scores


def agreement(model: LanguageModel, tokens: Sequence[int], replied: int = 0) -> Agreement:
    rows = reference_logits(open_checkpoint(str(model.checkpoint.folder)), tokens, CONTEXT)
    return compare(tokens, scores_of(model, tokens), replied, rows, model.weights)


@needs_kernels
def test_the_model_of_a_checkpoint_agrees(tmp_path: Path) -> None:
    found = agreement(
        load_language_model(
            str(tiny_mistral(tmp_path, sliding_window=20)), weights="fp32", device="cpu"
        ),
        TOKENS,
    )
    assert found.ok
    assert (found.tokens, found.first) == (len(TOKENS) - 1, None)
    assert found.largest < 1e-4


@needs_kernels
@pytest.mark.parametrize(
    "kind",
    [
        "gemma4_text small",
        "lfm2",
        pytest.param("granitemoehybrid", marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe_text", marks=pytest.mark.slow),
        pytest.param("gpt_oss", marks=pytest.mark.slow),
        pytest.param("llama4_text", marks=pytest.mark.slow),
    ],
)
def test_layers_with_states_inputs_experts_and_shared_keys_agree(kind: str, tmp_path: Path) -> None:
    folder = write_varied(kind, tmp_path / "m", torch.bfloat16)
    model = load_language_model(str(folder), weights="half", device="cpu")
    assert (model.backend, agreement(model, TOKENS).ok) == ("kernels", True)


@needs_kernels
@pytest.mark.parametrize(
    ("field", "value", "first"),
    [
        ("rotary_dim", 0, 2),
        ("window", 30, 21),
        ("window", 0, 21),
        ("softcap", 3.0, 2),
        ("scale", 0.26, 2),
    ],
)
def test_a_model_that_is_broken_in_one_layer_is_found_where_it_first_shows(
    tmp_path: Path, field: str, value: float, first: int
) -> None:
    """A row is about the token behind it, so what breaks the second token shows at the third; what
    a window lets go may be of little weight at first."""
    model = load_language_model(
        str(tiny_mistral(tmp_path, sliding_window=20)), weights="fp32", device="cpu"
    )
    setattr(model.back_end._layers[1].struct, field, value)  # type: ignore[attr-defined]
    found = agreement(model, TOKENS)
    assert found.ok is False
    assert found.first in (first, first + 1)
    assert f"the target differs from transformers in fp32 at position {found.first}" in found.remark


@needs_kernels
def test_weights_of_eight_bits_are_another_function_whose_mean_difference_is_bounded(
    tmp_path: Path,
) -> None:
    model = load_language_model(str(tiny_mistral(tmp_path)), weights="int8", device="cpu")
    found = agreement(model, TOKENS)
    assert found.of_mean
    assert 0 < found.mean < found.largest
    broken = model.back_end._layers[0].struct  # type: ignore[attr-defined]
    broken.rotary_dim = 0
    assert agreement(model, TOKENS).mean > 2 * found.mean


def test_a_choice_that_the_reference_would_not_make_is_found_though_its_score_is_right() -> None:
    laws = torch.tensor([[3.0, 0.0, 1.0], [3.0, 0.0, 1.0], [0.0, 0.0, 9.0]])
    tokens = [1, 0, 2, 2]
    scores = [
        TokenLogprobs(logprob=float(law.log_softmax(-1)[token]))
        for law, token in zip(laws, tokens[1:], strict=True)
    ]
    assert compare(tokens, scores, 1, iter([laws]), "fp32").ok
    assert compare(tokens, scores, 2, iter([laws[:2], laws[2:]]), "half").first == 2


def test_a_token_that_the_target_never_chooses_is_not_the_references_choice_either() -> None:
    laws = torch.tensor([[3.0, 9.0, 1.0]])
    score = TokenLogprobs(logprob=float(laws[0].log_softmax(-1)[0]), top=((1, -0.0028),))
    assert compare([2, 0], [score], 1, iter([laws]), "fp32").first == 1
    assert compare([2, 0], [score], 1, iter([laws]), "fp32", suppressed=(-1, 1, 3)).ok
    assert compare([2, 0], [score], 1, iter([laws]), "fp32", suppressed=(0, 1)).first == 1


@pytest.mark.parametrize("weights", ["fp32", "half", "file-fp32"])
def test_of_exact_weights_with_rounded_keys_and_values_the_mean_difference_is_bounded(
    weights: str,
) -> None:
    """A token that goes through another expert because of them may differ by more."""
    tokens, laws = [0] * 40, torch.zeros(39, 4).log_softmax(-1)
    scores = [TokenLogprobs(logprob=float(law[0])) for law in laws]
    laws = (laws + torch.eye(4)[0] * 0.1 * (torch.arange(39) == 20)[:, None]).log_softmax(-1)
    assert compare(tokens, scores, 0, iter([laws]), weights).first == 21
    assert compare(tokens, scores, 0, iter([laws]), weights, "half").ok


def test_a_checkpoint_that_is_not_here_is_said_and_not_passed_over() -> None:
    nothing = Agreement(why="the target's model cannot be read here")
    assert nothing.ok is None
    assert (
        nothing.remark
        == "the target was not compared with transformers: the target's model cannot be read "
        "here"
    )
