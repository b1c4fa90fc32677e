"""The parts that the commands share: options, cores, the model that is measured, and the report of
a result."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from benchmarks.child import SideError
from benchmarks.measure import Estimate, estimate
from benchmarks.models import SHAPES, model_folder
from dovetail.launch.settings.configure import Configuration, configure
from dovetail.protocol.errors import UserError
from dovetail.workers.kernels import Isa
from peers.llama.kinds import LLAMA_TYPES
from peers.llama.start import INSTALL, has_llama

BEHIND = 512
"""Cached tokens behind which a verification is measured."""
ISAS = tuple(isa.name for isa in Isa)


class Numbers(click.ParamType):
    """1,2,16: positive integers; none of them is a list too."""

    name = "N,N,..."

    def __init__(self, count: int | None = None) -> None:
        """`count`: how many there have to be."""
        self._count = count

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part for part in value.split(",") if part]
        if not all(part.isdigit() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is no list of positive integers such as 1,4,16", param, ctx)
        if self._count not in (None, len(parts)):
            self.fail(
                f"{value!r} has {len(parts)} numbers, and {self._count} are needed", param, ctx
            )
        return tuple(int(part) for part in parts)


class Command(click.Command):
    """A command whose mistakes of the user end in one line."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (SideError, UserError) as error:
            raise click.ClickException(str(error)) from None


def option(*names: str, **options: Any) -> Callable[[Any], Any]:
    """An option that shows its default."""
    return click.option(
        *names,
        show_default=options.get("default") is not None and not options.get("is_flag"),
        **options,
    )


OPTIONS = {
    "weights": option(
        "--weights",
        type=click.Choice([kind for kind in LLAMA_TYPES if kind != "int8-per-tensor"]),
        default="fp32",
    ),
    "backend": option(
        "--backend", type=click.Choice(("auto", "kernels", "library")), default="auto"
    ),
    "checkpoint": option(
        "--checkpoint",
        type=click.Choice(("fp16", "bf16")),
        help="Type of the random checkpoint.  [default: bf16 for bf16 weights, else fp16]",
    ),
    "shape": option(
        "--shape",
        type=click.Choice(("7b", "1b", "small")),
        default="7b",
        help="Sizes of a layer; small takes seconds.",
    ),
    "layers": option(
        "--layers", type=click.IntRange(min=1), help="Decoder layers.  [default: 3 of 7b, else 4]"
    ),
    "pairs": option(
        "--pairs",
        type=click.IntRange(min=2),
        default=21,
        help="Times that both sides take their turns.",
    ),
    "threads": option(
        "--threads", type=click.IntRange(min=1), default=1, help="Cores, and threads of each side."
    ),
    "clock": option(
        "--clock",
        type=click.Choice(("wall", "processor")),
        default="wall",
        help="processor: on a busy machine, with one thread.",
    ),
    "models": option(
        "--models",
        type=click.Path(file_okay=False, path_type=Path),
        help="Keep the random models there for the next run.",
    ),
    "isa": option(
        "--isa",
        type=click.Choice(ISAS),
        help="Instruction set, of kernels and limit.  [default: the best here]",
    ),
    "llama_python": option(
        "--llama-python",
        type=click.Path(path_type=Path),
        help="The python of an environment with llama-cpp-python and gguf.",
    ),
    "json": option(
        "--json", "as_json", is_flag=True, help="One JSON object on stdout instead of a table."
    ),
}


def options(*names: str) -> Callable[[Any], Any]:
    """The options that several commands share."""

    def decorate(command: Any) -> Any:
        for name in reversed(names):
            command = OPTIONS[name](command)
        return command

    return decorate


def verdict(found: Estimate, most: float | None) -> tuple[str, str]:
    """The cells that tell a figure and whether it holds."""
    return ("-", "-") if most is None else (f"<= {most:g}", "yes" if found.holds(most) else "NO")


def compared(
    name: object,
    ours: Sequence[float],
    theirs: Sequence[float],
    found: Estimate,
    most: float | None,
) -> tuple[object, ...]:
    """Return the cells of a comparison: its name, the medians of both sides in ms, given in
    seconds, their ratio, and whether that holds."""
    medians = (1e3 * estimate(side).median for side in (ours, theirs))
    return (name, *medians, str(found), *verdict(found, most))


def holds(found: Estimate, most: float | None) -> bool | None:
    """Return whether a figure holds; None if there is none."""
    return None if most is None else found.holds(most)


def report(result: Mapping[str, Any], as_json: bool, show: Callable[[], None]) -> None:
    """One object, or what `show` prints."""
    click.echo(json.dumps(result)) if as_json else show()


def pin(threads: int) -> list[int]:
    """Confine this process and its children to as many of the cores that it may use; `UserError` if
    they are fewer."""
    allowed = sorted(os.sched_getaffinity(0))
    if threads > len(allowed):
        raise UserError(
            f"--threads {threads}: this process may use {len(allowed)} cores; ask for no more"
        )
    os.sched_setaffinity(0, allowed[:threads])
    return allowed[:threads]


def find_llama(python: Path | None) -> Path:
    """The interpreter that has the peer's engine; `UserError` says how to get one."""
    if python is None:
        raise UserError(
            "--llama-python is missing: the python of an environment with llama.cpp. To get "
            f"one: {INSTALL}"
        )
    if not has_llama(python):
        raise UserError(
            f"--llama-python {python} cannot import llama_cpp and gguf. To get one that can: "
            f"{INSTALL}"
        )
    return python


def settings_of(values: Mapping[str, Any]) -> Configuration:
    """The settings of a pair: one core for the target, one for the draft."""
    return configure(environment={}).over(
        "benchmark", {"target.threads": 1, "draft.device": "cpu", **values}
    )


def checkpoint_type(*, weights: str, checkpoint: str | None, **_: Any) -> str:
    """The type of the random checkpoint: 16 bits, since `half` is what a checkpoint has."""
    return checkpoint or ("bf16" if weights == "bf16" else "fp16")


@contextmanager
def written_model(
    *, weights: str, checkpoint: str | None, shape: str, layers: int | None, models: Path | None
) -> Iterator[Path]:
    """The folder of a random checkpoint of that shape."""
    from benchmarks.checkpoints import TYPES, write_model  # torch, for seconds

    sizes = SHAPES[shape] if layers is None else dataclasses.replace(SHAPES[shape], layers=layers)
    kind = checkpoint_type(weights=weights, checkpoint=checkpoint)
    with model_folder(models) as folder:
        yield write_model(folder / f"{shape}-{sizes.layers}-layers-{kind}", sizes, TYPES[kind])
