"""Chat templates: honest ones render as in transformers and lose no text, and hostile ones are
stopped in a process of their own."""

import os
import resource
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from dovetail.protocol.errors import RequestError
from dovetail.runtime.text import tokenizer
from dovetail.runtime.text.templates import Renderer
from hostile.templates import EVIL, try_template
from support.cases import everyday

ONE_OF_TODAY = """{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and not message.content.startswith('<tool>') %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
OF_EVERYTHING = """{% macro wrap() %}[{{ caller() }}]{% endmacro %}
{% macro say(m) -%}<{{ m.role }}>{{ m.content | trim | replace('a', 'b') ~ mark }}{%- endmacro %}
{% set mark = '!' %}{% set text %}{% for m in messages %}{% call wrap() %}{{ m.role }}{% endcall %}{{ say(m) }}{{ m.content.replace('e', 'E') }}
{{ ', '.join(['x', m.role]) }}{{ ['p', 'q'] | join('-') }}{{ '%s=%d' % (m.role, loop.index) }}{{ '{}:{:>4}'.format(m.role, 3) }}{{ m | tojson }}
{{ m | tojson(indent=2) }}{% if loop.last %}{% continue %}{% endif %}{% endfor %}{% endset %}{{ text | indent(2) }}
{{ messages | map(attribute='role') | list }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ [1, 2, 3] | sum }}{{ 3 * 'ab' }}
{{ (messages | groupby('role') | list)[0][0] }}{{ 7 // 2 * 2.5 }}{% filter upper %}abc{{ bos_token }}{% endfilter %}{% with a = 3 %}{{ a }}{% endwith %}
{{ 5 | string ~ 'x' ~ 6 }}{{ 'abc' | join(',') }}{{ 'abc' | list | sort(reverse=true) | first }}{{ {'b': 1, 'a': 2} | dictsort }}{{ {'b': 1} | items | list }}
{{ 1.2345 | round(2) }}{{ none | default('d', true) }}"""
FEATURES = (
    "{{ {'b': '<é>', 'a': [1, none, true]} | tojson }}{{ messages | tojson(indent=2) }}",
    "{{ {'b': 1, 'a': 'ü'} | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}"
    "{{ messages | map(attribute='content') | join }}",
    "{% for m in messages %}{% if loop.index is odd %}{% continue %}{% endif %}{{ m.content }}"
    "{% endfor %}{{ messages | map(attribute='content') | join('|') }}",
    "{% for m in messages %}{% generation %}{% set inner = m.content %}{{ inner }}"
    "{% endgeneration %}{{ inner }}{% endfor %}",
    "{{ 'a-b' | center(9) ~ 'x' | xmlattr if false else '' }}{{ 'a b' | wordwrap(1) }}"
    "{{ '<b>t</b>' | striptags }}{{ 1234 | filesizeformat }}{{ [1, 2, 3] | batch(2) | list }}"
    "{{ messages | map(attribute='content') | list | pprint }}",
    "{{ 3 is divisibleby 3 }}{{ 'x' is in 'xy' }}{{ messages is sequence }}{{ none is none }}"
    "{{ tools is none }}{{ documents is none }}{{ tools is defined }}{{ messages[0].content }}"
    "{{ messages[-1].content }}{{ messages | map(attribute='content') | join }}",
    "{% set ns = namespace(self=1, n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ ns.n }}{{ m.content }}{% endfor %}{{ dict(a=1) }}{{ dict.fromkeys(['a']) }}",
    "{{ strftime_now('%Y') }}{% for m in messages %}{{ m['content'].strip().split(' ')[0] }} "
    "{{ m.content }}{% endfor %}{{ style | default('none given') }}",
    "\n  {% for m in messages %}\n  {{ m.role }}: {{ m.content }}\n  {% endfor %}\n  end\n",
)


def values(turns: int) -> dict[str, Any]:
    said = [
        {
            "role": ("user", "assistant")[i % 2],
            "content": f"hello there {i} <think>x</think> y " * 3,
        }
        for i in range(turns)
    ]
    return {
        "messages": said,
        "add_generation_prompt": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tools": None,
    }


EACH = [(kind, name) for kind, there in EVIL.items() for name in there]
LONG = ("runs for ever", "fills memory", "goes through")
SHORT = (
    *("two nested loops", "searches in a long text", "n.x", "n.x == n.y", "doubling a list"),
    *("letters", "replace", "the width of a format (%)", "a product that is known before"),
)


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    made = Renderer(cpu_s=0.1)
    yield made
    made.close()


@pytest.mark.parametrize("turns", [1, 2, 9])
@pytest.mark.parametrize("text", [ONE_OF_TODAY, OF_EVERYTHING, *FEATURES])
def test_an_honest_template_renders_as_in_transformers(
    text: str, turns: int, renderer: Renderer
) -> None:
    told = {**values(turns), "documents": None}
    given = {name: value for name, value in told.items() if name != "messages"}
    (expected,), _ = render_jinja_template([told["messages"]], chat_template=text, **given)
    assert renderer.render(text, told) == expected


STRING, PARTS = "alpha beta", [{"type": "text", "text": one} for one in ("alpha", " beta")]
READS = {
    "strings": "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{% endfor %}",
    "strings that are joined": "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}"
    "{% endfor %}",
    "strings that are trimmed": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}"
    "{% endfor %}",
    "strings alone": "{% for m in messages %}{% if m.content is not string %}"
    "{{ raise_exception('no') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "parts": "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}",
    "parts by filters": "{% for m in messages %}<{{ m.role }}>{{ m.content | selectattr('type', "
    "'equalto', 'text') | map(attribute='text') | join }}{% endfor %}",
    "the first part": "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}",
    "both": "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p['text'] }}{% endfor %}{% endif %}{% endfor %}",
    "strings of the system, parts of others": "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ '<system>' + m.content }}{% else %}<{{ m.role }}>"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("reads", [*READS])
@pytest.mark.parametrize("content", [STRING, PARTS], ids=["string", "parts"])
def test_no_text_is_lost_whatever_form_a_template_reads(
    reads: str, content: Any, renderer: Renderer
) -> None:
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "brief"}, {"role": "user", "content": content}]
        assert renderer.render(READS[reads], {"messages": messages}) == (
            "<system>brief<user>alpha beta"
        )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "1"),
        (
            "{% for m in messages %}{% for p in m.content %}{{ p.input }}{% endfor %}{% endfor %}",
            "1",
        ),
        ("{{ messages[0].content }}", "2"),
    ],
)
def test_a_template_that_leaves_a_message_out_is_refused(
    template: str, message: str, renderer: Renderer
) -> None:
    messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": PARTS}]
    with pytest.raises(RequestError, match=f"drops message {message} "):
        renderer.render(template, {"messages": messages})


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content }}",
        "{% for m in messages[-3:] %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:10] | replace('1', 'one') }}{% endfor %}",
        "{% for m in messages %}{{ m.content | wordwrap(8) }}{% endfor %}",
        "{% for m in messages if m.role != 'user' or m.content[0] == 'h' or raise_exception('') %}"
        "{{ m.content.split('</think>')[-1] | trim | upper }}{% endfor %}",
    ],
)
def test_a_template_may_rewrite_texts_and_leave_earlier_turns_out(
    template: str, renderer: Renderer
) -> None:
    told = values(5)
    (expected,), _ = render_jinja_template([told["messages"]], chat_template=template)
    assert renderer.render(template, told) == expected


def test_a_long_conversation_is_no_attack() -> None:
    long, renderer = values(400), Renderer(cpu_s=10.0)
    for message in long["messages"]:
        message["content"] = "word " * 2000
    assert len(renderer.render(ONE_OF_TODAY, long)) > 4_000_000
    renderer.close()


@pytest.mark.parametrize(
    ("kind", "name"),
    everyday(
        EACH,
        *((kind, name) for kind, name in EACH if name in SHORT or not any(x in kind for x in LONG)),
    ),
)
def test_a_hostile_template_is_refused_in_one_line(
    kind: str, name: str, renderer: Renderer
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError, match=r"^the chat template of the target [^\n]+$") as raised:
        renderer.render(EVIL[kind][name], values(1))
    assert raised.value.code == "settings"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert renderer.render("{{ messages[0].content }}", values(1)).startswith("hello")


@pytest.mark.parametrize(
    ("kind", "name"),
    everyday(
        EACH,
        ("a template that runs for ever by", "two nested loops"),
        ("a template that fills memory by", "doubling a list"),
    ),
)
def test_a_hostile_template_fails_only_its_own_request(
    kind: str, name: str, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "RENDERER", renderer)
    tried = try_template(kind, name, EVIL[kind][name])
    assert tried.passed, tried


ENDLESS = "{% if n %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HELLO = "{% endif %}{{ messages[0].content }}"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
def test_an_idle_process_that_is_killed_or_stopped_is_replaced(number: int) -> None:
    renderer = Renderer()
    expected = renderer.render(ENDLESS + HELLO, values(1))
    first = renderer._idle[0].pid
    os.kill(first, number)
    assert renderer.render(ENDLESS + HELLO, values(1)) == expected
    second = renderer._idle[0].pid
    assert second != first
    assert not Path(f"/proc/{first}").exists()
    renderer.close()
    assert not Path(f"/proc/{second}").exists()


def test_a_rendering_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.runtime.text.templates.WALL_S", 600.0)  # a busy machine is slow
    renderer, refused = Renderer(cpu_s=1.0), list[str]()

    def last() -> None:
        with pytest.raises(RequestError) as raised:
            renderer.render(ENDLESS + HELLO, {**values(1), "n": 1})
        refused.append(str(raised.value))

    threads = [threading.Thread(target=last) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        assert renderer.render(ENDLESS + HELLO, values(1)).startswith("hello")
    assert not refused
    for thread in threads:
        thread.join()
    words = "the chat template of the target takes more than 1 s of CPU time"
    assert refused == [words] * 3
    renderer.close()


def test_a_process_ends_with_its_parent_even_if_it_is_stopped() -> None:
    named, begun = os.pipe()
    held, let_go = os.pipe()
    if not (child := os.fork()):
        renderer = Renderer()
        renderer.render("{{ messages[0].content }}", values(1))
        os.kill(renderer._idle[0].pid, signal.SIGSTOP)
        os.write(begun, str(renderer._idle[0].pid).encode())
        os.read(held, 1)
        os._exit(0)
    watched = os.pidfd_open(int(os.read(named, 20)))
    os.write(let_go, b"x")
    os.waitpid(child, 0)
    assert select.select([watched], [], [], 60.0)[0]
    for descriptor in (named, begun, held, let_go, watched):
        os.close(descriptor)
