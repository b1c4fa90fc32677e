"""Devices of AMD, Intel and Apple on machines that have none: stand-ins answer for torch, and the
pretended GPU computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.protocol.errors import SettingsError
from dovetail.workers.devices import accelerator, memory, opening, rocm, xpu
from dovetail.workers.devices.base import DeviceKind
from dovetail.workers.devices.cpu import CPU
from dovetail.workers.devices.memory import limit_memory
from dovetail.workers.devices.mps import MPS
from dovetail.workers.devices.rocm import ROCM
from dovetail.workers.devices.xpu import XPU
from pretended.device import POSSIBLE, capture, device, lacking

GIB = 1 << 30
NAME = "pretended"


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what was said in earlier tests, and what was tried."""
    if not POSSIBLE:
        pytest.skip("torch cannot be told of a device from Python")
    device()
    accelerator.tried_int4.cache_clear()
    monkeypatch.setattr(memory.HELD, "_told", set())


class Properties(SimpleNamespace):
    """The properties of a GPU as torch reports them."""

    name = "Intel(R) Arc(TM) A380 Graphics"
    driver_version = "1.6"
    gcnArchName = "gfx1031"
    total_memory = 6 * GIB
    has_fp64 = False
    is_integrated_gpu = False


class Module:
    """The functions of `torch.xpu` or `torch.cuda` that are asked, over the pretended GPU."""

    def __init__(self, properties: Properties) -> None:
        self._properties = properties

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def get_device_properties(self, index: Any) -> Properties:
        return self._properties

    def empty_cache(self) -> None: ...

    def mem_get_info(self, place: Any) -> tuple[int, int]:
        return 5 * GIB, 6 * GIB

    def memory_reserved(self, place: Any) -> int:
        return GIB


@contextmanager
def standing_in(patch: pytest.MonkeyPatch, kind: DeviceKind, **modules: Any) -> Iterator[None]:
    """Have a kind compute on the pretended GPU, and torch answer with stand-ins."""
    with patch.context() as patched:
        patched.setattr(type(kind), "type", NAME)
        patched.setattr(opening, "KINDS", (kind, CPU))
        for name, module in modules.items():
            patched.setattr(torch, name, module)
        yield


def test_an_intel_gpu_without_graphs_or_fp64_opens_and_says_that_none_was_ever_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with standing_in(monkeypatch, XPU, xpu=Module(Properties())), lacking({"fp64", "int4"}):
        assert opening.first_device() == f"{NAME}:0"
        opened = opening.open_device("auto", 1)
        place = opened.torch_device
        assert (opened.capture, opened.draft_weights) == (None, "fp16")
        assert "Arc" in opened.library
        assert opened.free_bytes() == 5 * GIB
        limit_memory(opened, 3 * GIB)
        assert "cannot limit a process to 3.22 GB" in caplog.text
        limits: list[float] = []
        name = "set_per_process_memory_fraction"  # of newer versions
        monkeypatch.setattr(torch.xpu, name, lambda share, _: limits.append(share), raising=False)
        limit_memory(opened, 3 * GIB)
        assert limits == [0.5]
        assert not opening.has_fp64(place)
        assert opening.in_fp64(torch.ones(2, device=place)).device.type == "cpu"
        assert "no int4 products" in opened.kind.against_int4(place)
        assert "NVIDIA's GPUs alone" in str(opened.kind.program(place, ""))
        with pytest.raises(SettingsError, match=r"this machine has 1 such devices"):
            opening.open_device(f"{NAME}:3", 1)
    assert "has never been run on an Intel GPU" in caplog.text


@pytest.mark.parametrize(("integrated", "refuses"), [(False, True), (True, False)])
def test_the_free_memory_of_an_intel_gpu_is_what_is_known_of_it(
    monkeypatch: pytest.MonkeyPatch, integrated: bool, refuses: bool
) -> None:
    """Some drivers refuse to tell it; an integrated GPU shares the host's."""

    def refuse(place: Any) -> Any:
        raise RuntimeError("the device does not tell what is free")

    module = Module(Properties(is_integrated_gpu=integrated))
    if refuses:
        monkeypatch.setattr(module, "mem_get_info", refuse)
    monkeypatch.setattr(torch, "xpu", module)
    monkeypatch.setattr(xpu.cpu, "free_bytes", lambda: 2 * GIB)
    assert XPU.free_bytes(device()) == (5 * GIB if refuses else 2 * GIB)


class Graph:
    """A graph that cannot be replayed, or, if it is `lazy`, does nothing then."""

    lazy = False

    def pool(self) -> None: ...

    def replay(self) -> None:
        if not self.lazy:
            raise NotImplementedError


class Graphs(Module):
    """A module that has graphs."""

    XPUGraph = CUDAGraph = Graph

    @contextmanager
    def device(self, place: Any) -> Iterator[None]:
        yield

    stream = device

    @contextmanager
    def graph(self, graph: Any, **mode: Any) -> Iterator[None]:
        yield

    def Stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda stream: None)

    current_stream = Stream


@pytest.mark.parametrize("lazy", [True, False])
def test_graphs_that_are_refused_or_wrong_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lazy: bool
) -> None:
    monkeypatch.setattr(Graph, "lazy", lazy)
    with standing_in(monkeypatch, XPU, xpu=Graphs(Properties(has_fp64=True))):
        assert opening.open_device("auto", 1).capture is None
    assert "passes are computed operation by operation, without graphs" in caplog.text
    assert ("wrong numbers" in caplog.text) is lazy


def test_graphs_that_are_right_are_used() -> None:
    from dovetail.workers.devices.graphs import proved

    assert proved(capture, device()) is capture


def test_a_device_that_computes_wrong_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = accelerator._sample

    def wrong(place: torch.device) -> Any:
        found = right(place)
        return found if place.type == "cpu" else found | {"attention": found["attention"] * 1.1}

    monkeypatch.setattr(accelerator, "_sample", wrong)
    with (
        standing_in(monkeypatch, XPU, xpu=Module(Properties())),
        pytest.raises(
            SettingsError, match=r"its results for attention are off by .*; use device cpu"
        ),
    ):
        opening.open_device("auto", 1)


def test_cuda_0_of_a_build_for_rocm_is_an_amd_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has all that CUDA has, but no functions of ours, and int4 only if a trial is right."""
    found = Graphs(Properties(name="AMD Radeon RX 6700 XT"))
    place = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert opening.kind_of(place) is ROCM
    assert "and cuda:0 is AMD's" in str(ROCM.program(place, ""))
    with pytest.raises(SettingsError, match="finds no AMD GPU"):
        opening.open_device("cuda:0", 1)
    with standing_in(monkeypatch, ROCM, cuda=found), lacking({"int4"}):
        opened = opening.open_device("auto", 1)
        assert "rocm6.4.43482-AMD-Radeon-RX-6700-XT-gfx1031" in opened.library
        assert opened.kind.against_int4(opened.torch_device)
        assert opened.capture is None
    assert "has never been run on an AMD GPU" in caplog.text
    monkeypatch.setattr(torch.version, "hip", None)
    assert opening.kind_of(place) is not ROCM
    assert rocm.ROCM.open("cuda:0") is None


def test_a_mac_has_one_gpu_in_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    metal = SimpleNamespace(
        empty_cache=lambda: None,
        recommended_max_memory=lambda: 12 * GIB,
        driver_allocated_memory=lambda: GIB,
        set_per_process_memory_fraction=limits.append,
    )
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr("dovetail.workers.devices.cpu.free_bytes", lambda: 8 * GIB)
    with standing_in(monkeypatch, MPS, mps=metal), lacking({"fp64", "int4"}):
        opened = opening.open_device("auto", 1)
        assert (opened.capture, opened.kind.has_fp64(opened.torch_device)) == (None, False)
        assert opened.free_bytes() == 8 * GIB
        limit_memory(opened, 3 * GIB)
        assert limits == [0.25]
        way, source = opened.transfer(), torch.arange(5, dtype=torch.uint8)
        target = way.buffer(5)
        way.pin(source)
        way.wait(way.copy(source, target, way.computed()))
        assert target.tolist() == [0, 1, 2, 3, 4]
        opened.kind.send(source + 1, target)()
        assert target.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(SettingsError, match="this machine has 1 such devices"):
        MPS.own("mps:1", 1, "")


class Stream:
    """A stream that notes what it is asked."""

    def __init__(self, place: Any = None) -> None:
        self.asked: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.asked.append(("waits", event))

    def record_event(self) -> Any:
        self.asked.append("recorded")
        return SimpleNamespace(query=lambda: False, synchronize=lambda: self.asked.append("host"))

    def __enter__(self) -> None:
        self.asked.append("entered")

    def __exit__(self, *error: object) -> None:
        self.asked.append("left")


def test_copies_of_an_accelerator_wait_for_what_is_computed_and_it_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computes = Stream()
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda place: computes)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda buffer, stream: None)
    way = accelerator.Streams(device())
    target = way.buffer(3)
    mark = way.computed()
    copied = way.copy(torch.ones(3, dtype=torch.uint8), target, mark)
    way.wait(copied)
    assert way._copies.asked == [("waits", mark), "entered", "left", "recorded"]  # type: ignore[attr-defined]
    assert computes.asked == ["recorded", ("waits", copied)]
    assert target.tolist() == [1, 1, 1]
    accelerator.copied(torch.zeros(3, dtype=torch.uint8), target, computes)()
    assert computes.asked[-1] == "host"
    assert target.tolist() == [0, 0, 0]
