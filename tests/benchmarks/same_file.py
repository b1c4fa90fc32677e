"""The command `gguf-pair`: the embedded pair in GGUF files, the target at the size of a larger one,
for both engines of `dovetail bench TARGET.gguf --llama-server PATH`."""

import subprocess
import tempfile
from pathlib import Path

import click
from gguf import GGMLQuantizationType as Type

from benchmarks.options import Command
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from support.gguf_files import tokens_of, write_gguf
from support.inflated import kept_pair

OWN = ("F16", "Q8_0", "Q4_0")
"""Types that are written here; others are llama-quantize's."""


@click.command(cls=Command)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A folder for them.")
@click.option("--inflate", default="512MiB", show_default=True, help="fp32 size of the target.")
@click.option("--kind", default="Q4_0", show_default=True, help="Such as Q8_0 or Q4_K_M.")
@click.option("--quantize", type=click.Path(exists=True), help="llama-quantize, for other types.")
def gguf_pair(out: Path, inflate: str, kind: str, quantize: str | None) -> None:
    """Write `target-KIND.gguf`, inflated, and `draft-KIND.gguf`, and print where they are.

    The target is the embedded one with layers and units that add nothing to its sums, the draft is
    as it is.
    """
    for file in write_pair(out, inflate, kind, quantize):
        click.echo(file)


def write_pair(out: Path, inflate: str, kind: str, quantize: str | None = None) -> list[Path]:
    """Write both files into a folder and return where they are, the target's first. `UserError` for
    a kind that is llama-quantize's without its path."""
    if kind not in OWN and not quantize:
        raise UserError(f"--kind {kind} is written by llama.cpp: give --quantize PATH as well")
    out = out.expanduser().resolve()
    out.mkdir(parents=True, exist_ok=True)
    files = []
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        for role in ("target", "draft"):
            folder = kept_pair(inflate) / role
            written = _write(folder, Path(scratch) / f"{role}.gguf", kind if kind in OWN else "F16")
            file = out / f"{role}-{kind}.gguf"
            if kind in OWN:
                written.replace(file)
            else:
                _run([str(quantize), str(written), str(file), kind])
            files.append(file)
    return files


def _write(folder: Path, file: Path, kind: str) -> Path:
    template = (DEMO_FOLDER / "target" / "chat_template.jinja").read_text(encoding="utf-8")
    facts = {**tokens_of(folder), "tokenizer.chat_template": template}
    write_gguf(folder, file, lambda *_: Type[kind], **facts)
    return file


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            f"{command[0]} ended with exit code {done.returncode}: {done.stderr[-300:]}"
        )
