"""The sources of our functions for a GPU, compiled by the C++ compiler of this machine over
`cuda/cpu.h`, where the threads of a block are fibers: the same arithmetic, statement by statement,
with no GPU. It is slow, and knows nothing of what a GPU does at the same time."""

import fcntl
import os
import subprocess
from collections.abc import Iterator, Sequence
from ctypes import CDLL, c_int64, c_void_p, cast
from enum import IntEnum
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dovetail.workers.kernels.build import compiler
from dovetail.workers.models.backends.device.choice import Contest, Products, products_on
from pretended import device as pretended

if TYPE_CHECKING:
    import pytest

FOLDER = Path(__file__).parent / "cuda"
FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas")
KEPT = Path(os.environ["XDG_CACHE_HOME"]) / "functions"
"""Folder of the compiled functions, which all processes of a test run share; `conftest.py` makes
the folder above it and removes that with the run."""
MOST_ARGUMENTS = 18
UNITS = {"vectors": "", "matrices": "#define DT_MATRIX_UNITS\n"}
"""Name of a path of the functions -> the text that selects it in front of a source: for cards
without units for matrix products, and for cards with them."""

PROVED: dict[IntEnum, tuple[bool, str]] = {}
"""Contest -> whether our functions are right where the CPU computes them, and why."""


class Emulated:
    """Functions of ours that the CPU computes. A `Program`."""

    about, key, timed, units = "the CPU in place of a GPU", "emulated", False, 16

    def __init__(self, library: CDLL) -> None:
        self._library = library
        self.launches: list[str] = []
        """The names of the functions that have been asked for."""

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[Tensor | int | None],
    ) -> None:
        """Run a function; on the pretended device it becomes a part of the graph that is being
        captured."""
        self.launches.append(name)
        pretended.CLOCK.read(sum(one.nbytes for one in arguments if isinstance(one, Tensor)))
        held = [one.held if isinstance(one, pretended.Elsewhere) else one for one in arguments]
        run = partial(self._run, name, grid, threads, held)
        run()
        tensors = [one for one in held if isinstance(one, Tensor)]
        pretended.USES.note(tensors)
        moved = pretended.bytes_of(tensors)
        if (graph := pretended.recording()) is not None:
            graph.append(pretended.Recorded(run, (), {}, (), moved))
        else:
            pretended.counts.add(launches=1, moved=moved)

    def _run(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[Tensor | int | None],
    ) -> None:
        numbers = [one.data_ptr() if isinstance(one, Tensor) else one or 0 for one in arguments]
        function = cast(getattr(self._library, name), c_void_p)
        self._library.launch(function, (c_int64 * MOST_ARGUMENTS)(*numbers), *grid, threads)


def given_to_pretended(monkeypatch: "pytest.MonkeyPatch") -> Iterator[list[str]]:
    """Give the pretended GPU our functions, and yield the list of the names of those that run; for
    a fixture."""
    launches: list[str] = []
    choose = Products._choose

    def choose_once(products: Products, contest: Contest) -> tuple[bool, str]:
        """Prove functions of ours once a process: that takes a second."""
        if not isinstance(products.functions(contest.source), Emulated):
            return choose(products, contest)
        if contest.kind not in PROVED:
            PROVED[contest.kind] = choose(products, contest)
        return PROVED[contest.kind]

    def program(_: torch.device, source: str) -> Emulated:
        found = emulated(source)
        found.launches = launches
        return found

    monkeypatch.setattr(Products, "_choose", choose_once)
    monkeypatch.setattr(pretended.PRETENDED, "program", program)
    products_on.cache_clear()
    yield launches
    products_on.cache_clear()


@cache
def library_file(source: str) -> Path:
    """Return functions of ours as a library of this machine, with what stands for NVIDIA's driver
    (`cuda/driver.cpp`). The first process of a run that needs it compiles it, and others wait."""
    text = f'{source}\n#include "{FOLDER / "driver.cpp"}"\n'
    program, made = compiler(), KEPT / f"{sha256(text.encode()).hexdigest()}.so"
    assert program
    KEPT.mkdir(parents=True, exist_ok=True)
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            part = made.with_suffix(".part")
            command = [*program, *FLAGS, "-include", str(FOLDER / "cpu.h"), "-x", "c++", "-"]
            subprocess.run(
                [*command, "-o", str(part), "-ldl", "-lstdc++"], check=True, input=text, text=True
            )
            part.rename(made)
    return made


@cache
def _library(source: str) -> CDLL:
    library = CDLL(str(library_file(source)))
    library.launch.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_int64)
    library.launch.restype = None
    return library


def emulated(source: str) -> Emulated:
    """Return functions of ours, compiled once a run."""
    return Emulated(_library(source))
