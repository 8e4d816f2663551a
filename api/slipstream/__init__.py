"""The Python interface of Slipstream, a multi-process server for language models.

    from slipstream import Client

    with Client() as client:
        for delta in client.stream("Once upon a time", max_tokens=100):
            print(delta.text, end="", flush=True)

A name's module is imported when the name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.answers.events import (
        ContentDelta,
        ReasoningDelta,
        ToolCallArguments,
        ToolCallEnd,
        ToolCallStart,
    )
    from slipstream.answers.tool_calls import ToolCall, ToolCallDelta
    from slipstream.client.async_client import AsyncClient, AsyncStream
    from slipstream.client.call_options import CallOptions, RequestOptions
    from slipstream.client.client import Client, Stream
    from slipstream.client.stream_many import AsyncStreams, Streams
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
    from slipstream.llm import LLM
    from slipstream.outputs import (
        Classes,
        ClassificationOutput,
        ClassificationRequestOutput,
        Completion,
        CompletionOutput,
        Delta,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Embeddings,
        Logprob,
        RequestMetrics,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from slipstream.request.embedding_inputs import ClassifyOptions, EmbeddingOptions
    from slipstream.request.prompts import TextPrompt, TokensPrompt
    from slipstream.request.scoring_inputs import RankedDocument, Scores, ScoringOptions
    from slipstream.request.served_models import LoRARequest
    from slipstream.sampling_params import (
        RepetitionDetection,
        SamplingParams,
        StructuredOutputs,
    )
    from slipstream.stack.stack import Stack
    from slipstream.stack.supervisor_process import StackError
    from slipstream_ipc.messages import ChatMessage, ModelCard

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncStream",
    "AsyncStreams",
    "BadRequestError",
    "CallOptions",
    "ChatMessage",
    "Classes",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "ClassifyOptions",
    "Client",
    "ClosedError",
    "Completion",
    "CompletionOutput",
    "ConflictError",
    "ConnectionLostError",
    "ContentDelta",
    "Delta",
    "EmbeddingOptions",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Embeddings",
    "EngineError",
    "LoRARequest",
    "Logprob",
    "ModelCard",
    "OverloadedError",
    "RankedDocument",
    "ReasoningDelta",
    "RepetitionDetection",
    "RequestError",
    "RequestMetrics",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "Scores",
    "ScoringOptions",
    "ScoringOutput",
    "ScoringRequestOutput",
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
    "ToolCall",
    "ToolCallArguments",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "UnknownStreamError",
]

_MODULES = {
    "AsyncClient": "slipstream.client.async_client",
    "AsyncStream": "slipstream.client.async_client",
    "AsyncStreams": "slipstream.client.stream_many",
    "BadRequestError": "slipstream.errors",
    "CallOptions": "slipstream.client.call_options",
    "ChatMessage": "slipstream_ipc.messages",
    "Classes": "slipstream.outputs",
    "ClassificationOutput": "slipstream.outputs",
    "ClassificationRequestOutput": "slipstream.outputs",
    "ClassifyOptions": "slipstream.request.embedding_inputs",
    "Client": "slipstream.client.client",
    "ClosedError": "slipstream.errors",
    "Completion": "slipstream.outputs",
    "CompletionOutput": "slipstream.outputs",
    "ConflictError": "slipstream.errors",
    "ConnectionLostError": "slipstream.errors",
    "ContentDelta": "slipstream.answers.events",
    "Delta": "slipstream.outputs",
    "EmbeddingOptions": "slipstream.request.embedding_inputs",
    "EmbeddingOutput": "slipstream.outputs",
    "EmbeddingRequestOutput": "slipstream.outputs",
    "Embeddings": "slipstream.outputs",
    "EngineError": "slipstream.errors",
    "LLM": "slipstream.llm",
    "LoRARequest": "slipstream.request.served_models",
    "Logprob": "slipstream.outputs",
    "ModelCard": "slipstream_ipc.messages",
    "OverloadedError": "slipstream.errors",
    "RankedDocument": "slipstream.request.scoring_inputs",
    "ReasoningDelta": "slipstream.answers.events",
    "RepetitionDetection": "slipstream.sampling_params",
    "RequestError": "slipstream.errors",
    "RequestMetrics": "slipstream.outputs",
    "RequestOptions": "slipstream.client.call_options",
    "RequestOutput": "slipstream.outputs",
    "SamplingParams": "slipstream.sampling_params",
    "Scores": "slipstream.request.scoring_inputs",
    "ScoringOptions": "slipstream.request.scoring_inputs",
    "ScoringOutput": "slipstream.outputs",
    "ScoringRequestOutput": "slipstream.outputs",
    "SlipstreamError": "slipstream.errors",
    "Stack": "slipstream.stack.stack",
    "StackError": "slipstream.stack.supervisor_process",
    "Stream": "slipstream.client.client",
    "StreamLostError": "slipstream.errors",
    "Streams": "slipstream.client.stream_many",
    "StructuredOutputs": "slipstream.sampling_params",
    "SupersededError": "slipstream.errors",
    "TextPrompt": "slipstream.request.prompts",
    "TokensPrompt": "slipstream.request.prompts",
    "ToolCall": "slipstream.answers.tool_calls",
    "ToolCallArguments": "slipstream.answers.events",
    "ToolCallDelta": "slipstream.answers.tool_calls",
    "ToolCallEnd": "slipstream.answers.events",
    "ToolCallStart": "slipstream.answers.events",
    "UnknownStreamError": "slipstream.errors",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("slipstream."):
            raise
        raise ImportError(
            f"slipstream.{name} is not in slipstream-client, which is installed here: "
            "pip install slipstream",
            name=error.name,
        ) from None
    found = globals()[name] = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
