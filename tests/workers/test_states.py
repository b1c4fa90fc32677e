"""Hidden states that a draft reads are those of transformers' own forward, and asking for them
changes no byte of the logits."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dovetail.protocol.tree import TokenTree
from dovetail.workers import kernels
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from dovetail.workers.models.states import LAST
from dovetail.workers.verifier import tree_paths
from support.models import FAMILIES, tiny_llama

TOKENS = [0, 5, 9, 33, 2, 17, 41, 8, 8, 21, 30, 4]
TREE = TokenTree((7, 3, 11, 12), (-1, -1, 1, 2))
needs_kernels = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")
BACK_ENDS = [pytest.param("kernels", marks=needs_kernels), "library"]


def wanted_of(model: LanguageModel) -> list[int]:
    return [*range(model.layers + 1), LAST]


def oracle(folder: Path, tokens: Sequence[int]) -> dict[int, Tensor]:
    """transformers' states that enter each layer and the final norm, and the norm's output."""
    model, before = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        list[Tensor](),
    )
    (norm,) = (m for n, m in model.base_model.named_children() if n.endswith(("norm", "ln_f")))
    norm.register_forward_pre_hook(lambda _norm, args: before.append(args[0][0]))
    with torch.inference_mode():
        every = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    *entering, last = [states[0] for states in every]
    return {**dict(enumerate([*entering, *before])), LAST: last}


def prefill(
    model: LanguageModel, *, chunk: int, capacity: int = 32
) -> tuple[Segment, dict[int, Tensor]]:
    """The states of TOKENS, computed `chunk` at a time, and their cache."""
    cache, parts = model.new_cache(capacity), []
    for start in range(0, len(TOKENS), chunk):
        part = torch.tensor(TOKENS[start : start + chunk])
        count = len(part)
        segment = Segment(cache, start, count)
        parts.append(
            model.forward_with_states(
                part,
                torch.arange(start, start + count),
                [segment],
                wanted=wanted_of(model),
                rows=torch.tensor([count - 1]),
            )[1]
        )
        cache.keep(range(start, start + count), count)
    return Segment(cache, len(TOKENS), 0), {
        place: torch.cat([states[place] for states in parts]) for place in wanted_of(model)
    }


def check(found: Mapping[int, Tensor], expected: Mapping[int, Tensor]) -> None:
    assert set(found) == set(expected)
    for place, states in expected.items():
        torch.testing.assert_close(
            found[place],
            states,
            rtol=1e-3,
            atol=1e-4 * float(states.abs().max()),
            msg=lambda text, place=place: f"{place}: {text}",
        )


@pytest.mark.parametrize("backend", BACK_ENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_states_of_a_prompt_are_those_of_transformers_in_chunks_of_any_size(
    family: str, backend: str, tmp_path: Path
) -> None:
    folder = FAMILIES[family](tmp_path)
    model = load_language_model(str(folder), weights="fp32", device="cpu", backend=backend)
    assert (model.hidden_size, model.layers) == (64, 3 if family == "gemma2" else 2)
    for chunk in (5, len(TOKENS)):
        check(prefill(model, chunk=chunk)[1], oracle(folder, TOKENS))


@pytest.mark.parametrize("backend", BACK_ENDS)
def test_the_states_of_a_tree_are_those_of_each_of_its_paths(
    backend: str, llama_folder: Path
) -> None:
    model = load_language_model(str(llama_folder), weights="fp32", device="cpu", backend=backend)
    behind, _ = prefill(model, chunk=4)
    root = len(TOKENS)
    segment = Segment(behind.cache, root, 1 + len(TREE), tree_paths(TREE, root))
    tokens, positions = (
        torch.tensor([6, *TREE.tokens]),
        torch.tensor([root + depth for depth in (0, *TREE.depths)]),
    )
    _, states = model.forward_with_states(tokens, positions, [segment], wanted=wanted_of(model))
    for node in range(-1, len(TREE)):
        path = oracle(llama_folder, [*TOKENS, 6, *(TREE.tokens[n] for n in TREE.path(node))])
        check(
            {place: rows[node + 1] for place, rows in states.items()},
            {place: rows[-1] for place, rows in path.items()},
        )


@pytest.mark.parametrize("backend", BACK_ENDS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logits_are_the_same_bytes_whether_states_are_asked_for_or_not(
    family: str, backend: str, tmp_path: Path
) -> None:
    model = load_language_model(
        str(FAMILIES[family](tmp_path)), weights="fp32", device="cpu", backend=backend
    )
    tokens, positions = torch.tensor(TOKENS), torch.arange(len(TOKENS))
    for rows in (None, torch.tensor([len(TOKENS) - 1])):
        plain = model.forward(
            tokens, positions, [Segment(model.new_cache(16), 0, len(TOKENS))], rows=rows
        )
        for wanted in ([LAST], [1], wanted_of(model)):
            logits, states = model.forward_with_states(
                tokens,
                positions,
                [Segment(model.new_cache(16), 0, len(TOKENS))],
                wanted=wanted,
                rows=rows,
            )
            assert torch.equal(logits, plain)
            assert {place: tuple(kept.shape) for place, kept in states.items()} == dict.fromkeys(
                wanted, (len(TOKENS), 64)
            )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_the_states_are_those_of_transformers(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, layers=3)
    model = load_language_model(str(folder), weights="fp32", device="cuda:0")
    check(
        {place: states.cpu() for place, states in prefill(model, chunk=5)[1].items()},
        oracle(folder, TOKENS),
    )
