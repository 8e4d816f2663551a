"""Keywords that no call has: the error is Python's own type, and names the nearest one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import slipstream
from slipstream.client.call_options import options_for_many, options_for_one, suggesting_keywords
from slipstream.errors import UnknownOptionError

NOWHERE = "ipc:///nowhere/client.sock"
CALLS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "SamplingParams": (slipstream.SamplingParams, "max_token", "max_tokens"),
    "LLM": (slipstream.LLM, "max_model_length", "max_model_len"),
    "Stack": (slipstream.Stack, "kv_cache_gb", "kv_cache_gib"),
    "Client": (lambda **given: slipstream.Client(NOWHERE, **given), "timeout", "timeout_s"),
    "AsyncClient": (slipstream.AsyncClient, "adress", "address"),
    "one prompt": (lambda **given: options_for_one(None, given), "streamid", "stream_id"),  # type: ignore[arg-type]
    "many prompts": (
        lambda **given: options_for_many(["a"], None, given),  # type: ignore[arg-type]
        "temprature",
        "temperature",
    ),
    "its params": (
        lambda **given: options_for_one(None, given),  # type: ignore[arg-type]
        "sampling_parms",
        "sampling_params",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_nearest_keyword_is_named(call: str) -> None:
    function, given, nearest = CALLS[call]
    with pytest.raises(TypeError, match=rf"{given}; did you mean {nearest}\?$") as caught:
        function(**{given: 3})
    assert isinstance(caught.value, UnknownOptionError)
    assert caught.value.field == given
    assert isinstance(caught.value, ValueError)


def test_where_none_is_near_those_that_there_are_are_named() -> None:
    with pytest.raises(TypeError, match=r"no option xyz; there are .*max_model_len, ") as caught:
        slipstream.Stack(xyz=1)  # type: ignore[call-arg]
    assert "did you mean" not in str(caught.value)
    with pytest.raises(TypeError, match=r"no option xyz; there are .*top_p$") as caught:
        slipstream.SamplingParams(xyz=1)  # type: ignore[call-arg]
    assert isinstance(caught.value, slipstream.BadRequestError)


def test_what_a_call_has_passes_unchanged() -> None:
    @suggesting_keywords
    def call(first: int, *, second: int = 2) -> tuple[int, int]:
        """Says something."""
        return first, second

    assert (call(1), call(first=3, second=4), call.__doc__) == ((1, 2), (3, 4), "Says something.")
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'first'"):
        call()  # type: ignore[call-arg]


@pytest.mark.parametrize("method", ["generate", "chat"])
def test_of_generate_and_chat_too(method: str) -> None:
    llm = object.__new__(slipstream.LLM)  # the check needs no server
    asked: Any = "a" if method == "generate" else [{"role": "user", "content": "a"}]
    with pytest.raises(TypeError, match=r"there is no option max_token; did you mean max_tokens\?"):
        getattr(llm, method)(asked, max_token=3)
