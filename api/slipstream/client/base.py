"""What `Client` and `AsyncClient` share: checking arguments and making streams from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, get_args

import msgspec

from slipstream.client.connection.thread_io import ThreadIO
from slipstream.client.endpoints import ServerEndpoint
from slipstream.client.stream import ClientConnection, OutputKind
from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import BadRequestError, bad_request
from slipstream.outputs import RequestOutput
from slipstream.requests import (
    Prompt,
    checked_params,
    new_resume,
    new_submit,
    new_submits,
    params_of_answers,
)
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import SamplingParams
from slipstream_ipc.telemetry.trace import open_tracer

DEFAULT_TIMEOUT_S = 10.0


def ask(
    io: ClientConnection,
    prompt: Prompt,
    params: SamplingParams,
    kind: OutputKind,
    *,
    label: str | None,
    priority: int,
    stream_id: str | None,
    cache_salt: str | None,
) -> StreamState:
    """Submit one request. params: checked. Raises: BadRequestError."""
    state = new_state(
        io,
        prompt,
        params,
        kind=kind,
        label=label,
        priority=priority,
        stream_id=stream_id,
        cache_salt=cache_salt,
    )
    io.submit(state)
    return state


def ask_again(
    io: ClientConnection, stream_id: str, num_chars: int, num_tokens: int, kind: OutputKind
) -> StreamState:
    """Request the rest of a stream that is running, or has ended and is still kept.

    Raises: BadRequestError.
    """
    _check_kind(kind)
    resume = new_resume(stream_id, num_chars, num_tokens)
    state = StreamState(resume, wants_whole=kind == "final")
    io.submit(state)
    return state


def open_io(endpoint: ServerEndpoint, timeout_s: float, trace: str | None = None) -> ThreadIO:
    """Open the connection of a blocking client, driven by a thread. Raises: BadRequestError."""
    check_timeout(timeout_s)
    tracer = open_tracer(trace, "client")
    return ThreadIO(endpoint.address, timeout_s, tracer, access=endpoint.access)


def check_timeout(timeout_s: float) -> None:
    """Check a client's timeout. Raises: BadRequestError."""
    if not timeout_s > 0:
        raise bad_request(BadRequest("timeout_s", timeout_s, "a number of seconds > 0"))


def new_state(
    io: ClientConnection,
    prompt: Prompt,
    params: SamplingParams,
    *,
    kind: OutputKind,
    label: str | None = None,
    priority: int = 0,
    stream_id: str | None = None,
    cache_salt: str | None = None,
) -> StreamState:
    """A stream that is ready to submit. params: checked.

    Raises: BadRequestError.
    """
    _check_kind(kind)
    submit = new_submit(
        prompt,
        params,
        label=label,
        priority=priority,
        model=io.model,
        stream_id=stream_id,
        cache_salt=cache_salt,
    )
    return StreamState(submit, wants_whole=kind == "final")


def _check_kind(kind: OutputKind) -> None:
    allowed = get_args(OutputKind)
    if kind not in allowed:
        raise bad_request(BadRequest("output_kind", kind, "one of " + ", ".join(allowed)))


def new_states(
    io: ClientConnection,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    priority: int,
    *,
    kind: OutputKind = "final",
    cache_salt: str | None = None,
) -> list[StreamState]:
    """Streams ready to submit, `n` for each prompt. params: checked, one for each prompt.

    Raises: BadRequestError, naming the index of the prompt.
    """
    _check_kind(kind)
    states: list[StreamState] = []
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        try:
            submits = new_submits(
                prompt,
                params_of_answers(each),
                stream_ids=[None] * each.n,
                priority=priority,
                model=io.model,
                cache_salt=cache_salt,
            )
        except BadRequestError as error:
            message = f"prompts[{index}]: {error.fault.message}"
            raise BadRequestError(msgspec.structs.replace(error.fault, message=message)) from None
        states += [StreamState(submit, wants_whole=kind == "final") for submit in submits]
    return states


def with_others(
    answers: Sequence[RequestOutput], params: Sequence[SamplingParams]
) -> list[RequestOutput]:
    """Group the answers of all prompts, `n` to each prompt, into one output for each prompt."""
    rest = iter(answers)
    found = []
    for each in params:
        first, *others = islice(rest, each.n)
        others = [msgspec.structs.replace(other, _prompt=first._prompt) for other in others]
        found.append(msgspec.structs.replace(first, _others=tuple(others)) if others else first)
    return found


def params_for_each(
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    options: Mapping[str, Any],
) -> list[SamplingParams]:
    """Checked params for each prompt, given as one for all, one for each, or keyword options.

    Raises: BadRequestError, also where `prompts` is not a list.
    """
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
        raise bad_request(BadRequest("prompts", prompts, "a list of prompts"))
    num_prompts = len(prompts)
    if not isinstance(params, Sequence):
        return [checked_params(params, options)] * num_prompts
    if len(params) != num_prompts:
        given = f"{len(params)} of them"
        allowed = f"one for all, or {num_prompts} for {num_prompts} prompts"
        raise bad_request(BadRequest("params", given, allowed))
    return [checked_params(each, options) for each in params]


def refuse_for_several(label: str | None, stream_id: str | None) -> None:
    """Reject options that name a single stream. Raises: BadRequestError."""
    for field, value in (("label", label), ("stream_id", stream_id)):
        if value is not None:
            raise bad_request(BadRequest(field, value, "None where n is more than 1"))
