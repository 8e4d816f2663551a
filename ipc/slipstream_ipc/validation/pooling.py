"""Checks what a request for embeddings asks for."""

from __future__ import annotations

from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import PoolingCard


def check_dimensions(dimensions: int, card: PoolingCard) -> None:
    """Check the length that vectors are to be cut to; 0: they are not. Raises: BadRequest."""
    if dimensions in (0, card.dimensions) or dimensions in (card.matryoshka or ()):
        return
    if card.matryoshka == () and 0 < dimensions < card.dimensions:
        return
    if card.matryoshka is None:
        allowed = f"{card.dimensions}: the model's vectors are not made to be cut"
    elif card.matryoshka:
        allowed = ", ".join(map(str, sorted({*card.matryoshka, card.dimensions})))
    else:
        allowed = f"1 to {card.dimensions}"
    raise BadRequest("dimensions", dimensions, allowed)
