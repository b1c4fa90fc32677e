"""Model folders that somebody damaged, or made to do harm: weights, configurations, tokenizers,
chat templates, draft heads.

Each is a copy of a tiny model with one thing wrong in it. `Bad.words` is what the complaint has to
name: the file, and the tensor or the key where it is about one. What harm would do, if it were
done, is to leave a file named like `MARKER`. Knows folders, not who loads them.
"""

import json
import math
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.heads import write_head
from support.models import VOCABULARY, tiny_llama

MARKER = "EXECUTED"
"""The file that a payload writes into the folder above its own."""
UP_PROJ = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"
HUGE = 10**9


@dataclass(frozen=True)
class Bad:
    """One bad folder."""

    name: str
    spoil: Callable[[Path], object]
    """Damages the copy of a good one."""
    words: tuple[str, ...]
    """All of them stand in the complaint."""
    role: str = "target"
    """The role of the worker that is to load it; a draft's good folder is a head."""
    flags: tuple[str, ...] = ()


def good_folders(folder: Path) -> Mapping[str, Path]:
    """The folders that are damaged, by role."""
    return {"target": tiny_llama(folder / "target"), "draft": write_head(folder / "draft", "eagle")}


def damaged(bad: Bad, good: Mapping[str, Path], folder: Path) -> Path:
    """The bad folder, in `folder`, which is empty."""
    path = Path(shutil.copytree(good[bad.role], folder / "model"))
    bad.spoil(path)
    return path


# -- ways to damage --------------------------------------------------------------------------------


def config(path: Path, file: str = "config.json", **changes: object) -> None:
    """Other values in a JSON file."""
    content = json.loads((path / file).read_text()) if (path / file).exists() else {}
    (path / file).write_text(json.dumps({**content, **changes}))


def text(path: Path, file: str, content: str | bytes) -> None:
    """Something else in a file."""
    (path / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def without(path: Path, *files: str) -> None:
    for file in files:
        (path / file).unlink(missing_ok=True)


def cut(path: Path, keep: int) -> None:
    """The weights end early."""
    os.truncate(path / "model.safetensors", keep)


def header(path: Path, content: bytes, length: int | None = None, data: bytes = b"") -> None:
    """Weights with this header, which says that it is of another length."""
    (path / "model.safetensors").write_bytes(
        struct.pack("<Q", len(content) if length is None else length) + content + data
    )


def entries(path: Path, **tensors: Any) -> None:
    """Weights of 64 bytes whose header says this of them."""
    header(path, json.dumps(tensors).encode(), data=bytes(64))


def tensor(path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Another tensor under a name, or none."""
    tensors = load_file(path / "model.safetensors")
    old = tensors.pop(name)
    if change is not None:
        tensors[name] = change(old)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def spoilt(value: float, old: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor that differs in one number."""
    new = old.clone()
    new.view(-1)[3] = value
    return new


def index(path: Path, weight_map: object) -> None:
    """An index in the place of the weights, which lie beside it as a part."""
    (path / "model.safetensors").rename(path / "model-1.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def index_with(path: Path, file: str, name: str = NORM) -> None:
    """An index that says that the tensor of this name lies in this file."""
    names = [*load_file(path / "model.safetensors")]
    index(path, {**dict.fromkeys(names, "model-1.safetensors"), name: file})


def long_header(path: Path) -> None:
    """One of 128 MiB, of which most is nothing."""
    header(path, b"{}", length=128 << 20)
    os.truncate(path / "model.safetensors", 129 << 20)


def link(path: Path, file: str, to: str) -> None:
    without(path, file)
    (path / file).symlink_to(to)


def pipe(path: Path, file: str) -> None:
    """A file that never ends, and never begins."""
    without(path, file)
    os.mkfifo(path / file)


class Payload:
    """A pickle of this runs a command when it is read."""

    def __init__(self, path: Path) -> None:
        self._command = f"touch {path.parent / MARKER}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


def pickled(path: Path, file: str = "pytorch_model.bin", *, alone: bool = True) -> None:
    """Weights that run a command when they are unpickled."""
    if alone:
        without(path, "model.safetensors")
    (path / file).write_bytes(pickle.dumps({"fc.weight": Payload(path)}))


def code(path: Path) -> None:
    """A configuration that names classes in a file beside it."""
    text(
        path,
        "evil.py",
        f"import os\nos.system('touch {path.parent / MARKER}')\nclass Config: pass\nclass "
        "Model: pass\n",
    )
    config(
        path,
        model_type="evil",
        auto_map={
            "AutoConfig": "evil.Config",
            "AutoModelForCausalLM": "evil.Model",
            "AutoTokenizer": "evil.Model",
        },
    )


def tokenizer(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Something else in tokenizer.json."""
    content = json.loads((path / "tokenizer.json").read_text())
    change(content)
    (path / "tokenizer.json").write_text(json.dumps(content))


def normalizer(content: dict[str, Any]) -> None:
    """One that makes of every letter a thousand, and of each of these again."""
    step = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 1000}
    content["normalizer"] = {"type": "Sequence", "normalizers": [step] * 4}


def vocabulary(content: dict[str, Any], **tokens: int) -> None:
    content["model"]["vocab"] |= tokens


# -- what there is ---------------------------------------------------------------------------------

FILE = "model.safetensors"
BROKEN = "not a complete safetensors file"
ONE = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}
WEIGHTS = (
    Bad("an empty folder", lambda p: without(p, *os.listdir(p)), ("has no config.json",)),  # noqa: PTH208
    Bad("no weights", lambda p: without(p, FILE), ("has no model.safetensors",)),
    Bad("weights cut to nothing", lambda p: cut(p, 0), (FILE, BROKEN)),
    Bad("weights cut in their header", lambda p: cut(p, 400), (FILE, BROKEN)),
    Bad("weights cut in their numbers", lambda p: cut(p, 100_000), (FILE, BROKEN)),
    Bad(
        "a header that claims 2^60 bytes",
        lambda p: header(p, b"{}", length=1 << 60),
        (FILE, BROKEN),
    ),
    Bad("a header longer than the file", lambda p: header(p, b"{}", length=5000), (FILE, BROKEN)),
    Bad("a header that is no JSON", lambda p: header(p, b"\xff" * 64), (FILE, BROKEN)),
    Bad("a header nested 100,000 deep", lambda p: header(p, b'{"a":' * 100_000), (FILE, BROKEN)),
    Bad("a header of 128 MiB", long_header, (FILE, BROKEN)),
    Bad(
        "a tensor outside the file",
        lambda p: entries(p, a={**ONE, "data_offsets": [1 << 40, (1 << 40) + 64]}),
        (FILE, BROKEN),
    ),
    Bad("two tensors on the same bytes", lambda p: entries(p, a=ONE, b=ONE), (FILE, BROKEN)),
    Bad(
        "bytes that no tensor has",
        lambda p: entries(p, a={**ONE, "shape": [8], "data_offsets": [0, 32]}),
        (FILE, BROKEN),
    ),
    Bad(
        "a shape that overflows",
        lambda p: entries(p, a={**ONE, "shape": [1 << 32, 1 << 32, 1 << 32]}),
        (FILE, BROKEN),
    ),
    Bad("numbers of type object", lambda p: entries(p, a={**ONE, "dtype": "O"}), (FILE, BROKEN)),
    Bad(
        "numbers that need a scale (F8)",
        lambda p: tensor(p, NORM, lambda t: t.to(torch.float8_e4m3fn)),
        (FILE, NORM, "F8_E4M3"),
    ),
    Bad(
        "integers for weights",
        lambda p: tensor(p, UP_PROJ, lambda t: t.to(torch.int64)),
        (UP_PROJ, "of type I64"),
    ),
    Bad(
        "a missing tensor", lambda p: tensor(p, UP_PROJ, None), (f"lacks tensor {UP_PROJ}, which",)
    ),
    Bad(
        "a tensor of another shape",
        lambda p: tensor(p, NORM, lambda t: t[:63]),
        (NORM, "has the shape [63]", "[64]"),
    ),
    Bad(
        "a NaN", lambda p: tensor(p, UP_PROJ, lambda t: spoilt(math.nan, t)), (FILE, UP_PROJ, "NaN")
    ),
    Bad(
        "an infinite number",
        lambda p: tensor(p, UP_PROJ, lambda t: spoilt(math.inf, t)),
        (FILE, UP_PROJ, "infinite"),
    ),
    Bad(
        "weights that are a link to /etc/passwd",
        lambda p: link(p, FILE, "/etc/passwd"),
        (FILE, BROKEN),
    ),
    Bad("weights that are a link to /dev/zero", lambda p: link(p, FILE, "/dev/zero"), (FILE,)),
    Bad("weights that are a pipe", lambda p: pipe(p, FILE), (FILE,)),
    Bad("weights that are a folder", lambda p: (without(p, FILE), (p / FILE).mkdir()), (FILE,)),
    Bad(
        "an index that is no JSON",
        lambda p: (index(p, {}), text(p, f"{FILE}.index.json", "{")),
        ("index.json",),
    ),
    Bad("an index that lists nothing", lambda p: index(p, {}), ("index.json", "no weight_map")),
    Bad("a map that is a list", lambda p: index(p, [1, 2]), ("index.json", "weight_map")),
    Bad(
        "an index that is a list",
        lambda p: (index(p, {}), text(p, f"{FILE}.index.json", "[]")),
        ("index.json does not contain a JSON object, but []",),
    ),
    Bad(
        "an index into the folder above",
        lambda p: index_with(p, f"../{FILE}"),
        ("index.json", f"../{FILE}"),
    ),
    Bad(
        "an index to /etc/passwd",
        lambda p: index_with(p, "/etc/passwd"),
        ("index.json", "/etc/passwd"),
    ),
    Bad(
        "an index to a pickle",
        lambda p: (index_with(p, "evil.bin"), pickled(p, "evil.bin")),
        ("index.json", "evil.bin"),
    ),
    Bad(
        "an index to a part that is not there",
        lambda p: index_with(p, "model-2.safetensors"),
        ("model-2.safetensors is missing",),
    ),
    Bad("a pickle with a payload for weights", pickled, ("*.bin", "*.safetensors")),
    Bad("a pickle with a payload under another name", lambda p: pickled(p, FILE), (FILE, BROKEN)),
    Bad(
        "a configuration that names a pickle",
        lambda p: (config(p, transformers_weights="evil.bin"), pickled(p, "evil.bin", alone=False)),
        ("transformers_weights",),
    ),
    Bad("an adapter", lambda p: text(p, "adapter_config.json", "{}"), ("adapter_config.json",)),
)
CONFIGURATIONS = (
    Bad(
        "config.json that is no JSON",
        lambda p: text(p, "config.json", '{"a": '),
        ("config.json is not JSON (Expecting value, line 1 column 7)",),
    ),
    Bad(
        "config.json that is a list",
        lambda p: text(p, "config.json", "[]"),
        ("config.json does not contain a JSON object, but []",),
    ),
    Bad(
        "config.json nested 100,000 deep",
        lambda p: text(p, "config.json", "[" * 100_000),
        ("config.json",),
    ),
    Bad(
        "config.json that is not UTF-8",
        lambda p: text(p, "config.json", b'{"a": "\xff"}'),
        ("config.json is not UTF-8 text: byte 7 is 0xff",),
    ),
    Bad(
        "config.json of 1 GiB", lambda p: os.truncate(p / "config.json", 1 << 30), ("config.json",)
    ),
    Bad(
        "config.json that is a link to /dev/zero",
        lambda p: link(p, "config.json", "/dev/zero"),
        ("config.json",),
    ),
    Bad(
        "generation_config.json that is no JSON",
        lambda p: text(p, "generation_config.json", "nonsense"),
        ("generation_config.json",),
    ),
    Bad("hidden_size 10^9", lambda p: config(p, hidden_size=HUGE), (str(HUGE),)),
    Bad("vocab_size 10^9", lambda p: config(p, vocab_size=HUGE), ("vocab_size",)),
    Bad(
        "intermediate_size 10^12",
        lambda p: config(p, intermediate_size=HUGE * 1000),
        (str(HUGE * 1000),),
    ),
    Bad("num_hidden_layers 10^9", lambda p: config(p, num_hidden_layers=HUGE), (str(HUGE),)),
    Bad(
        "num_attention_heads 0",
        lambda p: config(p, num_attention_heads=0),
        ("config.json", "num_attention_heads is 0"),
    ),
    Bad(
        "num_attention_heads -4",
        lambda p: config(p, num_attention_heads=-4),
        ("config.json", "num_attention_heads is -4"),
    ),
    Bad(
        "num_hidden_layers 1.5", lambda p: config(p, num_hidden_layers=1.5), ("num_hidden_layers",)
    ),
    Bad("hidden_size as text", lambda p: config(p, hidden_size="64"), ("hidden_size",)),
    Bad("vocab_size true", lambda p: config(p, vocab_size=True), ("vocab_size",)),
    Bad(
        "rope_theta NaN",
        lambda p: config(p, rope_parameters={"rope_type": "default", "rope_theta": math.nan}),
        ("model",),
    ),
    Bad(
        "rope_theta 0",
        lambda p: config(p, rope_parameters={"rope_type": "default", "rope_theta": 0.0}),
        ("model",),
    ),
    Bad(
        "rotary embeddings of an unknown type",
        lambda p: config(p, rope_parameters={"rope_type": "evil", "rope_theta": 1e4}),
        ("evil",),
    ),
    Bad("rms_norm_eps NaN", lambda p: config(p, rms_norm_eps=math.nan), ("model",)),
    Bad("an unknown activation", lambda p: config(p, hidden_act="os.system"), ("os.system",)),
    Bad("a dtype that is none", lambda p: config(p, dtype="os.system"), ("os.system",)),
    Bad(
        "a hundred thousand end tokens",
        lambda p: config(p, "generation_config.json", eos_token_id=[1] * 100_000),
        ("end",),
    ),
    Bad(
        "an unknown model_type",
        lambda p: config(p, model_type="no-such-model"),
        ("model type 'no-such-model' is not known to transformers",),
    ),
    Bad(
        "a model_type that is a path", lambda p: config(p, model_type="../../evil"), ("../../evil",)
    ),
    Bad(
        "classes in a file beside it (auto_map)",
        code,
        (
            "model type 'evil' needs its own program code",
            "(auto_map names 'evil.Config'), which is never run",
        ),
    ),
    Bad(
        "weights in four bits",
        lambda p: config(p, quantization_config={"quant_method": "gptq", "bits": 4}),
        ("weights are quantised (gptq)",),
    ),
    Bad(
        "quantization by code of its own",
        lambda p: config(p, quantization_config={"quant_method": "../evil"}),
        ("is quantised in an unsupported way (../evil)",),
    ),
)
TOKENIZERS = (
    Bad("no tokenizer.json", lambda p: without(p, "tokenizer.json"), ("has no tokenizer.json",)),
    Bad(
        "tokenizer.json that is no JSON",
        lambda p: text(p, "tokenizer.json", "{"),
        ("tokenizer.json",),
    ),
    Bad(
        "tokenizer.json nested 100,000 deep",
        lambda p: text(p, "tokenizer.json", "[" * 100_000),
        ("tokenizer.json",),
    ),
    Bad(
        "tokenizer.json of 65 MiB",
        lambda p: text(p, "tokenizer.json", (p / "tokenizer.json").read_text() + " " * (65 << 20)),
        ("tokenizer.json",),
    ),
    Bad(
        "tokenizer.json that is a link to /dev/zero",
        lambda p: link(p, "tokenizer.json", "/dev/zero"),
        ("tokenizer.json",),
    ),
    Bad(
        "tokenizer.json without a model",
        lambda p: tokenizer(p, lambda c: c.pop("model")),
        ("tokenizer.json",),
    ),
    Bad(
        "a tokenizer of an unknown kind",
        lambda p: tokenizer(p, lambda c: c["model"].update(type="Evil")),
        ("tokenizer.json",),
    ),
    Bad(
        "a token of id 2^40",
        lambda p: tokenizer(p, lambda c: vocabulary(c, evil=1 << 40)),
        ("tokenizer.json",),
    ),
    Bad(
        "a token of id -1",
        lambda p: tokenizer(p, lambda c: vocabulary(c, evil=-1)),
        ("tokenizer.json",),
    ),
    Bad(
        "a normalizer that makes 10^12 letters of one",
        lambda p: tokenizer(p, normalizer),
        ("tokenizer.json", "normalizer"),
    ),
)
TEMPLATES = (
    Bad(
        "a template that is a number",
        lambda p: config(p, "tokenizer_config.json", chat_template=7),
        ("tokenizer_config.json", "chat_template"),
    ),
    Bad(
        "a template that is not UTF-8",
        lambda p: text(p, "chat_template.jinja", b"{{ \xff }}"),
        ("chat_template.jinja",),
    ),
)
NO_TEMPLATES: Mapping[str, str] = {
    "a template that is none": "{% for %}",
    "a template of 1 MiB": "a" * (1 << 20),
    "a template of 25 blocks in each other": "{% for a in b %}" * 25 + "{% endfor %}" * 25,
    "a template with a filter that there is not": "{{ messages | evil }}",
    "a template of 10,000 loops in each other": "{% for a in b %}" * 10_000,
}
"""Templates with which only chats are refused."""


def _with_template(name: str, template: str) -> Bad:
    return Bad(name, lambda p: text(p, "chat_template.jinja", template), ())


HEADS = (
    Bad("a head that is a pickle with a payload", pickled, ("*.bin", "draft.pickled"), "draft"),
    Bad(
        "the same, where pickles are allowed",
        pickled,
        ("pytorch_model.bin", "plain tensors"),
        "draft",
        ("--draft.pickled=true",),
    ),
    Bad(
        "a head whose header claims 2^60 bytes",
        lambda p: header(p, b"{}", length=1 << 60),
        (FILE, BROKEN),
        "draft",
    ),
    Bad("a head that is cut", lambda p: cut(p, 5000), (FILE, BROKEN), "draft"),
    Bad(
        "a head with a NaN",
        lambda p: tensor(p, "fc.weight", lambda t: spoilt(math.nan, t)),
        (FILE, "fc.weight"),
        "draft",
    ),
    Bad(
        "a head that lacks a tensor",
        lambda p: tensor(p, "layers.0.mlp.up_proj.weight", None),
        ("layers.0.mlp.up_proj.weight",),
        "draft",
    ),
    Bad(
        "a head of another shape",
        lambda p: tensor(p, "layers.0.mlp.up_proj.weight", lambda t: t[:50]),
        ("layers.0.mlp.up_proj.weight", "[50, 64]"),
        "draft",
    ),
    Bad(
        "a head of hidden_size 10^9",
        lambda p: config(p, hidden_size=HUGE),
        ("hidden_size", str(HUGE)),
        "draft",
    ),
    Bad(
        "a head of 10^9 heads",
        lambda p: config(p, num_attention_heads=HUGE),
        ("num_attention_heads", str(HUGE)),
        "draft",
    ),
    Bad(
        "a head whose config.json is no JSON",
        lambda p: text(p, "config.json", "{"),
        ("config.json",),
        "draft",
    ),
    Bad(
        "a head with an index into the folder above",
        lambda p: index_with(p, f"../{FILE}", "fc.weight"),
        ("index.json", f"../{FILE}"),
        "draft",
    ),
)
BAD: Mapping[str, tuple[Bad, ...]] = {
    "weights": WEIGHTS,
    "configuration": CONFIGURATIONS,
    "tokenizer": TOKENIZERS,
    "chat template": TEMPLATES,
    "draft head": HEADS,
}
HARMLESS = (
    Bad("a pickle with a payload beside good weights", lambda p: pickled(p, alone=False), ()),
    Bad(
        "code beside good weights that nothing names",
        lambda p: text(
            p, "modeling_llama.py", f"import os; os.system('touch {p.parent / MARKER}')"
        ),
        (),
    ),
    Bad(
        "an attention of somebody else's",
        lambda p: config(
            p, attn_implementation="evil/kernels", _attn_implementation="evil/kernels"
        ),
        (),
    ),
    Bad("positions for 10^15 tokens", lambda p: config(p, max_position_embeddings=10**15), ()),
    Bad(
        "an end token beyond the vocabulary",
        lambda p: config(p, "generation_config.json", eos_token_id=[1, VOCABULARY]),
        (),
    ),
    Bad(
        "a token beyond the embedding",
        lambda p: tokenizer(p, lambda c: vocabulary(c, evil=VOCABULARY)),
        (),
    ),
    Bad(
        "generation by code of its own",
        lambda p: config(p, "generation_config.json", custom_generate="../evil"),
        (),
    ),
    *(_with_template(name, template) for name, template in NO_TEMPLATES.items()),
)
"""Folders that are served all the same: nothing of what is bad is used, or a request that comes
across it is refused."""
