"""A file of prompts, several in flight at a time, with answers written as they come."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dovetail.launch.console.terminal import counted, failure_told, note, progress_bar
from dovetail.launch.decoding.request import Wish, tell_what_travels
from dovetail.launch.decoding.single import cancel
from dovetail.launch.files.prompts import Prompt
from dovetail.launch.files.records import Answers, open_answers
from dovetail.launch.processes.connection import Connection, connected_by_target
from dovetail.protocol.errors import DovetailError, UserError
from dovetail.protocol.messages import DraftFailure, Failed, Finished, Recorded, Result


@dataclass
class _Dialogue:
    """One prompt of a file on its way: the history so far, and the results of the turns that are
    answered."""

    prompt: Prompt
    history: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    def next_turns(self) -> tuple[str, ...]:
        self.history.append(self.prompt.turns[len(self.results)])
        return tuple(self.history)

    def answered(self, result: Result) -> bool:
        """Take the answer to a turn; whether it was the last one."""
        self.history.append(result.text)
        self.results.append(result)
        return len(self.results) == len(self.prompt.turns)


def decode_file(
    wish: Wish, connect: str | None, prompts: list[Prompt], out: Path, parallel: int
) -> None:
    if wish.raw and (several := next((p for p in prompts if len(p.turns) > 1), None)):
        raise UserError(f"prompt {several.id!r} has {len(several.turns)} turns: leave --raw out")
    with open_answers(out) as answers:
        left = [prompt for prompt in prompts if prompt.id not in answers.done]
        if len(left) < len(prompts):
            note(f"{len(prompts) - len(left)} of {len(prompts)} prompts are already done")
        if not left:
            return
        with (
            connected_by_target(wish.configuration, connect) as (connection, configuration),
            progress_bar(len(left), "prompts") as step,
        ):
            tell_what_travels(connection)
            wish = wish.to(connection, configuration)
            batch, began_s = _Batch(wish, connection, answers), time.monotonic()
            errors = batch.run(left, parallel, step)
            taken_s = time.monotonic() - began_s
    for prompt, error in errors:
        note(f"{prompt.id}: {error}")
    answered, tokens = counted(len(left) - len(errors), "prompt"), counted(batch.tokens, "token")
    rate = batch.tokens / taken_s
    note(f"{answered} answered: {tokens} in {taken_s:.2f} s · {rate:.1f} tokens/s")
    if batch.failure is not None:
        note(
            f"the draft failed in {counted(batch.failures, 'reply', 'replies')}; the first: "
            f"{failure_told(batch.failure)}"
        )
    if errors:
        text = f"{len(errors)} of {len(prompts)} prompts were not answered"
        raise (
            UserError(text)
            if all(isinstance(error, UserError) for _, error in errors)
            else DovetailError(text)
        )


class _Batch:
    """Several dialogues in flight over one client."""

    def __init__(self, wish: Wish, connection: Connection, answers: Answers) -> None:
        self._wish, self._connection, self._answers = wish, connection, answers
        self._flying: dict[int, _Dialogue] = {}
        self.tokens = 0  # tokens of all replies so far
        self.failures = 0  # replies whose draft failed, and the failure of the first one
        self.failure: DraftFailure | None = None

    def run(
        self, prompts: list[Prompt], parallel: int, step: Callable[[str], None]
    ) -> list[tuple[Prompt, DovetailError]]:
        """Decode all; returns those that failed, and why."""
        waiting = deque(_Dialogue(prompt) for prompt in prompts)
        errors: list[tuple[Prompt, DovetailError]] = []
        try:
            while waiting or self._flying:
                while waiting and len(self._flying) < parallel:
                    self._send(waiting.popleft())
                reply = self._connection.client.receive(None)
                if isinstance(reply, Finished):
                    dialogue = self._flying.pop(reply.request)
                    self.tokens += reply.result.completion_tokens
                    self.failures += reply.result.draft_failure is not None
                    self.failure = self.failure or reply.result.draft_failure
                    if not dialogue.answered(reply.result):
                        self._send(dialogue)
                        continue
                    self._answers.write(dialogue.prompt.id, dialogue.results)
                    step(dialogue.prompt.id)
                elif isinstance(reply, Recorded) and self._wish.records is not None:
                    dialogue = self._flying[reply.request]
                    self._wish.records.write(
                        dialogue.prompt.id, len(dialogue.results), reply.record
                    )
                elif isinstance(reply, Failed):
                    errors.append((self._fallen(reply).prompt, self._connection.failure(reply)))
                    step("")
        except KeyboardInterrupt:
            cancel(self._connection, list(self._flying))
            raise
        return errors

    def _send(self, dialogue: _Dialogue) -> None:
        self._flying[self._wish.submit(self._connection, dialogue.next_turns())] = dialogue

    def _fallen(self, reply: Failed) -> _Dialogue:
        """The dialogue to which a failure belongs; a failure without one ends the whole command."""
        if reply.session not in self._flying:
            raise self._connection.failure(reply)
        return self._flying.pop(reply.session)
