"""`dovetail coordinator --standby-of` with what it cannot do: each is refused in one line."""

import asyncio
import re
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from dovetail.launch import cli
from dovetail.launch.commands import coordinator as command
from dovetail.launch.files.deployment.notification import Notifier
from dovetail.protocol.errors import KeysError, LinkClosed, LinkRefused, RequestError
from dovetail.protocol.keys import generate_keys
from dovetail.protocol.links import Link, open_hub, open_link
from dovetail.protocol.settings import CoordinatorSettings
from dovetail.runtime.client import Client
from dovetail.runtime.journal.entries import reigned
from dovetail.runtime.journal.segments import Segments, packed
from dovetail.runtime.standby.watching import Opening, call_on


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--standby-of=ipc:///x/hub",), r"standby of ipc:///x/hub .*at tcp://HOST:PORT"),
        (
            ("--standby-of=tcp://localhost:45871", "--listen=tcp://127.0.0.1:45871"),
            r"would listen there itself: name the other coordinator with --standby-of",
        ),
        (
            ("--standby-of=tcp://127.0.0.1:1,tcp://127.0.0.1:2", "--listen=tcp://127.0.0.1:*"),
            r"name one address, of the one that leads",
        ),
        (("--standby-of=tcp://localhost", "--listen=tcp://127.0.0.1:*"), r"tcp://localhost"),
        (("--standby-of=tcp://127.0.0.1:1",), r"would listen at ipc://.*name one with --listen"),
        (
            ("--standby-of=tcp://127.0.0.1:1", "--listen=tcp://127.0.0.1:*", "--journal=off"),
            r"keeps a copy of the journal: name a folder for it with coordinator\.journal",
        ),
        (
            ("--standby-of=tcp://127.0.0.1:1", "--standby=tcp://127.0.0.1:2"),
            r"--standby tcp://127.0.0.1:2 with --standby-of tcp://127.0.0.1:1: .* leave one",
        ),
    ],
)
def test_a_standby_that_could_not_take_over_is_refused(
    flags: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate_keys(tmp_path / "keys")
    journal = () if "--journal=off" in flags else (f"--coordinator.journal={tmp_path}/journal",)
    flags = tuple(one.replace("--journal", "--coordinator.journal") for one in flags)
    assert cli.run(("coordinator", f"--keys={tmp_path}/keys", *flags, *journal)) == 2
    told = capsys.readouterr().err
    assert re.search(said, told), told
    assert "Traceback" not in told


def test_the_journal_of_the_other_of_a_pair_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate_keys(tmp_path / "keys")
    segments = Segments(tmp_path / "journal")
    segments.begin(packed(reigned(1, "tcp://localhost:45871", copied=True)))
    segments.close(remove=False)
    flags = ("--listen=tcp://127.0.0.1:45871", f"--coordinator.journal={tmp_path}/journal")
    assert cli.run(("coordinator", f"--keys={tmp_path}/keys", *flags)) == 2
    told = capsys.readouterr().err
    assert re.search(rf"{tmp_path}/journal' is that of the standby of tcp://localhost:45871", told)


@pytest.mark.parametrize(
    ("standby", "differs"), [("tcp://127.0.0.1:45872", False), ("tcp://127.0.0.2:45872", True)]
)
def test_a_standby_that_is_not_the_one_whose_journal_was_copied_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, standby: str, differs: bool
) -> None:
    """A name of its machine and a number may be the same place."""
    generate_keys(tmp_path / "keys")
    segments = Segments(tmp_path / "journal")
    segments.begin(packed(reigned(1, "tcp://localhost:45872", copied=True)))
    segments.close()
    named = {"keys": f"{tmp_path}/keys", "journal": f"{tmp_path}/journal"}
    settings = CoordinatorSettings(listen="tcp://127.0.0.1:*", **named)

    class Followed(command.Process):
        """A process that says whom it follows, and does not."""

        async def _follow(self, *_: object, **options: bool) -> None:
            followed.append(options["leads_on"])

    followed: list[bool] = []
    Followed(settings, Notifier(), None, False, None, True, standby).run(None)
    assert followed == [True]
    said = "copied from the coordinator at tcp://localhost:45872 last, and --standby says tcp://127"
    assert (said in caplog.text) == differs


def test_a_standby_that_looks_for_its_lead_answers_whoever_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, keys = threading.Event(), tmp_path / "keys"
    generate_keys(keys)

    def nobody(address: str, **_: object) -> Link:
        assert answered.wait(60), "it answers nobody while it looks for its lead"
        raise LinkClosed(f"no coordinator answers at {address}")

    monkeypatch.setattr(command, "open_link", nobody)
    named = {"listen": "tcp://127.0.0.1:*", "keys": str(keys), "journal": str(tmp_path / "own")}
    settings = CoordinatorSettings.model_validate(named)
    process = command.Process(settings, Notifier(), None, False, None, False, "")

    async def scene() -> None:
        with process._opened() as (hub, journal):
            lead = "tcp://first.invalid:5555"
            follows = asyncio.create_task(process._follow(hub, journal, lead, leads_on=False))
            link = await asyncio.to_thread(open_link, hub.address, keys=keys, role="client")
            try:
                with pytest.raises(RequestError, match=f"is the standby of {lead} .* no copy"):
                    await asyncio.to_thread(Client, link)
            finally:
                answered.set()
                link.close()
                follows.cancel()
                with suppress(asyncio.CancelledError):
                    await follows

    asyncio.run(scene())


@pytest.mark.parametrize("error", [LinkRefused("other keys"), KeysError("no key")])
def test_a_standby_whose_keys_are_wrong_says_so_before_it_waits(error: Exception) -> None:
    def refused(_: float) -> Link:
        raise error

    def end(opening: Opening) -> None:
        while not opening.tried:
            assert opening.link() is None

    with pytest.raises(type(error), match=str(error)):
        end(Opening(refused, strict=True))
    with suppress(KeysError):
        end(Opening(refused, strict=False))
        assert isinstance(error, LinkRefused)


def test_who_is_taken_over_from_in_turn_calls_no_more() -> None:
    over, called = threading.Event(), threading.Event()

    def connect(timeout_s: float) -> Link:
        called.set()
        raise LinkClosed("nobody is there")

    hub = open_hub("ipc")
    try:
        call_on(connect, hub, 1, over)
        (calling,) = (one for one in threading.enumerate() if one.name == "dovetail-call")
        assert called.wait(10)
        over.set()
        calling.join(10)
        assert not calling.is_alive()
    finally:
        hub.close()
