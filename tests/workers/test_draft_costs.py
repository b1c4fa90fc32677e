"""The cost of a level of a draft: measured with small models and heads, kept, and told by the
worker that starts later."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.protocol.calibration import ContextCurve, RowsSeconds
from dovetail.protocol.errors import UserError
from dovetail.protocol.profile import ProfileKey, update_profile
from dovetail.protocol.settings import DraftSettings
from dovetail.workers.calibration.draft import LEVELS, _Guesses, calibrate_draft
from dovetail.workers.calibration.passes import Passes
from dovetail.workers.devices.opening import open_device
from dovetail.workers.drafters.levels import levels_key
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.heads.head import Predicted, open_head
from dovetail.workers.models.loading import load_language_model
from support.block_heads import DRAFTERS, write_drafter
from support.heads import VARIANTS, write_head
from support.kernels import needs_kernels
from support.mtp import write_mtp
from support.parallel_heads import write_parallel_head

TOLD = ContextCurve(
    context=512, t_v=RowsSeconds(rows=LEVELS, seconds=(1.0, 1.0, 1.0, 2.0, 2.0, 3.0))
)


HEADS = ("eagle3", "jakiro", "dovetail-3", "dflash-mixed", "dspark-deepspec", "dflash2", "peagle")


@pytest.fixture(params=["small", *HEADS])
def draft(request: pytest.FixtureRequest, llama_folder: Path, tmp_path: Path) -> DraftSettings:
    """A small model, and heads of several kinds."""
    name, folder = request.param, tmp_path / "head"
    if name == "small":
        folder = llama_folder
    elif name in DRAFTERS:
        write_drafter(folder, name)
    elif name == "peagle":
        write_parallel_head(folder)
    else:
        write_head(folder, VARIANTS[name])
    return DraftSettings(model=str(folder), device="cpu")


def test_a_level_is_measured_kept_and_told(
    draft: DraftSettings, llama_folder: Path, tmp_path: Path
) -> None:
    target, profile = str(llama_folder), tmp_path / "profile.json"
    key, levels = calibrate_draft(draft, threads=1, target=target, seconds=0.02)
    assert levels.t_v.rows == LEVELS
    assert all(seconds > 0.0 for seconds in levels.t_v.seconds)
    update_profile(profile, key, lambda entry: entry.with_levels(levels))
    assert open_draft_worker(draft, name="draft", threads=1, target=target, profile=profile).hello(
        1
    ).curves == (levels,)


@needs_kernels
def test_a_level_of_the_targets_own_layer_is_measured_and_kept(tmp_path: Path) -> None:
    write_mtp("glm4_moe", tmp_path / "model")
    settings = DraftSettings(kind="mtp", device="cpu")
    target, profile = str(tmp_path / "model"), tmp_path / "profile.json"
    key, levels = calibrate_draft(settings, threads=1, target=target, seconds=0.02)
    update_profile(profile, key, lambda entry: entry.with_levels(levels))
    worker = open_draft_worker(settings, name="draft", threads=1, target=target, profile=profile)
    assert worker.hello(1).curves == (levels,)


@pytest.mark.parametrize(
    "change",
    [{"threads": 7}, {"machine": "another"}, {"weights": "int8"}, {"shapes": "other files"}],
)
def test_a_level_that_was_measured_of_something_else_is_not_told(
    llama_folder: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    settings, profile = (
        DraftSettings(model=str(llama_folder), device="cpu"),
        tmp_path / "profile.json",
    )
    key = levels_key(
        load_language_model(settings.model, weights="stored", device="cpu"),
        open_device("cpu", 1).library,
    )
    for where, expected in (
        (ProfileKey.model_validate({**key.model_dump(), **change}), ()),
        (key, (TOLD,)),
    ):
        update_profile(profile, where, lambda entry: entry.with_levels(TOLD))
        assert (
            open_draft_worker(settings, name="draft", threads=1, target="", profile=profile)
            .hello(1)
            .curves
            == expected
        )


def test_a_damaged_profile_is_one_clear_error(llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="damaged"):
        open_draft_worker(
            DraftSettings(model=str(llama_folder), device="cpu"),
            name="draft",
            threads=1,
            target="",
            profile=tmp_path / "profile.json",
        )


def test_where_levels_have_fixed_shapes_those_are_measured(
    llama_folder: Path, tmp_path: Path
) -> None:
    captured: list[int] = []

    def capture(function: Callable[[], Predicted]) -> Callable[[], Predicted]:
        captured.append(len(function().logits))
        return function

    head = open_head(
        str(write_head(tmp_path, VARIANTS["eagle"])), target=str(llama_folder), backend="library"
    )
    passes = Passes(_Guesses(head, capture), 24)
    passes.fill(8)
    assert passes.curve((1, 3, 16), 0.0).rows == (1, 3, 16)
    assert sorted(captured) == [1, 4, 16]
