"""Workers that take the place of others, and workers that leave, while sessions run: over in-memory
links with scripted workers.

The oracle is the same session undisturbed; a change of workers fails no request, whatever becomes
of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import (
    AHEAD,
    Close,
    Command,
    Dismissed,
    Draft,
    Drafted,
    Engage,
    Event,
    Failed,
    Fingerprint,
    Finished,
    Open,
    Opened,
    Probed,
    Reads,
    States,
    Supervised,
    Swapped,
    Verified,
)
from dovetail.protocol.settings import CoordinatorSettings, TreeSettings
from dovetail.runtime.control.on_off import OnOff
from dovetail.runtime.moves.reading_ahead import MOST_LAG
from dovetail.runtime.moves.replacement import SILENT_NS
from support.cases import everyday
from support.houses import House
from support.scripted import (
    READS,
    ROOMY,
    VOCABULARY,
    ScriptedDraft,
    ScriptedTarget,
    ScriptedWorker,
    continuation,
)

TRIAL = 16  # tokens: more than the prompt of a trial
LONG = 160  # tokens: longer than the trials take, so that there is something left to move
PROMPTS = [
    (5, j, k)
    for j in range(1, 40)
    for k in range(1, 40)
    if len(continuation((5, j, k), LONG)) == LONG
][:8]
OTHER = Fingerprint(checkpoint="1" * 64, weights="int8", kernels="scripted")


class Scene:
    """A house in which sessions run, and somebody who changes its workers."""

    def __init__(self, **options: Any) -> None:
        self.house = House(**options)
        self.admin, self.onlooker = self.house.connect(), self.house.connect()
        self.requests: dict[int, tuple[int, ...]] = {}

    def newcomer(self, kind: type[ScriptedWorker], **changes: object) -> ScriptedWorker:
        """A worker on standby."""
        head = {"vocabulary": None} if changes.get("reads") is not None else {}
        role = "draft" if issubclass(kind, ScriptedDraft) else "target"
        return self.house.add(
            kind, role, **{"name": f"{role}-2", "standby": True, **head, **changes}
        )  # type: ignore[arg-type]

    def begin(self, *, steps: int = 60, **options: object) -> None:
        """Let sessions begin and go so far."""
        for prompt in PROMPTS:
            self.requests[self.house.submit(prompt, max_tokens=LONG, **options)] = prompt
        small_steps(self.house, steps)

    def swap(self, newcomer: ScriptedWorker, old: ScriptedWorker | None) -> int:
        return self.admin.swap(newcomer.epoch, None if old is None else old.epoch)

    def end(
        self, request: int, said: Callable[[str], None] = lambda _: None
    ) -> Swapped | Dismissed:
        return self.admin.changed(request, said)

    def check_replies(self) -> list[Finished]:
        """No request has failed, and each says what it says undisturbed."""
        replies = self.house.replies()
        self.house.coordinator.tick()  # sends what a full queue did not take
        replies += self.house.replies()
        assert not [reply.text for reply in replies if isinstance(reply, Failed)]
        ends = {reply.request: reply for reply in replies if isinstance(reply, Finished)}
        assert ends.keys() == self.requests.keys()
        for request, prompt in self.requests.items():
            assert list(ends[request].result.token_ids) == continuation(prompt, LONG)
        self.check_all_is_over()
        return [*ends.values()]

    def check_all_is_over(self) -> None:
        self.house.run()
        report = self.onlooker.status()
        there = {worker.worker_epoch for worker in report.workers}
        assert all(not worker.logs for worker in self.house.workers if worker.epoch in there)
        assert not any((report.sessions, *(worker.sessions for worker in report.workers)))
        assert not any(worker.standby or worker.leaving for worker in report.workers)

    @property
    def names(self) -> list[str]:
        return [worker.name for worker in self.onlooker.status().workers]


def small_steps(house: House, count: int) -> None:
    """Let the coordinator and the workers handle what has arrived, in turns, so often."""
    for turn in range(count):
        if turn % 2 == 0:
            house.coordinator.pump()
        else:
            house.workers[turn // 2 % len(house.workers)].step()


def put_in_place(scene: Scene, newcomer: ScriptedWorker) -> None:
    """Let everything go so far."""
    for _ in range(1000):
        small_steps(scene.house, 2 * len(scene.house.workers))
        if not newcomer.standby:
            return
    raise AssertionError("it is still on standby")


def drafts_of(worker: ScriptedWorker) -> int:
    return sum(isinstance(command, Draft) for command in worker.seen)


# -- a draft ---------------------------------------------------------------------------------------


def test_a_draft_that_is_not_asked_at_this_load_is_in_place_before_the_sessions_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for judged in ("drafting", "untried"):
        monkeypatch.setattr(
            OnOff, judged, property(lambda _: False, lambda *_: None), raising=False
        )
    scene = Scene()
    old, newcomer = scene.house.draft, scene.newcomer(ScriptedDraft)
    scene.begin(steps=30, tree=TreeSettings(policy="goodput"))
    scene.swap(newcomer, old)
    put_in_place(scene, newcomer)
    small_steps(scene.house, 20 * len(scene.house.workers))
    assert scene.names == ["target", "draft-2"]
    assert all(len(live.session.tokens) < LONG // 2 for live in scene.house.coordinator.requests)
    assert old is not None
    assert old.drained
    scene.check_replies()


@pytest.mark.parametrize("later", [None, READS], ids=["to-small", "to-head"])
@pytest.mark.parametrize("reads", [None, READS], ids=["from-small", "from-head"])
def test_a_draft_takes_the_place_of_another_and_its_sessions_go_over(
    reads: Reads | None, later: Reads | None
) -> None:
    scene = Scene(reads=reads)
    old, newcomer, said = scene.house.draft, scene.newcomer(ScriptedDraft, reads=later), list[str]()
    assert old is not None
    scene.begin()
    swapped = scene.end(scene.swap(newcomer, old), said.append)
    assert isinstance(swapped, Swapped)
    assert (swapped.moved, swapped.stayed) == (len(PROMPTS), 0)
    assert swapped.longest_pause_s > 0.0
    assert said == ["draft-2 is tested", "draft-2 is in place"]
    assert old.drained
    assert scene.names == ["target", "draft-2"]
    replies = scene.check_replies()
    assert drafts_of(newcomer) > 10 * len(PROMPTS)
    assert all(reply.result.accepted_tokens > 20 for reply in replies)


@pytest.mark.parametrize("every", [12, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("role", everyday(["draft", "target"], "target"))
def test_a_change_may_come_at_any_moment(role: str, every: int) -> None:
    for steps in range(0, 60, every):
        scene = Scene(reads=READS)
        old = scene.house.draft if role == "draft" else scene.house.target
        newcomer = scene.newcomer(
            ScriptedDraft if role == "draft" else ScriptedTarget,
            **({"reads": READS} if role == "draft" else {}),
        )
        scene.begin(steps=steps)
        assert isinstance(scene.end(scene.swap(newcomer, old)), Swapped)
        scene.check_replies()
        assert scene.names == (["target", "draft-2"] if role == "draft" else ["draft", "target-2"])


def test_a_draft_that_leaves_is_followed_by_one_that_is_there_or_by_none() -> None:
    for another in (True, False):
        scene = Scene()
        old = scene.house.draft
        assert old is not None
        if another:
            scene.house.add(ScriptedDraft, "draft", name="draft-2")
        scene.begin()
        held = next(
            worker.sessions
            for worker in scene.house.coordinator.registry.workers.values()
            if worker.name == "draft"
        )
        dismissed = scene.end(scene.admin.dismiss(old.epoch))
        assert isinstance(dismissed, Dismissed)
        assert (dismissed.moved, dismissed.stayed) == (held, 0)
        assert old.drained
        asked = drafts_of(old)
        scene.check_replies()
        assert drafts_of(old) == asked
        assert "draft" not in scene.names
        assert not scene.onlooker.status().degraded, "nobody is missed"


# -- a target --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", [None, READS], ids=["small", "head"])
def test_a_target_takes_the_place_of_one_that_decides_as_it_does_and_the_sessions_go_over_one_after_the_other(  # noqa: E501
    reads: Reads | None,
) -> None:
    scene = Scene(reads=reads)
    old, newcomer = scene.house.target, scene.newcomer(ScriptedTarget)
    assert old is not None
    scene.begin()
    request = scene.swap(newcomer, old)
    reading = list[int]()
    watch(
        newcomer,
        lambda: reading.append(
            sum(
                live.target.name == "target-2"
                and not live.trial
                and live.session.state.value == "opening"
                for live in lives(scene)
            )
        ),
    )
    swapped = scene.end(request)
    assert (swapped.moved, swapped.stayed) == (len(PROMPTS), 0)
    assert max(reading) == 1
    assert old.drained
    assert scene.names == ["draft", "target-2"]
    replies = scene.check_replies()
    assert {(reply.result.moves, reply.result.fingerprints) for reply in replies} == {(1, ())}


def test_a_target_that_replaces_another_has_read_the_log_of_a_session_before_it_goes_over() -> None:
    scene = Scene()
    newcomer = scene.newcomer(ScriptedTarget, limits=ROOMY)
    scene.begin()
    swapped = scene.end(scene.swap(newcomer, scene.house.target))
    assert (swapped.moved, swapped.stayed) == (len(PROMPTS), 0)
    scene.check_replies()
    opened = [one for one in newcomer.seen if isinstance(one, Open) and one.round]
    assert len(opened) == len(PROMPTS)
    targets = (worker for worker in scene.house.coordinator.registry.workers.values())
    assert not any("_codec" in vars(one.language) for one in targets)  # no tokenizer was read
    assert all(one.kept and len(one.prompt) - one.kept <= MOST_LAG for one in opened)
    ahead = [one for one in newcomer.seen if isinstance(one, Open) and one.key == AHEAD]
    assert {one.capacity for one in ahead} == {one.capacity for one in opened}


def test_a_log_is_prefilled_again_while_fewer_tokens_come_than_were_prefilled() -> None:
    scene = Scene(draft=False)
    house, newcomer = scene.house, scene.newcomer(ScriptedTarget, limits=ROOMY)
    scene.requests[house.submit(PROMPTS[0], max_tokens=LONG)] = PROMPTS[0]
    small_steps(house, 30)
    (live,), handle, unread = lives(scene), newcomer.handle, list[int]()
    early, pause_ns = list[int](), 10**9

    def outrun(command: Any) -> Any:
        """While the newcomer prefills a log, decode 0.6 times as many tokens, at first more."""
        if isinstance(command, Open) and command.round:
            house.later_ns += pause_ns
        elif isinstance(command, Open) and len(command.prompt) > TRIAL:
            unread.append(len(command.prompt) - command.kept)
            more = (0.6 if len(unread) > 1 else 0.95) * unread[-1]
            end = min(live.session.length + more, LONG - MOST_LAG)
            while live.session.length < end:
                small_steps(house, 4)
                early.extend(live.target.turns.early)
        return handle(command)

    newcomer.handle = outrun  # type: ignore[method-assign]
    swapped = scene.end(scene.swap(newcomer, house.target))
    assert len(unread) > 3
    assert unread[-1] <= 2 * MOST_LAG
    assert not early, "a pass that was requested early would be wasted"
    assert swapped.longest_pause_s >= pause_ns / 1e9  # that of the move, which ends with a token
    scene.check_replies()


def lives(scene: Scene) -> Sequence[Any]:
    return [*scene.house.coordinator.requests]


def watch(worker: ScriptedWorker, look: Callable[[], object]) -> None:
    """Look at something whenever this worker is given something to do."""
    handle = worker.handle
    worker.handle = lambda command: (look(), handle(command))[1]  # type: ignore[method-assign]


def test_sessions_end_on_their_target_where_the_next_one_decides_otherwise_and_new_ones_go_to_the_next() -> (  # noqa: E501
    None
):
    scene = Scene()
    old, said = scene.house.target, list[str]()
    newcomer = scene.newcomer(ScriptedTarget, fingerprint=OTHER)
    assert old is not None
    scene.begin()
    request = scene.swap(newcomer, old)
    put_in_place(scene, newcomer)
    scene.requests[scene.house.submit(PROMPTS[0], max_tokens=LONG)] = PROMPTS[0]
    swapped = scene.end(request, said.append)
    assert (swapped.moved, swapped.stayed) == (0, len(PROMPTS))
    assert said[-1] == f"sessions that end on target: {len(PROMPTS)}"
    replies = scene.check_replies()
    assert [reply.result.fingerprint == str(OTHER) for reply in replies].count(True) == 1
    assert {reply.result.moves for reply in replies} == {0}


def test_a_target_that_replaces_a_lost_one_waits_for_sessions_that_it_cannot_continue() -> None:
    scene = Scene()
    lost, said = scene.house.target, list[str]()
    assert lost is not None
    newcomer = scene.newcomer(ScriptedTarget, fingerprint=OTHER)
    scene.begin(steps=400)
    scene.house.lose(lost)
    scene.house.coordinator.look_around()
    request = scene.swap(newcomer, None)
    put_in_place(scene, newcomer)
    scene.house.run()
    scene.house.workers.insert(0, scene.house.workers[0])  # the next epoch is a new one
    again = scene.house.add(ScriptedTarget, "target", name="target")
    assert scene.end(request, said.append).longest_pause_s >= 0.0
    numbers = ", ".join(str(number) for number in range(1, len(PROMPTS) + 1))
    assert said[-1] == f"sessions waiting for a lost target: {numbers}"
    request = scene.admin.dismiss(again.epoch)
    scene.end(request)
    assert {reply.result.moves for reply in scene.check_replies()} == {1}
    assert scene.names == ["draft", "target-2"]


def test_an_unresponsive_target_leaves_only_if_its_sessions_can_continue_elsewhere() -> None:
    scene = Scene()
    old = scene.house.target
    assert old is not None
    scene.house.add(ScriptedTarget, "target", name="other", fingerprint=OTHER)
    scene.begin(steps=400)
    (silent,) = (w for w in scene.house.coordinator.registry.workers.values() if w.name == "target")
    silent.silent = True
    numbers = [
        one.session.number for one in scene.house.coordinator.requests if one.target is silent
    ]
    listed = ", ".join(map(str, numbers))
    with pytest.raises(RequestError, match=rf"continue its sessions \({listed}\)"):
        scene.end(scene.admin.dismiss(old.epoch))
    silent.silent = False
    scene.end(scene.admin.dismiss(old.epoch))
    scene.check_replies()


def test_sessions_go_over_to_any_target_of_their_vocabulary_where_the_user_allows_it() -> None:
    scene = Scene(settings=CoordinatorSettings(move="any"))
    newcomer = scene.newcomer(ScriptedTarget, fingerprint=OTHER)
    scene.begin()
    swapped = scene.end(scene.swap(newcomer, scene.house.target))
    assert (swapped.moved, swapped.stayed) == (len(PROMPTS), 0)
    assert {len(reply.result.fingerprints) for reply in scene.check_replies()} == {2}


def test_a_target_that_leaves_hands_its_sessions_to_another() -> None:
    scene = Scene()
    old = scene.house.target
    assert old is not None
    scene.house.add(ScriptedTarget, "target", name="target-2")
    scene.begin()
    dismissed = scene.end(scene.admin.dismiss(old.epoch))
    assert dismissed.moved > 0
    assert dismissed.stayed == 0
    assert scene.names == ["draft", "target-2"]
    assert "target was removed" in scene.house.coordinator.report().decisions
    assert scene.house.coordinator.report().drained == (), "another one plays the role"
    scene.check_replies()


def test_the_only_target_leaves_where_that_is_said_and_ends_what_it_has() -> None:
    scene = Scene()
    old = scene.house.target
    assert old is not None
    scene.begin()
    with pytest.raises(
        RequestError,
        match=r"target is the only target: replace it with `dovetail swap`, or "
        r".* with --last",
    ):
        scene.end(scene.admin.dismiss(old.epoch))
    dismissed = scene.end(scene.admin.dismiss(old.epoch, last=True))
    scene.check_replies()
    assert dismissed.moved == 0
    with pytest.raises(RequestError, match="no target worker is registered"):
        scene.house.complete()


def test_a_role_that_nobody_plays_since_its_worker_was_drained_is_told_until_another_one_comes() -> (  # noqa: E501
    None
):
    scene = Scene()
    coordinator, old = scene.house.coordinator, scene.house.draft
    assert old is not None
    words = "the draft worker was drained by an operator and is not restarted"
    scene.end(scene.admin.dismiss(old.epoch))
    told = coordinator.report()
    assert (told.drained, told.degraded) == (("draft",), False)
    assert any(reason.startswith(words) for reason in told.reasons)
    scene.house.add(ScriptedDraft, "draft")
    scene.house.run()
    assert coordinator.report().drained == ()
    coordinator.supervised(Supervised(drained=("draft", "target")))
    assert coordinator.report().drained == (), "whoever supervises knows less of other workers"


def test_requests_that_come_while_their_target_leaves_are_served() -> None:
    """One is being read for the old target when that gets no more sessions; the old one waits for
    it."""
    scene = Scene()
    old, newcomer = scene.house.target, scene.newcomer(ScriptedTarget, fingerprint=OTHER)
    assert old is not None
    reading: list[Callable[[], None]] = []
    scene.house.coordinator._defer = lambda work, done: reading.append(lambda: done(work()))
    scene.requests[scene.house.submit(PROMPTS[0], max_tokens=LONG)] = PROMPTS[0]
    request = scene.swap(newcomer, old)
    scene.house.run()
    assert not old.drained
    reading.pop()()
    assert isinstance(scene.end(request), Swapped)
    scene.check_replies()


# -- a newcomer that is worth nothing --------------------------------------------------------------


class Strange(ScriptedTarget):
    """Decides otherwise than others of its fingerprint."""

    def open(self, command: Open) -> list[Event]:
        return [
            e.model_copy(update={"bonus": 1 + (e.bonus or 0) % 7}) if isinstance(e, Opened) else e
            for e in super().open(command)
        ]


class Fickle(ScriptedTarget):
    """Decides otherwise where there are drafted tokens."""

    def verify(self, asked: Sequence[Any], reads: Reads | None) -> Verified:
        verified = super().verify(asked, reads)
        drafted = any(item.tokens for item in asked)
        return verified.model_copy(
            update={
                "items": tuple(
                    i.model_copy(update={"bonus": 1 + (i.bonus + drafted) % 90}) if drafted else i
                    for i in verified.items
                )
            }
        )


class Broken(ScriptedTarget):
    """Its weights are no numbers."""

    def verify(self, asked: Sequence[Any], reads: Reads | None) -> Verified:
        verified = super().verify(asked, reads)
        nan = tuple(
            item.model_copy(update={"margins": (float("nan"),) * len(item.margins)})
            for item in verified.items
        )
        return verified.model_copy(update={"items": nan})


class Unable(ScriptedTarget):
    def open(self, command: Open) -> list[Event]:
        return [
            Failed(
                epoch=self.epoch,
                session=command.session,
                round=command.round,
                code="memory",
                text="out of memory",
            )
        ]


class Mute(ScriptedTarget):
    def work(self, command: Command) -> list[Event]:
        return []


class Slow(Mute):
    """Answers only probes, during a command that makes progress."""

    def handle(self, command: Command) -> list[Event]:
        return [
            event.model_copy(update={"busy": True}) if isinstance(event, Probed) else event
            for event in super().handle(command)
        ]


class Babbling(ScriptedDraft):
    """Proposes tokens that do not exist."""

    def propose(self, command: Draft, log: list[int]) -> Drafted:
        return (
            super()
            .propose(command, log)
            .model_copy(update={"tokens": (VOCABULARY,), "parents": (-1,), "scores": (0.0,)})
        )


class Helpless(ScriptedDraft):
    def work(self, command: Command) -> list[Event]:
        assert isinstance(command, Open)
        return [
            Failed(
                epoch=self.epoch,
                session=command.session,
                round=command.round,
                code="memory",
                text="out of memory",
            )
        ]


BAD = [
    (
        Strange,
        "it has the fingerprint of a registered target, but chooses different tokens from "
        "token 0 on",
    ),
    (Fickle, "with a draft it chooses different tokens than without, from token "),
    (Broken, "it broke the protocol"),
    (Unable, "its trial failed: out of memory"),
    (Babbling, "it offered nothing that its target could verify"),
    (Helpless, "it offered nothing that its target could verify"),
]


@pytest.mark.parametrize(("kind", "why"), BAD, ids=[kind.__name__.lower() for kind, _ in BAD])
def test_a_newcomer_that_fails_its_trial_is_let_go_and_everything_is_as_it_was(
    kind: type[ScriptedWorker], why: str
) -> None:
    scene = Scene()
    newcomer = scene.newcomer(kind, **({"fingerprint": OTHER} if kind is Fickle else {}))
    old = scene.house.target if issubclass(kind, ScriptedTarget) else scene.house.draft
    assert old is not None
    scene.begin()
    with pytest.raises(RequestError) as caught:
        scene.end(scene.swap(newcomer, old))
    assert caught.value.code == "swap"
    assert str(caught.value).startswith(f"{newcomer.role}-2 was not put in place: {why}")
    assert str(caught.value).endswith(f"; {old.role} stays")
    assert newcomer.drained != (kind is Broken), "who breaks the protocol is told so and no more"
    assert scene.names == ["target", "draft"]
    assert {reply.result.moves for reply in scene.check_replies()} == {0}
    assert not old.drained


def test_a_newcomer_of_which_nothing_is_heard_is_let_go_after_a_while() -> None:
    scene = Scene()
    newcomer = scene.newcomer(Mute)
    request = scene.swap(newcomer, scene.house.target)
    scene.house.run()
    assert "target-2 replaces target, it is being tested" in scene.onlooker.status().reasons
    scene.house.later_ns = SILENT_NS + 10**9
    scene.house.coordinator.tick()
    with pytest.raises(RequestError, match="its trial made no progress for 30 s; target stays"):
        scene.end(request)
    newcomer.step()
    assert newcomer.drained
    scene.check_all_is_over()


def test_a_newcomer_may_take_long_for_a_pass_that_makes_progress() -> None:
    scene = Scene()
    scene.swap(scene.newcomer(Slow), scene.house.target)
    for _ in range(6):
        scene.house.later_ns += SILENT_NS // 2
        scene.house.coordinator.tick()
        scene.house.run()
    assert "target-2 replaces target, it is being tested" in scene.onlooker.status().reasons


def test_a_trial_waits_for_as_long_as_it_gets_on() -> None:
    scene = Scene()
    newcomer = scene.newcomer(ScriptedTarget)
    request = scene.swap(newcomer, scene.house.target)
    for _ in range(40):
        small_steps(scene.house, 6)
        scene.house.later_ns += SILENT_NS // 2
        scene.house.coordinator.tick()
    assert isinstance(scene.end(request), Swapped)


@pytest.mark.parametrize("every", [92, pytest.param(23, marks=pytest.mark.slow)])
@pytest.mark.parametrize("role", everyday(["draft", "target"], "target"))
def test_a_newcomer_that_dies_at_any_moment_costs_no_request(role: str, every: int) -> None:
    seen = set()
    for steps in range(1, 700, every):
        scene = Scene(reads=READS)
        old = scene.house.draft if role == "draft" else scene.house.target
        newcomer = scene.newcomer(
            ScriptedDraft if role == "draft" else ScriptedTarget,
            **({"reads": READS} if role == "draft" else {}),
        )
        scene.begin()
        request = scene.swap(newcomer, old)
        small_steps(scene.house, steps)
        scene.house.lose(newcomer)
        try:
            scene.end(request)
            seen.add("in place")
        except RequestError as error:
            seen.add(str(error))
        if scene.names == ["draft"]:  # the newcomer was the target already
            another = scene.house.add(ScriptedTarget, "target")
            assert another in scene.house.workers
        scene.check_replies()
    whys = [
        f"{role}-2 {what}: it disconnected; {role} stays"
        for what in ("was not put in place", "was in place but was removed again")
    ]
    assert seen == {*whys, "in place"}


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_newcomer_that_fails_once_it_is_in_place_is_taken_back_and_costs_no_request(
    role: str,
) -> None:
    scene = Scene()
    old = scene.house.draft if role == "draft" else scene.house.target
    newcomer = scene.newcomer(ScriptedDraft if role == "draft" else ScriptedTarget)
    work = newcomer.work

    def refuse(command: Command) -> list[Event]:
        if isinstance(command, Open) and not newcomer.standby:
            return [
                Failed(
                    epoch=newcomer.epoch,
                    session=command.session,
                    round=command.round,
                    code="memory",
                    text="no room",
                )
            ]
        return work(command)

    newcomer.work = refuse  # type: ignore[method-assign]
    scene.begin()
    with pytest.raises(
        RequestError,
        match=rf"{role}-2 was in place but was removed again: it failed in session \d+: no room; "
        rf"{role} stays",
    ):
        scene.end(scene.swap(newcomer, old))
    newcomer.step()
    assert newcomer.drained
    assert sorted(scene.names) == ["draft", "target"]
    scene.check_replies()


def test_a_target_that_is_taken_back_ends_what_only_it_can_end() -> None:
    scene = Scene()
    old, newcomer = scene.house.target, scene.newcomer(ScriptedTarget, fingerprint=OTHER)
    assert old is not None
    scene.begin()
    request = scene.swap(newcomer, old)
    put_in_place(scene, newcomer)
    for prompt in PROMPTS[:3]:
        scene.requests[scene.house.submit(prompt, max_tokens=LONG)] = prompt
    while (
        not all(newcomer.rounds.get(number, 0) > 2 for number in newcomer.logs)
        or len(newcomer.logs) < 3
    ):
        small_steps(scene.house, 2 * len(scene.house.workers))
    work = newcomer.work

    def refuse(command: Command) -> list[Event]:
        if isinstance(command, Open):
            return [
                Failed(
                    epoch=newcomer.epoch,
                    session=command.session,
                    round=command.round,
                    code="memory",
                    text="no room",
                )
            ]
        return work(command)

    newcomer.work = refuse  # type: ignore[method-assign]
    scene.requests[scene.house.submit(PROMPTS[3], max_tokens=LONG)] = PROMPTS[3]
    with pytest.raises(
        RequestError,
        match=r"target-2 was in place but was removed again: it failed in session \d+: no room; "
        r"target stays",
    ):
        scene.end(request)
    newcomer.step()
    assert newcomer.drained
    assert not old.drained
    replies = scene.check_replies()
    assert [reply.result.fingerprint == str(OTHER) for reply in replies].count(True) == 3
    assert sorted(scene.names) == ["draft", "target"]


@pytest.mark.parametrize("every", [230, pytest.param(46, marks=pytest.mark.slow)])
@pytest.mark.parametrize("role", ["draft", "target"])
def test_an_old_worker_that_dies_at_any_moment_of_the_change_costs_no_request(
    role: str, every: int
) -> None:
    for steps in range(1, 700, every):
        scene = Scene(reads=READS)
        old = scene.house.draft if role == "draft" else scene.house.target
        assert old is not None
        newcomer = scene.newcomer(
            ScriptedDraft if role == "draft" else ScriptedTarget,
            **({"reads": READS} if role == "draft" else {}),
        )
        scene.begin()
        request = scene.swap(newcomer, old)
        small_steps(scene.house, steps)
        scene.house.lose(old)
        assert isinstance(scene.end(request), Swapped)
        scene.check_replies()
        assert sorted(scene.names) == sorted(
            [f"{role}-2", "target" if role == "draft" else "draft"]
        )


def test_a_worker_that_dies_while_it_leaves_is_told_of_until_its_sessions_are_elsewhere() -> None:
    scene = Scene()
    old = scene.house.target
    assert old is not None
    scene.begin()
    request = scene.admin.dismiss(old.epoch, last=True)
    small_steps(scene.house, 20)
    scene.house.lose(old)
    scene.house.run()
    assert "target leaves" in scene.onlooker.status().reasons
    scene.house.add(ScriptedTarget, "target", name="target-2")
    assert isinstance(scene.end(request), Dismissed)
    scene.check_replies()


# -- standby ---------------------------------------------------------------------------------------


def test_a_worker_on_standby_gets_no_sessions_and_is_missed_by_nobody() -> None:
    scene = Scene(draft=False)
    newcomers = [scene.newcomer(ScriptedDraft), scene.newcomer(ScriptedTarget)]
    scene.begin()
    scene.house.run()
    assert not any(isinstance(command, Open) for newcomer in newcomers for command in newcomer.seen)
    assert [worker.standby for worker in scene.onlooker.status().workers] == [False, True, True]
    for newcomer in newcomers:
        scene.house.lose(newcomer)
    scene.house.run()
    assert not scene.onlooker.status().degraded


def test_a_worker_joins_beside_those_that_are_there_and_its_trials_count_for_nothing() -> None:
    scene = Scene(draft=False)
    newcomer = scene.newcomer(ScriptedDraft)
    swapped = scene.end(scene.swap(newcomer, None))
    assert (swapped.moved, swapped.stayed) == (0, 0)
    assert sum(isinstance(command, Engage) for command in newcomer.seen) == 1
    report = scene.onlooker.status()
    assert (report.finished, report.rounds, report.totals.completion_tokens) == (0, 0, 0)
    assert scene.house.complete().result.accepted_tokens > 10
    assert all(not command.keep for command in newcomer.seen[:20] if isinstance(command, Close))


def test_a_newcomer_is_refused_if_it_does_not_fit_and_removed_if_it_no_longer_does() -> None:
    scene, narrow = Scene(reads=READS), {"states": States(width=2, layers=8)}
    assert "the draft head" in scene.newcomer(ScriptedTarget, **narrow).failures[0].text.lower()
    assert scene.names == ["target", "draft"]
    for replaced in (True, False):
        scene = Scene(draft=False, reads=READS)
        old = scene.house.target if replaced else None
        request = scene.swap(scene.newcomer(ScriptedTarget, **narrow), old)
        scene.house.add(ScriptedDraft, "draft", reads=READS, vocabulary=None)
        with pytest.raises(RequestError, match="target-2 was not put in place: the draft head"):
            scene.end(request)
        assert scene.names == ["target", "draft"]


def test_what_cannot_be_changed_is_said() -> None:
    scene = Scene()
    old, newcomer = scene.house.target, scene.newcomer(Mute)
    draft = scene.newcomer(ScriptedDraft)
    assert old is not None
    with pytest.raises(RequestError, match="the new worker is no longer on standby"):
        scene.end(scene.swap(old, None))
    with pytest.raises(RequestError, match="the worker to remove is no longer registered"):
        scene.end(scene.admin.dismiss(4711))
    wrong = "target is not a draft worker: name one that draft-2 can replace"
    with pytest.raises(RequestError, match=wrong):
        scene.end(scene.swap(draft, old))
    first = scene.swap(newcomer, old)
    scene.house.run()
    with pytest.raises(
        RequestError,
        match="another change of workers is in progress, target-2 replaces target, "
        "it is being tested: wait until it has ended",
    ):
        scene.end(scene.admin.dismiss(old.epoch))
    other = scene.house.connect()
    scene.admin.close()
    scene.house.run()
    assert first
    newcomer.step()
    assert newcomer.drained, "whoever asked has gone"
    dismissed = other.changed(other.dismiss(draft.epoch))
    assert (dismissed.moved, dismissed.stayed) == (0, 0)
    assert draft.drained
    assert scene.names == ["target", "draft"]


def test_a_change_that_has_begun_with_the_sessions_goes_on_without_whoever_asked() -> None:
    scene = Scene()
    old, newcomer = scene.house.draft, scene.newcomer(ScriptedDraft)
    assert old is not None
    scene.begin()
    scene.swap(newcomer, old)
    put_in_place(scene, newcomer)
    scene.admin.close()
    scene.check_replies()
    assert old.drained
    assert scene.names == ["target", "draft-2"]
