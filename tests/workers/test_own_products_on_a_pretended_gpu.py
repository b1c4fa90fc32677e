"""Our functions in whole models, where the CPU stands for a GPU: resident and streamed layers are
computed from the bytes in which they came, heads, codes, keys and values too, also in captured
graphs; and a token has the same bytes wherever it is computed."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dovetail.protocol.settings import DraftSettings, Sampling, TreeSettings
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.heads.head import open_head
from dovetail.workers.heads.matrices import device_product
from dovetail.workers.models.backends.device.choice import products_on, tell_products
from dovetail.workers.models.backends.device.own import OwnMatrix
from dovetail.workers.models.backends.device.own_blocks import CONTEST as BLOCKS
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.staged import Staged, Staging
from dovetail.workers.models.backends.stages.engines import SettledLayer
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Paths, Segment
from dovetail.workers.models.substitutes.coded import against_codes
from dovetail.workers.models.substitutes.substitute import load_device_substitute, load_substitute
from dovetail.workers.sessions.wire import to_array
from dovetail.workers.speculation.proposal import Shape
from pretended.device import POSSIBLE, PRETENDED, PretendedTransfer, capture, device
from support.cases import everyday
from support.decoded import decode
from support.emulated import given_to_pretended
from support.heads import write_head
from support.kernels import needs_kernels
from support.levels import levels_of
from support.models import FAMILIES, tiny_llama
from support.opening import opening

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not POSSIBLE, reason="torch cannot be told of a device from Python"),
]

C, R, S = Place.CPU, Place.RESIDENT, Place.STREAMED
TYPES = {"half": torch.float16, "int8": torch.float32}
TOLERANCE = {"half": 1e-5, "int8": 3e-2}
"""The largest difference of logits, as a share of the largest logit; see `test_staged.py`."""
ROUNDED = 0.08  # see `test_substitute.py`
TOKENS = torch.tensor([3, 17, 9, 30, 8, 22, 41, 5, 9, 11])
TREE = TreeSettings(policy="dynamic", gamma=4, depth=2, width=2)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The pretended GPU has our functions as long as a test takes: the names of those that are
    run."""
    yield from given_to_pretended(monkeypatch)


def placed(
    folder: Path, weights: str, places: Sequence[Place], cache: str = "fp32"
) -> LanguageModel:
    staging = Staging(places, PretendedTransfer())
    return load_language_model(
        str(folder), weights=weights, device="cpu", stage=lambda *_: staging, cache=cache
    )


@pytest.mark.parametrize(
    ("family", "weights", "places"),
    everyday(
        [("llama", "half", [C, R]), ("gemma2", "half", [S, R]), ("llama", "int8", [S, S])],
        ("gemma2", "half", [S, R]),
        ("llama", "int8", [S, S]),
    ),
)
def test_layers_and_head_are_computed_from_the_bytes_in_which_they_came(
    tmp_path: Path, launches: list[str], family: str, weights: str, places: Sequence[Place]
) -> None:
    folder = FAMILIES[family](tmp_path, dtype=TYPES[weights])
    whole = load_language_model(str(folder), weights=weights, device="cpu", backend="kernels")
    model = placed(folder, weights, [*[places[0]] * (whole.layers - 1), places[1]])
    launches.clear()
    found, expected = decode(model), decode(whole)
    assert float((found - expected).abs().max()) <= TOLERANCE[weights] * float(expected.abs().max())
    kind = {"half": "fp16", "int8": "int8"}[weights]
    assert {f"{kind}_4", f"{kind}_16"} <= set(launches)
    assert f"+own-{kind}" in products_on(device()).mark
    assert isinstance(model.back_end, Staged)
    last = model.back_end._stages[-1]._layers[-1]
    if isinstance(last, SettledLayer):
        for matrix in last.matrices.values():
            assert isinstance(matrix, OwnMatrix)
            assert matrix.packed.numel() == 2 * -(-matrix.n // 16) * 16 * matrix.k


def alone(model: LanguageModel) -> Tensor:
    """The logits of tokens that are computed one by one."""
    cache, rows = model.new_cache(16), []
    for place, token in enumerate(TOKENS):
        rows.append(model.forward(token[None], torch.tensor([place]), [Segment(cache, place, 1)]))
        cache.keep([place], 1)
    return torch.cat(rows)


@pytest.mark.parametrize("weights", everyday(TYPES, "half"))
def test_a_token_has_the_same_bytes_alone_in_a_prompt_and_in_a_tree(
    tmp_path: Path, launches: list[str], weights: str
) -> None:
    folder = tiny_llama(tmp_path, dtype=TYPES[weights])
    model = placed(folder, weights, [R, S], cache="half")
    expected, cache = alone(model), model.new_cache(16)
    assert "values_of" in launches
    assert "attention" in products_on(device()).mark
    assert torch.equal(model.forward(TOKENS, torch.arange(10), [Segment(cache, 0, 10)]), expected)
    cache.keep(range(6), 6)
    tree = model.forward(
        TOKENS[[6, 3, 7, 1, 8, 9]],
        torch.tensor([6, 6, 7, 7, 8, 9]),
        [Segment(cache, 6, 6, Paths.of(6, [[6], [7], [6, 8], [7, 9], [6, 8, 10], [6, 8, 10, 11]]))],
    )
    assert torch.equal(tree[[0, 2, 4, 5]], expected[6:])


@pytest.mark.parametrize("shared", [True, False])
def test_a_substitute_is_computed_from_codes_in_captured_levels(
    tmp_path: Path, launches: list[str], shared: bool
) -> None:
    folder = tiny_llama(tmp_path / "model", intermediate_size=128, dtype=torch.float16)
    kept = tmp_path / "kept"
    kernels, _ = load_substitute(str(folder), weights="int4", device="cpu", folder=kept)
    if shared:
        target = placed(folder, "half", [S, S], cache="half")
        model = load_device_substitute(target, capture, weights="int4", folder=kept)[0]
    else:
        model = load_substitute(str(folder), weights="int4", device=device().type, folder=kept)[0]
    assert model.kernels == "own-codes"
    launches.clear()
    found, expected = decode(model), decode(kernels)
    assert {"codes4", "values_of"} <= set(launches)
    assert float((found - expected).norm() / expected.norm()) < ROUNDED


def test_a_gpu_without_torchs_int4_products_has_a_substitute_if_ours_is_proved(
    launches: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PRETENDED, "against_int4", lambda _: "it is too old")
    assert against_codes(device(), "int3") == ""
    tell_products(device(), "draft")
    tell_products(device(), "draft")
    assert capsys.readouterr().err == (
        "draft: pretended:0: dovetail's own product multiplies codes3 weights: it is proved, and "
        "times are meaningless here\n"
    )
    products_on.cache_clear()
    monkeypatch.setattr(PRETENDED, "program", lambda *_: "there is no compiler")
    assert against_codes(device(), "int3") == (
        "it is too old; pretended:0: torch's product multiplies codes3 weights: there is no "
        "compiler"
    )
    for _ in range(2):
        tell_products(device(), "draft")
    assert capsys.readouterr().err == (
        "draft: pretended:0: torch computes everything: there is no compiler\n"
    )


@pytest.mark.parametrize("kind", everyday(["eagle", "eagle3", "dovetail-3", "jakiro"], "eagle3"))
@pytest.mark.parametrize(("weights", "function"), [("int8", "blocks_Q8_0"), ("int4", "codes4")])
def test_a_head_of_fewer_bits_is_what_the_kernels_make_of_it(
    tmp_path: Path, launches: list[str], kind: str, weights: str, function: str
) -> None:
    """This holds in captured levels, too, and needs none of torch's int4 products."""
    target, folder = tiny_llama(tmp_path / "target"), write_head(tmp_path / "head", kind, gain=1.0)
    here, there = (
        open_head(str(folder), target=str(target), weights=weights, device=where)
        for where in ("cpu", str(device()))
    )
    launches.clear()  # of proofs
    expected, found = levels_of(here, None), levels_of(there, capture)
    assert function in launches
    assert torch.equal(found.isfinite(), expected.isfinite())
    known = expected.isfinite()
    assert float((found - expected)[known].norm() / expected[known].norm()) < 3e-2


def test_int8_has_one_scale_a_row_where_blocks_are_slower(
    launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    products = products_on(device())
    real = products.owner
    monkeypatch.setattr(products, "owner", lambda one: None if one is BLOCKS else real(one))
    weight, x = torch.randn(48, 64), torch.randn(3, 64)
    found = device_product(weight, torch.ones(48), "int8", device())(x.to(device())).cpu()
    expected = x @ weight.t() + 1.0
    assert "int8_4" in launches
    assert float((found - expected).norm() / expected.norm()) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_head_of_16_bits_is_computed_by_our_functions_where_these_are_faster(
    tmp_path: Path, launches: list[str], dtype: torch.dtype
) -> None:
    target, places = tiny_llama(tmp_path / "target"), ("cpu", str(device()))
    folder = write_head(tmp_path / "head", "eagle", dtype=dtype, gain=1.0)
    here, there = (open_head(str(folder), target=str(target), device=where) for where in places)
    expected, found = levels_of(here, None), levels_of(there, capture)
    assert {"norm_rows", "turn_rows", "gate_rows"} <= set(launches)
    assert any(name.startswith("bf16" if dtype == torch.bfloat16 else "fp16") for name in launches)
    assert float((found - expected).norm() / expected.norm()) < 1e-2


def test_a_head_that_leaves_fp16_has_products_that_narrow_nothing(
    tmp_path: Path, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only torch's products narrow rows: ours take them as they are."""
    target, places = tiny_llama(tmp_path / "target"), ("cpu", str(device()))
    folder = write_head(tmp_path / "large", "eagle", gain=6.0, dtype=torch.float16)
    opened = partial(open_head, target=str(target), device=places[1])
    assert opened(str(folder)).said == ""
    products_on.cache_clear()
    monkeypatch.setattr(PRETENDED, "program", lambda *_: "there is no compiler")
    here, there = open_head(str(folder), target=str(target)), opened(str(folder))
    assert there.said == "pretended:0: large inputs leave fp16: products and cache are fp32"
    expected, found = levels_of(here, None), levels_of(there, capture)
    assert float((found - expected).norm() / expected.norm()) < 1e-3
    usual = write_head(tmp_path / "usual", "eagle", gain=1.0)
    assert opened(str(usual)).said == ""


def test_a_head_whose_numbers_leave_fp16_later_is_opened_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The session in which they do fails, and the next one is drafted for."""
    target = tiny_llama(tmp_path / "target")
    folder = write_head(tmp_path / "head", "eagle", gain=1.0)
    settings = DraftSettings(model=str(folder), device="pretended", weights="fp16")
    engine = open_draft_worker(settings, name="draft", threads=1, target=str(target)).engine
    assert isinstance(engine, HeadDrafter)
    features = torch.full((3, engine.reads.row), 6e4, dtype=torch.float16)
    for fails in (True, False):
        session = engine.open(opening(1, [3, 17, 9], capacity=32, sampling=Sampling(), tree=TREE))
        engine.feed(session, 0, to_array(features[:2]))
        engine.take_features(session, to_array(features[2:]))
        if fails:
            with pytest.raises(FloatingPointError, match="overflow"):
                engine.draft(session, (), 30, Shape(4, 2, 2))
        else:
            assert len(engine.draft(session, (), 30, Shape(4, 2, 2)).tree.tokens) == 4
    assert "numbers have left fp16: products and cache are fp32" in capsys.readouterr().err
