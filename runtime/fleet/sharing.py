"""Commands of several sessions in one message: which may share it, and their parts."""

from collections.abc import Mapping

from dovetail.protocol.messages import Draft, Verify, VerifyItem


def alike(orders: Mapping[int, Draft]) -> dict[int, Draft]:
    """Return by session the commands whose features are of the first's type and width, or none."""
    kinds = {s: (f.dtype, f.shape[1:]) for s, o in orders.items() if (f := o.features) is not None}
    kind = next(iter(kinds.values()), None)
    return {s: order for s, order in orders.items() if kinds.get(s, kind) == kind}


def drawn_from(command: Verify) -> int:
    """Return the number of tokens that each child was drawn from; 0: none was drawn."""
    return command.candidates.shape[1] if command.candidates else 0


def beginning(item: VerifyItem, nodes: int) -> VerifyItem:
    """Return the item with its first `nodes` nodes only."""
    if nodes == len(item.tokens):
        return item
    return VerifyItem.unchecked(
        session=item.session,
        round=item.round,
        prefix=item.prefix,
        tokens=item.tokens[:nodes],
        parents=item.parents[:nodes],
        hold=item.hold,
    )
