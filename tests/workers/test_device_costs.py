"""The costs of layers on a device: measured with a few of them, kept, and found again for the same
target alone."""

from pathlib import Path

import pytest

from dovetail.protocol.calibration import DeviceCosts
from dovetail.protocol.errors import SettingsError
from dovetail.protocol.profile import update_profile
from dovetail.protocol.settings import TargetSettings
from dovetail.workers.calibration.devices import keys_of, known_costs, measure_device, probe_device
from dovetail.workers.devices.opening import open_device
from dovetail.workers.serving.spread import known_readings
from support.kernels import needs_kernels
from support.models import tiny_llama

pytestmark = needs_kernels


def curves(costs: DeviceCosts) -> list[tuple[float, ...]]:
    return [
        getattr(costs, name).seconds
        for name in ("layer", "streamed", "head", "host_layer", "host_head")
    ]


def test_layers_are_measured_from_a_config_alone(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    for file in (*folder.glob("*.safetensors"), folder / "tokenizer.json"):
        file.unlink()
    costs = measure_device(TargetSettings(model=str(folder)), device="cpu", threads=1, seconds=0.1)
    assert costs.device == "cpu"
    assert costs.link_gb_s > 0.0
    assert costs.layer.rows[0] == 1
    assert all(seconds > 0.0 for curve in curves(costs) for seconds in curve)


def test_what_was_measured_is_found_for_the_same_target_and_device(tmp_path: Path) -> None:
    open_device("cpu", 1)
    own, other = (
        TargetSettings(model=str(tiny_llama(tmp_path / "own"))),
        TargetSettings(model=str(tiny_llama(tmp_path / "other", layers=3))),
    )
    profile = tmp_path / "profile.json"
    costs = measure_device(own, device="cpu", threads=1, seconds=0.1)
    update_profile(profile, next(keys_of(own)), lambda entry: entry.having(costs))
    assert known_costs(own, profile, device="cpu").parts == costs
    assert known_costs(own, profile, device="cuda:0").parts is None
    assert known_costs(other, profile, device="cpu").parts is None
    assert known_readings(own, profile) == ()


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cuda:99"):
        measure_device(
            TargetSettings(model=str(tiny_llama(tmp_path))),
            device="cuda:99",
            threads=1,
            seconds=0.1,
        )


def test_a_probe_finds_rates() -> None:
    found = probe_device(open_device("cpu", 1), side=64, size=1 << 16)
    assert min(found.read_gb_s, found.gflop_s, found.half_gflop_s, found.link_gb_s) > 0.0
