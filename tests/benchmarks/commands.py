"""The command line: one command a figure, a table for people or an object for programs.

Every command takes the cores that it may use (taskset counts), pins itself and its children to the
first of them, one a thread, and says what it measured.
"""

import click

from benchmarks.accuracy import accuracy
from benchmarks.ahead import ahead
from benchmarks.beginnings import beginnings
from benchmarks.building import build_llama
from benchmarks.context import context
from benchmarks.coupling import coupling
from benchmarks.engines import llama, transformers
from benchmarks.experts import experts
from benchmarks.fleet import fleet
from benchmarks.gains import gains, picture, utilisation
from benchmarks.gaps import gaps
from benchmarks.goodput import goodput
from benchmarks.heterospec import heterospec
from benchmarks.http import http
from benchmarks.journal import journal
from benchmarks.legacy import legacy
from benchmarks.levels import levels
from benchmarks.limit import limit
from benchmarks.links import links
from benchmarks.loading import loading
from benchmarks.loads import loads
from benchmarks.logits import logits
from benchmarks.losses import losses
from benchmarks.memory import memory
from benchmarks.observed import observed
from benchmarks.papers import papers
from benchmarks.parallel import parallel
from benchmarks.passes import passes
from benchmarks.pictures import pictures
from benchmarks.plan import plan
from benchmarks.recurrence import recurrence
from benchmarks.reliability import reliability
from benchmarks.replicas import ray, replicas
from benchmarks.rest import rest
from benchmarks.rounds import rounds
from benchmarks.router import router
from benchmarks.routing import routing
from benchmarks.same_file import gguf_pair
from benchmarks.sameness import bytes_command
from benchmarks.shards import shards
from benchmarks.substitute import substitute
from benchmarks.targets import targets
from benchmarks.training import training
from benchmarks.transport import transport
from benchmarks.turns import turns
from benchmarks.users import users


@click.group()
def main() -> None:
    """Figures of speed, bytes and accuracy on this machine, each printed by one command.

    Two engines that are compared take turns, pass by pass, in processes of their own on the same
    cores. A ratio is the median over the pairs with the 95 % interval of a bootstrap; a bound holds
    when the interval reaches it and the median misses it by at most 0.02.
    """


for command in (
    transformers,
    llama,
    context,
    limit,
    shards,
    experts,
    recurrence,
    rest,
    bytes_command,
    build_llama,
    gguf_pair,
    accuracy,
    logits,
    loading,
    loads,
    targets,
    memory,
    substitute,
    coupling,
    levels,
    papers,
    parallel,
    passes,
    pictures,
    reliability,
    heterospec,
    training,
    ahead,
    goodput,
    rounds,
    replicas,
    ray,
    router,
    routing,
    observed,
    transport,
    turns,
    http,
    losses,
    links,
    gains,
    beginnings,
    gaps,
    journal,
    users,
    fleet,
    utilisation,
    picture,
    plan,
    legacy,
):
    main.add_command(command)
