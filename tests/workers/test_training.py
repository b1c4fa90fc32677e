"""Training of small models: the loss falls, a distilled draft follows its target, an interrupted run goes on where it stopped."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail.launch.train import train_small
from dovetail.protocol.errors import UserError
from dovetail.workers.training import small

TOKENIZER = Path(__file__).resolve().parents[2] / "launch" / "demo" / "target"
TINY = small.Shape(hidden=32, layers=1, heads=2, kv_heads=1, mlp=48)
QUICK = small.Settings(steps=40, batch=4, context=32, rate=1.5e-2, warm_up=3, seed=3, device="cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on more threads than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Sequences in which every id follows from the one before."""
    rng, ids = np.random.default_rng(0), list[int]()
    for _ in range(300):
        first = int(rng.integers(10, 20))
        ids += [0, *(10 + (first + k) % 10 for k in range(int(rng.integers(5, 15)))), 1]
    path = tmp_path / "text.bin"
    np.array(ids, dtype="<u2").tofile(path)
    return path


def model(seed: int = 0) -> torch.nn.Module:
    return small.new_model(TINY, TOKENIZER, QUICK.context, seed)


def test_loss_falls_and_progress_is_reported(tokens: Path) -> None:
    seen: list[small.Progress] = []
    trained = model()
    outcome = small.train(trained, [tokens], QUICK, progress=seen.append)
    assert seen[0].loss > 2 * outcome.loss
    assert seen[-1].done == 1
    assert seen[-1].rate < seen[5].rate / 4
    assert outcome.tokens == QUICK.steps * QUICK.batch * QUICK.context == 40 * 4 * 32
    assert outcome.parameters == TINY.parameters(4096) == small.count_parameters(trained)


def test_interrupted_run_goes_on_where_it_stopped(tokens: Path, tmp_path: Path) -> None:
    whole, halved = model(), model()
    small.train(whole, [tokens], QUICK)

    def stop(at: small.Progress) -> None:
        if at.steps == 12:
            raise KeyboardInterrupt

    often = dataclasses.replace(QUICK, keep_every_s=-1.0)
    with pytest.raises(KeyboardInterrupt):
        small.train(halved, [tokens], often, checkpoint=tmp_path / "run", progress=stop)
    seen: list[small.Progress] = []
    resumed = model(seed=9)
    small.train(resumed, [tokens], often, checkpoint=tmp_path / "run", progress=seen.append)
    assert seen[0].steps == 12
    for expected, got in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(got, expected)


def test_distillation_raises_agreement(tokens: Path, tmp_path: Path) -> None:
    target, draft = model(1), model(2)
    small.train(target, [tokens], QUICK)
    before = small.measure(target, draft, [tokens], context=32, batches=4)
    small.distil(target, draft, [tokens], QUICK)
    after = small.measure(target, draft, [tokens], context=32, batches=4)
    assert after.greedy > before.greedy
    assert after.overlap > before.overlap + 0.05


def test_target_writes_its_own_outputs_and_keeps_finished_batches(tmp_path: Path) -> None:
    small.save_model(model(1), TOKENIZER, tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"turns": [f"Count to {n}."]}) for n in range(5)))
    prompts = small.read_prompts(tmp_path / "prompts.jsonl")
    writing = small.Writing(new_tokens=8, batch=2, context=32, device="cpu")

    def stop(at: small.Progress) -> None:
        if at.steps == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small.write_outputs(tmp_path / "target", prompts, tmp_path / "cut.bin", writing, progress=stop)
    assert len(list((tmp_path / "cut.bin.parts").glob("*.bin"))) == 3
    cut = small.write_outputs(tmp_path / "target", prompts, tmp_path / "cut.bin", writing)
    whole = small.write_outputs(tmp_path / "target", prompts, tmp_path / "whole.bin", writing)
    assert cut.read_bytes() == whole.read_bytes()
    ids, mask = np.fromfile(cut, dtype="<u2"), np.fromfile(cut.with_suffix(".mask"), dtype=np.uint8)
    assert len(ids) == len(mask)
    assert (ids == 0).sum() >= 5 * len(writing.temperatures)
    assert 0 < mask.sum() <= 8 * 10


def test_mistakes_are_the_users(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no token file"):
        small.train(model(), [tmp_path / "missing.bin"], QUICK)
    (tmp_path / "bad.jsonl").write_text("{}")
    with pytest.raises(UserError, match="line 1"):
        small.read_prompts(tmp_path / "bad.jsonl")


def test_command_refuses_what_it_cannot_train(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--prompts needs --target"):
        train_small(out=tmp_path / "out", prompts=tokens)
    with pytest.raises(UserError, match="nothing to learn from"):
        train_small(out=tmp_path / "out")
    with pytest.raises(UserError, match="--max-parameters 1,000"):
        train_small(out=tmp_path / "out", texts=[tokens], tokenizer=TOKENIZER, max_parameters=1000)
