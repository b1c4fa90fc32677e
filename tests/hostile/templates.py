"""Chat templates that mean harm: to reach what lies outside, to run for ever, to fill the memory.
Each is a template that can be read; what it does shows when the first conversation is to be
rendered.

A template that is refused costs its request and nobody else: requests in token ids go on, and so
does the process.
"""

import resource
import time
from collections.abc import Mapping

from dovetail.protocol.messages import Failed, Finished, VocabularyFacts
from dovetail.protocol.vocabulary import read_vocabulary, vocabulary_digest
from hostile.loaded import Tried
from support.houses import PROMPT, House
from support.scripted import END, VOCABULARY, ScriptedTarget, continuation, tokenizer_bytes

REACHING: Mapping[str, str] = {
    "the classes of Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the globals of a function": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "the globals of one of ours": "{{ strftime_now.__globals__['__builtins__'] }}{{ "
    "raise_exception('nothing') }}",
    "a class in a format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "a file, by include": "{% include '/etc/passwd' %}",
    "a file, by extends": "{% extends '/etc/passwd' %}",
    "a module, by import": "{% import 'os' as os %}",
    "what it is given": "{{ messages.append(messages) }}",
    "the lines of a list": "{{ messages.clear() }}",
}
LASTING: Mapping[str, str] = {
    "two nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% "
    "endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) "
    "}}{% endif %}{% endmacro %}{{ f(60) }}",
    "a loop over filters": "{% for a in range(99999) %}{{ range(99999) | map('string') | list "
    "| length }}{% endfor %}",
    "searches in a long text": "{% set s = 'a' * 30000000 %}"
    + "{% if 'b' in s %}{% endif %}" * 5000,
}
FILLING: Mapping[str, str] = {
    "doubling a text (~)": "{% set n = namespace(x='aa') %}{% for a in range(60) %}{% set n.x "
    "= n.x ~ n.x %}{% endfor %}",
    "doubling a text (+)": "{% set n = namespace(x='aa') %}{% for a in range(60) %}{% set n.x "
    "= n.x + n.x %}{% endfor %}",
    "doubling a list": "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = n.x "
    "+ n.x %}{% endfor %}",
    "doubling blocks": "{% set x %}aaaa{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "much output": "{% for a in range(99999) %}{{ 'a' * 100000 }}{% endfor %}",
    "a product": "{{ 'a' * 10000000000 }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "products of numbers": "{% set n = namespace(x=9) %}{% for a in range(99) %}{% set n.x = "
    "n.x * n.x %}{% endfor %}",
    "join": "{{ ('a' * 1000000).join('b' * 1000000) }}",
    "join as a filter": "{{ range(99999) | join('a' * 1000000) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace as a filter": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "the width of a format (%)": "{{ '%10000000000d' % 1 }}",
    "the width of a format ({})": "{{ '{:>10000000000}'.format(1) }}",
    "a width that is given": "{{ '{:>{}}'.format(1, 10000000000) }}{{ '%*d' % (10000000000, 1) }}",
    "centre": "{{ 'a'.center(10000000000) }}",
    "zeros": "{{ '1'.zfill(10000000000) }}",
    "indent": "{{ 'a' | indent(10000000000) }}",
    "indented JSON": "{{ [[1]] | tojson(indent=10000000000) }}",
    "a product that is known before": "{{ 'a' * 10 ** 10 }}{{ messages }}",
    "letters": "{{ ('a' * 50000000) | list | length }}",
    "a sum of lists": "{{ ([[1] * 1000] * 100000) | sum(start=[]) }}",
    "a growing dictionary": "{% set n = namespace(x={}) %}{% for a in range(99999) %}{% set "
    "n.x = dict(n.x, **{a | string: 1}) %}{% endfor %}",
}
_DOUBLED = (
    "{% set n = namespace(x=[1], y=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}"
    "{% set n.y = [n.y, n.y] %}{% endfor %}"
)
"""Two nests of sixty lists, each holding the next one twice: small, but long to traverse."""
DOUBLING: Mapping[str, str] = {
    what: f"{_DOUBLED}{{{{ {what} }}}}"
    for what in (
        *("n.x", "n.x == n.y", "[n.x, n.y] | sort", "[n.x] | join", "n.x in [n.y]"),
        *("n.x | tojson", "n.x | pprint", "[n.x, n.y] | min", "'%s' % (n.x,)", "n.x | urlencode"),
    )
}
BREAKING: Mapping[str, str] = {
    "calling itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "brackets in each other": "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "conditions in each other": "{% if x %}" * 3000 + "{% endif %}" * 3000,
    "lists in each other": "{% set n = namespace(x=[]) %}{% for a in range(99999) %}{% set n.x = "
    "[n.x] %}{% endfor %}{{ n.x }}",
    "links": "{{ ('http://a.' * 3000000) | urlize }}",
}
EVIL: Mapping[str, Mapping[str, str]] = {
    "a template that reaches for": REACHING,
    "a template that runs for ever by": LASTING,
    "a template that fills memory by": FILLING,
    "a template that goes through": DOUBLING,
    "a template that breaks by": BREAKING,
}
MOST_S, MOST_MIB = 5.0, 512


def try_template(kind: str, name: str, template: str) -> Tried:
    """Passed: the conversation is refused, in time and in little memory, and a request in token ids
    is answered as ever."""
    house = House(target=False)
    tokenizer = tokenizer_bytes()
    facts = VocabularyFacts(
        digest=vocabulary_digest(read_vocabulary(tokenizer)),
        size=VOCABULARY,
        end=(END,),
        template=template,
    )
    house.add(ScriptedTarget, "target", tokenizer=tokenizer, vocabulary=facts)
    began_s, began_mib = time.process_time(), _peak_mib()
    request = house.client.submit(turns=["hello"], max_tokens=5)
    (reply,) = [reply for reply in house.replies() if isinstance(reply, Failed | Finished)]
    seconds, grown_mib = time.process_time() - began_s, _peak_mib() - began_mib
    refused = (
        isinstance(reply, Failed)
        and reply.session == request
        and reply.code == "settings"
        and "\n" not in reply.text
    )
    well = list(house.complete().result.token_ids) == continuation(PROMPT, 60)
    got = reply.text if isinstance(reply, Failed) else "is rendered"
    return Tried(
        kind,
        name,
        got,
        seconds,
        grown_mib,
        refused and well and seconds < MOST_S and grown_mib < MOST_MIB,
    )


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
