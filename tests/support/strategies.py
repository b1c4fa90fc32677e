"""Hypothesis strategies for valid messages, derived from the declared types and their bounds."""

import types
from math import prod
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from dovetail.protocol import messages, settings
from dovetail.protocol.arrays import ITEM_BYTES, Array
from dovetail.protocol.calibration import ExpertCosts, RowsSeconds
from dovetail.protocol.experts import MAX_EXPERTS, Routing
from dovetail.protocol.messages import Message
from dovetail.protocol.settings import Frozen
from dovetail.protocol.settings.tree import POLICIES

MOST = 5
"""Longest text and tuple drawn, where the bounds allow more."""

WORDS = {
    (settings.TreeSettings, "policy"): tuple(POLICIES),
    (settings.DraftSettings, "kind"): tuple(settings.DRAFT_KINDS),
    (settings.DraftSettings, "weights"): settings.DRAFT_WEIGHTS,
    (settings.TargetSettings, "weights"): settings.WEIGHTS,
}
"""Fields whose values a validator restricts."""

WIDTHS = st.integers(1, messages.MAX_ROW // messages.MAX_TAPS)
"""Widths of hidden states, such that a row of any number of taps is not too long."""

CURVES = st.dictionaries(
    st.integers(1, 1 << 40), st.floats(0.0, 1e9), min_size=1, max_size=MOST
).map(
    lambda points: RowsSeconds(
        rows=tuple(sorted(points)), seconds=tuple(points[rows] for rows in sorted(points))
    )
)

ROUTINGS = st.tuples(st.integers(1, MAX_EXPERTS), st.integers(1, MAX_EXPERTS)).map(
    lambda two: Routing(row=min(two), most=max(two))
)

PASSES = st.dictionaries(st.integers(1, 1 << 40), st.integers(0, MAX_EXPERTS), max_size=MOST).map(
    lambda passes: tuple(sorted(passes.items()))
)

EXPERTS = st.builds(ExpertCosts, routing=ROUTINGS, expert_s=st.floats(0.0, 1e9), passes=PASSES)

BIASES = st.dictionaries(
    st.integers(0, (1 << 31) - 1), st.floats(-100.0, 100.0), max_size=MOST
).map(lambda biases: tuple(sorted(biases.items())))


def messages_of(member: type[Message]) -> st.SearchStrategy[Message]:
    """Valid messages of one type."""
    return _model(member)  # type: ignore[return-value]


def _model(model: type[Frozen]) -> st.SearchStrategy[Frozen]:
    if model is Array:
        return _arrays()
    if model is RowsSeconds:
        return CURVES
    if model is ExpertCosts:
        return EXPERTS
    fields = st.fixed_dictionaries(
        {name: _field(model, name, field) for name, field in model.model_fields.items()}
    )
    if model is messages.Open:
        fields = fields.map(
            lambda drawn: {**drawn, "replied": drawn["replied"] % len(drawn["prompt"])}
        )
    if model is messages.Drafts:
        fields = fields.map(_with_rows)
    return fields.map(model.model_validate)


def _with_rows(drawn: dict[str, Any]) -> dict[str, Any]:
    """Return fields that fit together: no order has features of its own, and all rows of features
    are the last one's."""
    orders = tuple(order.model_copy(update={"features": None}) for order in drawn["orders"])
    features = drawn["features"]
    there = features.shape[0] if features is not None and features.shape else 0
    rows = (*([0] * (len(orders) - 1)), there) if there else ()
    return {**drawn, "orders": orders, "rows": rows}


def _field(model: type[Frozen], name: str, field: FieldInfo) -> st.SearchStrategy[Any]:
    if (model, name) in WORDS:
        return st.sampled_from(WORDS[model, name])
    if model is messages.Reads and name == "width":
        return WIDTHS
    if model is messages.Blocks and name == "names":
        return st.lists(st.binary(min_size=32, max_size=32), max_size=2).map(b"".join)
    if name == "thresholds":
        return st.just("") | st.lists(
            st.floats(0.0, 1e6), min_size=1, max_size=settings.MAX_BINS - 1, unique=True
        ).map(lambda bounds: tuple(sorted(bounds)))
    return BIASES if name == "logit_bias" else _value(field.annotation, field.metadata)


@st.composite
def _arrays(draw: st.DrawFn) -> Array:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    length = prod(shape) * ITEM_BYTES[dtype]
    return Array.model_validate(
        {"dtype": dtype, "shape": shape, "data": draw(st.binary(min_size=length, max_size=length))}
    )


def _value(kind: Any, metadata: list[Any]) -> st.SearchStrategy[Any]:
    """Values of an annotation within the bounds of its metadata."""
    arguments = get_args(kind)
    if get_origin(kind) is Annotated:
        inner = [
            bound
            for item in arguments[1:]
            for bound in (item.metadata if isinstance(item, FieldInfo) else [item])
        ]
        return _value(arguments[0], [*metadata, *inner])
    if get_origin(kind) in (Union, types.UnionType):
        return st.one_of([_value(argument, metadata) for argument in arguments])
    if get_origin(kind) is Literal:
        return st.sampled_from(arguments)
    if get_origin(kind) is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*(_value(argument, []) for argument in arguments))
    least, most = (
        _bound(metadata, annotated_types.MinLen, 0),
        _bound(metadata, annotated_types.MaxLen, MOST),
    )
    most = min(most, max(least, MOST))
    if get_origin(kind) is tuple:
        return st.lists(_value(arguments[0], []), min_size=least, max_size=most).map(tuple)
    return _plain(kind, metadata, least, most)


def _plain(kind: Any, metadata: list[Any], least: int, most: int) -> st.SearchStrategy[Any]:
    if kind is type(None):
        return st.none()
    if kind is bool:
        return st.booleans()
    if kind is str:
        return st.text(min_size=least, max_size=most)
    if kind is bytes:
        return st.binary(min_size=least, max_size=most)
    if kind is int:
        low = _bound(metadata, annotated_types.Ge, None)
        high = _bound(metadata, annotated_types.Le, None)
        below = _bound(metadata, annotated_types.Lt, None)
        return st.integers(low, below - 1 if below is not None else high)
    if kind is float:
        above, low = (
            _bound(metadata, annotated_types.Gt, None),
            _bound(metadata, annotated_types.Ge, None),
        )
        high = _bound(metadata, annotated_types.Le, None)
        return st.floats(
            above if above is not None else low,
            high,
            exclude_min=above is not None,
            allow_nan=False,
            allow_infinity=False,
        )
    return _model(kind)


def _bound(metadata: list[Any], bound: type[Any], otherwise: Any) -> Any:
    """The value of the first bound of a kind, else `otherwise`."""
    found = (
        getattr(
            item,
            {"MinLen": "min_length", "MaxLen": "max_length"}.get(
                bound.__name__, bound.__name__.lower()
            ),
        )
        for item in metadata
        if isinstance(item, bound)
    )
    return next(found, otherwise)
