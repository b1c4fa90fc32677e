"""Speculation under load, in virtual time: whatever runs at once, no load is slower than without a
draft, and what one load taught says nothing of another.

The same streams are decoded with and without a draft, each in turn, by workers that compute at once
and wait for each other.
"""

from types import SimpleNamespace

import pytest

from dovetail.launch.settings.configure import configure
from dovetail.protocol.settings import TreeSettings
from dovetail.runtime.control.controller import CONTROLLED
from dovetail.runtime.control.on_off import Crowd, Experience, OnOff
from dovetail.runtime.control.pricing import worth_waiting
from dovetail.runtime.control.rounds import ALONE, Load
from dovetail.runtime.engine.running import Census
from dovetail.runtime.session.state import State
from support.cases import everyday
from support.loaded import FIXED, GOODPUT, Crowded, Pace, drafted, passes_of, rate

TARGET, DRAFT = object(), object()


def counted(*states: State, opening: bool = False) -> Load:
    """Return the load that the first of sessions in these states has on its workers."""
    running = {
        number: SimpleNamespace(session=SimpleNamespace(state=state), target=TARGET, draft=DRAFT)
        for number, state in enumerate(states)
    }
    return Census(running).load(running[0], opening=opening)  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [State.READY, State.BETWEEN, State.DRAFTING, State.VERIFYING])
def test_a_session_counts_itself_in_its_first_round_as_in_any_other(own: State) -> None:
    assert counted(own) == Load(1, 1)
    assert counted(own, State.VERIFYING, State.DRAFTING) == Load(3, 3)


def test_prompts_that_are_read_count_only_where_they_are_asked_for() -> None:
    states = State.READY, State.OPENING, State.WAITING, State.DONE
    assert counted(*states) == Load(1, 1)
    assert counted(*states, opening=True) == Load(2, 2)


INSISTED = TreeSettings(policy="dynamic", gamma=15, depth=8, insist=True)
DEAR = Pace(pass_s=lambda rows: 0.008 + 0.0006 * rows)
"""Rows cost what they cost a target that computes rather than reads."""
PACES = {
    "a pass as long as its weights": Pace(),
    "rows that are dear": DEAR,
    "a slow draft": Pace(level_s=0.008),
    "a remote draft": Pace(hop_s=0.004),
    "a tiny target": Pace(pass_s=lambda rows: 0.0015 + 0.00005 * rows, level_s=0.0006),
    "texts of which every second is predictable": Pace(
        right=lambda prompt, _: 0.9 if prompt % 2 else 0.2
    ),
    "a draft that is never right": Pace(right=lambda *_: 0.0, belief=0.6),
    "a draft whose passes all share": Pace(level_s=0.004, together=64),
    "a draft whose passes two share": Pace(level_s=0.004, further_s=0.001, together=2),
    "a draft whose passes all share, and rows that are dear": Pace(
        pass_s=lambda rows: 0.008 + 0.0006 * rows, level_s=0.002, together=64
    ),
}
FEW = (
    *("rows that are dear", "a remote draft", "a draft that is never right"),
    "a draft whose passes two share",
)
"""The paces at which goodput is held to its promise every day."""


def over_plain(
    house: Crowded,
    streams: int,
    *,
    tree: TreeSettings = GOODPUT,
    turn: int = 0,
    tokens: int = 64,
    apart_s: float = 0.0,
) -> float:
    """The rate of streams with a draft over that of the same without."""
    prompt = 8 + 20 * turn
    plain = rate(house.run(streams, tokens, speculate=False, prompt=prompt, apart_s=apart_s))
    return rate(house.run(streams, tokens, tree=tree, prompt=prompt, apart_s=apart_s)) / plain


def middle(ratios: list[float]) -> float:
    return sorted(ratios)[len(ratios) // 2]


@pytest.mark.parametrize(
    ("pace", "tree"),
    [
        *everyday([(pace, GOODPUT) for pace in PACES], *((pace, GOODPUT) for pace in FEW)),
        *everyday([(pace, FIXED) for pace in PACES], ("rows that are dear", FIXED)),
    ],
    ids=lambda value: getattr(value, "policy", value),
)
def test_at_no_load_a_draft_makes_streams_slower(pace: str, tree: TreeSettings) -> None:
    house = Crowded(PACES[pace])
    for streams in (3, 8):
        assert (
            middle(
                [over_plain(house, streams, tree=tree, turn=turn, tokens=48) for turn in range(3)]
            )
            >= 0.97
        )


def test_streams_that_come_one_after_the_other_are_not_slower_either() -> None:
    house = Crowded(DEAR)
    assert middle([over_plain(house, 8, turn=turn, apart_s=0.05) for turn in range(3)]) >= 0.97


def test_where_drafting_pays_at_a_load_it_is_done() -> None:
    house = Crowded(Pace(right=lambda *_: 0.9, level_s=0.0004))
    assert [
        over_plain(house, streams, tokens=128) > least
        for streams, least in ((2, 2.5), (4, 2.0), (8, 1.4))
    ] == [True] * 3


def test_a_draft_whose_passes_all_share_pays_at_loads_at_which_one_after_the_other_does_not() -> (
    None
):
    """A level takes a fifth of a pass, and for a further session a fortieth of that more."""
    rates = []
    for together in (1, 64):
        house = Crowded(Pace(level_s=0.004, right=lambda *_: 0.85, together=together))
        rates.append(middle([over_plain(house, 8, turn=turn, tokens=96) for turn in range(3)]))
    assert rates[0] < 1.02
    assert rates[1] > 1.15


@pytest.mark.parametrize("tree", [GOODPUT, FIXED], ids=lambda tree: tree.policy)
def test_after_a_burst_a_lone_session_is_drafted_for_within_its_first_reply(
    tree: TreeSettings,
) -> None:
    house = Crowded(DEAR)
    alone = rate(house.run(1, speculate=False))
    house.run(16, tree=tree)
    (stream,) = streams = house.run(1, tree=tree)
    assert drafted(streams) >= 0.8 * stream.result.rounds
    assert rate(streams) > 1.5 * alone


def test_a_draft_that_is_slow_at_its_very_first_order_is_not_given_up() -> None:
    house = Crowded()
    house.draft.late_s = 0.5
    house.run(1, 5 + CONTROLLED)
    assert len(house.draft.orders) == 1
    house.draft.late_s = 0.0
    (stream,) = streams = house.run(1)
    assert drafted(streams) >= 0.8 * stream.result.rounds


def test_a_lone_session_that_drafts_says_nothing_of_a_burst() -> None:
    house = Crowded(Pace(pass_s=lambda rows: 0.004 + 0.001 * rows))
    plain = rate(house.run(8, speculate=False))
    assert rate(house.run(1)) > 1.1 * rate(house.run(1, speculate=False))
    assert middle([rate(house.run(8)) / plain for _ in range(3)]) >= 0.97


@pytest.mark.parametrize("speculate", [True, False])
def test_a_target_that_decodes_one_session_undrafted_does_not_wait_between_passes(
    speculate: bool,
) -> None:
    house = Crowded(Pace(pass_s=lambda _: 0.004, hop_s=0.0015, right=lambda *_: 0.0, belief=0.6))
    house.run(1, 200)  # in which drafting is tried and switched off
    assert rate(house.run(1, 200, speculate=speculate)) > 0.95 / 0.004


def test_a_verdict_dies_when_the_load_changes() -> None:
    """Drafting is off for eight, and on for two of them when the others have ended."""
    house = Crowded(DEAR)
    house.run(2, 200)
    assert drafted(house.run(8)) < 40
    pair = house.run(2)
    assert drafted(pair) > 0.6 * sum(stream.result.rounds for stream in pair)


def test_a_draft_that_is_not_asked_at_this_load_reads_no_prompts_and_catches_up_when_it_is() -> (
    None
):
    """Drafting is off for eight; the two of them that go on for longer are drafted for."""
    house = Crowded(DEAR)
    house.run(8)
    before = house.draft.opened
    *_, one, another = house.run(8, [48] * 6 + [200] * 2, prompt=100)
    assert house.draft.opened - before <= 4
    assert drafted([one, another]) > 0.8 * (one.result.rounds + another.result.rounds - 2 * 48)


def test_a_fixed_tree_is_a_bound_under_load_and_is_taken_whole_where_the_request_insists() -> None:
    house = Crowded(DEAR)
    for tree, whole in ((FIXED, False), (INSISTED, True)):
        house.run(8, tree=tree)
        house.target.passes.clear()
        house.run(8, tree=tree)
        nodes = [
            len(item.tokens)
            for command in house.target.passes
            for item in command.items
            if item.prefix < 60
        ]
        assert (min(nodes) >= 7) == whole
        assert (sum(nodes) / len(nodes) > 4) == whole


def test_a_node_is_priced_by_everybody_who_waits_for_its_row() -> None:
    """Drafting is as good as free, and always paying: what a row costs a pass is what bounds the
    tree."""
    house = Crowded(Pace(level_s=1e-5, pass_s=lambda rows: 0.01 + 0.0005 * rows), profiled=True)
    sizes = []
    for streams in (1, 2, 8):
        house.run(streams)
        house.target.passes.clear()
        house.run(streams)
        nodes = [
            len(item.tokens)
            for command in house.target.passes
            for item in command.items
            if item.tokens and len(command.items) == streams
        ]
        sizes.append(sum(nodes) / len(nodes))
    assert sizes[0] > 1.1 * sizes[1] > 1.1 * 1.1 * sizes[2]


def test_a_pass_waits_for_proposals_that_are_nearly_there() -> None:
    house = Crowded(Pace(level_s=0.0004, right=lambda *_: 0.9))
    house.run(4, 100)
    house.target.passes.clear()
    house.run(4, 100)
    assert middle([float(len(command.items)) for command in house.target.passes]) == 4.0


def test_a_pass_does_not_wait_for_a_draft_that_stands_still() -> None:
    """Two sessions are in the hands of the draft when it begins to take a second for an order; the
    third one, which has none, goes on."""
    house = Crowded(Pace(level_s=0.0004, right=lambda *_: 0.9))
    alone = rate(house.run(1, 40, speculate=False))
    house.run(2, 100)
    house.draft.late_s = 1.0
    undrafted, *_ = house.run(3, 40, plain=(0,))
    assert rate([undrafted]) > 0.8 * alone


@pytest.mark.parametrize(
    ("waits", "ready", "wait"),
    [
        ((), 3, None),
        ((0.002,), 1, 0.002),
        ((0.002, 0.004, 0.016), 1, 0.004),
        ((0.002,), 9, None),
        ((0.03,), 1, None),
        ((0.0,), 8, 0.0),
    ],
)
def test_how_long_a_pass_waits_is_what_it_saves_those_who_come_over_what_it_costs_those_who_are_there(  # noqa: E501
    waits: tuple[float, ...], ready: int, wait: float | None
) -> None:
    assert worth_waiting(waits, ready=ready, pass_s=0.02) == wait


def test_loads_of_one_level_are_alike() -> None:
    assert ALONE.alone
    assert not Load(2, 1).alone
    levels = [Load(count, 1).level for count in (1, 2, 3, 4, 5, 8, 9, 16, 17)]
    assert levels == [(level, 0) for level in (0, 1, 2, 2, 3, 3, 4, 4, 5)]


def test_many_begin_without_a_draft_and_are_told_what_a_try_of_all_of_them_brought() -> None:
    on_off, words = OnOff(Experience(), many=True), list[str]()
    for _ in range(200):
        state = on_off.state
        said = (
            on_off.drafted(3.0, 0.03, 0.02, among=4)
            if on_off.drafting
            else on_off.undrafted(0.02, 0.02)
        )
        words += [said] if said else []
        assert (on_off.state != state) == (said is not None)
    assert words[0].endswith("2 rounds without a draft at 50.0 tokens/s per session")
    assert words[1] == (
        "drafting resumed because it is faster: "
        "100.0 tokens/s per session with a draft, 50.0 without"
    )
    assert on_off.state == "on"


def test_every_pair_comes_with_a_tree_that_adapts_itself() -> None:
    embedded, own = (
        configure(environment={}),
        configure(flags={"target.model": "/models/mine"}, environment={}),
    )
    assert [settings.settings.tree.policy for settings in (embedded, own)] == ["goodput", "goodput"]
    assert not embedded.settings.tree.insist


def test_costs_that_let_nothing_pay_are_not_believed_for_ever() -> None:
    on_off, states = OnOff(Experience(), many=True), list[str]()
    for _ in range(300):
        on_off.undrafted(0.02, 0.02, worth_trying=lambda: False)
        states.append(on_off.state)
    assert states.count("off") == 255
    assert states[-1] == "try"


def test_a_try_that_fails_as_known_costs_said_is_made_again_ever_later() -> None:
    on_off, waits = OnOff(Experience(), many=True), list[int]()
    for _ in range(6):
        waits.append(0)
        while on_off.state == "off":
            on_off.undrafted(0.02, 0.02, worth_trying=lambda: False)
            waits[-1] += 1
        while on_off.drafting:
            on_off.drafted(1.0, 0.03, 0.02)
    assert waits == [256, 512, 1024, 2048, 2048, 2048]


def test_what_rounds_of_a_try_cost_that_end_behind_it_is_charged_to_it() -> None:
    def credit_s(*, late: int) -> float:
        experience = Experience()
        on_off = OnOff(experience, many=True)
        while on_off.state == "off":
            on_off.undrafted(0.02, 0.02)
        began = on_off.era
        while on_off.drafting:
            on_off.drafted(1.0, 0.03, 0.02, among=4)
        for _ in range(late):
            on_off.straggled(began, 1.0, 0.03, 0.02, among=4)
            on_off.straggled(began - 1, 1.0, 0.03, 0.02, among=4)  # of the rounds before it
        assert experience.try_s > 0.0
        return experience.credit_s

    assert credit_s(late=0) - credit_s(late=3) == pytest.approx(3 * 0.01 / 4)


def test_where_nothing_is_worth_verifying_drafting_stops_and_is_tried_ever_later() -> None:
    experience, waits = Experience(), list[int]()
    on_off = OnOff(experience, many=True)
    for _ in range(4):
        waits.append(0)
        while on_off.state == "off":
            on_off.undrafted(0.02, 0.02)
            waits[-1] += 1
        while on_off.state == "try":
            on_off.drafted(3.0, 0.02, 0.02)
        assert on_off.state == "on"
        words = [on_off.drafted(1.0, 0.02, 0.02, barren=True) for _ in range(8)]
        assert words[:7] == [None] * 7
        assert words[7] == (
            "drafting stopped because no drafted node has been worth verifying lately: 50.0 "
            "tokens/s per session without a draft"
        )
    assert waits[:3] == [2, 512, 1024]
    assert waits[3] >= 2048


def test_a_try_after_which_much_is_drafted_makes_up_for_those_that_came_to_nothing() -> None:
    experience = Experience(hopeless=3, fruitless=True)
    on_off = OnOff(experience, many=True)
    while on_off.state != "on":
        on_off.undrafted(0.02, 0.02)
        if on_off.drafting:
            on_off.drafted(3.0, 0.02, 0.02)
    for _ in range(40):
        on_off.drafted(3.0, 0.02, 0.02)
        on_off.drafted(3.0, 0.02, 0.02, barren=True)  # now and then nothing is
    assert on_off.state == "on"
    assert (experience.hopeless, experience.fruitless) == (0, False)


@pytest.mark.parametrize("reading_s", [0.0, 0.5])
def test_prompts_that_are_read_while_drafting_loses_are_charged_to_it(reading_s: float) -> None:
    experience = Experience()
    on_off = OnOff(experience, many=True)
    while on_off.state != "on":
        on_off.undrafted(0.02, 0.02)
        if on_off.drafting:
            on_off.drafted(3.0, 0.02, 0.02)
    before_s = experience.credit_s
    on_off.catching_up(1.0, 0.02 + reading_s, 0.02, among=1)
    while on_off.state == "on":
        on_off.drafted(1.0, 0.04, 0.02)
    assert before_s - experience.credit_s == pytest.approx(0.06 + reading_s, abs=0.03)


def test_rounds_that_still_feel_drafting_do_not_say_how_long_those_without_it_take() -> None:
    crowd = Crowd()
    on_off = crowd.on_off

    def undrafted(seconds: float) -> None:
        costs = passes_of(0.02)
        crowd.undrafted(seconds, costs, rows=2, context=0.0, before_s=0.0, hope=lambda: 1.0)

    while on_off.state != "on":
        if on_off.drafting:
            crowd.drafted(3.0, 0.02, 0.02, rate=lambda: 150.0, among=1)
        else:
            undrafted(0.02)
    while on_off.state == "on":
        crowd.drafted(1.0, 0.06, 0.02, rate=lambda: 16.0, among=1)
    for _ in range(2):
        undrafted(0.03)
    assert crowd.alone_s(0.02) == pytest.approx(0.02)
    undrafted(0.03)
    assert crowd.alone_s(0.02) > 0.02


def test_rounds_that_took_longer_than_was_thought_do_not_once_such_passes_are_known() -> None:
    crowd = Crowd()
    for _ in range(8):
        crowd.undrafted(0.06, passes_of(0.03), rows=4, context=0.0, before_s=1.0, hope=lambda: 0.0)
    assert crowd.alone_s(0.03) == pytest.approx(0.045)  # no more than half as long again
    crowd.compare(passes_of(0.06))
    assert crowd.alone_s(0.06) == pytest.approx(0.06)
