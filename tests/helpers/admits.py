"""Registrations by the names of their fields, whichever of its parts a field stands in."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from slipstream_ipc.messages import Admit, Begun, Derived, RequestSpec, SamplingParams

PARTS = {"derived": Derived, "begun": Begun, "spec": RequestSpec}


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
    derived = Derived(seed, max_tokens, stop_token_ids)
    plain = Admit(stream_id, prompt_ids, RequestSpec(params), derived, Begun(output_ids))
    return with_fields(plain, **fields)


def with_fields(admit: Admit, **fields: Any) -> Admit:
    """The registration with other values of these fields, `answer` being its settings."""
    for part, struct in PARTS.items():
        names = [name for name in fields if name in struct.__struct_fields__]
        if names:
            values = {name: fields.pop(name) for name in names}
            fields[part] = structs.replace(getattr(admit, part), **values)
    return structs.replace(admit, **fields)
