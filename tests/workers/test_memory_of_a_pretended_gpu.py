"""The memory of a pretended GPU ends where a test says, and what does not fit is answered."""

from weakref import WeakValueDictionary

import pytest
import torch

from pretended import graphs
from pretended.device import MEMORY, POSSIBLE, PRETENDED, capped, capture, device

pytestmark = pytest.mark.skipif(
    not POSSIBLE, reason="this version of torch cannot be told of a device from Python"
)
MIB = 1 << 20


@pytest.fixture
def there() -> torch.device:
    return device()


def test_memory_is_taken_by_what_lives_and_ends_at_the_cap(there: torch.device) -> None:
    with capped(MEMORY.used + 10 * MIB):
        first = torch.zeros(6 * MIB, dtype=torch.uint8, device=there)
        view = first[: 3 * MIB].view(3, MIB)
        assert PRETENDED.free_bytes(there) == 4 * MIB
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 6\.00 MiB"):
            first + 1
        del first
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(6 * MIB, dtype=torch.uint8).to(there)
        del view
        assert PRETENDED.free_bytes(there) == 4 * MIB
        torch.get_device_module(there).empty_cache()
        assert torch.get_device_module(there).mem_get_info()[0] == 10 * MIB
        torch.zeros(10 * MIB, dtype=torch.uint8).to(there)


def test_graphs_hold_what_one_of_them_needs_at_once(
    there: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_pools", WeakValueDictionary())  # those of other tests may live
    with capped(MEMORY.used + 14 * MIB):
        x = torch.zeros(2 * MIB, dtype=torch.uint8, device=there)
        before = MEMORY.used
        replay = capture(lambda: (x + 1) * 2 + 3)  # never more than two of its results at a time
        assert MEMORY.used == before + 4 * MIB
        replay()[:5].view(5, 1)
        assert MEMORY.used == before + 4 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            capture(lambda: (x + 1, x + 2, x + 3, x + 4, x + 5))
        other = capture(lambda: (x + 1, x + 2, x + 3))
        assert MEMORY.used == before + 6 * MIB
        del replay
        assert MEMORY.used == before + 6 * MIB
        del other
        assert MEMORY.used == before
