"""A browser for all tests of this folder, and the embedded pair behind a server with requests that
run."""

from collections.abc import Iterator

import pytest

from dashboard.talking import talking
from dovetail.launch.processes.stack import Stack
from support.browser import Browser, Page, chromium, find_chromium
from support.web import Api, api


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if (program := find_chromium()) is None:
        pytest.skip("no Chromium is installed here (Debian: apt install chromium)")
    with chromium(program) as started:
        yield started


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab, closed with the test, so that nobody looks any more."""
    opened = browser.page()
    yield opened
    opened.close()


@pytest.fixture(scope="module")  # who talks ends with those who look
def server(stack: Stack) -> Iterator[Api]:
    """The embedded pair over HTTP, with two chats that go on and on."""
    with (
        api(stack.address, "--policy=dynamic", "--tree.insist=true") as started,
        talking(started.url),
    ):
        yield started
