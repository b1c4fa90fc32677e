"""Replies that follow a grammar, over real processes and the embedded pair: the same tokens with
any draft, with none, and after a worker was killed; a whole reply is a document of its schema."""

import json
from collections.abc import Callable, Iterator, Sequence

import jsonschema
import pytest

from dovetail.launch.settings.models import head_folder
from dovetail.protocol import grammar
from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import (
    Constraint,
    Emitted,
    Finished,
    ThoughtBudget,
    grammar_engine,
)
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.patience import PATIENCE_S
from support.schemas import VALID, several, thing
from support.stacks import PROMPTS, Stack, complete_all, growing, started
from support.web import Api, api

PERSON = thing(
    name={"type": "string", "maxLength": 20},
    age={"type": "integer", "minimum": 0, "maximum": 200},
    tags=several({"enum": ["red", "green", "blue"]}),
    ok={"type": "boolean"},
)
GRAMMARS = {
    "schema": grammar.of_schema(PERSON),
    "regex": grammar.of_regex(r"[A-Z][a-z]{2,8}( [a-z]{1,9}){3,12}\."),
    "choice": grammar.of_choice(["yes", "no", "maybe later, my dear"]),
}


def limited(tokens: int, text: str = "") -> Constraint:
    """A reply that begins within a thought of at most this many tokens; `text`: what follows, in
    Lark."""
    if text:
        text = grammar.of_lark(f"start: thought {text}\nthought[lazy]: /(.|\\n)*<\\/think>/")
    thoughts = ThoughtBudget(tokens=tokens, open="<think>", close="</think>", begun=True)
    return Constraint(grammar=text, engine=grammar_engine(), thoughts=thoughts)


THOUGHTS = limited(17, f"%json {grammar.json_part(PERSON)}"), limited(9)
SAMPLINGS = {
    "greedy": {},
    "T = 1": {"temperature": 1.0},
    "top-k, top-p": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.2, "min_tokens": 12},
}
TREES = [
    TreeSettings(policy="dynamic", insist=True, gamma=gamma, depth=depth, width=8)
    for gamma, depth in ((6, 2), (40, 10))
]
DRAFTS = {
    "small": {},
    "dovetail": {"draft.model": str(head_folder("dovetail"))},
    "eagle": {"draft.model": str(head_folder("eagle"))},
    "ngram": {"draft.kind": "ngram"},
    "substitute": {"draft.kind": "substitute"},
    "unified": {"draft.kind": "substitute", "draft.share": "true"},
}


def constraint(text: str | Constraint) -> Constraint:
    if isinstance(text, Constraint):
        return text
    return Constraint(grammar=text, engine=grammar_engine(), kind="test")


def ask(
    client: Client,
    text: str | Constraint,
    tree: TreeSettings | None = None,
    tokens: int = 96,
    turns: Sequence[str] = PROMPTS[3],
    **sampling: object,
) -> int:
    return client.submit(
        turns=turns,
        sampling=Sampling.model_validate(sampling),
        max_tokens=tokens,
        seed=3,
        tree=tree or TreeSettings(),
        speculate=tree is not None,
        constraint=constraint(text),
    )


def killed_within(client: Client, request: int, kill: Callable[[], object]) -> Finished:
    """The end of a reply in which a worker is killed, once some tokens were drafted."""
    done = False
    while not isinstance(reply := client.receive(PATIENCE_S), Finished):
        assert isinstance(reply, Emitted), reply
        assert reply.request == request
        if any(reply.drafted) and not done:
            kill()
            done = True
    assert done
    return reply


def complete(
    client: Client, text: str | Constraint, tree: TreeSettings | None = None, **more: object
) -> Finished:
    return complete_all(client, [ask(client, text, tree, **more)])[0]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def house() -> Iterator[tuple[Stack, Client]]:
    with started({}) as (stack, client):
        yield stack, client


@pytest.fixture(scope="module")
def client(house: tuple[Stack, Client]) -> Client:
    return house[1]


@pytest.fixture(scope="module")
def server(house: tuple[Stack, Client]) -> Iterator[Api]:
    with api(house[0].address) as served:
        yield served


def check_same(
    client: Client, names: Sequence[str], samplings: Sequence[str], trees: Sequence[TreeSettings]
) -> None:
    """These grammars and ways of sampling give the same tokens with each tree as without."""
    for name in names:
        for about in samplings:
            sampling = SAMPLINGS[about]
            alone = complete(client, GRAMMARS[name], **sampling).result
            assert alone.constraint is not None
            assert alone.constraint.complete
            for tree in trees:
                drafted = complete(client, GRAMMARS[name], tree, **sampling).result
                assert drafted.token_ids == alone.token_ids, f"{name}, {about}, {tree.gamma}"
                assert drafted.draft_failure is None


def test_a_constrained_reply_is_the_same_with_and_without_a_draft(client: Client) -> None:
    check_same(client, ["schema"], ["greedy", "penalties"], TREES[1:])


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_constrained_reply_is_the_same_with_any_draft(draft: str) -> None:
    with started(DRAFTS[draft]) as (_, client):
        check_same(client, [*GRAMMARS], [*SAMPLINGS], TREES)
        check_thoughts(client, [*SAMPLINGS], TREES)


def check_thoughts(client: Client, samplings: Sequence[str], trees: Sequence[TreeSettings]) -> None:
    """A thought has at most as many tokens as its budget, and is the same with each tree; what
    follows it too."""
    for about in samplings:
        for own in THOUGHTS:
            alone = complete(client, own, **SAMPLINGS[about]).result
            thought, closed, answer = alone.text.partition("</think>")
            assert closed, alone.text
            assert answer
            if own.grammar:
                jsonschema.validate(json.loads(answer), PERSON)
            for tree in trees:
                drafted = complete(client, own, tree, **SAMPLINGS[about]).result
                assert drafted.token_ids == alone.token_ids, about
        free = complete(client, limited(10_000), tokens=16, **SAMPLINGS[about]).result
        assert free.text.startswith(thought)
        assert alone.token_ids[:9] == free.token_ids[:9]


def test_a_thought_is_the_same_with_and_without_a_draft(client: Client) -> None:
    check_thoughts(client, ["greedy", "T = 1"], TREES[1:])
    assert complete(client, limited(0), tokens=6).result.text.startswith("</think>")


def test_rejection_sampling_follows_the_grammar(client: Client) -> None:
    tree = TreeSettings(policy="static", insist=True, gamma=8, depth=4, width=2)
    text = grammar.of_schema(PERSON)
    reply = complete(client, text, tree, temperature=1.0, acceptance="rejection").result
    assert jsonschema.Draft202012Validator(PERSON).is_valid(json.loads(reply.text))
    assert reply.drafted_tokens > 0


def test_what_must_follow_is_drafted_without_a_pass(client: Client) -> None:
    """A choice of one: every token but the first is a node of the tree, of any depth."""
    text = grammar.of_regex("What must be written is all that can be written here, word for word")
    tree = TreeSettings(policy="dynamic", insist=True, gamma=30, depth=1, width=1)
    reply = complete(client, text, tree).result
    assert reply.rounds <= 1 + reply.completion_tokens // 20
    assert reply.text.endswith("word for word")


def test_a_reply_goes_on_after_its_draft_was_killed_and_after_its_target_was() -> None:
    """Its log is read again by another target, from the middle of a thought and its grammar."""
    people = grammar.json_part({"type": "array", "items": PERSON, "minItems": 9})
    text, tokens = limited(50, f"%json {people}"), 100
    with growing({}) as (stack, client, another):
        alone = complete(client, text, tokens=tokens).result
        target, draft = stack.workers

        def replace() -> None:
            target.process.kill()
            another("target")

        for kill in (replace, draft.process.kill):
            request = ask(client, text, TREES[0], tokens=tokens)
            assert killed_within(client, request, kill).result.token_ids == alone.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_reply_is_a_document_of_its_schema(client: Client, temperature: float) -> None:
    ended = 0
    for name, schema in VALID.items():
        text, turns = grammar.of_schema(schema, strict=True), [f"Write: {name}"]
        alone, drafted = complete_all(
            client,
            [
                ask(client, text, tree, 400, turns, temperature=temperature)
                for tree in (None, TREES[1])
            ],
        )
        assert drafted.result.token_ids == alone.result.token_ids, name
        assert alone.result.constraint is not None
        if alone.result.constraint.complete:
            jsonschema.validate(json.loads(alone.result.text), schema)
            ended += 1
    assert ended > 0.9 * len(VALID)  # e-mail addresses, for one, have no bound


def test_a_grammar_that_fails_within_a_reply_ends_only_that(client: Client) -> None:
    good, bad = GRAMMARS["choice"], grammar.of_regex("(a|b)(c{1000}){1000}")
    before = complete(client, good).result.text
    with pytest.raises(RequestError) as failed:
        complete(client, bad, TREES[0])
    assert failed.value.code == "constraint"
    assert complete(client, good).result.text == before


def test_a_request_for_another_version_of_the_library_is_refused(client: Client) -> None:
    other = Constraint(grammar=GRAMMARS["choice"], engine="llguidance 0.1")
    request = client.submit(turns=["Hi"], max_tokens=8, constraint=other)
    with pytest.raises(RequestError, match=r"llguidance 0\.1") as failed:
        complete_all(client, [request])
    assert failed.value.code == "constraint"


SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": SCHEMA_FORMAT}, "json_schema"),
        ({"response_format": {"type": "json_object", "schema": PERSON}}, "json_object"),
        ({"response_format": {"type": "json_object", "value": PERSON}}, "json_object"),
        ({"structured_outputs": {"json": PERSON}}, "json_schema"),
        ({"guided_json": json.dumps(PERSON)}, "json_schema"),
        ({"json_schema": PERSON}, "json_schema"),
    ],
)
def test_each_api_s_name_for_a_schema_gives_a_document_of_it(
    server: Api, fields: dict[str, object], kind: str
) -> None:
    reply = server.chat("Who is Tom?", max_tokens=200, **fields)
    jsonschema.validate(json.loads(reply["choices"][0]["message"]["content"]), PERSON)
    assert reply["choices"][0]["finish_reason"] == "stop"
    told = {"kind": kind, "engine": grammar_engine(), "relaxed": [], "complete": True}
    assert reply["metrics"]["constraint"] == told


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "(yes|no)"}},
        {"guided_regex": "(yes|no)"},
        {"regex": "(yes|no)"},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"guided_choice": ["yes", "no"]},
        {"grammar": 'root ::= "yes" | "no"'},
        {"guided_grammar": 'start: "yes" | "no"'},
        {"ebnf": 'root ::= "yes" | "no"'},
        {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
    ],
)
def test_each_api_s_name_for_a_text_of_a_few_gives_one(
    server: Api, fields: dict[str, object]
) -> None:
    assert server.complete("Is it?", **fields)["choices"][0]["text"] in ("yes", "no")


TAGS = {
    "structures": [{"begin": " the (", "schema": {"enum": [1, 2]}, "end": ")"}],
    "triggers": [" the"],
}


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"structural_tag": json.dumps(TAGS)}},
        {"response_format": {"type": "structural_tag", **TAGS}},
    ],
)
def test_a_structural_tag_binds_what_its_trigger_begins(
    server: Api, fields: dict[str, object]
) -> None:
    text = server.complete("Who is Tom?", **fields, max_tokens=60)["choices"][0]["text"]
    assert " the (" in text
    assert all(part[:3] in ("(1)", "(2)") for part in text.split(" the ")[1:])


@pytest.mark.parametrize("option", [{"disable_any_whitespace": True}, {"whitespace_pattern": ""}])
def test_whitespace_can_be_excluded(server: Api, option: dict[str, object]) -> None:
    fields = {"json": PERSON, **option}
    text = server.complete("x", structured_outputs=fields, max_tokens=300)["choices"][0]["text"]
    assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)


def test_a_reply_that_is_cut_off_stays_as_it_is(server: Api) -> None:
    reply = server.chat("Who is Tom?", max_tokens=5, response_format=SCHEMA_FORMAT)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["metrics"]["constraint"]["complete"] is False
    assert reply["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"regex": "a", "grammar": 'root ::= "a"'}, "regex", "grammar and regex both"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos"),
        ({"regex": "(?=a)"}, "regex", "look-around"),
        ({"response_format": {"type": "xml"}}, "response_format", 'not "xml"'),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "one of"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            *("structured_outputs", '"additionalProperties": false in the schema'),
        ),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": '{"const": "\\ud800"}'}, "guided_json", "lone surrogates"),
        ({"structured_outputs": {"json": False}}, "structured_outputs.json", "Unsatisfiable"),
        ({"json_schema": {"type": "text"}}, "json_schema", "Invalid type"),
        ({"guided_choice": ["a"] * 1001}, "guided_choice", "1000"),
        ({"grammar": "root := a"}, "grammar", "GBNF"),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "begin",
        ),
        (
            {"response_format": {"type": "structural_tag", **TAGS, "triggers": "b"}},
            "response_format",
            "begin",
        ),
        (
            {"response_format": {"type": "structural_tag", **TAGS, "triggers": ["b"]}},
            "response_format",
            "no trigger",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_field(
    server: Api, fields: dict[str, object], param: str, said: str
) -> None:
    error = server.refusal("/v1/completions", {"prompt": "x", **fields})
    assert error["param"] == param
    assert said in error["message"]
    strict = {"name": "x", "strict": True, "schema": {"type": "integer", "not": {"const": 1}}}
    asked = {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": strict}}
    assert server.refusal("/v1/completions", asked)["code"] == "unsupported_schema"
