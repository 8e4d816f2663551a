"""The public face of Slipstream.

    from slipstream import Client

    with Client() as client:
        for delta in client.stream("Once upon a time", max_tokens=100):
            print(delta.text, end="", flush=True)

`Stack` and `LLM`, which start servers, are loaded when first asked for: a client needs none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.async_client import AsyncClient, AsyncStream
from slipstream.client import Client, Stream
from slipstream.errors import (
    BadRequestError,
    ClosedError,
    ConflictError,
    ConnectionLostError,
    EngineError,
    OverloadedError,
    RequestError,
    SlipstreamError,
    StreamLostError,
    SupersededError,
    UnknownStreamError,
)
from slipstream.many import AsyncStreams, Streams
from slipstream.outputs import Completion, Delta, Logprob
from slipstream.requests import TextPrompt, TokensPrompt
from slipstream_ipc.messages import ChatMessage, ModelCard, SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from slipstream.llm import LLM, CompletionOutput, RequestOutput
    from slipstream.stack import Stack, StackError

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncStream",
    "AsyncStreams",
    "BadRequestError",
    "ChatMessage",
    "Client",
    "ClosedError",
    "Completion",
    "CompletionOutput",
    "ConflictError",
    "ConnectionLostError",
    "Delta",
    "EngineError",
    "Logprob",
    "ModelCard",
    "OverloadedError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SlipstreamError",
    "Stack",
    "StackError",
    "Stream",
    "StreamLostError",
    "Streams",
    "StructuredOutputs",
    "SupersededError",
    "TextPrompt",
    "TokensPrompt",
    "UnknownStreamError",
]

_LATER = {
    "LLM": "slipstream.llm",
    "CompletionOutput": "slipstream.llm",
    "RequestOutput": "slipstream.llm",
    "Stack": "slipstream.stack",
    "StackError": "slipstream.stack",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
