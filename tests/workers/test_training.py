"""Training of small models: the loss falls, a distilled draft follows its target, an interrupted
run goes on where it stopped."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail.launch.commands.train import train_small
from dovetail.protocol.errors import UserError
from dovetail.workers.training import run, small
from dovetail.workers.training.data.examples import read_token_file

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
    seen: list[run.Progress] = []
    trained = model()
    outcome = small.train(trained, read_token_file(tokens, 0), QUICK, progress=seen.append)
    assert seen[0].loss > 2 * outcome.loss
    assert seen[-1].done == 1
    assert seen[-1].rate < seen[5].rate / 4
    assert outcome.tokens == QUICK.steps * QUICK.batch * QUICK.context == 40 * 4 * 32
    assert outcome.parameters == TINY.parameters(4096) == run.count_parameters(trained)


def test_interrupted_run_goes_on_where_it_stopped(tokens: Path, tmp_path: Path) -> None:
    whole, halved = model(), model()
    small.train(whole, read_token_file(tokens, 0), QUICK)

    def stop(at: run.Progress) -> None:
        if at.steps == 12:
            raise KeyboardInterrupt

    often, kept = (
        dataclasses.replace(QUICK, keep_every_s=-1.0),
        small.Checkpoint(tmp_path / "run", {}),
    )
    with pytest.raises(KeyboardInterrupt):
        small.train(halved, read_token_file(tokens, 0), often, checkpoint=kept, progress=stop)
    seen: list[run.Progress] = []
    resumed = model(seed=9)
    small.train(resumed, read_token_file(tokens, 0), often, checkpoint=kept, progress=seen.append)
    assert seen[0].steps == 12
    for expected, got in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(got, expected)


def test_only_the_same_run_is_resumed(tokens: Path, tmp_path: Path) -> None:
    rows, few = read_token_file(tokens, 0), dataclasses.replace(QUICK, steps=1)
    kept = small.Checkpoint(tmp_path / "run", {"layers": 1})
    small.train(model(), rows, few, checkpoint=kept)
    others = {
        "seed": (rows, dataclasses.replace(few, seed=4), kept),
        "data": (rows[1:], few, kept),
        "layers": (rows, few, small.Checkpoint(kept.file, {"layers": 2})),
    }
    for name, (text, settings, checkpoint) in others.items():
        with pytest.raises(
            UserError, match=f"unfinished run of other {name} .*give another --out, or remove it"
        ):
            small.train(model(), text, settings, checkpoint=checkpoint)
    assert small.train(model(), rows, dataclasses.replace(few, steps=2), checkpoint=kept).steps == 2


def test_damaged_checkpoint_is_named_with_its_remedy(tokens: Path, tmp_path: Path) -> None:
    rows, kept = read_token_file(tokens, 0), small.Checkpoint(tmp_path / "run", {})
    small.train(model(), rows, dataclasses.replace(QUICK, steps=1), checkpoint=kept)
    whole = kept.file.read_bytes()
    for damaged in (
        b"",
        whole[:1000],
        whole[:-1],
        whole.replace(b"counters", b"countess", 1),
        whole.replace(b"weight:", b"weight;", 1),
    ):
        kept.file.write_bytes(damaged)
        with pytest.raises(
            UserError,
            match=r"run is damaged .*: remove it|another shape: give another --out, or remove it",
        ) as found:
            small.train(model(), rows, QUICK, checkpoint=kept)
        assert "\n" not in str(found.value)


def test_what_is_in_the_way_of_a_small_model_stays(tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match=r"letter\.txt"):
        train_small(out=tmp_path / "out", texts=[tokens], tokenizer=TOKENIZER, minutes=0.001)
    assert (tmp_path / "out" / "letter.txt").is_file()
    with pytest.raises(UserError, match="an input of the training"):
        train_small(out=TOKENIZER / ".." / "target", texts=[tokens], tokenizer=TOKENIZER)


@pytest.mark.slow
def test_distillation_raises_agreement(tokens: Path, tmp_path: Path) -> None:
    target, draft, rows = model(1), model(2), read_token_file(tokens, 0)

    @torch.no_grad()
    def overlap() -> float:
        ids, learn = small.Text(rows, 32).batch(32, np.random.default_rng(1))
        p, q = (of(input_ids=ids[:, :-1]).logits.softmax(-1)[learn] for of in (target, draft))
        return float(torch.minimum(p, q).sum() / len(p))

    small.train(target, rows, QUICK)
    before = overlap()
    small.train(draft, rows, QUICK, target=target)
    assert overlap() > before + 0.05


def test_mistakes_are_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"there is no file .*missing\.bin"):
        train_small(out=tmp_path / "out", texts=[tmp_path / "missing.bin"], tokenizer=TOKENIZER)
    lines = [{"turns": ["Hello", "Hi."]}, {"turns": ["Nobody answers"]}]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="are too few to learn from"):
        train_small(out=tmp_path / "out", texts=[tmp_path / "few.jsonl"], tokenizer=TOKENIZER)
    assert "1 without an answer" in capsys.readouterr().err


def test_command_refuses_what_it_cannot_train(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--prompts needs --target"):
        train_small(out=tmp_path / "out", prompts=tokens)
    with pytest.raises(UserError, match="nothing to learn from"):
        train_small(out=tmp_path / "out")
    with pytest.raises(UserError, match="--max-parameters"):
        train_small(out=tmp_path / "out", texts=[tokens], tokenizer=TOKENIZER, max_parameters=1000)
