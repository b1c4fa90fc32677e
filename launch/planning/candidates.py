"""The drafts of a plan: the named ones, or those that the target could have, with size, settings
and missing steps. Reads config.json and the names of a head's tensors."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from dovetail.launch.console.terminal import counted
from dovetail.launch.planning.acceptance import (
    UNCOUNTED,
    Acceptance,
    Assumed,
    Recorded,
    figures_of,
    published,
    trained,
)
from dovetail.launch.planning.designs import (
    LOOKUP,
    Design,
    DraftSize,
    design_of,
    head_size,
    read_config,
    small_size,
    substitute_size,
)
from dovetail.launch.planning.planner import Draft, Tree
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.models import with_draft
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import BLOCK_KINDS, DRAFT_KINDS, HEAD_KINDS, DraftSettings
from dovetail.workers.heads.block.peagle import LEVELS
from dovetail.workers.heads.registry import kind_of_architecture, setting_of
from dovetail.workers.models.checkpoints.gguf.view import spelled, weight_paths

NOTHING = DraftSize(0, 0, 0, 0, 0, 0)  # the size of a draft without a model
BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
GAMMAS = (1, 2, 3, 5, 7, 9, 11, 15, 19, 23, 31, 47, 63)
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
BUDGETS = (128, 192, 256)
BUDGET_DEPTHS = (8, 12, 16, 24)
BUDGET_WIDTH = 32
BEAM_WIDTH = 6
BEAM_DEPTHS = (4, 8, 12, 16, 24, 32, 48)
UNTRAINED = "must be trained first"
TRAIN = UNTRAINED + ": dovetail train {kind}{blocks} --target {target} --data CHATS --out HEAD"
UNASKED = "is used only on request: --draft substitute"
"""A substitute is a second copy of the target, which `serve` does not choose by itself."""
HQQ = "needs hqq: pip install 'dovetail-llm[subspec]'"


@dataclass(frozen=True)
class Candidate:
    """A draft that could be used."""

    kind: str
    name: str
    size: DraftSize
    settings: DraftSettings  # the settings that start it, except its device
    acceptance: Acceptance
    blocks: int | None = None  # blocks of a head
    lacks: str = ""  # the steps to take before it can be started; empty: none
    trees: Sequence[Tree] = field(default=())
    block: int = 0  # rows of the only pass of a round; 0: a pass for each level

    def draft(
        self, level_s: Callable[[int, int], float], proposal_s: float, *, on_device: bool
    ) -> Draft:
        size = self.size.bytes
        return Draft(
            *(self.name, level_s, lambda _: size if on_device else 0, 0 if on_device else size),
            *(self.acceptance.tokens, self.trees, self._passes, proposal_s),
            candidate=self,
        )

    def _passes(self, tree: Tree, ahead: float) -> Iterable[tuple[int, float]]:
        return [(self.block, 1.0)] if self.block else self.acceptance.passes(tree, ahead)

    def shared(self, level_s: Callable[[int, int], float], proposal_s: float) -> Draft:
        """A substitute in the process of its target, which shares its resident layers, embedding,
        head, keys and values."""
        own = self.draft(level_s, proposal_s, on_device=True)
        name = f"{self.name}, one process with the target"
        return replace(own, name=name, device_bytes=self.size.shared_bytes, shares=True)


def trees_of(kind: str, acceptance: Acceptance, width: int) -> list[Tree]:
    """Return the candidate trees for a draft of a kind; for a recorded draft only recorded
    sizes."""
    sizes = [(gamma, depth) for gamma in GAMMAS for depth in DEPTHS if depth <= gamma]
    found = [Tree("dynamic", *size, width) for size in sizes]
    found += [Tree("budget", *size, BUDGET_WIDTH) for size in product(BUDGETS, BUDGET_DEPTHS)]
    if kind == "substitute":
        found += [Tree("beam", BEAM_WIDTH * depth, depth, BEAM_WIDTH) for depth in BEAM_DEPTHS]
    return [*filter(acceptance.reaches, found)] if isinstance(acceptance, Recorded) else found


class Reader:
    """Reads the drafts named on a command line."""

    def __init__(
        self,
        configuration: Configuration,
        target: Design,
        recorded: Sequence[Recorded],
        folder_of: Callable[[str], Path],
        *,
        embedded: bool,
        width: int | None,
        on_device: bool = False,
    ) -> None:
        """`folder_of`: of a model, by folder or hub id; `embedded`: whether drafts come with the
        target; `width`: of trees, if not the setting; `on_device`: whether drafts can use a GPU."""
        self._uncoded = target.uncoded if on_device else ""
        rows = configuration.settings.draft.head_rows
        self._head_size = partial(head_size, head_rows=rows, on_cpu=not on_device)
        self._configuration, self._target, self._recorded = configuration, target, list(recorded)
        self._folder_of, self._embedded = folder_of, embedded
        self._width = configuration.settings.tree.width if width is None else width

    def read(self, names: Sequence[str], there: Sequence[str] = ()) -> list[Candidate]:
        """Return all candidates: the named ones, by default (or with `auto`) the present drafts and
        those that the target could have; `UserError` for a wrong name."""
        self._asked = bool(names) and "auto" not in names
        usual = [*there, LOOKUP, "dovetail", *([] if self._uncoded else ["substitute"])]
        if self._embedded:
            usual = ["small", "eagle", "dovetail", "substitute", LOOKUP]
        wanted = dict.fromkeys(names if self._asked else [*names, *usual])
        found = [candidate for name in wanted for candidate in self._read(name)]
        if unused := [
            one
            for one in self._recorded
            if not any(candidate.acceptance is one for candidate in found)
        ]:
            about = unused[0].library.about
            raise UserError(f"--rounds of {about.draft_model}: name that draft with --draft, too")
        return found

    def _read(self, name: str) -> Iterator[Candidate]:
        if name in ("none", "auto"):
            return
        if name == LOOKUP:
            yield self._candidate(LOOKUP, f"look-up ({LOOKUP})", NOTHING, {"kind": LOOKUP})
            return
        if name == "substitute" and (parts := self._uncoded):
            raise UserError(
                f"--draft substitute is not planned on a GPU with layers that have {parts}"
            )
        if name == "substitute":
            weights = self._configuration.settings.draft.weights
            if weights != "auto" and weights not in BITS:
                raise UserError(f"draft.weights = {weights!r}: a substitute has {', '.join(BITS)}")
            yield self._substitute()
        elif name == "mtp":
            yield self._candidate(name, "MTP layer", head_size(self._target, 1), {"kind": name})
        elif name in DRAFT_KINDS and self._embedded and self._is_embedded(name):
            yield self._folder(with_draft(DraftSettings(kind=name)).model, {"kind": name})
        elif name == "small":
            raise UserError(
                "--draft small: no small model comes with this target; name one with --draft FOLDER"
            )
        elif name in HEAD_KINDS:
            yield from self._to_be_trained(name)
        else:
            yield self._folder(name, {"model": name})

    def _is_embedded(self, kind: str) -> bool:
        try:
            with_draft(DraftSettings(kind=kind))
        except UserError:
            return False
        return True

    def _substitute(self) -> Candidate:
        wishes = self._configuration.settings
        weights, target = wishes.draft.weights, wishes.target
        bits, settings = BITS.get(weights, 4), {"kind": "substitute"}
        settings |= {"weights": weights} if weights in BITS else {}
        lacks = HQQ if find_spec("hqq") is None else "" if self._asked else UNASKED
        size = substitute_size(self._target, bits, target.weights, target.cached)
        name = f"substitute of {bits} bits"
        return self._candidate("substitute", name, size, settings, lacks=lacks)

    def _to_be_trained(self, kind: str) -> Iterator[Candidate]:
        most = len(figures_of(kind).tokens)
        target = shlex.quote(spelled(self._configuration.settings.target.model) or "FOLDER")
        for blocks in range(1, most + 1):
            told = f" --blocks {blocks}" if most > 1 else ""
            name = f"{kind} head" + (f" of {counted(blocks, 'block')}" if told else "")
            yield self._candidate(
                kind,
                name,
                self._head_size(Design(self._target.config), blocks),
                {"kind": kind},
                blocks,
                TRAIN.format(kind=kind, blocks=told, target=target),
            )

    def _folder(self, source: str, settings: dict[str, Any]) -> Candidate:
        folder = self._folder_of(source)
        kind, missing = kind_of(folder), {}
        if kind != "small":  # a GGUF file of a head need not know its target's vocabulary
            missing["vocab_size"] = self._target.vocabulary
        config = read_config(folder, "draft", missing)
        own = design_of(config, folder) if kind == "small" else Design(config)
        if kind == "small":
            if own.vocabulary != self._target.vocabulary:
                sizes = f"{own.vocabulary} tokens and the target {self._target.vocabulary}"
                raise UserError(f"the draft {source} has {sizes}")
            name = f"small model {folder.name}"
            return self._candidate("small", name, small_size(own), settings, source=source)
        width = config.get("target_hidden_size") or own.hidden
        if width != self._target.hidden:
            sizes = f"for a target of width {width}, but this one has width {self._target.hidden}"
            raise UserError(f"the head {source} is {sizes}")
        blocks = own.layers
        name = f"{kind} head {folder.name} of {counted(blocks, 'block')}"
        size = self._head_size(own, blocks)
        found = self._candidate(kind, name, size, settings, blocks, source=source, folder=folder)
        if kind not in BLOCK_KINDS:
            return found
        inner = config.get("dflash_config") or {}
        block = config.get("block_size") or inner.get("block_size") or LEVELS
        trees = [tree for tree in found.trees if tree.depth <= block]
        return replace(found, block=block, trees=trees)

    def _candidate(
        self,
        kind: str,
        name: str,
        size: DraftSize,
        settings: dict[str, Any],
        blocks: int | None = None,
        lacks: str = "",
        source: str = "",
        folder: Path | None = None,
    ) -> Candidate:
        acceptance: Acceptance = UNCOUNTED
        trees = [Tree("dynamic", 1, 1, 1)]
        if kind != LOOKUP:
            measured = None if folder is None else trained(folder)
            acceptance = self._known(kind, source) or Assumed.of(
                measured or published(kind, blocks or 1)
            )
            trees = trees_of(kind, acceptance, self._width)
        return Candidate(
            kind, name, size, DraftSettings(**settings), acceptance, blocks, lacks, trees
        )

    def _known(self, kind: str, source: str) -> Recorded | None:
        def place(model: str) -> Path:
            return Path(model).expanduser().resolve()

        for one in self._recorded:
            said = one.library.about.draft_model
            substitute = kind == "substitute" and "substitute" in said
            if substitute or (source and place(said) == place(spelled(source))):
                return one
        return None


def kind_of(folder: Path) -> str:
    """small, or the kind of head, in a folder: by its tensors or, if there is only a config.json,
    by its architecture."""
    if weight_paths(folder):
        from dovetail.workers.heads.files import classify  # imports torch

        found = classify(str(folder))
        return "small" if found is None else setting_of(found)
    named = str(read_config(folder, "draft").get("architectures"))
    return kind_of_architecture(named) or "small"
