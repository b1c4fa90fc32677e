"""The chat page in a browser, before a real server: what it sends and shows, what it keeps, and
that nothing in a reply becomes more than text.

By `python -m pytest -m slow tests/dashboard`, where Chromium is installed.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboard.test_page import CHECKS, KEY
from dovetail.launch.processes.stack import Stack
from dovetail.launch.settings.models import TARGET_FOLDER
from support.browser import Page
from support.web import Api, api, backend

pytestmark = pytest.mark.slow

QUESTION = "Could you tell me a story about a young hedgehog who lost his red balloon?"
READY = "document.getElementById('model').textContent !== ''"
WRITING = "!document.getElementById('stop').hidden"
DONE = "document.getElementById('stop').hidden"
TEXT = "document.querySelector('.assistant:last-child .text')"
EVIL = """<img src="x" onerror="window.evil=1"><script>window.evil=1</script>

![secret](http://127.0.0.2:9/x.png) [go](javascript:window.evil=1) [fine](https://example.com/a)

<b onclick="window.evil=1">bold</b>
"""
RICH = """# A heading

| planet | size |
| --- | ---: |
| Mars | 6,779 km |

```python
print("a line that is longer than a telephone is wide, so that it has to scroll in its own box")
```

1. *one* with `code`
2. [two](https://example.com)

> quoted
"""


@pytest.fixture(scope="module")
def quiet(stack: Stack) -> Iterator[Api]:
    with api(stack.address, "--policy=dynamic", "--tree.insist=true") as started:
        yield started


@pytest.fixture
def chat(page: Page, quiet: Api) -> Iterator[Page]:
    """The page; it has nothing to complain of at the end, and asks nobody else."""
    page.open(quiet.url)
    page.until(READY)
    yield page
    assert page.messages == []
    assert all(url.startswith((quiet.url, "blob:")) for url in page.requests)


def send(page: Page, text: str) -> None:
    page.value("document.getElementById('input').focus()")
    page.type(text)
    page.press("Enter")


def ask(page: Page, text: str) -> str:
    """Send a message; the text of the reply."""
    send(page, text)
    return reply(page)


def reply(page: Page) -> str:
    page.until(WRITING)
    page.until(DONE)
    said: str = page.value(f"{TEXT}.innerText")
    return said


def words(text: str) -> list[str]:
    return text.split()


def press(page: Page, name: str, last: bool = True) -> None:
    """Click the button with this name, of the last message that has one."""
    page.value(
        f"[...document.querySelectorAll('button')].filter(b => b.checkVisibility() && "
        f"[b.textContent, b.ariaLabel].includes({json.dumps(name)}))"
        f".at({-1 if last else 0}).click()"
    )


def settle(page: Page, **values: str) -> None:
    for name, value in values.items():
        page.value(
            f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('change', "
            f"{{bubbles: true}})); }})(document.getElementById('{name}'))"
        )


def load(page: Page, folder: Path, *messages: dict[str, Any]) -> None:
    """Import a conversation."""
    file = folder / "conversation.json"
    file.write_text(json.dumps({"title": "Imported", "messages": messages}), encoding="utf-8")
    choose(page, file)
    page.until(f"document.querySelectorAll('.message').length === {len(messages)}")


def choose(page: Page, file: Path) -> None:
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    node = page.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
    page.call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])


def exported(page: Page) -> dict[str, Any]:
    """What the button Export writes."""
    page.value("URL.createObjectURL = (blob) => (window.exported = blob.text(), '#')")
    press(page, "Export")
    content: dict[str, Any] = json.loads(page.value("window.exported"))
    return content


def test_a_reply_is_shown_token_by_token_with_drafted_ones_tinted_and_then_as_text(
    chat: Page, quiet: Api
) -> None:
    expected = quiet.chat(QUESTION, dovetail={"speculate": False})["choices"][0]["message"]
    send(chat, QUESTION)
    chat.until("document.querySelectorAll('.assistant .drafted').length > 3")
    assert chat.value(f"{TEXT}.querySelectorAll('span:not(.drafted)').length") > 0
    chat.until(DONE)
    assert words(chat.value(f"{TEXT}.innerText")) == words(expected["content"])
    assert chat.value("document.querySelectorAll('.assistant .drafted').length") == 0
    line = chat.text(".assistant .figures")
    assert "tokens/s" in line
    assert "times as fast as without a draft (predicted)" in line or "as fast as" in line
    assert "tokens a pass" in line
    chat.value("document.getElementById('tokens').click()")
    assert chat.value(f"{TEXT}.querySelectorAll('.drafted').length") > 3
    assert chat.value(f"{TEXT}.textContent") == expected["content"]
    chat.value("document.getElementById('tokens').click()")


def test_text_is_matched_with_its_tokens_however_both_are_cut(chat: Page) -> None:
    """Tokens that are not shown, such as markers, are left out; no character is lost."""
    found = chat.value(
        """(async () => {
          const { Pieces } = await import('/pages/chat/tokens.js');
          const wrong = [];
          let state = 7;
          const random = (n) => (state = (state * 48271) % 2147483647) % n;
          for (let trial = 0; trial < 300; trial += 1) {
            const one = () => ["a", " b", "c d", "<m>", "\\n", ""][random(6)];
            const tokens = Array.from({ length: 30 }, () => [one(), random(2)]);
            const text = tokens.map(([t]) => (t === "<m>" ? "" : t)).join("");
            const pieces = new Pieces();
            const out = [];
            let [at, next] = [0, 0];
            while (at < text.length || next < tokens.length) {
              const [to, until] = [at + random(6), next + random(4)];
              const arrived = tokens.slice(next, until);
              out.push(...pieces.push([["content", text.slice(at, to)]], arrived));
              [at, next] = [to, until];
            }
            out.push(...pieces.rest);
            if (out.map(([, t]) => t).join("") !== text) wrong.push(text);
          }
          return wrong;
        })()"""
    )
    assert found == []


def test_while_the_prompt_is_read_its_progress_is_shown(page: Page) -> None:
    with backend() as house, api(house.address) as server:
        page.open(server.url)
        page.until(READY)
        house.held = True
        send(page, "w5 w6")
        page.until("document.querySelector('.assistant .figures')?.textContent.includes('reading')")
        house.held = False
        page.until(DONE)
    words = page.value(
        "import('/pages/chat/messages.js').then(({ readingWords }) => readingWords({ reading: "
        "{ total: 12000, cache: 5000, processed: 8000, time_ms: 30000 } }, 30))"
    )
    assert words == "reading 8,000 of 12,000 tokens, 5,000 from the cache, about 40 s left"


def test_settings_belong_to_the_conversation_and_are_sent(chat: Page, quiet: Api) -> None:
    settle(chat, temperature="1", seed="7", max_tokens="40", system="Talk about a fox.")
    shown = ask(chat, QUESTION)
    messages = [
        {"role": "system", "content": "Talk about a fox."},
        {"role": "user", "content": QUESTION},
    ]
    other = quiet.ask(
        "/v1/chat/completions", messages=messages, temperature=1, seed=7, max_tokens=40
    )
    assert words(shown) == words(other["choices"][0]["message"]["content"])
    assert [message["role"] for message in exported(chat)["messages"]] == [
        "system",
        "user",
        "assistant",
    ]
    press(chat, "New conversation")
    assert chat.value("document.getElementById('seed').value") == ""


def test_stopping_keeps_the_text_and_frees_the_server(chat: Page, quiet: Api) -> None:
    settle(chat, max_tokens="2000", temperature="1")
    chat.value("document.getElementById('speculate').click()")
    send(chat, QUESTION)
    chat.until(f"{TEXT}.textContent.length > 20")
    chat.press("Escape")
    chat.until(DONE)
    assert "stopped" in chat.text(".assistant .figures")
    assert len(chat.value(f"{TEXT}.textContent")) > 20
    while quiet.metric("dovetail_http_requests"):
        pass
    assert chat.value("document.activeElement.id") == "input"


def test_a_repeated_reply_and_an_edited_message_are_branches(chat: Page) -> None:
    settle(chat, temperature="1", max_tokens="30")
    settle(chat, seed="1")
    first = ask(chat, QUESTION)
    settle(chat, seed="2")
    press(chat, "Retry")
    second = reply(chat)
    assert "2 of 2" in chat.text(".assistant .actions")
    press(chat, "Previous version")
    assert chat.value(f"{TEXT}.innerText") == first
    assert "1 of 2" in chat.text(".assistant .actions")
    assert chat.value("document.activeElement.ariaLabel") == "Next version"
    press(chat, "Next version")
    assert chat.value(f"{TEXT}.innerText") == second
    press(chat, "Edit")
    chat.value("document.querySelector('.editing textarea').value = 'What is two plus three?'")
    press(chat, "Send", last=False)
    third = reply(chat)
    assert chat.text(".user .typed") == "What is two plus three?"
    press(chat, "Previous version", last=False)
    assert chat.text(".user .typed") == QUESTION
    assert chat.value(f"{TEXT}.innerText") == second
    press(chat, "Next version", last=False)
    assert chat.value(f"{TEXT}.innerText") == third


def test_conversations_stay_in_the_browser_and_go_through_a_file(
    chat: Page, tmp_path: Path
) -> None:
    settle(chat, max_tokens="20")
    said = ask(chat, QUESTION)
    chat.reload()
    chat.until("document.querySelectorAll('#conversations button').length > 0")
    press(chat, QUESTION[:60])
    assert chat.value(f"{TEXT}.innerText") == said
    messages = exported(chat)["messages"]
    chat.value("window.confirm = () => true")
    press(chat, "Delete")
    chat.until("document.querySelectorAll('#conversations button').length === 0")
    load(chat, tmp_path, *messages)
    assert chat.value(f"{TEXT}.innerText") == said
    (tmp_path / "wrong.json").write_text('{"messages": []}', encoding="utf-8")
    choose(chat, tmp_path / "wrong.json")
    chat.until("!document.getElementById('notice').hidden")
    assert "wrong.json: The file has no messages" in chat.text("#notice")


def test_a_reply_without_a_draft_gives_the_reason(page: Page) -> None:
    with backend(draft=False) as house, api(house.address) as server:
        page.open(server.url)
        page.until(READY)
        assert ask(page, "w5 w6")
        page.until(
            "document.querySelector('.assistant .figures').textContent.includes('no draft w')"
        )
    assert "without a draft: no draft worker is registered" in page.text(".assistant .figures")
    assert "times as fast" not in page.text(".assistant .figures")


def test_nothing_in_a_reply_runs_or_is_loaded(chat: Page, tmp_path: Path) -> None:
    load(
        chat,
        tmp_path,
        {"role": "user", "content": EVIL},
        {"role": "assistant", "content": EVIL, "reasoning_content": EVIL},
    )
    assert chat.value("document.querySelectorAll('#log img, #log script, #log b').length") == 0
    links = chat.value("[...document.querySelectorAll('#log a')].map(a => a.href ?? '')")
    assert links == ["http://127.0.0.2:9/x.png", "", "https://example.com/a"]
    assert "<b onclick" in chat.value(f"{TEXT}.innerText")
    chat.value("window.confirm = (words) => (window.asked = words, false)")
    chat.value("document.querySelectorAll('#log a')[2].click()")
    assert "https://example.com/a" in chat.value("window.asked")
    assert chat.value("window.evil") is None


def test_thoughts_are_folded_and_calls_are_cards(chat: Page, tmp_path: Path) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
    }
    messages = (
        {"role": "user", "content": "How is the weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I need a tool.",
            "tool_calls": [call],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
    )
    load(chat, tmp_path, *messages)
    assert not chat.value("document.querySelector('.thoughts').open")
    assert "I need a tool." in chat.value("document.querySelector('.thoughts').textContent")
    assert "Tool call: weather" in chat.text(".call")
    assert '"city": "Oslo"' in chat.text(".call pre")
    assert chat.text(".message.tool pre") == "rain"
    assert exported(chat)["messages"] == list(messages)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_everything_can_be_read(
    page: Page, quiet: Api, tmp_path: Path, width: int, dark: bool
) -> None:
    page.open(quiet.url, width=width, dark=dark)
    page.until(READY)
    load(
        page,
        tmp_path,
        {"role": "user", "content": "Show me Markdown."},
        {"role": "assistant", "content": RICH, "reasoning_content": "Let me see."},
    )
    settle(page, max_tokens="20")
    ask(page, QUESTION)
    page.value("document.getElementById('tokens').click()")
    page.value("document.querySelectorAll('details').forEach(d => (d.open = true))")
    for name in ("faint", "wide", "cut"):
        found = page.value(f"{CHECKS}.{name}()")
        if name != "faint":  # what scrolls in its own box
            found = [one for one in found if not one.startswith(("CODE", "PRE", "BUTTON: Could"))]
        assert found == []
    assert page.value("document.documentElement.scrollWidth") == width
    page.value("document.getElementById('tokens').click()")
    if width < 500:
        page.value("document.getElementById('list-switch').click()")
        assert "Imported" in page.text("#conversations")
        assert page.value(f"{CHECKS}.faint()") == []


def test_everything_is_reached_by_keys_and_has_a_name(chat: Page) -> None:
    settle(chat, max_tokens="20")
    ask(chat, QUESTION)
    chat.value("document.activeElement.blur()")
    reached = []
    for _ in range(14):
        chat.press("Tab")
        reached.append(chat.value(f"{CHECKS}.focus()"))
    names = [focus["name"] for focus in reached]
    for name in ("skip", "to-dashboard", "theme", "new", "export", "import", "delete", "scroll"):
        assert name in names
    assert all(focus["seen"] for focus in reached if focus["name"] != "BODY")
    roles = ("button", "combobox", "textbox", "region", "checkbox", "spinbutton", "navigation")
    nodes = chat.call("Accessibility.getFullAXTree")["nodes"]
    nameless = [
        node["role"]["value"]
        for node in nodes
        if not node.get("ignored")
        and node["role"]["value"] in roles
        and not node.get("name", {}).get("value", "")
    ]
    assert nameless == []


def test_a_key_is_asked_for_and_holds_for_both_pages(
    page: Page, stack: Stack, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text(KEY, encoding="utf-8")
    file.chmod(0o600)
    with api(stack.address, f"--http.api_key_file={file}") as keyed:
        page.open(keyed.url)
        page.until("!document.getElementById('key-form').hidden")
        page.type(KEY)
        page.press("Enter")
        page.until(READY)
        settle(page, max_tokens="20")
        assert ask(page, QUESTION)
        page.until("!document.getElementById('to-dashboard').hidden")
        page.value("document.getElementById('to-dashboard').click()")
        page.until("document.getElementById('link')?.dataset.state === 'live'")
        page.value("document.getElementById('to-chat').click()")
        page.until(f"document.getElementById('send') && {READY}")


def test_a_server_that_goes_or_refuses_is_reported_at_the_reply(page: Page) -> None:
    with backend() as house:
        with api(house.address) as server:
            page.open(server.url)
            page.until(READY)
            port = server.address[1]
            settle(page, temperature="1000")
            send(page, "w5 w6")
            assert page.value("document.activeElement.id") == "temperature"
            settle(page, temperature="", seed="9300000000000000000")
            send(page, "")
            page.until("document.querySelector('.error') !== null")
            assert "seed is 9300000000000000000" in page.text(".error")
            settle(page, seed="")
        press(page, "Retry")
        page.until("document.querySelector('.error')?.textContent.includes('connection was lost')")
        with api(house.address, f"--http.port={port}"):
            press(page, "Retry")
            assert reply(page)
            assert page.value("document.querySelector('.error')") is None


def test_of_several_models_the_conversation_has_its_own(page: Page, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(TARGET_FOLDER, tmp_path / "models" / name)
    flags = ("--json", "--http.port=0", "--draft=none", "--weights=int8", "--http.most_models=1")
    program = (sys.executable, "-P", "-m", "dovetail.launch.cli")
    command = (*program, "serve", str(tmp_path / "models"), *flags)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            page.open(json.loads(process.stdout.readline())["url"])
            page.until("!document.getElementById('models-field').hidden")
            settle(page, max_tokens="10", models="two")
            assert page.text("#model") == "· two"
            assert ask(page, QUESTION)
            loaded = page.value("fetch('v1/models').then((answer) => answer.json())")
            assert [one["status"]["value"] for one in loaded["data"]] == ["unloaded", "loaded"]
        finally:
            process.terminate()
