"""A small model with another vocabulary than its target's: how it reads a log, what it proposes,
and which ones are refused."""

import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.messages import Close, Draft, Drafted, Open
from dovetail.protocol.settings import DraftSettings, Sampling, TargetSettings, TreeSettings
from dovetail.protocol.tree import ROOT
from dovetail.protocol.vocabulary import TokenTable
from dovetail.workers.draft import DraftWorker
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.drafters.translation import (
    WINDOW,
    Retokenised,
    Translation,
    Vocabulary,
)
from dovetail.workers.serving.open_target import open_target_worker
from support.cases import everyday
from support.models import reference_logits, tiny_llama
from support.pairs import KEY, PairOfWorkers, Run
from support.stacks import PROMPTS
from support.vocabularies import (
    SPECIAL,
    fewer_merges,
    pieces_with_spaces,
    read_from_scratch,
    target_of,
    tokens_of,
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
SHORT: dict[str, Callable[[Path], Path]] = {
    "bytes": lambda folder: fewer_merges(folder, 0.0),
    "characters": lambda folder: pieces_with_spaces(folder, bytes_too=False),
}
"""Drafts whose tokens are bytes, or never parts of characters."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vocabularies")
    return {name: write(folder / name) for name, write in {**KINDS, **SHORT}.items()}


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


def draft_worker(folder: Path, target: Path = TARGET) -> DraftWorker[Any]:
    settings = DraftSettings(model=str(folder), kind="small", weights="fp32", device="cpu")
    worker = open_draft_worker(settings, name="draft", threads=1, target=str(target))
    worker.hello(1)
    return worker


class Pairs(dict[str, PairOfWorkers]):
    """The embedded target with each draft, opened when it is first wanted."""

    def __init__(self, folders: dict[str, Path]) -> None:
        settings = TargetSettings(model=str(TARGET))
        self._target, self._folders = open_target_worker(settings, name="t", threads=1), folders

    def __missing__(self, kind: str) -> PairOfWorkers:
        self[kind] = PairOfWorkers(self._target, draft_worker(self._folders[kind]))
        return self[kind]


@pytest.fixture(scope="module")
def pairs(folders: dict[str, Path]) -> Pairs:
    return Pairs(folders)


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


NOTHING = Drafted(epoch=1, session=0, round=0, tokens=(), parents=(), scores=(), hit=False, grown=0)


def check(run: Run, pair: PairOfWorkers) -> None:
    """The reply is that of the target without proposals."""
    alone = pair.open(
        run.number + 500, run.log[: run.prompt], tokens=60, sampling=run.sampling, tree=TREE
    )
    while len(alone.reply) < len(run.reply):
        alone.round += 1
        pair._verify(alone, NOTHING)
    assert run.reply == alone.reply
    pair.close(alone, keep=False)


@pytest.mark.parametrize("kind", KINDS)
def test_proposals_are_those_computed_from_the_log_alone(
    folders: dict[str, Path], pairs: Pairs, kind: str
) -> None:
    pair = pairs[kind]
    run = pair.open(1, prompt_of(0), tokens=60, sampling=Sampling(), tree=TREE)
    decode(pair, run, 30, Watched(pair, folders[kind]))
    check(run, pair)
    assert run.tau > 2.0
    pair.close(run, keep=False)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("rejects", [False, True])
@pytest.mark.parametrize("kind", everyday([*KINDS], "spaces"))
def test_a_sampled_reply_is_the_targets(
    pairs: Pairs, kind: str, rejects: bool, ahead: bool
) -> None:
    sampling = Sampling(temperature=1.0, acceptance="rejection" if rejects else "coupled")
    pair = pairs[kind]
    runs = [
        pair.open(number, prompt_of(number), tokens=60, sampling=sampling, tree=TREE, ahead=ahead)
        for number in (1, 2)
    ]
    for _ in range(6):
        pair.round_together(runs)
    for run in runs:
        if not rejects:
            check(run, pair)
        assert run.tau > 1.2
        pair.close(run, keep=False)


@pytest.mark.parametrize("kind", everyday([*KINDS], "prepended"))
def test_the_next_turn_goes_on_from_the_kept_rows(
    folders: dict[str, Path], pairs: Pairs, kind: str
) -> None:
    pair, number = pairs[kind], 10
    watched = Watched(pair, folders[kind])
    for kept in (3, 34):
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
            kept=kept,
        )
        decode(pair, second, 8, watched)
        check(second, pair)
        pair.close(second, keep=False)
        number += 2


@pytest.mark.parametrize("kind", everyday(["spaces", "fewer", "bytes"], "spaces"))
def test_a_proposal_may_begin_within_a_character(
    folders: dict[str, Path], pairs: Pairs, kind: str
) -> None:
    tokenizer, pair = Tokenizer.from_file(str(TARGET / "tokenizer.json")), pairs[kind]
    whole = tokenizer.encode("He wrote 東京都").ids
    for number, cut in enumerate((1, 2, 4), 30):
        prompt = whole[:-cut]
        run = pair.open(number, prompt, tokens=40, sampling=Sampling(), tree=TREE)
        decode(pair, run, 4, Watched(pair, folders[kind]))
        check(run, pair)
        pair.close(run, keep=False)


def test_a_draft_without_tokens_for_bytes_waits_for_the_end_of_a_character(
    folders: dict[str, Path],
) -> None:
    worker, prompt = draft_worker(folders["characters"]), prompt_of(0)
    list(worker.handle(opened_with(prompt)))
    *parts, last = Tokenizer.from_file(str(TARGET / "tokenizer.json")).encode("東").ids
    assert len(parts) > 1
    for number, token in enumerate((*parts, last)):
        [drafted] = worker.handle(order_of(number + 1, len(prompt) + number + 1, token))
        assert isinstance(drafted, Drafted)
        assert bool(drafted.tokens) == (token == last)


def test_a_log_that_takes_many_tokens_of_the_draft_gets_room(
    folders: dict[str, Path], pairs: Pairs
) -> None:
    """The draft reads bytes, so a reply has more of its tokens than of the target's."""
    pair, folder = pairs["bytes"], folders["bytes"]
    prompt = prompt_of(0)[-9:]
    run = pair.open(50, prompt, tokens=60, sampling=Sampling(), tree=TREE)
    decode(pair, run, 12)
    decode(pair, run, 32, Watched(pair, folder))
    check(run, pair)
    begun, now = (read_from_scratch(log, TARGET, folder, SPECIAL) for log in (prompt, run.log))
    assert len(now) - len(begun) > len(prompt) + 60
    pair.close(run, keep=False)


def test_nothing_is_drafted_for_a_log_beyond_the_drafts_context(
    pairs: Pairs, capfd: pytest.CaptureFixture[str]
) -> None:
    pair, prompt = pairs["bytes"], prompt_of(0) * 20
    run = pair.open(60, prompt[:400], tokens=40, sampling=Sampling(), tree=TREE)
    decode(pair, run, 4)
    assert not any(proposal.tokens for proposal in run.proposals)
    assert "exceeds the draft's context" in capfd.readouterr().err
    pair.close(run, keep=False)


def test_a_new_draft_reads_the_log_of_one_that_is_lost(
    folders: dict[str, Path], pairs: Pairs
) -> None:
    folder = folders["fewer"]
    pair = PairOfWorkers(pairs["fewer"].target, pairs["fewer"].draft)
    run = pair.open(70, prompt_of(5), tokens=60, sampling=Sampling(), tree=TREE)
    decode(pair, run, 12)
    pair.draft = draft_worker(folder)
    list(pair.draft.handle(opened_with(run.log[:-1], session=70, round=run.round)))
    run.accepted, count = (), len(run.proposals)
    decode(pair, run, 24, Watched(pair, folder))
    check(run, pair)
    assert any(proposal.tokens for proposal in run.proposals[count:])
    list(pair.target.handle(Close(epoch=1, session=70)))


def opened_with(prompt: Sequence[int], session: int = 5, round: int = 0) -> Open:
    return Open(
        epoch=1,
        session=session,
        round=round,
        key=KEY,
        prompt=tuple(prompt),
        capacity=len(prompt) + 60,
        vocabulary_size=4096,
        sampling=Sampling(),
        tree=TREE,
    )


def order_of(round: int, prefix: int, bonus: int) -> Draft:
    sizes = {"max_nodes": TREE.most_nodes, "max_depth": TREE.most_levels, "max_width": TREE.width}
    numbers = {"epoch": 1, "session": 5, "round": round, "prefix": prefix}
    return Draft(**numbers, **sizes, accepted=(), bonus=bonus)


def test_a_draft_registers_with_what_it_can_propose_and_the_targets_vocabulary(
    folders: dict[str, Path],
) -> None:
    folder = folders["fewer"]
    hello = draft_worker(folder).hello(1)
    count = len(target_of(TARGET, folder, SPECIAL))
    assert re.fullmatch(
        rf"{folder} \(proposes {count} of the target's 4096 tokens, \d+% of its own probability\)",
        hello.model,
    )
    table = TokenTable.read((TARGET / "tokenizer.json").read_bytes())
    assert hello.vocabulary is not None
    assert hello.table is not None
    assert (hello.vocabulary.digest, hello.table.data) == (table.digest, table.packed)


def test_without_the_targets_folder_the_draft_registers_with_its_own_vocabulary(
    folders: dict[str, Path],
) -> None:
    """The coordinator then compares the two, and names the remedy."""
    settings = DraftSettings(model=str(folders["fewer"]), kind="small", device="cpu")
    hello = open_draft_worker(settings, name="draft", threads=1, target="some/target").hello(1)
    assert hello.table is not None
    own = TokenTable.unpacked(hello.table.data)
    assert own.digest == TokenTable.read((folders["fewer"] / "tokenizer.json").read_bytes()).digest
    why_not = TokenTable.read((TARGET / "tokenizer.json").read_bytes()).against(own, "D", "T")
    assert why_not.startswith("the draft D does not share the vocabulary of the target T: id 0 is ")
    assert why_not.endswith("set target.model to the target's folder where the draft runs")


def test_a_draft_that_shares_too_few_tokens_is_refused_with_their_share(tmp_path: Path) -> None:
    target, other = tiny_llama(tmp_path / "target"), tiny_llama(tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_bytes())
    words = content["model"]["vocab"]
    for kept, why in (
        (2, "shares with the target .* only 4 of the target's 48 tokens, [0-9]+% of its own prob"),
        (0, "has no token in common with the target "),
    ):
        renamed = {t if i < 2 + kept else f"other {t}": i for t, i in words.items()}
        (other / "tokenizer.json").write_text(
            json.dumps({**content, "model": {**content["model"], "vocab": renamed}})
        )
        with pytest.raises(CheckpointError, match=why) as refused:
            draft_worker(other, target)
        assert str(refused.value).endswith("; choose another draft")


def test_a_draft_whose_tokens_have_no_bytes_of_their_own_is_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(folders["fewer"], tmp_path / "ctc")
    content = json.loads((tmp_path / "ctc" / "tokenizer.json").read_bytes())
    decoder = {"type": "CTC", "pad_token": "p", "word_delimiter_token": "|", "cleanup": True}
    (tmp_path / "ctc" / "tokenizer.json").write_text(json.dumps({**content, "decoder": decoder}))
    with pytest.raises(CheckpointError, match="ctc: its decoder CTC is not supported"):
        draft_worker(tmp_path / "ctc")


def test_special_tokens_are_mapped_by_their_roles(folders: dict[str, Path]) -> None:
    special = tokens_of(folders["fewer"])[2]
    named = tokens_of(TARGET)[2]
    roles = translation(TARGET, folders["fewer"]).roles
    assert roles == {named[one]: special[other] for one, other in SPECIAL.items()}
