"""A small model with another vocabulary than its target's: how it reads a log, what it proposes,
and which ones are refused."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.settings import DraftSettings, Sampling, TargetSettings, TreeSettings
from dovetail.protocol.tree import ROOT
from dovetail.workers.draft import DraftWorker
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.drafters.translation import (
    WINDOW,
    Retokenised,
    Translation,
    Vocabulary,
    open_translation,
)
from dovetail.workers.serving.open_target import open_target_worker
from support.cases import everyday
from support.models import reference_logits, reference_tokens
from support.pairs import KEY, PairOfWorkers, Run
from support.stacks import PROMPTS
from support.vocabularies import (
    SPECIAL,
    fewer_merges,
    pieces_with_spaces,
    read_from_scratch,
    target_of,
)

TARGET = DEMO_FOLDER / "target"
TREE = TreeSettings(policy="static", insist=True, gamma=10, depth=4, width=3, sharpening=1.0)
TEXTS = (
    "The mill stands where the river leaves the wood.\n\n    return width * height  # 12.50\n",
    "Zażółć gęślą jaźń — naïve café, 東京都, 👩‍🚀 and \U0001f468\U0001f3ff\u200d\U0001f9b2!",
    " \t \n\n  spaces   everywhere \n",
    "a" * 600 + " " + "ab" * 20,
    "東京都は日本の首都です。" * 46,
)
KINDS: dict[str, Callable[[Path], Path]] = {
    "fewer": fewer_merges,
    "spaces": pieces_with_spaces,
    "prepended": lambda folder: pieces_with_spaces(folder, prepended=True),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vocabularies")
    return {name: write(folder / name) for name, write in KINDS.items()}


def translation(target: Path, draft: Path) -> Translation:
    return Translation(Vocabulary(draft), Vocabulary(target))


def log_of(folder: Path, seed: int) -> list[int]:
    """Texts in the tokens of a model, with special tokens and random ones in between."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size, generator = tokenizer.get_vocab_size(), random.Random(seed)
    log = list[int]()
    for text in generator.sample(TEXTS, len(TEXTS)):
        log += tokenizer.encode(text).ids
        log += [generator.randrange(size) for _ in range(generator.randrange(40))]
        log += [generator.randrange(256) for _ in range(generator.randrange(4))]
    return log


@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in range(9))])
@pytest.mark.parametrize("kind", KINDS)
def test_a_log_is_read_as_from_scratch_after_each_commit(
    folders: dict[str, Path], kind: str, seed: int
) -> None:
    generator = random.Random(seed)
    for target, draft, roles in (
        (TARGET, folders[kind], SPECIAL),
        (folders[kind], TARGET, {other: one for one, other in SPECIAL.items()}),
    ):
        log, own = log_of(target, seed), translation(target, draft)
        read = Retokenised(own, log[:7])
        place = 7
        while place < len(log):
            step, before = generator.choice((1, 2, 3, 30, 90)), [*read.tokens]
            same = read.extend(log[place : place + step])
            place += step
            assert read.tokens == read_from_scratch(log[:place], target, draft, roles)
            assert before[:same] == read.tokens[:same]
            assert same == len(before) or before[same : same + 1] != read.tokens[same : same + 1]


@pytest.mark.parametrize("kind", KINDS)
def test_letters_change_the_tokens_before_them(folders: dict[str, Path], kind: str) -> None:
    read, log, changed = Retokenised(translation(TARGET, folders[kind]), []), list[int](), 0
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    for token in [token for letter in "unbelievable 👩" for token in tokenizer.encode(letter).ids]:
        before, same = len(read.tokens), read.extend([token])
        log.append(token)
        assert read.tokens == read_from_scratch(log, TARGET, folders[kind], SPECIAL)
        changed += same < before
    assert changed > 4


def test_a_long_text_is_not_tokenised_again_for_each_commit(folders: dict[str, Path]) -> None:
    own = translation(TARGET, folders["spaces"])
    lengths, encode = list[int](), own.encode
    own.encode = lambda text: lengths.append(len(text)) or encode(text)  # type: ignore
    log = Tokenizer.from_file(str(TARGET / "tokenizer.json")).encode(TEXTS[0] * 400).ids
    read = Retokenised(own, log[:-200])
    del lengths[:]
    for token in log[-200:]:
        read.extend([token])
    assert max(lengths) <= 3 * WINDOW
    assert read.tokens == read_from_scratch(log, TARGET, folders["spaces"], SPECIAL)


def pair_with(draft: Path, **changes: Any) -> PairOfWorkers:
    """The embedded target, and a draft that it takes through sessions."""
    return PairOfWorkers(
        open_target_worker(TargetSettings(model=str(TARGET)), name="target", threads=1),
        open_draft_worker(
            DraftSettings(model=str(draft), weights="fp32", device="cpu", **changes),
            name="draft",
            threads=1,
            target=str(TARGET),
        ),
    )


@pytest.fixture(scope="module")
def pairs(folders: dict[str, Path]) -> dict[str, PairOfWorkers]:
    return {kind: pair_with(folders[kind]) for kind in KINDS}


def prompt_of(number: int) -> list[int]:
    text = f"<|begin|><|user|>\n{PROMPTS[number][0]}<|end|>\n<|assistant|>\n"
    return Tokenizer.from_file(str(TARGET / "tokenizer.json")).encode(text).ids


class Watched:
    """Compares a draft's session and proposals with those computed from the log alone."""

    def __init__(self, pair: PairOfWorkers, draft: Path) -> None:
        self._pair, self._folder = pair, draft
        tokens = sorted(target_of(TARGET, draft, SPECIAL).items())
        self._own = torch.tensor([own for own, _ in tokens])
        self._targets = [token for _, token in tokens]
        self._of_target = {token: own for own, token in tokens}

    def laws(self, ids: Sequence[int]) -> dict[int, float]:
        """The log-probabilities of the target's tokens after the draft's `ids`."""
        law = reference_logits(self._folder, ids)[-1][self._own].double().log_softmax(-1)
        return dict(zip(self._targets, law.tolist(), strict=True))

    def round(self, run: Run) -> None:
        log = [*run.log]
        self._pair.round(run)
        ids = read_from_scratch(log, TARGET, self._folder, SPECIAL)
        worker: Any = self._pair.draft
        assert isinstance(worker, DraftWorker)
        assert worker.session(run.number).ids == ids
        drafted = run.proposals[-1]
        paths: dict[int, list[int]] = {ROOT: ids}
        below: dict[int, float] = {ROOT: 0.0}
        laws: dict[int, dict[int, float]] = {}
        for node, (token, parent) in enumerate(zip(drafted.tokens, drafted.parents, strict=True)):
            if parent not in laws:
                laws[parent] = self.laws(paths[parent])
            below[node] = below[parent] + laws[parent][token]
            paths[node] = [*paths[parent], self._of_target[token]]
            assert drafted.scores[node] == pytest.approx(below[node], abs=2e-3)
        if drafted.tokens:
            best = max(laws[ROOT].values())
            assert laws[ROOT][drafted.tokens[0]] == pytest.approx(best, abs=1e-3)


def decode(pair: PairOfWorkers, run: Run, tokens: int, watched: Watched | None = None) -> None:
    while len(run.reply) < tokens:
        (watched or pair).round(run)


def check(run: Run, pair: PairOfWorkers) -> None:
    alone = reference_tokens(
        TARGET, run.log[: run.prompt], len(run.reply), key=KEY, sampling=run.sampling
    )
    assert run.reply == alone


@pytest.mark.parametrize("kind", KINDS)
def test_proposals_are_those_computed_from_the_log_alone(
    folders: dict[str, Path], pairs: dict[str, PairOfWorkers], kind: str
) -> None:
    pair = pairs[kind]
    run = pair.open(1, prompt_of(0), tokens=60, sampling=Sampling(), tree=TREE)
    decode(pair, run, 40, Watched(pair, folders[kind]))
    check(run, pair)
    assert run.tau > 2.0
    pair.close(run, keep=False)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("rejects", [False, True])
@pytest.mark.parametrize("kind", everyday([*KINDS], "spaces"))
def test_a_sampled_reply_is_the_targets(
    pairs: dict[str, PairOfWorkers], kind: str, rejects: bool, ahead: bool
) -> None:
    sampling = Sampling(temperature=1.0, verification="rejection" if rejects else "coupled")
    pair = pairs[kind]
    runs = [
        pair.open(number, prompt_of(number), tokens=60, sampling=sampling, tree=TREE, ahead=ahead)
        for number in (1, 2)
    ]
    for _ in range(10):
        pair.round_together(runs)
    for run in runs:
        if not rejects:
            check(run, pair)
        assert run.tau > 1.2
        pair.close(run, keep=False)


@pytest.mark.parametrize("kind", everyday([*KINDS], "prepended"))
def test_the_next_turn_goes_on_from_the_kept_rows(
    folders: dict[str, Path], pairs: dict[str, PairOfWorkers], kind: str
) -> None:
    pair, number = pairs[kind], 10
    watched = Watched(pair, folders[kind])
    for kept in (3, 20, 41):
        first = pair.open(number, prompt_of(3), tokens=60, sampling=Sampling(), tree=TREE)
        decode(pair, first, 12)
        pair.close(first, keep=True)
        again = [*first.log[:kept], *prompt_of(4)]
        second = pair.open(
            number + 1,
            again,
            tokens=40,
            sampling=Sampling(),
            tree=TREE,
            base=number,
            kept=min(kept, len(first.log) - 1),
        )
        decode(pair, second, 8, watched)
        check(second, pair)
        pair.close(second, keep=False)
        number += 2
