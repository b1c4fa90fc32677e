"""Weights are read once to be checked, known again afterwards, and never taken for what they are no
more."""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.files import cache_folder
from dovetail.workers.models.checkpoints import digests, tokenizer
from dovetail.workers.models.checkpoints.checkpoint import Weights, open_checkpoint, open_weights
from dovetail.workers.models.checkpoints.digests import Identity, all_finite
from dovetail.workers.models.checkpoints.stored import FLOAT_TYPES
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.progress import hearing_loads
from support.models import tiny_llama

MIB = 1 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of caches; what is in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dovetail" / "digests"


def bytes_read() -> int:
    """Return the bytes that this process has asked the system to read, whether a disk or the page
    cache gave them."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


def read_by(work: Callable[[], object]) -> int:
    before = bytes_read()
    work()
    return bytes_read() - before


def settle(folder: Path) -> None:
    """Wait until a change of these files would show in their times."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            identity = Identity.of(file)
        while not identity.settled(time.time_ns()):
            os.sched_yield()


def weights_folder(folder: Path, *files: dict[str, torch.Tensor]) -> Path:
    """A folder of weights alone, in one file or in several that an index lists."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    if len(files) == 1:
        save_file(files[0], folder / "model.safetensors")
    else:
        weight_map = {
            name: f"model-{i}.safetensors" for i, tensors in enumerate(files) for name in tensors
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        for i, tensors in enumerate(files):
            save_file(tensors, folder / f"model-{i}.safetensors")
    settle(folder)
    return folder


def large(folder: Path) -> Path:
    return weights_folder(
        folder, {"a": torch.randn(5 * MIB), "b": torch.randn(3, 7).bfloat16(), "c": torch.zeros(0)}
    )


def plain_digest(folder: Path) -> str:
    """The definition, at full length."""
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    content = (
        f"{file.name}\0{file.stat().st_size}\0".encode() + file.read_bytes() for file in files
    )
    return sha256(b"".join(content)).hexdigest()


@pytest.mark.parametrize("kind", FLOAT_TYPES)
def test_the_check_of_exponents_says_what_torch_says_of_any_bits(kind: str) -> None:
    number = FLOAT_TYPES[kind]
    generator = np.random.default_rng(0)
    for _ in range(200):
        block = generator.bytes(number.itemsize * int(generator.integers(1, 40)))
        if generator.random() < 0.8:  # else nearly all of them have a NaN in 16 bits
            block = (
                (torch.frombuffer(bytearray(block), dtype=number).nan_to_num(0, 0, 0))
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
        expected = bool(torch.isfinite(torch.frombuffer(bytearray(block), dtype=number)).all())
        assert all_finite(bytearray(block), kind) is expected


@pytest.mark.parametrize("kind", FLOAT_TYPES)
def test_one_value_that_is_no_number_is_found_in_any_place_and_the_largest_ones_are_numbers(
    kind: str,
) -> None:
    number = FLOAT_TYPES[kind]
    numbers = torch.tensor(
        [torch.finfo(number).max, torch.finfo(number).min, -0.0, torch.finfo(number).tiny, 1.0],
        dtype=number,
    )
    assert all_finite(numbers.view(torch.uint8).numpy(), kind)
    assert all_finite(bytearray(), kind)
    for place in range(len(numbers)):
        for strange in (float("nan"), float("inf"), float("-inf"), -float("nan")):
            block = numbers.clone()
            block[place] = strange
            assert not all_finite(block.view(torch.uint8).numpy(), kind)


def test_the_digest_is_that_of_the_plain_definition_whatever_the_sizes(tmp_path: Path) -> None:
    block = digests.BLOCK_BYTES // 4
    for number, sizes in enumerate(
        ([1], [block - 1, 1], [block], [block + 1], [3, 2 * block + 5, 7], [0, 1])
    ):
        tensors = {f"t{i}": torch.randn(size) for i, size in enumerate(sizes)}
        folder = weights_folder(tmp_path / str(number), tensors)
        assert open_weights(folder).digest == plain_digest(folder)
    folder = weights_folder(
        tmp_path / "sharded",
        {"a": torch.randn(9)},
        {"b": torch.randn(9)},
        {"c": torch.ones(4).half()},
    )
    assert open_weights(folder).digest == plain_digest(folder) == open_weights(folder).digest


def test_known_weights_are_not_read_again_to_be_checked_and_are_read_once_to_be_loaded(
    tmp_path: Path,
) -> None:
    folder = tiny_llama(tmp_path / "llama", hidden_size=256, intermediate_size=512, vocab=2048)
    settle(folder)
    size = (folder / "model.safetensors").stat().st_size

    def load() -> None:
        load_language_model(str(folder), weights="fp32", device="cpu")

    load_language_model(
        str(tiny_llama(tmp_path / "other")), weights="fp32", device="cpu"
    )  # modules that are imported late
    first = read_by(load)
    again = read_by(load)
    assert 2.0 * size <= first < 2.5 * size
    assert size <= again < 1.3 * size


@pytest.mark.parametrize("link", ["plain", "symbolic link"])
def test_the_same_files_are_known_by_another_path_and_a_copy_is_read(
    tmp_path: Path, link: str
) -> None:
    folder = large(tmp_path / "model")
    digest = open_weights(folder).digest
    other = tmp_path / "other"
    other.mkdir()
    shutil.copyfile(folder / "config.json", other / "config.json")
    if link == "plain":
        shutil.copyfile(folder / "model.safetensors", other / "model.safetensors")
    else:
        (other / "model.safetensors").symlink_to(folder / "model.safetensors")
    settle(other)
    read = read_by(lambda: open_weights(other))
    assert (read > 20 * MIB) is (link == "plain")
    assert open_weights(other).digest == digest


def rewrite(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def replace(path: Path, content: bytes) -> None:
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").replace(path)


def poke(path: Path, content: bytes) -> None:
    """Write the bytes that differ, in place, and set the time of the last change back."""
    state = path.stat()
    with path.open("r+b") as file:
        file.seek(len(content) - 4)
        file.write(content[-4:])
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize("change", [rewrite, replace, poke])
def test_a_file_that_has_changed_under_its_name_is_read_anew(
    tmp_path: Path, change: Callable[[Path, bytes], None]
) -> None:
    folder = large(tmp_path / "model")
    before = open_weights(folder).digest
    content = (folder / "model.safetensors").read_bytes()
    change(folder / "model.safetensors", content[:-4] + b"\0\1\0\1")
    assert open_weights(folder).digest == plain_digest(folder) != before
    change(folder / "model.safetensors", content)
    assert open_weights(folder).digest == before


@pytest.mark.parametrize("change", [rewrite, replace])
def test_nothing_is_taken_from_a_file_that_was_changed_after_it_was_checked(
    tmp_path: Path, change: Callable[[Path, bytes], None]
) -> None:
    folder = large(tmp_path / "model")
    weights = open_weights(folder)
    weights.tensors["b"].read("b")
    change(folder / "model.safetensors", (folder / "model.safetensors").read_bytes())
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors was changed while it was loaded: wait until it is written, "
        r"and start again$",
    ):
        weights.tensors["b"].read("b")


@pytest.mark.parametrize("way", ["one to one", "by transformers"])
def test_a_file_that_changes_while_it_is_loaded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    folder = tiny_llama(tmp_path / "llama")
    file = folder / "model.safetensors"
    other = tiny_llama(tmp_path / "other", seed=1) / "model.safetensors"
    if way == "by transformers":
        monkeypatch.setattr(
            "dovetail.workers.models.checkpoints.loader._maps_one_to_one", lambda *_: False
        )

    def told(doing: str, done: int, total: int) -> None:
        if doing == "loading" and other.exists():
            other.replace(file)

    with (
        hearing_loads(told),
        pytest.raises(CheckpointError, match="was changed while it was loaded"),
    ):
        load_language_model(str(folder), weights="fp32", device="cpu")


def test_a_file_that_is_being_written_is_not_remembered(tmp_path: Path, cache: Path) -> None:
    folder = large(tmp_path / "model")
    content = bytearray((folder / "model.safetensors").read_bytes())
    ahead_ns = (
        time.time_ns() + 3600 * 10**9
    )  # its clock is ahead of ours, or it was written this very moment
    os.utime(folder / "model.safetensors", ns=(ahead_ns, ahead_ns))
    open_weights(folder)
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    os.utime(folder / "model.safetensors", ns=(ahead_ns, ahead_ns))
    assert open_weights(folder).digest == plain_digest(folder)
    assert not cache.exists() or not [*cache.iterdir()]


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 100, b"0" * 64, b"0" * 64 + b" " + b"0" * 64, b"half of it"]
)
def test_a_damaged_cache_costs_a_reading_and_nothing_else(
    tmp_path: Path, cache: Path, content: bytes
) -> None:
    folder = large(tmp_path / "model")
    expected = open_weights(folder).digest
    (kept,) = cache.iterdir()
    kept.write_bytes(content)
    assert read_by(lambda: open_weights(folder)) > 20 * MIB
    assert open_weights(folder).digest == expected
    assert read_by(lambda: open_weights(folder)) < MIB


@pytest.mark.parametrize("place", ["no home", "a file", "read-only"])
def test_where_nothing_can_be_kept_the_weights_are_read_each_time_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    folder = large(tmp_path / "model")
    if place == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr("os.path.expanduser", str)
        monkeypatch.chdir(tmp_path)
    elif place == "a file":
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self")
    before = {*tmp_path.iterdir()}
    with caplog.at_level(logging.WARNING):
        assert open_weights(folder).digest == open_weights(folder).digest == plain_digest(folder)
    tokenizer.keep(cache_folder() / "tokens", b"")
    assert "digests cannot be saved in" in caplog.text
    assert {*tmp_path.iterdir()} == before


def test_of_several_that_ask_at_once_one_reads(tmp_path: Path) -> None:
    folder = large(tmp_path / "model")

    def both() -> Iterator[Weights]:
        with ThreadPoolExecutor(4) as pool:
            return pool.map(lambda _: open_weights(folder), range(4))

    assert read_by(both) < 1.5 * (folder / "model.safetensors").stat().st_size


def test_who_holds_the_turn_for_too_long_is_not_waited_for(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "LEAST_WAIT_S", 0.0)
    monkeypatch.setattr(digests, "CHECKED_BYTES_S", 1e12)
    folder = large(tmp_path / "model")
    expected = open_weights(folder).digest
    (kept,) = cache.iterdir()
    kept.unlink()
    with digests.KeptDigests(cache).turn(kept.name, 0.0):
        assert open_weights(folder).digest == expected


def test_no_more_digests_are_kept_than_a_folder_should_hold(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "MOST_KEPT", 3)
    for number in range(6):
        folder = weights_folder(tmp_path / str(number), {"a": torch.full((4,), float(number))})
        open_weights(folder)
    assert len([*cache.iterdir()]) <= 4
    assert open_weights(folder).digest == plain_digest(folder)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (torch.bfloat16, "inf"),
        (torch.float16, "-inf"),
        (torch.float32, "nan"),
        (torch.float64, "nan"),
    ],
)
def test_a_value_that_is_no_number_is_found_in_the_last_shard(
    tmp_path: Path, kind: torch.dtype, value: str
) -> None:
    last = torch.ones(2 * MIB + 3, dtype=kind)
    last[-1] = float(value)
    folder = weights_folder(
        tmp_path / "model", {"a": torch.ones(4)}, {"b": torch.ones(4)}, {"z": last}
    )
    for _ in range(2):  # nor is it taken for known afterwards
        with pytest.raises(
            CheckpointError, match=r"model-2\.safetensors: tensor z holds NaN or infinite values$"
        ):
            open_weights(folder)


def test_a_sparse_file_of_zeros_is_as_good_as_any(tmp_path: Path) -> None:
    folder = weights_folder(tmp_path / "model", {"a": torch.zeros(4 * MIB)})
    file = folder / "model.safetensors"
    header = file.read_bytes()[: file.stat().st_size - 16 * MIB]
    size = file.stat().st_size
    with file.open("wb") as sparse:
        sparse.write(header)
        sparse.truncate(size)
    assert open_weights(folder).digest == plain_digest(folder)


def test_what_is_read_is_counted_while_weights_are_checked_and_loaded(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "llama")
    settle(folder)
    size = (folder / "model.safetensors").stat().st_size
    numbers = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    heard: list[tuple[str, int, int]] = []
    with hearing_loads(lambda *told: heard.append(told)):
        open_checkpoint(str(folder))
        load_language_model(str(folder), weights="fp32", device="cpu")
    for doing, total in (("checking", size), ("loading", numbers)):
        told = [(done, all_bytes) for what, done, all_bytes in heard if what == doing]
        assert [done for done, _ in told] == sorted(done for done, _ in told)
        assert told[0] == (0, total)
        assert told[-1] == (total, total)
    heard.clear()
    with hearing_loads(lambda *told: heard.append(told)):
        open_checkpoint(str(folder))
    assert not any(total for *_, total in heard)  # it is known by now
