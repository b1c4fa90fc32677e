"""The kinds of peers of `dovetail bench` by the names of their methods."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dovetail.launch.bench.methods import NAMES, Peer, Room
from dovetail.launch.machine.cores import CoreLayout
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.models import with_target
from dovetail.protocol.settings import Settings
from dovetail.workers.models.checkpoints.gguf.view import mix_of
from peers import assisted
from peers.llama import peer as llama
from peers.llama import served
from peers.llama.kinds import read_config, type_of


class Assisted:
    """transformers' assisted generation."""

    exact, defaults = True, assisted.Options()

    def read_option(self, options: Any, text: str) -> None:
        """It has none."""

    def weights(self, settings: Settings) -> str:
        return "bf16" if settings.target.weights == "bf16" else "fp32"

    def check(self, settings: Settings, options: Any, cores: Sequence[int]) -> None:
        assisted.check(settings)

    def find(self, program: Path | None) -> None:
        """It is a library of ours."""

    def open(
        self, room: Room, configuration: Configuration, layout: CoreLayout, options: Any
    ) -> Peer:
        return assisted.AssistedPeer(room.supervisor, configuration, layout)


class LlamaCpp:
    """llama-cpp-python, given the target as a GGUF file."""

    exact, defaults = False, llama.LlamaOptions()
    read_option = staticmethod(llama.read_option)

    def weights(self, settings: Settings) -> str:
        folder = Path(with_target(settings.target).model).expanduser()
        return type_of(settings.target.weights, read_config(folder))

    def check(self, settings: Settings, options: Any, cores: Sequence[int]) -> None:
        llama.check(settings, options, cores)
        assisted.check(settings, llama.LLAMA)

    def find(self, program: Path | None) -> None:
        llama.python_for(program)

    def open(
        self, room: Room, configuration: Configuration, layout: CoreLayout, options: Any
    ) -> Peer:
        python = llama.python_for(room.programs[llama.LLAMA])
        preparation = room.made.setdefault(llama.LLAMA, llama.Preparation(room.supervisor, python))
        return llama.LlamaPeer(preparation, configuration, layout, options)


class LlamaServer:
    """llama-server, given the GGUF file of the target."""

    exact, defaults = False, served.ServerOptions()
    read_option = staticmethod(served.read_option)

    def weights(self, settings: Settings) -> str:
        return mix_of(Path(settings.target.model)).partition(" ")[0]

    def check(self, settings: Settings, options: Any, cores: Sequence[int]) -> None:
        served.check(settings, options, cores)
        assisted.check(settings, llama.SERVER)

    def find(self, program: Path | None) -> None:
        served.find_program(program)

    def open(
        self, room: Room, configuration: Configuration, layout: CoreLayout, options: Any
    ) -> Peer:
        program = served.find_program(room.programs[llama.SERVER])
        preparation = llama.Preparation(room.supervisor)
        return served.ServedPeer(preparation, program, configuration, layout, options)


KINDS = dict(zip(NAMES, (Assisted(), LlamaCpp(), LlamaServer()), strict=True))
