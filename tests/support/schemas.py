"""Schemas that users of other servers have sent, that broke there, or that are hostile: by name,
with what is expected of them.

`VALID` are followed to the letter: a reply of any model is a document of theirs. `RELAXED` have
keywords that cannot be followed, and are refused if they are strict. `REFUSED` are always refused.
Numbers in comments are issues of llama.cpp, xgrammar, outlines-core, llguidance and others."""

from collections.abc import Iterator
from typing import Any

STRING = {"type": "string", "maxLength": 12}
SHORT = {"type": "string", "maxLength": 6}
INTEGER = {"type": "integer", "minimum": 0, "maximum": 99}
FLAG = {"type": "boolean"}
COLOUR = {"enum": ["red", "green", "blue"]}


def thing(required: bool = True, /, **properties: Any) -> dict[str, Any]:
    """A closed object, all of whose properties are required."""
    own: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    return {**own, "required": [*properties]} if required else own


def several(items: Any, least: int = 1, most: int = 3) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _nested(depth: int, inside: Any) -> Any:
    return inside if not depth else thing(a=_nested(depth - 1, inside))


def _values() -> Iterator[tuple[str, Any]]:
    yield "boolean", FLAG
    yield "null", {"type": "null"}
    yield "integer", {"type": "integer", "minimum": -5, "maximum": 5}
    yield "integer from 0", INTEGER
    yield "integer above", {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 13}
    yield "minimum (outlines-core 147)", {"type": "integer", "minimum": 18, "maximum": 120}
    yield "number", {"type": "number", "minimum": 0, "maximum": 1}
    yield "multiple", {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}
    yield "large", {"type": "integer", "minimum": 10**12, "maximum": 10**12 + 99}
    yield "string", STRING
    yield "empty string", {"type": "string", "maxLength": 0}
    yield "length", {"type": "string", "minLength": 3, "maxLength": 5}
    yield "const", {"const": "yes"}
    yield "const number", {"const": 42}
    yield "const object", {"const": {"a": [1, None]}}
    yield "enum", COLOUR
    yield "mixed enum", {"enum": ["a", 1, None, True]}
    yield "enum of one", {"enum": ["only this"]}
    yield "enum with quotes", {"enum": ['say "hi"', "back\\slash", "new\nline"]}
    yield "non-ASCII enum", {"enum": ["Zürich", "東京", "São Paulo"]}
    yield "types", {"type": ["integer", "null"], "minimum": 0, "maximum": 9}
    yield "anyOf", {"anyOf": [INTEGER, FLAG]}
    yield "anyOf with null", {"anyOf": [STRING, {"type": "null"}]}
    yield "oneOf", {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, FLAG]}
    yield "allOf", {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 7}]}


PATTERNS = (
    *(r"^\d{1,3}$", r"^[a-z]{2,5}$", r"^[\w-]{1,8}$", r"^(yes|no)$", r"^[A-Z][a-z]{1,6}$"),
    *(r"^hello there indeed\!$", r"^\d{4}-\d{2}-\d{2}$", r"^[^\s]{1,5}$", r"^a{2,4}b?$"),
    *(r"^(?:[01]\d|2[0-3]):[0-5]\d$", r"^#[0-9a-fA-F]{6}$", r"^\+?[0-9]{3,8}$", r"^.{1,5}$"),
    *(r"^\/[a-z]{1,5}$", r"^[a-z]{1,8}\.(png|jpg)$", r"^(|x.{0,3})$", r"^[äöü]{1,3}$", r"^$"),
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def _arrays() -> Iterator[tuple[str, Any]]:
    yield "array", several(INTEGER)
    yield "empty array", {"type": "array", "maxItems": 0}
    yield "array of one", several(COLOUR, 1, 1)
    yield "array of arrays", several(several(INTEGER, 0, 2), 1, 2)
    yield "tuple", {"type": "array", "prefixItems": [INTEGER, FLAG], "items": False, "minItems": 2}
    yield "array of objects", several(thing(a=INTEGER), 1, 2)
    yield "nested counts (json-schema-to-typescript 690)", several(several(FLAG, 2, 2), 2, 2)
    deep: Any = INTEGER
    for _ in range(22):
        deep = several(deep, 1, 1)
    yield "22 arrays (colibri 1596)", deep
    yield "mixed items", several({"anyOf": [INTEGER, COLOUR]}, 2, 3)
    yield "long array (unsloth 9888)", {**several(FLAG, 1, 4000), "maxItems": 6}


def _objects() -> Iterator[tuple[str, Any]]:
    yield "empty object", thing()
    yield "one property", thing(a=INTEGER)
    yield "two properties", thing(name=STRING, age=INTEGER)
    yield "optional properties", thing(False, a=INTEGER, b=FLAG, c=COLOUR)
    yield "required last", {**thing(False, a=INTEGER, b=FLAG), "required": ["b"]}
    yield "10 properties", thing(**{f"key{n}": FLAG for n in range(10)})
    yield "30 optional", thing(False, **{f"k{n}": FLAG for n in range(30)})
    yield "non-ASCII keys", thing(größe=INTEGER, 名前=SHORT)
    yield "odd keys", thing(**{"a b": FLAG, 'quo"te': FLAG, "back\\slash": FLAG, "$ref2": FLAG})
    yield "empty key", thing(**{"": FLAG})
    yield "nested", thing(a=thing(b=thing(c=INTEGER)))
    yield "nested 12 deep", _nested(12, FLAG)
    yield "map", {"type": "object", "additionalProperties": INTEGER, "maxProperties": 2}
    yield (
        "map of one",
        {
            "type": "object",
            "additionalProperties": COLOUR,
            "minProperties": 1,
            "maxProperties": 1,
        },
    )
    yield (
        "pattern properties",
        {
            "type": "object",
            "patternProperties": {"^x[0-9]$": INTEGER},
            "additionalProperties": False,
            "maxProperties": 2,
        },
    )
    yield (
        "properties beside patterns (llguidance 265, xgrammar 487)",
        {
            "type": "object",
            "properties": {"a": INTEGER},
            "patternProperties": {"^b[a-c]$": FLAG},
            "required": ["a"],
            "additionalProperties": False,
            "maxProperties": 2,
        },
    )
    yield (
        "anyOf beside properties (xgrammar 858)",
        {
            "type": "object",
            "properties": {"kind": COLOUR},
            "required": ["kind"],
            "anyOf": [{"required": ["kind"]}],
            "additionalProperties": False,
        },
    )
    yield "union", {"anyOf": [thing(cat=FLAG), thing(dog=INTEGER)]}
    yield (
        "tagged union",
        {
            "oneOf": [
                thing(kind={"const": "circle"}, radius=INTEGER),
                thing(kind={"const": "square"}, side=INTEGER),
            ]
        },
    )
    yield (
        "ignored words",
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://example.com/x",
            "$comment": "nothing",
            "title": "T",
            **thing(a={**INTEGER, "default": 1, "examples": [2], "readOnly": True}),
        },
    )
    for number, text in enumerate(DESCRIPTIONS):
        yield f"description {number} (llama.cpp 27619)", thing(a={**INTEGER, "description": text})


DESCRIPTIONS = (
    *('a "quoted" word', "root ::= x", "start: /a/", "{% raw %}", "\\d+ \\", "%json {}", "<think>"),
    *("a\nb", "// x", "# x", "' or 1=1", "", "\x00", "🦔", "}", "]]>", "$ref", "null", "`", "\t"),
)


def _references() -> Iterator[tuple[str, Any]]:
    own = {"$defs": {"c": COLOUR, "p": thing(x=INTEGER, y=INTEGER)}}
    yield "ref", {**own, **thing(at={"$ref": "#/$defs/p"})}
    yield "enum behind a ref (llama.cpp 8073)", {**own, **thing(c={"$ref": "#/$defs/c"})}
    yield "array of refs (llama.cpp 16790)", {**own, **several({"$ref": "#/$defs/p"}, 1, 2)}
    yield "definitions", {"definitions": {"x": INTEGER}, **thing(a={"$ref": "#/definitions/x"})}
    yield "ref with siblings", {**own, **thing(c={"$ref": "#/$defs/c", "description": "x"})}
    yield (
        "ref of a ref",
        {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": FLAG},
            **thing(v={"$ref": "#/$defs/a"}),
        },
    )
    yield (
        "tree",
        {
            "$defs": {
                "node": thing(
                    value=INTEGER,
                    children={"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
                ),
                "leaf": thing(value=INTEGER),
            },
            "$ref": "#/$defs/node",
        },
    )
    yield (
        "pydantic",
        {
            "$defs": {"Colour": {"enum": ["red", "blue"], "title": "Colour", "type": "string"}},
            "properties": {
                "colour": {"$ref": "#/$defs/Colour"},
                "size": {"anyOf": [INTEGER, {"type": "null"}], "default": None, "title": "Size"},
            },
            "required": ["colour", "size"],
            "title": "Shirt",
            "type": "object",
            "additionalProperties": False,
        },
    )


def _of_agents() -> Iterator[tuple[str, Any]]:
    """Arguments of tools."""
    yield "shell", thing(command=several(SHORT, 1, 3), timeout={**INTEGER, "description": "s"})
    yield "read", thing(path={"type": "string", "pattern": "^[a-z/]{1,12}$"}, limit=INTEGER)
    yield "edit", thing(old=SHORT, new=SHORT, all=FLAG)
    yield "search", thing(query=STRING, kind={"enum": ["web", "news"]}, count=INTEGER)
    yield "todo", thing(todos=several(thing(text=SHORT, status={"enum": ["open", "done"]}), 1, 2))
    yield "weather", thing(city=STRING, unit={"enum": ["C", "F"]})
    yield "title", thing(title={"type": "string", "minLength": 1, "maxLength": 20})
    yield (
        "person",
        thing(
            name=STRING,
            born={"type": "string", "format": "date"},
            mail={"anyOf": [{"type": "string", "maxLength": 10}, {"type": "null"}]},
            tags=several(COLOUR, 0, 2),
        ),
    )
    yield "scores", thing(scores=several({"type": "number", "minimum": 0, "maximum": 1}, 1, 2))
    yield "point", thing(x={"type": "integer", "minimum": -9, "maximum": 9}, y=INTEGER, on=FLAG)


def _pairs() -> Iterator[tuple[str, Any]]:
    """Objects of two values, each of another kind."""
    parts = {
        "flag": FLAG,
        "count": INTEGER,
        "colour": COLOUR,
        "text": SHORT,
        "none": {"type": "null"},
    }
    for one, first in parts.items():
        for other, second in parts.items():
            yield f"{one} and {other}", thing(a=first, b=several(second, 0, 2))


def _expressed() -> Iterator[tuple[str, Any]]:
    """Keywords that the library lacks, over a of x, y; b of 0 to 2; and c, which is free."""
    kinds, counts = {"enum": ["x", "y"]}, {"type": "integer", "minimum": 0, "maximum": 2}
    both = thing(False, a=kinds, b=counts, c={"const": 1})
    is_x, has_b = {"properties": {"a": {"const": "x"}}}, {"required": ["b"]}
    yield "if", {**both, "if": is_x, "then": has_b}
    yield "if, of what must be there", {**both, "required": ["a"], "if": is_x, "then": has_b}
    yield "else", {**both, "if": {**is_x, "required": ["a"]}, "else": has_b}
    yield "then and else", {**both, "if": has_b, "then": is_x, "else": {"required": ["c"]}}
    yield "then false", {**both, "if": is_x, "then": False}
    yield "else false", {**both, "if": is_x, "else": False}
    yield "conditions", {**both, "allOf": [{**both, "if": is_x, "then": has_b}, has_b]}
    yield (
        "several conditions",
        {
            **both,
            "allOf": [{"if": is_x, "then": has_b}, {"if": has_b, "then": {"required": ["c"]}}],
        },
    )
    yield "dependentRequired", {**both, "dependentRequired": {"a": ["b", "c"], "c": ["a"]}}
    yield "dependentSchemas", {**both, "dependentSchemas": {"b": is_x}}
    yield "dependencies", {**both, "dependencies": {"a": ["b"], "b": is_x}}
    yield "names", {**both, "propertyNames": {"pattern": "^[ab]$"}}
    yield "names in a list", {**both, "propertyNames": {"enum": ["a", "c"]}}
    yield (
        "names of others",
        {
            "type": "object",
            "additionalProperties": counts,
            "propertyNames": {"pattern": "^[a-c]$"},
            "maxProperties": 2,
        },
    )
    yield (
        "listed names of others",
        {
            "type": "object",
            "properties": {"a": kinds},
            "additionalProperties": counts,
            "propertyNames": {"enum": ["a", "b"]},
        },
    )
    yield "names like keywords", {**thing(False, **{"not": counts, "if": kinds}), "not": has_b}
    yield "not an object", {**both, "not": {"required": ["a", "b"]}}
    yield "not a value", thing(False, a={**kinds, "not": {"const": "x"}}, b=counts)
    yield (
        "not a value of its type",
        thing(False, b={**counts, "not": {"type": "string", "enum": [1]}}),
    )
    some: dict[str, Any] = {"type": "integer", "enum": [0, "x", 2], "title": "Some"}
    yield "not one of those of its type", thing(False, b={**some, "not": {"const": 2.0}})
    yield "not a number", thing(False, b={**counts, "not": {"enum": [1, True]}})
    lists = {"type": "array", "items": counts, "maxItems": 3}
    yield "unique", thing(False, list={**lists, "uniqueItems": True})
    yield (
        "unique items of their type",
        thing(False, list={**lists, "items": some, "uniqueItems": True}),
    )
    yield "contains", thing(False, list={**lists, "contains": {"const": 1}})
    yield (
        "contains some",
        thing(
            False, list={**lists, "contains": {"enum": [0, 2]}, "minContains": 0, "maxContains": 1}
        ),
    )


EXPRESSED = dict(_expressed())
VALID: dict[str, Any] = {
    **dict(_values()),
    **{f"pattern {one}": {"type": "string", "pattern": one} for one in PATTERNS},
    **{f"format {one}": {"type": "string", "format": one} for one in FORMATS},
    **dict(_arrays()),
    **dict(_objects()),
    **dict(_references()),
    **dict(_of_agents()),
    **dict(_pairs()),
    **EXPRESSED,
    **{
        f"{name}, {number} values": thing(**{f"v{place}": one for place in range(number)})
        for name, one in (("flags", FLAG), ("counts", INTEGER), ("colours", COLOUR))
        for number in range(2, 22, 2)
    },
    **{f"{number} levels": _nested(number, INTEGER) for number in range(2, 30, 3)},
    **{
        f"{number} choices": {"enum": [f"choice {n}" for n in range(number)]}
        for number in (50, 900)
    },
}
RELAXED: dict[str, Any] = {
    "unique items": {**several(INTEGER), "uniqueItems": True},
    "not": {**STRING, "not": {"const": "a"}},
    "if": {**thing(a=STRING), "if": {"properties": {"a": {"const": "x"}}}, "then": {}},
    "names": {**thing(a=FLAG), "propertyNames": {"maxLength": 3}},
    "contains": {**several(STRING), "contains": {"const": "a"}},
    "look-ahead": {"type": "string", "pattern": "^(?=a)b", "maxLength": 5},
    "look-behind in a property": thing(a={"type": "string", "pattern": "(?<!a)b", "maxLength": 5}),
    "look-ahead in a name": {
        "type": "object",
        "patternProperties": {"(?=a)b": FLAG},
        "additionalProperties": False,
    },
    "unknown format": {"type": "string", "format": "zip", "maxLength": 5},
    "overlapping oneOf": {"oneOf": [thing(False, a=FLAG), thing(False, b=FLAG)]},
}
REFUSED: dict[str, Any] = {
    "not an object": 5,
    "a list": [],
    "remote": {"$ref": "https://example.com/schema.json"},
    "missing ref": {"$ref": "#/$defs/none"},
    "contradiction": {"type": "integer", "minimum": 5, "maximum": 3},
    "impossible": {**thing(), "required": ["a"]},
    "unknown type": {"type": "text"},
    "nested 100 deep": _nested(50, FLAG),
    "5,000 optional properties": thing(False, **{f"p{n}": FLAG for n in range(5000)}),
    "20,000 values": {"enum": [*range(20_000)]},
    "200 patterns": thing(**{f"p{n}": {"type": "string", "pattern": f"^{n}$"} for n in range(200)}),
    "large": {"const": "x" * 300_000},
    "no value": {"enum": []},
}
HOSTILE: dict[str, Any] = {
    "huge repetition": {"type": "string", "pattern": "^(a{1000}){1000}$"},
    "doubling refs": {
        "$defs": {
            "d0": INTEGER,
            **{f"d{n}": several({"$ref": f"#/$defs/d{n - 1}"}, 2, 2) for n in range(1, 25)},
        },
        "$ref": "#/$defs/d24",
    },
    "long": {"type": "string", "maxLength": 10**9},
    "many": {"type": "array", "maxItems": 10**9},
    "wide": {"type": "string", "pattern": "^.{0,100000}x$"},
    "digits": {"type": "string", "pattern": "^[0-9]{5000}$"},
    "itself": {"$ref": "#"},
    "each other": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "500 optional properties": thing(False, **{f"p{n}": FLAG for n in range(500)}),
}
"""What would take long, or much memory: followed or refused, within the limits."""
