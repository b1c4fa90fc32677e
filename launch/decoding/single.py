"""One prompt, streamed to stdout as it is decoded: by a coordinator, or by a server over HTTP."""

import json

import click

from dovetail.launch.chat.conversation import Manner
from dovetail.launch.chat.web import WebAnswerer, api_key, check_flags, said_to_server
from dovetail.launch.console.terminal import failure_told, note, uninterrupted
from dovetail.launch.decoding.request import Wish
from dovetail.launch.decoding.summary import other_targets, summary, tell_full_context
from dovetail.launch.processes.connection import Connection
from dovetail.protocol.errors import DovetailError, LinkClosed, printable
from dovetail.protocol.messages import Emitted, Failed, Finished, Recorded, Reported

CANCEL_GRACE_S = 2.0
QUIET_S = 1.0  # silence after which the coordinator is asked whether the reply waits for a target


# -- one prompt ------------------------------------------------------------------------------------


def decode_one(
    wish: Wish, connection: Connection, text: str, *, as_json: bool
) -> tuple[Finished, int]:
    """Decode, streamed to stdout unless the whole result is requested; return the reply, and how
    many tokens its last round had. Ctrl-C cancels the request, and prints the result so far."""
    request: int | None = None
    shown, last = "", 0
    asked = waiting = False
    try:
        with uninterrupted():  # what has been sent is known, and can be cancelled
            request = wish.submit(connection, (text,))
        while True:
            reply = connection.client.receive(QUIET_S)
            if reply is None:
                if not asked:
                    connection.client.inquire()
                asked = True
            elif isinstance(reply, Reported):
                asked = False
                if reply.totals.waiting and not waiting:
                    note(
                        ("\n" if shown else "")
                        + f"waiting: {'; '.join(map(printable, reply.reasons))}"
                    )
                waiting = bool(reply.totals.waiting)
            elif isinstance(reply, Emitted):
                last = len(reply.tokens)
                if not as_json:
                    click.echo(reply.text, nl=False)
                    shown = reply.text or shown
            elif isinstance(reply, Recorded) and wish.records is not None:
                wish.records.write("", 0, reply.record)
            elif isinstance(reply, Finished):
                if not as_json and not shown.endswith("\n"):
                    click.echo()
                return reply, last
            elif isinstance(reply, Failed):
                break_off(shown, wish.seed if last else None)
                raise connection.failure(reply)
    except LinkClosed as lost:
        break_off(shown, wish.seed if last else None)
        if connection.stack is not None:
            raise
        raise LinkClosed(
            f"{lost}, and the reply is not finished: start a coordinator (`dovetail serve`)"
        ) from None
    except KeyboardInterrupt:
        cancelled = [] if request is None else cancel(connection, [request])
        break_off(shown, None if cancelled else wish.seed)
        for finished in cancelled:
            models = connection.models(draft=wish.speculates)
            note(f"interrupted: {summary(finished.result, models)}")
            if as_json:
                click.echo(json.dumps(finished.result.model_dump(), ensure_ascii=False))
        raise


def break_off(shown: str, seed: int | None) -> None:
    """End the line of an interrupted reply, and print the seed with which it can be repeated."""
    if shown and not shown.endswith("\n"):
        click.echo()
    if seed is not None:
        note(f"the reply stops here; seed {seed}")


def decode_over_http(wish: Wish, url: str, text: str, *, as_json: bool) -> None:
    """Decode one prompt with a server, streamed to stdout unless the whole result is wanted."""
    check_flags(wish.configuration)
    settings = wish.configuration.settings
    manner = Manner(
        settings.sampling,
        settings.sampling.max_tokens,
        settings.tree,
        wish.seed,
        wish.stop,
        speculate=wish.speculates,
        template=wish.values,
        said=said_to_server(wish.configuration),
    )
    server = WebAnswerer(url, api_key(wish.configuration))
    if held := server.defaults(manner):
        note(held)
    server.plain = wish.raw
    if not wish.raw and (why_not := server.no_chats()) and server.plain:
        note(why_not)
    shown: list[str] = []

    def show(piece: str, _drafted: bool) -> None:
        shown.append(piece)
        if not as_json:
            click.echo(piece, nl=False)

    try:
        answer = server.answer((text,), manner, show)
    except DovetailError:
        break_off("" if as_json else "".join(shown), wish.seed if shown else None)
        raise
    if answer.interrupted:
        break_off("" if as_json else answer.text, wish.seed)
        raise KeyboardInterrupt
    if not as_json and not answer.text.endswith("\n"):
        click.echo()
    if answer.result is None:
        raise DovetailError(
            f"the server at {url} sends no figures: it is not a dovetail server, or another version"
        )
    note(summary(answer.result, server.models()))
    if answer.result.fingerprints:
        note(other_targets(answer.result))
    if answer.result.draft_failure is not None:
        note(failure_told(answer.result.draft_failure))
    if manner.decides("max_tokens"):
        tell_full_context(answer.result, manner.max_tokens)
    if as_json:
        click.echo(json.dumps(answer.result.model_dump(), ensure_ascii=False))


def cancel(connection: Connection, requests: list[int]) -> list[Finished]:
    """Cancel running requests and wait until the coordinator confirms it. Returns the results so
    far."""
    finished: list[Finished] = []
    try:
        for request in requests:
            connection.client.cancel(request)
        left = set(requests)
        for reply in connection.client.replies(CANCEL_GRACE_S):
            if isinstance(reply, Finished):
                finished.append(reply)
                left.discard(reply.request)
            elif isinstance(reply, Failed) and reply.session is not None:
                left.discard(reply.session)
            if not left:
                break
    except LinkClosed:
        pass
    return finished
