"""Weights that fit, and the most promising draft, for a user who names only a target. Drafts in the
target's folder and the Hugging Face cache are compared by their config.json and tokenizer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.launch.machine.fit import check_memory, nodes_of
from dovetail.launch.machine.sharding import choice_of
from dovetail.launch.planning.designs import LOOKUP, design_of, on_kernels, read_config
from dovetail.launch.processes.stack import layout_of, processes_of
from dovetail.launch.settings.configure import POSITIONAL, Configuration
from dovetail.launch.settings.models import boxed_heads, keeps_blocks
from dovetail.protocol.errors import CheckpointError, SettingsError, UserError
from dovetail.protocol.settings import DRAFT_KINDS
from dovetail.workers import kernels
from dovetail.workers.models.backends.sizes import INT4
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.footprint import (
    half_of,
    in_pieces,
    read_tensors,
    rearranged,
    types_below,
)
from dovetail.workers.models.checkpoints.gguf import view
from dovetail.workers.models.checkpoints.gguf.names import is_gguf, models_in
from dovetail.workers.models.checkpoints.gguf.view import FILE
from dovetail.workers.models.checkpoints.hub import cached_folders, local_folder

if TYPE_CHECKING:
    from dovetail.launch.planning.candidates import Candidate, Reader

SMALLER = 2  # a model may draft for a target with at least this multiple of its parameters
OWN = {
    "half": "the checkpoint's own 16 bits",
    FILE: "the file's own blocks",
    "fp32": "the checkpoint's own numbers",
}
"""Weights in a checkpoint's own type, in words."""
Say = Callable[[str], None]


def with_choices(configuration: Configuration, say: Say) -> tuple[Configuration, list[str]]:
    """Return settings with weights and draft chosen where the user named none, and the choices in
    words. Weights are chosen for `dovetail serve MODEL`, drafts for any but the embedded target."""
    try:
        model = configuration.settings.target.model
        folder = local_folder(model) if model else None
    except CheckpointError:  # loading it reports the error
        return configuration, []
    if not model or (folder is not None and not (folder / "config.json").is_file()):
        return configuration, []
    configuration, weights = _with_weights(configuration, folder)
    configuration, draft = _with_draft(configuration, folder, say)
    return configuration, [*weights, *draft]


def _with_weights(
    configuration: Configuration, folder: Path | None
) -> tuple[Configuration, list[str]]:
    """The checkpoint's own numbers if they fit, else int8, or int4 if only that fits."""
    named_alone = configuration.origins["target.model"] == POSITIONAL
    if not named_alone or configuration.given("target.weights"):
        return configuration, []
    if folder is None or not (tensors := read_tensors(folder)):
        return configuration, []
    if not on_kernels(folder):  # torch computes in fp32 only
        chosen = configuration.over("chosen", {"target.weights": "fp32"})
        why = kernels.why_not() or "the C++ kernels do not compute this family"
        return chosen, [f"weights fp32, by torch: {why}"]
    target = configuration.settings.target.model_copy(update={"model": str(folder)})
    own = FILE if keeps_blocks(target) else "half" if half_of(tensors) else "fp32"
    chosen, why = configuration.over("chosen", {"target.weights": own}), OWN[own]
    if own != FILE and not _fits(chosen):  # blocks are no larger than int8
        chosen, why = _in_less(configuration, folder, own)
    return chosen, [f"weights {chosen.settings.target.weights}: {why}; change with --weights"]


def _in_less(configuration: Configuration, folder: Path, own: str) -> tuple[Configuration, str]:
    int8, int4 = (configuration.over("chosen", {"target.weights": name}) for name in ("int8", INT4))
    tensors = read_tensors(folder)
    whole = rearranged(tensors) and not in_pieces(folder)
    if any(tensor.packed_bytes for tensor in tensors):
        blocks = configuration.over("chosen", {"target.weights": FILE})
        return blocks, f"{own} does not fit into memory, and these are the file's own blocks"
    able = INT4 in types_below("int8", tensors, library=whole)
    if not able or _fits(int8) or not _fits(int4):
        return int8, f"{own} does not fit into memory"
    return int4, f"neither {own} nor int8 fits into memory"


def _fits(configuration: Configuration) -> bool:
    settings = configuration.settings
    roles = [role for role in processes_of(settings) if role != "draft"]
    try:
        check_memory(settings, roles, nodes=nodes_of(layout_of(settings).target))
    except SettingsError:
        return False
    return True


def _with_draft(
    configuration: Configuration, folder: Path | None, say: Say
) -> tuple[Configuration, list[str]]:
    """The present draft with the best prediction, else a look-up, which needs no model."""
    settings = configuration.settings
    named = any(configuration.given(f"draft.{name}") for name in ("kind", "model"))
    if named or not DRAFT_KINDS[settings.draft.kind].own_model:
        return configuration, []
    if folder is None:
        return _lookup(configuration, "the target has not been downloaded yet")
    say("looking for a draft")
    try:
        found = [*drafts_there(configuration, folder)]
        if found:
            found += _reader(configuration, folder).read([LOOKUP])
            return _best(configuration, folder, found, say)
    except UserError as error:
        return _lookup(configuration, f"no plan can be made of the target ({error})")
    return _lookup(configuration, "there is no head of the target and no smaller model")


def _lookup(configuration: Configuration, why: str) -> tuple[Configuration, list[str]]:
    chosen = configuration.over("chosen", {"draft.kind": LOOKUP})
    return chosen, [f"draft {LOOKUP} (a look-up in the text): {why}; change with --draft"]


def _why_boxed(head: Path, target: Path) -> str:
    """Return why a head that comes with dovetail fits a target."""
    from dovetail.workers.models.checkpoints.checkpoint import open_weights  # imports torch

    made_for = read_json(head / "config.json").get("dovetail", {}).get("trained_for")
    same = made_for == open_weights(target).digest
    return "trained for this very file" if same else "trained for a model of this shape"


def _best(
    configuration: Configuration, folder: Path, found: "Sequence[Candidate]", say: Say
) -> tuple[Configuration, list[str]]:
    from dovetail.launch.planning.subject import ready_of, subject_here

    spread = choice_of(configuration.settings.target).numa == "shard"
    subject = subject_here(configuration, say)
    searched = subject.search(found, lambda _: None)
    every = [one for one in searched if (one.nodes > 1) is spread]
    best = ready_of(every)
    if best is None or best.draft is None:
        return _lookup(configuration, "there is no room for a separate draft")
    if best.candidate.kind == LOOKUP:
        return _lookup(configuration, "none of the available drafts is expected to be faster")
    alone = next((one for one in every if one.draft is None), None)
    gain = "" if alone is None else f", {best.tokens_per_s / alone.tokens_per_s:.1f} times without"
    expected = f"about {best.tokens_per_s:.3g} tokens/s are expected{gain}"
    if subject.here is not None and subject.here.disturbed:
        expected += f" (estimated {subject.here.disturbed})"
    model, name = best.candidate.settings.model, best.candidate.name
    if Path(model) in boxed_heads():
        name += f", {_why_boxed(Path(model), folder)}"
    chosen = configuration.over("chosen", {"draft.model": model})
    return chosen, [f"draft {view.spelled(model)} ({name}): {expected}; change with --draft"]


def _reader(configuration: Configuration, target: Path) -> "Reader":
    from dovetail.launch.planning.candidates import Reader  # imports numpy, with its threads
    from dovetail.launch.planning.subject import folder_of

    design = design_of(read_config(target, "target model"), target)
    return Reader(configuration, design, [], folder_of, embedded=False, width=None)


def drafts_there(configuration: Configuration, target: Path) -> "Iterator[Candidate]":
    """Yield the present drafts of a target: its heads, and smaller models of its vocabulary, in its
    folder or in the Hugging Face cache."""
    size = _size(target)
    near = [one for one in _nearby(target) if not all(map(_differ, _size(one), size))]
    if not near:
        return  # without importing torch and transformers
    design = design_of(read_config(target, "target model"), target)
    reader = _reader(configuration, target)
    for folder in near:
        with suppress(UserError):  # a model of another kind, or one that is damaged
            own = read_config(folder, "draft")
            vocabulary, hidden = own.get("vocab_size"), own.get("hidden_size")
            differ = vocabulary != design.vocabulary, hidden != design.hidden
            if all(differ) or (any(differ) and folder in boxed_heads()):
                continue
            for candidate in reader.read([str(folder)]):
                if candidate.kind == "small":
                    if SMALLER * design_of(own, folder).parameters > design.parameters:
                        continue
                    if _vocabulary(folder) != _vocabulary(target):
                        continue
                yield candidate


def _size(folder: Path) -> tuple[Any, Any]:
    try:
        config = text_part(read_json(folder / "config.json"))
    except CheckpointError:
        return None, None
    return config.get("vocab_size"), config.get("hidden_size")


def _differ(one: Any, other: Any) -> bool:
    return None not in (one, other) and one != other


def _nearby(target: Path) -> Iterator[Path]:
    files = view.files_of(target)
    place = files[0] if files else target.resolve()
    beside = sorted(place.parent.iterdir())
    names = models_in(path.name for path in beside if is_gguf(path) and path not in files)
    most = sum(file.stat().st_size for file in files or [place]) / SMALLER
    for path in [*beside, *cached_folders(), *boxed_heads()]:
        if path.resolve() == place.resolve():
            continue
        with suppress(CheckpointError, OSError):
            if path.is_dir() and (path / "config.json").is_file():
                yield path
            elif path.name in names and path.stat().st_size <= most:
                yield view.view_of(path)


def _vocabulary(folder: Path) -> str:
    from dovetail.workers.models.checkpoints.tokenizer import table_of

    try:
        return table_of((folder / "tokenizer.json").read_bytes()).digest
    except (OSError, ValueError):
        return ""
