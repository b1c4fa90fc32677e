"""A made-up run, as `dovetail profile` sees one: rounds of a draft and a target that take turns,
with everything that is seen, sampled and sounded."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from dovetail.launch.planning.planner import Tree
from dovetail.launch.profiling.measured import Evidence, Soundings
from dovetail.launch.profiling.samplers import CardReading, Process, Sample
from dovetail.launch.profiling.timeline import Slice
from dovetail.protocol.messages import Role, RoundRecord, SeenRound, SeenWorker, WorkerState

MS = 1_000_000
HERE = "made-up"
LEVELS, WIDTH = 8, 2
LEVEL_MS, ROW_MS, PASS_MS = 1.2, 2.0, 20.0


def made_up_record(
    random: Random, number: int, *, nodes: int, verify_ms: float, hit: bool = False
) -> RoundRecord:
    """A round whose tree is two chains; of the first the target takes some nodes."""
    parents = tuple(-1 if node < WIDTH else node - WIDTH for node in range(nodes))
    accepted = tuple(
        range(0, WIDTH * random.choice([0, 1, 2, 3, 3, 4, min(8, nodes // WIDTH)]), WIDTH)
    )[: nodes // WIDTH]
    levels = min(LEVELS, max(1, nodes // WIDTH)) if nodes else 0
    return RoundRecord(
        round=number,
        prefix=40 + 4 * number,
        tokens=tuple(range(nodes)),
        parents=parents,
        scores=tuple(-0.2 * (1 + node // WIDTH) for node in range(nodes)),
        verified=nodes,
        accepted=accepted,
        bonus=7,
        hit=hit,
        grown=nodes,
        passes=tuple((WIDTH, int(LEVEL_MS * MS)) for _ in range(levels)),
        draft_ns=int((LEVEL_MS * levels + 0.3) * MS) if nodes else 0,
        verify_ns=int(verify_ms * MS),
        transport_ns=int(0.4 * MS),
        coordinator_ns=int(0.2 * MS),
    )


def verify_ms(rows: int) -> float:
    """T_V: flat, then steep."""
    return max(PASS_MS, ROW_MS * rows) + 2.0


def made_up_run(*, rounds: int = 40, nodes: int = 15, gpu: bool = False) -> Evidence:
    """One reply of so many rounds."""
    random, now_ms, slices, seen = Random(5), 100.0, list[Slice](), list[SeenRound]()

    def add(process: str, name: str, start: float, length: float, number: int) -> float:
        slices.append(Slice(process, name, int(start * MS), int((start + length) * MS), 1, number))
        return start + length

    for number in range(1, rounds + 1):
        hit = random.random() < 0.4
        record = made_up_record(
            random, number, nodes=nodes, verify_ms=verify_ms(nodes + 1) + random.random(), hit=hit
        )
        at = add("coordinator", "handle", now_ms, 0.1, number)
        at = add("coordinator", "link", at, 0.1, number)
        began = at
        at = add("draft", "root", at + 0.2, LEVEL_MS, number)
        for _ in range(len(record.passes) - 1):
            at = add("draft", "level", at, LEVEL_MS, number)
        slices.append(Slice("draft", "draft", int(began * MS), int((at + 0.1) * MS), 1, number))
        at = add("coordinator", "link", at + 0.1, 0.1, number)
        at = add("coordinator", "handle", at, 0.1, number)
        at = add("coordinator", "link", at, 0.1, number)
        whole = record.verify_ns / MS
        add("draft", "grow", at + 1.0, 0.5 * whole, number)
        for name, share in (("linears", 0.8), ("attention", 0.08), ("other", 0.05), ("head", 0.05)):
            add(
                "target",
                name,
                at + {"linears": 0.0, "attention": 0.8, "other": 0.88, "head": 0.93}[name] * whole,
                share * whole,
                number,
            )
        at = add("target", "verify", at, whole, number)
        now_ms = add("coordinator", "link", at, 0.1, number)
        seen.append(
            SeenRound(
                number=number,
                session=1,
                draft="draft",
                target="target",
                at_ns=int(now_ms * MS),
                record=record,
            )
        )
    end_ns = int((now_ms + 40.0) * MS)
    wide = [
        made_up_record(random, number, nodes=63, verify_ms=verify_ms(64), hit=number % 3 == 0)
        for number in range(1, 20)
    ]
    others = [
        made_up_record(random, number, nodes=count, verify_ms=verify_ms(count + 1))
        for count in (1, 3, 7, 31)
        for number in range(1, 6)
    ]
    plain = [
        made_up_record(random, number, nodes=0, verify_ms=verify_ms(1)) for number in range(1, 9)
    ]
    return Evidence(
        slices=slices,
        rounds=seen,
        workers=(_seen_worker("target", (0,)), _seen_worker("draft", (1,))),
        states=(_state("target", 11), _state("draft", 12)),
        pairs=(),
        start_ns=int(90.0 * MS),
        end_ns=end_ns,
        samples=_samples(end_ns, gpu=gpu),
        absent={"NVIDIA cards (NVML)": "pynvml is not installed"},
        here=HERE,
        soundings=Soundings([wide], plain, others) if nodes else Soundings(plain=plain),
        tree=Tree("dynamic", nodes, LEVELS, WIDTH),
        ahead=False,
        title="target made-up (fp32) · draft made-up",
        workload="1 prompt, temperature 0, seed 0, policy dynamic, 15/8/2",
    )


def with_experts(run: Evidence, *, row: int, drafted: int) -> Evidence:
    """Return a run as if its model had experts: a pass over one row goes through `row` of 16 times
    as many, and a drafted pass through `drafted`."""

    def routed(record: RoundRecord) -> RoundRecord:
        return record.model_copy(update={"experts": drafted if record.verified else row})

    rounds = [seen.model_copy(update={"record": routed(seen.record)}) for seen in run.rounds]
    plain = [routed(record) for record in run.soundings.plain]
    return replace(run, rounds=rounds, soundings=Soundings(run.soundings.wide, plain))


def _seen_worker(role: Role, cores: Sequence[int]) -> SeenWorker:
    number = {"target": 1, "draft": 2}[role]
    return SeenWorker(
        name=role,
        worker_epoch=number,
        roles=(role,),
        host=HERE,
        device="cpu",
        cores=tuple(cores),
        busy_ns=0,
        at_ns=0,
        clock_bound_ns=80_000,  # type: ignore[arg-type]
    )


def _state(role: str, pid: int) -> WorkerState:
    return WorkerState(
        name=role,
        roles=(role,),  # type: ignore[arg-type]
        model="made-up",
        device="cpu",
        threads=1,
        fingerprint="",
        host=HERE,
        pid=pid,
        worker_epoch=1,
        sessions=0,
        busy_share=0.5,
        round_trip_us=160.0,
        clock_offset_us=0.0,
        clock_bound_us=80.0,
        rss_mb=512.0,
        stale=0,
    )


def _samples(end_ns: int, *, gpu: bool) -> list[Sample]:
    """Every quarter of a second: the target's process runs for two thirds of the time, the draft's
    for half of it."""
    found = []
    for number, at_ns in enumerate(range(90 * MS, end_ns + 1, 250 * MS)):
        seconds = 0.25 * number
        cards = {"cuda:0": CardReading("Card", 0.3, 3 << 30, 8 << 30, 15.76)} if gpu else {}
        processes = {11: Process(0.66 * seconds, 600 << 20), 12: Process(0.5 * seconds, 400 << 20)}
        cores = {0: (0.7 * seconds, seconds), 1: (0.55 * seconds, seconds)}
        found.append(Sample(at_ns, cores, processes, cards))
    return found
