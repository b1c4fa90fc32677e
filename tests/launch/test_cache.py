"""`dovetail cache`: what is cached on disk is shown and deleted."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

from dovetail.workers.sessions.block_files import BlockFiles
from dovetail.workers.sessions.blocks import Block

Run = Callable[..., "CompletedProcess[str]"]


def test_cached_prompts_are_shown_and_cleared(
    tmp_path: Path, environment: dict[str, str], invoke: Run
) -> None:
    call = partial(invoke, env={**environment, "XDG_CACHE_HOME": str(tmp_path)})
    folder = tmp_path / "dovetail" / "prompts"
    assert "no prompts are cached in" in call("cache").stderr
    files = BlockFiles(folder / "seed", 1 << 20, "target", "some/model")
    for number in range(3):
        files.write(bytes([number] * 32), Block(b"p" * 32, b"t" * 256, ()), b"d" * 32)
    (shown,) = json.loads(call("cache", "show", "--json").stdout)
    assert (shown["model"], shown["tokens"]) == ("some/model", 3 * 64)
    assert shown["bytes"] == sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    (folder / "seed" / ("ab" * 32 + ".safetensors")).symlink_to(tmp_path / "missing")
    (folder / "seed" / ("cd" * 32 + ".safetensors")).mkdir()
    assert len(BlockFiles(folder / "seed", 1 << 20, "target").names) == 4
    (folder / "seed" / "model.txt").write_bytes(b"some/model\xff")
    table = call("cache").stdout
    assert "some/model" in table
    assert "192" in table
    assert "deleted" in call("cache", "clear").stderr
    assert not folder.exists()
    assert call("cache", "clear").returncode == 0
