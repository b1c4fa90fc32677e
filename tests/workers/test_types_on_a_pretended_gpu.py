"""The type of a draft's weights on a GPU: of 16 and 32 bits the one whose products are right and
fastest on that card, which is remembered and said; a pretended card counts what products take."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.protocol.errors import SettingsError
from dovetail.protocol.profile import TypeTimes, load_profile, rewrite_profile
from dovetail.protocol.settings import DraftSettings
from dovetail.workers.devices.opening import open_device
from dovetail.workers.drafters import weights
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.drafters.weights import chosen_type
from dovetail.workers.models.backends.device.choice import products_on
from pretended.device import MEMORY, POSSIBLE, capable, capped, device, slow_fp16
from support.emulated import given_to_pretended
from support.heads import write_head
from support.kernels import needs_kernels
from support.models import tiny_llama

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not POSSIBLE, reason="torch cannot be told of a device from Python"),
]
NO_BF16 = "bf16: pretended:0 has no bf16 arithmetic (compute capability {})"


@pytest.fixture(autouse=True)
def torchs() -> None:
    """No other test's functions of ours."""
    products_on.cache_clear()


@pytest.mark.parametrize("capability", [5.0, 6.1, 7.0, 7.5])
def test_weights_of_bf16_become_fp16_on_cards_without_bf16(capability: float) -> None:
    with capable(capability):
        for stored in ("bf16", "fp16", "fp32"):
            chosen = chosen_type(open_device("pretended", 1), stored, None)
            assert chosen.weights == "fp16"
            assert chosen.said.endswith(NO_BF16.format(capability))
        assert "weights are fp16 (stored as fp32); products of 1, 4 and 16 rows take " in (
            chosen.said
        )


@pytest.mark.parametrize("capability", [8.0, 8.6, 8.9, 9.0, 12.0])
def test_weights_of_16_bits_stay_as_they_are_on_cards_with_units_for_both(
    capability: float,
) -> None:
    with capable(capability):
        opened = open_device("pretended", 1)
        found = [chosen_type(opened, stored, None).weights for stored in ("bf16", "fp16", "fp32")]
    assert found == ["bf16", "fp16", "fp16"]


def test_products_of_fp16_that_are_slow_make_way_for_fp32_unless_ours_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Products in fp16 take 25 times as long as those in fp32, as on a GTX 16xx."""
    with capable(7.5), slow_fp16(0.04):
        chosen = chosen_type(open_device("pretended", 1), "fp16", None)
        assert chosen.weights == "fp32"
        for _ in given_to_pretended(monkeypatch):
            opened = open_device("pretended", 1)
            found = [chosen_type(opened, stored, None).weights for stored in ("fp16", "bf16")]
            assert found == ["fp16", "bf16"]  # ours need no bf16 arithmetic


def test_what_was_measured_is_remembered_for_the_card_and_its_driver(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    for capability, count in ((6.0, 1), (6.0, 1), (8.7, 2)):
        with capable(capability):
            chosen_type(open_device("pretended", 1), "bf16", profile)
        known = load_profile(profile).types
        assert len(known) == count
        assert f"capability-{capability}-1.0" in known[-1].key


def test_without_memory_to_time_products_a_draft_has_its_own_type_and_nothing_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, opened = tmp_path / "profile.json", open_device("pretended", 1)
    monkeypatch.setattr(weights, "COUNTED_SHAPE", (1024, 1024))
    with capable(8.5), slow_fp16(0.04):
        with capped(MEMORY.used + (1 << 20)):
            chosen = chosen_type(opened, "fp16", profile)
        assert chosen.weights == "fp16"
        assert chosen.said.endswith("not enough memory to time products of several types")
        assert not load_profile(profile).types
        with capped(MEMORY.used + 1024), pytest.raises(torch.OutOfMemoryError):
            chosen_type(opened, "fp16", profile)
        assert chosen_type(opened, "fp16", profile).weights != "fp16"
    assert load_profile(profile).types


@pytest.mark.parametrize("seconds", [{}, {"fp16": (1e-3,) * 3, "bf16": (1e-3,) * 3}])
def test_remembered_times_that_lack_a_type_are_measured_anew(
    tmp_path: Path, seconds: dict[str, tuple[float, ...]]
) -> None:
    profile = tmp_path / "profile.json"
    with capable(8.1 + len(seconds) / 10):
        opened = open_device("pretended", 1)
        times = TypeTimes(key=weights._key(opened), seconds=seconds)
        rewrite_profile(profile, lambda found: found.holding(times))
        chosen_type(opened, "fp16", profile)
    (known,) = load_profile(profile).types
    assert known.key == times.key
    assert {*known.seconds} == {"fp16", "bf16", "fp32"}


def opened(draft: Path, target: Path, kind: str = "auto") -> str:
    """The type of weights that a draft has on a pretended GPU."""
    settings = DraftSettings(model=str(draft), device="pretended", weights=kind)
    engine = open_draft_worker(settings, name="draft", threads=1, target=str(target)).engine
    return str(engine.model.weights)


@pytest.mark.parametrize(("gain", "expected"), [(1.0, "fp16"), (3e5, "fp32")])
def test_a_small_model_of_bf16_whose_numbers_leave_fp16_becomes_fp32_on_an_old_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gain: float, expected: str
) -> None:
    target = tiny_llama(tmp_path, dtype=torch.bfloat16)
    file = target / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] *= gain
    save_file(tensors, file, {"format": "pt"})
    with capable(6.1):
        assert opened(target, target) == expected
    said = capsys.readouterr().err
    assert "draft: pretended:0: weights are fp16 (stored as bf16); products of 1, 4" in said
    assert ("weights are fp32 (stored as bf16)" in said) is (expected == "fp32")
    assert ("fp16: the model's numbers overflow it" in said) is (expected == "fp32")


def test_a_head_of_bf16_becomes_fp16_on_an_old_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_llama(tmp_path / "target")
    head = write_head(tmp_path / "head", "eagle", dtype=torch.bfloat16, gain=1.0)
    settings = DraftSettings(model=str(head), device="pretended")
    for capability, kind in ((7.5, torch.float16), (8.0, torch.bfloat16)):
        with capable(capability):
            worker = open_draft_worker(settings, name="draft", threads=1, target=str(target))
        assert worker.engine.head._table.dtype == kind
    assert "weights are fp16 (stored as bf16)" in capsys.readouterr().err


def test_a_type_that_somebody_wants_is_taken_or_refused_in_a_sentence(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path, dtype=torch.bfloat16)
    with capable(7.5):
        assert opened(target, target, "fp32") == "fp32"
        with pytest.raises(SettingsError) as refusal:
            opened(target, target, "bf16")
    assert str(refusal.value) == (
        "draft.weights = 'bf16' is not possible on pretended:0: pretended:0 has no bf16 "
        "arithmetic (compute capability 7.5); use fp16 or fp32"
    )


def test_products_of_bf16_are_refused_by_the_oldest_cards() -> None:
    x = torch.ones(8, 8, dtype=torch.bfloat16).to(device())
    with capable(5.0), pytest.raises(RuntimeError, match="CUBLAS_STATUS_NOT_SUPPORTED"):
        torch.mm(x, x)
    with capable(6.1):
        assert torch.mm(x, x).cpu().eq(8).all()
