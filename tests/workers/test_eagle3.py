"""EAGLE-3 heads in each public layout: what they propose is what the format says, computed by the
oracle, and what a layout leaves open is reported or refused."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dovetail.launch.planning.designs import read_config
from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.heads.head import classify, open_head
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from dovetail.workers.sessions.wire import to_array
from dovetail.workers.speculation.proposal import Shape
from support.eagle3_oracle import eagle3
from support.gguf_heads import write_gguf_head
from support.heads import write_files
from support.models import VOCABULARY, tiny_llama
from support.opening import opening

LAYERS, WIDTH, HEADS, KEY_HEADS, HEAD, WIDE, KNOWN = 8, 64, 4, 2, 24, 96, 20
"""Of the target, and of the heads: the tokens that their output knows."""
PROMPT, ROOT, DEPTH = [3, 1, 4, 1, 5, 9, 2, 6], 7, 4
TAPS, WITH_LAST = (2, 4, 5), (2, 4, LAYERS)


@dataclass(frozen=True)
class Head:
    """What a head computes; the rest is that of its layout."""

    taps: tuple[int, ...] = TAPS
    layers: int = 1
    flags: Mapping[str, bool] = field(default_factory=dict)
    head_norms: bool = False
    known: int = KNOWN  # VOCABULARY: the output is the target's

    def weights(self) -> dict[str, Tensor]:
        """Random weights by plain names, without those that are shared with the target."""
        random = torch.Generator().manual_seed(3)

        def matrix(rows: int, inputs: int) -> Tensor:
            return torch.randn(rows, inputs, generator=random) / inputs**0.5

        def norm(size: int) -> Tensor:
            return 1 + 0.2 * torch.randn(size, generator=random)

        found = {"fc.weight": matrix(WIDTH, 3 * WIDTH), "norm.weight": norm(WIDTH)}
        found["layers.0.hidden_norm.weight"] = norm(WIDTH)
        if self.flags.get("fc_norm"):
            found |= {f"fc_norm.{i}.weight": norm(WIDTH) for i in range(3)}
        if self.flags.get("norm_before_fc"):
            found["input_norm.weight"] = norm(3 * WIDTH)
        for index in range(self.layers):
            at, width = f"layers.{index}.", WIDTH * (2 if index == 0 else 1)
            for part, heads in (("q", HEADS), ("k", KEY_HEADS), ("v", KEY_HEADS)):
                found[f"{at}self_attn.{part}_proj.weight"] = matrix(heads * HEAD, width)
            found[f"{at}self_attn.o_proj.weight"] = matrix(WIDTH, HEADS * HEAD)
            if self.head_norms:
                found |= {f"{at}self_attn.{part}_norm.weight": norm(HEAD) for part in "qk"}
            for part, shape in (
                ("gate", (WIDE, WIDTH)),
                ("up", (WIDE, WIDTH)),
                ("down", (WIDTH, WIDE)),
            ):
                found[f"{at}mlp.{part}_proj.weight"] = matrix(*shape)
            for name in ("input_layernorm", "post_attention_layernorm"):
                found[f"{at}{name}.weight"] = norm(WIDTH)
        if self.known < VOCABULARY:
            ids = torch.randperm(VOCABULARY, generator=random)[: self.known].sort().values
            found |= {
                "lm_head.weight": matrix(self.known, WIDTH),
                "d2t": ids - torch.arange(self.known),
            }
            found["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, ids, True)
        return found

    def config(self) -> dict[str, Any]:
        """The keys of all layouts."""
        return {
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": WIDTH,
            "intermediate_size": WIDE,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KEY_HEADS,
            "head_dim": HEAD,
            "num_hidden_layers": self.layers,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 96,
            "rms_norm_eps": 1e-5,
        }


Layout = Callable[[Path, Head], Path]


def safe_ai_lab(folder: Path, head: Head) -> Path:
    """`midlayer`, and no layers named: the usual ones."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": head.known}
    write_files(folder, _midlayer(head.weights()), head.config() | config | head.flags)
    return folder


def spec_forge(folder: Path, head: Head) -> Path:
    """`midlayer` with layers by their outputs, `fc_norms`."""
    outputs = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in head.taps]}
    config = {"eagle_config": {"use_aux_hidden_state": True, **outputs}}
    tensors = {n.replace("fc_norm.", "fc_norms."): t for n, t in _midlayer(head.weights()).items()}
    write_files(folder, tensors, head.config() | config | head.flags)
    return folder


def speculators(folder: Path, head: Head) -> Path:
    """`layers.0`, the layer's configuration inside, and the target's tensors left unset."""
    unset = {"embed_tokens.weight": (VOCABULARY, WIDTH), "verifier_norm.weight": (WIDTH,)}
    unset["verifier_lm_head.weight"] = (KNOWN, WIDTH)
    tensors = head.weights() | {n: torch.full(shape, torch.nan) for n, shape in unset.items()}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"verifier": {"name_or_path": "tiny/target"}},
        "transformer_layer_config": head.config(),
        "draft_vocab_size": head.known,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(head.taps),
    }
    write_files(folder, tensors, config | head.flags)
    return folder


def model_opt(folder: Path, head: Head) -> Path:
    """Layers by their outputs, and flags of norms inside `eagle_config`."""
    outputs = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in head.taps]}
    config = {"eagle_config": outputs | head.flags, "draft_vocab_size": head.known}
    write_files(folder, head.weights(), head.config() | config)
    return folder


def gguf(folder: Path, head: Head) -> Path:
    """The file of llama.cpp's converter."""
    flags = {"eagle_aux_hidden_state_layer_ids": list(head.taps), **head.flags}
    write_files(folder, _midlayer(head.weights()), head.config() | flags)
    write_gguf_head(folder, folder.with_suffix(".gguf"))
    return folder.with_suffix(".gguf")


def _midlayer(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.items()}


BOTH = {"norm_before_residual": True, "norm_before_fc": True}
LAYOUTS: dict[str, tuple[Layout, Head]] = {
    "SafeAILab": (safe_ai_lab, Head()),
    "SafeAILab, all tokens": (safe_ai_lab, Head(known=VOCABULARY)),
    "SpecForge": (spec_forge, Head((0, 3, 7))),
    "SpecForge, Qwen3": (spec_forge, Head(head_norms=True)),
    "SpecForge, EAGLE-3.1": (spec_forge, Head(flags={"fc_norm": True, "norm_output": True})),
    "speculators": (speculators, Head(flags={"norm_before_residual": True})),
    "speculators, four layers": (speculators, Head(layers=4, flags=BOTH)),
    "ModelOpt": (model_opt, Head(WITH_LAST)),
    "ModelOpt, one norm": (model_opt, Head(WITH_LAST, flags={"norm_before_fc": True})),
    "GGUF": (gguf, Head(WITH_LAST)),
    "GGUF, two norms": (gguf, Head(flags=BOTH)),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target"), layers=LAYERS)


@pytest.fixture(scope="module")
def streams(target: Path) -> Callable[[tuple[int, ...]], Tensor]:
    """The target's features of the prompt, as they travel."""
    model = load_language_model(str(target), weights="fp32", device="cpu")

    @cache
    def read(taps: tuple[int, ...]) -> Tensor:
        tokens = torch.tensor(PROMPT)
        segment = Segment(model.new_cache(len(PROMPT)), 0, len(PROMPT))
        positions = torch.arange(len(PROMPT))
        _, states = model.forward_with_states(tokens, positions, [segment], wanted=set(taps))
        return torch.cat([states[tap] for tap in taps], dim=1).half()

    return read


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_in_each_public_layout_proposes_what_the_oracle_does(
    layout: str, tmp_path: Path, target: Path, streams: Callable[[tuple[int, ...]], Tensor]
) -> None:
    write, made = LAYOUTS[layout]
    source = write(tmp_path / "head", made)
    assert classify(str(source)) == "eagle3"
    head = open_head(str(source), target=str(target), weights="fp32")
    assert head.spec.taps == made.taps
    theirs = load_file(target / "model.safetensors")
    shared = {
        "embed_tokens": theirs["model.embed_tokens.weight"],
        "lm_head": theirs["lm_head.weight"],
    }
    weights = {f"{name}.weight": tensor for name, tensor in shared.items()} | made.weights()
    facts = {"heads": HEADS, "eps": 1e-5, "taps": 3, "layers": made.layers}
    features, rows = streams(made.taps), torch.tensor([*PROMPT[1:], ROOT])
    config = {**facts, "norm_before_residual": False, **made.flags}
    logits, chain = eagle3(weights, config, rows, features, DEPTH)

    engine = HeadDrafter(head, Spans(), contrast=False)
    tree = TreeSettings(policy="dynamic", gamma=DEPTH, depth=DEPTH, width=1)
    fields = {"capacity": 60, "vocabulary_size": VOCABULARY, "sampling": Sampling(), "end": ()}
    session = engine.open(opening(1, PROMPT, tree=tree, key=bytes(16), **fields))
    engine.feed(session, 0, to_array(features))
    proposal = engine.draft(session, (), ROOT, Shape(DEPTH, DEPTH, 1), None, more=(), ahead=False)
    assert list(proposal.tree.tokens) == chain.tolist()

    segment = Segment(head.new_cache(len(rows)), 0, len(rows))
    found = head.forward(rows, features, torch.arange(len(rows)), [segment], true=True).logits[-1]
    known = found[found.isfinite()]
    torch.testing.assert_close(known.double(), logits[0], rtol=1e-4, atol=1e-4)
    assert int(found.argmax()) == int(chain[0])


def test_the_default_of_a_flag_that_publishers_disagree_about_is_reported(
    tmp_path: Path, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    silent, said = Head(), Head(flags={"norm_before_residual": False})
    with caplog.at_level(logging.WARNING):
        first = open_head(str(speculators(tmp_path / "silent", silent)), target=str(target))
    assert (
        "has no norm_before_residual: false is used, the default of the speculators" in caplog.text
    )
    assert str(tmp_path / "silent") in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        second = open_head(str(speculators(tmp_path / "said", said)), target=str(target))
        open_head(str(safe_ai_lab(tmp_path / "own", silent)), target=str(target))
    assert "norm_before_residual" not in caplog.text
    assert first.spec == second.spec


Change = Callable[[dict[str, Tensor], dict[str, Any]], Any]
BROKEN: dict[str, tuple[Layout, Change, str]] = {
    "attention over latents": (
        safe_ai_lab,
        lambda t, c: (
            t.update({"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(4, 128)}),
            c.update(architectures=["Eagle3DeepseekV2ForCausalLM"]),
        ),
        r"attention is over latents \(Eagle3DeepseekV2ForCausalLM\), which is not supported; use",
    ),
    "positions of pictures": (
        safe_ai_lab,
        lambda t, c: c.update(rope_scaling={"type": "mrope", "mrope_section": [4, 4, 4]}),
        "rotary positions of type 'mrope'",
    ),
    "norms of each stream and of all": (
        model_opt,
        lambda t, c: (
            t.update({f"fc_norm.{i}.weight": torch.ones(WIDTH) for i in range(3)}),
            t.update({"input_norm.weight": torch.ones(3 * WIDTH)}),
        ),
        "has both fc_norm and norm_before_fc, of which a head has at most one",
    ),
    "a norm that config.json denies": (
        model_opt,
        lambda t, c: (
            t.update({"input_norm.weight": torch.ones(3 * WIDTH)}),
            c.update(norm_before_fc=False),
        ),
        r"has unknown tensors input_norm\.weight$",
    ),
    "no norm": (
        model_opt,
        lambda t, c: c.update(norm_before_fc=True),
        r"lacks input_norm\.weight$",
    ),
    "a norm of one stream": (
        model_opt,
        lambda t, c: (
            t.update({"input_norm.weight": torch.ones(WIDTH)}),
            c.update(norm_before_fc=True),
        ),
        r"wrong shape for input_norm\.weight \[64\] instead of \[192\]",
    ),
    "fewer layers than config.json has": (
        model_opt,
        lambda t, c: c.update(num_hidden_layers=2),
        r"lacks layers\.1\.input_layernorm\.weight, .* and \d more$",
    ),
    "a layer beyond others": (
        model_opt,
        lambda t, c: t.update({"layers.2.input_layernorm.weight": torch.ones(WIDTH)}),
        r"lacks layers\.1\.input_layernorm\.weight, ",
    ),
    "half an embedding": (
        speculators,
        lambda t, c: t["embed_tokens.weight"][0].zero_(),
        r"has NaN or infinite values in embed_tokens\.weight",
    ),
    "weights that were never set": (
        speculators,
        lambda t, c: t["fc.weight"][0].fill_(torch.nan),
        r"tensor fc\.weight holds NaN",
    ),
    "an embedding that was never set, in another format": (
        safe_ai_lab,
        lambda t, c: t.update({"embed_tokens.weight": torch.full((48, WIDTH), torch.nan)}),
        r"tensor embed_tokens\.weight holds NaN",
    ),
    "another target's width": (
        speculators,
        lambda t, c: t.update({"fc.weight": torch.zeros(WIDTH, 384)}),
        r"hidden width 128 and vocabulary 48 \(tiny/target\), but .* has hidden width 64",
    ),
    "another target's layers": (
        speculators,
        lambda t, c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 9]),
        r"reads layers \[1, 2, 9\] \(tiny/target\), but .* has 8 layers: use the head",
    ),
    "a target without a name": (
        speculators,
        lambda t, c: c.update(speculators_config={"verifier": {"name_or_path": 5}}),
        r"has speculators_config\.verifier\.name_or_path 5 in config\.json",
    ),
    "no layers": (
        speculators,
        lambda t, c: c["transformer_layer_config"].update(num_hidden_layers=0),
        "has num_hidden_layers 0 in config",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_head_that_is_not_whole_is_refused_in_a_line_with_its_name(
    case: str, tmp_path: Path, target: Path
) -> None:
    layout, change, text = BROKEN[case]
    layout(tmp_path, Head())
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    change(tensors, config)
    write_files(tmp_path, tensors, config)
    with pytest.raises(CheckpointError, match=text) as refusal:
        open_head(str(tmp_path), target=str(target))
    assert str(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_plan_finds_the_sizes_of_a_head_whose_layer_is_configured_inside(tmp_path: Path) -> None:
    found = read_config(speculators(tmp_path, Head(layers=2)), "draft")
    assert (found["hidden_size"], found["num_hidden_layers"]) == (WIDTH, 2)
