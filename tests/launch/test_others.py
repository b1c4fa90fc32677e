"""What other programs take of the processors, by counters that were made up."""

from pathlib import Path

from dovetail.launch.machine.others import Others


def write(proc: Path, cores: dict[int, str], processes: dict[int, tuple[str, int, int]]) -> None:
    """Write counters of cores, and of processes (name, parent, ticks), as the kernel has them."""
    lines = [f"cpu{core} {ticks} 0 0" for core, ticks in cores.items()]
    (proc / "stat").write_text("\n".join(["cpu  9 9 9 9", *lines, "intr 1"]))
    for pid, (name, parent, ticks) in processes.items():
        (proc / str(pid)).mkdir(exist_ok=True)
        before = " ".join(["0"] * 9)
        (proc / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} {before} {ticks} 0 0")


def test_what_is_ours_and_what_it_started_is_nobody_elses_and_the_host_counts(
    tmp_path: Path,
) -> None:
    idle = dict.fromkeys(range(3), "0 0 0 0 0 0 0 0")
    write(tmp_path, idle, {7: ("ours", 1, 5), 8: ("a (b) c", 1, 0), 9: ("gone", 1, 50)})
    others = Others((0, 1), tmp_path)
    assert others.load(lambda pid: pid == 7) is None, "no time has passed"
    # cores 0 and 1: 100 ticks each, of which 120 busy and 20 stolen; what core 2 does is no matter
    busy = {0: "60 0 10 20 0 0 0 10", 1: "50 0 0 40 0 0 0 10", 2: "100 0 0 0 0 0 0 0"}
    write(tmp_path, busy, {7: ("ours", 1, 35), 8: ("a (b) c", 1, 40), 10: ("child", 7, 20)})
    load = others.load(lambda pid: pid == 7)
    assert load is not None
    assert (load.cores, load.share, load.stolen) == ("0-1", (120 - 30 - 20 + 20) / 200, 0.1)
    assert load.programs == [("a (b) c", 8, 0.4)]
    assert load.words == "take 45% of cores 0-1: a (b) c (pid 8) 0.4 cores, the host 10%"
