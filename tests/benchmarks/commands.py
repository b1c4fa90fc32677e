"""The command line: one command a figure, a table for people or an object for programs.

Every command takes the cores that it may use (taskset counts), pins itself and its children to the
first of them, one a thread, and says what it measured. A command's module is imported when the
command is chosen, since all of them together take many seconds.
"""

import importlib
from collections.abc import Mapping

import click

from benchmarks import NEEDED

COMMANDS: Mapping[str, tuple[str, str]] = {
    "beginnings": (
        "beginnings.beginnings",
        "Time to first token of requests at once that begin alike.",
    ),
    "build-llama": (
        "building.build_llama",
        "Build llama-server, llama-bench and llama-quantize with kernels for every CPU.",
    ),
    "context": (
        "context.context",
        "T_V(M) behind so many cached tokens, against llama.cpp's attention.",
    ),
    "coupling": (
        "coupling.coupling",
        "Acceptance with the noise that draft and target share, against others.",
    ),
    "expert-trees": (
        "expert_trees.expert_trees",
        "Trees that are chosen by the experts of their nodes, over goodput at the same prices.",
    ),
    "experts": (
        "experts.experts",
        "A decoder layer with experts against the bandwidth of the weights that it reads.",
    ),
    "fleet": (
        "fleet.fleet",
        "Throughput and latencies of real replicas beside those that are simulated.",
    ),
    "gains": (
        "gains.gains",
        "What `dovetail profile` predicts of its advice beside what the advice brings.",
    ),
    "gaps": ("gaps.gaps", "Pauses of a stream while prompts are prefilled, over those without."),
    "gguf-pair": (
        "same_file.gguf_pair",
        "Write the GGUF files of a target and a draft, and print where they are.",
    ),
    "inflate": (
        "inflated.inflate",
        "Write the embedded pair as folders, the target at the cost of a larger model.",
    ),
    "journal": (
        "journal.journal",
        "Tokens/s with a journal over those without, and microseconds of a write.",
    ),
    "legacy": (
        "legacy.legacy",
        "What `dovetail plan --machine` predicted of legacy.toml over what was measured.",
    ),
    "links": ("links.links", "Tokens/s over slow and distant lines, over those of one machine."),
    "loading": (
        "loading.loading",
        "The first start of a model, which checks and proves it, and the next one.",
    ),
    "loads": (
        "loads.loads",
        "Tokens a second of 1, 2, 4, 8 streams over plain decoding of the same.",
    ),
    "logits": (
        "logits.logits",
        "Our logits beside llama.cpp's on the same GGUF files of the embedded target.",
    ),
    "passes": (
        "passes.passes",
        "Our passes over M rows of a tree, and over prompts, beside llama-bench's.",
    ),
    "pictures": ("pictures.pictures", "Make pictures of speed-ups and sweeps."),
    "ray": (
        "replicas.ray",
        "A service that Ray has placed on this machine beside one that `serve` starts.",
    ),
    "recurrence": (
        "recurrence.recurrence",
        "A layer with a state against one without, and its trees against chains.",
    ),
    "replicas": (
        "replicas.replicas",
        "Two replicas on separate cores behind the router over one of them.",
    ),
    "router": (
        "router.router",
        "Decisions, requests and chunks of the router a second on one core.",
    ),
    "routing": (
        "routing.routing",
        "Predicted passes of a mixture of experts over trees beside measured ones.",
    ),
    "shards": (
        "shards.shards",
        "Passes of a target that is spread over shards, which stand for memory nodes.",
    ),
    "targets": (
        "targets.targets",
        "Tokens a second of streams on two targets behind one draft, over one target.",
    ),
    "users": ("users.users", "Many users with a few keys: waits, failures and memory."),
}
"""Name -> the module in this folder and what the command is called there; what help says of it."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used; its help comes from the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, own_name = COMMANDS[cmd_name][0].partition(".")
        try:
            command: click.Command = getattr(
                importlib.import_module(f"benchmarks.{module}"), own_name
            )
        except ModuleNotFoundError as error:
            raise click.ClickException(f"{error.name} {NEEDED}") from None
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup)
def main() -> None:
    """Figures of speed, bytes and accuracy on this machine, each printed by one command.

    Two engines that are compared take turns, pass by pass, in processes of their own on the same
    cores. A ratio is the median over the pairs with the 95 % interval of a bootstrap; a bound holds
    when the interval reaches it and the median misses it by at most 0.02.
    """
