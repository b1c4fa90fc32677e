"""A Gemma 4 assistant over its target's keys and values: transformers' logits, the same text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
)

from dovetail.protocol.errors import CheckpointError, SettingsError
from dovetail.protocol.settings import (
    DraftSettings,
    MemorySettings,
    Sampling,
    TargetSettings,
    TreeSettings,
)
from dovetail.workers.models.assistant import SLIDING, Assistant
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from dovetail.workers.unified import open_unified
from support.architectures import VARIED, randomise, write_tiny
from support.losslessness import difference
from support.stacks import complete_all, started, submit

HEADS = ("head_dim", "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v")
TREE = TreeSettings(policy="static", insist=True, gamma=4, depth=2, width=2)


def write_assistant(kind: str, target: Path, folder: Path, **fields: Any) -> None:
    """Write an assistant of random numbers for a tiny target of a kind."""
    config = json.loads((target / "config.json").read_text())
    same = {name: VARIED[kind][name] for name in HEADS if name in VARIED[kind]}
    same |= {name: config[name] for name in ("vocab_size", "sliding_window", "num_key_value_heads")}
    text = {
        "model_type": "gemma4_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 4,
        **same,
    }
    own = {"backbone_hidden_size": config["hidden_size"], "num_centroids": 12} | fields
    own |= {"centroid_intermediate_top_k": 3}
    model = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=text, **own))
    randomise(model)
    if model.masked_embedding is not None:
        order = torch.randperm(config["vocab_size"], generator=torch.Generator().manual_seed(1))
        model.masked_embedding.token_ordering.copy_(order)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return a function that writes a target of a kind and its assistant."""
    base = tmp_path_factory.mktemp("gemma4")

    def written(kind: str) -> tuple[Path, Path]:
        target, assistant = base / kind / "target", base / kind / "assistant"
        if not target.exists():
            write_tiny(kind.split()[0], target, **VARIED[kind])
            write_assistant(kind, target, assistant, use_ordered_embeddings="small" in kind)
        return target, assistant

    return written


def load(folder: Path, **about: Any) -> LanguageModel:
    return load_language_model(str(folder), weights="fp32", device="cpu", proof="off", **about)


@pytest.mark.parametrize("kind", ["gemma4_text", "gemma4_text small"])
def test_a_chain_has_the_logits_of_transformers(
    kind: str, folders: Callable[[str], tuple[Path, Path]]
) -> None:
    at, assistant_at = folders(kind)
    model, oracle = load(at), AutoModelForCausalLM.from_pretrained(at)
    assistant = Assistant(str(assistant_at), model)
    own = AutoModelForCausalLM.from_pretrained(assistant_at)
    ids = torch.randint(model.vocabulary_size, (21,), generator=torch.Generator().manual_seed(2))
    cache, rows = model.new_cache(20), 20
    model.forward(ids[:-1], torch.arange(rows), [Segment(cache, 0, rows)])
    cache.keep(range(rows), rows)
    with torch.no_grad():
        whole = oracle(ids[None, :-1], output_hidden_states=True, return_shared_kv_states=True)
    window = oracle.config.sliding_window - 1  # the position itself has no key
    shared = {
        name: tuple(part[:, :, -window if name == SLIDING else 0 :] for part in pair)
        for name, pair in whole.shared_kv_states.items()
    }
    token, state, expected = ids[-1:], whole.hidden_states[-1][0, -1:], whole.hidden_states[-1][0]
    seen = assistant.keys(cache, 0, rows)
    for _ in range(4):
        logits, after = assistant.forward(token, state, seen)
        with torch.no_grad():
            embedded = oracle.get_input_embeddings()(token[None])
            out = own(
                inputs_embeds=torch.cat([embedded, state[None]], -1),
                position_ids=torch.tensor([[rows]]),
                shared_kv_states=shared,
            )
        computed = logits.isfinite()
        assert torch.allclose(logits[computed], out.logits[0][computed], atol=1e-4)
        assert computed.all() or bool((out.logits[0][~computed] < logits[computed].min()).all())
        token, state = logits.argmax(-1), after
    siblings, _ = assistant.forward(torch.tensor([3, 4, 3]), expected[-3:], seen)
    alone, _ = assistant.forward(torch.tensor([4]), expected[-2:-1], seen)
    assert torch.allclose(siblings[1:2], alone, atol=1e-5)


@pytest.mark.parametrize(
    "kind", ["gemma4_text small", pytest.param("gemma4_text", marks=pytest.mark.slow)]
)
def test_the_text_is_the_target_s(kind: str, folders: Callable[[str], tuple[Path, Path]]) -> None:
    target, assistant = folders(kind)
    flags = {"target.model": str(target), "draft.model": str(assistant), "draft.share": "true"}
    replies = []
    for given in (flags, {"target.model": str(target), "draft.kind": "none"}):
        with started(given) as (_, client):
            asked = [
                submit(
                    client,
                    ["w1 w2 w3 w4 w2 w3"],
                    sampling=Sampling(temperature=temperature, min_tokens=12),
                    tokens=12,
                    seed=3,
                    tree=TREE if "draft.model" in given else None,
                )
                for temperature in (0.0, 1.0)
            ]
            replies.append(complete_all(client, asked))
    for ours, alone in zip(*replies, strict=True):
        assert difference(ours, alone.result.token_ids) is None
        assert ours.result.plain_rounds <= 1, "the last round has room for one token only"
        assert ours.result.rounds > 1


def test_what_does_not_fit_is_refused_by_name(
    folders: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    at, assistant_at = folders("gemma4_text small")
    model = load(at)
    tensors = load_file(assistant_at / "model.safetensors")
    config = (assistant_at / "config.json").read_text()

    def changed(name: str, **content: Any) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(content.pop("config", config))
        kept = {key: value for key, value in (tensors | content).items() if value is not None}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)

    pre = "pre_projection.weight"
    for name, content, words in (
        ("missing", {pre: None}, f"lacks tensors: {pre}"),
        ("extra", {"other": torch.ones(2)}, "that an assistant does not: other"),
        ("shape", {pre: tensors[pre][:, :-1].contiguous()}, pre),
        ("nan", {pre: tensors[pre] * float("nan")}, f"NaN or infinite values: {pre}"),
    ):
        with pytest.raises(CheckpointError, match=words):
            Assistant(changed(name, **content), model)
    wide = json.loads(config) | {"backbone_hidden_size": 8}
    narrow = changed("width", config=json.dumps(wide))
    with pytest.raises(CheckpointError):
        Assistant(narrow, model)
    with pytest.raises(CheckpointError, match=r"heads of full_attention is .* there and .* here"):
        Assistant(str(assistant_at), load(folders("gemma4_text")[0]))
    with pytest.raises(SettingsError, match=r"target\.cache = 'q8'"):
        Assistant(str(assistant_at), load(at, cache="q8"))
    with pytest.raises(SettingsError, match="takes a substitute or an assistant of the target"):
        open_unified(
            TargetSettings(model=str(at)),
            DraftSettings(model=str(at), share=True),
            name="unified",
            threads=1,
            memory=MemorySettings(),
        )
