"""Grammars: what is allowed depends on the tokens alone; schemas are followed, relaxed or refused;
hostile ones cost little."""

import codecs
import itertools
import json
import random
import resource
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol import grammar
from dovetail.protocol.errors import RequestError
from dovetail.protocol.grammar import GrammarVocabulary, Matcher
from dovetail.protocol.messages import (
    MAX_GRAMMAR,
    Constraint,
    ThoughtBudget,
    VocabularyFacts,
    grammar_engine,
)
from dovetail.protocol.schemas import TYPES
from dovetail.protocol.vocabulary import TokenTable
from dovetail.runtime.text.tokenizer import TextCodec
from support.schemas import EXPRESSED, HOSTILE, REFUSED, RELAXED, VALID, thing

TOKENIZER = (DEMO_FOLDER / "target" / "tokenizer.json").read_bytes()
TEXT = Tokenizer.from_buffer(TOKENIZER)
CODEC = TextCodec(TOKENIZER, VocabularyFacts(digest="", size=4096, end=(1,)))
TABLE = CODEC.table
SIZE, END = 4096, 1
OTHERS = {
    "regex": grammar.of_regex(r"[A-Z][a-z]{2,8}( [a-z]{1,9}){1,4}\."),
    "choice": grammar.of_choice(["yes", "no", "may be (or not)?", "a/b\\c\n[d]"]),
    "gbnf": grammar.of_gbnf('root ::= "a" ("b" | [0-9]){1,5} "."'),
    "lark": grammar.of_lark(
        'start: "<" body ">" (%json {"type": "integer", "minimum": 0, "maximum": 99})\n'
        "body: /[a-z]{1,5}/"
    ),
}
GRAMMARS = {**{name: grammar.of_schema(VALID[name]) for name in [*VALID][::7]}, **OTHERS}
AFTER_THOUGHT = grammar.of_lark(
    r"""start: thought /[a-z]{1,9}/
    thought[lazy]: /(.|\n)*<\/t>/"""
)


def limited(tokens: int, text: str = "", *, begun: bool = True) -> Constraint:
    """The budget of a thought, and what the whole reply follows."""
    thoughts = ThoughtBudget(tokens=tokens, open="<t>", close="</t>", begun=begun)
    return Constraint(grammar=text, engine=grammar_engine(), thoughts=thoughts)


CONSTRAINTS = {
    **{name: Constraint(grammar=text, engine=grammar_engine()) for name, text in GRAMMARS.items()},
    "thought": limited(9, AFTER_THOUGHT),
    "any thought": limited(9),
    "no thought": limited(0),
    "own thought": limited(5, begun=False),
}


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(TABLE, SIZE, [END])


def walk(matcher: Matcher, seed: int, most: int = 60) -> list[int]:
    """A random reply: the end and short tokens are preferred, so that most end."""
    chance, tokens = random.Random(seed), []
    while not matcher.ended and len(tokens) < most:
        allowed = matcher.allowed().nonzero()[0].tolist()
        assert allowed
        tokens.append(END if END in allowed and chance.random() < 0.5 else chance.choice(allowed))
        matcher.consume(tokens[-1:])
    return tokens


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_what_is_allowed_depends_on_the_tokens_alone(
    vocabulary: GrammarVocabulary, name: str
) -> None:
    """Whether they were consumed one by one, with masks computed in between, at once, by copies, or
    after other branches were tried, and by another instance."""
    own = CONSTRAINTS[name]
    other = GrammarVocabulary(TABLE, SIZE, [END]) if name == "regex" else vocabulary
    for seed in range(2):
        tokens = walk(vocabulary.follow(own), seed)
        stepping, copied = vocabulary.follow(own), vocabulary.follow(own)
        for place, token in enumerate(tokens):
            at_once = other.follow(own)
            at_once.consume(tokens[:place])
            expected = at_once.allowed()
            for branch in expected.nonzero()[0][:3].tolist():
                wrong = copied.copy()
                wrong.consume([branch])
                wrong.allowed()
            assert (stepping.allowed() == expected).all()
            assert (copied.allowed() == expected).all()
            assert expected[token]
            if forced := stepping.forced():
                assert [forced[0]] == expected.nonzero()[0].tolist()
            stepping.consume([token])
            copied = copied.copy()
            copied.consume([token])


def text_of(tokens: list[int]) -> bytes:
    return b"".join(map(CODEC.piece, tokens))


def obliged(own: ThoughtBudget, reply: list[int]) -> list[int]:
    """What must follow a reply, from its beginning: the slow version."""
    ends = range(len(reply) + 1)
    opened = (n for n in ends if text_of(reply[:n]).lstrip().startswith(own.open.encode()))
    at = 0 if own.begun else next(opened, None)
    if at is None or own.close.encode() in text_of(reply[at:]):
        return []
    for end in range(at, len(reply) + 1):
        spent, decoder = end - at - own.tokens, codecs.getincrementaldecoder("utf-8")("ignore")
        decoder.decode(text_of(reply[at:end]))
        if spent >= 3 or (spent >= 0 and not decoder.getstate()[0]):
            return TEXT.encode(own.close).ids[len(reply) - end :]
    return []


@pytest.mark.parametrize("close", ["</t>", "<|user|>"])
@pytest.mark.parametrize("opening", ["", "<t>", " \n<t>", "<t", "no <t>"])
def test_a_thought_ends_at_its_budget_after_a_whole_character(
    vocabulary: GrammarVocabulary, close: str, opening: str
) -> None:
    """Or before it, at an end of its own. The rest is free, as is a reply without a thought."""
    chance, forced = random.Random(1), 0
    halves = [token for token in range(SIZE) if text_of([token])[-1] > 127]
    for budget in range(0, 20, 4):
        own = ThoughtBudget(tokens=budget, open="<t>", close=close, begun=not opening)
        matcher = vocabulary.follow(Constraint(grammar="", engine="", thoughts=own))
        reply, script = list[int](), [*TEXT.encode(opening).ids]
        while len(reply) < 40:
            must, allowed = obliged(own, reply), matcher.allowed().nonzero()[0].tolist()
            assert matcher.forced() == must
            assert allowed == (must[:1] or [*range(SIZE)])
            if not script and chance.random() < 0.02:
                script = [*TEXT.encode(close).ids]
            free = script.pop(0) if script else chance.choice(chance.choice([halves, allowed]))
            reply += must[:1] or [free]
            matcher.consume(reply[-1:])
            forced += bool(must)
    assert bool(forced) is (opening.strip() in ("", "<t>"))


@pytest.mark.parametrize("name", VALID)
def test_a_schema_is_followed_to_the_letter(vocabulary: GrammarVocabulary, name: str) -> None:
    text = grammar.of_schema(VALID[name], strict=True)
    assert [*vocabulary.warnings(text), *grammar.relaxed(VALID[name])] == []
    matcher = vocabulary.matcher(text)
    document = ""
    for seed in range(2):
        matcher = vocabulary.matcher(text)
        tokens = walk(matcher, seed, 400)
        if matcher.ended:
            document = detokenized(tokens)
            jsonschema.validate(json.loads(document), VALID[name])
    assert matcher.complete == matcher.ended


def detokenized(tokens: list[int]) -> str:
    return str(TEXT.decode(tokens))


@pytest.mark.parametrize("name", RELAXED)
def test_what_cannot_be_enforced_is_named_or_refused_if_it_is_strict(
    vocabulary: GrammarVocabulary, name: str
) -> None:
    text = grammar.of_schema(RELAXED[name])
    assert vocabulary.matcher(text).allowed().any()
    assert vocabulary.warnings(text) or grammar.relaxed(RELAXED[name])
    with pytest.raises(RequestError) as refused:
        vocabulary.matcher(grammar.of_schema(RELAXED[name], strict=True))
    assert refused.value.code == "constraint"


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_makes_no_sense_is_refused_in_a_line(
    vocabulary: GrammarVocabulary, name: str, strict: bool
) -> None:
    with pytest.raises(RequestError) as refused:
        vocabulary.matcher(grammar.of_schema(REFUSED[name], strict=strict))
    assert "\n" not in str(refused.value)
    assert 10 < len(str(refused.value)) < 500


@pytest.mark.parametrize("schema", [{"properties": 5}, {"properties": True}, {"enum": 5}, False])
def test_a_keyword_of_the_wrong_type_is_refused(
    vocabulary: GrammarVocabulary, schema: object
) -> None:
    with pytest.raises(RequestError):
        vocabulary.matcher(grammar.of_schema(schema))


@pytest.mark.parametrize("name", EXPRESSED)
def test_keywords_that_the_library_lacks_have_their_meaning(
    vocabulary: GrammarVocabulary, name: str
) -> None:
    schema, found = EXPRESSED[name], set()
    old = "dependencies" in schema
    reader = (jsonschema.Draft7Validator if old else jsonschema.Draft202012Validator)(schema)
    text = grammar.of_schema(schema, strict=True)
    fields: dict[str, list[object]] = {"a": ["x", "y", 1], "b": [0, 1, 2], "c": [1]}
    if "list" in str(schema):
        values = [[*one] for n in range(5) for one in itertools.product(range(3), repeat=n)]
        fields = {"list": values}
    elif "like" in name:
        fields = {"not": [0, 2], "if": ["x", 0], "b": [1]}
    for values in itertools.product(*([None, *some] for some in fields.values())):
        document = {key: one for key, one in zip(fields, values, strict=True) if one is not None}
        matcher = vocabulary.matcher(text)
        try:
            matcher.consume(TEXT.encode(json.dumps(document), add_special_tokens=False).ids)
            complete = matcher.complete
        except RequestError:
            complete = False
        assert complete is reader.is_valid(document), document
        found.add(complete)
    assert found == {True, False}


def test_keywords_with_values_of_any_kind_are_read_or_refused() -> None:
    chance = random.Random(1)
    words = [
        *"abc",
        *TYPES,
        "if",
        "then",
        "else",
        "propertyNames",
        "not",
        "uniqueItems",
        "contains",
    ]
    words += ["items", "type", "const", "minimum", "maximum", "pattern", "additionalProperties"]

    def anything(depth: int) -> Any:
        plain = [None, True, -1, 3, 10**9, 1e300, "object", "(", "^[ab]$"]
        kind = chance.randrange(5) if depth else 0
        if kind < 2:
            return chance.choice(plain)
        inner = [anything(depth - 1) for _ in range(chance.randrange(4))]
        return inner if kind == 2 else {chance.choice(words): one for one in inner}

    schemas: list[dict[str, Any]] = [
        {chance.choice(words): anything(4), "type": "object"} for _ in range(2000)
    ]
    none = {"type": "array", "items": {"enum": []}, "maxItems": -1}
    schemas += [{**none, "contains": {"const": 1}}, {**none, "uniqueItems": True}]
    read = 0
    for schema in schemas:
        with suppress(RequestError):
            grammar.of_schema(schema)
            read += 1
    assert 0 < read <= len(schemas)


def test_the_schema_true_allows_any_json(vocabulary: GrammarVocabulary) -> None:
    assert grammar.of_schema(True) == grammar.of_schema({})
    assert vocabulary.matcher(grammar.of_schema(True)).allowed().any()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_costs_little(vocabulary: GrammarVocabulary, name: str) -> None:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with suppress(RequestError):
        walk(vocabulary.matcher(grammar.of_schema(HOSTILE[name])), 0, 20)
    assert time.process_time() - began < 5.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_nothing_is_read_from_elsewhere_and_the_library_s_own_options_are_ours(
    vocabulary: GrammarVocabulary,
) -> None:
    sent = {"type": "string", "not": {}, "x-guidance": {"lenient": True}}
    with pytest.raises(RequestError, match="not"):
        vocabulary.matcher(grammar.of_schema(sent, strict=True))


@pytest.mark.parametrize(
    ("schema", "read"),
    [
        ({"type": "integer", "nullable": True}, {"type": ["integer", "null"]}),
        ({"type": ["integer", "null"], "nullable": True}, {"type": ["integer", "null"]}),
        ({"$ref": "#/x", "nullable": True}, {"anyOf": [{"$ref": "#/x"}, {"type": "null"}]}),
        ({"const": {"type": "x", "nullable": True}}, {"const": {"type": "x", "nullable": True}}),
        ({"type": "integer", "nullable": False}, {"type": "integer", "nullable": False}),
    ],
)
def test_openapi_s_nullable_means_null_too(schema: object, read: dict[str, object]) -> None:
    found = json.loads(grammar.json_part(schema))
    del found["x-guidance"]
    assert found == read


def test_whitespace_is_bounded(vocabulary: GrammarVocabulary) -> None:
    blanks = [token for token in range(SIZE) if detokenized([token]).isspace()]
    text = grammar.of_schema(thing(a={"type": "integer"}))
    matcher = vocabulary.matcher(text)
    matcher.consume(walk(matcher.copy(), 0, 1))
    written = 0
    while any(allowed := matcher.allowed()[blanks].tolist()):
        token = blanks[allowed.index(True)]
        matcher.consume([token])
        written += len(detokenized([token]))
        assert written <= 17
    tight = vocabulary.matcher(grammar.of_schema(thing(a={"type": "integer"}), whitespace=""))
    tight.consume(tight.forced() or walk(tight.copy(), 0, 1))
    assert not tight.allowed()[blanks].any()


@pytest.mark.parametrize("text", ["yes", "no", "may be (or not)?", "a/b\\c\n[d]"])
def test_a_choice_is_one_of_its_texts(vocabulary: GrammarVocabulary, text: str) -> None:
    matcher = vocabulary.matcher(OTHERS["choice"])
    matcher.consume(TEXT.encode(text, add_special_tokens=False).ids)
    assert matcher.complete
    assert matcher.allowed().nonzero()[0].tolist() == [END]


def test_after_its_end_a_reply_may_only_end(vocabulary: GrammarVocabulary) -> None:
    several = GrammarVocabulary(TABLE, SIZE + 100, [END, 0])
    matcher = several.matcher(grammar.of_regex("(yes)?"))
    matcher.consume([END, 17, 17])
    assert matcher.ended
    assert matcher.complete
    assert matcher.forced() == []
    assert matcher.allowed().nonzero()[0].tolist() == [0, END]
    assert not several.matcher(grammar.of_regex("(?s:.)+")).allowed()[SIZE:].any()


def test_a_structural_tag_binds_what_its_triggers_begin(vocabulary: GrammarVocabulary) -> None:
    tags = [("<a=x>", {"enum": [1, 23]}, "</a>"), ("<b>", {"type": "null"}, ""), ("<a=", True, "!")]
    text = grammar.of_tags(tags, ["<a=", "<b", "<b>", "<a=x"])
    right = ("", "hello <a", "a <a=x>23</a> b", "<b>null<a=x>1</a>\n", '<a={"c": 1}!', "a<b>null")
    wrong = ("<a=q", "<a=x>23", "<b>1", "x <a=x>12</a>", "<b", "<b>null<b>", "a<b x")
    for reply in (*right, *wrong):
        matcher = vocabulary.matcher(text)
        try:
            matcher.consume(TEXT.encode(reply, add_special_tokens=False).ids)
        except RequestError:
            assert reply in wrong
        else:
            assert matcher.complete is (reply in right), reply
    for given in ((tags, []), ([], ["<"]), (tags, ["<a"])):
        with pytest.raises(RequestError):
            grammar.of_tags(*given)


def test_wrong_grammars_are_refused_in_a_line(vocabulary: GrammarVocabulary) -> None:
    for text in ("", "x", "root := a", "root ::= (", "::=", 'start: "a'):
        with pytest.raises(RequestError) as refused:
            vocabulary.matcher(grammar.of_gbnf(text))
        assert "\n" not in str(refused.value)
    with pytest.raises(RequestError, match="look-around"):
        vocabulary.matcher(grammar.of_regex("a(?=b)"))
    with pytest.raises(RequestError, match="1 to 1000"):
        grammar.of_choice([])
    with pytest.raises(RequestError, match="characters"):
        vocabulary.matcher("x" * (MAX_GRAMMAR + 1))
    matcher = vocabulary.matcher(OTHERS["choice"])
    with pytest.raises(RequestError, match="satisfy the grammar"):
        matcher.consume([17])


def test_a_vocabulary_that_cannot_have_grammars_is_refused() -> None:
    with pytest.raises(RequestError, match="no token that ends"):
        GrammarVocabulary(TABLE, SIZE, [])
    with pytest.raises(RequestError, match="tokenizer"):
        GrammarVocabulary(TokenTable.of({0: "a", END: "b"}, decoder={"type": "X"}), SIZE, [END])
    facts = VocabularyFacts(digest="", size=SIZE, end=(END,))
    assert GrammarVocabulary.of(TABLE, facts) is GrammarVocabulary.of(TABLE, facts)


@pytest.mark.parametrize("special", [False, True])
def test_forced_text_has_the_tokens_of_the_tokenizer(special: bool) -> None:
    """An added token that is part of a text is one token in it, and allowed where its text is; a
    special one is not."""
    own = Tokenizer.from_buffer(TOKENIZER)
    added = AddedToken("<tool_call>", special=special, normalized=False)
    (own.add_special_tokens if special else own.add_tokens)([added])
    number = own.token_to_id("<tool_call>")
    table = TokenTable.read(own.to_str().encode())
    vocabulary = GrammarVocabulary(table, SIZE + 1, [END])
    for text in (
        '{"name": "get_weather", "arguments":\n    {',
        "Größe 東京 \U0001f642",
        "a  b\n\n c",
        "x" * 99,
    ):
        found = vocabulary.matcher(grammar.of_choice([f"<tool_call>{text}"])).forced()
        assert found[0] == number if not special else number not in found
        ids = own.encode(text, add_special_tokens=False).ids
        assert special or found[1:] in (ids, [*ids, END])
    free = vocabulary.matcher(grammar.of_lark("start: /(.|\\n)*/"))
    assert free.allowed()[number] == (not special)
    ending = GrammarVocabulary(table, SIZE + 1, [END, number])
    quoted = ending.matcher(grammar.of_lark('start: "x" /(.|\\n)*/ "x"'))
    quoted.consume(own.encode("x", add_special_tokens=False).ids)
    assert not quoted.allowed()[[END, number]].any()


def test_the_engine_is_named_without_being_imported() -> None:
    code = (
        "import sys\nfrom dovetail.protocol.messages import grammar_engine\n"
        "print(grammar_engine(), 'llguidance' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == f"{grammar_engine()} False", done.stderr
