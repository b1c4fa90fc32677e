"""Every message between two processes, typed, versioned and bounded.

Three dialects share one envelope. A *command* goes from the coordinator to a worker (imperatives),
an *event* from a worker to the coordinator (participles); a *request* goes from a client to the
coordinator, a *reply* back. Every message carries `epoch`, the incarnation of its sender, drawn at
random when the process starts. Commands about a session carry `session, round, prefix`, where
prefix is the number of committed tokens they assume, and events `session, round`, so that late,
duplicate and stale ones are recognised, counted and ignored. Token ids are int32, times
nanoseconds. Transport (`links/`) and encoding (`codec.py`) are elsewhere. Import everything from
here; each file is one conversation."""

from dovetail.protocol.messages.client import *
from dovetail.protocol.messages.drafting import *
from dovetail.protocol.messages.parts import *
from dovetail.protocol.messages.registration import *
from dovetail.protocol.messages.rounds import *
from dovetail.protocol.messages.status import *
from dovetail.protocol.messages.worker import *

Command = (
    Welcome
    | Open
    | Feed
    | Refeed
    | Read
    | Draft
    | Drafts
    | Verify
    | Close
    | Probe
    | Observe
    | Engage
    | Drain
    | Failed
)

Event = (
    Hello
    | Loading
    | Prefilled
    | Reading
    | Refed
    | Scored
    | Opened
    | Fed
    | Drafted
    | Verified
    | Closed
    | Blocks
    | Probed
    | Failed
)

Request = (
    Hello | Submit | Recall | Forget | Cancel | Status | Describe | Look | Swap | Dismiss | Stop
)

Reply = (
    Welcome
    | Emitted
    | PromptScored
    | PromptRead
    | Recorded
    | Finished
    | Recalled
    | Forgotten
    | Reported
    | Described
    | Seen
    | Progressed
    | Swapped
    | Dismissed
    | Failed
)
