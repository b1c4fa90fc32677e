"""Schedules that have broken a promise: what was mended stays mended."""

from explore.sabotage import HANDLED
from explore.schedules import Fault, Schedule, Wish

LONG_PROMPT = tuple(range(3, 25))
LONG_LOG = tuple(range(3, 40))
PROBED = HANDLED.index(("_peers", "probe"))
STRUCK = HANDLED.index(("_peers", "strike"))
MADE_ROOM = HANDLED.index(("_moving", "make_room"))
ASKED = HANDLED.index(("_dispatch", "ask"))
CLOSED = HANDLED.index(("_dispatch", "_close"))
SENT = HANDLED.index(("_post", "to_worker"))
TOLD = HANDLED.index(("_post", "to_client"))
PAIRED = HANDLED.index(("_placement", "pair"))
STARTED = HANDLED.index(("_starting", "_start"))
BEGUN = HANDLED.index(("_sessions", "start"))
FORGOTTEN = HANDLED.index(("_sessions", "close_on"))
CLAIMED = HANDLED.index(("_intake", "_submit"))
ANSWERED = HANDLED.index(("_answers", "_probed"))
OPENED = HANDLED.index(("_answers", "_opened"))
ASKED_FOR = HANDLED.index(("_intake", "take"))
FOUND = {
    "the target goes while the prompt is read, and the draft reads features": Schedule(
        reads=True, steps=((0, Wish(tokens=1)), (0, Fault("cut", for_ms=1)))
    ),
    "a draft that has just joined in has forgotten what the session goes on from, and its "
    "first order waits": Schedule(
        targets=2,
        drafts=2,
        steps=(
            (0, Wish(tokens=120)),
            (68, Wish(prompt=LONG_PROMPT, logprobs=2, scored=True)),
            (75, Fault("kill", who=0, for_ms=1)),
            (25, Fault("stick", who=3, for_ms=1)),
            (25, Fault("forget", who=2, for_ms=1)),
            (40, Fault("kill", who=0, for_ms=1)),
            (25, Wish(tokens=120)),
            (75, Fault("kill", who=0, for_ms=1)),
            (25, Wish(prompt=LONG_PROMPT, tokens=120, policy="goodput")),
        ),
    ),
    "a client reads nothing while a worker disconnects": Schedule(
        drafts=0, steps=((0, Wish(tokens=1)), (0, Fault("deaf", for_ms=1)), (0, Fault("cut")))
    ),
    "a draft that was put in place disconnects before it has heard of that": Schedule(
        drafts=0, steps=((0, Fault("swap", who=1, for_ms=0)), (39, Fault("cut", who=1)))
    ),
    "the coordinator fails at what it learns of a round whose verdict ends the reply": Schedule(
        drafts=0, steps=((0, Wish(tokens=2)), (3, Fault("fault", for_ms=26)))
    ),
    "the coordinator fails at speaking to a worker to find out who has gone": Schedule(
        drafts=0, steps=((0, Fault("handler", for_ms=PROBED)), (0, Fault("cut")))
    ),
    "the coordinator fails at asking a worker how it is, which is there all the time": Schedule(
        drafts=0, steps=((0, Fault("handler", for_ms=SENT)), (14, Wish(tokens=1)))
    ),
    "the coordinator fails at beginning a request that goes on from a kept one": Schedule(
        drafts=0,
        steps=(
            (0, Wish(prompt=LONG_PROMPT, tokens=1)),
            (3, Fault("handler", for_ms=PAIRED)),
            (2, Wish(prompt=LONG_PROMPT, tokens=1)),
        ),
    ),
    "the coordinator fails at beginning a request, and at telling its client so": Schedule(
        drafts=0,
        steps=(
            (0, Wish(tokens=1)),
            (0, Fault("handler", for_ms=STARTED)),
            (0, Fault("handler", for_ms=TOLD)),
        ),
    ),
    "the coordinator fails at a message that cannot be read": Schedule(
        drafts=0, steps=((0, Fault("handler", for_ms=STRUCK)), (0, Fault("babble", for_ms=0)))
    ),
    "the coordinator fails at making room for a request that goes on from a kept one": Schedule(
        drafts=0,
        steps=(
            (0, Wish(prompt=LONG_PROMPT, tokens=1)),
            (3, Fault("handler", for_ms=MADE_ROOM)),
            (2, Wish(prompt=(*LONG_PROMPT, 25, 26), tokens=1)),
        ),
    ),
    "the coordinator fails at asking for a session whose target goes meanwhile": Schedule(
        drafts=0,
        steps=(
            (0, Wish(tokens=1)),
            (3, Fault("babble", for_ms=0)),
            (0, Wish(tokens=1)),
            (2, Fault("handler", for_ms=ASKED)),
        ),
    ),
    "the coordinator fails at telling workers that a session has ended": Schedule(
        drafts=0, steps=((0, Wish(tokens=1)), (0, Fault("handler", for_ms=CLOSED)))
    ),
    "the coordinator fails at reading a request that its client came back for": Schedule(
        drafts=0,
        journal=True,
        steps=(
            (0, Wish(tokens=1)),
            (0, Fault("crash", for_ms=0)),
            (3, Fault("handler", for_ms=CLAIMED)),
        ),
    ),
    "a client cancels a reply that it has come back for and that is whole": Schedule(
        targets=2,
        journal=True,
        steps=(
            (0, Fault("crash", for_ms=26)),
            (33, Wish(tokens=9, speculate=False)),
            (46, Fault("cancel")),
        ),
    ),
    "the coordinator fails at having a draft forget a session that it has refused": Schedule(
        targets=2,
        reads=True,
        steps=(
            (0, Fault("refuse", who=2)),
            (0, Fault("handler", for_ms=FORGOTTEN)),
            (0, Wish(tokens=3)),
        ),
    ),
    "the coordinator fails at having a draft forget a session that is to get another": Schedule(
        row_ms=0.2,
        steps=(
            (0, Wish(prompt=(5, 6, 7), tokens=27, policy="goodput")),
            (0, Fault("handler", for_ms=FORGOTTEN)),
            (0, Fault("swap", who=1, for_ms=0)),
        ),
    ),
    "the coordinator fails at starting a session that goes on from a kept one": Schedule(
        drafts=0,
        steps=(
            (0, Wish(prompt=LONG_PROMPT, tokens=1)),
            (3, Fault("handler", for_ms=BEGUN)),
            (2, Wish(prompt=LONG_PROMPT, tokens=1)),
        ),
    ),
    "the coordinator fails at telling a client that no target came back": Schedule(
        drafts=0,
        steps=(
            (0, Wish(tokens=1)),
            (0, Fault("kill", for_ms=9000)),
            (0, Fault("handler", for_ms=TOLD)),
        ),
    ),
    "the coordinator fails at a session whose target is lost, as it waits for another": Schedule(
        targets=2,
        reads=True,
        part=3,
        row_ms=12.0,
        steps=(
            (0, Wish(prompt=tuple(range(3, 40)), tokens=15)),
            (0, Fault("drop")),
            (187, Fault("kill", who=1, for_ms=0)),
            (90, Fault("stop", who=2, for_ms=1400)),
            (0, Fault("fault", for_ms=58)),
            (0, Wish(tokens=11)),
        ),
    ),
    "the only draft refuses, and nobody asks for anything afterwards": Schedule(
        steps=((0, Wish(tokens=40)), (20, Fault("refuse", who=1)))
    ),
    "a draft that has failed is let go": Schedule(
        steps=(
            (0, Wish(tokens=120, policy="goodput")),
            (0, Fault("refuse", who=3)),
            (20, Wish(tokens=1)),
            (5, Fault("drain", who=3)),
        )
    ),
    "the coordinator fails at an answer to whether a worker is there": Schedule(
        drafts=0, steps=((0, Fault("handler", for_ms=ANSWERED)), (13, Wish(tokens=1)))
    ),
    "the coordinator fails at a session, and at telling its target that it has ended": Schedule(
        drafts=0,
        steps=(
            (0, Wish(tokens=2)),
            (6, Fault("fault", for_ms=0)),
            (0, Fault("handler", for_ms=SENT)),
        ),
    ),
    "a reply that was whole when the coordinator died goes on from a kept beginning": Schedule(
        targets=3,
        drafts=0,
        sessions=1,
        journal=True,
        steps=(
            (0, Wish(tokens=18)),
            (33, Fault("stop", who=1, for_ms=300)),
            (3, Fault("crash", for_ms=43)),
            (18, Wish(tokens=2)),
            (0, Wish(tokens=22)),
            (2, Fault("drop")),
        ),
    ),
    "the coordinator fails at cancelling a request that is being read": Schedule(
        drafts=0,
        steps=((0, Wish(tokens=0)), (0, Fault("handler", for_ms=ASKED_FOR)), (0, Fault("cancel"))),
    ),
    "the coordinator fails at cancelling a request that waits for room": Schedule(
        drafts=0,
        sessions=1,
        journal=True,
        steps=(
            (0, Wish(tokens=40)),
            (3, Wish(tokens=3)),
            (10, Fault("handler", for_ms=ASKED_FOR)),
            (0, Fault("cancel", who=1)),
        ),
    ),
    "the coordinator fails at making room for a session that is to read another's log": Schedule(
        targets=2,
        drafts=0,
        row_ms=12.0,
        steps=(
            (0, Wish(tokens=7)),
            (0, Wish(prompt=LONG_LOG, tokens=1)),
            (0, Wish(prompt=LONG_LOG, tokens=48)),
            (32, Fault("stick")),
            (0, Fault("handler", for_ms=len(HANDLED) + MADE_ROOM)),
        ),
    ),
    "the coordinator fails at a target's answer, and at telling the client so, which reads "
    "nothing": Schedule(
        drafts=0,
        steps=(
            (0, Wish(prompt=(5, 6, 7), tokens=1)),
            (0, Fault("handler", for_ms=len(HANDLED) + TOLD)),
            (0, Fault("handler", for_ms=OPENED)),
            (0, Fault("deaf", for_ms=40)),
        ),
    ),
    "the coordinator fails at a draft's answer, and at telling the client so while text waits": (
        Schedule(
            row_ms=0.2,
            steps=(
                (0, Wish(prompt=(5, 6, 7), tokens=4, policy="goodput")),
                (12, Fault("fault", for_ms=1)),
                (1, Fault("handler", for_ms=TOLD)),
            ),
        )
    ),
}
