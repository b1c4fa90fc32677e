"""The journal that `bench --out` keeps: a run goes on where it stopped, and no other run does."""

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.launch.bench.contenders import Contender, Ours, Theirs
from dovetail.launch.bench.journal import Journal, heading_of, open_journal
from dovetail.launch.bench.methods import Method, PromptSet, read_method
from dovetail.launch.bench.table import CSV_COLUMNS, csv_text
from dovetail.launch.bench.turns import Cell, measure
from dovetail.launch.files.prompts import Prompt
from dovetail.launch.settings.configure import configure
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Finished, Result
from support.patience import PATIENCE_S

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
