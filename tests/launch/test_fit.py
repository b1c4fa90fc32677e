"""A model that does not fit is refused before it is loaded, with what would fit; one that fits is
not."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dovetail.launch.machine import fit
from dovetail.launch.machine.fit import LOOKUP_BYTES, check_memory, needs_of
from dovetail.launch.processes.stack import begin_stack
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import configure
from dovetail.protocol.errors import CheckpointError, SettingsError
from dovetail.protocol.memory import Room
from dovetail.protocol.settings import Settings
from dovetail.workers.models.checkpoints import loader
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.checkpoints.footprint import PROCESS_BYTES, read_tensors
from dovetail.workers.models.loading import against_device, load_language_model
from support.inflated import kept_pair
from support.kernels import needs_kernels
from support.models import tiny_llama, tiny_qwen2

Run = Callable[..., subprocess.CompletedProcess[str]]
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "vocab": 4096,
    "layers": 6,
}
PLENTY = 1 << 50


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("bf16"), dtype=torch.bfloat16, **WIDE)


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("fp32"), **WIDE)


def settings(**flags: object) -> Settings:
    return configure(
        flags={name.replace("__", "."): str(value) for name, value in flags.items()}, environment={}
    ).settings


def takes(folder: Path, weights: str) -> int:
    (need,) = needs_of(settings(target__model=folder, target__weights=weights), ("target",))
    return need.size


def check(wanted: Settings, size: int, *roles: str) -> None:
    check_memory(wanted, roles or ("target",), room=Room(size, "available on this machine"))


@pytest.mark.parametrize(("weights", "fits"), [("fp32", "half"), ("half", "int8")])
def test_a_target_that_does_not_fit_is_refused_with_the_most_exact_type_of_weights_that_would(
    bf16: Path, weights: str, fits: str
) -> None:
    wanted = settings(target__model=bf16, target__weights=weights)
    check(wanted, takes(bf16, weights))
    words = (
        rf"^the target with {weights} weights takes [\d.]+ GB of memory, and there are "
        r"[\d.]+ GB available on this machine: "
    )
    with pytest.raises(
        SettingsError,
        match=words + rf"with --target\.weights {fits} it needs [\d.]+ GB, which fits$",
    ):
        check(wanted, takes(bf16, weights) - 1)


def test_half_weights_are_not_offered_for_a_checkpoint_that_has_none(fp32: Path) -> None:
    with pytest.raises(SettingsError, match=r"with --target\.weights int8 it needs"):
        check(settings(target__model=fp32), takes(fp32, "fp32") - 1)


@pytest.mark.parametrize("flags", [{"target__weights": "int8"}, {}])
def test_where_no_type_fits_the_remedy_is_another(fp32: Path, flags: dict[str, str]) -> None:
    with pytest.raises(
        SettingsError,
        match=r"use a smaller model, put a part of the target on a GPU "
        r"\(target\.split\.device\), or set memory\.ram",
    ):
        check(settings(target__model=fp32, **flags), 1 << 20)


def test_what_is_started_together_is_added_up(fp32: Path, bf16: Path) -> None:
    wanted = settings(target__model=fp32, draft__model=bf16, draft__device="cpu")
    alone = takes(fp32, "fp32")
    check(wanted, alone)
    roles = ("coordinator", "target", "draft")
    with pytest.raises(
        SettingsError,
        match=r"^together these take [\d.]+ GB .*the coordinator 0\.04\d* GB, the target with "
        r"fp32 weights .*, the draft ",
    ):
        check(wanted, alone + takes(bf16, "half"), *roles)
    check(wanted, sum(need.size for need in needs_of(wanted, roles)), *roles)


def test_a_head_counts_what_it_takes_of_its_target(fp32: Path) -> None:
    wanted = settings(draft__kind="dovetail", draft__device="cpu")
    with pytest.raises(SettingsError, match=r"^the draft head takes 0\.3\d+ GB"):
        check(wanted, PROCESS_BYTES, "draft")
    check(wanted, 2 * PROCESS_BYTES, "draft")


@pytest.mark.parametrize(
    "flags", [{"draft__kind": "none"}, {"draft__device": "cuda:0"}, {"draft__model": "owner/name"}]
)
def test_what_takes_nothing_here_or_is_not_here_yet_is_not_counted(flags: dict[str, str]) -> None:
    check(settings(**flags), 1, "draft")


def test_a_look_up_counts_as_a_process_without_torch() -> None:
    with pytest.raises(SettingsError, match=r"^the look-up draft takes 0\.03 GB"):
        check(settings(draft__kind="ngram"), LOOKUP_BYTES - 1, "draft")
    check(settings(draft__kind="ngram"), LOOKUP_BYTES, "draft")


def test_a_model_in_the_cache_of_the_hub_is_counted(
    fp32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "models--someone--something"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    (model / "snapshots").mkdir()
    (model / "snapshots" / ("0" * 40)).symlink_to(fp32, target_is_directory=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    wanted = settings(target__model="someone/something", draft__kind="none")
    with pytest.raises(SettingsError, match="takes"):
        check(wanted, takes(fp32, "fp32") // 2, "target")


def test_what_is_swapped_is_not_refused(fp32: Path) -> None:
    wanted = settings(target__model=fp32)
    check_memory(wanted, ("target",), room=Room(1, "available on this machine", swap=PLENTY))


def test_who_knows_better_says_so_with_memory_ram(fp32: Path) -> None:
    check(settings(target__model=fp32, memory__ram="8GB"), 1, "coordinator", "target", "draft")
    with pytest.raises(SettingsError, match=r"there are 0\.001 GB .*, or raise memory\.ram$"):
        check(settings(target__model=fp32, memory__ram="1MB"), PLENTY)
    with pytest.raises(
        SettingsError,
        match=r"^the target with fp32 weights takes ([\d.]+) GB of memory, and there are [\d.]+ GB "
        r"for it besides its process \(memory\.ram\): with --target\.weights int8 it needs",
    ):
        check(
            settings(target__model=fp32, memory__ram=f"{takes(fp32, 'int8') - PROCESS_BYTES}B"),
            PLENTY,
        )


def test_a_node_of_its_own_bounds_a_target_that_is_bound_to_it(
    fp32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fit, "node_room", lambda node: Room(1000 * node, f"available on memory node {node}")
    )
    wanted = settings(target__model=fp32)
    with pytest.raises(
        SettingsError, match=r"available on memory node 1 \(target\.numa = 'off' lifts that\)"
    ):
        check_memory(wanted, ("target",), nodes=(1,), room=Room(PLENTY, ""))
    with pytest.raises(
        SettingsError,
        match=r" of it on each of 2 nodes, and there are 1e-06 GB available on memory node 1 ",
    ):
        check_memory(wanted, ("target",), nodes=(99999999, 1), room=Room(PLENTY, ""))
    check_memory(wanted, ("target",), nodes=(), room=Room(PLENTY, ""))


def test_a_limit_of_address_space_is_refused_before_it_is_met(bf16: Path, run: Run) -> None:
    done = run(
        "generate",
        "w3",
        "--target",
        str(bf16),
        "--draft",
        "none",
        command_prefix=("bash", "-c", 'ulimit -v 1300000; exec "$@"', "bash"),
    )
    assert done.returncode == 2, done.stderr
    assert "allowed to a process as address space (ulimit -v)" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "broken", ["no index", "no header", "a list", "no shape", "a shape of more"]
)
def test_what_is_wrong_with_a_file_is_left_to_whoever_loads_it(tmp_path: Path, broken: str) -> None:
    content = {
        "no header": b"\xff" * 100,
        "a list": b"\x02\0\0\0\0\0\0\0[]",
        "no shape": b'\x0a\0\0\0\0\0\0\0{"a": {} }',
        "a shape of more": b"\x3f\0\0\0\0\0\0\0"
        b'{"a": {"dtype": "F32", "shape": [17], "data_offsets": [0, 64]}}',
    }
    if broken in content:
        (tmp_path / "model.safetensors").write_bytes(content[broken])
    assert read_tensors(tmp_path) == []


def test_a_tied_head_is_counted_once_but_beside_its_table_while_it_is_packed(
    tmp_path: Path,
) -> None:
    folder = tiny_qwen2(tmp_path / "tied", vocab=20_000)
    table = 20_000 * 64 * 4
    (need,) = needs_of(settings(target__model=folder), ("target",))
    assert table < need.footprint.weights < 2 * table
    assert need.footprint.weights + need.footprint.loading > 2 * table


@pytest.fixture
def small_group(tmp_path: Path) -> Iterator[Path]:
    """A control group of 1 GB, where one can be made."""
    folder = Path("/sys/fs/cgroup/memory") / f"dovetail-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(10**9), encoding="ascii")
    except OSError:
        if folder.exists():
            folder.rmdir()
        pytest.skip("needs the right to make a control group of memory (of the first kind)")
    yield folder
    folder.rmdir()


def large() -> tuple[str, ...]:
    """More than a control group of 1 GB holds, but for half weights."""
    model = f"--target={kept_pair('800MiB') / 'target'}"
    return ("generate", "hello", model, "--draft=none", "--max-tokens=2")


def within(group: Path) -> tuple[str, ...]:
    """Return the prefix with which a command line runs in a control group."""
    return ("bash", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "bash")


def test_in_a_real_control_group_what_does_not_fit_is_refused(small_group: Path, run: Run) -> None:
    done = run(*large(), command_prefix=within(small_group))
    assert done.returncode == 2, done.stderr
    assert f"left of the 1 GB of the control group {small_group}" in done.stderr
    assert "with --target.weights half they need" in done.stderr


@pytest.mark.slow
def test_in_a_real_control_group_what_fits_runs(small_group: Path, run: Run) -> None:
    done = run(*large(), "--target.weights=half", command_prefix=within(small_group))
    assert done.returncode == 0, done.stderr


def test_nothing_is_started_for_what_does_not_fit(
    fp32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "read_room", lambda: Room(1 << 20, "available on this machine"))
    with Supervisor() as supervisor:
        with pytest.raises(SettingsError, match="together these take"):
            begin_stack(
                supervisor,
                configure(flags={"target.model": str(fp32), "draft.kind": "ngram"}, environment={}),
            )()
        assert supervisor.children == []


def test_what_transformers_rearranges_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_llama(tmp_path / "llama")
    monkeypatch.setattr(loader, "read_room", lambda: Room(1000, "available on this machine"))
    load_language_model(str(folder), weights="fp32", device="cpu")
    monkeypatch.setattr(loader, "_maps_one_to_one", lambda *_: False)
    with pytest.raises(
        CheckpointError,
        match=r"all of it as float32 takes .* GB of memory while it is loaded, and there are "
        r"1e-06 GB",
    ):
        load_language_model(str(folder), weights="fp32", device="cpu")


def test_a_gpu_that_is_too_small_is_said_with_the_weights_that_fit(bf16: Path, fp32: Path) -> None:
    device = torch.device("cuda:0")
    checkpoint, numbers = (
        open_checkpoint(str(bf16)),
        sum(tensor.numbers for tensor in read_tensors(bf16)),
    )
    assert against_device(checkpoint, "fp32", device, 4 * numbers) == ""
    assert against_device(checkpoint, "fp32", device, 4 * numbers - 1).endswith(
        "are free: use weights half"
    )
    assert against_device(checkpoint, "bf16", device, numbers).endswith(
        "take a smaller model, or leave it on the CPU"
    )
    assert against_device(open_checkpoint(str(fp32)), "fp32", device, 4 * numbers - 1).endswith(
        "or leave it on the CPU"
    )


LOADING = """
import sys
from pathlib import Path
from dovetail.protocol.settings import TargetSettings
from dovetail.workers.serving.open_target import open_target_worker
folder, weights, backend = sys.argv[1:]
open_target_worker(TargetSettings(model=folder, weights=weights, backend=backend), name="t", threads=1)
lines = Path("/proc/self/status").read_text().splitlines()
size = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmHWM", "RssFile"))}
print(size["VmHWM"] - size["RssFile"])
"""  # noqa: E501


def check_estimate(folder: Path, weights: str, backend: str) -> None:
    """Check that what a worker holds at most of its own, libraries apart, is below the estimate and
    not far below."""
    command = [sys.executable, "-P", "-c", LOADING, str(folder), weights, backend]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    flags = {"target__weights": weights, "target__backend": backend}
    (need,) = needs_of(settings(target__model=folder, **flags), ("target",))
    own = need.footprint
    estimate = own.process + own.weights + own.loading
    assert 0.7 < int(done.stdout) / estimate <= 1.0, (int(done.stdout), estimate)


@needs_kernels
@pytest.mark.slow
def test_a_worker_that_searches_for_blocks_of_large_matrices_takes_what_was_estimated(
    tmp_path: Path,
) -> None:
    shape = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
    model = tiny_llama(tmp_path / "model", dtype=torch.bfloat16, layers=2, vocab=512, **shape)
    check_estimate(model, "int4", "auto")


@needs_kernels
@pytest.mark.parametrize("weights", ["half", "int4"])
def test_a_worker_takes_what_was_estimated(bf16: Path, weights: str) -> None:
    check_estimate(bf16, weights, "auto")


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("weights", "backend"),
    [
        ("fp32", "auto"),
        ("half", "auto"),
        ("int8", "auto"),
        ("fp32", "library"),
        ("bf16", "library"),
    ],
)
def test_workers_of_all_weights_take_what_was_estimated(
    tmp_path: Path, stored: torch.dtype, weights: str, backend: str
) -> None:
    if (weights, stored) == ("half", torch.float32):
        pytest.skip("there are no half weights of a checkpoint of fp32")
    shape = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab": 16384,
        "layers": 8,
    }
    check_estimate(tiny_llama(tmp_path / "model", dtype=stored, **shape), weights, backend)
