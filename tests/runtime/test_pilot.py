"""What a session makes of its rounds, which are made up."""

from dovetail.protocol.messages import Drafted
from dovetail.protocol.settings import TreeSettings
from dovetail.runtime.costs import PairCosts
from dovetail.runtime.metrics import RoundTimes
from dovetail.runtime.pilot import Pair, Pilot, Round

PROPOSAL = Drafted(epoch=1, session=1, round=1, tokens=(4, 5, 6), parents=(-1, 0, 1), scores=(-0.1, -0.2, -0.3), grown=3, hit=False)
ROW_NS = 1_000_000


def after(rounds: int, *, tokens: int, other_rows: int, queue_ns: int = 0) -> Pilot:
    """A pilot after drafted rounds whose pass took a millisecond a row."""
    costs = PairCosts()
    for rows in (1, other_rows, other_rows + 3):
        for _ in range(8):
            costs.target.observe(rows, rows * ROW_NS / 1e9)
    pair = Pair("draft", "target", costs, shared=False)
    pilot = Pilot(1, tree=TreeSettings(policy="goodput"), pair=pair, costs=costs, greedy=True, ahead=None, say=lambda _: None)
    for _ in range(rounds):
        pilot.sends(100, PROPOSAL.scores, other_rows + 3)
        times = RoundTimes(verify_ns=(other_rows + 3) * ROW_NS, target_queue_ns=queue_ns)
        pilot.learn(Round(times, 100, tokens, verified=3, drafted=PROPOSAL, other_rows=other_rows))
    return pilot


def test_drafting_is_not_blamed_for_the_rows_that_other_sessions_have_in_a_pass() -> None:
    assert after(40, tokens=2, other_rows=61).off is None
    assert after(40, tokens=2, other_rows=1).off is not None


def test_drafting_is_blamed_for_the_pass_that_it_made_a_session_miss_and_not_for_a_prompt_that_was_read() -> None:
    assert after(40, tokens=3, other_rows=1).off is not None  # three further rows take four times as long
    assert after(40, tokens=2, other_rows=40).off is None
    assert after(40, tokens=2, other_rows=40, queue_ns=43 * ROW_NS).off is not None
    assert after(40, tokens=3, other_rows=40, queue_ns=10**12).off is None
