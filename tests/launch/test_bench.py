"""`dovetail bench`: methods side by side."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.launch.bench.contenders import (
    Contender,
    Ours,
    Run,
    Task,
    Theirs,
    check_methods,
    founder,
)
from dovetail.launch.bench.figures import (
    CSV_COLUMNS,
    against_peers,
    best_of_peers,
    csv_text,
    interval,
    medians,
    row,
    show_notes,
    speedup,
)
from dovetail.launch.bench.methods import Method, PromptSet, read_method, read_methods
from dovetail.launch.bench.turns import (
    Cell,
    Journal,
    heading_of,
    loop_begins,
    measure,
    open_journal,
)
from dovetail.launch.files.prompts import Prompt
from dovetail.launch.machine.cores import CoreLayout
from dovetail.launch.machine.topology import Place
from dovetail.launch.settings.configure import Configuration, configure
from dovetail.protocol.errors import SettingsError, UserError
from dovetail.protocol.messages import Finished, Result
from support.patience import PATIENCE_S

METHODS = ("none", "small,tree.gamma=4", "assisted")

ROW_FIELDS = [
    "method",
    "prompts",
    "temperature",
    "tokens_per_s",
    "speedup",
    "speedup_low",
    "speedup_high",
    "tau",
    "tau_macro",
    "calls",
    "verified_tokens",
    "peak_rss_mb",
    "peak_vram_mb",
    "draft_share",
    "verify_share",
    "weights",
    "draft_failures",
    "draft_failure",
    "policy",
    "gamma",
    "depth",
    "width",
    "ahead",
    "hit_rate",
    "grown_nodes",
    "ahead_nodes",
    "wasted_nodes",
    "plain_share",
    "predicted_tokens_per_s",
]


def base() -> Configuration:
    return configure(environment={})


def cell(seconds: list[float], tokens: list[int], *others: dict[str, Any]) -> Cell:
    """A cell of one run a prompt, of which the first token took a second and the others these;
    `others`: more figures of each."""
    made = Cell(Method("none", base()), PromptSet("set", ()), 0.0)
    nothing = dict.fromkeys(
        (name for name, told in Result.model_fields.items() if told.is_required()), 0
    )
    for number, (duration, count, more) in enumerate(
        zip(seconds, tokens, others or [{}] * len(tokens), strict=True)
    ):
        figures = {
            "wall_s": 1 + duration,
            "time_to_first_token_s": 1.0,
            "completion_tokens": count + 1,
            **more,
        }
        fixed = {
            "text": "",
            "token_ids": (),
            "finish_reason": "length",
            "fingerprint": "",
            "accepted_per_position": (),
            "fingerprints": (),
        }
        finished = Finished(
            epoch=0,
            request=1,
            result=Result.model_validate({**nothing, **fixed, **figures}),
            margins=(),
        )
        made.runs.append(Run(Task(Prompt(str(number), ("",)), "", 1, finished), finished))
    return made


def report_of(folder: Path, methods: Sequence[str]) -> Mapping[str, Any]:
    """Return what a run of some methods prints with --json, and writes to --out."""
    long = "word " * 2000
    (folder / "few.jsonl").write_text(
        "".join(
            json.dumps({"id": id, "turns": [text]}) + "\n"
            for id, text in (("a", "Hello."), ("b", long), ("c", "never"))
        )
    )
    options = (
        *shlex.split(
            "--limit 2 --max-tokens 12 --draft.device cpu --temperature 0 --temperature 1 --out"
        ),
        str(folder / "out.json"),
    )
    named = [word for method in methods for word in ("--method", method)]
    command = [
        sys.executable,
        *shlex.split("-P -m dovetail.launch.cli bench --prompts"),
        str(folder / "few.jsonl"),
        *named,
        *options,
        "--json",
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "out.json").read_text().splitlines()[-1] == done.stdout.strip()
    told: Mapping[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.slow
def test_a_run_has_a_row_of_the_promised_fields_for_every_method_set_and_temperature(
    tmp_path: Path,
) -> None:
    report = report_of(tmp_path, ["small,tree.gamma=4"])
    assert all(list(row) == ROW_FIELDS for row in report["rows"])
    assert [(row["method"], row["temperature"]) for row in report["rows"]] == [
        (m, t) for t in (0.0, 1.0) for m in METHODS[:2]
    ]
    assert {row["prompts"] for row in report["rows"]} == {"few"}
    alone, drafted = report["rows"][:2]
    assert [told["ratio"] for told in report["passes"] if told["method"] == "none"] == [1.0, 1.0]
    assert (alone["speedup"], alone["gamma"], alone["draft_share"], drafted["gamma"]) == (
        1.0,
        0,
        0.0,
        4,
    )
    assert drafted["peak_rss_mb"] > alone["peak_rss_mb"] > 100
    assert alone["verified_tokens"] == alone["calls"]
    assert [told["shortened"] for told in report["prompts"]] == [1, 1]
    assert all(difference["near_tie"] for difference in report["differences"])


def test_two_files_that_are_one_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("kept")
    command = [
        sys.executable,
        *shlex.split("-P -m dovetail.launch.cli bench"),
        f"--out={out}",
        f"--csv={tmp_path}/../{tmp_path.name}/out.json",
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n"), out.read_text()) == (2, 1, "kept")
    assert "choose different files" in done.stderr


@pytest.mark.slow
def test_transformers_assisted_generation_is_a_method_that_takes_its_turns(tmp_path: Path) -> None:
    report = report_of(tmp_path, METHODS[1:])
    assert [(row["method"], row["temperature"]) for row in report["rows"]] == [
        (m, t) for t in (0.0, 1.0) for m in METHODS
    ]
    assert report["rows"][2]["weights"] == "fp32"
    assert [
        difference for difference in report["differences"] if difference["method"] == "assisted"
    ] == []
    assert [
        sum(peer["best"] for peer in report["peers"] if peer["temperature"] == t)
        for t in (0.0, 1.0)
    ] == [1, 1]
    assert {(a["method"], a["peer"]) for a in report["against"]} == {
        (method, "assisted") for method in METHODS[:2]
    }


# -- methods ---------------------------------------------------------------------------------------


def test_a_method_is_a_kind_a_folder_or_a_file_with_settings_appended(tmp_path: Path) -> None:
    file = tmp_path / "tuned.toml"
    file.write_text("[tree]\ngamma = 3\ndepth = 2\n")
    assert read_method(base(), "none").configuration.settings.draft.kind == "none"
    assert read_method(base(), str(tmp_path)).configuration.settings.draft.model == str(tmp_path)
    looking_up = read_method(
        base().over("--draft", {"draft.model": "x"}), "ngram"
    ).configuration.settings.draft
    assert (looking_up.kind, looking_up.model) == ("ngram", "")
    head = read_method(
        base().over("--draft", {"draft.model": "x"}), "eagle3"
    ).configuration.settings.draft
    assert (head.kind, head.model) == ("eagle3", "")
    folder = read_method(
        base().over("--draft", {"draft.kind": "dovetail"}), str(tmp_path)
    ).configuration.settings.draft
    assert (folder.kind, folder.model) == ("auto", str(tmp_path))
    tree = read_method(base(), f"{file},tree.gamma=9").configuration.settings.tree
    assert (tree.gamma, tree.depth) == (9, 2)


@pytest.mark.parametrize("kind", ["auto", "ngram", "none"])
def test_without_methods_the_draft_of_the_settings_is_measured(kind: str) -> None:
    asked = base().over("--draft", {"draft.kind": kind})
    found = [method.configuration.settings.draft for method in read_methods(asked, ())]
    assert [draft.kind for draft in found] == [*dict.fromkeys(("none", kind))]
    assert found[-1] == asked.settings.draft


def test_a_policy_is_a_method_with_the_draft_of_the_settings() -> None:
    small = base().over("--draft", {"draft.kind": "small"})
    method = read_method(small, "budget,tree.gamma=20")
    assert (method.label, method.configuration.settings.draft) == (
        "budget,tree.gamma=20",
        small.settings.draft,
    )
    assert (
        method.configuration.settings.tree.policy,
        method.configuration.settings.tree.gamma,
    ) == ("budget", 20)
    with pytest.raises(UserError, match="leave out --draft none"):
        read_method(base().over("--draft", {"draft.kind": "none"}), "goodput")


def test_methods_that_share_processes_are_given_what_each_of_them_needs() -> None:
    texts = ("none", "small,draft.ahead=false", "small,draft.ahead=true,tree.gamma=3", "ngram")
    alone, waits, goes_on, other = (
        replace(read_method(base(), text), shares="one") for text in texts
    )
    assert (
        founder([alone, waits], alone).configuration.settings.draft
        == waits.configuration.settings.draft
    )
    assert founder([alone, waits, goes_on], waits).configuration.settings.draft.ahead == "auto"
    apart = replace(waits, shares="")
    assert founder([apart, goes_on], apart) is apart
    with pytest.raises(ValueError, match="their models differ"):
        founder([alone, waits, other], waits)


@pytest.mark.parametrize(
    "text", ["magic", "small,tree.gamma", "small,tree.gama=1", "small,tree.gamma=x", "no/such.toml"]
)
def test_what_is_no_method_is_refused(text: str) -> None:
    with pytest.raises((UserError, SettingsError)):
        read_method(base(), text)


# -- figures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/nowhere/at/all", "the draft model /nowhere/at/all is not there"),
        ("small,target.threads=5", r"target\.threads = 5 is more than the number of"),
        ("assisted,target.device=cuda:0", "assisted runs on the CPU"),
    ],
)
def test_every_method_is_looked_at_before_a_process_is_started(text: str, words: str) -> None:
    layout = CoreLayout(Place((0,)), Place((1,)), Place((1,)))
    with pytest.raises(UserError, match=words):
        check_methods([read_method(base(), "none"), read_method(base(), text)], layout)
    check_methods([read_method(base(), "none"), read_method(base(), "small")], layout)


def test_a_speedup_over_a_single_prompt_is_told_without_an_interval() -> None:
    def told(*seconds: float) -> str:
        names = ("speedup", "speedup_low", "speedup_high")
        tokens = [10] * len(seconds)
        found = speedup(cell([*seconds], tokens), cell([2.0] * len(seconds), tokens), seed=0)
        return interval({**dict(zip(names, found, strict=True)), "draft_failures": 0})

    assert told(1.0) == "2.00"
    assert told(1.0, 2.0) == "1.33 (1.00-2.00)"


def test_a_method_whose_draft_failed_has_no_speedup_and_its_row_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    failure = {"draft": "draft", "error": "IndexError: elsewhere", "round": 3, "after_s": 0.5}
    failed, alone = (
        cell([1.0, 1.0], [10, 10], {}, {"draft_failure": failure}),
        cell([2.0, 2.0], [10, 10]),
    )
    assert speedup(failed, alone, seed=0) == (None, None, None)
    found = row(failed, alone, Nobody(), seed=0)
    assert (found["speedup"], found["draft_failures"], found["draft_failure"]) == (None, 1, failure)
    assert interval(found) == "failed"
    show_notes(
        {
            "rows": [found],
            "prompts": [],
            "peers": [],
            "against": [],
            "medians": [],
            "differences": [],
        }
    )
    assert (
        "FAILED: the draft of none set T 0 in 1 reply, first in round 3: IndexError: elsewhere"
        in capfd.readouterr().err
    )


def test_a_loop_begins_where_twenty_tokens_come_again() -> None:
    start = list(range(100, 130))
    assert loop_begins([*start, *[1, 2, 3, 4, 5] * 20]) == 35
    assert loop_begins(start) == 30
    assert loop_begins([7] * 50) == 1
    assert loop_begins([]) == 0


def test_speedup_is_the_ratio_of_time_per_token_and_lies_in_its_interval() -> None:
    baseline, method = cell([2.0, 4.0, 3.0], [10, 20, 15]), cell([1.0, 1.0, 2.0], [10, 20, 15])
    ratio, low, high = speedup(method, baseline, seed=0)
    assert ratio == pytest.approx(9 / 4)
    assert low is not None
    assert high is not None
    assert 1.5 <= low <= 9 / 4 <= high <= 4.0
    assert speedup(method, baseline, seed=0) == (ratio, low, high)


def test_tokens_that_differ_in_number_are_compared_by_time_per_token() -> None:
    assert speedup(cell([1.0], [5]), cell([2.0], [10]), seed=0) == pytest.approx((1.0, 1.0, 1.0))


def test_of_a_peer_the_number_of_threads_that_is_the_fastest_is_reported_and_compared() -> None:
    alone, slow, fast = cell([4.0], [10]), cell([4.0], [10]), cell([2.0], [10])
    slow.method, fast.method = Method("peer", base(), threads=2), Method("peer", base(), threads=1)
    slow.prompts = fast.prompts = alone.prompts
    best = best_of_peers([alone, slow, fast])
    assert [c.method.label for c in best] == ["none", "peer with 1 thread"]
    against = against_peers(best, seed=0)
    assert [(a["method"], a["peer"], a["ratio"]) for a in against] == [
        ("none", "peer", pytest.approx(0.5))
    ]


def test_the_median_set_of_prompts_is_told_where_there_are_several() -> None:
    rows = [{"method": "m", "temperature": 0.0, "speedup": ratio} for ratio in (1.0, 2.5, 2.0)]
    assert medians(rows) == [{"method": "m", "temperature": 0.0, "sets": 3, "speedup": 2.0}]
    assert medians(rows[:1]) == []


def test_without_a_decoded_token_there_is_no_speedup() -> None:
    assert speedup(cell([0.0], [0]), cell([0.0], [0]), seed=0) == (None, None, None)


class Nobody:
    """A contender that decodes nothing any more, and was never large."""

    method = Method("none", base())

    def decode(self, task: Task, temperature: float, seed: int) -> Run:
        pytest.fail("nothing is to be decoded")

    def peak_rss_mb(self) -> float:
        return 1.0

    def identity(self) -> str:
        return "nobody"


def test_a_row_weighs_hits_by_rounds_that_drafted_and_predictions_by_tokens() -> None:
    drafted = {
        "rounds": 10,
        "plain_rounds": 2,
        "hit_rate": 0.75,
        "verified_rows": 90,
        "ahead_nodes": 7,
        "predicted_tokens_per_s": 10.0,
    }
    plain = {
        "rounds": 10,
        "plain_rounds": 10,
        "hit_rate": None,
        "verified_rows": 10,
        "predicted_tokens_per_s": 5.0,
    }
    unknown = {
        "rounds": 5,
        "hit_rate": 0.0,
        "verified_rows": 5,
        "wasted_nodes": 3,
        "predicted_tokens_per_s": None,
    }
    made = cell([1.0, 2.0, 1.0], [20, 10, 5], drafted, plain, unknown)
    told = row(made, made, Nobody(), seed=0)
    assert told["hit_rate"] == pytest.approx(0.75 * 8 / 13)
    assert told["plain_share"] == pytest.approx(12 / 25)
    assert (told["verified_tokens"], told["ahead_nodes"], told["wasted_nodes"]) == (105, 7, 3)
    assert told["predicted_tokens_per_s"] == pytest.approx(30 / (20 / 10 + 10 / 5))
    assert told["tokens_per_s"] == pytest.approx(35 / 4)


def test_where_nothing_was_drafted_or_foretold_a_row_says_nothing_of_it() -> None:
    made = cell(
        [1.0],
        [5],
        {"rounds": 5, "plain_rounds": 5, "hit_rate": None, "predicted_tokens_per_s": None},
    )
    told = row(made, made, Nobody(), seed=0)
    assert (told["hit_rate"], told["predicted_tokens_per_s"], told["plain_share"]) == (
        None,
        None,
        1.0,
    )


Start = Callable[..., "subprocess.Popen[str]"]
RunCommand = Callable[..., "subprocess.CompletedProcess[str]"]
SETS = [PromptSet("set", tuple(Prompt(id, (f"say {id}",)) for id in "abc"))]
NONE, SMALL = (read_method(configure(environment={}), name) for name in ("none", "small"))


@dataclass
class Scripted:
    """A connection that answers each prompt with the same tokens, takes a second, and is
    interrupted at its `interrupted`-th reply."""

    asked: list[str] = field(default_factory=list)
    interrupted: int = 1 << 30
    fingerprint: str = "target/fp32"
    state: Any = None

    def __post_init__(self) -> None:
        self.state = SimpleNamespace(
            workers=(SimpleNamespace(roles=("target",), fingerprint=self.fingerprint),)
        )

    def decode(self, turns: Sequence[str], *, max_tokens: int, **_: Any) -> Finished:
        if len(self.asked) + 1 == self.interrupted:
            raise KeyboardInterrupt
        self.asked.append(turns[0])
        nothing = dict.fromkeys(
            (name for name, told in Result.model_fields.items() if told.is_required()), 0
        )
        fixed = {
            "text": "",
            "token_ids": (5, 6, 7),
            "finish_reason": "stop",
            "fingerprint": "f",
            "accepted_per_position": (),
            "fingerprints": (),
        }
        figures = {"wall_s": 1.0, "time_to_first_token_s": 0.5, "completion_tokens": 3, "rounds": 2}
        return Finished(
            epoch=9,
            request=9,
            result=Result.model_validate({**nothing, **fixed, **figures}),
            margins=(1.0, 2.0, 3.5),
        )

    def peak_rss_mb(self) -> float:
        return 100.0 + len(self.asked)


def contenders(alone: Scripted, drafted: Scripted) -> dict[str, Contender]:
    return {"none": Ours(NONE, alone), "small": Ours(SMALL, drafted)}  # type: ignore[arg-type]


def heading(
    methods: Sequence[Method] = (NONE, SMALL),
    sets: Sequence[PromptSet] = SETS,
    *,
    repeat: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    return heading_of(methods, sets, [0.0], repeat, seed)


def run(path: Path, alone: Scripted, drafted: Scripted) -> list[Cell]:
    with open_journal(path, heading()) as journal:
        cells = list(measure(journal.agree(contenders(alone, drafted)), SETS, [0.0], 1, 0, journal))
        journal.end({"rows": [1]})
        return cells


def test_a_run_that_is_interrupted_keeps_what_it_has_and_goes_on_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, first = tmp_path / "out.json", Scripted(interrupted=2)
    with pytest.raises(KeyboardInterrupt):
        run(path, Scripted(), first)
    assert first.asked == ["say a"]
    assert (
        capsys.readouterr().err
        == f"2 measured replies saved in {path}: the same command continues from there\n"
    )
    alone, drafted = Scripted(), Scripted()
    cells = run(path, alone, drafted)
    assert capsys.readouterr().err == "2 replies from an earlier run: 6 to go\n"
    assert drafted.asked == ["say b", "say c"]
    assert alone.asked == ["say b", "say b", "say c", "say c"], "b to be warm, b; how far c goes, c"
    assert [[run.task.prompt.id for run in cell.runs] for cell in cells] == [
        ["a", "b", "c"],
        ["a", "b", "c"],
    ]
    assert all(
        run.finished.result.token_ids == (5, 6, 7) and run.decode_s == 0.5
        for cell in cells
        for run in cell.runs
    )
    assert [cell.runs[0].finished.margins for cell in cells] == [(1.0, 2.0, 3.5)] * 2


def test_a_run_that_is_whole_is_told_again_without_a_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    run(path, Scripted(), Scripted())
    assert capsys.readouterr().err == ""
    content = path.read_bytes()
    with open_journal(path, heading()) as journal:
        assert journal.whole
        found = journal.remembered([NONE, SMALL])
        cells = list(measure(found, SETS, [0.0], 1, 0, journal))
        journal.end({"rows": [2]})
    assert (
        capsys.readouterr().err
        == "all 6 replies are already in the file of --out: nothing was measured\n"
    )
    assert [len(cell.runs) for cell in cells] == [3, 3]
    assert [found[label].peak_rss_mb() for label in ("none", "small")] == [106.0, 103.0]
    assert path.read_bytes() == content


def test_a_torn_last_line_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with pytest.raises(KeyboardInterrupt):
        run(path, Scripted(), Scripted(interrupted=3))
    path.write_bytes(path.read_bytes()[:-5])
    alone, drafted = Scripted(), Scripted()
    run(path, alone, drafted)
    assert (alone.asked, drafted.asked) == (["say c", "say c"], ["say c"]), (
        "c to be warm, and c, whose line was torn"
    )
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (heading(repeat=2), "repeat was 1 and is 2"),
        (heading(seed=3), "seed was 0 and is 3"),
        (heading((NONE,)), "methods.small is not in this run"),
        (
            heading(
                (NONE, read_method(configure(environment={}).over("-", {"tree.gamma": 3}), "small"))
            ),
            "methods.small.tree.gamma was 15 and is 3",
        ),
        (heading(sets=[PromptSet("set", (Prompt("a", ("else",)),))]), "prompts.set was"),
        ({**heading(), "machine": {"processor": "another"}}, "machine.processor was"),
    ],
)
def test_a_file_of_another_run_is_refused_by_what_differs_and_stays(
    tmp_path: Path, other: Mapping[str, Any], words: str
) -> None:
    path = tmp_path / "out.json"
    run(path, Scripted(), Scripted())
    content = path.read_bytes()
    with pytest.raises(UserError, match=words), open_journal(path, other):
        pass
    assert path.read_bytes() == content


def test_a_file_of_other_models_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with pytest.raises(KeyboardInterrupt):
        run(path, Scripted(), Scripted(interrupted=1))
    with pytest.raises(
        UserError, match="the models or engines of none was 'target/fp32' and is 'target/int8'"
    ):
        run(path, Scripted(fingerprint="target/int8"), Scripted())


@pytest.mark.parametrize("content", [b"mine\n", b'{"rows": []}\n', b'{"bench": 1}\n[]\n'])
def test_a_file_that_is_something_else_is_refused_and_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="out"), open_journal(path, heading()):
        pass
    assert path.read_bytes() == content


def test_a_second_run_does_not_write_to_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with (
        open_journal(path, heading()),
        pytest.raises(UserError, match="another run is writing"),
        open_journal(path, heading()),
    ):
        pass


def test_a_peer_goes_on_with_the_numbers_of_threads_that_it_began_with() -> None:
    peer = SimpleNamespace(identity="engine 1")
    variant = Method("llama.cpp", NONE.configuration, threads=2)
    journal = Journal(
        known={
            "llama.cpp with 1 thread": {"name": "llama.cpp", "threads": 1, "identity": "engine 1"}
        }
    )
    agreed = journal.agree({variant.label: Theirs(variant, peer)})  # type: ignore[arg-type]
    assert [(label, contender.method.threads) for label, contender in agreed.items()] == [
        ("llama.cpp with 1 thread", 1)
    ]


def test_a_table_for_other_programs_has_a_line_a_row_and_nothing_for_what_is_not_known() -> None:
    row = dict.fromkeys(CSV_COLUMNS) | {
        "method": "small,tree.gamma=4",
        "prompts": "set",
        "temperature": 0.0,
        "tau": 2.5,
        "ahead": True,
    }
    differences = [{"method": "small,tree.gamma=4", "prompts": "set", "temperature": 0.0}]
    result = {
        "rows": [row],
        "passes": [{"verify_ms": 3.0, "ratio": 1.5, "draft_ms": None}],
        "end_to_end": [{"tokens_per_s": 7.0}],
        "replies": [6],
    }
    heading, line = csv_text({**result, "differences": differences}).splitlines()
    told = dict(
        zip(
            heading.split(","),
            line.replace('"small,tree.gamma=4"', "small").split(","),
            strict=True,
        )
    )
    assert list(told) == list(CSV_COLUMNS)
    assert {
        name: told[name]
        for name in (*shlex.split("method tau pass_ms draft_ms replies differ ahead hit_rate"),)
    } == {
        "method": "small",
        "tau": "2.5",
        "pass_ms": "3.0",
        "draft_ms": "",
        "replies": "6",
        "differ": "1",
        "ahead": "true",
        "hit_rate": "",
    }


@pytest.mark.slow
def test_ctrl_c_keeps_the_replies_and_the_same_command_goes_on(
    start: Start, run: RunCommand, tmp_path: Path
) -> None:
    out, prompts = tmp_path / "out.json", tmp_path / "few.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"id": str(number), "turns": [f"Tell me a story about {number} owls."]})
            + "\n"
            for number in range(40)
        )
    )
    options = (
        "bench",
        "--prompts",
        str(prompts),
        *shlex.split("--method ngram --max-tokens 24 --out"),
        str(out),
        "--csv",
        str(tmp_path / "t.csv"),
    )
    first = start(*options)
    while b'"reply"' not in (out.read_bytes() if out.exists() else b""):
        assert first.poll() is None
        os.sched_yield()
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 130
    assert f" saved in {out}: the same command continues from there" in said
    before = out.read_bytes()
    done = run(*options)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert out.read_bytes().startswith(before.rpartition(b"\n")[0])
    replies = [
        (line["reply"]["method"], line["reply"]["at"][2]) for line in lines if "reply" in line
    ]
    assert len(replies) == len(set(replies)) == 80
    assert [row["calls"] > 0 for row in lines[-1]["rows"]] == [True, True]
    assert len((tmp_path / "t.csv").read_text().splitlines()) == 3
