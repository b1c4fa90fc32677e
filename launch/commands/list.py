"""`dovetail list`: the models on this machine."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from dovetail.launch.console.help import HelpCommand, json_option
from dovetail.launch.console.terminal import print_table, spinner
from dovetail.launch.extras import extra
from dovetail.launch.settings.configure import configure
from dovetail.launch.settings.several import models_inside
from dovetail.protocol.errors import UserError
from dovetail.workers.models.checkpoints.gguf.names import is_gguf, parts_of


@dataclass
class Found:
    """A model on this machine."""

    model: str  # as other commands name it
    size: int
    complete: bool = True  # False if its download was interrupted
    drafts: list[str] | None = None  # those on this machine that fit; None: not looked for
    why: str = ""  # why it cannot be a target


@click.command("list", cls=HelpCommand)
@click.argument("folders", nargs=-1, metavar="[FOLDER]...", type=click.Path(path_type=Path))
@click.option("--drafts", is_flag=True, help="Look for the drafts on this machine that fit each.")
@json_option()
def command(folders: tuple[Path, ...], drafts: bool, as_json: bool) -> None:
    """List the models in the cache of the Hugging Face hub, and in FOLDERs of models, with their
    sizes in files."""
    found = [*_in_folders(folders), *_in_cache()]
    if drafts:
        with spinner() as say:
            for one in found:
                say(f"reading {one.model}")
                _find_drafts(one)
    if as_json:
        click.echo(json.dumps({"models": [asdict(one) for one in found]}))
    elif found:
        rows = [[one.model, _amount(one), _drafts(one)] for one in found]
        columns = ["model", "size", *(["drafts that fit"] if drafts else [])]
        print_table(columns, [row[: len(columns)] for row in rows])
    else:
        click.echo("no models: `dovetail pull owner/name` downloads one")


def _in_cache() -> Iterator[Found]:
    from dovetail.workers.models.checkpoints.hub import cached_models, is_complete

    for one in cached_models():
        if not one.files:
            yield Found(one.name, one.size, is_complete(one.folder))
        for file in one.files:
            parts = parts_of(one.folder / file)
            complete = all(part.is_file() for part in parts)
            yield Found(f"{one.name}/{file}", sum(map(_size, parts)), complete)


def _in_folders(folders: tuple[Path, ...]) -> Iterator[Found]:
    for folder in folders:
        if not folder.exists():
            raise UserError(f"{folder} does not exist")
        for path in models_inside(folder) or [folder]:
            files = parts_of(path) if is_gguf(path) else [*path.rglob("*")]
            yield Found(str(path), sum(map(_size, files)))


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _amount(one: Found) -> str:
    return f"{one.size / 1e9:.3g} GB{'' if one.complete else ', incomplete'}"


def _find_drafts(one: Found) -> None:
    from dovetail.workers.models.checkpoints.hub import local_folder

    choice = extra("launch.planning.choice")
    try:
        configuration = configure(model=one.model)
        folder = local_folder(configuration.settings.target.model)
        if folder is None:
            raise UserError("it is not complete")
        nearby = extra("launch.planning.nearby")
        one.drafts = [
            nearby.named(draft) for draft in choice.find_drafts(configuration, folder).fitting
        ]
    except UserError as error:
        one.why = str(error)


def _drafts(one: Found) -> str:
    return one.why or ", ".join(one.drafts or []) or "none"
