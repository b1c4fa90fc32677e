"""A model folder: found, checked and read. The only module that opens safetensors. Anything that
could make a model silently wrong is refused by name: weights that are pickled, truncated, missing
from the index, not finite, or quantised in an unknown way."""

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.messages import VocabularyFacts
from dovetail.protocol.vocabulary import TokenTable
from dovetail.workers.models.checkpoints.architecture import refuse_content, refuse_elsewhere
from dovetail.workers.models.checkpoints.composite import renamed, text_part
from dovetail.workers.models.checkpoints.digests import (
    DigestSource,
    FilePart,
    Identity,
    begin_digest,
    changed,
    digest_of,
    known_digest,
    refuse_changed,
)
from dovetail.workers.models.checkpoints.files import (
    damaged,
    read_bytes,
    read_json,
    reason,
    unreadable,
)
from dovetail.workers.models.checkpoints.gguf.facts import Facts
from dovetail.workers.models.checkpoints.gguf.placing import TRANSPOSE, naming_of
from dovetail.workers.models.checkpoints.gguf.rows import UNPACK, Pile, Rows
from dovetail.workers.models.checkpoints.gguf.tensors import Blocks, Piled, source_of, stored_in
from dovetail.workers.models.checkpoints.gguf.view import files_of, model_of, spelled
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.checkpoints.namings import BLOCKS
from dovetail.workers.models.checkpoints.quantised.tensors import decoded
from dovetail.workers.models.checkpoints.stored import CODE_TYPES, Stored
from dovetail.workers.models.checkpoints.tokenizer import read_language
from dovetail.workers.progress import loading

UNSET = re.compile(r"(model\.)?(embed_tokens|verifier_norm|verifier_lm_head)\.weight")


@dataclass(frozen=True)
class Weights:
    """The weight files of a folder: intact, or still being read by the digest."""

    folder: Path
    digesting: Future[str]
    tensors: Mapping[str, Stored]  # every tensor in the weight files

    @property
    def digest(self) -> str:
        """Return the SHA-256 of config.json and weights, in hexadecimal; `CheckpointError` for
        damaged weights."""
        return self.digesting.result()


@dataclass(frozen=True)
class Checkpoint(Weights):
    """A folder with a vocabulary."""

    source: str
    tokenizer: bytes  # the content of tokenizer.json
    table: TokenTable  # its vocabulary
    vocabulary: VocabularyFacts
    context: int | None = None  # the requested longest sequence; None: the model's

    def refusal(self, text: str) -> CheckpointError:
        """Return an error that names this checkpoint."""
        return CheckpointError(f"{self.source}: {text}")

    @property
    def is_coded(self) -> bool:
        """Return whether some tensors are decoded as they are read, which transformers does not
        do."""
        return any(type(stored) is not Stored for stored in self.tensors.values())

    def read(self, name: str) -> Tensor:
        """The tensor of that name in the type it is stored in."""
        return self.tensors[name].read(name)

    def own_names(self, names: Iterable[str]) -> list[str]:
        """Return the weight files' names of a model's tensors, present or not: GGUF has its own."""
        if (model := model_of(self.folder)) is None:
            return [*names]
        naming = naming_of(Facts(model))
        return [*dict.fromkeys(naming.in_file(name) or name for name in names)]

    def rows(self, name: str, *others: str, transposed: bool) -> Rows | Pile | None:
        """Return the rows [out] of a matrix as blocks; None without blocks or in pieces (`others`).
        `transposed`: stored as [in, out]."""
        stored = None if others else self.tensors[name]
        if isinstance(stored, Piled):
            return stored.rows(name)
        if not isinstance(stored, Blocks) or (stored.placed.change == TRANSPOSE) != transposed:
            return None
        return stored.rows(name)

    @property
    def has_blocks(self) -> bool:
        """Return whether any matrix is stored in blocks: of a GGUF file, or experts in MXFP4."""
        return any(
            (isinstance(stored, Blocks) and stored.placed.place.kind in UNPACK)
            or (stored.kind in CODE_TYPES and name.endswith(BLOCKS))
            for name, stored in self.tensors.items()
        )

    def refuse_changed(self) -> None:
        """`CheckpointError` if a weight file has changed since it was read."""
        for path, before in {
            stored.file: stored.identity for stored in self.tensors.values()
        }.items():
            try:
                with path.open("rb") as file:
                    refuse_changed(path, before, file)
            except OSError as error:
                raise unreadable(path, error) from None


def open_checkpoint(source: str, *, wait: bool = True) -> Checkpoint:
    """Return the checkpoint of a folder, hub id or id@revision, checked. Without `wait`, weights
    may still be being read, which the digest awaits."""
    folder = find_folder(source)
    refuse_content(text_part(read_json(folder / "config.json")), folder / "config.json")
    if not files_of(folder):
        weight_files(folder)  # report errors that need no weights before reading them
    with loading("reading", 0):
        tokenizer, table, vocabulary = read_language(folder)
    own = open_weights(folder, wait=wait)
    whole = (spelled(source), tokenizer, table, vocabulary)
    return Checkpoint(folder, own.digesting, own.tensors, *whole)


def open_weights(folder: Path, *, wait: bool = True) -> Weights:
    """Return a folder's weights without checks of a vocabulary, which draft heads lack."""
    content = read_json(folder / "config.json")
    refuse_elsewhere(content, folder / "config.json")
    sources, tensors = _read_headers(folder)
    tensors = _apart(text_part(content), decoded(text_part(content), tensors))
    _refuse_kinds(tensors)
    if "speculators_model_type" in content:
        sources = [_with_unset(source) for source in sources]
    configuration = read_bytes(folder / "config.json")
    if wait:
        digesting = known_digest(digest_of(configuration, sources))
    else:
        digesting = begin_digest(configuration, sources)
    return Weights(folder, digesting, renamed(content, tensors))


def stored_tensors(folder: Path, *, mtp: bool = False) -> dict[str, Stored]:
    """Return where a folder's tensors are, from headers only; their values are not checked. `mtp`:
    with the MTP layers of a GGUF file, which safetensors always include."""
    content = read_json(folder / "config.json")
    refuse_elsewhere(content, folder / "config.json")
    tensors = decoded(text_part(content), _read_headers(folder, mtp=mtp)[1])
    return renamed(content, _apart(text_part(content), tensors))


def save_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file atomically, with its folder; `OSError` if that fails."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, made)
        except SafetensorError as error:  # the system's error is within its text
            raise OSError(None, reason(error)) from None
        made.replace(file)


def load_tensors(file: Path) -> dict[str, Tensor]:
    """Return all tensors of a file of `save_tensors`; `CheckpointError` if it is incomplete."""
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is not a complete safetensors file ({reason(error)})"
        ) from None
    return tensors


def tensor_names(file: Path) -> list[str]:
    """The tensors of one safetensors file."""
    try:
        with safe_open(file, framework="pt") as content:
            return sorted(content.keys())
    except (SafetensorError, OSError) as error:
        raise damaged(f"{file} is not a complete safetensors file ({reason(error)})") from None


def _apart(config: Mapping[str, Any], tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Return tensors with queries, keys and values apart, which Sarvam stores as one tensor."""
    heads, groups = config.get("num_attention_heads", 64), config.get("num_key_value_heads", 4)
    counts = [heads, groups, groups]
    if config.get("model_type") != "sarvam_moe" or any(type(n) is not int or n < 1 for n in counts):
        return tensors
    found = dict[str, Stored]()
    for name, stored in tensors.items():
        before, fused, after = name.partition(".query_key_value.")
        if not fused or type(stored) is not Stored or not stored.shape:
            found[name] = stored
            continue
        first, width = 0, stored.shape[0] // sum(counts)
        for part, count in zip("qkv", counts, strict=True):
            found[f"{before}.{part}_proj.{after}"] = stored.some(first, count * width)
            first += count * width
    return found


def _with_unset(source: DigestSource) -> DigestSource:
    """Return a file whose copies of the target's tensors may be NaN, as the speculators library
    leaves them."""
    parts = [replace(one, kind="") if UNSET.fullmatch(one.name) else one for one in source.parts]
    return replace(source, parts=parts)


def _read_headers(
    folder: Path, *, mtp: bool = False
) -> tuple[list[DigestSource], dict[str, Stored]]:
    """The weight files of a folder, and the places of all their tensors."""
    if (model := model_of(folder)) is not None:
        return [source_of(head) for head in model.heads], stored_in(model, mtp=mtp)
    read = [_read_header(file) for file in weight_files(folder)]
    tensors = {name: stored for _, tensors in read for name, stored in tensors.items()}
    return [source for source, _ in read], tensors


def _read_header(file: Path) -> tuple[DigestSource, dict[str, Stored]]:
    """The tensors of a file in order, and their places."""
    names = tensor_names(
        file
        # safetensors proves here that the header is sound and that tensors fill the rest of the
        # file without a gap
    )
    try:
        with file.open("rb") as content:
            identity = Identity.of(content)
            size = content.read(8)
            header = size + content.read(int.from_bytes(size, "little"))
        entries: dict[str, dict[str, Any]] = json.loads(header[8:])
        tensors = {name: _stored(file, entries[name], len(header), identity) for name in names}
    except OSError as error:
        raise unreadable(file, error) from None
    except (ValueError, KeyError):
        raise changed(file) from None
    ordered = sorted(tensors.items(), key=lambda item: item[1].offset)
    return DigestSource(
        file,
        identity,
        header,
        [FilePart(name, stored.kind, stored.size_bytes) for name, stored in ordered],
    ), tensors


def _stored(file: Path, entry: dict[str, Any], data: int, identity: Identity) -> Stored:
    start, stop = entry["data_offsets"]
    return Stored(file, entry["dtype"], tuple(entry["shape"]), data + start, stop - start, identity)


def _refuse_kinds(tensors: Mapping[str, Stored]) -> None:
    """`CheckpointError` for quantised numbers without scales."""
    for name, stored in tensors.items():
        if stored.kind.startswith(("F", "BF")):
            stored.refuse_kind(name)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers would load: model.safetensors, or the
    index's."""
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(f"{folder} holds adapter_config.json; merge it into its model")
    if (single := folder / "model.safetensors").is_file():
        return [single]
    if (index := folder / "model.safetensors.index.json").is_file():
        return _indexed_files(folder, index)
    pickled = sorted(
        f.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for f in folder.glob(pattern)
    )
    if pickled:
        text = f"has only pickled weights ({pickled[0]}), which can run code when read"
        raise CheckpointError(f"{folder} {text}; convert them to safetensors")
    others = sorted(f.name for f in folder.glob("*.safetensors"))
    beside = f", though it has {others[0]}" if others else ""
    raise damaged(f"{folder} has no model.safetensors and no model.safetensors.index.json{beside}")


def _indexed_files(folder: Path, index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(f, str) for f in weight_map.values())
    ):
        raise damaged(f"{index} has no weight_map of tensor files")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise damaged(f"{index} names {name!r}, which is not a safetensors file beside it")
        if not (folder / name).is_file():
            raise damaged(f"{folder / name} is missing, although {index.name} lists it")
        held = set(tensor_names(folder / name))
        absent = sorted(t for t, f in weight_map.items() if f == name and t not in held)
        if absent:
            raise damaged(f"{folder / name} lacks tensor {absent[0]}, which {index.name} lists")
    return [folder / name for name in names]
