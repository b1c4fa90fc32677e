"""Passes of fixed shape: their rows see what paths say, and what is sent to a device is copied
before it is overwritten."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dovetail.workers.devices.cpu import CPU
from dovetail.workers.models.backends.device.fixed import (
    ArenaCache,
    Arenas,
    Buffers,
    Inputs,
    form_of,
)
from dovetail.workers.models.segment import Paths, Segment

HERE = torch.device("cpu")


def cache(slots: int) -> ArenaCache:
    shape = {"layers": 1, "kv_heads": 1, "head_dim": 2, "dtype": torch.float32, "device": HERE}
    return ArenaCache(Arenas(), capacity=slots, **shape)  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 20),
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.sampled_from([0, 1, 3, 9, 40]),
    st.sampled_from([1, 50]),
)
def test_rows_see_the_prefix_and_their_paths_within_the_window(
    prefix: int, ancestors: list[int], window: int, apart: int
) -> None:
    """Row i goes on from row ancestors[i], if that comes before it. Positions may be far apart, as
    those of a proof are: a window is of rows."""
    rows: list[list[int]] = []
    for row, above in enumerate(ancestors):
        rows.append([*(rows[above] if above < row else []), prefix + row])
    positions = apart * np.array([prefix + len(path) - 1 for path in rows])
    segment = Segment(cache(64), prefix, len(rows), Paths.of(prefix, rows))
    form = form_of([segment], placed=False)
    assert form.rows >= len(rows)
    inputs = Inputs(form, {"tokens": (torch.long, (form.rows,))}, HERE)
    inputs.send([segment], {"positions": positions, "tokens": np.arange(len(rows))})
    mask = inputs.mask(torch.float32, window)
    for row in range(form.rows):
        path = rows[min(row, len(rows) - 1)]
        seen = [*range(prefix), *path]
        seen = seen[-window:] if window else seen
        assert (mask[row] == 0.0).nonzero().flatten().tolist() == sorted(seen)
        assert int(inputs["slots"][row]) == path[-1]
        assert int(inputs["tokens"][row]) == min(row, len(rows) - 1)


def test_what_is_sent_is_not_overwritten_before_it_has_been_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device copies as late as it may."""

    def send(source: Tensor, target: Tensor) -> Callable[[], None]:
        def wait() -> None:
            target.copy_(source)

        return wait

    monkeypatch.setattr(CPU, "send", send)
    packed = Buffers({"x": (torch.float32, (3,))}, HERE)
    for number in (1.0, 2.0, 3.0):
        packed.open()["x"][:] = number
        assert packed["x"].tolist() == [number - 1.0] * 3
        packed.send()
