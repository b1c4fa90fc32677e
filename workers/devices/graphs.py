"""Functions of fixed shapes, captured once as a graph and replayed, by `torch.cuda` or
`torch.xpu`."""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

from dovetail.workers.devices.base import Capture
from dovetail.workers.devices.memory import HELD

ResultT = TypeVar("ResultT")
WARM_UPS = 3  # runs before a capture, in which libraries choose kernels and allocate memory


def capture(
    module: Any,
    new: Callable[[], Any],
    device: torch.device,
    function: Callable[[], ResultT],
    **mode: Any,
) -> Callable[[], ResultT]:
    """Capture `function`, which uses the same tensors each time, as a graph; return what replays
    it. The result is good until any graph of the device is replayed: all share memory. `module`:
    `torch.cuda` or `torch.xpu`; `new` makes a graph; `mode`: options of `module.graph`."""
    with module.device(device):
        side = module.Stream()
        side.wait_stream(module.current_stream())
        with module.stream(side):
            for _ in range(WARM_UPS):
                function()
        module.current_stream().wait_stream(side)
        graph, pool = new(), _first_graph(module, new, device, *mode.items()).pool()
        with module.graph(graph, pool=pool, **mode):
            result = function()

    def replay() -> ResultT:
        with module.device(device):
            graph.replay()
        return result

    return replay


@cache
def _first_graph(
    module: Any, new: Callable[[], Any], device: torch.device, *mode: tuple[str, Any]
) -> Any:
    """Return a graph whose memory all graphs of a device share. It stays: an empty pool is closed
    for good."""
    graph, number = new(), torch.zeros(1, device=device)
    with module.graph(graph, **dict(mode)):
        number + 1.0
    return graph


def proved(capture: Capture, device: torch.device) -> Capture | None:
    """Return `capture` if a small graph gives the right numbers twice; else report why, once, and
    return None."""
    given = torch.zeros(64, device=device)
    try:
        replay = capture(lambda: (given + given.flip(0)) * 2.0)
        for number in (3.0, 5.0):
            given.copy_(torch.arange(64) + number)
            if not (replay() == 2.0 * (63.0 + 2.0 * number)).all().item():
                raise RuntimeError("a replayed graph gave wrong numbers")
    except (RuntimeError, TypeError, AttributeError) as error:  # of torch, whatever it lacks here
        why = " ".join(str(error).split())[:200]
        HELD.tell(f"{device}: passes are computed operation by operation, without graphs: {why}")
        return None
    return capture
