"""`python -m peers.llama.prepare`: find the target's folder, inflate it if asked
to, and say on stdout where it lies and what its vocabulary is.

A process of its own, since reading checkpoints takes torch.
"""

import json
import sys
from pathlib import Path

import click

from dovetail.launch.cli import run
from dovetail.launch.console.help import HelpCommand
from dovetail.launch.processes.child import claim_stdout, end_when_told, end_with
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.embedded import with_target
from dovetail.launch.settings.flags import settings_flags
from dovetail.protocol.settings import byte_count


@click.command(cls=HelpCommand)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--parent", type=int, required=True)
@settings_flags("target")
def process(configuration: Configuration, out: Path, parent: int) -> None:
    """Write the inflated target to `out`, if it is one."""
    end_with(parent)
    end_when_told()
    said = claim_stdout()
    from dovetail.workers.models.checkpoints.hub import find_folder
    from dovetail.workers.models.checkpoints.inflate import write_inflated
    from dovetail.workers.models.checkpoints.tokenizer import read_tokenizer  # torch comes in here

    target = with_target(configuration.settings.target)
    folder = find_folder(target.model)
    _, facts = read_tokenizer(folder)
    if target.inflate:
        write_inflated(target.model, byte_count(target.inflate), out)
    told = {
        "source": str(folder),
        "folder": str(out if target.inflate else folder),
        "facts": facts.model_dump(mode="json"),
    }
    print(json.dumps(told), file=said, flush=True)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], process))
