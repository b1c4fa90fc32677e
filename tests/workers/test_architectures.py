"""Every causal model class of the installed transformers that no family here describes, tiny: it is
decoded rightly, or refused in one sentence that is true and says what to do. Those that are
described are in `test_described_families.py`."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.settings import Sampling
from dovetail.workers import kernels
from dovetail.workers.models.checkpoints.architecture import RECURRENT_FAMILIES
from dovetail.workers.models.checkpoints.configured import read_config
from dovetail.workers.models.families.names import DESCRIBED
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.speculation.decode import Chooser
from support.architectures import VOCABULARY, YARN, configurations, write_tiny
from support.cases import everyday
from support.decoded import in_a_tree
from support.models import reference_logits
from support.sentences import check_sentence

EVERY = 16  # one in so many classes is tried every day, and all of them in the slow run
PROMPT, TREE = 40, 12
"""Tokens that are read at once, beyond every tiny window, and then a path of a tree."""
TOLERANCE = {"fp32": 1e-3, "int8": 0.25}
UNBUILT = {"dots3_note", "gemma3n", "gemma4_assistant", "musicgen", "musicgen_melody"}
"""Types without a tiny configuration that transformers can build; all are refused."""
DTYPES = {"fp32": torch.float32, "int8": torch.float32}


def some(kinds: Iterable[str]) -> list[Any]:
    """All of some model types; those of the everyday run without the mark."""
    return [
        kind if number % EVERY == 0 else pytest.param(kind, marks=pytest.mark.slow)
        for number, kind in enumerate(sorted(kinds))
    ]


@cache
def tokens() -> list[int]:
    return torch.randint(
        3, VOCABULARY, (PROMPT + TREE,), generator=torch.Generator().manual_seed(5)
    ).tolist()


def check_refusal(text: str, folder: Path) -> None:
    """One true sentence that names the folder, what kind of model it is and a remedy, in plain
    words."""
    said, config = (
        check_sentence(text, str(folder)),
        json.loads((folder / "config.json").read_text()),
    )
    kinds = [
        config["model_type"],
        *(
            part["model_type"]
            for part in config.values()
            if isinstance(part, dict) and "model_type" in part
        ),
    ]
    assert any(kind in said for kind in kinds), text
    check_truth(text, folder)


def check_truth(text: str, folder: Path) -> None:
    """Check that what a sentence says of a model is so."""
    content = json.loads((folder / "config.json").read_text())
    config_class = configurations().get(content["model_type"])
    model_class = None if config_class is None else MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    if "both directions" in text:
        ids = tokens()
        changed = [*ids[:-1], ids[-1] % 45 + 3]
        one, other = (reference_logits(folder, own) for own in (ids, changed))
        assert not torch.allclose(one[0], other[0], atol=1e-4), "its first token sees the last one"
    if "recurrent state" in text:
        layers = str(AutoConfig.from_pretrained(folder).get_text_config().to_dict())
        assert (
            getattr(model_class, "_is_stateful", False)
            or "linear_attention" in layers
            or "hybrid" in layers
        )
    if "fails with this config.json" in text:
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            reference_logits(folder, tokens())
    if "latent attention" in text:
        assert "kv_lora_rank" in json.dumps(content)
    if "computes attention, masks or positions by itself" in text:
        assert not model_class._supports_attention_backend
    if "together with other parts" in text:
        assert config_class is not None
        assert config_class.sub_configs


@pytest.mark.parametrize("weights", everyday(DTYPES, "fp32"))
@pytest.mark.parametrize("kind", some({*configurations()} - DESCRIBED))
def test_a_class_is_decoded_as_transformers_does_or_refused_in_one_true_sentence(
    kind: str, weights: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if weights != "fp32" and not kernels.available():
        pytest.skip("the C++ kernels are not built")
    folder = tmp_path / "model"
    assert write_tiny(kind, folder, dtype=DTYPES[weights]) == (kind not in UNBUILT)
    capfd.readouterr()
    try:
        model = load_language_model(str(folder), weights=weights, device="cpu")
    except CheckpointError as error:
        assert capfd.readouterr() == ("", ""), "nothing but the sentence is said"
        check_refusal(str(error), folder)
        if "use weights fp32" in str(error):
            assert load_language_model(str(folder), weights="fp32", device="cpu").weights == "fp32"
    else:
        assert capfd.readouterr() == ("", "")
        found = in_a_tree(model, tokens(), PROMPT)
        assert found.shape[1] == model.vocabulary_size
        expected = reference_logits(folder, tokens())
        shares = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        found_share = float(shares.mean() if weights == "int8" else shares.max())
        assert found_share < TOLERANCE[weights], f"{model.choice}: {shares.tolist()}"


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("gemma4_unified_assistant", "which is not supported"),
        ("axk2", "of type indexed_attention, which need a sparse indexer"),
        ("minimax", "of type linear_attention, which keep a recurrent state; states are"),
        ("bailing_hybrid", "the decays of its linear attention have a lower bound"),
    ],
)
def test_a_refusal_names_what_is_missing_here(kind: str, missing: str, tmp_path: Path) -> None:
    write_tiny(kind, tmp_path / "model")
    with pytest.raises(CheckpointError) as refused:
        read_config(tmp_path / "model" / "config.json")
    assert missing in check_sentence(str(refused.value), str(tmp_path / "model"))
    if "states are" in missing:
        assert "qwen3_next alone, and this model type is not described here" in str(refused.value)
        assert kind not in RECURRENT_FAMILIES


def test_a_language_model_with_a_sparse_indexer_is_refused_for_that(tmp_path: Path) -> None:
    part = {"model_type": "minimax_m3_vl_text", "sparse_attention_config": {}}
    content = {"model_type": "minimax_m3_vl", "text_config": part}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="whose layers need a sparse indexer") as refused:
        read_config(tmp_path / "config.json")
    check_refusal(str(refused.value), tmp_path)


def test_a_model_with_more_embeddings_than_logits_is_sampled(tmp_path: Path) -> None:
    write_tiny("moshi", tmp_path / "model")
    model = load_language_model(str(tmp_path / "model"), weights="fp32", device="cpu")
    chooser = Chooser([3], Sampling(temperature=1.0), bytes(16), model.vocabulary_size)
    logits = in_a_tree(model, tokens(), PROMPT)
    assert logits.shape[1] == model.vocabulary_size == VOCABULARY
    assert all(0 <= chooser.choice(row[None], []) < VOCABULARY for row in logits)


@pytest.mark.parametrize(
    ("kind", "backend", "weights"),
    [
        ("opt", "auto", "int8"),
        pytest.param("opt", "kernels", "half", marks=pytest.mark.slow),
        pytest.param("mimo_v2_flash", "auto", "half", marks=pytest.mark.slow),
        pytest.param("mimo_v2_flash", "kernels", "int8", marks=pytest.mark.slow),
    ],
)
def test_the_remedy_of_a_refusal_leads_to_a_model_that_is_loaded(
    kind: str, backend: str, weights: str, tmp_path: Path
) -> None:
    """The kernels can compute none of these, and torch's own operations the last one alone."""
    if not kernels.available():
        pytest.skip("the C++ kernels are not built")
    folder = tmp_path / "model"
    fields = {"do_layer_norm_before": False} if kind == "opt" else {}
    write_tiny(kind, folder, dtype=torch.bfloat16 if weights == "half" else torch.float32, **fields)
    with pytest.raises(CheckpointError) as refused:
        load_language_model(str(folder), weights=weights, device="cpu", backend=backend)
    assert ("weights fp32" in str(refused.value)) == (kind == "opt"), refused.value
    if kind == "opt":
        fp32 = load_language_model(str(folder), weights="fp32", device="cpu", backend="library")
        assert fp32.weights == "fp32"


@pytest.mark.parametrize(
    ("kind", "fields", "culprit"),
    [
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3;"),
        (
            "llama",
            {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
            "rope_parameters is ",
        ),
        pytest.param(
            "qwen3_moe",
            {"num_key_value_heads": 3},
            "num_key_value_heads is 3;",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "deepseek_v3", {"qk_rope_head_dim": 7}, "fields do not fit", marks=pytest.mark.slow
        ),
    ],
)
def test_of_a_configuration_that_transformers_cannot_compute_either_the_field_is_named(
    kind: str, fields: dict[str, Any], culprit: str, tmp_path: Path
) -> None:
    write_tiny(kind, tmp_path, **fields)
    with pytest.raises(CheckpointError, match=f"fails with this config.json: .*{culprit}") as said:
        load_language_model(str(tmp_path), weights="fp32", device="cpu")
    check_refusal(str(said.value), tmp_path)


@pytest.mark.parametrize("kind", ["prophetnet", "reformer"])
def test_a_configuration_that_transformers_computes_when_called_in_another_way_is_not_blamed(
    kind: str, tmp_path: Path
) -> None:
    """ProphetNet takes no mask of pairs, and Reformer reads numbers that a trial does not have."""
    write_tiny(kind, tmp_path)
    with pytest.raises(CheckpointError, match="by itself, and token trees need other ones") as said:
        load_language_model(str(tmp_path), weights="fp32", device="cpu")
    check_refusal(str(said.value), tmp_path)


@pytest.mark.parametrize(
    "kind", some(kind for kind, config in configurations().items() if hasattr(config, "is_decoder"))
)
def test_an_encoder_that_is_told_to_be_a_decoder_is_decoded_or_refused_too(
    kind: str, tmp_path: Path
) -> None:
    write_tiny(kind, tmp_path, is_decoder=True)
    try:
        model = load_language_model(str(tmp_path), weights="fp32", device="cpu")
    except CheckpointError as error:
        check_refusal(str(error), tmp_path)
    else:
        expected = reference_logits(tmp_path, tokens())
        found = in_a_tree(model, tokens(), PROMPT)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
