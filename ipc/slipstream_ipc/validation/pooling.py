"""Checks what a request for embeddings, classes or scores asks for."""

from __future__ import annotations

from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import Fault, ModelCard, PoolingCard, PoolingTask

_SERVED: dict[PoolingTask, str] = {"embed": "for embeddings", "classify": "for classes and scores"}


class WrongTask(BadRequest):
    """The model is served for something else."""

    def __init__(self, why: str) -> None:
        ValueError.__init__(self, why)

    @property
    def fault(self) -> Fault:
        """The error as a wire type; no field is at fault."""
        return Fault("bad_request", str(self))


def card_for(task: PoolingTask, card: ModelCard) -> PoolingCard:
    """The pooling of a model, if it is served for a task. Raises: WrongTask."""
    pooling = card.pooling
    options = "--runner pooling" if task == "embed" else "--convert classify"
    if pooling is None:
        why = f"{card.name!r} generates text: it is not served {_SERVED[task]} ({options})"
        raise WrongTask(why)
    if pooling.task != task:
        why = f"{card.name!r} is served {_SERVED[pooling.task]}, not {_SERVED[task]} "
        raise WrongTask(why + f"(--convert {task} serves it so)")
    return pooling


def served_for(pooling: PoolingCard) -> str:
    """The task of a model that generates nothing, in words."""
    return _SERVED[pooling.task]


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


def pooling_detail(name: str, pooling: PoolingCard) -> str:
    """The words of a core about a model when it is ready."""
    what = "dimensions" if pooling.task == "embed" else "labels"
    return f"{name}, {_SERVED[pooling.task]}, {pooling.dimensions} {what}"


def task_in(detail: str) -> PoolingTask | None:
    """The task of which a core's detail speaks; None: it generates."""
    words = detail.split(", ")
    return next((task for task, served in _SERVED.items() if served in words), None)
