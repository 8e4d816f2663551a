"""The public `SamplingParams`, whose values are checked when it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from slipstream.requests import checked_params
from slipstream_ipc import messages


class SamplingParams(messages.SamplingParams, frozen=True, kw_only=True):
    # help() shows the fields as the wire type describes them
    __doc__ = f"{messages.SamplingParams.__doc__}\n    Raises: BadRequestError, naming the field.\n"

    if TYPE_CHECKING:  # the fields of a subclass are those of its annotations, to a checker

        def __init__(self, **options: Unpack[messages.SamplingOptions]) -> None: ...

    def __post_init__(self) -> None:
        checked_params(self, {})
