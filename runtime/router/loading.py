"""Decides which of several models are loaded: those with waiting requests, one at a time and in
order of arrival. If memory or the number of models is short, the least recently used one gets no
further requests and is unloaded once its running ones have ended; a model that is idle for long is
unloaded, too. Pure: names, events and seconds in, the names of the wanted models out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

State = Literal["unloaded", "loading", "loaded", "unloading", "failed"]
PAUSE_S = 5.0  # seconds after a failure to load before the next attempt
NEVER, OPEN = float("-inf"), float("inf")


@dataclass(frozen=True)
class Report:
    """The state of a model, as its supervisor reports it."""

    name: str
    size: int  # the estimated bytes of its memory; 0 if unknown
    state: State
    url: str = ""
    why: str = ""  # why it could not be loaded, or was lost


@dataclass
class Model:
    """One model, with its requests."""

    report: Report
    wanted: bool = False  # True if it should be loaded
    closing_s: float = OPEN
    """Requests that arrive later wait, since it makes room for another model."""
    running: int = 0
    waiting: dict[int, float] = field(default_factory=dict)
    """The time of arrival of each waiting request, by its id, the earliest first."""
    used_s: float = NEVER  # when a request last began, waited or ended
    failed_s: float = NEVER
    failures: int = 0
    """The number of failures to load; waiting requests compare it."""

    def admits(self, arrival_s: float) -> bool:
        """Return whether a request that arrived at this time can be sent to it."""
        return self.wanted and self.report.state == "loaded" and arrival_s < self.closing_s

    @property
    def busy(self) -> bool:
        """Whether requests run or are about to."""
        return self.running > 0 or any(map(self.admits, self.waiting.values()))

    @property
    def resident(self) -> bool:
        """Whether it is loaded, or about to be."""
        return self.wanted or self.report.state in ("loading", "loaded", "unloading")


class Pool:
    """The models by their names."""

    def __init__(self, *, most: int = 0, idle_s: float = 0.0) -> None:
        """`most`: the most models loaded at once, 0: no limit; `idle_s`: seconds without a request
        after which a model is unloaded, 0: never."""
        self._most, self._idle_s = most, idle_s
        self.models: dict[str, Model] = {}

    @property
    def wanted(self) -> list[str]:
        """The models that should be loaded."""
        return [name for name, model in self.models.items() if model.wanted]

    @property
    def queues(self) -> bool:
        """Whether a request waits for a model that is not loaded."""
        return any(model.waiting and not model.wanted for model in self.models.values())

    def update(self, reports: Iterable[Report], now_s: float) -> None:
        """Take the states of all models, reported after the last change of `wanted`. A model that
        is loaded at the first report stays loaded."""
        for report in reports:
            model = self.models.get(report.name)
            if model is None:
                model = self.models[report.name] = Model(report)
                model.wanted = report.state in ("loading", "loaded")
                model.used_s = now_s if model.wanted else NEVER
            if report.state == "loaded" != model.report.state:
                model.used_s = now_s
            model.report = report
            if report.state == "failed" and model.wanted:
                model.wanted, model.failed_s = False, now_s
                model.failures += 1

    def pause_s(self, name: str, now_s: float) -> float:
        """Return for how many more seconds a model that could not be loaded is not tried again."""
        return max(0.0, self.models[name].failed_s + PAUSE_S - now_s)

    def step(self, now_s: float, room: int | None) -> None:
        """Decide which models are wanted. `room`: bytes of free memory; None if unknown."""
        models = self.models.values()
        for model in models:
            idle = not (model.running or model.waiting) and model.report.state == "loaded"
            if model.wanted and idle and 0.0 < self._idle_s <= now_s - model.used_s:
                model.wanted = False
        if any(model.wanted != (model.report.state == "loaded") for model in self._resident):
            return  # one is being loaded or unloaded, and what it takes is not known yet
        queue = sorted(
            (model for model in models if model.waiting and not model.wanted),
            key=lambda model: next(iter(model.waiting.values())),
        )
        first = next((model for model in queue if now_s - model.failed_s >= PAUSE_S), None)
        resident = self._resident
        room_left = not self._most or len(resident) < self._most
        if first is None or not resident or (room_left and _fits(first, room)):
            for model in models:
                model.closing_s = OPEN
            if first is not None:
                first.wanted = True
            return
        victim = min(resident, key=lambda model: (model.closing_s, model.busy, model.used_s))
        victim.closing_s = min(victim.closing_s, now_s)
        victim.wanted = victim.busy

    @property
    def _resident(self) -> Sequence[Model]:
        return [model for model in self.models.values() if model.resident]


def _fits(model: Model, room: int | None) -> bool:
    return room is None or model.report.size <= room
