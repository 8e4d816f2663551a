"""Registrations by the names of their fields, whichever of its parts a field stands in."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from slipstream_ipc.messages import Admit, RequestSpec, SamplingParams

_OF_SPEC = RequestSpec.__struct_fields__


def admit_of(
    stream_id: bytes,
    prompt_ids: bytes,
    params: SamplingParams,
    stop_token_ids: tuple[int, ...] = (),
    seed: int = 0,
    max_tokens: int = 100,
    output_ids: bytes = b"",
    **fields: Any,
) -> Admit:
    plain = Admit(
        stream_id, prompt_ids, RequestSpec(params), stop_token_ids, seed, max_tokens, output_ids
    )
    return with_fields(plain, **fields)


def with_fields(admit: Admit, **fields: Any) -> Admit:
    """The registration with other values of these fields, `answer` being its settings."""
    own = {name: value for name, value in fields.items() if name in Admit.__struct_fields__}
    rest = {name: value for name, value in fields.items() if name not in own}
    return structs.replace(admit, **{"spec": structs.replace(admit.spec, **rest), **own})
