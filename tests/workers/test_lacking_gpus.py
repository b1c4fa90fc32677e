"""Drafts and placements on GPUs that lack what CUDA's have, as those of AMD, Intel and Apple do: a
pretended one without fp64, graphs, pinned memory, a stream of copies or int4 gives
the same tokens and the same function."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dovetail.protocol.errors import CheckpointError, SettingsError
from dovetail.protocol.messages import Draft, Drafted, Feed, Open
from dovetail.protocol.settings import DraftSettings, Sampling, TreeSettings
from dovetail.workers.devices.opening import in_fp64, open_device
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.sessions.wire import narrowed, to_array
from pretended.device import POSSIBLE, PROFILES, device, lacking
from support.cases import everyday
from support.decoded import decode, far
from support.heads import write_head
from support.kernels import needs_kernels
from support.models import tiny_llama

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not POSSIBLE, reason="torch cannot be told of a device from Python"),
]
MAKERS = sorted(PROFILES)
KINDS = ("small", "eagle", "eagle3", "dovetail", "jakiro")
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.0),
    "from a nucleus": Sampling(temperature=1.0, top_p=0.9),
    "by rejection": Sampling(temperature=1.0, acceptance="rejection"),
    "looking back": Sampling(temperature=0.7, repetition_penalty=1.2, min_p=0.01),
}
TREE = TreeSettings(policy="beam", gamma=16, depth=4, width=4)
PROMPT = tuple(range(3, 15))


def proposed(kind: str, folder: Path) -> dict[str, Sequence[int]]:
    """Return the tokens of a proposal for each of `SAMPLINGS` by a draft in fp32 on the device."""
    target = folder / "target"
    if not target.exists():
        tiny_llama(target, intermediate_size=128, context=256, dtype=torch.float16)
        if kind != "small":
            write_head(folder / "head", kind, dtype=torch.float16)
    model = str(target if kind == "small" else folder / "head")
    settings = DraftSettings(model=model, device="pretended", weights="fp32")
    worker = open_draft_worker(settings, name="draft", threads=1, target=str(target))
    reads, found = worker.hello(1).reads, {}
    for number, (name, sampling) in enumerate(SAMPLINGS.items()):
        at = {"epoch": 1, "session": number}
        order = Open(
            **at,
            key=bytes(16),
            prompt=PROMPT,
            capacity=60,
            vocabulary_size=48,
            sampling=sampling,
            tree=TREE,
            features=reads,
        )
        list(worker.handle(order))
        if reads is not None:
            generator = torch.Generator().manual_seed(2)
            features = torch.randn(len(PROMPT), reads.row, generator=generator)
            rows = to_array(narrowed(features, reads.dtype))
            list(worker.handle(Feed(**at, start=0, features=rows)))
        shape = {"max_nodes": TREE.gamma, "max_depth": TREE.depth, "max_width": TREE.width}
        draft = Draft(**at, round=1, prefix=len(PROMPT) + 1, accepted=(), bonus=7, **shape)
        (event,) = (event for event in worker.handle(draft) if isinstance(event, Drafted))
        assert len(event.tokens) > TREE.depth
        found[name] = event.tokens
    return found


@pytest.mark.parametrize(
    ("kind", "maker"),
    everyday(
        [(kind, MAKERS[i % len(MAKERS)]) for i, kind in enumerate(KINDS)], ("jakiro", "apple")
    ),
)
def test_drafts_of_each_kind_propose_the_same_tokens(kind: str, maker: str, tmp_path: Path) -> None:
    expected = proposed(kind, tmp_path)
    with lacking(PROFILES[maker]):
        assert proposed(kind, tmp_path) == expected


@pytest.mark.parametrize(
    ("maker", "weights", "places"),
    everyday(
        [
            ("apple", "half", "mixed"),
            ("apple", "fp32", "resident"),
            ("intel", "half", "resident"),
            ("intel", "fp32", "streamed"),
            ("amd", "half", "streamed"),
            ("amd", "fp32", "mixed"),
        ],
        ("apple", "half", "mixed"),
    ),
)
def test_a_target_there_is_the_same_function(
    maker: str, weights: str, places: str, tmp_path: Path
) -> None:
    stored = torch.float16 if weights == "half" else torch.float32
    folder = str(tiny_llama(tmp_path, layers=3, dtype=stored))
    expected = decode(load_language_model(folder, weights=weights, device="cpu"))
    chosen = {
        "streamed": [Place.STREAMED] * 3,
        "mixed": [Place.CPU, Place.STREAMED, Place.RESIDENT],
        "resident": [Place.RESIDENT] * 3,
    }
    with lacking(PROFILES[maker]):
        opened = open_device("pretended", 1)
        staging = Staging(chosen[places], opened.transfer())
        model = load_language_model(folder, weights=weights, device="cpu", stage=lambda *_: staging)
        assert far(decode(model), expected) < 1e-5


@pytest.mark.parametrize("maker", MAKERS)
def test_a_substitute_without_products_for_its_codes_is_refused(maker: str, tmp_path: Path) -> None:
    target = str(tiny_llama(tmp_path, dtype=torch.float16))
    settings = DraftSettings(kind="substitute", device="pretended")
    with (
        lacking(PROFILES[maker]),
        pytest.raises(SettingsError, match="no int4 products for pretended"),
    ):
        open_draft_worker(settings, name="draft", threads=1, target=target)


def test_the_host_computes_in_fp64_where_the_card_cannot() -> None:
    numbers = torch.ones(3, device=device())
    assert in_fp64(numbers).device == device()
    with lacking({"fp64"}):
        assert in_fp64(numbers).device.type == "cpu"
        for refused in (
            numbers.double,
            lambda: torch.zeros(2, dtype=torch.double, device=device()),
        ):
            with pytest.raises(RuntimeError, match="has no float64"):
                refused()


def test_a_target_of_int8_without_torchs_product_of_it_is_refused_in_a_sentence(
    tmp_path: Path,
) -> None:
    folder = str(tiny_llama(tmp_path))
    staging = Staging([Place.RESIDENT] * 2, open_device("pretended", 1).transfer())
    how = {"weights": "int8", "device": "cpu", "stage": lambda *_: staging}
    with lacking({"int8"}), pytest.raises(CheckpointError, match=r"target\.weights half or fp32"):
        load_language_model(folder, **how)  # type: ignore[arg-type]
