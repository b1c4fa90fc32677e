"""Refuses impossible commands, such as with a missing model or a port in use, before a process is
started or torch is imported. The listening process or the worker makes the final check."""

import errno
import json
import socket
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import psutil

from dovetail.launch.files.directory import announcements
from dovetail.launch.settings.models import with_draft, with_target
from dovetail.protocol.errors import CheckpointError, RequestError, SettingsError, UserError
from dovetail.protocol.memory import read_room, total_bytes
from dovetail.protocol.settings import (
    DRAFT_KINDS,
    SUBSTITUTE_WEIGHTS,
    DraftSettings,
    Settings,
    TargetSettings,
)
from dovetail.workers import kernels
from dovetail.workers.devices.registry import Memory, memory_of
from dovetail.workers.models.backends import placement
from dovetail.workers.models.backends.placement import substitute_bytes
from dovetail.workers.models.backends.sizes import WEIGHT_BYTES, Sizes, has_sizes, sizes_of
from dovetail.workers.models.checkpoints import hub
from dovetail.workers.models.checkpoints.architecture import why_no_folder, why_not_there
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.files import MODEL_FILES
from dovetail.workers.models.checkpoints.footprint import (
    read_tensors,
    tables_lacking,
    weights_bytes,
)
from dovetail.workers.models.checkpoints.gguf.view import files_of, local_folder, weight_paths

MAX_CONFIG_BYTES = 16 << 20
TORCH_WEIGHTS = ("bf16", "int8-per-tensor")
"""Types of weights with which torch computes the products."""


def check_target(settings: Settings) -> None:
    """`UserError` if the files show that the target cannot be loaded on this machine."""
    check_model("target", settings.target.model)
    check_shards(settings)
    kernels.check_isa("target.isa", settings.target.isa)


def why_not_sharded(target: TargetSettings) -> str:
    """Return in words the setting that prevents the kernels from computing the whole target on the
    CPU; empty if none does."""
    reasons = {
        f"target.device is {target.device!r}": target.device != "cpu",
        "a device computes its last layers (target.split)": target.split.device,
        "a device reads prompts for it": target.prefill not in ("auto", "local"),
        "torch computes it (target.backend)": target.backend == "library",
        f"torch computes with {target.weights} weights": target.weights in TORCH_WEIGHTS,
    }
    return next((words for words, holds in reasons.items() if holds), "")


def check_shards(settings: Settings) -> None:
    """`SettingsError` if target.numa is shard and the target cannot be spread."""
    if settings.target.numa != "shard":
        return
    shares = "it shares a process with its draft (draft.share)"
    why = why_not_sharded(settings.target) or (shares if settings.draft.share is True else "")
    if why:
        raise SettingsError(
            f"target.numa = 'shard' needs a target that the CPU kernels compute alone, and {why}"
        )


def check_draft(settings: Settings) -> None:
    """`UserError` if the files show that the draft cannot be loaded."""
    kernels.check_isa("draft.isa", settings.draft.isa)
    if settings.draft.kind == "ngram" and settings.draft.model:
        raise SettingsError(
            f"draft.kind = 'ngram' has no model: leave draft.model {settings.draft.model!r} out"
        )
    if settings.draft.kind == "substitute":
        check_substitute(settings)
        if settings.draft.share is True:
            check_unified(settings)
        return
    if is_assistant(settings.draft):
        if settings.draft.share is not True:
            raise SettingsError(
                f"{settings.draft.model} is an assistant, which reads its target's keys and values "
                "in the same process: add --draft.share true"
            )
        check_unified(settings)
    elif settings.draft.share is True:
        if settings.draft.model and hub.local_folder(settings.draft.model) is None:
            raise SettingsError(
                "draft.share = true needs an assistant that has been downloaded: run `hf download "
                f"{settings.draft.model}` first"
            )
        raise SettingsError(
            "draft.share = true needs draft.kind = 'substitute' or a Gemma 4 assistant, not "
            f"{settings.draft.model or settings.draft.kind!r}"
        )
    check_model("draft", with_draft(settings.draft).model, pickled=settings.draft.pickled)


def is_assistant(draft: DraftSettings) -> bool:
    """Return whether a draft is an assistant; False for one that `check_model` refuses."""
    try:
        return bool(draft.model) and hub.is_assistant(draft.model)
    except CheckpointError:
        return False


def check_substitute(settings: Settings) -> None:
    """`SettingsError` for a substitute of another model than the target, or of a type of weights
    that it cannot have."""
    draft = settings.draft
    if draft.model:
        text = "draft.kind = 'substitute' is made from the target"
        raise SettingsError(f"{text}: leave draft.model {draft.model!r} out")
    if draft.weights not in SUBSTITUTE_WEIGHTS:
        text = f"draft.weights = {draft.weights!r}"
        raise SettingsError(f"{text}: a substitute has int8, int4, int3 or int2")


def check_unified(settings: Settings) -> None:
    """`SettingsError` if the settings rule out one process for target and draft."""
    target, draft = settings.target, settings.draft
    assistant = draft.kind == "auto" and is_assistant(draft)
    if draft.kind != "substitute" and not assistant:
        raise SettingsError(
            "a process with both roles needs draft.kind = 'substitute' or an assistant as "
            f"draft.model, not {draft.model or draft.kind!r}"
        )
    if not assistant:
        check_substitute(settings)
    elif target.device != "cpu" or target.split.device:
        device = target.split.device or target.device
        raise SettingsError(f"an assistant needs a target on the CPU, not on {device}")
    for name in ("isa", "device"):
        if (own := getattr(draft, name)) not in ("auto", getattr(target, name)):
            text = f"draft.{name} is {own!r}, but a draft in its target's process uses the target's"
            raise SettingsError(f"{text}: leave it out")
    if target.split.device not in ("", "cpu"):
        raise SettingsError(
            "a split target shares nothing with a substitute: set target.device to the GPU instead"
        )


def check_model(role: str, source: str, *, pickled: bool = False) -> None:
    """Raise `CheckpointError` unless `source` is empty, a folder of a model (whose weights may
    be `pickled`), or the id of one that the Hugging Face hub or its cache has."""
    if not source:
        return
    path = Path(source).expanduser()
    if not is_path(source) and not path.exists():
        check_source(role, source, pickled=pickled)
        return
    path = local_folder(path) or path
    if not path.is_dir():
        why = why_no_folder(source) if path.exists() else why_not_there(source)
        raise CheckpointError(f"the {role} model {source} {why}")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"the {role} model {source} has no config.json: {MODEL_FILES}")
    if not weight_paths(path) and not (pickled and any(path.glob("*.bin"))):
        head = ", or if it is a head allow them with --draft.pickled true"
        raise CheckpointError(
            f"the {role} model {source} has no *.safetensors: {MODEL_FILES}; convert weights "
            f"of another kind (*.bin) first{head if role == 'draft' else ''}"
        )


def check_whole(source: str) -> None:
    """Raise `CheckpointError` if a local model is damaged or cannot be decoded, as far as its files
    show without reading the weights."""
    # imports torch (seconds), only for a refusal
    from dovetail.workers.models.checkpoints import checkpoint, choices, tokenizer

    if (folder := hub.local_folder(source)) is not None:
        checkpoint.stored_tensors(folder)
        tokenizer.read_tokenizer(folder)
        choices.suppressed_in(folder, ())


def check_source(role: str, source: str, *, pickled: bool = False) -> None:
    """Raise `CheckpointError` unless the hub or its cache has the model of an id; downloads
    nothing."""

    files = (*hub.HUB_FILES, *hub.PICKLED_FILES) if pickled else hub.HUB_FILES
    try:
        hub.check_source(source, files=files)
    except CheckpointError as error:
        no_kind = role == "draft" and "/" not in source and source not in DRAFT_KINDS
        kinds = f"{source} is no kind of draft ({', '.join(DRAFT_KINDS)}), and " if no_kind else ""
        raise CheckpointError(f"{kinds}the {role} model {error}") from None


def is_path(source: str) -> bool:
    """True if a model is named by a path that cannot be a hub id."""
    return source.startswith(("/", ".", "~"))


def text_here(source: str) -> Path | None:
    """Return the local folder of a model; None if it may have to be downloaded."""
    return local_folder(Path(source).expanduser())


def check_text(folder: Path) -> None:
    """Raise `CheckpointError` for a tokenizer that the coordinator would refuse, before the weights
    are read. The tokenizer of a GGUF file was checked when its view was made."""
    if files_of(folder):
        return
    from dovetail.workers.models.checkpoints.tokenizer import keep, kept_path, read_language

    content, table, facts = read_language(folder)
    accepted = kept_path(content, f"read-{version('tokenizers')}")
    if accepted.is_file():
        return
    from dovetail.runtime.text.tokenizer import TextCodec

    try:
        TextCodec(content, facts, table)
    except RequestError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    keep(accepted, b"")


def no_chats(target: TargetSettings) -> str:
    """Return why a target does not support chats; empty if it does or is not on this machine."""
    from dovetail.runtime.text.tokenizer import why_no_chats
    from dovetail.workers.models.checkpoints.tokenizer import read_template

    folder = text_here(with_target(target).model)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return ""
    why = why_no_chats(read_template(folder))
    return f"chats are refused, completions are served: {why}" if why else ""


def estimated_bytes(target: TargetSettings) -> int:
    """The memory of a target's weights, from the headers of its files or the size of its GGUF file;
    0 if they are not here yet or unknown."""
    model = Path(with_target(target).model).expanduser()
    if model.is_file():
        return model.stat().st_size
    if not model.is_dir():
        return 0
    return weights_bytes(read_tensors(model), target.weights)


def draft_bytes(settings: Settings) -> int:
    """Return an estimate of a draft's memory on the GPU of its target: weights of 16 bits (fp32 if
    set, a substitute's codes), caches of a long conversation and its trees, a pass, graphs. 0 if it
    is elsewhere, or in the target's process."""
    target, draft = with_target(settings.target), with_draft(settings.draft)
    device = target.split.device or target.device
    if (
        memory_of(device) is Memory.HOST
        or draft.device not in ("auto", device)
        or draft.kind in ("none", "ngram")
        or draft.share is True
    ):
        return 0
    kind = _type_of(draft.weights)
    own, whole = sizes_here(draft.model, kind, kind), sizes_here(target.model, "half", "half")
    if draft.kind == "substitute" and whole is not None:
        bits = int((draft.weights if draft.weights != "auto" else "int4").removeprefix("int"))
        return substitute_bytes(whole, bits, device)
    if draft.kind == "mtp" and whole is not None:
        return placement.draft_bytes(replace(whole, layers=1), device)
    if own is None:
        return 0
    return placement.draft_bytes(own, device) + _bytes_beyond(own, draft, target)


def draft_has_gpu_alone(settings: Settings) -> bool:
    """True if a draft may be on a GPU and no setting of the target names one."""
    target, draft = settings.target, settings.draft
    return (
        memory_of(draft.device) is not Memory.HOST
        and draft.kind not in ("none", "ngram")
        and draft.share is not True
        and target.device == "cpu"
        and not target.split.device
        and target.prefill in ("auto", "local")
    )


def draft_room(settings: Settings) -> int:
    """Return how much of memory.vram a draft may use; 0 for no limit."""
    room = settings.memory.vram_bytes
    if room is None:
        return 0
    return room if draft_has_gpu_alone(settings) else draft_bytes(settings)


def _bytes_beyond(sizes: Sizes, draft: DraftSettings, target: TargetSettings) -> int:
    """Return the bytes of a head's matrices, and of its copies of the target's tables, beyond those
    in the sizes; 0 for a smaller model."""
    own, theirs = (read_tensors(Path(of.model).expanduser()) for of in (draft, target))
    if not own or any(tensor.is_table for tensor in own):
        return 0
    numbers = sum(tensor.numbers for tensor in (*own, *tables_lacking(own, theirs)))
    told = sizes.layers * sizes.layer + sizes.embedding + sizes.head
    return max(0, numbers * WEIGHT_BYTES[_type_of(draft.weights)] - told)


def _type_of(weights: str) -> str:
    return "fp32" if weights == "fp32" else "half"


def sizes_here(model: str, weights: str, cache: str) -> Sizes | None:
    """Return the sizes of a model, or of a head with its copies of the target's tables, for these
    types of weights, keys and values; None if it is not here or its config.json lacks them."""
    file = Path(model).expanduser() / "config.json"
    if not model or not file.is_file() or file.stat().st_size > MAX_CONFIG_BYTES:
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        config = text_part(content) if isinstance(content, dict) else {}
        return sizes_of(config, weights, cache) if has_sizes(config) else None
    except (ValueError, RecursionError):  # its worker reports it
        return None


def memory_bytes() -> int:
    """The memory of this machine, or the limit of our control group if that is less."""
    return total_bytes() or psutil.virtual_memory().total


def free_memory_bytes() -> int:
    """The free memory for one of our processes, on the machine and in our control group."""
    room = read_room()
    return room.size if room is not None else psutil.virtual_memory().available


LAST_PORT = 65535
SERVE = "dovetail:serve"  # the process name of `dovetail serve`


def check_port(host: str, port: int, *, remedy: str) -> None:
    """`UserError` if a process already listens at this port. The listening process reports other
    errors of the address."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
            tried.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return
            raise UserError(f"{host} port {port} is in use by {_holder(port)}: {remedy}") from None


def check_coordinator(listen: str, *, remedy: str) -> None:
    """`UserError` if a coordinator of this user listens there already, or any process at a tcp
    port."""
    for found in announcements():
        if found.address == listen:
            text = f"{listen} is held by your coordinator (pid {found.pid})"
            raise UserError(f"{text}: stop it with `kill {found.pid}`, {remedy}")
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    if listen.startswith("tcp://") and port.isdigit() and int(port) <= LAST_PORT:
        check_port(host.strip("[]").replace("*", "0.0.0.0"), int(port), remedy=f"stop it, {remedy}")


def _holder(port: int) -> str:
    """Name the process that listens at a port, or its supervisor. Only root sees other users'
    processes."""
    found = (
        c.pid
        for c in psutil.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port and c.pid is not None
    )
    pid = next(found, None)
    if pid is None:
        return "a process that is not yours"
    try:
        process = psutil.Process(pid)
        parent = process.parent()
        if parent is not None and parent.name() == SERVE:
            return f"`dovetail serve` (pid {parent.pid})"
        return f"{process.name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"
