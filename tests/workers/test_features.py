"""Features: the target's states as transformers computes them, the same stored and computed on the
fly, and a store that survives being killed."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.protocol.errors import UserError
from dovetail.workers.training.data import store
from dovetail.workers.training.data.corpus import open_reader, read_examples
from dovetail.workers.training.data.examples import Example, Examples, arrange, read_token_file
from dovetail.workers.training.data.features import Features, online_features, open_features
from dovetail.workers.training.data.states import (
    PASS_ROWS,
    Origin,
    TargetStates,
    choose_taps,
    open_states,
)
from dovetail.workers.training.run import Progress
from support.features import samples
from support.models import tiny_llama, transformers_model

TARGET = Path(__file__).resolve().parents[2] / "launch" / "demo" / "target"
TALKS = [
    ["What is a window made from?", "A window is made from glass."],
    ["Hello", "Hi! How are you?", "Fine.", "Good."],
    ["Say a word.", "Word."],
]
SMALL_SHARD = 4 * 256 * 2 * 60
"""The bytes of about sixty tokens."""


@pytest.fixture(scope="module")
def target() -> TargetStates:
    return open_states(str(TARGET), taps="2,4,5")


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Examples:
    file = tmp_path_factory.mktemp("data") / "chats.jsonl"
    file.write_text(
        "".join(
            json.dumps({"turns": [turns[0] + " " * n, *turns[1:]]}) + "\n"
            for turns in TALKS
            for n in range(4)
        )
    )
    return read_examples([file], open_reader(str(TARGET)))


@pytest.fixture(scope="module")
def folder(
    target: TargetStates, examples: Examples, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return write(tmp_path_factory.mktemp("features") / "store", examples, target)


def write(folder: Path, examples: Examples, target: TargetStates) -> Path:
    index = store.begin(folder, store.plan(examples, target.origin, SMALL_SHARD), examples)
    assert store.write(folder, index, examples, target).written == len(index.shards) > 2
    return folder


@torch.no_grad()
def reference_states(model: Path, tokens: Tensor, taps: Sequence[int]) -> Tensor:
    """transformers' own states [n, (1 + K) * H], for a whole sequence at once."""
    hidden = transformers_model(model)(
        tokens.unsqueeze(0), output_hidden_states=True, use_cache=False
    ).hidden_states
    return torch.cat([hidden[place][0] for place in (-1, *taps)], -1)


def test_states_are_those_that_transformers_computes(folder: Path, examples: Examples) -> None:
    features = open_features([folder])
    assert (features.count, features.tokens, features.origin.row) == (12, examples.tokens, 4 * 256)
    for row, sample in zip(examples.rows, samples(features), strict=True):
        assert sample.taps is not None
        assert sample.tokens.tolist() == row.tokens.tolist()
        assert sample.learn.tolist() == row.learn.tolist()
        expected = reference_states(TARGET, sample.tokens, (2, 4, 5))
        torch.testing.assert_close(
            torch.cat([sample.g, sample.taps], -1).float(), expected, rtol=2e-3, atol=2e-2
        )
        assert sample.g.dtype == torch.float16


@torch.no_grad()
def test_the_last_tap_is_what_the_final_norm_reads() -> None:
    tokens = torch.tensor([1, 5, 9, 700, 3])
    (states,) = open_states(str(TARGET), taps="0,8", dtype="bfloat16").read([tokens])
    last, _, stream = states.float().split(256, dim=-1)
    normed = transformers_model(TARGET).model.norm(stream)
    torch.testing.assert_close(last, normed, rtol=2e-2, atol=5e-2)


def test_sequence_that_is_longer_than_a_pass_has_the_same_states(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path, context=2 * PASS_ROWS)
    tokens = torch.randint(0, 48, (PASS_ROWS + 37,), generator=torch.Generator().manual_seed(1))
    states = open_states(str(model), taps="1")
    long, short = states.read([tokens, tokens[:5]])
    torch.testing.assert_close(
        long.float(), reference_states(model, tokens, (1,)), rtol=2e-3, atol=5e-3
    )
    assert torch.equal(short, long[:5])


def test_online_gives_the_same_numbers_as_the_store(
    folder: Path, examples: Examples, target: TargetStates
) -> None:
    stored, online = open_features([folder]), online_features(examples, target)
    for one, other in zip(
        (stored, *stored.split(0.25)), (online, *online.split(0.25)), strict=True
    ):
        for length in (7, 24, 400):
            expected, found = (of.batch(np.random.default_rng(5), 6, length) for of in (one, other))
            for name in ("tokens", "learn", "sequence", "position", "g", "taps"):
                assert torch.equal(getattr(expected, name), getattr(found, name)), (name, length)


@pytest.mark.parametrize("length", [7, 24, 400])
def test_row_is_whole_sequences_one_behind_the_other(folder: Path, length: int) -> None:
    features = open_features([folder])
    whole = list(samples(features))
    batch = features.batch(np.random.default_rng(1), 8, length)
    assert batch.tokens.shape == batch.sequence.shape == batch.g.shape[:2] == (8, length)
    for row in range(8):
        for number in batch.sequence[row][batch.sequence[row] >= 0].unique().tolist():
            columns = batch.sequence[row] == number
            position = batch.position[row][columns]
            begin, stop = int(position[0]), int(position[-1]) + 1
            # a sequence begins at its beginning, but for the first of a row that is shorter than it
            assert begin == 0 or (number == 0 and begin % (length // 2) == 0)
            taps = batch.taps[row][columns] if batch.taps is not None else torch.empty(0)
            assert any(
                torch.equal(batch.tokens[row][columns], sample.tokens[begin:stop])
                and torch.equal(batch.learn[row][columns], sample.learn[begin:stop])
                and torch.equal(batch.g[row][columns], sample.g[begin:stop])
                and sample.taps is not None
                and torch.equal(taps, sample.taps[begin:stop])
                for sample in whole
            )
        padding = batch.sequence[row] < 0
        assert not batch.learn[row][padding].any()
        assert not batch.g[row][padding].any()
        assert padding.tolist() == sorted(padding.tolist())


def test_every_token_comes_up(folder: Path) -> None:
    features = open_features([folder])
    seen: set[tuple[int, ...]] = set()
    for step in range(200):
        batch = features.batch(np.random.default_rng([2, step]), 4, 8)
        seen |= {tuple(sample.half().tolist()) for sample in batch.g.reshape(-1, 256)[:, :6]}
    for sample in samples(features):
        assert {tuple(row.tolist()) for row in sample.g[:, :6]} <= seen


def test_split_keeps_answers_to_a_prompt_together(tmp_path: Path, target: TargetStates) -> None:
    answers = [
        Example(np.array([0, 2, prompt, 3, answer]), np.array([False] * 4 + [True]))
        for prompt in range(20, 30)
        for answer in range(10, 14)
    ]
    features: Features = online_features(arrange(answers, context=8, vocabulary_size=4096), target)
    learning, held = features.split(0.3)
    assert learning.count + held.count == 40
    assert held.count == 12
    prompts = [{int(sample.tokens[2]) for sample in samples(side)} for side in (learning, held)]
    assert not prompts[0] & prompts[1]
    assert learning.counts()[10:14].tolist() == [7, 7, 7, 7]
    with pytest.raises(UserError, match=r"of 0\.001: give at least 501, with different prompts"):
        held.split(0.001)


def test_killed_run_goes_on_where_the_last_shard_ended(
    folder: Path, examples: Examples, target: TargetStates, tmp_path: Path
) -> None:
    class Counting:
        origin, read_before = target.origin, 0

        def read(self, rows: Sequence[Tensor]) -> Iterator[Tensor]:
            self.read_before += sum(len(row) for row in rows)
            return target.read(rows)

    def stop(at: Progress) -> None:
        if at.steps == 2:
            raise KeyboardInterrupt

    planned = store.plan(examples, target.origin, SMALL_SHARD)
    with pytest.raises(KeyboardInterrupt):
        store.write(
            tmp_path / "killed",
            store.begin(tmp_path / "killed", planned, examples),
            examples,
            target,
            stop,
        )
    with pytest.raises(UserError, match=f"holds 2 of {len(planned.shards)} shards"):
        open_features([tmp_path / "killed"])
    rest = Counting()
    found = store.begin(tmp_path / "killed", planned, examples)
    store.write(tmp_path / "killed", found, examples, rest)
    assert found.written == 2
    assert rest.read_before == sum(len(row.tokens) for row in examples.rows[planned.shards[2] :])
    written = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert {
        file.name: file.read_bytes()
        for file in (tmp_path / "killed").iterdir()
        if file.suffix != ".new"
    } == written


def test_store_refuses_what_is_not_its_own(
    folder: Path, examples: Examples, target: TargetStates, tmp_path: Path
) -> None:
    def begin(origin: Origin, of: Examples = examples) -> None:
        store.begin(folder, store.plan(of, origin), of)

    with pytest.raises(UserError, match="not of another model"):
        begin(dataclasses.replace(target.origin, digest="0" * 64, target="another model"))
    with pytest.raises(UserError, match="with weights fp32, not half"):
        begin(dataclasses.replace(target.origin, weights="half"))
    with pytest.raises(UserError, match=r"with taps \(2, 4, 5\), not \(\)"):
        begin(dataclasses.replace(target.origin, taps=()))
    with pytest.raises(UserError, match="of other sequences"):
        begin(target.origin, dataclasses.replace(examples, rows=examples.rows[1:]))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("Dear")
    with pytest.raises(UserError, match=r"is not empty \(letter\.txt\)"):
        store.begin(tmp_path / "mine", store.plan(examples, target.origin), examples)


def test_size_is_known_before_anything_is_written(
    folder: Path, examples: Examples, target: TargetStates, tmp_path: Path
) -> None:
    index = store.read_index(folder)
    assert index.bytes == sum(
        file.stat().st_size for file in folder.iterdir() if file.suffix == ".bin"
    )
    with pytest.raises(UserError, match="GB free, but needs"):
        store.begin(
            tmp_path / "large",
            dataclasses.replace(store.plan(examples, target.origin), tokens=10**15),
            examples,
        )
    assert not list((tmp_path / "large").iterdir())


def test_damaged_store_is_refused(examples: Examples, target: TargetStates, tmp_path: Path) -> None:
    folder = write(tmp_path / "store", examples, target)
    with (folder / "states-000001.bin").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(UserError, match=r"states-000001\.bin has \d+ bytes instead of \d+"):
        open_features([folder])
    (folder / "index.json").write_text("{}")
    with pytest.raises(UserError, match="not an index of features"):
        open_features([folder])
    with pytest.raises(UserError, match="holds no features"):
        open_features([tmp_path])


def test_taps_are_those_of_eagle3_unless_named() -> None:
    assert choose_taps("auto", 8) == (2, 4, 5)
    assert choose_taps("auto", 32) == (2, 16, 29)
    assert choose_taps("none", 8) == ()
    assert choose_taps("0,8", 8) == (0, 8)  # the last one is the output of the last layer
    for asked, layers in (("auto", 6), ("9", 8), ("1,1", 8), ("x", 8)):
        with pytest.raises(UserError, match="taps"):
            choose_taps(asked, layers)


def test_token_file_is_read_with_its_mask(tmp_path: Path) -> None:
    np.array([0, 5, 6, 1, 0, 7, 1], dtype="<u2").tofile(tmp_path / "a.bin")
    assert [row.tokens.tolist() for row in read_token_file(tmp_path / "a.bin", 0)] == [
        [0, 5, 6, 1],
        [0, 7, 1],
    ]
    np.array([0, 0, 1, 1, 0, 0, 1], dtype=np.uint8).tofile(tmp_path / "a.mask")
    assert [row.learn.tolist() for row in read_token_file(tmp_path / "a.bin", 0)] == [
        [False, False, True, True],
        [False, False, True],
    ]
    with pytest.raises(UserError, match="does not begin with id 3"):
        read_token_file(tmp_path / "a.bin", 3)
    (tmp_path / "a.mask").write_bytes(b"\1")
    with pytest.raises(UserError, match="1 bytes for the 7 ids"):
        read_token_file(tmp_path / "a.bin", 0)
    with pytest.raises(UserError, match="made for another target"):
        arrange([Example(np.array([0, 9]), np.array([False, True]))], context=8, vocabulary_size=9)
