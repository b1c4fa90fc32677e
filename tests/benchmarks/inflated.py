"""The command `inflate`: the embedded pair as ordinary folders, the target at the cost of a larger
model, for any command that takes a model."""

from pathlib import Path

import click

from benchmarks.options import Command
from dovetail.protocol.errors import UserError
from support.inflated import write_pair


@click.command(cls=Command)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A new folder.")
@click.option("--size", default="512MiB", show_default=True, help="Target's linears in fp32.")
def inflate(out: Path, size: str) -> None:
    """Write OUT/target, inflated, OUT/draft, the heads OUT/heads/KIND, and OUT/settings.toml, which
    names target and draft: `dovetail bench --config OUT/settings.toml`.

    The target is the embedded one with layers and units that add nothing to its sums, so that its
    tokens are the same.
    """
    out = out.expanduser().resolve()
    if out.exists():
        raise UserError(f"{out} already exists: name a new folder with --out")
    write_pair(out, size)
    click.echo(out / "settings.toml")
