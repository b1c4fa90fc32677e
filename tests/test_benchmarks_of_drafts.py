"""The parts of tests/benchmarks that look at drafts: two workers in one process, acceptance, the
cost of a level, and a table like the papers'."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import papers
from benchmarks.agreement import Text, agreements, greedy
from benchmarks.coupling import GREEDY, PLAIN, SAMPLED, list_keys
from benchmarks.duet import Duet, Reply, open_draft, open_target
from benchmarks.levels import Subject
from benchmarks.measure import Estimate, ratio_of_sums
from benchmarks.papers import HEADS, SMALL, passes_of, rows_of
from dovetail.launch.settings.embedded import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.workers import kernels
from support.heads import write_head
from support.models import reference_tokens, tiny_llama

BENCHMARKS = Path(__file__).parent / "benchmarks"
PROMPT = (3, 17, 9, 30, 8, 22, 41, 5)
KEY = bytes(range(16))
TREE = TreeSettings(policy="dynamic", insist=True, gamma=6, depth=4, width=3)
TOKENS = 20
Play = Callable[..., Reply]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("draft"), seed=1, layers=1)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), "jakiro")


def play(
    target: Path,
    draft: Path,
    sampling: Sampling,
    tree: TreeSettings = TREE,
    drafting: Sampling | None = None,
) -> Reply:
    duet = Duet(open_target(str(target)), open_draft(str(draft), str(target)))
    return duet.decode(
        PROMPT, key=KEY, sampling=sampling, tree=tree, max_tokens=TOKENS, drafting=drafting
    )


# -- two workers in one process --------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["T=0", "T=1"])
@pytest.mark.parametrize("drafting", [None, GREEDY], ids=["coupled", "matched"])
def test_whatever_the_draft_is_told_the_reply_is_the_target_s(
    target: Path, draft: Path, head: Path, sampling: Sampling, drafting: Sampling | None
) -> None:
    expected = reference_tokens(target, PROMPT, TOKENS, key=KEY, sampling=sampling)
    for folder in (draft, head):
        reply = play(target, folder, sampling, drafting=drafting)
        assert reply.tokens == expected[: len(reply.tokens)]
        assert reply.rounds <= reply.decoded


def test_a_target_as_its_own_draft_is_accepted_to_the_bottom_with_its_noise_and_less_without(
    target: Path,
) -> None:
    chain = TreeSettings(policy="dynamic", insist=True, gamma=4, depth=4, width=1)
    coupled, matched = (
        play(target, target, SAMPLED, chain),
        play(target, target, SAMPLED, chain, drafting=GREEDY),
    )
    assert coupled.rounds == -(-coupled.decoded // (chain.depth + 1))
    assert matched.rounds > coupled.rounds


def test_without_a_tree_every_round_brings_one_token(target: Path, draft: Path) -> None:
    reply = play(target, draft, GREEDY, PLAIN)
    assert (reply.rounds, reply.reached) == (reply.decoded, [])


# -- acceptance of a node --------------------------------------------------------------------------


def test_a_choice_among_the_children_is_a_hit() -> None:
    choices = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 1.0]])
    guesses = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
    assert [greedy(choices, guesses, children).tolist() for children in (1, 2, 3)] == [
        [0, 0],
        [1, 0],
        [1, 1],
    ]


def test_a_model_agrees_with_itself_at_every_temperature(
    target: Path, draft: Path, head: Path
) -> None:
    reply = tuple(reference_tokens(target, PROMPT, TOKENS, key=KEY, sampling=SAMPLED))
    texts = [Text(PROMPT, reply, key) for key in list_keys("a", 2)]
    (same,), entropy = agreements(str(target), str(target), texts, [1])
    assert (same.greedy, same.coupled, same.ratio.median) == (1.0, 1.0, 1.0)
    assert same.matched < same.rejected == pytest.approx(1.0)
    assert entropy > 0
    for folder in (draft, head):
        found, _ = agreements(str(target), str(folder), texts, [1, 8, 48])
        assert found[0].coupled <= found[1].coupled <= found[2].coupled == 1.0


# -- figures ---------------------------------------------------------------------------------------


def test_a_ratio_of_rates_is_over_all_prompts_and_lies_in_its_interval() -> None:
    left, right = (
        [(40.0, 10.0), (20.0, 10.0), (30.0, 10.0)],
        [(20.0, 10.0), (20.0, 10.0), (5.0, 10.0)],
    )
    found = ratio_of_sums(left, right)
    assert found.median == pytest.approx(2.0)
    assert found.low <= 2.0 <= found.high
    assert ratio_of_sums(left, left) == Estimate(1.0, 1.0, 1.0)


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")
def test_a_level_takes_longer_than_its_matrices_alone(
    target: Path, draft: Path, head: Path
) -> None:
    for folder in (draft, head):
        subject = Subject(str(folder), str(target), "auto")
        measured = subject.measure(PROMPT, KEY, GREEDY, TREE, TOKENS)
        assert 0 < measured.matrices_s < measured.passes_s < measured.whole_s
        assert len(measured.roots_s) == measured.rounds
        assert max(measured.rows) <= TREE.width


# -- the table -------------------------------------------------------------------------------------

SETTINGS = {
    "target": "",
    "inflate": "",
    "small": str(DEMO_FOLDER / "draft"),
    "max_tokens": 16,
    "tree": (6, 4, 3),
}


def test_a_head_that_is_missing_is_told_with_the_command_that_makes_it(tmp_path: Path) -> None:
    write_head(tmp_path / "dovetail-2", "dovetail")
    rows, missing = rows_of(papers.configuration(**SETTINGS), tmp_path, str(SETTINGS["small"]), ())
    assert [method.name for method, _ in rows] == [SMALL, "w/ DGF + 1"]
    assert len(missing) == len(HEADS) - 1
    assert (
        "dovetail train jakiro --experts 2 --no-contrast --features FOLDER --out "
        f"{tmp_path / 'jakiro-2-plain'}" in "\n".join(missing)
    )
    with pytest.raises(UserError, match="no row begins with"):
        rows_of(papers.configuration(**SETTINGS), tmp_path, str(SETTINGS["small"]), ("nothing",))


def test_rows_differ_in_what_they_say_and_share_the_tree(tmp_path: Path) -> None:
    write_head(tmp_path / "jakiro-2", "jakiro")
    rows, _ = rows_of(
        papers.configuration(**SETTINGS), tmp_path, str(SETTINGS["small"]), ("Jakiro",)
    )
    contrast = {method.name: method.configuration.settings.draft.contrast for method, _ in rows}
    assert contrast == {"Jakiro": "auto", "Jakiro w/o parallel last step": False}
    assert {method.configuration.settings.tree.gamma for method, _ in rows} == {6}


def test_the_last_level_of_a_full_tree_is_no_pass_where_it_is_foretold() -> None:
    spans = [
        ("prefill", 9),
        ("root", 1),
        ("level", 2),
        ("level", 3),
        ("draft", 7),
        ("root", 4),
        ("draft", 5),
    ]
    assert list(passes_of(spans, 0)) == [[1, 2, 3], [4]]
    assert list(passes_of(spans, 3)) == [[1, 2], [4]]
