"""`dovetail cache`: shows and deletes the prompts that workers have cached on disk (cache.disk)."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import click

from dovetail.launch.console.help import HelpCommand, json_option
from dovetail.launch.console.terminal import note, print_table
from dovetail.protocol.files import ABOUT_PROMPTS, prompts_folder, writing
from dovetail.protocol.prefixes import BLOCK_TOKENS
from dovetail.workers.models.checkpoints.gguf.view import spelled


@click.command(cls=HelpCommand)
@click.argument("action", type=click.Choice(("show", "clear")), default="show")
@json_option()
def command(action: str, as_json: bool) -> None:
    """Show or clear the prompts cached on disk (cache.disk). A running worker misses a deleted
    block when it needs it, and reads the prompt instead.
    """
    folder = prompts_folder()
    found = [_described(one) for one in sorted(folder.glob("*/")) if one.is_dir()]
    if action == "clear":
        with writing(folder, "cached prompts"):
            if folder.exists():
                shutil.rmtree(folder)
    if as_json:
        click.echo(json.dumps(found))
        return
    size = sum(one["bytes"] for one in found) / 1e6
    if action == "clear":
        note(f"deleted {size:.1f} MB of cached prompts in {folder}")
    elif not found:
        note(f"no prompts are cached in {folder}: start a service with --cache.disk 20GB")
    else:
        rows = [
            (one["model"], one["tokens"], f"{one['bytes'] / 1e6:.1f}", one["used"]) for one in found
        ]
        print_table(("model", "tokens", "MB", "last used"), rows)
        note(f"{size:.1f} MB in {folder}")


def _described(folder: Path) -> dict[str, Any]:
    """Return the figures of the prompts of one model."""
    files = [path.stat() for path in folder.glob("*.safetensors") if path.is_file()]
    about = folder / ABOUT_PROMPTS
    used = max((one.st_mtime for one in files), default=0.0)
    return {
        "folder": folder.name,
        "model": spelled(about.read_text("utf-8", "replace")) if about.is_file() else folder.name,
        "tokens": BLOCK_TOKENS * len(files),
        "bytes": sum(one.st_size for one in files),
        "used": time.strftime("%Y-%m-%d %H:%M", time.localtime(used)) if files else "",
    }
