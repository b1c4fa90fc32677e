"""Machines that are network namespaces of one kernel, each on a cable of its own to the one that
the program runs on, where the coordinator is.

A cable can be limited to a rate, and either of its directions can be made to lose everything, in
silence. Needs no more than what an unprivileged user may do where user namespaces are allowed:
`isolated` starts a program in a namespace in which it is root over its own network, and no other
network is touched.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

UNSHARE = ("unshare", "--user", "--map-root-user", "--net")
TOOLS = ("unshare", "nsenter", "ip", "tc")
TRIAL = (
    "ip link add name cable0 type veth peer name cable1 && tc qdisc add dev cable0 root "
    "tbf rate 1mbit burst 2kb latency 50ms"
)
NOBODY = "02:00:00:00:00:ee"
"""The address of no device: a frame to it is lost, and nobody is told."""
SLOW_MBIT = 200.0
"""Up to here packets go one by one, so that a rate holds from 2 KB on; beyond, 16 at a time, else
this machine is slower than the cable."""
QUEUE_MS = 200


os.environ["PATH"] = os.pathsep.join(
    (os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin")
)  # where ip and tc are, and not every user looks


def why_not() -> str | None:
    """Return what keeps machines of this kind from being made here; None: nothing does."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} missing: install iproute2 and util-linux"
    tried = subprocess.run(
        [*UNSHARE, "sh", "-c", TRIAL], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        said = tried.stderr.strip().splitlines() or ["no reason given"]
        return (
            "network namespaces are not permitted here, or the kernel lacks veth or tbf "
            f"({said[-1]})"
        )
    return None


def isolated(arguments: Sequence[str]) -> list[str]:
    """The command that runs this Python with these arguments in a network of its own, as `Network`
    needs it."""
    return [*UNSHARE, sys.executable, *arguments]


class Machine:
    """A namespace at the other end of a cable."""

    def __init__(self, number: int) -> None:
        self.here, self.there = f"10.77.{number}.1", f"10.77.{number}.2"
        """The addresses of the cable's ends."""
        self._cable = f"cable{number}"
        self._limited = False
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        _do(
            "ip",
            "link",
            "add",
            self._cable,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            str(self._holder.pid),
        )
        for inside, device, address in (
            (False, self._cable, self.here),
            (True, "eth0", self.there),
        ):
            self._at(inside, "ip", "address", "add", f"{address}/24", "dev", device)
            self._at(inside, "ip", "link", "set", device, "up")
        self._at(True, "ip", "link", "set", "lo", "up")
        self._known = {inside: self._hardware(inside) for inside in (False, True)}

    @property
    def prefix(self) -> list[str]:
        """The words before a command that is to run on this machine."""
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--"]

    def run(self, *command: str) -> str:
        """Run a command on this machine; what it says."""
        return self._at(True, *command)

    def route(self) -> None:
        """Send all that is for other machines over the cable."""
        self.run("ip", "route", "add", "default", "via", self.here)

    def limit(self, mbit: float | None) -> None:
        """Carry no more than so many 10^6 bits a second, in each direction."""
        packets = "1" if mbit is not None and mbit <= SLOW_MBIT else "16"
        for inside, device in ((False, self._cable), (True, "eth0")):
            self._at(inside, "ip", "link", "set", device, "gso_max_segs", packets)
            if mbit is not None:
                rate = (
                    "rate",
                    f"{mbit:g}mbit",
                    "burst",
                    "2kb" if packets == "1" else "32kb",
                    "latency",
                    f"{QUEUE_MS}ms",
                )
                self._at(inside, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *rate)
            elif self._limited:
                self._at(inside, "tc", "qdisc", "delete", "dev", device, "root")
        self._limited = mbit is not None

    def lose(self, *, to: bool = False, back: bool = False) -> None:
        """Lose from now on all that goes to this machine, or comes back from it; or, with False, no
        more."""
        for inside, loses, address, device in (
            (False, to, self.there, self._cable),
            (True, back, self.here, "eth0"),
        ):
            hardware = NOBODY if loses else self._known[not inside]
            self._at(
                inside,
                "ip",
                "neighbour",
                "replace",
                address,
                "lladdr",
                hardware,
                "dev",
                device,
                "nud",
                "permanent",
            )

    def close(self) -> None:
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.wait()
        self._holder.stdout.close()

    def _hardware(self, inside: bool) -> str:
        words = self._at(
            inside, "ip", "-oneline", "link", "show", "eth0" if inside else self._cable
        ).split()
        return words[words.index("link/ether") + 1]

    def _at(self, inside: bool, *command: str) -> str:
        return _do(*self.prefix, *command) if inside else _do(*command)


@contextmanager
def network(machines: int, *, routed: bool = False) -> Iterator[list[Machine]]:
    """Yield so many machines, in a program that was started by `isolated`; `routed`: they reach
    each other, over this one."""
    _do("ip", "link", "set", "lo", "up")
    if routed:
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    with contextlib.ExitStack() as stack:
        made = []
        for number in range(1, machines + 1):
            made.append(machine := Machine(number))
            stack.callback(machine.close)
            if routed:
                machine.route()
        yield made


def _do(*command: str) -> str:
    """Run a command and return its output; if it fails, print what it said and raise
    `CalledProcessError`."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    return done.stdout
