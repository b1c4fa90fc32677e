"""Faults inside a process that is otherwise the real one: its command begins with a script that
waits for SIGUSR2, so that nothing of it is in the product.

A coordinator fails at the next step of whichever session takes one. A worker lets the next command
go unanswered, and says that it is idle while it owes that.
"""

NAME = "Sabotage"  # the name of the exception; the error that its request ends with has it

_BEGIN = """
import signal, sys
due = []
signal.signal(signal.SIGUSR2, lambda *_: due.append(True))
from dovetail.launch import cli
"""
_END = """
sys.exit(cli.run(sys.argv[1:]))
"""
COORDINATOR = f"""{_BEGIN}
from dovetail.runtime.session.session import Session

class {NAME}(Exception):
    pass

def failing(real):
    def step(self, *arguments, **named):
        if due:
            due.clear()
            raise {NAME}("meant to be")
        return real(self, *arguments, **named)
    return step

Session.verified, Session.drafted = failing(Session.verified), failing(Session.drafted)
{_END}"""
WORKER = f"""{_BEGIN}
from dovetail.protocol.messages import Draft, Feed, Open, Refeed, Verify
from dovetail.workers.loop import _Loop
real = _Loop._do

def do(self, command):
    if due and isinstance(command, Open | Feed | Refeed | Draft | Verify):
        due.clear()
        return iter(())
    return real(self, command)

_Loop._do = do
{_END}"""
