"""The public `SamplingParams` and its parts: their values are checked at once.

They share their names with the wire's types in `slipstream_ipc.messages`, which they extend: both
names are vLLM's, an instance of one is an instance of the other, and it is sent as it is. The
wire's own decode without a check, as the receiver's validation names the field for its sender.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from slipstream.errors import unknown_option
from slipstream.request.requests import check_detection, check_outputs, checked_params
from slipstream.vllm_names import SAMPLING_PARAMS, without_unsupported
from slipstream_ipc import messages


class _SuggestingKeywords(msgspec.StructMeta):
    """Makes structs whose error for an unknown keyword has a suggestion, and which accept vLLM's
    parameters that are not supported where they change nothing.
    """

    if not TYPE_CHECKING:  # to a checker, the classes' own constructors count

        def __call__(cls, *args: Any, **options: Any) -> Any:  # noqa: N805 - of a class
            if issubclass(cls, messages.SamplingParams):
                options = without_unsupported(options, SAMPLING_PARAMS)
            for name in options:
                if name not in cls.__struct_fields__:
                    raise unknown_option(name, cls.__struct_fields__)
            return super().__call__(*args, **options)


class SamplingParams(
    messages.SamplingParams, metaclass=_SuggestingKeywords, frozen=True, kw_only=True
):
    # help() shows the fields as the wire type describes them
    __doc__ = f"{messages.SamplingParams.__doc__}\n    Raises: BadRequestError, naming the field.\n"

    if TYPE_CHECKING:  # the fields of a subclass are those of its annotations, to a checker

        def __init__(self, **options: Unpack[messages.SamplingOptions]) -> None: ...

    def __post_init__(self) -> None:
        checked_params(self, {})


class StructuredOutputs(
    messages.StructuredOutputs, metaclass=_SuggestingKeywords, frozen=True, kw_only=True
):
    __doc__ = f"{messages.StructuredOutputs.__doc__}\n    Raises: BadRequestError.\n"

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[messages.StructuredOptions]) -> None: ...

    def __post_init__(self) -> None:
        check_outputs(self)


class RepetitionDetection(
    messages.RepetitionDetection, metaclass=_SuggestingKeywords, frozen=True, kw_only=True
):
    __doc__ = f"{messages.RepetitionDetection.__doc__}\n    Raises: BadRequestError.\n"

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[messages.RepetitionOptions]) -> None: ...

    def __post_init__(self) -> None:
        check_detection(self)
