"""Checks on machines that are namespaces, each a story that is told to the end with the texts that
it would have had on one machine.

The coordinator and the clients are on this machine; the target, the draft and a second target on
one each. Which process runs where, and what happens to the cables, is here; that a text is what it
was is the oracle.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dovetail.protocol.messages import Emitted, Failed, Finished
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.fleets import Fleet
from support.inflated import as_flags, models_at
from support.machines import Machine, network
from support.stacks import PROMPTS, complete_all, submit

TREE = TreeSettings(policy="dynamic", insist=True, gamma=6, depth=4, width=4)
TOKENS = 192
TEMPERATURES = (0.0, 1.0)
ANYWHERE = "0.0.0.0"
SIZE = "64MiB"  # makes a reply take long enough for something to happen meanwhile
FLAP_S, FLAPS = 0.6, 6  # shorter than a heartbeat's patience
SLOW_MBIT = 1.0
PATIENCE_S = 90.0


@dataclass
class House:
    """The processes, and the machines that they are on."""

    fleet: Fleet
    client: Client
    target: Machine
    draft: Machine
    spare: Machine
    expected: list[tuple[int, ...]]

    def ask(self, *, speculate: bool = True) -> list[int]:
        """A greedy request and a sampled one."""
        tree = TREE if speculate else None
        samplings = [
            Sampling(temperature=temperature, min_tokens=TOKENS) for temperature in TEMPERATURES
        ]
        return [
            submit(self.client, PROMPTS[0], sampling=sampling, tokens=TOKENS, seed=7, tree=tree)
            for sampling in samplings
        ]

    def tell(self, harm: Callable[[], object]) -> list[Finished]:
        """Two replies with something happening once both have begun; they are what they would have
        been, to the last token."""
        ends, begun, done = dict.fromkeys(self.ask()), set[int](), False
        finished: dict[int, Finished] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(finished) < len(ends):
            reply = self.client.receive(1.0)
            self.fleet.tend()
            assert time.monotonic() < deadline, (
                f"nothing was heard of a request for {PATIENCE_S:g} s\n{self.fleet.tale()}"
            )
            assert not isinstance(reply, Failed), reply.text
            if isinstance(reply, Finished):
                finished[reply.request] = reply
            if isinstance(reply, Emitted):
                begun.add(reply.request)
            if len(begun) == len(ends) and not done:
                harm()
                done = True
        told = [finished[request] for request in ends]
        self.check(told)
        return told

    def check(self, told: Sequence[Finished]) -> None:
        assert [reply.result.token_ids for reply in told] == self.expected, (
            "another text than on one machine"
        )

    def again(self) -> list[Finished]:
        """Ask for the same replies with nothing happening."""
        told = complete_all(self.client, self.ask())
        self.check(told)
        return told

    def mend(self) -> None:
        """All cables carry everything, and everybody comes back."""
        for machine in (self.target, self.draft, self.spare):
            machine.lose()
            machine.limit(None)
        self.fleet.wait_until_ready(self.client, within_s=PATIENCE_S)


@contextmanager
def housed() -> Iterator[House]:
    with network(3) as (target, draft, spare), Fleet(host=ANYWHERE) as fleet:
        listened = fleet.address
        for name, role, machine in (
            ("target", "target", target),
            ("draft", "draft", draft),
            ("spare", "target", spare),
        ):
            fleet.address = listened.replace(ANYWHERE, machine.here)
            fleet.add(
                name, role, *as_flags(models_at(SIZE)), "--draft.device=cpu", prefix=machine.prefix
            )  # type: ignore[arg-type]
        fleet.address = listened.replace(ANYWHERE, "127.0.0.1")
        with fleet.client() as client:
            fleet.wait_until_ready(client)
            house = House(fleet, client, target, draft, spare, [])
            house.expected = [
                reply.result.token_ids for reply in complete_all(client, house.ask(speculate=False))
            ]
            yield house


# -- the stories -----------------------------------------------------------------------------------


def three_machines(house: House) -> str:
    """Texts are those of one machine, and the draft on the other one drafts."""
    told = house.again()
    assert all(reply.result.drafted_tokens for reply in told)
    return f"{told[0].result.tokens_per_s:.0f} tokens/s"


def slow_cable(house: House) -> str:
    """1 Mbit/s to everybody."""
    for machine in (house.target, house.draft, house.spare):
        machine.limit(SLOW_MBIT)
    told = house.again()
    return f"{told[0].result.tokens_per_s:.0f} tokens/s"


def lost_from_draft(house: House) -> str:
    """Lose what the draft says, and not what it is told: the target goes on alone, and the draft
    comes back."""
    house.tell(lambda: house.draft.lose(back=True))
    house.mend()
    told = house.again()
    assert all(reply.result.drafted_tokens for reply in told), (
        "the draft is back, and nobody asks it"
    )
    return "continued alone; drafts again"


def lost_to_draft(house: House) -> str:
    """The other direction."""
    house.tell(lambda: house.draft.lose(to=True))
    house.mend()
    assert all(reply.result.drafted_tokens for reply in house.again()), (
        "the draft is back, and nobody asks it"
    )
    return "continued alone; drafts again"


def lost_from_targets(house: House) -> str:
    """Lose what one target says: its sessions go on at the other one."""
    told = house.tell(lambda: house.target.lose(back=True))
    told += house.tell(
        lambda: (
            house.target.lose(),
            house.fleet.wait_until_ready(house.client),
            house.spare.lose(back=True),
        )
    )
    moved = sum(reply.result.moves for reply in told)
    assert moved, "both targets were lost in turn, and no session moved"
    return f"moved {moved} times"


def lost_to_targets(house: House) -> str:
    """The other direction."""
    told = house.tell(lambda: house.target.lose(to=True))
    told += house.tell(
        lambda: (
            house.target.lose(),
            house.fleet.wait_until_ready(house.client),
            house.spare.lose(to=True),
        )
    )
    moved = sum(reply.result.moves for reply in told)
    assert moved, "both targets were lost in turn, and no session moved"
    return f"moved {moved} times"


def no_target_for_a_while(house: House) -> str:
    """Both targets are cut off in both directions for some seconds: the streams pause, and go
    on."""

    def cut() -> None:
        for machine in (house.target, house.spare):
            machine.lose(to=True, back=True)
        time.sleep(3.0)  # how long it lasts is the fault
        for machine in (house.target, house.spare):
            machine.lose()

    began = time.monotonic()
    told = house.tell(cut)
    return (
        f"moved {sum(reply.result.moves for reply in told)} times, done after "
        f"{time.monotonic() - began:.1f} s"
    )


def flapping(house: House) -> str:
    """A cable that goes for less than a heartbeat's patience and comes again loses nobody."""
    before = {worker.pid: worker.worker_epoch for worker in house.client.status().workers}

    def flap() -> None:
        for number in range(FLAPS):
            house.target.lose(to=number % 2 == 0, back=number % 3 == 0)
            time.sleep(FLAP_S)  # how long it lasts is the fault
            house.target.lose()
            time.sleep(FLAP_S)

    told = house.tell(flap)
    assert {
        worker.pid: worker.worker_epoch for worker in house.client.status().workers
    } == before, "a worker was lost that was there"
    return f"moved {sum(reply.result.moves for reply in told)} times"


STORIES: tuple[Callable[[House], str], ...] = (
    three_machines,
    slow_cable,
    lost_from_draft,
    lost_to_draft,
    lost_from_targets,
    lost_to_targets,
    no_target_for_a_while,
    flapping,
)


def main(names: Sequence[str]) -> int:
    """Exit code 0 if each story was told to its end."""
    known = {story.__name__: story for story in STORIES}
    if unknown := [name for name in names if name not in known]:
        sys.stderr.write(f"there is no check {unknown[0]!r}: choose among {', '.join(known)}\n")
        return 2
    failed = 0
    with housed() as house:
        for name in names or known:
            began = time.monotonic()
            try:
                said = known[name](house)
            except AssertionError as error:
                failed += 1
                said = f"FAILED: {error}"
            house.mend()
            print(f"{name:24} {time.monotonic() - began:6.1f} s  {said}", flush=True)
    print(
        "all checks passed" if not failed else f"{failed} of {len(names or known)} failed",
        flush=True,
    )
    return 1 if failed else 0
