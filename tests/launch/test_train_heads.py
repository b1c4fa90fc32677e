"""`dovetail train KIND` for the embedded target: the folder that it writes is what the draft loads,
to the same logits."""

import json
import shlex
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Type
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from dovetail.launch.commands.features import command as features
from dovetail.launch.commands.train import command
from dovetail.launch.training import run as training
from dovetail.launch.training.run import TrainingOptions, show_progress, train_head
from dovetail.protocol.errors import UserError
from dovetail.workers.devices.opening import open_device
from dovetail.workers.heads.files import open_files
from dovetail.workers.heads.head import Head, classify, open_head
from dovetail.workers.heads.mtp.layers import open_mtp
from dovetail.workers.models.checkpoints.checkpoint import open_weights
from dovetail.workers.models.segment import Segment
from dovetail.workers.training.block_losses import block_states
from dovetail.workers.training.data.features import Batch
from dovetail.workers.training.folder import read_weights, shape_for
from dovetail.workers.training.heads.dovetail import DovetailHead
from dovetail.workers.training.heads.trainable import Seen, mask_of
from dovetail.workers.training.recipes import TRAINED, recipe_of
from dovetail.workers.training.run import Progress
from dovetail.workers.training.target_parts import read_target
from dovetail.workers.training.trainer import new_head
from support.architectures import write_tiny
from support.cases import everyday
from support.gguf_files import tokens_of, write_gguf
from support.kernels import needs_kernels

TARGET = Path(__file__).resolve().parents[2] / "launch" / "demo" / "target"
KINDS: dict[str, dict[str, Any]] = {
    "eagle": {"draft_vocabulary": 500, "store": "int8"},
    "eagle3": {"draft_vocabulary": 1000},
    "dovetail": {"blocks": 3, "dgf_silu": False},
    "jakiro": {"experts": 3},
    "mtp": {},
    "dflash": {"blocks": 2, "block_size": 4, "draft_vocabulary": 600},
    "dspark": {"blocks": 1, "block_size": 4, "rank": 8},
}
BLOCKS = ("dflash", "dspark")
PUBLIC = {
    "eagle": {
        "fc.weight",
        "fc.bias",
        "d2t",
        "fc.weight_scale",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.post_attention_layernorm.weight",
    },
    "eagle3": {
        "fc.weight",
        "midlayer.hidden_norm.weight",
        "midlayer.self_attn.q_proj.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
    },
    "dovetail": {
        "input_layernorm.weight",
        "W_1",
        "W_2",
        "W_z",
        "layers.0.self_attn.q_proj.weight",
        "layers.2.input_layernorm.weight",
    },
    "jakiro": {
        "fc.weight",
        "layers.0.mlp_moe.gate.weight",
        "layers.0.mlp_moe.experts.2.down_proj.weight",
    },
    "mtp": {
        "mtp_layers.0.input_proj.weight",
        "mtp_layers.0.token_layernorm.weight",
        "mtp_layers.0.hidden_layernorm.weight",
        "mtp_layers.0.final_layernorm.weight",
        "mtp_layers.0.self_attn.q_proj.weight",
    },
    "dflash": {
        "fc.weight",
        "hidden_norm.weight",
        "layers.1.self_attn.q_norm.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
    },
    "dspark": {
        "fc.weight",
        "layers.0.self_attn.k_norm.weight",
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
    },
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty short sequences of the embedded target's ids, of which the second half is learned."""
    rng, ids, learn = np.random.default_rng(0), list[int](), list[int]()
    for _ in range(60):
        row = [0, *rng.integers(10, 4096, size=int(rng.integers(12, 24))).tolist(), 1]
        ids += row
        learn += [int(place > len(row) // 2) for place in range(len(row))]
    path = tmp_path_factory.mktemp("tokens") / "text.bin"
    np.array(ids, dtype="<u2").tofile(path)
    np.array(learn, dtype=np.uint8).tofile(path.with_suffix(".mask"))
    return path


def wish(kind: Any, tokens: Path, out: Path, **otherwise: Any) -> TrainingOptions:
    fields, given = {option.field for option in TRAINED[kind].options}, KINDS[kind] | otherwise
    own = {name: value for name, value in given.items() if name in fields}
    others = {name: value for name, value in given.items() if name not in own}
    return TrainingOptions(
        **{
            "kind": kind,
            "out": out,
            "data": (tokens,),
            "steps": 3,
            "batch": 2,
            "length": 48,
            "number": "fp32",
            "own": own,
            **others,
        }
    )


@pytest.fixture(scope="module")
def written(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Trains a head of a kind, once."""

    @cache
    def trained(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("heads") / kind
        train_head(wish(kind, tokens, folder))
        return folder

    return trained


def both(kind: str, folder: Path) -> tuple[Head, Any]:
    """The draft of a folder, and the module that was trained."""
    if kind == "mtp":
        of: dict[str, Any] = {"target": str(TARGET), "weights": "fp32"}
        head = open_mtp(str(folder), device=open_device("cpu", 1), **of)
    else:
        head = open_head(str(folder), target=str(TARGET), weights="fp32", device="cpu")
    trained = json.loads((folder / "training.json").read_text())
    oracle = new_head(recipe_of(kind).shape(**trained["shape"]), seed=1)
    read_weights(oracle, open_files(str(folder), allow_bin=False))
    assert classify(str(folder)) == kind
    return head, oracle


@pytest.mark.parametrize(
    "kind", everyday([kind for kind in KINDS if kind not in BLOCKS], "eagle3", "jakiro", "mtp")
)
def test_the_draft_loads_the_folder_and_computes_the_same_logits(
    kind: str, written: Callable[[str], Path]
) -> None:
    folder, count = written(kind), 7
    config = json.loads((folder / "config.json").read_text())
    (head, oracle), target = both(kind, folder), read_target(str(TARGET))
    assert config["dovetail"]["trained_for"] == target.digest == open_weights(TARGET).digest
    assert head.trained_for in (("",) if kind == "mtp" else (target.digest,))
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(4096, (count,), generator=random)
    features = torch.randn(count, 768 if kind == "eagle3" else 256, generator=random)
    found = head.forward(
        ids,
        features,
        torch.arange(count),
        [Segment(head.new_cache(count), 0, count)],
        true=True,
        contrast=kind == "jakiro",
    )
    with torch.no_grad():
        seen = Seen(mask_of(torch.zeros(1, count)))
        said = oracle(
            target.frozen.embedding.float()[ids][None],
            oracle.begin(features[None]),
            torch.arange(count)[None],
            seen,
        )
    close(found.states, said.state[0])
    rows = target.frozen.head if oracle.known is None else target.frozen.head[oracle.known]
    logits = oracle.logits(said.state[0], rows.float()).detach()
    if oracle.known is not None:
        known = len(oracle.known)
        assert torch.isneginf(found.logits).sum(-1).tolist() == [4096 - known] * count
        found = replace(found, logits=found.logits[:, oracle.known])
    if kind == "eagle":  # its output head is rounded to 8 bits, too
        assert (found.logits - logits).abs().max() <= 0.02 * logits.abs().max()
    else:
        close(found.logits, logits)
    if kind == "jakiro":
        assert found.contrast is not None
        assert said.contrast is not None
        close(found.contrast, oracle.logits(said.contrast[0], target.frozen.head.float()).detach())


@pytest.mark.parametrize("kind", everyday(BLOCKS, "dspark"))
def test_the_draft_computes_the_blocks_that_were_trained(
    kind: str, written: Callable[[str], Path]
) -> None:
    (head, oracle), count = both(kind, written(kind)), 7
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(4096, (count + 1,), generator=random)
    taps = torch.randn(count + 1, 768, generator=random).half()
    rows, cache = oracle.shape.block_size, head.new_cache(count + 4)
    context = [Segment(cache, 0, count)]
    read = taps[:count].float()
    head.forward(ids[:count], read, torch.arange(count), context, true=True, rows=ids[:0])
    cache.keep(range(count), count)
    found = head.forward(
        torch.tensor([int(ids[-1]), *[oracle.shape.mask_token] * (rows - 1)]),
        torch.zeros(rows, 256),
        torch.arange(count, count + rows),
        [Segment(cache, count, rows)],
        true=False,
        rows=torch.arange(rows - oracle.shape.levels, rows),
    )
    one = torch.zeros(1, count + 1, dtype=torch.int32)
    batch = Batch(ids[None], one > 0, one, torch.arange(count + 1)[None], taps[None], taps[None])
    frozen = read_target(str(TARGET)).frozen
    expected = block_states(oracle, frozen, batch, torch.tensor([[count]]))[0, 0].detach()
    close(found.states, expected)
    known = torch.arange(4096) if oracle.known is None else oracle.known
    close(found.logits[:, known], expected @ frozen.head.float()[known].T)
    if head.pairs is not None:
        previous = torch.tensor([3, 70])
        pairs = head.pairs(found.states[1], previous, torch.tensor([5, 9, 4095]))
        at, matrix = oracle.output(expected[1].expand(2, -1), previous, frozen.head.float())
        scores = (at @ matrix.T).detach()[:, [5, 9, 4095]] - expected[1] @ frozen.head.float()[
            [5, 9, 4095]
        ].T
        torch.testing.assert_close(pairs, scores, atol=1e-4, rtol=1e-3)


def close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", everyday(KINDS, "eagle3", "jakiro", "mtp", "dflash"))
def test_the_folder_is_in_the_public_format_with_card_and_pictures(
    kind: str, written: Callable[[str], Path]
) -> None:
    folder = written(kind)
    files = shlex.split(
        "README.md acceptance.svg config.json loss.svg model.safetensors training.json"
    )
    reduced = kind in ("eagle", "eagle3", "dflash")  # to a d2t
    counts = [] if reduced else ["token_counts.json"]
    assert sorted(file.name for file in folder.iterdir()) == sorted([*files, *counts])
    with safe_open(folder / "model.safetensors", framework="pt") as content:
        names = set(content.keys())
        assert names >= PUBLIC[kind]
        assert not any("embed_tokens" in name for name in names)
        assert ("lm_head.weight" in names) == reduced
        types = {content.get_slice(name).get_dtype() for name in names}
        assert types <= {"F16", "I64", "BOOL", *(["I8"] if kind == "eagle" else [])}
    card = (folder / "README.md").read_text()
    assert str(TARGET.name) in card
    assert "tokens per round" in card
    for picture in ("loss.svg", "acceptance.svg"):
        xml.parse(folder / picture)
    assert not list(folder.parent.glob("*.unfinished"))
    assert not list(folder.parent.glob("*.new"))


def test_what_is_in_the_way_of_a_head_stays(tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match=r"letter\.txt"):
        train_head(wish("eagle", tokens, tmp_path / "head"))
    assert (tmp_path / "head" / "letter.txt").is_file()


def test_an_unfinished_run_is_resumed_by_the_same_command_only(
    tokens: Path, tmp_path: Path
) -> None:
    out, often = (
        tmp_path / "head",
        wish("eagle", tokens, tmp_path / "head", rate=1e30),
    )  # whose weights cannot be written in the end
    with pytest.raises(UserError, match="do not fit into fp16"):
        train_head(often)
    for name, other in {
        "begin": {"begin": "random"},
        "rate": {"rate": 1e-3},
        "kind": {"kind": "jakiro", "own": {"experts": 3}},
        "recipe.noise": {"noise": 0.1},
    }.items():
        with pytest.raises(UserError, match=f"unfinished run of other {name} "):
            train_head(replace(often, **other))
    with pytest.raises(UserError, match="do not fit into fp16"):
        train_head(often)
    assert not out.exists()


def test_the_papers_losses_are_a_preset(tokens: Path, tmp_path: Path) -> None:
    trained = train_head(
        wish("jakiro", tokens, tmp_path / "head", preset="paper", contrast=False, experts=2)
    )
    assert trained is not None
    assert (
        trained.plan.recipe.feature,
        trained.plan.recipe.cross_entropy,
        trained.plan.pace.rate,
        trained.plan.alone,
    ) == (1.0, 0.1, 9e-5, 0.0)
    assert trained.checks[-1].contrast is None
    assert (tmp_path / "head" / "model.safetensors").is_file()


@torch.no_grad()
def test_a_head_begins_with_the_targets_last_layers() -> None:
    target = read_target(str(TARGET))
    head = new_head(shape_for("dovetail", target, context=512, blocks=2), seed=0)
    assert isinstance(head, DovetailHead)
    assert (
        head.begin_with(target, stream=2.0) == 17
    )  # nine tensors of a layer, and the first has no norm before its attention
    g = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    close(head.fuse(torch.zeros(3, 256), g), g)
    close(
        head.get_parameter("layers.1.mlp.up_proj.weight"),
        target.read("layers.7.mlp.up_proj.weight").float(),
    )
    written = (
        target.read("layers.6.mlp.down_proj.weight").float()
        * target.read("model.norm.weight").float()[:, None]
        / 2
    )
    close(head.get_parameter("layers.0.mlp.down_proj.weight"), written)
    eagle = new_head(shape_for("eagle", target, context=512), seed=0)
    assert eagle.begin_with(target) == 8
    tokens, features = (
        eagle.get_parameter("fc.weight")[:, half] for half in (slice(0, 256), slice(256, 512))
    )
    weighed = target.frozen.embedding.float().square().mean().sqrt() * tokens.square().mean().sqrt()
    assert float(
        weighed
        / target.read("model.norm.weight").float().square().mean().sqrt()
        / features.square().mean().sqrt()
    ) == pytest.approx(1, rel=0.02)


@torch.no_grad()
def test_norms_that_are_stored_less_one_or_elsewhere_are_not_mistaken(tmp_path: Path) -> None:
    """As in Gemma: a head's output norm begins as the target computes it; no layer is copied."""
    assert write_tiny("gemma3_text", tmp_path)
    target = read_target(str(tmp_path))
    head = new_head(shape_for("eagle3", target, context=64), seed=0)
    before = head.get_parameter("midlayer.post_attention_layernorm.weight").clone()
    assert head.begin_with(target, stream=3.0) == 0
    close(head.get_parameter("norm.weight"), 1 + target.read("norm.weight").float())
    assert torch.equal(head.get_parameter("midlayer.post_attention_layernorm.weight"), before)
    stream = 100 * torch.randn(1, 2, 3 * head.shape.hidden)
    close(head.begin(stream).square().mean(-1).sqrt(), torch.full((1, 2), 3.0))


@needs_kernels
def test_a_gguf_file_is_a_target_and_a_trained_head_learns_more_from_further_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, data = tmp_path / "model.gguf", []
    write_gguf(TARGET, file, lambda *_: Type.Q8_0, **tokens_of(TARGET))
    for part in range(2):
        lines = [{"prompt": f"Say {part} {n}", "response": f"{part} " * n} for n in range(2, 42)]
        chats = tmp_path / f"chats-{part}.jsonl"
        chats.write_text("".join(json.dumps(line) + "\n" for line in lines))
        data.append(tmp_path / f"features-{part}")
        options = ["--target", str(file), "--data", str(chats), "--out", str(data[-1])]
        done = CliRunner().invoke(features, [*options, "--taps", "2,4,5"], catch_exceptions=False)
        assert done.exit_code == 0
    first, second = tmp_path / "first", tmp_path / "second"
    many = {"data": (), "draft_vocabulary": 300, "store": "int8"}
    train_head(wish("eagle3", data[0], first, features=(data[0],), **many))
    still = {"steps": 1, "rate": 1e-12, "begin": str(first)}
    train_head(wish("eagle3", data[0], second, features=tuple(data), **still, **many))
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    other = wish("eagle3", data[0], tmp_path / "other", features=tuple(data), begin=str(first))
    with pytest.raises(UserError, match=r"another shape \(size mismatch for d2t\): give"):
        train_head(replace(other, data=(), draft_vocabulary=200))
    config = json.loads((first / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [1, 4, 5]
    (first / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"with taps \(1, 4, 5\), but the .* for \(2, 4, 5\)"):
        train_head(replace(other, data=(), draft_vocabulary=300))
    card = (second / "README.md").read_text()
    assert "the model in a file called model.gguf" in card
    assert str(tmp_path) not in card


@pytest.mark.slow
def test_two_processes_train_one_head(tokens: Path, tmp_path: Path) -> None:
    line = "from dovetail.launch.commands.train import command; command()"
    (tmp_path / "train.py").write_text(line)
    options = (
        f"eagle --data {tokens} --out {tmp_path / 'head'} --steps 2 --batch 2 --length "
        "48 --threads 1"
    ).split()
    subprocess.run(
        [
            sys.executable,
            *shlex.split("-m torch.distributed.run --standalone --nproc_per_node=2"),
            str(tmp_path / "train.py"),
            *options,
        ],
        check=True,
    )
    trained = json.loads((tmp_path / "head" / "training.json").read_text())
    assert trained["outcome"]["tokens"] == 2 * 2 * 2 * 48


@pytest.mark.parametrize(
    ("otherwise", "complaint"),
    [
        ({"data": ()}, "give either --data FILE, or --features DIR"),
        ({"features": (Path("somewhere"),)}, "^give either --data FILE, or --features DIR"),
        ({"draft_vocabulary": 5000}, "more than the target's 4096"),
        ({"begin": "targett"}, "--begin targett is neither target, nor random, nor the folder of"),
        ({"begin": str(TARGET)}, "is neither target, nor random, nor the folder of a head of the"),
        ({"regenerate": True, "processes": 2}, "--regenerate needs --data and a single process"),
        ({"processes": 2}, r"pip install 'dovetail-llm\[train\]'"),
    ],
)
def test_mistakes_are_one_line(
    otherwise: dict[str, Any],
    complaint: str,
    tokens: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(UserError, match=complaint) as found:
        train_head(wish("eagle3", tokens, tmp_path / "head", **otherwise))
    assert "\n" not in str(found.value)
    assert not (tmp_path / "head").exists()


def test_an_mtp_layer_is_only_trained_as_a_layer_of_its_target(
    tokens: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="an MTP layer has the MLP and the vocabulary of its"):
        train_head(wish("mtp", tokens, tmp_path / "head", draft_vocabulary=500))
    assert write_tiny("gemma3_text", tmp_path / "target")
    target = read_target(str(tmp_path / "target"))
    with pytest.raises(UserError, match="the target is of model type gemma3_text: train another"):
        shape_for("mtp", target, context=64)
    scaled = {"rope_parameters": {"rope_type": "yarn"}, "model_type": "llama"}
    with pytest.raises(UserError, match="of model type llama with rope_scaling: train another"):
        shape_for("mtp", replace(target, config=target.config | scaled), context=64)


def test_a_resumed_run_shows_the_time_left_at_its_own_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "PLAIN_LINE_EVERY_S", 0.0)
    with show_progress() as show:
        show(Progress("features", 0.9, 0, 10, spent_s=1.0))
        show(Progress("features", 0.95, 0, 20, spent_s=61.0))
    assert "features 95%: 20 tokens, 0/s, 1 minute left\n" in capsys.readouterr().err


def test_each_kind_has_a_command_with_its_own_options() -> None:
    for kind, option in {
        "eagle": "--ttt-steps",
        "eagle3": "--begin",
        "dovetail": "--blocks",
        "jakiro": "--no-contrast",
        "mtp": "--ttt-steps",
        "dflash": "--block-size",
        "dspark": "--rank",
    }.items():
        shown = CliRunner().invoke(command, [kind, "--help-all"])
        assert shown.exit_code == 0
        assert option in shown.output


def test_the_result_is_one_json_object_where_that_is_asked_for(
    tokens: Path, tmp_path: Path
) -> None:
    head, model = tmp_path / "head", tmp_path / "model"
    training = ("--steps", "1", "--batch", "2", "--length", "48", "--number", "fp32")
    done = CliRunner().invoke(
        command,
        ["eagle", "--data", str(tokens), "--out", str(head), *training, "--json"],
        catch_exceptions=False,
    )
    assert "60 sequences" in done.stderr
    told, log = json.loads(done.stdout), json.loads((head / "training.json").read_text())
    assert {name: told[name] for name in ("out", "kind", "steps", "parameters")} == {
        "out": str(head),
        "kind": "eagle",
        "steps": 1,
        "parameters": 868864,
    }
    assert (told["tau"], told["accepted_at"]) == (
        log["checks"][-1]["length"],
        log["checks"][-1]["at"],
    )
    new = ("--hidden", "16", "--mlp", "16", "--layers", "1", "--heads", "2", "--kv-heads", "1")
    options = [
        "small",
        "--text",
        str(tokens),
        "--tokenizer",
        str(TARGET),
        "--minutes",
        "0.001",
        *new,
        "--out",
        str(model),
        "--json",
    ]
    told = json.loads(CliRunner().invoke(command, options, catch_exceptions=False).stdout)
    assert (told["out"], told["parameters"]) == (
        str(model),
        4096 * 16 + 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 16 + 3 * 16,
    )
