"""The embedded pair: it loads, it is as small as promised, both models speak the same tokens, and
its prompts are sound."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

DEMO = Path(__file__).resolve().parents[2] / "launch" / "demo"
MEGABYTE = 1_000_000


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """No bars while models load, and one thread: the models are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()
    torch.set_num_threads(threads)


def prompts() -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    ]


@pytest.mark.parametrize(
    ("name", "least", "most"), [("target", 6_000_000, 7_000_000), ("draft", 100_000, 1_000_000)]
)
def test_model_loads_and_has_the_promised_size(name: str, least: int, most: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / name)
    assert least < sum(p.numel() for p in model.parameters()) <= most
    assert model.dtype == torch.float16
    assert model.config.max_position_embeddings == 512
    assert model.config.tie_word_embeddings
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(DEMO / name))
    with torch.no_grad():
        logits = model.float()(torch.tensor([[0, 5, 6]])).logits
    assert logits.isfinite().all()


def test_both_models_have_the_same_tokenizer_and_template() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (DEMO / "target" / file).read_bytes() == (DEMO / "draft" / file).read_bytes()


def test_chat_template_is_the_format_of_the_training_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    turns = [{"role": "user", "content": "Hello!"}]
    assert (
        tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        == "<|begin|><|user|>\nHello!<|end|>\n<|assistant|>\n"
    )


def test_folder_is_small_and_holds_no_pickle() -> None:
    files = [f for f in DEMO.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    assert sum(f.stat().st_size for f in files if f.suffix == ".safetensors") < 20_000_000
    assert sum(f.stat().st_size for f in files if f.suffix != ".safetensors") < MEGABYTE
    assert not [f for f in files if f.suffix in {".bin", ".pt", ".pth", ".pkl"}]


def test_prompts_are_varied_short_and_named_once() -> None:
    rows = prompts()
    assert len(rows) == 48
    assert len({r["id"] for r in rows}) == 48
    assert len({tuple(r["turns"]) for r in rows}) == 48
    assert len(Counter(r["category"] for r in rows)) >= 6
    for row in rows:
        assert row["turns"]
        assert all(len(turn.split()) < 60 for turn in row["turns"])
