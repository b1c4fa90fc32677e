"""A device that is not there is refused with the remedy."""

import pytest
import torch

from dovetail.protocol.errors import SettingsError
from dovetail.workers.devices import open_device
from dovetail.workers.devices.memory import is_out_of_memory


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


@pytest.mark.parametrize("name", ["", "gpu", "cuda:x", "cuda:0:1", "CPU"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="write cpu or cuda:N"):
        open_device(name, 1)


def test_exhausted_memory_is_told_from_other_failures() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes differ"))
