"""Our attention for a GPU, computed by the CPU statement by statement, and compiled for every GPU
that it is for."""

import pytest
import torch
from torch import Tensor

from dovetail.workers.models.attention import by_torch
from dovetail.workers.models.backends.device import attention
from dovetail.workers.models.backends.device.attention import CONTEST, SOURCE, own_attention
from dovetail.workers.models.backends.device.choice import Products
from pretended import device as pretended
from support.cases import everyday
from support.cuda_compilers import ARCHITECTURES, NVRTC, needs_a_compiler, needs_nvrtc
from support.emulated import Emulated, emulated

CPU = torch.device("cpu")


GROUPS = 2  # query heads of a key head


def given(heads: int, rows: int, slots: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and keys and values of 16 bits as a view of a larger cache."""
    generator = torch.Generator().manual_seed(slots)
    query = torch.randn(heads * GROUPS, rows, width, generator=generator)
    cache = torch.randn(2, heads, slots + 40, width, generator=generator).half()
    return query, cache[0, :, 8 : slots + 8], cache[1, :, 8 : slots + 8]


@needs_a_compiler
@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_rows_see_what_their_masks_say_and_nothing_else_changes_them(
    monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    if order == "backwards":
        monkeypatch.setenv("DT_BACKWARDS", "1")
    assert CONTEST.against(emulated(SOURCE), CPU) == ""


@needs_a_compiler
@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (3, 9, 65, 24), (2, 17, 200, 136)])
def test_it_is_torchs_attention_up_to_rounding(shape: tuple[int, int, int, int]) -> None:
    query, keys, values = given(*shape)
    found = own_attention(emulated(SOURCE), query, keys, values, None, 0.2, None)
    expected = by_torch(query, keys, values, None, 0.2, None, None)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@needs_a_compiler
def test_the_heads_of_many_scores_are_computed_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, keys, values = given(3, 10, 70, 64)
    parts = (query, keys, values, None, 0.2, torch.linspace(-1, 1, 6))
    functions = emulated(SOURCE)
    whole = own_attention(functions, *parts)
    functions.launches.clear()
    monkeypatch.setattr(attention, "MOST_SCORES", GROUPS * 1500)
    assert torch.equal(own_attention(functions, *parts), whole)
    assert functions.launches == ["scores_128", "values_of"] * 2


class Wrong(Emulated):
    """Functions that see one slot less."""

    def launch(self, name: str, grid: tuple[int, int], threads: int, arguments: object) -> None:
        changed = list(arguments)  # type: ignore[call-overload]
        if name == "values_of":
            changed[6] -= 1
        super().launch(name, grid, threads, changed)


@needs_a_compiler
def test_ours_is_not_used_where_it_is_wrong_or_cannot_be() -> None:
    query, keys, values = given(2, 4, 70, 64)
    functions = emulated(SOURCE)
    own = attention.attending(Products(CPU, lambda _: functions))
    wrong = Products(CPU, lambda source: Wrong(emulated(source)._library))
    functions.launches.clear()

    def asked(keys: Tensor, values: Tensor, cap: float | None = None) -> int:
        """Return how many of our functions are run; the result has to be torch's."""
        before = len(functions.launches)
        found = own(query, keys, values, None, 0.1, cap, None)
        expected = by_torch(query, keys, values, None, 0.1, cap, None)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        return len(functions.launches) - before

    assert asked(keys.float(), values.float()) == 0
    assert asked(keys, values, cap=5.0) == 0
    assert asked(keys, values[..., :32]) == 0
    assert asked(keys, values) >= 2
    assert wrong.owner(CONTEST) is None
    assert wrong.said[CONTEST.kind].startswith(
        "cpu: torch's attention reads keys and values of 16 bits: dovetail's own is not proved "
        "here: keys of 64 numbers: differs from the exact result by"
    )


@needs_a_compiler
def test_it_is_captured_in_a_graph_as_a_gpu_captures_it() -> None:
    place = pretended.device()
    query, keys, values = given(2, 4, 70, 64)
    mask = torch.zeros(GROUPS * 4, 70)
    there = [part.to(place) for part in (query, keys, values, mask)]
    functions = emulated(SOURCE)
    replay = pretended.capture(lambda: own_attention(functions, *there, 0.2, None))
    there[0].mul_(2.0)
    there[3][:, 20:] = float("-inf")
    expected = by_torch(2.0 * query, keys[:, :20], values[:, :20], None, 0.2, None, None)
    torch.testing.assert_close(replay().cpu(), expected, rtol=1e-5, atol=1e-5)


@needs_nvrtc
@pytest.mark.parametrize("architecture", everyday(ARCHITECTURES, 75))
def test_the_functions_compile_for_every_gpu(architecture: int) -> None:
    assert not isinstance(NVRTC, str)
    code = NVRTC.compile(SOURCE, architecture)
    assert isinstance(code, bytes), code
    for name in ("scores_128", "scores_256", "values_of"):
        assert name.encode() in code
