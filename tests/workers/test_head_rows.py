"""A reduced output head against the whole one: the same logits for its tokens, and no others."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from dovetail.launch.settings.models import TARGET_FOLDER, head_folder
from dovetail.protocol.errors import CheckpointError, SettingsError
from dovetail.protocol.settings import DraftSettings, Sampling, TargetSettings, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.heads.head import Head, Predicted, open_head
from dovetail.workers.heads.reduced import recent
from dovetail.workers.heads.reduced.rows import (
    AUTO_ROWS,
    COUNTS,
    FrequentRows,
    TokenCounts,
    most_frequent,
    reduced_rows,
)
from dovetail.workers.models.segment import Segment
from dovetail.workers.serving.open_target import open_target_worker
from dovetail.workers.sessions.wire import TYPES, to_array
from dovetail.workers.speculation.proposal import Shape
from support.cases import everyday
from support.heads import write_head
from support.models import VOCABULARY
from support.opening import opening
from support.pairs import PairOfWorkers, Run

ROWS = 12
TEXT, END = [3, 30, 4, 29, 3, 28], (1, 27)
KINDS = ("eagle", "dovetail-3", "jakiro", "jakiro-star")
TREE = TreeSettings(policy="dynamic", gamma=12, depth=4, width=4, insist=True)
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def opened(tmp_path: Path, llama_folder: Path) -> Callable[..., tuple[Head, FrequentRows]]:
    def open_it(kind: str, rows: int | str = "all", **more: str) -> tuple[Head, FrequentRows]:
        folder = tmp_path / kind
        if not folder.exists():
            write_head(folder, kind)
        output = FrequentRows(rows, str(llama_folder))  # type: ignore[arg-type]
        about = {"target": str(llama_folder), "weights": "fp32", "device": "cpu"} | more
        return open_head(str(folder), output=output, **about), output

    return open_it


def predicted(head: Head, *, own: bool) -> Predicted:
    """Two sessions in a pass, of which the second has tokens of its own."""
    generator = torch.Generator().manual_seed(5)
    counts = (4, 3)
    rows = head.recent_rows(TEXT, END) if own else None
    return head.forward(
        torch.randint(0, VOCABULARY, (7,), generator=generator),
        torch.randn(7, head.spec.feature_width, generator=generator),
        torch.tensor([0, 1, 2, 3, 0, 1, 2]),
        [Segment(head.new_cache(count), 0, count) for count in counts],
        true=True,
        contrast=True,
        recent=[(4, None), (3, rows)],
    )


@pytest.mark.parametrize("backend", ["auto", "library"])
@pytest.mark.parametrize("kind", everyday(KINDS, "eagle", "jakiro"))
def test_its_logits_are_those_of_the_whole_head_at_its_tokens(
    opened: Callable[..., tuple[Head, FrequentRows]], kind: str, backend: str
) -> None:
    whole = predicted(opened(kind, backend=backend)[0], own=False)
    head, _ = opened(kind, ROWS, backend=backend)
    found = predicted(head, own=True)
    frequent = set(range(ROWS))  # the order of the ids, since nothing was counted
    for session, (rows, known) in enumerate(
        ((slice(0, 4), frequent), (slice(4, 7), frequent | {*TEXT, *END}))
    ):
        for name in ("logits", "contrast"):
            got, expected = getattr(found, name), getattr(whole, name)
            if expected is None:
                assert got is None
                continue
            check_tokens(got[rows], expected[rows], sorted(known), mixed="star" in kind, at=session)


def check_tokens(found: Tensor, whole: Tensor, known: list[int], *, mixed: bool, at: int) -> None:
    """A mixture of two distributions is over the known tokens, so that it alone is normalized."""
    finite = torch.isfinite(found)
    assert finite.any(0).nonzero().flatten().tolist() == known, at
    assert finite[:, known].all()
    if not mixed:
        torch.testing.assert_close(found[:, known], whole[:, known], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_draft_proposes_its_tokens_and_those_of_the_text_alone(
    opened: Callable[..., tuple[Head, FrequentRows]], sampling: Sampling
) -> None:
    head, output = opened("eagle", ROWS)
    engine = HeadDrafter(head, Spans(), contrast=False)
    engine.counts = output.counts
    generator = torch.Generator().manual_seed(1)

    def features(count: int) -> Tensor:
        return torch.randn(count, engine.reads.row, generator=generator).to(
            TYPES[engine.reads.dtype]
        )

    session = engine.open(
        opening(
            *(1, TEXT),
            capacity=60,
            vocabulary_size=VOCABULARY,
            sampling=sampling,
            tree=TREE,
            end=END,
        )
    )
    engine.feed(session, 0, to_array(features(len(TEXT))))
    known, proposed = {*range(ROWS), *TEXT, *END}, set[int]()
    for place, bonus in enumerate((2, 31, 26, 25, 5, 24)):
        known.add(bonus)  # what is committed can be proposed again
        if place:
            engine.take_features(session, to_array(features(1)))
        proposal = engine.draft(session, (), bonus, Shape(12, 4, 4))
        assert len(proposal.tree.tokens) == 12
        assert known >= {*proposal.tree.tokens}
        proposed |= {*proposal.tree.tokens}
    assert proposed - {*range(ROWS)}
    assert output.counts is not None
    assert np.flatnonzero(output.counts.counts).tolist() == [2, 5, 24, 25, 26, 31]


def test_the_oldest_tokens_of_a_text_give_way_and_end_tokens_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recent, "MOST", 4)
    output, lacking = torch.randn(20, 8), torch.arange(20) >= 5
    rows = recent.RecentRows(output, lacking, [6, 7, 3, 8, 9, 8], [19])
    states = torch.randn(2, 8)

    def there() -> list[int]:
        torch.testing.assert_close(rows.product(states), states @ output[rows.ids].T)
        return sorted(rows.ids.tolist())

    assert there() == [7, 8, 9, 19]
    rows.add([7, 1])
    rows.add([10])
    assert there() == [7, 8, 10, 19]  # 9 was the oldest
    rows.add([11, 12, 13, 14, 15])
    assert there() == [13, 14, 15, 19]


def test_frequent_are_counted_tokens_then_known_ones_then_low_ids() -> None:
    counted, known = np.zeros(10, np.int64), np.zeros(10, np.int64)
    assert most_frequent(counted, known, 3).tolist() == [0, 1, 2]
    known[[4, 8]] = 100, 50
    assert most_frequent(counted, known, 3).tolist() == [0, 4, 8]
    counted[[7, 9]] = 10_000
    assert most_frequent(counted, known, 3).tolist() == [4, 7, 9]


def test_auto_reduces_a_large_output_head_on_a_cpu() -> None:
    small, large = (4096, 512), (1 << 18, 1280)  # tokens, and bytes of a row
    assert reduced_rows("auto", *large, on_cpu=True) == AUTO_ROWS
    assert reduced_rows("auto", *large, on_cpu=False) is None
    assert reduced_rows("auto", *small, on_cpu=True) is None
    assert reduced_rows("all", *large, on_cpu=True) is None
    assert reduced_rows(1024, *small, on_cpu=False) == 1024
    assert reduced_rows(1 << 20, *large, on_cpu=True) is None


def test_counts_of_replies_are_kept_for_the_next_start(tmp_path: Path) -> None:
    counts = TokenCounts(40, "digest")
    counts.add([7] * 255)
    assert not counts.save()
    counts.add([39, 39])
    assert counts.save()
    assert not counts.save()
    again = TokenCounts(40, "digest").counts
    assert (again[7], again[39], again.sum()) == (255, 2, 257)
    assert not TokenCounts(40, "another").counts.any()


def test_damaged_counts_of_replies_are_reported_and_counted_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counts = TokenCounts(40, "digest")
    counts.add([7] * 300)
    counts.save()
    (file,) = (tmp_path / "cache" / "dovetail" / "token_counts").iterdir()
    file.write_text("{")
    assert not TokenCounts(40, "digest").counts.any()
    assert "counting restarts at zero" in caplog.text


@pytest.mark.parametrize(
    "text", ['{"counts": [1, 2]}', '{"counts": "x"}', "{}", '{"counts": [-1]}']
)
def test_counts_of_another_vocabulary_are_refused_by_name(
    tmp_path: Path, opened: Callable[..., tuple[Head, FrequentRows]], text: str
) -> None:
    opened("eagle")
    (tmp_path / "eagle" / COUNTS).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{COUNTS} is not a list of \d+ counts of tokens"):
        opened("eagle", ROWS)


def test_counts_in_the_head_s_folder_choose_its_rows(
    tmp_path: Path, opened: Callable[..., tuple[Head, FrequentRows]]
) -> None:
    opened("eagle")
    counts = [0] * VOCABULARY
    counts[17] = counts[23] = 5
    (tmp_path / "eagle" / COUNTS).write_text(json.dumps({"counts": counts}))
    logits = predicted(opened("eagle", 4)[0], own=False).logits
    assert torch.isfinite(logits[0]).nonzero().flatten().tolist() == [0, 1, 17, 23]


def test_a_head_with_a_vocabulary_of_its_own_keeps_it(
    opened: Callable[..., tuple[Head, FrequentRows]],
) -> None:
    assert opened("eagle3", "auto")[0].reduced is None
    with pytest.raises(CheckpointError, match=r"20 tokens of its own: leave draft\.head_rows = 12"):
        opened("eagle3", 12)


def test_a_small_model_keeps_its_output_head(llama_folder: Path) -> None:
    settings = DraftSettings(model=str(llama_folder), device="cpu", head_rows=64)
    with pytest.raises(SettingsError, match="is a language model, not a draft head"):
        open_draft_worker(settings, name="draft", threads=1, target=str(llama_folder))


def test_fewer_rows_than_a_tree_needs_are_refused() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 64"):
        DraftSettings(head_rows=63)


# ---- the embedded pair ----


class Pair:
    """The embedded target with its Dovetail head."""

    def __init__(self) -> None:
        self._target = open_target_worker(
            TargetSettings(model=str(TARGET_FOLDER)), name="target", threads=1
        )

    def replies(
        self, prompts: list[list[int]], sampling: Sampling, rows: int | str, tokens: int
    ) -> Iterator[Run]:
        model = str(head_folder("dovetail"))
        settings = DraftSettings(model=model, device="cpu", head_rows=rows)
        draft = open_draft_worker(settings, name="draft", threads=1, target=str(TARGET_FOLDER))
        pair = PairOfWorkers(self._target, draft)
        for number, prompt in enumerate(prompts, 1):
            run = pair.open(number, prompt, tokens=tokens, sampling=sampling, tree=TREE)
            while len(run.reply) < tokens - TREE.depth - 1:
                pair.round(run)
            pair.close(run, keep=False)
            yield run


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_quarter_of_the_rows_costs_less_than_3_percent_of_the_tokens_a_round(
    pair: Pair, sampling: Sampling
) -> None:
    """On shipped prompts, with the counts of the target's training data."""
    lines = (TARGET_FOLDER.parent / "prompts.jsonl").read_text().splitlines()[::4]
    tokenizer = Tokenizer.from_file(str(TARGET_FOLDER / "tokenizer.json"))
    chat = "<|begin|><|user|>\n{}<|end|>\n<|assistant|>\n"
    prompts = [tokenizer.encode(chat.format(json.loads(line)["turns"][0])).ids for line in lines]
    tau = {}
    for rows in ("all", 1024):
        runs = [*pair.replies(prompts, sampling, rows, 80)]
        tau[rows] = sum(len(run.reply) - 1 for run in runs) / sum(run.round for run in runs)
    print(f"\ntau {tau['all']:.3f} with all rows, {tau[1024]:.3f} with 1,024")
    assert tau[1024] > 0.97 * tau["all"]


PROMPTS = [[1, 2 + n, 300 + 7 * n, 900 + n, 2000 + n, 3000 + 5 * n] for n in range(3)]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_reduced_head_changes_no_token(pair: Pair, sampling: Sampling) -> None:
    whole = [*pair.replies(PROMPTS, sampling, "all", 40)]
    reduced = [*pair.replies(PROMPTS, sampling, 256, 40)]
    for one, other in zip(whole, reduced, strict=True):
        count = min(len(one.log), len(other.log))
        assert one.log[:count] == other.log[:count]
        assert [*one.proposals] != [*other.proposals]
