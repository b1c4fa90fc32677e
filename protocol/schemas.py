"""Keywords of JSON Schema that llguidance does not implement, written with those that it does."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import permutations, product
from typing import Any

MAX_LISTED = 1000  # values that stand for a schema
MAX_LENGTH = 16  # of arrays that are listed
MAX_DEPENDENT = 6  # the library multiplies alternatives out
CONDITION = ("if", "then", "else")
ANNOTATIONS = ("title", "description", "default", "examples", "$comment", "deprecated")
ARRAYS = {"type", "items", "minItems", "maxItems"}
CONTAINED = {"uniqueItems", "contains", "minContains", "maxContains"}
KINDS: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "array": list,
    "object": dict,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}
TYPES: Mapping[str, type] = {
    **dict.fromkeys(("allOf", "required", "enum"), list),
    **dict.fromkeys(("minItems", "maxItems", "minContains", "maxContains"), int),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies", "properties"), dict),
}
"""Types of keywords. The library reports others."""


def expressed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an equivalent schema, if there is one, without `if`, `dependentRequired`,
    `dependentSchemas`, `dependencies`, `propertyNames`, `not`, `uniqueItems` and `contains`; those
    that cannot be expressed stay."""
    if _is_sound(schema):
        for express in (_conditions, _dependent, _names, _negation, _arrays):
            schema = express(schema)
    return schema


def _is_sound(schema: Mapping[str, Any]) -> bool:
    """Return whether the keywords of a schema have their types."""
    named = (*schema.get("required", ()),) if isinstance(schema.get("required", ()), list) else ()
    right = all(isinstance(schema[key], kind) for key, kind in TYPES.items() if key in schema)
    return right and all(isinstance(name, str) for name in named)


def _without(schema: Mapping[str, Any], *keywords: str) -> dict[str, Any]:
    return {name: one for name, one in schema.items() if name not in keywords}


def _one_of(schema: Mapping[str, Any], options: Sequence[Any]) -> dict[str, Any]:
    """Return the schema of what follows `schema` and at least one of `options`."""
    chosen = {"anyOf": [one for one in options if one is not False]}
    return {**schema, "allOf": [*schema.get("allOf", ()), chosen]}


def _values(schema: Any) -> list[Any] | None:
    """Return all values of a schema; None if they are too many, or unknown."""
    own = _without(schema, *ANNOTATIONS) if isinstance(schema, dict) else {}
    kind = own.pop("type", None)
    if {*own} in ({"enum"}, {"const"}):
        listed = own["enum"] if "enum" in own else [own["const"]]
        known = isinstance(listed, list) and (kind is None or kind in [*KINDS])
        return [one for one in listed if kind is None or _is_of(one, kind)] if known else None
    least, most = own.get("minimum"), own.get("maximum")
    whole = kind == "integer" and {*own} == {"minimum", "maximum"}
    if whole and type(least) is int and type(most) is int and most - least < MAX_LISTED:
        return [*range(least, most + 1)]
    return [True, False] if kind == "boolean" and not own else None


def _is_of(value: Any, kind: str) -> bool:
    """Return whether a value is of a type: True is no number, and 1.0 is an integer."""
    if isinstance(value, bool) or kind == "boolean":
        return isinstance(value, bool) and kind == "boolean"
    whole = kind == "integer" and isinstance(value, float) and value.is_integer()
    return whole or isinstance(value, KINDS[kind])


def _but(values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return `values` without `others`: True is not 1, but 1.0 is."""

    def text(value: Any) -> str:
        whole = isinstance(value, float) and value.is_integer()
        return json.dumps(int(value) if whole else value, sort_keys=True)

    out = {text(one) for one in others}
    return [one for one in values if text(one) not in out]


def _contradictions(schema: Any, base: Mapping[str, Any]) -> list[Any] | None:
    """Return schemas of which an object that follows `base`, but not `schema`, follows one. None:
    that is not known."""
    if not isinstance(schema, dict) or {*schema} - {"properties", "required", "type"}:
        return None
    if not _is_sound(schema) or not base.get("type") == "object" == schema.get("type", "object"):
        return None
    properties, found = base.get("properties") or {}, list[Any]()
    for name, one in (schema.get("properties") or {}).items():
        every, some = _values(properties.get(name)), _values(one)
        if every is None or some is None:
            return None
        if left := _but(every, some):
            found.append({"required": [name], "properties": {name: {"enum": left}}})
    absent = _but(schema.get("required") or (), base.get("required") or ())
    return [*found, *({"properties": {name: False}} for name in absent)]


def _conditions(schema: dict[str, Any]) -> dict[str, Any]:
    """Conditions may be parts of `allOf`, which is how several are written."""
    parts = schema.get("allOf", ())
    rest = _without(schema, "if", "then", "else")
    if "allOf" in schema:
        rest["allOf"] = [one for one in parts if not _is_condition(one)]
    for one in (schema, *filter(_is_condition, parts)):
        if "if" not in one:
            continue
        condition, then, other = (one.get(keyword, {}) for keyword in CONDITION)
        negated = _contradictions(condition, rest)
        if negated is None:
            return schema
        options = [{"allOf": [condition, then]}] if then is not False else []
        options += [{"allOf": [case, other]} for case in negated] if other is not False else []
        if not options:
            return schema
        rest = _one_of(rest, options)
    return rest


def _is_condition(schema: Any) -> bool:
    return isinstance(schema, dict) and "if" in schema and {*schema} <= {*CONDITION}


def _dependent(schema: dict[str, Any]) -> dict[str, Any]:
    keywords = ("dependentRequired", "dependentSchemas", "dependencies")
    pairs = [pair for keyword in keywords for pair in (schema.get(keyword) or {}).items()]
    if len(pairs) > MAX_DEPENDENT or not all(isinstance(one, list | dict) for _, one in pairs):
        return schema
    rest = _without(schema, *keywords)
    for name, needed in pairs:
        follows = {"required": needed} if isinstance(needed, list) else needed
        rest = _one_of(rest, [{"properties": {name: False}}, follows])
    return rest


def _names(schema: dict[str, Any]) -> dict[str, Any]:
    names = schema.get("propertyNames")
    if not isinstance(names, dict) or "patternProperties" in schema:
        return schema
    allowed, pattern = _values(_without(names, "type")), names.get("pattern")
    others, own = schema.get("additionalProperties", {}), dict(schema.get("properties") or {})
    rest = _without(schema, "propertyNames")
    if allowed is not None:
        allowed = [one for one in allowed if isinstance(one, str)]
        added = {} if others is False else {one: others for one in allowed if one not in own}
        kept = {one: own[one] if one in allowed else False for one in own}
        return {**rest, "properties": {**kept, **added}, "additionalProperties": False}
    if {*names} - {"pattern", "type"} or not isinstance(pattern, str):
        return schema
    try:
        kept = {one: own[one] if re.search(pattern, one) else False for one in own}
    except re.error:
        return schema
    if others is False:
        return {**rest, "properties": kept}
    if own and others not in (True, {}):
        return schema  # patterns hold for the names of `properties`, too
    others = {} if others is True else others
    rest |= {"patternProperties": {pattern: others}, "additionalProperties": False}
    return {**rest, "properties": kept} if kept else rest


def _negation(schema: dict[str, Any]) -> dict[str, Any]:
    rest, negated = _without(schema, "not"), schema.get("not")
    every, some = _values(rest), _values(negated)
    if every is not None and some is not None:
        return {"enum": _but(every, some)}
    contradictions = _contradictions(negated, rest)
    return _one_of(rest, contradictions) if contradictions else schema


def _arrays(schema: dict[str, Any]) -> dict[str, Any]:
    unique, contains = schema.get("uniqueItems") is True, "contains" in schema
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if not contains and (not unique or most in (0, 1)):
        return _without(schema, "uniqueItems")
    values, contained = _values(schema.get("items")), _values(schema.get("contains"))
    if values is None or (contained is not None) is not contains:
        return schema
    if {*_without(schema, *ANNOTATIONS)} - ARRAYS - CONTAINED:
        return schema  # it has other conditions
    if unique:
        most = min(len(values), len(values) if most is None else most)
    if most is None or not 0 <= most <= MAX_LENGTH or len(values) ** most > 50 * MAX_LISTED:
        return schema
    fewest, greatest = schema.get("minContains", 1), schema.get("maxContains", most)
    found = [
        [*items]
        for count in range(least, most + 1)
        for items in (permutations(values, count) if unique else product(values, repeat=count))
        if contained is None or fewest <= count - len(_but(items, contained)) <= greatest
    ]
    listed = schema.get("type") == "array" and 0 < len(found) <= MAX_LISTED
    return {"enum": found} if listed else schema
