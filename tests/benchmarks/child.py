"""Both ends of the pipe to a side of a comparison: a process of its own that does what a line of
JSON asks and answers with one.

Only one side works at a time, on the same cores as every other; the rest sleep in `read`. Needs
nothing but the standard library, here and in what it imports, because a side may run under another
Python.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from peers.llama.start import command_of

PATIENCE_S = 10
"""Seconds in which a side ends by itself once nothing more is asked of it."""
TESTS = Path(__file__).resolve().parent.parent


class SideError(Exception):
    """A side could not do what it was asked; the text is one line."""


class Side:
    """A child process, started with `python -m benchmarks.MODULE ARGUMENTS` and ended with the
    block."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        python: str = sys.executable,
        threads: int = 1,
    ) -> None:
        ours = python == sys.executable
        paths = (
            [str(TESTS), *filter(None, (os.environ.get("PYTHONPATH"),))] if ours else [str(TESTS)]
        )
        run = (
            [python, "-P", "-m", f"benchmarks.{module}", *arguments]
            if ours
            else command_of(python, f"benchmarks.{module}", arguments)
        )
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
        }
        self.name = module
        self._process = subprocess.Popen(
            run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        try:
            self.hello = self._read()
        except SideError:
            self.close()
            raise

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one request."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SideError(f"the side {self.name} has ended; its last words are above") from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideError(
                f"the side {self.name} has ended (exit code {self._process.wait()}); its last "
                "words are above"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SideError(f"{self.name}: {answer['error']}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def obey(
    prepare: Callable[[], tuple[Mapping[str, Any], Mapping[str, Callable[..., Mapping[str, Any]]]]],
) -> None:
    """The child's end: prepare (a greeting, and what can be asked for), then answer until the pipe
    closes. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        hello, can = prepare()
        _say(answers, hello)
        for line in sys.stdin:
            request = json.loads(line)
            _say(answers, can[request.pop("do")](**request))
    except Exception as error:  # told to the parent, who shows it
        _say(answers, {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"})
        raise


def _say(answers: Any, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def timed(work: Callable[[], object]) -> dict[str, float]:
    """The seconds that `work` takes: on the wall, and of this process's processors."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return {"wall_s": time.perf_counter() - wall, "processor_s": time.process_time() - processor}
