"""`dovetail plan` as users have it: machines of papers, this machine, what is wrong on a command
line, and whether the settings that it prints do start."""

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
import tomllib
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from dovetail.launch.planning.subject import LAYER_US
from dovetail.launch.processes.stack import layout_of
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.calibration import Calibration, MachineLimits, RowsSeconds
from dovetail.protocol.profile import ProfileKey, machine_key, update_profile
from dovetail.protocol.settings import DraftSettings, Settings
from dovetail.runtime.costs.rounds import MEETING_S
from dovetail.workers import kernels
from dovetail.workers.devices.opening import open_device
from dovetail.workers.drafters.trial import fall_key, remember_fall
from dovetail.workers.models.checkpoints.footprint import linears_bytes, read_tensors
from pretended.device import MEMORY, POSSIBLE, capped
from support.cases import everyday
from support.gguf_files import tokens_of, write_gguf
from support.kernels import needs_kernels

Run = Callable[..., CompletedProcess[str]]
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
FIELDS = {
    "name",
    "placement",
    "tokens_per_s",
    "tau",
    "gamma",
    "blocks",
    "vram_gb",
    "ram_gb",
    "why",
    "settings",
    "acceptance",
    "lacks",
    "layers",
    "round_ms",
}
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
"""Fields of config.json of Qwen2.5-7B-Instruct."""
QWEN_MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
"""The config.json of Qwen3-30B-A3B, as far as a plan reads it."""


@pytest.fixture
def plan(invoke: Any, tmp_path: Path, environment: dict[str, str]) -> Callable[..., dict[str, Any]]:
    """Return a function that runs the command with --json and a cache directory of its own, and
    returns what it prints."""

    def plan(*arguments: str) -> dict[str, Any]:
        result = invoke(
            "plan",
            "--json",
            *arguments,
            env={**environment, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        )
        assert result.returncode == 0, result.stderr
        assert ("comparing drafts and placements" in result.stderr) is (
            "--machine" not in arguments
        )
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    return plan


def named(found: dict[str, Any], name: str) -> dict[str, Any]:
    """The fastest alternative of that name."""
    return next(one for one in found["alternatives"] if one["name"] == name)


def test_on_the_server_of_the_dovetail_paper_dovetail_wins(
    plan: Callable[..., dict[str, Any]],
) -> None:
    found = plan("--machine", "dovetail-server", "--target-size", "7B", "--draft", "dovetail")
    assert found["choice"]["name"].startswith("Dovetail")
    assert named(found, "target alone")["tokens_per_s"] == pytest.approx(2.14, rel=0.02)  # Table 4
    assert named(found, "Dovetail")["speedup"] > 2.0
    assert named(found, "Dovetail")["vram_gb"] < 3.2  # 2.95 GB with five blocks
    assert named(found, "plain offloading")["tokens_per_s"] < 0.45 * 2.14
    assert "right: offloading a token a pass would need" in " ".join(found["verdict"])
    assert all(set(one) >= FIELDS for one in found["alternatives"])
    rates = [one["tokens_per_s"] for one in found["alternatives"]]
    assert rates == sorted(rates, reverse=True)
    assert found["choice"] == found["alternatives"][0]
    assert all(one["vram_gb"] <= 8.0 and one["ram_gb"] <= 128.0 for one in found["alternatives"])


def test_at_8_gb_subspec_beats_plain_offloading_by_the_papers_factor(
    plan: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    found = plan("--machine", "subspec-desktop", "--target", str(tmp_path), "--draft", "substitute")
    factor = (
        named(found, "SubSpec")["tokens_per_s"] / named(found, "plain offloading")["tokens_per_s"]
    )
    assert factor == pytest.approx(9.15, rel=0.25)  # Table 2 of the SubSpec paper
    assert named(found, "SubSpec")["vram_gb"] <= 8.0


def test_of_several_heads_the_number_of_blocks_is_decided_too(
    plan: Callable[..., dict[str, Any]],
) -> None:
    alone = named(
        plan("--machine", "dovetail-server", "--target-size", "7B", "--draft", "dovetail"),
        "Dovetail",
    )
    assert 1 < alone["blocks"] <= 6
    assert "must be trained" in alone["lacks"]
    laptop = named(
        plan(
            *shlex.split(
                "--machine dovetail-laptop --target-size 13B --draft dovetail --memory.ram 24GB"
            )
        ),
        "Dovetail",
    )
    assert laptop["blocks"] < alone["blocks"]  # where drafting is slow, few are better: Table 8


def test_without_a_gpu_everything_is_on_the_cpu(plan: Callable[..., dict[str, Any]]) -> None:
    found = plan("--draft", "small", "--draft", "dovetail", "--draft", "none")
    if found["device"] is not None:
        pytest.skip("there is a GPU here")
    shared = layout_of(Settings()).shared
    place = "in turns with the target" if shared else "on a separate core"
    assert found["device_says"].endswith(f"everything is on the CPU, and a draft {place}")
    assert found["kernels"] == kernels.in_words()
    assert {one["name"] for one in found["alternatives"]} == {"target alone", "Dovetail"}
    assert {one["vram_gb"] for one in found["alternatives"]} == {0.0}
    assert all("estimated" in origin or "assumed" in origin for origin in found["origins"].values())


def test_a_config_alone_gives_a_table(invoke: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    result = invoke("plan", "--machine", "subspec-desktop", "--target", str(tmp_path))
    assert result.returncode == 0, result.stderr
    for words in (
        "SubSpec",
        "plain offloading",
        "target alone",
        "speculation is worth it",
        "dovetail serve",
    ):
        assert words in result.stdout


def test_of_a_target_with_experts_a_pass_reads_those_that_its_rows_choose(
    plan: Callable[..., dict[str, Any]], invoke: Run, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_MOE))
    asked = ("--machine", "dovetail-server", "--target", str(tmp_path), "--weights", "int8")
    found = plan(*asked)
    assert found["parameters"] == pytest.approx(30.2e9, rel=0.01)  # its card: 30.5 with embeddings
    assert found["active_parameters"] == pytest.approx(3.03e9, rel=0.01)
    assert named(found, "target alone")["ram_gb"] > 30.0
    read_s = found["active_parameters"] / 56.6e9  # bytes, at the bandwidth of that machine
    assert named(found, "target alone")["tokens_per_s"] == pytest.approx(1 / read_s, rel=0.1)
    apart, plain = named(found, "experts on the CPU"), named(found, "target alone")
    assert apart["vram_gb"] < 4.0  # attention, head, keys and values
    assert apart["ram_gb"] > 28.0
    assert apart["tokens_per_s"] > 1.05 * plain["tokens_per_s"]
    assert "all on the device" in found["left_out"]
    assert apart["settings"]["target.split.experts_on_cpu"] is True
    assert "experts on the cpu" in apart["placement"]
    independent = "as if rows chose independently of each other"
    assert found["origins"]["experts of a pass"] == independent
    refused = invoke("plan", *asked, "--draft", "substitute")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "substitute is not planned on a GPU with layers that have experts" in refused.stderr


def test_a_gguf_file_that_is_not_here_is_planned_by_its_size(
    plan: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Qwen3-30B-A3B as UD-Q4_K_XL: 16.49 GiB with its embedding, over two nodes."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_MOE))
    asked = ("--machine", "two-xeons", "--target", str(tmp_path), "--draft", "none")
    found = plan(*asked, "--gguf-size", "16.49GiB")
    assert found["weights"] == "file"
    alone = named(found, "target alone, over memory nodes")
    share = 16.49 * 2**30 / (found["parameters"] + 2048 * 151936)
    read_s = share * found["active_parameters"] / 122.88e9
    beside_s = 30e-6 / 2 + MEETING_S
    assert alone["tokens_per_s"] == pytest.approx(1 / (read_s + 48 * beside_s), rel=0.05)
    assert found["choice"] == alone


def test_what_old_machines_publish_is_told_apart_and_all_of_it_was_predicted() -> None:
    known = tomllib.loads((BENCHMARKS / "legacy.toml").read_text())
    predictions = json.loads((BENCHMARKS / "legacy-predictions.json").read_text())
    key = ("processor", "model", "weights")
    reports = [tuple(one[name] for name in key) for one in known["reports"]]
    assert len(set(reports)) == len(reports) >= 25
    assert [tuple(one[name] for name in key) for one in predictions] == reports
    assert {one["model"] for one in known["reports"]} == known["models"].keys()
    assert all(one["source"].startswith("https://") for one in known["reports"])


def test_the_rate_of_a_type_of_weights_is_that_of_the_command_to_type(
    plan: Callable[..., dict[str, Any]],
) -> None:
    found = plan("--machine", "dovetail-server", "--target-size", "7B", "--draft", "dovetail")
    (compared,) = found["weights_compared"]
    assert compared["tokens_per_s"] == found["at_once"]["tokens_per_s"]
    assert compared["tokens_per_s"] < found["choice"]["tokens_per_s"]


def test_the_command_that_trains_a_head_names_the_gguf_file_that_was_named(
    plan: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    folder, file = DEMO_FOLDER / "target", tmp_path / "model.gguf"
    write_gguf(folder, file, lambda *_: GGMLQuantizationType.Q8_0, **tokens_of(folder))
    found = plan("--target", str(file), "--weights", "fp32", "--draft", "dovetail")
    lacks = [one["lacks"] for one in found["alternatives"] if one["lacks"]]
    assert lacks
    assert all(f"--target {file} --data CHATS --out HEAD" in one for one in lacks)


@needs_kernels
def test_the_types_of_weights_that_a_gguf_file_can_have_are_compared(
    plan: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    folder, file = DEMO_FOLDER / "target", tmp_path / "model.gguf"
    write_gguf(folder, file, lambda *_: GGMLQuantizationType.Q8_0, **tokens_of(folder))
    found = plan("--target", str(file), "--draft", "none")
    compared = {one["weights"]: one for one in found["weights_compared"]}
    assert list(compared) == ["file", "fp32", "int8"]
    assert found["weights"] == "file", "its own type before those that lose more, even if faster"
    assert found["choice"]["settings"].get("target.weights", "fp32") == found["weights"]
    assert found["choice"]["settings"]["target.model"] == str(file)
    assert f"--target.model={file}" in found["measurable"]
    assert compared["file"]["gb"] == pytest.approx(34 / 32 * found["parameters"] / 1e9, rel=0.02)
    assert compared["fp32"]["gb"] == pytest.approx(4 * found["parameters"] / 1e9, rel=0.02)
    assert compared["file"]["computes"].startswith("the file's blocks; activations in int8")
    stands_in = ("--weights", "file", "--target.split.device", "cpu")
    beside = plan("--target", str(file), "--draft", "none", *stands_in)
    assert f"--target.model={file}" in beside["measurable"]
    assert "--target.split.device" not in beside["measurable"]
    exact = ("--weights", "file", "--target.activations", "fp32")
    found = plan("--target", str(file), "--draft", "none", *exact)
    assert found["choice"]["settings"]["target.activations"] == "fp32"


def test_without_a_draft_it_plans_with_those_that_are_there(
    plan: Callable[..., dict[str, Any]],
) -> None:
    asked = ("--target", str(DEMO_FOLDER / "target"), "--weights", "fp32")
    found = plan(*asked)
    (there,) = (one for one in found["alternatives"] if "draft.model" in one["settings"])
    assert Path(there["settings"]["draft.model"]).samefile(DEMO_FOLDER / "draft")
    assert not there["lacks"]
    assert any("must be trained" in one["lacks"] for one in found["alternatives"])
    auto = plan(*asked, "--draft", "auto")
    names = [{one["name"] for one in each["alternatives"]} for each in (found, auto)]
    assert names[0] == names[1]
    only = plan(*asked, "--draft", "dovetail")
    assert all("draft.model" not in one["settings"] for one in only["alternatives"])


@needs_kernels
def test_overhead_and_limits_of_the_same_instruction_set_are_used_for_other_models(
    plan: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    asked = ("--target", str(DEMO_FOLDER / "target"), "--weights", "fp32", "--draft", "none")
    before = plan(*asked)
    assert before["origins"]["messages of a round"].startswith("assumed")
    assert before["uncalibrated"], "its rate is printed as an estimate"
    curve = RowsSeconds(rows=(1, 64), seconds=(0.02, 0.05))
    peaks = {"fp32": 300.0, "int8": 2000.0, "bf16": 800.0}
    calibration = Calibration(
        measured="2026-07-26T12:00:00+00:00",
        backend="kernels",
        context=512,
        t_v=curve,
        t_v_limit=curve,
        t_v_by_context=(),
        layers=4,
        layers_measured=4,
        limits=MachineLimits(bandwidth_gb_s=55.0, peak_gflop_s=peaks, probe="kernels plain C++"),
        overhead_s=0.0123,
    )
    one = {"machine": machine_key(), "software": "x", "weights": "fp32", "threads": 1}
    key = ProfileKey(**one, shapes="of another model")
    update_profile(
        tmp_path / "cache" / "dovetail" / "profile.json",
        key,
        lambda entry: entry.having(calibration),
    )
    found = plan(*asked)
    assert found["origins"]["messages of a round"] == "12 ms (measured with another model)"
    (alone,) = found["alternatives"]
    assert alone["round_ms"]["beside"] == pytest.approx(12.3)
    assert 1e3 / alone["tokens_per_s"] == pytest.approx(alone["round_ms"]["verify"] + 12.3)
    assert "measured now" in found["origins"]["passes of the CPU"]
    same = plan(*asked, "--target.isa", "plain")["origins"]["passes of the CPU"]
    source = f"measured with another model; {LAYER_US:g} us a layer assumed"
    assert same == f"estimated from 55 GB/s and products ({source})"


@needs_kernels
def test_a_plan_made_while_other_programs_compute_says_so(
    plan: Callable[..., dict[str, Any]],
) -> None:
    with contextlib.ExitStack() as ending:
        for _ in range(1 + len(os.sched_getaffinity(0)) // 8):
            busy = subprocess.Popen([sys.executable, "-c", "while 1: pass"])
            ending.callback(ending.enter_context(busy).kill)
        found = plan("--target", str(DEMO_FOLDER / "target"), "--draft", "none")
    assert "while other programs used" in found["origins"]["passes of the CPU"]


@needs_kernels
def test_weights_of_4_bits_are_compared_with_the_others_of_a_checkpoint(
    plan: Callable[..., dict[str, Any]],
) -> None:
    folder = DEMO_FOLDER / "target"
    found = plan("--target", str(folder), "--draft", "none")
    compared = {one["weights"]: one for one in found["weights_compared"]}
    assert list(compared) == ["half", "fp32", "int8", "int4"]
    assert compared["int8"]["computes"].endswith("checked on loading, may be refused")
    assert compared["int4"]["computes"].startswith("another function: logits move by about 10 %")
    taken = linears_bytes(read_tensors(folder), "int4")
    assert compared["int4"]["gb"] == pytest.approx(taken / 1e9, rel=0.02)
    assert compared["int4"]["gb"] < compared["int8"]["gb"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--machine", "nowhere"), "there is no machine 'nowhere'"),
        (("--target-size", "7B"), "needs --machine"),
        (("--gguf-size", "4GiB"), "needs --machine"),
        (("--machine", "two-xeons", "--gguf-size", "big"), "is not a size"),
        (
            ("--machine", "dovetail-server", "--target-size", "7B", "--target", "x"),
            "replaces --target",
        ),
        (
            ("--machine", "dovetail-server", "--target-size", "7B", "--target.numa", "shard"),
            "has one memory node",
        ),
        (
            ("--machine", "two-xeons", "--target-size", "7B", "--target.numa", "1"),
            "write shard, or leave it out",
        ),
        (("--target", "/nowhere"), "/nowhere"),
        (("--weights", "int8-per-tensor"), "cannot be planned"),
        (("--target.resident", "3"), "a plan chooses this"),
        (
            ("--machine", "dovetail-server", "--target-size", "7B", "--draft", "small"),
            "name one with --draft FOLDER",
        ),
        (
            (
                *shlex.split("--machine dovetail-server --target-size 7B --draft"),
                str(DEMO_FOLDER / "draft"),
            ),
            "tokens and the target",
        ),
        (("--machine", "dovetail-server", "--rounds", "/nowhere"), "is not a recording"),
        (
            (
                *shlex.split(
                    "--machine dovetail-server --target-size 7B --memory.vram 1MB --memory.ram 1MB"
                ),
            ),
            "nothing fits",
        ),
        (("--machine", "dovetail-server", "--memory.vram", "much"), "is not a size"),
    ],
)
def test_what_is_wrong_is_one_line(invoke: Run, arguments: tuple[str, ...], words: str) -> None:
    result = invoke("plan", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@needs_kernels
@pytest.mark.slow
def test_the_settings_of_the_winner_start_it(
    run: Run, plan: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    limits = (
        *shlex.split(
            "--target.split.device cpu --memory.vram 64MiB --draft small --draft dovetail"
        ),
    )
    for one in {found["name"]: found for found in plan(*limits)["alternatives"]}.values():
        flags = [
            f"--{name}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in one["settings"].items()
        ]
        result = run(
            *shlex.split("generate --json --max-tokens 8"),
            *flags,
            "Could you tell me a story about a young hedgehog?",
        )
        assert result.returncode == 0, (one["name"], result.stderr)
        told = json.loads(result.stdout)
        assert told["completion_tokens"] == 8
        assert one["placement"].startswith(told["placement"])


@needs_kernels
@pytest.mark.slow
def test_rounds_that_were_recorded_take_the_place_of_the_assumption(
    plan: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    rounds = str(tmp_path / "rounds")
    simulation = str(Path(__file__).parents[1] / "simulation")
    options = ("--limit=1", "--max-tokens=24", "--draft.device=cpu", f"--out={rounds}")
    subprocess.run([sys.executable, simulation, "record", *options], check=True)
    found = plan("--draft", "small", "--rounds", rounds)
    assert named(found, "Dovetail")["acceptance"].startswith("recorded: 1 replies")
    shutil.rmtree(rounds)


def test_what_has_no_room_is_named_and_is_not_called_too_slow(invoke: Run) -> None:
    shown = invoke(
        *("plan", "--machine", "dovetail-laptop", "--target-size", "7B", "--memory.ram", "7GB"),
        *("--draft", "dovetail", "--draft", "substitute"),
    )
    assert shown.returncode == 0, shown.stderr
    assert "none fits next to the target" in shown.stdout
    assert "these do not fit into memory: " in shown.stdout


def test_a_substitute_of_other_weights_is_refused_as_it_would_be_later(invoke: Run) -> None:
    refused = invoke(
        "plan", "--machine", "subspec-desktop", "--draft", "substitute", "--draft.weights", "fp16"
    )
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "draft.weights = 'fp16'" in refused.stderr


@needs_kernels
@pytest.mark.skipif(not POSSIBLE, reason="torch cannot be told of a device from Python")
@pytest.mark.parametrize(
    ("room", "remembered", "why"),
    everyday(
        [
            (4_000_000, "", "it takes 0.08"),
            (120_000_000, "its products are wrong", "as at its last start: its products"),
        ],
        (4_000_000, "", "it takes 0.08"),
    ),
)
def test_a_draft_that_the_gpu_cannot_have_is_priced_on_the_cpu(
    plan: Callable[..., dict[str, Any]], tmp_path: Path, room: int, remembered: str, why: str
) -> None:
    """The draft falls back for want of memory, or as the profile file remembers it."""
    draft, target = str(DEMO_FOLDER / "draft"), str(DEMO_FOLDER / "target")
    key = fall_key(DraftSettings(model=draft), target, open_device("pretended", 1))
    remember_fall(tmp_path / "cache" / "dovetail" / "profile.json", key, remembered)
    with capped(MEMORY.used + room):
        found = plan(
            *("--target.device", "pretended", "--weights", "half", "--draft", draft),
            *("--target", target),
        )
    assert "".join(found["falls"].values()).startswith(why)
    drafted = [one for one in found["alternatives"] if one["gamma"]]
    devices = {one["settings"]["draft.device"] for one in drafted}
    assert devices == {"cpu"}


def test_the_first_line_is_a_command_that_lacks_nothing(invoke: Run) -> None:
    asked = ("plan", "--machine", "dovetail-server", "--target-size", "7B")
    lines = invoke(*asked, "--draft", "dovetail").stdout.splitlines()
    assert shlex.split(lines[0])[:2] == ["dovetail", "serve"]
    assert {"--target=FOLDER", "--draft=none"} <= {*shlex.split(lines[0])}
    wins = "Dovetail, split target wins, but its draft must be trained first: "
    assert any(line.startswith(wins) for line in lines)
    assert "Dovetail, split target needs more: the draft must be trained" in lines[-2]
    trained = shlex.split(lines[-2].partition(": dovetail train ")[2])
    assert {"--data", "--out"} <= {*trained}, "train asks for both"
    assert lines[-1].startswith("then: dovetail serve ")
    assert lines[-1].endswith("--draft.model=HEAD")


def test_a_cache_that_a_gpu_does_not_have_leaves_the_target_on_the_cpu(
    plan: Callable[..., dict[str, Any]],
) -> None:
    asked = ("--machine", "dovetail-server", "--target-size", "7B", "--weights", "half")
    found = plan(*asked, "--target.cache", "q8", "--target.context", "8192")
    for row in found["alternatives"]:
        own = {name: value for name, value in row["settings"].items() if "target" in name}
        assert own.keys() <= {"target.weights", "target.cache", "target.context"}
        assert (own["target.cache"], own["target.context"]) == ("q8", 8192)
    assert "8 bits move logits" in found["weights_compared"][0]["computes"]


def test_no_word_of_a_table_is_cut_however_narrow_the_terminal_is(
    run: Run, environment: dict[str, str]
) -> None:
    columns, asked = (
        60,
        ("plan", "--machine", "dovetail-laptop", "--target-size", "7B", "--draft", "substitute"),
    )
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    command = [sys.executable, "-P", "-m", "dovetail.launch.cli", *asked]
    own = {name: value for name, value in environment.items() if name != "COLUMNS"}
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=own):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while piece := os.read(ours, 1 << 16):
                shown += piece
    os.close(ours)
    words = {*run(*asked).stdout.split()}
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown.decode())
    table = [line for line in plain.splitlines() if line.startswith(" ")]
    assert table
    assert {word for line in table for word in line.split() if "─" not in word} <= words
    assert max(map(len, table)) <= columns
