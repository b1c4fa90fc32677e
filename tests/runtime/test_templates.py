"""Chat templates: what honest ones make is jinja2's own, what hostile ones try is stopped in time,
in memory, and within."""

import threading
import time
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dovetail.runtime.text import templates
from dovetail.runtime.text.templates import ChatTemplate
from hostile.templates import EVIL, FILLING, LASTING, REACHING, try_template
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


@pytest.mark.parametrize("turns", [1, 2, 9])
@pytest.mark.parametrize("text", [ONE_OF_TODAY, OF_EVERYTHING])
def test_what_is_honest_renders_as_in_jinja2_itself(text: str, turns: int) -> None:
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    template = ChatTemplate(text)
    assert [template.render(**values(turns)) for _ in range(3)] == [
        plain.from_string(text).render(**values(turns))
    ] * 3


def test_a_long_conversation_is_no_attack() -> None:
    long = values(400)
    for message in long["messages"]:
        message["content"] = "word " * 2000
    assert len(ChatTemplate(ONE_OF_TODAY).render(**long)) > 4_000_000


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_CPU_S", 0.1)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, there in EVIL.items() for name in there]
)
@pytest.mark.usefixtures("impatient")
def test_what_is_evil_costs_its_request_and_nobody_else(kind: str, name: str) -> None:
    tried = try_template(kind, name, EVIL[kind][name])
    assert tried.passed, tried


@pytest.mark.parametrize("name", everyday(LASTING, "two nested loops"))
@pytest.mark.usefixtures("impatient")
def test_what_runs_for_ever_is_stopped_by_the_clock(name: str) -> None:
    with pytest.raises(SecurityError, match=r"may not take longer than 0\.1 s"):
        ChatTemplate(LASTING[name]).render(**values(1))


@pytest.mark.parametrize("name", [*FILLING])
def test_what_fills_memory_is_stopped_before_it_does(name: str) -> None:
    with pytest.raises(SecurityError):
        ChatTemplate(FILLING[name]).render(**values(1))


@pytest.mark.parametrize("name", [*REACHING])
def test_what_reaches_outside_raises(name: str) -> None:
    with pytest.raises((SecurityError, TemplateError, TypeError)):
        ChatTemplate(REACHING[name]).render(**values(1))


@pytest.mark.parametrize(
    "text",
    [
        "{% for %}",
        "{{ x | center(9) }}",
        "{% for a in b %}" * 10_000,
        "{% for a in b %}" * 25 + "{% endfor %}" * 25,
        "{% debug %}",
    ],
)
def test_what_is_no_template_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^\w+: [^\n]+$"):
        ChatTemplate(text)


def test_a_rendering_that_was_stopped_leaves_the_next_its_whole_time_and_memory() -> None:
    template = ChatTemplate("{% if fill %}{{ 'a' * 60000000 }}{% endif %}{{ 'a' * 30000000 }}")
    for _ in range(3):
        with pytest.raises(SecurityError):
            template.render(fill=True)
        assert len(template.render(fill=False)) == 30_000_000


@pytest.mark.usefixtures("impatient")
def test_renderings_in_other_threads_have_clocks_of_their_own() -> None:
    template = ChatTemplate("{% for a in range(n) %}{% endfor %}well")
    said: list[str] = []
    with pytest.raises(SecurityError):
        ChatTemplate(LASTING["two nested loops"]).render()
    threads = [
        threading.Thread(target=lambda: said.append(template.render(n=1000))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == ["well"] * 4


def test_what_is_ours_in_a_template_costs_microseconds() -> None:
    template, told = ChatTemplate(ONE_OF_TODAY), values(3)
    template.render(**told)
    began = time.thread_time()
    for _ in range(100):
        template.render(**told)
    assert time.thread_time() - began < 1.0
