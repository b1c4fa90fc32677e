"""Thresholds from prompts to settings: played over real processes, written, read, and refused where
they do not hold."""

import json
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.launch.commands.stratify import chart, rounds_of
from dovetail.launch.processes.stack import Stack
from dovetail.launch.settings.configure import configure
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.launch.settings.thresholds import draft_facts, read_thresholds, write_thresholds
from dovetail.protocol.errors import SettingsError
from dovetail.protocol.messages import Result, RoundRecord
from dovetail.protocol.settings import DraftSettings, TreeSettings
from dovetail.workers.training.stratify import Bin, Round, Strata

Run = Callable[..., subprocess.CompletedProcess[str]]
PROMPTS = [
    json.loads(line)
    for line in (DEMO_FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
]
SHIPPED = ("small", "dovetail", "eagle")


def write(path: Path, thresholds: object = (1.0, 2.5), **otherwise: object) -> Path:
    """A file for the embedded draft and its tree."""
    holds_for = {
        **draft_facts(DraftSettings()),
        "depth": 8,
        "width": 4,
        "sharpening": "auto",
        **otherwise,
    }
    write_thresholds(path, thresholds, {"holds_for": holds_for}, [{"rounds": 3, "mean_rank": 1.5}])  # type: ignore[arg-type]
    return path


def configured(**flags: str) -> tuple[float, ...] | str:
    found = configure(
        flags={
            "tree.policy": "heterospec",
            **{name.replace("__", "."): text for name, text in flags.items()},
        },
        environment={},
    )
    return found.settings.tree.thresholds


def test_a_file_becomes_numbers_and_its_name_goes_nowhere(tmp_path: Path) -> None:
    path = write(tmp_path / "t.toml")
    assert configured(tree__thresholds=str(path)) == (1.0, 2.5)
    plain = configure(flags={"tree.thresholds": str(path)}, environment={})
    assert plain.settings.tree.thresholds == ""
    assert plain.value("tree.thresholds") == str(path)
    assert plain.over("test", {"tree.policy": "heterospec"}).settings.tree.thresholds == (1.0, 2.5)
    assert configured(tree__thresholds=str(path), draft__kind="none") == ""


def test_numbers_are_what_they_are() -> None:
    assert configured(tree__thresholds="0.5,1.5", tree__depth="3") == (0.5, 1.5)


@pytest.mark.parametrize("kind", SHIPPED)
def test_an_embedded_draft_has_thresholds_that_hold_for_it_and_for_no_other(kind: str) -> None:
    path = DEMO_FOLDER / f"thresholds-{kind}.toml"
    assert configured(draft__kind=kind) == read_thresholds(path).thresholds
    other = SHIPPED[SHIPPED.index(kind) - 1]
    with pytest.raises(SettingsError, match="were made for another draft"):
        configured(draft__kind=other, tree__thresholds=str(path))


def test_a_configuration_with_another_draft_takes_the_thresholds_of_that_draft() -> None:
    small = configure(flags={"tree.policy": "heterospec"}, environment={})
    head = small.over("test", {"draft.kind": "dovetail"})
    assert (
        head.settings.tree.thresholds
        == read_thresholds(DEMO_FOLDER / "thresholds-dovetail.toml").thresholds
        != small.settings.tree.thresholds
    )


def test_a_draft_without_thresholds_is_refused_with_the_command_that_makes_them(
    tmp_path: Path,
) -> None:
    shutil.copytree(DEMO_FOLDER / "draft", tmp_path / "a draft")
    with pytest.raises(
        SettingsError,
        match=r"needs thresholds .*: run `dovetail stratify --draft '\S*/a draft' --tree.gamma "
        r"15 --tree.depth 8 .*--out",
    ):
        configured(draft__model=str(tmp_path / "a draft"))
    with pytest.raises(SettingsError, match=r"tree\.policy 'heterospec' needs thresholds"):
        configure(flags={"tree.policy": "heterospec"}, environment={}, demo=False)


def test_the_same_draft_elsewhere_is_the_same_draft(tmp_path: Path) -> None:
    shutil.copytree(DEMO_FOLDER / "draft", tmp_path / "copy")
    path = write(tmp_path / "t.toml")
    assert configured(draft__model=str(tmp_path / "copy"), tree__thresholds=str(path)) == (1.0, 2.5)
    (tmp_path / "copy" / "config.json").write_text("{}")
    with pytest.raises(SettingsError, match="were made for another draft"):
        configured(draft__model=str(tmp_path / "copy"), tree__thresholds=str(path))


@pytest.mark.parametrize(("key", "text"), [("depth", "6"), ("width", "5"), ("sharpening", "0.5")])
def test_another_tree_than_that_of_the_thresholds_is_refused(
    tmp_path: Path, key: str, text: str
) -> None:
    with pytest.raises(
        SettingsError,
        match=rf"made for tree.{key} = (8|4|auto), but it is {text}: run `dovetail stratify",
    ):
        configured(tree__thresholds=str(write(tmp_path / "t.toml")), **{f"tree__{key}": text})


def test_a_draft_that_somebody_else_started_is_not_held_against_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.toml", draft_sha256="another")
    flags = {"tree.policy": "heterospec", "tree.thresholds": str(path), "tree.width": "4"}
    assert configure(flags=flags, environment={}, demo=False).settings.tree.thresholds == (1.0, 2.5)
    with pytest.raises(SettingsError, match="another draft"):
        configure(flags=flags, environment={})


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read: No such file"),
        ("thresholds = [1.0", "are damaged"),
        ("thresholds = [2.0, 1.0]\n[holds_for]", "not a file of thresholds"),
        ("thresholds = []\n[holds_for]", "not a file of thresholds"),
        ("thresholds = [nan]\n[holds_for]", "not a file of thresholds"),
        ("thresholds = [true]\n[holds_for]", "not a file of thresholds"),
        pytest.param(
            f"thresholds = [1{'0' * 400}]\n[holds_for]", "not a file of thresholds", id="no float"
        ),
        ("thresholds = [1, 2, 3, 4, 5, 6, 7, 8]\n[holds_for]", "not a file of thresholds"),
        ("thresholds = [1.0]", "not a file of thresholds"),
        ("[tree]\ngamma = 4", "not a file of thresholds"),
    ],
)
def test_a_missing_or_damaged_file_is_one_clear_line(
    tmp_path: Path, content: str | None, complaint: str
) -> None:
    path = tmp_path / "t.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError, match=complaint) as raised:
        configured(tree__thresholds=str(path))
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def record(
    prefix: int, accepted: tuple[int, ...] = (0, 1), entropy: float | None = 1.5
) -> RoundRecord:
    return RoundRecord(
        round=1,
        prefix=prefix,
        tokens=(1, 2, 3),
        parents=(-1, 0, 1),
        scores=(0, 0, 0),
        verified=3,
        accepted=accepted,
        bonus=4,
        entropy=entropy,
    )


def result(tokens: list[int]) -> Result:
    numbers = {name: 0 for name, info in Result.model_fields.items() if info.is_required()}
    texts = {"text": "", "fingerprint": "", "finish_reason": "stop", "accepted_per_position": ()}
    return Result.model_validate(
        {**numbers, **texts, "prompt_tokens": 10, "token_ids": tuple(tokens)}
    )


def test_a_round_is_learned_from_if_it_had_a_tree_with_room_for_its_levels() -> None:
    tree = TreeSettings(policy="dynamic", gamma=9, depth=4)
    records = [
        record(11),
        record(13, ()),
        record(14, entropy=None),
        record(25, (0, 1, 3, 5)),
        record(26),
    ]
    assert rounds_of(records, result(list(range(20))), tree, 20) == [
        Round(1.5, 2, False),
        Round(1.5, 9, False),
        Round(1.5, 6, True),
    ]


def test_nothing_is_learned_from_a_reply_that_repeats_itself() -> None:
    tokens = [*range(30), *range(30)]
    assert (
        len(
            rounds_of(
                [record(12), record(40), record(41)],
                result(tokens),
                TreeSettings(policy="dynamic", gamma=9, depth=4),
                100,
            )
        )
        == 2
    )


def test_the_plot_has_the_rounds_and_the_bins() -> None:
    rounds = [Round(n / 10, 1 + (n >= 60) * 4, n < 80) for n in range(100)]
    picture = chart(rounds, Strata((5.95,), (Bin(60, 1.0, 1.0, 1.0), Bin(40, 10.0, 5.0, 0.5))), 15)
    assert picture.count('class="curve"') == 4
    assert "Accepted to the deepest level" in picture


def stratified(run: Run, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(
        "stratify",
        "--out",
        str(folder / "t.toml"),
        *shlex.split("--sampling.max_tokens 96 --draft.device cpu"),
        *arguments,
    )


@pytest.mark.slow
def test_prompts_become_thresholds_and_a_second_run_goes_on_with_the_rounds_of_the_first(
    run: Run, tmp_path: Path
) -> None:
    """The tree is small, for many rounds, and the sharpening is given: what is fitted online begins
    anew with every process."""
    prompts, rounds = tmp_path / "prompts.jsonl", tmp_path / "rounds.jsonl"
    small = (
        *shlex.split("--tree.gamma 4 --tree.depth 3 --tree.sharpening 1.0 --prompts"),
        str(prompts),
        "--rounds",
        str(rounds),
        "--json",
    )
    prompts.write_text(
        "".join(json.dumps(prompt) + "\n" for prompt in PROMPTS[:5]), encoding="utf-8"
    )
    first = stratified(run, tmp_path, *small, "--plot", str(tmp_path / "t.svg"))
    assert first.returncode == 0, first.stderr
    told = json.loads(first.stdout)
    assert tuple(told["thresholds"]) == read_thresholds(tmp_path / "t.toml").thresholds
    assert sum(found["rounds"] for found in told["bins"]) == told["fitted_on"]["rounds"]
    means = [found["fitted_rank"] for found in told["bins"]]
    assert means == sorted(means)
    assert tomllib.loads((tmp_path / "t.toml").read_text())["holds_for"] == told["holds_for"]
    assert configured(
        tree__thresholds=str(tmp_path / "t.toml"), tree__depth="3", tree__sharpening="1.0"
    ) == tuple(told["thresholds"])
    assert (tmp_path / "t.svg").read_text().startswith("<svg")
    content = rounds.read_bytes()
    rounds.write_bytes(content[:-20])  # interrupted
    again = stratified(run, tmp_path, *small)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == told
    assert rounds.read_bytes() == content
    other = stratified(run, tmp_path, *small, "--tree.depth", "5")
    assert (other.returncode, other.stderr.count("\n")) == (2, 1)
    assert "were played with depth = 3, not 5: choose another --rounds" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--draft", "none"), "draft.kind = 'none' has no entropy"),
        (("--tree.width", "1"), "has no entropy"),
        (("--plot", "t.png"), "does not end in .svg"),
        (("--rounds", str(DEMO_FOLDER / "prompts.jsonl")), "is not from an earlier run"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_decoded(
    invoke: Run, tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    done = stratified(invoke, tmp_path, "--prompts", str(DEMO_FOLDER / "prompts.jsonl"), *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert complaint in done.stderr


def test_in_a_low_bin_more_levels_are_accepted_than_the_depth_and_in_one_bin_alone_they_are_not(
    stack: Stack,
) -> None:
    with stack.connect() as client:
        for thresholds, longer in (((50.0,), True), ((), False)):
            tree = TreeSettings.model_validate(
                {
                    "policy": "heterospec",
                    "insist": True,
                    "gamma": 15,
                    "depth": 8,
                    "width": 4,
                    "thresholds": thresholds,
                }
            )
            results = [
                client.complete(
                    client.submit(turns=prompt["turns"], max_tokens=64, seed=3, tree=tree)
                ).result
                for prompt in PROMPTS[:3]
            ]
            assert (
                any(len(result.accepted_per_position) > tree.depth for result in results) is longer
            )
