"""The load of other programs, from made-up counters."""

import os
import subprocess
import sys

from dovetail.launch.machine.others import Look, Others, between


def test_our_processes_and_ended_children_are_excluded_and_the_host_is_included() -> None:
    idle = Look(
        0.0, 0.0, 0.0, {7: ("ours", 1, 5.0), 8: ("other", 1, 0.0), 9: ("gone", 1, 50.0)}, {7: 5.0}
    )
    there = {7: ("ours", 1, 35.0), 8: ("other", 1, 40.0), 10: ("child", 7, 20.0)}
    busy = Look(120.0, 20.0, 200.0, there, {7: 15.0, 8: 30.0})
    assert between(idle, idle, (0, 1), lambda pid, _: pid == 7) is None, "no time has passed"
    load = between(idle, busy, (0, 1), lambda pid, _: pid == 7)
    assert load is not None
    assert (load.cores, load.share, load.stolen) == ("0-1", (120 - 30 - 20 - 10 + 20) / 200, 0.1)
    assert load.programs == [("other", 8, 0.4)]
    assert load.words == "use 40% of cores 0-1: other (pid 8) 0.4 cores, the host 10%"


def test_a_busy_program_is_seen_and_not_if_it_is_ours() -> None:
    with subprocess.Popen([sys.executable, "-c", "while 1: pass"]) as busy:
        others = Others()
        while (load := others.load(lambda *_: False)) is None or not load.share:
            pass
        assert load.share > 0.0
        looks = (others.load(lambda pid, _: pid == os.getpid()) for _ in range(10))
        named = {pid for look in looks if look is not None for _, pid, _ in look.programs}
        busy.kill()
    assert busy.pid not in named
