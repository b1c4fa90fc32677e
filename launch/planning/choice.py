"""Weights that fit, and the most promising draft, for a user who names only a target."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.launch.machine.fit import check_memory, nodes_of
from dovetail.launch.machine.sharding import choice_of
from dovetail.launch.planning.designs import LOOKUP, Design, on_kernels
from dovetail.launch.planning.nearby import Drafts, drafts_there, named
from dovetail.launch.processes.stack import layout_of, processes_of
from dovetail.launch.settings.configure import POSITIONAL, Configuration
from dovetail.launch.settings.models import boxed_heads, keeps_blocks
from dovetail.protocol.errors import CheckpointError, SettingsError, UserError
from dovetail.workers import kernels
from dovetail.workers.models.backends.sizes import INT4
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.footprint import (
    half_of,
    in_pieces,
    read_tensors,
    rearranged,
    types_below,
)
from dovetail.workers.models.checkpoints.gguf.view import FILE
from dovetail.workers.models.checkpoints.hub import local_folder

if TYPE_CHECKING:
    from dovetail.launch.planning.candidates import Reader

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
    configuration, weights = with_weights(configuration, folder)
    configuration, draft = _with_draft(configuration, folder, say)
    return configuration, [*weights, *draft]


def with_weights(
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
    """Choose the available draft with the best prediction, else a look-up, which needs no model.
    Also return three lines: what was found, what was chosen, and the expected speed."""
    draft = configuration.settings.draft
    if draft.kind != "auto" or draft.model:
        return configuration, []
    if folder is None:
        return _lookup(configuration, [], "the target has not been downloaded yet")
    say("looking for a draft")
    there = Drafts()
    try:
        there = find_drafts(configuration, folder)
        if there.fitting:
            return _best(configuration, folder, there, say)
    except UserError as error:
        why = f"no plan can be made for the target ({error})"
        return _lookup(configuration, [there.in_words()], why)
    why = "no head for the target and no smaller model was found"
    return _lookup(configuration, [there.in_words()], why)


def find_drafts(configuration: Configuration, target: Path) -> Drafts:
    """Return the drafts for a target that are on this machine."""
    return drafts_there(target, lambda design: _reader(configuration, design))


def _lookup(
    configuration: Configuration, found: list[str], why: str
) -> tuple[Configuration, list[str]]:
    chosen = configuration.over("chosen", {"draft.kind": LOOKUP})
    taken = f"draft {LOOKUP} (a look-up in the text): {why}; change with --draft"
    return chosen, [*found, taken, "expected: the speed without a draft, more where text repeats"]


def _why_boxed(head: Path, target: Path) -> str:
    """Return why a head that comes with dovetail fits a target."""
    from dovetail.workers.models.checkpoints.checkpoint import open_weights  # imports torch

    made_for = read_json(head / "config.json").get("dovetail", {}).get("trained_for")
    same = made_for == open_weights(target).digest
    return "trained for this very file" if same else "trained for a model of this shape"


def _best(
    configuration: Configuration, folder: Path, there: Drafts, say: Say
) -> tuple[Configuration, list[str]]:
    from dovetail.launch.planning.subject import ready_of, subject_here

    found = [there.in_words()]
    spread = choice_of(configuration.settings.target).numa == "shard"
    subject = subject_here(configuration, say)
    lookup = _reader(configuration, subject.design).read([LOOKUP])
    searched = subject.search([*there.fitting, *lookup], lambda _: None)
    every = [one for one in searched if (one.nodes > 1) is spread]
    best = ready_of(every)
    if best is None or best.draft is None:
        return _lookup(configuration, found, "there is no room for a separate draft")
    if best.candidate.kind == LOOKUP:
        why = "none of the available drafts is expected to be faster"
        return _lookup(configuration, found, why)
    alone = next((one for one in every if one.draft is None), None)
    expected = f"expected: about {best.tokens_per_s:.3g} tokens/s"
    if alone is not None:
        expected += f", {best.tokens_per_s / alone.tokens_per_s:.1f} times that without a draft"
    if subject.here is not None and subject.here.disturbed:
        expected += f" (estimated {subject.here.disturbed})"
    own, name = best.candidate.settings, best.candidate.name
    if Path(own.model) in boxed_heads():
        name += f", {_why_boxed(Path(own.model), folder)}"
    settings = {"draft.model": own.model} if own.model else {"draft.kind": own.kind}
    chosen = configuration.over("chosen", settings)
    taken = f"draft {named(best.candidate)} ({name}); change with --draft"
    return chosen, [*found, taken, expected]


def _reader(configuration: Configuration, design: Design) -> "Reader":
    from dovetail.launch.planning.candidates import Reader  # imports numpy, with its threads
    from dovetail.launch.planning.subject import folder_of

    return Reader(configuration, design, [], folder_of, embedded=False, width=None)
