"""The tables of head kinds, drafters, policies, devices and constraints: whoever adds an entry
changes nothing else."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.launch.commands.train import head_commands
from dovetail.launch.settings.configure import configure
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.launch.training.run import TrainingOptions, train_head
from dovetail.protocol.errors import SettingsError
from dovetail.protocol.messages import Open
from dovetail.protocol.settings import (
    DRAFT_KINDS,
    DraftSettings,
    DraftTraits,
    Sampling,
    TargetSettings,
    TreeSettings,
)
from dovetail.protocol.settings.tree import POLICIES, PolicyTraits
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import TokenTree
from dovetail.workers.devices import opening, registry
from dovetail.workers.devices.base import Device, DeviceKind, Transfer
from dovetail.workers.devices.cpu import CPU
from dovetail.workers.draft import DraftWorker, Identity
from dovetail.workers.drafters import registry as drafters
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.drafters.ngram import Lookup
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.heads.config import HeadConfig
from dovetail.workers.heads.kind import HeadKind
from dovetail.workers.heads.parts import Body, HeadParts
from dovetail.workers.heads.registry import KINDS
from dovetail.workers.heads.spec import Group, HeadSpec, Shapes
from dovetail.workers.serving.open_target import open_target_worker
from dovetail.workers.speculation import policies
from dovetail.workers.speculation.growth import GrowingTree, Nodes
from dovetail.workers.speculation.history import CONSTRAINTS, History
from dovetail.workers.speculation.policy import root_pass
from dovetail.workers.speculation.proposal import Proposal, Shape
from dovetail.workers.training.heads import trainable
from dovetail.workers.training.heads.recipe import EAGLE_PLAN, HeadRecipe
from dovetail.workers.training.heads.trainable import TrainableHead
from dovetail.workers.training.recipes import TRAINED, TrainedKind
from support.heads import VARIANTS, head_config, head_tensors, write_files
from support.levels import levels_of
from support.pairs import PairOfWorkers


class Board(DeviceKind):
    """A device that is the CPU by another name."""

    type = "cpu"

    def open(self, name: str) -> Device | None:
        return Device(self, name, torch.device("cpu"), "board", "fp16") if name == "board" else None

    def best(self) -> str | None:
        return "board"

    def free_bytes(self, device: torch.device) -> int:
        return 7

    def transfer(self, device: torch.device) -> Transfer:
        return CPU.transfer(device)


BOARD = Board()
ENTRY = registry.Entry(lambda: BOARD, "board", "board", registry.Memory.OWN)


@pytest.fixture
def adding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Set the variable that adds devices for this process, and have it read again."""

    def add(paths: str) -> None:
        monkeypatch.setenv("DOVETAIL_DEVICES", paths)
        registry.entries.cache_clear()

    yield add
    registry.entries.cache_clear()


def test_a_device_is_added_by_its_import_path(
    adding: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    adding(f"{__name__}:ENTRY")
    monkeypatch.setattr(opening, "KINDS", tuple(one.load() for one in registry.entries()))
    opened = opening.open_device("auto", torch.get_num_threads())
    assert (opened.name, opened.free_bytes()) == ("board", 7)
    with pytest.raises(SettingsError, match="write board, cuda:N"):
        opening.open_device("bord", torch.get_num_threads())
    found = configure(flags={"target.device": "board", "draft.device": "board"}, environment={})
    assert found.settings.draft.device == "board"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no.such:ENTRY", "cannot import 'no.such:ENTRY': No module named 'no'"),
        ("json:ENTRY", "cannot import 'json:ENTRY': module 'json' has no attribute 'ENTRY'"),
        ("json", "cannot import 'json': module 'json' has no attribute ''"),
        ("json:loads", "'json:loads' is not an Entry"),
    ],
)
def test_an_import_path_that_leads_to_no_device_is_refused(
    path: str, why: str, adding: Callable[[str], None]
) -> None:
    adding(path)
    with pytest.raises(SettingsError, match=re.escape(f"DOVETAIL_DEVICES: {why}")):
        configure(flags={"draft.device": "cpu"}, environment={})


class Sum(HeadKind):
    name = "sum"

    def recognises(self, shapes: Shapes) -> bool:
        return "fc.weight" not in shapes and "layers.0.self_attn.q_proj.weight" in shapes

    def fusion_groups(self, spec: HeadSpec, config: HeadConfig) -> list[Group]:
        return []

    def body(self, parts: HeadParts) -> Body:
        return parts.layered(torch.add)


def test_a_kind_of_head_is_added_by_the_table_alone(
    tmp_path: Path, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "sum", Sum())
    tensors, config = head_tensors(VARIANTS["eagle-llama3"]), head_config(VARIANTS["eagle-llama3"])
    tensors["fc.weight"] = torch.eye(64).repeat(1, 2)  # EAGLE's fusion as a sum
    write_files(tmp_path / "eagle", tensors, config)
    del tensors["fc.weight"]
    write_files(tmp_path / "sum", tensors, config)
    found = []
    for kind in ("eagle", "sum"):
        settings = DraftSettings(model=str(tmp_path / kind), device="cpu", weights="fp32")
        worker = open_draft_worker(settings, name=kind, threads=1, target=str(llama_folder))
        assert isinstance(worker.engine, HeadDrafter)
        assert worker.engine.head.spec.kind == kind
        found.append(levels_of(worker.engine.head, None))
        assert reply(llama_folder, worker, DYNAMIC) == alone(llama_folder)
    torch.testing.assert_close(found[0], found[1])


class SumHead(TrainableHead):
    def __init__(self, shape: Any) -> None:
        super().__init__(shape)
        self.layers = torch.nn.ModuleList([trainable.Block(shape, 0)])

    def forward(self, embedded: Tensor, state: Tensor, positions: Tensor, seen: Any) -> Any:
        return self.layers[0](embedded + state, self.turn(positions), seen)


class SumRecipe(HeadRecipe):
    architecture, paper, trainable = "LlamaForCausalLMSum", EAGLE_PLAN, SumHead


def test_a_kind_of_head_is_trained_by_an_entry_in_the_table_of_recipes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "sum", Sum())
    monkeypatch.setitem(TRAINED, "sum", TrainedKind("a sum: the simplest fusion", SumRecipe))
    assert "sum" in [command.name for command in head_commands()]
    ids = [[0, *range(10 + n, 30 + n), 1] for n in range(40)]
    np.array(ids, dtype="<u2").tofile(tmp_path / "text.bin")
    pace: Any = {"steps": 2, "batch": 2, "length": 32, "number": "fp32"}
    train_head(
        TrainingOptions(kind="sum", out=tmp_path / "head", data=(tmp_path / "text.bin",), **pace)
    )
    settings = DraftSettings(model=str(tmp_path / "head"), device="cpu")
    target = str(DEMO_FOLDER / "target")
    worker = open_draft_worker(settings, name="sum", threads=1, target=target)
    assert isinstance(worker.engine, HeadDrafter)
    assert worker.engine.head.spec.kind == "sum"


@dataclass
class Block:
    """A session of `Blocks`."""

    log: list[int]
    offered: Sequence[int] = ()
    readable: bool = True


class Blocks(Lookup):
    """A block drafter: all its tokens come at once, as a chain: those after the last occurrence of
    the last token. `length` 0: it proposes none."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def open(self, order: Open, base: None = None) -> Any:
        return Block([*order.prompt])

    def draft(self, session: Any, accepted: Any, bonus: int, *_: Any, **more: Any) -> Proposal:
        log = session.log
        log += [*(session.offered[node] for node in accepted), bonus, *more.get("more", ())]
        last = next((at for at in reversed(range(len(log) - 1)) if log[at] == log[-1]), len(log))
        block = tuple(log[last + 1 :][: self.length])
        session.offered = block
        tree = TokenTree(block, tuple(range(-1, len(block) - 1)))
        return Proposal(tree, tuple(-0.1 * n for n in range(1, len(block) + 1)), len(block), False)


def open_blocks(wanted: drafters.Wanted) -> DraftWorker[Any]:
    device = wanted.open_device()
    return DraftWorker(Blocks(6), Identity("blocks", "", device.name, 1, 1 << 20), Spans())


@dataclass(frozen=True)
class FewTokens:
    """A constraint: a reply is written with `few` ids, and no id follows itself."""

    few: Sequence[int] = (5, 6, 7, 9)

    def applies(self, sampling: Sampling) -> bool:
        return sampling.temperature == 0.0

    def forbidden(self, history: History, path: Sequence[int]) -> Collection[int]:
        return {*range(FEW_VOCABULARY)} - {*self.few} | {*[*history.reply, *path][-1:]}


class Chain:
    """A policy: a chain of the likeliest tokens, a pass each."""

    entropy = None

    def passes(self, tree: GrowingTree, shape: Shape) -> Iterator[Nodes]:
        yield from root_pass(tree, shape)
        for level in range(1, shape.depth):
            yield self.select(tree, shape)[level - 1 : level]

    def select(self, tree: GrowingTree, shape: Shape) -> Nodes:
        best: list[int] = []
        for _ in range(shape.nodes):
            below = np.flatnonzero(tree.parents[: len(tree)] == (best[-1] if best else -1))
            if not len(below):
                break
            best.append(int(below[np.argmax(tree.scores[below])]))
        return np.array(best, np.intp)


DYNAMIC = TreeSettings(policy="dynamic", insist=True, gamma=6, depth=3, width=3)
FEW_VOCABULARY = 300
PROMPT = [4, 5, 6, 7, 9, 5, 6]


def reply(target: Path, draft: DraftWorker[Any], tree: TreeSettings, tokens: int = 24) -> Any:
    """Rounds of a target and a draft, greedy: the first tokens of the reply."""
    own = open_target_worker(TargetSettings(model=str(target)), name="target", threads=1)
    pair = PairOfWorkers(own, draft)
    run = pair.open(1, PROMPT, tokens=2 * tokens, sampling=Sampling(), tree=tree)
    while len(run.reply) < tokens:
        pair.round(run)
    draft.accepted = run.tau  # type: ignore[attr-defined]
    return run.reply[:tokens]


def alone(target: Path) -> Any:
    """The same, of the target alone."""
    silent = DraftWorker(Blocks(0), Identity("none", "", "cpu", 1, 1 << 20), Spans())
    return reply(target, silent, DYNAMIC)


def test_a_constraint_is_added_by_the_table_alone(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = alone(llama_folder)
    monkeypatch.setitem(CONSTRAINTS, "few tokens", FewTokens())
    constrained = alone(llama_folder)
    assert {*constrained} <= {*FewTokens.few} < {*before} | {*FewTokens.few}
    assert all(one != other for one, other in pairwise(constrained))
    draft = DraftSettings(model=str(llama_folder), weights="int8", device="cpu")
    worker = open_draft_worker(draft, name="own", threads=1, target=str(llama_folder))
    assert reply(llama_folder, worker, DYNAMIC) == constrained
    assert worker.accepted > 2.0


def test_a_kind_of_draft_a_policy_and_a_device_are_added_by_their_tables_alone(
    llama_folder: Path, adding: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONSTRAINTS, "few tokens", FewTokens())
    expected = alone(llama_folder)
    adding(f"{__name__}:ENTRY")
    monkeypatch.setattr(opening, "KINDS", tuple(one.load() for one in registry.entries()))
    monkeypatch.setitem(DRAFT_KINDS, "block", DraftTraits(own_model=False, draws=False))
    monkeypatch.setitem(drafters.OPENERS, "block", open_blocks)
    monkeypatch.setitem(POLICIES, "chain", PolicyTraits())
    monkeypatch.setitem(policies.OPENERS, "chain", lambda tree: Chain())
    flags = {"draft.device": "board", "tree.policy": "chain", "tree.insist": "true"}
    for named in ({"draft.kind": "block"}, {"draft.model": str(llama_folder)}):
        settings = configure(flags={**flags, **named}, environment={}).settings
        worker = open_draft_worker(
            settings.draft, name="made up", threads=1, target=str(llama_folder)
        )
        assert worker.hello(1).device == "board"
        assert reply(llama_folder, worker, settings.tree) == expected
        assert worker.accepted > 1.5


def test_every_draft_and_every_policy_can_be_opened() -> None:
    assert set(drafters.OPENERS) == set(DRAFT_KINDS) - {"none"}
    assert set(policies.OPENERS) == set(POLICIES)
