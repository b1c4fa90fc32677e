"""`dovetail pull`: downloads a model from the Hugging Face hub into its cache."""

import shutil

import click

from dovetail.launch.console.help import HelpCommand
from dovetail.launch.console.terminal import note
from dovetail.launch.extras import extra, installed
from dovetail.protocol.errors import UserError

TABLE = "launch.planning.downloads"
MOST_NAMED = 3


@click.command(cls=HelpCommand)
@click.argument("model", metavar="ID")
def command(model: str) -> None:
    """Download a model into the cache of the Hugging Face hub; an interrupted download continues.

    ID is owner/name, with @REVISION if not the latest. Of a repository of GGUF files one is
    downloaded: name it as owner/name/FILE.gguf, or owner/name:Q4_K_M. HF_TOKEN, HF_ENDPOINT and
    HF_HUB_CACHE are respected.
    """
    from dovetail.workers.models.checkpoints.hub import download, find_offer

    offer = find_offer(model)
    note(
        f"{offer.name}: {offer.size / 1e9:.3g} GB, {offer.missing / 1e9:.3g} GB to download; "
        f"license: {offer.license or 'none is stated'}"
    )
    place = next(path for path in (offer.cache, *offer.cache.parents) if path.is_dir())
    if (free := shutil.disk_usage(place).free) < offer.missing:
        raise UserError(
            f"{offer.name} needs {offer.missing / 1e9:.3g} GB in {offer.cache}, and "
            f"{free / 1e9:.3g} GB are free: make room, or name another folder in HF_HUB_CACHE"
        )
    download(offer)
    click.echo(offer.name)
    note(f"  try it:  dovetail serve {offer.name}")
    if installed(TABLE):
        drafts = [one for one in extra(TABLE).downloads().of(offer.name) if one.id]
        for one in drafts[:MOST_NAMED]:
            size = f", {one.gb:g} GB" if one.gb else ""
            note(f"  a draft for it:  dovetail pull {one.id}  ({one.kind}{size})")
