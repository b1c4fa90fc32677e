"""The settings of a target say where it runs, and its fingerprint tells that only where it changes
bytes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dovetail.protocol.calibration import ReadingCosts, RowsSeconds
from dovetail.protocol.errors import SettingsError
from dovetail.protocol.profile import ProfileKey, update_profile
from dovetail.protocol.settings import MemorySettings, SplitSettings, TargetSettings
from dovetail.workers.calibration.target import calibrate
from dovetail.workers.devices.opening import open_device
from dovetail.workers.kernels.layer_plan import CODES
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.stages.engines import TorchEngine
from dovetail.workers.serving.open_target import open_target_worker
from dovetail.workers.serving.spread import known_readings, spread_of
from support.kernels import needs_kernels
from support.models import CONFIG, tiny_llama

UNLIMITED = MemorySettings()
C, R, S = Place.CPU, Place.RESIDENT, Place.STREAMED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("spread"), layers=4)


def places(settings: TargetSettings, memory: MemorySettings = UNLIMITED) -> list[Place] | None:
    spread = spread_of(settings, memory, open_device(settings.device, 1), 1)
    return None if spread is None else list(spread.stage(CONFIG, "fp32").places)


def test_a_target_of_which_nothing_is_said_is_computed_as_it_always_was() -> None:
    assert places(TargetSettings()) is None
    assert places(TargetSettings(prefill="local")) is None


def test_the_settings_say_what_is_where() -> None:
    split = SplitSettings(device="cpu", layers=3)
    assert places(TargetSettings(split=split)) == [C] * 5 + [R] * 3
    assert places(TargetSettings(split=split, resident=1)) == [C] * 5 + [S, S, R]
    assert places(TargetSettings(resident=0)) == [S] * 8
    assert places(TargetSettings(resident=8)) == [R] * 8
    assert places(TargetSettings(prefill="cpu")) == [C] * 8
    assert places(TargetSettings(split=SplitSettings(device="cpu"))) == [R] * 8


def test_keys_and_values_in_8_bits_are_refused_where_a_gpu_computes() -> None:
    gpu = replace(open_device("cpu", 1), name="cuda:0", torch_device=torch.device("meta"))
    with pytest.raises(SettingsError, match=r"'q8' is for layers on the CPU, but cuda:0 computes"):
        spread_of(TargetSettings(cache="q8", weights="file"), UNLIMITED, gpu, 1)
    with pytest.raises(SettingsError, match=r"no 8-bit keys and values: use target\.cache"):
        TorchEngine(torch.device("meta")).expect(CODES)


def test_a_limit_of_the_hosts_memory_holds_where_a_device_only_reads_prompts() -> None:
    assert places(TargetSettings(prefill="cpu"), MemorySettings(ram="1GB")) == [C] * 8
    with pytest.raises(SettingsError, match=r"memory\.ram is"):
        places(TargetSettings(prefill="cpu"), MemorySettings(ram="1MB"))


@pytest.mark.parametrize("weights", ["int8", "int4-int8"])
def test_codes_of_a_substitute_beside_take_the_same_whatever_the_weights_are(weights: str) -> None:
    settings = TargetSettings(resident=0)
    cpu = open_device("cpu", 1)
    spread = spread_of(settings, MemorySettings(vram="1GB"), cpu, 1, bits=4)
    alone = spread_of(settings, MemorySettings(vram="1GB"), cpu, 1)
    assert spread is not None
    assert alone is not None
    assert spread.stage(CONFIG, weights).places == alone.stage(CONFIG, weights).places
    assert spread.demand is not None
    tight = spread_of(settings, MemorySettings(vram="1257KB"), cpu, 1, bits=4)
    assert tight is not None
    with pytest.raises(SettingsError, match="cpu would need"):
        tight.stage(CONFIG, weights)


def test_a_limit_of_the_devices_memory_is_kept() -> None:
    split = places(TargetSettings(split=SplitSettings(device="cpu")), MemorySettings(vram="1953KB"))
    streamed = places(
        TargetSettings(split=SplitSettings(device="cpu", layers=8)), MemorySettings(vram="2545KB")
    )
    assert split == [C] * 4 + [R] * 4
    assert streamed is not None
    assert (streamed.count(R), streamed.count(S)) == (1, 7)


@pytest.mark.parametrize(
    ("settings", "memory", "words"),
    [
        (
            TargetSettings(split=SplitSettings(layers=3)),
            UNLIMITED,
            ("target.split.layers = 3", "target.split.device"),
        ),
        (
            TargetSettings(split=SplitSettings(device="cpu", layers=9)),
            UNLIMITED,
            ("target.split.layers = 9", "the model has 8 layers"),
        ),
        (
            TargetSettings(split=SplitSettings(device="cpu", layers=2), resident=3),
            UNLIMITED,
            ("target.resident = 3", "cpu computes 2 layers"),
        ),
        (TargetSettings(split=SplitSettings(device="cuda:5")), UNLIMITED, ("there is no cuda:5",)),
        (
            TargetSettings(resident=0),
            MemorySettings(vram="10KB"),
            ("cpu would need", "memory.vram leaves 1e-05 GB"),
        ),
        (
            TargetSettings(resident=0),
            MemorySettings(ram="10KB"),
            ("8 layers, the embedding and a pass", "memory.ram is 1e-05 GB"),
        ),
        (TargetSettings(), MemorySettings(vram="10KB"), ("memory.vram = '10KB'", "leave it out")),
        (TargetSettings(), MemorySettings(vram="8GB"), ("memory.vram = '8GB'", "leave it out")),
        (
            TargetSettings(prefill="cpu", resident=0),
            UNLIMITED,
            ("target.prefill = 'cpu'", "there are none"),
        ),
        (
            TargetSettings(prefill="cpu", split=SplitSettings(device="cpu", layers=2)),
            MemorySettings(vram="1257KB"),
            ("to read prompts", "memory.vram leaves"),
        ),
        (TargetSettings(prefill="cuda:7"), UNLIMITED, ("there is no cuda:7",)),
    ],
)
def test_settings_that_do_not_go_together_are_refused_in_one_line(
    settings: TargetSettings, memory: MemorySettings, words: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError) as caught:
        places(settings, memory)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_whose_sizes_are_not_known_is_refused() -> None:
    spread = spread_of(TargetSettings(resident=0), UNLIMITED, open_device("cpu", 1), 1)
    assert spread is not None
    with pytest.raises(SettingsError, match="of a strange model lacks the sizes"):
        spread.stage({"model_type": "strange"}, "fp32")


@needs_kernels
def test_a_placement_is_told_and_changes_no_fingerprint_where_it_changes_no_byte(
    folder: Path,
) -> None:
    whole = open_target_worker(TargetSettings(model=str(folder)), name="t", threads=1).hello(1)
    mixed = TargetSettings(
        model=str(folder), split=SplitSettings(device="cpu", layers=3), resident=1, prefill="cpu"
    )
    found = open_target_worker(mixed, name="t", threads=1).hello(1)
    assert (
        found.placement == "cpu 0-0, cpu 1-3 (1 resident, 2 streamed) and head; prompts read by cpu"
    )
    assert whole.placement == ""
    assert found.fingerprint == whole.fingerprint


def curve(*seconds: float) -> RowsSeconds:
    return RowsSeconds(rows=(16, 64, 256, 1024), seconds=seconds)


@pytest.mark.parametrize(
    ("streamed", "rows"),
    [
        ((1.0, 1.0, 1.0, 1.0), 256),
        ((0.1, 0.1, 0.1, 0.1), 16),
        ((9.0, 9.0, 9.0, 9.0), None),
        ((0.1, 5.0, 1.0, 1.0), 256),
        ((0.1, 0.1, 0.1, 9.0), None),
    ],
)
def test_prompts_are_read_apart_from_where_that_is_always_faster(
    streamed: tuple[float, ...], rows: int | None
) -> None:
    reading = ReadingCosts(device="cpu", local=curve(0.2, 0.8, 3.2, 8.0), streamed=curve(*streamed))
    assert reading.better_from == rows
    spread = spread_of(TargetSettings(), UNLIMITED, open_device("cpu", 1), 1, [reading])
    assert (None if spread is None else (spread.reader is not None, spread.reads_from)) == (
        None if rows is None else (True, rows)
    )
    for local in (TargetSettings(prefill="local"), TargetSettings(cache="q8")):
        assert spread_of(local, UNLIMITED, open_device("cpu", 1), 1, [reading]) is None


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(("weights", "dtype"), [("fp32", torch.float32), ("half", torch.bfloat16)])
def test_what_calibrate_finds_of_prompts_is_known_to_a_worker_of_the_same_model(
    tmp_path: Path, weights: str, dtype: torch.dtype
) -> None:
    settings = TargetSettings(
        model=str(tiny_llama(tmp_path, dtype=dtype)), weights=weights, prefill="cpu"
    )
    found = calibrate(
        settings,
        threads=1,
        memory_bytes=8 << 30,
        profile=None,
        seconds=0.1,
        contexts=(),
        say=lambda *_: None,
    )
    reading, path = (
        ReadingCosts.model_validate_json(json.dumps(found["reading"])),
        tmp_path / "profile.json",
    )
    assert reading.local.rows == reading.streamed.rows == (16, 64)
    update_profile(
        path, ProfileKey.model_validate(found["key"]), lambda entry: entry.having(reading)
    )
    assert known_readings(settings.model_copy(update={"prefill": "auto"}), path) == (reading,)
    assert known_readings(settings.model_copy(update={"weights": "int8"}), path) == ()
