"""A coordinator and its standby over links in memory, with scripted workers: what the standby has
of the journal at any moment, and who commands whom behind a take-over."""

import socket
from pathlib import Path
from typing import Any

import pytest

from dovetail.protocol.codec import encode
from dovetail.protocol.errors import LinkClosed, UserError
from dovetail.protocol.keys import STANDBY, PeerKey
from dovetail.protocol.messages import Failed, Finished, Follow, Welcome
from dovetail.runtime.journal.journal import Journal
from dovetail.runtime.journal.segments import Segments
from dovetail.runtime.standby.follower import ANSWER_S, GRACE_S, HOLD_S, Follower
from dovetail.runtime.standby.lead import successor
from dovetail.runtime.standby.succession import PATIENCE_S
from dovetail.workers.serving.registration import Standing
from support.houses import PROMPT, House
from support.lives import LONG_PROMPT, MOST, TICKET, Lives, every, undisturbed
from support.memory_links import MemoryHub, memory_links
from support.scripted import ScriptedTarget, continuation, hello

OWN_KEY = PeerKey("coordinator", (STANDBY,), "k")
FOLLOW = Follow(epoch=3, host="other", pid=2, term=0, address="tcp://other:5555")


class Pair(Lives):
    """A coordinator with a standby, which a test gives time to."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder / "first", **options)
        self.copy = Journal(Segments(folder / "second"))
        self.hub: MemoryHub = memory_links()
        self.now_s = 0.0
        self.follower = Follower(
            self.hub, self.copy, "tcp://first:5555", leads_on=False, now_s=self.now_s
        )
        self.follow()

    def follow(self) -> None:
        """Have the standby connect to the coordinator."""
        self.follower.follow(self.house.hub.connect(OWN_KEY), self.now_s)
        self.copies()

    def copies(self) -> None:
        """Let the coordinator and the standby hear each other."""
        for _ in range(2):
            self.house.coordinator.pump()
            self.house.coordinator.tick()
            self.follower.listen(self.now_s)
            self.follower.receive(self.now_s)
        self.house.coordinator.pump()

    def vanishes(self) -> None:
        """The coordinator is killed, and everybody finds out."""
        self.killed()
        self.house.hub.close()
        self.follower.listen(self.now_s)

    def come(self) -> list[Any]:
        """The workers say Hello to the standby; return them."""
        for worker in self.house.workers:
            served, worker.epoch = worker.coordinator_epoch, worker.epoch + 1000
            held = worker.suspend()
            worker.link = self.hub.connect()
            worker.register(limits=worker.limits, served=served if held else None, held=held)
        self.follower.receive(self.now_s)
        return self.house.workers

    def takes_over(self) -> None:
        """The standby is the coordinator from now on, with the workers that wait at it."""
        self.now_s += PATIENCE_S
        greetings = self.follower.take_over(self.now_s)
        assert greetings is not None
        workers, self.house.workers, self.journal = self.house.workers, [], self.copy
        self.house = House(
            hub=self.hub, journal=self.copy, settings=self.settings, draft=False, target=False
        )
        for peer, frames in greetings:
            self.house.coordinator.hear(peer, frames)
        self.house.workers += workers
        self.house.run()


def test_the_standby_takes_over_at_any_moment_and_nothing_differs(tmp_path: Path) -> None:
    whole = undisturbed(tmp_path / "whole", tokens=LONG_PROMPT)
    moment, taken = 1, 0
    while True:
        pair = Pair(tmp_path / f"{moment}")
        pair.ask(tokens=LONG_PROMPT)
        pair.steps(moment)
        pair.copies()
        pair.drain()
        if pair.end is not None:
            break
        pair.vanishes()
        pair.come()
        pair.takes_over()
        assert pair.house.coordinator.service.term == 1
        pair.ask(again=True, tokens=LONG_PROMPT)
        pair.run()
        assert (pair.tokens, pair.text) == (whole.tokens, whole.text), moment
        assert isinstance(pair.end, Finished)
        pair.journal.close()
        moment, taken = moment + 4, taken + 1
    assert taken > 3


@pytest.mark.parametrize("moment", range(4, 36, 8))
def test_a_coordinator_that_lives_on_behind_a_cut_tells_nothing_more_and_steps_down(
    tmp_path: Path, moment: int
) -> None:
    """The first coordinator is cut off: the standby has all that had arrived by then, and the
    client stays for a while."""
    whole = undisturbed(tmp_path / "whole", tokens=LONG_PROMPT)
    pair = Pair(tmp_path / "cut")
    pair.ask(tokens=LONG_PROMPT)
    pair.copies()
    pair.steps(moment)
    first, client = pair.house, pair.house.client
    pair.follower._lose("the way is cut", pair.now_s)
    for worker in first.workers:
        worker.link.close()
    pair.come()
    for _ in range(3):
        first.coordinator.look_around()
        first.coordinator.tick()
        first.coordinator.pump()
    pair.drain()
    before = len(pair.tokens)
    pair.takes_over()
    workers = pair.house.workers
    assert len(workers) == 2
    assert {worker.coordinator_epoch for worker in workers} == {pair.house.coordinator.epoch}
    assert not first.coordinator.registry.workers
    for _ in range(8):
        first.later_ns += 10**8
        first.coordinator.tick()
        first.coordinator.pump()
    assert client._link.take() is None, "it told something behind the cut"
    pair.ask(again=True, tokens=LONG_PROMPT)
    pair.run()
    assert (pair.tokens, pair.text) == (whole.tokens, whole.text)
    assert len(pair.tokens) > before
    first.hub.connect(OWN_KEY).send(encode(FOLLOW.model_copy(update={"term": 1})))
    first.coordinator.pump()
    assert first.coordinator.service.deposed


def test_a_copy_is_what_the_journal_says_and_a_stream_that_broke_off_is_followed_anew(
    tmp_path: Path,
) -> None:
    pair = Pair(tmp_path)
    pair.ask()
    pair.steps(20)
    pair.copies()
    mine, copied = pair.journal._entries, pair.copy._entries
    assert mine.of[TICKET].tokens
    assert every(copied) == every(mine)
    pair.follower.close()
    pair.steps(10)
    pair.copies()
    assert every(copied) != every(mine)
    pair.follow()
    pair.steps(10)
    pair.copies()
    assert every(pair.copy._entries) == every(mine)
    assert pair.copy._entries.epochs == mine.epochs
    on_disk = Journal(_unlocked(tmp_path / "second"))._entries
    assert on_disk.copied
    assert every(on_disk)[TICKET].tokens == every(mine)[TICKET].tokens


def _unlocked(folder: Path) -> Segments:
    (folder / "lock").unlink()
    return Segments(folder)


def test_without_the_workers_a_standby_waits_and_one_started_anew_by_hand_serves(
    tmp_path: Path,
) -> None:
    pair = Pair(tmp_path)
    pair.ask()
    pair.steps(20)
    pair.copies()
    old = pair.house
    pair.vanishes()
    assert pair.follower.take_over(pair.now_s + 1000.0) is None
    pair.copy.close()
    pair.journal = Journal(Segments(tmp_path / "second"))
    pair.house = House(journal=pair.journal, draft=False, target=False)
    assert pair.house.coordinator.service.term == 1
    pair.join(old)
    pair.ask(again=True)
    pair.run()
    assert pair.tokens == continuation(PROMPT, MOST)


def test_who_comes_to_a_standby_waits_for_a_while_and_is_sent_on(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    client = pair.hub.connect()
    client.send(encode(hello("target", epoch=5).model_copy(update={"roles": ("client",)})))
    pair.follower.receive(0.0)
    for hold_s, lost_s in ((GRACE_S, None), (HOLD_S, 0.0)):
        pair.follower.watch.lost_s = lost_s
        worker = ScriptedTarget(pair.hub.connect(), "target", epoch=5)
        worker.register()
        pair.follower.receive(0.0)
        pair.follower.receive(hold_s)
        assert worker.step() == 0
        pair.follower.receive(hold_s + 0.1)
        worker.step()
        assert [failed.code for failed in worker.failures] == ["standby"]
        assert f"connect to tcp://first:5555,{pair.hub.address}" in worker.failures[0].text


def test_a_coordinator_that_may_have_been_taken_over_from_commands_nobody(tmp_path: Path) -> None:
    """Until its standby is here again; sessions go on then."""
    pair = Pair(tmp_path)
    pair.ask()
    pair.steps(20)
    pair.copies()
    assert pair.follower.watch.voters == {"here/1/target", "here/1/draft"}
    near = ScriptedTarget(pair.house.hub.connect(), "near", epoch=50)
    near.role = "target"
    near.register(host=socket.gethostname(), pid=9)
    pair.house.workers.append(near)
    pair.house.run()
    pair.copies()
    assert len(pair.follower.watch.voters) == 2
    pair.follower.close()
    away = pair.house.workers[:2]
    for worker in away:
        pair.house.lose(worker)
    pair.house.run()
    coordinator = pair.house.coordinator
    for _ in range(2):
        coordinator.look_around()
        coordinator.tick()
        pair.house.run()
    assert not coordinator.registry.workers
    assert near.failures[-1].code == "session"
    near.link = pair.house.hub.connect()
    near.register(host=socket.gethostname(), pid=9)
    pair.house.run()
    assert not coordinator.registry.workers
    pair.drain()
    before = len(pair.tokens)
    pair.run()
    assert len(pair.tokens) == before
    assert near.failures[-1].code == "standby"
    near.link = pair.house.hub.connect()
    near.register(host=socket.gethostname(), pid=9)
    pair.house.run()
    assert not coordinator.registry.workers
    pair.follow()
    pair.house.run()
    assert len(coordinator.registry.workers) == 1
    pair.run()
    assert isinstance(pair.end, Finished)
    assert pair.tokens == continuation(PROMPT, MOST)


def test_who_has_served_a_higher_term_neither_obeys_a_lower_one_nor_is_let_in(
    tmp_path: Path,
) -> None:
    standing = Standing("", standby=False, load_s=0.0)
    standing.welcomed(Welcome(epoch=1, term=2))
    with pytest.raises(LinkClosed, match="served one of term 2: it takes no commands"):
        standing.welcomed(Welcome(epoch=2, term=1))
    house = House(journal=Journal(Segments(tmp_path)), draft=False, target=False)
    worker = house.add(ScriptedTarget, "target", term=2)
    assert [failed.code for failed in worker.failures] == ["standby"]
    assert not house.coordinator.registry.workers


def test_a_coordinator_that_hears_of_a_higher_term_steps_down_if_its_own_key_says_so(
    tmp_path: Path,
) -> None:
    house = House(journal=Journal(Segments(tmp_path)), draft=False, target=False)
    higher = encode(FOLLOW.model_copy(update={"term": 1}))
    worker_key = PeerKey("target", ("target",), "t")
    for user in (None, worker_key):
        link = house.hub.connect(user)
        link.send(higher)
        house.run()
        assert not house.coordinator.service.deposed
        assert b"own key" in b"".join(link.receive(0) or [])
    house.hub.connect(OWN_KEY).send(higher)
    house.run()
    deposed = house.coordinator.service.deposed
    assert "taken over from" in str(deposed)
    assert deposed is not None
    assert deposed.successor == "tcp://other:5555"


def led_before(folder: Path) -> Journal:
    """The journal of a standby that took over, and led when it ended."""
    pair = Pair(folder)
    pair.vanishes()
    pair.come()
    pair.takes_over()
    pair.copy.close()
    return Journal(Segments(folder / "second"))


def test_who_led_last_leads_on_if_the_other_says_nothing(tmp_path: Path) -> None:
    journal = led_before(tmp_path)
    assert journal.led
    assert journal.followed == "tcp://first:5555"
    follower = Follower(memory_links(), journal, journal.followed, leads_on=True, now_s=0.0)
    assert follower.step(ANSWER_S - 0.1, lambda: None) is None
    assert follower.step(ANSWER_S, lambda: None) == []
    house = House(journal=journal, draft=False, target=False)
    assert house.coordinator.service.term == 1


def test_who_led_last_has_one_of_a_lower_term_step_down_and_leads_on(tmp_path: Path) -> None:
    journal = led_before(tmp_path)
    first = House(journal=Journal(Segments(tmp_path / "third")), draft=False, target=False)
    follower = Follower(memory_links(), journal, "tcp://first:5555", leads_on=True, now_s=0.0)
    follower.step(0.0, lambda: first.hub.connect(OWN_KEY))
    first.run()
    assert first.coordinator.service.deposed
    assert follower.step(ANSWER_S, lambda: None) == []


def test_who_led_last_follows_one_that_leads_in_a_term_as_high(tmp_path: Path) -> None:
    journal = led_before(tmp_path)
    higher = Journal(Segments(tmp_path / "third"))
    higher.copy_anew(journal.whole(), "tcp://other:5555")
    first = House(journal=higher, draft=False, target=False)
    follower = Follower(memory_links(), journal, "tcp://first:5555", leads_on=True, now_s=0.0)
    follower.step(0.0, lambda: first.hub.connect(OWN_KEY))
    first.run()
    assert first.coordinator.service.term == 2
    assert follower.step(ANSWER_S, lambda: None) is None
    assert follower.step(100.0, lambda: None) is None
    assert (journal.led, journal.term) == (False, 2)


def test_status_says_how_far_a_standby_is_behind(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.ask()
    pair.steps(20)
    behind = pair.house.report().standby
    assert behind is not None
    assert behind.behind_bytes
    pair.copies()
    pair.house.coordinator.pump()
    behind = pair.house.report().standby
    assert behind is not None
    assert not behind.behind_bytes
    pair.follower.close()
    pair.house.coordinator.tick()
    assert pair.house.report().standby is None


def test_a_standby_says_what_keeps_it_from_following(tmp_path: Path) -> None:
    house = House()
    journal = Journal(Segments(tmp_path))
    follower = Follower(memory_links(), journal, "tcp://first:5555", leads_on=False, now_s=0.0)
    follower.follow(house.hub.connect(OWN_KEY), 0.0)
    house.run()
    with pytest.raises(UserError, match=r"keeps no journal .* coordinator.journal"):
        follower.listen(0.0)


def test_a_coordinator_that_may_have_no_standby_says_why(tmp_path: Path) -> None:
    house = House(journal=Journal(Segments(tmp_path / "first")))
    house.coordinator.service.alone = "this one is alone"
    copy = Journal(Segments(tmp_path / "second"))
    follower = Follower(memory_links(), copy, "tcp://first:5555", leads_on=False, now_s=0.0)
    follower.follow(house.hub.connect(OWN_KEY), 0.0)
    house.run()
    with pytest.raises(UserError, match="refused this standby: this one is alone"):
        follower.listen(0.0)


def test_a_coordinator_hands_over_only_to_a_standby_that_takes_over(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    service, registry = pair.house.coordinator.service, pair.house.coordinator.registry
    standby = successor(service, registry)
    assert standby is not None
    assert not standby.behind
    pair.ask()
    pair.steps(20)
    assert standby.behind
    pair.copies()
    service.ending = True  # a client's Stop: the whole service ends
    assert successor(service, registry) is None
    service.ending = False
    pair.follower.close()
    pair.house.coordinator.tick()
    assert successor(service, registry) is None
    pair.follow()
    assert successor(service, registry) is not None
    for worker in [*pair.house.workers]:
        pair.house.lose(worker)
    pair.house.run()
    pair.house.coordinator.look_around()
    assert successor(service, registry) is None


def test_a_coordinator_has_one_standby_and_says_when_it_is_lost(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    second = pair.house.hub.connect(OWN_KEY)
    second.send(encode(FOLLOW))
    pair.house.run()
    refused = b"".join(second.receive(0) or [])
    assert b"has a standby already, at " in refused
    assert FOLLOW.address.encode() in refused
    assert not pair.house.report().degraded
    pair.follower.close()
    pair.house.coordinator.tick()
    told = pair.house.report()
    assert any("standby" in reason for reason in told.reasons)
    pair.follow()
    assert not pair.house.report().degraded
    assert isinstance(pair.follower.take_over(1000.0), type(None))
    assert not isinstance(pair.end, Failed)
