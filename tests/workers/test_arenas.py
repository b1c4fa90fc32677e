"""The memory of caches on a device, which goes from one to the next."""

import torch

from dovetail.workers.models.backends.device.fixed import ArenaCache, Arenas

CPU = torch.device("cpu")


def opened(arenas: Arenas, capacity: int) -> ArenaCache:
    return ArenaCache(
        arenas, layers=2, kv_heads=1, head_dim=4, capacity=capacity, dtype=torch.half, device=CPU
    )


def test_memory_that_was_taken_in_inference_mode_can_be_written_outside() -> None:
    arenas = Arenas()
    with torch.inference_mode():
        cache = opened(arenas, 8)
        cache.rows[:] = 1
        cache.length = 3
        cache.resize(4)
        shrunk = cache.rows
        cache.resize(40)
        address = cache.rows.data_ptr()
    shrunk.zero_()
    del cache
    other = opened(arenas, 40)
    assert other.rows.data_ptr() == address
    assert not other.rows.any()
    other.rows[0] = 2
