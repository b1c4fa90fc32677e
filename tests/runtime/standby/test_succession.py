"""Who holds the term when coordinator, standby and workers no longer hear each other: every case of
a few voters."""

import random
from itertools import product

from dovetail.runtime.standby.succession import PATIENCE_S, Tenure, Watch

VOTERS = ("a/1/target", "b/2/draft", "c/3/target", "d/4/draft", "e/5/target")
HERE, THERE, NOWHERE = range(3)


def test_of_one_list_of_voters_never_do_both_coordinators_command() -> None:
    """Each voter serves here, waits there, or does neither."""
    taken = 0
    for count in range(len(VOTERS) + 1):
        voters = VOTERS[:count]
        tenure, watch = Tenure(), Watch(frozenset(voters), lost_s=0.0)
        tenure.told(1, voters)
        tenure.confirmed(1)
        for places in product((HERE, THERE, NOWHERE), repeat=count):
            here = [one for one, place in zip(voters, places, strict=True) if place == HERE]
            there = [one for one, place in zip(voters, places, strict=True) if place == THERE]
            due = watch.due(there, PATIENCE_S)
            taken += due
            assert not due or tenure.lapsed(here)
            assert not tenure.lapsed(voters)
    assert taken


def test_nor_do_they_while_the_list_changes_whichever_the_standby_goes_by() -> None:
    draw, taken = random.Random(5), 0
    for _ in range(2000):
        tenure, lists = Tenure(followed=True), dict[int, list[str]]()
        for number in range(draw.randint(1, 4)):
            lists[number] = [one for one in VOTERS if draw.random() < 0.6]
            tenure.told(number, lists[number])
        confirmed = draw.choice([*lists])
        tenure.confirmed(confirmed)
        tenure.followed = False
        reached = draw.choice([number for number in lists if number >= confirmed])
        watch = Watch(frozenset(lists[reached]), lost_s=0.0)
        places = {one: draw.choice((HERE, THERE, NOWHERE)) for one in VOTERS}
        here = [one for one, place in places.items() if place == HERE]
        there = [one for one, place in places.items() if place == THERE]
        if watch.due(there, PATIENCE_S):
            taken += 1
            assert tenure.lapsed(here)
    assert taken > 100


def test_a_standby_waits_for_a_flaw_to_pass_and_does_nothing_while_it_hears_the_coordinator() -> (
    None
):
    watch = Watch(frozenset(VOTERS))
    assert not watch.due(VOTERS, 100.0)
    watch.lost_s = 100.0
    assert not watch.due(VOTERS, 100.0 + PATIENCE_S / 2)
    assert watch.due(VOTERS, 100.0 + PATIENCE_S)


def test_without_a_worker_on_another_machine_nobody_takes_over_and_nobody_lapses() -> None:
    tenure = Tenure()
    assert not tenure.lapsed(())
    tenure.told(1, ())
    assert not tenure.lapsed(())
    assert not Watch(frozenset(), lost_s=0.0).due(VOTERS, 100.0)


def test_a_coordinator_goes_on_with_its_standby_whoever_else_is_lost() -> None:
    tenure = Tenure(followed=True)
    tenure.told(1, VOTERS)
    assert not tenure.lapsed(())
    tenure.followed = False
    assert tenure.lapsed(())
    assert not tenure.lapsed(VOTERS[:3])
