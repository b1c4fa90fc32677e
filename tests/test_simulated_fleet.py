"""The simulator of a fleet beside what is known of queues, and its command."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

from dovetail.launch.planning.machines import read_machine
from dovetail.protocol.errors import UserError
from simulation.commands import execute
from simulation.figures import Figures
from simulation.fleet.arrivals import Mix, Requests, draw_requests, read_trace
from simulation.fleet.description import read_fleet
from simulation.fleet.layout import Kind, Plan, Played, handled_s
from simulation.fleet.play import Fleet
from simulation.fleet.profile import Profile, of_costs, of_rounds
from simulation.fleet.results import PERCENTS, capacity, line, play_load
from simulation.prices import placed_costs, read_size

Run = Callable[..., CompletedProcess[str]]
PLAN = Plan(4, 8, 1 << 16, 1 << 16, 0.0, 0.0, (10.0, 100.0))
READS = tuple(0.001 * rows for rows in range(300))
"""Passes that take a millisecond a row."""


def profile(*rounds_s: float, passes_s: tuple[float, ...] = READS, host_s: float = 0.0) -> Profile:
    """Return the profile of a server without a draft, by its rounds with 1, 2, ... sessions."""
    count, rounds_s = len(rounds_s) + 1, (0.0, *rounds_s)
    taus, rows = (1.0,) * count, (*range(count),)
    return Profile(rounds_s, taus, rows, rounds_s, passes_s, 0.0, host_s)


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `python tests/simulation` with some arguments, in this process."""

    def invoke(*arguments: str) -> CompletedProcess[str]:
        code = execute(arguments)
        shown = capsys.readouterr()
        return CompletedProcess(arguments, code, shown.out, shown.err)

    return invoke


FLAT = profile(*[0.01] * 8)
"""A server that is as fast for each of eight sessions as for one."""
ONE = profile(0.01)
FREE = (1e-9,) * 300
"""Passes that cost nothing to speak of, whatever they read."""


def kind(profile: Profile, count: int = 1, **fields: float) -> Kind:
    return Kind("a", count, profile, profile, 100.0, 300.0, **fields)  # type: ignore[arg-type]


def asked(*requests: tuple[float, int, int]) -> Requests:
    at_s, prompts, replies = map(np.array, zip(*requests, strict=True))
    return Requests(at_s, prompts, replies, np.zeros(len(at_s), int))


def latencies(played: Played) -> list[float]:
    return [at_s - s.asked_s for s, at_s in sorted(played.done, key=lambda one: one[0].number)]


def test_a_request_alone_is_read_and_then_written() -> None:
    played = Fleet([kind(FLAT)], PLAN).play(asked((5.0, 200, 101)), (0.0, 10.0))
    assert latencies(played) == pytest.approx([0.2 + 1.0])
    assert played.tokens == pytest.approx([101.0])
    assert played.busy_s == pytest.approx([1.2])


def test_sessions_share_a_server_whose_passes_take_longer_for_more() -> None:
    halved = profile(0.01, 0.02, passes_s=FREE)
    played = Fleet([kind(halved)], PLAN).play(asked((0.0, 1, 101), (0.0, 1, 201)), (0.0, 10.0))
    assert latencies(played) == pytest.approx([2.0, 3.0], rel=0.02)


def test_who_finds_no_room_waits_and_a_full_queue_refuses() -> None:
    requests = asked(*[(0.0, 1, 101)] * 4)
    played = Fleet([kind(ONE)], PLAN).play(requests, (0.0, 10.0))
    assert latencies(played) == pytest.approx([1.0, 2.0, 3.0, 4.0], rel=0.02)
    short = Fleet([kind(ONE)], replace(PLAN, queue=1)).play(requests, (0.0, 10.0))
    assert (len(short.done), short.refused) == (2, 2)


def test_a_queue_of_one_server_is_that_of_the_book() -> None:
    """M/D/1: requests wait rho / (2 (1 - rho)) times what one takes."""
    load, mix = 0.7, Mix(1.0, 101.0, 0.0)
    requests = draw_requests("poisson", load, 20_000.0, mix, 1, 3)
    played = Fleet([kind(ONE)], PLAN).play(requests, (0.0, 20_000.0))
    waits = np.mean(latencies(played)) - 1.001
    assert waits == pytest.approx(load / (2 * (1 - load)), rel=0.1)
    assert played.busy_s[0] / played.seconds == pytest.approx(load, rel=0.05)


@pytest.mark.parametrize("process", ["poisson", "diurnal", "bursts"])
def test_requests_come_at_their_mean_rate(process: Any) -> None:
    requests = draw_requests(process, 50.0, 4000.0, Mix(400.0, 200.0, 0.8), 3, 1)
    assert len(requests) / 4000.0 == pytest.approx(50.0, rel=0.1)
    assert np.mean(requests.prompts) == pytest.approx(400.0, rel=0.05)
    assert np.all(np.diff(requests.at_s) >= 0)
    spread = np.histogram(requests.at_s, 400)[0]
    assert (np.var(spread) > 2 * np.mean(spread)) == (process != "poisson")


def test_a_session_whose_worker_is_lost_goes_on_elsewhere_and_reads_its_log_again() -> None:
    lost = kind(FLAT, 2, worker_h=0.0005, worker_back_s=5.0)
    requests = draw_requests("poisson", 1.0, 60.0, Mix(50.0, 100.0, 0.0), 1, 0)
    played = Fleet([lost], PLAN).play(requests, (0.0, 60.0))
    assert played.failures["worker"] == 2
    moved = [s for s, _ in played.done if s.moves]
    assert moved
    assert len(played.done) == len(requests)
    calm = Fleet([kind(FLAT, 2)], PLAN).play(requests, (0.0, 60.0))
    assert sum(latencies(played)) > sum(latencies(calm))


def test_streams_stand_still_while_their_coordinator_is_away() -> None:
    away = replace(PLAN, coordinator_h=0.002, coordinator_back_s=4.0, seed=1)
    requests = draw_requests("poisson", 2.0, 30.0, Mix(10.0, 100.0, 0.0), 1, 0)
    played = Fleet([kind(FLAT)], away).play(requests, (0.0, 30.0))
    assert played.failures["coordinator"] == 1
    assert len(played.done) == len(requests)
    assert max(latencies(played)) > 4.0


def test_a_coordinator_that_is_at_work_all_the_time_sets_the_pace() -> None:
    assert handled_s(0.001, 0.1, 1) == pytest.approx(0.001)
    assert handled_s(0.001, 0.1, 1000) == pytest.approx(1.0 - 0.1, rel=0.01)
    slow = replace(FLAT, host_s=0.005, passes_s=FREE)
    requests = asked(*[(0.0, 1, 101)] * 8)
    played = Fleet([kind(slow)], PLAN).play(requests, (0.0, 100.0))
    assert max(latencies(played)) == pytest.approx(100 * 8 * 0.005, rel=0.1)
    assert played.coordinator_busy == pytest.approx(1.0, abs=0.05)


def test_joules_are_those_of_idle_servers_too() -> None:
    requests, two = asked((0.0, 1, 101)), kind(replace(FLAT, passes_s=FREE), 2)
    row = play_load([two], PLAN, requests, load=1.0, seconds=10.0).row([two])
    assert row["joules_per_token"] == pytest.approx((2 * 10 * 100 + 1.0 * 200) / 101)


def test_a_profile_comes_from_the_cost_model_and_is_never_slower_for_a_draft() -> None:
    costs = placed_costs(read_machine("dovetail-server"), read_size("7B"), "int8")
    alone = of_costs(costs, 4, 0.0)
    assert alone.token_s(1) == pytest.approx(
        costs.verify_s(1) + costs.messages.beside_s(drafted=False)
    )
    assert list(alone.rounds_s) == sorted(alone.rounds_s)
    for tau, drafts in ((4.0, True), (1.0, False)):
        figures = Figures(0, 0.0, 0, 0.0, tau, 0.0, 0.001, 0.0, None, 8.0, 0.0, 0.0, 0.0, 0.0, None)
        drafted = of_costs(costs, 4, 0.0, figures)
        assert drafted.token_s(1) < alone.token_s(1) if drafts else drafted.rows == alone.rows
        assert all(drafted.token_s(n) <= alone.token_s(n) for n in range(1, 5))


def test_a_measured_profile_is_linear_between_what_was_measured() -> None:
    passes_s = {1: 0.008, 5: 0.012, 9: 0.02}
    measured = of_rounds({1: 0.01, 4: 0.025}, passes_s, most=5, open_s=0.0)
    assert measured.token_s(2) == pytest.approx(0.01 + 0.015 / 3)
    assert measured.token_s(5) == pytest.approx(0.026)
    assert measured.passes_s[:3] == pytest.approx((0.0, 0.008, 0.009))
    assert measured.passes_s[7] == pytest.approx(0.016)
    assert measured.passes_s[13] == pytest.approx(0.026)  # 1.5 ms a row, as from 1 to 9
    assert capacity([kind(ONE, 3)], 0.0, 101.0) == pytest.approx(3.0)


@pytest.mark.parametrize(("together", "passes"), [(0, 0), (1, 2), (2, 4)])
def test_prompts_that_come_together_are_read_in_the_passes_of_a_stream(
    together: int, passes: int
) -> None:
    """A pass takes 10 ms, and 20 rows of prompts nearly treble that, once their cost is known."""
    known, row_s = [(0.0, 40, 3)] * 9, 0.00098
    requests = asked(*known, (9.0, 10, 201), *[(10.0, 40, 2)] * together)
    server = profile(*[0.01] * 16, passes_s=(0.0, *(0.01 + row_s * row for row in range(300))))
    played = Fleet([kind(server)], PLAN).play(requests, (0.0, 20.0))
    (stream, ended_s), *late = sorted(played.done, key=lambda one: one[0].number)[9:]
    assert ended_s - stream.first_s == pytest.approx(2.0 + 20 * row_s * passes)
    began_s = {session.first_s - (0.01 + 20 * row_s) * passes for session, _ in late}
    assert len(began_s) == min(1, together)
    assert all(10.0 <= at_s <= 10.01 for at_s in began_s)


def test_who_comes_at_random_finds_a_longer_pass_and_others_make_good_for_it() -> None:
    quick = profile(*[0.01] * 8, passes_s=FREE)
    requests = asked((0.0, 4, 1001), (1.004, 4, 2), (2.008, 4, 2), (3.001, 4, 2))
    firsts, ends = [], []
    for spread in (0.0, 0.5):
        served = kind(replace(quick, spread=spread))
        played = Fleet([served], PLAN).play(requests, (0.0, 20.0))
        done = sorted(played.done, key=lambda one: one[0].number)
        firsts.append(np.array([session.first_s - session.asked_s for session, _ in done[1:]]))
        ends.append(done[0][1])
    assert firsts[0] == pytest.approx([0.016, 0.012, 0.019], abs=1e-6)
    assert firsts[1] - firsts[0] == pytest.approx([0.003, 0.001, 0.0045], abs=1e-6)
    assert ends[1] == pytest.approx(ends[0], abs=1e-6)


def test_a_request_begins_when_it_has_been_handled() -> None:
    requests = asked((5.0, 200, 101))
    played = Fleet([kind(FLAT)], replace(PLAN, begin_s=0.5)).play(requests, (0.0, 10.0))
    assert latencies(played) == pytest.approx([0.5 + 0.2 + 1.0])


def test_a_trace_is_played_as_it_is(invoke: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"at_s": n / 2, "prompt_tokens": 100, "reply_tokens": 50} for n in range(40)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = invoke("fleet", "--servers", "20", "--trace", str(trace), "--json")
    assert said.returncode == 0, said.stderr
    (row,) = json.loads(said.stdout)["rows"]
    assert row["requests_per_s"] == pytest.approx(40 / 19.5)
    for field in rows[0]:
        assert field in invoke("fleet", "--help").stdout
    trace.write_text('{"at_s": 0, "prompt_tokens": 100}\n')
    with pytest.raises(UserError, match="line 1: write a JSON object"):
        read_trace(trace)


def test_a_fleet_that_is_not_there_is_told_as_what_it_was_named_by() -> None:
    with pytest.raises(UserError, match=r"^there is no file /nosuch\.toml: .* choose legacy$"):
        read_fleet("/nosuch.toml")
    with pytest.raises(UserError, match=r"^there is no fleet 'nosuch': choose legacy, or name"):
        read_fleet("nosuch")


def test_one_seed_gives_one_result_and_a_large_fleet_is_a_small_one_many_times(
    invoke: Run, tmp_path: Path
) -> None:
    shown = invoke("fleet", "--servers", "2", "--seconds", "9", "--load", "0.5").stdout
    assert shown.endswith("ms/token, latency: the median, and what 99 % stay within\n")

    def told(servers: str) -> dict[str, Any]:
        flags = ("--seconds", "30", "--load", "0.5", "--sample", "32", "--sigma", "0")
        said = invoke("fleet", "--servers", servers, *flags, "--json")
        assert said.returncode == 0, said.stderr
        return dict(json.loads(said.stdout))

    small, large = told("32"), told("320000")
    assert small == told("32")
    assert large["played"] == 32
    assert large["rows"][0]["tokens_per_s"] == pytest.approx(
        10_000 * small["rows"][0]["tokens_per_s"]
    )


def test_figures_of_no_reply_are_none_and_no_number(invoke: Run, tmp_path: Path) -> None:
    trace, plot = tmp_path / "trace.jsonl", tmp_path / "fleet.svg"
    asks = '{"at_s": %d, "prompt_tokens": 9, "reply_tokens": 1}\n'
    trace.write_text(asks % 0 + asks % 9, encoding="utf-8")

    def no_number(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    flags = ("--servers", "1", "--trace", str(trace), "--plot", str(plot))
    said = invoke("fleet", *flags, "--json")
    assert said.returncode == 0, said.stderr
    (row,) = json.loads(said.stdout, parse_constant=no_number)["rows"]
    assert row["token_s"]["p50"] is None
    empty = {f"p{percent}": None for percent in PERCENTS}
    assert line(row | {"ttft_s": empty, "latency_s": empty})[3:6] == ("-", "-", "-")


def test_what_is_no_fleet_is_a_mistake(invoke: Run, tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text('[[kind]]\nname = "a"\n')
    for flags in (("--fleet", "nobody"), ("--fleet", str(bad)), ("--load", "fast")):
        said = invoke("fleet", *flags)
        assert (said.returncode, "Traceback" in said.stderr) == (2, False), said.stderr


@pytest.mark.parametrize("name", ["seconds", "prompt-tokens", "reply-tokens", "sigma"])
def test_nan_is_no_number(name: str, invoke: Run) -> None:
    result = invoke("fleet", f"--{name}", "nan")
    assert (result.returncode, "is not a number" in result.stderr) == (2, True), result.stderr
