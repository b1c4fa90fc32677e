"""The dashboard in a browser, before a real server: what it shows, to whom, by which keys, and that
it comes back.

By `python -m pytest -m slow tests/dashboard`, where Chromium is installed.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browser import Browser, Page
from support.patience import PATIENCE_S
from support.scripted import ScriptedDraft, ScriptedTarget
from support.web import Api, api, backend

pytestmark = pytest.mark.slow

KEY = "0123456789abcdef"
CHECKS = (Path(__file__).parent / "checks.js").read_text(encoding="utf-8")
LIVE = "document.getElementById('link')?.dataset.state === 'live'"
DRAWN = "document.querySelectorAll('#tree .node').length > 3"
EVIL = '<img src=x onerror="window.evil=1"><script>window.evil=1</script>'


def check(page: Page, name: str) -> Any:
    """Return what one of the page's checks finds."""
    return page.value(f"{CHECKS}.{name}()")


@pytest.fixture
def live(page: Page, server: Api) -> Iterator[Page]:
    """The page with a tree in it; it has nothing to complain of at the end."""
    page.open(f"{server.url}/dashboard")
    page.until(LIVE)
    page.until(DRAWN)
    yield page
    assert page.messages == []


def test_it_shows_workers_figures_and_a_tree_and_goes_on(live: Page) -> None:
    live.until("document.getElementById('headline').textContent.includes(' as fast as ')")
    assert "without a draft" in live.text("#rates")
    assert live.text("#speculation-words") == "Speculation is on"
    assert live.value("[...document.querySelectorAll('#workers h3')].map(h => h.textContent)") == [
        "target",
        "draft",
    ]
    workers = live.text("#workers")
    assert all(
        word in workers
        for word in (
            "fingerprint",
            "epoch",
            "round trip",
            "clock known within",
            "a round",
            "binding",
            "pid",
        )
    )
    live.until("parseFloat(document.querySelectorAll('#figures dd')[0].textContent) > 1")
    assert float(live.value("document.querySelectorAll('#figures dd')[1].textContent")) > 1.0
    live.until("document.querySelector('#devices .curve').getAttribute('d').split('L').length > 2")
    live.until(
        "[...document.querySelectorAll('#devices strong')].every(value => "
        "value.textContent.startsWith('busy '))"
    )
    assert "just now it " in live.text("#devices")
    before = live.text("#tree-words")
    live.until(f"document.getElementById('tree-words').innerText !== {json.dumps(before)}")


def test_the_tree_is_the_one_that_the_server_tells_of(live: Page) -> None:
    live.value("document.getElementById('pause').click()")
    live.until("document.getElementById('link').dataset.state === 'paused'")
    counts = {
        kind: live.value(f"document.querySelectorAll('#tree .node.{kind}').length")
        for kind in "arnb"
    }
    offered, verified, accepted = _counts(live)
    assert (counts["a"], counts["a"] + counts["r"], counts["a"] + counts["r"] + counts["n"]) == (
        accepted,
        verified,
        offered,
    )
    assert counts["b"] == 1
    assert live.value("document.querySelectorAll('#tree .edge.a').length") == accepted
    live.value("document.querySelector('#tree-details summary').click()")
    live.until(f"document.querySelectorAll('#tree-list li').length === {offered + 1}")
    assert live.text("#tree-list").count(", accepted") == accepted


def _counts(page: Page) -> tuple[int, int, int]:
    """Nodes offered, verified and accepted, in the words above the tree."""
    words = page.text("#tree-words").replace(",", "").split()
    offered, verified, accepted = (
        int(words[words.index(word) - (2 if word == "offered" else 1)])
        for word in ("offered", "verified", "accepted")
    )
    return offered, verified, accepted


def test_fates_are_told_apart_without_colour(live: Page) -> None:
    """Each has a mark of its own shape, and an outline of its own."""
    live.value("document.getElementById('pause').click()")
    shapes = live.value(
        "[...document.querySelectorAll('#legend .mark')].map(m => m.getAttribute('d'))"
    )
    assert len(set(shapes)) == len(shapes) == 4
    dashed = (
        "[...document.querySelectorAll('#legend rect')].map(r => "
        "getComputedStyle(r).strokeDasharray + getComputedStyle(r).strokeWidth)"
    )
    assert len(set(live.value(dashed)[:3])) == 3


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_everything_can_be_read(page: Page, server: Api, width: int, dark: bool) -> None:
    page.open(f"{server.url}/dashboard", width=width, dark=dark)
    page.until(DRAWN)
    page.value("document.querySelector('#tree-details summary').click()")
    page.value("document.getElementById('pause').click()")
    assert check(page, "faint") == []
    assert check(page, "wide") == []
    assert check(page, "cut") == []
    assert page.value("document.documentElement.scrollWidth") == width
    assert page.messages == []


def test_the_switch_of_colours_goes_before_the_system(live: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = live.value(ground)
    choose = (
        "(theme => { const t = document.getElementById('theme'); t.value = theme; "
        "t.dispatchEvent(new Event('change')); })"
    )
    live.value(f"{choose}('dark')")
    dark = live.value(ground)
    assert dark != light
    live.reload()
    live.until(LIVE)
    assert live.value(ground) == dark
    live.value(f"{choose}('')")
    assert live.value(ground) == light


def test_everything_is_reached_by_keys_and_seen_when_it_is(live: Page) -> None:
    reached = []
    for _ in range(8):
        live.press("Tab")
        reached.append(check(live, "focus"))
    assert [focus["name"] for focus in reached] == [
        "skip",
        "to-chat",
        "pause",
        "theme",
        "session",
        "tree",
        "SUMMARY",
        "BODY",
    ]
    assert all(focus["seen"] for focus in reached[:-1])


def test_keys_pause_it_and_have_it_go_on(live: Page) -> None:
    for _ in range(3):
        live.press("Tab")
    live.press("Enter")
    live.until("document.getElementById('link').dataset.state === 'paused'")
    words = live.text("#tree-words")
    asked = len(live.requests)
    time.sleep(2.2)  # two turns, had it not paused
    assert (live.text("#tree-words"), len(live.requests) - asked) == (words, 0)
    live.press(" ")
    live.until(LIVE)
    live.until(f"document.getElementById('tree-words').innerText !== {json.dumps(words)}")


def test_every_control_and_picture_has_a_name(live: Page) -> None:
    nodes = live.call("Accessibility.getFullAXTree")["nodes"]
    wanted = (
        "button",
        "combobox",
        "textbox",
        "region",
        "image",
        "table",
        "main",
        "heading",
        "article",
    )
    roles = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node.get("ignored") and node["role"]["value"] in wanted
    ]
    assert {role for role, name in roles if not name} <= {"main"}
    assert {"button", "combobox", "image", "heading"} <= {role for role, _ in roles}
    assert live.value(
        "[...document.querySelectorAll('[id]')].length === new "
        "Set([...document.querySelectorAll('[id]')].map(n => n.id)).size"
    )


def test_it_asks_only_its_server_and_once_a_second(live: Page, server: Api) -> None:
    began, asked = time.monotonic(), len(live.requests)
    time.sleep(5.0)
    turns = len(live.requests) - asked
    assert all(url.startswith(server.url) for url in live.requests)
    live.value("1")
    assert turns <= time.monotonic() - began + 1


def test_a_hidden_page_asks_nothing(live: Page) -> None:
    live.value(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true}); "
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    live.value("new Promise(done => setTimeout(done, 1500))")
    asked = len(live.requests)
    live.value("new Promise(done => setTimeout(done, 2500))")
    assert len(live.requests) == asked
    live.value("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    live.until(LIVE)


def test_little_motion_is_none_for_who_wants_it_so(page: Page, server: Api) -> None:
    page.open(f"{server.url}/dashboard", still=True)
    page.until(DRAWN)
    assert page.value(
        "getComputedStyle(document.querySelector('.bar > span')).transitionDuration"
    ) in ("0s", "0s, 0s")


def test_what_peers_call_themselves_and_what_models_say_is_never_html(page: Page) -> None:
    with backend(target=False, draft=False) as house:
        house.add(ScriptedTarget, "target", prefix="<b>", name=EVIL, model=f"/models/{EVIL}")
        house.add(ScriptedDraft, "draft", prefix="<b>", name=f"{EVIL}2", binding=EVIL)
        with api(house.address, "--policy=dynamic", "--tree.insist=true") as server:
            page.open(f"{server.url}/dashboard")
            page.until(LIVE)
            for first in range(50):
                server.complete(prompt=[5, 6, 7 + first], max_tokens=30)
                page.value("new Promise(done => setTimeout(done, 1200))")
                if page.value(DRAWN):
                    break
            assert "<b>" in page.text("#tree")
    assert EVIL in page.text("#workers")
    assert page.value("document.querySelectorAll('main b, main img, main script').length") == 0
    assert page.value("window.evil") is None
    assert [
        message
        for message in page.messages
        if "TrustedHTML" in message or "Content Security" in message
    ] == []


def test_the_policy_stops_what_would_take_text_for_html(live: Page) -> None:
    refused = (
        "(() => { try { document.body.innerHTML = '<p>x'; return ''; } catch (error) { "
        "return error.name; } })()"
    )
    assert live.value(refused) == "TypeError"
    injected = (
        "new Promise(done => { const s = document.createElement('img'); s.onerror = () "
        "=> done('stopped'); s.src = 'http://127.0.0.2:9/x.png'; })"
    )
    assert live.value(injected) == "stopped"
    live.messages.clear()


def test_a_key_is_asked_for_kept_in_the_tab_and_no_texts_are_shown(
    browser: Browser, page: Page, server: Api, stack: Any, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text(KEY, encoding="utf-8")
    file.chmod(0o600)
    with api(stack.address, f"--http.api_key_file={file}") as keyed:
        page.open(f"{keyed.url}/dashboard")
        page.until("!document.getElementById('key-form').hidden")
        assert check(page, "focus")["name"] == "key"
        page.type("wrong-key-wrong-key")
        page.press("Enter")
        page.until("document.getElementById('key-words').textContent.includes('does not accept')")
        page.type(KEY)
        page.value(
            "[...document.querySelectorAll('#key-form button')].find(button => "
            "button.textContent === 'Send the key').click()"
        )
        page.until(LIVE)
        page.until("document.activeElement.id === 'main'")
        page.until(DRAWN)
        assert page.value("document.querySelector('#tree .node.root text').textContent") == "root"
        assert (
            page.value("[...document.querySelectorAll('#tree .node text:not(.rank)')].length") == 1
        )
        assert "not shown" in page.text("#about")
        page.reload()
        page.until(LIVE)
        other = browser.page()
        other.open(f"{keyed.url}/dashboard")
        other.until("!document.getElementById('key-form').hidden")
        other.close()


def test_it_says_that_the_server_has_gone_and_comes_back_with_it(page: Page) -> None:
    with backend() as house:
        with api(house.address) as first:
            page.open(f"{first.url}/dashboard")
            page.until(LIVE)
            port = first.address[1]
        page.until("document.getElementById('link').dataset.state === 'lost'")
        assert "does not answer" in page.text("#link")
        assert page.value("'stale' in document.getElementById('main').dataset")
        with api(house.address, f"--http.port={port}"):
            page.until(LIVE)
            notices = page.text("#notices")
    assert "The HTTP server was started again" in notices
    assert "Lost: the server does not answer." in notices


def test_it_says_that_the_coordinator_has_gone_and_who_came_instead(page: Page) -> None:
    with backend() as first, api(first.address) as server:
        page.open(f"{server.url}/dashboard")
        page.until(LIVE)
        address = first.address
        first.close()
        page.until("document.getElementById('link').dataset.state === 'lost'")
        assert "coordinator" in page.text("#link")
        with backend(address=address):
            page.until(LIVE)
            assert "The coordinator was started again" in page.text("#notices")


def test_without_workers_and_without_a_draft_it_says_so(page: Page) -> None:
    with backend(target=False, draft=False) as house, api(house.address) as server:
        page.open(f"{server.url}/dashboard")
        page.until(LIVE)
        assert "is not possible: no target worker is registered" in page.text("#speculation")
        assert "No worker is registered" in page.text("#workers")
        house.add(ScriptedTarget, "target")
        page.until(
            "document.getElementById('speculation-words').textContent.includes('no draft "
            "worker is registered')"
        )
        assert page.value("document.getElementById('speculation').dataset.state") == "alone", (
            "nobody wanted one: no fault"
        )
    assert [message for message in page.messages if "status of 503" not in message] == []


def test_without_scripts_it_says_what_to_do(page: Page, server: Api) -> None:
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.call("Page.navigate", url=f"{server.url}/dashboard")
    deadline, found = time.monotonic() + PATIENCE_S, ""
    while not found:
        assert time.monotonic() < deadline, "where scripts run it is no element but text"
        with contextlib.suppress(AssertionError):  # the document may be replaced between these
            root = page.call("DOM.getDocument")["root"]["nodeId"]
            node = page.call("DOM.querySelector", nodeId=root, selector="noscript p")["nodeId"]
            found = page.call("DOM.getOuterHTML", nodeId=node)["outerHTML"] if node else ""
    assert "dovetail top" in found
