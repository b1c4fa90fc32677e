"""`dovetail generate` with the embedded pair, as real processes."""

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from pydantic import ValidationError

from dovetail.launch import cli
from dovetail.launch.decoding.single import (
    NOTHING_PAID,
    STOP_CHARACTERS,
    other_targets,
    summary,
    without_speculation,
)
from dovetail.launch.files.directory import announced
from dovetail.launch.files.outputs import open_answers
from dovetail.launch.files.prompts import Prompt, read_prompts
from dovetail.launch.processes.connection import Connection, ends_of
from dovetail.launch.processes.stack import Stack
from dovetail.launch.processes.supervise import Supervisor
from dovetail.protocol.errors import DovetailError, UserError
from dovetail.protocol.links import open_link
from dovetail.protocol.messages import MAX_TEXT, Limits, Result, Submit
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.golden import representative
from support.patience import PATIENCE_S
from support.records import read_records
from support.scripted import ScriptedTarget
from support.web import Backend, backend

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

RESULT_FIELDS = [
    "text",
    "token_ids",
    "prompt_tokens",
    "completion_tokens",
    "finish_reason",
    "seed",
    "fingerprint",
    "rounds",
    "tau",
    "accepted_tokens",
    "drafted_tokens",
    "grown_nodes",
    "acceptance_rate",
    "accepted_per_position",
    "hit_rate",
    "wall_s",
    "time_to_first_token_s",
    "tokens_per_s",
    "prefill_s",
    "draft_exposed_s",
    "verify_s",
    "transport_s",
    "queue_s",
    "coordinator_s",
    "unaccounted_s",
    "bytes_per_round",
    "ahead_nodes",
    "wasted_nodes",
    "verified_rows",
    "plain_rounds",
    "control_rounds",
    "predicted_tokens_per_s",
    "reused_tokens",
    "reused_from",
    "moves",
    "fingerprints",
    "placement",
    "prefill",
    "draft_failure",
    "constraint",
]
ACCOUNTS = (
    *shlex.split(
        "prefill_s draft_exposed_s verify_s transport_s queue_s coordinator_s unaccounted_s"
    ),
)
STORY = "Tell me a story about a small owl who is afraid of the dark."


def write_prompts(path: Path, *prompts: tuple[str, list[str]]) -> str:
    path.write_text(
        "".join(
            json.dumps({"id": id, "turns": turns, "category": "test"}) + "\n"
            for id, turns in prompts
        )
    )
    return str(path)


def left_of(temporary: Path) -> list[int]:
    """The processes that run with this folder for temporary files."""
    return [
        process.pid
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("TMPDIR") == str(temporary)
    ]


def answers(path: Path) -> dict[str, list[dict[str, object]]]:
    return {line["id"]: line["results"] for line in map(json.loads, path.read_text().splitlines())}


def test_penalties_biases_and_a_least_length_are_flags(invoke: Run, stack: Stack) -> None:
    def ids(*flags: str) -> list[int]:
        done = invoke(
            "generate",
            "Say hello.",
            "--connect",
            stack.address,
            "--json",
            "--max-tokens",
            "40",
            *flags,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["token_ids"]

    plain = ids()
    assert len(plain) < 30
    assert len(ids("--min-tokens", "30")) >= 30
    banned = ids(f"--logit-bias={plain[0]}=-100", f"--logit-bias={plain[1]}=-100")
    assert not {*plain[:2]} & {*banned}
    pressed = ids(
        *shlex.split(
            "--min-tokens 40 --presence-penalty 2 --frequency-penalty 2 --repetition-penalty 1.5"
        )
    )
    assert len(set(pressed)) > 34


def test_json_is_one_object_of_exactly_the_promised_fields(run: Run, stack: Stack) -> None:
    done = run(
        "generate",
        STORY,
        "--connect",
        stack.address,
        *shlex.split("--json --max-tokens 24 --seed 7 --temperature 1"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result) == RESULT_FIELDS
    assert result["seed"] == 7
    assert 1 <= result["completion_tokens"] <= 24
    assert sum(result[account] for account in ACCOUNTS) == pytest.approx(result["wall_s"])
    assert "seed 7 · target demo (fp32) · draft demo" in done.stderr


def test_the_streamed_text_is_that_of_the_result_and_the_draft_changes_nothing(
    run: Run, stack: Stack
) -> None:
    options = ("--connect", stack.address, *shlex.split("--max-tokens 24 --seed 7 --temperature 1"))
    streamed = run("generate", STORY, *options)
    alone = json.loads(
        run("generate", "-", *options, "--json", "--draft", "none", input=STORY).stdout
    )
    assert streamed.stdout.removesuffix("\n") == alone["text"].removesuffix("\n")
    assert alone["drafted_tokens"] == 0


def test_the_prompt_comes_from_standard_input_and_raw_leaves_the_template_out(
    invoke: Run, stack: Stack
) -> None:
    options = ("--connect", stack.address, "--max-tokens", "4", "--json")
    chat = json.loads(invoke("generate", *options, input="Once upon a time").stdout)
    raw = json.loads(invoke("generate", *options, "--raw", input="Once upon a time").stdout)
    assert max(chat["seed"], raw["seed"]) < 1 << 53
    assert raw["prompt_tokens"] < chat["prompt_tokens"]


def test_a_stop_string_ends_the_reply_before_it(invoke: Run, stack: Stack) -> None:
    options = ("--connect", stack.address, "--max-tokens", "24", "--json", "--seed", "1")
    whole = json.loads(invoke("generate", STORY, *options).stdout)["text"]
    stop = whole[5:8]
    cut = json.loads(invoke("generate", STORY, *options, "--stop", stop).stdout)
    assert (cut["text"], cut["finish_reason"]) == (whole[: whole.index(stop)], "stop")


@pytest.mark.parametrize("kind", [("--json",), ()])
def test_a_prompt_that_is_too_long_is_one_line_and_exit_code_2(
    invoke: Run, stack: Stack, kind: tuple[str, ...]
) -> None:
    done = invoke("generate", "--connect", stack.address, *kind, input="long " * 2000)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dovetail: the prompt has ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("hello", "--stop", ""), "--stop '' would end every reply"),
        (
            ("hello", "--stop", "x" * (STOP_CHARACTERS + 1)),
            "has 1025 characters: at most 1024 are possible",
        ),
        (("hello", *("--stop", "x") * 17), "--stop is given 17 times: at most 16 are possible"),
        (("hello", "--stop", "\udcff"), "is not valid UTF-8 text"),
        (("hel\udcfflo",), "the prompt is not valid UTF-8 text"),
        (("x" * (MAX_TEXT + 1),), f"the prompt has {MAX_TEXT + 1} characters"),
    ],
)
def test_a_request_that_is_not_possible_is_refused_before_a_coordinator_is_looked_for(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert cli.run(["generate", *arguments, "--connect", "ipc:///no/such/socket"]) == 2
    complaint = capsys.readouterr().err
    assert words in complaint
    assert complaint.count("\n") == 1


def test_the_longest_stop_is_the_one_that_the_protocol_takes() -> None:
    def submit(length: int) -> Submit:
        return Submit(
            epoch=0,
            request=1,
            text="x",
            sampling=Sampling(),
            max_tokens=1,
            stop=("x" * length,),
            tree=TreeSettings(),
        )

    assert submit(STOP_CHARACTERS).stop
    with pytest.raises(ValidationError):
        submit(STOP_CHARACTERS + 1)


def a_result(**figures: Any) -> Result:
    """A second's request of one round; `figures` instead of these."""
    result = Result(
        text="",
        token_ids=(),
        prompt_tokens=1,
        completion_tokens=1,
        finish_reason="length",
        seed=7,
        fingerprint="",
        rounds=1,
        tau=None,
        accepted_tokens=0,
        drafted_tokens=0,
        grown_nodes=0,
        acceptance_rate=None,
        accepted_per_position=(),
        hit_rate=None,
        wall_s=1.0,
        time_to_first_token_s=0.1,
        tokens_per_s=1.0,
        prefill_s=0.06,
        draft_exposed_s=0.2,
        verify_s=0.7,
        transport_s=0.0,
        queue_s=0.0,
        coordinator_s=0.0,
        unaccounted_s=0.04,
        bytes_per_round=0.0,
    )
    return result.model_copy(update=figures)


def test_the_summary_tells_of_the_prefill_where_it_is_more_than_a_twentieth() -> None:
    assert "· prefill 6 % draft 20 % verify 70 % ·" in summary(a_result(), "")
    assert "· draft 20 % verify 70 % ·" in summary(a_result(prefill_s=0.05), "")


def test_the_summary_has_the_seconds_to_the_first_token_which_its_rate_leaves_out() -> None:
    told = summary(a_result(completion_tokens=6, wall_s=2.0, time_to_first_token_s=1.0), "")
    assert told.startswith("6 tokens in 2.00 s, the first after 1.00 s · ")


def test_the_models_of_a_reply_without_speculation_are_the_target_alone() -> None:
    report = representative()["reported"]
    serving = [
        worker.model_copy(update={"standby": False, "leaving": False, "roles": ("target", "draft")})
        for worker in report.workers
    ]
    connection = Connection(cast(Any, None), report.model_copy(update={"workers": tuple(serving)}))
    assert "· draft " in connection.models()
    assert "draft" not in connection.models(draft=False)


def test_the_summary_tells_of_waiting_where_it_is_more_than_a_twentieth() -> None:
    assert "· prefill 6 % draft 20 % verify 70 % waiting 9 % ·" in summary(
        a_result(queue_s=0.09), ""
    )
    assert "waiting" not in summary(a_result(queue_s=0.05), "")


def test_the_summary_tells_of_moves_and_which_targets_wrote_a_reply_where_they_differ() -> None:
    assert "move" not in summary(a_result(), "")
    assert "· 2 moves to another target ·" in summary(a_result(moves=2), "")
    assert other_targets(a_result(fingerprints=("one", "two"))).endswith(
        "none of them alone would produce it: one, then two"
    )


def test_a_placement_is_told_wherever_the_worker_was_started() -> None:
    report = representative()["reported"]
    serving = [
        worker.model_copy(update={"standby": False, "leaving": False}) for worker in report.workers
    ]
    told = Connection(
        cast(Any, None), report.model_copy(update={"workers": tuple(serving)})
    ).models()  # nothing is asked of the client
    assert (
        "target demo/target (fp32, cache half, cpu 0-4, cuda:0 5-7 (1 resident, 2 streamed) and "
        "head)" in told
    )


def test_the_summary_sets_what_was_foretold_beside_what_was_measured_and_tells_of_hits_where_drafting_went_on() -> (  # noqa: E501
    None
):
    assert "· 1.0 tokens/s ·" in summary(a_result(hit_rate=0.5), "")
    assert "hit" not in summary(a_result(hit_rate=0.5), "")
    told = summary(a_result(hit_rate=0.5, ahead_nodes=9, predicted_tokens_per_s=1.25), "")
    assert "· 1.0 tokens/s (1.2 predicted) ·" in told
    assert "· hit 50 % ·" in told


def test_rounds_without_speculation_are_told_with_the_last_reason_that_is_a_session_s() -> None:
    some, every = a_result(rounds=40, plain_rounds=12), a_result(rounds=5, plain_rounds=5)
    decisions = (
        "session 1: drafting stopped",
        "session 2: drafting stopped",
        "a and b: drafting ahead is on",
    )
    told = without_speculation(some, decisions, insists=False, last=3)
    assert told == "without speculation in 12 of 40 rounds: session 2: drafting stopped"
    assert (
        without_speculation(every, (), insists=False, last=1)
        == f"without speculation in every round: 5 in which {NOTHING_PAID}"
    )
    measured = a_result(rounds=14, plain_rounds=2, control_rounds=2)
    told = without_speculation(measured, (), insists=False, last=2)
    assert told == "without speculation in 2 of 14 rounds: 2 to measure the target alone"
    assert without_speculation(measured, decisions, insists=False, last=2).endswith(
        "the target alone; session 2: drafting stopped"
    )
    told = without_speculation(some, (), insists=False, last=3, missing="its draft worker was lost")
    assert told == "without speculation in 12 of 40 rounds: its draft worker was lost"


@pytest.mark.parametrize(
    ("plain", "finish", "last", "insists", "reason"),
    [
        (1, "length", 1, True, "the last, which had room for a single token"),
        (1, "stop", 1, True, "1 in which the draft offered nothing"),
        (1, "length", 2, True, "1 in which the draft offered nothing"),
        (
            4,
            "length",
            1,
            False,
            f"the last, which had room for a single token; 3 in which {NOTHING_PAID}",
        ),
    ],
)
def test_rounds_without_speculation_that_nobody_decided_are_told_with_what_was_asked_for_as_the_reason(  # noqa: E501
    plain: int, finish: str, last: int, insists: bool, reason: str
) -> None:
    result = a_result(rounds=13, plain_rounds=plain, finish_reason=finish)
    assert (
        without_speculation(result, (), insists=insists, last=last)
        == f"without speculation in {plain} of 13 rounds: {reason}"
    )


def test_the_rounds_of_a_request_are_recorded_as_they_were(
    invoke: Run, stack: Stack, tmp_path: Path
) -> None:
    options = (
        "--connect",
        stack.address,
        *shlex.split("--max-tokens 24 --json --record"),
        str(tmp_path / "rounds.jsonl"),
    )
    result = json.loads(invoke("generate", STORY, *options, "--draft.ahead", "false").stdout)
    (reply,) = read_records(tmp_path / "rounds.jsonl")
    assert [one.round for one in reply.rounds] == [*range(1, result["rounds"] + 1)]
    assert sum(one.verified + 1 for one in reply.rounds) == result["verified_rows"]
    assert sum(one.ahead for one in reply.rounds) == result["ahead_nodes"] == 0
    followed = [
        token
        for one in reply.rounds
        for token in (*(one.tokens[node] for node in one.accepted), one.bonus)
    ]
    assert followed[: result["completion_tokens"] - 1] == result["token_ids"][1:]


def test_records_of_a_file_of_prompts_are_kept_reply_by_reply_and_never_where_the_answers_are(
    invoke: Run, stack: Stack, tmp_path: Path
) -> None:
    prompts = write_prompts(
        tmp_path / "prompts.jsonl",
        ("a", ["Hello."]),
        ("b", ["What is two plus two?", "And three?"]),
    )
    options = (
        "--connect",
        stack.address,
        *shlex.split("--max-tokens 8 --parallel 2 --prompts"),
        prompts,
        "--out",
        str(tmp_path / "answers"),
    )
    refused = invoke("generate", *options, "--record", str(tmp_path / "answers"))
    assert (refused.returncode, "choose a file for each" in refused.stderr) == (2, True)
    assert invoke("generate", *options, "--record", str(tmp_path / "rounds")).returncode == 0
    rounds = {
        (reply.id, reply.turn): len(reply.rounds) for reply in read_records(tmp_path / "rounds")
    }
    assert rounds == {
        (id, turn): result["rounds"]
        for id, results in answers(tmp_path / "answers").items()
        for turn, result in enumerate(results)
    }


def test_a_trace_shows_the_spans_of_the_workers(invoke: Run, stack: Stack, tmp_path: Path) -> None:
    assert (
        invoke(
            "generate",
            STORY,
            "--connect",
            stack.address,
            *shlex.split("--max-tokens 8 --policy dynamic --tree.insist true --trace"),
            str(tmp_path / "trace.json"),
        ).returncode
        == 0
    )
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert all(
        any(name.startswith(f"{process} (aligned within ") for name in names)
        for process in ("target", "draft")
    )


def test_interrupting_a_request_cancels_it(start: Start, invoke: Run, stack: Stack) -> None:
    cancelled = json.loads(invoke("status", "--connect", stack.address, "--json").stdout)[
        "cancelled"
    ]
    for seed in range(
        1,
        6,
        # every token is about equally likely; a reply that ends by itself before the signal proves
        # nothing: ask again
    ):
        process = start(
            "generate",
            STORY,
            "--connect",
            stack.address,
            *shlex.split("--max-tokens 450 --temperature 50 --seed"),
            str(seed),
        )
        assert process.stdout is not None
        assert process.stdout.read(1) != ""
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate()
        if process.returncode == 130:
            break
    assert process.returncode == 130
    assert re.fullmatch(rf"interrupted: \d+ tokens? in .* · seed {seed} · .*\n+", complaints)
    state = json.loads(invoke("status", "--connect", stack.address, "--json").stdout)
    assert (state["cancelled"], state["sessions"]) == (cancelled + 1, 0)


# -- files of prompts ------------------------------------------------------------------------------


def test_a_reply_that_waits_for_a_target_says_so_and_goes_on_with_the_next(start: Start) -> None:
    with backend(draft=False) as house:
        house.token_s = 0.05
        process = begun_at(start, house)
        assert process.stderr is not None
        house.lose(house.workers[0])
        told = iter(process.stderr.readline, "")
        line = next(line for line in told if line.startswith("waiting: "))
        assert "waits for a target, for " in line
        house.add(ScriptedTarget, "target")
        assert process.wait(PATIENCE_S) == 0
        rest = "".join(told)
        assert re.search(r"waiting \d+ %", rest)
        assert rest.endswith("without speculation in every round: there is no draft worker\n")


def test_an_interrupted_result_tells_its_seed_as_a_whole_one_does(start: Start) -> None:
    with backend(draft=False) as house:
        house.token_s = 0.05
        process = start("generate", "--connect", house.address, "--json", "w5 w6")
        house.until(lambda: house.sessions == 1)
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    result = json.loads(said)
    assert result["finish_reason"] == "cancelled"
    assert f" · seed {result['seed']} · " in complained


def test_a_reply_whose_coordinator_goes_ends_its_line_and_says_what_to_do(start: Start) -> None:
    with backend(draft=False) as house:
        house.token_s = 0.05
        process = begun_at(start, house)
        house.die()
        said, complained = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert said.endswith("\n")
    assert (
        "disconnected, and the reply is incomplete: start a coordinator (`dovetail serve`)"
        in complained
    )
    assert re.match(r"the reply stops here; seed \d+\n", complained)


def test_the_tokens_that_end_a_reply_are_listed() -> None:
    with backend() as house, Client(open_link(house.address, role="client")) as client:
        assert ends_of(client.status()) == "replies end at <end>"
    with backend(target=False) as house, Client(open_link(house.address, role="client")) as client:
        assert ends_of(client.status()) == ""


def test_a_reply_that_fills_the_context_says_so(invoke: Run) -> None:
    with backend(target=False, draft=False) as house:
        house.add(ScriptedTarget, "target", limits=Limits(context=24))
        done = invoke(
            "generate", "--connect", house.address, "--max-tokens=40", "--min-tokens=40", "w5 w6"
        )
    assert done.returncode == 0, done.stderr
    assert (
        "the reply ended because the target's context is full, before --max-tokens 40"
        in done.stderr
    )


def begun_at(start: Start, house: Backend) -> "subprocess.Popen[str]":
    """A reply of forty tokens of which the first have come."""
    process = start(
        "generate", "--connect", house.address, "--max-tokens=40", "--min-tokens=40", "w5 w6"
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    return process


def test_a_file_of_prompts_is_answered_turn_by_turn_and_continued_where_it_stopped(
    invoke: Run, stack: Stack, tmp_path: Path
) -> None:
    prompts = write_prompts(
        tmp_path / "prompts.jsonl",
        ("one", ["Hello."]),
        ("two", ["Hello.", "And then?"]),
        ("three", [STORY]),
    )
    out = tmp_path / "out.jsonl"
    command = (
        "generate",
        "--prompts",
        prompts,
        "--out",
        str(out),
        "--connect",
        stack.address,
        *shlex.split("--max-tokens 8 --seed 3 --parallel 2"),
    )
    done = invoke(*command)
    first = answers(out)
    tokens = sum(result["completion_tokens"] for results in first.values() for result in results)
    assert (
        done.returncode,
        done.stderr.startswith(f"3 prompts answered: {tokens} tokens in "),
    ) == (0, True)
    assert {id: len(results) for id, results in first.items()} == {"one": 1, "two": 2, "three": 1}
    assert all(list(result) == RESULT_FIELDS for results in first.values() for result in results)
    assert first["two"][0]["token_ids"] == first["one"][0]["token_ids"]
    assert first["two"][1]["prompt_tokens"] > first["two"][0]["prompt_tokens"]

    lines = out.read_text().splitlines(keepends=True)
    out.write_text(lines[0] + lines[1] + lines[2][:40])
    done = invoke(*command)
    assert done.stderr.startswith("2 of 3 prompts are already done")
    again = answers(out)
    assert {id: [r["token_ids"] for r in results] for id, results in again.items()} == {
        id: [r["token_ids"] for r in results] for id, results in first.items()
    }


def test_a_prompt_that_cannot_be_answered_does_not_stop_the_others(
    invoke: Run, stack: Stack, tmp_path: Path
) -> None:
    prompts = write_prompts(
        tmp_path / "prompts.jsonl", ("long", ["long " * 2000]), ("short", ["Hello."])
    )
    done = invoke(
        "generate",
        "--prompts",
        prompts,
        "--out",
        str(tmp_path / "out.jsonl"),
        "--connect",
        stack.address,
        "--max-tokens",
        "4",
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith("long: the prompt has ")
    assert set(answers(tmp_path / "out.jsonl")) == {"short"}


def test_a_torn_last_line_is_dropped_and_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"id": "a", "results": []}\n{"id": "b", "resu')
    with open_answers(path) as opened:
        assert opened.done == {"a"}
    assert path.read_text() == '{"id": "a", "results": []}\n'
    path.write_text("my diary\n")
    with pytest.raises(UserError, match="line 1 is not from an earlier run"), open_answers(path):
        pass


def begun(line: bytes) -> list[bytes]:
    """Everything that can be left of a line."""
    return [line[:end] for end in range(1, len(line))]


def test_a_line_torn_at_any_byte_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_answers(path) as opened:
        opened.write('a "quoted\\" \x01 id ü', [])
        opened.write("b", [])
    first, second = path.read_bytes().splitlines(keepends=True)
    for whole, torn in ((b"", first), (first, second)):
        for part in begun(torn):
            path.write_bytes(whole + part)
            with open_answers(path) as opened:
                assert len(opened.done) == bool(whole)
            assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "content",
    [
        '{"my only copy": 1}',
        "my diary",
        '{"id": "1", "turns": ["my only copy"]}',
        '{"id": "1", "turns": ["my only copy"]}\n',
        '{"id": "a", "results": []}\n{"id": 1, "results": []}\n',
        '{"id": "a", "results": []}\n{"my only copy": 1}',
        "[" * 100_000 + "\n",
    ],
)
def test_a_file_that_holds_anything_else_is_refused_and_stays_as_it_is(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / "notes"
    path.write_text(content)
    with pytest.raises(UserError, match="is not from an earlier run"), open_answers(path):
        pass
    assert path.read_text() == content


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null", "/dev/zero", "/"])
def test_answers_go_to_a_regular_file_only(path: str) -> None:
    with pytest.raises(UserError, match="is not a regular file"), open_answers(Path(path)):
        pass


def test_the_answers_do_not_go_to_the_file_of_the_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", ("a", ["x"]))
    (tmp_path / "link").symlink_to(prompts)
    before = Path(prompts).read_bytes()
    assert cli.run(["generate", "--prompts", prompts, "--out", str(tmp_path / "link")]) == 2
    assert "is the file of --prompts" in capsys.readouterr().err
    assert Path(prompts).read_bytes() == before


def test_two_runs_do_not_write_to_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_answers(path), pytest.raises(UserError, match="another run"), open_answers(path):
        pass


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "{",
            r'line 2 is not JSON \(.*\): write a line such as \{"id": "a", "turns": \["Why is '
            r'the sky blue\?"\]\}',
        ),
        ("[]", "line 2 is not a prompt"),
        ('{"turns": ["x"]}', "line 2 is not a prompt"),
        ('{"id": "", "turns": ["x"]}', "line 2 is not a prompt"),
        ('{"id": "b", "turns": []}', "line 2: the"),
        ('{"id": "b", "turns": [1]}', "line 2: the"),
        ('{"id": "b", "turns": ["\\ud800"]}', "line 2.*surrogates"),
        ('{"id": "\\ud800", "turns": ["x"]}', "line 2.*surrogates"),
        ("[" * 100_000, "line 2 is nested too deep"),
        ('{"id": "a", "turns": ["x"]}', "two prompts of id 'a'"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "turns": ["x"]}\n' + line + "\n")
    with pytest.raises(UserError, match=words):
        read_prompts(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            '{"id": "a", "turns": ["caf\u00e9"]}'.encode("latin-1"),
            r"byte 26 \(line 1\) is 0xe9; save it as UTF-8",
        ),
        ('{"id": "a", "turns": ["x"]}\n'.encode("utf-16"), "is UTF-16 text"),
        (b"\x1f\x8b\x08\x00\x00", r"byte 3 \(line 1\) is zero"),
        (b"hello\n", r"line 1 is not JSON \(Expecting value, column 1\): write a line such as"),
    ],
)
def test_a_file_that_is_no_text_of_prompts_is_named_with_the_place(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path} .*{words}"):
        read_prompts(path)


def test_prompts_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('\ufeff{"id": "a", "turns": ["x"]}\n'.encode())
    assert read_prompts(path) == [Prompt("a", ("x",))]


def test_a_folder_in_place_of_prompts_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=f"the prompts in {tmp_path} cannot be read: Is a directory; that is a folder",
    ):
        read_prompts(tmp_path)


def test_prompts_keep_their_order_and_blank_lines_are_nothing(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '\n{"id": "b", "turns": ["x", "y"], "more": 1}\n\n{"id": "a", "turns": ["z"]}\n'
    )
    assert read_prompts(path) == [Prompt("b", ("x", "y")), Prompt("a", ("z",))]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_only_a_newline_ends_a_line_of_prompts(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "a", "turns": [f"x{separator}y"]}, ensure_ascii=False) + "\n")
    assert read_prompts(path) == [Prompt("a", (f"x{separator}y",))]


def test_the_loss_of_a_draft_is_an_error_where_runs_are_compared(stack: Stack) -> None:
    """The request itself survives it. The draft that is lost here has not registered yet; the
    request has the one that has."""
    with Supervisor() as supervisor, stack.connect() as client:
        lost = supervisor.start(
            "draft worker", ["worker", "--role=draft", f"--connect={stack.address}"]
        )
        lost.process.kill()
        lost.process.wait()
        connection = Connection(
            client, client.status(), replace(stack, workers=(stack.workers[0], lost))
        )
        with pytest.raises(DovetailError, match="the draft worker was killed by SIGKILL"):
            connection.decode([STORY], sampling=Sampling(), tree=TreeSettings(), max_tokens=4)


# -- processes of its own --------------------------------------------------------------------------


@pytest.mark.parametrize(("running", "lines"), [(True, 2), (False, 1)])
def test_what_keeps_a_command_from_the_coordinator_that_runs_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    running: bool,
    lines: int,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", environment["XDG_RUNTIME_DIR"])
    with announced("ipc:///x") if running else nullcontext():
        assert cli.run(["generate", "hello", "--target", "/no/such/model", "--draft", "none"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == lines
    assert (
        told[0].startswith("starting separate processes: --target.model changes no running worker")
        is running
    )


def test_without_a_coordinator_generate_starts_its_own_and_leaves_nothing_behind_and_tells_of_a_target_that_is_not_lossless(  # noqa: E501
    start: Start, tmp_path: Path
) -> None:
    process = start(
        "generate",
        STORY,
        *shlex.split("--max-tokens 8 --draft none --weights int8-per-tensor --json"),
    )
    output, notes = process.communicate()
    assert process.returncode == 0, notes
    assert sum("int8-per-tensor is not lossless" in line for line in notes.splitlines()) == 1
    assert list(json.loads(output)) == RESULT_FIELDS
    assert [*(tmp_path / "tmp").glob("dovetail*")] == []
    assert left_of((tmp_path / "tmp").readlink()) == []


def test_interrupting_the_start_leaves_nothing_behind(start: Start, tmp_path: Path) -> None:
    process = start("generate", STORY, "--draft.device", "cpu")
    watched = psutil.Process(process.pid)
    while not watched.children():
        os.sched_yield()
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert [*(tmp_path / "tmp").glob("dovetail*")] == []
    assert left_of((tmp_path / "tmp").readlink()) == []
