"""`python -m peers.llama.prepare`: print the target's folder and the facts of its vocabulary.

A process of its own, since reading checkpoints takes torch.
"""

import json
import sys

import click

from dovetail.launch.cli import run
from dovetail.launch.console.help import HelpCommand
from dovetail.launch.processes.child import claim_stdout, end_when_told, end_with
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import settings_flags
from dovetail.launch.settings.models import with_target


@click.command(cls=HelpCommand)
@click.option("--parent", type=int, required=True)
@settings_flags("target")
def process(configuration: Configuration, parent: int) -> None:
    """Print one line of JSON."""
    end_with(parent)
    end_when_told()
    said = claim_stdout()
    from dovetail.workers.models.checkpoints.hub import find_folder
    from dovetail.workers.models.checkpoints.tokenizer import read_tokenizer  # torch comes in here

    folder = find_folder(with_target(configuration.settings.target).model)
    _, facts = read_tokenizer(folder)
    told = {"folder": str(folder), "facts": facts.model_dump(mode="json")}
    print(json.dumps(told), file=said, flush=True)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], process))
