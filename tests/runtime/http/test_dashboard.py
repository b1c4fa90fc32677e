"""The routes of the pages: what is served to whom, under which headers, and what the dashboard
shows of other people's texts."""

import hashlib
import json
import re
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
from pydantic import ValidationError

from dovetail.protocol.settings import HttpSettings
from dovetail.runtime.http.pages.site import FOLDER, page_files
from dovetail.runtime.http.pages.watch import FRESH_S, STATE_PATH
from support.patience import PATIENCE_S
from support.scripted import ScriptedDraft, ScriptedTarget
from support.web import Api, Backend, api, backend

KEY = "0123456789abcdef"
WORDS = re.compile(r"␣?w\d+")  # the spelling of the scripted language's tokens


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(KEY, encoding="utf-8")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def keyed(house: Backend, key_file: Path) -> Iterator[Api]:
    with api(
        house.address, f"--http.api_key_file={key_file}", "--policy=dynamic", "--tree.insist=true"
    ) as started:
        yield started


def state(server: Api, **options: Any) -> dict[str, Any]:
    reply = server.client.get(STATE_PATH, **options)
    assert reply.status_code == 200, reply.text
    value: dict[str, Any] = reply.json()
    return value


def told_of_a_tree(server: Api, client: Api, **options: Any) -> dict[str, Any]:
    """Return what a server tells once there is a tree to show; requests go to `client`."""
    for attempt in range(20):
        client.complete(prompt=[5, 6, 7 + attempt], max_tokens=30)
        time.sleep(FRESH_S)  # what was told before is told again for so long
        told = state(server, **options)
        if told["tree"] is not None and told["tree"]["parents"]:
            return told
    raise AssertionError("nothing was drafted")


def texts_of(told: dict[str, Any]) -> list[str]:
    tree = told["tree"]
    return [
        text for text in (*(tree["texts"] or ()), tree["bonus"], tree["root"]) if text is not None
    ]


class Names(HTMLParser):
    """What a page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found |= {value or "" for name, value in attributes if name in ("src", "href")}
        assert not any(name.startswith("on") or name == "style" for name, _ in attributes), (
            "the policy forbids it"
        )


def test_the_pages_are_there_with_everything_that_they_name(server: Api) -> None:
    named = set()
    for path in ("/", "/dashboard"):
        page = server.client.get(path)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        head = server.client.head(path)
        assert (head.status_code, head.headers["content-length"], head.content) == (
            200,
            str(len(page.content)),
            b"",
        )
        named |= {urljoin(path, name) for name in Names(page.text).found if name[0] != "#"}
    own = {path for path in page_files() if path.endswith(".js") and "vendor" not in path}
    for path in own:
        imports = re.findall(r'(?:from|import) "([\w./]+)"', server.client.get(path).text)
        named |= {urljoin(path, name) for name in imports}
    assert named | {"/", "/dashboard"} == set(page_files())
    assert all(server.client.get(name).status_code == 200 for name in named)


@pytest.mark.parametrize(
    ("front", "dashboard", "expected"),
    [
        ("chat", "auto", ("dovetail: chat", "dovetail: dashboard")),
        ("dashboard", "auto", ("dovetail: dashboard", "dovetail: dashboard")),
        ("chat", "off", ("dovetail: chat", None)),
        ("off", "auto", (None, "dovetail: dashboard")),
        ("off", "off", (None, None)),
    ],
)
def test_settings_decide_which_pages_there_are(
    house: Backend, front: str, dashboard: str, expected: tuple[str | None, str | None]
) -> None:
    with api(house.address, f"--http.page={front}", f"--http.dashboard={dashboard}") as other:
        answers = [other.client.get(path) for path in ("/", "/dashboard")]
        there = other.client.get(STATE_PATH)
    titles = [re.search("<title>(.*)</title>", answer.text) for answer in answers]
    assert tuple(title and title[1] for title in titles) == expected
    if dashboard == "off":
        assert there.status_code == 404
    else:
        assert there.json()["server"]["chat"] == (front == "chat")


def test_the_dashboard_cannot_be_in_front_and_off() -> None:
    with pytest.raises(ValidationError, match="dashboard is off: set page to chat or off"):
        HttpSettings(page="dashboard", dashboard="off")


def test_nothing_of_them_comes_from_elsewhere() -> None:
    for path, file in page_files().items():
        if "/vendor/" in path:
            continue
        text = file.content.decode()
        addresses = set(re.findall(r"(?:https?:)?//[\w-]+\.\w+[\w./-]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org"}, path
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser",
            text,
        ), path


def test_files_of_other_projects_are_the_published_ones_with_their_licences() -> None:
    vendor = FOLDER / "vendor"
    versions = tomllib.loads((vendor / "versions.toml").read_text(encoding="utf-8"))
    assert set(versions) == {path.name for path in vendor.glob("*.js")}
    for name, of in versions.items():
        content = (vendor / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == of["sha256"], name
        assert of["version"].encode() in content[:200]
        licence = (vendor / f"LICENSE.{of['package']}").read_text(encoding="utf-8")
        known = {"MIT": "Permission is hereby granted", "Apache-2.0": "Apache License"}
        assert known[of["licence"]] in licence


@pytest.mark.parametrize("path", [*page_files(), STATE_PATH])
def test_a_browser_may_run_nothing_else(server: Api, path: str) -> None:
    headers = server.client.get(path).headers
    policy = dict(
        part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {
        "'self'"
    }
    assert (policy["require-trusted-types-for"], policy["frame-ancestors"]) == (
        "'script'",
        "'none'",
    )
    if path == "/":
        assert policy["trusted-types"] == "dompurify"
    elif path == "/dashboard":
        assert policy["trusted-types"] == "'none'"
    assert (
        headers["x-content-type-options"],
        headers["referrer-policy"],
        headers["cross-origin-resource-policy"],
    ) == ("nosniff", "no-referrer", "same-origin")
    assert headers["cache-control"] == ("no-store" if path == STATE_PATH else "no-cache")


def test_a_file_that_is_still_the_same_is_not_sent_again(server: Api) -> None:
    tag = server.client.get("/pages/chat/main.js").headers["etag"]
    again = server.client.get("/pages/chat/main.js", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")


def test_it_is_no_part_of_the_api_document(server: Api) -> None:
    assert not [
        path
        for path in server.client.get("/openapi.json").json()["paths"]
        if path == "/" or "dashboard" in path or "pages" in path
    ]


def test_what_is_shown_has_workers_sessions_tree_and_figures(server: Api) -> None:
    told = told_of_a_tree(server, server)
    assert {worker["name"] for worker in told["workers"]} == {"target", "draft"}
    assert (told["model"], told["shown"], told["server"]["pid"]) == (
        "scripted-target",
        "full",
        server.process.pid,
    )
    assert told["figures"]["tau"] > 1.0
    tree = told["tree"]
    assert set(tree["fates"]) <= {"a", "r", "n"}
    assert tree["session"] in [session["session"] for session in told["sessions"]]


def test_without_a_key_set_texts_are_shown_with_one_they_are_not(server: Api, keyed: Api) -> None:
    told = told_of_a_tree(server, server)
    assert len(texts_of(told)) > len(told["tree"]["parents"])
    assert all(WORDS.fullmatch(text) or text == "<end>" for text in texts_of(told))
    told = told_of_a_tree(keyed, server, headers={"authorization": f"Bearer {KEY}"})
    assert (told["shown"], texts_of(told)) == ("anonymous", [])
    assert not WORDS.search(json.dumps(told, ensure_ascii=False))


def test_a_setting_has_the_last_word(house: Backend, server: Api) -> None:
    with api(house.address, "--http.dashboard=anonymous") as other:
        told = told_of_a_tree(other, server)
    assert (told["shown"], texts_of(told)) == ("anonymous", [])


def test_the_page_asks_for_the_key_so_it_comes_without_one_and_its_figures_do_not(
    keyed: Api,
) -> None:
    assert {keyed.client.get(path).status_code for path in page_files()} == {200}
    assert keyed.client.get(STATE_PATH).status_code == 401
    assert (
        keyed.client.get(STATE_PATH, headers={"authorization": "Bearer wrong"}).status_code == 401
    )
    assert keyed.client.get("/v1/models").status_code == 401
    assert keyed.client.post("/", json={}).status_code == 405


def test_a_web_page_that_has_its_name_made_to_mean_this_machine_reads_nothing(server: Api) -> None:
    assert server.client.get(STATE_PATH, headers={"host": "evil.example"}).status_code == 403


@pytest.mark.parametrize("session", ["-1", "x", str(1 << 63), "", "1e3"])
def test_a_session_that_is_no_number_is_refused(server: Api, session: str) -> None:
    reply = server.client.get(STATE_PATH, params={"session": session})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "session")


def test_a_session_that_is_not_there_is_none_to_fail_for(server: Api) -> None:
    assert state(server, params={"session": "123456"})["tree"] == state(server)["tree"]


@contextmanager
def looks(house: Backend) -> Iterator[list[float]]:
    """The times at which the coordinator's log is read."""
    asked: list[float] = []
    with house.still() as coordinator:
        look = coordinator._intake._look
        coordinator._intake._look = lambda client, request: (  # type: ignore[method-assign]
            asked.append(time.monotonic()),
            look(client, request),
        )[1]
    yield asked


def test_pages_query_the_coordinator_at_most_twice_a_second() -> None:
    with backend() as house, api(house.address) as server, looks(house) as asked:
        began = time.monotonic()
        assert {server.client.get(STATE_PATH).status_code for _ in range(100)} == {200}
        assert 1 <= len(asked) <= 1 + (time.monotonic() - began) / FRESH_S


def test_the_history_is_kept_while_nobody_looks() -> None:
    """It has what the coordinator's log has forgotten meanwhile."""
    with backend() as house, api(house.address) as server:
        server.complete(max_tokens=60)
        with looks(house) as asked:
            house.until(lambda: bool(asked))
            assert len(asked) == 1
        with house.still() as coordinator:
            log = coordinator._intake._observing
            log._ring.clear()
            log._gone = log._number
        assert state(server)["figures"]["rounds"] > 0


def test_tokens_are_counted_by_key(house: Backend, keyed: Api, server: Api) -> None:
    owner = hashlib.sha256(b"dovetail owner\0" + KEY.encode()).hexdigest()[:8]
    headers = {"authorization": f"Bearer {KEY}"}

    def used(api: Api, key: str) -> dict[str, int]:
        rows = state(api, headers=headers if api is keyed else {})["keys"]
        return next((row for row in rows if row["key"] == key), {})

    for one, key in ((keyed, owner), (server, "")):
        before = used(one, key)
        body = {"prompt": [5, 6, 7], "max_tokens": 9, "ignore_eos": True}
        sent = headers if one is keyed else {}
        reply = one.client.post("/v1/completions", json=body, headers=sent)
        assert reply.json()["usage"]["completion_tokens"] == 9
        after = used(one, key)
        grown = {name: after[name] - before.get(name, 0) for name in after if name != "key"}
        assert grown == {"replies": 1, "prompt": 3, "completion": 9}
        metrics = one.client.get("/metrics", headers=sent).text
        line = f'dovetail_tokens_total{{key="{key}",kind="completion"}} {after["completion"]}.0'
        assert line in metrics.splitlines()


def test_names_and_texts_of_peers_are_told_as_they_are_and_never_as_html() -> None:
    evil = '<img src=x onerror="alert(1)">'
    with backend(target=False, draft=False) as house:
        house.add(ScriptedTarget, "target", prefix="<b>", name=evil, model=f"/models/{evil}")
        house.add(ScriptedDraft, "draft", prefix="<b>", name=f"{evil}2")
        with api(house.address, "--policy=dynamic", "--tree.insist=true") as server:
            told = told_of_a_tree(server, server)
            assert server.client.get(STATE_PATH).headers["content-type"] == "application/json"
    assert [worker["name"] for worker in told["workers"]] == [evil, f"{evil}2"]
    assert any(text.startswith("␣<b>") for text in texts_of(told))


def test_a_coordinator_that_has_gone_is_told_and_its_successor_shown() -> None:
    with backend() as first, api(first.address) as server:
        epoch = state(server)["coordinator"]["epoch"]
        address = first.address
        first.close()
        deadline = time.monotonic() + PATIENCE_S
        while (reply := server.client.get(STATE_PATH)).status_code != 503:
            assert time.monotonic() < deadline
        assert "coordinator" in reply.json()["error"]["message"]
        with backend(address=address):
            while (reply := server.client.get(STATE_PATH)).status_code != 200:
                assert time.monotonic() < deadline
        assert reply.json()["coordinator"]["epoch"] != epoch
