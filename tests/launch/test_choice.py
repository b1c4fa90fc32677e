"""A target that is named and no more: the weights and the draft that are chosen for it."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from dovetail.launch.planning.candidates import kind_of
from dovetail.launch.planning.choice import find_drafts, with_choices
from dovetail.launch.planning.designs import Design, head_size
from dovetail.launch.planning.nearby import Drafts
from dovetail.launch.settings.configure import Configuration, configure
from dovetail.launch.settings.models import DEMO_FOLDER, blocks_in_words
from dovetail.protocol.errors import SettingsError
from support.architectures import write_tiny
from support.gguf_files import tokens_of, write_gguf
from support.gguf_heads import write_gguf_head
from support.heads import Variant, write_head
from support.kernels import needs_kernels
from support.models import tiny_phi3
from support.mtp import write_mtp


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_FOLDER / "target", tmp_path / "models" / "target"))


def chosen(target: Path | str, **flags: Any) -> tuple[Configuration, list[str]]:
    given = {name.replace("__", "."): str(value) for name, value in flags.items()}
    return with_choices(configure(model=str(target), flags=given, environment={}), lambda _: None)


def there(target: Path) -> Drafts:
    return find_drafts(configure(model=str(target), environment={}), target)


def test_without_another_model_the_draft_is_a_lookup(target: Path) -> None:
    found, said = chosen(target)
    assert found.settings.draft.kind == "ngram"
    assert said[1:] == [
        "drafts found: none",
        "draft ngram (a look-up in the text): no head for the target and no smaller model was "
        "found; change with --draft",
        "expected: the speed without a draft, more where text repeats",
    ]


def test_auto_finds_a_draft_as_if_none_were_named(target: Path) -> None:
    small = shutil.copytree(DEMO_FOLDER / "draft", target.parent / "small")
    assert chosen(target, draft__kind="auto")[0].settings.draft.model == str(small)


def test_a_target_is_checked_and_its_draft_chosen_without_torch(target: Path) -> None:
    """A model that is known starts without the seconds and the memory that torch takes."""
    tiny_phi3(target.parent / "stranger")
    program = (
        "import sys; from dovetail.launch.planning.choice import with_choices; "
        "from dovetail.launch.processes.stack import check_stack; "
        "from dovetail.launch.settings.configure import configure; "
        f"found, _ = with_choices(configure(model={str(target)!r}, environment={{}}), print); "
        "check_stack(found); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", program]).returncode == 0


def test_a_smaller_model_of_its_vocabulary_beside_it_drafts(target: Path) -> None:
    small = shutil.copytree(DEMO_FOLDER / "draft", target.parent / "small")
    tiny_phi3(target.parent / "stranger")
    shutil.copytree(target, target.parent / "as large")
    found, said = chosen(target)
    assert found.settings.draft.model == str(small)
    large = target.parent / "as large"
    assert said[1:3] == [
        f"drafts found: {small} (small model small); passed over: {large} (more than half as large "
        "as its target)",
        f"draft {small} (small model small); change with --draft",
    ]
    assert re.fullmatch(r"expected: about \S+ tokens/s, \S+ times that without a draft.*", said[3])


def test_a_model_of_as_many_other_tokens_does_not_draft(target: Path) -> None:
    small = Path(shutil.copytree(DEMO_FOLDER / "draft", target.parent / "small"))
    content = json.loads((small / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    one, other = list(words)[300:302]
    words[one], words[other] = words[other], words[one]
    (small / "tokenizer.json").write_text(json.dumps(content))
    found, said = chosen(target)
    assert found.settings.draft.kind == "ngram"
    assert said[1] == (
        f"drafts found: none; passed over: {target.parent / 'small'} (another vocabulary)"
    )


@pytest.mark.parametrize("place", ["inside/draft", "cache/dovetail/heads/mine"])
def test_a_head_in_the_target_s_folder_or_in_dovetail_s_cache_is_found(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = target / "draft" if place.startswith("inside") else tmp_path / place
    shutil.copytree(DEMO_FOLDER / "heads" / "eagle", folder)
    assert chosen(target)[0].settings.draft.model == str(folder)


def test_a_head_for_another_target_inside_its_folder_is_named_with_the_reason(target: Path) -> None:
    head = Path(shutil.copytree(DEMO_FOLDER / "heads" / "eagle", target / "draft"))
    config = json.loads((head / "config.json").read_text())
    wrong = config | {"vocab_size": 5000, "hidden_size": 320}
    (head / "config.json").write_text(json.dumps(wrong))
    assert chosen(target)[1][1] == (
        f"drafts found: none; passed over: {head} (for 5000 tokens and a width of 320, not 4096 "
        "tokens and a width of 256)"
    )


def test_a_head_in_a_gguf_file_beside_a_gguf_target_drafts(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, head = (tmp_path / "gguf" / name for name in ("model.gguf", "eagle3-model.gguf"))
    file.parent.mkdir()
    write_gguf(target, file, lambda *_: Type.Q8_0, **tokens_of(target))
    shape = {"hidden": 256, "target_width": 256, "heads": 8, "head_dim": 32, "taps": (1, 4, 6)}
    sizes = {"vocabulary": 4096, "draft_vocabulary": 512, "own_embedding": True}
    folder = write_head(tmp_path / "head", Variant("eagle3", **shape, **sizes))
    write_gguf_head(folder, head, vocab_size=None)
    for twin in file.parent.glob("*.twin"):
        shutil.rmtree(twin)
    found, said = chosen(file)
    assert said[1] == f"drafts found: {head} (eagle3 head eagle3-model.gguf of 1 block)"
    assert said[2].startswith(f"draft {head} (eagle3 head ")
    assert kind_of(Path(found.settings.draft.model)) == "eagle3"


@needs_kernels
def test_the_mtp_layer_of_a_checkpoint_drafts_and_one_that_was_left_out_is_named(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "models" / "target"
    folder.parent.mkdir()
    write_mtp("qwen3_5_text", folder)
    shutil.rmtree(folder.parent / "target-alone")
    found, said = chosen(folder)
    assert said[1] == "drafts found: mtp (MTP layer)"
    assert (found.settings.draft.kind, said[2]) == (
        "mtp",
        "draft mtp (MTP layer); change with --draft",
    )
    tensors = load_file(folder / "model.safetensors")
    trunk = {name: one for name, one in tensors.items() if not name.startswith("mtp.")}
    save_file(trunk, folder / "model.safetensors")
    assert chosen(folder)[1][1].startswith(
        "drafts found: none; passed over: mtp (has no MTP layer (tensors such as mtp.fc"
    )


def test_a_damaged_draft_file_beside_a_gguf_target_is_named_with_the_reason(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, draft = (tmp_path / "gguf" / name for name in ("model.gguf", "dflash-model.gguf"))
    file.parent.mkdir()
    write_gguf(target, file, lambda *_: Type.Q8_0, **tokens_of(target))
    draft.write_bytes(b"GGUF")
    found, said = chosen(file)
    assert found.settings.draft.kind == "ngram"
    assert said[1].startswith(f"drafts found: none; passed over: {draft} (")


def test_of_several_drafts_the_planner_chooses(target: Path) -> None:
    shutil.copytree(DEMO_FOLDER / "draft", target.parent / "small")
    for kind in ("dovetail", "eagle"):
        shutil.copytree(DEMO_FOLDER / "heads" / kind, target.parent / f"{kind} head")
    found, said = chosen(target)
    assert Path(found.settings.draft.model).parent == target.parent
    assert said[1].startswith("drafts found: ")
    assert said[1].count("head (") + said[1].count("small (") >= 1
    assert said[3].startswith("expected: about ")


def test_a_head_that_comes_with_dovetail_is_found_for_its_target(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the digest of its target or by the shape. The expected gain is the one measured in its
    training, and the cost of its pass that of its own vocabulary."""
    head = Path(shutil.copytree(DEMO_FOLDER / "heads" / "eagle", tmp_path / "box/heads/public"))
    monkeypatch.setattr("dovetail.launch.settings.models.DEMO_FOLDER", tmp_path / "box")
    found, said = chosen(target)
    assert found.settings.draft.model == str(head)
    assert said[2] == (
        f"draft {head} (eagle head public of 1 block, trained for this very file); change with "
        "--draft"
    )
    (candidate,) = there(target).fitting
    assert "simulated when it was trained" in candidate.acceptance.origin
    config = json.loads((head / "config.json").read_text())
    reduced = {"draft_vocab_size": 512, "quantization_config": {"quant_method": "any"}}
    assert head_size(Design(config | reduced), 1).pass_bytes < candidate.size.pass_bytes / 3
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config))
    assert "trained for a model of this shape);" in chosen(target)[1][2]
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": 5000}))
    assert there(target) == Drafts()


def test_a_draft_in_the_cache_of_the_hub_is_found(target: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--some-one--small" / "snapshots" / "f00d"
    shutil.copytree(DEMO_FOLDER / "draft", snapshot)
    assert chosen(target)[0].settings.draft.model == str(snapshot)


def test_what_is_named_is_not_chosen(target: Path) -> None:
    found, said = chosen(target, draft__kind="none", target__weights="fp32")
    assert (found.settings.draft.kind, found.settings.target.weights, said) == ("none", "fp32", [])


def test_weights_are_the_checkpoints_own_if_they_fit(target: Path) -> None:
    found, said = chosen(target)
    assert (found.settings.target.weights, said[0]) == (
        "half",
        "weights half: the checkpoint's own 16 bits; change with --weights",
    )
    file = target / "model.safetensors"
    save_file({name: one.to(torch.float32) for name, one in load_file(file).items()}, file)
    assert chosen(target)[0].settings.target.weights == "fp32"
    found, said = chosen(target, memory__ram="80MB")
    assert (found.settings.target.weights, said[0]) == (
        "int8",
        "weights int8: fp32 does not fit into memory; change with --weights",
    )


def write_outline(folder: Path) -> None:
    """Write the config.json of a model of a billion weights in 16 bits, and the header of its
    weights alone."""
    layers, hidden, units, vocabulary = 16, 2048, 8192, 32000
    shapes = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden)}
    for index in range(layers):
        own = f"model.layers.{index}"
        shapes |= {f"{own}.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{own}.mlp.{name}_proj": (units, hidden) for name in ("gate", "up")}
        shapes[f"{own}.mlp.down_proj"] = (hidden, units)
    entries, place = {}, 0
    for name, shape in shapes.items():
        end = place + 2 * prod(shape)
        entries[f"{name}.weight"] = {"dtype": "F16", "shape": shape, "data_offsets": (place, end)}
        place = end
    header = json.dumps(entries).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": units,
        "num_attention_heads": 16,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(config))


@needs_kernels
def test_weights_are_int4_where_only_these_fit(tmp_path: Path) -> None:
    target = tmp_path / "large"
    write_outline(target)
    found = {}
    for limit in ("4GB", "2.2GB", "1.6GB", "0.7GB"):
        configuration, said = chosen(target, memory__ram=limit, draft__kind="none")
        found[limit] = configuration.settings.target.weights, said[0].split("; ")[0]
    assert found == {
        "4GB": ("half", "weights half: the checkpoint's own 16 bits"),
        "2.2GB": ("int8", "weights int8: half does not fit into memory"),
        "1.6GB": ("int4", "weights int4: neither half nor int8 fits into memory"),
        "0.7GB": ("int8", "weights int8: half does not fit into memory"),
    }


def test_a_gguf_file_keeps_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = []
    for role in ("target", "draft"):
        folder, file = DEMO_FOLDER / role, tmp_path / f"{role}.gguf"
        write_gguf(folder, file, lambda *_: Type.Q8_0, **tokens_of(folder))
        files.append(file)
    found, said = chosen(files[0])
    assert said[0] == "weights file: the file's own blocks; change with --weights"
    assert Path(found.settings.draft.model).name == "draft.gguf"


def test_weights_that_the_kernels_do_not_compute_become_fp32(tmp_path: Path) -> None:
    write_tiny("biogpt", tmp_path / "models" / "biogpt", dtype=torch.bfloat16)
    found, _ = chosen(tmp_path / "models" / "biogpt")
    assert found.settings.target.weights == "fp32"


def test_a_target_behind_a_flag_keeps_its_weights_and_gets_a_draft(target: Path) -> None:
    configuration = configure(flags={"target.model": str(target)}, environment={})
    found, said = with_choices(configuration, lambda _: None)
    assert (found.settings.target.weights, found.settings.draft.kind) == ("fp32", "ngram")
    assert len(said) == 3


def test_two_targets_are_refused() -> None:
    with pytest.raises(SettingsError, match="a and --target b name two targets"):
        configure(model="a", flags={"target.model": "b"}, environment={})


def test_the_embedded_pair_is_left_as_it_is() -> None:
    configuration = configure(environment={})
    assert with_choices(configuration, lambda _: None) == (configuration, [])


@needs_kernels
def test_a_gguf_target_is_computed_from_its_blocks_unless_something_else_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = DEMO_FOLDER / "target"
    whole, blocks = (tmp_path / f"model-{kind.name}.gguf" for kind in (Type.F16, Type.Q8_0))
    write_gguf(folder, whole, lambda *_: Type.F16, **tokens_of(folder))
    write_gguf(folder, blocks, lambda *_: Type.Q8_0, **tokens_of(folder))

    def weights(file: Path, **flags: str) -> tuple[str, str]:
        given = {"target.model": str(file), **flags}
        found = configure(flags=given, environment={})
        assert found.given("target.weights") == ("target.weights" in flags)
        return found.settings.target.weights, blocks_in_words(found.settings.target)

    assert weights(blocks)[0] == "file"
    assert weights(blocks, **{"target.weights": "int8"})[0] == "int8"
    asked = weights(blocks, **{"target.weights": "fp32"})
    assert asked[1].endswith("; --weights file takes less")
    found, said = weights(blocks, **{"target.backend": "library"})
    why = "blocks are computed only by the C++ kernels"
    assert (found, said.rpartition("; ")[2]) == ("fp32", why)
    split = {"target.split.device": "cuda:0"}
    assert weights(blocks, **split)[0] == "file"
    assert weights(blocks, **split, **{"target.activations": "fp32"})[0] == "file"
    assert weights(whole)[0] == "fp32"
    assert weights(whole)[1].endswith("the file's exact function")
    merged = configure(flags={"target.model": str(blocks)}, environment={})
    assert "--target.weights=file" in merged.arguments("target")  # of its workers


@needs_kernels
def test_a_gguf_file_of_the_hub_is_chosen_and_planned_as_the_blocks_that_it_has(
    target: Path, tmp_path: Path, invoke: Callable[..., Any]
) -> None:
    snapshot = tmp_path / "hub" / "models--some-one--m" / "snapshots" / ("0" * 40)
    for folder in (snapshot, snapshot.parents[1] / "refs"):
        folder.mkdir(parents=True)
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    write_gguf(target, tmp_path / "blob", lambda *_: Type.Q8_0, **tokens_of(target))
    (snapshot / "m-Q8_0.gguf").symlink_to(tmp_path / "blob")
    for name in ("some-one/m", "some-one/m/m-Q8_0.gguf"):
        found, said = chosen(name)
        assert found.settings.target.weights == "file"
        assert said[0] == "weights file: the file's own blocks; change with --weights"
    done = invoke("plan", "--target", "some-one/m", "--weights", "file")
    assert done.returncode == 0, done.stderr


def test_plan_proposes_what_serve_chooses(target: Path, invoke: Any, tmp_path: Path) -> None:
    file = tmp_path / "models" / "alone" / "model.gguf"
    file.parent.mkdir()
    write_gguf(target, file, lambda *_: Type.Q8_0, **tokens_of(target))
    for model in (target, file):
        done = invoke("plan", "--target", str(model), "--json")
        assert done.returncode == 0, done.stderr
        found, serve = json.loads(done.stdout), chosen(model)[0].settings
        assert found["at_once"]["settings"]["draft.kind"] == serve.draft.kind == "ngram"
        assert found["weights"] == serve.target.weights
        assert found["command"].startswith(f"dovetail serve --target={model} ")
        assert f"--weights={serve.target.weights} --draft=ngram" in found["command"]
