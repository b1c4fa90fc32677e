"""Code that relies on more than events gets wrong numbers on a pretended GPU, or an error: each of
these bugs is planted here."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dovetail.workers.models.backends.device.fixed import Buffers
from dovetail.workers.models.backends.stages.stage import Ring
from pretended.device import POSSIBLE, PRETENDED, PretendedTransfer, capture, device

pytestmark = pytest.mark.skipif(
    not POSSIBLE, reason="this version of torch cannot be told of a device from Python"
)
BLOBS = [torch.arange(8, dtype=torch.uint8) + 10 * number for number in range(3)]


@pytest.fixture
def there() -> torch.device:
    return device()


class Careless(PretendedTransfer):
    """Waits for no copy."""

    def wait(self, mark: object) -> None:
        """Do nothing."""


class Hasty(PretendedTransfer):
    """Lets copies begin before what is computed is done."""

    def computed(self) -> int:
        return 0


def passed_through(transfer: PretendedTransfer) -> Sequence[Tensor]:
    """Return what is computed from blobs that stream twice through two buffers."""
    ring, found = Ring(transfer, BLOBS, 2), []
    for number in [0, 1, 2] * 2:
        with ring.next(number) as (_, blob):
            found.append((blob + 1).cpu())
    return found


def test_a_copy_that_is_not_waited_for_has_not_been_made(there: torch.device) -> None:
    expected = [blob + 1 for blob in BLOBS * 2]
    assert all(map(torch.equal, passed_through(PretendedTransfer()), expected))
    assert not any(map(torch.equal, passed_through(Careless()), expected))


def test_a_copy_does_not_begin_before_its_target_is_free(there: torch.device) -> None:
    with pytest.raises(RuntimeError, match="would overwrite what is computed with"):
        passed_through(Hasty())


def test_pinned_memory_is_not_written_before_it_has_been_copied(there: torch.device) -> None:
    packed = Buffers({"x": (torch.float32, (3,))}, there)
    for number in range(2):
        packed.open()["x"][:] = number
        packed.send()
    assert packed["x"].tolist() == [1.0] * 3
    with pytest.raises(RuntimeError, match="nobody has waited for the copy before"):
        packed.send()
    source, target = PRETENDED.pinned(4), torch.zeros(4, dtype=torch.uint8, device=there)
    wait = PRETENDED.send(source, target)
    source += 1
    with pytest.raises(RuntimeError, match="was written before its copy"):
        wait()


def test_what_is_copied_back_is_there_once_it_has_been_waited_for(there: torch.device) -> None:
    source, target = torch.full((4,), 7, dtype=torch.uint8, device=there), PRETENDED.pinned(4)
    wait = PRETENDED.fetch(source, target)
    source.zero_()
    assert target.tolist() == [255] * 4
    wait()
    assert target.tolist() == [7] * 4


def test_what_a_graph_returned_is_gone_when_another_is_replayed(there: torch.device) -> None:
    x, kept = torch.ones(3, device=there), torch.zeros(3, device=there)
    one, other = capture(lambda: (x + 1, kept.copy_(x))), capture(lambda: (x + 2).long())
    found, still = one()
    assert found.tolist() == [2.0] * 3
    whole = other()
    assert found.isnan().all()
    assert still.tolist() == [1.0] * 3
    assert whole.tolist() == [3] * 3
    assert one()[0].tolist() == [2.0] * 3
    assert whole.tolist() == [-1] * 3
