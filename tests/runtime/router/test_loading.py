"""Which of several models are loaded, in virtual time."""

import random

import pytest

from dovetail.runtime.router.loading import PAUSE_S, Pool, Report

GB = 10**9


class Machine:
    """A supervisor that loads and unloads what a pool wants, one step at a time."""

    def __init__(self, pool: Pool, sizes: dict[str, int], memory: int = 1 << 60) -> None:
        self.pool, self.sizes, self.memory = pool, sizes, memory
        self.states = dict.fromkeys(sizes, "unloaded")
        self.broken: set[str] = set()
        self.now_s = 0.0
        self.report()

    @property
    def room(self) -> int:
        held = ("loading", "loaded", "unloading")
        return self.memory - sum(self.sizes[n] for n, state in self.states.items() if state in held)

    @property
    def loaded(self) -> set[str]:
        return {name for name, state in self.states.items() if state == "loaded"}

    def report(self) -> None:
        reports = [Report(name, self.sizes[name], state) for name, state in self.states.items()]  # type: ignore[arg-type]
        self.pool.update(reports, self.now_s)

    def step(self, seconds: float = 1.0) -> None:
        self.now_s += seconds
        self.pool.step(self.now_s, self.room)
        for name, state in self.states.items():
            wanted = name in self.pool.wanted
            if wanted:
                ready = "failed" if name in self.broken else "loaded"
                self.states[name] = {"unloaded": "loading", "loading": ready}.get(state, state)
            else:
                steps = {"loaded": "unloading", "loading": "unloading"}
                self.states[name] = steps.get(state, "unloaded")
        assert self.room >= 0 or len(self.loaded) < 2
        self.report()


class Client:
    """A request: waits for its model, runs for some steps, and ends."""

    def __init__(self, machine: Machine, name: str, number: int, steps: int = 2) -> None:
        self.model, self.number, self.steps = machine.pool.models[name], number, steps
        self.machine, self.begun_s, self.running = machine, machine.now_s, False
        self.model.waiting[number] = self.model.used_s = machine.now_s

    @property
    def ended(self) -> bool:
        return self.steps <= 0

    def step(self) -> None:
        if self.running:
            assert self.model.report.state == "loaded", "it was unloaded during a request"
            self.steps -= 1
            if self.ended:
                self.model.running -= 1
                self.model.used_s = self.machine.now_s
        elif self.model.admits(self.begun_s):
            del self.model.waiting[self.number]
            self.model.running += 1
            self.running = True


def test_a_model_is_loaded_when_it_is_asked_for_and_unloaded_when_idle() -> None:
    machine = Machine(Pool(idle_s=10.0), {"a": GB, "b": GB})
    machine.step()
    assert machine.loaded == set()
    client = Client(machine, "a", 0, steps=15)
    while not client.ended:
        machine.step()
        client.step()
        assert "b" not in machine.loaded
    machine.step(9.0)
    assert machine.loaded == {"a"}
    for _ in range(3):
        machine.step()
    assert machine.states == {"a": "unloaded", "b": "unloaded"}


@pytest.mark.parametrize("most", [0, 2])
def test_the_least_recently_used_model_makes_room(most: int) -> None:
    """By memory, or by the number of models."""
    machine = Machine(
        Pool(most=most), dict.fromkeys("abc", 4 * GB), memory=(1 << 60) if most else 10 * GB
    )
    for number, name in enumerate("abac"):
        client = Client(machine, name, number)
        while not client.ended:
            machine.step()
            client.step()
    assert machine.loaded == {"a", "c"}


def test_a_model_that_fits_nowhere_is_tried_once_nothing_else_is_loaded() -> None:
    """Its own processes report why it does not fit."""
    machine = Machine(Pool(), {"a": GB, "b": 100 * GB}, memory=10 * GB)
    for number, name in enumerate("ab"):
        client = Client(machine, name, number)
        while not client.ended:
            machine.step()
            client.step()
    assert machine.loaded == {"b"}


def test_a_model_that_cannot_be_loaded_is_tried_again_after_a_pause() -> None:
    machine = Machine(Pool(), {"a": GB, "b": GB})
    machine.broken.add("a")
    model = machine.pool.models["a"]
    model.waiting[0] = 0.0
    for _ in range(3):
        machine.step(0.1)
    assert model.failures == 1
    assert 0.0 < machine.pool.pause_s("a", machine.now_s) <= PAUSE_S
    other = Client(machine, "b", 1)
    for _ in range(8):
        machine.step(0.1)
        other.step()
    assert (other.ended, model.failures) == (True, 1)
    machine.step(PAUSE_S)
    machine.broken.clear()
    for _ in range(4):
        machine.step(0.1)
    assert "a" in machine.loaded


def test_a_pool_that_finds_models_loaded_keeps_them() -> None:
    pool = Pool()
    pool.update([Report("a", GB, "loaded", "http://x:1"), Report("b", GB, "unloaded")], 0.0)
    pool.step(1.0, None)
    assert pool.wanted == ["a"]


@pytest.mark.parametrize("seed", range(20))
def test_every_request_is_served_whatever_else_is_asked_for(seed: int) -> None:
    """Requests to more models than fit, at random: none is disturbed, and each ends, although those
    to other models never cease."""
    chance = random.Random(seed)
    sizes = {name: chance.randint(1, 5) * GB for name in "abcd"}
    machine = Machine(Pool(idle_s=chance.choice([0.0, 3.0])), sizes, memory=6 * GB)
    clients: list[Client] = []
    for number in range(300):
        if chance.random() < 0.6:
            name = chance.choice("aaaabbcd")
            clients.append(Client(machine, name, number, chance.randint(1, 6)))
        machine.step(chance.random())
        for client in clients:
            client.step()
        clients = [client for client in clients if not client.ended]
        assert all(machine.now_s - client.begun_s < 60.0 for client in clients)
    for _ in range(200):
        machine.step()
        for client in clients:
            client.step()
        clients = [client for client in clients if not client.ended]
    assert not clients
