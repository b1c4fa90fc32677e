"""Whatever is wrong with a folder that is named as a model is said in one sentence: what, where,
and what to do about it. `test_checkpoint.py` does the same with what `hostile.checkpoints` has."""

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.settings import DraftSettings
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.models.loading import load_language_model
from support.cases import everyday
from support.models import FAMILIES
from support.sentences import check_sentence

VALUES = (
    float("nan"),
    -1,
    0,
    3,
    10**12,
    0.5,
    "x",
    "",
    [],
    {},
    [1, 2],
    {"a": 1},
    None,
    True,
)
"""Values that may stand in a JSON file in place of anything."""
TRIED = ("llama", "gpt2", "gemma2", "phi3")
ALL = 10**6


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama to be damaged."""
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


def refusal(source: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_language_model(str(source), weights="fp32", device="cpu")
    return check_sentence(str(caught.value), str(source))


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def replace(file: Path, content: bytes | None) -> None:
    """Other content in place of a file's; None: a folder."""
    file.unlink()
    file.mkdir() if content is None else file.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "config.json is a folder": (
        lambda p: replace(p / "config.json", None),
        "config.json cannot be read (Is a directory)",
    ),
    "config.json is empty": (lambda p: replace(p / "config.json", b" \n"), "config.json is empty"),
    "no model_type": (lambda p: replace(p / "config.json", b"{}"), "config.json has no model_type"),
    "model_type is a number": (
        lambda p: edit(p / "config.json", model_type=3),
        "a model_type of 3",
    ),
    "an image model": (
        lambda p: edit(p / "config.json", model_type="vit", vocab_size=None),
        "model type vit has no vocab_size",
    ),
    "an encoder and decoder": (
        lambda p: edit(p / "config.json", model_type="t5", is_encoder_decoder=True),
        "model type t5",
    ),
    "a wrapper": (
        lambda p: edit(
            p / "config.json",
            model_type="paligemma",
            text_config={"model_type": "gemma"},
            vocab_size=None,
        ),
        "paligemma is a language model (gemma)",
    ),
    "an embedding model": (
        lambda p: edit(
            p / "config.json",
            model_type="gemma3_text",
            use_bidirectional_attention=True,
            head_dim=16,
        ),
        "both directions",
    ),
    "layers is NaN": (
        lambda p: edit(p / "config.json", num_hidden_layers=float("nan")),
        "num_hidden_layers is nan; it must be an integer >= 1",
    ),
    "layers is text": (
        lambda p: edit(p / "config.json", num_hidden_layers="2"),
        "num_hidden_layers is '2'",
    ),
    "tokenizer.json is a folder": (lambda p: replace(p / "tokenizer.json", None), "tokenizer.json"),
    "only GGUF": (
        lambda p: (p / "model.safetensors").rename(p / "model-q4.gguf"),
        "model-q4.gguf is no GGUF file",
    ),
    "another name": (
        lambda p: (p / "model.safetensors").rename(p / "consolidated.safetensors"),
        "though it has consolidated.safetensors",
    ),
    "weights that are cut": (
        lambda p: replace(p / "model.safetensors", (p / "model.safetensors").read_bytes()[:-100]),
        "not a complete safetensors",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_wrong_with_a_folder_is_one_sentence(folder: Path, damage: str) -> None:
    break_it, words = DAMAGES[damage]
    break_it(folder)
    assert words.replace("  ", " ") in refusal(folder).replace("  ", " ")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model-q4.gguf", "is no GGUF file"),
        ("model.safetensors", "is one file of a model; name its folder"),
        ("config.json", "is a file; a model is"),
    ],
)
def test_a_file_in_place_of_a_folder_is_told_what_it_is(
    folder: Path, name: str, words: str
) -> None:
    (folder / name).touch()
    assert words in refusal(folder / name)


@pytest.mark.parametrize(
    "damage", ["config.json is empty", "a wrapper", "layers is NaN", "weights that are cut"]
)
def test_a_draft_comes_through_the_same_door(folder: Path, damage: str) -> None:
    break_it, words = DAMAGES[damage]
    break_it(folder)
    with pytest.raises(CheckpointError) as caught:
        open_draft_worker(
            DraftSettings(model=str(folder), device="cpu"),
            name="draft",
            threads=1,
            target=str(folder),
        )
    assert words in check_sentence(str(caught.value), str(folder))


@pytest.mark.parametrize("count", everyday([6, ALL], 6))
@pytest.mark.parametrize("family", TRIED)
def test_any_value_in_any_field_of_a_configuration_loads_or_is_one_sentence(
    tmp_path: Path, family: str, count: int
) -> None:
    folder = FAMILIES[family](tmp_path / "model")
    config = folder / "config.json"
    content = json.loads(config.read_text())
    others = {"layer_types", "sliding_window", "auto_map", "text_config"}
    cases = list(itertools.product(sorted({*content, *others}), VALUES))
    for name, value in random.Random(3).sample(cases, min(count, len(cases))):
        print(f"{name}: {value}")
        config.write_text(json.dumps({**content, name: value}))
        try:
            load_language_model(str(folder), weights="fp32", device="cpu")
        except CheckpointError as error:
            check_sentence(str(error), str(folder))
