"""The table of devices, and what is said of one that is not there."""

import pytest
import torch

from dovetail.protocol.errors import SettingsError
from dovetail.workers.devices.memory import is_out_of_memory
from dovetail.workers.devices.opening import open_device
from dovetail.workers.devices.registry import Memory, entries, memory_of


def test_the_cpu_opens_with_the_threads_asked_for_and_says_so() -> None:
    device = open_device("cpu", 1)
    assert torch.get_num_threads() == 1
    assert (device.name, device.torch_device, device.draft_weights) == (
        "cpu",
        torch.device("cpu"),
        "stored",
    )
    assert torch.__version__ in device.library
    assert device.library.endswith("-1t")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_a_gpu_where_there_is_none_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(SettingsError, match="use device cpu, or install torch for CUDA"):
        open_device(name, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_beyond_the_last_is_refused_and_the_first_opens() -> None:
    assert open_device("cuda:0", 1).draft_weights == "fp16"
    with pytest.raises(SettingsError, match="this machine has"):
        open_device("cuda:99", 1)


@pytest.mark.parametrize("name", ["", "gpu", "cuda:x", "cuda:0:1", "CPU", "openvino:GPU"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=r"write cuda:N.*, mps \(Apple\)"):
        open_device(name, 1)


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("cuda", Memory.OWN),
        ("cuda:1", Memory.OWN),
        ("xpu:0", Memory.OWN),
        ("mps", Memory.SHARED),
        ("cpu", Memory.HOST),
        ("pretended", Memory.HOST),
        *((name, None) for name in ("auto", "", "cuda:x", "cpu:0")),
    ],
)
def test_the_table_says_where_weights_lie(name: str, memory: Memory | None) -> None:
    assert memory_of(name) is memory


def test_a_kind_of_the_table_has_its_names() -> None:
    for entry in entries():
        assert entry.pattern.startswith(entry.load().type)


def test_exhausted_memory_is_told_from_other_failures() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes differ"))
