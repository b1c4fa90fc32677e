"""Keys of a model's files that change its choices beyond sampling are followed or refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import SuppressTokensLogitsProcessor

from dovetail.launch.processes.preflight import check_whole
from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.settings import Sampling, TargetSettings
from dovetail.workers.models.checkpoints.choices import suppressed_in
from dovetail.workers.models.checkpoints.gguf.view import view_of
from dovetail.workers.serving.open_target import open_target_worker
from dovetail.workers.speculation.history import History
from dovetail.workers.speculation.sampling import LookingBack
from support.architectures import write_tiny
from support.gguf_files import write_gguf


def with_keys(folder: Path, place: Path, **keys: Any) -> Path:
    """A copy of a model whose generation_config.json has more keys."""
    shutil.copytree(folder, place)
    file = place / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    return place


def test_a_file_without_a_way_of_splitting_words_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_tiny("llama", tmp_path / "model")
    for name, reported in (("default", False), (None, True)):
        file = tmp_path / f"{name}.gguf"
        write_gguf(tmp_path / "model", file, lambda *_: Type.F32, **{"tokenizer.ggml.pre": name})
        open_target_worker(TargetSettings(model=str(file)), name="t", threads=1)
        assert (f"t: {file}: it does not name its pre" in capsys.readouterr().err) is reported


def test_a_mask_is_part_of_the_fingerprint(llama_folder: Path, tmp_path: Path) -> None:
    prints = {
        str(
            open_target_worker(TargetSettings(model=str(folder)), name="t", threads=1)
            .hello(1)
            .fingerprint
        )
        for folder in (
            llama_folder,
            with_keys(llama_folder, tmp_path / "a", suppress_tokens=[4]),
            with_keys(llama_folder, tmp_path / "b", suppress_tokens=[5]),
        )
    }
    assert len(prints) == 3


def test_numbers_and_tensors_are_masked_as_by_transformers() -> None:
    logits, never = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)), [4, 7, 99]
    found = LookingBack(Sampling(), [1], (), 50, suppressed=never).process(logits, [()] * 3)
    plain = SuppressTokensLogitsProcessor(never)(torch.tensor([[1]] * 3), logits.clone())
    assert torch.equal(found, plain)
    history = History(Sampling(), [1], (), suppressed=never)
    numbers = [history.process(token, float(logits[0, token])) for token in range(50)]
    assert numbers == found[0].tolist()


REFUSED: dict[str, Any] = {
    "bad_words_ids": [[4, 5]],
    "no_repeat_ngram_size": 3,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": [1],
    "begin_suppress_tokens": [7],
    "sequence_bias": [[[4], 2.0]],
    "num_beams": 4,
    "typical_p": 0.9,
    "suppress_tokens": "all",
}
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(REFUSED),
    "bad_words_ids": [],
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "typical_p": 1.0,
    "min_length": 0,
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_a_key_that_is_not_obeyed_is_refused_with_file_and_value(
    llama_folder: Path, tmp_path: Path, name: str, file: str
) -> None:
    folder = with_keys(llama_folder, tmp_path / "m")
    if file == "config.json":
        (folder / "generation_config.json").unlink()
    content = json.loads((folder / file).read_text()) | {"do_sample": True, **NEUTRAL}
    (folder / file).write_text(json.dumps(content))
    check_whole(str(folder))
    (folder / file).write_text(json.dumps({**content, name: REFUSED[name]}))
    with pytest.raises(CheckpointError, match=rf"{file}: {name} is .*, which is not supported; "):
        check_whole(str(folder))
    with pytest.raises(CheckpointError, match=rf"{file}: {name} is "):
        open_target_worker(TargetSettings(model=str(folder)), name="t", threads=1)


def test_suppressed_tokens_of_a_gguf_file_are_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_tiny("llama", tmp_path / "model")
    key = "tokenizer.ggml.suppress_tokens"
    write_gguf(tmp_path / "model", tmp_path / "m.gguf", lambda *_: Type.F32, **{key: [5, 3]})
    assert suppressed_in(view_of(tmp_path / "m.gguf"), ()) == (3, 5)
    for name, value in ((key, 5), ("general.sampling.mirostat", 2)):
        write_gguf(
            tmp_path / "model", tmp_path / f"{value}.gguf", lambda *_: Type.F32, **{name: value}
        )
        with pytest.raises(CheckpointError, match=rf"{value}\.gguf.*{name} is {value}, "):
            view_of(tmp_path / f"{value}.gguf")
