"""`dovetail rm`: removes a downloaded model."""

import click

from dovetail.launch.console.help import HelpCommand


@click.command(cls=HelpCommand)
@click.argument("model", metavar="ID")
def command(model: str) -> None:
    """Remove a model from the cache of the Hugging Face hub: all of owner/name, one @REVISION, or
    one GGUF file (owner/name/FILE.gguf). Processes that have it open keep it until they end."""
    from dovetail.workers.models.checkpoints.hub import remove

    click.echo(f"{model} is removed; {remove(model) / 1e9:.3g} GB are free again")
