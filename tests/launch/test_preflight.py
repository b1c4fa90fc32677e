"""Mistakes are refused before anything is started."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import psutil
import pytest
import torch
from safetensors.torch import save_file

from dovetail.launch.chat.answering import PLAIN, CoordinatorAnswerer, Templated, templated
from dovetail.launch.decoding.single import RequestSettings
from dovetail.launch.files.outputs import OUT_FOLDER, check_output
from dovetail.launch.processes.connection import connected, connected_by_target
from dovetail.launch.processes.preflight import (
    check_draft,
    check_model,
    draft_bytes,
    estimated_bytes,
    free_memory_bytes,
    memory_bytes,
    no_chats,
)
from dovetail.launch.processes.stack import (
    begin_stack,
    layout_of,
    with_room_for_draft,
    worker_arguments,
)
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings import models as embedded
from dovetail.launch.settings.configure import Configuration, configure
from dovetail.launch.settings.generation import FILE, fitting, with_generation_config
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import CheckpointError, SettingsError, UserError
from dovetail.protocol.links import open_link
from dovetail.protocol.settings import DRAFT_KINDS, DraftSettings, TargetSettings
from dovetail.runtime.client import Client
from support.scripted import ScriptedTarget
from support.web import backend

Run = Callable[..., subprocess.CompletedProcess[str]]


def model_folder(path: Path, *names: str) -> str:
    path.mkdir()
    for name in names:
        (path / name).write_text("{}" if name == "config.json" else "", encoding="utf-8")
    return str(path)


def test_a_path_that_is_no_folder_of_a_model_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.touch()
    wrong = {
        "/no/such/model": "is not there",
        "./no-such-model": "is not there",
        "~/no-such-model": "is not there",
        str(file): "is a file; a model is a GGUF file, or a folder",
        model_folder(tmp_path / "a"): "no config.json",
        model_folder(tmp_path / "b", "config.json", "pytorch_model.bin"): "no \\*.safetensors",
    }
    for source, words in wrong.items():
        with pytest.raises(CheckpointError, match=f"^the target model {source} .*{words}"):
            check_model("target", source)


def test_no_name_and_a_folder_with_the_files_of_a_model_are_left_to_the_worker(
    tmp_path: Path,
) -> None:
    for source in (
        "",
        model_folder(tmp_path / "c", "config.json", "model-00001-of-00002.safetensors"),
    ):
        check_model("target", source)


ALONE = ("--draft", "none")


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "--draft", "foo", "hi"),
        pytest.param(("generate", "--target", "foo", *ALONE, "hi"), marks=pytest.mark.slow),
        pytest.param(("serve", "--target", "foo/bar@baz", *ALONE), marks=pytest.mark.slow),
        pytest.param(("chat", "--target", "foo", *ALONE), marks=pytest.mark.slow),
        pytest.param(
            ("bench", "--method", "none", "--target", "foo", *ALONE), marks=pytest.mark.slow
        ),
        pytest.param(("selftest", "--draft", "foo"), marks=pytest.mark.slow),
        ("worker", "--role", "target", "--connect", "tcp://127.0.0.1:9", "--target", "foo"),
        pytest.param(
            ("worker", "--role", "draft", "--connect", "tcp://127.0.0.1:9", "--draft", "foo"),
            marks=pytest.mark.slow,
        ),
        ("plan", "--target", "foo"),
        pytest.param(("calibrate", "--target", "foo"), marks=pytest.mark.slow),
        pytest.param(("calibrate", "--draft", "foo"), marks=pytest.mark.slow),
        pytest.param(("profile", "--draft", "foo", "--out", "OUT"), marks=pytest.mark.slow),
        pytest.param(
            ("stratify", "--draft", "foo", "--prompts", "PROMPTS", "--out", "OUT.toml"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("features", "--target", "foo", "--data", "PROMPTS", "--out", "OUT"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=" ".join,
)
def test_a_name_of_no_model_is_refused_before_torch_is_imported(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """No hub listens at port 9, so that every name is one that cannot be fetched."""
    line = {"id": "a", "turns": ["hi"], "messages": [{"role": "user", "content": "hi"}]}
    (tmp_path / "prompts").write_text(json.dumps(line) + "\n")
    places = {name: str(tmp_path / name.lower()) for name in ("OUT", "OUT.toml", "PROMPTS")}
    forbidden = tmp_path / "forbidden" / "torch"
    forbidden.mkdir(parents=True)
    (forbidden / "__init__.py").write_text("raise SystemExit('torch was imported')")
    environment = {
        **os.environ,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hub"),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "PYTHONPATH": str(forbidden.parent),
        "DOVETAIL_DEVICES": "",
    }
    command = [sys.executable, "-m", "dovetail.launch.cli", *(places.get(a, a) for a in arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    named = next(word for word in ("foo/bar@baz", "foo") if word in arguments)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    where = "is not a folder here and not in the Hugging Face cache"
    assert f"{named} {where}, and the hub cannot be reached (" in line
    assert line.endswith("while connected")
    assert "Connection refused" in line


def test_a_name_that_is_no_draft_is_answered_with_the_kinds_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError) as refused:
        check_model("draft", "foo")
    kinds = f"foo is no kind of draft ({', '.join(DRAFT_KINDS)}), and the draft model foo is not a"
    assert str(refused.value).startswith(f"{kinds} folder here and not in the Hugging Face cache, ")
    for source in ("foo/bar", "ngram"):  # none could be a kind, and the other is one
        with pytest.raises(CheckpointError, match=f"^the draft model {source} is not a folder"):
            check_model("draft", source)


def test_an_assistant_that_is_not_here_has_to_be_downloaded_first() -> None:
    flags = {"draft.model": "owner/gemma-4-assistant", "draft.share": "true"}
    with pytest.raises(SettingsError, match="`hf download owner/gemma-4-assistant` first"):
        check_draft(configure(flags=flags, environment={}).settings)


def test_a_relative_path_that_exists_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"^the draft model models has no config\.json"):
        check_draft(configure(flags={"draft.model": "models"}, environment={}).settings)


def test_pickled_weights_are_for_heads_and_only_where_they_are_allowed(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "head", "config.json", "pytorch_model.bin")
    with pytest.raises(
        CheckpointError,
        match=r"no \*\.safetensors.*if it is a head allow them with --draft\.pickled true",
    ):
        check_draft(configure(flags={"draft.model": folder}, environment={}).settings)
    check_draft(
        configure(flags={"draft.model": folder, "draft.pickled": "true"}, environment={}).settings
    )


def test_an_embedded_head_is_taken_where_there_is_one_and_else_it_is_said_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "DEMO_FOLDER", tmp_path)
    settings = configure(flags={"draft.kind": "eagle3"}, environment={}).settings
    with pytest.raises(
        UserError,
        match=r"^draft\.kind = 'eagle3': no such head .* train one with `dovetail train eagle3`",
    ):
        check_draft(settings)
    (tmp_path / "heads").mkdir()
    folder = model_folder(tmp_path / "heads" / "eagle3", "config.json", "model.safetensors")
    check_draft(settings)
    assert embedded.with_draft(settings.draft).model == folder
    assert embedded.with_draft(DraftSettings()).model == str(tmp_path / "draft")
    for kept in (DraftSettings(kind="ngram"), DraftSettings(model="x", kind="eagle3")):
        assert embedded.with_draft(kept) == kept


def test_the_memory_is_at_most_that_of_the_machine() -> None:
    assert 0 < memory_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    "flags",
    [
        {"target.model": "/no/such/model", "draft.kind": "none"},
        {"target.model": "owner/name", "draft.model": "/no/such/model"},
        {"draft.kind": "ngram", "draft.model": "owner/name"},
    ],
)
def test_nothing_is_started_for_what_cannot_be_loaded(flags: dict[str, str]) -> None:
    with Supervisor() as supervisor:
        with pytest.raises(UserError):
            begin_stack(supervisor, configure(flags=flags, environment={}))()
        assert supervisor.children == []


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "hello", "--target", "/no/such/model", "--draft", "none"),
        (
            *shlex.split(
                "worker --role target --connect ipc:///no/such/socket --target /no/such/model"
            ),
        ),
    ],
)
def test_a_missing_model_is_told_without_torch_and_within_a_second_of_the_processor(
    command: tuple[str, ...], environment: dict[str, str]
) -> None:
    code = f"""
import sys, time
from dovetail.launch.cli import run
code = run({command!r})
assert "torch" not in sys.modules
assert time.process_time() < 1.0, time.process_time()
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("dovetail: the target model /no/such/model is not there: ")
    assert done.stderr.count("\n") == 1


def test_an_output_that_cannot_be_written_is_refused_and_one_that_can_keeps_its_content(
    tmp_path: Path,
) -> None:
    file = tmp_path / "trace.json"
    file.write_text("old")
    check_output(file, "the trace")
    check_output(None, "the trace")
    assert file.read_text() == "old"
    for path in (tmp_path / "none" / "trace.json", tmp_path):
        with pytest.raises(UserError, match=f"cannot write the trace to {path}: "):
            check_output(path, "the trace")


def test_a_trace_that_cannot_be_written_ends_the_command_before_it_looks_for_a_coordinator(
    run: Run, tmp_path: Path
) -> None:
    done = run(
        "generate",
        "hello",
        "--trace",
        str(tmp_path / "none" / "trace.json"),
        "--connect",
        "ipc:///no/such/socket",
    )
    assert done.returncode == 2
    assert done.stderr.startswith("dovetail: cannot write the trace to ")
    assert [*(tmp_path / "tmp").iterdir()] == []


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("weights", "each"), [("fp32", 4), ("half", 2), ("int8", 1)])
def test_what_the_weights_will_need_follows_from_the_files(
    tmp_path: Path, weights: str, each: int, stored: torch.dtype
) -> None:
    parts = {f"model.layers.{n}.mlp.up_proj.weight": f"{n}.safetensors" for n in range(2)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    for name, file in parts.items():
        save_file({name: torch.ones(640, 1280, dtype=stored)}, tmp_path / file)
    needed = estimated_bytes(TargetSettings(model=str(tmp_path), weights=weights))
    numbers = 2 * 640 * 1280
    assert each * numbers <= needed <= 1.01 * each * numbers, "scales of int8 are 0.3 %"


def test_what_the_weights_of_a_quantised_checkpoint_will_need_are_its_numbers(
    tmp_path: Path,
) -> None:
    codes = torch.zeros(640, 1280 // 8, dtype=torch.int32)
    scales = torch.ones(640, 10, dtype=torch.float16)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({f"{name}_packed": codes, f"{name}_scale": scales}, tmp_path / "model.safetensors")
    group = {"weights": {"num_bits": 4, "group_size": 128}}
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    content = {"quantization_config": {**said, "config_groups": {"all": group}}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    needed = estimated_bytes(TargetSettings(model=str(tmp_path)))
    assert 4 * 640 * 1280 <= needed <= 1.01 * 4 * 640 * 1280


def test_what_is_not_here_yet_is_not_estimated(tmp_path: Path) -> None:
    assert estimated_bytes(TargetSettings(model="owner/name")) == 0
    assert 20e6 < estimated_bytes(TargetSettings()) < 50e6


def test_the_weights_of_a_gguf_file_need_its_size(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(1000))
    assert estimated_bytes(TargetSettings(model=str(file))) == 1000


def test_no_more_memory_is_free_than_there_is() -> None:
    assert 0 < free_memory_bytes() <= memory_bytes()


GPU = {"target.device": "cuda:0", "memory.vram": "1GB"}


@pytest.mark.parametrize(
    "draft",
    [{}, {"draft.kind": "dovetail"}, {"draft.kind": "substitute"}],
    ids=["small", "head", "substitute"],
)
def test_of_a_gpu_that_both_have_the_draft_gets_its_memory_first(draft: dict[str, str]) -> None:
    settings = configure(flags={**GPU, **draft}, environment={})
    taken = draft_bytes(settings.settings)
    assert taken > 0
    assert with_room_for_draft(settings).settings.memory.vram_bytes == 10**9 - taken
    command = worker_arguments(settings, "draft", "ipc", layout_of(settings.settings))
    assert f"--memory.vram={taken}B" in command


@pytest.mark.parametrize(
    "draft",
    [
        {"draft.kind": "none"},
        {"draft.kind": "ngram"},
        {"draft.device": "cuda:1"},
        {"draft.device": "cpu"},
    ],
)
def test_a_draft_that_is_elsewhere_takes_nothing_of_the_targets_gpu(draft: dict[str, str]) -> None:
    settings = configure(flags={**GPU, **draft}, environment={})
    assert with_room_for_draft(settings) is settings


@pytest.mark.parametrize("device", ["auto", "cuda:0"])
def test_a_draft_that_has_the_gpu_alone_gets_the_whole_limit(device: str) -> None:
    given = {"draft.device": device, "memory.vram": "1GB"}
    settings = configure(flags=given, environment={})
    layout = layout_of(settings.settings)
    assert "--memory.vram=1000000000B" in worker_arguments(settings, "draft", "ipc", layout)
    target = worker_arguments(with_room_for_draft(settings), "target", "ipc", layout)
    assert {"--memory.vram=auto", "--target.prefill=local"} <= set(target)


@pytest.mark.parametrize(
    "given", [{"draft.kind": "ngram"}, {"draft.device": "cpu"}, {"target.prefill": "cuda:0"}]
)
def test_a_limit_that_is_not_the_drafts_goes_to_the_target(given: dict[str, str]) -> None:
    settings = configure(flags={**given, "memory.vram": "1GB"}, environment={})
    assert with_room_for_draft(settings) is settings


def test_a_limit_that_the_draft_alone_exceeds_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"memory\.vram = '10MB', and the draft alone takes"):
        with_room_for_draft(configure(flags={**GPU, "memory.vram": "10MB"}, environment={}))


def test_a_file_is_no_folder_to_write_to_and_what_is_not_there_may_become_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(click.BadParameter, match="file is a file: name a folder"):
        OUT_FOLDER.convert(str(tmp_path / "file"), None, None)
    assert OUT_FOLDER.convert(str(tmp_path / "new"), None, None) == tmp_path / "new"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "the model has no chat template"),
        ("{{ messages | evil }}", "the chat template of the target cannot be used"),
        ("{{ messages[0].content }}", ""),
    ],
)
def test_a_target_without_chats_is_reported(
    tmp_path: Path, template: str | None, words: str
) -> None:
    folder = shutil.copytree(DEMO_FOLDER / "target", tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    said = no_chats(TargetSettings(model=str(folder)))
    assert said.startswith(f"chats are refused, completions are served: {words}" if words else "")
    assert bool(said) == bool(words)


def configured(folder: Path, content: Any, **flags: str) -> Configuration:
    (folder / FILE).write_text(content if isinstance(content, str) else json.dumps(content))
    given = {name.replace("__", "."): text for name, text in flags.items()}
    return configure(flags={"target.model": str(folder), **given}, environment={})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}, (0.6, 0.95, 20, 512)),
        ({"do_sample": True}, (1.0, 1.0, 0, 512)),
        ({"do_sample": False, "temperature": 0.6}, (0.0, 1.0, 0, 512)),
        ({"temperature": 0.7, "max_new_tokens": 2048}, (0.7, 1.0, 0, 2048)),
        ({"eos_token_id": [1, 2], "temperature": None}, (0.0, 1.0, 0, 512)),
    ],
)
def test_a_targets_sampling_defaults_are_those_of_requests(
    content: dict[str, Any], expected: tuple[float, float, int, int], tmp_path: Path
) -> None:
    found, words = with_generation_config(configured(tmp_path, content))
    sampling = found.settings.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == expected
    assert bool(words) == (expected != (0.0, 1.0, 0, 512))


def test_the_fewest_tokens_of_a_reply_are_the_targets(tmp_path: Path) -> None:
    found, _ = with_generation_config(configured(tmp_path, {"min_new_tokens": 5}))
    assert found.settings.sampling.min_tokens == 5
    for given, least in (({}, 3), ({"sampling__min_tokens": "4"}, 4)):
        asked = configured(tmp_path, {"min_new_tokens": 5}, sampling__max_tokens="3", **given)
        found, _ = with_generation_config(asked)
        assert fitting(found).settings.sampling.min_tokens == least


def test_what_the_user_says_stays_and_what_is_taken_over_is_told(tmp_path: Path) -> None:
    content = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    asked = configured(tmp_path, content, sampling__temperature="0")
    found, words = with_generation_config(asked)
    assert found.settings.sampling.temperature == 0.0
    assert found.settings.sampling.top_k == 20
    assert words.startswith(f"sampling by the target's {FILE}: top_k 20 (")
    assert found.arguments("sampling") == ["--sampling.temperature=0.0", "--sampling.top_k=20"]
    without = configured(tmp_path, content, sampling__generation_config="none")
    assert with_generation_config(without) == (without, "")


def test_a_request_to_a_target_that_runs_here_has_the_defaults_of_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FILE).write_text(json.dumps({"do_sample": True, "top_k": 20}))
    given = configure(flags={"sampling.temperature": "0.5"}, environment={}, demo=False)
    with backend(target=False, draft=False) as house:
        here = {"model": str(tmp_path), "host": socket.gethostname(), "pid": os.getpid()}
        worker = house.add(ScriptedTarget, "target", **here)
        with connected_by_target(given, house.address) as (_, found):
            assert found.settings.sampling == given.settings.sampling.model_copy(
                update={"top_k": 20}
            )
        assert f"sampling by the target's {FILE}: top_k 20 (" in capsys.readouterr().err
        house.lose(worker)
        house.add(ScriptedTarget, "target", **here | {"host": "elsewhere"})
        with connected_by_target(given, house.address) as (_, found):
            assert found == given
        assert capsys.readouterr().err == ""


def test_a_persons_values_reach_the_targets_template() -> None:
    thinks = "w5 {{ 'w6' if enable_thinking else 'w7' }} {{ messages[0].content }}"
    with backend(target=False, draft=False) as house:
        house.add(ScriptedTarget, "target", template=thinks)
        with Client(open_link(house.address, role="client")) as client:
            assert templated(client, {}) is None
            asked = [
                Templated(client, {"enable_thinking": wanted}).submitted(("w8",))["tokens"]
                for wanted in (True, False)
            ]
            assert asked == [(5, 6, 8), (5, 7, 8)]
            with pytest.raises(UserError, match=r"kwargs .*tools may not be among them"):
                Templated(client, {"tools": []})
        house.lose(house.workers[0])
        house.add(ScriptedTarget, "target", template="")
        with (
            Client(open_link(house.address, role="client")) as client,
            pytest.raises(UserError, match="the target has none"),
        ):
            Templated(client, {"enable_thinking": True})


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("{", "is not JSON"), ("[]", "not a JSON object"), ('{"top_p": 7}', "sampling.top_p")],
)
def test_a_damaged_file_is_one_error_that_names_it(
    content: str, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=complaint) as raised:
        with_generation_config(configured(tmp_path, content))
    assert str(tmp_path / FILE) in str(raised.value)


def test_without_a_chat_template_a_prompt_is_continued_and_that_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with backend(target=False, draft=False) as house:
        house.add(ScriptedTarget, "target", template="")
        with connected(configure(environment={}), house.address) as connection:
            for raw in (False, True):
                wish = RequestSettings(configure(environment={}), raw=raw)
                wish.to(connection, wish.configuration)
                assert (f"{PLAIN}\n" in capsys.readouterr().err) == (not raw)
            assert CoordinatorAnswerer(connection).no_chats() == PLAIN
