"""Every kind of draft head against a slow version of itself: whole sequences, one row and one head
after the other, in fp64, without any cache."""

import json
import logging
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import gelu, silu

from dovetail.protocol.errors import CheckpointError
from dovetail.workers import kernels
from dovetail.workers.heads.checkpoint import frequencies
from dovetail.workers.heads.config import HeadConfig, MisfitError, read_config
from dovetail.workers.heads.dovetail import DovetailConfig
from dovetail.workers.heads.eagle3 import Eagle3Config
from dovetail.workers.heads.head import Head, Predicted, classify, open_head
from dovetail.workers.models.segment import Paths, Segment
from support.heads import VARIANTS, Variant, head_config, head_tensors, write_files, write_head
from support.models import VOCABULARY, tiny_gpt2, tiny_llama, tiny_qwen2

BACKENDS = ["library", *(["kernels"] if kernels.available() else [])]
LENGTH = 9
CLOSE = 2e-5
"""Relative to the largest number: rounding of fp32 gives about 1e-6."""


# ---- the slow version ----


@dataclass
class Oracle:
    """A head by the formulas, from the tensors that were written (in the names of its own
    repository)."""

    variant: Variant
    tensors: dict[str, Tensor]
    embedding: Tensor
    output: Tensor

    def __call__(
        self, tokens: Tensor, features: Sequence[Tensor], *, positions: Sequence[int], sees: Tensor
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Return for each row the recurrent state [H], probabilities or logits as log-law [V] and
        contrast logits [V] or None.

        features: [W] of the target, or recurrent [H]; sees: bool [T, T].
        """
        embedded = [self.embedding[token] for token in tokens]
        if self.variant.kind == "eagle3":
            return self._eagle3(embedded, features, positions, sees)
        rows = [self._fuse(e, f) for e, f in zip(embedded, features, strict=True)]
        for index in range(self.variant.blocks):
            layer = f"layers.{index}."
            inputs = rows if index == 0 else [self.norm(x, f"{layer}input_layernorm") for x in rows]
            mixed = self._attention(layer, inputs, positions, sees)
            rows = [x + m for x, m in zip(rows, mixed, strict=True)]
            if self.variant.kind.startswith("jakiro"):
                return [self._experts(x) for x in rows]
            rows = [
                x + self._mlp(f"{layer}mlp.", self.norm(x, f"{layer}post_attention_layernorm"))
                for x in rows
            ]
        return [(x, self.output @ x, None) for x in rows]

    def get(self, name: str) -> Tensor:
        return self.tensors[name].double()

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = self.get(f"{name}.weight") @ x
        return y + self.get(f"{name}.bias") if f"{name}.bias" in self.tensors else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean() + 1e-5) * self.get(f"{name}.weight")

    def _fuse(self, e: Tensor, g: Tensor) -> Tensor:
        if self.variant.kind != "dovetail":
            return self.linear(torch.cat([e, g]), "fc")
        config = self.variant.config
        e = self.norm(e, "input_layernorm") if config.get("dgf_embed_norm", True) else e
        h1, h2 = g @ self.get("W_1"), e @ self.get("W_2")
        h2 = silu(h2) if config.get("dgf_silu", True) else h2
        z = torch.sigmoid(torch.cat([h1, h2]) @ self.get("W_z"))
        return z * h1 + (1 - z) * h2

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        return self.linear(
            silu(self.linear(x, f"{prefix}gate_proj")) * self.linear(x, f"{prefix}up_proj"),
            f"{prefix}down_proj",
        )

    def _attention(
        self, layer: str, rows: Sequence[Tensor], positions: Sequence[int], sees: Tensor
    ) -> list[Tensor]:
        at, d = f"{layer}self_attn.", self.variant.head_dim
        queries, keys, values = (
            [self.linear(x, f"{at}{n}_proj").view(-1, d) for x in rows] for n in "qkv"
        )
        queries = [self._turn(q, p, f"{at}q_norm") for q, p in zip(queries, positions, strict=True)]
        keys = [self._turn(k, p, f"{at}k_norm") for k, p in zip(keys, positions, strict=True)]
        outputs = []
        for i, query in enumerate(queries):
            seen = [j for j in range(len(rows)) if sees[i, j]]
            heads = []
            for h, q in enumerate(query):
                shared = h // (self.variant.heads // self.variant.kv_heads)
                weights = torch.stack([q @ keys[j][shared] / math.sqrt(d) for j in seen]).softmax(0)
                heads.append(sum(w * values[j][shared] for w, j in zip(weights, seen, strict=True)))
            outputs.append(self.linear(torch.cat(heads), f"{at}o_proj"))  # type: ignore[arg-type]
        return outputs

    def _turn(self, heads: Tensor, position: int, norm: str) -> Tensor:
        d, config = self.variant.head_dim, self.variant.config
        factor = config.get("rope_scaling", {}).get("factor", 1.0)
        turned = []
        for x in heads:
            x = self.norm(x, norm) if f"{norm}.weight" in self.tensors else x
            y = x.clone()
            for j in range(d // 2):
                angle = position / factor / config.get("rope_theta", 10000.0) ** (2 * j / d)
                y[j] = x[j] * math.cos(angle) - x[j + d // 2] * math.sin(angle)
                y[j + d // 2] = x[j + d // 2] * math.cos(angle) + x[j] * math.sin(angle)
            turned.append(y)
        return torch.stack(turned)

    def _experts(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        at, count = "layers.0.mlp_moe.", self.variant.experts
        u = self.norm(r, "layers.0.post_attention_layernorm")
        gate = self.linear(u, f"{at}gate")
        best = sorted(range(count), key=lambda i: -float(gate[i]))[:2]
        shares = gate[best].softmax(0)
        if self.variant.kind == "jakiro*":
            adds = [
                self.linear(gelu(self.linear(u, f"{at}experts.{i}.fc")), f"{at}experts.{i}.proj")
                for i in best
            ]
            left, right = ((self.output @ (r + add)).softmax(0) for add in adds)
            return (
                r + shares[0] * adds[0] + shares[1] * adds[1],
                torch.log(shares[0] * left + shares[1] * right),
                None,
            )
        adds = [self._mlp(f"{at}experts.{i}.", u) for i in best]
        state = r + shares[0] * adds[0] + shares[1] * adds[1]
        if not self.variant.contrast:
            return state, self.output @ state, None
        weights = gate[-2:].softmax(0)
        owners = adds if count > 2 or best == [0, 1] else adds[::-1]
        const = (
            r
            + weights.max() * owners[int(weights.argmax())]
            - weights.min() * owners[int(weights.argmin())]
        )
        return state, self.output @ state, self.output @ const

    def _eagle3(
        self,
        embedded: Sequence[Tensor],
        features: Sequence[Tensor],
        positions: Sequence[int],
        sees: Tensor,
    ) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        rows = [self._tapped(f) if getattr(f, "is_true", False) else f for f in features]
        normed = [self.norm(x, "midlayer.hidden_norm") for x in rows]
        inputs = [
            torch.cat([self.norm(e, "midlayer.input_layernorm"), n])
            for e, n in zip(embedded, normed, strict=True)
        ]
        mixed = self._attention("midlayer.", inputs, positions, sees)
        rows = [
            x + m
            for x, m in zip(
                normed if self.variant.config.get("norm_before_residual") else rows,
                mixed,
                strict=True,
            )
        ]
        results: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for x in rows:
            x = x + self._mlp("midlayer.mlp.", self.norm(x, "midlayer.post_attention_layernorm"))
            logits = self.output @ self.norm(x, "norm")
            if "d2t" in self.tensors:
                spread = torch.full((self.variant.vocabulary,), -math.inf, dtype=torch.float64)
                for i, z in enumerate(logits):
                    spread[i + int(self.tensors["d2t"][i])] = z
                logits = spread
            results.append(
                (
                    self.norm(x, "norm") if self.variant.config.get("norm_output") else x,
                    logits,
                    None,
                )
            )
        return results

    def _tapped(self, f: Tensor) -> Tensor:
        if self.variant.fc_norm:
            f = torch.cat(
                [
                    self.norm(tap, f"fc_norm.{i}")
                    for i, tap in enumerate(f.chunk(len(self.variant.taps)))
                ]
            )
        return self.linear(f, "fc")


def true_row(feature: Tensor) -> Tensor:
    """A feature of the target's, marked as such: EAGLE-3 treats those and its own in two ways."""
    row = feature.double()
    row.is_true = True  # type: ignore[attr-defined]
    return row


def law(logits: Tensor) -> Tensor:
    """Return the log-probabilities of logits, which no constant added to the logits changes."""
    return logits.double().log_softmax(-1)


def assert_close(found: Tensor, expected: Tensor, tolerance: float = CLOSE) -> None:
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(found), finite)
    assert float((found.double() - expected)[finite].abs().max()) <= tolerance * float(
        expected[finite].abs().max()
    )


# ---- what is tested ----


@dataclass
class Case:
    """A head on disk, and the slow version of it."""

    folder: Path
    variant: Variant
    oracle: Oracle
    target: Path

    def open(self, backend: str, **otherwise: Any) -> Head:
        return open_head(
            str(self.folder),
            **{
                "target": str(self.target),
                "weights": "fp32",
                "device": "cpu",
                "backend": backend,
                **otherwise,
            },
        )

    def inputs(self, length: int = LENGTH, seed: int = 1) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, self.variant.vocabulary, (length,), generator=generator)
        return tokens, torch.randn(length, self.variant.feature_width, generator=generator)


@pytest.fixture(scope="session")
def make_case(
    tmp_path_factory: pytest.TempPathFactory, llama_folder: Path
) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name not in made:
            folder, variant = write_head(tmp_path_factory.mktemp(name), name), VARIANTS[name]
            tensors, target = head_tensors(variant), load_file(llama_folder / "model.safetensors")
            embedding = tensors.get(
                "embed_tokens.weight", target["model.embed_tokens.weight"]
            ).double()
            output = tensors.get("lm_head.weight", target["lm_head.weight"]).double()
            made[name] = Case(
                folder, variant, Oracle(variant, tensors, embedding, output), llama_folder
            )
        return made[name]

    return make


def causal(count: int) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril()


def chain(head: Head, tokens: Tensor, features: Tensor, *, contrast: bool = False) -> Predicted:
    """A whole sequence of true rows in one pass."""
    count = len(tokens)
    return head.forward(
        tokens,
        features,
        torch.arange(count),
        [Segment(head.new_cache(count), 0, count)],
        true=True,
        contrast=contrast,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_head_computes_what_its_formulas_say(
    name: str, backend: str, make_case: Callable[[str], Case]
) -> None:
    case = make_case(name)
    tokens, features = case.inputs()
    found = chain(case.open(backend), tokens, features, contrast=True)
    rows = case.oracle(
        tokens, [true_row(f) for f in features], positions=range(LENGTH), sees=causal(LENGTH)
    )
    assert_close(found.states, torch.stack([state for state, _, _ in rows]))
    assert_close(law(found.logits), torch.stack([law(logits) for _, logits, _ in rows]))
    assert found.logits.dtype == torch.float32
    assert found.logits.shape == (LENGTH, VOCABULARY)
    assert (found.contrast is not None) == (case.variant.kind == "jakiro" and case.variant.contrast)
    if found.contrast is not None:
        assert_close(
            found.contrast, torch.stack([const for _, _, const in rows if const is not None])
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_tree_of_recurrent_rows_computes_each_path_as_if_it_were_alone(
    name: str, backend: str, make_case: Callable[[str], Case]
) -> None:
    case = make_case(name)
    head = case.open(backend)
    tokens, features = case.inputs()
    cache = head.new_cache(40)
    head.forward(
        tokens,
        features,
        torch.arange(LENGTH),
        [Segment(cache, 0, LENGTH)],
        true=True,
        rows=torch.empty(0, dtype=torch.int64),
    )
    cache.length = LENGTH
    drafted, recurrent = (
        case.inputs(5, seed=2)[0],
        torch.randn(5, case.variant.hidden, generator=torch.Generator().manual_seed(3)),
    )
    parents = [-1, -1, 0, 0, 2]
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    positions = [LENGTH - 1 + len(path) for path in paths]
    levels = [(0, 2), (2, 4), (4, 5)]
    found = []
    for first, last in levels:
        segment = Segment(
            cache,
            LENGTH + first,
            last - first,
            Paths.of(LENGTH, [[LENGTH + node for node in path] for path in paths[first:last]]),
        )
        found.append(
            head.forward(
                drafted[first:last],
                recurrent[first:last],
                torch.tensor(positions[first:last]),
                [segment],
                true=False,
            )
        )
    sees = torch.zeros(LENGTH + 5, LENGTH + 5, dtype=torch.bool)
    sees[:LENGTH, :LENGTH] = causal(LENGTH)
    sees[LENGTH:, :LENGTH] = True
    for node, path in enumerate(paths):
        sees[LENGTH + node, [LENGTH + ancestor for ancestor in path]] = True
    rows = [*(true_row(f) for f in features), *recurrent.double()]
    expected = case.oracle(
        torch.cat([tokens, drafted]), rows, positions=[*range(LENGTH), *positions], sees=sees
    )[LENGTH:]
    assert_close(
        torch.cat([p.states for p in found]), torch.stack([state for state, _, _ in expected])
    )
    assert_close(
        law(torch.cat([p.logits for p in found])),
        torch.stack([law(logits) for _, logits, _ in expected]),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["eagle", "jakiro-4", "jakiro-star-3", "eagle3"])
def test_only_the_rows_that_are_asked_for_are_predicted(
    name: str, backend: str, make_case: Callable[[str], Case]
) -> None:
    case = make_case(name)
    head = case.open(backend)
    tokens, features = case.inputs()
    whole = chain(head, tokens, features, contrast=True)
    segment = [Segment(head.new_cache(LENGTH), 0, LENGTH)]
    some = head.forward(
        tokens,
        features,
        torch.arange(LENGTH),
        segment,
        true=True,
        rows=torch.tensor([2, 8]),
        contrast=True,
    )
    assert_close(some.logits, whole.logits[[2, 8]].double())
    assert_close(some.states, whole.states[[2, 8]].double())
    none = head.forward(
        tokens,
        features,
        torch.arange(LENGTH),
        segment,
        true=True,
        rows=torch.empty(0, dtype=torch.int64),
        contrast=True,
    )
    assert none.logits.shape == (0, VOCABULARY)
    assert none.states.shape == (0, case.variant.hidden)
    for part in (some, none):
        assert (part.contrast is None) == (whole.contrast is None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_survivors_of_a_tree_may_lie_between_the_committed_rows_and_the_new_true_ones(
    backend: str, make_case: Callable[[str], Case]
) -> None:
    case = make_case("dovetail-3")
    head = case.open(backend)
    tokens, features = case.inputs()
    expected = chain(head, tokens, features)
    cache = head.new_cache(40)
    head.forward(tokens[:5], features[:5], torch.arange(5), [Segment(cache, 0, 5)], true=True)
    cache.length = 5
    slots = list(range(12, 12 + LENGTH - 5))
    segment = Segment(
        cache, 12, LENGTH - 5, Paths.of(5, [slots[: i + 1] for i in range(len(slots))])
    )
    found = head.forward(tokens[5:], features[5:], torch.arange(5, LENGTH), [segment], true=True)
    assert_close(found.logits, expected.logits[5:].double())
    cache.keep(slots, len(slots))
    assert cache.length == LENGTH


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_may_lie_far_beyond_the_trained_length(
    backend: str, make_case: Callable[[str], Case]
) -> None:
    case = make_case("eagle")
    head = case.open(backend)
    tokens, features = case.inputs(3)
    far = [5000, 5001, 5002]
    found = head.forward(
        tokens, features, torch.tensor(far), [Segment(head.new_cache(3), 0, 3)], true=True
    )
    expected = case.oracle(tokens, [true_row(f) for f in features], positions=far, sees=causal(3))
    assert_close(
        found.logits, torch.stack([logits for _, logits, _ in expected]), tolerance=2e-3
    )  # fp32 angles of thousands


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("weights", "tolerance"),
    [("auto", CLOSE), ("fp16", 5e-3), ("bf16", 4e-2), ("int8", 8e-2), ("int4", 0.6)],
)
@pytest.mark.parametrize("name", ["dovetail-3", "jakiro-4", "jakiro-star", "eagle3-vllm"])
def test_weights_of_fewer_bits_compute_nearly_the_same(
    name: str,
    weights: str,
    tolerance: float,
    backend: str,
    make_case: Callable[[str], Case],
) -> None:
    case = make_case(name)
    tokens, features = case.inputs()
    exact, rounded = (
        chain(case.open(backend, weights=type_), tokens, features) for type_ in ("fp32", weights)
    )
    finite = torch.isfinite(exact.logits)
    assert torch.equal(torch.isfinite(rounded.logits), finite)
    assert float((rounded.logits - exact.logits)[finite].norm()) <= tolerance * float(
        exact.logits[finite].norm()
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_16_bits_are_kept_and_features_may_come_in_them(
    dtype: torch.dtype, backend: str, tmp_path: Path, llama_folder: Path
) -> None:
    folder = write_head(tmp_path, "dovetail", dtype=dtype)
    stored, exact = (
        open_head(str(folder), target=str(llama_folder), weights=w, backend=backend)
        for w in ("auto", "fp32")
    )
    tokens, features = (
        torch.arange(6),
        torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).to(dtype),
    )
    assert_close(
        chain(stored, tokens, features).logits, chain(exact, tokens, features).logits.double()
    )
    assert stored.spec.dtype == str(dtype).removeprefix("torch.")


def test_a_head_says_what_it_is(
    make_case: Callable[[str], Case], tmp_path: Path, llama_folder: Path
) -> None:
    head = make_case("eagle3-vllm").open("library")
    spec = head.spec
    assert (
        spec.kind,
        spec.hidden,
        spec.heads,
        spec.kv_heads,
        spec.head_dim,
        spec.intermediate,
    ) == ("eagle3", 64, 4, 2, 24, 96)
    assert (
        spec.taps,
        spec.feature_width,
        spec.vocabulary_size,
        spec.draft_vocabulary,
        spec.context,
    ) == ((0, 1, 1), 192, 48, 20, 96)
    jakiro = make_case("jakiro-4").open("library").spec
    assert (
        jakiro.kind,
        jakiro.experts,
        jakiro.contrast,
        jakiro.intermediate,
        jakiro.feature_width,
    ) == ("jakiro", 4, True, 64, 64)
    assert make_case("dovetail-3").open("library").spec.blocks == 3
    trained = open_head(
        str(write_head(tmp_path, "eagle", config={"dovetail": {"trained_for": "abc"}})),
        target=str(llama_folder),
    )
    assert (head.trained_for, trained.trained_for) == ("", "abc")
    assert head.checkpoint_digest != trained.checkpoint_digest


def test_layers_counted_by_their_outputs_are_those_entered_next(
    make_case: Callable[[str], Case],
) -> None:
    folder = make_case("eagle3-specforge").folder
    assert json.loads((folder / "config.json").read_text())["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [0, 0, 0]
    }
    assert make_case("eagle3-specforge").open("library").spec.taps == (1, 1, 1)


def test_the_usual_layers_are_read_where_a_configuration_names_none(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target", layers=8)
    variant = Variant("eagle3", taps=(2, 4, 5), config={"eagle_aux_hidden_state_layer_ids": None})
    assert open_head(str(write_head(tmp_path / "head", variant)), target=str(target)).spec.taps == (
        2,
        4,
        5,
    )


@pytest.mark.parametrize("make_target", [tiny_qwen2, tiny_gpt2, tiny_llama])
def test_what_a_head_lacks_comes_from_its_target_tied_or_not(
    make_target: Callable[[Path], Path], tmp_path: Path
) -> None:
    target, folder = make_target(tmp_path / "target"), write_head(tmp_path / "head", "eagle-llama3")
    stored = load_file(target / "model.safetensors")
    embedding = next(
        stored[n]
        for n in ("model.embed_tokens.weight", "transformer.wte.weight", "wte.weight")
        if n in stored
    )
    output = stored["lm_head.weight"] if make_target is tiny_llama else embedding
    variant = VARIANTS["eagle-llama3"]
    oracle = Oracle(variant, head_tensors(variant), embedding.double(), output.double())
    case = Case(folder, variant, oracle, target)
    tokens, features = case.inputs()
    expected = oracle(
        tokens, [true_row(f) for f in features], positions=range(LENGTH), sees=causal(LENGTH)
    )
    assert_close(
        chain(case.open("auto"), tokens, features).logits,
        torch.stack([logits for _, logits, _ in expected]),
    )


def test_an_embedding_of_another_model_is_reported(
    tmp_path: Path, llama_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = load_file(llama_folder / "model.safetensors")["model.embed_tokens.weight"]
    write_files(
        tmp_path,
        {**head_tensors(VARIANTS["eagle-llama3"]), "embed_tokens.weight": own},
        head_config(VARIANTS["eagle-llama3"]),
    )
    with caplog.at_level(logging.WARNING):
        open_head(str(tmp_path), target=str(llama_folder))
        assert not caplog.records
        open_head(str(write_head(tmp_path / "other", "eagle")), target=str(llama_folder))
    assert "its embedding differs" in caplog.text


@pytest.mark.parametrize("name", VARIANTS)
def test_a_checkpoint_is_told_by_its_tensors(name: str, make_case: Callable[[str], Case]) -> None:
    assert classify(str(make_case(name).folder)) == VARIANTS[name].kind


def test_an_ordinary_model_is_no_head(llama_folder: Path) -> None:
    assert classify(str(llama_folder)) is None
    with pytest.raises(CheckpointError, match="is not a draft head of a known kind"):
        open_head(str(llama_folder), target=str(llama_folder))


def test_a_head_for_a_target_that_is_more_than_a_language_model_says_so(
    llama_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(llama_folder, tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text(
        '{"model_type": "paligemma", "text_config": {"model_type": "gemma"}}'
    )
    with pytest.raises(
        CheckpointError,
        match=r"target/config\.json: model type paligemma is a language model \(gemma\) "
        r"with other parts",
    ):
        open_head(str(write_head(tmp_path / "head", "eagle")), target=str(tmp_path / "target"))


def test_pickled_weights_are_opened_only_when_asked_and_only_as_tensors(
    tmp_path: Path, make_case: Callable[[str], Case]
) -> None:
    case = make_case("eagle")
    folder = write_head(tmp_path, "eagle")
    (folder / "model.safetensors").unlink()
    torch.save(head_tensors(VARIANTS["eagle"]), folder / "pytorch_model.bin")
    for refuse in (
        lambda: classify(str(folder)),
        lambda: open_head(str(folder), target=str(case.target)),
    ):
        with pytest.raises(CheckpointError, match=r"draft\.pickled = true"):
            refuse()
    assert classify(str(folder), allow_bin=True) == "eagle"
    tokens, features = case.inputs()
    found = chain(
        open_head(str(folder), target=str(case.target), weights="fp32", allow_bin=True),
        tokens,
        features,
    )
    assert_close(found.logits, chain(case.open("auto"), tokens, features).logits.double())
    torch.save({"fc.weight": Path("/")}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read as plain tensors") as refusal:
        open_head(str(folder), target=str(case.target), allow_bin=True)
    assert "weights_only" not in str(refusal.value), (
        "the advice to run what is in there is not ours"
    )
    torch.save([torch.zeros(1)], folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds something other than named tensors"):
        open_head(str(folder), target=str(case.target), allow_bin=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Tensor.to_sparse, r"tensors that are sparse, .* \(fc\.weight, "),
        (lambda matrix: matrix.to("meta"), r"without numbers \(fc\.weight, "),
        (
            lambda matrix: matrix.to(torch.complex64),
            r"numbers of the wrong type \(complex64\) in fc\.weight, ",
        ),
        (
            lambda matrix: matrix.to(torch.int8),
            r"numbers of the wrong type \(int8\) in fc\.weight, ",
        ),
        (lambda matrix: matrix.fill_(math.nan), r"tensor \S+ holds NaN"),
        (
            lambda matrix: torch.zeros(1).expand(1 << 25, 1 << 26),
            "is a head for a target of|not a draft head",
        ),
    ],
)
def test_pickled_tensors_that_are_no_plain_numbers_are_refused(
    change: Callable[[Tensor], Tensor], message: str, tmp_path: Path, llama_folder: Path
) -> None:
    folder = write_head(tmp_path, "eagle")
    (folder / "model.safetensors").unlink()
    torch.save(
        {
            name: change(t) if t.ndim == 2 else t
            for name, t in head_tensors(VARIANTS["eagle"]).items()
        },
        folder / "pytorch_model.bin",
    )
    with pytest.raises(CheckpointError, match=message):
        open_head(str(folder), target=str(llama_folder), allow_bin=True)


Change = Callable[[dict[str, Tensor], dict[str, Any]], object]

BROKEN: dict[str, tuple[str, Change, str]] = {
    "missing": (
        "eagle",
        lambda t, c: t.pop("layers.0.self_attn.k_proj.weight"),
        "lacks layers.0.self_attn.k_proj.weight",
    ),
    "a missing block": (
        "dovetail-3",
        lambda t, c: c.update(num_hidden_layers=4),
        "lacks layers.3.post_attention_layernorm.weight, .* and 1 more",
    ),
    "unknown": (
        "eagle",
        lambda t, c: t.update(strange=torch.zeros(3)),
        "has unknown tensors strange",
    ),
    "an input norm in the first layer": (
        "dovetail",
        lambda t, c: t.update({"layers.0.input_layernorm.weight": torch.ones(64)}),
        r"unknown tensors layers\.0\.input_layernorm\.weight",
    ),
    "a bias that is promised": (
        "eagle-llama3",
        lambda t, c: c.update(bias=True),
        r"lacks fc\.bias",
    ),
    "half the biases": (
        "eagle-qwen2",
        lambda t, c: t.pop("layers.0.self_attn.v_proj.bias"),
        r"lacks layers\.0\.self_attn\.v_proj\.bias",
    ),
    "misshapen": (
        "dovetail",
        lambda t, c: t.update(W_z=torch.zeros(64, 128)),
        r"the wrong shape for W_z \[64, 128\] instead of \[128, 64\]",
    ),
    "everything at once": (
        "eagle",
        lambda t, c: (
            t.pop("fc.weight"),
            t.update(
                {"fc.weight": torch.zeros(64, 128), "x": torch.zeros(1), "fc.bias": torch.zeros(3)}
            ),
            t.pop("layers.0.mlp.up_proj.weight"),
        ),
        r"lacks layers\.0\.mlp\.up_proj\.weight; has unknown tensors x; has the wrong shape "
        r"for fc\.bias \[3\] instead of \[64\]",
    ),
    "gate rows": (
        "jakiro",
        lambda t, c: t.update({"layers.0.mlp_moe.gate.weight": torch.zeros(3, 64)}),
        r"mlp_moe\.gate\.weight \[3, 64\] instead of \[4, 64\]",
    ),
    "a missing expert": (
        "jakiro-3",
        lambda t, c: [t.pop(name) for name in list(t) if ".experts.1." in name],
        r"lacks layers\.0\.mlp_moe\.experts\.1\.gate_proj\.weight",
    ),
    "no output head": ("eagle3", lambda t, c: t.pop("lm_head.weight"), "d2t"),
    "no map of tokens": ("eagle3", lambda t, c: t.pop("d2t"), "lacks d2t"),
    "a map that does not ascend": (
        "eagle3",
        lambda t, c: t.update(d2t=t["d2t"].flip(0)),
        "whose ids do not ascend",
    ),
    "a map beyond the vocabulary": (
        "eagle3",
        lambda t, c: t.update(d2t=t["d2t"] + 40),
        "whose ids do not ascend within the target's vocabulary of 48",
    ),
    "two maps": (
        "eagle3",
        lambda t, c: t.update(t2d=~t["t2d"]),
        "a t2d that does not name the tokens of its d2t",
    ),
    "two names": (
        "eagle3",
        lambda t, c: t.update({"layers.0.hidden_norm.weight": torch.ones(64)}),
        r"has both \S+\.hidden_norm\.weight and \S+\.hidden_norm\.weight, which mean the same "
        r"tensor",
    ),
    "another width": (
        "eagle",
        lambda t, c: c.update(hidden_size=32),
        "hidden width 32 and vocabulary 48, but .* has hidden width 64 and vocabulary 48",
    ),
    "another vocabulary": (
        "eagle",
        lambda t, c: t.update({"embed_tokens.weight": torch.zeros(50, 64)}),
        "vocabulary 50, but .* vocabulary 48",
    ),
    "another vocabulary in words": (
        "eagle-llama3",
        lambda t, c: c.update(vocab_size=50),
        "vocabulary 50, but .* vocabulary 48",
    ),
    "taps of a wider target": (
        "eagle3",
        lambda t, c: t.update({"fc.weight": torch.zeros(64, 384)}),
        "hidden width 128 and vocabulary 48, but .* has hidden width 64",
    ),
    "layers that are not there": (
        "eagle3",
        lambda t, c: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 3]),
        r"reads layers \[0, 1, 3\], but .* has 2 layers",
    ),
    "layers by default": (
        "eagle3",
        lambda t, c: c.pop("eagle_aux_hidden_state_layer_ids"),
        r"reads layers \[2, 1, -1\], but .* has 2 layers",
    ),
    "no embedding for a narrow head": (
        "eagle3-narrow",
        lambda t, c: t.pop("embed_tokens.weight"),
        r"lacks embed_tokens\.weight, which .* cannot give",
    ),
    "no heads": (
        "eagle",
        lambda t, c: c.pop("num_attention_heads"),
        r"has no num_attention_heads in config\.json",
    ),
    "another activation": ("eagle", lambda t, c: c.update(hidden_act="relu"), "hidden_act 'relu'"),
    "an unknown rotation": (
        "eagle",
        lambda t, c: c.update(rope_scaling={"type": "spiral"}),
        "rotary positions of type 'spiral'",
    ),
    "half a rotation": (
        "eagle",
        lambda t, c: c.update(rope_scaling={"type": "llama3"}),
        "rotary positions of type 'llama3' that cannot be computed",
    ),
    "not a number": (
        "eagle",
        lambda t, c: t["fc.bias"].fill_(math.nan),
        r"tensor fc\.bias holds NaN",
    ),
    "quantised": (
        "eagle",
        lambda t, c: c.update(quantization_config={"quant_method": "spqr"}),
        r"is quantised in an unsupported way \(spqr\)",
    ),
    "heads that do not share evenly": (
        "jakiro",
        lambda t, c: t.update(
            {f"layers.0.self_attn.{name}_proj.weight": torch.zeros(48, 64) for name in "kv"}
        ),
        "4 attention heads of 16 numbers and 3 key heads",
    ),
    "no key heads": (
        "eagle3",
        lambda t, c: t.update(
            {f"midlayer.self_attn.{name}_proj.weight": torch.zeros(0, 128) for name in "kv"}
        ),
        r"has empty tensors midlayer\.self_attn\.k_proj\.weight, "
        r"midlayer\.self_attn\.v_proj\.weight",
    ),
    "heads of an odd size": (
        "jakiro",
        lambda t, c: t.update(
            {
                f"layers.0.self_attn.{name}_proj.weight": torch.zeros(rows * 15, 64)
                for name, rows in (("q", 4), ("k", 2), ("v", 2))
            },
            **{"layers.0.self_attn.o_proj.weight": torch.zeros(64, 60)},
        ),
        "4 attention heads of 15 numbers",
    ),
    "a rotation of more than there is": (
        "jakiro",
        lambda t, c: c.update(partial_rotary_factor=64),
        r"partial_rotary_factor 64 .* less than or equal to 1",
    ),
    "a vocabulary of nothing": (
        "eagle3",
        lambda t, c: (
            t.update(
                {"lm_head.weight": torch.zeros(0, 64), "d2t": torch.zeros(0, dtype=torch.int64)}
            ),
            t.pop("t2d"),
        ),
        r"has empty tensors d2t, lm_head\.weight",
    ),
    "an output head of fewer tokens": (
        "dovetail",
        lambda t, c: t.update({"lm_head.weight": torch.zeros(40, 64)}),
        r"the wrong shape for lm_head\.weight \[40, 64\] instead of \[48, 64\]",
    ),
    "whole numbers for weights": (
        "eagle",
        lambda t, c: t.update({"fc.bias": torch.zeros(64, dtype=torch.int64)}),
        r"numbers of the wrong type \(int64\) in fc\.bias: weights are floats",
    ),
    "numbers of few bits": (
        "eagle",
        lambda t, c: t.update({"fc.bias": torch.zeros(64, dtype=torch.uint8)}),
        r"wrong type \(another type\) in fc\.bias",
    ),
    "fractions for ids": (
        "eagle3",
        lambda t, c: t.update(d2t=t["d2t"].float()),
        r"numbers of the wrong type \(float32\) in d2t",
    ),
    "a name that a terminal obeys": (
        "eagle",
        lambda t, c: t.update({"x\n\x1b[31m": torch.zeros(1)}),
        r"unknown tensors x\?\?\[31m$",
    ),
    "a name without end": (
        "eagle",
        lambda t, c: t.update({"x" * 9999: torch.zeros(1)}),
        r"unknown tensors x{100}\.\.\.$",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_head_is_refused_in_one_line_that_names_what_is_wrong(
    what: str, tmp_path: Path, llama_folder: Path
) -> None:
    name, change, message = BROKEN[what]
    tensors, config = head_tensors(VARIANTS[name]), head_config(VARIANTS[name])
    change(tensors, config)
    write_files(tmp_path, tensors, config)
    with pytest.raises(CheckpointError, match=message) as refusal:
        open_head(str(tmp_path), target=str(llama_folder))
    assert str(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


ILL = ("abc", -1, 0, math.inf, math.nan, True, [1], {"a": 1}, 10**30, "7")
ILL_VALUES = {
    **dict.fromkeys(
        (
            "hidden_size",
            "num_attention_heads",
            "target_hidden_size",
            "intermediate_size",
            "vocab_size",
        ),
        (*ILL, 3.5),
    ),
    **dict.fromkeys(("num_hidden_layers", "max_position_embeddings"), (*ILL, 10**10)),
    **dict.fromkeys(("rms_norm_eps", "partial_rotary_factor"), (*ILL, 1.5)),
    "rope_theta": ILL,
    **dict.fromkeys(
        ("rope_scaling", "rope_parameters"),
        (
            "abc",
            7,
            True,
            [1],
            [1, 2],
            {"type": [1]},
            {"type": "linear", "factor": 0},
            {"rope_theta": "x"},
        ),
    ),
    **dict.fromkeys(
        (
            "bias",
            "qkv_bias",
            "fc_norm",
            "dgf_silu",
            "dgf_embed_norm",
            "norm_before_residual",
            "norm_output",
        ),
        ("yes", 1, [1]),
    ),
    **dict.fromkeys(
        ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"),
        (5, True, "abc", {"a": 1}, [True, 2, 3], [1.5], [-1], ["a"], [1] * 9),
    ),
    "eagle_config": (
        5,
        "abc",
        *(
            {"eagle_aux_hidden_state_layer_ids": ids}
            for ids in ("abc", 5, True, ["a"], {"a": 1}, [1] * 9)
        ),
    ),
    "dovetail": (5, {"trained_for": 5}, {"trained_for": "x" * 121}),
    "hidden_act": (5, ["silu"]),
    "transformer_layer_config": (5, "abc", [1]),
}


@pytest.mark.parametrize("key", ILL_VALUES)
def test_a_value_in_config_json_that_cannot_be_is_named_with_its_key(key: str) -> None:
    for value in ILL_VALUES[key]:
        with pytest.raises(
            MisfitError,
            match=rf"^has {key}\S* .* in config\.json: .*; take the config\.json that belongs "
            r"to its weights$",
        ) as refusal:
            configured({key: value})
        assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("key", sorted(set(ILL_VALUES) - {"hidden_size", "num_attention_heads"}))
def test_a_value_in_config_json_that_is_null_or_empty_is_not_there(key: str) -> None:
    found = configured({key: None})
    assert found == type(found).model_validate(MINIMAL)
    assert configured({"aux_hidden_state_layer_ids": []}) == configured({})


def test_taps_that_coincide_by_default_are_refused(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target", layers=6)
    config = {"eagle_aux_hidden_state_layer_ids": None}
    folder = write_head(tmp_path / "head", "eagle3", config=config)
    with pytest.raises(
        CheckpointError,
        match=r"reads layers \[2, 3, 3\] of .*, which has 6 layers: name three different ones",
    ):
        open_head(str(folder), target=str(target))


def test_what_cannot_be_had_is_refused(tmp_path: Path, llama_folder: Path) -> None:
    folder = str(write_head(tmp_path, "eagle"))
    target = str(llama_folder)
    with pytest.raises(CheckpointError, match="no weights of type 'int3' for a draft head"):
        open_head(folder, target=target, weights="int3")
    with pytest.raises(CheckpointError, match="no back end 'magic'"):
        open_head(folder, target=target, backend="magic")


def test_features_of_another_width_are_ours_to_notice(make_case: Callable[[str], Case]) -> None:
    head = make_case("eagle3").open("library")
    segment = [Segment(head.new_cache(1), 0, 1)]
    for width, true in ((64, True), (192, False)):
        with pytest.raises(ValueError, match=f"features of width {width}"):
            head.forward(
                torch.zeros(1, dtype=torch.int64),
                torch.zeros(1, width),
                torch.zeros(1, dtype=torch.int64),
                segment,
                true=true,
            )


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_frequencies_are_transformers_own(spelling: str, scaling: dict[str, Any] | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": 5e5}
    reference: Any = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=64,
            num_attention_heads=2,
            head_dim=24,
            max_position_embeddings=256,
            rope_parameters=parameters,
        )
    )
    own = dict(parameters)
    config: dict[str, Any] = {"rope_parameters": own}
    if spelling == "rope_scaling":
        config = {
            "rope_theta": own.pop("rope_theta"),
            "rope_scaling": {"type": own.pop("rope_type"), **own} if scaling else None,
        }
    found, factor = frequencies(configured(config), heads=2, head_dim=24, context=256)
    assert torch.allclose(found, reference.inv_freq, rtol=1e-6)
    assert factor == pytest.approx(reference.attention_scaling)


def test_a_base_of_ten_thousand_is_taken_where_none_is_named() -> None:
    found, _ = frequencies(configured({}), heads=2, head_dim=4, context=8)
    assert torch.allclose(found, torch.tensor([1.0, 0.01]))
    with pytest.raises(MisfitError, match="longrope"):
        frequencies(
            configured({"rope_scaling": {"rope_type": "longrope"}}), heads=2, head_dim=4, context=8
        )


@pytest.mark.parametrize("kind", ["default", "linear", "yarn"])
def test_no_more_of_a_head_is_rotated_than_there_is(kind: str) -> None:
    rotary = {"rope_type": kind, "factor": 2.0, "partial_rotary_factor": 0.5}
    found, _ = frequencies(
        configured({"rope_parameters": rotary}), heads=2, head_dim=16, context=64
    )
    assert found.shape == (4,)
    for share in (0.1, 0.2):
        with pytest.raises(MisfitError, match="partial_rotary_factor"):
            frequencies(
                configured({"rope_parameters": {**rotary, "partial_rotary_factor": share}}),
                heads=2,
                head_dim=16,
                context=64,
            )


MINIMAL = {"hidden_size": 64, "num_attention_heads": 2}


def configured(values: dict[str, Any]) -> HeadConfig:
    """The content of a config.json that says this and what every one says."""
    own = DovetailConfig if any(key.startswith("dgf_") for key in values) else Eagle3Config
    return read_config(MINIMAL | values, own)
