"""Commands of several sessions in one message: which may share it, and what of them goes into it.
Pure."""

from dovetail.protocol.messages import Draft, Verify, VerifyItem


def goes_with(order: Draft, other: Draft) -> bool:
    """Return whether two orders may be in one message, whose features are of one type and width."""
    one, two = order.features, other.features
    return one is None or two is None or (one.dtype, one.shape[1:]) == (two.dtype, two.shape[1:])


def drawn_from(command: Verify) -> int:
    """Return how many tokens each child was drawn from, 0 where none was drawn: the arrays of a
    message have one width."""
    return command.candidates.shape[1] if command.candidates else 0


def beginning(item: VerifyItem, nodes: int) -> VerifyItem:
    """Return the item with its first `nodes` nodes only."""
    if nodes == len(item.tokens):
        return item
    return VerifyItem(
        session=item.session,
        round=item.round,
        prefix=item.prefix,
        tokens=item.tokens[:nodes],
        parents=item.parents[:nodes],
        hold=item.hold,
    )
