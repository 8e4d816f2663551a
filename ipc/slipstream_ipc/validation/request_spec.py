"""Makes a request's spec of a Submit, checks what either asks, and names the prefixes that it may
share.

Nothing here names a field that has no rule of its own, so a new one stands in `RequestSpec`, in
`Submit`, and where it is used; in `AskedOptions` and in `http/openai/request_bodies` if callers
name it, and here if it has to be checked.
"""

from __future__ import annotations

import hashlib
from operator import attrgetter

from msgspec.structs import replace

from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.messages import (
    MAX_LABEL_CHARS,
    MAX_LORA_NAME_CHARS,
    MAX_RECORD_BYTES,
    RequestSpec,
    SamplingParams,
    Submit,
)

MAX_PRIORITY = 2**31 - 1
_values = attrgetter(*[name for name in RequestSpec.__struct_fields__ if name != "params"])


def spec_of(submit: Submit, params: SamplingParams, client: bytes = b"") -> RequestSpec:
    """The spec of a submission. params: its own, decoded. client: on whose behalf it is made where
    it names no tenant.

    Raises: BadRequest.
    """
    check_spec(submit)
    spec = RequestSpec(params, *_values(submit))
    return spec if spec.tenant else replace(spec, tenant=client)


def root_digest(model: str, asked: RequestSpec | Submit, tenant: bytes = b"") -> bytes:
    """The digest before the first block of a prompt, 16 bytes: requests with an equal one share
    what is computed of equal beginnings. It is the same in every process.

    model: the served model's name. tenant: the only one that shares it; empty: every tenant does.
    Of an adapter counts its content, whatever its name.
    """
    texts = (model, asked.cache_salt)
    model_bytes, salt = [text.encode("utf-8", "surrogatepass") for text in texts]
    parts = [model_bytes, tenant, salt]
    if asked.adapter:
        parts.append(asked.adapter_digest or asked.adapter.encode("utf-8", "surrogatepass"))
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(framed, digest_size=16).digest()


def among_own(submit: Submit) -> Submit:
    """The Submit of a tenant whose priority counts among its own requests only."""
    if not submit.priority:
        return submit
    return replace(submit, priority=0, own_priority=submit.own_priority or submit.priority)


def content_of(spec: RequestSpec) -> RequestSpec:
    """The spec without what two submissions of one request may differ in: the seed, which is each
    answer's own, whose it is, its name, how it is kept and traced, and its place among its
    tenant's; and the version of its adapter.
    """
    return replace(
        spec,
        params=replace(spec.params, seed=None),
        label="",
        own_priority=0,
        tenant=b"",
        scope=b"",
        keep=None,
        trace=None,
        adapter_digest=b"",
    )


def check_spec(spec: RequestSpec | Submit) -> None:
    """Check a spec's fields but `params` (`check_params`), types included. Raises: BadRequest."""
    if not isinstance(spec.label, str):
        raise BadRequest("label", spec.label, "a string, or None")
    if len(spec.label) > MAX_LABEL_CHARS:
        raise BadRequest("label", spec.label, f"at most {MAX_LABEL_CHARS} characters")
    for priority in (spec.priority, spec.own_priority):
        is_integer = isinstance(priority, int) and not isinstance(priority, bool)
        if not is_integer or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise BadRequest("priority", priority, "a 32-bit integer; lower runs first")
    if not isinstance(spec.cache_salt, str):
        raise BadRequest("cache_salt", type(spec.cache_salt).__name__, "a string, or None")
    if len(spec.cache_salt) > MAX_LABEL_CHARS:
        given = Summary(f"{len(spec.cache_salt)} characters")  # a tenant's must not be logged
        raise BadRequest("cache_salt", given, f"at most {MAX_LABEL_CHARS} characters")
    if not isinstance(spec.adapter, str) or len(spec.adapter) > MAX_LORA_NAME_CHARS:
        raise BadRequest("adapter", spec.adapter, f"at most {MAX_LORA_NAME_CHARS} characters")
    if spec.keep is not None and len(spec.keep.record) > MAX_RECORD_BYTES:
        size = Summary(f"a record of {len(spec.keep.record)} bytes")
        raise BadRequest("keep", size, f"at most {MAX_RECORD_BYTES}")
