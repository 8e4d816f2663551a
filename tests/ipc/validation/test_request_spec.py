"""A Submit's fields and its spec's: each arrives, and each tells two requests apart or is named."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from msgspec import Raw, structs

from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import (
    AnswerOptions,
    AskedOptions,
    KeepOptions,
    RequestSpec,
    SamplingParams,
    Submit,
    TraceContext,
)
from slipstream_ipc.validation.request_spec import (
    among_own,
    check_spec,
    content_of,
    root_digest,
    spec_of,
)

SUBMIT = Submit(1, bytes(16), Raw(), text="x")
PARAMS = SamplingParams(temperature=0.5, seed=3)
OTHERS: dict[str, Any] = {
    "label": "another",
    "priority": 7,
    "own_priority": 7,
    "cache_salt": "another",
    "tenant": b"another",
    "scope": b"another",
    "answer": AnswerOptions(stop_scope="all"),
    "keep": KeepOptions(b"a record"),
    "trace": TraceContext(bytes(16)),
    "adapter": "another",
    "adapter_digest": b"another",
}
FIELDS = [name for name in RequestSpec.__struct_fields__ if name != "params"]


def test_a_spec_is_a_submits_fields() -> None:
    defaults = {each.name: each.default for each in structs.fields(Submit)}
    own = {each.name: each.default for each in structs.fields(RequestSpec)}
    assert {name: own[name] for name in FIELDS} == {name: defaults[name] for name in FIELDS}
    # a prediction is in no spec: a registration has its ids
    assert set(AskedOptions.__annotations__) - {"prediction"} <= set(FIELDS)
    assert set(AskedOptions.__annotations__) <= set(defaults)


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_arrives(field: str) -> None:
    plain = spec_of(SUBMIT, PARAMS)
    spec = spec_of(structs.replace(SUBMIT, **{field: OTHERS[field]}), PARAMS)
    assert spec == structs.replace(plain, **{field: OTHERS[field]})
    is_of_content = field in ("priority", "cache_salt", "answer", "adapter")
    assert (content_of(spec) != content_of(plain)) == is_of_content


def test_params_but_their_seed_are_content() -> None:
    plain = spec_of(SUBMIT, PARAMS)
    seeded = structs.replace(plain, params=structs.replace(PARAMS, seed=4))
    hotter = structs.replace(plain, params=structs.replace(PARAMS, temperature=0.6))
    assert content_of(plain) == content_of(seeded) != content_of(hotter)


def test_a_client_is_the_tenant_of_what_names_none() -> None:
    assert spec_of(SUBMIT, PARAMS, b"client").tenant == b"client"
    named = structs.replace(SUBMIT, tenant=b"t")
    assert spec_of(named, PARAMS, b"client").tenant == b"t"


def test_a_root_is_the_same_everywhere() -> None:
    """Another machine, process or version must compute the same: the bytes are written out."""
    salted = structs.replace(SUBMIT, cache_salt="salt")
    framed = b"\5\0\0\0\0\0\0\0model\1\0\0\0\0\0\0\0t\4\0\0\0\0\0\0\0salt"
    root = root_digest("model", salted, b"t")
    assert root == hashlib.blake2b(framed, digest_size=16).digest()
    assert root == root_digest("model", spec_of(salted, PARAMS), b"t")


def test_parts_of_a_root_do_not_run_into_one_another() -> None:
    roots = {
        root_digest(model, structs.replace(SUBMIT, cache_salt=salt), tenant)
        for model in ("", "a", "ab", "\udc80")
        for salt in ("", "a", "ab", "b", "\udc80")
        for tenant in (b"", b"a", b"b")
    }
    assert len(roots) == 4 * 5 * 3


def test_a_priority_among_a_tenants_own() -> None:
    urgent = structs.replace(SUBMIT, priority=-5)
    assert among_own(urgent) == structs.replace(SUBMIT, own_priority=-5)
    assert among_own(among_own(urgent)) == among_own(urgent)
    both = structs.replace(urgent, own_priority=2)
    assert among_own(both) == structs.replace(SUBMIT, own_priority=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("label", "x" * 1025),
        ("label", 3),
        ("priority", 2**31),
        ("priority", True),
        ("own_priority", -(2**31)),
        ("cache_salt", "x" * 1025),
        ("cache_salt", 3),
        ("keep", KeepOptions(bytes(2**20 + 1))),
        ("adapter", "x" * 129),
        ("adapter", 3),
    ],
)
def test_what_is_not_allowed_is_named(field: str, value: object) -> None:
    with pytest.raises(BadRequest) as caught:
        check_spec(structs.replace(SUBMIT, **{field: value}))
    assert caught.value.field == field.removeprefix("own_")
    if field == "cache_salt":
        assert "xxx" not in str(caught.value)
